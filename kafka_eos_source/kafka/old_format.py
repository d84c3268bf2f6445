"""The error for records that only librdkafka decodes."""

from __future__ import annotations


class OldFormatError(Exception):
    """A partition has records in a format from before Kafka 0.11, which only librdkafka decodes."""
