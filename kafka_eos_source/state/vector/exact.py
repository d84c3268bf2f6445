"""Exact sums: they fail with an error where Arrow's own sums would wrap around."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import StateError
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.vector.group import NO_NULLS_ONLY, Plan

_HALF = np.int64(32)
_LOW = np.int64(0xFFFFFFFF)

#: Digits that a mean of decimals adds to the precision and to the scale of its column, as Spark's `Average`.
_MEAN_DIGITS = 4


def sum_type(type_: pa.DataType) -> pa.DataType | None:
    """Returns Spark's type for the sum of a column of this type; None = the type cannot be summed."""
    if pa.types.is_signed_integer(type_):
        return pa.int64()
    if cells.is_float(type_):
        return pa.float64()
    if pa.types.is_decimal128(type_):
        return pa.decimal128(min(38, type_.precision + 10), type_.scale)
    return None


def mean_type(type_: pa.DataType) -> pa.DataType:
    """Returns Spark's type for the mean of a column of this type, which `sum_type` can sum."""
    if pa.types.is_decimal(type_):
        return pa.decimal128(min(38, type_.precision + _MEAN_DIGITS), min(38, type_.scale + _MEAN_DIGITS))
    return pa.float64()


def divide_sums(total: pa.Array, counts: pa.Array, type_: pa.DataType) -> pa.Array:
    """Returns the mean of each group from its sum and its number of values; null for a group without values.

    Args:
        total: sums.
        counts: numbers of values.
        type_: `mean_type` of the values.
    """
    divisor = pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.int64()), counts)
    if pa.types.is_floating(type_):
        return pc.divide(total.cast(pa.float64(), safe=False), divisor.cast(pa.float64(), safe=False))
    # Divide with one extra digit and then round half up, as Spark does for decimals.
    wide = pa.decimal256(76 - 20, type_.scale + 1)
    quotient = pc.divide(total.cast(wide), divisor.cast(pa.decimal256(19, 0)))
    return pc.round(quotient, type_.scale, round_mode="half_towards_infinity").cast(type_, safe=False)


def plan_sum(column: pa.Array, type_: pa.DataType, name: str) -> Plan:
    """Plans the sum of a column, or of partial sums of it, by group.

    The sum of a group without values is null. ``Plan.collect`` raises `StateError` if a sum does not fit the
    type.

    Args:
        column: values or partial sums.
        type_: `sum_type` of the values.
        name: name of the column, for the error.
    """
    if pa.types.is_decimal(type_):
        return _decimals(column, type_, name)
    if pa.types.is_floating(type_):
        return Plan([(column, "sum", NO_NULLS_ONLY)], lambda sums: sums)
    if _cannot_overflow(column):
        return Plan([(column, "sum", NO_NULLS_ONLY)], lambda sums: [sums[0].cast(type_)])
    # Sum the upper and lower 32 bits separately: neither sum can overflow with fewer than 2^31 rows.
    high = pa.array(cells.raw(column, np.int64) >> _HALF, mask=~binary.valid(column))
    low = pa.array(cells.raw(column, np.int64) & _LOW, mask=~binary.valid(column))

    def join_halves(sums: list[pa.Array]) -> list[pa.Array]:
        highs, lows = (cells.raw(half, np.int64) for half in sums)
        highs = highs + (lows >> _HALF)
        if bool((highs != highs.astype(np.int32)).any()):
            raise _too_large(name, type_)
        return [_with_nulls((highs << _HALF) | (lows & _LOW), binary.valid(sums[0]), type_)]

    return Plan([(high, "sum", NO_NULLS_ONLY), (low, "sum", NO_NULLS_ONLY)], join_halves)


def add_sums(left: pa.Array, right: pa.Array, name: str) -> pa.Array:
    """Adds two columns of sums row by row; a null counts as zero, and two nulls give null.

    Args:
        left: sums of one type.
        right: sums of the same type.
        name: name of the summed column, for the error.

    Raises:
        StateError: if a sum does not fit the type.
    """
    type_ = left.type
    if pa.types.is_decimal(type_):
        wide = pa.decimal256(39, type_.scale)
        total = _narrow(pc.add(_or_zero(left).cast(wide), _or_zero(right).cast(wide)), type_, name)
        return pc.if_else(pc.and_(left.is_null(), right.is_null()), pa.scalar(None, type_), total)
    is_valid = binary.valid(left) | binary.valid(right)
    if pa.types.is_floating(type_):
        return _with_nulls(cells.raw(left, np.float64) + cells.raw(right, np.float64), is_valid, type_)
    first, second = cells.raw(left, np.int64), cells.raw(right, np.int64)
    total = first + second
    if bool((((first ^ total) & (second ^ total)) < 0).any()):
        raise _too_large(name, type_)
    return _with_nulls(total, is_valid, type_)


def _cannot_overflow(column: pa.Array) -> bool:
    """Whether the sum of any of these integers fits int64."""
    if column.type != pa.int64():
        return True  # at most 32 bits per value and fewer than 2^31 rows
    ends = pc.min_max(column).as_py()
    if ends["min"] is None:
        return True
    return bool(max(-ends["min"], ends["max"]) * len(column) < 1 << 63)


def _decimals(column: pa.Array, type_: pa.DataType, name: str) -> Plan:
    # The sum of up to 10^10 values of at most 28 digits fits 38 digits.
    exact = column if column.type.precision <= 28 else column.cast(pa.decimal256(39, type_.scale))
    return Plan([(exact, "sum", NO_NULLS_ONLY)], lambda sums: [_narrow(sums[0], type_, name)])


def _or_zero(column: pa.Array) -> pa.Array:
    return column.fill_null(pa.scalar(Decimal(0), column.type)) if column.null_count else column


def _narrow(sums: pa.Array, type_: pa.DataType, name: str) -> pa.Array:
    try:
        return sums.cast(type_)
    except pa.ArrowInvalid as error:
        raise _too_large(name, type_) from error


def _with_nulls(values: NDArray[Any], is_valid: NDArray[np.bool_], type_: pa.DataType) -> pa.Array:
    buffers = [binary.bitmap(is_valid), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(type_, len(values), buffers)


def _too_large(name: str, type_: pa.DataType) -> StateError:
    return StateError(
        f"the sum of column {name!r} does not fit {type_}.",
        fix=f"cast {name!r} to a decimal of up to 28 digits before the aggregation, or use mean.",
    )
