"""What the package sets up around a session: settings, quiet logs, and fast local checkpoint files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from kafka_eos_source import local_checkpoints, quiet_logs
from kafka_eos_source.kafka import admin_client
from kafka_eos_source.runtime import logs
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import MASK, Secrets
from kafka_eos_source.spark import session
from kafka_eos_source.spark.session import (
    ADAPTIVE_SETTING,
    BATCH_BYTES_SETTING,
    SETTING,
    disable_adaptive_streaming,
    file_system_manager,
    recommended_settings,
    warn_of_large_batches,
)


class Conf(dict[str, str]):
    """The part of a session's ``conf`` that is used."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Session:
    def __init__(self, **settings: str) -> None:
        self.conf = Conf(settings)


def test_adaptive_execution_is_disabled_once() -> None:
    session: Any = Session()
    assert disable_adaptive_streaming(session)
    assert session.conf == {ADAPTIVE_SETTING: "false"}
    assert not disable_adaptive_streaming(session)


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_the_user_has_set_stays(value: str) -> None:
    session: Any = Session(**{ADAPTIVE_SETTING: value})
    assert not disable_adaptive_streaming(session)
    assert session.conf == {ADAPTIVE_SETTING: value}


@pytest.mark.parametrize(
    ("value", "warned"),
    [
        (None, False),
        ("67108864b", False),
        ("64m", False),
        ("2147483647", True),
        ("1g", True),
        ("2147483647b", True),
    ],
)
def test_a_session_without_a_limit_for_packed_batches_is_warned(
    value: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session: Any = Session(**({} if value is None else {BATCH_BYTES_SETTING: value}))
    with caplog.at_level("WARNING"):
        assert warn_of_large_batches(session, "a stateful operator") is warned
    assert ("a stateful operator passes packed batches" in caplog.text) is warned


def test_the_recommended_setting_for_small_rows_is_one_of_those() -> None:
    session: Any = Session(**recommended_settings(small_rows=True))
    assert warn_of_large_batches(session, "map_in_read")


# ------------------------------------------------------------------ quiet logs


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*session._OWN_OPTIONS, "SPARK_HOME", logs.LEVEL_VARIABLE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the function sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(session, "_running_jvm", lambda: None)


def made(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties that a Kafka client gets."""
    found = admin_client.make(dict, config)
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
    assert made({"client.id": "x"}) == {"client.id": "x", "log_level": logs.ERRORS}


def test_the_level_that_the_user_sets_for_a_client_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "6")
    quiet_logs()
    assert os.environ[logs.LEVEL_VARIABLE] == "6"
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
    repeats = logs.Repeats(clock := Clock())
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
    repeats = logs.Repeats(Clock())
    for _ in range(3):
        lines = [repeats.reduced(refused(1, port, 0)) for port in range(50)]
        lines.append(repeats.reduced("FAIL [rdkafka#producer-1] [thrd:b]: b: Authentication failed"))
    assert lines == [None] * 51
    repeats = logs.Repeats(Clock())
    assert None not in [repeats.reduced(refused(1, port, 0)) for port in range(1000)]


def test_the_state_in_which_a_connection_failed_is_part_of_its_line() -> None:
    repeats = logs.Repeats(Clock())
    for state in ("CONNECT", "SSL_HANDSHAKE", "APIVERSION_QUERY", "AUTH_REQ"):
        line = "FAIL [rdkafka#producer-1] [thrd:b]: b: Connection closed (after %sms in state " + state + ")"
        assert repeats.reduced(line % 7) is not None
        assert repeats.reduced(line % 5001) is None


def test_a_line_that_comes_back_much_later_is_logged_as_it_is() -> None:
    repeats = logs.Repeats(clock := Clock())
    assert repeats.reduced("it failed") == "it failed"
    clock.now = 3600.0
    assert repeats.reduced("it failed") == "it failed"


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
def test_what_librdkafka_logs_has_no_secrets_and_no_repetitions(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_repeats", logs.Repeats())
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{refusing.getsockname()[1]}"
        config = {"bootstrap.servers": address, "reconnect.backoff.ms": 1, "reconnect.backoff.max.ms": 1}
        client: Any = admin_client.make(kind, {**config, "group.id": "g"} if kind is Consumer else config)
        deadline = Deadline.after_seconds(30)
        while "Connection refused" not in caplog.text:
            assert not deadline.expired
            client.poll(0.1)
        client.poll(0.5)
    assert caplog.text.count("Connection refused") == 1
    logs.ClientLog(Secrets.of({"sasl.password": "swordfish"}).hide).log(30, "%s: %s", "a", "swordfish")
    assert "swordfish" not in caplog.text
    assert f"a: {MASK}" in caplog.text


def test_warnings_that_need_action_stay_visible() -> None:
    kept = list(session.kept_loggers())
    assert "org.apache.spark.scheduler.TaskSchedulerImpl" in kept  # no executor accepts the tasks
    assert "org.apache.spark.SparkConf" in kept
    assert len(kept) == session.CONFIGURATION.read_text().count(".level = warn")


# ------------------------------------------------------------------ local checkpoints

_STREAMING = "org.apache.spark.sql.execution.streaming"
_CLASS = "FileSystemBasedCheckpointFileManager"


def _jar(folder: Path, name: str, *classes: str) -> Path:
    with ZipFile(folder / name, "w") as archive:
        for each in classes:
            archive.writestr(each.replace(".", "/") + ".class", b"")
    return folder


@pytest.mark.parametrize("package", [_STREAMING, f"{_STREAMING}.checkpointing"])  # Spark 4.0; since 4.1
def test_the_class_is_found_under_the_package_name_of_each_spark_version(
    tmp_path: Path, package: str
) -> None:
    _jar(tmp_path, "spark-sql-api_2.13-4.jar", f"org.other.{_CLASS}")
    _jar(tmp_path, "spark-sql_2.13-4.jar", f"{package}.Other{_CLASS}", f"{package}.{_CLASS}")
    assert file_system_manager(tmp_path) == f"{package}.{_CLASS}"


def test_without_sparks_jars_there_is_no_setting(tmp_path: Path) -> None:
    assert file_system_manager(tmp_path / "jars") == ""
    assert file_system_manager(_jar(tmp_path, "spark-sql_2.13-9.jar", "org.apache.spark.sql.Row")) == ""


def test_the_installed_spark_contains_the_class() -> None:
    ((name, value),) = local_checkpoints().items()
    assert name == SETTING
    assert value.startswith(f"{_STREAMING}.")
    assert value.endswith(f".{_CLASS}")
