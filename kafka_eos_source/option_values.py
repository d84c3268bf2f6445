"""From an option's text to its value; every error names the option, its value and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition

T = TypeVar("T")
#: (option name, text) → value.
Parse = Callable[[str, str], T]

LATEST, EARLIEST = -1, -2
_LONG_MAX = 2**63 - 1

_UNITS_MS = {
    "us": 0.001,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def invalid(name: str, value: str, expected: str, fix: str = "") -> InvalidOptionError:
    """The one form of a bad value's message."""
    return InvalidOptionError(f"option {name!r} has the value {value!r}; expected {expected}.", fix=fix)


def text(name: str, value: str) -> str:
    """Trimmed, not empty."""
    if not value.strip():
        raise invalid(name, value, "some text")
    return value.strip()


def boolean(name: str, value: str) -> bool:
    """``true`` or ``false`` in any letter case, as Scala's ``toBoolean``."""
    found = {"true": True, "false": False}.get(value.strip().lower())
    if found is None:
        raise invalid(name, value, "true or false")
    return found


def choice(*values: str) -> Parse[str]:
    """One of ``values``, in any letter case."""

    def parse(name: str, value: str) -> str:
        found = value.strip().lower()
        if found not in values:
            raise invalid(name, value, " or ".join(values))
        return found

    return parse


def integer(at_least: int) -> Parse[int]:
    """A whole number from ``at_least`` to 2⁶³-1."""

    def parse(name: str, value: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", value.strip()) or not at_least <= int(value) <= _LONG_MAX:
            raise invalid(name, value, f"a whole number, {at_least} or more")
        return int(value)

    return parse


def duration_ms(name: str, value: str) -> int:
    """Spark's time string: a number with us, ms, s, m, min, h or d; without a unit it is ms."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", value.strip().lower())
    if found is None or (found[2] or "ms") not in _UNITS_MS:
        raise invalid(name, value, "a time such as 500ms, 30s, 15m or 1h")
    return int(int(found[1]) * _UNITS_MS[found[2] or "ms"])


def application_id(name: str, value: str) -> str:
    """What can be a transactional id, a group and the start of topic names."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", value.strip()):
        raise invalid(name, value, "1 to 200 letters, digits, dots, dashes or underscores")
    return value.strip()


def topic(name: str, value: str) -> str:
    """A legal topic name (``Topic.validate`` in Kafka)."""
    found = value.strip()
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", found) or found in (".", ".."):
        raise invalid(name, value, "a topic name: 1 to 249 letters, digits, dots, dashes or underscores")
    return found


def topics(name: str, value: str) -> tuple[str, ...]:
    """A comma list; blanks are dropped."""
    found = tuple(dict.fromkeys(topic(name, each) for each in value.split(",") if each.strip()))
    if not found:
        raise invalid(name, value, "one topic or several, with commas between")
    return found


def pattern(name: str, value: str) -> str:
    """A regular expression; a topic belongs when it is *found* in its name, as with Java's ``find``."""
    try:
        re.compile(text(name, value))
    except re.error as error:
        raise invalid(name, value, f"a regular expression ({error})") from error
    return value.strip()


def assignment(name: str, value: str) -> tuple[TopicPartition, ...]:
    """``{"t":[0,1]}``."""
    example = '{"topic":[0,1]}'
    found = _json_object(name, value, example)
    partitions = []
    for each, numbers in found.items():
        if not isinstance(numbers, list) or not all(_is_whole(number, 0) for number in numbers):
            raise invalid(name, value, f"lists such as {example}; topic {each!r} has {numbers!r}")
        partitions += [TopicPartition(topic(name, each), number) for number in numbers]
    if not partitions:
        raise invalid(name, value, f"one partition at least, such as {example}")
    return tuple(sorted(set(partitions)))


def offsets(name: str, value: str) -> tuple[dict[TopicPartition, int], dict[str, int]]:
    """``{"t":{"0":23,"1":-1},"u":"earliest"}`` as offsets per partition, and per whole topic."""
    example = '{"topic":{"0":23,"1":-1}} (-1 = latest, -2 = earliest)'
    by_partition: dict[TopicPartition, int] = {}
    by_topic: dict[str, int] = {}
    for each, entry in _json_object(name, value, example).items():
        if isinstance(entry, str) and entry.lower() in ("earliest", "latest"):
            by_topic[each] = EARLIEST if entry.lower() == "earliest" else LATEST
        elif isinstance(entry, dict) and entry:
            for number, offset in entry.items():
                if not number.isdigit() or not _is_whole(offset, EARLIEST):
                    raise invalid(name, value, f"offsets such as {example}; {each}-{number} has {offset!r}")
                by_partition[TopicPartition(each, int(number))] = offset
        else:
            raise invalid(name, value, f"offsets such as {example}; topic {each!r} has {entry!r}")
    if not by_partition and not by_topic:
        raise invalid(name, value, f"one topic at least, such as {example}")
    return by_partition, by_topic


def timestamps(name: str, value: str) -> dict[TopicPartition, int]:
    """``{"t":{"0":1700000000000}}``, ms since 1970."""
    example = '{"topic":{"0":1700000000000}} (ms since 1970)'
    found: dict[TopicPartition, int] = {}
    for each, entry in _json_object(name, value, example).items():
        if not isinstance(entry, dict):
            raise invalid(name, value, f"times such as {example}; topic {each!r} has {entry!r}")
        for number, at_ms in entry.items():
            if not number.isdigit() or not _is_whole(at_ms, 0):
                raise invalid(name, value, f"times such as {example}; {each}-{number} has {at_ms!r}")
            found[TopicPartition(each, int(number))] = at_ms
    if not found:
        raise invalid(name, value, f"one partition at least, such as {example}")
    return found


def _json_object(name: str, value: str, example: str) -> Mapping[str, Any]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise invalid(name, value, f"JSON such as {example}; it is malformed: {error}") from error
    if not isinstance(found, dict):
        raise invalid(name, value, f"a JSON object such as {example}")
    return found


def _is_whole(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= _LONG_MAX
