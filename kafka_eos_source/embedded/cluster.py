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
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kafka_eos_source.embedded import java, supervisor
from kafka_eos_source.errors import AuthorizationError, InvalidOptionError, UnavailableError
from kafka_eos_source.kafka.probe import broker_ids
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.folders import make_missing, make_private
from kafka_eos_source.runtime.json_input import parse_json

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """The ports of one node.

    Attributes:
        client: port for clients and other brokers.
        controller: port for KRaft.
    """

    client: int
    controller: int


def server_properties(
    node_id: int, nodes: Mapping[int, Ports], data: Path, users: Mapping[str, str]
) -> dict[str, str]:
    """Returns the properties of one node of a cluster.

    Args:
        node_id: the node.
        nodes: ports of all nodes.
        data: folder of the node's log.
        users: passwords by user name, see `EmbeddedKafka`.
    """
    copies = str(min(3, len(nodes)))
    in_sync = str(min(2, len(nodes)))
    listener = "SASL_PLAINTEXT" if users else "PLAINTEXT"
    ports = nodes[node_id]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": ",".join(f"{id_}@{HOST}:{at.controller}" for id_, at in nodes.items()),
        "listeners": f"{listener}://{HOST}:{ports.client},CONTROLLER://{HOST}:{ports.controller}",
        "inter.broker.listener.name": listener,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": f"CONTROLLER:{listener},{listener}:{listener}",
        "log.dirs": str(data),
        # Internal topics have few partitions, and as many replicas as the number of brokers allows.
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
        "group.initial.rebalance.delay.ms": "0",  # consumers of a test need not wait for others
        "controlled.shutdown.max.retries": "1",
        "metadata.max.idle.interval.ms": "5000",  # by default, it writes twice a second
        **(_security(users) if users else {}),
    }


def _security(users: Mapping[str, str]) -> dict[str, str]:
    """Returns properties for SASL/PLAIN and ACLs.

    The controllers' ports need a login too: whoever may send requests there as a super user may grant
    themselves any right. Brokers and controllers log in to each other as the first user.
    """
    first = next(iter(users))
    logins = " ".join(f"user_{name}={_quoted(password)}" for name, password in users.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    jaas = f"{module} username={_quoted(first)} password={_quoted(users[first])} {logins};"
    return {
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": jaas,
        "listener.name.controller.plain.sasl.jaas.config": jaas,
        "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{first}",
    }


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def render(properties: Mapping[str, str]) -> str:
    """Returns the text of a ``.properties`` file, with backslashes escaped."""
    return "".join(
        "{}={}\n".format(name, value.replace("\\", "\\\\").replace("\n", "\\n"))
        for name, value in properties.items()
    )


# -- one broker: its files, ports and process ------------------------------------------------------

_STOP_SECONDS = 30.0  # longer than the grace period of the supervisor
_ANSWER_SECONDS = 5.0
_STARTED = b"Kafka Server started"


class Node:
    """A broker, stopped or running under its own supervisor process (`embedded.supervisor`).

    Attributes:
        pid: process id of the JVM; 0 = not running.
        version: Kafka's version at the next `launch`.
    """

    def __init__(self, node_id: int, directory: Path, ports: Ports, version: str) -> None:
        self.node_id = node_id
        self.ports = ports
        self.version = version
        self.data = directory / "data"
        self.log = directory / "broker.log"
        self.properties = directory / "server.properties"
        self.pid = 0
        self._supervisor: subprocess.Popen[str] | None = None
        self._log_start = 0

    @property
    def started(self) -> bool:
        """Whether the broker was started, and not killed or stopped through this object since."""
        return self._supervisor is not None

    @property
    def running(self) -> bool:
        """Whether the process exists, suspended or not."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def launch(self, command: Sequence[str], remove: Path | None, open_files: Sequence[int]) -> None:
        """Starts the process. `is_up` tells when the broker has started.

        Args:
            command: command line of the JVM.
            remove: folder that the supervisor deletes when this process ends; None = no folder.
            open_files: file descriptors that stay open while the broker runs.
        """
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(self.log), str(remove or ""), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=open_files,
            # In a session of its own, the broker does not get the terminal's Ctrl-C; this process stops it.
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        pid = self._supervisor.stdout.readline()
        if not pid:
            self._await_end(kill=True)
            raise UnavailableError(f"broker {self.node_id} did not start: {command[0]!r} could not be run.")
        self.pid = int(pid)

    def is_up(self, known: frozenset[int], login: Mapping[str, str]) -> bool:
        """Returns whether the broker has started, and its metadata contains all these brokers.

        Args:
            known: node ids.
            login: librdkafka properties of the login.
        """
        return self._log_says_started() and self._knows(known, login)

    def not_started(self) -> UnavailableError:
        """Returns the error for a broker that has not started; it contains what its log says about that."""
        what = "did not start in time" if self.running else "ended while it started"
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        cause = next((f": {line.strip()}" for line in lines if "Exception: " in line), "")
        return UnavailableError(f"broker {self.node_id} {what}{cause}. {self.tail()}")

    def _log_says_started(self) -> bool:
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            return _STARTED in log.read()

    def _knows(self, known: frozenset[int], login: Mapping[str, str]) -> bool:
        try:
            return known <= broker_ids(HOST, self.ports.client, login, _ANSWER_SECONDS)
        except (OSError, AuthorizationError):  # it starts, and does not know its users yet
            return False

    def tail(self) -> str:
        """Returns the end of the broker's log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "The end of its log:\n" + last_lines(text)

    def signal(self, number: int) -> None:
        """Sends a signal to the JVM, if it runs."""
        # Process id 0 would address our own process group.
        if self.running and self.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the broker with SIGKILL and waits for its end."""
        self._await_end(kill=True)

    def stop(self) -> None:
        """Shuts the broker down in an orderly way and waits for its end.

        The signal goes to the JVM, because the supervisor kills a broker whose data is temporary.
        """
        self.signal(signal.SIGCONT)  # it may have been paused
        self.signal(signal.SIGTERM)
        self._await_end(kill=False)

    def begin_stop(self) -> None:
        """Sends SIGTERM; `await_stop` waits for the end."""
        if self._supervisor is not None:
            self._supervisor.terminate()

    def await_stop(self) -> None:
        """Waits for the end after `begin_stop`; kills the broker if it takes too long."""
        self._await_end(kill=False)

    def _await_end(self, kill: bool) -> None:
        if self._supervisor is None:
            return
        process = self._supervisor
        if kill:
            self.signal(signal.SIGKILL)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            process.kill()
            process.wait()
        self._supervisor, self.pid = None, 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def last_lines(text: str, count: int = 15) -> str:
    """Returns the last lines of a JVM's output, without the frames of stack traces."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join(lines[-count:])


# -- the cluster -----------------------------------------------------------------------------------

_START_SECONDS, _POLL_SECONDS = 120.0, 0.05
#: Options for a JVM that runs for a second: it starts faster without the optimising compiler.
_BRIEF_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_BROKER_JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
#: Below the ephemeral ports. Otherwise a client that retries while a broker is down could get the broker's
#: port as its own local port.
_FREE_PORTS = range(20_000, 32_000)
#: Properties with which neither records nor committed offsets expire while a cluster is stopped.
_LASTING = {"log.retention.ms": "-1", "offsets.retention.minutes": str(10 * 365 * 24 * 60)}
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
        version: str = java.KAFKA_VERSION,
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
        jars = java.jars(java.broker_jars(self._version))
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
        jars = {version: java.jars(java.broker_jars(version)) for version in versions}
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


def lasting(config: Mapping[str, str]) -> dict[str, str]:
    """Returns broker properties with which nothing expires, unless the given ones say when."""
    stated = {name.rpartition(".")[0] for name in config}  # log.retention has three units
    kept = {name: value for name, value in _LASTING.items() if name.rpartition(".")[0] not in stated}
    return {**kept, **config}


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
