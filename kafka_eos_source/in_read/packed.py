"""Rows in parcels: many rows of a frame in one of Spark's, which hands it on without looking into it.

Spark turns each row from Arrow into a row of its own and back, between a Python source and a Python sink.
Rows that nothing in between looks at are spared that: a parcel is a record batch of Arrow IPC, without its
schema, in the column `PACKED`; the column's metadata says which rows they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.spark.schema import arrow_schema

#: The column of parcels.
PACKED = "__kafka_eos_rows"

#: Where its metadata has the rows' schema, as Spark's JSON.
_SCHEMA = "kafka_eos.rows"

#: Bytes of rows in a parcel, about: Spark holds one, and hands a few at a time to Python.
PARCEL_BYTES = 2 << 20

#: Where a parcel begins and ends in its column: Arrow's offsets.
_OFFSETS = struct.Struct("=2i")

_FIX = "write the frame as map_in_read gave it: what is to be done with its rows goes into the function."


def packed_schema(rows: StructType) -> StructType:
    """Of a frame whose rows, of schema ``rows``, are in parcels."""
    return StructType([StructField(PACKED, BinaryType(), metadata={_SCHEMA: json.dumps(rows.jsonValue())})])


def packed_rows(schema: StructType) -> StructType | None:
    """The schema of the rows in a frame's parcels; None = it has rows as they are.

    Raises:
        InvalidSchemaError: there are other columns beside the parcels, or it is not known what is in them.
    """
    if PACKED not in schema.names:
        return None
    if schema.names != [PACKED]:
        others = ", ".join(repr(each) for each in schema.names if each != PACKED)
        raise InvalidSchemaError(
            f"the frame has columns ({others}) beside {PACKED!r}, which has whole rows in it.", fix=_FIX
        )
    written = (schema.fields[0].metadata or {}).get(_SCHEMA)
    if written is None:
        raise InvalidSchemaError(
            f"column {PACKED!r} has lost its metadata, which tells what is in it.", fix=_FIX
        )
    return StructType.fromJson(json.loads(written))


def pack(batches: Iterable[pa.RecordBatch], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Parcels of rows, each in an Arrow batch of its own: Spark can have it before the next is made.

    Args:
        batches: what a function gave: columns by name, of types that can be cast to those of ``rows``.
        rows: the schema that was promised.

    Raises:
        InvalidRecordError: there are no batches, one has other columns, or a value does not fit.
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
        at_once = max(1, PARCEL_BYTES * fitted.num_rows // max(1, fitted.nbytes))
        for start in range(0, fitted.num_rows, at_once):
            parcel = fitted.slice(start, at_once).serialize()
            offsets = pa.py_buffer(_OFFSETS.pack(0, parcel.size))
            packed = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, parcel])
            yield pa.RecordBatch.from_arrays([packed], schema=column)


def unpack(parcels: Iterable[pa.Buffer], rows: StructType) -> Iterator[pa.RecordBatch]:
    """The rows that were packed. Buffers are not copied."""
    schema = arrow_schema(rows)
    for parcel in parcels:
        yield pa.ipc.read_record_batch(parcel, schema)


def parcels_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """The parcels in Spark's Arrow batches of a packed frame."""
    for batch in batches:
        for parcel in batch.column(0):
            if parcel.is_valid:
                yield parcel.as_buffer()


def _no_batches(given: object) -> InvalidRecordError:
    return InvalidRecordError(
        f"the function of map_in_read gave a {type(given).__name__}; expected an iterable of "
        "pyarrow.RecordBatch.",
        fix="yield record batches; of a table, table.to_batches().",
    )


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    if sorted(batch.schema.names) != sorted(schema.names):
        raise InvalidRecordError(
            f"the function of map_in_read gave a batch with the columns {', '.join(batch.schema.names)}; its "
            f"schema has {', '.join(schema.names)}.",
            fix="give map_in_read the schema of what the function gives.",
        )
    columns = []
    for field in schema:
        found = batch.column(field.name)
        try:
            columns.append(found if found.type.equals(field.type) else found.cast(field.type))
        except pa.ArrowException as error:
            raise InvalidRecordError(
                f"column {field.name!r} of what the function of map_in_read gave has type {found.type}, "
                f"which does not fit {field.type}, its type in the schema: {error}.",
                fix="cast it in the function, or correct the schema.",
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
