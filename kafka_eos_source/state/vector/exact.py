"""Sums that are right or an error: Arrow's own wrap around when they do not fit."""

from __future__ import annotations

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


def sum_type(type_: pa.DataType) -> pa.DataType | None:
    """The type of a sum, as Spark has it; None = there is no sum of this type."""
    if pa.types.is_signed_integer(type_):
        return pa.int64()
    if cells.is_float(type_):
        return pa.float64()
    if pa.types.is_decimal128(type_):
        return pa.decimal128(min(38, type_.precision + 10), type_.scale)
    return None


def plan_sum(column: pa.Array, type_: pa.DataType, name: str) -> Plan:
    """How to sum a column, or sums of its parts, in groups: null where there is no value.

    Args:
        column: values or sums.
        type_: `sum_type` of the values.
        name: of the column, for the error.

    Raises:
        StateError: when collected, if a sum does not fit the type.
    """
    if pa.types.is_decimal(type_):
        return _decimals(column, type_, name)
    if pa.types.is_floating(type_):
        return Plan([(column, "sum", NO_NULLS_ONLY)], lambda sums: sums)
    if _fits(column):
        return Plan([(column, "sum", NO_NULLS_ONLY)], lambda sums: [sums[0].cast(type_)])
    # Two halves: neither of their sums can overflow in less than 2^31 rows.
    high = pa.array(cells.raw(column, np.int64) >> _HALF, mask=~binary.valid(column))
    low = pa.array(cells.raw(column, np.int64) & _LOW, mask=~binary.valid(column))

    def whole(sums: list[pa.Array]) -> list[pa.Array]:
        highs, lows = (cells.raw(half, np.int64) for half in sums)
        highs = highs + (lows >> _HALF)
        if bool((highs != highs.astype(np.int32)).any()):
            raise _too_large(name, type_)
        return [_with_nulls((highs << _HALF) | (lows & _LOW), binary.valid(sums[0]), type_)]

    return Plan([(high, "sum", NO_NULLS_ONLY), (low, "sum", NO_NULLS_ONLY)], whole)


def add(left: pa.Array, right: pa.Array, name: str) -> pa.Array:
    """Two columns of sums, row by row; a null is as nothing, two are null.

    Raises:
        StateError: a sum does not fit the type.
    """
    type_ = left.type
    if pa.types.is_decimal(type_):
        wide = pa.decimal256(39, type_.scale)
        total = _narrow(pc.add(_or_zero(left).cast(wide), _or_zero(right).cast(wide)), type_, name)
        return pc.if_else(pc.and_(left.is_null(), right.is_null()), pa.scalar(None, type_), total)
    is_valid = binary.valid(left) | binary.valid(right)
    if pa.types.is_floating(type_):
        return _with_nulls(cells.raw(left, np.float64) + cells.raw(right, np.float64), is_valid, type_)
    one, other = cells.raw(left, np.int64), cells.raw(right, np.int64)
    total = one + other
    if bool((((one ^ total) & (other ^ total)) < 0).any()):
        raise _too_large(name, type_)
    return _with_nulls(total, is_valid, type_)


def _fits(column: pa.Array) -> bool:
    """Whether no sum of these integers can leave int64."""
    if column.type != pa.int64():
        return True  # 2^31 rows of 32 bits
    ends = pc.min_max(column).as_py()
    if ends["min"] is None:
        return True
    return bool(max(-ends["min"], ends["max"]) * len(column) < 1 << 63)


def _decimals(column: pa.Array, type_: pa.DataType, name: str) -> Plan:
    # 10^10 rows cannot leave 38 digits while a value has 28 or less.
    exact = column if column.type.precision <= 28 else column.cast(pa.decimal256(39, type_.scale))
    return Plan([(exact, "sum", NO_NULLS_ONLY)], lambda sums: [_narrow(sums[0], type_, name)])


def _or_zero(column: pa.Array) -> pa.Array:
    return column.fill_null(pa.scalar(0).cast(column.type)) if column.null_count else column


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
        f"a sum of column {name!r} does not fit {type_}",
        fix=f"cast {name!r} to a decimal of up to 28 digits before the aggregation, or use mean",
    )
