"""Checks the rows of a frame and converts them to the staged columns.

The task refuses rows that cannot become Kafka records (a null topic, a negative partition, …), or sets them
aside (`stage.invalid_rows`). So the driver does not begin a transaction for a batch that cannot succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import TimestampType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.spark.arrow import CHANGES, HEADERS_ARROW, STAGED_ARROW
from kafka_eos_source.spark.schema import (
    HEADERS,
    INVALID,
    INVALID_TYPE,
    KEY,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    SinkColumns,
)
from kafka_eos_source.stage.invalid_rows import InvalidRows
from kafka_eos_source.stage.row_rules import check

#: Number of rows that the row-based writer of PySpark 4.0 converts to one Arrow batch.
ROWS_PER_BATCH = 2000


def staged_schema(columns: SinkColumns) -> pa.Schema:
    """Returns the columns of `STAGED_ARROW` that the frame has."""
    return pa.schema([field for field in STAGED_ARROW if getattr(columns, field.name) is not None])


def from_batches(
    batches: Iterable[pa.RecordBatch], columns: SinkColumns, invalid: InvalidRows | None = None
) -> Iterator[pa.RecordBatch]:
    """Converts Spark's Arrow batches to staged batches; packets of state changes get separate batches.

    Args:
        batches: batches with the columns of the frame.
        columns: positions of the sink's columns.
        invalid: takes the rows that cannot become records; None = they are an error.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    for batch in batches:
        if columns.changelog is None or batch.column(columns.changelog).null_count == batch.num_rows:
            yield from_arrow(batch, columns, invalid)
            continue
        packets = batch.column(columns.changelog)
        yield from_arrow(batch.filter(packets.is_null()), columns, invalid)
        yield _packets(packets.drop_null(), columns)


def from_arrow(
    batch: pa.RecordBatch, columns: SinkColumns, invalid: InvalidRows | None = None
) -> pa.RecordBatch:
    """Converts one of Spark's Arrow batches, which contains only records, to a staged batch.

    Raises:
        InvalidRecordError: if a row cannot become a record, and ``invalid`` is None. It names the column and
            the number of the row.
    """
    found = {name: batch.column(index) for name, index in _present(columns)}
    marks = None if columns.invalid is None else batch.column(columns.invalid)
    origins = None if columns.origin is None else batch.column(columns.origin)
    return _staged(found, columns, marks, origins, invalid)


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


def _packets(packets: pa.Array, columns: SinkColumns) -> pa.RecordBatch:
    """Converts packets of an operator's changes to staged rows without records."""
    schema = staged_schema(columns)
    return pa.RecordBatch.from_arrays(
        [
            _binary(packets) if name == CHANGES else pa.nulls(len(packets), schema.field(name).type)
            for name in schema.names
        ],
        schema=schema,
    )


def _from_chunk(
    chunk: list[Sequence[Any]], columns: SinkColumns, invalid: InvalidRows | None
) -> Iterator[pa.RecordBatch]:
    if columns.changelog is not None:
        packets = [packet for row in chunk if (packet := row[columns.changelog]) is not None]
        if packets:
            yield _packets(_binary_of(packets), columns)
            chunk = [row for row in chunk if row[columns.changelog] is None]
    marks = None if columns.invalid is None else _marks_of([row[columns.invalid] for row in chunk])
    origins = None if columns.origin is None else _structs_of([row[columns.origin] for row in chunk])
    found = {name: _FROM_PYTHON[name]([row[index] for row in chunk]) for name, index in _present(columns)}
    yield _staged(found, columns, marks, origins, invalid)


def _present(columns: SinkColumns) -> list[tuple[str, int]]:
    return [(name, getattr(columns, name)) for name in staged_schema(columns).names]


def _staged(
    found: dict[str, pa.Array],
    columns: SinkColumns,
    marks: pa.Array | None,
    origins: pa.Array | None,
    invalid: InvalidRows | None,
) -> pa.RecordBatch:
    if invalid is not None:
        found = invalid.take(found, marks, origins)
    elif marks is not None and marks.null_count < len(marks):
        raise _marked(marks)
    for name, column in found.items():
        check(name, column)
    return pa.RecordBatch.from_arrays(
        [_STAGE[name](found[name]) for name in found], schema=staged_schema(columns)
    )


def _marked(marks: pa.Array) -> InvalidRecordError:
    """Returns the error for the first row that is marked as invalid."""
    first = pc.index(marks.is_valid(), True).as_py()
    why = marks[first].as_py()
    text = why if isinstance(why, str) else ", ".join(f"{name}={each!r}" for name, each in why.items())
    return InvalidRecordError(
        f"column {INVALID!r} marks row {first} of the Arrow batch as invalid: {text}.",
        fix="set onInvalidRecord to 'dead-letter' (with deadLetter.topic), which keeps such rows in another "
        "topic, or to 'drop', which loses them; or change the query so that it no longer marks the row.",
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
    return pa.array([None if each is None else _with_microseconds(each.asDict()) for each in values], type_)


def _with_microseconds(struct: dict[str, Any]) -> dict[str, Any]:
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
