"""The processor of the aggregates: what an operator runs in each shard, and before the shuffle.

`decode_state` and `decode_entries` decode the state of every vectorised processor, without its query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateMismatchError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.describe import META_TABLE, Description, type_from_json, type_to_json
from kafka_eos_source.state.encoding.layout import KeyCodec, split_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import RowsByKey
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.arrays import chunks, concat_batches, output_batches
from kafka_eos_source.state.vector.groups import EMIT, TIMES, Declared, Emission, Grouping, key_columns
from kafka_eos_source.state.vector.sessions import Sessionized
from kafka_eos_source.state.vector.versions import Version, VersionedRows, agree, versions_of
from kafka_eos_source.state.vector.windowed import ByKey, Windowed
from kafka_eos_source.state.vector.windows import (
    Duration,
    Session,
    Window,
    check_time_column,
    milliseconds,
    window_from_json,
)

#: Number of partial rows that are collected before they are merged. It bounds memory and not the result.
PARTIAL_ROWS = 1 << 20

#: The same for rows that meet the state, which takes memory of the same process; fewer cost no more time.
KEYED_ROWS = 1 << 17


class AggregateProcessor(Declared):
    """Computes aggregates by key, or by key and window.

    It implements `state.model.ShardProcessor`; `aggregate` creates it for a streaming
    DataFrame.

    With ``emit="on_update"``, each micro-batch emits one row for each key, or key and window, that it
    changed. With ``emit="on_close"``, each window emits one row when it closes. A row consists of the key
    columns, ``window_start`` and ``window_end`` if there is a window (both in the type of the event-time
    column), and the results.

    With ``emit="changes"``, each micro-batch emits for each of its changes the row that was emitted before,
    with true in the boolean column ``removed``, and then the row that replaces it. A key or window without
    an earlier row has no removed row. The next aggregation subtracts the removed rows (``removed``).

    Sessions with ``on_update`` also have a boolean column ``removed``. It is true in a row that retracts an
    earlier one, because its session became part of a longer session. The results of such a row are null, and
    it precedes the row of the longer session.

    Args:
        schema: columns of the input rows; unused columns are ignored.
        keys: names of the columns to group by.
        aggregates: aggregates by the name of their result.
        window: `tumbling`, `hopping` or `session`; None = aggregate over all rows of a key.
        emit: ``"on_update"`` or ``"changes"``; or ``"on_close"`` if there is a window.
        removed: name of a boolean column; the aggregates take back the rows in which it is true. A key or
            window without rows left is deleted, and with ``emit="on_update"`` emitted once more: with true
            in the column ``removed`` and null results.
        at_most_every: time span; a changed result is held back until the span has passed since its first
            change that was not emitted. The span is event time if there is a window, and processing time
            otherwise. A window that closes emits what it holds back.

    Raises:
        InvalidSchemaError: if a column is missing or has an unsupported type, two columns of the result
            would have the same name, or an aggregate cannot take rows back.
        InvalidOptionError: if ``emit`` has another value, or is ``"on_close"`` without a window; or if a
            session has ``removed`` or ``at_most_every``, or ``on_close`` has ``at_most_every``.

    Example::

        schema = pa.schema([("origin", pa.string()), ("delay", pa.int32())])
        AggregateProcessor(schema, ["origin"], {"flights": agg.count(), "mean_delay": agg.avg("delay")})
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        *,
        window: Window | None = None,
        emit: str = "on_update",
        removed: str | None = None,
        at_most_every: Duration | None = None,
    ) -> None:
        if emit not in EMIT or (emit == "on_close" and window is None):
            expected = (
                "on_update, changes or on_close"
                if window
                else "on_update or changes, because there is no window to close"
            )
            raise InvalidOptionError(
                f"emit is {emit!r}; expected {expected}.", fix="set 'emit' to an expected value."
            )
        _check_session(window, removed, at_most_every)
        if emit == "on_close" and at_most_every is not None:
            raise InvalidOptionError(
                f"at_most_every is {at_most_every!r} with emit='on_close', which emits each window once.",
                fix="remove 'at_most_every', or use emit='on_update' or 'changes'.",
            )
        self._schema = schema
        self._keys = key_columns(schema, keys)
        self._aggregates = _by_event_time(aggregates, window)
        self._window = window
        self._emit = emit
        self._removed = removed
        self._limit_ms = (
            None if at_most_every is None else milliseconds("at_most_every", at_most_every, at_least=1)
        )
        _check_names(schema, self._grouping)

    @property
    def output(self) -> pa.Schema:
        """Columns of the emitted rows."""
        return self._grouping.output

    @property
    def partial_schema(self) -> pa.Schema:
        """Columns of the rows that `partial` yields. The key columns come first."""
        return self._grouping.partial

    @cached_property
    def description(self) -> Description:
        """Description of the state as declared.

        These do not affect the state: ``grace``, the length of ``at_most_every``, and ``emit`` if it changes
        between ``"on_update"`` and ``"on_close"``. The other modes need to know what was emitted before.
        """
        details = {**self._grouping.aggregation.to_json(), **self._grouping.details}
        if self._window is not None:
            details["window"] = self._window.to_json()
            details["time"] = type_to_json(self._schema.field(self._window.on).type)
        return Description("aggregate", self._keys, self._grouping.tables, details)

    def partial(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Combines the rows of one input partition before the shuffle, usually to one row per group.

        It uses no state, and runs in ``mapInArrow`` or in the task that reads Kafka.

        Args:
            batches: rows of one input partition.
        """
        yield from self._reduced(self._parts(batches), PARTIAL_ROWS)

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Merges this shard's micro-batch into the state, and yields the results to emit.

        Args:
            batches: all rows of this shard in this micro-batch, or the rows that `partial` made of them.
            state: state of this shard.
            context: the micro-batch; late rows and rows without a time are counted in it.

        Raises:
            StateMismatchError: if an earlier version of the query wrote a state that cannot be continued.
        """
        description = agree(state, self.description, context)
        grouping = self._grouping
        if "versions" in description.details:
            grouping = self._grouping_of(versions_of(description))
        with RowsByKey(self._keys.names, entries_per_row=grouping.entries_per_row) as rows:
            # Which windows close depends on the event times of all keys, so all rows are read first.
            for partial in self._partial_rows(batches):
                rows.add(grouping.admit(partial, context))
            parts = map(self._one_batch, rows.parts())
            for columns in grouping.update(parts, state, context, divided=rows.divided):
                yield from output_batches(grouping.output, columns)

    def _partial_rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the input as partial rows, which are merged where that makes them fewer."""
        if self._grouping.merges:
            return self._parts(batches, merged=False, most_rows=KEYED_ROWS)
        return self._reduced(self._parts(batches, most_rows=KEYED_ROWS), KEYED_ROWS)

    def _one_batch(self, part: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Returns the partial rows of a part as one batch, which has each group once if that is required."""
        if len(part) == 1:
            return part[0]
        rows = concat_batches(part)
        return rows if self._grouping.merges else self._grouping.merge_partials(rows)

    def _reduced(self, parts: Iterable[pa.RecordBatch], most_rows: int) -> Iterator[pa.RecordBatch]:
        """Merges partial rows, so that each yielded batch has each group once.

        It yields one batch; or several if there are more groups than memory allows.
        """
        grouping = self._grouping
        waiting: list[pa.RecordBatch] = []
        count = 0
        for part in parts:
            waiting.append(part)
            count += part.num_rows
            if count >= most_rows and len(waiting) > 1:
                waiting = [grouping.merge_partials(concat_batches(waiting))]
                count = waiting[0].num_rows
                if count >= most_rows // 2:
                    yield waiting.pop()
                    count = 0
        if waiting:
            yield waiting[0] if len(waiting) == 1 else grouping.merge_partials(concat_batches(waiting))

    def _parts(
        self, batches: Iterable[pa.RecordBatch], *, merged: bool = True, most_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the input as partial rows, computing them if the input consists of plain rows.

        If ``merged`` is set, each yielded batch has each group once.
        """
        grouping = self._grouping
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            return
        if first.schema.names == grouping.partial.names:
            partial = chunks(chain([first], rest), grouping.partial, most_rows)
            yield from map(grouping.merge_partials, partial) if merged else partial
        else:
            yield from map(grouping.reduce_rows, chunks(chain([first], rest), self._read, most_rows))

    @cached_property
    def _read(self) -> pa.Schema:
        """Columns of the input rows that the processor reads."""
        time = [] if self._window is None else [self._window.on]
        names = dict.fromkeys([*self._keys.names, *time, *self._grouping.aggregation.columns])
        return pa.schema([self._schema.field(name) for name in names])

    @cached_property
    def _grouping(self) -> Grouping:
        return self._grouping_of(None)

    def _grouping_of(self, versions: Sequence[Version] | None) -> Grouping:
        """Returns the grouping that reads values of these versions; None = only the declared one."""
        time = None if self._window is None else check_time_column(self._schema, self._window.on)
        aggregation = Aggregation(self._aggregates, self._schema, self._removed)
        return grouping_of(self._keys, aggregation, versions, self._window, time, self._emit, self._limit_ms)


def grouping_of(
    keys: pa.Schema,
    aggregation: Aggregation,
    versions: Sequence[Version] | None,
    window: Window | None,
    time: pa.DataType,
    emit: str,
    limit_ms: int | None,
) -> Grouping:
    """Returns the grouping for a window, or for no window.

    Args:
        keys: columns of the key.
        aggregation: the aggregates.
        versions: versions of the stored values, oldest first; None = only the declared one.
        window: the window; None = no window.
        time: type of the event-time column.
        emit: one of `EMIT`.
        limit_ms: how long a changed result is held back; None = not at all.
    """
    if isinstance(window, Session):
        return Sessionized(keys, aggregation, versions, window, time, emit)
    emission = Emission(aggregation, versions, emit, limit_ms)
    if window is None:
        return ByKey(keys, aggregation, emission)
    return Windowed(keys, aggregation, window, time, emission)


def grouping_of_description(description: Description) -> Grouping:
    """Returns the grouping that decodes a store with this description."""
    details = description.details
    window = window_from_json(details["window"]) if "window" in details else None
    time = type_from_json(details["time"]) if "window" in details else None
    limit_ms = 1 if details.get("held") else None  # the length does not matter to a reader
    emit = details.get("emit", "on_update" if limit_ms else "on_close")
    aggregation = Aggregation.from_json(details)
    return grouping_of(description.key, aggregation, versions_of(description), window, time, emit, limit_ms)


def _check_session(window: Window | None, removed: str | None, at_most_every: Duration | None) -> None:
    if not isinstance(window, Session):
        return
    if removed is not None:
        raise InvalidOptionError(
            f"removed is {removed!r}, but a session cannot take rows back: it might have to become two.",
            fix="use tumbling or hopping windows, or no window.",
        )
    if at_most_every is not None:
        raise InvalidOptionError(
            f"at_most_every is {at_most_every!r}, which sessions do not support.",
            fix="remove 'at_most_every', or use tumbling or hopping windows.",
        )


def _by_event_time(aggregates: Mapping[str, Aggregate], window: Window | None) -> dict[str, Aggregate]:
    """Orders ``first`` and ``last`` without ``by`` by event time if there is a window."""
    return {
        name: replace(each, by=(window.on,))
        if window and each.kind in ("first", "last") and not each.by
        else each
        for name, each in aggregates.items()
    }


def _check_names(schema: pa.Schema, grouping: Grouping) -> None:
    for fields in (grouping.output, grouping.partial):
        twice = sorted({name for name in fields.names if fields.names.count(name) > 1})
        if twice:
            raise InvalidSchemaError(
                f"the result would have two columns named {twice[0]!r}: {', '.join(fields.names)}.",
                fix="give the aggregate another name, or rename the key column.",
            )
    if schema.names == grouping.partial.names:
        raise InvalidSchemaError(
            f"the input columns {', '.join(schema.names)} have the same names as those of partial rows, so "
            "the operator cannot distinguish the two.",
            fix="give the aggregate another name.",
        )


# -- decoding for readers

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
