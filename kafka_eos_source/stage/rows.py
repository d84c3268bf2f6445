"""Checks the rows of a frame and converts them to the staged columns.

The task refuses rows that cannot become Kafka records (a null topic, a negative partition, …). So the driver
does not begin a transaction for a batch that cannot succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import TimestampType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.spark.schema import (
    CHANGES,
    HEADERS,
    HEADERS_ARROW,
    KEY,
    PARTITION,
    STAGED_ARROW,
    TIMESTAMP,
    TOPIC,
    VALUE,
    SinkColumns,
)

#: Number of rows that the row-based writer of PySpark 4.0 converts to one Arrow batch.
ROWS_PER_BATCH = 2000


def staged_schema(columns: SinkColumns) -> pa.Schema:
    """Returns the columns of `STAGED_ARROW` that the frame has."""
    return pa.schema([field for field in STAGED_ARROW if getattr(columns, field.name) is not None])


def from_batches(batches: Iterable[pa.RecordBatch], columns: SinkColumns) -> Iterator[pa.RecordBatch]:
    """Converts Spark's Arrow batches to staged batches; packets of state changes get separate batches.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    for batch in batches:
        if columns.changelog is None or batch.column(columns.changelog).null_count == batch.num_rows:
            yield from_arrow(batch, columns)
            continue
        packets = batch.column(columns.changelog)
        yield from_arrow(batch.filter(packets.is_null()), columns)
        yield _packets(packets.drop_null(), columns)


def from_arrow(batch: pa.RecordBatch, columns: SinkColumns) -> pa.RecordBatch:
    """Converts one of Spark's Arrow batches, which contains only records, to a staged batch.

    Raises:
        InvalidRecordError: if a row cannot become a record. It names the column and the number of the row.
    """
    return _staged({name: batch.column(index) for name, index in _present(columns)}, columns)


def from_rows(rows: Iterable[Sequence[Any]], columns: SinkColumns) -> Iterator[pa.RecordBatch]:
    """Converts Spark's rows (`Row` or tuple) to staged batches, for the row-based writer of PySpark 4.0.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    chunk: list[Sequence[Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_PER_BATCH:
            yield from _from_chunk(chunk, columns)
            chunk = []
    if chunk:
        yield from _from_chunk(chunk, columns)


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


def _from_chunk(chunk: list[Sequence[Any]], columns: SinkColumns) -> Iterator[pa.RecordBatch]:
    if columns.changelog is not None:
        packets = [packet for row in chunk if (packet := row[columns.changelog]) is not None]
        if packets:
            yield _packets(_binary_of(packets), columns)
            chunk = [row for row in chunk if row[columns.changelog] is None]
    yield _staged(
        {name: _FROM_PYTHON[name]([row[index] for row in chunk]) for name, index in _present(columns)},
        columns,
    )


def _present(columns: SinkColumns) -> list[tuple[str, int]]:
    return [(name, getattr(columns, name)) for name in staged_schema(columns).names]


def _staged(found: dict[str, pa.Array], columns: SinkColumns) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [_STAGE[name](found[name]) for name in found], schema=staged_schema(columns)
    )


def _binary(array: pa.Array) -> pa.Array:
    """Casts strings to their UTF-8 bytes, which does not copy them."""
    if pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        array = array.cast(pa.string())
    return array.cast(pa.binary())


def _topic(array: pa.Array) -> pa.Array:
    _raise_if_any(array.is_null(), TOPIC, "is null", "set the option 'topic', or remove or fill such rows")
    array = array.cast(pa.string())
    _raise_if_any(pc.equal(array, ""), TOPIC, "is empty", "remove or fill such rows")
    return array


def _partition(array: pa.Array) -> pa.Array:
    _raise_if_any(
        pc.less(array, 0),
        PARTITION,
        "is negative",
        "use a partition that exists, or null to let the partitioner choose one",
    )
    return array.cast(pa.int32())


def _headers(array: pa.Array) -> pa.Array:
    """Converts headers by position, because the user's field names may be in another letter case."""
    if array.null_count == len(array):
        return pa.nulls(len(array), HEADERS_ARROW)
    entries = array.flatten()
    key = entries.field(0).cast(pa.string())
    fix = "remove the header, or set its key"
    _raise_if_any(entries.is_null(), HEADERS, "has a null entry", fix, what="entry")
    _raise_if_any(key.is_null(), HEADERS, "has an entry with a null key", fix, what="entry")
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
    _raise_if_any(
        pc.less(array, 0),
        TIMESTAMP,
        "is before 1970",
        "use a later timestamp, because Kafka's timestamps are milliseconds since 1970",
    )
    return pc.divide(array, 1000)


def _raise_if_any(bad: pa.Array, column: str, what_is_wrong: str, fix: str, what: str = "row") -> None:
    """Raises an error if any element of ``bad`` is true; null counts as false.

    Raises:
        InvalidRecordError: names the column and the first such row or header entry.
    """
    first = pc.index(pc.fill_null(bad, False), True).as_py()
    if first >= 0:
        raise InvalidRecordError(
            f"column {column!r} {what_is_wrong} in {what} {first} of the Arrow batch.", fix=f"{fix}."
        )


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


def _microseconds_of(values: list[Any]) -> pa.Array:
    to_internal = TimestampType().toInternal
    return pa.array([None if value is None else to_internal(value) for value in values], pa.int64())


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
