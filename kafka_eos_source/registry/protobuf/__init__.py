"""Decodes and encodes Protobuf messages whose schema lives in a Schema Registry."""

from kafka_eos_source.registry.protobuf.codecs import arrow_type, decoder, message_path

__all__ = ["arrow_type", "decoder", "message_path"]
