"""Identifies processes of this host, so that a reader of a journal sees whether its writer still lives."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import psutil

from kafka_eos_source.observe.decode import integer, items, number
from kafka_eos_source.runtime.private_folders import warn_once

_log = logging.getLogger(__name__)

#: The time at which a process started is known to about this many seconds.
_START_PRECISION_SECONDS = 2.0
#: How many generations above a Python process its driver may be: Spark's daemon of Python workers is between.
_GENERATIONS = 3


@dataclass(frozen=True)
class ProcessId:
    """A process of this host. Its start distinguishes it from a later process with the same number.

    Attributes:
        pid: number of the process.
        started_at: when it started, in seconds since 1970, rounded to tenths so that it survives JSON; 0 if
            that is not known.
    """

    pid: int
    started_at: float

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            process = psutil.Process(self.pid)
            started_at = process.create_time()
            return bool(
                abs(started_at - self.started_at) < _START_PRECISION_SECONDS
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (psutil.Error, OSError, ValueError, RuntimeError):  # as in `_writer`
            return False

    def to_json(self) -> list[float]:
        return [self.pid, self.started_at]

    @classmethod
    def from_json(cls, found: object) -> ProcessId:
        """Reads what `to_json` wrote.

        Raises:
            TypeError, ValueError: if it is something else.
        """
        pid, started_at = items(found)
        return cls(integer(pid), number(started_at))


@dataclass(frozen=True)
class Writer:
    """Who wrote a line of a journal.

    Attributes:
        process: the Python process.
        driver: the JVM of the Spark driver that it belongs to; the process itself if there is none.
    """

    process: ProcessId
    driver: ProcessId

    def to_json(self) -> dict[str, Any]:
        return {"process": self.process.to_json(), "driver": self.driver.to_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Writer:
        """Reads what `to_json` wrote.

        Raises:
            TypeError, ValueError, KeyError: if it is something else.
        """
        return cls(ProcessId.from_json(found["process"]), ProcessId.from_json(found["driver"]))


def this_writer() -> Writer:
    """Returns the identity of this process, and of the driver that it belongs to."""
    return _writer(os.getpid())


@lru_cache(maxsize=1)
def _writer(pid: int) -> Writer:
    """Looks up the process once; a fork has another ``pid``."""
    me = ProcessId(pid, 0.0)
    try:
        own = psutil.Process(pid)
        me = _id_of(own)
        for ancestor in own.parents()[:_GENERATIONS]:
            if ancestor.name().startswith("java"):
                return Writer(me, _id_of(ancestor))
    except (psutil.Error, OSError, ValueError, RuntimeError) as error:  # an incomplete /proc: RuntimeError
        warn_once(_log, f"cannot tell which driver process {pid} belongs to: {error!r}")
    return Writer(me, me)


def _id_of(process: psutil.Process) -> ProcessId:
    return ProcessId(process.pid, round(process.create_time(), 1))
