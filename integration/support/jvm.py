"""Runs a server of a test in a JVM that ends with the test, and that can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from integration.support.processes import await_condition
from kafka_eos_source.embedded import java, supervisor


class Jvm:
    """A server's process.

    Args:
        log: file for what it prints.
        arguments: arguments of Java.
        answers: returns whether the server answers.
        seconds: how long it may take until it does.
    """

    def __init__(
        self, log: Path, arguments: Sequence[str], answers: Callable[[], bool], seconds: float
    ) -> None:
        self._log = log
        self._arguments = arguments
        self._answers = answers
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        command = [java.find(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *self._arguments]
        self._process = process = subprocess.Popen(  # the supervisor ends the JVM when this process ends
            [sys.executable, supervisor.__file__, str(self._log), "", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        self._pid = int(process.stdout.readline())

        def answers() -> bool:
            assert process.poll() is None, f"the server did not start:\n{self._log.read_text()[-4000:]}"
            return self._answers()

        await_condition(answers, self._seconds, "the server answers")

    def kill(self) -> None:
        """Kills the server at once, as a power failure would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None
