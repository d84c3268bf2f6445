"""Writes without a transaction: the check of the target, and the guarantee ``at_least_once``."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.meter import highest_partitions

#: Longest wait for the brokers before the first batch.
_CHECK_MS = 60_000

_checked: set[str] = set()
_producers: dict[str, RecordProducer] = {}


def check_target(options: WriteOptions) -> None:
    """Checks that brokers answer, and that ``topic`` and ``deadLetter.topic`` exist, once per process.

    Raises:
        UnavailableError: if no broker answers in time, or the topic does not exist.
        AuthorizationError: if the principal may not describe the topic, or the brokers refuse its
        credentials.
    """
    key = repr((options.topic, options.dead_letter_topic, sorted(options.kafka.items())))
    if key in _checked:
        return
    producer = RecordProducer(producer_config(options.kafka), "check")
    try:
        deadline = Deadline.after_ms(min(options.commit_timeout_ms, _CHECK_MS))
        named = [each for each in (options.topic, options.dead_letter_topic) if each is not None]
        if named:
            producer.check_partitions(dict.fromkeys(named, -1), deadline)
        else:
            producer.cluster(deadline)
    finally:
        producer.close()
    _checked.add(key)


def produce(options: WriteOptions, batches: Iterable[pa.RecordBatch]) -> int:
    """Sends the rows of one task with an idempotent producer, and waits until brokers have acknowledged all.

    If Spark retries the task, it sends its rows again.

    Returns:
        Number of records written.

    Raises:
        InvalidRecordError: if a record is too large, or its partition does not exist.
        UnavailableError: if the brokers did not answer in time.
    """
    key = repr(sorted(options.kafka.items()))
    producer = _producers.get(key)
    if producer is None:
        producer = _producers[key] = RecordProducer(producer_config(options.kafka), "at_least_once")
    deadline = Deadline.after_ms(options.commit_timeout_ms)
    producer.begin_count()
    try:
        for batch in batches:
            producer.check_partitions(highest_partitions(batch, options.topic), deadline)
            producer.send(batch, options.topic, deadline)
        producer.flush(deadline)
        if producer.enqueued:  # a retry of an empty task duplicates nothing
            failpoints.reach("direct.after_flush")
    except BaseException:
        _producers.pop(key, None)
        producer.close()
        raise
    return producer.enqueued
