"""Finds the offsets from UTC of a session time zone, as the tables that the C libraries search.

Spark gets them from Java, and Python from the time zone database of the machine or of the package tzdata. The
two agree as far as their versions do (docs/json.md).
"""

from __future__ import annotations

import importlib.resources
import re
import struct
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kafka_eos_source.errors import InvalidOptionError

_NEVER = np.iinfo(np.int64).max
_ALWAYS = np.iinfo(np.int64).min
#: The table has at least the changes until the end of this year, as json.c expects.
_LAST_YEAR = 2438
_EARLY = datetime(1, 1, 3, tzinfo=timezone.utc)
#: The rule at the end of a file of the format TZif, if there is daylight saving time (POSIX, variable TZ).
_DAYLIGHT = re.compile(
    r"(?:<[^>]+>|[A-Za-z]+)(?P<standard>[+-]?[\d:]+)(?:<[^>]+>|[A-Za-z]+)(?P<summer>[+-]?[\d:]+)?"
    r",(?P<begin>[MJ\d.]+)(?:/(?P<begin_time>[+-]?[\d:]+))?,(?P<end>[MJ\d.]+)(?:/(?P<end_time>[+-]?[\d:]+))?"
)
#: Spark accepts "+1:30", "+0130", "UTC+01:30:00", "GMT-3" and the like.
_FIXED = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?([0-5]\d)(?::?([0-5]\d))?|:(\d))?")
_MOST_HOURS = 18
#: Names that Java knows besides those of the time zone database, or gives another meaning (ZoneId.SHORT_IDS).
_SHORT_NAMES = {
    "Z": "UTC",
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}


@dataclass(frozen=True, eq=False)
class Zone:
    """The offsets of a time zone.

    Attributes:
        starts: second since 1970 from which each offset applies, in order; the first is the least int64.
        offsets: seconds by which local time is ahead of UTC from then on.
        repeats: from this second on, everything repeats every 400 years, as days of the week do in the
            Gregorian calendar, and the table has the first 400; the greatest int64 if the last offset stays.
    """

    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    repeats: int = field(default=int(_NEVER))


@lru_cache(maxsize=64)
def zone(name: str) -> Zone:
    """Returns a time zone by its name in ``spark.sql.session.timeZone``.

    Raises:
        InvalidOptionError: if neither the machine nor the package tzdata has the time zone.
    """
    found = _SHORT_NAMES.get(name, name)
    fixed = _FIXED.fullmatch(found)
    if fixed:
        sign, hours, minutes, seconds, minute = fixed.groups()
        offset = int(hours) * 3600 + int(minutes or minute or 0) * 60 + int(seconds or 0)
        if offset <= _MOST_HOURS * 3600:
            return _constant(-offset if sign == "-" else offset)
    elif found in ("UTC", "GMT", "UT"):
        return _constant(0)
    try:
        return _from_database(found)
    except (OSError, ValueError, zoneinfo.ZoneInfoNotFoundError) as failure:
        raise InvalidOptionError(
            f"the time zone {name!r} is not in the time zone database of Python ({failure}).",
            fix="set spark.sql.session.timeZone to a name such as 'Europe/Berlin', or an offset such as "
            "'+01:00'; if the name is right, pip install tzdata.",
        ) from failure


def _constant(offset: int) -> Zone:
    return Zone(np.array([_ALWAYS], np.int64), np.array([offset], np.int64))


def _from_database(name: str) -> Zone:
    rules = zoneinfo.ZoneInfo(name)  # refuses names that would leave the folder
    starts, offsets, footer = _parse(_file(name))
    first = _EARLY.astimezone(rules).utcoffset() or timedelta(0)
    table = {int(_ALWAYS): round(first.total_seconds())} | dict(zip(starts, offsets, strict=True))
    last = max(max(starts, default=0), 0)
    repeats = int(_NEVER)
    daylight = _DAYLIGHT.fullmatch(footer)
    if daylight:
        repeats = last + 1
        first_year = datetime.fromtimestamp(last, timezone.utc).year
        for second, offset in _changes(daylight, first_year, max(first_year + 400, _LAST_YEAR)):
            if second > last:
                table[second] = offset
    ordered = sorted(table.items())
    return Zone(
        np.array([start for start, _ in ordered], np.int64),
        np.array([offset for _, offset in ordered], np.int64),
        repeats,
    )


def _changes(daylight: re.Match[str], first_year: int, last_year: int) -> Iterator[tuple[int, int]]:
    """Yields when daylight saving time begins and ends by a rule of POSIX, and the offsets from then on."""
    standard = -_seconds(daylight["standard"])
    summer = -_seconds(daylight["summer"]) if daylight["summer"] else standard + 3600
    for year in range(first_year, last_year + 1):
        yield _day(daylight["begin"], year) + _seconds(daylight["begin_time"] or "2") - standard, summer
        yield _day(daylight["end"], year) + _seconds(daylight["end_time"] or "2") - summer, standard


def _seconds(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    parts = [int(part) for part in text.lstrip("+-").split(":")]
    return sign * sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))


def _day(rule: str, year: int) -> int:
    """Returns the second of 1970 at which the day of a rule begins, as if local time were UTC."""
    if rule.startswith("M"):
        month, week, weekday = (int(part) for part in rule[1:].split("."))
        first = date(year, month, 1)
        day = first + timedelta(days=(weekday - first.isoweekday()) % 7 + 7 * (week - 1))
        if day.month != month:  # the fifth week is the last one
            day -= timedelta(days=7)
    elif rule.startswith("J"):  # without February 29th
        day = date(2001, 1, 1) + timedelta(days=int(rule[1:]) - 1)
        day = day.replace(year=year)
    else:
        day = date(year, 1, 1) + timedelta(days=int(rule))
    return (day - date(1970, 1, 1)).days * 86_400


def _file(name: str) -> bytes:
    for folder in zoneinfo.TZPATH:
        path = Path(folder, name)
        if path.is_file():
            return path.read_bytes()
    return importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


def _parse(content: bytes) -> tuple[list[int], list[int], str]:
    """Reads a file of the format TZif (RFC 9636): when the offset changes, to what, and the rule after that.

    Raises:
        ValueError: if the file is not valid.
    """
    header = struct.Struct(">4sc15x6I")
    try:
        magic, version, utc, wall, leap, times, types, chars = header.unpack_from(content)
        if magic != b"TZif" or version < b"2":
            raise ValueError("its file is not of the format TZif, version 2 or later")
        at = header.size + times * 5 + types * 6 + chars + leap * 8 + wall + utc
        _, _, utc, wall, leap, times, types, chars = header.unpack_from(content, at)
        at += header.size
        starts = struct.unpack_from(f">{times}q", content, at)
        numbers = struct.unpack_from(f">{times}B", content, at + 8 * times)
        at += 9 * times
        offsets = [struct.unpack_from(">i", content, at + 6 * number)[0] for number in range(types)]
        at += types * 6 + chars + leap * 12 + wall + utc
        return list(starts), [offsets[number] for number in numbers], content[at:].decode("ascii").strip()
    except (struct.error, IndexError) as failure:
        raise ValueError(f"its file is damaged: {failure}") from failure
