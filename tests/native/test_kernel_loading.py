"""The C kernel is found wherever the package is installed; without it, one error says what to do."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import kafka_eos_source
from kafka_eos_source import native
from kafka_eos_source.cli import main
from kafka_eos_source.datasource import KafkaEosDataSource, KafkaEosStateDataSource
from kafka_eos_source.errors import KernelUnavailableError
from kafka_eos_source.operate.shared import ExitCode

REAL = {name: Path(native.load(name)._name) for name in native.VERSIONS}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source folder without libraries, from which the package seems to be imported."""
    folder = tmp_path / "clone" / "kafka_eos_source" / "native"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native, "_HERE", folder)
    environment = SimpleNamespace(
        path=[str(tmp_path / "clone")], executable=sys.executable, byteorder=sys.byteorder
    )
    monkeypatch.setattr(native, "sys", environment)
    native.load.cache_clear()
    yield folder
    native.load.cache_clear()


def installation(tmp_path: Path, name: str = "site-packages") -> Path:
    """A folder of sys.path with the installed package."""
    folder = tmp_path / name / "kafka_eos_source" / "native"
    folder.mkdir(parents=True)
    for library in REAL.values():
        shutil.copy(library, folder)
    native.sys.path.append(str(tmp_path / name))
    return folder


def test_in_a_clone_the_library_of_the_installed_package_is_used(clone: Path, tmp_path: Path) -> None:
    folder = installation(tmp_path)
    native.check()
    assert {Path(native.load(name)._name).parent for name in native.VERSIONS} == {folder}


def test_the_library_next_to_the_package_comes_first(clone: Path, tmp_path: Path) -> None:
    installation(tmp_path)
    shutil.copy(REAL["avro"], clone)
    assert Path(native.load("avro")._name).parent == clone
    assert Path(native.load("kernel")._name).parent != clone


def test_the_working_directory_is_searched_as_python_does(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installation(tmp_path)
    monkeypatch.setattr(native.sys, "path", [""])
    monkeypatch.chdir(tmp_path / "site-packages")
    assert Path(native.load("kernel")._name).parent == folder


def test_without_a_library_the_error_says_how_to_install_it(clone: Path) -> None:
    with pytest.raises(KernelUnavailableError) as raised:
        native.check()
    assert f"there is no kernel.so in {clone}" in raised.value.message
    assert f"install the package into the Python {sys.executable}" in raised.value.fix


def test_libraries_that_do_not_fit_are_named_with_the_reason(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installation(tmp_path)
    (clone / "kernel.so").write_bytes(b"no library")
    monkeypatch.setitem(native.VERSIONS, "kernel", native.VERSIONS["kernel"] + 1)
    with pytest.raises(KernelUnavailableError) as raised:
        native.load("kernel")
    wanted = native.VERSIONS["kernel"]
    assert f"{clone}/kernel.so cannot be loaded: " in raised.value.message
    assert (
        f"{folder}/kernel.so has version {wanted - 1}, but this package needs version {wanted}"
        in raised.value.message
    )


def test_an_older_library_next_to_the_package_does_not_hide_the_installed_one(
    clone: Path, tmp_path: Path
) -> None:
    installation(tmp_path)
    (clone / "kernel.so").write_bytes(b"")
    assert isinstance(native.load("kernel"), ctypes.CDLL)


def test_another_byte_order_is_refused(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.sys, "byteorder", "big")
    with pytest.raises(KernelUnavailableError, match="highest byte first"):
        native.load("kernel")


@pytest.mark.parametrize("source", [KafkaEosDataSource, KafkaEosStateDataSource])
def test_a_query_fails_before_its_options_are_looked_at(clone: Path, source: Any) -> None:
    with pytest.raises(KernelUnavailableError, match=r"KERNEL_UNAVAILABLE.* Fix: install the package"):
        source({})


def test_registration_fails(clone: Path) -> None:
    with pytest.raises(KernelUnavailableError):
        kafka_eos_source.register(None)  # type: ignore[arg-type]


def test_commands_fail_and_doctor_says_why(clone: Path) -> None:
    failed = CliRunner().invoke(main, ["topics", "list"])
    assert failed.exit_code == ExitCode.FAILED
    assert failed.stderr.startswith("[KAFKA_EOS.KERNEL_UNAVAILABLE] the C kernel of kafka-eos cannot be used")
    failed = CliRunner().invoke(main, ["topics", "list", "--json"])
    assert json.loads(failed.stdout)["error"]["condition"] == "KAFKA_EOS.KERNEL_UNAVAILABLE"
    found = CliRunner().invoke(main, ["doctor", "--check", "kernel"])
    assert found.exit_code == ExitCode.NEEDS_A_PERSON
    assert "there is no kernel.so" in found.stdout
    assert CliRunner().invoke(main, ["--version"]).exit_code == ExitCode.DONE
