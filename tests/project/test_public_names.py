"""The public names are exactly the documented ones, and keep working."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

PUBLIC = {
    "kafka_eos_source": [
        "KafkaEosDataSource",
        "from_registry",
        "invalid_record",
        "local_checkpoints",
        "map_in_read",
        "observe_batches",
        "quiet_logs",
        "recommended_settings",
        "record_origin",
        "register",
        "registry_schema",
        "to_registry",
        "undecodable_record",
        "watch",
    ],
    "kafka_eos_source.datasource": ["KafkaEosDataSource"],
    "kafka_eos_source.embedded": ["EmbeddedKafka"],
    "kafka_eos_source.state": [
        "CHANGELOG",
        "StateQuery",
        "TransactionalStateStore",
        "aggregate_with_changelog_state",
        "apply_with_changelog_state",
        "deduplicate_with_changelog_state",
        "transform_with_changelog_state",
        "watch_state",
    ],
    "kafka_eos_source.state.vector": [
        "count",
        "deduplicate",
        "hopping",
        "latest",
        "max_",
        "mean",
        "min_",
        "session",
        "sum_",
        "tumbling",
    ],
    "kafka_eos_source.sinks.contract": ["SinkTxn", "TwoPhaseSink"],
    "kafka_eos_source.errors": ["KafkaEosError", "OperatorError", "RestartQueryError", "RetriableError"],
    "kafka_eos_source.testing.sinks": ["SinkConformance", "System"],
    "pyspark_kafka_eos": ["DefaultSource"],
    "pyspark_kafka_eos_state": ["DefaultSource"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_each_documented_name_can_be_imported(module: str) -> None:
    found = import_module(module)
    missing = [name for name in PUBLIC[module] if not hasattr(found, name)]
    assert not missing
    promised = getattr(found, "__all__", None)
    if module in ("kafka_eos_source", "kafka_eos_source.embedded", "kafka_eos_source.state"):
        assert promised is not None
        assert sorted(promised) == sorted(PUBLIC[module])


@pytest.mark.parametrize("module", ["kafka_eos_source", "kafka_eos_source.cli", "kafka_eos_source.embedded"])
def test_the_command_line_starts_without_pyspark(module: str) -> None:
    """`kafka-eos --help` does not import PySpark, which takes a second."""
    code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
