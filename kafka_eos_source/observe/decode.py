"""Reads values of JSON whose writer may have been another version, or may have been killed while it wrote."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any


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


def items(found: object) -> list[Any]:
    """Returns an array of JSON.

    Raises:
        TypeError: if the value is something else.
    """
    if not isinstance(found, list):
        raise TypeError(f"{found!r} is not an array")
    return found
