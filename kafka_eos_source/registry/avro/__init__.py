"""Decodes and encodes Avro records column by column."""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.registry.avro import kernel  # the module, as a function would take its name
from kafka_eos_source.registry.avro.decode import AvroDecoder
from kafka_eos_source.registry.avro.derive import derive
from kafka_eos_source.registry.avro.encode import AvroEncoder
from kafka_eos_source.registry.avro.encode_program import compile_encoder
from kafka_eos_source.registry.avro.resolve import compile_program
from kafka_eos_source.registry.avro.schema import parse
from kafka_eos_source.registry.avro.types import to_arrow
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema


def arrow_type(schema: Schema) -> pa.DataType:
    """Returns the Arrow type of decoded records: the one whose Spark type `from_avro` gives.

    Raises:
        InvalidSchemaError: if the schema is not valid, or no Spark type can hold its records.
    """
    return to_arrow(parse(schema))


def decoder(writer: Schema, reader: Schema | None = None) -> Decoder:
    """Returns a decoder of records that were written with one schema into values of another.

    Args:
        writer: The schema of the records.
        reader: The schema of the values; None = that of the writer.

    Raises:
        InvalidSchemaError: if a schema is not valid, no Spark type can hold the values, or the reader's
            schema cannot read records of the writer's.
    """
    written = parse(writer)
    return AvroDecoder(
        compile_program(written, written if reader is None else parse(reader)), kernel.kernel()
    )


def encoder(schema: Schema, values: pa.DataType) -> Encoder:
    """Returns an encoder of values of an Arrow type.

    Fields are matched by name. A field that the values lack is written with its default, or as null if the
    schema allows it.

    Args:
        schema: The schema of the records.
        values: The type of the column, usually a struct.

    Raises:
        InvalidSchemaError: if the schema is not valid, or cannot take the type. The message names the field,
            both types and the fix.
    """
    return AvroEncoder(compile_encoder(parse(schema), values), kernel.kernel())


def schema_for(values: pa.DataType, name: str = "topLevelRecord") -> Schema:
    """Returns a schema for values of an Arrow type, with the names and types that Spark's `to_avro` uses.

    A field that can be null is a union that begins with null, and has the default null. Thus columns can be
    added and removed later. (Spark puts null second and writes no default.)

    Args:
        values: The type of the column, usually a struct.
        name: The name of the record.

    Raises:
        InvalidSchemaError: if Avro has no such type, or does not accept the name of a field.
    """
    return derive(values, name)
