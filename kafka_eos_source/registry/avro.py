"""The Avro codec: decodes and encodes columns of records with native/avro.c.

`avro_schema` parses schemas; `avro_decode` and `avro_encode` compile them to the programs that run here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.native import load
from kafka_eos_source.native.buffers import NO_MEMORY, Memory, Part, array_pointer, column_of_bytes
from kafka_eos_source.registry.avro_decode import Column, Kind, Program, compile_program
from kafka_eos_source.registry.avro_encode import EncodeProgram, compile_encoder, derive

# the module, as a function would take its name
from kafka_eos_source.registry.avro_schema import parse, to_arrow
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema


def arrow_type(schema: Schema) -> pa.DataType:
    """Returns the Arrow type of decoded records: the one whose Spark type `from_avro` gives.

    Raises:
        InvalidSchemaError: if the schema is not valid, or no Spark type can hold its records.
    """
    return to_arrow(parse(schema))


def decoder(writer: Schema, reader: Schema | None = None) -> Decoder:
    """Returns a decoder of records that were written with one schema into values of another.

    Args:
        writer: The schema of the records.
        reader: The schema of the values; None = that of the writer.

    Raises:
        InvalidSchemaError: if a schema is not valid, no Spark type can hold the values, or the reader's
            schema cannot read records of the writer's.
    """
    written = parse(writer)
    return AvroDecoder(compile_program(written, written if reader is None else parse(reader)), kernel())


def encoder(schema: Schema, values: pa.DataType) -> Encoder:
    """Returns an encoder of values of an Arrow type.

    Fields are matched by name. A field that the values lack is written with its default, or as null if the
    schema allows it.

    Args:
        schema: The schema of the records.
        values: The type of the column, usually a struct.

    Raises:
        InvalidSchemaError: if the schema is not valid, or cannot take the type. The message names the field,
            both types and the fix.
    """
    return AvroEncoder(compile_encoder(parse(schema), values), kernel())


def schema_for(values: pa.DataType, name: str = "topLevelRecord") -> Schema:
    """Returns a schema for values of an Arrow type, with the names and types that Spark's `to_avro` uses.

    A field that can be null is a union that begins with null, and has the default null. Thus columns can be
    added and removed later. (Spark puts null second and writes no default.)

    Args:
        values: The type of the column, usually a struct.
        name: The name of the record.

    Raises:
        InvalidSchemaError: if Avro has no such type, or does not accept the name of a field.
    """
    return derive(values, name)


# -- decoding ------------------------------------------------------------------------------------


class AvroDecoder:
    """Decodes the payloads of one writer schema into values of one reader schema."""

    def __init__(self, program: Program, kernel: AvroKernel) -> None:
        self._program = program
        self._kernel = kernel
        self._arrays = _arrays(program)

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of decoded values."""
        return self._program.columns[0].type

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (see `codec.Decoder`)."""
        messages, described = column_of_bytes(messages)
        given = Input(
            *(array.ctypes.data for array in self._arrays),
            len(self._program.columns),
            *described,
            start,
            most_bytes,
        )
        memory = self._kernel.memory(self._kernel.decode(ctypes.byref(given)))
        block = memory.block
        if not block.rows:
            return Converted(pa.array([], self.arrow_type))
        found = np.frombuffer(memory.buffer(block.errors), ERROR).tolist()
        errors = {row: self._message(*error) for row, *error, _ in found}
        return Converted(_Arrays(memory).array(self._program.columns[0]), errors)

    def _message(self, node: int, code: int, detail: int, more: int) -> str:
        return message(code, detail, more, self._program.paths[node], self._program.reasons.get(node, ""))


def _arrays(program: Program) -> list[npt.NDArray[Any]]:
    """Returns the program as the arrays that ``input_t`` refers to, in its order."""
    kinds = [
        (column.kind, program.column_links[column.index], len(column.children)) for column in program.columns
    ]
    return [
        np.array(program.nodes, np.int64),
        np.array(program.links or [0], np.int64),
        np.array(program.symbols or [0], np.int64),
        np.frombuffer(bytes(program.text) or b"\0", np.uint8),
        np.array(kinds, np.int64),
    ]


class _Arrays:
    """Turns the columns of a block into Arrow arrays, which refer to the block's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._columns = memory.columns(ColumnBuffers)

    def array(self, column: Column) -> pa.Array:
        found = self._columns[column.index]
        if column.kind is Kind.NONE:
            return pa.nulls(found.rows)
        buffers = [self._memory.buffer(found.validity)]
        if column.kind is not Kind.STRUCT:
            buffers.append(self._memory.buffer(found.values))
        if column.kind is Kind.TEXT:
            buffers.append(self._memory.buffer(found.heap))
        if pa.types.is_map(column.type):
            (entries,) = column.children
            keys, items = (self.array(child) for child in entries.children)
            children = [
                pa.StructArray.from_arrays(
                    [keys, items], fields=[column.type.key_field, column.type.item_field]
                )
            ]
        else:
            children = [self.array(child) for child in column.children]
        return pa.Array.from_buffers(column.type, found.rows, buffers, -1, 0, children)


# -- encoding ------------------------------------------------------------------------------------


class AvroEncoder:
    """Encodes values of one Arrow type with one schema."""

    def __init__(self, program: EncodeProgram, kernel: AvroKernel) -> None:
        self._program = program
        self._kernel = kernel
        self._arrays: list[npt.NDArray[Any]] = [
            np.array([node.numbers() for node in program.nodes], np.int64),
            np.array(program.links or [0], np.int64),
            np.array(program.symbols or [0], np.int64),
            np.frombuffer(bytes(program.text) or b"\0", np.uint8),
        ]

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values (see `codec.Encoder`)."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if not values.type.equals(self._program.type):
            values = values.cast(self._program.type)
        capsules = values.__arrow_c_array__()  # keeps the exported array alive
        given = Values(
            *(array.ctypes.data for array in self._arrays),
            array_pointer(capsules[1]),
            self._program.array_count,
            prefix,
            len(prefix),
            most_bytes,
        )
        memory = self._kernel.memory(self._kernel.encode(ctypes.byref(given)))
        block = memory.block
        if not block.rows:
            return Converted(pa.array([], pa.binary()))
        errors = {}
        found = np.frombuffer(memory.buffer(block.errors), ERROR).tolist()
        for row, node, code, detail, more, text in found:
            errors[row] = message(code, detail, more, self._program.paths[node], text=text)
        (column,) = memory.columns(ColumnBuffers)
        parts = [memory.buffer(part) for part in (column.validity, column.values, column.heap)]
        return Converted(pa.Array.from_buffers(pa.binary(), block.rows, parts), errors)


# -- errors of rows ------------------------------------------------------------------------------

MAX_EMPTY_ITEMS = 65536
MAX_DEPTH = 100

#: How much of a value is quoted at most.
QUOTED_BYTES = 48


class Code(IntEnum):
    """Why a row does not decode or encode, as in avro.c."""

    TRUNCATED = 1
    VARINT = 2
    INT_RANGE = 3
    UNION_INDEX = 4
    ENUM_INDEX = 5
    ENUM_SYMBOL = 6
    NEGATIVE_LENGTH = 7
    UTF8 = 8
    DECIMAL_SIZE = 9
    OVERFLOW = 10
    BRANCH = 11
    TRAILING = 12
    SHORT = 13
    EMPTY_ITEMS = 14
    DEPTH = 16
    BOOLEAN = 17
    BLOCK_BYTES = 18
    NULL_VALUE = 19
    FIXED_SIZE = 20
    SYMBOL = 21
    MEMBERS = 22
    DECIMAL_RANGE = 23


_TEXTS: dict[Code, str] = {
    Code.TRUNCATED: "the payload ends too early: {detail} bytes or items are announced, {more} bytes left",
    Code.VARINT: "a number takes more than 64 bits",
    Code.INT_RANGE: "{detail} does not fit into an int",
    Code.UNION_INDEX: "the union has {more} branches, but the payload selects number {detail}",
    Code.ENUM_INDEX: "the enum has {more} symbols, but the payload selects number {detail}",
    Code.ENUM_SYMBOL: "the reader's enum lacks symbol number {detail} of the writer's, and has no default",
    Code.NEGATIVE_LENGTH: "the length {detail} is negative",
    Code.UTF8: "a string is not valid UTF-8",
    Code.DECIMAL_SIZE: "a decimal of {detail} bytes is empty, or has more digits than its precision",
    Code.OVERFLOW: "the timestamp {detail} is too far from 1970 for the unit of the type",
    Code.BRANCH: "the reader's schema does not accept this branch of the writer's union",
    Code.TRAILING: "{detail} bytes follow the value",
    Code.SHORT: "the message has {detail} bytes, fewer than the {more} of its frame",
    Code.EMPTY_ITEMS: "a block has {detail} items of no bytes; at most {more} are accepted in one row",
    Code.DEPTH: "values are nested more than {detail} levels deep",
    Code.BOOLEAN: "byte {detail} is not a boolean",
    Code.BLOCK_BYTES: "a block announces {detail} bytes, {more} are left",
    Code.NULL_VALUE: "the value is null, but the schema does not allow null",
    Code.FIXED_SIZE: "the value has {detail} bytes, but the fixed type has {more}",
    Code.SYMBOL: "the enum has no symbol {text!r}",
    Code.MEMBERS: "{detail} members of the union are set; exactly one must be",
    Code.DECIMAL_RANGE: "the decimal has more digits than the precision of the type",
}


def message(code: int, detail: int, more: int, path: str, reason: str = "", text: bytes = b"") -> str:
    """Returns the message of an error: the field, and the cause."""
    quoted = text.decode(errors="replace")
    cause = _TEXTS[Code(code)].format(detail=detail, more=more, text=quoted)
    where = f"field {path.lstrip('.')}: " if path else ""
    return f"{where}{cause}{f' ({reason})' if reason else ''}"


# -- the C library -------------------------------------------------------------------------------

#: ``error_t`` of avro.c.
ERROR = np.dtype(
    [("row", "i8"), ("node", "i8"), ("code", "i8"), ("detail", "i8"), ("more", "i8"), ("text", "S48")]
)


class ColumnBuffers(Structure):
    """``column_t``."""

    _fields_ = (
        ("kind", c_int64),
        ("first", c_int64),
        ("count", c_int64),
        ("rows", c_int64),
        ("validity", Part),
        ("values", Part),
        ("heap", Part),
    )


class Block(Structure):
    """``block_t`` without its columns, of which there are ``column_count``."""

    _fields_ = (
        ("rows", c_int64),
        ("status", c_int64),
        ("column_count", c_int64),
        ("errors", Part),
    )


class Input(Structure):
    """``input_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("links", c_void_p),
        ("symbols", c_void_p),
        ("text", c_void_p),
        ("columns", c_void_p),
        ("column_count", c_int64),
        ("validity", c_void_p),
        ("offsets", c_void_p),
        ("data", c_void_p),
        ("offset_width", c_int64),
        ("offset", c_int64),
        ("rows", c_int64),
        ("start", c_int64),
        ("most_bytes", c_int64),
    )


class Values(Structure):
    """``values_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("links", c_void_p),
        ("symbols", c_void_p),
        ("text", c_void_p),
        ("array", c_void_p),
        ("array_count", c_int64),
        ("prefix", c_char_p),
        ("prefix_bytes", c_int64),
        ("most_bytes", c_int64),
    )


class AvroKernel:
    """The functions of avro.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode: Any = library["kafka_eos_avro_decode"]
        self.decode.restype, self.decode.argtypes = POINTER(Block), (POINTER(Input),)
        self.encode: Any = library["kafka_eos_avro_encode"]
        self.encode.restype, self.encode.argtypes = POINTER(Block), (POINTER(Values),)
        self.free: Any = library["kafka_eos_avro_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(Block),)

    def memory(self, pointer: Any) -> Memory:
        """Returns the owner of what a function returned.

        Raises:
            MemoryError: if there was not enough memory.
        """
        content = "a batch of Avro records"
        found = Memory(pointer, self.free, content)
        if found.block.status == NO_MEMORY:
            raise MemoryError(f"not enough memory for {content}")
        return found


@lru_cache(maxsize=1)
def kernel() -> AvroKernel:
    """Returns the library.

    Raises:
        KernelUnavailableError: if it is missing or cannot be used.
    """
    return AvroKernel(load("avro"))
