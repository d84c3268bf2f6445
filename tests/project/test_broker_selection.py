"""Which Kafka the integration tests choose, and that the files for Docker users agree with the code."""

from __future__ import annotations

import re

import pytest
import yaml

from integration.support.broker import IMAGE, VARIABLE, choose, container_environment
from kafka_eos_source.embedded.java import KAFKA_VERSION
from tests import ROOT


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
    """The image of the compose file sets the same properties as the embedded broker."""
    image = (ROOT / "docker" / "broker.Dockerfile").read_text(encoding="utf-8")
    assert f"FROM {IMAGE}\n" in image
    assert IMAGE.endswith(f":{KAFKA_VERSION}")
    found = dict(re.findall(r"^(?:ENV| {3}) (KAFKA_[A-Z_]+)=(\S*)", image, re.MULTILINE))
    assert found == container_environment("localhost", 9092, auto_create_topics=True)


def test_the_compose_file_builds_the_images_of_this_folder() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert compose["services"]["kafka"]["ports"] == ["127.0.0.1:9092:9092"]
    built = {each["build"]["dockerfile"] for each in compose["services"].values() if "build" in each}
    assert built == {f"docker/{each.name}" for each in (ROOT / "docker").glob("*.Dockerfile")}


def test_the_image_copies_what_the_package_is_built_from() -> None:
    """.dockerignore lets through what docker/pyspark.Dockerfile copies, and all of it exists."""
    image = (ROOT / "docker" / "pyspark.Dockerfile").read_text(encoding="utf-8")
    copied = {each for line in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE) for each in line.split()}
    packages = {each.parent.name for each in ROOT.glob("*/__init__.py")} - {
        "tests",
        "integration",
        "benchmarks",
    }
    assert {each for each in packages if each.startswith(("kafka_eos", "pyspark_kafka_eos"))} <= copied
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {each.removeprefix("!") for each in ignored if each.startswith("!")} == copied
    assert all((ROOT / each).exists() for each in copied)


def test_a_broker_in_a_container_advertises_its_published_port() -> None:
    environment = container_environment("docker.example", 20123)
    assert environment["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://docker.example:20123"
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert "9092" in environment["KAFKA_LISTENERS"]
