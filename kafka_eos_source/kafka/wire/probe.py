"""Asks one broker alone: for its finalized features, for the brokers that it knows, or for its time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer import ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

from kafka_eos_source.kafka.wire.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.wire.messages import VERSIONS_WITH_FEATURES
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

#: Versions of the request to write, and how long the leader waits for the in-sync replicas.
_PRODUCE, _OLDEST_PRODUCE, _PRODUCE_MS = 11, 3, 10_000


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
            raise KafkaException(KafkaError(found.error_code))
        return sent, found.log_append_time_ms, acknowledged

    try:
        cluster.retried(f"writing a record to {tp}", deadline, write)
        return cluster.retried(f"writing a record to {tp}", deadline, write)
    finally:
        cluster.close()


def _one_record(tp: TopicPartition, version: int) -> ProduceRequest:
    """Returns the request that writes one record, without a producer id."""
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
