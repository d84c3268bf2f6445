"""The embedded Kafka and the helpers of these tests clean up their processes and folders."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from integration.support import processes
from integration.support.broker import JAVA_OPTIONS
from integration.support.driver import ROOT, Driver
from integration.support.kafka import Admin, produce, read_back, transaction, values
from integration.support.processes import await_condition
from integration.support.security import SecuredCluster
from integration.support.sink_stream import LOOP, spec, without_spark
from integration.support.tools import (
    abort_transaction,
    console_consumer,
    describe_transaction,
    hanging_transactions,
)
from kafka_eos_source.embedded import EmbeddedKafka, cluster, java
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import InvalidOptionError, UnavailableError

START_SECONDS = 120.0
END_SECONDS = 60.0
MARK = "KAFKA_EOS_TEST_BROKER"


class Command:
    """Runs ``kafka-eos broker``, or a script that starts a broker, in a separate process."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = directory / f"{self.mark}.out", directory / f"{self.mark}.err"
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def await_bootstrap(self) -> str:
        await_condition(
            lambda: "bootstrap.servers=" in self.out.read_text() or self.process.poll() is not None,
            START_SECONDS,
            "the broker accepts connections",
        )
        lines = self.out.read_text().splitlines()
        assert len(lines) == 1, f"one line on stdout: {lines}; stderr: {self.err.read_text()}"
        return lines[0].removeprefix("bootstrap.servers=")

    def await_nothing_left(self) -> None:
        """Checks that no process of the command and no broker folder is left."""
        await_condition(lambda: not processes.marked(MARK, self.mark), END_SECONDS, "every process is gone")
        assert list(self.out.parent.glob("kafka-eos-broker-*")) == []


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        processes.kill_marked(MARK, each.mark)
        each.process.wait(END_SECONDS)


CLI = ("-m", "kafka_eos_source.cli", "broker", "--port", "0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_address_and_ends_on_a_signal(command: Any, number: signal.Signals) -> None:
    running = command(*CLI)
    bootstrap = running.await_bootstrap()
    produce(
        bootstrap, "made-by-writing", ["a", "b"]
    )  # a broker for trying things out creates topics on first write
    assert values(read_back(bootstrap, "made-by-writing")) == ["a", "b"]
    running.process.send_signal(number)
    assert running.process.wait(END_SECONDS) == 0
    running.await_nothing_left()


def test_the_command_can_be_ended_while_it_starts(command: Any) -> None:
    running = command(*CLI)
    await_condition(
        lambda: any(each.info["name"] == "java" for each in processes.marked(MARK, running.mark)),
        START_SECONDS,
        "a JVM is there",
    )
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_SECONDS) == 128 + signal.SIGTERM
    assert running.out.read_text() == ""
    running.await_nothing_left()


def test_the_command_ends_with_the_process_that_started_it(command: Any) -> None:
    """The parent is killed, so it cannot end the broker itself."""
    parent = command(
        "-c", f"import subprocess, sys; subprocess.run([sys.executable, *{list(CLI)!r}], check=False)"
    )
    parent.await_bootstrap()
    parent.process.kill()
    parent.await_nothing_left()


def test_the_command_reports_a_broker_that_died(command: Any) -> None:
    running = command(*CLI)
    running.await_bootstrap()
    (jvm,) = [each for each in processes.marked(MARK, running.mark) if each.info["name"] == "java"]
    jvm.kill()
    assert running.process.wait(END_SECONDS) == 1
    assert "broker 1 ended unexpectedly" in running.err.read_text()
    assert "Traceback" not in running.err.read_text()
    running.await_nothing_left()


def test_a_port_in_use_is_reported_at_once(command: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = command(*CLI[:-1], str(port))
        assert running.process.wait(END_SECONDS) == 1
    said = running.err.read_text()
    assert said.startswith(f"[KAFKA_EOS.UNAVAILABLE] port {port} of 127.0.0.1 cannot be used")
    assert "Traceback" not in said
    assert running.out.read_text() == ""


def test_the_error_of_a_broker_that_does_not_start_has_the_reason(command: Any) -> None:
    running = command(*CLI, "--config", "num.network.threads=0")
    assert running.process.wait(START_SECONDS) == 1
    assert "num.network.threads" in running.err.read_text()
    assert "Traceback" not in running.err.read_text()
    running.await_nothing_left()


def test_the_broker_ends_when_the_process_of_its_context_manager_is_killed(command: Any) -> None:
    """The process gets no chance to clean up."""
    script = (
        "import time; from kafka_eos_source.embedded import EmbeddedKafka\n"
        "with EmbeddedKafka() as kafka:\n"
        "    print('bootstrap.servers=' + kafka.bootstrap_servers, flush=True); time.sleep(600)\n"
    )
    running = command("-c", script)
    running.await_bootstrap()
    assert [each.info["name"] for each in processes.marked(MARK, running.mark)].count("java") == 1
    running.process.kill()
    running.await_nothing_left()


def test_data_in_a_directory_is_kept_and_used_by_one_broker_at_a_time(tmp_path: Path) -> None:
    with EmbeddedKafka(directory=tmp_path / "data", java_options=JAVA_OPTIONS) as kafka:
        Admin(kafka.bootstrap_servers).create("kept", 2)
        produce(kafka.bootstrap_servers, "kept", ["a", "b", "c"])
        with pytest.raises(UnavailableError, match="another broker runs in the directory"):
            EmbeddedKafka(directory=tmp_path / "data").start()
        kafka.pause_node(1)  # a paused broker must still be shut down cleanly
    with EmbeddedKafka(directory=tmp_path / "data", java_options=JAVA_OPTIONS) as kafka:
        assert values(read_back(kafka.bootstrap_servers, "kept")) == ["a", "b", "c"]


@pytest.mark.timeout(400)
@pytest.mark.long
def test_three_brokers_serve_while_one_is_down(fresh_cluster: Callable[..., EmbeddedKafka]) -> None:
    kafka = fresh_cluster(3)
    assert kafka.nodes == (1, 2, 3)
    admin = Admin(kafka.bootstrap_servers)
    assert set(admin.client.list_topics(timeout=30).brokers) == {1, 2, 3}
    admin.create("replicated", 3)
    produce(kafka.bootstrap_servers, "replicated", map(str, range(9)), config={"acks": "all"})
    kafka.kill_node(2)
    kafka.check()  # a broker killed by the test counts as expected
    producer = transaction(kafka.bootstrap_servers, "while-one-is-down")
    for number in range(9, 18):
        producer.produce("replicated", str(number))
    producer.commit_transaction(60)
    found = read_back(kafka.bootstrap_servers, "replicated")
    assert sorted(int(value) for value in values(found)) == list(range(18))
    kafka.start_node(2)
    assert set(admin.client.list_topics(timeout=30).brokers) == {1, 2, 3}

    kafka.stop_node(3)
    kafka.check()
    assert "shut down completed" in (kafka.directory / "node-3" / "broker.log").read_text()
    with pytest.raises(InvalidOptionError, match=r"version='3\.9\.2', but broker 1 already runs with"):
        kafka.start_node(1, "3.9.2")
    kafka.start_node(3, kafka.version(1))
    assert values(read_back(kafka.bootstrap_servers, "replicated")) == values(found)


def test_a_paused_broker_answers_again(fresh_cluster: Callable[..., EmbeddedKafka]) -> None:
    kafka = fresh_cluster()
    Admin(kafka.bootstrap_servers).create("paused")
    kafka.pause_node(1)
    with pytest.raises(KafkaException, match=r"_TRANSPORT|_TIMED_OUT|_ALL_BROKERS_DOWN"):
        Admin(kafka.bootstrap_servers).client.list_topics(timeout=2)
    kafka.resume_node(1)
    produce(kafka.bootstrap_servers, "paused", ["a"])
    assert values(read_back(kafka.bootstrap_servers, "paused")) == ["a"]


def test_a_damaged_cache_is_repaired_before_the_broker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated jar in the cache is replaced. Copies of intact jars stand in for the repository."""
    whole = java.jars()

    def copy(_jar_set: java.JarSet, into: Path, _ivy_cache: Path) -> None:
        for jar in whole.glob("*.jar"):
            shutil.copy(jar, into)

    folder = java.jars(java.BROKER, tmp_path, copy)
    os.truncate(next(folder.glob("kafka-server-*.jar")), 1000)
    monkeypatch.setenv("KAFKA_EOS_CACHE", str(tmp_path))
    monkeypatch.setattr(java, "_ivy", copy)
    with EmbeddedKafka(java_options=JAVA_OPTIONS) as kafka:
        Admin(kafka.bootstrap_servers).create("works")
    assert java.is_complete(folder, java.BROKER)


# -- helpers of the tests


def test_the_wrappers_of_kafkas_command_line_tools_work(broker: str, topic: Callable[..., str]) -> None:
    name = topic(1)
    produce(broker, name, ["a", "b"])
    transactional_id = f"tools-{name}"
    producer = transaction(broker, transactional_id)
    producer.produce(name, "open")
    assert producer.flush(30) == 0
    assert console_consumer(broker, name, 10) == ["a", "b"]
    described = describe_transaction(broker, transactional_id)
    assert (described["TransactionState"], described["TopicPartitions"]) == ("Ongoing", f"{name}-0")
    # its coordinator knows the transaction, so it is not hanging; it can be aborted anyway
    assert hanging_transactions(broker, name, 0, minutes=0) == []
    abort_transaction(broker, name, 0, start_offset=2)
    produce(broker, name, ["c"])
    await_condition(
        lambda: values(read_back(broker, name)) == ["a", "b", "c"], 30, "nothing is open any more"
    )
    producer.close()


def test_a_user_without_rights_is_refused(secured_cluster: SecuredCluster) -> None:
    bootstrap, admin = secured_cluster.bootstrap_servers, secured_cluster.admin
    admin.create("guarded")
    produce(bootstrap, "guarded", ["a"], config=secured_cluster.login("admin"))
    alice = Admin(bootstrap, **secured_cluster.login("alice"))
    assert "guarded" not in alice.client.list_topics(timeout=30).topics
    secured_cluster.allow("alice", "topic", "guarded", "READ", "DESCRIBE")
    await_condition(
        lambda: "guarded" in alice.client.list_topics(timeout=30).topics, 30, "the ACL is in effect"
    )
    stranger = Admin(bootstrap, **secured_cluster.login("alice", password="wrong"))
    with pytest.raises(KafkaException):
        stranger.client.list_topics(timeout=5)


@pytest.mark.fault("T396", "an ACL is created through the controller's port, without a login", "broker")
def test_nobody_grants_rights_through_the_port_of_the_controller(secured_cluster: SecuredCluster) -> None:
    """The controller closes the connection of whoever has not logged in, and no ACL is created."""
    properties = (secured_cluster.kafka.directory / "node-1" / "server.properties").read_text()
    found = re.search(r"CONTROLLER://127\.0\.0\.1:(\d+)", properties)
    assert found is not None
    everything = _short("User:mallory") + _short("*") + bytes([_ALL, _ALLOW])
    creation = bytes([_CLUSTER]) + _short("kafka-cluster") + bytes([_LITERAL]) + everything
    request = struct.pack(">hhi", _CREATE_ACLS, 1, 7) + _short("test") + struct.pack(">i", 1) + creation
    with socket.create_connection((HOST, int(found[1])), timeout=30) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert answer == b"", "the controller has answered"
    every = AclBindingFilter(
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        "User:mallory",
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    assert secured_cluster.admin.client.describe_acls(every).result(30) == []


#: Kafka's numbers of an API, of two kinds of resource patterns, of the right to everything, and of a grant.
_CREATE_ACLS, _CLUSTER, _LITERAL, _ALL, _ALLOW = 30, 4, 3, 2, 3


def _short(text: str) -> bytes:
    """Returns a text as Kafka's protocol writes it: two bytes of length, and UTF-8."""
    return struct.pack(">h", len(text)) + text.encode()


@pytest.mark.timeout(400)
def test_a_killed_driver_leaves_no_process(
    broker: str, topic: Callable[..., str], driver: Callable[..., Driver], checkpoint: str
) -> None:
    source, sink = topic(), topic()
    produce(broker, source, ["a"])
    query = spec(broker, source, sink, checkpoint, 100)
    endless = driver({**query, "trigger": {"processingTime": "0 seconds"}})
    await_condition(lambda: values(read_back(broker, sink)) == ["a"], 120, "the first batch")
    assert endless.jvm()
    tree = psutil.Process(endless.process.pid).children(recursive=True)
    endless.kill()
    assert [each for each in tree if processes.is_alive(each)] == []
    produce(broker, source, ["b"])
    driver(without_spark(query), module=LOOP).finish()
    assert values(read_back(broker, sink)) == ["a", "b"]


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_failed_run_of_tests_leaves_no_process(tmp_path: Path) -> None:
    """A test run that is interrupted with a broker, a session and a driver running leaves no process."""
    (tmp_path / "conftest.py").write_text("from integration.conftest import *\n")
    (tmp_path / "test_fails.py").write_text(
        "import subprocess\n"
        "def test_fails(broker, spark, driver):\n"
        "    assert spark.range(3).count() == 3\n"
        "    driver({'sources': [], 'sink': {}})\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    raise KeyboardInterrupt\n"
    )
    mark = uuid.uuid4().hex
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert processes.marked(MARK, mark) == []
    assert finished.returncode != 0
    assert "processes were left, and killed" in finished.stderr
    assert "sleep 600" in finished.stderr
    assert "java" not in finished.stderr.partition("processes were left")[2], (
        "what fixtures own ended by itself"
    )


def test_of_several_brokers_the_one_that_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, so their logs say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(
            cluster, "free_ports", lambda wanted: [taken.getsockname()[1], *free_ports(wanted[1:])]
        )
        with pytest.raises(UnavailableError, match="broker 1 ended while it started") as caught:
            EmbeddedKafka(brokers=3).start()
    assert "Address already in use" in str(caught.value)
