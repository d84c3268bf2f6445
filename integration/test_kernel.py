"""A query whose processes find a copy of the package without the C kernel says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.support.driver import ROOT
from integration.support.kafka import produce, read_back, values
from integration.test_sink_stream import rows, spec
from kafka_eos_source.kafka import kernel


@pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)
def test_a_query_says_that_its_processes_import_a_copy_of_the_package_without_kernel(
    broker: str, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The program has the kernel; Spark's processes find another copy in its working directory."""
    checkout, source, sink = tmp_path / "checkout", topic(1), topic(1)
    for package in ("kafka_eos_source", "pyspark_kafka_eos"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("*.so"))
    produce(broker, source, rows(0, 10))
    running = driver(spec(broker, source, sink, checkpoint, 10, directory=str(checkout)))
    running.finish()
    assert values(read_back(broker, sink)) == rows(0, 10)
    said = [line for line in running.log.read_text().splitlines() if "without the C kernel" in line]
    assert len(said) == 1, said
    assert "the query runs" in said[0]
    assert str(checkout) in said[0]
