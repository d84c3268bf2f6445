"""The fields of a Protobuf message as a tree with Arrow types, and the .proto file for an Arrow type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa

from kafka_eos_source.documents.converted import MAX_DEPTH, MAX_FIELDS, inside
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema, is_list

#: The field of a message without fields, because Spark has no empty structs. Spark uses this name, too.
EMPTY_FIELD = "__dummy_field_in_empty_struct"


class Kind(IntEnum):
    """How a value is encoded. The numbers are those of native/protobuf.c."""

    BOOL = 1
    INT32 = 2
    SINT32 = 3
    UINT32 = 4
    INT64 = 5
    SINT64 = 6
    UINT64 = 7
    FIXED32 = 8
    SFIXED32 = 9
    FLOAT = 10
    FIXED64 = 11
    SFIXED64 = 12
    DOUBLE = 13
    ENUM = 14
    STRING = 15
    BYTES = 16
    MESSAGE = 17
    GROUP = 18
    TIMESTAMP = 19
    DURATION = 20
    RAW = 21


#: FieldDescriptor.TYPE_… → kind.
KINDS = {
    1: Kind.DOUBLE,
    2: Kind.FLOAT,
    3: Kind.INT64,
    4: Kind.UINT64,
    5: Kind.INT32,
    6: Kind.FIXED64,
    7: Kind.FIXED32,
    8: Kind.BOOL,
    9: Kind.STRING,
    10: Kind.GROUP,
    11: Kind.MESSAGE,
    12: Kind.BYTES,
    13: Kind.UINT32,
    14: Kind.ENUM,
    15: Kind.SFIXED32,
    16: Kind.SFIXED64,
    17: Kind.SINT32,
    18: Kind.SINT64,
}

SCALARS = {
    Kind.BOOL: pa.bool_(),
    Kind.INT32: pa.int32(),
    Kind.SINT32: pa.int32(),
    Kind.UINT32: pa.int64(),
    Kind.INT64: pa.int64(),
    Kind.SINT64: pa.int64(),
    Kind.UINT64: pa.decimal128(20, 0),
    Kind.FIXED32: pa.int64(),
    Kind.SFIXED32: pa.int32(),
    Kind.FLOAT: pa.float32(),
    Kind.FIXED64: pa.decimal128(20, 0),
    Kind.SFIXED64: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.ENUM: pa.string(),
    Kind.STRING: pa.string(),
    Kind.BYTES: pa.binary(),
    Kind.TIMESTAMP: pa.timestamp("us", "UTC"),
    Kind.DURATION: pa.duration("us"),
    Kind.RAW: pa.string(),
}

_WELL_KNOWN = {
    "google.protobuf.Timestamp": Kind.TIMESTAMP,
    "google.protobuf.Duration": Kind.DURATION,
    "google.protobuf.Struct": Kind.RAW,
    "google.protobuf.Value": Kind.RAW,
    "google.protobuf.ListValue": Kind.RAW,
}

_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)


@dataclass(frozen=True)
class Field:
    """A field at one place of the tree.

    Attributes:
        descriptor: Google's descriptor.
        path: names of the fields from the root to this one, joined by dots.
        kind: how a value is encoded.
        is_map: whether it is a map; `message` is then the type of its entries.
        is_wrapper: whether it is a google.protobuf.…Value, which becomes a nullable scalar.
        nullable: whether it is null if the message does not contain it.
        default: what it is then otherwise.
        oneof: name of the oneof of which it is a member.
        message: the fields of a message.
    """

    descriptor: Any
    path: str
    kind: Kind
    is_repeated: bool
    is_map: bool
    is_wrapper: bool
    is_required: bool
    nullable: bool
    default: Any
    oneof: str | None
    message: Message | None

    @property
    def name(self) -> str:
        """The name of the field, and of its column."""
        name: str = self.descriptor.name
        return name

    @property
    def number(self) -> int:
        """The number of the field on the wire."""
        number: int = self.descriptor.number
        return number

    @property
    def is_closed_enum(self) -> bool:
        """Whether a number that the enum does not have counts as an unknown field."""
        return self.kind is Kind.ENUM and self.descriptor.enum_type.is_closed

    @property
    def element_type(self) -> pa.DataType:
        """The type of one element of a repeated field, and of the field itself if it is not repeated."""
        if self.message is None:
            return SCALARS[self.kind]
        if self.is_wrapper:
            return self.message.fields[0].arrow_type
        return self.message.arrow_type

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column."""
        if self.is_map and self.message is not None:
            key, value = self.message.fields
            return pa.map_(key.arrow_type, value.arrow_type)
        return pa.list_(self.element_type) if self.is_repeated else self.element_type


@dataclass(frozen=True)
class Message:
    """A message at one place of the tree, with its fields in the order of the schema."""

    descriptor: Any
    fields: tuple[Field, ...]

    @property
    def arrow_type(self) -> pa.StructType:
        """The struct with a column per field."""
        if not self.fields:
            return pa.struct([(EMPTY_FIELD, pa.string())])
        return pa.struct([(field.name, field.arrow_type) for field in self.fields])


def build_tree(descriptor: Any) -> Message:
    """Returns the tree of a message.

    Raises:
        InvalidSchemaError: if the message contains itself, has too many fields, or is nested too deeply.
    """
    return _message(descriptor, "", (), [0])


def walk(message: Message) -> Iterator[Field]:
    """Yields all fields of a tree, each before those inside it."""
    for field in message.fields:
        yield field
        if field.message is not None:
            yield from walk(field.message)


def _message(descriptor: Any, path: str, outer: tuple[str, ...], count: list[int]) -> Message:
    if descriptor.full_name in outer:
        raise InvalidSchemaError(
            f"field {path!r} of message {outer[0]}: the message {descriptor.full_name} contains itself, "
            "and a column cannot have a recursive type",
            fix="read the value as binary and decode it in a function of your own",
        )
    count[0] += len(descriptor.fields)
    if count[0] > MAX_FIELDS:
        raise InvalidSchemaError(
            f"message {outer[0] if outer else descriptor.full_name} has more than {MAX_FIELDS:,} fields, "
            "including those of nested messages",
            fix="read the value as binary and decode it in a function of your own",
        )
    if len(outer) >= MAX_DEPTH:
        raise InvalidSchemaError(
            f"field {path!r} of message {outer[0]}: messages are nested more than {MAX_DEPTH} levels deep",
            fix="read the value as binary and decode it in a function of your own",
        )
    around = (*outer, descriptor.full_name)
    is_entry = descriptor.GetOptions().map_entry
    fields = tuple(
        _field(each, inside(path, f".{each.name}").lstrip("."), around, is_entry, count)
        for each in descriptor.fields
    )
    return Message(descriptor, fields)


def _field(field: Any, path: str, outer: tuple[str, ...], in_entry: bool, count: list[int]) -> Field:
    kind = KINDS[field.type]
    message, is_map, is_wrapper = None, False, False
    if kind in (Kind.MESSAGE, Kind.GROUP):
        name = field.message_type.full_name
        is_map = bool(field.message_type.GetOptions().map_entry)
        is_wrapper = kind is Kind.MESSAGE and name in _WRAPPERS
        if kind is Kind.MESSAGE and name in _WELL_KNOWN:
            kind = _WELL_KNOWN[name]
        else:
            message = _message(field.message_type, path, outer, count)
    oneof = field.containing_oneof
    default = None
    if message is None and kind not in (Kind.TIMESTAMP, Kind.DURATION, Kind.RAW) and not field.is_repeated:
        default = field.default_value
    explicit_default = bool(field.has_default_value) and oneof is None
    is_required = bool(field.is_required)
    nullable = not in_entry and not field.is_repeated and field.has_presence
    nullable = nullable and (is_required or not explicit_default)
    return Field(
        field,
        path,
        kind,
        is_repeated=field.is_repeated,
        is_map=is_map,
        is_wrapper=is_wrapper,
        is_required=is_required,
        nullable=nullable,
        default=default,
        oneof=oneof.name if oneof is not None else None,
        message=message,
    )


# -- values and errors that are converted in Python ----------------------------------------------


class UnfitError(ValueError):
    """A value does not fit the type of its column. The text names the field and the reason."""


def json_text(field: Field, payload: bytes) -> str:
    """Returns a Struct, Value or ListValue as JSON text with sorted keys.

    Raises:
        UnfitError: if it is malformed, or has a number that JSON does not have.
    """
    from google.protobuf import json_format, message_factory
    from google.protobuf.message import DecodeError

    try:
        message = message_factory.GetMessageClass(field.descriptor.message_type).FromString(payload)
        plain = _plain(message)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (DecodeError, ValueError, json_format.Error, RecursionError) as failure:
        name = field.descriptor.message_type.full_name
        raise UnfitError(f"field {field.path}: the {name} is not valid JSON: {failure}") from failure


def _plain(message: Any) -> Any:
    from google.protobuf import json_format

    return json_format.MessageToDict(message)


def enum_name(field: Field, number: int) -> str:
    """Returns the name of an enum's number; the number itself if an open enum does not have it."""
    value = field.descriptor.enum_type.values_by_number.get(number)
    return str(number) if value is None else str(value.name)


def time_text(field: Field, seconds: int) -> str:
    """Describes a Timestamp or Duration that Protobuf does not allow."""
    if field.descriptor.message_type.full_name.endswith("Timestamp"):
        return (
            f"field {field.path}: the Timestamp with {seconds} seconds is not between the years 1 and 9999, "
            "or its nanos are not between 0 and 999,999,999"
        )
    return (
        f"field {field.path}: the Duration with {seconds} seconds is longer than 10,000 years, "
        "or its seconds and nanos differ in sign"
    )


# -- writing a .proto file -----------------------------------------------------------------------

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
    body = "\n".join(_message_lines(message, arrow_type, "", imports))
    head = ['syntax = "proto3";']
    head += [f"package {package};"] if package else []
    head += [f'import "google/protobuf/{each}.proto";' for each in sorted(imports)]
    return Schema("PROTOBUF", "\n".join(head) + "\n\n" + body + "\n")


def _message_lines(name: str, struct: pa.StructType, path: str, imports: set[str]) -> list[str]:
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
            nested += _message_lines(inner_name, inner, inside, imports)
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
    if is_list(arrow_type):
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
    if is_list(arrow_type) or _types.is_map(arrow_type):
        raise _unsupported(arrow_type, path, "put the inner array or map into a struct")
    raise _unsupported(arrow_type, path, "cast the column to string")


def _unsupported(arrow_type: pa.DataType, path: str, fix: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"column {path!r} has the type {arrow_type}, which Protobuf does not have", fix=fix
    )


def _inner_struct(arrow_type: pa.DataType) -> pa.StructType | None:
    if _types.is_map(arrow_type):
        arrow_type = arrow_type.item_type
    elif is_list(arrow_type):
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
