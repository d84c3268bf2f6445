"""Asks the cluster what tasks need to know before they encode rows as Kafka's record batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.sealed_column import SealingPlan

_log = logging.getLogger(__name__)

#: Plans are made again after this time, in seconds: topics grow.
_VALID_SECONDS = 60.0
#: A micro-batch does not wait longer for a plan, in ms; its tasks then stage rows.
_WAIT_MS = 3_000

_known: dict[str, tuple[float, SealingPlan | None]] = {}


def sealing_plan(kafka: Mapping[str, str], topic: str | None) -> SealingPlan | None:
    """Returns how the tasks of a micro-batch encode their rows; None if they stage rows.

    They stage rows if each row names its topic, or if the cluster does not say now what the topic accepts.
    The commit reports what is wrong with the topic.

    Args:
        kafka: librdkafka properties of the write.
        topic: option ``topic``; None = each row names its topic.
    """
    if topic is None:
        return None
    key = repr((topic, sorted(kafka.items())))
    at, known = _known.get(key, (0.0, None))
    if key not in _known or time.monotonic() - at > _VALID_SECONDS:
        known = _ask(kafka, topic)
        _known[key] = time.monotonic(), known
    return known


def _ask(kafka: Mapping[str, str], topic: str) -> SealingPlan | None:
    deadline = Deadline.after_ms(_WAIT_MS)
    try:
        with TopicAdmin(kafka) as admin:
            shape = admin.shape(topic, deadline)
            if shape is None:
                return None
            limits = admin.config(topic, deadline)
            # a batch must also fit into a segment of the log
            topic_bytes = min(int(limits["max.message.bytes"]), int(limits["segment.bytes"]))
    except (KafkaEosError, KeyError, ValueError) as error:  # some Kafka-compatible brokers omit properties
        _log.info("tasks stage rows instead of record batches: %s", error)
        return None
    config = producer_config(kafka)
    compression = str(config.get("compression.type", "none"))
    level = config.get("compression.level")
    return SealingPlan(
        topic,
        shape.partitions,
        topic_bytes,
        max(1, min(int(config["batch.size"]), topic_bytes)),
        int(config.get("message.max.bytes", 1_000_000)),
        compression,
        None if level in (None, "-1", -1) else int(str(level)),
        str(config["partitioner"]),
    )
