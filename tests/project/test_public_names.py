"""The public names are exactly the documented ones, and keep working."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from tests.project.public_names import PUBLIC


@pytest.mark.parametrize("module", PUBLIC)
def test_each_documented_name_can_be_imported(module: str) -> None:
    found = import_module(module)
    missing = [name for name in PUBLIC[module] if not hasattr(found, name)]
    assert not missing
    promised = getattr(found, "__all__", None)
    if module in (
        "kafka_eos_source",
        "kafka_eos_source.embedded",
        "kafka_eos_source.state",
        "kafka_eos_source.state.aggregates",
    ):
        assert promised is not None
        assert sorted(promised) == sorted(PUBLIC[module])


@pytest.mark.parametrize("module", ["kafka_eos_source.state.vector", "kafka_eos_source.state.processor"])
def test_packages_of_internals_promise_nothing(module: str) -> None:
    """Users find windows and keyed batches in `kafka_eos_source.state`, aggregates in its `aggregates`."""
    found = import_module(module)
    assert getattr(found, "__all__", []) == []
    assert not hasattr(found, "tumbling")


@pytest.mark.parametrize("module", ["kafka_eos_source", "kafka_eos_source.cli", "kafka_eos_source.embedded"])
def test_the_command_line_starts_without_pyspark(module: str) -> None:
    """`kafka-eos --help` does not import PySpark, which takes a second."""
    code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
