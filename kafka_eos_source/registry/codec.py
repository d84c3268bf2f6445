"""What a codec of one schema format offers, and the choice of the codec.

A codec converts a column of bytes to a column of values, or back. Confluent's wire format puts a frame
before each payload: a zero byte, the schema id (4 bytes, big endian), and, for Protobuf only, the path of
the message inside its file. Codecs do not know the frame. A decoder skips `start` bytes of each message; an
encoder puts `prefix` before each payload. Callers group messages by frame, because all messages of one
frame share one writer schema.

A record names its writer schema, so it can name any schema that anybody registered. Codecs therefore compile
schemas within the limits of `documents.converted`, in time that is linear in what they read, and refuse
everything else with `InvalidSchemaError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, Protocol, cast, get_args

import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError

SchemaFormat = Literal["AVRO", "PROTOBUF", "JSON"]


@dataclass(frozen=True)
class Reference:
    """A schema that another schema imports.

    Attributes:
        name: The name under which it is imported: mostly an Avro full name, or the path of a .proto file.
        schema: The schema.
        origin: Where the registry has it, for errors.
    """

    name: str
    schema: Schema
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, eq=False)
class Schema:
    """The text of a schema with everything that it refers to. Schemas with equal contents are equal.

    Schemas may share their references. Nothing may walk through them as through a tree, which can be
    exponentially larger: use `digest` and `imports`.

    Attributes:
        format: How records of this schema are encoded.
        text: The schema as the registry stores it.
        references: The imported schemas, themselves with their references.
    """

    format: SchemaFormat
    text: str
    references: tuple[Reference, ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the schema and of everything that it imports."""
        made = hashlib.sha256()
        for part in (self.format, self.text, *(each.name for each in self.references)):
            encoded = part.encode("utf-8", "surrogatepass")
            made.update(b"%d:" % len(encoded) + encoded)
        for each in self.references:
            made.update(each.schema.digest)
        return made.digest()

    def __eq__(self, other: object) -> bool:
        """Compares the contents."""
        return isinstance(other, Schema) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        """Returns a hash of the contents."""
        return hash(self.digest)

    def imports(self) -> Iterator[Reference]:
        """Yields everything that the schema imports, each name and schema once, after its own imports."""
        yield from _imports(self, set())


def _imports(schema: Schema, seen: set[tuple[str, bytes]]) -> Iterator[Reference]:
    for each in schema.references:
        key = (each.name, each.schema.digest)
        if key not in seen:
            seen.add(key)
            yield from _imports(each.schema, seen)
            yield each


def zigzag(number: int) -> bytes:
    """Returns a number as a zigzag varint, as Avro and Confluent's frames write it."""
    return varint(number << 1 if number >= 0 else ((-number) << 1) - 1)


def varint(bits: int) -> bytes:
    """Returns a number that is not negative as a varint, as Protobuf and Glue's frames write it."""
    encoded = bytearray()
    while bits >= 0x80:
        encoded.append(bits & 0x7F | 0x80)
        bits >>= 7
    return bytes([*encoded, bits])


def decoded_type(arrow_type: pa.DataType) -> pa.DataType:
    """Returns the type of the values of a dictionary; other types as they are."""
    return arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type


def is_list(arrow_type: pa.DataType) -> bool:
    """Returns whether values of the type are arrays."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(arrow_type) for is_kind in kinds)


class Decoder(Protocol):
    """Turns the payloads of one writer schema into a column of one Arrow type."""

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of decoded values, which the reader schema decides."""
        ...

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (binary), each of which begins with `start` bytes that are not payload.

        The column that it makes takes at most `most_bytes`, so it may stop after some of the messages.
        """
        ...


class Encoder(Protocol):
    """Turns a column of values into the payloads of one schema."""

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values, and puts `prefix` before each. The values of the result are binary.

        The column that it makes takes at most `most_bytes`, so it may stop after some of the values.
        """
        ...


# -- choosing a codec ----------------------------------------------------------------------------

FORMATS: tuple[SchemaFormat, ...] = get_args(SchemaFormat)

#: Package and extra of each format.
_CODECS = {
    "AVRO": ("avro", "avro"),
    "PROTOBUF": ("protobuf", "protobuf"),
    "JSON": ("json_schema", "jsonschema"),
}


def schema_format(name: str) -> SchemaFormat:
    """Returns a format by its name, in any letter case.

    Raises:
        InvalidSchemaError: if there is no such format.
    """
    if name.upper() not in FORMATS:
        raise InvalidSchemaError(
            f"the schema format {name!r} is unknown; expected one of {', '.join(FORMATS)}.",
            fix="use the name that the registry uses.",
        )
    return cast(SchemaFormat, name.upper())


def arrow_type(schema: Schema, message: str | None) -> pa.DataType:
    """Returns the type of the values of a schema.

    Args:
        schema: the schema.
        message: full name of the message type in a Protobuf schema; None = its only one at the top level.
    """
    codec = _codec(schema.format)
    found = codec.arrow_type(schema, message) if schema.format == "PROTOBUF" else codec.arrow_type(schema)
    return cast(pa.DataType, found)


def decoder(
    writer: Schema, path: tuple[int, ...] | int, reader: Schema | None, message: str | None
) -> Decoder:
    """Returns the decoder of messages of a writer schema.

    Args:
        writer: the schema of the messages.
        path: path of the message type in the writer's file, or its number (`message_number`); for Protobuf.
        reader: the schema of the result, of the same format; None = the writer's.
        message: full name of the message type in the reader's file; for Protobuf.
    """
    codec = _codec(writer.format)
    if writer.format == "PROTOBUF":
        return cast(Decoder, codec.decoder(writer, path, reader=reader, message=message))
    return cast(Decoder, codec.decoder(writer, reader=reader))


def encoder(schema: Schema, values_type: pa.DataType, message: str | None) -> Encoder:
    """Returns the encoder of values of a type.

    Args:
        schema: the schema of the messages.
        values_type: the type of the values.
        message: full name of the message type in a Protobuf schema; None = its only one at the top level.
    """
    codec = _codec(schema.format)
    if schema.format == "PROTOBUF":
        return cast(Encoder, codec.encoder(schema, values_type, message=message))
    return cast(Encoder, codec.encoder(schema, values_type))


def message_path(schema: Schema, message: str | None) -> tuple[int, ...]:
    """Returns the path that frames of this schema contain: empty except for Protobuf."""
    if schema.format != "PROTOBUF":
        return ()
    return tuple(_codec(schema.format).message_path(schema, message))


def message_number(schema: Schema, message: str | None) -> int:
    """Returns the number of a message type of a Protobuf schema that Glue's frames contain."""
    return int(_codec(schema.format).message_number(schema, message))


def schema_for(values_type: pa.DataType, kind: SchemaFormat, name: str) -> Schema:
    """Returns a schema in which values of an Arrow type can be written.

    Args:
        values_type: the type of the values.
        kind: format of the schema.
        name: full name of the record or message type.
    """
    return cast(Schema, _codec(kind).schema_for(values_type, name))


def _codec(kind: str) -> Any:
    package, extra = _CODECS[kind]
    try:
        return import_module(f"kafka_eos_source.registry.{package}")
    except ImportError as error:
        raise InvalidOptionError(
            f"a library for schemas of the format {kind} is not installed: {error}.",
            fix=f"pip install 'kafka-eos-source[{extra}]' on the driver and on every executor.",
        ) from error
