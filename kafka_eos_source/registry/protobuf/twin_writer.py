"""Writes Protobuf messages in Python: the twin of the encoder in native/protobuf.c, byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from kafka_eos_source.registry.protobuf.inputs import Column
from kafka_eos_source.registry.protobuf.program import (
    END_GROUP,
    I64,
    LEN,
    VARINT,
    WIRE_TYPES,
    Program,
    Slot,
)
from kafka_eos_source.registry.protobuf.tree import Kind

_BYTES = (Kind.STRING, Kind.BYTES, Kind.RAW)
_MESSAGES = (Kind.MESSAGE, Kind.GROUP)
_REQUIRED, _NULL_ELEMENT, _ONEOF, _RANGE, _UTF8 = 9, 12, 13, 14, 6


class RefusedError(Exception):
    """A row cannot be encoded. The attributes are those of ``error_t``."""

    def __init__(self, code: int, field: int, detail: int) -> None:
        super().__init__(code, field, detail)
        self.code, self.field, self.detail = code, field, detail


def write_rows(
    program: Program, columns: list[Column], valid: Any, rows: int
) -> Iterator[bytes | RefusedError | None]:
    """Yields each row as a message, as None for null, or the reason why it cannot be encoded."""
    for row in range(rows):
        if valid is not None and not valid[row]:
            yield None
            continue
        try:
            yield _message(program.slots, columns, row, in_entry=False)
        except RefusedError as refused:
            yield refused


def _message(slots: tuple[Slot, ...], columns: list[Column], row: int, in_entry: bool) -> bytes:
    parts: list[bytes] = []
    members: dict[str, int] = {}
    for slot in sorted(
        slots, key=lambda each: -each.field.number
    ):  # backwards, which decides the first error
        field, column = slot.field, columns[slot.index]
        if column.missing:
            continue
        if column.validity is not None and not column.validity[row]:
            if in_entry or field.is_required:
                raise RefusedError(_NULL_ELEMENT if in_entry else _REQUIRED, slot.index, row)
            continue
        if field.is_repeated:
            parts.append(_repeated(slot, columns, row))
            continue
        if not in_entry and not field.descriptor.has_presence and _is_zero(slot, column, row):
            continue
        if field.oneof is not None:
            if field.oneof in members:
                raise RefusedError(_ONEOF, slot.index, members[field.oneof])
            members[field.oneof] = slot.index
        parts.append(_tag(slot) + _value(slot, columns, row))
    return b"".join(reversed(parts))


def _repeated(slot: Slot, columns: list[Column], row: int) -> bytes:
    column = columns[slot.index]
    assert column.offsets is not None
    packed = slot.field.descriptor.is_packed
    parts: list[bytes] = []
    for index in range(int(column.offsets[row + 1]) - 1, int(column.offsets[row]) - 1, -1):
        if column.element_validity is not None and not column.element_validity[index]:
            raise RefusedError(_NULL_ELEMENT, slot.index, index)
        parts.append((b"" if packed else _tag(slot)) + _value(slot, columns, index))
    body = b"".join(reversed(parts))
    return _varint(slot.field.number << 3 | LEN) + _sized(body) if packed and parts else body


def _value(slot: Slot, columns: list[Column], index: int) -> bytes:
    field, column = slot.field, columns[slot.index]
    if column.unfit is not None and column.unfit[index]:
        raise RefusedError(_RANGE, slot.index, index)
    if field.kind in _MESSAGES:
        body = _message(slot.children, columns, index, field.is_map)
        return _sized(body) if field.kind is Kind.MESSAGE else body + _varint(field.number << 3 | END_GROUP)
    if field.kind in _BYTES:
        body = _bytes(slot, column, index)
        if field.kind is Kind.STRING:
            try:
                body.decode()
            except UnicodeDecodeError as failure:
                raise RefusedError(_UTF8, slot.index, index) from failure
        return _sized(body)
    number = _number(column, index)
    if field.kind in (Kind.TIMESTAMP, Kind.DURATION):
        return _sized(_time(field.kind, number))
    if field.kind in (Kind.SINT32, Kind.SINT64):
        return _varint(number << 1 if number >= 0 else (-number << 1) - 1)
    wire_type = WIRE_TYPES.get(field.kind, VARINT)
    if wire_type == VARINT:
        return _varint(number)
    return struct.pack("<Q", number & (1 << 64) - 1)[: 8 if wire_type == I64 else 4]


def _bytes(slot: Slot, column: Column, index: int) -> bytes:
    offsets = column.entry_offsets if slot.field.is_repeated else column.offsets
    assert offsets is not None
    assert column.data is not None
    return column.data[offsets[index] : offsets[index + 1]].tobytes()


def _number(column: Column, index: int) -> int:
    assert column.values is not None
    return int(column.values[index])


def _is_zero(slot: Slot, column: Column, row: int) -> bool:
    if slot.field.kind in _BYTES:
        return not _bytes(slot, column, row)
    return not _number(column, row) and not (column.unfit is not None and column.unfit[row])


def _time(kind: Kind, micros: int) -> bytes:
    seconds, rest = divmod(micros, 1_000_000)
    if kind is Kind.DURATION and seconds < 0 and rest:
        seconds, rest = seconds + 1, rest - 1_000_000
    first = b"\x08" + _varint(seconds) if seconds else b""
    return first + (b"\x10" + _varint(rest * 1000) if rest else b"")


def _tag(slot: Slot) -> bytes:
    return _varint(slot.field.number << 3 | WIRE_TYPES.get(slot.field.kind, VARINT))


def _sized(body: bytes) -> bytes:
    return _varint(len(body)) + body


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
