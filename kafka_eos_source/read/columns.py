"""Builds Arrow batches with Spark's columns from decoded Kafka messages.

Only the requested columns are built. Values that are constant over a run of messages (topic, partition) are
repeated here; the contents of the messages refer to the memory into which the C kernel decoded them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.kernel import Block, KernelMessages
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.spark.arrow import HEADERS_ARROW, escaped_names, read_arrow_schema

#: The largest timestamp, in ms, that fits Spark's 64-bit microseconds.
MAX_TIMESTAMP_MS = (2**63 - 1) // 1000

_log = logging.getLogger(__name__)
_TIMESTAMP = pa.timestamp("us", tz="UTC")
#: The most bytes of a name that an error shows.
_SHOWN = 100

#: The most bytes in one column of a batch, because offsets in Arrow and Spark have 32 bits.
MAX_COLUMN_BYTES = 2**31 - 1


Number = TypeVar("Number", np.int32, np.int64)


class ColumnTooLargeError(Exception):
    """A column of the batch is larger than the limit."""


class Run(NamedTuple):
    """Consecutive messages of one partition, and their offsets."""

    tp: TopicPartition
    messages: KernelMessages
    offsets: npt.NDArray[np.int64]


def _row_count(runs: Sequence[Run]) -> int:
    """Returns the number of records in the runs."""
    return sum(len(run.offsets) for run in runs)


def _where(runs: Sequence[Run], index: int) -> tuple[TopicPartition, int]:
    """Returns partition and offset of the message at ``index``, counted over all runs."""
    for run in runs:
        if index < len(run.offsets):
            return run.tp, int(run.offsets[index])
        index -= len(run.offsets)
    raise IndexError(index)


def _halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Divides the rows into two non-empty parts. There must be at least two rows."""
    wanted = _row_count(runs) // 2
    first: list[Run] = []
    second: list[Run] = []
    for tp, messages, offsets in runs:
        here = min(wanted, len(offsets))
        if here:
            first.append(Run(tp, messages[:here], offsets[:here]))
        if here < len(offsets):
            second.append(Run(tp, messages[here:], offsets[here:]))
        wanted -= here
    return first, second


def record_batches(
    runs: Sequence[Run],
    include_headers: bool,
    columns: tuple[str, ...] | None = None,
    limit_bytes: int = MAX_COLUMN_BYTES,
    header_names: str = "replace",
) -> list[pa.RecordBatch]:
    """Returns the rows of ``runs`` in order, in one batch, or in several if a column would be too large.

    Args:
        runs: runs with at least one row in total.
        include_headers: whether the schema has the column ``headers``.
        columns: names of the requested columns, in order; None = all.
        limit_bytes: maximum size of one column of a batch.
        header_names: as in `Contents`.

    Raises:
        InvalidRecordError: if a single record is larger than ``limit_bytes``; or as `Contents.headers`.
    """
    try:
        return [record_batch(runs, include_headers, columns, limit_bytes, header_names)]
    except ColumnTooLargeError as failure:
        if _row_count(runs) == 1:
            tp, offset = _where(runs, 0)
            raise InvalidRecordError(
                f"the record at offset {offset} of {tp} is larger than {limit_bytes:,} bytes, the maximum "
                "size of one column of a batch.",
                fix="leave the large column out of the option 'columns' until the query has read the record, "
                "with nulls in its place. startingOffsets has no effect on a query with a checkpoint.",
            ) from failure
    return [
        batch
        for half in _halves(runs)
        for batch in record_batches(half, include_headers, columns, limit_bytes, header_names)
    ]


def record_batch(
    runs: Sequence[Run],
    include_headers: bool,
    columns: tuple[str, ...] | None = None,
    limit_bytes: int = MAX_COLUMN_BYTES,
    header_names: str = "replace",
) -> pa.RecordBatch:
    """Returns the rows of ``runs`` in one batch; arguments as in `record_batches`.

    Raises:
        ColumnTooLargeError: if a column is larger than ``limit_bytes``.
        InvalidRecordError: as `Contents.headers`.
    """
    contents = Contents(runs, limit_bytes, header_names)
    schema = read_arrow_schema(include_headers, columns)
    makers: dict[str, Callable[[], pa.Array]] = {
        "key": contents.keys,
        "value": contents.values,
        "topic": lambda: _topics(runs),
        "partition": lambda: _partitions(runs),
        "offset": lambda: _offsets(runs),
        "headers": contents.headers,
    }
    if "timestamp" in schema.names or "timestampType" in schema.names:
        ms, types = contents.timestamps()
        makers["timestamp"] = lambda: _timestamps(runs, ms)
        makers["timestampType"] = lambda: _numbers(types, pa.int32())
    return pa.RecordBatch.from_arrays([makers[name]() for name in schema.names], schema=schema)


class Contents:
    r"""Contents of messages as Arrow columns; each method builds its column.

    Args:
        runs: the messages.
        limit_bytes: maximum size of one column.
        header_names: option ``headerNames``: how names of headers that are not UTF-8 are shown. ``replace``
            shows U+FFFD as Kafka's Java client does; ``escape`` shows each byte as ``\xHH``, and a backslash
            too, so that a sink can write the same bytes (`spark.arrow.escaped_names`); ``fail`` raises.
            Unless it is ``replace``, the messages must have been read with `kernel.RAW_NAMES`.

    Raises:
        ColumnTooLargeError: from all methods but `timestamps`, if the column is larger than the limit.
    """

    def __init__(
        self, runs: Sequence[Run], limit_bytes: int = MAX_COLUMN_BYTES, header_names: str = "replace"
    ) -> None:
        self._runs = runs
        self._limit_bytes = limit_bytes
        self._header_names = header_names
        #: Messages of the runs; runs that are adjacent in a block are joined.
        self._pieces: list[KernelMessages] = []
        for run in runs:
            messages = run.messages
            last = self._pieces[-1] if self._pieces else None
            if last is not None and last.block is messages.block and last.past == messages.first:
                self._pieces[-1] = KernelMessages(last.block, last.first, messages.past)
            else:
                self._pieces.append(messages)

    def keys(self) -> pa.Array:
        """Returns the keys as binary column, which distinguishes null from empty."""
        return self._joined([each.keys for each in self._pieces])

    def values(self) -> pa.Array:
        """Returns the values, like `keys`."""
        return self._joined([each.values for each in self._pieces])

    def timestamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Returns timestamps in ms, and their types as Spark numbers them."""
        return (
            self._numbers(lambda block: block.timestamps_ms),
            self._numbers(lambda block: block.timestamp_types),
        )

    def headers(self) -> pa.Array:
        """Returns headers in their order, with repeated names; NULL for a message without headers.

        Raises:
            InvalidRecordError: if a name is not UTF-8, with ``header_names="fail"``.
        """
        spans = [
            (each.block, int(each.block.header_starts[each.first]), int(each.block.header_starts[each.past]))
            for each in self._pieces
        ]
        if all(first == past for _, first, past in spans):  # most topics have no headers
            return pa.nulls(_row_count(self._runs), HEADERS_ARROW)
        counts = self._numbers(lambda block: block.header_counts)
        names = self._joined([block.header_names.slice(first, past - first) for block, first, past in spans])
        values = self._joined(
            [block.header_values.slice(first, past - first) for block, first, past in spans]
        )
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        if self._header_names == "escape":
            names = escaped_names(names)
        elif self._header_names == "fail":
            self._check_names(names, starts)
        entries = pa.StructArray.from_arrays([names, values], fields=list(HEADERS_ARROW.value_type))
        return pa.ListArray.from_arrays(
            pa.array(starts), entries, type=HEADERS_ARROW, mask=pa.array(counts == 0)
        )

    def _check_names(self, names: pa.Array, starts: npt.NDArray[np.int32]) -> None:
        """Raises: InvalidRecordError: if a name is not UTF-8."""
        try:
            names.validate(full=True)
        except pa.ArrowInvalid:
            wrong, name = next(
                each for each in enumerate(names.cast(pa.binary()).to_pylist()) if not _decodes(each[1])
            )
        else:
            return
        tp, offset = _where(self._runs, int(np.searchsorted(starts, wrong, "right")) - 1)
        raise InvalidRecordError(
            f"the record at offset {offset} of {tp} has a header whose name is not UTF-8: {name[:_SHOWN]!r}.",
            fix="set the option headerNames of the source to 'replace', which shows U+FFFD, or to 'escape', "
            "which shows each such byte as \\xHH, and start the query again, which repeats the batch. Its "
            "checkpoint stays valid.",
        )

    def _numbers(self, of: Callable[[Block], npt.NDArray[Number]]) -> npt.NDArray[Number]:
        parts = [of(each.block)[each.first : each.past] for each in self._pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _joined(self, parts: list[pa.Array]) -> pa.Array:
        if sum(map(_data_bytes, parts)) > self._limit_bytes:
            raise ColumnTooLargeError
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _decodes(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _data_bytes(array: pa.Array) -> int:
    offsets = array.buffers()[1]
    if offsets is None or not len(array):
        return 0
    first = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return int(first[-1]) - int(first[0])


def _topics(runs: Sequence[Run]) -> pa.Array:
    if len({run.tp.topic for run in runs}) == 1:
        return _repeated(runs[0].tp.topic.encode(), _row_count(runs))
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
    """Returns the timestamps; null for one that Spark cannot hold, because no query could skip its record."""
    found = _numbers(ms * 1000, _TIMESTAMP)
    beyond = (ms > MAX_TIMESTAMP_MS) | (ms < -MAX_TIMESTAMP_MS)
    if not beyond.any():
        return found
    rows = np.flatnonzero(beyond)
    tp, offset = _where(runs, int(rows[0]))
    if tp not in _warned:
        _warned.add(tp)
        _log.warning(
            "The record at offset %d of %s has the timestamp %d ms, which is outside of Spark's range of "
            "±%d ms; its producer probably set micro- or nanoseconds. The column 'timestamp' is null for it "
            "and for other such records of the partition (%d here), of which nothing more is logged.",
            offset,
            tp,
            int(ms[rows[0]]),
            MAX_TIMESTAMP_MS,
            len(rows),
        )
    valid = pa.py_buffer(np.packbits(~beyond, bitorder="little"))
    return pa.Array.from_buffers(_TIMESTAMP, len(ms), [valid, found.buffers()[1]])


#: Partitions with a timestamp that Spark cannot hold, about which this process has warned.
_warned: set[TopicPartition] = set()
