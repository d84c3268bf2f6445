"""Checks the rows of a frame, and converts those for Kafka to the staged columns.

The task refuses rows that an output cannot hold, or sets them aside (`stage.invalid_rows`), so that the
driver does not begin a transaction for a batch that cannot succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import TimestampType

from kafka_eos_source.in_read.bad_records import bad_record
from kafka_eos_source.protocol import packing
from kafka_eos_source.spark.arrow import CHANGES, HEADERS_ARROW, STAGED_ARROW
from kafka_eos_source.spark.schema import (
    HEADERS,
    INVALID_TYPE,
    KEY,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    SinkColumns,
)
from kafka_eos_source.stage.invalid_rows import InvalidRows, Reasons, RowChecks

if TYPE_CHECKING:
    from kafka_eos_source.stage.fanout import Fanout, Plan

#: Number of rows that the row-based writer of PySpark 4.0 converts to one Arrow batch.
ROWS_PER_BATCH = 2000


def staged_schema(columns: SinkColumns) -> pa.Schema:
    """Returns the columns of `STAGED_ARROW` that the frame has."""
    return pa.schema([field for field in STAGED_ARROW if getattr(columns, field.name) is not None])


def from_batches(
    batches: Iterable[pa.RecordBatch],
    columns: SinkColumns,
    invalid: InvalidRows | None = None,
    fanout: Fanout | None = None,
    find: Callable[[pa.RecordBatch], Reasons | None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Converts Spark's Arrow batches to staged batches; packets get separate batches.

    Bad records in packets become invalid rows.

    Args:
        batches: batches with the columns of the frame.
        columns: positions of the sink's columns.
        invalid: takes the rows that an output cannot hold; None = they are an error.
        fanout: takes the valid rows, and passes on those for Kafka; None = all are for Kafka.
        find: finds invalid rows; None = the rules of all outputs do.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    plan = None if fanout is None else fanout.plan
    checks = RowChecks(columns, None if invalid is None else invalid.limits, plan)
    for batch in batches:
        packets = None if columns.changelog is None else batch.column(columns.changelog)
        if packets is not None and packets.null_count < batch.num_rows:
            batch = batch.filter(packets.is_null())
        else:
            packets = None
        rows: pa.RecordBatch | None = _valid(batch, columns, checks, invalid, plan, find)
        if fanout is not None:
            rows = fanout.take(rows)
        if rows is not None:
            yield _staged(rows, columns)
        if packets is not None:
            yield _packets(packets.drop_null(), columns, invalid)


def from_arrow(
    batch: pa.RecordBatch, columns: SinkColumns, invalid: InvalidRows | None = None
) -> pa.RecordBatch:
    """Converts one of Spark's Arrow batches, which contains only records, to a staged batch.

    Raises:
        InvalidRecordError: if a row cannot become a record, and ``invalid`` is None. It names the column and
            the number of the row.
    """
    checks = RowChecks(columns, None if invalid is None else invalid.limits)
    return _staged(_valid(batch, columns, checks, invalid), columns)


def from_rows(
    rows: Iterable[Sequence[Any]], columns: SinkColumns, invalid: InvalidRows | None = None
) -> Iterator[pa.RecordBatch]:
    """Converts Spark's rows (`Row` or tuple) to staged batches, for the row-based writer of PySpark 4.0.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    chunk: list[Sequence[Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_PER_BATCH:
            yield from _from_chunk(chunk, columns, invalid)
            chunk = []
    if chunk:
        yield from _from_chunk(chunk, columns, invalid)


def _packets(packets: pa.Array, columns: SinkColumns, invalid: InvalidRows | None) -> pa.RecordBatch:
    """Converts packets to staged rows without records, and passes on the bad records in them.

    Raises:
        InvalidRecordError: if there is a bad record, and ``invalid`` is None.
        StateError: if a packet is damaged.
    """
    kept = _binary(packets)
    values = list(packing.values(kept))
    found = list(map(packing.unpack_packet, values))
    if any(isinstance(each, packing.BadRecords) for each in found):
        for each in found:
            if isinstance(each, packing.BadRecords):
                for bad in each.batches():
                    _take_bad(bad, invalid)
        kept = packing.column(
            [
                each.without_records() if isinstance(each, packing.BadRecords) else value
                for value, each in zip(values, found, strict=True)
            ]
        )
    schema = staged_schema(columns)
    return pa.RecordBatch.from_arrays(
        [kept if name == CHANGES else pa.nulls(len(kept), schema.field(name).type) for name in schema.names],
        schema=schema,
    )


def _take_bad(bad: pa.RecordBatch, invalid: InvalidRows | None) -> None:
    """Passes on bad records as rows that are marked as invalid: key and value are those that were read.

    Raises:
        InvalidRecordError: if ``invalid`` is None.
    """
    if invalid is None:
        raise bad_record(bad, "set onInvalidRecord to 'dead-letter' (with deadLetter.topic) or 'drop'.")
    invalid.take_bad_records(bad)


def _from_chunk(
    chunk: list[Sequence[Any]], columns: SinkColumns, invalid: InvalidRows | None
) -> Iterator[pa.RecordBatch]:
    if columns.changelog is not None:
        packets = [packet for row in chunk if (packet := row[columns.changelog]) is not None]
        if packets:
            yield _packets(_binary_of(packets), columns, invalid)
            chunk = [row for row in chunk if row[columns.changelog] is None]
    found = {at: _FROM_PYTHON[name]([row[at] for row in chunk]) for name, at in _present(columns)}
    for at, converted in ((columns.invalid, _marks_of), (columns.origin, _structs_of)):
        if at is not None:
            found[at] = converted([row[at] for row in chunk])
    names = [str(at) for at in range(max(found) + 1)]
    batch = pa.RecordBatch.from_arrays(
        [found.get(at, pa.nulls(len(chunk))) for at in range(len(names))], names
    )
    yield from_arrow(batch, columns, invalid)


def _present(columns: SinkColumns) -> list[tuple[str, int]]:
    return [(name, getattr(columns, name)) for name in staged_schema(columns).names]


def _valid(
    batch: pa.RecordBatch,
    columns: SinkColumns,
    checks: RowChecks,
    invalid: InvalidRows | None,
    plan: Plan | None = None,
    find: Callable[[pa.RecordBatch], Reasons | None] | None = None,
) -> pa.RecordBatch:
    """Returns the valid rows of a batch; sets the others aside."""
    if invalid is None:
        checks.refuse(batch)
        return batch
    reasons = (find or checks.reasons)(batch)
    return batch if reasons is None else invalid.take(batch, reasons, columns, plan)


def _staged(batch: pa.RecordBatch, columns: SinkColumns) -> pa.RecordBatch:
    """Converts valid rows for Kafka to staged rows."""
    return pa.RecordBatch.from_arrays(
        [_STAGE[name](batch.column(at)) for name, at in _present(columns)], schema=staged_schema(columns)
    )


def _binary(array: pa.Array) -> pa.Array:
    """Casts strings to their UTF-8 bytes, which does not copy them."""
    if pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        array = array.cast(pa.string())
    return array.cast(pa.binary())


def _topic(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _partition(array: pa.Array) -> pa.Array:
    return array.cast(pa.int32())


def _headers(array: pa.Array) -> pa.Array:
    """Converts headers by position, because the user's field names may be in another letter case."""
    if array.null_count == len(array):
        return pa.nulls(len(array), HEADERS_ARROW)
    entries = array.flatten()
    key = entries.field(0).cast(pa.string())
    struct = pa.StructArray.from_arrays(
        [key, entries.field(1).cast(pa.binary())], fields=list(HEADERS_ARROW.value_type)
    )
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, struct, type=HEADERS_ARROW, mask=array.is_null())


def _timestamp(array: pa.Array) -> pa.Array:
    """Converts Spark's microseconds to Kafka's milliseconds, rounded down."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    return pc.divide(array, 1000)


def _binary_of(values: list[Any]) -> pa.Array:
    return pa.array(values, pa.binary())


def _headers_of(values: list[Any]) -> pa.Array:
    return pa.array(
        [
            None if row is None else [None if h is None else {"key": h[0], "value": h[1]} for h in row]
            for row in values
        ],
        HEADERS_ARROW,
    )


def _marks_of(values: list[Any]) -> pa.Array:
    if any(isinstance(each, str) for each in values):
        return pa.array(values, pa.string())
    return _structs_of(values)


def _structs_of(values: list[Any]) -> pa.Array:
    """Returns structs with all fields of `INVALID_TYPE`; fields that a row does not have are null."""
    type_ = pa.struct([(field.name, _MARK_TYPES[field.name]) for field in INVALID_TYPE])
    return pa.array([None if each is None else _for_arrow(each.asDict(True)) for each in values], type_)


def _for_arrow(struct: dict[str, Any]) -> dict[str, Any]:
    """Returns a struct with its time in microseconds: Spark's rows have times in the local time zone."""
    at = struct.get("timestamp")
    return struct if at is None else {**struct, "timestamp": TimestampType().toInternal(at)}


def _microseconds_of(values: list[Any]) -> pa.Array:
    to_internal = TimestampType().toInternal
    return pa.array([None if value is None else to_internal(value) for value in values], pa.int64())


_MARK_TYPES = {
    "error": pa.string(),
    "message": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "holds": pa.string(),
    HEADERS: HEADERS_ARROW,
}

_STAGE = {
    KEY: _binary,
    VALUE: _binary,
    TOPIC: _topic,
    PARTITION: _partition,
    HEADERS: _headers,
    TIMESTAMP: _timestamp,
    CHANGES: _binary,
}

_FROM_PYTHON = {
    KEY: _binary_of,
    VALUE: _binary_of,
    TOPIC: lambda values: pa.array(values, pa.string()),
    PARTITION: lambda values: pa.array(values, pa.int32()),
    HEADERS: _headers_of,
    TIMESTAMP: _microseconds_of,
    CHANGES: _binary_of,
}
