"""One broker: its files, its ports, its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kafka_eos_source.embedded import probe, supervisor
from kafka_eos_source.embedded.properties import HOST, Ports
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.runtime.deadline import Deadline

_STOP_SECONDS = 30.0  # above the supervisor's own grace
_LOOK_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_STARTED = b"Kafka Server started"


class Node:
    """A broker that is stopped, or runs under a supervisor of its own (`embedded.supervisor`)."""

    def __init__(self, node_id: int, directory: Path, ports: Ports) -> None:
        self.node_id = node_id
        self.ports = ports
        self.data = directory / "data"
        self.log = directory / "broker.log"
        self.properties = directory / "server.properties"
        self._supervisor: subprocess.Popen[str] | None = None
        self._jvm_pid = 0
        self._log_start = 0

    @property
    def started(self) -> bool:
        """Whether it was started, and neither killed nor stopped by us since."""
        return self._supervisor is not None

    @property
    def running(self) -> bool:
        """Whether the process is there, paused or not."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def launch(self, command: Sequence[str], remove: Path | None, held: Sequence[int]) -> None:
        """Starts the process; `await_start` waits for the broker.

        Args:
            command: of the JVM.
            remove: a folder that is to go when this process goes.
            held: file descriptors that stay open while the broker runs.
        """
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(self.log), str(remove or ""), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=held,
            # a session of its own: Ctrl-C in a terminal reaches us alone, and we end it in good order
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        pid = self._supervisor.stdout.readline()
        if not pid:
            self._forget(kill=True)
            raise UnavailableError(f"broker {self.node_id}: {command[0]!r} could not be run.")
        self._jvm_pid = int(pid)

    def await_start(
        self, known: frozenset[int], login: tuple[str, str] | None, deadline: Deadline, look: threading.Event
    ) -> None:
        """Until it has started and its metadata names the nodes ``known``.

        Raises:
            UnavailableError: it ended, or the deadline passed; with the end of its log.
        """
        while not (self._log_says_started() and self._knows(known, login)):
            if not self.running or deadline.expired:
                what = "did not start in time" if self.running else "ended"
                raise UnavailableError(f"broker {self.node_id} {what}. {self.tail()}")
            look.wait(_LOOK_SECONDS)

    def _log_says_started(self) -> bool:
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            return _STARTED in log.read()

    def _knows(self, known: frozenset[int], login: tuple[str, str] | None) -> bool:
        try:
            return known <= probe.broker_ids(HOST, self.ports.client, login, _ANSWER_SECONDS)
        except OSError:
            return False

    def tail(self) -> str:
        """The end of the log."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "The end of its log:\n" + last_lines(said)

    def signal(self, number: int) -> None:
        """To the JVM, if it is there."""
        # 0 would mean our own process group
        if self.running and self._jvm_pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._jvm_pid, number)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self._forget(kill=True)

    def begin_stop(self) -> None:
        """SIGTERM; `await_stop` waits."""
        if self._supervisor is not None:
            self._supervisor.terminate()

    def await_stop(self) -> None:
        """Gone: in good order after `begin_stop`, else killed."""
        self._forget(kill=False)

    def _forget(self, kill: bool) -> None:
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
        self._supervisor, self._jvm_pid = None, 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def last_lines(said: str, count: int = 15) -> str:
    """Of what a JVM said, without the frames of its stack traces."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join(lines[-count:])
