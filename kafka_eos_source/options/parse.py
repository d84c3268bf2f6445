"""Parses the options that Spark passes to a source or sink, and checks what they mean together.

This runs on the driver and contacts no broker. `options.table` declares the options, and `options.by_table`
parses each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyspark

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.options import bounds as option_bounds
from kafka_eos_source.options.by_table import parse_table, take_group_id
from kafka_eos_source.options.checked import Bound, ReadOptions, Subscription, WriteOptions
from kafka_eos_source.options.option import (
    BATCH_READ,
    BATCH_WRITE,
    OPERATOR_IN_READ,
    SINK_IN_READ,
    STEPS_IN_READ,
    STREAM_READ,
    STREAM_WRITE,
)
from kafka_eos_source.options.table import ISOLATION_LEVELS
from kafka_eos_source.protocol.record_batch import MOST_DECOMPRESSED
from kafka_eos_source.sinks import naming, registry

__all__ = [
    "Bound",
    "Subscription",
    "parse_read",
    "parse_sink_in_read",
    "parse_write",
]


def parse_read(
    options: Mapping[str, str], *, streaming: bool, pyspark_version: str = pyspark.__version__
) -> ReadOptions:
    """Returns the checked options of a read.

    Raises:
        InvalidOptionError: if an option is unknown, malformed, missing, not for this kind of read, or needs a
            newer PySpark.
    """
    where = STREAM_READ if streaming else BATCH_READ
    found, kafka = parse_table(options, where, pyspark_version)
    group_id = take_group_id(kafka)
    isolation_level = _isolation_level(options, found["isolation.level"], kafka)
    minimum, maximum = found["minOffsetsPerTrigger"], found["maxOffsetsPerTrigger"]
    if minimum is not None and maximum is not None and minimum > maximum:
        raise values.invalid(
            "minOffsetsPerTrigger", str(minimum), f"at most the value of 'maxOffsetsPerTrigger', {maximum}"
        )
    subscription = option_bounds._subscription(found)
    starting = option_bounds._starting(
        found, streaming=streaming, has_group=bool(group_id or found["application.id"])
    )
    ending = option_bounds._ending(found)
    columns = found["columns"]
    if not streaming:  # a stream with a checkpoint ignores its starting options
        for bound in (starting, ending):
            option_bounds._check_names(subscription, bound)
        option_bounds._check_order(starting, ending)
    return ReadOptions(
        subscription=subscription,
        starting=starting,
        ending=ending,
        max_offsets_per_trigger=maximum,
        min_offsets_per_trigger=minimum,
        max_trigger_delay_ms=found["maxTriggerDelay"],
        token_renewal_interval_ms=found["token.renewal.interval.ms"],
        timer_batch_interval_ms=found["timer.batch.interval.ms"],
        metrics_port=found["metrics.port"],
        metrics_host=found["metrics.host"],
        rolled_back_checkpoint=found["onRolledBackCheckpoint"],
        min_partitions=found["minPartitions"],
        max_records_per_partition=found["maxRecordsPerPartition"],
        fail_on_data_loss=found["failOnDataLoss"],
        skip_damaged=_skip_damaged(found["skipDamagedRecords"], subscription),
        most_decompressed_bytes=found[MOST_DECOMPRESSED],
        include_headers=found["includeHeaders"] if columns is None else "headers" in columns,
        columns=columns,
        step_in_read=_step_in_read(found),
        isolation_level=isolation_level,
        application_id=found["application.id"],
        group_id=group_id,
        fetch_num_retries=found["fetchOffset.numRetries"],
        fetch_retry_interval_ms=found["fetchOffset.retryIntervalMs"],
        poll_timeout_ms=found["kafkaConsumer.pollTimeoutMs"],
        push_filters=found["pushFilters"],
        kafka=config.check_consumer(kafka),
        sink=_sink_in_read(options, found),
        operator=_operator_in_read(options, found),
    )


def parse_write(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Returns the checked options of a write.

    Raises:
        InvalidOptionError: if an option is unknown, malformed, missing, not for this kind of write, or breaks
            exactly-once.
    """
    found, kafka = parse_table(options, STREAM_WRITE if streaming else BATCH_WRITE, pyspark.__version__)
    group_id = take_group_id(kafka)
    if (found["txnAppId"] is None) != (found["txnVersion"] is None):
        lone = "txnAppId" if found["txnVersion"] is None else "txnVersion"
        other = "txnVersion" if lone == "txnAppId" else "txnAppId"
        raise InvalidOptionError(
            f"option {lone!r} has the value {str(found[lone])!r}, but {other!r} is not set; expected both "
            "or neither.",
            fix=f"also set {other!r}, or remove {lone!r}.",
        )
    exactly_once = found["processing.guarantee"] == "exactly_once"
    if not exactly_once and found["txnAppId"] is not None:
        raise _needs_exactly_once("txnAppId")
    if not exactly_once and found["sinks"]:
        raise _needs_exactly_once("sinks")
    return WriteOptions(
        topic=found["topic"],
        application_id=found["application.id"],
        group_id=group_id,
        guarantee=found["processing.guarantee"],
        checkpoint_location=found["checkpointLocation"],
        staging_location=found["staging.location"],
        staging_inline_bytes=found["staging.inline.bytes"],
        include_timestamp=found["includeTimestamp"],
        txn_app_id=found["txnAppId"],
        txn_version=found["txnVersion"],
        missing_token=found["onMissingToken"],
        foreign_query=found["onForeignQuery"],
        moved_offsets=found["onMovedOffsets"],
        moved_checkpoint=found["onMovedCheckpoint"],
        commit_timeout_ms=found["commitTimeoutMs"],
        source_cluster=found["source.cluster"],
        anchor_topic=found["anchor.topic"],
        kafka=config.check_producer(kafka, exactly_once=exactly_once),
        query_name=found["queryName"],
        token_topic=_token_topic(found, streaming=streaming),
        on_invalid_record=found["onInvalidRecord"],
        dead_letter_topic=_dead_letter_topic(found),
        sinks=registry.parse(found["sinks"], _of_sinks(options)),
    )


def _skip_damaged(
    named: dict[TopicPartition, tuple[int, ...]], subscription: Subscription
) -> dict[TopicPartition, tuple[int, ...]]:
    """Returns the option ``skipDamagedRecords`` after checking that it can have an effect.

    Raises:
        InvalidOptionError: if it names a partition that is not read.
    """
    unread = next((tp for tp in named if not subscription.has(tp)), None)
    if unread is not None:
        raise InvalidOptionError(
            f"option 'skipDamagedRecords' names {unread}; expected partitions that are read "
            f"({subscription}).",
            fix="correct the topic or the partition, or remove the option.",
        )
    return named


def _token_topic(found: Mapping[str, Any], *, streaming: bool) -> str | None:
    """Returns the option ``token.topic`` after checking that the write can use it; None if it is not set.

    Raises:
        InvalidOptionError: if the write commits no token, or also writes records to the topic.
    """
    name: str | None = found["token.topic"]
    if name is None:
        return None
    if found["processing.guarantee"] != "exactly_once":
        raise _needs_exactly_once("token.topic")
    if not streaming and found["txnAppId"] is None:
        raise InvalidOptionError(
            f"option 'token.topic' has the value {name!r}, but 'txnAppId' is not set: a batch write without "
            "a version has no token to store.",
            fix="set 'txnAppId' and 'txnVersion', or remove 'token.topic'.",
        )
    if found["topic"] == name:
        raise InvalidOptionError(
            f"options 'token.topic' and 'topic' have the same value {name!r}; expected two topics, because "
            "the token topic may contain only tokens.",
            fix="create a separate topic with 'kafka-eos token-topic create' and set 'token.topic' to it.",
        )
    return name


def _dead_letter_topic(found: Mapping[str, Any]) -> str | None:
    """Returns the option ``deadLetter.topic`` after checking it and ``onInvalidRecord``.

    Raises:
        InvalidOptionError: if one of the two is missing, the write is not exactly once, or the topic also
            receives other records.
    """
    name: str | None = found["deadLetter.topic"]
    what: str = found["onInvalidRecord"]
    if what != "fail" and found["processing.guarantee"] != "exactly_once":
        raise _needs_exactly_once("onInvalidRecord")
    if what == "dead-letter" and name is None:
        raise InvalidOptionError(
            "option 'onInvalidRecord' has the value 'dead-letter', but 'deadLetter.topic' is not set.",
            fix="create a topic for dead letters, and set 'deadLetter.topic' to its name.",
        )
    if what != "dead-letter" and name is not None:
        raise InvalidOptionError(
            f"option 'deadLetter.topic' has the value {name!r}, but 'onInvalidRecord' is {what!r}; expected "
            "'dead-letter'.",
            fix="set 'onInvalidRecord' to 'dead-letter', or remove 'deadLetter.topic'.",
        )
    for other in ("topic", "token.topic"):
        if name is not None and found[other] == name:
            raise InvalidOptionError(
                f"options 'deadLetter.topic' and {other!r} have the same value {name!r}; expected two "
                "topics.",
                fix="create a topic of its own for dead letters.",
            )
    return name


def _of_sinks(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the ``sink.*`` options with names in lower case, because Spark may change the case."""
    return {
        name.lower(): str(value) for name, value in options.items() if name.lower().startswith(naming.PREFIX)
    }


def _needs_exactly_once(option: str) -> InvalidOptionError:
    return values.invalid(
        "processing.guarantee", "at_least_once", f"exactly_once, because option {option!r} is set"
    )


def _step_in_read(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the option that carries a step for the read tasks (`read.steps`), and its value."""
    steps = [(name, found[name]) for name in STEPS_IN_READ if found[name] is not None]
    if len(steps) > 1:
        both = " and ".join(repr(name) for name, _ in steps)
        raise InvalidOptionError(
            f"the options {both} are both set; expected at most one of them.", fix="keep one of them."
        )
    return steps[0] if steps else None


def parse_sink_in_read(options: Mapping[str, str]) -> WriteOptions:
    """Returns the checked options of a sink for which reading tasks stage their rows.

    Raises:
        InvalidOptionError: as `parse_write`, or if such a sink cannot be used with them.
    """
    checked = parse_write(options, streaming=True)
    if checked.guarantee != "exactly_once":
        raise values.invalid(
            "processing.guarantee",
            checked.guarantee,
            "exactly_once, because tasks that read can only stage rows for a transaction; leave out write= "
            "of map_in_read otherwise",
        )
    if checked.checkpoint_location is None:
        raise InvalidOptionError(
            "option 'checkpointLocation' is missing. The tasks that read stage their rows there.",
            fix="add it to the options in write=, and set the same on writeStream.",
        )
    return checked


def _sink_in_read(options: Mapping[str, str], found: Mapping[str, Any]) -> WriteOptions | None:
    """Returns the options of the sink that the source carries (``write=`` of `map_in_read`), or None."""
    prefixed = _with_prefix(options, SINK_IN_READ)
    if not prefixed:
        return None
    if found["map.in.read"] is None:
        raise InvalidOptionError(
            f"options with the prefix {SINK_IN_READ!r} are set, but 'map.in.read' is not.",
            fix="let map_in_read set them: map_in_read(frame, …, write={…}).",
        )
    return parse_sink_in_read(prefixed)


def _operator_in_read(options: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns the options of the stateful operator that the source carries, or None.

    `state.options.parse_state` checks them.

    Raises:
        InvalidOptionError: if there are options without an operator.
    """
    prefixed = _with_prefix(options, OPERATOR_IN_READ)
    if found["operator.in.read"] is None:
        if prefixed:
            raise InvalidOptionError(
                f"options with the prefix {OPERATOR_IN_READ!r} are set, but 'operator.in.read' is not.",
                fix="let the stateful operator set them: shards='partitions'.",
            )
        return None
    return prefixed


def _with_prefix(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the options whose name begins with a prefix, without it."""
    return {name[len(prefix) :]: value for name, value in options.items() if name.lower().startswith(prefix)}


def _isolation_level(options: Mapping[str, str], found: str, kafka: dict[str, str]) -> str:
    """Returns the isolation level, set as ``isolation.level`` or as ``kafka.isolation.level``.

    Raises:
        InvalidOptionError: if the two options differ.
    """
    value = kafka.pop("isolation.level", None)
    if value is None:
        return found
    level = values.choice(*ISOLATION_LEVELS)("kafka.isolation.level", value)
    if level != found and "isolation.level" in {name.lower() for name in options}:
        raise InvalidOptionError(
            f"option 'isolation.level' is {found!r}, but 'kafka.isolation.level' is {level!r}; expected the "
            "same value.",
            fix="keep one of them.",
        )
    return level
