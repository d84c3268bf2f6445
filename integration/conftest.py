"""Fixtures: see `integration.support`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support.driver import Driver
from integration.support.kafka import Admin
from integration.support.session import builder
from kafka_eos_source.embedded import EmbeddedKafka


@pytest.fixture(scope="session")
def broker() -> Iterator[str]:
    with brokers.running(brokers.choose(os.environ, brokers.container_engine_answers)) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def admin(broker: str) -> Admin:
    return Admin(broker)


@pytest.fixture
def topic(admin: Admin) -> Callable[..., str]:
    def make(partitions: int = 1, **config: str) -> str:
        return admin.create(f"t-{uuid.uuid4().hex[:10]}", partitions, **config)

    return make


@pytest.fixture(scope="session")
def other_cluster() -> Iterator[str]:
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = builder().getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    yield session
    session.stop()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(spec: Mapping[str, Any], failpoints: str = "") -> Driver:
        started.append(Driver(spec, tmp_path / "drivers", failpoints))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
