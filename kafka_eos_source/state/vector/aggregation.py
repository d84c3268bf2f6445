"""All aggregates of a processor together: one grouping of the rows computes the states of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError, StateError, StateFormatError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.describe import fields_from_json, fields_to_json
from kafka_eos_source.state.vector.accumulators import (
    Accumulator,
    Count,
    CountedSum,
    Extreme,
    Moments,
    Picked,
    Sum,
    not_retractable,
)
from kafka_eos_source.state.vector.arrays import Plan, Request, group
from kafka_eos_source.state.vector.sketches import DistinctSketch, Quantiles
from kafka_eos_source.state.vector.value_lists import MAX_VALUES, ValueLists

_FIRST_OR_LAST = ("first", "last", "max_by", "min_by")
_MOMENTS = ("stddev_pop", "stddev_samp", "var_pop", "var_samp")
_LISTS = ("collect_list", "collect_set", "count_distinct")


def accumulator(
    name: str,
    aggregate: Aggregate,
    schema: pa.Schema,
    removed: str | None = None,
    max_values: int = MAX_VALUES,
) -> Accumulator:
    """Returns the accumulator of a declared aggregate.

    Args:
        name: name of the result.
        aggregate: the declaration.
        schema: columns of the input rows.
        removed: name of the column that marks the rows to take back; None = no row is taken back.
        max_values: largest number of values that the state of a group may keep.

    Raises:
        InvalidSchemaError: if a column is missing, or has a type that the aggregate does not support; or if
            the aggregate cannot take rows back.
        StateFormatError: if a later version of this package has declared the aggregate.
    """
    types = []
    for column in aggregate.columns():
        if column not in schema.names:
            raise InvalidSchemaError(
                f"aggregate {name!r} ({aggregate.kind}) reads column {column!r}, which the rows do not have.",
                fix=f"use one of the columns {', '.join(schema.names)}.",
            )
        types.append(schema.field(column).type)
    kind = aggregate.kind
    if kind == "count":
        return Count(name, aggregate.inputs[0] if aggregate.inputs else None, removed)
    if kind == "avg" or (kind == "sum" and removed is not None):
        return CountedSum(name, aggregate, types[0], removed)
    if kind == "sum":
        return Sum(name, aggregate, types[0])
    if removed is not None:
        raise not_retractable(
            name,
            f"is {kind}, which cannot forget a value",
            "aggregate with count, sum or avg; for another aggregate use transform "
            "with a map of the values and how often each occurs.",
        )
    if kind in _FIRST_OR_LAST:
        return Picked(name, aggregate, types)
    if kind in ("min", "max", "bool_and", "bool_or"):
        return Extreme(name, aggregate, types)
    if kind in _MOMENTS:
        return Moments(name, aggregate, types[0])
    if kind in _LISTS:
        return ValueLists(name, aggregate, types, max_values)
    if kind == "approx_count_distinct":
        return DistinctSketch(name, aggregate, types[0])
    if kind == "percentile_approx":
        return Quantiles(name, aggregate, types[0])
    raise StateFormatError(
        f"aggregate {name!r} has the kind {kind!r}, which this version does not know.",
        fix="use the version of kafka-eos that wrote it, or a later one.",
    )


def _check_removed_column(schema: pa.Schema, removed: str) -> None:
    """Checks the column that marks the rows to take back.

    Raises:
        InvalidSchemaError: if the column is missing or is not boolean.
    """
    if removed not in schema.names:
        raise InvalidSchemaError(
            f"removed={removed!r} is not among the columns of the rows.",
            fix=f"use a boolean column among {', '.join(schema.names)}, such as the column 'removed' of an "
            "aggregation with emit='changes'.",
        )
    if not pa.types.is_boolean(schema.field(removed).type):
        raise InvalidSchemaError(
            f"removed={removed!r} names a column of type {schema.field(removed).type}; expected boolean.",
            fix="use a boolean column that is true in the rows to take back.",
        )


# -- all aggregates of a processor

#: Name of the column of the state that counts the rows of a group, if rows are taken back.
_LIVE = "__live"


class Grouped(NamedTuple):
    """Columns with one row per group, in about the order in which the groups first appear.

    Attributes:
        keys: columns that identify the group.
        extra: results of the extra requests, one column each.
        states: columns of `Aggregation.state`.
    """

    keys: list[pa.Array]
    extra: list[pa.Array]
    states: list[pa.Array]


class Aggregation:
    """Declared aggregates over columns of known types.

    Args:
        aggregates: declarations by the name of their result.
        schema: columns of the input rows.
        removed: name of the boolean column that marks the rows to take back; None = no row is taken back.
        max_values: largest number of values that the state of a group may keep in one aggregate; `settled`
            compares it.

    Attributes:
        columns: names of the input columns that the aggregates read.
        state: columns of the state of all aggregates.
        results: columns of the results.
        removed: the argument.

    Raises:
        InvalidSchemaError: if there is no aggregate, a column is missing, or a column has a type that its
            aggregate does not support; or if rows are taken back that an aggregate cannot forget.
    """

    def __init__(
        self,
        aggregates: Mapping[str, Aggregate],
        schema: pa.Schema,
        removed: str | None = None,
        max_values: int = MAX_VALUES,
    ) -> None:
        if not aggregates:
            raise InvalidSchemaError(
                "no aggregate is declared.", fix="declare at least one, such as {'rows': agg.count()}."
            )
        if removed is not None:
            _check_removed_column(schema, removed)
        self.aggregates = dict(aggregates)
        self.removed = removed
        self._accumulators = [
            accumulator(name, each, schema, removed, max_values) for name, each in aggregates.items()
        ]
        read = {column for each in aggregates.values() for column in each.columns()}
        #: Accumulators without a result. A group whose last row was taken back must vanish, so count rows.
        self._hidden: list[Accumulator] = []
        if removed is not None:
            read.add(removed)
            self._hidden = [Count(_LIVE, None, removed)]
        self.columns = sorted(read)
        self._schema = pa.schema([schema.field(column) for column in self.columns])
        self.state = pa.schema([field for each in self._all for field in each.state])
        #: Columns of the state of each aggregate, by the name of its result.
        self.states_by_name = {
            name: each.state for name, each in zip(aggregates, self._accumulators, strict=True)
        }
        self.results = pa.schema(
            [pa.field(name, each.result) for name, each in zip(aggregates, self._accumulators, strict=True)]
        )

    def held(self, *, changes: bool) -> list[pa.Field]:
        """Returns the columns that a value has in addition if results are held back.

        Args:
            changes: whether the result that was emitted last is needed again.
        """
        fields = [pa.field("__due_ms", pa.int64()), pa.field("__emitted", pa.bool_(), nullable=False)]
        if changes:
            fields += [pa.field(f"__emitted_{field.name}", field.type) for field in self.results]
        return fields

    def aggregate_rows(
        self, keys: Sequence[pa.Array], rows: Mapping[str, pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Computes the states of groups of input rows.

        Args:
            keys: columns that identify the group of each row.
            rows: input columns by name.
            extra: more that is computed for each group.
        """
        plans = [each.plan_rows(rows) for each in self._all]
        return self._grouped(keys, plans, extra)

    def merge_states(
        self, keys: Sequence[pa.Array], states: Sequence[pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Merges states that were computed from parts of the rows into one state per group.

        Args:
            keys: columns that identify the group of each state.
            states: columns of ``state``.
            extra: more that is computed for each group.
        """
        plans = [each.plan_states(own) for each, own in zip(self._all, self._own(states), strict=True)]
        return self._grouped(keys, plans, extra)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merges two states of the same groups row by row.

        For a group without a stored state, ``old`` is what `RowCodec.decode` returns for a missing value:
        null, or zero in a column that is not nullable.
        """
        pairs = zip(self._all, self._own(old), self._own(new), strict=True)
        return [column for each, before, after in pairs for column in each.combine(before, after)]

    def settled(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns states as they are stored: checked, and without what only merging needed.

        Raises:
            AggregateLimitError: if an aggregate keeps too many values of a group.
        """
        pairs = zip(self._all, self._own(states), strict=True)
        return [column for each, own in pairs for column in each.settled(own)]

    def state_declarations(self) -> dict[str, dict[str, Any]]:
        """Returns what the meaning of each aggregate's state depends on, as JSON values, by its result."""
        pairs = zip(self.aggregates.items(), self._accumulators, strict=True)
        return {name: each.state_declaration(aggregate) for (name, aggregate), each in pairs}

    def finish(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Computes the results from the states."""
        own = self._own(states)[: len(self._accumulators)]
        return [each.finish(state) for each, state in zip(self._accumulators, own, strict=True)]

    def lives(self, states: Sequence[pa.Array]) -> pa.BooleanArray | None:
        """Returns whether each group still has rows; None if no row is ever taken back.

        Raises:
            StateError: if a group took back more rows than it received.
        """
        if self.removed is None:
            return None
        rows = states[-1]
        if len(rows) and pc.min(rows).as_py() < 0:
            raise StateError(
                f"a group took back {-pc.min(rows).as_py()} more rows than it received "
                f"(removed={self.removed!r}).",
                fix="start the operator together with the one before it, which must have emit='changes': new "
                "state needs every row from the beginning. Use another application.id and checkpoint.",
            )
        return pc.greater(rows, 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the aggregates as JSON values, as the store's description keeps them."""
        written: dict[str, Any] = {
            "aggregates": [[name, each.to_json()] for name, each in self.aggregates.items()],
            "columns": fields_to_json(self._schema),
        }
        return written if self.removed is None else {**written, "removed": self.removed}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Aggregation:
        """Returns the aggregation that `to_json` wrote."""
        aggregates = {name: Aggregate.from_json(each) for name, each in written["aggregates"]}
        return cls(aggregates, fields_from_json(written["columns"]), written.get("removed"))

    @property
    def _all(self) -> list[Accumulator]:
        """The accumulators in the order of their states."""
        return self._accumulators + self._hidden

    def _grouped(self, keys: Sequence[pa.Array], plans: list[Plan], extra: Sequence[Request]) -> Grouped:
        groups, (more, *states) = group(keys, [Plan(extra, lambda answers: answers), *plans])
        return Grouped(groups, more, [column for own in states for column in own])

    def _own(self, states: Sequence[pa.Array]) -> list[list[pa.Array]]:
        """Splits the columns of the state by aggregate."""
        parts, start = [], 0
        for each in self._all:
            parts.append(list(states[start : start + len(each.state)]))
            start += len(each.state)
        return parts
