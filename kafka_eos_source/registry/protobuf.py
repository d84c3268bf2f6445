"""The Protobuf codec: finds the messages of schemas, and decodes columns of them with native/protobuf.c.

`protobuf_schema` compiles schemas with protoc, `protobuf_tree` gives their fields Arrow types, and
`protobuf_program` makes the tables that the C library executes; `protobuf_encode` encodes.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema
from kafka_eos_source.registry.protobuf_encode import MessageEncoder
from kafka_eos_source.registry.protobuf_program import (
    COLUMN,
    ERROR,
    ROWS,
    Program,
    ProtobufKernel,
    Slot,
    compile_tree,
    kernel,
    tables,
    view,
)
from kafka_eos_source.registry.protobuf_schema import (
    check_readable,
    find_message,
    list_messages,
    message_at,
    number_of,
    numbered_message,
    path_of,
)
from kafka_eos_source.registry.protobuf_tree import (
    Kind,
    Message,
    UnfitError,
    build_tree,
    enum_name,
    json_text,
    schema_for,
    time_text,
)

__all__ = [
    "arrow_type",
    "decoder",
    "encoder",
    "message_number",
    "message_path",
    "schema_for",
]


def decoder(
    writer: Schema,
    message_path: tuple[int, ...] | int,
    reader: Schema | None = None,
    message: str | None = None,
) -> Decoder:
    """Returns a decoder of the messages that were written with a schema.

    Args:
        writer: the schema with which they were written.
        message_path: the message in that schema, as their frame tells it: a path (Confluent), or a number
            (Glue).
        reader: the schema that decides the type of the column. Fields that the writer does not have are null
            or have their default, and fields that the reader does not have are skipped.
        message: the message of the reader; without it, its only one at the top level.

    Raises:
        InvalidSchemaError: if a schema or the message is not usable, the records are messages of another
            type, or the reader would change values.
    """
    found = None if reader is None else _message(reader, message)
    if isinstance(message_path, int):
        written = numbered_message(writer, message_path)
    else:
        written = message_at(writer, message_path, None if found is None else found.name)
    if found is None:
        if message is not None and message not in (written.full_name, written.name):
            raise InvalidSchemaError(
                f"the records are messages of type {written.full_name}, but {message!r} is expected",
                fix="give a reader schema that says how to read them, or do not name a message",
            )
        found = written
    else:
        if written.name != found.name:  # packages may differ; fields of another type share numbers by chance
            raise InvalidSchemaError(
                f"the records are messages of type {written.full_name}, but {found.full_name} is expected",
                fix="keep records of other types out of the topic, or set them aside with onInvalidRecord",
            )
        return MessageDecoder(build_tree(found), kernel(), check_readable(written, found))
    return MessageDecoder(build_tree(found), kernel())


def encoder(schema: Schema, values: pa.DataType, message: str | None = None) -> Encoder:
    """Returns an encoder of values as messages of a schema; without a name, its only message.

    Raises:
        InvalidSchemaError: if the schema is not usable, or a column does not fit its field.
    """
    return MessageEncoder(build_tree(_message(schema, message)), values, kernel())


def message_path(schema: Schema, message: str | None = None) -> tuple[int, ...]:
    """Returns the path of a message as Confluent's frame stores it; without a name, of the only message."""
    return path_of(schema, _message(schema, message))


def message_number(schema: Schema, message: str | None = None) -> int:
    """Returns the number of a message as Glue's frame stores it; without a name, of the only message."""
    return number_of(_message(schema, message))


def arrow_type(schema: Schema, message: str | None = None) -> pa.StructType:
    """Returns the type of the column that messages of the schema become."""
    return build_tree(_message(schema, message)).arrow_type


def _message(schema: Schema, name: str | None) -> Any:
    if name is not None:
        return find_message(schema, name)
    messages = list_messages(schema)
    outer = [each for each in messages if each.containing_type is None]
    if len(outer) != 1:
        raise InvalidSchemaError(
            f"the schema has {len(outer)} messages at its top level: "
            + ", ".join(each.full_name for each in messages),
            fix="name the message",
        )
    return outer[0]


# -- decoding ------------------------------------------------------------------------------------

#: The most memory that is kept between two calls.
_MOST_SPARE_BYTES = 16 << 20

_NUMBERS = {
    Kind.INT32: np.int32,
    Kind.SINT32: np.int32,
    Kind.UINT32: np.int64,
    Kind.INT64: np.int64,
    Kind.SINT64: np.int64,
    Kind.FIXED32: np.int64,
    Kind.SFIXED32: np.int32,
    Kind.FLOAT: np.float32,
    Kind.SFIXED64: np.int64,
    Kind.DOUBLE: np.float64,
    Kind.TIMESTAMP: np.int64,
    Kind.DURATION: np.int64,
}


class MessageDecoder:
    """Decodes the messages of one type (see `codec.Decoder`).

    Args:
        root: the tree of the message.
        kernel: the loaded library.
        narrowed: fields whose values must be checked (see `compile_tree`).
    """

    def __init__(self, root: Message, kernel: ProtobufKernel, narrowed: frozenset[str] = frozenset()) -> None:
        self._root = root
        self._kernel = kernel
        self._program = compile_tree(root, narrowed)
        self._tables = tables(self._program)
        self._used = (self._tables, self._program)  # a result refers to both
        self._type = root.arrow_type

    @property
    def arrow_type(self) -> pa.StructType:
        """The struct with a column per field of the message."""
        return self._type

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (see `codec.Decoder`)."""
        if isinstance(messages, pa.ChunkedArray):
            messages = messages.combine_chunks()
        wide = pa.types.is_large_binary(messages.type)
        if not wide and not pa.types.is_binary(messages.type):
            messages = messages.cast(pa.binary())
        validity, offsets, data = messages.buffers()
        first = messages.offset
        given = (
            offsets.address + first * (8 if wide else 4) if offsets is not None and len(messages) else 0,
            int(wide),
            data.address if data is not None else 0,
            validity.address if validity is not None else 0,
            first,
            len(messages),
            start,
            most_bytes,
        )
        spare = _Memory.spare(self._kernel, self._used, most_bytes)
        memory = self._memory(*given, spare)
        if spare is not None and not memory.pointer.contents.rows:
            memory = self._memory(*given, None)  # whether a record fits does not depend on earlier ones
        return _Result(self._root, self._program, memory, most_bytes).convert(self._type)

    def _memory(self, *given: Any) -> _Memory:
        pointer = self._kernel.decode(ctypes.byref(self._tables), *given)
        if not pointer:
            raise MemoryError("not enough memory to decode Protobuf messages")
        return _Memory(self._kernel, pointer, self._used)


class _Memory:
    """Owns a result. When the last array that refers to it is gone, the next call may reuse the memory.

    A new result needs a page fault for each 4 KiB, which took a quarter of the time of a batch.
    """

    #: A result that nobody reads any more; at most one, whatever the number of decoders.
    _spares: ClassVar[list[_Memory]] = []

    def __init__(self, kernel: ProtobufKernel, pointer: Any, used: object) -> None:
        self._kernel = kernel
        self.pointer = pointer
        self._used = used

    @classmethod
    def spare(cls, kernel: ProtobufKernel, used: object, most_bytes: int) -> Any:
        """Returns a result to reuse; None if there is none of this program within the limit."""
        try:
            found = cls._spares.pop()
        except IndexError:
            return None
        pointer, found.pointer = found.pointer, None
        if found._used is used and kernel.capacity(pointer) <= most_bytes:
            return pointer
        kernel.free(pointer)
        return None

    def __del__(self) -> None:
        if self.pointer is None:
            return
        if not self._spares and self._kernel.capacity(self.pointer) <= _MOST_SPARE_BYTES:
            self._spares.append(_Memory(self._kernel, self.pointer, self._used))
        else:
            self._kernel.free(self.pointer)


class _Result:
    """The buffers of one call, from which arrays are made."""

    def __init__(self, root: Message, program: Program, memory: _Memory, most_bytes: int) -> None:
        self._root = root
        self._program = program
        self._memory = memory
        found = memory.pointer.contents
        if found.no_memory:
            raise MemoryError("not enough memory to decode Protobuf messages")
        columns = view(found.columns, COLUMN, len(program.fields))
        self._columns = [dict(zip(COLUMN.names or (), each, strict=True)) for each in columns.tolist()]
        self._rows = view(found.frames, ROWS, len(program.frames))["rows"]
        self._validity = view(found.validity.at, np.dtype(np.uint8), found.validity.bytes)
        self._found_errors = view(found.errors.at, ERROR, found.errors.bytes // ERROR.itemsize)
        self._errors: dict[int, str] = {}
        self._fitting = found.rows
        self._json_bytes = most_bytes

    def convert(self, arrow_type: pa.StructType) -> Converted:
        rows = self._fitting
        if not rows:
            return Converted(pa.array([], arrow_type))
        for row, code, field, detail in self._found_errors.tolist():
            self._errors[row] = self._message(code, field, detail)
        children = [self._column(slot) for slot in self._program.slots] or [pa.nulls(rows, pa.string())]
        valid = self._validity[:rows]
        if self._errors:
            valid = valid.copy()
            valid[list(self._errors)] = 0
        values = pa.Array.from_buffers(arrow_type, rows, [_bits(valid)], children=children)
        return Converted(values, dict(sorted(self._errors.items()))).first(self._fitting)

    # -- columns ---------------------------------------------------------------------------------

    def _column(self, slot: Slot) -> pa.Array:
        """Returns the column of a field, with a value per row of its frame."""
        field = slot.field
        rows = int(self._rows[slot.frame])
        if not field.is_repeated:
            valid = self._part(slot, "validity", np.uint8)[:rows] if field.nullable else None
            return self._values(slot, rows, valid, self._part(slot, "offsets", np.int32)[: rows + 1])
        offsets = self._part(slot, "offsets", np.int32)[: rows + 1]
        if not len(offsets):
            offsets = np.zeros(1, np.int32)
        if slot.elements < 0:
            count = self._columns[slot.index]["elements"]
            elements = self._values(slot, count, None, self._part(slot, "entry_offsets", np.int32))
            return _list(field.arrow_type, offsets, elements)
        count = int(self._rows[slot.elements])
        if not field.is_map:
            return _list(field.arrow_type, offsets, self._values(slot, count, None, offsets))
        entries = [self._column(child) for child in slot.children]
        dropped = self._part(slot, "dropped", np.int32)
        if len(dropped):
            kept = np.ones(count, bool)
            kept[dropped] = False
            offsets = np.concatenate(([0], np.cumsum(kept)))[offsets].astype(np.int32)
            mask = pa.array(kept)
            entries = [each.filter(mask) for each in entries]
            count = int(kept.sum())
        pair_fields = [field.arrow_type.key_field, field.arrow_type.item_field]
        pairs = pa.StructArray.from_arrays(entries, fields=pair_fields)
        return pa.Array.from_buffers(
            field.arrow_type, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[pairs]
        )

    def _values(
        self, slot: Slot, count: int, valid: npt.NDArray[np.uint8] | None, offsets: npt.NDArray[np.int32]
    ) -> pa.Array:
        """Returns values that are not lists: one per row, or one per element of a repeated field."""
        field = slot.field
        bits = None if valid is None else _bits(valid)
        if field.message is not None:
            children = [self._column(child) for child in slot.children]
            if field.is_wrapper:
                return _with_validity(children[0], bits)
            children = children or [pa.nulls(count, pa.string())]
            return pa.Array.from_buffers(field.element_type, count, [bits], children=children)
        if field.kind in (Kind.STRING, Kind.BYTES):
            return self._bytes(slot, field.element_type, count, bits, offsets)
        if field.kind is Kind.RAW:
            return self._json(slot, self._bytes(slot, pa.binary(), count, bits, offsets))
        if field.kind is Kind.BOOL:
            buffer = _bits(self._part(slot, "values", np.uint8)[:count])
        elif field.kind in (Kind.UINT64, Kind.FIXED64):
            wide = np.zeros((count, 2), np.uint64)
            wide[:, 0] = self._part(slot, "values", np.uint64)[:count]
            buffer = pa.py_buffer(wide)
        elif field.kind is Kind.ENUM:
            return _enum(slot, self._part(slot, "values", np.int32)[:count], valid)
        else:
            buffer = self._buffer(slot, "values")
        return pa.Array.from_buffers(field.element_type, count, [bits, buffer])

    def _bytes(
        self,
        slot: Slot,
        arrow_type: pa.DataType,
        count: int,
        bits: pa.Buffer | None,
        offsets: npt.NDArray[np.int32],
    ) -> pa.Array:
        buffer = pa.py_buffer(offsets if len(offsets) else np.zeros(1, np.int32))
        return pa.Array.from_buffers(arrow_type, count, [bits, buffer, self._buffer(slot, "data")])

    def _json(self, slot: Slot, payloads: pa.Array) -> pa.Array:
        """Converts messages to JSON, one by one. An error belongs to the row of the root that contains it.

        If the texts take too much memory, the rows of the root end before the one whose text is the last.
        """
        texts: list[str | None] = []
        for index, payload in enumerate(payloads.to_pylist()):
            text = None
            if payload is not None and self._json_bytes >= 0:
                try:
                    text = json_text(slot.field, payload)
                    self._json_bytes -= len(text)
                    if self._json_bytes < 0:
                        self._fitting = min(self._fitting, self._root_row(slot, index))
                except UnfitError as failure:
                    self._errors.setdefault(self._root_row(slot, index), f"{self._name()}: {failure}")
                    text = "" if payloads.null_count == 0 else None
            texts.append(text)
        return pa.array(texts, pa.string())

    def _root_row(self, slot: Slot, index: int) -> int:
        """Returns the row of the root that contains an element of a field, or a row of its frame."""
        if slot.field.is_repeated:
            index = self._owner_row(slot, index)
        frame = slot.frame
        while (owner := self._program.frame_owners[frame]) is not None:
            index = self._owner_row(owner, index)
            frame = owner.frame
        return index

    def _owner_row(self, owner: Slot, index: int) -> int:
        offsets = self._part(owner, "offsets", np.int32)[: int(self._rows[owner.frame]) + 1]
        return int(np.searchsorted(offsets, index, side="right")) - 1

    # -- buffers ---------------------------------------------------------------------------------

    def _part(self, slot: Slot, name: str, dtype: Any) -> npt.NDArray[Any]:
        return np.frombuffer(self._buffer(slot, name), dtype)

    def _buffer(self, slot: Slot, name: str) -> pa.Buffer:
        address, size, _ = self._columns[slot.index][name]
        return pa.foreign_buffer(address, size, self._memory) if address else pa.py_buffer(b"")

    # -- errors ----------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"message {self._root.descriptor.full_name}"

    def _message(self, code: int, index: int, detail: int) -> str:
        field = None if index < 0 else self._program.by_index[index].field
        if field is not None and code in (7, 8):
            return f"{self._name()}: {time_text(field, detail)}"
        where = "" if field is None else f"field {field.path}: "
        return f"{self._name()}: {where}{_REASONS[code].format(detail=detail)}"


_REASONS = {
    1: "the bytes end inside a value",
    2: "a varint has more than 10 bytes",
    3: "the bytes contain an invalid field number or wire type",
    4: "the bytes contain an end of a group (field {detail}) that does not belong there",
    5: "messages are nested more than 100 deep",
    6: "the string is not UTF-8",
    9: "the required field is missing",
    11: "the value has {detail} bytes, fewer than its frame",
    14: "the number does not fit into the type of the reader's schema",
}


def _bits(each_byte: npt.NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(each_byte, bitorder="little"))


def _list(arrow_type: pa.DataType, offsets: npt.NDArray[np.int32], elements: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(
        arrow_type, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[elements]
    )


def _with_validity(array: pa.Array, bits: pa.Buffer | None) -> pa.Array:
    if bits is None:
        return array
    return pa.Array.from_buffers(array.type, len(array), [bits, *array.buffers()[1:]])


def _enum(slot: Slot, numbers: npt.NDArray[np.int32], valid: npt.NDArray[np.uint8] | None) -> pa.Array:
    """Returns the names of an enum's numbers. A number without a name becomes its digits."""
    known = sorted(slot.field.descriptor.enum_type.values_by_number)
    names = [enum_name(slot.field, number) for number in known]
    mask = None if valid is None else valid == 0
    is_dense = known[0] == 0 and known[-1] == len(known) - 1
    if is_dense and (not len(numbers) or (numbers.min() >= 0 and numbers.max() < len(known))):
        return pa.array(names, pa.string()).take(pa.array(numbers, mask=mask))
    table = np.array(known, np.int32)
    places = np.minimum(np.searchsorted(table, numbers), len(table) - 1)
    unknown = table[places] != numbers
    if unknown.any():
        others, inverse = np.unique(numbers[unknown], return_inverse=True)
        places[unknown] = len(names) + inverse
        names += [str(number) for number in others.tolist()]
    return pa.array(names, pa.string()).take(pa.array(places.astype(np.int32), mask=mask))
