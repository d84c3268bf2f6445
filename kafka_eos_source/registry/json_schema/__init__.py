"""Decodes and encodes JSON documents whose JSON Schema lives in a Schema Registry."""

from kafka_eos_source.registry.json_schema.codecs import arrow_type, decoder, encoder, schema_for

__all__ = ["arrow_type", "decoder", "encoder", "schema_for"]
