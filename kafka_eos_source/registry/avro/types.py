"""Maps Avro types to Arrow types, as Spark's `from_avro` maps them to Spark's types."""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro.schema import Type
from kafka_eos_source.registry.codec import MAX_FIELDS, inside

#: The largest precision of Spark's decimals.
MAX_PRECISION = 38

_PRIMITIVES: dict[str, pa.DataType] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}

#: Spark has no timestamps of nanoseconds: these stay numbers, as in `from_avro`, so that no digit is lost.
_LOGICAL: dict[str, pa.DataType] = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}


def to_arrow(found: Type, path: str = "", around: tuple[Type, ...] = ()) -> pa.DataType:
    """Returns the Arrow type of decoded values. Every field is nullable, as with `from_avro`.

    Raises:
        InvalidSchemaError: if no Spark type can hold the values: a recursive type, a decimal of more than 38
            digits, or a type with more fields than `MAX_FIELDS`.
    """
    if found.places > MAX_FIELDS:
        raise InvalidSchemaError(
            f"{_where(path)} has more than {MAX_FIELDS:,} fields, counting those of a type at each place "
            "where it is used",
            fix="read with a reader schema that leaves out fields",
        )
    if found in around:
        raise InvalidSchemaError(
            f"{_where(path)} has the recursive type {found.name!r}, which no Spark type can express",
            fix="read with a reader schema that leaves out the field that makes the type recursive",
        )
    if found.kind == "record":
        outer = (*around, found)
        return pa.struct(
            [pa.field(f.name, to_arrow(f.type, inside(path, f".{f.name}"), outer)) for f in found.fields]
        )
    if found.kind == "array":
        return pa.list_(to_arrow(found.item, inside(path, "[]"), around))
    if found.kind == "map":
        return pa.map_(pa.string(), to_arrow(found.item, inside(path, "{}"), around))
    if found.kind == "union":
        values = found.values
        if is_struct_of_members(found):
            return pa.struct(
                [
                    pa.field(f"member{number}", to_arrow(value, inside(path, f".member{number}"), around))
                    for number, value in enumerate(values)
                ]
            )
        if len(values) > 1:
            return pa.int64() if {"int", "long"} == {value.kind for value in values} else pa.float64()
        return to_arrow(values[0], path, around) if values else pa.null()
    if found.logical == "decimal":
        if found.precision > MAX_PRECISION:
            raise InvalidSchemaError(
                f"{_where(path)} is a decimal of {found.precision} digits; Spark allows {MAX_PRECISION}",
                fix="read with a reader schema that declares the field without the logical type, as bytes",
            )
        return pa.decimal128(found.precision, found.scale)
    return _LOGICAL.get(found.logical or "", _PRIMITIVES[found.kind])


def is_struct_of_members(union: Type) -> bool:
    """Returns whether the values of a union become a struct with one field per type, as with `from_avro`.

    Unions of one type, of int and long, and of float and double become one number.
    """
    kinds = {value.kind for value in union.values}
    is_number = kinds in ({"int", "long"}, {"float", "double"}) and not any(v.logical for v in union.values)
    return len(union.values) > 1 and not is_number


def _where(path: str) -> str:
    return f"field {path.lstrip('.')}" if path else "the schema"
