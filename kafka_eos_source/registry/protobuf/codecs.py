"""Makes decoders and encoders of Protobuf schemas."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema
from kafka_eos_source.registry.protobuf.compatibility import check_readable
from kafka_eos_source.registry.protobuf.decode import MessageDecoder
from kafka_eos_source.registry.protobuf.encode import MessageEncoder
from kafka_eos_source.registry.protobuf.files import (
    compile_schema,
    find_message,
    list_messages,
    message_at,
    path_of,
)
from kafka_eos_source.registry.protobuf.kernel import kernel
from kafka_eos_source.registry.protobuf.tree import build_tree


def decoder(
    writer: Schema, message_path: tuple[int, ...], reader: Schema | None = None, message: str | None = None
) -> Decoder:
    """Returns a decoder of the messages that were written with a schema.

    Args:
        writer: the schema with which they were written.
        message_path: the message in that schema, as their frame tells it.
        reader: the schema that decides the type of the column. Fields that the writer does not have are null
            or have their default, and fields that the reader does not have are skipped.
        message: the message of the reader; without it, its only one at the top level.

    Raises:
        InvalidSchemaError: if a schema or the message is not usable, the records are messages of another
            type, or the reader would change values.
    """
    written = message_at(writer, message_path)
    if reader is None:
        if message is not None and message not in (written.full_name, written.name):
            raise InvalidSchemaError(
                f"the records are messages of type {written.full_name}, but {message!r} is expected",
                fix="give a reader schema that says how to read them, or do not name a message",
            )
        found = written
    else:
        found = _message(reader, message)
        if written.name != found.name:  # packages may differ; fields of another type share numbers by chance
            raise InvalidSchemaError(
                f"the records are messages of type {written.full_name}, but {found.full_name} is expected",
                fix="keep records of other types out of the topic, or set them aside with onInvalidRecord",
            )
        check_readable(written, found)
    return MessageDecoder(build_tree(found), kernel())


def encoder(schema: Schema, values: pa.DataType, message: str | None = None) -> Encoder:
    """Returns an encoder of values as messages of a schema; without a name, its only message.

    Raises:
        InvalidSchemaError: if the schema is not usable, or a column does not fit its field.
    """
    return MessageEncoder(build_tree(_message(schema, message)), values, kernel())


def message_path(schema: Schema, message: str | None = None) -> tuple[int, ...]:
    """Returns the path of a message as Confluent's frame stores it; without a name, of the only message."""
    return path_of(_message(schema, message))


def arrow_type(schema: Schema, message: str | None = None) -> pa.StructType:
    """Returns the type of the column that messages of the schema become."""
    return build_tree(_message(schema, message)).arrow_type


def _message(schema: Schema, name: str | None) -> Any:
    if name is not None:
        return find_message(schema, name)
    messages = list_messages(compile_schema(schema))
    outer = [each for each in messages if each.containing_type is None]
    if len(outer) != 1:
        raise InvalidSchemaError(
            f"the schema has {len(outer)} messages at its top level: "
            + ", ".join(each.full_name for each in messages),
            fix="name the message",
        )
    return outer[0]
