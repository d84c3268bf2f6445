"""What a person sees of errors: which lines of Spark's log, and what of an uncaught exception."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.core import context
from pyspark.errors import AnalysisException, StreamingQueryException

from kafka_eos_source import quiet_logs
from kafka_eos_source.errors import DataLossError
from kafka_eos_source.runtime.logs import QUIET_VARIABLE
from kafka_eos_source.spark import quiet
from kafka_eos_source.spark.quiet import quiet_by_default, short_text, short_traceback


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*quiet._OWN_OPTIONS, "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the function sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(quiet, "_running_jvm", lambda: None)
    monkeypatch.setattr(context, "launch_gateway", lambda *_: None)
    monkeypatch.delenv(QUIET_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


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


def test_warnings_that_need_action_stay_visible() -> None:
    kept = list(quiet.kept_loggers())
    assert "org.apache.spark.scheduler.TaskSchedulerImpl" in kept  # no executor accepts the tasks
    assert "org.apache.spark.SparkConf" in kept
    assert len(kept) == quiet.CONFIGURATION.read_text().count(".level = warn")


@pytest.mark.parametrize("text", ["false", "0", "OFF"])
def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(QUIET_VARIABLE, text)
    quiet_logs()
    quiet_by_default()
    assert "SPARK_SUBMIT_OPTS" not in os.environ
    assert sys.excepthook is sys.__excepthook__


def test_an_app_says_once_how_to_see_everything(caplog: pytest.LogCaptureFixture) -> None:
    quiet_by_default()
    quiet_by_default()
    assert "log4j2.configurationFile" in os.environ["SPARK_SUBMIT_OPTS"]
    (record,) = caplog.records
    assert "KAFKA_EOS_QUIET_LOGS=false" in record.getMessage()


@pytest.mark.parametrize("name", ["PYSPARK_GATEWAY_PORT", "SPARK_SUBMIT_OPTS"])
def test_an_app_leaves_the_logs_of_a_deployment_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "-Dlog4j2.configurationFile=mine.xml")
    quiet_by_default()
    assert not caplog.records
    assert sys.excepthook is sys.__excepthook__


def test_a_child_process_is_quiet_like_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_logs()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # it inherits the environment, not the hook
    quiet_logs()
    assert sys.excepthook is not sys.__excepthook__


# -- what Java prints when it starts


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (f"{quiet._JAVA_STARTS}\nan error\n", "an error\n"),
        (f"Picked up JAVA_TOOL_OPTIONS: -X\n{quiet._JAVA_STARTS}\n", "Picked up JAVA_TOOL_OPTIONS: -X\n"),
        ("  a\\n\n" + "b\n" * 20 + f"{quiet._JAVA_STARTS}\nno end of line", None),
        ("", None),
    ],
)
def test_the_filter_hides_one_line_and_changes_no_other(printed: str, shown: str | None) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", quiet._FILTER],
        input=printed,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (printed if shown is None else shown)


def test_the_next_jvm_starts_with_the_filter(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def launch(_conf: Any, popen_kwargs: Any) -> int:
        script = f"echo '{quiet._JAVA_STARTS}' >&2; echo 'an error' >&2"
        return subprocess.Popen(["/bin/sh", "-c", script], **(popen_kwargs or {})).wait()

    monkeypatch.setattr(context, "launch_gateway", launch)
    quiet_logs()
    quiet_logs()
    assert context.launch_gateway(None) == 0
    assert quiet._filters.pop().wait(60) == 0
    assert not quiet._filters, "a second call adds no second filter"
    assert capfd.readouterr().err == "an error\n"
    monkeypatch.setenv(QUIET_VARIABLE, "false")
    context.launch_gateway(None, {})
    assert "incubator" in capfd.readouterr().err


# -- uncaught exceptions

_OWN_TEXT = "[KAFKA_EOS.DATA_LOSS] records are gone.\nThey were deleted. Fix: start again."
_QUOTED = f"""[STREAM_FAILED] Query [id = 1-2, runId = 3] terminated: Traceback (most recent call last):
  File "kafka_eos_source/datasource/short_errors.py", line 58, in call
kafka_eos_source.errors.DataLossError: {_OWN_TEXT}
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: orders [id = 1-2, runId = 3]
Logical Plan:
"""


def test_the_error_of_this_package_is_taken_out_of_what_spark_quotes() -> None:
    shown = f"kafka_eos_source.errors.DataLossError: {_OWN_TEXT}"
    assert short_text(StreamingQueryException(_QUOTED)) == shown
    assert short_text(AnalysisException(_QUOTED)) == shown
    assert short_text(DataLossError("records are gone.\nThey were deleted.", "start again.")) == shown


def test_an_error_that_the_log_has_shown_is_not_repeated() -> None:
    found = short_text(StreamingQueryException(_QUOTED), is_logged=True)
    assert (
        found == "StreamingQueryException: query orders ended with DataLossError, which the log above shows."
    )


def test_an_error_in_code_of_the_user_is_shown_whole_and_without_the_plan_and_javas_frames() -> None:
    text = """[STREAM_FAILED] Query [id = 1-2, runId = 3] terminated: Traceback (most recent call last):
  File "job.py", line 3, in shout
TypeError: not a string
 SQLSTATE: 38000
\tat org.apache.spark.X(X.scala:1)
\t... 30 more
=== Streaming Query ===
Identifier: [id = 1-2, runId = 3]
"""
    found = short_text(StreamingQueryException(text)) or ""
    assert found.endswith('File "job.py", line 3, in shout\nTypeError: not a string\n SQLSTATE: 38000')
    logged = short_text(StreamingQueryException(text), is_logged=True) or ""
    assert logged.endswith("query 1-2 ended with TypeError, which the log above shows.")


def test_what_a_sink_of_the_user_raised_stays() -> None:
    text = _QUOTED.replace(
        "kafka_eos_source.errors", "KeyError: 1\nThe above exception…\nkafka_eos_source.errors"
    )
    assert "KeyError: 1" in (short_text(StreamingQueryException(text)) or "")


def test_a_data_source_that_another_python_does_not_find_is_explained() -> None:
    text = (
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: kafka-eos. Make sure the provider is right."
    )
    found = short_text(AnalysisException(text)) or ""
    assert "Make sure" in found
    assert f"PYSPARK_PYTHON={sys.executable}" in found
    assert "PYSPARK_PYTHON" not in (short_text(AnalysisException(text.replace("kafka-eos", "x"))) or "")


def caught(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return error
    raise AssertionError


def test_a_traceback_has_the_frames_of_the_user_only() -> None:
    def fails(_name: str) -> None:
        raise DataLossError("gone")

    code = compile("def inner(f): f('x')", quiet.__file__, "exec")  # a frame of this package
    names: dict[str, Any] = {}
    exec(code, names)
    error = caught(lambda: names["inner"](fails))
    lines = short_traceback(error, error.__traceback__)
    assert lines is not None
    assert lines[0].startswith("Traceback")
    assert "in fails" in lines[1]
    assert "in inner" not in "\n".join(lines)
    assert lines[-1] == "kafka_eos_source.errors.DataLossError: [KAFKA_EOS.DATA_LOSS] gone"


def test_other_exceptions_are_shown_by_python() -> None:
    assert short_traceback(ValueError("x"), None) is None

    def handles_another() -> None:
        try:
            int("the user's")
        except ValueError:
            raise DataLossError("gone")  # noqa: B904

    assert short_traceback(caught(handles_another), None) is None
    assert short_traceback(KeyboardInterrupt(), None) == ["KeyboardInterrupt"]


def test_an_uncaught_error_is_printed_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_logs()
    sys.excepthook(DataLossError, DataLossError("gone"), None)
    assert capsys.readouterr().err.splitlines()[-1].endswith("DataLossError: [KAFKA_EOS.DATA_LOSS] gone")
    sys.excepthook(ValueError, ValueError("of the user"), None)
    assert "ValueError: of the user" in capsys.readouterr().err


def test_py4j_does_not_log_what_it_raises() -> None:
    def record(module: str, text: str) -> logging.LogRecord:
        return logging.LogRecord("root", logging.ERROR, f"/py4j/{module}.py", 1, text, (), None)

    assert not quiet._is_no_repetition(record("java_gateway", "Exception while sending command."))
    assert quiet._is_no_repetition(record("java_gateway", "another"))
    assert quiet._is_no_repetition(record("mine", "Exception while sending command."))
