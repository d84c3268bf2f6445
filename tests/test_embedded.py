"""The embedded Kafka without a JVM: the cache of jars, Java's version, ports, configuration."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.embedded import EmbeddedKafka, java
from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.embedded.jars import BROKER, JarSet, cache_directory, is_whole, jars
from kafka_eos_source.embedded.properties import render
from kafka_eos_source.errors import InvalidOptionError, UnavailableError


class Repository:
    """Stands for Maven: fills a folder, and counts how often."""

    def __init__(self, fails: int = 0) -> None:
        self.fetched = 0
        self.fails = fails

    def __call__(self, jar_set: JarSet, into: Path, ivy_cache: Path) -> None:
        self.fetched += 1
        (into / "a.jar").write_bytes(b"first")
        if self.fails:
            self.fails -= 1
            raise UnavailableError("the network went away")
        (into / "b.jar").write_bytes(b"second")


def test_jars_are_fetched_once(tmp_path: Path) -> None:
    repository = Repository()
    folder = jars(BROKER, tmp_path, repository)
    assert jars(BROKER, tmp_path, repository) == folder
    assert repository.fetched == 1
    assert sorted(path.name for path in folder.glob("*.jar")) == ["a.jar", "b.jar"]


@pytest.mark.parametrize(
    "harm", ["truncate", "change", "delete", "no manifest", "bad manifest", "empty manifest"]
)
def test_a_damaged_cache_is_repaired(tmp_path: Path, harm: str) -> None:
    repository = Repository()
    folder = jars(BROKER, tmp_path, repository)
    if harm == "truncate":
        os.truncate(folder / "a.jar", 1)
    elif harm == "change":
        (folder / "a.jar").write_bytes(b"fir5t")
    elif harm == "delete":
        (folder / "b.jar").unlink()
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text("{" if harm == "bad manifest" else "{}")
    assert not is_whole(folder)
    assert is_whole(jars(BROKER, tmp_path, repository))
    assert repository.fetched == 2


def test_a_fetch_that_breaks_off_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    repository = Repository(fails=1)
    with pytest.raises(UnavailableError, match="network"):
        jars(BROKER, tmp_path, repository)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert is_whole(jars(BROKER, tmp_path, repository))


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UnavailableError, match="KAFKA_EOS_CACHE"):
        jars(BROKER, tmp_path / "cache", Repository())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_EOS_CACHE", "/here")
    assert cache_directory() == Path("/here")
    monkeypatch.delenv("KAFKA_EOS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache_directory() == Path("/there/kafka-eos")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('openjdk version "17.0.9" 2023-10-17', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("what?", None),
    ],
)
def test_java_versions(said: str, expected: int | None) -> None:
    assert java.version(said) == expected


def fake_java(folder: Path, version: str) -> None:
    (folder / "bin").mkdir()
    path = folder / "bin" / "java"
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)


def test_an_old_java_is_named_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match="is Java 11; Kafka 4 needs 17"):
        java.find()


def test_a_new_java_of_java_home_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find() == str(tmp_path / "bin" / "java")


def test_no_java_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="apt-get install"):
        java.find()


def test_ports_are_free_and_different() -> None:
    assert len(set(free_ports([0] * 6))) == 6


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UnavailableError, match=f"port {taken.getsockname()[1]} .*choose another"):
            free_ports([taken.getsockname()[1]])


def test_properties_are_rendered_one_a_line() -> None:
    assert render({"a": "1", "b.c": "x=y"}) == "a=1\nb.c=x=y\n"


def test_too_many_brokers() -> None:
    with pytest.raises(InvalidOptionError, match="1 to 9"):
        EmbeddedKafka(brokers=10)


def test_the_command_line_names_what_is_wrong_with_an_argument() -> None:
    bad = CliRunner().invoke(main, ["broker", "--config", "nonsense"])
    assert bad.exit_code == 2
    assert "expected KEY=VALUE" in bad.output


def test_the_command_line_gives_messages_and_not_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(main, ["broker", "--port", "0"])
    assert result.exit_code == 1
    assert result.output.startswith("[KAFKA_EOS.UNAVAILABLE] no Java found")
