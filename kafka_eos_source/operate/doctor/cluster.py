"""Checks of a cluster and of what a query uses on it.

Brokers answer, features are finalized, topics have replicas, clocks agree; the query has its rights, a token
that Kafka keeps, a staging folder and a dead-letter topic.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping

import pyarrow.fs as pafs

from kafka_eos_source.errors import AuthorizationError, KafkaEosError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.health import (
    Broker,
    ClockDifference,
    Layout,
    Rights,
    clock_difference,
    replicas_below,
)
from kafka_eos_source.kafka.probe import finalized_features
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.operate.doctor.finding import Finding, Severity, failure, ok
from kafka_eos_source.operate.inspection import Inspection
from kafka_eos_source.operate.rights import QUERY, Names, Need, arguments, needs
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system

#: Features of a cluster by level, as a broker reports them; None = it is too old to report any.
Features = Mapping[str, int] | None

_FEATURE = "transaction.version"
_PROTECTED_LEVEL = 2
_FEATURE_SECONDS = 5.0
_BROKER_SECONDS = 5.0
_CLOCK_WARNING_MS, _CLOCK_BAD_MS = 2_000, 60_000
_OFFSETS_TOPIC, _TRANSACTIONS_TOPIC = "__consumer_offsets", "__transaction_state"
_ENOUGH_REPLICAS = 3


def ask_broker(kafka: Mapping[str, str], broker: Broker, deadline: Deadline) -> None:
    """Asks one broker for metadata, at the address that it gives to clients.

    Raises:
        KafkaEosError: if it does not answer, or refuses the login.
    """
    alone = {**kafka, "bootstrap.servers": f"{broker.host}:{broker.port}"}
    # librdkafka's own log is off, because the check reports the error
    with ClusterReader({**admin_config(alone), "log_level": "0"}) as reader:
        reader.topics(deadline)


def brokers(
    kafka: Mapping[str, str],
    found: Layout,
    cluster_id: str,
    deadline: Deadline,
    *,
    ask: Callable[[Mapping[str, str], Broker, Deadline], None] = ask_broker,
) -> Iterator[Finding]:
    """Checks that every broker answers at the address that it gives to clients.

    Each broker has `_BROKER_SECONDS`, so that one that is down leaves time for the others.
    """
    answering = 0
    for each in found.brokers:
        try:
            ask(kafka, each, Deadline.after_seconds(min(_BROKER_SECONDS, deadline.budget_seconds)))
            answering += 1
        except KafkaEosError as error:
            yield Finding(
                "brokers",
                Severity.BAD,
                f"broker {each.node_id} does not answer at {each.host}:{each.port}: {error.message}",
                "clients find a broker by the address in its advertised.listeners, whatever "
                "bootstrap.servers says; its partitions cannot be read or written",
                "start the broker, correct its advertised.listeners, or open the port for this machine.",
            )
    listed = ", ".join(f"{each.node_id} at {each.host}:{each.port}" for each in found.brokers)
    topics = len(found.replicas)
    text = f"{answering} of {len(found.brokers)} brokers of cluster {cluster_id} answer ({listed})"
    if answering == len(found.brokers):
        yield ok("brokers", f"{text}; {topics} visible topics")


def transaction_version(
    kafka: Mapping[str, str],
    found: Layout,
    *,
    ask: Callable[[str, int, Mapping[str, str], float], Features] = finalized_features,
) -> Finding:
    """Reports the level of the finalized feature ``transaction.version``."""
    why = (
        "at level 2, brokers raise the epoch with each transaction (KIP-890), so they reject its late "
        "requests; below that, a sink asks for another epoch before each transaction"
    )
    problem = "there are no brokers"
    for each in found.brokers:
        try:
            features = ask(each.host, each.port, kafka, _FEATURE_SECONDS)
        except (OSError, KafkaEosError) as error:
            problem = f"broker {each.node_id}: {error}"
            continue
        level = None if features is None else features.get(_FEATURE, 0)
        if level is None:
            text = (
                "the brokers are older than the request for features; Kafka 3.7 is the oldest supported one"
            )
            return Finding("transactions", Severity.BAD, text, why, "upgrade the brokers.")
        if level >= _PROTECTED_LEVEL:
            return ok("transactions", f"finalized {_FEATURE}={level}")
        return Finding(
            "transactions",
            Severity.NOTE,
            f"finalized {_FEATURE}={level}",
            why,
            f"with Kafka 4: kafka-features.sh --bootstrap-server … upgrade --feature {_FEATURE}=2",
        )
    return Finding(
        "transactions",
        Severity.NOTE,
        f"cannot ask for the finalized features: {problem}",
        why,
        f"run kafka-features.sh --bootstrap-server … describe; expected {_FEATURE}=2.",
    )


def replicas(found: Layout, topics: Collection[str]) -> Finding:
    """Checks that the topics of a query, and Kafka's own ones, survive the loss of a broker."""
    few = replicas_below(found, sorted({*topics, _OFFSETS_TOPIC, _TRANSACTIONS_TOPIC}), _ENOUGH_REPLICAS)
    if not few:
        return ok("replicas", f"the topics that were checked have {_ENOUGH_REPLICAS} replicas or more")
    listed = ", ".join(f"{name}: {count}" for name, count in few.items())
    is_cluster = len(found.brokers) > 1
    return Finding(
        "replicas",
        Severity.WARNING if is_cluster else Severity.NOTE,
        f"fewer than {_ENOUGH_REPLICAS} replicas ({listed})",
        "if the only in-sync replica is down when a transaction ends, brokers of Kafka 4.1 to 4.3 can leave "
        "the transaction hanging (KAFKA-20734); and data that has one replica can be lost",
        "give these topics three replicas on three brokers (docs/runbooks.md, Hanging transactions).",
    )


def clock(
    kafka: Mapping[str, str],
    topic: str,
    deadline: Deadline,
    *,
    ask: Callable[[Mapping[str, str], str, Deadline], ClockDifference] = clock_difference,
) -> Finding:
    """Compares the clock of this machine with that of a broker, by records in ``topic``."""
    why = (
        "timestamps, startingTimestamp, the bound of processing times (state.clock.max.ahead) and the ages "
        "that doctor and sweep compute are off by as much"
    )
    try:
        found = ask(kafka, topic, deadline)
    except KafkaEosError as error:
        return failure("clock", error, why, Severity.WARNING)
    text = (
        f"the broker's clock is {abs(found.ms):,.0f} ms {'ahead of' if found.ms >= 0 else 'behind'} this "
        f"machine's (± {found.uncertainty_ms:,.0f} ms)"
    )
    sure_ms = abs(found.ms) - found.uncertainty_ms
    if sure_ms < _CLOCK_WARNING_MS:
        return ok("clock", text)
    severity = Severity.BAD if sure_ms >= _CLOCK_BAD_MS else Severity.WARNING
    return Finding("clock", severity, text, why, "synchronise both clocks with NTP.")


# -- the rights of a query

#: Who may log in with the credentials: the whole query, or one part of it.
PRINCIPALS = ("query", *QUERY)


def check_rights(names: Names, principal: str, asks: Rights) -> Iterator[Finding]:
    """Yields a finding for each missing right, or one that all rights are there.

    Args:
        names: the query's resources.
        principal: one of `PRINCIPALS`.
        asks: looks up the rights of the credentials.
    """
    parts = QUERY if principal == "query" else (principal,)
    # the retention check asks for the right on the cluster; a changelog that exists needs no Create
    wanted = [each for each in needs(names, parts) if each.kind != "cluster" and each.operation != "CREATE"]
    topics = asks.of_topics({each.name for each in wanted if each.kind == "topic"})
    group = asks.of_group(names.group_id) if any(each.kind == "group" for each in wanted) else frozenset()
    missing, absent = 0, set()
    for each in wanted:
        if each.kind == "topic":
            held = topics[each.name]
            if held is None:
                missing += 1
                if each.name not in absent:
                    yield _no_topic(each.name)
                absent.add(each.name)
                continue
            is_there: bool | None = each.operation in held
        elif each.kind == "group":
            is_there = None if group is None else each.operation in group
        else:
            is_there = asks.may_write_transactional_id(each.name)
        if is_there is None:
            yield _unknown(each)
        elif not is_there:
            missing += not each.without
            yield _missing(each)
    if not missing:
        required = sum(not each.without for each in wanted)
        yield ok("rights", f"these credentials have the {required} rights that the {principal} needs")


def _missing(need: Need) -> Finding:
    return Finding(
        "rights",
        Severity.NOTE if need.without else Severity.BAD,
        f"the right {need.title} on {need.kind} {need.name!r} is missing",
        f"it is for {need.purpose}; without it: {need.without}"
        if need.without
        else f"the {need.part} needs it for {need.purpose}, and ends with NOT_AUTHORIZED without it",
        f"kafka-acls.sh --bootstrap-server … --add --allow-principal User:… {arguments(need)}",
    )


def _no_topic(name: str) -> Finding:
    return Finding(
        "rights",
        Severity.WARNING,
        f"topic {name!r} does not exist, so its rights are not known",
        "a query does not create its topics, except changelogs",
        f"kafka-eos topics create {name}, or correct the name.",
    )


def _unknown(need: Need) -> Finding:
    return Finding(
        "rights",
        Severity.NOTE,
        f"cannot ask for the right {need.title} on {need.kind} {need.name!r} without using it",
        f"the query needs it for {need.purpose}",
        "look at the ACLs: kafka-acls.sh --bootstrap-server … --list",
    )


# -- the token and the staging folder of a query

_HOUR_SECONDS = 3_600.0
#: A source without new records renews the token this often if it may not read the broker's setting.
_LEAST_RETENTION_SECONDS = 4 * _HOUR_SECONDS
_DAY_SECONDS = 24 * _HOUR_SECONDS
#: Part of the retention time that must be left.
_LEAST_PART_LEFT = 0.25


def retention(
    found: Inspection, retention_ms: int | KafkaEosError, now_seconds: float, token_topic: str | None
) -> Finding:
    """Compares how long Kafka keeps the token with the time since the query last planned a batch.

    Args:
        found: the state of the query, including Kafka and its checkpoint.
        retention_ms: ``offsets.retention.minutes`` in ms, or why it is not known.
        now_seconds: the current time, seconds since 1970.
        token_topic: the query's option ``token.topic``; None = not set.
    """
    why = (
        "a query commits its token as an offset of a group without members, which Kafka deletes after "
        "offsets.retention.minutes; a restart then ends with TOKEN_MISSING"
    )
    rescue = (
        f" The token topic {token_topic!r} keeps a copy, with which a restart continues."
        if token_topic
        else ""
    )
    planned = found.checkpoint.planned_at_seconds if found.checkpoint is not None else None
    idle = "" if planned is None else f"; the newest batch was planned {_span(now_seconds - planned)} ago"
    if isinstance(retention_ms, KafkaEosError):
        text = f"offsets.retention.minutes is not known{idle}: {retention_ms.message}"
        fix = "grant DescribeConfigs on the cluster, or ask its operators; the default is 7 days."
        return Finding("retention", Severity.NOTE, text, why, fix)
    kept = retention_ms / 1000
    text = f"Kafka keeps offsets for {_span(kept)}{idle}.{rescue}"
    fix = "raise offsets.retention.minutes above the longest planned stop, or set token.topic."
    has_token = found.kafka is not None and found.kafka.token is not None
    promised = found.checkpoint is not None and found.checkpoint.identity is not None
    if found.kafka is not None and promised and not has_token:
        severity = Severity.WARNING if token_topic else Severity.BAD
        return Finding(
            "retention", severity, f"the token is gone. {text}", why, "see docs/runbooks.md, TOKEN_MISSING."
        )
    left = kept if planned is None else kept - (now_seconds - planned)
    if has_token and not token_topic and left < _LEAST_PART_LEFT * kept:
        due = f"in {_span(left)}" if left > 0 else "at any moment"
        return Finding(
            "retention",
            Severity.WARNING,
            f"{text} Unless the query runs, Kafka deletes its token {due}",
            why,
            "start the query soon, or set token.topic.",
        )
    if kept < _LEAST_RETENTION_SECONDS and not token_topic:
        return Finding("retention", Severity.WARNING, text, why, fix)
    if kept < _DAY_SECONDS and not token_topic:
        return Finding("retention", Severity.NOTE, text, why, fix)
    return ok("retention", text)


def staging(location: str) -> Finding:
    """Checks that this machine can write, read and delete in the staging folder."""
    why = "rows that are too large for a commit message are staged there"
    try:
        fs, path = file_system(location)
        if isinstance(fs, pafs.LocalFileSystem) and not os.path.isdir(path):
            parent = _nearest_existing(path)
            if not os.path.isdir(parent):
                raise NotADirectoryError(f"{parent} is not a folder")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError(f"{parent} is not writable")
            return ok("staging", f"{location} does not exist yet, and can be created")
        probe, text = f"{path}/.doctor-{uuid.uuid4().hex}", uuid.uuid4().hex.encode()
        with fs.open_output_stream(probe) as out:
            out.write(text)
        try:
            with fs.open_input_stream(probe) as file:
                if file.read() != text:
                    raise OSError("a file that was just written has other contents")
        finally:
            fs.delete_file(probe)
    except (OSError, KafkaEosError) as error:
        return Finding(
            "staging",
            Severity.BAD,
            f"this machine cannot use {location}: {error}",
            why,
            "correct staging.location, or the rights on that folder.",
        )
    return ok("staging", f"this machine can use {location}")


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _span(seconds: float) -> str:
    for unit, size in (("days", _DAY_SECONDS), ("hours", _HOUR_SECONDS), ("minutes", 60.0)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.0f} seconds"


# -- the dead-letter topic of a query

_CHECK = "dead-letters"
#: Kafka's default of retention.ms.
_WEEK_MS = 7 * 24 * 3_600_000
#: A dead letter has up to 8 KiB of headers; the sink refuses topics that take no more than twice of that.
_LEAST_BYTES = 16_384
_MAX_BYTES = "max.message.bytes"


def check_dead_letter_topic(
    name: str, output: str | None, topics: TopicAdmin, deadline: Deadline
) -> Iterator[Finding]:
    """Yields what is wrong with a dead-letter topic, or that nothing is.

    Args:
        name: the option ``deadLetter.topic``.
        output: the option ``topic``; None = not known.
        topics: looks topics up with the sink's credentials.
        deadline: limits the wait for the brokers.
    """
    if topics.shape(name, deadline) is None:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"the dead-letter topic {name!r} does not exist",
            "a query with onInvalidRecord=dead-letter does not start without it",
            f"kafka-eos topics create {name}",
        )
        return
    try:
        config = topics.config(name, deadline)
        limit = None if output is None else int(topics.config(output, deadline)[_MAX_BYTES])
    except AuthorizationError as error:
        why = "the sink asks for max.message.bytes, to know which records are too large"
        yield failure(_CHECK, error, why, Severity.WARNING)
        return
    found = [*_cleanup(name, config), *_size(name, int(config[_MAX_BYTES]), output, limit)]
    yield from found or [
        ok(_CHECK, f"topic {name!r} takes and keeps dead letters ({_MAX_BYTES}={config[_MAX_BYTES]})")
    ]


def _cleanup(name: str, config: Mapping[str, str]) -> Iterator[Finding]:
    policy = config["cleanup.policy"]
    if "compact" in policy:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"topic {name!r} has cleanup.policy={policy}",
            "a compacted topic refuses letters without a key, so that the batch fails, and keeps only the "
            "newest letter of each key",
            f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=delete",
        )
    retention_ms = int(config["retention.ms"])
    if 0 <= retention_ms < _WEEK_MS:
        yield Finding(
            _CHECK,
            Severity.NOTE,
            f"topic {name!r} keeps letters for {retention_ms / 3_600_000:,.0f} hours (retention.ms)",
            "letters that are deleted before somebody looks at them are lost",
            "raise retention.ms; a week is Kafka's default.",
        )


def _size(name: str, own: int, output: str | None, limit: int | None) -> Iterator[Finding]:
    if own < _LEAST_BYTES:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"topic {name!r} has {_MAX_BYTES}={own}",
            f"a letter needs {_LEAST_BYTES:,} bytes, so that its headers fit; the query does not start",
            f"raise {_MAX_BYTES} of topic {name!r}.",
        )
    elif limit is not None and own < limit:
        yield Finding(
            _CHECK,
            Severity.WARNING,
            f"topic {name!r} has {_MAX_BYTES}={own}, less than topic {output!r} ({limit})",
            "records between the two sizes become dead letters with the beginning of their value, although "
            "the output takes them",
            f"raise {_MAX_BYTES} of topic {name!r} to {limit} or more.",
        )
