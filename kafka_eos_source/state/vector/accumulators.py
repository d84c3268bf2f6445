"""Accumulators: how each aggregate turns rows into partial states, merges them, and computes the result.

The state of an aggregate is one or more columns with one row per group. The result must not depend on how
the rows were split before they reached the state. There are three ways to compute a state:

* ``plan_rows`` plans an Arrow grouping of input rows;
* ``plan_states`` plans an Arrow grouping of states that were computed from parts of the rows;
* ``combine`` merges two states of the same groups, row by row: the stored one and the one of this batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import cells
from kafka_eos_source.state.vector import exact, order
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.group import NO_NULLS_ONLY, ZERO_FOR_NULLS, Plan
from kafka_eos_source.state.vector.retractable import retractable


class Accumulator(Protocol):
    """Computes one aggregate over columns of known types.

    Attributes:
        state: fields of the state's columns; their names begin with the name of the result.
        result: type of the result.
    """

    state: list[pa.Field]
    result: pa.DataType

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        """Plans how to compute states from input rows, given as columns by name."""

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        """Plans how to merge states that were computed from parts of the rows."""

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merges two states of the same groups row by row; see `Aggregation.combine`."""

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        """Computes the result of each group from its state."""


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
    """
    types = []
    for column in aggregate.columns():
        if column not in schema.names:
            raise InvalidSchemaError(
                f"aggregate {name!r} ({aggregate.kind}) reads column {column!r}, which the rows do not have.",
                fix=f"use one of the columns {', '.join(schema.names)}.",
            )
        types.append(schema.field(column).type)
    if removed is not None:
        return retractable(name, aggregate, types, removed)
    return _KINDS[aggregate.kind](name, aggregate, types)


class _Count:
    """The aggregate count; the state is the count so far."""

    def __init__(self, name: str, aggregate: Aggregate, _types: list[pa.DataType]) -> None:
        self._column = aggregate.column
        self.state = [pa.field(f"{name}__count", pa.int64(), nullable=False)]
        self.result = pa.int64()

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        if self._column is None:
            return Plan([(None, "count_all", None)], lambda counts: counts)
        return Plan([(rows[self._column], "count", pc.CountOptions("only_valid"))], lambda counts: counts)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return Plan([(states[0], "sum", ZERO_FOR_NULLS)], lambda sums: sums)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [pc.add(old[0], new[0])]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


class _Sum:
    """The aggregate sum; the state is the sum so far."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = str(aggregate.column)
        self.result = _sum_type(name, aggregate, types[0])
        self.state = [pa.field(f"{name}__sum", self.result)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return exact.plan_sum(rows[self._column], self.result, self._column)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return exact.plan_sum(states[0], self.result, self._column)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [exact.add_sums(old[0], new[0], self._column)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


class _Mean:
    """The aggregate mean; the state is the sum and the number of the values so far."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = str(aggregate.column)
        sum_type = _sum_type(name, aggregate, types[0])
        self.result = exact.mean_type(types[0])
        if pa.types.is_floating(self.result):
            # Spark also adds integers as doubles to compute a mean, so this sum cannot overflow.
            sum_type = self.result
        self._sum_type = sum_type
        self.state = [
            pa.field(f"{name}__sum", sum_type),
            pa.field(f"{name}__count", pa.int64(), nullable=False),
        ]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column]
        if pa.types.is_floating(self._sum_type):
            column = column.cast(pa.float64(), safe=False)
        total = exact.plan_sum(column, self._sum_type, self._column)
        counted = (column, "count", pc.CountOptions("only_valid"))
        return Plan([*total.requests, counted], lambda grouped: [*total.collect(grouped[:-1]), grouped[-1]])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        total = exact.plan_sum(states[0], self._sum_type, self._column)
        counted = (states[1], "sum", ZERO_FOR_NULLS)
        return Plan([*total.requests, counted], lambda grouped: [*total.collect(grouped[:-1]), grouped[-1]])

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [exact.add_sums(old[0], new[0], self._column), pc.add(old[1], new[1])]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return exact.divide_sums(states[0], states[1], self.result)


class _Extreme:
    """The aggregates min and max; the state is the extreme value so far."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = str(aggregate.column)
        self._function = aggregate.kind
        self.result = _supported_type(name, aggregate, self._column, types[0])
        self.state = [pa.field(f"{name}__{aggregate.kind}", self.result)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return self._plan(rows[self._column])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return self._plan(states[0])

    def _plan(self, column: pa.Array) -> Plan:
        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            return [order.from_comparable(grouped[0], self.result)]

        return Plan([(order.comparable(column), self._function, NO_NULLS_ONLY)], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        left, right = (new[0], old[0]) if self._function == "min" else (old[0], new[0])
        replaces = pc.or_(order.less(left, right), old[0].is_null())
        return [pc.if_else(replaces, new[0], old[0])]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


class _Latest:
    """The aggregate latest; the state is the newest value and the row's ``by`` columns, if there are any."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = str(aggregate.column)
        self._by = aggregate.by
        self.result, *by_types = [
            _supported_type(name, aggregate, column, type_)
            for column, type_ in zip(aggregate.columns(), types, strict=True)
        ]
        self.state = [pa.field(f"{name}__latest", self.result)]
        self.state += [pa.field(f"{name}__by{index}", type_) for index, type_ in enumerate(by_types)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        return self._plan([rows[self._column], *(rows[by] for by in self._by)])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return self._plan(states)

    def _plan(self, columns: Sequence[pa.Array]) -> Plan:
        ranks = order.Ranks(columns[1:], len(columns[0]))

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            newest = ranks.rows(grouped[0])
            return [column.take(newest) for column in columns]

        return Plan([(ranks.ranks, "max", NO_NULLS_ONLY)], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        if not self._by:
            return list(new)
        newer = pc.or_(order.not_before(new[1:], old[1:]), pc.and_(old[1].is_null(), new[1].is_valid()))
        return [pc.if_else(newer, after, before) for before, after in zip(old, new, strict=True)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


_KINDS: dict[str, Callable[[str, Aggregate, list[pa.DataType]], Accumulator]] = {
    "count": _Count,
    "sum": _Sum,
    "mean": _Mean,
    "min": _Extreme,
    "max": _Extreme,
    "latest": _Latest,
}


def _sum_type(name: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    sum_type = exact.sum_type(type_)
    if sum_type is None:
        column = str(aggregate.column)
        raise _unsupported_type(name, aggregate, column, type_, "an integer, float, double or decimal column")
    return sum_type


def _supported_type(name: str, aggregate: Aggregate, column: str, type_: pa.DataType) -> pa.DataType:
    if (cells.width(type_) is None and not cells.is_variable(type_)) or pa.types.is_duration(type_):
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
