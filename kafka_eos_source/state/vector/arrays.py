"""Computations on Arrow columns: batches of columns, grouping, exact sums, and the order of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError, StateError
from kafka_eos_source.state.encoding import binary

#: Rows and bytes that are processed at once. Larger chunks need fewer passes, smaller ones less memory.
CHUNK_ROWS = 1 << 19
CHUNK_BYTES = 64 << 20

#: Largest number of rows in an output batch. Larger batches make Spark grow its buffers.
OUTPUT_ROWS = 1 << 16


def chunks(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, most_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the columns of ``schema`` in batches of about ``most_rows`` rows; never an empty batch.

    Args:
        batches: the rows.
        schema: the columns.
        most_rows: None for `CHUNK_ROWS`.

    Raises:
        InvalidSchemaError: if a column is missing, or a value cannot be cast to the column's type.
    """
    waiting: list[pa.RecordBatch] = []
    most_rows = most_rows or CHUNK_ROWS
    count = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = conform(batch, schema)
        waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= most_rows or size >= CHUNK_BYTES:
            yield concat_batches(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield concat_batches(waiting)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Selects the columns of ``schema`` in its order and casts them to its types.

    Raises:
        InvalidSchemaError: if a column is missing, or a value cannot be cast to the column's type.
    """
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            raise InvalidSchemaError(
                f"column {field.name!r} is missing from the rows, which have the columns "
                f"{', '.join(batch.schema.names)}.",
                fix="declare the columns that the rows have.",
            )
        column = batch.column(at)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidSchemaError(
                    f"column {field.name!r} has type {column.type}; expected {field.type}: {error}.",
                    fix=f"declare {field.name!r} with the type that the rows have.",
                ) from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenates one or more batches of the same schema into one."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def output_batches(schema: pa.Schema, columns: list[pa.Array]) -> Iterator[pa.RecordBatch]:
    """Yields the columns as batches of at most `OUTPUT_ROWS` rows; nothing if there are no rows."""
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for start in range(0, batch.num_rows, OUTPUT_ROWS):
        yield batch.slice(start, OUTPUT_ROWS)


# -- grouping

#: Option of an Arrow aggregation whose result is null for a group that contains only nulls.
NO_NULLS_ONLY = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
#: Option of an Arrow aggregation whose result is zero for a group that contains only nulls.
ZERO_FOR_NULLS = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)

#: A column (None = the rows themselves), the name of an Arrow aggregation, and its options.
Request = tuple[Any, str, Any]


@dataclass(frozen=True)
class Plan:
    """Arrow aggregations that one accumulator requests, and how it converts their results.

    Attributes:
        requests: the requested aggregations.
        collect: converts their results, one array each, to the columns that the accumulator needs.
    """

    requests: Sequence[Request]
    collect: Callable[[list[pa.Array]], list[pa.Array]]


def group(keys: Sequence[pa.Array], plans: Sequence[Plan]) -> tuple[list[pa.Array], list[list[pa.Array]]]:
    """Groups rows by key and executes the plans.

    As in Spark, -0.0 and 0.0 are one group, and all NaN values are one group.

    Args:
        keys: columns that identify the group of each row.
        plans: what to compute for each group.

    Returns:
        Columns of the distinct keys, in the order in which they first appear; and for each plan the columns
        that it collected.
    """
    columns = {f"k{index}": _normalized(key) for index, key in enumerate(keys)}
    names = list(columns)
    requests: list[tuple[Any, str, Any]] = []
    results: list[str] = []
    for plan in plans:
        for column, function, options in plan.requests:
            name = f"v{len(requests)}"
            if column is None:
                requests.append(([], function, options))
                results.append(function)
            else:
                columns[name] = column
                requests.append((name, function, options))
                results.append(f"{name}_{function}")
    if not requests:
        requests.append(([], "count_all", None))
    table = pa.table(columns)
    # With one thread the groups keep the order of the rows, and a Spark task has only one core anyway.
    grouped = table.group_by(names, use_threads=False).aggregate(_distinct(requests))
    arrays = iter([_combined(grouped.column(result)) for result in results])
    collected = [plan.collect([next(arrays) for _ in plan.requests]) for plan in plans]
    return [_combined(grouped.column(name)) for name in names], collected


def _distinct(requests: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """Removes repeated requests for the rows themselves, whose results would have the same name."""
    return list({(str(request[0]), request[1]): request for request in requests}.values())


def _normalized(key: pa.Array) -> pa.Array:
    return (
        binary.unpack(binary.pack(key, normalize=True), key.type, binary.valid(key))
        if binary.is_float(key.type)
        else key
    )


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else binary.concat(column.chunks, column.type)


# -- exact sums: an error where Arrow's own sums would wrap around

_HALF = np.int64(32)
_LOW = np.int64(0xFFFFFFFF)

#: Digits that a mean of decimals adds to the precision and to the scale of its column, as Spark's `Average`.
_MEAN_DIGITS = 4


def sum_type(type_: pa.DataType) -> pa.DataType | None:
    """Returns Spark's type for the sum of a column of this type; None = the type cannot be summed."""
    if pa.types.is_signed_integer(type_):
        return pa.int64()
    if binary.is_float(type_):
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
    high = pa.array(binary.raw(column, np.int64) >> _HALF, mask=~binary.valid(column))
    low = pa.array(binary.raw(column, np.int64) & _LOW, mask=~binary.valid(column))

    def join_halves(sums: list[pa.Array]) -> list[pa.Array]:
        highs, lows = (binary.raw(half, np.int64) for half in sums)
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
        return _with_nulls(binary.raw(left, np.float64) + binary.raw(right, np.float64), is_valid, type_)
    first, second = binary.raw(left, np.int64), binary.raw(right, np.int64)
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
        fix=f"cast {name!r} to a decimal of up to 28 digits before the aggregation, or use avg.",
    )


# -- order: columns are compared as Spark does


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
