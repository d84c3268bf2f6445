"""Encodes Arrow columns and rows as bytes with numpy, for many rows at once and without a loop.

The arrays of bytes are `pa.BinaryArray`, whose offsets have 32 bits; so one array holds at most 2 GiB of
values.

A value of a fixed-width column is a *cell*, whose bytes sort like the values:

========================  =====  ===========================================================================
type                      bytes  encoding
========================  =====  ===========================================================================
bool                      1      0 or 1
int8 to int64             1-8    big endian, sign bit flipped
date32, timestamp, time   4, 8   like the integer that Arrow stores
float, double             4, 8   big endian; all bits flipped if negative, otherwise the sign bit
decimal128                16     big endian, sign bit flipped
========================  =====  ===========================================================================

A row is first a cell for each column, then the bodies of variable length::

    cell 1 │ cell 2 │ … │ body 1 │ body 2 │ …

    fixed-width column       cell: [0 for null, 1 otherwise (1 byte)] │ value as above, zeros for null
    variable-length column   cell: length of the body (4, big endian), 0xffffffff for null · body: the bytes
    array                    as variable length · body: number of elements (4, big endian) │ cells │ bodies

The cells of a column are at the same position in all rows, so a column is a slice of the matrix of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_large_binary)


def to_binary(array: pa.Array) -> pa.BinaryArray:
    """Returns strings or binary values of any Arrow type as binary, without copying plain strings."""
    if pa.types.is_binary(array.type):
        return array
    if any(is_type(array.type) for is_type in _STRINGS):
        return array.cast(pa.binary())
    # Not every version of Arrow can cast views and dictionaries directly to binary.
    plain = pa.string() if "string" in str(array.type) else pa.binary()
    return array.cast(plain).cast(pa.binary())


def of_type(array: pa.BinaryArray, type_: pa.DataType) -> pa.Array:
    """Returns the bytes as a string or binary type. Keeps invalid UTF-8, which the input may contain."""
    if pa.types.is_string(type_):
        return pa.Array.from_buffers(type_, len(array), array.buffers(), offset=array.offset)
    if pa.types.is_large_string(type_):
        large = array.cast(pa.large_binary())
        return pa.Array.from_buffers(type_, len(large), large.buffers(), offset=large.offset)
    return array.cast(type_)


def offsets(array: pa.BinaryArray) -> NDArray[np.int32]:
    """Returns where each value begins in `data`, and where the last one ends: ``len(array) + 1`` numbers."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def data(array: pa.BinaryArray) -> Bytes:
    """Returns the bytes of all values, which `offsets` refers to."""
    buffer = array.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer else np.zeros(0, np.uint8)


def valid(array: pa.Array) -> NDArray[np.bool_]:
    """Returns True for each value that is not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def bitmap(is_valid: NDArray[np.bool_]) -> pa.Buffer | None:
    """Returns Arrow's validity bitmap; None if no value is null."""
    return None if bool(is_valid.all()) else pa.py_buffer(np.packbits(is_valid, bitorder="little"))


def from_parts(
    begins: NDArray[Any], values: Bytes, is_valid: NDArray[np.bool_] | None = None
) -> pa.BinaryArray:
    """Returns the array whose ``i``-th value is ``values[begins[i]:begins[i + 1]]``."""
    nulls = None if is_valid is None else bitmap(is_valid)
    buffers = [nulls, pa.py_buffer(np.ascontiguousarray(begins, np.int32)), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(begins) - 1, buffers)


def from_matrix(rows: Bytes) -> pa.BinaryArray:
    """Returns an array with one value for each row of a byte matrix, without copying.

    Raises:
        OverflowError: if the matrix is larger than 2 GiB.
    """
    count, width = rows.shape
    if count * width > np.iinfo(np.int32).max:
        raise OverflowError(f"{count} values of {width} bytes exceed the 2 GiB that one Arrow array holds")
    return from_parts(np.arange(count + 1, dtype=np.int64) * width, rows.reshape(-1))


def head(array: pa.BinaryArray, width: int) -> Bytes:
    """Returns the first ``width`` bytes of each value as a matrix. No value may be null.

    Raises:
        ValueError: if a value is shorter.
    """
    begins = offsets(array)
    flat = data(array)[begins[0] : begins[-1]]
    count = len(array)
    if flat.size == count * width and bool((np.diff(begins) == width).all()):
        return flat.reshape(count, width)
    if count and int(np.diff(begins).min()) < width:
        raise ValueError(f"a value has {int(np.diff(begins).min())} bytes, expected {width} or more")
    starts = begins[:-1].astype(np.int64)
    cut = substrings(starts, starts + width, data(array))
    return data(cut)[: count * width].reshape(count, width)


def join(*parts: pa.BinaryArray | bytes) -> pa.BinaryArray:
    """Concatenates the parts of each row. A null counts as empty; ``bytes`` are the same in each row."""
    if len(parts) == 1 and not isinstance(parts[0], bytes) and parts[0].null_count == 0:
        return parts[0]
    scalars = [pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.binary()), null_handling="replace")


def substrings(starts: Ints, ends: Ints, values: Bytes) -> pa.BinaryArray:
    """Returns, for each ``i``, the bytes of ``values`` from ``starts[i]`` to ``ends[i]`` (exclusive).

    Each range must begin at or after the end of the range before it.
    """
    count = len(starts)
    # An array with the ranges and the gaps between them; every second value is a range.
    edges = np.empty(max(2 * count, 1), np.int32)
    edges[0::2] = starts if count else 0
    edges[1::2] = ends
    return from_parts(edges, values).take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int64)))


def concat(arrays: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    """Returns one array with the values of all arrays; an empty one of ``type_`` if there are none."""
    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], type_)


# ---------------------------------------- cells

_VARIABLE = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)
_FLOATS = (pa.types.is_float32, pa.types.is_float64)
_INTEGERS = (
    pa.types.is_signed_integer,
    pa.types.is_date32,
    pa.types.is_timestamp,
    pa.types.is_time,
    pa.types.is_duration,
)


def is_variable(type_: pa.DataType) -> bool:
    """Whether values of the type vary in length: strings and binary."""
    return any(is_type(type_) for is_type in _VARIABLE)


def is_float(type_: pa.DataType) -> bool:
    """Whether the type is float or double."""
    return any(is_type(type_) for is_type in _FLOATS)


def is_list(type_: pa.DataType) -> bool:
    """Whether the type is an array of values that a cell can hold."""
    return bool(pa.types.is_list(type_)) and (
        is_variable(type_.value_type) or width(type_.value_type) is not None
    )


def check_cells(schema: pa.Schema) -> None:
    """Checks that a cell can hold each value of some columns, so that none is an array.

    Raises:
        InvalidSchemaError: if a column has another type.
    """
    for field in schema:
        if width(field.type) is None and not is_variable(field.type):
            raise unsupported(field)


def unsupported(field: pa.Field) -> InvalidSchemaError:
    """Returns the error for a column of a type that state cannot hold."""
    return InvalidSchemaError(
        f"column {field.name!r} is {field.type}, which state cannot hold.",
        fix="use bool, int8 to int64, float, double, decimal (38 digits), string, binary, date "
        "or timestamp; replace a struct by its fields.",
    )


def width(type_: pa.DataType) -> int | None:
    """Returns the bytes per value of this type; None if the width varies or the type is not supported."""
    if pa.types.is_boolean(type_):
        return 1
    if pa.types.is_decimal128(type_):
        return 16
    if is_float(type_) or any(is_type(type_) for is_type in _INTEGERS):
        return int(type_.bit_width) // 8
    return None


def raw(array: pa.Array, dtype: Any) -> NDArray[Any]:
    """Returns the values of a fixed-width column as a numpy array, with zeros for nulls."""
    if len(array) == 0:
        return np.zeros(0, dtype)
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * np.dtype(dtype).itemsize)
    return np.where(valid(array), values, values.dtype.type(0)) if array.null_count else values


def pack(array: pa.Array, *, normalize: bool = False) -> Bytes:
    """Returns the column as bytes, with one row per value and zeros for nulls.

    Args:
        array: column of a type that has a `width`.
        normalize: whether to encode -0.0 as 0.0 and every NaN as the same value, as Spark does for grouping.
    """
    type_, count = array.type, len(array)
    size = width(type_)
    assert size is not None, type_
    if count == 0:
        return np.zeros((0, size), np.uint8)
    if pa.types.is_boolean(type_):
        return raw(array.cast(pa.uint8()), np.uint8).reshape(count, 1)
    if pa.types.is_decimal128(type_):
        words = np.frombuffer(array.buffers()[1], "<u8", 2 * count, array.offset * 16).reshape(count, 2)[
            :, ::-1
        ]
        big = words.astype(">u8")
        big[:, 0] ^= np.uint64(1 << 63)
    elif is_float(type_):
        big = to_order(raw(array, f"<f{size}"), normalize=normalize).astype(f">u{size}")
    else:
        sign = np.dtype(f"u{size}").type(1 << (8 * size - 1))
        big = (raw(array, f"<u{size}") ^ sign).astype(f">u{size}")
    packed = big.view(np.uint8).reshape(count, size)
    if array.null_count:
        packed[~valid(array)] = 0
    return packed


def unpack(packed: Bytes, type_: pa.DataType, is_valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Returns the column that `pack` encoded. Rows that are not valid become null."""
    count, size = packed.shape
    nulls = None if is_valid is None else bitmap(is_valid)
    if pa.types.is_boolean(type_):
        bits = pa.py_buffer(np.packbits(packed[:, 0] != 0, bitorder="little"))
        return pa.Array.from_buffers(type_, count, [nulls, bits])
    packed = np.ascontiguousarray(packed)
    values: NDArray[Any]
    if pa.types.is_decimal128(type_):
        values = packed.reshape(-1).view(">u8").reshape(count, 2)[:, ::-1].astype("<u8")
        values[:, 1] ^= np.uint64(1 << 63)
    else:
        big = packed.reshape(-1).view(f">u{size}").astype(f"<u{size}")
        sign = big.dtype.type(1 << (8 * size - 1))
        values = from_order(big) if is_float(type_) else big ^ sign
    return pa.Array.from_buffers(type_, count, [nulls, pa.py_buffer(np.ascontiguousarray(values))])


def to_order(values: NDArray[Any], *, normalize: bool = False) -> NDArray[Any]:
    """Returns floats as unsigned integers in the same order. All NaN are equal and largest, as in Spark."""
    size = values.dtype.itemsize
    nan = np.isnan(values)
    values = values + values.dtype.type(0) if normalize else values  # -0.0 + 0.0 = 0.0
    if bool(nan.any()):
        values = np.where(nan, values.dtype.type("nan"), values)
    bits = values.view(f"<u{size}")
    sign = bits.dtype.type(1 << (8 * size - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_order(bits: NDArray[Any]) -> NDArray[Any]:
    """Returns the floats that `to_order` encoded."""
    size = bits.dtype.itemsize
    sign = bits.dtype.type(1 << (8 * size - 1))
    return np.where(bits & sign, bits ^ sign, ~bits).view(f"<f{size}")


def zero(type_: pa.DataType) -> pa.Array:
    """Returns an array with one zero of a fixed-width type, such as false or the epoch."""
    return pa.Array.from_buffers(type_, 1, [None, pa.py_buffer(bytes(16))])


# ---------------------------------------- rows

_NULL = 0xFFFFFFFF


@dataclass(frozen=True)
class _Cell:
    """The cell of a column: its position in the row, and its format.

    Attributes:
        type: type of the column.
        start: first byte of the cell.
        end: end of the cell (exclusive).
        variable: whether the column has variable length.
        nullable: whether a fixed-width cell begins with a null byte.
        elements: codec of the elements of an array; None for another type.
    """

    type: pa.DataType
    start: int
    end: int
    variable: bool
    nullable: bool
    elements: RowCodec | None


class RowCodec:
    """Encodes rows of a schema as bytes, and decodes them. Decoding requires only the schema.

    Args:
        schema: columns of type bool, int8 to int64, float, double, decimal, string, binary, date, time or
            timestamp, or arrays of them without null elements. Columns that are not nullable have no null
            byte.
        normalize: whether to encode -0.0 as 0.0 and every NaN as the same value, as Spark does for grouping.
        lead: bytes with which every row begins, usually a version.

    Raises:
        InvalidSchemaError: if a column has another type.
    """

    def __init__(self, schema: pa.Schema, *, normalize: bool = False, lead: bytes = b"") -> None:
        self.schema = schema
        self._normalize = normalize
        self._lead = lead
        self._cells: list[_Cell] = []
        at = len(lead)
        for field in schema:
            elements = RowCodec(_elements(field)) if is_list(field.type) else None
            variable = is_variable(field.type) or elements is not None
            size = 4 if variable else width(field.type)
            if size is None:
                raise unsupported(field)
            end = at + size + (field.nullable and not variable)
            self._cells.append(_Cell(field.type, at, end, variable, field.nullable, elements))
            at = end
        #: Total width of the cells of a row, in bytes.
        self.width = at
        self.variable = any(cell.variable for cell in self._cells)
        #: The cells of a row that is null in every column (zero in a column that is not nullable).
        self.null_row = lead + b"".join(map(_null_cell, self._cells))

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Returns one value for each row.

        Raises:
            InvalidSchemaError: if a column that is declared not nullable contains a null.
        """
        head, bodies = self.split(columns)
        packed = from_matrix(head)
        return join(packed, *bodies) if bodies else packed

    def split(self, columns: Sequence[pa.Array]) -> tuple[Bytes, list[pa.BinaryArray]]:
        """Returns the cells of all rows, and the bodies of each variable-length column.

        Raises:
            InvalidSchemaError: if a column that is declared not nullable contains a null.
        """
        head = np.empty((len(columns[0]), self.width), np.uint8)
        head[:, : len(self._lead)] = np.frombuffer(self._lead, np.uint8)
        bodies: list[pa.BinaryArray] = []
        for cell, field, column in zip(self._cells, self.schema, columns, strict=True):
            if column.null_count and not cell.nullable:
                raise InvalidSchemaError(
                    f"there is a null in column {field.name!r}, which is declared not nullable."
                )
            if cell.variable:
                body = to_binary(column) if cell.elements is None else _list_bodies(column, cell.elements)
                bodies.append(body)
                lengths = np.diff(offsets(body)).astype(np.int64)
                if column.null_count:
                    lengths[~valid(column)] = _NULL
                head[:, cell.start : cell.end] = lengths.astype(">u4").view(np.uint8).reshape(-1, 4)
            else:
                if cell.nullable:
                    head[:, cell.start] = valid(column)
                head[:, cell.start + cell.nullable : cell.end] = pack(column, normalize=self._normalize)
        return head, bodies

    def decode(self, rows: pa.BinaryArray) -> list[pa.Array]:
        """Returns the columns that `encode` encoded. A null value yields `null_row`.

        Raises:
            ValueError: if this codec did not encode a value.
        """
        if rows.null_count:
            rows = rows.fill_null(pa.scalar(self.null_row, pa.binary()))
        begins = offsets(rows).astype(np.int64)
        columns, ends = self.cut(head(rows, self.width), rows, begins[:-1] + self.width)
        if not bool((ends == begins[1:]).all()):
            raise ValueError(f"a value is longer or shorter than its columns {self.schema.names}")
        return columns

    def cut(self, head: Bytes, bodies: pa.BinaryArray, starts: Ints) -> tuple[list[pa.Array], Ints]:
        """Decodes the columns from the cells and bodies of all rows.

        Args:
            head: cells of all rows.
            bodies: array whose data contains the bodies.
            starts: where the bodies of each row begin in that data.

        Returns:
            The columns, and where the bodies of each row end.

        Raises:
            ValueError: if this codec did not encode a value.
        """
        if not bool((head[:, : len(self._lead)] == np.frombuffer(self._lead, np.uint8)).all()):
            raise ValueError(f"a value does not begin with {self._lead!r}")
        columns = []
        for cell in self._cells:
            if not cell.variable:
                is_valid = head[:, cell.start] != 0 if cell.nullable else None
                columns.append(unpack(head[:, cell.start + cell.nullable : cell.end], cell.type, is_valid))
                continue
            is_valid, lengths = _lengths(head, cell)
            body = _variable(bodies, starts, starts + lengths, is_valid)
            columns.append(of_type(body, cell.type) if cell.elements is None else _lists(body, cell))
            starts = starts + lengths
        return columns, starts

    def encode_lists(self, lead: Bytes, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Encodes several rows as one value: what leads, the cells of all its rows, and then their bodies.

        Args:
            lead: bytes with which each value begins, as a matrix.
            counts: number of rows of each value.
            columns: columns of all rows, value after value.
        """
        cells, bodies = self.split(columns)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        parts = [from_matrix(lead), from_parts(firsts * self.width, cells.reshape(-1))]
        if bodies:
            whole = join(*bodies)
            parts.append(from_parts(offsets(whole)[firsts], data(whole)))
        return join(*parts)

    def decode_lists(self, values: pa.BinaryArray, lead: int, counts: Ints) -> list[pa.Array]:
        """Decodes the columns of all rows of values that `encode_lists` encoded.

        Args:
            values: the values, none of which is null.
            lead: number of bytes with which each value begins.
            counts: number of rows of each value.

        Raises:
            ValueError: if a value is damaged.
        """
        begins = offsets(values).astype(np.int64)
        ends_of_cells = begins[:-1] + lead + counts * self.width
        if bool((ends_of_cells > begins[1:]).any()):
            raise ValueError("an encoded list is shorter than its rows")
        firsts = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        starts = np.repeat(begins[:-1] + lead, counts) + number * self.width
        cells = head(substrings(starts, starts + self.width, data(values)), self.width)
        lengths = self.body_lengths(cells)
        before = np.cumsum(lengths) - lengths
        of_value = np.concatenate([before, [lengths.sum()]])[firsts]
        bodies = np.repeat(ends_of_cells - of_value, counts) + before
        totals = np.add.reduceat(np.append(lengths, 0), firsts) * (counts > 0) if len(counts) else counts
        if not bool((ends_of_cells + totals == begins[1:]).all()):
            raise ValueError("an encoded list is longer or shorter than its rows")
        columns, _ = self.cut(cells, values, bodies)
        return columns

    def body_lengths(self, head: Bytes) -> Ints:
        """Returns the total length of the bodies of each row, given the cells of all rows."""
        total = np.zeros(len(head), np.int64)
        for cell in self._cells:
            if cell.variable:
                total += _lengths(head, cell)[1]
        return total


def _null_cell(cell: _Cell) -> bytes:
    """Returns the cell of a null, or of zero if the column is not nullable."""
    if cell.variable:
        return b"\xff" * 4
    if cell.nullable:
        return bytes(cell.end - cell.start)
    return pack(zero(cell.type)).tobytes()


def _lengths(head: Bytes, cell: _Cell) -> tuple[NDArray[np.bool_], Ints]:
    packed = np.ascontiguousarray(head[:, cell.start : cell.end])
    lengths = packed.reshape(-1).view(">u4").astype(np.int64)
    is_valid = lengths != _NULL
    return is_valid, np.where(is_valid, lengths, 0)


def _variable(rows: pa.BinaryArray, starts: Ints, ends: Ints, is_valid: NDArray[np.bool_]) -> pa.BinaryArray:
    if len(ends) and int(ends.max()) > data(rows).size:
        raise ValueError("a value is shorter than its columns")
    column = substrings(starts, ends, data(rows))
    if not bool(is_valid.all()):
        parts = [bitmap(is_valid), *column.buffers()[1:]]
        column = pa.Array.from_buffers(pa.binary(), len(column), parts)
    return column


# ---------------------------------------- arrays, and other lists of rows

_COUNT_BYTES = 4


def _elements(field: pa.Field) -> pa.Schema:
    name = f"elements of {field.name}"
    return pa.schema([pa.field(name, field.type.value_type, nullable=False)])


def _list_bodies(column: pa.ListArray, elements: RowCodec) -> pa.BinaryArray:
    """Returns the body of each array; an empty one for null."""
    counts = list_lengths(column)
    lead = counts.astype(">u4").view(np.uint8).reshape(-1, _COUNT_BYTES)
    bodies = elements.encode_lists(lead, counts, [column.flatten()])
    if not column.null_count:
        return bodies
    return pa.Array.from_buffers(pa.binary(), len(bodies), [bitmap(valid(column)), *bodies.buffers()[1:]])


def _lists(bodies: pa.BinaryArray, cell: _Cell) -> pa.ListArray:
    """Returns the arrays with these bodies.

    Raises:
        ValueError: if a body is damaged.
    """
    assert cell.elements is not None
    present = valid(bodies)
    counts = np.zeros(len(bodies), np.int64)
    bodies = bodies.drop_null()
    lead = np.ascontiguousarray(head(bodies, _COUNT_BYTES))
    own = lead.reshape(-1).view(">u4").astype(np.int64)
    counts[present] = own
    (values,) = cell.elements.decode_lists(bodies, _COUNT_BYTES, own)
    return lists_of(values, counts, cell.type, present)


def list_lengths(column: pa.ListArray) -> Ints:
    """Returns the number of elements of each array; 0 for null."""
    return np.asarray(pc.list_value_length(column).fill_null(0), np.int64)


def lists_of(
    values: pa.Array, counts: Ints, type_: pa.DataType, is_valid: NDArray[np.bool_] | None = None
) -> pa.ListArray:
    """Returns arrays with these numbers of elements, which follow one another in ``values``."""
    begins = np.concatenate([[0], np.cumsum(counts)])
    if begins[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{begins[-1]} elements exceed the 2^31 that one Arrow array of lists holds")
    nulls = None if is_valid is None else bitmap(is_valid)
    parts = [nulls, pa.py_buffer(begins.astype(np.int32))]
    return pa.Array.from_buffers(type_, len(counts), parts, children=[values])
