"""Encodes Arrow columns as Protobuf messages with native/protobuf.c.

The types of the columns are checked once. Each batch is then brought to the layout that the library reads.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.native.buffers import Memory
from kafka_eos_source.registry.codec import decoded_type, is_list
from kafka_eos_source.registry.protobuf_program import (
    ERROR,
    WIDTHS,
    Program,
    ProtobufKernel,
    Slot,
    compile_tree,
    tables,
    view,
)
from kafka_eos_source.registry.protobuf_schema import describe
from kafka_eos_source.registry.protobuf_tree import EMPTY_FIELD, Field, Kind, Message

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
        content = "a batch of Protobuf messages"
        memory = Memory(pointer, self._kernel.free_encoded, content)
        found = memory.block
        if found.no_memory:
            raise MemoryError(f"not enough memory for {content}")
        rows = found.rows
        errors = {
            row: self._message(columns, code, field, detail)
            for row, code, field, detail in view(
                found.errors.at, ERROR, found.errors.bytes // ERROR.itemsize
            ).tolist()
        }
        bits = np.packbits(view(found.validity.at, np.dtype(bool), rows), bitorder="little")
        buffers = [pa.py_buffer(bits), memory.buffer(found.offsets), memory.buffer(found.data)]
        return Converted(pa.Array.from_buffers(pa.binary(), rows, buffers), errors)

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


# -- columns as the C library reads them ---------------------------------------------------------

_types = pa.types
_INT32 = (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16())
_INT64 = (*_INT32, pa.int64(), pa.uint32())
_STRINGS = tuple(each() for each in (pa.string, pa.large_string, getattr(pa, "string_view", pa.string)))
_BINARIES = tuple(each() for each in (pa.binary, pa.large_binary, getattr(pa, "binary_view", pa.binary)))
_TIMESTAMP_MICROS = (-62135596800 * 10**6, 253402300799 * 10**6 + 999999)
_DURATION_MICROS = (-315576000000 * 10**6 - 999999, 315576000000 * 10**6 + 999999)


@dataclass
class Column:
    """The column of a field in the layout of ``input_t`` in native/protobuf.c.

    Attributes:
        original: the values, or elements, of the column, for the text of errors.
    """

    missing: bool = True
    validity: npt.NDArray[np.uint8] | None = None
    element_validity: npt.NDArray[np.uint8] | None = None
    unfit: npt.NDArray[np.uint8] | None = None
    values: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[np.int32] | None = None
    entry_offsets: npt.NDArray[np.int32] | None = None
    data: npt.NDArray[np.uint8] | None = None
    original: pa.Array | None = None


def check_types(root: Message, values: pa.DataType) -> None:
    """Checks that values of this type can be encoded as the message.

    Raises:
        InvalidSchemaError: naming the column, its type, the type of the field, and what to do.
    """
    if not _types.is_struct(values):
        raise InvalidSchemaError(
            f"the column has the type {values}, but message {root.descriptor.full_name} needs a struct",
            fix="put the columns of the message into one column with struct(…)",
        )
    _check_message(root, values, "")


def gather(program: Program, values: pa.StructArray) -> list[Column]:
    """Returns the columns of all fields, by their index in the program."""
    columns = [Column() for _ in program.by_index]
    _gather_message(program.slots, values, columns)
    return columns


# -- types ---------------------------------------------------------------------------------------


def _check_message(message: Message, struct: pa.StructType, path: str) -> None:
    fields = {field.name: field for field in message.fields}
    name = message.descriptor.full_name
    for column in struct:
        inside = f"{path}.{column.name}".lstrip(".")
        if column.name in fields:
            _check_field(fields[column.name], column.type, inside)
        elif fields or column.name != EMPTY_FIELD:
            raise InvalidSchemaError(
                f"column {inside!r}: message {name} has no field {column.name!r}; "
                f"its fields are: {', '.join(fields) or 'none'}",
                fix="drop or rename the column, or register a schema that has the field",
            )
    present = {column.name for column in struct}
    missing = [field.path for field in message.fields if field.is_required and field.name not in present]
    if missing:
        raise InvalidSchemaError(
            f"message {name} requires the field {missing[0]!r}, and there is no such column",
            fix="add the column",
        )


def _check_field(field: Field, arrow_type: pa.DataType, path: str) -> None:
    arrow_type = decoded_type(arrow_type)
    if _types.is_null(arrow_type):
        return
    if field.is_map and field.message is not None:
        if not _types.is_map(arrow_type):
            raise _mismatch(field, arrow_type, path)
        key, value = field.message.fields
        _check_field(key, arrow_type.key_type, f"{path}.key")
        _check_field(value, arrow_type.item_type, f"{path}.value")
        return
    if field.is_repeated:
        if not is_list(arrow_type):
            raise _mismatch(field, arrow_type, path)
        arrow_type = decoded_type(arrow_type.value_type)
    if field.message is not None and not field.is_wrapper:
        if not _types.is_struct(arrow_type):
            raise _mismatch(field, arrow_type, path)
        _check_message(field.message, arrow_type, path)
    elif not _accepts(field.message.fields[0].kind if field.message else field.kind, arrow_type):
        raise _mismatch(field, arrow_type, path)


def _mismatch(field: Field, arrow_type: pa.DataType, path: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"column {path!r} has the type {arrow_type}, which cannot be encoded as {describe(field.descriptor)}",
        fix=f"cast the column to {field.arrow_type}",
    )


def _accepts(kind: Kind, arrow_type: pa.DataType) -> bool:
    if kind in (Kind.UINT64, Kind.FIXED64) and _types.is_decimal(arrow_type):
        return bool(arrow_type.scale == 0 and arrow_type.precision <= 38)
    if kind is Kind.TIMESTAMP:
        return bool(_types.is_timestamp(arrow_type) and arrow_type.tz)
    if kind is Kind.DURATION:
        return bool(_types.is_duration(arrow_type))
    accepted: dict[Kind, tuple[pa.DataType, ...]] = {
        Kind.BOOL: (pa.bool_(),),
        Kind.FLOAT: (pa.float16(), pa.float32()),
        Kind.DOUBLE: (pa.float16(), pa.float32(), pa.float64()),
        Kind.STRING: _STRINGS,
        Kind.RAW: _STRINGS,
        Kind.BYTES: _BINARIES,
        Kind.ENUM: (*_STRINGS, *_INT32),
        **dict.fromkeys((Kind.INT32, Kind.SINT32, Kind.SFIXED32), _INT32),
        **dict.fromkeys((Kind.UINT64, Kind.FIXED64), (*_INT64, pa.uint64())),
    }
    return arrow_type in accepted.get(kind, _INT64)


# -- values --------------------------------------------------------------------------------------


def _gather_message(slots: tuple[Slot, ...], values: pa.StructArray, columns: list[Column]) -> None:
    for slot in slots:
        index = values.type.get_field_index(slot.field.name)
        if index >= 0:
            _gather_field(slot, values.field(index), columns)


def _gather_field(slot: Slot, array: pa.Array, columns: list[Column]) -> None:
    field, column = slot.field, columns[slot.index]
    if _types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _types.is_null(array.type):
        return
    column.missing = False
    column.validity = _validity(array)
    if not field.is_repeated:
        _gather_values(slot, array, columns)
        return
    if field.is_map:
        column.offsets = _int32(array.offsets)
        for child, entries in zip(slot.children, (array.keys, array.items), strict=True):
            _gather_field(child, entries, columns)
        return
    if not _types.is_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    column.offsets = _int32(array.offsets)
    elements = array.values
    if _types.is_dictionary(elements.type):
        elements = elements.dictionary_decode()
    if _types.is_null(elements.type):
        column.element_validity = np.zeros(len(elements), np.uint8)
        return
    column.element_validity = _validity(elements)
    _gather_values(slot, elements, columns)


def _gather_values(slot: Slot, array: pa.Array, columns: list[Column]) -> None:
    """Adds values that are not lists: one per row, or one per element of a repeated field."""
    field, column = slot.field, columns[slot.index]
    column.original = array
    if field.is_wrapper:
        inner = columns[slot.children[0].index]
        inner.missing = False
        _gather_scalar(slot.children[0].field, array, inner, is_element=False)
        inner.original = array
    elif field.message is not None:
        _gather_message(slot.children, array, columns)
    else:
        _gather_scalar(field, array, column, field.is_repeated)


def _gather_scalar(field: Field, array: pa.Array, column: Column, is_element: bool) -> None:
    if field.kind is Kind.RAW:
        array, column.unfit = _messages_of_json(field, array)
    if field.kind in (Kind.STRING, Kind.BYTES, Kind.RAW):
        canonical = pa.string() if field.kind is Kind.STRING else pa.binary()
        _, offsets, data = array.cast(canonical).buffers()
        place = array.offset if array.type == canonical else 0
        found = np.zeros(1, np.int32) if offsets is None else np.frombuffer(offsets, np.int32)[place:]
        column.data = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        if is_element:
            column.entry_offsets = found
        else:
            column.offsets = found
        return
    convert: Callable[[Field, pa.Array], tuple[npt.NDArray[Any], npt.NDArray[Any] | None]]
    convert = _CONVERSIONS.get(field.kind, _number)
    column.values, unfit = convert(field, array)
    if unfit is not None and unfit.any():
        column.unfit = unfit.astype(np.uint8)


def _number(field: Field, array: pa.Array) -> tuple[npt.NDArray[Any], None]:
    width = WIDTHS[field.kind]
    floats = {Kind.FLOAT: pa.float32(), Kind.DOUBLE: pa.float64()}
    canonical = floats.get(field.kind, {1: pa.uint8(), 4: pa.int32(), 8: pa.int64()}[width])
    return _fixed(array.cast(canonical), f"i{width}"), None


def _uint32(_: Field, array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    numbers = _fixed(array.cast(pa.int64()), "i8")
    return numbers, (numbers < 0) | (numbers > 0xFFFFFFFF)


def _uint64(_: Field, array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    if _types.is_decimal(array.type):
        words = _fixed(array.cast(pa.decimal128(38, 0)), "V16").view("i8").reshape(-1, 2)
        return np.ascontiguousarray(words[:, 0]), words[:, 1] != 0
    if array.type == pa.uint64():
        return _fixed(array, "i8"), None
    numbers = _fixed(array.cast(pa.int64()), "i8")
    return numbers, numbers < 0


def _micros(field: Field, array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if field.kind is Kind.TIMESTAMP:
        canonical, (low, high) = pa.timestamp("us", array.type.tz), _TIMESTAMP_MICROS
    else:
        canonical, (low, high) = pa.duration("us"), _DURATION_MICROS
    numbers = _fixed(array.cast(canonical, safe=False), "i8")
    return numbers, (numbers < low) | (numbers > high)


def _enum_numbers(field: Field, array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    enum = field.descriptor.enum_type
    if _types.is_integer(array.type):
        numbers = _fixed(array.cast(pa.int32()), "i4")
        return numbers, ~np.isin(numbers, list(enum.values_by_number)) if enum.is_closed else None
    encoded = array.cast(pa.string()).dictionary_encode()
    found: list[int | None] = []
    for name in encoded.dictionary.to_pylist():
        if name in enum.values_by_name:
            found.append(enum.values_by_name[name].number)
        else:
            digits = int(name) if re.fullmatch(r"-?\d{1,10}", name) else 1 << 31
            known = digits in enum.values_by_number or not enum.is_closed
            found.append(digits if known and -(1 << 31) <= digits < 1 << 31 else None)
    table = np.array([0 if number is None else number for number in [*found, 0]], np.int32)
    unfit = np.array([number is None for number in [*found, 0]])
    places = encoded.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(table[places]), unfit[places]


def _messages_of_json(field: Field, array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.uint8] | None]:
    from google.protobuf import json_format, message_factory

    message_class = message_factory.GetMessageClass(field.descriptor.message_type)
    payloads: list[bytes | None] = []
    unfit = np.zeros(len(array), np.uint8)
    for index, text in enumerate(array.to_pylist()):
        payload = None
        if text is not None:
            try:
                payload = json_format.Parse(text, message_class()).SerializeToString(deterministic=True)
            except (json_format.Error, ValueError, RecursionError):
                unfit[index] = 1
        payloads.append(payload)
    return pa.array(payloads, pa.binary()), unfit if unfit.any() else None


_CONVERSIONS: dict[Kind, Any] = {
    Kind.UINT32: _uint32,
    Kind.FIXED32: _uint32,
    Kind.UINT64: _uint64,
    Kind.FIXED64: _uint64,
    Kind.TIMESTAMP: _micros,
    Kind.DURATION: _micros,
    Kind.ENUM: _enum_numbers,
}


def _fixed(array: pa.Array, dtype: str) -> npt.NDArray[Any]:
    """Returns the values of an array of fixed width, with arbitrary ones in place of nulls."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype)[array.offset : array.offset + len(array)]


def _int32(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False), np.int32)


def _validity(array: pa.Array) -> npt.NDArray[np.uint8] | None:
    if not array.null_count:
        return None
    valid: npt.NDArray[Any] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid.astype(np.uint8)
