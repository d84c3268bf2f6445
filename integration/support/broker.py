"""Chooses and starts the Kafka that the tests run against."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import Ports, free_ports, server_properties
from kafka_eos_source.embedded.java import KAFKA_VERSION

VARIABLE = "KAFKA_BOOTSTRAP"
#: Version of the embedded broker, such as ``3.9.1``, and the finalized levels of its features, such as
#: ``transaction.version=1``, separated by spaces.
VERSION_VARIABLE = "KAFKA_EOS_TEST_KAFKA"
IMAGE = "apache/kafka:4.3.1"
#: Names an archive that `write_archive` has written. Without it, brokers start with twice the CPU time.
ARCHIVE_VARIABLE = "KAFKA_EOS_TEST_BROKER_ARCHIVE"
#: Test brokers live for minutes, too short for the JVM's optimising compiler (C2) to pay off.
_C1 = "-XX:TieredStopAtLevel=1"
JAVA_OPTIONS = (
    (_C1, f"-XX:SharedArchiveFile={os.environ[ARCHIVE_VARIABLE]}", "-Xshare:auto", "-Xlog:cds=off")
    if os.environ.get(ARCHIVE_VARIABLE)
    else (_C1,)
)
_CONTAINER_SECONDS = 180


def write_archive(path: Path) -> None:
    """Writes an archive of the classes that a broker loads, which later brokers map into memory (JEP 350).

    A broker of another version, or with another Java, ignores the archive.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        options = (_C1, f"-XX:ArchiveClassesAtExit={unfinished}")
        with EmbeddedKafka(directory=Path(folder, "data"), java_options=options) as kafka:
            servers = {"bootstrap.servers": kafka.bootstrap_servers}
            admin, producer = AdminClient(servers), Producer({**servers, "transactional.id": "archive"})
            admin.create_topics([NewTopic("archive", 1)])["archive"].result()
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce("archive", b"value")
            producer.commit_transaction()
            producer.close()
        os.replace(unfinished, path)


def choose(environment: Mapping[str, str], engine_answers: Callable[[], bool]) -> str:
    """Returns ``external`` if `VARIABLE` is set, else ``container`` or, without an engine, ``embedded``."""
    if environment.get(VARIABLE):
        return "external"
    return "container" if engine_answers() else "embedded"


def container_engine_answers() -> bool:
    """Returns whether a Docker-compatible engine is reachable."""
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
    """Runs a Kafka of this kind while the block runs, and yields its bootstrap servers."""
    if kind == "external":
        yield os.environ[VARIABLE]
    elif kind == "container":
        with _container() as bootstrap:
            yield bootstrap
    else:
        with EmbeddedKafka(java_options=JAVA_OPTIONS, **version(os.environ)) as kafka:
            yield kafka.bootstrap_servers


def version(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `EmbeddedKafka` that `VERSION_VARIABLE` asks for."""
    version, *features = environment.get(VERSION_VARIABLE, KAFKA_VERSION).split()
    levels = {name: int(level) for name, _, level in (each.partition("=") for each in features)}
    return {"version": version, "features": levels}


def container_environment(host: str, port: int, *, auto_create_topics: bool = False) -> dict[str, str]:
    """Returns the embedded broker's settings as environment variables for Apache's image.

    The image turns ``KAFKA_A_B`` into ``a.b``. Clients connect to ``host:port``; inside the container the
    broker listens on 9092.
    """
    properties = server_properties(1, {1: Ports(9092, 9093)}, Path("/var/lib/kafka/data"), {})
    properties |= {
        "listeners": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "auto.create.topics.enable": str(auto_create_topics).lower(),
    }
    return {"KAFKA_" + name.upper().replace(".", "_"): value for name, value in properties.items()}


@contextmanager
def _container() -> Iterator[str]:
    """Runs Apache's image. The Kafka class of testcontainers supports only Confluent's image."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    (port,) = free_ports([0])
    container = DockerContainer(IMAGE).with_bind_ports(9092, port)
    host = container.get_docker_client().host()
    container.with_envs(**container_environment(host, port))
    started = LogMessageWaitStrategy("Kafka Server started").with_startup_timeout(_CONTAINER_SECONDS)
    with container.waiting_for(started):
        yield f"{host}:{port}"


if __name__ == "__main__":
    write_archive(Path(sys.argv[1]))
