"""Processor of the aggregates: what the operator runs in each shard and before the shuffle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.encoding.describe import Description, type_from_json, type_to_json
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregates import Aggregate, latest
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.evolution import agree, versions_of
from kafka_eos_source.state.vector.grouping import Grouping, key_columns, without_cached
from kafka_eos_source.state.vector.intake import chunks, concat_batches, output_batches
from kafka_eos_source.state.vector.running import Running
from kafka_eos_source.state.vector.sessionized import Sessionized
from kafka_eos_source.state.vector.versions import Version
from kafka_eos_source.state.vector.windowed import Windowed
from kafka_eos_source.state.vector.windows import Session, Window, check_time_column, window_from_json

EMIT = ("on_update", "on_close")

#: Number of partial rows that are collected before they are merged. It bounds memory and not the result.
PARTIAL_ROWS = 1 << 20


class AggregateProcessor:
    """Computes aggregates by key, or by key and window.

    It implements `state.model.ShardProcessor`; `aggregate_with_changelog_state` creates it for a streaming
    DataFrame.

    With ``emit="on_update"``, each micro-batch emits one row for each key, or key and window, that it
    changed. With ``emit="on_close"``, each window emits one row when it closes. A row consists of the key
    columns, ``window_start`` and ``window_end`` if there is a window (both in the type of the event-time
    column), and the results.

    Sessions with ``on_update`` also have a boolean column ``removed``. It is true in a row that retracts an
    earlier one, because its session became part of a longer session. The results of such a row are null, and
    it precedes the row of the longer session.

    Args:
        schema: columns of the input rows; unused columns are ignored.
        keys: names of the columns to group by.
        aggregates: aggregates by the name of their result.
        window: `windows.tumbling`, `hopping` or `session`; None = aggregate over all rows of a key.
        emit: ``"on_update"``; or ``"on_close"`` if there is a window.

    Raises:
        InvalidSchemaError: if a column is missing or has an unsupported type, or two columns of the result
            would have the same name.
        InvalidOptionError: if ``emit`` has another value, or is ``"on_close"`` without a window.

    Example::

        schema = pa.schema([("origin", pa.string()), ("delay", pa.int32())])
        AggregateProcessor(schema, ["origin"], {"flights": count(), "mean_delay": mean("delay")})
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
            expected = " or ".join(EMIT) if window else "on_update, because there is no window to close"
            raise InvalidOptionError(
                f"emit is {emit!r}; expected {expected}.", fix="set 'emit' to an expected value."
            )
        self._schema = schema
        self._keys = key_columns(schema, keys)
        self._aggregates = _by_event_time(aggregates, window)
        self._window = window
        self._emit = emit
        _check_names(schema, self._grouping)

    @property
    def output(self) -> pa.Schema:
        """Columns of the emitted rows."""
        return self._grouping.output

    @property
    def partial_schema(self) -> pa.Schema:
        """Columns of the rows that `partial` yields. The key columns come first."""
        return self._grouping.partial

    @property
    def schema(self) -> str:
        """Empty: `process` compares the state's description."""
        return ""

    @cached_property
    def description(self) -> Description:
        """Description of the state as declared; ``grace`` and ``emit`` do not affect the state."""
        details = self._grouping.aggregation.to_json()
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
        yield from self._reduced(self._parts(batches), bounded=True)

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
        description = agree(state, self.description)
        grouping = self._grouping
        if "versions" in description.details:
            grouping = self._grouping_of(versions_of(description))
        if grouping.merges:
            parts = list(self._parts(batches, merged=False))
        else:
            parts = list(self._reduced(self._parts(batches), bounded=False))
        partial = concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], grouping.partial)
        for columns in grouping.update(partial, state, context):
            yield from output_batches(grouping.output, columns)

    def _reduced(self, parts: Iterable[pa.RecordBatch], *, bounded: bool) -> Iterator[pa.RecordBatch]:
        """Merges partial rows, so that each yielded batch has each group once.

        It yields one batch; or several if ``bounded`` is set and there are more groups than memory allows.
        """
        grouping = self._grouping
        waiting: list[pa.RecordBatch] = []
        count, limit = 0, PARTIAL_ROWS
        for part in parts:
            waiting.append(part)
            count += part.num_rows
            if count >= limit and len(waiting) > 1:
                waiting = [grouping.merge_partials(concat_batches(waiting))]
                count = waiting[0].num_rows
                if bounded and count >= PARTIAL_ROWS // 2:
                    yield waiting.pop()
                    count = 0
                # If nearly all groups are distinct, merging saves nothing, so wait for twice as many rows.
                limit = max(PARTIAL_ROWS, 2 * count)
        if waiting:
            yield waiting[0] if len(waiting) == 1 else grouping.merge_partials(concat_batches(waiting))

    def _parts(self, batches: Iterable[pa.RecordBatch], *, merged: bool = True) -> Iterator[pa.RecordBatch]:
        """Yields the input as partial rows, computing them if the input consists of plain rows.

        If ``merged`` is set, each yielded batch has each group once.
        """
        grouping = self._grouping
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            return
        if first.schema.names == grouping.partial.names:
            partial = chunks(chain([first], rest), grouping.partial)
            yield from map(grouping.merge_partials, partial) if merged else partial
        else:
            yield from map(grouping.reduce_rows, chunks(chain([first], rest), self._read))

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
        aggregation = Aggregation(self._aggregates, self._schema)
        return grouping_of(self._keys, aggregation, versions, self._window, time, self._emit)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the declared attributes; the task recomputes the cached ones."""
        return without_cached(self)


def grouping_of(
    keys: pa.Schema,
    aggregation: Aggregation,
    versions: Sequence[Version] | None,
    window: Window | None,
    time: pa.DataType,
    emit: str,
) -> Grouping:
    """Returns the grouping for a window, or for no window."""
    if window is None:
        return Running(keys, aggregation, versions)
    if isinstance(window, Session):
        return Sessionized(keys, aggregation, versions, window, time, emit)
    return Windowed(keys, aggregation, versions, window, time, emit)


def grouping_of_description(description: Description) -> Grouping:
    """Returns the grouping that decodes a store with this description."""
    details = description.details
    window = window_from_json(details["window"]) if "window" in details else None
    time = type_from_json(details["time"]) if "window" in details else None
    aggregation = Aggregation.from_json(details)
    return grouping_of(description.key, aggregation, versions_of(description), window, time, "on_close")


def _by_event_time(aggregates: Mapping[str, Aggregate], window: Window | None) -> dict[str, Aggregate]:
    """Orders ``latest`` without ``by`` by event time if there is a window."""
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
                f"the result would have two columns named {twice[0]!r}: {', '.join(fields.names)}.",
                fix="give the aggregate another name, or rename the key column.",
            )
    if schema.names == grouping.partial.names:
        raise InvalidSchemaError(
            f"the input columns {', '.join(schema.names)} have the same names as those of partial rows, so "
            "the operator cannot distinguish the two.",
            fix="give the aggregate another name.",
        )
