"""Writes the .proto file for values of an Arrow type, for registration."""

from __future__ import annotations

import re

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf.tree import EMPTY_FIELD

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_types = pa.types
_SCALARS = {
    pa.bool_(): "bool",
    pa.int8(): "int32",
    pa.int16(): "int32",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.uint8(): "int32",
    pa.uint16(): "int32",
    pa.uint32(): "uint32",
    pa.uint64(): "uint64",
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
    pa.decimal128(20, 0): "uint64",
}
_KEYS = frozenset({"bool", "int32", "int64", "uint32", "uint64", "string"})


def schema_for(arrow_type: pa.DataType, name: str) -> Schema:
    """Returns a proto3 schema whose message has a field per column, numbered in their order.

    Args:
        arrow_type: a struct.
        name: full name of the message, such as "shop.Order".

    Raises:
        InvalidSchemaError: if a column has a name or a type that Protobuf does not have.
    """
    package, _, message = name.rpartition(".")
    if not all(_IDENTIFIER.fullmatch(part) for part in name.split(".")):
        raise InvalidSchemaError(
            f"{name!r} is not a name of a Protobuf message",
            fix="use letters, digits and _, with dots for the package",
        )
    if not _types.is_struct(arrow_type):
        raise InvalidSchemaError(
            f"a Protobuf message needs a struct, not the type {arrow_type}",
            fix="put the columns into a struct(…)",
        )
    imports: set[str] = set()
    body = "\n".join(_message(message, arrow_type, "", imports))
    head = ['syntax = "proto3";']
    head += [f"package {package};"] if package else []
    head += [f'import "google/protobuf/{each}.proto";' for each in sorted(imports)]
    return Schema("PROTOBUF", "\n".join(head) + "\n\n" + body + "\n")


def _message(name: str, struct: pa.StructType, path: str, imports: set[str]) -> list[str]:
    lines, nested, taken = [f"message {name} {{"], [], {field.name for field in struct}
    number = 0
    for column in struct:
        inside = f"{path}.{column.name}".lstrip(".")
        if column.name == EMPTY_FIELD and struct.num_fields == 1:
            continue
        if not _IDENTIFIER.fullmatch(column.name):
            raise InvalidSchemaError(
                f"column {inside!r}: a Protobuf field cannot have this name",
                fix="rename the column to letters, digits and _",
            )
        number += 1
        inner = _inner_struct(column.type)
        inner_name = _free_name(column.name, taken)
        if inner is not None:
            nested += _message(inner_name, inner, inside, imports)
        lines.append(f"  {_type(column.type, inside, inner_name, imports)} {column.name} = {number};")
    lines += [f"  {line}" for line in nested]
    return [*lines, "}"]


def _type(arrow_type: pa.DataType, path: str, inner_name: str, imports: set[str]) -> str:
    """Returns the type of a field with its label. Single scalars are optional, so that nulls remain nulls."""
    if _types.is_map(arrow_type):
        key = _element(arrow_type.key_type, f"{path}.key", inner_name, imports)
        if key not in _KEYS:
            raise _unsupported(arrow_type.key_type, f"{path}.key", "cast the keys to string")
        return f"map<{key}, {_element(arrow_type.item_type, f'{path}.value', inner_name, imports)}>"
    if _is_list(arrow_type):
        return f"repeated {_element(arrow_type.value_type, path, inner_name, imports)}"
    element = _element(arrow_type, path, inner_name, imports)
    is_scalar = element != inner_name and "." not in element
    return f"optional {element}" if is_scalar else element


def _element(arrow_type: pa.DataType, path: str, inner_name: str, imports: set[str]) -> str:
    if _types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if arrow_type in _SCALARS:
        return _SCALARS[arrow_type]
    if _types.is_struct(arrow_type):
        return inner_name
    if _types.is_timestamp(arrow_type) and arrow_type.tz:
        imports.add("timestamp")
        return "google.protobuf.Timestamp"
    if _types.is_duration(arrow_type):
        imports.add("duration")
        return "google.protobuf.Duration"
    if _types.is_timestamp(arrow_type):
        raise _unsupported(arrow_type, path, "cast the column to a timestamp with time zone")
    if _is_list(arrow_type) or _types.is_map(arrow_type):
        raise _unsupported(arrow_type, path, "put the inner array or map into a struct")
    raise _unsupported(arrow_type, path, "cast the column to string")


def _unsupported(arrow_type: pa.DataType, path: str, fix: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"column {path!r} has the type {arrow_type}, which Protobuf does not have", fix=fix
    )


def _is_list(arrow_type: pa.DataType) -> bool:
    is_fixed = _types.is_fixed_size_list(arrow_type)
    return bool(is_fixed or _types.is_list(arrow_type) or _types.is_large_list(arrow_type))


def _inner_struct(arrow_type: pa.DataType) -> pa.StructType | None:
    if _types.is_map(arrow_type):
        arrow_type = arrow_type.item_type
    elif _is_list(arrow_type):
        arrow_type = arrow_type.value_type
    return arrow_type if _types.is_struct(arrow_type) else None


def _free_name(column: str, taken: set[str]) -> str:
    """Returns a name for the message of a column that neither a field nor another message has."""
    name = "".join(part[:1].upper() + part[1:] for part in column.split("_") if part) or "Message"
    if name[0].isdigit():
        name = f"M{name}"
    while name in taken or f"{name}Entry" in taken:
        name += "_"
    taken.add(name)
    return name
