"""Which Kafka the integration tests choose, and that the files for Docker users agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from integration.support.broker import IMAGE, VARIABLE, choose, container_environment
from kafka_eos_source.embedded.jars import KAFKA_VERSION

ROOT = Path(__file__).parent.parent


def never() -> bool:
    raise AssertionError("KAFKA_BOOTSTRAP is set, so Docker must not be called")


@pytest.mark.parametrize(
    ("environment", "engine", "expected"),
    [
        ({VARIABLE: "b:9092"}, never, "external"),
        ({VARIABLE: ""}, lambda: True, "container"),
        ({}, lambda: True, "container"),
        ({}, lambda: False, "embedded"),
    ],
)
def test_the_environment_chooses_the_broker_of_the_tests(
    environment: dict[str, str], engine: object, expected: str
) -> None:
    assert choose(environment, engine) == expected  # type: ignore[arg-type]


def test_docker_runs_the_same_kafka() -> None:
    """The compose file sets the same properties as the embedded broker."""
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert f"image: {IMAGE}" in compose
    assert IMAGE.endswith(f":{KAFKA_VERSION}")
    assert '"9092:9092"' in compose
    found = dict(re.findall(r'^ +(KAFKA_[A-Z_]+): "?([^"\n]*)"?$', compose, re.MULTILINE))
    assert found == container_environment("localhost", 9092, auto_create_topics=True)


def test_a_broker_in_a_container_advertises_its_published_port() -> None:
    environment = container_environment("docker.example", 20123)
    assert environment["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://docker.example:20123"
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert "9092" in environment["KAFKA_LISTENERS"]
