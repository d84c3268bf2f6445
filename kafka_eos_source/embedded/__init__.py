"""A real Kafka on this machine, from Kafka's own jars: for trying things out, and for tests."""

from kafka_eos_source.embedded.cluster import EmbeddedKafka

__all__ = ["EmbeddedKafka"]
