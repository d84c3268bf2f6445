"""Decodes the state of a vectorised processor into Arrow tables, without the query that wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.encoding.describe import META_TABLE, Description
from kafka_eos_source.state.encoding.layout import KeyCodec, split_keys
from kafka_eos_source.state.vector.evolution import versions_of
from kafka_eos_source.state.vector.grouping import TIMES
from kafka_eos_source.state.vector.processor import grouping_of_description
from kafka_eos_source.state.vector.versions import VersionedRows

#: Values of `Description.kind` that this module decodes.
KINDS = ("aggregate", "deduplicate", "function")


def decode_state(
    description: Description, keys: pa.BinaryArray, values: pa.BinaryArray
) -> dict[str, pa.Table]:
    """Decodes entries of a store into one Arrow table for each table of the store.

    Args:
        description: description of the store, read from the entry `describe.META_KEY`.
        keys: keys of the entries, from any tables. The entry of the description itself is skipped.
        values: values of the same entries.

    Returns:
        An Arrow table for each described table, by its name. Its columns are the grouping columns,
        ``window_start`` and ``window_end`` if there are windows, and then the results of aggregates or the
        columns of the state. A table without entries has no rows.

    Raises:
        StateMismatchError: if another kind of processor wrote the store, or an entry does not match the
            description.
    """
    if description.kind not in KINDS:
        raise StateMismatchError(
            f"a processor of kind {description.kind!r} wrote the state; expected one of {', '.join(KINDS)}.",
            fix="read it with StateQuery, which decodes every kind.",
        )
    tables = split_keys(keys).tables
    unknown = sorted(set(np.unique(tables).tolist()) - {META_TABLE, *description.tables})
    if unknown:
        raise StateMismatchError(
            f"the store has entries of table {unknown[0]:#04x}, which its description does not list.",
            fix="decode the entries with the description of the processor that wrote them.",
        )
    read = _reader(description)
    decoded = {}
    for number, table in description.tables.items():
        own = pa.array(tables == number)
        try:
            decoded[table.name] = read(number, keys.filter(own), values.filter(own))
        except ValueError as error:
            raise StateMismatchError(
                f"entries of table {table.name!r} do not match the store's description: {error}.",
                fix="the store is damaged; restore it from the changelog.",
            ) from error
    return decoded


def decode_entries(description: Description, entries: Iterable[tuple[bytes, bytes]]) -> dict[str, pa.Table]:
    """Decodes pairs of key and value, as a scan of a store returns them.

    Args:
        description: description of the store, read from the entry `describe.META_KEY`.
        entries: pairs of key and value, from any tables of the store.

    Returns:
        An Arrow table for each described table, by its name, as `decode_state`.

    Raises:
        StateMismatchError: if another kind of processor wrote the store, or an entry does not match the
            description.

    Example::

        with StateQuery(state_dir="/data/state") as query:
            tables = decode_entries(query.description(), (pair for _, pair in query.raw()))
        tables["aggregates"].to_pandas()
    """
    pairs = list(entries)
    keys = pa.array([key for key, _ in pairs], pa.binary())
    return decode_state(description, keys, pa.array([value for _, value in pairs], pa.binary()))


def _reader(description: Description) -> Callable[[int, pa.BinaryArray, pa.BinaryArray], pa.Table]:
    if description.kind == "aggregate":
        return grouping_of_description(description).read

    def read(number: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        entries = split_keys(keys)
        columns = KeyCodec(description.key).decode(entries.group_keys)
        if number == TIMES:
            fields, more = pa.schema([pa.field("due_ms", pa.int64())]), [pa.array(entries.times_ms)]
        else:
            fields = description.tables[number].value
            more = VersionedRows(versions_of(description)).decode(values)
        return pa.Table.from_arrays([*columns, *more], schema=pa.schema([*description.key, *fields]))

    return read
