"""What the package sets up around a session: settings, and fast local checkpoint files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from kafka_eos_source import local_checkpoints
from kafka_eos_source.spark import session
from kafka_eos_source.spark.session import (
    ADAPTIVE_SETTING,
    BATCH_BYTES_SETTING,
    SETTING,
    disable_adaptive_streaming,
    file_system_manager,
    recommended_settings,
    use_this_python,
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


# ------------------------------------------------------------------ the interpreter


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYSPARK_SUBMIT_ARGS", "--master  local[2] pyspark-shell", True),
        ("PYSPARK_SUBMIT_ARGS", "--master yarn pyspark-shell", False),
        ("PYSPARK_SUBMIT_ARGS", "--conf spark.master=k8s://x pyspark-shell", False),
        ("PYSPARK_DRIVER_PYTHON", "/opt/python", False),
        ("PYSPARK_GATEWAY_PORT", "4711", False),
        ("spark-defaults.conf", "spark.driver.memory 2g\n", True),
        ("spark-defaults.conf", "spark.master  spark://host:7077\n", False),
        ("spark-defaults.conf", "spark.pyspark.python /opt/python\n", False),
    ],
)
def test_a_local_session_starts_the_interpreter_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, expected: bool
) -> None:
    for each in (*session._NAMES_PYTHON, "PYSPARK_SUBMIT_ARGS", "SPARK_HOME"):
        monkeypatch.setenv(each, "")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    if name == "spark-defaults.conf":
        (tmp_path / name).write_text(value)
    else:
        monkeypatch.setenv(name, value)
    use_this_python()
    assert (os.environ["PYSPARK_PYTHON"] == sys.executable) == expected


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
