"""Decodes and encodes Protobuf messages whose schema lives in a Schema Registry."""

from kafka_eos_source.registry.protobuf.codecs import arrow_type, decoder, encoder, message_path
from kafka_eos_source.registry.protobuf.schemas import schema_for

__all__ = ["arrow_type", "decoder", "encoder", "message_path", "schema_for"]
