"""Columns as values that Arrow and numpy compare as Spark does, and the rank of rows by several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.state.encoding import binary, cells


def comparable(column: pa.Array) -> pa.Array:
    """The column with floats as integers of their order; `restored` undoes it.

    NaN is then the largest, and -0.0 less than 0.0: what is found depends on no order of rows.
    """
    if not cells.is_float(column.type):
        return column
    bits = cells.to_order(cells.raw(column, f"<f{column.type.bit_width // 8}"))
    nulls = binary.bitmap(binary.valid(column))
    return pa.Array.from_buffers(pa.from_numpy_dtype(bits.dtype), len(bits), [nulls, pa.py_buffer(bits)])


def restored(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """The column of `comparable`."""
    if not cells.is_float(type_):
        return column
    floats = cells.from_order(cells.raw(column, f"<u{type_.bit_width // 8}"))
    nulls = binary.bitmap(binary.valid(column))
    return pa.Array.from_buffers(type_, len(floats), [nulls, pa.py_buffer(floats)])


def less(left: pa.Array, right: pa.Array) -> pa.Array:
    """Whether ``left`` is; false where one of them is null."""
    return pc.less(comparable(left), comparable(right)).fill_null(False)


def not_before(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> pa.Array:
    """Whether ``left`` is as large as ``right`` or larger, the first columns first. No nulls, else false."""
    found = pc.greater_equal(comparable(left[-1]), comparable(right[-1]))
    for one, other in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        one, other = comparable(one), comparable(other)
        found = pc.or_(pc.greater(one, other), pc.and_(pc.equal(one, other), found))
    return found.fill_null(False)


class Ranks:
    """Rows by several columns, then by the place they stand at.

    Attributes:
        ranks: of each row, from 0; null where one of the columns is null. `rows` goes back.
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
        """Where the rows of these ranks stand; null for null."""
        return ranks if self._order is None else pa.array(self._order).take(ranks)


def _numbers(column: pa.Array) -> NDArray[Any]:
    """Integers in the order of the values; anything for null."""
    if len(column) == 0:
        return np.zeros(0, np.int64)
    if cells.is_float(column.type):
        return cells.to_order(cells.raw(column, f"<f{column.type.bit_width // 8}"))
    size = cells.width(column.type)
    if size is None or pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type):
        return np.asarray(pc.rank(column, tiebreaker="dense"))
    return cells.raw(column, f"<i{size}")
