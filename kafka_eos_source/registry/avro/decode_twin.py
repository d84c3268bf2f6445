"""Decodes Avro payloads in Python, with the results of native/avro.c, where that is not available."""

from __future__ import annotations

import decimal
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.registry.avro.messages import MAX_DEPTH, MAX_EMPTY_ITEMS, Code, message
from kafka_eos_source.registry.avro.program import Kind, Node, Op, Program
from kafka_eos_source.registry.codec import MOST_BYTES, Converted
from kafka_eos_source.registry.slices import Collector

_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1
_CONTEXT = decimal.Context(prec=40)


class _RowError(Exception):
    def __init__(self, node: int, code: Code, detail: int = 0, more: int = 0) -> None:
        super().__init__(code.name)
        self.node, self.code, self.detail, self.more = node, code, detail, more


def decode_rows(program: Program, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
    """Decodes messages, as many as fit into a column of `most_bytes`."""
    values = Collector(program.columns[0].type, most_bytes)
    errors: dict[int, str] = {}
    for row, payload in enumerate(each.as_py() for each in messages):
        value = None
        if payload is not None:
            try:
                value = _Row(program, payload, start).decode()
            except _RowError as error:
                path, reason = program.paths[error.node], program.reasons.get(error.node, "")
                errors[row] = message(error.code, error.detail, error.more, path, reason)
        values.add(value)
        if values.is_full:
            break
    return values.converted(errors)


class _Row:
    def __init__(self, program: Program, payload: bytes, start: int) -> None:
        self._program = program
        self._payload = payload
        self._start = start
        self._at = start
        self._past = len(payload)
        self._depth = 0
        self._empty_items = 0

    def decode(self) -> Any:
        if self._past < self._start:
            raise _RowError(0, Code.SHORT, self._past, self._start)
        value = self._node(0)
        if self._at != self._past:
            raise _RowError(0, Code.TRAILING, self._past - self._at)
        return value

    def _node(self, index: int) -> Any:
        node = self._program.nodes[index]
        return _READ[Op(node.op)](self, index, node)

    def _take(self, index: int, count: int) -> bytes:
        if count > self._past - self._at:
            raise _RowError(index, Code.TRUNCATED, count, self._past - self._at)
        self._at += count
        return self._payload[self._at - count : self._at]

    def _varint(self, index: int) -> int:
        bits = shift = 0
        while True:
            if self._at == self._past:
                raise _RowError(index, Code.TRUNCATED, 1, 0)
            byte = self._payload[self._at]
            self._at += 1
            if shift == 63 and byte > 1:
                raise _RowError(index, Code.VARINT)
            bits |= (byte & 0x7F) << shift
            if byte < 0x80:
                return bits >> 1 ^ -(bits & 1)
            shift += 7

    def _prefixed(self, index: int) -> bytes:
        length = self._varint(index)
        if length < 0:
            raise _RowError(index, Code.NEGATIVE_LENGTH, length)
        return self._take(index, length)

    def _null(self, index: int, node: Node) -> Any:
        return None

    def _boolean(self, index: int, node: Node) -> Any:
        byte = self._take(index, 1)[0]
        if byte > 1:
            raise _RowError(index, Code.BOOLEAN, byte)
        return bool(byte)

    def _integer(self, index: int, node: Node) -> Any:
        number = self._varint(index)
        if node.op == Op.INT and not _INT_MIN <= number <= _INT_MAX:
            raise _RowError(index, Code.INT_RANGE, number)
        if node.column < 0:
            return None
        kind = self._program.columns[node.column].kind
        if kind is Kind.F32:
            return np.int64(number).astype(np.float32)
        if kind is Kind.F64:
            return float(number)
        if kind is Kind.I64 and node.a > 1:
            if not _LONG_MIN <= number * node.a <= _LONG_MAX:
                raise _RowError(index, Code.OVERFLOW, number)
            number *= node.a
        elif kind is Kind.I64 and node.b > 1:
            number //= node.b
        return number

    def _float(self, index: int, node: Node) -> Any:
        return struct.unpack("<f", self._take(index, 4))[0]

    def _double(self, index: int, node: Node) -> Any:
        return struct.unpack("<d", self._take(index, 8))[0]

    def _bytes(self, index: int, node: Node) -> Any:
        return self._prefixed(index)

    def _string(self, index: int, node: Node) -> Any:
        return _text(index, self._prefixed(index))

    def _fixed(self, index: int, node: Node) -> Any:
        return self._take(index, node.a)

    def _enum(self, index: int, node: Node) -> Any:
        number = self._varint(index)
        if not 0 <= number < node.size:
            raise _RowError(index, Code.ENUM_INDEX, number, node.size)
        if node.column < 0:
            return None
        offset, length = self._program.symbols[node.first + 2 * number :][:2]
        if length < 0:
            raise _RowError(index, Code.ENUM_SYMBOL, number)
        return self._program.text[offset : offset + length].decode()

    def _decimal(self, index: int, node: Node) -> Any:
        plain = self._prefixed(index) if node.op == Op.DECIMAL else self._take(index, node.a)
        if node.column < 0:
            return None
        found = self._program.columns[node.column].type
        number = int.from_bytes(plain, "big", signed=True)
        if not plain or abs(number) >= 10**found.precision:
            raise _RowError(index, Code.DECIMAL_SIZE, len(plain))
        return decimal.Decimal(number).scaleb(-found.scale, _CONTEXT)

    def _record(self, index: int, node: Node) -> Any:
        self._nest(index)
        children = self._program.links[node.first : node.first + node.size]
        values = {self._program.nodes[child].column: self._node(child) for child in children}
        self._depth -= 1
        if node.column < 0:
            return None
        column = self._program.columns[node.column]
        return [
            (column.type.field(number).name, values[child.index])
            for number, child in enumerate(column.children)
        ]

    def _nest(self, index: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _RowError(index, Code.DEPTH, MAX_DEPTH)

    def _items(self, index: int, node: Node) -> Any:
        self._nest(index)
        items: list[Any] = []
        while count := self._varint(index):
            if count < 0:
                if count == _LONG_MIN:
                    raise _RowError(index, Code.NEGATIVE_LENGTH, count)
                count = -count
                size, left = self._varint(index), self._past - self._at
                if not 0 <= size <= left:
                    raise _RowError(index, Code.BLOCK_BYTES, size, left)
                if node.column < 0:
                    self._at += size
                    continue
            self._check_count(index, node, count)
            for _ in range(count):
                if node.op == Op.MAP:
                    key = _text(index, self._prefixed(index))
                    items.append((key, self._node(node.a)))
                else:
                    items.append(self._node(node.a))
        self._depth -= 1
        return items

    def _check_count(self, index: int, node: Node, count: int) -> None:
        left = self._past - self._at
        if node.b > 0 and count > left // node.b:
            raise _RowError(index, Code.TRUNCATED, count, left)
        if node.b == 0:
            if count > MAX_EMPTY_ITEMS - self._empty_items:
                raise _RowError(index, Code.EMPTY_ITEMS, count, MAX_EMPTY_ITEMS)
            self._empty_items += count

    def _union(self, index: int, node: Node) -> Any:
        number = self._varint(index)
        if not 0 <= number < node.size:
            raise _RowError(index, Code.UNION_INDEX, number, node.size)
        return self._node(self._program.links[node.first + number])

    def _member(self, index: int, node: Node) -> Any:
        column = self._program.columns[node.column]
        members: list[Any] = [(one.name, None) for one in column.type]
        members[node.a] = (members[node.a][0], self._node(node.b))
        return members

    def _default(self, index: int, node: Node) -> Any:
        default = _Row(self._program, bytes(self._program.text[node.a : node.a + node.b]), 0)
        default._depth, default._empty_items = self._depth, self._empty_items
        value = default._node(node.first)
        self._empty_items = default._empty_items
        return value

    def _mismatch(self, index: int, node: Node) -> Any:
        raise _RowError(index, Code.BRANCH)


def _text(index: int, plain: bytes) -> str:
    try:
        return plain.decode()
    except UnicodeDecodeError:
        raise _RowError(index, Code.UTF8) from None


_READ: dict[Op, Callable[[_Row, int, Node], Any]] = {
    Op.NULL: _Row._null,
    Op.BOOLEAN: _Row._boolean,
    Op.INT: _Row._integer,
    Op.LONG: _Row._integer,
    Op.FLOAT: _Row._float,
    Op.DOUBLE: _Row._double,
    Op.BYTES: _Row._bytes,
    Op.STRING: _Row._string,
    Op.FIXED: _Row._fixed,
    Op.ENUM: _Row._enum,
    Op.DECIMAL: _Row._decimal,
    Op.DECIMAL_FIXED: _Row._decimal,
    Op.RECORD: _Row._record,
    Op.ARRAY: _Row._items,
    Op.MAP: _Row._items,
    Op.UNION: _Row._union,
    Op.MEMBER: _Row._member,
    Op.DEFAULT: _Row._default,
    Op.MISMATCH: _Row._mismatch,
}
