"""Decodes and encodes Avro records column by column."""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.registry.avro.decode import AvroDecoder
from kafka_eos_source.registry.avro.resolve import compile_program
from kafka_eos_source.registry.avro.schema import parse
from kafka_eos_source.registry.avro.types import to_arrow
from kafka_eos_source.registry.codec import Decoder, Schema


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
    return AvroDecoder(compile_program(written, written if reader is None else parse(reader)))
