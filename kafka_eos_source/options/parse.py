"""Parses the options that Spark passes to a source or sink, and checks what they mean together.

It runs on the driver and contacts no broker. `options.table` declares the options. `parse_table` parses each
of them by itself; `parse_read` and `parse_write` check what they mean together, as `state` does for the
options of operators and of reads of state.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyspark

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.options.checked import Bound, ReadOptions, Subscription, WriteOptions
from kafka_eos_source.options.table import (
    BATCH_READ,
    BATCH_WRITE,
    BY_NAME,
    CHANGED_TABLE,
    ISOLATION_LEVELS,
    OPERATOR_IN_READ,
    OPTIONS,
    READ,
    SINK_IN_READ,
    SQL_MEMORY,
    STATIC_TABLES,
    STEP_IN_READ,
    STREAM_READ,
    STREAM_WRITE,
    WRITE,
    Option,
)
from kafka_eos_source.protocol.records import MOST_DECOMPRESSED
from kafka_eos_source.sinks import sink_options, specs


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
    subscription = _subscription(found)
    starting = _starting(found, streaming=streaming, has_group=bool(group_id or found["application.id"]))
    ending = _ending(found)
    columns = found["columns"]
    if not streaming:  # a stream with a checkpoint ignores its starting options
        for bound in (starting, ending):
            _check_names(subscription, bound)
        _check_order(starting, ending)
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
        header_names=found["headerNames"],
        include_headers=found["includeHeaders"] if columns is None else "headers" in columns,
        columns=columns,
        step_in_read=found[STEP_IN_READ],
        sql_memory_bytes=found[SQL_MEMORY],
        isolation_level=isolation_level,
        application_id=found["application.id"],
        group_id=group_id,
        fetch_num_retries=found["fetchOffset.numRetries"],
        fetch_retry_interval_ms=found["fetchOffset.retryIntervalMs"],
        poll_timeout_ms=found["kafkaConsumer.pollTimeoutMs"],
        push_filters=found["pushFilters"],
        kafka=config.check_consumer(kafka),
        sink=_sink_in_read(options, found),
        operator=_of_step(options, found, OPERATOR_IN_READ),
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
        static_tables=found[STATIC_TABLES],
        changed_table=found[CHANGED_TABLE],
        commit_timeout_ms=found["commitTimeoutMs"],
        source_cluster=found["source.cluster"],
        anchor_topic=found["anchor.topic"],
        kafka=config.check_producer(kafka, exactly_once=exactly_once),
        query_name=found["queryName"],
        token_topic=_token_topic(found, streaming=streaming),
        on_invalid_record=found["onInvalidRecord"],
        dead_letter_topic=_dead_letter_topic(found),
        all_records_bad=found["onAllRecordsBad"],
        header_names=found["headerNames"],
        sinks=specs.parse(found["sinks"], _of_sinks(options)),
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
        name.lower(): str(value)
        for name, value in options.items()
        if name.lower().startswith(sink_options.PREFIX)
    }


def _needs_exactly_once(option: str) -> InvalidOptionError:
    return values.invalid(
        "processing.guarantee", "at_least_once", f"exactly_once, because option {option!r} is set"
    )


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
    stated = _of_step(options, found, SINK_IN_READ)
    return None if stated is None else parse_sink_in_read(stated)


def _of_step(options: Mapping[str, str], found: Mapping[str, Any], prefix: str) -> dict[str, str] | None:
    """Returns the options that the source carries for its step, without their prefix; None if there are none.

    Raises:
        InvalidOptionError: if there are options without a step.
    """
    stated = {
        name[len(prefix) :]: value for name, value in options.items() if name.lower().startswith(prefix)
    }
    if stated and found[STEP_IN_READ] is None:
        raise InvalidOptionError(
            f"options with the prefix {prefix!r} are set, but {STEP_IN_READ!r} is not.",
            fix="let map_in_read (write=) or the stateful operator (shards='partitions') set them.",
        )
    return stated or None


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


# ------------------------------------------------------------------ what to read, from where to where


def _subscription(values_of: Mapping[str, Any]) -> Subscription:
    """Returns the subscription from the one of its three options that is set.

    Raises:
        InvalidOptionError: if none of the options is set, or more than one.
    """
    names = ("subscribe", "subscribePattern", "assign")
    given = [name for name in names if values_of[name] is not None]
    if not given:
        raise InvalidOptionError(
            f"no topic to read: expected exactly one of the options {', '.join(names)}, but none is set.",
            fix="set .option('subscribe', 'topic').",
        )
    if len(given) > 1:
        raise InvalidOptionError(
            f"the options {' and '.join(map(repr, given))} are set together; expected exactly one of "
            f"{', '.join(names)}.",
            fix="keep one of them. To read several topics, use a list 'a,b' or a pattern 'a|b'.",
        )
    kind = given[0]
    value = values_of[kind]
    return Subscription(
        kind,
        topics=value if kind == "subscribe" else (),
        pattern=value if kind == "subscribePattern" else "",
        partitions=value if kind == "assign" else (),
    )


def _starting(values_of: Mapping[str, Any], *, streaming: bool, has_group: bool) -> Bound:
    """Returns where a query without a checkpoint starts.

    As in Spark, ``startingTimestamp`` takes precedence over ``startingOffsetsByTimestamp``, and that over
    ``startingOffsets``.

    Args:
        values_of: value of each option.
        streaming: whether the read is a stream.
        has_group: whether a consumer group is known, for ``startingOffsets=group``.

    Raises:
        InvalidOptionError: if the offsets are malformed or a read cannot start there.
    """
    no_match = values_of["startingOffsetsByTimestampStrategy"]
    if values_of["startingTimestamp"] is not None:
        return Bound(
            "timestamp",
            timestamp_ms=values_of["startingTimestamp"],
            no_match=no_match,
            option="startingTimestamp",
        )
    if values_of["startingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=values_of["startingOffsetsByTimestamp"],
            no_match=no_match,
            option="startingOffsetsByTimestamp",
        )
    bound = _offsets(
        "startingOffsets",
        values_of["startingOffsets"] or ("latest" if streaming else "earliest"),
        ("earliest", "latest", "group") if streaming else ("earliest", "group"),
    )
    if bound.kind == "group" and not has_group:
        raise values.invalid(
            "startingOffsets",
            "group",
            "a consumer group to be set as well",
            "set 'kafka.group.id' or 'application.id'.",
        )
    if not streaming and values.LATEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "startingOffsets",
            values_of["startingOffsets"],
            "offsets other than -1 (latest), with which a batch read would be empty",
            "set an offset, or -2 for the earliest one.",
        )
    return bound


def _ending(values_of: Mapping[str, Any]) -> Bound:
    """Returns where a batch read stops.

    Raises:
        InvalidOptionError: if the offsets are malformed or a read cannot stop there.
    """
    if values_of["endingTimestamp"] is not None:
        return Bound(
            "timestamp",
            timestamp_ms=values_of["endingTimestamp"],
            no_match="latest",
            option="endingTimestamp",
        )
    if values_of["endingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=values_of["endingOffsetsByTimestamp"],
            no_match="latest",
            option="endingOffsetsByTimestamp",
        )
    bound = _offsets("endingOffsets", values_of["endingOffsets"] or "latest", ("latest",))
    if values.EARLIEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "endingOffsets",
            values_of["endingOffsets"],
            "offsets other than -2 (earliest), with which nothing would be read",
            "set an offset, or -1 for the latest one.",
        )
    return bound


def _offsets(name: str, value: str, words: Iterable[str]) -> Bound:
    if value.strip().lower() in words:
        return Bound(value.strip().lower(), option=name)
    if not value.strip().startswith("{"):
        raise values.invalid(name, value, f"{', '.join(words)} or JSON such as " + '{"topic":{"0":23}}')
    by_partition, by_topic = values.offsets(name, value)
    return Bound("offsets", offsets=by_partition, topic_defaults=by_topic, option=name)


def _check_names(what: Subscription, bound: Bound) -> None:
    """Checks that a bound names the topics and partitions of the subscription, without asking a broker.

    Only batch reads are checked here. A stream checks its start when it uses it, which it does not do if
    there is a checkpoint.

    Raises:
        InvalidOptionError: if the bound names anything else, or leaves a topic or partition out.
    """
    if bound.kind not in ("offsets", "timestamps"):
        return
    named = set(bound.offsets) | set(bound.timestamps_ms)
    topics = {tp.topic for tp in named} | {each for each in bound.topic_defaults if each != values.OTHERS}
    for topic in sorted(topics):
        if not what.has_topic(topic):
            raise InvalidOptionError(
                f"option {bound.option!r} names the topic {topic!r}, which option {what.kind!r} does not "
                "include.",
                fix=f"remove the topic from {bound.option!r}, or add it to {what.kind!r}.",
            )
    missing = [each for each in what.topics if each not in topics and bound.default_of(each) is None]
    if missing:
        raise InvalidOptionError(
            f"option {bound.option!r} names no partition of {', '.join(map(repr, missing))}; expected all "
            "partitions of every topic to read.",
            fix=f"add the missing partitions. {_COMPLETE}",
        )
    wanted = {tp for tp in what.partitions if tp in named or bound.default_of(tp.topic) is None}
    if what.kind == "assign" and named != wanted:
        shown = [", ".join(str(tp) for tp in sorted(each)) or "none" for each in (named, wanted)]
        raise InvalidOptionError(
            f"option {bound.option!r} names the partitions {shown[0]}, but option 'assign' has {shown[1]}.",
            fix=f"name the same partitions in both options. {_COMPLETE}",
        )


_COMPLETE = (
    'In offsets, {"topic":"earliest"} covers a whole topic, and {"*":"latest"} all topics that are not named.'
)


def _check_order(start: Bound, end: Bound) -> None:
    """Checks that no partition starts after its end, as far as the options alone show that.

    The planner finds the other cases when it knows the offsets of the partitions.

    Raises:
        InvalidOptionError: if a partition starts after its end, or only one option names it; the equivalent
            of Spark's ``UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET``.
    """
    named = (set(start.offsets), set(end.offsets))
    if start.kind == end.kind == "offsets" and not (start.topic_defaults or end.topic_defaults):
        lone = sorted(named[0] ^ named[1])
        if lone:
            raise InvalidOptionError(
                f"only one of the options {start.option!r} and {end.option!r} names the partition(s) "
                f"{', '.join(map(str, lone))}; expected both to name them.",
                fix=f"name the same partitions in both options. {_COMPLETE}",
            )
    pairs = [
        *((str(tp), at, end.offsets.get(tp)) for tp, at in start.offsets.items()),
        *((str(tp), at, end.timestamps_ms.get(tp)) for tp, at in start.timestamps_ms.items()),
        *(
            [("every partition", start.timestamp_ms, end.timestamp_ms)]
            if start.timestamp_ms is not None
            else []
        ),
    ]
    for what, starts, ends in pairs:
        if ends is not None and 0 <= ends < starts:
            raise InvalidOptionError(
                f"option {start.option!r} starts {what} at {starts}, but option {end.option!r} ends it at "
                f"{ends}.",
                fix="set an end that is not before the start.",
            )


# ------------------------------------------------------------------ one option by itself

_log = logging.getLogger(__name__)


#: Options that Spark adds for every format; they have no meaning here.
_SPARK_OPTIONS = frozenset({"path", "paths"})


#: Prefixes of the options of asynchronous progress tracking. With it, a repeated batch may read other
#: offsets.
_ASYNCHRONOUS = ("asyncprogresstracking", "_asyncprogresstracking")


def _check_pyspark(option: Option, running: str) -> None:
    """Checks that the running PySpark has the interfaces that an option needs.

    Raises:
        InvalidOptionError: if it is too old.
    """
    have, need = (tuple(int(n) for n in re.findall("[0-9]+", each)[:2]) for each in (running, option.since))
    if have < need:
        raise InvalidOptionError(
            f"option {option.name!r} requires PySpark {option.since} or newer; this is PySpark {running}.",
            fix=f"upgrade PySpark, or remove {option.name!r}.",
        )


def is_for_stream_only(options: Iterable[str]) -> bool:
    """Returns whether one of these option names has an effect only on a stream read."""
    return any(BY_NAME[name.lower()].where == (STREAM_READ,) for name in options if name.lower() in BY_NAME)


def parse_table(
    options: Mapping[str, str],
    where: str,
    pyspark_version: str = pyspark.__version__,
    *,
    needs_brokers: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses all options.

    Args:
        options: as Spark passes them.
        where: kind of read or write, such as `table.STREAM_READ`.
        pyspark_version: version of the running PySpark.
        needs_brokers: whether ``kafka.bootstrap.servers`` is required.

    Returns:
        The value of every option in the table, by name, and the ``kafka.*`` options without that prefix.

    Raises:
        InvalidOptionError: if an option is unknown, malformed, missing, not for this kind of read or write,
            or needs a newer PySpark.
    """
    found = {option.name: option.default for option in OPTIONS}
    keys: dict[str, str] = {}  # the spelling in `options` of each name in lower case
    kafka: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower()
        if options[keys.get(name, key)] != value:
            raise InvalidOptionError(
                f"options {keys[name]!r} and {key!r} are the same option with two different values: option "
                "names are not case-sensitive.",
                fix="keep one of them.",
            )
        keys[name] = key
        if name.startswith("kafka.") and name != "kafka.":
            kafka[name.removeprefix("kafka.")] = str(value)
        elif name.startswith(sink_options.PREFIX) and where == STREAM_WRITE:
            continue  # `sinks.specs.parse` checks it
        elif name.startswith(SINK_IN_READ) and where == STREAM_READ:
            continue  # `parse_sink_in_read` checks it
        elif name.startswith(OPERATOR_IN_READ) and where == STREAM_READ:
            continue  # `parse_state` checks it
        elif name in BY_NAME:
            option = BY_NAME[name]
            parsed = _parse_where_allowed(option, str(value), where)
            if option.since and parsed != option.default:
                _check_pyspark(option, pyspark_version)
            if where in option.where:
                found[option.name] = parsed
            elif option.where == (STREAM_READ,):
                _log.warning("option %r has no effect on a %s (as in Spark)", option.name, where)
        elif not _is_ignored(name, str(value)):
            # `load()` does not know yet whether the read is a stream
            raise _unknown(key, str(value), *(READ if where in READ else (where,)))
    if needs_brokers and not has_brokers(kafka):
        raise InvalidOptionError(
            "option 'kafka.bootstrap.servers' is missing; expected host:port, or several separated by "
            "commas.",
            fix="set .option('kafka.bootstrap.servers', 'host:9092').",
        )
    return found, kafka


def divide(options: Mapping[str, str], *kinds: str) -> list[dict[str, str]]:
    """Returns for each kind of read or write those of the options that it takes; does not parse their values.

    Args:
        options: options for several kinds of reads and writes.
        *kinds: the kinds, such as `table.STREAM_READ`.

    Raises:
        InvalidOptionError: if an option is unknown, or none of the kinds takes it.
    """
    found: list[dict[str, str]] = [{} for _ in kinds]
    for key, value in options.items():
        name = key.lower()
        if name.startswith("kafka.") and name != "kafka.":
            takers = kinds
        elif name.startswith(sink_options.PREFIX):
            takers = (STREAM_WRITE,)
        elif name not in BY_NAME:
            raise _unknown(key, value, *kinds)
        else:
            takers = BY_NAME[name].where
        if not set(takers).intersection(kinds):
            raise InvalidOptionError(
                f"option {key!r} cannot be used for a {', '.join(kinds[:-1])} or {kinds[-1]}, only for a "
                f"{' or '.join(takers)}.",
                fix="remove it.",
            )
        for number, kind in enumerate(kinds):
            if kind in takers:
                found[number][key] = value
    return found


def has_brokers(kafka: Mapping[str, str]) -> bool:
    """Returns whether the ``kafka.*`` options (without prefix) name at least one broker."""
    return any(kafka.get(name, "").strip() for name in ("bootstrap.servers", "metadata.broker.list"))


def _parse_where_allowed(option: Option, value: str, where: str) -> Any:
    """Returns the value of an option that this kind of read or write accepts.

    Raises:
        InvalidOptionError: if it does not accept the option, or the value is malformed.
    """
    if where not in (*option.where, *option.idle):
        raise InvalidOptionError(
            f"option {option.name!r} (value {value!r}) cannot be used for a {where}, only for a "
            f"{' or '.join(option.where)}.",
            fix=f"{option.instead or _other_place(option, where)}.",
        )
    return option.parse(option.name, value)


def _other_place(option: Option, where: str) -> str:
    if set(option.where) <= set(WRITE) and where in READ:
        return "set it on the sink (df.writeStream or df.write)"
    if set(option.where) <= set(READ) and where in WRITE:
        return "set it on the source (spark.readStream or spark.read)"
    return "remove it"


def _is_ignored(name: str, value: str) -> bool:
    """Returns whether this is an option of Spark that has no meaning here.

    Raises:
        InvalidOptionError: if it is an option of Spark that breaks exactly-once.
    """
    if name.startswith(_ASYNCHRONOUS):
        if name.endswith("enabled") and value.strip().lower() == "false":
            return True
        raise InvalidOptionError(
            f"option {name!r} (value {value!r}) cannot be used: with asynchronous progress tracking, a "
            "repeated batch may read other offsets, which breaks exactly-once.",
            fix="remove it.",
        )
    return name in _SPARK_OPTIONS or name.startswith("__")


def _unknown(key: str, value: str, *kinds: str) -> InvalidOptionError:
    """Returns the error for an unknown option, with similar names.

    It shows the value only if all similar names are options of this package. Otherwise the value may be a
    password.
    """
    name = key.lower()
    bare = name.partition(".")[2]
    if config.is_known(name):
        near = [f"kafka.{name}"]
    elif config.is_known(bare):
        near = [f"kafka.{bare}"]
    else:
        here = {option.name.lower(): option.name for option in OPTIONS if set(kinds) & set(option.where)}
        here["kafka.bootstrap.servers"] = "kafka.bootstrap.servers"
        near = [here[each] for each in difflib.get_close_matches(name, here, n=2, cutoff=0.6)]
    showable = bool(near) and all(each.lower() in BY_NAME for each in near) and not config.is_secret(name)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return InvalidOptionError(
        f"unknown option {key!r}{f' (value {value!r})' if showable else ''}.{hint}",
        fix="correct the name, or remove the option; docs/options.md lists all options.",
    )


def take_group_id(kafka: dict[str, str]) -> str | None:
    """Removes ``group.id`` from the ``kafka.*`` options and returns it; None if it is not set.

    The package passes the group to its clients itself, so it is not one of the user's client properties.
    """
    value = kafka.pop("group.id", None)
    return None if value is None else values.text("kafka.group.id", value)
