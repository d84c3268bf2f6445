"""Runs Kafka brokers in KRaft mode on 127.0.0.1; each is a broker and a controller."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kafka_eos_source.embedded import java
from kafka_eos_source.embedded import java as jar_cache
from kafka_eos_source.embedded.node import Node, last_lines
from kafka_eos_source.embedded.properties import HOST, Ports, render, server_properties
from kafka_eos_source.errors import InvalidOptionError, UnavailableError
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.folders import make_missing, make_private
from kafka_eos_source.runtime.json_input import parse_json

_START_SECONDS, _POLL_SECONDS = 120.0, 0.05
#: Options for a JVM that runs for a second: it starts faster without the optimising compiler.
_BRIEF_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_BROKER_JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
#: Below the ephemeral ports. Otherwise a client that retries while a broker is down could get the broker's
#: port as its own local port.
_FREE_PORTS = range(20_000, 32_000)
_LOGGING = "-Dorg.slf4j.simpleLogger.showDateTime=true"


class EmbeddedKafka:
    """A Kafka cluster that runs for the duration of a ``with`` block, and never longer than this process.

    Args:
        brokers: number of brokers; 1 and 3 are usual.
        port: port of the first broker; the others follow. 0 = any free ports.
        directory: folder for the data. It stays after the end, and the next start uses it again; None = a
            temporary folder.
        config: broker properties that override those of this class, as in ``server.properties``.
        auto_create_topics: whether Kafka creates a topic when a client writes to it or reads it.
        users: passwords by user name. If set, clients log in with SASL/PLAIN (``security.protocol`` is
            ``SASL_PLAINTEXT``). The first user is a super user; ACLs apply to the others.
        java_options: options for each broker's JVM, after those of this class (512 MiB of heap).
        version: Kafka's version, 3.7.0 or newer. A directory that has data must not go back to an older one.
            `start_node` can start a single broker with another version.
        features: finalized levels by feature name, such as ``{"transaction.version": 1}``, when a data
            directory is formatted; the others are those of the version. Needs Kafka 4.0 or newer.

    Attributes:
        directory: folder with the data.

    Raises:
        UnavailableError: if there is no Java or no jars, a port or the directory is in use, or a broker does
            not start.
        InvalidOptionError: if ``brokers`` is out of range, or differs from the cluster in the directory.
    """

    def __init__(
        self,
        brokers: int = 1,
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        config: Mapping[str, str] | None = None,
        auto_create_topics: bool = False,
        *,
        users: Mapping[str, str] | None = None,
        java_options: Sequence[str] = (),
        version: str = jar_cache.KAFKA_VERSION,
        features: Mapping[str, int] | None = None,
    ) -> None:
        if not 1 <= brokers <= 9:
            raise InvalidOptionError(f"brokers={brokers} is out of range; expected 1 to 9.")
        self._brokers = brokers
        self._port = port
        self._kept = directory is not None
        self.directory = Path(directory).absolute() if directory is not None else Path()
        self._config = {"auto.create.topics.enable": str(auto_create_topics).lower(), **(config or {})}
        self._users = dict(users or {})
        self._java_options = tuple(java_options)
        self._version = version
        self._features = dict(features or {})
        self._nodes: dict[int, Node] = {}
        self._lock = -1

    @property
    def bootstrap_servers(self) -> str:
        """Addresses for clients: ``127.0.0.1:PORT`` of each broker, separated by commas."""
        return ",".join(f"{HOST}:{node.ports.client}" for node in self._nodes.values())

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of all nodes, running or not."""
        return tuple(self._nodes)

    def start(self) -> EmbeddedKafka:
        """Starts every broker; returns when all of them answer and know each other."""
        executable = java.find()
        jars = jar_cache.jars(jar_cache.broker_jars(self._version))
        try:
            self._open_directory()
            self._nodes = self._make_nodes()
            ports = {node.node_id: node.ports for node in self._nodes.values()}
            for node in self._nodes.values():
                _write_private(node.properties, render(self._properties(node, ports)))
            self._format(executable, jars, self._cluster_id())
            self._start(self._nodes.values(), executable)
        except BaseException:
            self.stop()
            raise
        return self

    def _properties(self, node: Node, ports: Mapping[int, Ports]) -> dict[str, str]:
        """Returns the properties of one broker, given the ports of all."""
        return {**server_properties(node.node_id, ports, node.data, self._users), **self._config}

    def stop(self) -> None:
        """Stops every broker, and deletes the data if the directory is temporary."""
        for node in self._nodes.values():
            if self._kept:
                node.begin_stop()
            else:
                node.signal(signal.SIGKILL)  # the data is deleted, so an orderly shutdown is not needed
        for node in self._nodes.values():
            node.await_stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if not self._kept and self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def check(self) -> None:
        """Raises if a broker has ended that was neither killed nor stopped through this object.

        Raises:
            UnavailableError: if a broker has ended; contains the end of its log.
        """
        for node in self._nodes.values():
            if node.started and not node.running:
                raise UnavailableError(f"broker {node.node_id} ended unexpectedly. {node.tail()}")

    def pids(self) -> dict[int, int]:
        """Returns the process id of each broker's JVM that runs, by node id."""
        return {node.node_id: node.pid for node in self._nodes.values() if node.running}

    def kill_node(self, node_id: int) -> None:
        """Kills a broker with SIGKILL, as a power failure would."""
        self._nodes[node_id].kill()

    def pause_node(self, node_id: int) -> None:
        """Suspends a broker with SIGSTOP: its connections stay open, but it does not answer."""
        self._nodes[node_id].signal(signal.SIGSTOP)

    def resume_node(self, node_id: int) -> None:
        """Resumes a broker after `pause_node`."""
        self._nodes[node_id].signal(signal.SIGCONT)

    def stop_node(self, node_id: int) -> None:
        """Shuts a broker down with SIGTERM: it hands its partitions over first, unlike after `kill_node`."""
        self._nodes[node_id].stop()

    def start_node(self, node_id: int, version: str | None = None) -> None:
        """Starts a broker that has ended, with its data and its port. Does nothing if the broker runs.

        Args:
            node_id: the broker.
            version: Kafka's version from now on; None = the same as before. Kafka supports newer versions,
                and older ones only until ``metadata.version`` is finalized at a level that they do not know.

        Raises:
            UnavailableError: if the broker does not start, or the jars of the version cannot be downloaded.
            InvalidOptionError: if the broker runs with another version.
        """
        node = self._nodes[node_id]
        if node.running:
            if version not in (None, node.version):
                raise InvalidOptionError(
                    f"version={version!r}, but broker {node_id} already runs with {node.version}.",
                    fix="call stop_node or kill_node first.",
                )
            return
        node.version = version or node.version
        self._start([node], java.find())

    def is_running(self, node_id: int) -> bool:
        """Returns whether the process of a broker exists. A broker ends by itself if its disk fails."""
        return self._nodes[node_id].running

    def version(self, node_id: int) -> str:
        """Returns Kafka's version with which a broker runs, or ran last."""
        return self._nodes[node_id].version

    def __enter__(self) -> EmbeddedKafka:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open_directory(self) -> None:
        if not self._kept:
            self.directory = Path(tempfile.mkdtemp(prefix="kafka-eos-broker-"))
            return
        try:
            make_missing(self.directory, "directory=")
            self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(
                f"another broker runs in the directory {str(self.directory)!r}.",
                fix="stop it first, or use another directory.",
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"cannot use the directory {str(self.directory)!r}: {error.strerror}.",
                fix="use a directory that is writable.",
            ) from error

    def _make_nodes(self) -> dict[int, Node]:
        wanted = [self._port + index if self._port else 0 for index in range(self._brokers)]
        found = free_ports(wanted + [0] * self._brokers)
        nodes = {}
        for index, (client, controller) in enumerate(
            zip(found[: self._brokers], found[self._brokers :], strict=True)
        ):
            directory = self.directory / f"node-{index + 1}"
            make_private(directory, "directory=")
            nodes[index + 1] = Node(index + 1, directory, Ports(client, controller), self._version)
        return nodes

    def _cluster_id(self) -> str:
        """Returns the cluster id, which is stored with the data."""
        path = self.directory / "cluster.json"
        if path.exists():
            stored = parse_json(path.read_text())
            if stored["brokers"] != self._brokers:
                raise InvalidOptionError(
                    f"brokers={self._brokers}, but the directory {str(self.directory)!r} holds a cluster of "
                    f"{stored['brokers']} broker(s).",
                    fix=f"set brokers={stored['brokers']}, or use another directory.",
                )
            return str(stored["id"])
        cluster_id = new_cluster_id()
        _write_private(path, json.dumps({"id": cluster_id, "brokers": self._brokers}))
        return cluster_id

    def _format(self, executable: str, jars: Path, cluster_id: str) -> None:
        """Formats the data directories that do not exist yet."""
        tool = [executable, *_BRIEF_JVM, "-cp", f"{jars}/*", "kafka.tools.StorageTool", "format"]
        for name, level in self._features.items():
            tool += ["--feature", f"{name}={level}"]
        with contextlib.ExitStack() as running:
            formatting = [
                running.enter_context(
                    subprocess.Popen(
                        [*tool, "-t", cluster_id, "-c", str(node.properties)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
                for node in self._nodes.values()
                if not (node.data / "meta.properties").exists()
            ]
            for process in formatting:
                output, _ = process.communicate()
                if process.returncode:
                    raise UnavailableError(f"cannot format the data directory:\n{last_lines(output)}")

    def _start(self, nodes: Iterable[Node], executable: str) -> None:
        started = list(nodes)
        versions = {node.version for node in started}
        jars = {version: jar_cache.jars(jar_cache.broker_jars(version)) for version in versions}
        options = [*_BROKER_JVM, *self._java_options, _LOGGING]
        for node in started:
            node.launch(
                [executable, *options, "-cp", f"{jars[node.version]}/*", "kafka.Kafka", str(node.properties)],
                None if self._kept else self.directory,
                [self._lock] if self._lock >= 0 else [],
            )
        pauses = Pauses(Deadline.after_seconds(_START_SECONDS), _POLL_SECONDS)
        known, login = frozenset(node.node_id for node in started), self._login()
        waiting = started
        while waiting := [node for node in waiting if not node.is_up(known, login)]:
            # the others wait for the one that ended, so its log has the reason
            ended = [node for node in started if not node.running]
            if ended or pauses.expired:
                raise (ended or waiting)[0].not_started()
            pauses.wait()

    def _login(self) -> Mapping[str, str]:
        """Returns the librdkafka properties with which the first user logs in."""
        for name, password in self._users.items():
            return {
                "security.protocol": "sasl_plaintext",
                "sasl.mechanisms": "PLAIN",
                "sasl.username": name,
                "sasl.password": password,
            }
        return {}


def new_cluster_id(random_bytes: Callable[[], bytes] = lambda: uuid.uuid4().bytes) -> str:
    """Returns a random cluster id in Kafka's form: 22 characters of base64.

    The first character is never a dash, because Kafka's tools would take the id for an option.
    """
    while True:
        cluster_id = base64.urlsafe_b64encode(random_bytes()).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


def free_ports(wanted: list[int]) -> list[int]:
    """Returns the wanted ports, with each 0 replaced by a free port; all are different.

    Raises:
        UnavailableError: if a wanted port is in use, or no port is free.
    """
    with contextlib.ExitStack() as sockets:
        found = []
        for port in wanted:
            listener = sockets.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port:
                _bind(listener, port)
            else:
                _bind_any(listener)
            found.append(listener.getsockname()[1])
        return found


def _bind(listener: socket.socket, port: int) -> None:
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "expected 1 to 65535"
        raise UnavailableError(
            f"port {port} of {HOST} cannot be used: {reason}.",
            fix="stop the program that uses it, or choose another port (0 = any free port).",
        ) from error


def _bind_any(listener: socket.socket) -> None:
    for port in random.sample(_FREE_PORTS, 100):
        with contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return
    raise UnavailableError(f"found no free port from {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} on {HOST}.")


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only the current user can read, because it may contain passwords."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
