"""The error for what only librdkafka reads."""

from __future__ import annotations


class NeedsLibrdkafkaError(Exception):
    """A partition has records from before Kafka 0.11, or its leader names a replica to read from instead."""
