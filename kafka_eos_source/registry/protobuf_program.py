"""Compiles the tree of a message to the flat tables that native/protobuf.c executes; loads that library."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kafka_eos_source.native import load
from kafka_eos_source.native.buffers import Part
from kafka_eos_source.registry.protobuf_tree import Field, Kind, Message, enum_name

REPEATED, NULLABLE, REQUIRED, MAP, CLOSED, PACKED, EXPLICIT = 1, 2, 4, 8, 16, 32, 64

#: Bytes of a stored value, by kind; the others are of variable size, or messages.
WIDTHS = {
    Kind.BOOL: 1,
    Kind.INT32: 4,
    Kind.SINT32: 4,
    Kind.UINT32: 8,
    Kind.INT64: 8,
    Kind.SINT64: 8,
    Kind.UINT64: 8,
    Kind.FIXED32: 8,
    Kind.SFIXED32: 4,
    Kind.FLOAT: 4,
    Kind.FIXED64: 8,
    Kind.SFIXED64: 8,
    Kind.DOUBLE: 8,
    Kind.ENUM: 4,
    Kind.TIMESTAMP: 8,
    Kind.DURATION: 8,
}

#: ``field_t``, ``message_t`` and ``frame_t`` of native/protobuf.c; all members are int32.
FIELD = (
    "number",
    "kind",
    "flags",
    "frame",
    "message",
    "elements",
    "oneof",
    "parent",
    "known_first",
    "known_count",
    "default_first",
    "default_bytes",
    "extra_bytes",
    "tag",
    "reader",
)
MESSAGE = ("first", "count", "dense", "dense_count", "owner", "oneof_first", "oneof_count")
FRAME = (
    "first",
    "count",
    "closer_first",
    "closer_count",
    "default_first",
    "default_count",
    "key",
    "row_bytes",
    "extra_bytes",
)

VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)
#: Wire types; the other kinds are varints.
WIRE_TYPES = {
    **dict.fromkeys((Kind.FIXED32, Kind.SFIXED32, Kind.FLOAT), I32),
    **dict.fromkeys((Kind.FIXED64, Kind.SFIXED64, Kind.DOUBLE), I64),
    **dict.fromkeys((Kind.STRING, Kind.BYTES, Kind.RAW, Kind.MESSAGE, Kind.TIMESTAMP, Kind.DURATION), LEN),
    Kind.GROUP: START_GROUP,
}

#: Readers of native/protobuf.c.
_ONE_NUMBER, _NUMBERS, _TEXT, _OTHER, _ELEMENTS, _ENTRIES, _NARROWED_NUMBER, _NARROWED_NUMBERS = range(8)

_DENSE_NUMBERS = 1024
_OFFSET_BYTES, _DECIMAL_BYTES, _DIGITS_OF_INT32 = 4, 16, 11
#: A column of nulls stands in for the fields of a message without any.
_EMPTY_BYTES = 5
_VARIABLE = (Kind.STRING, Kind.BYTES, Kind.RAW)
_TIMES = (Kind.TIMESTAMP, Kind.DURATION)


@dataclass
class Slot:
    """A field with its place in the tables.

    Attributes:
        field: the field of the tree.
        index: its index in the table of fields.
        frame: the frame that contains its slots.
        elements: the frame of its elements, or -1.
        children: the slots of its message, in the order of the schema.
    """

    field: Field
    index: int
    frame: int
    elements: int
    children: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Program:
    """The tables, and what Python needs to make arrays of the result.

    Attributes:
        slots: the slots of the root's fields, in the order of the schema.
        by_index: all slots.
        frame_owners: for each frame, the slot whose elements it contains; None for the root.
    """

    slots: tuple[Slot, ...]
    by_index: tuple[Slot, ...]
    frame_owners: tuple[Slot | None, ...]
    oneofs: tuple[str, ...]
    fields: npt.NDArray[np.int32]
    messages: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int32]
    members: npt.NDArray[np.int32]
    dense: npt.NDArray[np.int32]
    known: npt.NDArray[np.int32]
    constants: npt.NDArray[np.uint8]


def compile_tree(root: Message, narrowed: frozenset[str] = frozenset()) -> Program:
    """Returns the program of a message.

    Args:
        root: the tree of the message.
        narrowed: full names of the fields that the writer has with a type of more values. A row with another
            value is an error.
    """
    return _Compiler(root, narrowed).program()


class _Compiler:
    def __init__(self, root: Message, narrowed: frozenset[str]) -> None:
        self._narrowed = narrowed
        self._fields: list[dict[str, int]] = []
        self._messages: list[dict[str, int]] = []
        self._slots: list[Slot] = []
        self._owners: list[Slot | None] = [None]
        self._keys = [-1]
        self._oneofs: list[str] = []
        self._dense: list[int] = []
        self._known: list[int] = []
        self._constants = bytearray()
        _, self._root = self._message(root, frame=0, owner=-1, parent=-1)

    def program(self) -> Program:
        members: list[int] = []
        frames = []
        of_frames: list[list[int]] = [[] for _ in self._keys]
        for slot in self._slots:
            of_frames[slot.frame].append(slot.index)
        for key, inside in zip(self._keys, of_frames, strict=True):
            closers = [index for index in inside if _needs_close(self._slots[index].field)]
            defaults = [index for index in inside if self._fields[index]["default_bytes"] >= 0]
            singular = [index for index in inside if not self._slots[index].field.is_repeated]
            extra = sum(self._fields[index]["extra_bytes"] for index in singular)
            row = {"key": key, "row_bytes": sum(_slot_bytes(self._slots[index].field) for index in inside)}
            row["extra_bytes"] = extra if inside else _EMPTY_BYTES
            for name, part in (("", inside), ("closer_", closers), ("default_", defaults)):
                row[f"{name}first"], row[f"{name}count"] = len(members), len(part)
                members += part
            frames.append(row)
        return Program(
            self._root,
            tuple(self._slots),
            tuple(self._owners),
            tuple(self._oneofs),
            _table(FIELD, self._fields),
            _table(MESSAGE, self._messages),
            _table(FRAME, frames),
            np.array(members, np.int32),
            np.array(self._dense, np.int32),
            np.array(self._known, np.int32),
            np.frombuffer(bytes(self._constants), np.uint8),
        )

    def _message(self, message: Message, frame: int, owner: int, parent: int) -> tuple[int, tuple[Slot, ...]]:
        """Adds a message, whose fields are next to each other in the table, and those inside it."""
        index, first, oneof_first = len(self._messages), len(self._fields), len(self._oneofs)
        by_number = sorted(message.fields, key=lambda field: field.number)
        names = sorted({field.oneof for field in by_number if field.oneof is not None})
        self._oneofs += [f"{message.descriptor.full_name}.{name}" for name in names]
        oneofs = {name: oneof_first + position for position, name in enumerate(names)}
        row = {"first": first, "count": len(by_number), "owner": owner}
        row |= {"oneof_first": oneof_first, "oneof_count": len(names), "dense": len(self._dense)}
        numbers = {field.number: first + position for position, field in enumerate(by_number)}
        row["dense_count"] = max(numbers) + 1 if numbers and max(numbers) < _DENSE_NUMBERS else 0
        self._dense += [numbers.get(number, -1) for number in range(row["dense_count"])]
        self._messages.append(row)
        slots = [self._field(field, frame, parent, oneofs) for field in by_number]
        for slot in slots:
            inner = slot.field.message
            if inner is None:
                continue
            if slot.field.is_repeated:
                slot.elements = len(self._owners)
                self._owners.append(slot)
                self._keys.append(-1)
                number, slot.children = self._message(inner, slot.elements, slot.index, -1)
                if slot.field.is_map:
                    self._keys[slot.elements] = slot.children[0].index
            else:
                number, slot.children = self._message(inner, frame, slot.index, slot.index)
            self._fields[slot.index] |= {"message": number, "elements": slot.elements}
        in_order = {slot.field.number: slot for slot in slots}
        return index, tuple(in_order[field.number] for field in message.fields)

    def _field(self, field: Field, frame: int, parent: int, oneofs: dict[str, int]) -> Slot:
        flags = (
            REPEATED * field.is_repeated
            | NULLABLE * field.nullable
            | REQUIRED * field.is_required
            | MAP * field.is_map
            | CLOSED * field.is_closed_enum
            | PACKED * bool(field.descriptor.is_packed)
            | EXPLICIT * bool(field.descriptor.has_presence)
        )
        row = dict.fromkeys(FIELD, -1) | {"number": field.number, "kind": field.kind, "flags": flags}
        row |= {"frame": frame, "parent": parent, "extra_bytes": _extra_bytes(field)}
        row |= {"tag": _tag(field), "reader": _reader(field, field.descriptor.full_name in self._narrowed)}
        if field.oneof is not None:
            row["oneof"] = oneofs[field.oneof]
        if field.is_closed_enum:
            known = sorted(field.descriptor.enum_type.values_by_number)
            row |= {"known_first": len(self._known), "known_count": len(known)}
            self._known += known
        default = b"" if field.is_repeated else _stored(field.kind, field.default)
        if default.strip(b"\0"):
            row |= {"default_first": len(self._constants), "default_bytes": len(default)}
            self._constants += default
        slot = Slot(field, len(self._slots), frame, -1)
        self._slots.append(slot)
        self._fields.append(row)
        return slot


def _needs_close(field: Field) -> bool:
    return field.is_repeated or field.is_required or field.kind in _TIMES


def _slot_bytes(field: Field) -> int:
    if field.is_repeated or field.kind in _VARIABLE:
        return 4
    return WIDTHS.get(field.kind, 0) + field.nullable


def _tag(field: Field) -> int:
    """Returns the tag before a value of a field, as int32."""
    wire_type = WIRE_TYPES.get(field.kind, VARINT)
    tag = field.number << 3 | (LEN if field.descriptor.is_packed else wire_type)
    return tag - (1 << 32) if tag >> 31 else tag


def _reader(field: Field, is_narrowed: bool) -> int:
    """Returns how native/protobuf.c reads a field."""
    if field.is_map:
        return _ENTRIES
    if WIRE_TYPES.get(field.kind, VARINT) in (LEN, START_GROUP):
        return _ELEMENTS if field.is_repeated else _TEXT if field.kind in _VARIABLE else _OTHER
    if is_narrowed:
        return _NARROWED_NUMBERS if field.is_repeated else _NARROWED_NUMBER
    return _NUMBERS if field.is_repeated else _ONE_NUMBER


def _extra_bytes(field: Field) -> int:
    """Returns the memory of a value in what Python makes of the values of native/protobuf.c."""
    if field.kind in (Kind.UINT64, Kind.FIXED64):
        return _DECIMAL_BYTES
    if field.kind is not Kind.ENUM:
        return 0
    names = [len(enum_name(field, number).encode()) for number in field.descriptor.enum_type.values_by_number]
    return _OFFSET_BYTES + max(_DIGITS_OF_INT32, *names)


def _stored(kind: Kind, value: Any) -> bytes:
    """Returns a value as native/protobuf.c stores it."""
    if value is None:
        return b""
    if kind is Kind.STRING:
        return str(value).encode()
    if kind is Kind.BYTES:
        return bytes(value)
    if kind is Kind.FLOAT:
        return struct.pack("<f", value)
    if kind is Kind.DOUBLE:
        return struct.pack("<d", value)
    return (int(value) & ((1 << 64) - 1)).to_bytes(8, "little")[: WIDTHS[kind]]


def _table(names: tuple[str, ...], rows: list[dict[str, int]]) -> npt.NDArray[np.int32]:
    return np.array([[row[name] for name in names] for row in rows], np.int32).reshape(len(rows), len(names))


# -- the C library -------------------------------------------------------------------------------

_PART = [("at", "u8"), ("bytes", "i8"), ("capacity", "i8")]

#: ``column_t``.
COLUMN = np.dtype(
    [
        ("validity", _PART),
        ("values", _PART),
        ("offsets", _PART),
        ("entry_offsets", _PART),
        ("data", _PART),
        ("dropped", _PART),
        ("elements", "i8"),
        ("filled", "i8"),
        ("seconds", "i8"),
        ("slot", "i8"),
        ("nanos", "i4"),
        ("unused", "i4"),
    ]
)

#: ``rows_t``.
ROWS = np.dtype([("rows", "i8"), ("capacity", "i8")])

#: ``error_t``.
ERROR = np.dtype([("row", "i8"), ("code", "i4"), ("field", "i4"), ("detail", "i8")])


class Decoded(Structure):
    """``decoded_t``, up to the last member that Python reads."""

    _fields_ = (
        ("columns", c_void_p),
        ("frames", c_void_p),
        ("validity", Part),
        ("errors", Part),
        ("no_memory", c_int64),
        ("rows", c_int64),
    )


class Encoded(Structure):
    """``encoded_t``, up to the last member that Python reads."""

    _fields_ = (
        ("validity", Part),
        ("offsets", Part),
        ("data", Part),
        ("errors", Part),
        ("no_memory", c_int64),
        ("rows", c_int64),
    )


class ProgramTables(Structure):
    """``program_t``."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("fields", "messages", "frames", "members", "dense", "known", "constants")
        ),
        *((name, c_int32) for name in ("field_count", "message_count", "frame_count", "oneof_count")),
    )


class ProtobufKernel:
    """The functions of protobuf.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode: Any = library["kafka_eos_protobuf_decode"]
        self.decode.restype = POINTER(Decoded)
        self.decode.argtypes = (
            POINTER(ProgramTables),
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            c_int64,
            POINTER(Decoded),
        )
        self.capacity: Any = library["kafka_eos_protobuf_capacity"]
        self.capacity.restype, self.capacity.argtypes = c_int64, (POINTER(Decoded),)
        self.free: Any = library["kafka_eos_protobuf_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(Decoded),)
        self.encode: Any = library["kafka_eos_protobuf_encode"]
        self.encode.restype = POINTER(Encoded)
        self.encode.argtypes = (
            *(POINTER(ProgramTables), c_void_p, c_void_p),
            *(c_int64, c_char_p, c_int64, c_int64),
        )
        self.free_encoded: Any = library["kafka_eos_protobuf_free_encoded"]
        self.free_encoded.restype, self.free_encoded.argtypes = None, (POINTER(Encoded),)


@lru_cache(maxsize=1)
def kernel() -> ProtobufKernel:
    """Returns the library.

    Raises:
        KernelUnavailableError: if it is missing or cannot be used.
    """
    return ProtobufKernel(load("protobuf"))


def tables(program: Program) -> ProgramTables:
    """Returns the struct with the tables of a program, which must outlive it."""
    arrays = (
        program.fields,
        program.messages,
        program.frames,
        program.members,
        program.dense,
        program.known,
        program.constants,
    )
    counts = (len(program.fields), len(program.messages), len(program.frames), len(program.oneofs))
    return ProgramTables(*(array.ctypes.data for array in arrays), *counts)


def view(address: int | None, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Returns an array on memory of the library, which must outlive it."""
    if not address or not count:
        return np.zeros(0, dtype)
    memory = memoryview((ctypes.c_char * (dtype.itemsize * count)).from_address(address))
    found: npt.NDArray[Any] = np.frombuffer(memory, dtype, count)
    return found
