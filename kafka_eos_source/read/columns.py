"""Builds Arrow batches from Kafka messages.

Only the requested columns are built. Values that are constant over a run of messages (topic, partition) are
repeated here. The contents of the messages come from `kernel_columns` (C kernel) or `message_columns`
(Python).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.kernel_messages import KernelMessages
from kafka_eos_source.read.contents import ColumnTooLargeError, Contents, Headers
from kafka_eos_source.read.kernel_columns import KernelContents
from kafka_eos_source.read.message_columns import MessageContents
from kafka_eos_source.read.runs import Run, halves, row_count, where
from kafka_eos_source.spark.schema import HEADERS_ARROW, read_arrow_schema

#: The largest timestamp, in ms, that fits Spark's 64-bit microseconds.
MAX_TIMESTAMP_MS = (2**63 - 1) // 1000

#: The most bytes in one column of a batch, because offsets in Arrow and Spark have 32 bits.
MAX_COLUMN_BYTES = 2**31 - 1


def record_batches(
    runs: Sequence[Run],
    include_headers: bool,
    columns: tuple[str, ...] | None = None,
    limit_bytes: int = MAX_COLUMN_BYTES,
) -> list[pa.RecordBatch]:
    """Returns the rows of ``runs`` in order, in one batch, or in several if a column would be too large.

    Args:
        runs: runs with at least one row in total.
        include_headers: whether the schema has the column ``headers``.
        columns: names of the requested columns, in order; None = all.
        limit_bytes: maximum size of one column of a batch.

    Raises:
        InvalidRecordError: if a timestamp is too large for Spark, a header name is not UTF-8, or a single
            record is larger than ``limit_bytes``.
    """
    try:
        return [record_batch(runs, include_headers, columns, limit_bytes)]
    except ColumnTooLargeError as failure:
        if row_count(runs) == 1:
            tp, offset = where(runs, 0)
            raise InvalidRecordError(
                f"the record at offset {offset} of {tp} is larger than {limit_bytes:,} bytes, the maximum "
                "size of one column of a batch.",
                fix="leave the large column out of the option 'columns' until the query has read the record, "
                "with nulls in its place. startingOffsets has no effect on a query with a checkpoint.",
            ) from failure
    return [
        batch
        for half in halves(runs)
        for batch in record_batches(half, include_headers, columns, limit_bytes)
    ]


def record_batch(
    runs: Sequence[Run],
    include_headers: bool,
    columns: tuple[str, ...] | None = None,
    limit_bytes: int = MAX_COLUMN_BYTES,
) -> pa.RecordBatch:
    """Returns the rows of ``runs`` in one batch; arguments as in `record_batches`.

    Raises:
        ColumnTooLargeError: if a column is larger than ``limit_bytes``.
    """
    kind = KernelContents if isinstance(runs[0].messages, KernelMessages) else MessageContents
    contents: Contents = kind(runs, limit_bytes)
    schema = read_arrow_schema(include_headers, columns)
    makers: dict[str, Callable[[], pa.Array]] = {
        "key": contents.keys,
        "value": contents.values,
        "topic": lambda: _topics(runs),
        "partition": lambda: _partitions(runs),
        "offset": lambda: _offsets(runs),
        "headers": lambda: _headers(contents.headers()),
    }
    if "timestamp" in schema.names or "timestampType" in schema.names:
        ms, types = contents.timestamps()
        makers["timestamp"] = lambda: _timestamps(runs, ms)
        makers["timestampType"] = lambda: _numbers(types, pa.int32())
    return pa.RecordBatch.from_arrays([makers[name]() for name in schema.names], schema=schema)


def _topics(runs: Sequence[Run]) -> pa.Array:
    if len({run.tp.topic for run in runs}) == 1:
        return _repeated(runs[0].tp.topic.encode(), row_count(runs))
    names = pa.array([run.tp.topic for run in runs], pa.string())
    return names.take(pa.array(np.repeat(np.arange(len(runs)), _counts(runs))))


def _repeated(text: bytes, rows: int) -> pa.Array:
    """Repeats a text without `pa.repeat`, whose scalar makes PyArrow import pandas; see `_numbers`."""
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(text))
    return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(text * rows))


def _numbers(values: npt.NDArray[np.int32] | npt.NDArray[np.int64], of: pa.DataType) -> pa.Array:
    """Converts numbers without `pa.array`, which imports pandas: 0.2 s in a new Python worker."""
    return pa.Array.from_buffers(of, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _partitions(runs: Sequence[Run]) -> pa.Array:
    partitions = np.fromiter((run.tp.partition for run in runs), np.int32, len(runs))
    return _numbers(np.repeat(partitions, _counts(runs)), pa.int32())


def _offsets(runs: Sequence[Run]) -> pa.Array:
    offsets = runs[0].offsets if len(runs) == 1 else np.concatenate([run.offsets for run in runs])
    return _numbers(offsets, pa.int64())


def _counts(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    return np.fromiter((len(run.offsets) for run in runs), np.int64, len(runs))


def _timestamps(runs: Sequence[Run], ms: npt.NDArray[np.int64]) -> pa.Array:
    beyond = np.flatnonzero((ms > MAX_TIMESTAMP_MS) | (ms < -MAX_TIMESTAMP_MS))
    if len(beyond):
        tp, offset = where(runs, int(beyond[0]))
        raise InvalidRecordError(
            f"the record at offset {offset} of {tp} has the timestamp {int(ms[beyond[0]])} ms, which is "
            f"outside of Spark's range of ±{MAX_TIMESTAMP_MS} ms. Its producer probably set micro- or "
            "nanoseconds.",
            fix="correct the producer, and leave 'timestamp' and 'timestampType' out of the option 'columns' "
            "until the query has read the record, with nulls in their place. startingOffsets has no effect "
            "on a query with a checkpoint.",
        )
    return _numbers(ms * 1000, pa.timestamp("us", tz="UTC"))


def _headers(found: Headers) -> pa.Array:
    """Returns headers in their order, with repeated names; NULL for a message without headers."""
    starts = np.zeros(len(found.counts) + 1, np.int32)
    np.cumsum(found.counts, out=starts[1:])
    entries = pa.StructArray.from_arrays([found.names, found.values], fields=list(HEADERS_ARROW.value_type))
    return pa.ListArray.from_arrays(
        pa.array(starts), entries, type=HEADERS_ARROW, mask=pa.array(found.counts == 0)
    )
