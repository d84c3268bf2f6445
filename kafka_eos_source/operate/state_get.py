"""Keys as they are typed: text that becomes the types of the grouping columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.operate.state_view import text
from kafka_eos_source.state.reading.query import StateQuery


def rows(
    state: StateQuery, key: Sequence[str], prefix: str | None, variable: str | None, *, timers: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of a key, of keys whose first column begins with ``prefix`` as text, or all.

    Raises:
        InvalidOptionError: key and prefix; or the key has another number of columns, or other types.
        KafkaEosError: as `StateQuery.rows`.
    """
    if key and prefix is not None:
        raise InvalidOptionError("a KEY and --prefix are given.", fix="keep one of them.")
    if key:
        description = state.description()
        if description is not None:
            yield from state.rows(typed(description.key, key), variable, timers=timers)
        return
    for row in state.all(variable, timers=timers):
        if prefix is None or text(next(iter(row["key"].values()))).startswith(prefix):
            yield row


def typed(fields: pa.Schema, key: Sequence[str]) -> tuple[Any, ...]:
    """The key of these columns that the words of a command line mean; binary is written in hexadecimal.

    Raises:
        InvalidOptionError: they mean none.
    """
    if len(key) != len(fields):
        raise InvalidOptionError(
            f"the key has {len(key)} values; expected {len(fields)}: {', '.join(fields.names)}.",
            fix="give one for each grouping column; quote those with blanks.",
        )
    return tuple(_typed(word, field) for word, field in zip(key, fields, strict=True))


def _typed(word: str, field: pa.Field) -> Any:
    try:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return bytes.fromhex(word)
        if pa.types.is_boolean(field.type):
            return {"true": True, "false": False}[word.lower()]
        return pa.array([word]).cast(field.type)[0].as_py()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidOptionError(
            f"{word!r} is no value of column {field.name!r}, which is {field.type}.",
            fix="write numbers in decimal, times as 2026-11-21T12:00:00Z, binary in hexadecimal.",
        ) from error
