"""The parts of the embedded Kafka that need no JVM: jar cache, Java version, ports and configuration."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import socket
import stat
import threading
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.embedded import EmbeddedKafka, java
from kafka_eos_source.embedded.cluster import (
    Ports,
    free_ports,
    lasting,
    new_cluster_id,
    render,
    server_properties,
)
from kafka_eos_source.embedded.java import (
    BROKER,
    KAFKA_VERSION,
    JarSet,
    broker_jars,
    cache_directory,
    is_complete,
    ivy_error,
    jars,
)
from kafka_eos_source.errors import InvalidOptionError, UnavailableError

FOLDER = f"kafka-{KAFKA_VERSION}"


def jar(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(zipfile.ZipInfo("content"), content)


def sums_of(folder: Path) -> str:
    """Returns what ``sha256sum`` prints for the jars of a folder."""
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.glob("*.jar")}
    return "".join(f"{digest}  {name}\n" for name, digest in found.items())


@pytest.fixture(name="jar_set")
def _jar_set(tmp_path_factory: pytest.TempPathFactory) -> JarSet:
    """The broker's set, with the sums of what `Repository` sends."""
    folder = tmp_path_factory.mktemp("sums")
    Repository()(BROKER, folder, folder)
    sums = folder / "sums"
    sums.write_text(sums_of(folder))
    return replace(BROKER, sums=sums)


class Repository:
    """A fake Maven repository that fills a folder and counts the downloads."""

    def __init__(self, fails: int = 0, damages: int = 0) -> None:
        self.fetched = 0
        self.fails = fails
        self.damages = damages

    def __call__(self, jar_set: JarSet, into: Path, ivy_cache: Path) -> None:
        self.fetched += 1
        ivy_cache.mkdir(exist_ok=True)
        jar(into / "a.jar", b"first")
        if self.fails:
            self.fails -= 1
            raise UnavailableError("the network went away")
        jar(into / "b.jar", b"second" * 100)
        if self.damages:
            self.damages -= 1
            os.truncate(into / "b.jar", 300)


def test_jars_are_downloaded_once(tmp_path: Path, jar_set: JarSet) -> None:
    repository = Repository()
    folder = jars(jar_set, tmp_path, repository)
    assert jars(jar_set, tmp_path, repository) == folder
    assert repository.fetched == 1
    assert sorted(path.name for path in folder.glob("*.jar")) == ["a.jar", "b.jar"]


@pytest.mark.parametrize(
    "harm", ["truncate", "change", "delete", "no manifest", "bad manifest", "empty manifest"]
)
def test_a_damaged_cache_is_repaired(tmp_path: Path, harm: str, jar_set: JarSet) -> None:
    repository = Repository()
    folder = jars(jar_set, tmp_path, repository)
    if harm == "truncate":
        os.truncate(folder / "a.jar", 1)
    elif harm == "change":
        whole = (folder / "a.jar").read_bytes()
        (folder / "a.jar").write_bytes(whole.replace(b"first", b"fir5t"))
    elif harm == "delete":
        (folder / "b.jar").unlink()
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text("{" if harm == "bad manifest" else "{}")
    assert not is_complete(folder, jar_set)
    assert is_complete(jars(jar_set, tmp_path, repository), jar_set)
    assert repository.fetched == 2


def test_an_interrupted_download_leaves_no_complete_looking_cache(tmp_path: Path, jar_set: JarSet) -> None:
    repository = Repository(fails=1)
    with pytest.raises(UnavailableError, match="network"):
        jars(jar_set, tmp_path, repository)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ivy", "lock"]
    assert is_complete(jars(jar_set, tmp_path, repository), jar_set)


def test_files_of_a_killed_download_are_removed(tmp_path: Path, jar_set: JarSet) -> None:
    (tmp_path / "half-made-x" / "jars").mkdir(parents=True)
    jars(jar_set, tmp_path, Repository())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ivy", FOLDER, "lock"]


def test_a_damaged_download_is_repeated_without_the_ivy_cache(tmp_path: Path, jar_set: JarSet) -> None:
    (tmp_path / "ivy").mkdir()
    (tmp_path / "ivy" / "damaged").touch()
    repository = Repository(damages=1)
    assert is_complete(jars(jar_set, tmp_path, repository), jar_set)
    assert repository.fetched == 2
    assert not (tmp_path / "ivy" / "damaged").exists()


def test_a_download_that_stays_damaged_is_an_error(tmp_path: Path, jar_set: JarSet) -> None:
    with pytest.raises(UnavailableError, match=r"damaged: b\.jar"):
        jars(jar_set, tmp_path, Repository(damages=2))
    assert not (tmp_path / FOLDER).exists()


def test_one_process_at_a_time_downloads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], jar_set: JarSet
) -> None:
    """A second process waits for the first download and then uses its jars."""
    repository = Repository()
    looked = threading.Event()
    with ThreadPoolExecutor() as pool:
        others: list[Future[Path]] = []

        def slow(_jar_set: JarSet, into: Path, ivy_cache: Path) -> None:
            others.append(pool.submit(jars, jar_set, tmp_path, repository))
            while "waiting for another process" not in capfd.readouterr().err:
                looked.wait(0.01)
            repository(jar_set, into, ivy_cache)

        folder = jars(jar_set, tmp_path, slow)
        assert [other.result(60) for other in others] == [folder]
    assert repository.fetched == 1


def test_a_complete_cache_is_used_without_taking_its_lock(tmp_path: Path, jar_set: JarSet) -> None:
    """A complete cache is used even if it is read-only, as in a container image."""
    folder = jars(jar_set, tmp_path, Repository())
    (tmp_path / "lock").unlink()
    assert jars(jar_set, tmp_path, Repository()) == folder
    assert not (tmp_path / "lock").exists()


def test_a_cache_path_that_is_a_file_is_named(tmp_path: Path, jar_set: JarSet) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="KAFKA_EOS_CACHE"):
        jars(jar_set, tmp_path / "file", Repository())


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, jar_set: JarSet) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UnavailableError, match="KAFKA_EOS_CACHE"):
        jars(jar_set, tmp_path / "cache", Repository())


def test_a_jar_with_another_hash_is_refused_and_deleted(tmp_path: Path, jar_set: JarSet) -> None:
    """The manifest of a download proves nothing: who replaces a jar writes it as well."""

    def forged(each: JarSet, into: Path, ivy_cache: Path) -> None:
        repository(each, into, ivy_cache)
        jar(into / "b.jar", b"malice")

    repository = Repository()
    with pytest.raises(
        UnavailableError, match=r"the download of b\.jar has the SHA-256 \w{64}; expected \w{64}"
    ):
        jars(jar_set, tmp_path, forged)
    assert repository.fetched == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    forged(jar_set, tmp_path, tmp_path)
    other = tmp_path / "sums"
    other.write_text(sums_of(tmp_path))
    jars(replace(jar_set, sums=other), tmp_path / "cache", forged)
    assert is_complete(jars(jar_set, tmp_path / "cache", repository), jar_set)  # also if it is in the cache
    assert repository.fetched == 5


def test_jars_without_a_known_hash_need_an_option(
    tmp_path: Path, jar_set: JarSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = jar_set.sums.read_text().splitlines()
    jar_set.sums.write_text(next(line for line in lines if "a.jar" in line) + "\n")
    with pytest.raises(
        UnavailableError, match=r"SHA-256 of 1 jar\(s\) of kafka .*: b\.jar\. They were deleted"
    ) as refused:
        jars(jar_set, tmp_path, Repository())
    assert "KAFKA_EOS_UNLISTED_JARS=accept" in refused.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    monkeypatch.setenv("KAFKA_EOS_UNLISTED_JARS", "accept")
    folder = jars(jar_set, tmp_path, Repository())
    assert is_complete(folder, jar_set)
    monkeypatch.delenv("KAFKA_EOS_UNLISTED_JARS")
    assert not is_complete(folder, jar_set)


@pytest.mark.parametrize("version", ["3.7.2", "3.9.1", "3.9.2", "4.0.0", KAFKA_VERSION, "4.4.0"])
def test_the_versions_of_the_tests_are_listed(version: str) -> None:
    listed = broker_jars(version).listed
    assert {
        f"kafka_2.13-{version}.jar",
        f"kafka-clients-{version}.jar",
        "slf4j-simple-1.7.36.jar",
    } <= listed.keys()
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in listed.values())


def test_the_environment_sets_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_EOS_CACHE", "/here")
    assert cache_directory() == Path("/here")
    monkeypatch.delenv("KAFKA_EOS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache_directory() == Path("/there/kafka-eos")


def test_the_error_contains_ivys_own_message() -> None:
    output = [":: problems summary ::", ":::: WARNINGS", "\tmodule not found: a#b;1", "", ":::: ERRORS"]
    output += ["\tHttpClientHandler: Connect to host failed: Connection refused", "", ":: USE VERBOSE"]
    assert ivy_error(output) == "HttpClientHandler: Connect to host failed: Connection refused"
    assert ivy_error(["Error: Could not find or load main class"]) == (
        "Error: Could not find or load main class"
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ('openjdk version "17.0.9" 2023-10-17', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("what?", None),
    ],
)
def test_the_java_version_is_parsed(output: str, expected: int | None) -> None:
    assert java.version(output) == expected


def fake_java(folder: Path, version: str) -> None:
    (folder / "bin").mkdir()
    path = folder / "bin" / "java"
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)


def test_a_java_that_is_too_old_is_named_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match="is Java 11; Kafka 4 needs 17"):
        java.find()


def test_java_home_is_used_if_its_java_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find() == str(tmp_path / "bin" / "java")


@pytest.mark.usefixtures("no_java")
def test_the_error_without_java_says_how_to_install_it() -> None:
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


def test_broker_properties_are_written_one_per_line() -> None:
    assert render({"a": "1", "b.c": "x=y", "d": 'a\\"'}) == 'a=1\nb.c=x=y\nd=a\\\\"\n'


@pytest.mark.parametrize(("brokers", "copies", "in_sync"), [(1, "1", "1"), (3, "3", "2"), (5, "3", "2")])
def test_topics_have_as_many_replicas_as_the_brokers_allow(brokers: int, copies: str, in_sync: str) -> None:
    nodes = {number: Ports(20_000 + number, 21_000 + number) for number in range(1, brokers + 1)}
    properties = server_properties(1, nodes, Path("/data"), {})
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic", "default"):
        assert properties[f"{name}.replication.factor"] == copies
    assert properties["min.insync.replicas"] == properties["transaction.state.log.min.isr"] == in_sync
    assert properties["controller.quorum.voters"].count("@127.0.0.1:") == brokers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("-1", "5256000")),
        ({"log.retention.hours": "1"}, (None, "5256000")),
        ({"offsets.retention.minutes": "1"}, ("-1", "1")),
    ],
)
def test_nothing_expires_in_a_broker_that_keeps_its_data(
    config: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    found = lasting(config)
    assert (found.get("log.retention.ms"), found.get("offsets.retention.minutes")) == expected
    assert found.items() >= config.items()


def test_brokers_listen_only_on_the_local_host() -> None:
    for users in ({}, {"admin": "secret"}):
        listeners = server_properties(1, {1: Ports(1, 2)}, Path("/data"), users)["listeners"]
        assert all("://127.0.0.1:" in each for each in listeners.split(","))


def test_with_users_the_first_is_super_user_and_every_login_needs_a_password() -> None:
    properties = server_properties(1, {1: Ports(1, 2)}, Path("/data"), {"admin": 's"1', "alice": "s2"})
    assert properties["listeners"] == "SASL_PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2"
    assert properties["super.users"] == "User:admin"
    assert "PLAINTEXT" not in properties["listener.security.protocol.map"].replace("SASL_PLAINTEXT", "")
    for listener in ("sasl_plaintext", "controller"):
        login = properties[f"listener.name.{listener}.plain.sasl.jaas.config"]
        assert 'user_admin="s\\"1" user_alice="s2";' in login


@pytest.fixture
def unusable_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java and the jars are found, and cannot be run."""
    monkeypatch.setattr(java, "find", lambda: str(tmp_path / "no-such-java"))
    monkeypatch.setattr(java, "jars", lambda _: tmp_path)


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("unusable_java")
def test_a_directory_in_use_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match=f"another broker runs in the directory '{tmp_path}'"):
            EmbeddedKafka(directory=tmp_path).start()


@pytest.mark.usefixtures("unusable_java")
def test_a_directory_with_another_number_of_brokers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"id": "x", "brokers": 3}')
    with pytest.raises(
        InvalidOptionError, match=r"brokers=1, but the directory .* holds a cluster of 3 broker\(s\)"
    ):
        EmbeddedKafka(directory=tmp_path).start()


@pytest.mark.usefixtures("unusable_java")
def test_a_broker_that_cannot_start_is_an_error_and_ends_no_other_process(tmp_path: Path) -> None:
    (tmp_path / "node-1" / "data").mkdir(parents=True)
    (tmp_path / "node-1" / "data" / "meta.properties").touch()
    with pytest.raises(UnavailableError, match="no-such-java' could not be run"):
        EmbeddedKafka(directory=tmp_path).start()


def test_more_brokers_than_supported_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="1 to 9"):
        EmbeddedKafka(brokers=10)


def test_the_command_line_names_the_wrong_argument() -> None:
    bad = CliRunner().invoke(main, ["broker", "--config", "nonsense"])
    assert bad.exit_code == 2
    assert "expected KEY=VALUE" in bad.output


@pytest.mark.parametrize(
    ("feature", "message"),
    [("transaction.version", "expected NAME=LEVEL"), ("transaction.version=two", "not a whole number")],
)
def test_the_level_of_a_feature_must_be_a_number(feature: str, message: str) -> None:
    result = CliRunner().invoke(main, ["broker", "--feature", feature])
    assert result.exit_code == 2
    assert message in result.output


def test_a_broker_of_another_version_runs_its_own_jars() -> None:
    older = broker_jars("3.9.1")
    assert older.version == "3.9.1"
    assert older.artifacts[0] == ("org.apache.kafka", "kafka_2.13", "3.9.1")
    assert older.artifacts[1:] == BROKER.artifacts[1:]
    assert broker_jars(KAFKA_VERSION) == BROKER


@pytest.mark.usefixtures("no_java")
def test_the_command_line_prints_errors_without_a_traceback() -> None:
    result = CliRunner().invoke(main, ["broker", "--port", "0"])
    assert result.exit_code == 1
    assert result.output.startswith("[KAFKA_EOS.UNAVAILABLE] there is no Java")


@pytest.mark.usefixtures("no_java")
def test_the_command_line_restores_signal_handlers_and_ends_its_thread() -> None:
    """Otherwise, a Ctrl-C in the program that called the command would be ignored from then on."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before, threads = [signal.getsignal(each) for each in numbers], set(threading.enumerate())
    assert CliRunner().invoke(main, ["broker", "--port", "0"]).exit_code == 1
    assert [signal.getsignal(each) for each in numbers] == before
    for each in set(threading.enumerate()) - threads:
        each.join(10)
        assert not each.is_alive()


def test_a_cluster_id_is_never_taken_for_an_option() -> None:
    """A cluster id never begins with a hyphen, because kafka-storage reads ``-t -abc`` as two options."""
    made = iter([b"\xf8" + bytes(15), bytes(16)])
    assert new_cluster_id(lambda: next(made)) == "A" * 22
