"""Reads rows of a store, and parses keys that a person typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.reading.as_text import text
from kafka_eos_source.state.reading.query import StateQuery


def selected_rows(
    state: StateQuery, key: Sequence[str], prefix: str | None, variable: str | None, *, timers: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a key, of all keys whose first column begins with ``prefix``, or all rows.

    Raises:
        InvalidOptionError: if both key and prefix are set, or the key has the wrong number or types of
            columns.
        KafkaEosError: as `StateQuery.rows` raises it.
    """
    if key and prefix is not None:
        raise InvalidOptionError("KEY and --prefix exclude each other.", fix="remove one of them.")
    if key:
        description = state.description()
        if description is not None:
            yield from state.rows(parse_key(description.key, key), variable, timers=timers)
        return
    for row in state.all(variable, timers=timers):
        if prefix is None or text(next(iter(row["key"].values()))).startswith(prefix):
            yield row


def parse_key(fields: pa.Schema, key: Sequence[str]) -> tuple[Any, ...]:
    """Converts the words of a command line into a key with these columns; binary is hexadecimal.

    Raises:
        InvalidOptionError: if a word is not a value of its column, or the number of words is wrong.
    """
    if len(key) != len(fields):
        raise InvalidOptionError(
            f"the key has {len(key)} value(s); expected {len(fields)}: {', '.join(fields.names)}.",
            fix="give one value for each grouping column; quote values that contain blanks.",
        )
    return tuple(_parse_word(word, field) for word, field in zip(key, fields, strict=True))


def _parse_word(word: str, field: pa.Field) -> Any:
    try:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return bytes.fromhex(word)
        if pa.types.is_boolean(field.type):
            return {"true": True, "false": False}[word.lower()]
        return pa.array([word]).cast(field.type)[0].as_py()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidOptionError(
            f"{word!r} is not a value of column {field.name!r}, which has type {field.type}.",
            fix="write numbers in decimal, times as 2026-11-21T12:00:00Z, and binary in hexadecimal.",
        ) from error
