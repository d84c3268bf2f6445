"""Compares JSON documents of commands with their shapes (`operate.json_documents`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kafka_eos_source.operate.json_documents import AnyNames, Lines, Object, Optional, OrNull, Value


def mismatches(shape: object, value: Any, at: str = "$") -> Iterator[str]:
    """Yields where a value differs from its shape.

    Args:
        shape: a shape.
        value: a parsed JSON document; of several lines, one of them.
        at: path of the value, for the messages.
    """
    if isinstance(shape, OrNull):
        if value is not None:
            yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, Optional | Value | Lines):
        yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at}: {value!r} is not an array"
            return
        for number, each in enumerate(value):
            yield from mismatches(shape[0], each, f"{at}[{number}]")
    elif isinstance(shape, Object | AnyNames):
        yield from _mismatches_of_object(shape, value, at)
    elif isinstance(value, (list, dict)):
        yield f"{at}: {value!r} is not a simple value"


def _mismatches_of_object(shape: Object[Any] | AnyNames, value: Any, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: {value!r} is not an object"
    elif isinstance(shape, AnyNames):
        for name, each in value.items():
            if not isinstance(shape.shape, str):
                yield from mismatches(shape.shape, each, f"{at}.{name}")
    else:
        fields = shape.fields
        required = {name for name, each in fields.items() if not isinstance(each, Optional)}
        yield from (f"{at}.{name} is missing" for name in sorted(required - set(value)))
        yield from (f"{at}.{name} is not documented" for name in sorted(set(value) - set(fields)))
        for name in fields.keys() & value.keys():
            yield from mismatches(fields[name], value[name], f"{at}.{name}")
