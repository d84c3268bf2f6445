"""Converts Spark schemas to Arrow schemas, the same way for every version of PySpark."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidSchemaError

_ARROW_TYPES: dict[type[t.DataType], pa.DataType] = {
    t.BooleanType: pa.bool_(),
    t.ByteType: pa.int8(),
    t.ShortType: pa.int16(),
    t.IntegerType: pa.int32(),
    t.LongType: pa.int64(),
    t.FloatType: pa.float32(),
    t.DoubleType: pa.float64(),
    t.StringType: pa.string(),
    t.CharType: pa.string(),
    t.VarcharType: pa.string(),
    t.BinaryType: pa.binary(),
    t.DateType: pa.date32(),
    t.TimestampNTZType: pa.timestamp("us"),
    t.DayTimeIntervalType: pa.duration("us"),
    t.NullType: pa.null(),
}


def arrow_schema(schema: t.StructType, timezone: str = "UTC") -> pa.Schema:
    """Returns the Arrow schema of a frame with this Spark schema.

    Args:
        schema: Spark schema of the frame.
        timezone: time zone of timestamps, which have microseconds.

    Raises:
        InvalidSchemaError: if the operator does not support the type of a column.
    """
    return pa.schema([_field(field, timezone) for field in schema.fields])


def _field(field: t.StructField, timezone: str) -> pa.Field:
    return pa.field(field.name, _type(field.dataType, field.name, timezone), field.nullable)


def _type(type_: t.DataType, name: str, timezone: str) -> pa.DataType:
    if isinstance(type_, t.TimestampType):
        return pa.timestamp("us", timezone)
    if type(type_) in _ARROW_TYPES:
        return _ARROW_TYPES[type(type_)]
    if isinstance(type_, t.DecimalType):
        return pa.decimal128(type_.precision, type_.scale)
    if isinstance(type_, t.StructType):
        return pa.struct([_field(field, timezone) for field in type_.fields])
    if isinstance(type_, t.ArrayType):
        return pa.list_(_type(type_.elementType, name, timezone))
    if isinstance(type_, t.MapType):
        return pa.map_(_type(type_.keyType, name, timezone), _type(type_.valueType, name, timezone))
    raise InvalidSchemaError(
        f"column {name!r} has type {type_.simpleString()}, which stateful operators do not support.",
        fix="cast the column to a supported type before the operator, or in the output schema.",
    )
