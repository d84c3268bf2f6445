"""Compares columns as Spark does, and ranks rows by several columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.state.encoding import binary


def comparable(column: pa.Array) -> pa.Array:
    """Converts floats to integers with the same order; other types are returned as they are.

    NaN becomes the largest value. -0.0 becomes less than 0.0, so that the minimum and maximum do not depend
    on the order of rows. `from_comparable` is the inverse.
    """
    if not binary.is_float(column.type):
        return column
    bits = binary.to_order(binary.raw(column, f"<f{column.type.bit_width // 8}"))
    nulls = binary.bitmap(binary.valid(column))
    return pa.Array.from_buffers(pa.from_numpy_dtype(bits.dtype), len(bits), [nulls, pa.py_buffer(bits)])


def from_comparable(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Converts the result of `comparable` back to a column of its original type."""
    if not binary.is_float(type_):
        return column
    floats = binary.from_order(binary.raw(column, f"<u{type_.bit_width // 8}"))
    nulls = binary.bitmap(binary.valid(column))
    return pa.Array.from_buffers(type_, len(floats), [nulls, pa.py_buffer(floats)])


def less(left: pa.Array, right: pa.Array) -> pa.Array:
    """Returns row by row whether ``left`` is less than ``right``; false if either is null."""
    return pc.less(comparable(left), comparable(right)).fill_null(False)


def not_before(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> pa.Array:
    """Returns row by row whether ``left`` is greater than or equal to ``right``.

    The first columns are the most significant ones. The result is false if any of them is null.
    """
    result = pc.greater_equal(comparable(left[-1]), comparable(right[-1]))
    for left_column, right_column in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        first, second = comparable(left_column), comparable(right_column)
        result = pc.or_(pc.greater(first, second), pc.and_(pc.equal(first, second), result))
    return result.fill_null(False)


class Ranks:
    """Ranks rows by several columns, and rows with equal values by their position.

    Args:
        columns: columns to rank by, the most significant one first.
        count: number of rows.

    Attributes:
        ranks: rank of each row, from 0; null if any of the columns is null.
    """

    def __init__(self, columns: Sequence[pa.Array], count: int) -> None:
        numbers = [_numbers(column) for column in columns]
        ranks = np.arange(count)
        self._order: NDArray[Any] | None = None
        sorted_already = not numbers or (
            len(numbers) == 1 and bool((numbers[0][1:] >= numbers[0][:-1]).all())
        )
        if not sorted_already:
            self._order = np.lexsort(tuple(reversed(numbers)))
            ranks = np.empty(count, np.int64)
            ranks[self._order] = np.arange(count)
        missing = np.zeros(count, np.bool_)
        for column in columns:
            missing |= ~binary.valid(column)
        self.ranks = pa.array(ranks, mask=missing if bool(missing.any()) else None)

    def rows(self, ranks: pa.Array) -> pa.Array:
        """Returns the positions of the rows with these ranks; null for null. The inverse of ``ranks``."""
        return ranks if self._order is None else pa.array(self._order).take(ranks)


def _numbers(column: pa.Array) -> NDArray[Any]:
    """Returns integers with the same order as the values; any integer for null."""
    if len(column) == 0:
        return np.zeros(0, np.int64)
    if binary.is_float(column.type):
        return binary.to_order(binary.raw(column, f"<f{column.type.bit_width // 8}"))
    size = binary.width(column.type)
    if size is None or pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type):
        return np.asarray(pc.rank(column, tiebreaker="dense"))
    return binary.raw(column, f"<i{size}")
