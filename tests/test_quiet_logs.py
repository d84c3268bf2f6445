"""`quiet_logs` without a JVM: what it hides, what it keeps, and that it respects the user's own settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source import quiet_logs
from kafka_eos_source.kafka import clients
from kafka_eos_source.runtime import client_log
from kafka_eos_source.spark import quiet


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*quiet._OWN_OPTIONS, "SPARK_HOME", client_log.VARIABLE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the function sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(quiet, "_running_jvm", lambda: None)


def made(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties that a Kafka client gets."""
    return clients.make(dict, config)


def test_spark_starts_with_the_quiet_configuration_and_keeps_the_options_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xmx1g")
    quiet_logs()
    options = os.environ["SPARK_SUBMIT_OPTS"].split()
    assert options[0] == "-Xmx1g"
    assert f"-Dlog4j2.configurationFile={quiet.CONFIGURATION.as_uri()}" in options
    assert quiet.CONFIGURATION.exists()


def test_a_second_call_adds_nothing() -> None:
    quiet_logs()
    once = os.environ["SPARK_SUBMIT_OPTS"]
    quiet_logs()
    assert os.environ["SPARK_SUBMIT_OPTS"] == once


@pytest.mark.parametrize("name", quiet._OWN_OPTIONS)
def test_a_log4j_configuration_of_the_user_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "-Dlog4j2.configurationFile=mine.xml")
    before = os.environ.get("SPARK_SUBMIT_OPTS")
    quiet_logs()
    assert os.environ.get("SPARK_SUBMIT_OPTS") == before


def test_a_log4j_file_in_the_configuration_folder_is_respected(tmp_path: Path) -> None:
    (tmp_path / "log4j2.properties").touch()
    quiet_logs()
    assert "SPARK_SUBMIT_OPTS" not in os.environ


def test_a_log4j_file_in_sparks_home_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "log4j2.xml").touch()
    quiet_logs()
    assert "SPARK_SUBMIT_OPTS" not in os.environ


def test_kafka_clients_print_errors_only_after_the_call() -> None:
    assert made({"client.id": "x"}) == {"client.id": "x"}
    quiet_logs()
    assert made({"client.id": "x"}) == {"client.id": "x", "log_level": client_log.ERRORS}


def test_the_level_that_the_user_sets_for_a_client_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client_log.VARIABLE, "6")
    quiet_logs()
    assert os.environ[client_log.VARIABLE] == "6"
    assert made({"log_level": "7"})["log_level"] == "7"


def test_warnings_that_need_action_stay_visible() -> None:
    kept = list(quiet.kept_loggers())
    assert "org.apache.spark.scheduler.TaskSchedulerImpl" in kept  # no executor accepts the tasks
    assert "org.apache.spark.SparkConf" in kept
    assert len(kept) == quiet.CONFIGURATION.read_text().count(".level = warn")
