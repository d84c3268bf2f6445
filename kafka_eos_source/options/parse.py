"""From Spark's options to checked records, on the driver, before any broker is asked.

The options themselves are declared in `option_table`. ``python -m kafka_eos_source.options`` writes
``docs/options.md``.
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
from kafka_eos_source.options import bounds as option_bounds
from kafka_eos_source.options.bounds import Bound, Subscription
from kafka_eos_source.options.checked import ReadOptions, WriteOptions
from kafka_eos_source.options.option import (
    BATCH_READ,
    BATCH_WRITE,
    READ,
    STEPS_IN_READ,
    STREAM_READ,
    STREAM_WRITE,
    WRITE,
    Option,
)
from kafka_eos_source.options.table import BY_NAME, ISOLATION_LEVELS, OPTIONS
from kafka_eos_source.sinks import registry

__all__ = [
    "Bound",
    "Subscription",
    "parse_read",
    "parse_write",
    "tells_stream",
]

_log = logging.getLogger(__name__)

#: Options that Spark or its users put in every map, and that mean nothing here.
_SPARKS = frozenset({"path", "paths"})

#: A replayed batch would have another range of offsets.
_ASYNCHRONOUS = ("asyncprogresstracking", "_asyncprogresstracking")


def parse_read(
    options: Mapping[str, str], *, streaming: bool, pyspark_version: str = pyspark.__version__
) -> ReadOptions:
    """The options of a read. No broker is asked.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place, missing, or needs a newer PySpark.
    """
    where = STREAM_READ if streaming else BATCH_READ
    found, kafka = parse_table(options, where, pyspark_version)
    group_id = take_group_id(kafka)
    isolation_level = _isolation_level(options, found["isolation.level"], kafka)
    minimum, maximum = found["minOffsetsPerTrigger"], found["maxOffsetsPerTrigger"]
    if minimum is not None and maximum is not None and minimum > maximum:
        raise values.invalid(
            "minOffsetsPerTrigger", str(minimum), f"at most maxOffsetsPerTrigger ({maximum})"
        )
    subscription = option_bounds.subscription(found)
    starting = option_bounds.starting(
        found, streaming=streaming, has_group=bool(group_id or found["application.id"])
    )
    ending = option_bounds.ending(found)
    columns = found["columns"]
    if not streaming:  # a stream with a checkpoint does not look at its starting option
        for bound in (starting, ending):
            option_bounds.check_names(subscription, bound)
        option_bounds.check_order(starting, ending)
    return ReadOptions(
        subscription=subscription,
        starting=starting,
        ending=ending,
        max_offsets_per_trigger=maximum,
        min_offsets_per_trigger=minimum,
        max_trigger_delay_ms=found["maxTriggerDelay"],
        token_renewal_interval_ms=found["token.renewal.interval.ms"],
        rolled_back_checkpoint=found["onRolledBackCheckpoint"],
        min_partitions=found["minPartitions"],
        max_records_per_partition=found["maxRecordsPerPartition"],
        fail_on_data_loss=found["failOnDataLoss"],
        include_headers=found["includeHeaders"] if columns is None else "headers" in columns,
        columns=columns,
        step_in_read=_step_in_read(found),
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
    found, kafka = parse_table(options, STREAM_WRITE if streaming else BATCH_WRITE, pyspark.__version__)
    group_id = take_group_id(kafka)
    if (found["txnAppId"] is None) != (found["txnVersion"] is None):
        lone = "txnAppId" if found["txnVersion"] is None else "txnVersion"
        other = "txnVersion" if lone == "txnAppId" else "txnAppId"
        raise InvalidOptionError(
            f"option {lone!r} is set and {other!r} is not.", fix=f"set both, or neither; add {other!r}."
        )
    exactly_once = found["processing.guarantee"] == "exactly_once"
    if not exactly_once and found["txnAppId"] is not None:
        raise values.invalid("processing.guarantee", "at_least_once", "exactly_once together with 'txnAppId'")
    if not exactly_once and found["sinks"]:
        raise values.invalid("processing.guarantee", "at_least_once", "exactly_once together with 'sinks'")
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
        commit_timeout_ms=found["commitTimeoutMs"],
        source_cluster=found["source.cluster"],
        anchor_topic=found["anchor.topic"],
        kafka=config.check_producer(kafka, exactly_once=exactly_once),
        query_name=found["queryName"],
        token_topic=_token_topic(found, streaming=streaming),
        sinks=registry.parse(found["sinks"], _of_sinks(options)),
    )


def _token_topic(found: Mapping[str, Any], *, streaming: bool) -> str | None:
    """The option ``token.topic``, where the write has a token to keep and no other use for the topic."""
    name: str | None = found["token.topic"]
    if name is None:
        return None
    if found["processing.guarantee"] != "exactly_once":
        raise values.invalid(
            "processing.guarantee", "at_least_once", "exactly_once together with 'token.topic'"
        )
    if not streaming and found["txnAppId"] is None:
        raise InvalidOptionError(
            f"option 'token.topic' has the value {name!r}, and 'txnAppId' is not set: a write without a "
            "version has no token to keep.",
            fix="set 'txnAppId' and 'txnVersion', or remove 'token.topic'.",
        )
    if found["topic"] == name:
        raise InvalidOptionError(
            f"options 'token.topic' and 'topic' have the same value {name!r}; the token topic takes only "
            "tokens.",
            fix="give 'token.topic' a topic of its own: kafka-eos token-topic create.",
        )
    return name


def _of_sinks(options: Mapping[str, str]) -> dict[str, str]:
    """The ``sink.*`` options, by their names in lower case: Spark hands them on so."""
    return {
        name.lower(): str(value)
        for name, value in options.items()
        if name.lower().startswith(registry.PREFIX)
    }


def check_pyspark(option: Option, running: str) -> None:
    """An option that needs interfaces which this PySpark has not.

    Raises:
        InvalidOptionError: naming the version needed.
    """
    have, need = (tuple(int(n) for n in re.findall("[0-9]+", each)[:2]) for each in (running, option.since))
    if have < need:
        raise InvalidOptionError(
            f"option {option.name!r} needs PySpark {option.since} or newer; this is {running}.",
            fix=f"upgrade PySpark, or remove {option.name!r}.",
        )


def tells_stream(options: Iterable[str]) -> bool:
    """Whether there is an option among the names that means something on a stream read only."""
    return any(BY_NAME[name.lower()].where == (STREAM_READ,) for name in options if name.lower() in BY_NAME)


def parse_table(
    options: Mapping[str, str],
    where: str,
    pyspark_version: str = pyspark.__version__,
    *,
    needs_brokers: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Every option of the table with its value, and the ``kafka.*`` ones without their prefix.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place, missing, or needs a newer PySpark.
    """
    found = {option.name: option.default for option in OPTIONS}
    stated: dict[str, str] = {}
    kafka: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower()
        if options[stated.get(name, key)] != value:
            raise InvalidOptionError(
                f"options {stated[name]!r} and {key!r} are one option with two values: letter case does not "
                "matter.",
                fix="keep one of them.",
            )
        stated[name] = key
        if name.startswith("kafka.") and name != "kafka.":
            kafka[name.removeprefix("kafka.")] = str(value)
        elif name.startswith(registry.PREFIX) and where == STREAM_WRITE:
            continue  # judged by its sink
        elif name in BY_NAME:
            option = BY_NAME[name]
            parsed = _in_place(option, str(value), where)
            if option.since and parsed != option.default:
                check_pyspark(option, pyspark_version)
            if where in option.where:
                found[option.name] = parsed
            elif option.where == (STREAM_READ,):
                _log.warning("option %r has no effect on a %s (as in Spark)", option.name, where)
        elif not _may_stay(name, str(value)):
            raise _unknown(key, str(value), where)
    if needs_brokers and not has_brokers(kafka):
        raise InvalidOptionError(
            "option 'kafka.bootstrap.servers' is missing; expected host:port, or several with commas.",
            fix="set .option('kafka.bootstrap.servers', 'host:9092').",
        )
    return found, kafka


def has_brokers(kafka: Mapping[str, str]) -> bool:
    """Whether the ``kafka.*`` options, without their prefix, name brokers."""
    return any(kafka.get(name, "").strip() for name in ("bootstrap.servers", "metadata.broker.list"))


def _in_place(option: Option, value: str, where: str) -> Any:
    """The value of an option that may stand there, with an effect or without one."""
    if where not in (*option.where, *option.idle):
        raise InvalidOptionError(
            f"option {option.name!r} (value {value!r}) cannot be used for a {where}; "
            f"it belongs to: {', '.join(option.where)}.",
            fix=f"{option.instead or _elsewhere(option, where)}.",
        )
    return option.parse(option.name, value)


def _elsewhere(option: Option, where: str) -> str:
    if set(option.where) <= set(WRITE) and where in READ:
        return "set it on the sink (df.writeStream or df.write)"
    if set(option.where) <= set(READ) and where in WRITE:
        return "set it on the source (spark.readStream or spark.read)"
    return "remove it"


def _may_stay(name: str, value: str) -> bool:
    """Options of Spark that are none of ours.

    Raises:
        InvalidOptionError: one that exactly-once cannot live with.
    """
    if name.startswith(_ASYNCHRONOUS):
        if name.endswith("enabled") and value.strip().lower() == "false":
            return True
        raise InvalidOptionError(
            f"option {name!r} cannot be used: with asynchronous progress tracking a replayed batch may "
            "have another range of offsets, so it could not be exactly once.",
            fix="remove it.",
        )
    return name in _SPARKS or name.startswith("__")


def _unknown(key: str, value: str, where: str) -> InvalidOptionError:
    """The value is shown only beside a name of ours: under another it may be a password."""
    name = key.lower()
    bare = name.partition(".")[2]
    if config.is_known(name):
        near = [f"kafka.{name}"]
    elif config.is_known(bare):
        near = [f"kafka.{bare}"]
    else:
        here = {option.name.lower(): option.name for option in OPTIONS if where in option.where}
        here["kafka.bootstrap.servers"] = "kafka.bootstrap.servers"
        near = [here[each] for each in difflib.get_close_matches(name, here, n=2, cutoff=0.6)]
    ours = bool(near) and all(each.lower() in BY_NAME for each in near) and not config.is_secret(name)
    said = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return InvalidOptionError(
        f"unknown option {key!r}{f' (value {value!r})' if ours else ''}.{said}",
        fix="correct or remove it; docs/options.md lists all options.",
    )


def take_group_id(kafka: dict[str, str]) -> str | None:
    """``kafka.group.id``, which is no property of a client here."""
    stated = kafka.pop("group.id", None)
    return None if stated is None else values.text("kafka.group.id", stated)


def _step_in_read(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Each makes other rows of the source's (`read.steps`)."""
    given = [(name, found[name]) for name in STEPS_IN_READ if found[name] is not None]
    if len(given) > 1:
        both = " and ".join(repr(name) for name, _ in given)
        raise InvalidOptionError(f"the options {both} are both set.", fix="keep one of them.")
    return given[0] if given else None


def _isolation_level(options: Mapping[str, str], found: str, kafka: dict[str, str]) -> str:
    """Kafka's name for it goes too; the two may not differ."""
    stated = kafka.pop("isolation.level", None)
    if stated is None:
        return found
    level = values.choice(*ISOLATION_LEVELS)("kafka.isolation.level", stated)
    if level != found and "isolation.level" in {name.lower() for name in options}:
        raise InvalidOptionError(
            f"option 'isolation.level' is {found!r} and 'kafka.isolation.level' is {level!r}.",
            fix="keep one of them.",
        )
    return level
