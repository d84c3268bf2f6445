"""Checks of a cluster: brokers answer, features are finalized, topics have replicas, clocks agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.health import Broker, ClockDifference, Layout, clock_difference, replicas_below
from kafka_eos_source.kafka.probe import finalized_features
from kafka_eos_source.operate.doctor.finding import Finding, Severity, failure, ok
from kafka_eos_source.runtime.deadline import Deadline

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
