"""From Spark's options to checked records, on the driver, before any broker is asked.

The options themselves are declared in `option_table`. ``python -m kafka_eos_source.options`` writes
``docs/options.md``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.option_table import (
    BATCH_READ,
    BATCH_WRITE,
    BY_NAME,
    OPTIONS,
    STREAM_READ,
    STREAM_WRITE,
    documentation,
)

#: Options that Spark or its users put in every map, and that mean nothing here.
_IGNORED = frozenset({"path", "queryname", "header"})

#: Options of Spark that cannot go together with exactly-once: a replayed batch would have another range.
_REFUSED_PREFIXES = ("asyncprogresstracking", "_asyncprogresstracking")


@dataclass(frozen=True)
class Subscription:
    """What to read. ``kind``: ``subscribe``, ``subscribePattern`` or ``assign``."""

    kind: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True)
class Bound:
    """Where to start or stop.

    Attributes:
        kind: ``earliest``, ``latest``, ``group``, ``offsets``, ``timestamps`` or ``timestamp``.
        offsets: per partition; -1 latest, -2 earliest (kind ``offsets``).
        topic_defaults: the same for whole topics.
        timestamps_ms: per partition (kind ``timestamps``).
        timestamp_ms: for all (kind ``timestamp``).
        no_match: when no record is at or after the time: ``error`` or ``latest``.
    """

    kind: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_defaults: Mapping[str, int] = field(default_factory=dict)
    timestamps_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    timestamp_ms: int | None = None
    no_match: str = "error"


@dataclass(frozen=True)
class ReadOptions:
    """The options of a source, checked. Fields are named after the options."""

    subscription: Subscription
    starting: Bound
    ending: Bound
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    isolation_level: str
    application_id: str | None
    group_id: str | None
    group_id_prefix: str
    fetch_num_retries: int
    fetch_retry_interval_ms: int
    poll_timeout_ms: int
    push_filters: bool
    kafka: Mapping[str, str]


@dataclass(frozen=True)
class WriteOptions:
    """The options of a sink, checked. Fields are named after the options."""

    topic: str | None
    application_id: str | None
    group_id: str | None
    guarantee: str
    checkpoint_location: str | None
    staging_location: str | None
    staging_inline_bytes: int
    include_timestamp: bool
    txn_app_id: str | None
    txn_version: int | None
    missing_token: str
    foreign_query: str
    commit_timeout_ms: int
    source_cluster: str
    anchor_topic: str | None
    kafka: Mapping[str, str]


def parse_read(
    options: Mapping[str, str], *, streaming: bool, pyspark_version: str = pyspark.__version__
) -> ReadOptions:
    """The options of a read. No broker is asked.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place, missing, or needs a newer PySpark.
    """
    where = STREAM_READ if streaming else BATCH_READ
    found, kafka = _parse(options, where)
    group_id = _group_id(kafka)
    isolation_level = found["isolation.level"]
    stated = kafka.pop("isolation.level", None)
    if stated is not None:
        isolation_level = values.choice("read_committed", "read_uncommitted")("kafka.isolation.level", stated)
    minimum, maximum = found["minOffsetsPerTrigger"], found["maxOffsetsPerTrigger"]
    if minimum is not None and maximum is not None and minimum > maximum:
        raise values.invalid(
            "minOffsetsPerTrigger", str(minimum), f"at most maxOffsetsPerTrigger ({maximum})"
        )
    for name, wanted in _NEEDS_PYSPARK.items():
        if found[name]:
            check_pyspark(name, wanted, pyspark_version)
    subscription = _subscription(found)
    starting = _starting(found, streaming)
    if starting.kind == "group" and not (group_id or found["application.id"]):
        raise values.invalid(
            "startingOffsets", "group", "a group to go with it", "set 'kafka.group.id' or 'application.id'."
        )
    ending = _ending(found)
    _check_assigned(subscription, starting, "startingOffsets")
    _check_assigned(subscription, ending, "endingOffsets")
    _check_order(starting, ending)
    return ReadOptions(
        subscription=subscription,
        starting=starting,
        ending=ending,
        max_offsets_per_trigger=maximum,
        min_offsets_per_trigger=minimum,
        max_trigger_delay_ms=found["maxTriggerDelay"],
        min_partitions=found["minPartitions"],
        max_records_per_partition=found["maxRecordsPerPartition"],
        fail_on_data_loss=found["failOnDataLoss"],
        include_headers=found["includeHeaders"],
        isolation_level=isolation_level,
        application_id=found["application.id"],
        group_id=group_id,
        group_id_prefix=found["groupIdPrefix"],
        fetch_num_retries=found["fetchOffset.numRetries"],
        fetch_retry_interval_ms=found["fetchOffset.retryIntervalMs"],
        poll_timeout_ms=found["kafkaConsumer.pollTimeoutMs"],
        push_filters=found["pushFilters"],
        kafka=config.check_consumer(kafka),
    )


def parse_write(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """The options of a write. No broker is asked.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place, missing, or breaks exactly-once.
    """
    found, kafka = _parse(options, STREAM_WRITE if streaming else BATCH_WRITE)
    group_id = _group_id(kafka)
    if (found["txnAppId"] is None) != (found["txnVersion"] is None):
        lone = "txnAppId" if found["txnVersion"] is None else "txnVersion"
        other = "txnVersion" if lone == "txnAppId" else "txnAppId"
        raise InvalidOptionError(
            f"option {lone!r} is set and {other!r} is not.", fix=f"set both, or neither; add {other!r}."
        )
    exactly_once = found["processing.guarantee"] == "exactly_once"
    if not exactly_once and found["txnAppId"] is not None:
        raise values.invalid("processing.guarantee", "at_least_once", "exactly_once together with 'txnAppId'")
    return WriteOptions(
        topic=found["topic"],
        application_id=found["application.id"],
        group_id=group_id,
        guarantee=found["processing.guarantee"],
        checkpoint_location=found["checkpointLocation"],
        staging_location=found["staging.location"],
        staging_inline_bytes=found["stagingInlineBytes"],
        include_timestamp=found["includeTimestamp"],
        txn_app_id=found["txnAppId"],
        txn_version=found["txnVersion"],
        missing_token=found["onMissingToken"],
        foreign_query=found["onForeignQuery"],
        commit_timeout_ms=found["commitTimeoutMs"],
        source_cluster=found["source.cluster"],
        anchor_topic=found["anchor.topic"],
        kafka=config.check_producer(kafka, exactly_once=exactly_once),
    )


#: Option → first PySpark in which it can work.
_NEEDS_PYSPARK = {
    "maxOffsetsPerTrigger": "4.2",
    "minOffsetsPerTrigger": "4.2",
    "pushFilters": "4.1",
}


def check_pyspark(name: str, wanted: str, running: str) -> None:
    """Raises: InvalidOptionError: the option cannot work on this PySpark."""
    if tuple(int(part) for part in running.split(".")[:2]) < tuple(int(part) for part in wanted.split(".")):
        raise InvalidOptionError(
            f"option {name!r} needs PySpark {wanted} or newer; this is {running}.",
            fix=f"upgrade PySpark, or remove {name!r}.",
        )


def _parse(options: Mapping[str, str], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Every option of the table with its value, and the ``kafka.*`` ones without their prefix."""
    found = {option.name: option.default for option in OPTIONS}
    kafka: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower()
        if name.startswith("kafka.") and name != "kafka.":
            kafka[name.removeprefix("kafka.")] = str(value)
        elif name in BY_NAME:
            option = BY_NAME[name]
            if where not in option.where:
                raise InvalidOptionError(
                    f"option {option.name!r} (value {value!r}) cannot be used for a {where}; "
                    f"it belongs to: {', '.join(option.where)}.",
                    fix=f"{option.instead or 'remove it'}.",
                )
            found[option.name] = option.parse(option.name, str(value))
        elif name.startswith(_REFUSED_PREFIXES):
            raise InvalidOptionError(
                f"option {key!r} cannot be used: with asynchronous progress tracking a replayed batch may "
                "have another range of offsets, so it could not be exactly once.",
                fix="remove it.",
            )
        elif name not in _IGNORED and not name.startswith("__"):
            raise InvalidOptionError(
                f"unknown option {key!r} (value {value!r}).{_nearest(name, where)}",
                fix="correct or remove it; docs/options.md lists all options.",
            )
    if not kafka.get("bootstrap.servers", "").strip():
        raise InvalidOptionError(
            "option 'kafka.bootstrap.servers' is missing; expected host:port, or several with commas.",
            fix="set .option('kafka.bootstrap.servers', 'host:9092').",
        )
    return found, kafka


def _nearest(name: str, where: str) -> str:
    known = [option.name for option in OPTIONS if where in option.where]
    by_lower = {each.lower(): each for each in known}
    by_lower["kafka.bootstrap.servers"] = "kafka.bootstrap.servers"
    by_lower["bootstrap.servers"] = "kafka.bootstrap.servers"
    near = difflib.get_close_matches(name, by_lower, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def _group_id(kafka: dict[str, str]) -> str | None:
    stated = kafka.pop("group.id", None)
    return None if stated is None else values.text("kafka.group.id", stated)


def _subscription(found: Mapping[str, Any]) -> Subscription:
    names = ("subscribe", "subscribePattern", "assign")
    stated = [name for name in names if found[name] is not None]
    if len(stated) != 1:
        said = " and ".join(repr(name) for name in stated)
        raise InvalidOptionError(
            f"{said} are set; expected exactly one of {', '.join(names)}."
            if stated
            else f"nothing to read: none of {', '.join(names)} is set; expected exactly one.",
            fix="keep one." if stated else "set .option('subscribe', 'topic').",
        )
    value = found[stated[0]]
    return Subscription(
        stated[0],
        topics=value if stated[0] == "subscribe" else (),
        pattern=value if stated[0] == "subscribePattern" else "",
        partitions=value if stated[0] == "assign" else (),
    )


def _starting(found: Mapping[str, Any], streaming: bool) -> Bound:
    no_match = found["startingOffsetsByTimestampStrategy"]
    if found["startingTimestamp"] is not None:
        return Bound("timestamp", timestamp_ms=found["startingTimestamp"], no_match=no_match)
    if found["startingOffsetsByTimestamp"] is not None:
        return Bound("timestamps", timestamps_ms=found["startingOffsetsByTimestamp"], no_match=no_match)
    bound = _offsets(
        "startingOffsets",
        found["startingOffsets"] or ("latest" if streaming else "earliest"),
        ("earliest", "latest", "group") if streaming else ("earliest", "group"),
    )
    latest = [*bound.offsets.values(), *bound.topic_defaults.values()].count(values.LATEST)
    if latest and not streaming:
        raise values.invalid(
            "startingOffsets", found["startingOffsets"], "no -1 or latest on a batch read: it would be empty"
        )
    return bound


def _ending(found: Mapping[str, Any]) -> Bound:
    if found["endingTimestamp"] is not None:
        return Bound("timestamp", timestamp_ms=found["endingTimestamp"], no_match="latest")
    if found["endingOffsetsByTimestamp"] is not None:
        return Bound("timestamps", timestamps_ms=found["endingOffsetsByTimestamp"], no_match="latest")
    bound = _offsets("endingOffsets", found["endingOffsets"] or "latest", ("latest",))
    if values.EARLIEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "endingOffsets", found["endingOffsets"], "no -2 or earliest: nothing would be read"
        )
    return bound


def _offsets(name: str, value: str, words: Iterable[str]) -> Bound:
    if value.strip().lower() in words:
        return Bound(value.strip().lower())
    if not value.strip().startswith("{"):
        raise values.invalid(name, value, f"{', '.join(words)}, or JSON such as " + '{"topic":{"0":23}}')
    by_partition, by_topic = values.offsets(name, value)
    return Bound("offsets", offsets=by_partition, topic_defaults=by_topic)


def _check_assigned(subscription: Subscription, bound: Bound, name: str) -> None:
    """With ``assign`` the partitions are known here: offsets or times must name exactly those."""
    named = set(bound.offsets) | set(bound.timestamps_ms)
    if subscription.kind != "assign" or not named:
        return
    wanted = {tp for tp in subscription.partitions if tp.topic not in bound.topic_defaults}
    if named != wanted:
        shown = [", ".join(str(tp) for tp in sorted(each)) for each in (named, wanted)]
        raise InvalidOptionError(
            f"option {name!r} names the partitions {shown[0]}; 'assign' has {shown[1]}.",
            fix="name exactly the assigned partitions.",
        )


def _check_order(starting: Bound, ending: Bound) -> None:
    """What can be seen without a broker; the rest is found when the read is planned."""
    for tp, start in starting.offsets.items():
        end = ending.offsets.get(tp)
        if end is not None and 0 <= end < start:
            raise InvalidOptionError(
                f"option 'startingOffsets' starts {tp} at {start}, 'endingOffsets' ends it at {end}.",
                fix="let each partition end at or after its start.",
            )


if __name__ == "__main__":
    Path("docs/options.md").write_text(documentation(), encoding="utf-8")
