"""`quiet_logs` without a JVM: what it hides, what it keeps, and that it respects the user's own settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from kafka_eos_source import quiet_logs
from kafka_eos_source.kafka import clients
from kafka_eos_source.kafka.secrets import MASK, Secrets
from kafka_eos_source.runtime import client_log
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark import session


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*session._OWN_OPTIONS, "SPARK_HOME", client_log.VARIABLE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the function sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(session, "_running_jvm", lambda: None)


def made(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties that a Kafka client gets."""
    found = clients.make(dict, config)
    del found["logger"]
    return found


def test_spark_starts_with_the_quiet_configuration_and_keeps_the_options_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xmx1g")
    quiet_logs()
    options = os.environ["SPARK_SUBMIT_OPTS"].split()
    assert options[0] == "-Xmx1g"
    assert f"-Dlog4j2.configurationFile={session.CONFIGURATION.as_uri()}" in options
    assert session.CONFIGURATION.exists()


def test_a_second_call_adds_nothing() -> None:
    quiet_logs()
    once = os.environ["SPARK_SUBMIT_OPTS"]
    quiet_logs()
    assert os.environ["SPARK_SUBMIT_OPTS"] == once


@pytest.mark.parametrize("name", session._OWN_OPTIONS)
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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(client: int, port: int, ms: int) -> str:
    """A line of librdkafka, as it is logged for each attempt to connect."""
    address = f"127.0.0.1:{port}/bootstrap"
    return (
        f"FAIL [rdkafka#producer-{client}] [thrd:{address}]: {address}: Connect to ipv4#127.0.0.1:{port} "
        f"failed: Connection refused (after {ms}ms in state CONNECT"
        f"{', 1 identical error(s) suppressed' if ms else ''})"
    )


def test_a_line_that_repeats_is_logged_once_and_later_with_a_count() -> None:
    repeats = client_log.Repeats(clock := Clock())
    logged = []
    for attempt in range(773):  # in 43 s, by two clients in turn
        clock.now = attempt / 18
        logged.append(repeats.reduced(refused(attempt % 2, 19092, attempt % 3)))
    first, second = [line for line in logged if line is not None]
    assert first == logged[0] == refused(0, 19092, 0)
    assert second is not None
    assert second.startswith(refused(0, 19092, 0)[:40])
    assert second.endswith("(540 times in the last 30 s)")


def test_no_line_about_another_cause_is_lost() -> None:
    repeats = client_log.Repeats(Clock())
    for _ in range(3):
        lines = [repeats.reduced(refused(1, port, 0)) for port in range(50)]
        lines.append(repeats.reduced("FAIL [rdkafka#producer-1] [thrd:b]: b: Authentication failed"))
    assert lines == [None] * 51
    repeats = client_log.Repeats(Clock())
    assert None not in [repeats.reduced(refused(1, port, 0)) for port in range(1000)]


def test_the_state_in_which_a_connection_failed_is_part_of_its_line() -> None:
    repeats = client_log.Repeats(Clock())
    for state in ("CONNECT", "SSL_HANDSHAKE", "APIVERSION_QUERY", "AUTH_REQ"):
        line = "FAIL [rdkafka#producer-1] [thrd:b]: b: Connection closed (after %sms in state " + state + ")"
        assert repeats.reduced(line % 7) is not None
        assert repeats.reduced(line % 5001) is None


def test_a_line_that_comes_back_much_later_is_logged_as_it_is() -> None:
    repeats = client_log.Repeats(clock := Clock())
    assert repeats.reduced("it failed") == "it failed"
    clock.now = 3600.0
    assert repeats.reduced("it failed") == "it failed"


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
def test_what_librdkafka_logs_has_no_secrets_and_no_repetitions(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_log, "_repeats", client_log.Repeats())
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{refusing.getsockname()[1]}"
        config = {"bootstrap.servers": address, "reconnect.backoff.ms": 1, "reconnect.backoff.max.ms": 1}
        client: Any = clients.make(kind, {**config, "group.id": "g"} if kind is Consumer else config)
        deadline = Deadline.after_seconds(30)
        while "Connection refused" not in caplog.text:
            assert not deadline.expired
            client.poll(0.1)
        client.poll(0.5)
    assert caplog.text.count("Connection refused") == 1
    client_log.ClientLog(Secrets.of({"sasl.password": "swordfish"}).hide).log(30, "%s: %s", "a", "swordfish")
    assert "swordfish" not in caplog.text
    assert f"a: {MASK}" in caplog.text


def test_warnings_that_need_action_stay_visible() -> None:
    kept = list(session.kept_loggers())
    assert "org.apache.spark.scheduler.TaskSchedulerImpl" in kept  # no executor accepts the tasks
    assert "org.apache.spark.SparkConf" in kept
    assert len(kept) == session.CONFIGURATION.read_text().count(".level = warn")
