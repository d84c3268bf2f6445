"""Messages into Arrow columns, with as little Python per row as the client allows.

One list comprehension a column; what is constant over a run of messages (topic, partition) is repeated by
Arrow. The C kernel that will fill the buffers itself comes behind the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.schema import HEADERS_ARROW, read_arrow_schema

#: Milliseconds beyond which a timestamp does not fit Spark's microseconds in 64 bits.
MAX_TIMESTAMP_MS = (2**63 - 1) // 1000

#: librdkafka's timestamp types are 0 none, 1 create, 2 append; Spark's -1, 0, 1.
_TYPE_SHIFT = 1


class Run(NamedTuple):
    """Successive messages of one partition, and their offsets."""

    tp: TopicPartition
    messages: Sequence[Any]
    offsets: np.ndarray[Any, np.dtype[np.int64]]


def record_batch(
    runs: Sequence[Run], include_headers: bool, columns: tuple[str, ...] | None = None
) -> pa.RecordBatch:
    """The rows of ``runs`` in their order, as Spark's Kafka schema has them.

    Args:
        runs: of messages.
        include_headers: whether the column ``headers`` is among them.
        columns: to make, in this order; None = all.

    Raises:
        InvalidRecordError: a timestamp too large for Spark, a header name that is not UTF-8.
    """
    schema = read_arrow_schema(include_headers, columns)
    messages: Sequence[Any] = (
        runs[0].messages if len(runs) == 1 else list(chain.from_iterable(run.messages for run in runs))
    )
    counts = np.fromiter((len(run.messages) for run in runs), np.int64, len(runs))
    partitions = np.fromiter((run.tp.partition for run in runs), np.int32, len(runs))
    times = cache(lambda: _timestamps(runs, messages))
    makers: dict[str, Callable[[], pa.Array]] = {
        "key": lambda: pa.array([message.key() for message in messages], pa.binary()),
        "value": lambda: pa.array([message.value() for message in messages], pa.binary()),
        "topic": lambda: _topics(runs, counts),
        "partition": lambda: pa.array(np.repeat(partitions, counts)),
        "offset": lambda: pa.array(np.concatenate([run.offsets for run in runs])),
        "timestamp": lambda: times()[0],
        "timestampType": lambda: times()[1],
        "headers": lambda: _headers(runs, messages),
    }
    return pa.RecordBatch.from_arrays([makers[name]() for name in schema.names], schema=schema)


def _topics(runs: Sequence[Run], counts: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    if len({run.tp.topic for run in runs}) == 1:
        return pa.repeat(pa.scalar(runs[0].tp.topic, pa.string()), int(counts.sum()))
    names = pa.array([run.tp.topic for run in runs], pa.string())
    return names.take(pa.array(np.repeat(np.arange(len(runs)), counts)))


def _timestamps(runs: Sequence[Run], messages: Sequence[Any]) -> tuple[pa.Array, pa.Array]:
    pairs = np.fromiter(
        chain.from_iterable([message.timestamp() for message in messages]), np.int64, 2 * len(messages)
    )
    types, ms = pairs[0::2] - _TYPE_SHIFT, pairs[1::2]
    none = types < 0
    if none.any():
        ms = np.where(none, -1, ms)  # ConsumerRecord.NO_TIMESTAMP, as Spark shows it
    beyond = np.flatnonzero((ms > MAX_TIMESTAMP_MS) | (ms < -MAX_TIMESTAMP_MS))
    if len(beyond):
        tp, offset = _where(runs, int(beyond[0]))
        raise InvalidRecordError(
            f"record {tp} offset {offset} has timestamp {int(ms[beyond[0]])} ms, "
            f"beyond Spark's range of ±{MAX_TIMESTAMP_MS} ms.",
            fix="its producer probably wrote micro- or nanoseconds; skip it with startingOffsets, "
            "or mend the producer.",
        )
    return pa.array(ms * 1000).cast(pa.timestamp("us", tz="UTC")), pa.array(types.astype(np.int32))


def _headers(runs: Sequence[Run], messages: Sequence[Any]) -> pa.Array:
    """``array<struct<key,value>>``: order and repeats kept; no headers, or none in the list, is NULL."""
    lists: list[list[tuple[str, bytes | None]] | None] = []
    for index, message in enumerate(messages):
        try:
            lists.append(message.headers())
        except UnicodeDecodeError as failure:
            tp, offset = _where(runs, index)
            raise InvalidRecordError(
                f"record {tp} offset {offset} has a header name that is not UTF-8: {failure}.",
                fix="set includeHeaders=false, or skip the record with startingOffsets.",
            ) from failure
    sizes = np.fromiter((len(one) if one else 0 for one in lists), np.int32, len(lists))
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    flat = [header for one in lists if one for header in one]
    entries = pa.StructArray.from_arrays(
        [
            pa.array([name for name, _ in flat], pa.string()),
            pa.array([_as_bytes(value) for _, value in flat], pa.binary()),
        ],
        fields=list(HEADERS_ARROW.value_type),
    )
    return pa.ListArray.from_arrays(pa.array(starts), entries, type=HEADERS_ARROW, mask=pa.array(sizes == 0))


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _where(runs: Sequence[Run], index: int) -> tuple[TopicPartition, int]:
    """Partition and offset of the message at ``index`` over all runs."""
    for run in runs:
        if index < len(run.messages):
            return run.tp, int(run.offsets[index])
        index -= len(run.messages)
    raise IndexError(index)
