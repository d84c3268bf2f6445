"""Encodes Arrow columns as Protobuf messages, with native/protobuf.c."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.registry.codec import MOST_BYTES, Converted
from kafka_eos_source.registry.protobuf.inputs import Column, check_types, gather
from kafka_eos_source.registry.protobuf.kernel import ERROR, ProtobufKernel, tables, view
from kafka_eos_source.registry.protobuf.program import compile_tree
from kafka_eos_source.registry.protobuf.tree import Field, Kind, Message

_REQUIRED, _NULL_ELEMENT, _ONEOF, _UTF8 = 9, 12, 13, 6


class MessageEncoder:
    """Encodes values of one type as messages of one type (see `codec.Encoder`).

    Args:
        root: the tree of the message.
        values: the type of the values.
        kernel: the loaded library.

    Raises:
        InvalidSchemaError: if a column does not fit its field.
    """

    def __init__(self, root: Message, values: pa.DataType, kernel: ProtobufKernel) -> None:
        check_types(root, values)
        self._root = root
        self._values = values
        self._kernel = kernel
        self._program = compile_tree(root)
        self._tables = tables(self._program)

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values (see `codec.Encoder`)."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if values.type != self._values:
            raise TypeError(f"this encoder is for values of type {self._values}, not {values.type}")
        columns = gather(self._program, values)
        valid = (
            None
            if not values.null_count
            else values.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
        )
        table = np.array([_addresses(column) for column in columns], np.uint64).reshape(len(columns), 8)
        pointer = self._kernel.encode(
            ctypes.byref(self._tables),
            table.ctypes.data,
            0 if valid is None else valid.ctypes.data,
            len(values),
            prefix,
            len(prefix),
            most_bytes,
        )
        if not pointer:
            raise MemoryError("not enough memory to encode Protobuf messages")
        memory = _Memory(self._kernel, pointer)
        found = pointer.contents
        if found.no_memory:
            raise MemoryError("not enough memory to encode Protobuf messages")
        rows = found.rows
        errors = {
            row: self._message(columns, code, field, detail)
            for row, code, field, detail in view(
                found.errors.at, ERROR, found.errors.bytes // ERROR.itemsize
            ).tolist()
        }
        bits = np.packbits(view(found.validity.at, np.dtype(bool), rows), bitorder="little")
        offsets, data = (
            pa.foreign_buffer(part.at, part.bytes, memory) if part.at else pa.py_buffer(b"")
            for part in (found.offsets, found.data)
        )
        return Converted(
            pa.Array.from_buffers(pa.binary(), rows, [pa.py_buffer(bits), offsets, data]), errors
        )

    def _message(self, columns: list[Column], code: int, index: int, detail: int) -> str:
        name = f"message {self._root.descriptor.full_name}"
        field = self._program.by_index[index].field
        return f"{name}: field {field.path}: {self._reason(field, columns[index], code, detail)}"

    def _reason(self, field: Field, column: Column, code: int, detail: int) -> str:
        if code == _REQUIRED:
            return "the field is required, and the column is null"
        if code == _NULL_ELEMENT:
            return "Protobuf has no nulls inside arrays and maps"
        if code == _ONEOF:
            other = self._program.by_index[detail].field.name
            return f"{other} is set, too, and only one member of the oneof {field.oneof} can be"
        if code == _UTF8:
            return "the string is not UTF-8"
        if field.kind in (Kind.TIMESTAMP, Kind.DURATION):
            stored = None if column.values is None else int(column.values[detail])
            return f"{stored} microseconds are outside of what a {field.kind.name.capitalize()} can hold"
        value = None if column.original is None else column.original[detail].as_py()
        if field.kind is Kind.ENUM:
            return f"{value!r} is not a value of the enum {field.descriptor.enum_type.full_name}"
        if field.kind is Kind.RAW:
            return f"{value!r} is not JSON for a {field.descriptor.message_type.full_name}"
        return f"{value} is negative or too large for {field.kind.name.lower()}"


class _Memory:
    """Owns a result, and frees it when the last array that refers to it is gone."""

    def __init__(self, kernel: ProtobufKernel, pointer: Any) -> None:
        self._kernel = kernel
        self._pointer = pointer

    def __del__(self) -> None:
        self._kernel.free_encoded(self._pointer)


def _addresses(column: Column) -> list[int]:
    parts = (
        column.validity,
        column.element_validity,
        column.unfit,
        column.values,
        column.offsets,
        column.entry_offsets,
        column.data,
    )
    return [0 if part is None else part.ctypes.data for part in parts] + [int(column.missing)]
