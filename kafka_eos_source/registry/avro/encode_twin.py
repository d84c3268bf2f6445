"""Encodes Avro payloads in Python, with the results of native/avro.c, where that is not available."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.registry.avro.defaults import varint
from kafka_eos_source.registry.avro.encode_program import EncodeProgram, Put, PutNode
from kafka_eos_source.registry.avro.messages import QUOTED_BYTES, Code, message
from kafka_eos_source.registry.codec import MOST_BYTES, Converted
from kafka_eos_source.registry.slices import Collector


class _RowError(Exception):
    def __init__(self, node: int, code: Code, detail: int = 0, more: int = 0, text: bytes = b"") -> None:
        super().__init__(code.name)
        self.node, self.code, self.detail, self.more, self.text = node, code, detail, more, text


def encode_rows(
    program: EncodeProgram, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES
) -> Converted:
    """Encodes values of the program's type, as many as fit into a column of `most_bytes`."""
    run = _Run(program, values)
    payloads = Collector(pa.binary(), most_bytes)
    errors: dict[int, str] = {}
    for row, is_valid in enumerate(values.is_valid().to_pylist()):
        payload = None
        if is_valid:
            try:
                payload = prefix + run.put(0, row)
            except _RowError as error:
                path = program.paths[error.node]
                errors[row] = message(error.code, error.detail, error.more, path, text=error.text)
        payloads.add(payload)
        if payloads.is_full:
            break
    return payloads.converted(errors)


class _Place:
    """One array of the tree, as Python values."""

    def __init__(self, array: pa.Array, offsets: Any = None) -> None:
        self.valid: list[bool] = array.is_valid().to_pylist()
        self.offsets: list[int] = [] if offsets is None else offsets.to_pylist()
        self.values = [] if pa.types.is_nested(array.type) else _plain(array)


def _plain(array: pa.Array) -> list[Any]:
    """Returns times as numbers, decimals as digits, and strings as bytes, which may not be UTF-8."""
    kinds = pa.types
    if kinds.is_timestamp(array.type):
        array = array.view(pa.int64())
    elif kinds.is_date32(array.type):
        array = array.view(pa.int32())
    elif kinds.is_string(array.type):
        array = array.view(pa.binary())
    elif kinds.is_large_string(array.type):
        array = array.view(pa.large_binary())
    elif kinds.is_decimal(array.type):
        halves = np.frombuffer(array.buffers()[1], [("low", "<u8"), ("high", "<i8")])
        part = halves[array.offset : array.offset + len(array)].tolist()
        return [high << 64 | low for low, high in part]
    plain: list[Any] = array.to_pylist()
    return plain


class _Run:
    def __init__(self, program: EncodeProgram, values: pa.Array) -> None:
        self._program = program
        self._places: list[_Place] = []
        self._flatten(values)

    def _flatten(self, array: pa.Array) -> None:
        kinds = pa.types
        if kinds.is_struct(array.type):
            self._places.append(_Place(array))
            for number in range(array.type.num_fields):
                self._flatten(array.field(number))
        elif kinds.is_map(array.type):
            array = pa.concat_arrays([array, array[:0]])  # without an offset, which `keys` does not know
            self._places.append(_Place(array, array.offsets))
            self._places.append(self._places[-1])
            self._flatten(array.keys)
            self._flatten(array.items)
        elif kinds.is_list(array.type) or kinds.is_large_list(array.type):
            self._places.append(_Place(array, array.offsets))
            self._flatten(array.values)
        else:
            self._places.append(_Place(array))

    def put(self, index: int, at: int) -> bytes:
        node = self._program.nodes[index]
        if node.op == Put.NOTHING:
            return b""
        if node.op == Put.TEXT_OF_PROGRAM:
            return bytes(self._program.text[node.a : node.a + node.b])
        place = self._places[node.array]
        if not place.valid[at]:
            if node.null_branch < 0:
                raise _RowError(index, Code.NULL_VALUE)
            return varint(node.null_branch)
        branch = varint(node.branch) if node.branch >= 0 else b""
        if node.op == Put.RECORD:
            children = self._program.links[node.first : node.first + node.size]
            return branch + b"".join([self.put(child, at) for child in children])
        if node.op in (Put.ARRAY, Put.MAP):
            return branch + self._items(node, place, at)
        if node.op == Put.MEMBERS:
            return branch + self._member(index, node, at)
        return branch + self._value(index, node, place.values[at])

    def _items(self, node: PutNode, place: _Place, at: int) -> bytes:
        first, past = place.offsets[at : at + 2]
        parts = [varint(past - first)] if past > first else []
        for entry in range(first, past):
            if node.op == Put.MAP:
                parts.append(self.put(node.first, entry))
            parts.append(self.put(node.a, entry))
        return b"".join([*parts, b"\0"])

    def _member(self, index: int, node: PutNode, at: int) -> bytes:
        children = self._program.links[node.first : node.first + node.size]
        found = [child for child in children if self._places[self._program.nodes[child].array].valid[at]]
        if len(found) != 1:
            raise _RowError(index, Code.MEMBERS, len(found))
        return self.put(found[0], at)

    def _value(self, index: int, node: PutNode, value: Any) -> bytes:
        op = node.op
        if op == Put.BOOLEAN:
            return bytes([value])
        if op == Put.INTEGER:
            if node.b == 4 and not -(1 << 31) <= value < 1 << 31:
                raise _RowError(index, Code.INT_RANGE, value)
            return varint(value)
        if op == Put.TIMESTAMP:
            scaled = value * node.a // node.b
            if not -(1 << 63) <= scaled < 1 << 63:
                raise _RowError(index, Code.OVERFLOW, value)
            return varint(scaled)
        if op == Put.FLOAT:
            return struct.pack("<f", value)
        if op in (Put.DOUBLE, Put.FLOAT_AS_DOUBLE):
            return struct.pack("<d", value)
        if op == Put.DECIMAL:
            return self._decimal(index, node, value)
        return self._text(index, node, value)

    def _text(self, index: int, node: PutNode, value: bytes) -> bytes:
        if node.op == Put.FIXED:
            if len(value) != node.size:
                raise _RowError(index, Code.FIXED_SIZE, len(value), node.size)
            return value
        if node.op == Put.ENUM:
            for number in range(node.size):
                offset, length = self._program.symbols[node.first + 2 * number :][:2]
                if self._program.text[offset : offset + length] == value:
                    return varint(number)
            raise _RowError(index, Code.SYMBOL, len(value), 0, value[:QUOTED_BYTES].rstrip(b"\0"))
        if node.op == Put.STRING:
            try:
                value.decode()
            except UnicodeDecodeError:
                raise _RowError(index, Code.UTF8) from None
        return varint(len(value)) + value

    def _decimal(self, index: int, node: PutNode, digits: int) -> bytes:
        low, high = self._program.symbols[node.first : node.first + 2]
        if abs(digits) >= (high << 64 | low & (1 << 64) - 1):
            raise _RowError(index, Code.DECIMAL_RANGE)
        digits *= 10**node.b
        if node.a:
            return digits.to_bytes(node.a, "big", signed=True)
        size = ((digits if digits >= 0 else ~digits).bit_length() + 8) // 8
        return varint(size) + digits.to_bytes(size, "big", signed=True)
