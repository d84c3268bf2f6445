"""A real Kafka cluster on this machine, for development and tests."""

from kafka_eos_source.embedded.cluster import EmbeddedKafka

__all__ = ["EmbeddedKafka"]
