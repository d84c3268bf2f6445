"""Accumulators that can also take rows back: count, sum and mean of numbers that add up exactly.

A boolean column of the input marks the rows that are taken back. Such a row cancels an equal row that the
group received before, in this batch or in an earlier one. Each state contains the number of values that it
covers, because a group whose last value was taken back must return to null and not to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError, StateError
from kafka_eos_source.state.vector import exact
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.group import ZERO_FOR_NULLS, Plan


class RetractableCount:
    """The aggregate count; the state is the number of rows, or of values, that were not taken back.

    Args:
        name: name of the result.
        column: the column whose values are counted; None = count rows.
        removed: name of the column that marks the rows to take back.
    """

    def __init__(self, name: str, column: str | None, removed: str) -> None:
        self._column = column
        self._removed = removed
        self.state = [pa.field(f"{name}__count", pa.int64(), nullable=False)]
        self.result: pa.DataType = pa.int64()

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        signs = pc.if_else(_is_removed(rows, self._removed), -1, 1)
        if self._column is not None:
            signs = pc.if_else(rows[self._column].is_valid(), signs, 0)
        return Plan([(signs, "sum", ZERO_FOR_NULLS)], lambda sums: [sums[0].cast(pa.int64())])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return Plan([(states[0], "sum", ZERO_FOR_NULLS)], lambda sums: sums)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [pc.add(old[0], new[0])]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


class _RetractableTotal:
    """Base of sum and mean; the state is the sum, and the number of values that it covers."""

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType, removed: str) -> None:
        self._column = str(aggregate.column)
        self._removed = removed
        sum_type = exact.sum_type(type_)
        if sum_type is None or pa.types.is_floating(sum_type):
            raise _not_retractable(
                name,
                f"reads column {self._column!r} of type {type_}, whose sums are not exact",
                f"cast {self._column!r} to a decimal before the aggregation.",
            )
        self._sum_type: pa.DataType = sum_type
        self._counted = RetractableCount(name, self._column, removed)
        self.state = [pa.field(f"{name}__sum", sum_type), *self._counted.state]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column]
        if pa.types.is_integer(column.type):
            column = column.cast(pa.int64())
        removed = _is_removed(rows, self._removed)
        if bool(pc.any(removed).as_py()):
            column = pc.if_else(removed, self._negated(column, removed), column)
        return self._both(exact.plan_sum(column, self._sum_type, self._column), self._counted.plan_rows(rows))

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        total = exact.plan_sum(states[0], self._sum_type, self._column)
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
        return [exact.add_sums(old[0], new[0], self._column), *self._counted.combine(old[1:], new[1:])]


class _RetractableSum(_RetractableTotal):
    """The aggregate sum of integers or decimals."""

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType, removed: str) -> None:
        super().__init__(name, aggregate, type_, removed)
        self.result = self._sum_type

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        total, counts = states
        return pc.if_else(pc.equal(counts, 0), pa.scalar(None, self.result), total)


class _RetractableMean(_RetractableTotal):
    """The aggregate mean of integers or decimals."""

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType, removed: str) -> None:
        super().__init__(name, aggregate, type_, removed)
        self.result = exact.mean_type(type_)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return exact.divide_sums(states[0], states[1], self.result)


def retractable(
    name: str, aggregate: Aggregate, types: Sequence[pa.DataType], removed: str
) -> RetractableCount | _RetractableSum | _RetractableMean:
    """Returns an accumulator of a declared aggregate that can take rows back.

    Args:
        name: name of the result.
        aggregate: the declaration.
        types: types of the aggregate's columns.
        removed: name of the column that marks the rows to take back.

    Raises:
        InvalidSchemaError: if the aggregate cannot forget a value, or its column has an unsupported type.
    """
    if aggregate.kind == "count":
        return RetractableCount(name, aggregate.column, removed)
    if aggregate.kind == "sum":
        return _RetractableSum(name, aggregate, types[0], removed)
    if aggregate.kind == "mean":
        return _RetractableMean(name, aggregate, types[0], removed)
    raise _not_retractable(
        name,
        f"is {aggregate.kind}, which keeps one value and cannot go back to the one before",
        "aggregate with count, sum_ or mean; for another aggregate use transform_with_changelog_state with a "
        "map of the values and how often each occurs.",
    )


def check_removed_column(schema: pa.Schema, removed: str) -> None:
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


def _is_removed(rows: Mapping[str, pa.Array], removed: str) -> pa.BooleanArray:
    return rows[removed].fill_null(False)


def _not_retractable(name: str, why: str, fix: str) -> InvalidSchemaError:
    return InvalidSchemaError(f"aggregate {name!r} cannot take rows back: it {why}.", fix=fix)
