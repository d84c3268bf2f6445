"""Failpoints: named places in the code where a test or the demo can kill or stop the process.

An environment variable arms them. Each process reads it once::

    KAFKA_EOS_FAILPOINTS="commit.after_commit=kill@/tmp/once,commit.before_begin=raise"

Each entry is ``name=action[*n][@file]``. The failpoint fires when the process reaches it for the n-th time
(default: the first), and each time after that. The actions:

- ``kill`` sends SIGKILL to this process and to the JVM that started it, like a power cut on the driver.
- ``kill-executor`` sends SIGKILL to this process and to the JVM of its executor.
- ``kill-worker`` sends SIGKILL to this Python process only.
- ``raise`` raises a `RestartQueryError`.
- ``stop`` sends SIGSTOP to this process.

With ``@file``, the failpoint fires once in all processes together: the process that creates the file wins.
In normal use nothing is armed, and `reach` costs one dictionary look-up.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from functools import lru_cache

from kafka_eos_source.errors import RestartQueryError

ENVIRONMENT_VARIABLE = "KAFKA_EOS_FAILPOINTS"

_log = logging.getLogger(__name__)


@dataclass
class _Armed:
    """One armed failpoint. It fires once ``left`` has been counted down to 0."""

    action: str
    left: int
    once_file: str


@lru_cache(maxsize=1)
def _armed() -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for entry in os.environ.get(ENVIRONMENT_VARIABLE, "").split(","):
        if not entry.strip():
            continue
        name, _, rest = entry.strip().partition("=")
        rest, _, once_file = rest.partition("@")
        action, _, times = rest.partition("*")
        if action not in _ACTIONS or not (times or "1").isdecimal():
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} has an unknown action {rest!r} in {entry!r}; expected one of "
                f"{', '.join(_ACTIONS)}, followed by *n to fire when the place is reached the n-th time"
            )
        armed[name] = _Armed(action, int(times or 1), once_file)
    return armed


def reach(name: str) -> None:
    """Performs the action of the failpoint ``name`` if a test armed it.

    Raises:
        RestartQueryError: if the failpoint is armed with ``raise``.
    """
    armed = _armed().get(name)
    if armed is None:
        return
    armed.left -= 1
    if armed.left > 0:
        return
    if armed.once_file:
        try:
            os.close(os.open(armed.once_file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    _log.warning("failpoint %s fires: %s", name, armed.action)
    _ACTIONS[armed.action](name)


def _kill(_name: str) -> None:
    for pid in _driver_processes():
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _driver_processes() -> list[int]:
    """Returns the ids of this process's ancestors, up to the Python process that launched the JVM.

    A commit worker is a child of ``pyspark.daemon``, which is a child of the JVM, which is a child of the
    user's script (through ``spark-submit``). Ancestors of the script, such as a shell, are not included.
    """
    import psutil  # imported late: needed only when a failpoint fires

    found: list[int] = []
    process = psutil.Process().parent()
    seen_jvm = False
    while process is not None:
        is_jvm = process.name() == "java"
        if seen_jvm and not is_jvm:
            if process.name().startswith("python"):
                found.append(process.pid)
                break
        else:
            found.append(process.pid)
        seen_jvm = seen_jvm or is_jvm
        process = process.parent()
    if not seen_jvm:
        return []
    # the JVM first, so that it cannot react to the loss of its worker
    return sorted(found, key=lambda pid: psutil.Process(pid).name() != "java")


def _kill_executor(_name: str) -> None:
    import psutil

    for parent in psutil.Process().parents():
        os.kill(parent.pid, signal.SIGKILL)
        if parent.name() == "java":
            break
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_worker(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(name: str) -> None:
    raise RestartQueryError(f"failpoint {name} is armed to raise this error")


_ACTIONS = {
    "kill": _kill,
    "kill-executor": _kill_executor,
    "kill-worker": _kill_worker,
    "raise": _raise,
    "stop": _stop,
}
