"""Which Kafka the tests run against."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import free_ports

VARIABLE = "KAFKA_BOOTSTRAP"
IMAGE = "apache/kafka:4.3.1"
#: Brokers of tests live for minutes: the second compiler of the JVM would not pay.
JAVA_OPTIONS = ("-XX:TieredStopAtLevel=1",)
_CONTAINER_SECONDS = 180


def choose(environment: Mapping[str, str], engine_answers: Callable[[], bool]) -> str:
    """``external`` when `VARIABLE` is set, else ``container`` where an engine answers, else ``embedded``."""
    if environment.get(VARIABLE):
        return "external"
    return "container" if engine_answers() else "embedded"


def container_engine_answers() -> bool:
    """Whether a Docker-compatible engine is there and willing."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError:
        return False
    try:
        docker.from_env(timeout=5).ping()
    except (DockerException, OSError):
        return False
    return True


@contextmanager
def running(kind: str) -> Iterator[str]:
    """Bootstrap servers of a Kafka of this kind, while the block runs."""
    if kind == "external":
        yield os.environ[VARIABLE]
    elif kind == "container":
        with _container() as bootstrap:
            yield bootstrap
    else:
        with EmbeddedKafka(java_options=JAVA_OPTIONS) as kafka:
            yield kafka.bootstrap_servers


def container_environment(host: str, port: int) -> dict[str, str]:
    """For Apache's image, whose scripts make ``a.b`` of ``KAFKA_A_B``; clients come to ``host:port``."""
    return {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        "KAFKA_LISTENERS": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://localhost:9093",
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://{host}:{port}",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "KAFKA_INTER_BROKER_LISTENER_NAME": "PLAINTEXT",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS": "5",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS": "5",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }


@contextmanager
def _container() -> Iterator[str]:
    """Not testcontainers' own Kafka class: that one knows Confluent's image and its scripts alone."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    (port,) = free_ports([0])
    container = DockerContainer(IMAGE).with_bind_ports(9092, port)
    host = container.get_docker_client().host()
    container.with_envs(**container_environment(host, port))
    started = LogMessageWaitStrategy("Kafka Server started").with_startup_timeout(_CONTAINER_SECONDS)
    with container.waiting_for(started):
        yield f"{host}:{port}"
