"""One broker: its files, ports and process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kafka_eos_source.embedded import supervisor
from kafka_eos_source.embedded.properties import HOST, Ports
from kafka_eos_source.errors import AuthorizationError, UnavailableError
from kafka_eos_source.kafka.probe import broker_ids

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
