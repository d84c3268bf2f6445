"""Encodes rows as bytes, many at a time: first a fixed-width cell per column, then variable-length bodies.

::

    cell 1 │ cell 2 │ … │ body 1 │ body 2 │ …

    fixed-width column       cell: [0 for null, 1 otherwise (1 byte)] │ value as in `cells`, zeros for null
    variable-length column   cell: length of the body (4, big endian), 0xffffffff for null · body: the bytes

The cells of a column are at the same position in all rows, so a column is a slice of the matrix of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Bytes, Ints

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
    """

    type: pa.DataType
    start: int
    end: int
    variable: bool
    nullable: bool


class RowCodec:
    """Encodes rows of a schema as bytes, and decodes them. Decoding requires only the schema.

    Args:
        schema: columns of type bool, int8 to int64, float, double, decimal, string, binary, date, time or
            timestamp. Columns that are not nullable have no null byte.
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
            variable = cells.is_variable(field.type)
            size = 4 if variable else cells.width(field.type)
            if size is None:
                raise InvalidSchemaError(
                    f"column {field.name!r} is {field.type}, which state cannot hold.",
                    fix="use bool, int8 to int64, float, double, decimal (38 digits), string, binary, date "
                    "or timestamp; replace a struct by its fields.",
                )
            end = at + size + (field.nullable and not variable)
            self._cells.append(_Cell(field.type, at, end, variable, field.nullable))
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
        packed = binary.from_matrix(head)
        return binary.join(packed, *bodies) if bodies else packed

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
                body = binary.to_binary(column)
                bodies.append(body)
                lengths = np.diff(binary.offsets(body)).astype(np.int64)
                if column.null_count:
                    lengths[~binary.valid(column)] = _NULL
                head[:, cell.start : cell.end] = lengths.astype(">u4").view(np.uint8).reshape(-1, 4)
            else:
                if cell.nullable:
                    head[:, cell.start] = binary.valid(column)
                head[:, cell.start + cell.nullable : cell.end] = cells.pack(column, normalize=self._normalize)
        return head, bodies

    def decode(self, rows: pa.BinaryArray) -> list[pa.Array]:
        """Returns the columns that `encode` encoded. A null value yields `null_row`.

        Raises:
            ValueError: if this codec did not encode a value.
        """
        if rows.null_count:
            rows = rows.fill_null(pa.scalar(self.null_row, pa.binary()))
        begins = binary.offsets(rows).astype(np.int64)
        head = binary.head(rows, self.width)
        columns, ends = self.cut(head, rows, begins[:-1] + self.width)
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
                columns.append(
                    cells.unpack(head[:, cell.start + cell.nullable : cell.end], cell.type, is_valid)
                )
                continue
            is_valid, lengths = _lengths(head, cell)
            columns.append(_variable(bodies, starts, starts + lengths, is_valid, cell.type))
            starts = starts + lengths
        return columns, starts

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
    return cells.pack(cells.zero(cell.type)).tobytes()


def _lengths(head: Bytes, cell: _Cell) -> tuple[NDArray[np.bool_], Ints]:
    packed = np.ascontiguousarray(head[:, cell.start : cell.end])
    lengths = packed.reshape(-1).view(">u4").astype(np.int64)
    is_valid = lengths != _NULL
    return is_valid, np.where(is_valid, lengths, 0)


def _variable(
    rows: pa.BinaryArray, starts: Ints, ends: Ints, is_valid: NDArray[np.bool_], type_: pa.DataType
) -> pa.Array:
    if len(ends) and int(ends.max()) > binary.data(rows).size:
        raise ValueError("a value is shorter than its columns")
    column = binary.substrings(starts, ends, binary.data(rows))
    if not bool(is_valid.all()):
        parts = [binary.bitmap(is_valid), *column.buffers()[1:]]
        column = pa.Array.from_buffers(pa.binary(), len(column), parts)
    return binary.of_type(column, type_)
