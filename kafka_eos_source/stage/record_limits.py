"""Asks the cluster which records a topic accepts, for tasks that set invalid rows aside."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kafka_eos_source.errors import AuthorizationError, InvalidOptionError
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.row_rules import RecordLimits

_log = logging.getLogger(__name__)

#: librdkafka's default of ``message.max.bytes``.
CLIENT_BYTES = 1_000_000
#: A dead letter has up to 8 KiB of headers.
_LEAST_BYTES = 16_384
_WAIT_MS = 60_000
#: Timestamps of Spark are before the year 10,000, so that such a limit excludes none.
_NO_LIMIT_MS = 1 << 50
#: Limits are asked for again after this time, in seconds: topics grow.
_VALID_SECONDS = 60.0

_known: dict[str, tuple[float, RecordLimits]] = {}


def record_limits(kafka: Mapping[str, str], topic: str | None, dead_letter_topic: str | None) -> RecordLimits:
    """Returns the limits of records for a write.

    The size is the smallest of the client's limit (``kafka.message.max.bytes``) and ``max.message.bytes`` of
    both topics. It applies to a record without compression.

    Args:
        kafka: librdkafka properties of the write.
        topic: option ``topic``; None = each row names its topic, whose limit is not known.
        dead_letter_topic: option ``deadLetter.topic``; None if rows are dropped.

    Raises:
        InvalidOptionError: if the limit leaves no room for the headers of a dead letter.
        UnavailableError: if a topic does not exist, or no broker answers.
    """
    key = repr((topic, dead_letter_topic, sorted(kafka.items())))
    at, known = _known.get(key, (0.0, None))
    if known is None or time.monotonic() - at > _VALID_SECONDS:
        known = _ask(kafka, topic, dead_letter_topic)
        _known[key] = time.monotonic(), known
    return known


def _ask(kafka: Mapping[str, str], topic: str | None, dead_letter_topic: str | None) -> RecordLimits:
    most, partitions = int(kafka.get("message.max.bytes", CLIENT_BYTES)), None
    output: Mapping[str, str] = {}
    deadline = Deadline.after_ms(_WAIT_MS)
    with TopicAdmin(kafka) as admin:
        for name in (each for each in (topic, dead_letter_topic) if each is not None):
            try:
                config = admin.config(name, deadline)
            except AuthorizationError as refused:
                _log.warning("the configuration of topic %r does not limit records: %s", name, refused)
                continue
            most = min(most, int(config["max.message.bytes"]))
            output = config if name == topic else output
        shape = None if topic is None else admin.shape(topic, deadline)
        partitions = None if shape is None else shape.partitions
    if dead_letter_topic is not None and most < _LEAST_BYTES:
        raise InvalidOptionError(
            f"records may have {most:,} bytes, by kafka.message.max.bytes and max.message.bytes of the "
            f"topics; onInvalidRecord=dead-letter needs {_LEAST_BYTES:,}, so that the headers fit.",
            fix="raise the limit.",
        )
    return RecordLimits(
        most,
        partitions,
        needs_key="compact" in output.get("cleanup.policy", ""),
        before_ms=time_limit(output, "message.timestamp.before.max.ms"),
        after_ms=time_limit(output, "message.timestamp.after.max.ms"),
    )


def time_limit(config: Mapping[str, str], name: str) -> int | None:
    """Returns a limit of timestamps in milliseconds; None if the topic accepts any."""
    text = config.get(name, config.get("message.timestamp.difference.max.ms"))  # until Kafka 3.5
    if text is None or config.get("message.timestamp.type") != "CreateTime":
        return None
    limit = int(text)
    return limit if limit < _NO_LIMIT_MS else None
