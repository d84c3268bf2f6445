"""One broker or several in KRaft mode, each broker and controller at once, on 127.0.0.1 alone."""

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
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kafka_eos_source.embedded import jars as jar_cache
from kafka_eos_source.embedded import java
from kafka_eos_source.embedded.node import Node, last_lines
from kafka_eos_source.embedded.properties import HOST, Ports, render, server_properties
from kafka_eos_source.errors import InvalidOptionError, UnavailableError
from kafka_eos_source.runtime.deadline import Deadline

_START_SECONDS = 120.0
#: Quick to start: a JVM that lives for a second needs no optimising compiler.
_BRIEF_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_BROKER_JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
#: Below the range from which systems take the near ends of connections: while a broker is down, a client
#: that tries it again and again must not come to sit on its port.
_FREE_PORTS = range(20_000, 32_000)
_LOGGING = "-Dorg.slf4j.simpleLogger.showDateTime=true"


class EmbeddedKafka:
    """A Kafka cluster that lives as long as the ``with`` block, and never longer than this process.

    Args:
        brokers: how many; 1 or 3 are usual.
        port: of the first broker; the others follow. 0 = any free ones.
        directory: for the data, kept afterwards and used again by the next start; None = a temporary one.
        config: broker properties that win over ours, as in ``server.properties``.
        auto_create_topics: whether a topic is made by writing to it or reading it.
        users: passwords by name. With any, clients log in by SASL/PLAIN (``security.protocol`` is
            ``SASL_PLAINTEXT``); the first user may do everything, the others what ACLs allow them.
        java_options: for each broker's JVM, after ours (512 MiB of heap).

    Attributes:
        directory: where the data is.

    Raises:
        UnavailableError: no Java, no jars, a port or the directory in use, or a broker that does not start.
        InvalidOptionError: ``brokers`` out of range, or not as many as the directory's cluster has.
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
    ) -> None:
        if not 1 <= brokers <= 9:
            raise InvalidOptionError(f"brokers={brokers}; expected 1 to 9.")
        self._brokers = brokers
        self._port = port
        self._kept = directory is not None
        self.directory = Path(directory).absolute() if directory is not None else Path()
        self._config = {"auto.create.topics.enable": str(auto_create_topics).lower(), **(config or {})}
        self._users = dict(users or {})
        self._java_options = tuple(java_options)
        self._nodes: dict[int, Node] = {}
        self._lock = -1

    @property
    def bootstrap_servers(self) -> str:
        """For clients: ``127.0.0.1:PORT``, one for each broker, with commas between."""
        return ",".join(f"{HOST}:{node.ports.client}" for node in self._nodes.values())

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node ids, running or not."""
        return tuple(self._nodes)

    def start(self) -> EmbeddedKafka:
        """Starts every broker; returns when all of them answer and know each other."""
        executable, jars = java.find(), jar_cache.jars()
        try:
            self._open_directory()
            self._nodes = self._make_nodes()
            ports = {node.node_id: node.ports for node in self._nodes.values()}
            for node in self._nodes.values():
                properties = server_properties(node.node_id, ports, node.data, self._users)
                _write_private(node.properties, render({**properties, **self._config}))
            self._format(executable, jars, self._cluster_id())
            self._start(self._nodes.values(), executable, jars)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every broker and, unless a directory was given, removes the data."""
        for node in self._nodes.values():
            if self._kept:
                node.begin_stop()
            else:
                node.signal(signal.SIGKILL)  # nothing to be left in good order
        for node in self._nodes.values():
            node.await_stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if not self._kept and self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def check(self) -> None:
        """Whether every broker that was started is still there, but for those that were killed by us.

        Raises:
            UnavailableError: one is gone; with the end of its log.
        """
        for node in self._nodes.values():
            if node.started and not node.running:
                raise UnavailableError(f"broker {node.node_id} ended by itself. {node.tail()}")

    def kill_node(self, node_id: int) -> None:
        """SIGKILL: the plug is pulled."""
        self._nodes[node_id].kill()

    def pause_node(self, node_id: int) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._nodes[node_id].signal(signal.SIGSTOP)

    def resume_node(self, node_id: int) -> None:
        """Ends `pause_node`."""
        self._nodes[node_id].signal(signal.SIGCONT)

    def start_node(self, node_id: int) -> None:
        """Starts a broker that was killed or ended, with its data, on its port; a running one is left be."""
        if not self._nodes[node_id].running:
            self._start([self._nodes[node_id]], java.find(), jar_cache.jars())

    def __enter__(self) -> EmbeddedKafka:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside

    def _open_directory(self) -> None:
        if not self._kept:
            self.directory = Path(tempfile.mkdtemp(prefix="kafka-eos-broker-"))
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(
                f"another broker runs in the directory {str(self.directory)!r}.",
                fix="stop that one first, or give another directory.",
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"the directory {str(self.directory)!r} cannot be used: {error.strerror}.",
                fix="give one that can be written.",
            ) from error

    def _make_nodes(self) -> dict[int, Node]:
        wanted = [self._port + index if self._port else 0 for index in range(self._brokers)]
        found = free_ports(wanted + [0] * self._brokers)
        nodes = {}
        for index, (client, controller) in enumerate(
            zip(found[: self._brokers], found[self._brokers :], strict=True)
        ):
            directory = self.directory / f"node-{index + 1}"
            directory.mkdir(exist_ok=True)
            nodes[index + 1] = Node(index + 1, directory, Ports(client, controller))
        return nodes

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
        cluster_id = new_cluster_id()
        path.write_text(json.dumps({"id": cluster_id, "brokers": self._brokers}))
        return cluster_id

    def _format(self, executable: str, jars: Path, cluster_id: str) -> None:
        """Makes the data directories that are not there yet."""
        tool = [executable, *_BRIEF_JVM, "-cp", f"{jars}/*", "kafka.tools.StorageTool", "format"]
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
                said, _ = process.communicate()
                if process.returncode:
                    raise UnavailableError(f"the data directory could not be made:\n{last_lines(said)}")

    def _start(self, nodes: Iterable[Node], executable: str, jars: Path) -> None:
        started = list(nodes)
        options = [*_BROKER_JVM, *self._java_options, _LOGGING, "-cp", f"{jars}/*", "kafka.Kafka"]
        for node in started:
            node.launch(
                [executable, *options, str(node.properties)],
                None if self._kept else self.directory,
                [self._lock] if self._lock >= 0 else [],
            )
        deadline = Deadline.after_seconds(_START_SECONDS)
        known = frozenset(node.node_id for node in started)
        login = next(iter(self._users.items()), None)
        look = threading.Event()
        for node in started:
            node.await_start(known, login, deadline, look)


def new_cluster_id(random_bytes: Callable[[], bytes] = lambda: uuid.uuid4().bytes) -> str:
    """As Kafka makes them: 22 characters of base64, never a dash first, which tools take for an option."""
    while True:
        made = base64.urlsafe_b64encode(random_bytes()).decode().rstrip("=")
        if not made.startswith("-"):
            return made


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
        reason = error.strerror if isinstance(error, OSError) else "ports go from 1 to 65535"
        raise UnavailableError(
            f"port {port} of {HOST} cannot be used: {reason}.",
            fix="stop what uses it, or choose another (0 = any free one).",
        ) from error


def _bind_any(listener: socket.socket) -> None:
    for port in random.sample(_FREE_PORTS, 100):
        with contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return
    raise UnavailableError(f"no port from {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} of {HOST} is free.")


def _write_private(path: Path, text: str) -> None:
    """For our user's eyes only: there may be passwords in it."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
