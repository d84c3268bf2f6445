"""Which Kafka the tests run against."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kafka_eos_source.embedded import EmbeddedKafka

VARIABLE = "KAFKA_BOOTSTRAP"
IMAGE = "apache/kafka:4.3.1"


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
        from testcontainers.kafka import KafkaContainer

        with KafkaContainer(IMAGE).with_kraft() as container:
            yield container.get_bootstrap_server()
    else:
        with EmbeddedKafka() as kafka:
            yield kafka.bootstrap_servers
