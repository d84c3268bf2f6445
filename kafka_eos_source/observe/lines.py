"""Lines of JSON, which one process writes and another one reads: records with a version, a kind and a writer.

The writer may have been another version, or may have been killed while it wrote. A reader skips objects whose
version or kind it does not know, and ignores keys that it does not know. The functions that read single
values raise for a value of another kind. `ProcessId` tells a reader whether the writer still lives.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import psutil

from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.runtime.logs import warn_once

#: Version of the JSON. A change that a reader of this version would misunderstand gets the next number.
VERSION = 1

_SECONDS_DIGITS = 6

R = TypeVar("R")


def json_line(found: Mapping[str, Any]) -> str:
    """Returns an object of JSON as one line, which can be parsed whatever texts and numbers it contains.

    Half of a surrogate pair, as in the name of a file that is not UTF-8, becomes a question mark. Infinite
    numbers and NaN are left out.
    """
    try:
        line = json.dumps(found, separators=(",", ":"), allow_nan=False)
        if "\\ud" not in line:
            return line
    except ValueError:
        pass
    return json.dumps(_plain(found), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items() if _is_plain(each)}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value if _is_plain(each)]
    return value


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


# -- records ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """How a field of a record is stored; see `key`."""

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    is_brief: bool


def _as_is(value: Any) -> Any:
    return value


def key(
    name: str, read: Callable[[Any], Any], write: Callable[[Any], Any] = _as_is, *, brief: bool = False
) -> dict[str, _Key]:
    """Returns the metadata of a dataclass's field that `to_line` stores and `from_line` reads.

    Args:
        name: the key in the JSON object.
        read: returns the value of the field; raises one of `SHAPE_ERRORS` for a value of another kind.
        write: returns the value for JSON.
        brief: leave the key out if the field has its default.
    """
    return {"key": _Key(name, read, write, brief)}


def to_line(record: Any, kind: str) -> str:
    """Returns a record, a dataclass, as one line."""
    found: dict[str, Any] = {"v": VERSION, "kind": kind}
    for each in fields(record):
        stored: _Key = each.metadata["key"]
        value = getattr(record, each.name)
        if not (stored.is_brief and value == _default(each)):
            found[stored.name] = stored.write(value)
    return json_line(found)


def from_line(record: type[R], kind: str, line: str) -> R | None:
    """Reads what `to_line` wrote; returns None if it is damaged, of another kind or of another version."""
    try:
        found = parse_json(line)
        if not isinstance(found, dict) or (found.get("v"), found.get("kind")) != (VERSION, kind):
            return None
        values = {}
        for each in fields(record):  # type: ignore[arg-type]
            stored: _Key = each.metadata["key"]
            if stored.name in found:
                values[each.name] = stored.read(found[stored.name])
        return record(**values)  # raises TypeError if a field without a default is missing
    except SHAPE_ERRORS:
        return None


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def milliseconds(at: float | None) -> float | None:
    """Returns a time in seconds, rounded to milliseconds."""
    return None if at is None else round(at, 3)


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns numbers with as many digits as a duration in seconds needs."""
    return {
        name: each if isinstance(each, int) else round(each, _SECONDS_DIGITS)
        for name, each in seconds.items()
    }


def all_rounded(groups: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns groups of numbers as `rounded` does."""
    return {name: rounded(each) for name, each in groups.items()}


# -- reading values --------------------------------------------------------------------------------


def integer(found: object) -> int:
    """Returns an integer.

    Raises:
        ValueError: if the value is something else.
    """
    if type(found) is not int:
        raise ValueError(f"{found!r} is not an integer")
    return found


def number(found: object) -> float:
    """Returns a finite number.

    Raises:
        ValueError: if the value is something else.
    """
    if (type(found) is int and found.bit_length() < sys.float_info.max_exp) or (
        type(found) is float and math.isfinite(found)
    ):
        return float(found)
    raise ValueError(f"{found!r} is not a number")


def number_or_none(found: object) -> float | None:
    """Returns a finite number, or None for null.

    Raises:
        ValueError: if the value is something else.
    """
    return None if found is None else number(found)


def text(found: object) -> str:
    """Returns a text.

    Raises:
        TypeError: if the value is something else.
    """
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is not a text")
    return found


def mapping(found: object) -> Mapping[str, Any]:
    """Returns an object of JSON.

    Raises:
        TypeError: if the value is something else.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{found!r} is not an object")
    return found


def integers(found: object) -> dict[str, int]:
    """Returns an object of JSON whose values are integers.

    Raises:
        TypeError, ValueError: if the value is something else.
    """
    return {name: integer(value) for name, value in mapping(found).items()}


def numbers(found: object) -> dict[str, float]:
    """Returns an object of JSON whose values are finite numbers.

    Raises:
        TypeError, ValueError: if the value is something else.
    """
    return {name: number(value) for name, value in mapping(found).items()}


def groups(found: object) -> dict[str, dict[str, float]]:
    """Returns an object of JSON whose values are objects of finite numbers.

    Raises:
        TypeError, ValueError: if the value is something else.
    """
    return {name: numbers(each) for name, each in mapping(found).items()}


def items(found: object) -> list[Any]:
    """Returns an array of JSON.

    Raises:
        TypeError: if the value is something else.
    """
    if not isinstance(found, list):
        raise TypeError(f"{found!r} is not an array")
    return found


# -- the process that wrote a line -----------------------------------------------------------------

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
    def from_json(cls, found: object) -> Writer:
        """Reads what `to_json` wrote.

        Raises:
            TypeError, ValueError, KeyError: if it is something else.
        """
        writer = mapping(found)
        return cls(ProcessId.from_json(writer["process"]), ProcessId.from_json(writer["driver"]))


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
