"""Which Kafka the integration tests choose, and that the files for Docker users agree with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.support.broker import IMAGE, VARIABLE, choose
from kafka_eos_source.embedded.jars import KAFKA_VERSION

ROOT = Path(__file__).parent.parent


def never() -> bool:
    raise AssertionError("the engine was asked although KAFKA_BOOTSTRAP is set")


@pytest.mark.parametrize(
    ("environment", "engine", "expected"),
    [
        ({VARIABLE: "b:9092"}, never, "external"),
        ({VARIABLE: ""}, lambda: True, "container"),
        ({}, lambda: True, "container"),
        ({}, lambda: False, "embedded"),
    ],
)
def test_choose(environment: dict[str, str], engine: object, expected: str) -> None:
    assert choose(environment, engine) == expected  # type: ignore[arg-type]


def test_docker_runs_the_same_kafka() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert f"image: {IMAGE}" in compose
    assert IMAGE.endswith(f":{KAFKA_VERSION}")
    assert '"9092:9092"' in compose
