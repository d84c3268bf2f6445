"""Describes the shape of a JSON document, compares documents with it, and prints it for the documentation.

A text describes a value. ``[shape]`` is an array. A dict is an object with exactly these keys; a dict with
the key ``*`` is an object with any keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lines:
    """Several JSON documents, one on each line.

    Attributes:
        shape: shape of each document.
    """

    shape: Any


@dataclass(frozen=True)
class OrNull:
    """A value that may be null.

    Attributes:
        shape: shape of the value.
        when: when it is null.
    """

    shape: Any
    when: str


@dataclass(frozen=True)
class Optional:
    """A field that may be absent.

    Attributes:
        shape: shape of the value.
    """

    shape: Any


def mismatches(shape: Any, value: Any, at: str = "$") -> Iterator[str]:
    """Yields where a value differs from its shape.

    Args:
        shape: a shape, see the module.
        value: a parsed JSON document.
        at: path of the value, for the messages.
    """
    if isinstance(shape, OrNull):
        if value is not None:
            yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, Optional):
        yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at}: {value!r} is not an array"
            return
        for number, each in enumerate(value):
            yield from mismatches(shape[0], each, f"{at}[{number}]")
    elif isinstance(shape, dict):
        yield from _mismatches_of_object(shape, value, at)
    elif isinstance(value, (list, dict)):
        yield f"{at}: {value!r} is not a simple value"


def _mismatches_of_object(shape: dict[str, Any], value: Any, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: {value!r} is not an object"
    elif "*" in shape:
        for name, each in value.items():
            if not isinstance(shape["*"], str):
                yield from mismatches(shape["*"], each, f"{at}.{name}")
    else:
        required = {name for name, each in shape.items() if not isinstance(each, Optional)}
        yield from (f"{at}.{name} is missing" for name in sorted(required - set(value)))
        yield from (f"{at}.{name} is not documented" for name in sorted(set(value) - set(shape)))
        for name in shape.keys() & value.keys():
            yield from mismatches(shape[name], value[name], f"{at}.{name}")


def rendered(shape: Any) -> str:
    """Returns a shape as a Markdown block."""
    return "```text\n" + _rendered(shape, "") + "\n```"


def _rendered(shape: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(shape, OrNull):
        return f"null if {shape.when}, else {_rendered(shape.shape, indent)}"
    if isinstance(shape, Optional):
        return f"may be absent: {_rendered(shape.shape, indent)}"
    if isinstance(shape, list):
        return f"[{_rendered(shape[0], indent)}, …]"
    if isinstance(shape, dict):
        fields = (
            f"{inner}{'…' if name == '*' else json.dumps(name)}: {_rendered(each, inner)}"
            for name, each in shape.items()
        )
        return "{\n" + "\n".join(fields) + f"\n{indent}}}"
    return str(shape)
