"""Writes and reads records as lines of JSON, with a version and a kind.

A reader skips objects whose version or kind it does not know, and ignores keys that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kafka_eos_source.runtime.json_input import JsonError, parse_json

#: Version of the JSON. A change that a reader of this version would misunderstand gets the next number.
VERSION = 1

_SECONDS_DIGITS = 6


def to_line(found: Mapping[str, Any]) -> str:
    """Returns an object of JSON as one line, which `parsed` accepts whatever texts and numbers it contains.

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


def parsed(line: str, kind: str) -> Mapping[str, Any] | None:
    """Returns the JSON object of this kind and version in a line; None if there is none."""
    try:
        found = parse_json(line)
    except JsonError:
        return None
    is_known = isinstance(found, dict) and found.get("v") == VERSION and found.get("kind") == kind
    return found if is_known else None


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns numbers with as many digits as a duration in seconds needs."""
    return {
        name: each if isinstance(each, int) else round(each, _SECONDS_DIGITS)
        for name, each in seconds.items()
    }
