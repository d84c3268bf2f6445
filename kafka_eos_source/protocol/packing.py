"""Arrow record batches as bytes: packed batches, and packets of state changes and of bad records.

A **packed batch** is one value of a binary column, or one value in Kafka or a database, which Spark and Kafka
pass on without looking into it. There are two forms, both in Arrow's IPC format:

========  =================================  ===========================================================
form      content                            where
========  =================================  ===========================================================
message   a record batch, without a schema   in a binary column between two tasks of one micro-batch:
                                             `in_read.step`, `state.shard_rows`
stream    the schema, then a record batch    in what is stored: packets, pending changes, and the records
                                             of an initial state
========  =================================  ===========================================================

Both ends of a message know its schema, so it is smaller and cheaper to read. A stream may be read by a later
version, which finds the schema in it. Stored streams must stay readable, so their bytes must not change.

A **packet** goes to the sink in a reserved column of the rows, which cannot be mistaken for data, and to
which the ``topic`` option does not apply. It carries state changes of one shard of an operator (`Packet`), or
records that a reading task could not decode (`BadRecords`)::

    length of header (4 bytes, big endian) │ header (JSON) │ packed batch

The packed batch is a stream. The last packet of a shard or a reading task has none; it carries the report, by
which the commit detects lost packets.
"""

from __future__ import annotations

import json
import struct
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError, StateError, UnavailableError
from kafka_eos_source.model import ReadTask, ShardReport, TopicPartition, TopicRecords
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Arrow needs buffers that begin at a multiple of this address; packed batches are padded to it.
_ALIGNMENT = 8
#: Most bytes in a binary column, because its offsets are signed 32-bit numbers.
_COLUMN_BYTES = 2**31 - 1

#: What Arrow raises for bytes that it cannot read.
_UNREADABLE = (pa.ArrowException, OSError, EOFError)


def slices(rows: pa.RecordBatch, size_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cuts a batch into slices of about ``size_bytes``, with one row at least; copies nothing."""
    count = max(1, size_bytes * rows.num_rows // max(1, rows.nbytes))
    return (rows.slice(start, count) for start in range(0, rows.num_rows, count))


def pack(rows: pa.RecordBatch) -> pa.Buffer:
    """Packs a batch as a message."""
    return rows.serialize()


def unpack(packed: pa.Buffer, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Reads a message without copying its buffers.

    Args:
        packed: what `pack` returned.
        schema: exact schema of the batch that was packed.
        where: the column that contains the message, for errors.

    Raises:
        InvalidRecordError: if it is not a message, or its buffers are too short for its rows.
    """
    try:
        return _checked(pa.ipc.read_record_batch(packed, schema))
    except _UNREADABLE as error:
        raise _damaged(where, packed.size, error) from error


def pack_stream(rows: pa.RecordBatch, head: bytes = b"") -> pa.Buffer:
    """Packs a batch as a stream that follows ``head``."""
    sink = pa.BufferOutputStream()
    sink.write(head)
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def unpack_stream(packed: pa.Buffer | bytes | memoryview, where: str) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream without copying their buffers.

    Args:
        packed: what `pack_stream` returned, without its head.
        where: the place that contains the stream, for errors.

    Raises:
        InvalidRecordError: if it is not a stream, or the buffers of a batch are too short for its rows.
    """
    batch = None
    try:
        for batch in pa.ipc.open_stream(packed):
            yield _checked(batch)
        if batch is None:  # Arrow reads a stream that was cut off between two messages without an error
            raise EOFError("the stream ends before its first batch")
    except _UNREADABLE as error:
        raise _damaged(where, memoryview(packed).nbytes, error) from error


def column(packed: Sequence[pa.Buffer]) -> pa.BinaryArray:
    """Returns a binary column of packed batches; copies nothing if there is only one.

    Raises:
        InvalidRecordError: if they have 2 GiB or more in total.
    """
    offsets = np.zeros(len(packed) + 1, np.int64)
    np.cumsum([each.size for each in packed], out=offsets[1:])
    if offsets[-1] > _COLUMN_BYTES:
        raise InvalidRecordError(
            f"{len(packed)} packed batch(es) have {offsets[-1]:,} bytes; a binary column holds at most "
            f"{_COLUMN_BYTES:,}.",
            fix="return smaller record batches, or rows with smaller values.",
        )
    data = packed[0] if len(packed) == 1 else pa.py_buffer(b"".join(packed))
    return pa.Array.from_buffers(
        pa.binary(), len(packed), [None, pa.py_buffer(offsets.astype(np.int32)), data]
    )


def values(packed: pa.BinaryArray | pa.LargeBinaryArray) -> Iterator[pa.Buffer]:
    """Yields the values of a binary column, which are not copied unless they are unaligned; skips nulls.

    With ``spark.sql.execution.arrow.useLargeVarTypes``, Spark passes the column with 64-bit offsets.
    """
    _, offsets, data = packed.buffers()
    if data is None or packed.null_count == len(packed):
        return
    # a scalar of Arrow's is a copy of its value
    width = np.dtype(np.int64 if pa.types.is_large_binary(packed.type) else np.int32)
    bounds = np.frombuffer(offsets, width, len(packed) + 1, packed.offset * width.itemsize).tolist()
    for index, is_valid in enumerate(packed.is_valid().to_pylist()):
        if is_valid:
            value = data.slice(bounds[index], bounds[index + 1] - bounds[index])
            yield value if value.address % _ALIGNMENT == 0 else pa.py_buffer(value.to_pybytes())


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Checks the lengths of the buffers, because Arrow would read beyond the end of one that is too short."""
    batch.validate()
    return batch


def _damaged(where: str, size_bytes: int, error: Exception) -> InvalidRecordError:
    return InvalidRecordError(
        f"{where} contains {size_bytes:,} bytes that are not a packed batch: {error}.",
        fix="do not change packed batches on their way, and install the same version of kafka-eos on the "
        "driver and on all executors.",
    )


# -- packets ----------------------------------------------------------------------------------------------

#: Name of the reserved column of packets. Its type is binary.
CHANGELOG = "__kafka_eos_changelog"

_VERSION = 1
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Packet:
    """One packet of state changes, which are still packed.

    Attributes:
        tp: partition of the changelog.
        task_attempt_id: id of the task attempt that created the packet (UUID, hex).
        number: number of this packet in its task attempt, from 0.
        report: report of the whole task attempt; only its last packet has one.
        changes: an Arrow IPC stream; empty if the packet has no changes.
    """

    tp: TopicPartition
    task_attempt_id: str
    number: int
    report: ShardReport | None
    changes: memoryview

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the changes, with the schema `state.store.uncommitted.CHANGES`.

        Raises:
            StateError: if the changes are damaged.
        """
        return _batches(self.changes)


@dataclass(frozen=True)
class BadRecords:
    """One packet of bad records, which are still packed.

    Attributes:
        task: the reading task.
        task_attempt_id: id of its attempt that created the packet (UUID, hex).
        number: number of this packet in the attempt, from 0.
        total: number of packets of the attempt; only its last packet, which has no records, says it.
        records: an Arrow IPC stream; empty if the packet has no records.
        topics: what the attempt read of each topic; likewise.
    """

    task: ReadTask
    task_attempt_id: str
    number: int
    total: int | None
    records: memoryview
    topics: tuple[TopicRecords, ...] = ()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the records, with the schema `spark.arrow.BAD_RECORDS`.

        Raises:
            StateError: if the packet is damaged.
        """
        return _batches(self.records)

    def without_records(self) -> pa.Buffer:
        """Returns the packet without its records. It still proves that the records arrived."""
        return pa.py_buffer(
            _head_of_read(self.task, self.task_attempt_id, self.number, self.total, self.topics)
        )


def _batches(stream: memoryview) -> Iterator[pa.RecordBatch]:
    if stream.nbytes:
        try:
            yield from unpack_stream(stream, f"column {CHANGELOG!r}")
        except InvalidRecordError as error:
            raise StateError(error.message, error.fix) from error


def pack_packets(report: ShardReport, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Packs the changes of one task attempt: one packet for each Arrow batch, and one for the report.

    Args:
        report: the report. This function fills in ``packets`` and ``records``.
        changes: Arrow batches with the schema `state.store.uncommitted.CHANGES`.
    """
    number = records = 0
    for each in changes:
        if each.num_rows:
            yield pack_stream(each, _head(report, number, None))
            number += 1
            records += each.num_rows
    done = replace(report, packets=number + 1, records=records)
    yield pa.py_buffer(_head(report, number, done))


#: Approximate size of the records in a packet, in bytes. Spark holds a packet in memory as one row.
_PACKET_BYTES = 2 << 20
#: The most characters of the reason why a record is bad, in the report of its task.
_LONGEST_REASON = 500


class BadRecordsOfTask:
    """Packs the bad records of one attempt of a reading task.

    Attributes:
        is_reported: whether the report was made.

    Args:
        task: the reading task.
    """

    def __init__(self, task: ReadTask) -> None:
        self._task = task
        self._attempt = uuid.uuid4().hex
        self._number = 0
        self._bad: dict[str, TopicRecords] = {}
        self.is_reported = False

    def packets(self, records: pa.RecordBatch) -> Iterator[pa.Buffer]:
        """Packs records with the schema `spark.arrow.BAD_RECORDS`, of which there is at least one."""
        self._count(records)
        for each in slices(records, _PACKET_BYTES):
            yield pack_stream(each, _head_of_read(self._task, self._attempt, self._number, None))
            self._number += 1

    def report(self) -> pa.Buffer:
        """Returns the last packet: number of packets, and what was read. Call it once, after all records."""
        self.is_reported = True
        read = self._task.records
        topics = [
            replace(self._bad.get(topic) or TopicRecords(topic, 0, 0), records=read.get(topic, 0))
            for topic in dict.fromkeys((*read, *self._bad))
        ]
        return pa.py_buffer(_head_of_read(self._task, self._attempt, self._number, self._number + 1, topics))

    def _count(self, records: pa.RecordBatch) -> None:
        topics, messages = records.column("topic"), records.column("message")
        for each in topics.value_counts().to_pylist():
            topic, number = each["values"] or "", each["counts"]
            before = self._bad.get(topic)
            if before is None:
                at = topics.index(topic) if topic else topics.is_null().index(True)
                first = messages[at.as_py()].as_py() or ""
                before = TopicRecords(topic, 0, 0, first[:_LONGEST_REASON])
            self._bad[topic] = replace(before, bad=before.bad + number)


def packets(column: pa.BinaryArray) -> Iterator[Packet | BadRecords]:
    """Reads the packets in a column. Raises: StateError: as `unpack`."""
    return (unpack_packet(memoryview(each)) for each in values(column))


def split_packets(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """Returns the data rows of a batch, and the packets of the steps before this one."""
    if CHANGELOG not in batch.schema.names:
        return batch, pa.array([], pa.binary())
    packets = batch.column(CHANGELOG)
    rows = batch.drop_columns([CHANGELOG])
    return (
        rows if packets.null_count == len(packets) else rows.filter(packets.is_null())
    ), packets.drop_null()


class WaitingPackets:
    """Packets that wait until a step has processed the rows among them; many wait in a temporary file.

    There may be as many as a micro-batch has records: all are bad if somebody declares a wrong schema.
    """

    def __init__(self) -> None:
        self._held: list[pa.Array] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def append(self, packets: pa.Array) -> None:
        """Adds packets, which may be none.

        Raises:
            UnavailableError: if the temporary folder is full or not writable.
        """
        if not len(packets):
            return
        self._held.append(packets.cast(pa.binary()))
        self._bytes += self._held[-1].nbytes
        if self._bytes < _MOST_WAITING_BYTES:
            return
        with _temporary_file():
            if self._writer is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  `taken` closes it, and it has no name
                self._writer = pa.ipc.new_stream(self._file, _WAITING)
            for each in self._held:
                self._writer.write_batch(pa.RecordBatch.from_arrays([each], schema=_WAITING))
        self._held, self._bytes = [], 0

    def taken(self) -> Iterator[pa.Array]:
        """Yields the packets, which then wait no longer; in any order.

        Raises:
            UnavailableError: if the temporary file cannot be read.
        """
        if self._file is not None:
            file, writer, self._file, self._writer = self._file, self._writer, None, None
            with _temporary_file():
                assert writer is not None
                writer.close()
                file.seek(0)
                reader = pa.ipc.open_stream(file)
            while True:
                with _temporary_file():
                    batch = next(reader, None)
                if batch is None:
                    break
                yield batch.column(0)
            file.close()
        while self._held:
            yield self._held.pop(0)
        self._bytes = 0


_WAITING = pa.schema([pa.field(CHANGELOG, pa.binary())])
#: Packets that wait in memory.
_MOST_WAITING_BYTES = 32 << 20


@contextmanager
def _temporary_file() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"the temporary folder {tempfile.gettempdir()!r} cannot hold the packets of a micro-batch: "
            f"{error}.",
            fix="free space there, set the environment variable TMPDIR of the executors to a larger folder, "
            "or set maxOffsetsPerTrigger on the source; then restart the query.",
        ) from error


def with_packets(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns data rows with the column of packets, which is null in them."""
    return batch.append_column(CHANGELOG, pa.nulls(batch.num_rows, pa.binary()))


def rows_of_packets(packets: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """Returns packets as rows whose other columns, those of a schema, are null."""
    nulls = [pa.nulls(len(packets), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(
        [*nulls, packets.cast(pa.binary())], schema=schema.append(pa.field(CHANGELOG, pa.binary()))
    )


def unpack_packet(packet: pa.Buffer | bytes | memoryview) -> Packet | BadRecords:
    """Reads a packet.

    Raises:
        StateError: if the value is not a packet, or has another version.
    """
    view = memoryview(packet)
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = parse_json(bytes(view[4 : 4 + length]))
        version = header["v"]
        if version == _VERSION and "plan" in header:
            task = ReadTask(*(header[key] for key in ("frame", "plan", "task", "tasks")))
            return BadRecords(
                task,
                header["attempt"],
                header["number"],
                header.get("total"),
                view[4 + length :],
                tuple(TopicRecords(*each) for each in header.get("topics", ())),
            )
        if version == _VERSION:
            tp = TopicPartition(header["topic"], header["shard"])
            return Packet(
                tp,
                header["attempt"],
                header["number"],
                _report(tp, header["attempt"], header.get("report")),
                view[4 + length :],
            )
    except (*SHAPE_ERRORS, struct.error) as error:
        raise StateError(
            f"column {CHANGELOG!r} holds a value that no operator or read wrote ({error!r}): "
            f"{bytes(view[:64])!r}.",
            fix=f"pass the column {CHANGELOG!r} on exactly as the frame has it.",
        ) from error
    raise StateError(
        f"column {CHANGELOG!r} has version {version}, but this sink reads version {_VERSION}.",
        fix="install the same version of kafka-eos on the driver and on all executors.",
    )


def _head_of_read(
    task: ReadTask, attempt: str, number: int, total: int | None, topics: Sequence[TopicRecords] = ()
) -> bytes:
    header: dict[str, object] = {
        "v": _VERSION,
        "frame": task.frame,
        "plan": task.plan,
        "task": task.task,
        "tasks": task.tasks,
        "attempt": attempt,
        "number": number,
        **({} if total is None else {"total": total, "topics": [astuple(each) for each in topics]}),
    }
    return _with_length(header)


def _head(report: ShardReport, number: int, done: ShardReport | None) -> bytes:
    header: dict[str, object] = {
        "v": _VERSION,
        "topic": report.tp.topic,
        "shard": report.tp.partition,
        "attempt": report.task_attempt_id,
        "number": number,
        **({} if done is None else {"report": _fields(done)}),
    }
    return _with_length(header)


def _with_length(header: dict[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def _integer(found: object) -> int:
    return int(str(found))


def _integer_or_none(found: object) -> int | None:
    return None if found is None else _integer(found)


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, dict):
        raise TypeError(f"the key 'counts' has type {type(found).__name__}; expected an object")
    return {str(name): int(number) for name, number in found.items()}


def _measured(found: object) -> dict[str, float]:
    """Returns the measured numbers; without those that are none, because they are for metrics only."""
    numbers = found.items() if isinstance(found, dict) else ()
    return {str(name): each for name, each in numbers if type(each) in (int, float)}


#: The fields of a report: key in the packet, name, and how the value is read. Those after ``counts`` are left
#: out if they say nothing.
_REPORT: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("packets", "packets", _integer),
    ("records", "records", _integer),
    ("app", "application_id", str),
    ("group", "group_id", str),
    ("store", "store", str),
    ("host", "host", str),
    ("topic_id", "topic_id", str),
    ("brokers", "brokers", str),
    ("shards", "shards", _integer),
    ("query", "query_id", str),
    ("batch", "batch_id", _integer),
    ("next", "next_offset", _integer),
    ("time", "time_ms", _integer),
    ("event", "event_time_ms", _integer_or_none),
    ("sequence", "sequence", _integer),
    ("ahead", "clock_max_ahead_ms", _integer),
    ("log_start", "log_start", _integer),
    ("skipped", "skipped", bool),
    ("base", "base_digest", str),
    ("missing", "missing_state", str),
    ("failure", "failure", str),
    ("pressure", "pressure", lambda found: float(str(found))),
    ("counts", "counts", _counts),
    ("due", "due_ms", _integer_or_none),
    ("in_read", "in_read", bool),
    ("measured", "measured", _measured),
)
_OPTIONAL = ("due", "in_read", "measured")


def _fields(report: ShardReport) -> dict[str, object]:
    """Returns the report as JSON."""
    found = {key: getattr(report, name) for key, name, _ in _REPORT}
    found |= {
        "pressure": round(report.pressure, 4),
        "counts": dict(report.counts),
        "measured": {
            name: each if isinstance(each, int) else round(each, 3) for name, each in report.measured.items()
        },
    }
    return {
        key: value
        for key, value in found.items()
        if key not in _OPTIONAL or not (value is None or value is False or value == {})
    }


def _report(tp: TopicPartition, task_attempt_id: str, found: dict[str, Any] | None) -> ShardReport | None:
    if found is None:
        return None
    read = {name: of(found[key]) for key, name, of in _REPORT if key in found or key not in _OPTIONAL}
    return ShardReport(tp=tp, task_attempt_id=task_attempt_id, **read)
