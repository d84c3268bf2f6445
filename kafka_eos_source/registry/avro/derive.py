"""Derives an Avro schema from an Arrow type, with the types that Spark's `to_avro` uses."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro.encode_program import plain_type
from kafka_eos_source.registry.codec import Schema

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIMPLE: dict[pa.DataType, Any] = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
}


def derive(found: pa.DataType, name: str) -> Schema:
    """Returns the schema for values of an Arrow type, which is usually a struct."""
    return Schema("AVRO", json.dumps(_type(plain_type(found), name, "", "")))


def _type(found: pa.DataType, name: str, namespace: str, path: str) -> Any:
    inside = f"{namespace}.{name}" if namespace else name
    if found in _SIMPLE:
        return _SIMPLE[found]
    if pa.types.is_timestamp(found):
        return {
            "type": "long",
            "logicalType": "local-timestamp-micros" if found.tz is None else "timestamp-micros",
        }
    if pa.types.is_fixed_size_binary(found):
        return "bytes"
    if pa.types.is_decimal128(found) and 0 <= found.scale <= found.precision:
        size = ((10**found.precision - 1).bit_length() + 8) // 8
        return {
            "type": "fixed",
            "name": f"{inside}.fixed",
            "size": size,
            "logicalType": "decimal",
            "precision": found.precision,
            "scale": found.scale,
        }
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        return {"type": "array", "items": _nullable(found.value_field, name, namespace, f"{path}[]")}
    if pa.types.is_map(found) and found.key_type in (pa.string(), pa.large_string()):
        return {"type": "map", "values": _nullable(found.item_field, name, namespace, f"{path}{{}}")}
    if pa.types.is_struct(found):
        return _record(found, name, namespace, path)
    raise InvalidSchemaError(
        f"{'field ' + path.lstrip('.') if path else 'the column'} has type {found}, which Avro does not have",
        fix="cast or drop the column before it is encoded",
    )


def _record(found: pa.DataType, name: str, namespace: str, path: str) -> Any:
    fields = []
    for each in found:
        inside = f"{path}.{each.name}"
        if not _NAME.fullmatch(each.name):
            raise InvalidSchemaError(
                f"field {inside.lstrip('.')}: {each.name!r} is no name that Avro accepts (letters, digits "
                "and underscores, and no digit first)",
                fix="rename the column before it is encoded",
            )
        one: dict[str, Any] = {
            "name": each.name,
            "type": _nullable(each, each.name, f"{namespace}.{name}" if namespace else name, inside),
        }
        if each.nullable:
            one["default"] = None
        fields.append(one)
    return {
        "type": "record",
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "fields": fields,
    }


def _nullable(found: pa.Field, name: str, namespace: str, path: str) -> Any:
    made = _type(found.type, name, namespace, path)
    return ["null", made] if found.nullable and made != "null" else made
