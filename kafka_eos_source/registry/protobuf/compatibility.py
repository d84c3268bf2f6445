"""Checks that messages of one schema can be read with another without changing values."""

from __future__ import annotations

from typing import Any

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import inside

_VARINTS = {8: 1, 14: 32, 5: 32, 13: 33, 3: 64, 4: 65}
#: Kinds of encodings between which Protobuf converts: FieldDescriptor.TYPE_… → family and bits.
_FAMILIES = {
    **{kind: ("varint", bits) for kind, bits in _VARINTS.items()},
    17: ("zigzag", 32),
    18: ("zigzag", 64),
    15: ("fixed32", 32),
    7: ("fixed32", 33),
    16: ("fixed64", 64),
    6: ("fixed64", 65),
    2: ("float", 32),
    1: ("double", 64),
    9: ("bytes", 1),
    12: ("bytes", 2),
    11: ("message", 0),
    10: ("group", 0),
}
_NAMES = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    9: "string",
    10: "group",
    11: "message",
    12: "bytes",
    13: "uint32",
    14: "enum",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}


def check_readable(writer: Any, reader: Any) -> None:
    """Checks that each field of a writer's message, which the reader's message has too, keeps its value.

    Raises:
        InvalidSchemaError: if the reader would skip or change values. It names the field and both types.
    """
    seen = {(writer.full_name, reader.full_name)}
    waiting = [(writer, reader, "")]
    while waiting:
        written, read, path = waiting.pop()
        for field in written.fields:
            other = read.fields_by_number.get(field.number)
            if other is None:
                continue
            place = inside(path, f".{other.name}").lstrip(".")
            if not _fits(field, other):
                raise InvalidSchemaError(
                    f"field {place!r} (number {field.number}): the writer has {describe(field)}, "
                    f"the reader has {describe(other)}, and Protobuf does not convert these without loss",
                    fix="give the changed field a new number, or read with a schema that has the writer's "
                    "type",
                )
            if field.message_type is not None and other.message_type is not None:
                pair = (field.message_type.full_name, other.message_type.full_name)
                if pair not in seen:
                    seen.add(pair)
                    waiting.append((field.message_type, other.message_type, place))


def _fits(writer: Any, reader: Any) -> bool:
    written, bits = _FAMILIES[writer.type]
    read, room = _FAMILIES[reader.type]
    if written != read or bits > room or (bits, room) in ((32, 33), (64, 65), (32, 65)):
        return False
    if writer.is_repeated and not reader.is_repeated:
        return False
    if writer.message_type is not None:
        entries = [each.message_type.GetOptions().map_entry for each in (writer, reader)]
        return bool(entries[0] == entries[1])
    return True


def describe(field: Any) -> str:
    """Returns the type of a field as a schema writes it."""
    name = field.message_type.full_name if field.message_type is not None else _NAMES[field.type]
    return f"repeated {name}" if field.is_repeated else name
