"""Accumulators: how each aggregate turns rows into partial states, merges them, and computes the result.

The state of an aggregate is one or more columns with one row per group. The result must not depend on how
the rows were split before they reached the state. There are three ways to compute a state:

* ``plan_rows`` plans an Arrow grouping of input rows;
* ``plan_states`` plans an Arrow grouping of states that were computed from parts of the rows;
* ``combine`` merges two states of the same groups, row by row: the stored one and the one of this batch.

Count, and sum and avg of integers and decimals, can also take rows back, which a boolean column of the input
marks: such a row cancels an equal row that the group received before, in this batch or in an earlier one. No
other aggregate can.

This module has the aggregates whose state has a fixed number of values. `value_lists` has those that keep
many values, and `sketches` those that approximate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError, StateError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.vector.arrays import (
    NO_NULLS_ONLY,
    ZERO_FOR_NULLS,
    Plan,
    Ranks,
    add_sums,
    comparable,
    divide_sums,
    from_comparable,
    less,
    mean_type,
    not_before,
    plan_sum,
    row_numbers,
    rows_of,
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

    def settled(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns the states as they are stored.

        Raises:
            AggregateLimitError: if the aggregate would keep too many values of a group.
        """
        return list(states)

    def state_declaration(self, aggregate: Aggregate) -> dict[str, Any]:
        """Returns what the meaning of the state depends on, besides the types of its columns.

        Args:
            aggregate: declaration of this aggregate.
        """
        return aggregate.to_json()


class Count(Accumulator):
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


class Sum(Accumulator):
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


class CountedSum(Accumulator):
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
                raise not_retractable(
                    name,
                    f"reads column {self._column!r} of type {type_}, whose sums are not exact",
                    f"cast {self._column!r} to a decimal before the aggregation.",
                )
        self.result = mean_type(type_) if self._is_mean else self._sum_type
        self._counted = Count(name, self._column, removed)
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


#: The Arrow aggregation of each kind. True is larger than false.
_EXTREMES = {"min": "min", "max": "max", "bool_and": "min", "bool_or": "max"}


class Extreme(Accumulator):
    """The aggregates min, max, bool_and and bool_or; the state is the extreme value so far."""

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = aggregate.inputs[0]
        self._function = _EXTREMES[aggregate.kind]
        self.result = supported_type(name, aggregate, self._column, types[0])
        if aggregate.kind.startswith("bool") and not pa.types.is_boolean(self.result):
            raise unsupported_type(name, aggregate, self._column, self.result, "a boolean column")
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


class Picked(Accumulator):
    """The aggregates first, last, min_by and max_by; the state is the value of the row that was picked.

    The state also has the row's ``by`` columns. Without them, rows are picked in their order of arrival, and
    the state says whether a row was picked if its value may be null.
    """

    def __init__(self, name: str, aggregate: Aggregate, types: list[pa.DataType]) -> None:
        self._column = aggregate.inputs[0]
        self._by = aggregate.by
        self._is_last = aggregate.kind in ("last", "max_by")
        self._ignores_nulls = dict(aggregate.settings).get("ignore_nulls", False)
        self.result, *by_types = [
            supported_type(name, aggregate, column, type_)
            for column, type_ in zip(aggregate.columns(), types, strict=True)
        ]
        self.state = [pa.field(f"{name}__{aggregate.kind}", self.result)]
        self.state += [pa.field(f"{name}__by{index}", type_) for index, type_ in enumerate(by_types)]
        self._has_mark = not self._by and not self._ignores_nulls
        if self._has_mark:
            self.state.append(pa.field(f"{name}__seen", pa.bool_(), nullable=False))

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        value = rows[self._column]
        mark = [pa.repeat(pa.scalar(True), len(value))] if self._has_mark else []
        return self._plan([value, *(rows[by] for by in self._by), *mark])

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        return self._plan(states)

    def _plan(self, columns: Sequence[pa.Array]) -> Plan:
        ranks = Ranks(columns[1 : 1 + len(self._by)], len(columns[0]))
        # A row without a ``by`` column has no rank, and is not picked.
        ranked = pc.if_else(self._has_row(columns), ranks.ranks, pa.scalar(None, pa.int64()))

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            picked = ranks.rows(grouped[0])
            found = [column.take(picked) for column in columns]
            return [*found[:-1], found[-1].fill_null(False)] if self._has_mark else found

        return Plan([(ranked, "max" if self._is_last else "min", NO_NULLS_ONLY)], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        had, has = self._has_row(old), self._has_row(new)
        if not self._by:
            wins = pa.scalar(self._is_last)
        elif self._is_last:
            wins = not_before(new[1:], old[1:])
        else:
            wins = pc.invert(not_before(new[1:], old[1:]))
        replaces = pc.and_(has, pc.or_(pc.invert(had), wins))
        return [pc.if_else(replaces, after, before) for before, after in zip(old, new, strict=True)]

    def _has_row(self, columns: Sequence[pa.Array]) -> pa.BooleanArray:
        """Returns whether a row, or the state of a group, may be picked."""
        if self._has_mark:
            return columns[-1]
        if self._ignores_nulls:
            return columns[0].is_valid()
        return columns[1].is_valid()


class Moments(Accumulator):
    """The aggregates var_pop, var_samp, stddev_pop and stddev_samp.

    The state is the number of values, their mean, and the sum of the squares of their distances from it. Two
    states are merged as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances" (1979), which keeps the digits that a sum of squares would lose.
    """

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType) -> None:
        _sum_type(name, aggregate, type_)  # only for its check
        self._column = aggregate.inputs[0]
        self._is_root = aggregate.kind.startswith("stddev")
        self._is_sample = aggregate.kind.endswith("samp")
        self.result = pa.float64()
        self.state = [
            pa.field(f"{name}__count", pa.int64(), nullable=False),
            pa.field(f"{name}__mean", pa.float64()),
            pa.field(f"{name}__squares", pa.float64()),
        ]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column].cast(pa.float64(), safe=False)

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            counts, means, variances = grouped
            return [counts, means, pc.multiply(variances, counts.cast(pa.float64()))]

        return Plan(
            [
                (column, "count", pc.CountOptions("only_valid")),
                (column, "mean", NO_NULLS_ONLY),
                (column, "variance", pc.VarianceOptions(ddof=0, min_count=1)),
            ],
            collect,
        )

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            rows, groups = rows_of(grouped[0])
            return self._merged([column.take(rows) for column in states], groups, len(grouped[0]))

        return Plan([row_numbers(states[0])], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        both = [pa.concat_arrays(pair) for pair in zip(old, new, strict=True)]
        count = len(old[0])
        return self._merged(both, np.tile(np.arange(count), 2), count)

    def _merged(self, states: list[pa.Array], groups: Ints, count: int) -> list[pa.Array]:
        """Merges the states of each group into one.

        Args:
            states: columns of the states.
            groups: the group of each state.
            count: number of groups.
        """
        counts = binary.raw(states[0], np.int64)
        means, squares = (binary.raw(column, np.float64) for column in states[1:])
        total = np.bincount(groups, counts, count)
        some = counts > 0
        groups, counts, means, squares = groups[some], counts[some], means[some], squares[some]
        # The distances from the mean of one of the states are small, so their mean loses no digits.
        near = np.zeros(count)
        near[groups[::-1]] = means[::-1]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = near + np.bincount(groups, counts * (means - near[groups]), count) / total
            apart = means - mean[groups]
            summed = np.bincount(groups, squares + counts * apart * apart, count)
        empty = total == 0
        mask = empty if bool(empty.any()) else None
        found = [pa.array(each, pa.float64(), mask=mask) for each in (mean, summed)]
        return [pa.array(total.astype(np.int64), pa.int64()), *found]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        counts = binary.raw(states[0], np.int64)
        divisor = counts - 1 if self._is_sample else counts
        missing = divisor < 1
        with np.errstate(invalid="ignore"):
            found = binary.raw(states[2], np.float64) / np.where(missing, 1, divisor)
            found = np.sqrt(found) if self._is_root else found
        return pa.array(found, pa.float64(), mask=missing if bool(missing.any()) else None)


def _sum_type(name: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    summed = sum_type(type_)
    if summed is None:
        column = aggregate.inputs[0]
        raise unsupported_type(name, aggregate, column, type_, "an integer, float, double or decimal column")
    return summed


def supported_type(name: str, aggregate: Aggregate, column: str, type_: pa.DataType) -> pa.DataType:
    """Returns the type of an input column.

    Raises:
        InvalidSchemaError: if state cannot hold values of the type.
    """
    if (binary.width(type_) is None and not binary.is_variable(type_)) or pa.types.is_duration(type_):
        raise unsupported_type(
            name,
            aggregate,
            column,
            type_,
            "bool, int8 to int64, float, double, decimal, string, binary, date or timestamp",
        )
    return type_


def unsupported_type(
    name: str, aggregate: Aggregate, column: str, type_: pa.DataType, expected: str
) -> InvalidSchemaError:
    """Returns the error for an input column whose type an aggregate does not support."""
    return InvalidSchemaError(
        f"aggregate {name!r} ({aggregate.kind}) reads column {column!r} of type {type_}; "
        f"expected {expected}.",
        fix=f"cast {column!r} before the aggregation.",
    )


def _is_removed(rows: Mapping[str, pa.Array], removed: str) -> pa.BooleanArray:
    return rows[removed].fill_null(False)


def not_retractable(name: str, why: str, fix: str) -> InvalidSchemaError:
    """Returns the error for an aggregate that cannot take rows back."""
    return InvalidSchemaError(f"aggregate {name!r} cannot take rows back: it {why}.", fix=fix)
