"""Asks one broker alone, at a given address: for its finalized features, or for the brokers that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kafka.protocol.metadata import ApiVersionsRequest

from kafka_eos_source.kafka.wire.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.wire.messages import VERSIONS_WITH_FEATURES
from kafka_eos_source.runtime.deadline import Deadline


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
