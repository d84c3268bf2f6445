"""Parsers that turn the text of an option into its value.

Each error names the option, its value and what was expected.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import READ_COLUMNS, TopicPartition
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.secrets import is_loopback, shown_text, shown_url

T = TypeVar("T")
#: A parser: takes the name and the text of an option, returns the value.
Parse = Callable[[str, str], T]

LATEST, EARLIEST = -1, -2
#: Stands for all topics that the JSON of an offsets option does not name. No topic can have this name.
OTHERS = "*"
_LONG_MAX = 2**63 - 1
_INT_MAX = 2**31 - 1
_HIGHEST_PORT = 65535

#: Spark's units of time (``JavaUtils.timeStringAs``), in microseconds.
_UNITS_US = {
    "us": 1,
    "ms": 1000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def invalid(name: str, value: str, expected: str, fix: str = "") -> InvalidOptionError:
    """Returns the error for a bad value. All such messages have this form."""
    shown = shown_text(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return InvalidOptionError(
        f"option {name!r} has the value {shown!r}; expected {expected}.",
        fix=fix or f"set {name!r} to such a value, or remove it.",
    )


def refuse_plain_http(option: str, url: str, sent: str, permission: str, *, allowed: bool) -> None:
    """Checks that a URL to which secrets are sent is encrypted, or leads to this host.

    Args:
        option: name of the option with the URL, for the error.
        url: the URL.
        sent: which secrets are sent, for the error, as in "the password of 'auth'".
        permission: name of the option that allows plain http.
        allowed: its value.

    Raises:
        InvalidOptionError: if the secrets would cross the network in plain text, or the URL is none.
    """
    try:
        parts = urlsplit(url.strip())
        host = parts.hostname or ""
    except ValueError:
        raise InvalidOptionError(
            f"option {option!r} has the value {shown_url(url)!r}, which is not a URL.", fix="correct it."
        ) from None
    if allowed or parts.scheme.lower() != "http" or is_loopback(host):
        return
    raise InvalidOptionError(
        f"option {option!r} has the value {shown_url(url)!r}: {sent} would cross the network to the host "
        f"{host!r} without encryption.",
        fix=f"use https; or set the option {permission!r} to true if nobody else can read what crosses that "
        "network.",
    )


def text(name: str, value: str) -> str:
    """Returns the text without surrounding blanks; it must not be empty."""
    if not value.strip():
        raise invalid(name, value, "a non-empty text")
    return value.strip()


def anything(_name: str, value: str) -> str:
    """Returns the text unchanged."""
    return value


def boolean(name: str, value: str) -> bool:
    """Parses ``true`` or ``false``; letter case does not matter, as in Scala's ``toBoolean``."""
    found = {"true": True, "false": False}.get(value.strip().lower())
    if found is None:
        raise invalid(name, value, "true or false")
    return found


def choice(*values: str) -> Parse[str]:
    """Returns a parser for one of ``values``; letter case does not matter."""

    def parse(name: str, value: str) -> str:
        found = value.strip().lower()
        if found not in values:
            raise invalid(name, value, " or ".join(values))
        return found

    return parse


def answer(words: tuple[str, ...], questions: tuple[str, ...], argument: Parse[object]) -> Parse[str]:
    """Returns a parser for a person's answer to an error: a word, or a word and what it is about.

    The part after the colon names the one case that the answer is for, such as a batch, so that an answer
    that stays in a program has no effect on later cases.

    Args:
        words: words that stand alone.
        questions: words that need an argument, as in ``assume_committed:17``.
        argument: parser of the argument.
    """
    expected = " or ".join([*words, *(f"{each}:…" for each in questions)])

    def parse(name: str, value: str) -> str:
        word, colon, about = (part.strip() for part in value.partition(":"))
        word = word.lower()
        if not colon and word in words:
            return word
        if word not in questions or not about:
            raise invalid(
                name,
                value,
                expected,
                f"set {name!r} as the error message says that asks for it, or remove it.",
            )
        return f"{word}:{argument(name, about)}"

    return parse


def option_text(value: object) -> str:
    """Returns the value of an option as Spark's ``options()`` passes it on: booleans in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def digests(name: str, value: str) -> dict[str, str]:
    """Parses a JSON object whose values are texts, such as the digest of each static table by its name."""
    expected = 'a JSON object of texts, such as {"rates":"5f3c"}'
    try:
        found = parse_json(value)
    except JsonError as error:
        raise invalid(name, value, f"{expected}; it is malformed ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise invalid(name, value, expected)
    return found


def batch_number(name: str, value: str) -> int:
    """Parses the number of a batch in an answer."""
    return integer(0)(name, value)


def integer(at_least: int, at_most: int = _LONG_MAX) -> Parse[int]:
    """Returns a parser for an integer from ``at_least`` to ``at_most``, by default 2⁶³-1."""
    expected = f"{at_least} or more" if at_most == _LONG_MAX else f"from {at_least} to {at_most}"

    def parse(name: str, value: str) -> int:
        # int() raises a ValueError for thousands of digits, so the pattern limits their number; it raises one
        # also for the separators U+001C to U+001F, which strip() takes away
        digits = value.strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,30}", digits) or not at_least <= int(digits) <= at_most:
            raise invalid(name, value, f"an integer, {expected}")
        return int(digits)

    return parse


def port(name: str, value: str) -> int:
    """Parses a port number; 0 = any free port."""
    number = integer(0)(name, value)
    if number > _HIGHEST_PORT:
        raise invalid(name, value, f"a port from 0 to {_HIGHEST_PORT}")
    return number


def minus_one_or_positive(name: str, value: str) -> int:
    """Parses a positive integer, or -1."""
    found = integer(-1)(name, value)
    if found == 0:
        raise invalid(name, value, "an integer, 1 or more, or -1")
    return found


def duration_ms(name: str, value: str) -> int:
    """Parses Spark's time string, such as ``30s``, into ms; a number without a unit is in ms."""
    found = re.fullmatch(r"([0-9]{1,19})\s*([a-z]*)", value.strip().lower())
    if found is None or (found[2] or "ms") not in _UNITS_US:
        raise invalid(name, value, "a time such as 500ms, 30s, 15m or 1h")
    return min(int(found[1]) * _UNITS_US[found[2] or "ms"] // 1000, _LONG_MAX)


def application_id(name: str, value: str) -> str:
    """Parses an id that is valid as transactional id, group id and topic name prefix."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", value.strip()):
        raise invalid(name, value, "1 to 200 letters, digits, dots, hyphens or underscores")
    return value.strip()


def topic(name: str, value: str) -> str:
    """Parses a topic name; the rules are those of Kafka's ``Topic.validate``."""
    found = value.strip()
    if not _TOPIC.fullmatch(found) or found in (".", ".."):
        raise invalid(name, value, "a topic name: 1 to 249 letters, digits, dots, hyphens or underscores")
    return found


def topics(name: str, value: str) -> tuple[str, ...]:
    """Parses a comma-separated list of topics; ignores empty items and repetitions."""
    found = tuple(dict.fromkeys(topic(name, each) for each in value.split(",") if each.strip()))
    if not found:
        raise invalid(name, value, "one or more topics, separated by commas")
    return found


def read_columns(name: str, value: str) -> tuple[str, ...]:
    """Parses a comma-separated list of distinct columns of the source; letter case does not matter."""
    known = {column.lower(): column for column in READ_COLUMNS}
    asked = [each.strip() for each in value.split(",") if each.strip()]
    found = tuple(known.get(each.lower(), "") for each in asked)
    if not found or "" in found or len(set(found)) < len(found):
        raise invalid(name, value, f"some of the columns {', '.join(READ_COLUMNS)}, each at most once")
    return found


def pattern(name: str, value: str) -> str:
    """Checks a regular expression. It matches a topic if it is *found* in the name, as with Java's ``find``.

    Users know the syntax of Java's expressions. Syntax that Python lacks is an error. So is syntax that
    Python warns about, such as nested sets and intersections (``[a-z&&[^b]]``), because it has another
    meaning in Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(text(name, value))
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise invalid(name, value, f"a regular expression that Python's 're' accepts ({error})") from error
    return value.strip()


def assignment(name: str, value: str) -> tuple[TopicPartition, ...]:
    """Parses partitions by topic, such as ``{"t":[0,1]}``."""
    example = '{"topic":[0,1]}'
    partitions = []
    for each, numbers in _json_object(name, value, example).items():
        if (
            not isinstance(numbers, list)
            or not numbers
            or not all(_is_whole(number, 0, _INT_MAX) for number in numbers)
        ):
            raise invalid(
                name,
                value,
                f"a list of partitions for each topic, such as {example}; topic {each!r} has {numbers!r}",
            )
        partitions += [TopicPartition(each, number) for number in numbers]
    return tuple(sorted(set(partitions)))


def offsets(name: str, value: str) -> tuple[dict[TopicPartition, int], dict[str, int]]:
    """Parses offsets such as ``{"t":{"0":23,"1":-1},"u":"earliest","*":"latest"}``.

    Returns:
        The offsets by partition, and the offsets for whole topics by topic.
    """
    example = '{"topic":{"0":23,"1":-1}} (-1 = latest, -2 = earliest)'
    words = {"earliest": EARLIEST, "latest": LATEST, EARLIEST: EARLIEST, LATEST: LATEST}
    by_partition: dict[TopicPartition, int] = {}
    by_topic: dict[str, int] = {}
    for each, entry in _json_object(name, value, example, others=True).items():
        if isinstance(entry, str | int) and not isinstance(entry, bool):
            whole = words.get(entry.lower() if isinstance(entry, str) else entry)
            if whole is None:
                raise invalid(
                    name,
                    value,
                    f'"earliest" or "latest" for a whole topic; topic {each!r} has {json.dumps(entry)}',
                )
            by_topic[each] = whole
        else:
            found = _per_partition(name, value, each, entry, EARLIEST, f"offsets such as {example}")
            by_partition.update(found)
    return by_partition, by_topic


def offset_lists(name: str, value: str) -> dict[TopicPartition, tuple[int, ...]]:
    """Parses offsets such as ``{"t":{"0":[17,1042]}}``."""
    example = '{"topic":{"0":[17]}}'
    found: dict[TopicPartition, tuple[int, ...]] = {}
    for each, entry in _json_object(name, value, example).items():
        numbers = entry if isinstance(entry, dict) else {}
        lists_ok = all(
            isinstance(offsets, list) and offsets and all(_is_whole(offset, 0) for offset in offsets)
            for offsets in numbers.values()
        )
        if not numbers or not lists_ok or not all(_is_partition(number) for number in numbers):
            raise invalid(
                name,
                value,
                f"lists of offsets by partition, such as {example}; topic {each!r} has {json.dumps(entry)}",
            )
        found |= {TopicPartition(each, int(number)): tuple(entry[number]) for number in numbers}
    return found


def timestamps(name: str, value: str) -> dict[TopicPartition, int]:
    """Parses times such as ``{"t":{"0":1700000000000}}`` (ms since 1970)."""
    example = '{"topic":{"0":1700000000000}} (ms since 1970)'
    found: dict[TopicPartition, int] = {}
    for each, entry in _json_object(name, value, example).items():
        found.update(_per_partition(name, value, each, entry, 0, f"times such as {example}"))
    return found


def _per_partition(
    name: str, value: str, each: str, entry: object, at_least: int, expected: str
) -> dict[TopicPartition, int]:
    """Parses the entry of one topic, such as ``{"0":23,"1":24}``."""
    if not isinstance(entry, dict) or not entry or each == OTHERS:
        raise invalid(name, value, f"{expected}; topic {each!r} has {json.dumps(entry)}")
    for number, found in entry.items():
        if not _is_partition(number):
            raise invalid(name, value, f"{expected}; topic {each!r} has the partition {number!r}")
        if not _is_whole(found, at_least):
            raise invalid(name, value, f"{expected}; partition {each}-{number} has {json.dumps(found)}")
    return {TopicPartition(each, int(number)): found for number, found in entry.items()}


def _json_object(name: str, value: str, example: str, *, others: bool = False) -> Mapping[str, Any]:
    """Parses a JSON object whose keys are topics.

    Args:
        name: name of the option.
        value: its text.
        example: a valid value, for the error.
        others: whether the key `OTHERS` is allowed.
    """
    try:
        found = parse_json(value, object_pairs_hook=_without_duplicates)
    except JsonError as error:
        raise invalid(name, value, f"JSON such as {example}; it is malformed ({error})") from error
    if not isinstance(found, dict) or not found:
        raise invalid(name, value, f"a JSON object with at least one topic, such as {example}")
    for each in found:
        if not (_TOPIC.fullmatch(each) and each not in (".", "..")) and not (others and each == OTHERS):
            raise invalid(
                name, value, f"topic names as keys, such as {example}; {each!r} is not a valid topic name"
            )
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object and refuses duplicate keys, which ``json`` would accept silently."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} occurs twice")
        found[name] = value
    return found


def _is_partition(number: str) -> bool:
    return re.fullmatch("0|[1-9][0-9]{0,9}", number) is not None and int(number) <= _INT_MAX


def _is_whole(value: object, at_least: int, at_most: int = _LONG_MAX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most
