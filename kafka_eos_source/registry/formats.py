"""Chooses the codec of a schema's format. Codecs are imported on first use: their libraries are extras."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast, get_args

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema, SchemaFormat

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
        message: full name of the message type in a Protobuf schema; None = its first.
    """
    codec = _codec(schema.format)
    found = codec.arrow_type(schema, message) if schema.format == "PROTOBUF" else codec.arrow_type(schema)
    return cast(pa.DataType, found)


def decoder(writer: Schema, path: tuple[int, ...], reader: Schema | None, message: str | None) -> Decoder:
    """Returns the decoder of messages of a writer schema.

    Args:
        writer: the schema of the messages.
        path: path of the message type in the writer's file; for Protobuf.
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
        message: full name of the message type in a Protobuf schema; None = its first.
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
