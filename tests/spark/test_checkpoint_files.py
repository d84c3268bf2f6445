"""The setting for fast local checkpoint files finds Spark's class in each supported version."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from kafka_eos_source import local_checkpoints
from kafka_eos_source.spark.session import SETTING, file_system_manager

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
