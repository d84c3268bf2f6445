"""The state of a vectorised processor as tables: for who reads a store without the query that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.encoding.describe import META_TABLE, Description, TableDescription
from kafka_eos_source.state.encoding.keys import KeyCodec, split_keys
from kafka_eos_source.state.encoding.rows import RowCodec
from kafka_eos_source.state.vector.grouping import TIMES, VALUE_VERSION
from kafka_eos_source.state.vector.processor import of_description

#: The processors whose state this reads: `Description.kind`.
KINDS = ("aggregate", "deduplicate", "function")


def decode_state(
    description: Description, keys: pa.BinaryArray, values: pa.BinaryArray
) -> dict[str, pa.Table]:
    """Entries of a store, as columns: those of the key, of the window, and of the results or the state.

    Args:
        description: of the store (`describe.META_KEY`).
        keys: of entries, of any tables; that of the description is left out.
        values: of the same entries.

    Returns: a table for each table that is described, by name; without rows if there are no entries of it.

    Raises:
        StateMismatchError: an entry is not what the description says.
    """
    if description.kind not in KINDS:
        raise StateMismatchError(
            f"the state is that of a {description.kind!r}, expected {', '.join(KINDS)}",
            fix="read it with the decoder of that processor",
        )
    tables = split_keys(keys).tables
    unknown = sorted(set(np.unique(tables).tolist()) - {META_TABLE, *description.tables})
    if unknown:
        raise StateMismatchError(
            f"entries of table {unknown[0]:#04x}, of which the description knows nothing",
            fix="the store was written by another processor; look at its description",
        )
    read = _reader(description)
    found = {}
    for number, table in description.tables.items():
        own = pa.array(tables == number)
        try:
            found[table.name] = read(number, keys.filter(own), values.filter(own))
        except ValueError as error:
            raise StateMismatchError(
                f"entries of table {table.name!r} are not as described: {error}",
                fix="the store is damaged: restore it from the changelog",
            ) from error
    return found


def decode_entries(description: Description, entries: Iterable[tuple[bytes, bytes]]) -> dict[str, pa.Table]:
    """`decode_state` of pairs, as a scan of a store gives them.

    Raises:
        StateMismatchError: an entry is not what the description says.
    """
    pairs = list(entries)
    keys = pa.array([key for key, _ in pairs], pa.binary())
    return decode_state(description, keys, pa.array([value for _, value in pairs], pa.binary()))


def _reader(description: Description) -> Callable[[int, pa.BinaryArray, pa.BinaryArray], pa.Table]:
    if description.kind == "aggregate":
        return of_description(description).read

    def read(number: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        entries = split_keys(keys)
        columns = KeyCodec(description.key).decode(entries.group_keys)
        if number == TIMES:
            fields, more = pa.schema([pa.field("due_ms", pa.int64())]), [pa.array(entries.times_ms)]
        else:
            fields, more = _state(description.tables[number], values)
        return pa.Table.from_arrays([*columns, *more], schema=pa.schema([*description.key, *fields]))

    return read


def _state(table: TableDescription, values: pa.BinaryArray) -> tuple[pa.Schema, list[pa.Array]]:
    codec = RowCodec(table.value, lead=VALUE_VERSION)
    return table.value, codec.decode(values)
