"""Named moments at which a test (or the demo) may stop the process dead.

Armed by an environment variable, read once per process::

    KAFKA_EOS_FAILPOINTS="commit.after_commit=kill@/tmp/once,commit.before_begin=raise"

Each entry is ``name=action[*n][@file]``: from the n-th time on (the first, if not said) that this process
gets there. Actions: ``kill`` (SIGKILL to this process and to the JVM that started it, the nearest thing to
pulling the plug on a driver), ``kill-executor`` (this process and its executor's JVM), ``kill-worker`` (this
Python process only), ``raise`` (a `RestartQueryError`), ``stop`` (SIGSTOP to this process). With ``@file``
the failpoint fires once in all processes together: the file is created, exclusively, when it fires.
Nothing is armed in normal use, and `reach` then costs one dictionary look-up.
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
    """One entry; ``left`` counts down to the time from which it fires."""

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
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: unknown action {rest!r} in {entry!r}")
        armed[name] = _Armed(action, int(times or 1), once_file)
    return armed


def reach(name: str) -> None:
    """Marks the moment ``name``; does nothing unless a test armed it.

    Raises:
        RestartQueryError: when armed with ``raise``.
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
    _log.warning("failpoint %s: %s", name, armed.action)
    _ACTIONS[armed.action](name)


def _kill(_name: str) -> None:
    for pid in _driver_processes():
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _driver_processes() -> list[int]:
    """Our ancestors up to and including the Python process that launched the JVM.

    A commit worker is a child of the ``pyspark.daemon``, that of the JVM, that of the user's script
    (through ``spark-submit``). Ancestors beyond the script (a shell, a test runner) are left alone.
    """
    import psutil  # only when a failpoint fires

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
    # the JVM first, so that nothing it would still do on losing its worker happens
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
    raise RestartQueryError(f"failpoint {name} was armed to raise")


_ACTIONS = {
    "kill": _kill,
    "kill-executor": _kill_executor,
    "kill-worker": _kill_worker,
    "raise": _raise,
    "stop": _stop,
}
