"""One broker or several in KRaft mode, each broker and controller at once, on 127.0.0.1 alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kafka_eos_source.deadline import Deadline
from kafka_eos_source.embedded import jars as jar_cache
from kafka_eos_source.embedded import java, supervisor
from kafka_eos_source.errors import InvalidOptionError, UnavailableError

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_STARTED = b"Kafka Server started"
_HOST = "127.0.0.1"


@dataclass
class _Node:
    """One broker: its files, its port, its process."""

    node_id: int
    directory: Path
    port: int
    controller_port: int
    process: subprocess.Popen[str] | None = None
    jvm_pid: int = 0

    @property
    def log(self) -> Path:
        return self.directory / "broker.log"

    @property
    def properties(self) -> Path:
        return self.directory / "server.properties"


class EmbeddedKafka:
    """A Kafka cluster that lives as long as the ``with`` block, and never longer than this process.

    Args:
        brokers: how many; 1 or 3 are usual.
        port: of the first broker; the others follow. 0 = any free ones.
        directory: for the data, kept afterwards and used again by the next start; None = a temporary one.
        config: broker properties that win over ours, as in ``server.properties``.
        auto_create_topics: whether a topic is made by writing to it.

    Attributes:
        bootstrap_servers: for clients.
        directory: where the data is.

    Raises:
        UnavailableError: no Java, no jars, a port in use, or a broker that does not start.
    """

    def __init__(
        self,
        brokers: int = 1,
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        config: Mapping[str, str] | None = None,
        auto_create_topics: bool = False,
    ) -> None:
        if not 1 <= brokers <= 9:
            raise InvalidOptionError(f"brokers={brokers}; expected 1 to 9.")
        self._brokers = brokers
        self._port = port
        self._kept = directory is not None
        self.directory = Path(directory) if directory is not None else Path()
        self._config = {"auto.create.topics.enable": str(auto_create_topics).lower(), **(config or {})}
        self._nodes: dict[int, _Node] = {}

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{_HOST}:{node.port}" for node in self._nodes.values())

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node ids, running or not."""
        return tuple(self._nodes)

    def start(self) -> EmbeddedKafka:
        """Starts every broker; returns when all accept connections."""
        executable = java.find()
        jars = jar_cache.jars()
        if not self._kept:
            self.directory = Path(tempfile.mkdtemp(prefix="kafka-eos-broker-"))
        try:
            self._nodes = self._make_nodes()
            cluster_id = self._cluster_id()
            for node in self._nodes.values():
                node.directory.mkdir(parents=True, exist_ok=True)
                node.properties.write_text(render(self._properties(node)))
            self._format(executable, jars, cluster_id)
            self._start_all(self._nodes.values(), executable, jars)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every broker and, unless a directory was given, removes the data."""
        for node in self._nodes.values():
            if node.process is not None and not self._kept:
                _signal(node.jvm_pid, signal.SIGKILL)  # nothing to be kept in order
            elif node.process is not None:
                _signal(node.jvm_pid, signal.SIGCONT)
                node.process.terminate()
        for node in self._nodes.values():
            _reap(node)
        if not self._kept and self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill_node(self, node_id: int) -> None:
        """SIGKILL: the plug is pulled."""
        node = self._nodes[node_id]
        _signal(node.jvm_pid, signal.SIGKILL)
        _reap(node)

    def pause_node(self, node_id: int) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        _signal(self._nodes[node_id].jvm_pid, signal.SIGSTOP)

    def resume_node(self, node_id: int) -> None:
        """Ends `pause_node`."""
        _signal(self._nodes[node_id].jvm_pid, signal.SIGCONT)

    def start_node(self, node_id: int) -> None:
        """Starts a broker that was killed, with its data, on its port."""
        self._start_all([self._nodes[node_id]], java.find(), jar_cache.jars())

    def __enter__(self) -> EmbeddedKafka:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside

    def _make_nodes(self) -> dict[int, _Node]:
        ports = [self._port + index if self._port else 0 for index in range(self._brokers)]
        found = free_ports(ports + [0] * self._brokers)
        return {
            index + 1: _Node(
                index + 1, self.directory / f"node-{index + 1}", found[index], found[self._brokers + index]
            )
            for index in range(self._brokers)
        }

    def _cluster_id(self) -> str:
        """Kept with the data."""
        path = self.directory / "cluster.json"
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["brokers"] != self._brokers:
                raise InvalidOptionError(
                    f"{str(self.directory)!r} holds a cluster of {kept['brokers']} broker(s); asked for "
                    f"{self._brokers}.",
                    fix="start it with as many brokers as before, or give another directory.",
                )
            return str(kept["id"])
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"id": cluster_id, "brokers": self._brokers}))
        return cluster_id

    def _properties(self, node: _Node) -> dict[str, str]:
        copies = str(min(3, self._brokers))
        in_sync = str(min(2, self._brokers))
        voters = ",".join(f"{each.node_id}@{_HOST}:{each.controller_port}" for each in self._nodes.values())
        return {
            "process.roles": "broker,controller",
            "node.id": str(node.node_id),
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{_HOST}:{node.port},CONTROLLER://{_HOST}:{node.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(node.directory / "data"),
            # internal topics small and as safe as the number of brokers allows
            "offsets.topic.num.partitions": "5",
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": "5",
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": in_sync,
            "default.replication.factor": copies,
            "min.insync.replicas": in_sync,
            "group.initial.rebalance.delay.ms": "0",  # consumers of a laptop need not wait for others
            "controlled.shutdown.max.retries": "1",
            **self._config,
        }

    def _format(self, executable: str, jars: Path, cluster_id: str) -> None:
        """Makes the data directories that are not there yet."""
        formatting = [
            subprocess.Popen(
                [
                    executable,
                    *_class_path(jars),
                    "kafka.tools.StorageTool",
                    "format",
                    "-t",
                    cluster_id,
                    "-c",
                    str(node.properties),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in self._nodes.values()
            if not (node.directory / "data" / "meta.properties").exists()
        ]
        for process in formatting:
            said, _ = process.communicate(timeout=_START_SECONDS)
            if process.returncode:
                raise UnavailableError(f"the data directory could not be made: {said.strip()[-500:]}")

    def _start_all(self, nodes: Iterable[_Node], executable: str, jars: Path) -> None:
        started = []
        for node in nodes:
            offset = node.log.stat().st_size if node.log.exists() else 0
            node.process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(supervisor.__file__),
                    str(node.log),
                    executable,
                    "-Xmx512m",
                    "-XX:-UsePerfData",
                    *_class_path(jars),
                    "kafka.Kafka",
                    str(node.properties),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert node.process.stdout is not None
            node.jvm_pid = int(node.process.stdout.readline())
            started.append((node, offset))
        deadline = Deadline.after_seconds(_START_SECONDS)
        for node, offset in started:
            _await_start(node, offset, deadline)


def render(properties: Mapping[str, str]) -> str:
    """As a ``.properties`` file."""
    return "".join(f"{name}={value}\n" for name, value in properties.items())


def free_ports(wanted: list[int]) -> list[int]:
    """The ports wanted, 0 replaced by free ones; all different.

    Raises:
        UnavailableError: one of them is in use.
    """
    with contextlib.ExitStack() as held:
        found = []
        for port in wanted:
            listener = held.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((_HOST, port))
            except OSError as error:
                raise UnavailableError(
                    f"port {port} of {_HOST} cannot be used: {error.strerror}.",
                    fix="stop what uses it, or choose another with --port (0 = any free one).",
                ) from error
            found.append(listener.getsockname()[1])
        return found


def _class_path(jars: Path) -> list[str]:
    return ["-Dorg.slf4j.simpleLogger.showDateTime=true", "-cp", f"{jars}/*"]


def _await_start(node: _Node, offset: int, deadline: Deadline) -> None:
    assert node.process is not None
    look = threading.Event()
    while True:
        with open(node.log, "rb") as log:
            log.seek(offset)
            if _STARTED in log.read():
                return
        if node.process.poll() is not None or deadline.expired:
            ended = "ended" if node.process.poll() is not None else "did not start in time"
            raise UnavailableError(
                f"broker {node.node_id} {ended}; the end of {node.log}:\n{_tail(node.log)}",
                fix="the log says why.",
            )
        look.wait(_LOOK_SECONDS)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(node: _Node) -> None:
    if node.process is None:
        return
    process, node.process = node.process, None
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _signal(node.jvm_pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
