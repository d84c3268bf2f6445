"""What the package offers, and that Spark's discovery finds the same."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

import kafka_eos_source


def test_public_names() -> None:
    assert sorted(kafka_eos_source.__all__) == [
        "KafkaEosDataSource",
        "local_checkpoints",
        "map_in_read",
        "register",
    ]
    assert all(hasattr(kafka_eos_source, name) for name in kafka_eos_source.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kafka_eos_source.Nothing


def test_discovery_and_registration_name_the_same_format() -> None:
    found = importlib.import_module("pyspark_kafka_eos").DefaultSource
    assert found is kafka_eos_source.KafkaEosDataSource
    assert found.name() == "kafka-eos"
    registered: list[Any] = []
    kafka_eos_source.register(SimpleNamespace(dataSource=SimpleNamespace(register=registered.append)))  # type: ignore[arg-type]
    assert registered == [found]
