"""Encodes default values, which schemas write as JSON, in Avro's binary encoding."""

from __future__ import annotations

import struct
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro.schema import Type

_LIMITS = {"int": 1 << 31, "long": 1 << 63}


def encode_default(found: Type, value: Any, path: str) -> bytes:
    """Returns the encoding of a default value.

    Raises:
        InvalidSchemaError: if the value does not have the type of its field.
    """
    encoded = _encode(found, value)
    if encoded is None:
        raise InvalidSchemaError(
            f"field {path.lstrip('.')} has default {value!r}, which is not of type {found}",
            fix="correct the default in the schema",
        )
    return encoded


def varint(number: int) -> bytes:
    """Returns the zigzag encoding of an int or a long."""
    bits = number << 1 if number >= 0 else ((-number) << 1) - 1
    encoded = bytearray()
    while bits >= 0x80:
        encoded.append(bits & 0x7F | 0x80)
        bits >>= 7
    encoded.append(bits)
    return bytes(encoded)


def _encode(found: Type, value: Any) -> bytes | None:
    kind = found.kind
    if kind == "union":
        return _encode_union(found, value)
    if kind == "null":
        return b"" if value is None else None
    if kind == "boolean":
        return bytes([value]) if isinstance(value, bool) else None
    if kind in ("int", "long", "float", "double"):
        return _encode_number(kind, value)
    if kind == "record":
        return _encode_record(found, value)
    if kind == "array":
        if not isinstance(value, list):
            return None
        return _blocks([_encode(found.item, item) for item in value])
    if kind == "map":
        if not isinstance(value, dict):
            return None
        return _blocks([_join([_text(key), _encode(found.item, item)]) for key, item in value.items()])
    if not isinstance(value, str):
        return None
    if kind == "string":
        return _text(value)
    if kind == "enum":
        return varint(found.symbols.index(value)) if value in found.symbols else None
    try:
        plain = value.encode("latin-1")
    except UnicodeEncodeError:
        return None
    if kind == "bytes":
        return varint(len(plain)) + plain
    return plain if len(plain) == found.size else None


def _encode_union(found: Type, value: Any) -> bytes | None:
    for number, branch in enumerate(found.branches):
        encoded = _encode(branch, value)
        if encoded is not None:
            return varint(number) + encoded
    return None


def _encode_number(kind: str, value: Any) -> bytes | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind in ("float", "double"):
        try:
            return struct.pack("<f" if kind == "float" else "<d", value)
        except OverflowError:
            return None
    limit = _LIMITS[kind]
    return varint(value) if isinstance(value, int) and -limit <= value < limit else None


def _encode_record(found: Type, value: Any) -> bytes | None:
    if not isinstance(value, dict):
        return None
    parts: list[bytes | None] = []
    for one in found.fields:
        if one.name in value:
            parts.append(_encode(one.type, value[one.name]))
        else:
            parts.append(_encode(one.type, one.default) if one.has_default else None)
    return _join(parts)


def _text(value: str) -> bytes | None:
    try:
        plain = value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can write
        return None
    return varint(len(plain)) + plain


def _blocks(parts: list[bytes | None]) -> bytes | None:
    joined = _join(parts)
    if joined is None or not parts:
        return None if joined is None else b"\0"
    return varint(len(parts)) + joined + b"\0"


def _join(parts: list[bytes | None]) -> bytes | None:
    known = [part for part in parts if part is not None]
    return b"".join(known) if len(known) == len(parts) else None
