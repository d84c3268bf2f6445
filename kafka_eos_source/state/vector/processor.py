"""Aggregates of a stream by key, with state: what the operator runs in each shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.encoding.describe import Description, describe, type_from_json, type_to_json
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregates import Aggregate, latest
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.grouping import Grouping, key_columns, without_made
from kafka_eos_source.state.vector.intake import chunks, output, whole
from kafka_eos_source.state.vector.running import Running
from kafka_eos_source.state.vector.sessionized import Sessionized
from kafka_eos_source.state.vector.windowed import Windowed
from kafka_eos_source.state.vector.windows import Session, Window, check_time_column, window_from_json

EMIT = ("on_update", "on_close")

#: Partial rows that are merged before there are more of them: a bound on memory, not on what is computed.
PARTIAL_ROWS = 1 << 20


class AggregateProcessor:
    """Aggregates by key, and by window if there is one (`state.model.ShardProcessor`).

    A row for every key, or key and window, that a micro-batch changed (``on_update``), or one for every
    window when it closes (``on_close``): the columns of the key, ``window_start`` and ``window_end``, the
    results. For sessions that are emitted on update, ``removed`` is true in rows that take an earlier row
    back: a session that became part of a longer one. Its results are null, and it comes before the row of
    the longer one.

    Args:
        schema: of the rows; it may have more columns than are used.
        keys: columns to group by.
        aggregates: by the name of their result.
        window: `windows.tumbling`, `hopping` or `session`; None = over all rows of a key.
        emit: ``on_update`` or, with a window, ``on_close``.

    Raises:
        InvalidSchemaError: a column is missing, of a type that does not fit, or of a name that is taken.
        InvalidOptionError: ``emit`` is none of these.
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        *,
        window: Window | None = None,
        emit: str = "on_update",
    ) -> None:
        if emit not in EMIT or (emit == "on_close" and window is None):
            expected = " or ".join(EMIT) if window else "on_update: without a window nothing closes"
            raise InvalidOptionError(f"emit is {emit!r}, expected {expected}", fix="give 'emit' such a value")
        self._schema = schema
        self._keys = key_columns(schema, keys)
        self._aggregates = _by_event_time(aggregates, window)
        self._window = window
        self._emit = emit
        _check_names(schema, self._grouping)

    @property
    def output(self) -> pa.Schema:
        """Columns that are emitted."""
        return self._grouping.output

    @property
    def partial_schema(self) -> pa.Schema:
        """Columns of `partial`: those of the key first, so that they can be repartitioned by it."""
        return self._grouping.partial

    @cached_property
    def schema(self) -> str:
        """Fingerprint of how keys and values are encoded. Grace and ``emit`` may change: the state stays."""
        return self.description.fingerprint()

    @cached_property
    def description(self) -> Description:
        """What the store says of itself."""
        details = self._grouping.aggregation.to_json()
        if self._window is not None:
            details["window"] = self._window.to_json()
            details["time"] = type_to_json(self._schema.field(self._window.on).type)
        return Description("aggregate", self._keys, self._grouping.tables, details)

    def partial(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of one input partition to partial rows, before the shuffle: one for each group, as a rule.

        Runs in tasks of its own (``mapInArrow``), without state.
        """
        yield from self._reduced(self._parts(batches), bounded=True)

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Rows, or rows of `partial`, of this shard in this micro-batch, in; changed results out."""
        describe(state, self.description)
        grouping = self._grouping
        if grouping.merges:
            found = list(self._parts(batches, merged=False))
        else:
            found = list(self._reduced(self._parts(batches), bounded=False))
        partial = whole(found) if found else pa.RecordBatch.from_pylist([], grouping.partial)
        for columns in grouping.update(partial, state, context):
            yield from output(grouping.output, columns)

    def _reduced(self, parts: Iterable[pa.RecordBatch], *, bounded: bool) -> Iterator[pa.RecordBatch]:
        """Partial rows, each group once in a batch: one batch, or more if bounded and groups are many."""
        grouping = self._grouping
        waiting: list[pa.RecordBatch] = []
        count, limit = 0, PARTIAL_ROWS
        for part in parts:
            waiting.append(part)
            count += part.num_rows
            if count >= limit and len(waiting) > 1:
                waiting = [grouping.of_partials(whole(waiting))]
                count = waiting[0].num_rows
                if bounded and count >= PARTIAL_ROWS // 2:
                    yield waiting.pop()
                    count = 0
                # Groups that are all different do not get fewer: wait until there are twice as many rows.
                limit = max(PARTIAL_ROWS, 2 * count)
        if waiting:
            yield waiting[0] if len(waiting) == 1 else grouping.of_partials(whole(waiting))

    def _parts(self, batches: Iterable[pa.RecordBatch], *, merged: bool = True) -> Iterator[pa.RecordBatch]:
        """Partial rows of rows; or those that came, each group once in a batch if they are to be merged."""
        grouping = self._grouping
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            return
        if first.schema.names == grouping.partial.names:
            partial = chunks(chain([first], rest), grouping.partial)
            yield from map(grouping.of_partials, partial) if merged else partial
        else:
            yield from map(grouping.of_rows, chunks(chain([first], rest), self._read))

    @cached_property
    def _read(self) -> pa.Schema:
        """The columns that are read of the rows."""
        time = [] if self._window is None else [self._window.on]
        names = dict.fromkeys([*self._keys.names, *time, *self._grouping.aggregation.columns])
        return pa.schema([self._schema.field(name) for name in names])

    @cached_property
    def _grouping(self) -> Grouping:
        time = None if self._window is None else check_time_column(self._schema, self._window.on)
        return grouping_of(
            self._keys, Aggregation(self._aggregates, self._schema), self._window, time, self._emit
        )

    def __getstate__(self) -> dict[str, Any]:
        """What is declared: the rest is made of it where it is needed."""
        return without_made(self)


def grouping_of(
    keys: pa.Schema, aggregation: Aggregation, window: Window | None, time: pa.DataType, emit: str
) -> Grouping:
    """The grouping of a window, or of none."""
    if window is None:
        return Running(keys, aggregation)
    if isinstance(window, Session):
        return Sessionized(keys, aggregation, window, time, emit)
    return Windowed(keys, aggregation, window, time, emit)


def of_description(description: Description) -> Grouping:
    """The grouping whose state a store holds: for who looks at the state."""
    details = description.details
    window = window_from_json(details["window"]) if "window" in details else None
    time = type_from_json(details["time"]) if "window" in details else None
    return grouping_of(description.key, Aggregation.from_json(details), window, time, "on_close")


def _by_event_time(aggregates: Mapping[str, Aggregate], window: Window | None) -> dict[str, Aggregate]:
    """In windows the newest row is that of the latest event time, if nothing else is said."""
    return {
        name: latest(str(each.column), by=window.on)
        if window and each.kind == "latest" and not each.by
        else each
        for name, each in aggregates.items()
    }


def _check_names(schema: pa.Schema, grouping: Grouping) -> None:
    for fields in (grouping.output, grouping.partial):
        twice = sorted({name for name in fields.names if fields.names.count(name) > 1})
        if twice:
            raise InvalidSchemaError(
                f"column {twice[0]!r} would be there twice: {', '.join(fields.names)}",
                fix="give the result another name, or rename the key's column",
            )
    if schema.names == grouping.partial.names:
        raise InvalidSchemaError(
            f"rows of columns {', '.join(schema.names)} cannot be told from partial rows",
            fix="give the result another name",
        )
