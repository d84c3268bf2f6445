"""``kafka-eos doctor``: each check passes and fails when it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from mock_cluster import MockCluster

from kafka_eos_source.cli import main
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka import kernel
from kafka_eos_source.operate import doctor
from kafka_eos_source.runtime.deadline import Deadline


def test_installed_components_pass_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "found", lambda: ("/opt/java", 21))
    monkeypatch.setattr(kernel, "choice", lambda: kernel.Choice(kernel.Kernel.__new__(kernel.Kernel), ""))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with MockCluster() as mock:
        result = CliRunner().invoke(main, ["doctor", "--bootstrap-servers", mock.bootstrap_servers])
    assert result.exit_code == 0, result.output
    lines = dict(line[4:].split(maxsplit=1) for line in result.output.splitlines())
    assert "pyspark" in lines["versions"]
    assert lines["java"] == "/opt/java, version 21"
    assert lines["kernel"] == "in use"
    assert lines["discovery"] == "Spark finds 'kafka-eos', 'kafka-eos-state'"
    assert lines["executors"] == f"PYSPARK_PYTHON={sys.executable}"
    assert "answers: cluster mockCluster" in lines["broker"]


def test_missing_components_fail_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java() -> tuple[str, int]:
        raise UnavailableError("no Java found.", fix="install it.")

    monkeypatch.setattr(java, "found", no_java)
    monkeypatch.setattr(kernel, "choice", lambda: kernel.Choice(None, "it was not built"))
    monkeypatch.setattr(doctor, "iter_modules", list)
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    arguments = ["doctor", "--bootstrap-servers", "127.0.0.1:1", "--timeout", "300ms"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 3
    assert "BAD java       no Java found.\n    fix: install it." in result.output
    assert (
        "ok  kernel     not in use; the slower Python code is used instead: it was not built" in result.output
    )
    assert "BAD discovery  Spark does not find format('kafka-eos')\n" in result.output
    assert "BAD executors  PYSPARK_PYTHON=/nowhere/python, which does not exist" in result.output
    assert "BAD broker     no answer from Kafka" in result.output


def test_a_module_that_cannot_be_imported_hides_all_data_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyspark_0_broken.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    check = doctor.discovery()
    assert check.text.endswith("importing pyspark_0_broken fails with RuntimeError: not today")
    assert check.fix == "repair or uninstall pyspark_0_broken."


def test_another_python_for_executors_is_reported(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        for each in ("python", "python3"):
            (tmp_path / name / each).write_text("")
            (tmp_path / name / each).chmod(0o755)
    ours, theirs = str(tmp_path / "ours" / "python"), str(tmp_path / "theirs" / "python")
    assert doctor.executors_python({"PYSPARK_PYTHON": ours}, ours).ok
    assert doctor.executors_python({"PATH": str(tmp_path / "ours")}, ours).ok
    assert not doctor.executors_python({"PATH": str(tmp_path / "theirs")}, ours).ok
    assert "set PYSPARK_PYTHON=" in doctor.executors_python({"PYSPARK_PYTHON": theirs}, ours).fix
    assert "does not exist" in doctor.executors_python({"PATH": ""}, ours).text


def test_pyspark_in_a_zip_is_reported_with_its_cost_but_passes(tmp_path: Path) -> None:
    assert "bytecode" in doctor.zipped_pyspark(tmp_path).text
    (tmp_path / "python" / "lib").mkdir(parents=True)
    (archive := tmp_path / "python" / "lib" / "pyspark.zip").write_bytes(b"")
    found = doctor.zipped_pyspark(tmp_path)
    assert found.ok
    assert "compiles PySpark again" in found.text
    assert str(archive) in found.text


def test_the_setting_for_fast_checkpoints_is_reported_and_never_fails() -> None:
    found = doctor.checkpoint_files({"some.setting": "a.Class"})
    assert found.ok
    assert "some.setting=a.Class" in found.text
    assert "does not include Spark" in doctor.checkpoint_files({}).text


def test_without_brokers_on_the_command_line_no_broker_is_contacted() -> None:
    names = [check.name for check in doctor.checks(None, Deadline.after_seconds(1))]
    assert "broker" not in names
