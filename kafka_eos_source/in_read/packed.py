"""Packed batches: one Spark row carries an Arrow batch of many rows in a binary column.

Between a Python source and a Python sink, Spark converts every row from Arrow to its own format and back.
Packing avoids that for rows that Spark itself does not process. A packed batch is a record batch in Arrow's
IPC format, without the schema, in the column `PACKED`. The metadata of that column contains the schema of the
rows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.spark.schema import arrow_schema

#: Column of a packed frame.
PACKED = "__kafka_eos_rows"

#: Key of the rows' schema (JSON of Spark) in the metadata of that column.
_SCHEMA = "kafka_eos.rows"

#: Approximate size of a packed batch, in bytes. Spark holds one in memory and passes a few at a time to
#: Python.
PACKED_BATCH_BYTES = 2 << 20

#: Arrow's offsets of a binary column with one value: where the value begins and ends.
_OFFSETS = struct.Struct("=2i")

_FIX = "write the frame that map_in_read returned without changes; do all processing in its function."


def packed_frame_schema(rows: StructType) -> StructType:
    """Returns the schema of a frame that has its rows, of schema ``rows``, in packed batches."""
    return StructType([StructField(PACKED, BinaryType(), metadata={_SCHEMA: json.dumps(rows.jsonValue())})])


def schema_of_packed_rows(schema: StructType) -> StructType | None:
    """Returns the schema of the rows in the packed batches of a frame; None if the frame has none.

    Args:
        schema: schema of the frame.

    Raises:
        InvalidSchemaError: if the frame has other columns as well, or has lost the schema of the rows.
    """
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
    return StructType.fromJson(json.loads(written))


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
    schema = arrow_schema(rows)
    column = pa.schema([pa.field(PACKED, pa.binary())])
    if not isinstance(batches, Iterable):
        raise _no_batches(batches)
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise _no_batches(batch)
        if not batch.num_rows:
            continue
        fitted = _fitted(batch, schema)
        size_rows = max(1, PACKED_BATCH_BYTES * fitted.num_rows // max(1, fitted.nbytes))
        for start in range(0, fitted.num_rows, size_rows):
            packed_batch = fitted.slice(start, size_rows).serialize()
            offsets = pa.py_buffer(_OFFSETS.pack(0, packed_batch.size))
            packed = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, packed_batch])
            yield pa.RecordBatch.from_arrays([packed], schema=column)


def unpack(packed_batches: Iterable[pa.Buffer], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Returns the rows in packed batches, without copying the buffers."""
    schema = arrow_schema(rows)
    for packed_batch in packed_batches:
        yield pa.ipc.read_record_batch(packed_batch, schema)


def packed_batches_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Returns the packed batches in the Arrow batches that Spark passes for a packed frame."""
    for batch in batches:
        for packed_batch in batch.column(0):
            if packed_batch.is_valid:
                yield packed_batch.as_buffer()


def _no_batches(result: object) -> InvalidRecordError:
    return InvalidRecordError(
        f"the function of map_in_read returned a {type(result).__name__}; expected an iterable of "
        "pyarrow.RecordBatch.",
        fix="yield record batches; for a table, yield from table.to_batches().",
    )


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with its columns in the order and types of the schema."""
    if batch.schema.equals(schema):
        return batch
    if sorted(batch.schema.names) != sorted(schema.names):
        raise InvalidRecordError(
            "the function of map_in_read returned a batch with the columns "
            f"{', '.join(batch.schema.names)}; expected the columns of its schema, "
            f"{', '.join(schema.names)}.",
            fix="pass map_in_read the schema of the batches that the function returns.",
        )
    columns = []
    for field in schema:
        found = batch.column(field.name)
        try:
            columns.append(found if found.type.equals(field.type) else found.cast(field.type))
        except pa.ArrowException as error:
            raise InvalidRecordError(
                f"the function of map_in_read returned column {field.name!r} with type {found.type}, which "
                f"cannot be cast to {field.type}, its type in the schema: {error}.",
                fix="cast the column in the function, or correct the schema.",
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
