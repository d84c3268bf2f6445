"""Packed frames: the rows of `map_in_read` travel to the sink as packed batches, many in one Spark row.

Between a Python source and a Python sink, Spark converts every row from Arrow to its own format and back.
Packing avoids that for rows that Spark itself does not process. The packed batches, messages of
`protocol.packed_batches`, are in the column `PACKED`, whose metadata contains the schema of the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.protocol import packed_batches
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.spark.arrow import arrow_schema, fit

#: Column of a packed frame.
PACKED = "__kafka_eos_rows"

#: Key of the rows' schema (JSON of Spark) in the metadata of that column.
_SCHEMA = "kafka_eos.rows"

#: Approximate size of a packed batch, in bytes. Spark holds one in memory and passes a few at a time to
#: Python.
PACKED_BATCH_BYTES = 2 << 20

_FIX = "write the frame that map_in_read returned without changes; do all processing in its function."


def packed_frame_schema(rows: StructType) -> StructType:
    """Returns the schema of a frame that has its rows, of schema ``rows``, in packed batches."""
    return StructType([StructField(PACKED, BinaryType(), metadata={_SCHEMA: json.dumps(rows.jsonValue())})])


def schema_of_packed_rows(schema: StructType) -> StructType | None:
    """Returns the schema of the rows in the packed batches of a frame; None if the frame has none.

    Args:
        schema: schema of the frame.

    Raises:
        InvalidSchemaError: if the frame has other columns as well, or has lost the schema of the rows, or the
            column has another name.
    """
    refuse_renamed(schema, _SCHEMA, PACKED, "packed batches of rows")
    if PACKED not in schema.names:
        return None
    if schema.names != [PACKED]:
        others = ", ".join(repr(each) for each in schema.names if each != PACKED)
        raise InvalidSchemaError(
            f"the frame has the column(s) {others} in addition to {PACKED!r}, which already contains whole "
            "rows.",
            fix=_FIX,
        )
    written = (schema.fields[0].metadata or {}).get(_SCHEMA)
    if written is None:
        raise InvalidSchemaError(
            f"column {PACKED!r} has no metadata with the schema of its rows; a step of the query removed it.",
            fix=_FIX,
        )
    return StructType.fromJson(parse_json(written))


def refuse_renamed(schema: StructType, key: str, name: str, content: str) -> None:
    """Raises an error if a column is one of `map_in_read` under another name: its bytes are no records.

    Args:
        schema: schema of the frame.
        key: key in the metadata of the column, which Spark keeps when it renames the column.
        name: name of the column in the frame that `map_in_read` returned.
        content: what the column contains.

    Raises:
        InvalidSchemaError: names the column.
    """
    for field in schema.fields:
        if field.name != name and key in (field.metadata or {}):
            raise InvalidSchemaError(
                f"column {field.name!r} is column {name!r} of map_in_read under another name. It contains "
                f"{content}, which must not be written as they are.",
                fix=_FIX,
            )


def pack(batches: Iterable[pa.RecordBatch], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Packs the rows that a function returned.

    Each packed batch comes in an Arrow batch of its own, so that Spark receives it before the next one
    exists.

    Args:
        batches: result of the function. Columns are matched by name and cast to the types in ``rows``.
        rows: declared schema of the rows.

    Raises:
        InvalidRecordError: if the result is not an iterable of record batches, a batch has other columns, or
            a value does not fit its type.
    """
    column = pa.schema([pa.field(PACKED, pa.binary())])
    for batch in fitted(batches, rows):
        for rows_of_one in packed_batches.slices(batch, PACKED_BATCH_BYTES):
            packed = packed_batches.column([packed_batches.pack(rows_of_one)])
            yield pa.RecordBatch.from_arrays([packed], schema=column)


def fitted(batches: Iterable[pa.RecordBatch], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Yields the batches that a function returned with the declared schema, without empty ones.

    Args:
        batches: result of the function. Columns are matched by name and cast to the types in ``rows``.
        rows: declared schema of the rows.

    Raises:
        InvalidRecordError: if the result is not an iterable of record batches, a batch has other columns, or
            a value does not fit its type.
    """
    schema = arrow_schema(rows)
    if not isinstance(batches, Iterable):
        raise _no_batches(batches)
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise _no_batches(batch)
        if batch.num_rows:
            yield fit(batch, schema, "the function of map_in_read returned")


def unpack(packed: Iterable[pa.Buffer], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Returns the rows in packed batches, without copying the buffers.

    Raises:
        InvalidRecordError: if a value is not a packed batch.
    """
    schema = arrow_schema(rows)
    return (packed_batches.unpack(each, schema, f"column {PACKED!r}") for each in packed)


def packed_batches_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Returns the packed batches in the Arrow batches that Spark passes for a packed frame."""
    return (each for batch in batches for each in packed_batches.values(batch.column(0)))


def _no_batches(result: object) -> InvalidRecordError:
    return InvalidRecordError(
        f"the function of map_in_read returned a {type(result).__name__}; expected an iterable of "
        "pyarrow.RecordBatch.",
        fix="yield record batches; for a table, yield from table.to_batches().",
    )
