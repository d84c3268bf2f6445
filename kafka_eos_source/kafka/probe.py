"""Asks brokers one by one: whether they can be reached, for features, for metadata, for the time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer import ProduceRequest

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.error_codes import KafkaError
from kafka_eos_source.kafka.failure import ADVERTISED_FIX, START_SECONDS, UNREACHABLE_FIX
from kafka_eos_source.kafka.messages import VERSIONS_WITH_FEATURES
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

#: Versions of the request to write, and how long the leader waits for the in-sync replicas.
_PRODUCE, _OLDEST_PRODUCE, _PRODUCE_MS = 11, 3, 10_000
_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0
#: How long one pass over the brokers may take at least.
_PASS_SECONDS = 3.0
#: How long brokers that run may be unreachable at the addresses that they advertise, because DNS may learn of
#: new names a moment later.
_ADVERTISED_SECONDS = 3.0


def finalized_features(
    host: str, port: int, kafka: Mapping[str, str], timeout_seconds: float
) -> dict[str, int] | None:
    """Returns the finalized level of each feature (KIP-584), such as ``{"transaction.version": 2}``.

    Args:
        host: host of a broker.
        port: port of the broker's listener.
        kafka: librdkafka properties. Only those of TLS are used, because brokers answer before a login.
        timeout_seconds: limits the connection, and the answer.

    Returns:
        The levels; a feature at level 0 is absent. None = the broker is older than the request.

    Raises:
        OSError: if there is no connection, or no answer of a Kafka broker.
        KafkaEosError: if the properties or certificates cannot be used.
    """
    protocol = kafka.get("security.protocol", "plaintext").lower().removeprefix("sasl_")
    with _alone(host, port, {**kafka, "security.protocol": protocol}) as cluster:
        connection = cluster.anyone(Deadline.after_seconds(timeout_seconds))
        is_old = connection.version(ApiVersionsRequest, VERSIONS_WITH_FEATURES) < VERSIONS_WITH_FEATURES
        return None if is_old else dict(connection.features)


def broker_ids(host: str, port: int, kafka: Mapping[str, str], timeout_seconds: float) -> frozenset[int]:
    """Returns the node ids in the metadata of a broker.

    A broker accepts connections shortly before its metadata contains all brokers, including itself. A client
    that connects in between finds no broker, or too few replicas.

    Args:
        host: host of the broker.
        port: port of the broker's listener.
        kafka: librdkafka properties of TLS and the login.
        timeout_seconds: limits the connection and the answers.

    Raises:
        OSError: if there is no connection, or no answer of a Kafka broker.
        AuthorizationError: if the login is refused.
    """
    with _alone(host, port, kafka) as cluster:
        answer = cluster.metadata([], Deadline.after_seconds(timeout_seconds))
        return frozenset(each.node_id for each in answer.brokers or ())


def append_time(kafka: Mapping[str, str], tp: TopicPartition, deadline: Deadline) -> tuple[float, int, float]:
    """Writes two records to a topic with ``message.timestamp.type=LogAppendTime``.

    The first request of a connection takes longer, so the second one is measured.

    Args:
        kafka: librdkafka properties of the connection.
        tp: a partition of the topic.
        deadline: for both.

    Returns:
        When the request was sent, in seconds; the broker's time, in ms; when it was acknowledged, in seconds.

    Raises:
        UnavailableError: if the leader does not answer in time, or there is none.
        KafkaEosError: if it refuses the record.
    """
    cluster = Cluster(kafka)

    def write() -> tuple[float, int, float]:
        cluster.metadata([tp.topic], deadline)
        leader = cluster.leaders.of(tp)
        if leader is None:
            raise TemporaryError(f"{tp} has no leader")
        connection = cluster.broker(leader, deadline)
        request = _one_record(tp, connection.version(ProduceRequest, _PRODUCE, _OLDEST_PRODUCE))
        sent = time.time()
        answer = cluster.ask(connection, request, deadline)
        acknowledged = time.time()
        found = answer.responses[0].partition_responses[0]
        if found.error_code:
            raise KafkaError(found.error_code)
        return sent, found.log_append_time_ms, acknowledged

    try:
        cluster.retried(f"writing a record to {tp}", deadline, write)
        return cluster.retried(f"writing a record to {tp}", deadline, write)
    finally:
        cluster.close()


def _one_record(tp: TopicPartition, version: int) -> ProduceRequest:
    """Returns the request that writes one record, without a producer id."""
    from kafka.record.default_records import DefaultRecordBatchBuilder  # loads all codecs, for a rare case

    batch = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1024,
    )
    batch.append(0, None, None, b"clock check of kafka-eos doctor", [])
    kind = ProduceRequest.TopicProduceData
    partition = kind.PartitionProduceData(index=tp.partition, records=bytes(batch.build()), version=version)
    return ProduceRequest(
        transactional_id=None,
        acks=-1,
        timeout_ms=_PRODUCE_MS,
        topic_data=[kind(name=tp.topic, partition_data=[partition], version=version)],
        version=version,
    )


@contextmanager
def _alone(host: str, port: int, kafka: Mapping[str, str]) -> Iterator[Cluster]:
    """Yields a client of one broker; its failures are those of a connection."""
    cluster = Cluster({**kafka, "bootstrap.servers": f"{host}:{port}"})
    try:
        yield cluster
    except TemporaryError as error:
        raise ConnectionError(str(error)) from error
    finally:
        cluster.close()


class _AdvertisedError(Exception):
    """The bootstrap server answered, but no broker can be reached at the address that it advertises."""

    def __init__(self, bootstrap: str, causes: str) -> None:
        super().__init__(
            f"the bootstrap server {bootstrap} answered, but no broker can be reached at the address that it "
            f"advertises: {causes}"
        )


def check_reachable(config: Mapping[str, Any], seconds: float = START_SECONDS, *, every: bool = False) -> str:
    """Connects to a bootstrap server, and to a broker at the address that it advertises.

    A client connects to an address of ``bootstrap.servers`` first, and then to the addresses that the brokers
    advertise. If it cannot reach those, librdkafka reports only that all brokers are down, after 44 s. This
    function uses the package's own client, which knows which address failed, why, and where it comes from.

    Args:
        config: librdkafka properties of a client.
        seconds: how long to try; 0 = once.
        every: connect to all brokers, instead of stopping at the first one that answers.

    Returns:
        What is wrong although the cluster may work: brokers that cannot be reached while others can, or that
        accept connections and did not answer in time; "" if nothing is.

    Raises:
        UnavailableError: if no broker can be reached, because connections are refused, end, or are not
            accepted in time, or host names do not resolve.
        AuthorizationError: if a broker refuses the login.
        InvalidOptionError: if a certificate or key cannot be used.
    """
    cluster, deadline = Cluster(config), Deadline.after_seconds(seconds)
    advertised = Deadline.after_seconds(_ADVERTISED_SECONDS)
    try:
        some = retry(
            lambda: _unreached(cluster, deadline, every=every),
            (TemporaryError, _AdvertisedError),
            Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
            permanent=lambda each: (
                each if isinstance(each, _AdvertisedError) and advertised.expired else None
            ),
        )
    except (TemporaryError, _AdvertisedError) as failure:
        if cluster.refusal is not None:
            raise cluster.refusal from failure
        if not cluster.refuses:
            return str(failure)
        if isinstance(failure, _AdvertisedError):
            raise UnavailableError(f"{failure}.", fix=ADVERTISED_FIX) from failure
        raise UnavailableError(
            f"no answer from Kafka at kafka.bootstrap.servers={cluster.bootstrap!r}: {cluster.unreached}.",
            fix=UNREACHABLE_FIX,
        ) from failure
    finally:
        cluster.close()
    if some:
        _log.warning("other brokers of the cluster answer, but this process %s", some)
    return some


def _is_at(cluster: Cluster, node: int, address: str) -> bool:
    """Returns whether a broker advertises this address."""
    host, port = cluster.brokers[node]
    return f"{host}:{port}" == address


def _unreached(cluster: Cluster, deadline: Deadline, *, every: bool) -> str:
    """Returns which brokers cannot be reached; stops at the first that can, unless ``every`` is set."""
    deadline = Deadline.after_seconds(max(_PASS_SECONDS, deadline.remaining_seconds()))
    cluster.metadata([], deadline)
    bootstrap = cluster.anyone(deadline).address
    causes: list[TemporaryError] = []
    # the broker that has answered needs no other connection; one that is silent must not delay a start
    nodes = sorted(cluster.brokers, key=lambda each: not _is_at(cluster, each, bootstrap))
    for index, node in enumerate(nodes):
        if _is_at(cluster, node, bootstrap):
            if every:
                continue
            break
        share = Deadline.after_seconds(deadline.remaining_seconds() / (len(nodes) - index))
        try:
            cluster.broker(node, share)
        except TemporaryError as cause:
            causes.append(cause)
        else:
            if not every:
                break
    text = "; ".join(map(str, causes))
    if causes and len(causes) == len(nodes):
        raise _AdvertisedError(bootstrap, text)
    return text
