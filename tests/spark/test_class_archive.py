"""The archive of Spark's classes: where it is, when it is used, and what a failed attempt leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest

from kafka_eos_source import recommended_settings
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.operate.doctor import machine
from kafka_eos_source.operate.doctor.finding import Severity
from kafka_eos_source.spark import class_archive
from kafka_eos_source.spark.session import COMPILER_OPTION, DRIVER_OPTIONS_SETTING

_WRITES = "import sys; open(sys.argv[1], 'w').write('classes')"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, and a Java and a Spark that exist."""
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("")
    java.chmod(0o755)
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setenv("KAFKA_EOS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Replaces the Spark program that loads the classes."""
    path = tmp_path / "program.py"
    path.write_text(text)
    monkeypatch.setattr(class_archive, "_PROGRAM", path)


def test_the_settings_use_an_archive_as_soon_as_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recommended_settings()[DRIVER_OPTIONS_SETTING] == COMPILER_OPTION
    program(tmp_path, monkeypatch, _WRITES)
    written = class_archive.write()
    assert written == class_archive.usable_archive()
    assert written.read_text() == "classes"
    options = recommended_settings()[DRIVER_OPTIONS_SETTING]
    assert options.startswith(f"{COMPILER_OPTION} -XX:SharedArchiveFile={written} ")


def test_another_java_and_another_spark_have_another_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [class_archive.archive_path()]
    other = tmp_path / "other-jdk" / "bin" / "java"
    other.parent.mkdir(parents=True)
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "other-jdk"))
    paths.append(class_archive.archive_path())
    (tmp_path / "other-spark" / "jars").mkdir(parents=True)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "other-spark"))
    paths.append(class_archive.archive_path())
    monkeypatch.setattr(pyspark, "__version__", "5.0.0")
    paths.append(class_archive.archive_path())
    assert None not in paths
    assert len(set(paths)) == 4


@pytest.mark.parametrize("missing", ["java", "jars"])
def test_without_java_or_spark_there_is_no_archive(missing: str, tmp_path: Path) -> None:
    if missing == "java":
        (tmp_path / "jdk" / "bin" / "java").unlink()
    else:
        (tmp_path / "spark" / "jars").rmdir()
    assert class_archive.archive_path() is None
    assert class_archive.usable_archive() is None
    assert recommended_settings()[DRIVER_OPTIONS_SETTING] == COMPILER_OPTION
    found = machine.archived_classes(class_archive.archive_path(), class_archive.usable_archive())
    assert found.severity is Severity.OK
    with pytest.raises(UnavailableError, match="there is no Java"):
        class_archive.write()


@pytest.mark.parametrize("change", ["others may write it", "cut", "no size", "a link", "a folder"])
def test_an_incomplete_archive_or_one_that_somebody_else_could_have_written_is_not_used(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, _WRITES)
    written = class_archive.write()
    if change == "others may write it":
        written.chmod(0o666)
    elif change == "cut":
        written.write_text("class")
    elif change == "no size":
        written.with_suffix(".size").unlink()
    else:
        written.unlink()
        if change == "a folder":
            written.mkdir()
        else:
            (tmp_path / "planted").write_text("classes")
            written.symlink_to(tmp_path / "planted")
    assert class_archive.usable_archive() is None
    assert recommended_settings()[DRIVER_OPTIONS_SETTING] == COMPILER_OPTION


def test_an_archive_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, _WRITES)
    written = class_archive.write()
    if os.getuid() == 0:
        os.chown(written, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert class_archive.usable_archive() is None


def test_a_path_with_a_blank_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_EOS_CACHE", str(tmp_path / "my cache"))
    program(tmp_path, monkeypatch, _WRITES)
    with pytest.raises(UnavailableError, match="a blank or a quote in its path"):
        class_archive.write()
    assert class_archive.usable_archive() is None


def test_an_archive_in_a_folder_in_which_everybody_may_replace_it_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, _WRITES)
    written = class_archive.write()
    cache.chmod(0o777)
    assert class_archive.usable_archive() is None
    cache.chmod(0o1777)
    assert class_archive.usable_archive() == written


@pytest.mark.parametrize(
    ("text", "told"),
    [("raise SystemExit('no Spark here')", "no Spark here"), ("", "exit code 0")],
    ids=["fails", "writes nothing"],
)
def test_a_failed_attempt_leaves_the_archive_as_it_was(
    text: str, told: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, _WRITES)
    written = class_archive.write()
    program(tmp_path, monkeypatch, text)
    with pytest.raises(UnavailableError, match=told):
        class_archive.write()
    assert written.read_text() == "classes"
    assert sorted(cache.iterdir()) == [written, written.with_suffix(".size")]
    assert class_archive.usable_archive() == written


def test_the_program_finds_no_module_of_this_package_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import sys; assert {str(tmp_path)!r} not in sys.path; open(sys.argv[1], 'w').write(sys.argv[0])"
    program(tmp_path, monkeypatch, text)
    assert class_archive.write().read_text() == str(tmp_path / "program.py")


def test_doctor_offers_to_write_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, _WRITES)
    found = machine.archived_classes(class_archive.archive_path(), class_archive.usable_archive())
    assert found.severity is Severity.NOTE
    assert found.repair is not None
    found.repair.run()
    found = machine.archived_classes(class_archive.archive_path(), class_archive.usable_archive())
    assert found.severity is Severity.OK
    assert found.repair is None
    assert str(class_archive.usable_archive()) in found.what


def test_the_program_imports_nothing_of_this_package() -> None:
    text = class_archive._PROGRAM.read_text()
    assert "kafka_eos" not in text
