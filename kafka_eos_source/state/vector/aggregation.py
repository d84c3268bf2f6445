"""Computes aggregates: how each turns rows into partial states, merges them, and computes the result.

The state of an aggregate is one or more columns with one row per group. The result must not depend on how
the rows were split before they reached the state. There are three ways to compute a state:

* ``plan_rows`` plans an Arrow grouping of input rows;
* ``plan_states`` plans an Arrow grouping of states that were computed from parts of the rows;
* ``combine`` merges two states of the same groups, row by row: the stored one and the one of this batch.

Count, sum and avg of numbers that add up exactly can also take rows back, which a boolean column of the
input marks. Such a row cancels an equal row that the group received before, in this batch or in an earlier
one.

`Aggregation` computes all aggregates of a processor together, with one grouping of the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError, StateError, StateFormatError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.describe import fields_from_json, fields_to_json
from kafka_eos_source.state.vector.arrays import (
    NO_NULLS_ONLY,
    ZERO_FOR_NULLS,
    Plan,
    Ranks,
    Request,
    add_sums,
    comparable,
    divide_sums,
    from_comparable,
    group,
    less,
    mean_type,
    not_before,
    plan_sum,
    sum_type,
)


class Accumulator(ABC):
    """Computes one aggregate over columns of known types.

    Attributes:
        state: fields of the state's columns; their names begin with the name of the result.
        result: type of the result.
    """

    state: list[pa.Field]
    result: pa.DataType

    @abstractmethod
    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        """Plans how to compute states from input rows, given as columns by name."""

    @abstractmethod
    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        """Plans how to merge states that were computed from parts of the rows."""

    @abstractmethod
    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merges two states of the same groups row by row; see `Aggregation.combine`."""

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        """Computes the result of each group from its state."""
        return states[0]


def accumulator(
    name: str, aggregate: Aggregate, schema: pa.Schema, removed: str | None = None
) -> Accumulator:
    """Returns the accumulator of a declared aggregate.

    Args:
        name: name of the result.
        aggregate: the declaration.
        schema: columns of the input rows.
        removed: name of the column that marks the rows to take back; None = no row is taken back.

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
    if aggregate.kind == "count":
        return _Count(name, aggregate.inputs[0] if aggregate.inputs else None, removed)
    if aggregate.kind == "avg" or (aggregate.kind == "sum" and removed is not None):
        return _CountedSum(name, aggregate, types[0], removed)
    if aggregate.kind == "sum":
        return _Sum(name, aggregate, types[0])
    if removed is not None:
        raise _not_retractable(
            name,
            f"is {aggregate.kind}, which keeps one value and cannot go back to the one before",
            "aggregate with count, sum or avg; for another aggregate use transform "
            "with a map of the values and how often each occurs.",
        )
    if aggregate.kind == "last":
        return _Last(name, aggregate, types)
    if aggregate.kind in ("min", "max"):
        return _Extreme(name, aggregate, types)
    raise StateFormatError(
        f"aggregate {name!r} has the kind {aggregate.kind!r}, which this version does not know.",
        fix="use the version of kafka-eos that wrote it, or a later one.",
    )


class _Count(Accumulator):
    """The aggregate count; the state is the number of rows, or of values, that were not taken back.

    Args:
        name: name of the result.
        column: the column whose values are counted; None = count rows.
        removed: name of the column that marks the rows to take back; None = no row is taken back.
    """

    def __init__(self, name: str, column: str | None, removed: str | None) -> None:
        self._column = column
        self._removed = removed
        self.state = [pa.field(f"{name}__count", pa.int64(), nullable=False)]
        self.result = pa.int64()

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        if self._removed is not None:
            signs = pc.if_else(_is_removed(rows, self._removed), -1, 1)
            if self._column is not None:
                signs = pc.if_else(rows[self._column].is_valid(), signs, 0)
            return Plan([(signs, "sum", ZERO_FOR_NULLS)], lambda sums: [sums[0].cast(pa.int64())])
        if self._column is None:
            return Plan([(None, "count_all", None)], lambda counts: counts)
        return Plan([(rows[self._column], "count", pc.CountOptions("only_valid"))], lambda counts: counts)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return Plan([(states[0], "sum", ZERO_FOR_NULLS)], lambda sums: sums)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [pc.add(old[0], new[0])]


class _Sum(Accumulator):
    """The aggregate sum; the state is the sum so far."""

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType) -> None:
        self._column = aggregate.inputs[0]
        self.result = _sum_type(name, aggregate, type_)
        self.state = [pa.field(f"{name}__sum", self.result)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return plan_sum(rows[self._column], self.result, self._column)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return plan_sum(states[0], self.result, self._column)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [add_sums(old[0], new[0], self._column)]


class _CountedSum(Accumulator):
    """The aggregate avg, and the aggregate sum if rows are taken back.

    The state is the sum, and the number of values that it covers: a group whose last value was taken back
    must return to null and not to zero.
    """

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType, removed: str | None) -> None:
        self._column = aggregate.inputs[0]
        self._removed = removed
        self._is_mean = aggregate.kind == "avg"
        if removed is None:
            summed = _sum_type(name, aggregate, type_)
            # Spark also adds integers as doubles to compute a mean, so this sum cannot overflow.
            self._sum_type = summed if pa.types.is_decimal(summed) else pa.float64()
        else:
            self._sum_type = sum_type(type_)
            if self._sum_type is None or pa.types.is_floating(self._sum_type):
                raise _not_retractable(
                    name,
                    f"reads column {self._column!r} of type {type_}, whose sums are not exact",
                    f"cast {self._column!r} to a decimal before the aggregation.",
                )
        self.result = mean_type(type_) if self._is_mean else self._sum_type
        self._counted = _Count(name, self._column, removed)
        self.state = [pa.field(f"{name}__sum", self._sum_type), *self._counted.state]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column]
        if not pa.types.is_decimal(self._sum_type):
            column = column.cast(self._sum_type, safe=False)
        if self._removed is not None:
            removed = _is_removed(rows, self._removed)
            if bool(pc.any(removed).as_py()):
                column = pc.if_else(removed, self._negated(column, removed), column)
        return self._both(plan_sum(column, self._sum_type, self._column), self._counted.plan_rows(rows))

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        total = plan_sum(states[0], self._sum_type, self._column)
        return self._both(total, self._counted.plan_states(states[1:]))

    def _negated(self, column: pa.Array, removed: pa.BooleanArray) -> pa.Array:
        if pa.types.is_decimal(column.type):
            return pc.negate(column)
        try:
            # Negate only the removed values, so that the smallest integer remains usable in other rows.
            return pc.negate_checked(pc.if_else(removed, column, 0))
        except pa.ArrowInvalid as error:
            raise StateError(
                f"column {self._column!r} of a removed row is the smallest bigint: it has no negative.",
                fix=f"cast {self._column!r} to a decimal before the aggregation.",
            ) from error

    def _both(self, total: Plan, counted: Plan) -> Plan:
        cut = len(total.requests)
        return Plan(
            [*total.requests, *counted.requests],
            lambda found: [*total.collect(found[:cut]), *counted.collect(found[cut:])],
        )

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [add_sums(old[0], new[0], self._column), *self._counted.combine(old[1:], new[1:])]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        total, counts = states
        if self._is_mean:
            return divide_sums(total, counts, self.result)
        return pc.if_else(pc.equal(counts, 0), pa.scalar(None, self.result), total)


class _Extreme(Accumulator):
    """The aggregates min and max; the state is the extreme value so far."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = aggregate.inputs[0]
        self._function = aggregate.kind
        self.result = _supported_type(name, aggregate, self._column, types[0])
        self.state = [pa.field(f"{name}__{aggregate.kind}", self.result)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return self._plan(rows[self._column])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return self._plan(states[0])

    def _plan(self, column: pa.Array) -> Plan:
        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            return [from_comparable(grouped[0], self.result)]

        return Plan([(comparable(column), self._function, NO_NULLS_ONLY)], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        left, right = (new[0], old[0]) if self._function == "min" else (old[0], new[0])
        replaces = pc.or_(less(left, right), old[0].is_null())
        return [pc.if_else(replaces, new[0], old[0])]


class _Last(Accumulator):
    """The aggregate last; the state is the newest value and the row's ``by`` columns, if there are any."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = aggregate.inputs[0]
        self._by = aggregate.by
        self.result, *by_types = [
            _supported_type(name, aggregate, column, type_)
            for column, type_ in zip(aggregate.columns(), types, strict=True)
        ]
        self.state = [pa.field(f"{name}__last", self.result)]
        self.state += [pa.field(f"{name}__by{index}", type_) for index, type_ in enumerate(by_types)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return self._plan([rows[self._column], *(rows[by] for by in self._by)])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return self._plan(states)

    def _plan(self, columns: Sequence[pa.Array]) -> Plan:
        ranks = Ranks(columns[1:], len(columns[0]))

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            newest = ranks.rows(grouped[0])
            return [column.take(newest) for column in columns]

        return Plan([(ranks.ranks, "max", NO_NULLS_ONLY)], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        if not self._by:
            return list(new)
        newer = pc.or_(not_before(new[1:], old[1:]), pc.and_(old[1].is_null(), new[1].is_valid()))
        return [pc.if_else(newer, after, before) for before, after in zip(old, new, strict=True)]


def _sum_type(name: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    summed = sum_type(type_)
    if summed is None:
        column = aggregate.inputs[0]
        raise _unsupported_type(name, aggregate, column, type_, "an integer, float, double or decimal column")
    return summed


def _supported_type(name: str, aggregate: Aggregate, column: str, type_: pa.DataType) -> pa.DataType:
    if (binary.width(type_) is None and not binary.is_variable(type_)) or pa.types.is_duration(type_):
        raise _unsupported_type(
            name,
            aggregate,
            column,
            type_,
            "bool, int8 to int64, float, double, decimal, string, binary, date or timestamp",
        )
    return type_


def _unsupported_type(
    name: str, aggregate: Aggregate, column: str, type_: pa.DataType, expected: str
) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"aggregate {name!r} ({aggregate.kind}) reads column {column!r} of type {type_}; "
        f"expected {expected}.",
        fix=f"cast {column!r} before the aggregation.",
    )


def _is_removed(rows: Mapping[str, pa.Array], removed: str) -> pa.BooleanArray:
    return rows[removed].fill_null(False)


def _not_retractable(name: str, why: str, fix: str) -> InvalidSchemaError:
    return InvalidSchemaError(f"aggregate {name!r} cannot take rows back: it {why}.", fix=fix)


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
    """Columns with one row per group, in the order in which the groups first appear.

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
        self, aggregates: Mapping[str, Aggregate], schema: pa.Schema, removed: str | None = None
    ) -> None:
        if not aggregates:
            raise InvalidSchemaError(
                "no aggregate is declared.", fix="declare at least one, such as {'rows': agg.count()}."
            )
        if removed is not None:
            _check_removed_column(schema, removed)
        self.aggregates = dict(aggregates)
        self.removed = removed
        self._accumulators = [accumulator(name, each, schema, removed) for name, each in aggregates.items()]
        read = {column for each in aggregates.values() for column in each.columns()}
        #: Accumulators without a result. A group whose last row was taken back must vanish, so count rows.
        self._hidden: list[Accumulator] = []
        if removed is not None:
            read.add(removed)
            self._hidden = [_Count(_LIVE, None, removed)]
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
