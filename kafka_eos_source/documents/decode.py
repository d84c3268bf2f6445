"""Decodes JSON documents into columns of a declared schema, with native/json.c.

A schema becomes a tree of nodes in one flat array: node 0 is the document, and the children of a node follow
each other. Each node has one column. docs/json.md lists the rules, and how they differ from `from_json`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import types

from kafka_eos_source.documents.converted import MAX_DEPTH, MAX_FIELDS, MOST_BYTES, Converted, inside, slices
from kafka_eos_source.documents.zone import zone
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.native import load
from kafka_eos_source.native.buffers import NO_MEMORY, Memory, Part, column_of_bytes
from kafka_eos_source.spark.arrow import arrow_schema


@dataclass(frozen=True)
class JsonDecoding:
    """How to decode a column of JSON documents. Can be pickled.

    Attributes:
        schema: the fields that documents may have, with the types of their values. Other fields of a document
            are skipped; a field that is missing or null is null, also if the schema says NOT NULL.
        time_zone: the time zone of timestamps that name none, as in ``spark.sql.session.timeZone``.
        partial: whether a value that does not fit becomes null while the other fields keep their values, and
            bytes that are not a JSON object become a row of nulls, as in ``from_json``'s mode PERMISSIVE.

    Raises:
        InvalidSchemaError: if a field has a type that documents are not decoded to, two fields of a struct
            have the same name, or there is no field.
        InvalidOptionError: if the time zone is unknown.
    """

    takes_headers: ClassVar[bool] = False
    schema: types.StructType
    time_zone: str = "UTC"
    partial: bool = False

    def __post_init__(self) -> None:
        """Checks the schema."""
        self._program()

    @property
    def rows(self) -> types.StructType:
        """The schema of the rows: each field can be null, and CHAR and VARCHAR are STRING."""
        return self._program().rows

    @property
    def arrow_type(self) -> pa.StructType:
        """The type of the values."""
        return self._program().arrow_type

    def decode(self, column: pa.Array, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes documents.

        Args:
            column: the documents, as binary or as strings; null where a record has none.
            most_bytes: the most that the result may take.

        Returns:
            The rows as structs, one for each document, and an error for each document that is bad. The row of
            a bad document is null; see `partial` for another rule. If more would take too much memory, only
            the first documents are decoded (see `Converted`).
        """
        return _decode(self._program(), column, self.partial, most_bytes)

    def slices(self, column: pa.Array) -> Iterator[Converted]:
        """Decodes a column of documents slice by slice, so that each takes a limited amount of memory."""
        return slices(self.decode, column, "decoded")

    def _program(self) -> _Program:
        return _compiled(self.schema, self.time_zone)


# -- compiling -----------------------------------------------------------------------------------


class Op(IntEnum):
    """What a node reads, as in json.c. The comments name the operands."""

    BOOLEAN = 0
    INT8 = 1  # a: the largest number
    INT16 = 2  # likewise
    INT32 = 3  # likewise
    INT64 = 4  # likewise
    FLOAT = 5
    DOUBLE = 6
    DECIMAL = 7  # a: precision; b: scale
    STRING = 8
    BINARY = 9
    DATE = 10
    TIMESTAMP = 11  # a: the largest number of seconds
    TIMESTAMP_NTZ = 12
    STRUCT = 13
    ARRAY = 14  # its child reads the items
    MAP = 15  # its children read the keys, and the values


_MOST_SECONDS = 9_223_372_036_854
_WHOLE = "a whole number from {} to {}, written without fraction, exponent and quotes"


class _Plain(NamedTuple):
    """How a type that contains no other types is read, and what documents must contain."""

    op: Op
    expected: str
    a: int = 0


def _integer(op: Op, bits: int) -> _Plain:
    most = (1 << (bits - 1)) - 1
    return _Plain(op, _WHOLE.format(-most - 1, most), most)


_NUMBER = 'a number that is not too large, or "NaN", "Infinity" or "-Infinity"'
_PLAIN: Mapping[type[types.DataType], _Plain] = {
    types.BooleanType: _Plain(Op.BOOLEAN, "true or false"),
    types.ByteType: _integer(Op.INT8, 8),
    types.ShortType: _integer(Op.INT16, 16),
    types.IntegerType: _integer(Op.INT32, 32),
    types.LongType: _integer(Op.INT64, 64),
    types.FloatType: _Plain(Op.FLOAT, _NUMBER),
    types.DoubleType: _Plain(Op.DOUBLE, _NUMBER),
    types.StringType: _Plain(Op.STRING, "a string"),
    types.BinaryType: _Plain(Op.BINARY, "a string in base64, with padding"),
    types.DateType: _Plain(Op.DATE, 'a string such as "2026-01-31"'),
    types.TimestampType: _Plain(
        Op.TIMESTAMP,
        'a string such as "2026-01-31T14:05:00.25Z" or "2026-01-31 14:05:00", or seconds since 1970 as a '
        "whole number",
        _MOST_SECONDS,
    ),
    types.TimestampNTZType: _Plain(
        Op.TIMESTAMP_NTZ, 'a string such as "2026-01-31T14:05:00.25", without a time zone'
    ),
}


@dataclass(eq=False)
class _Node:
    """``node_t`` of json.c, and what error messages say about the field."""

    op: Op
    path: str
    type: types.DataType
    expected: str = ""
    a: int = 0
    b: int = 0
    first: int = 0
    count: int = 0
    name: bytes = b""


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled schema.

    Attributes:
        rows: the schema of the rows.
        arrow_type: likewise, as the type of a struct.
        nodes: all nodes.
        numbers, names: the nodes and their names as json.c takes them.
        turns, offsets: the time zone as json.c takes it.
    """

    rows: types.StructType
    arrow_type: pa.StructType
    nodes: Sequence[_Node]
    numbers: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]
    turns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


@lru_cache(maxsize=16)
def _compiled(schema: types.StructType, time_zone: str) -> _Program:
    """Returns the program of a schema.

    Raises:
        InvalidSchemaError: if documents cannot be decoded to the schema.
        InvalidOptionError: if the time zone is unknown.
    """
    if not isinstance(schema, types.StructType) or not schema.fields:
        raise InvalidSchemaError(
            "the schema of JSON documents declares no fields.",
            fix="declare the fields that you need, such as 'id BIGINT, name STRING'.",
        )
    nodes = _nodes(schema)
    rows = _nullable(schema)
    assert isinstance(rows, types.StructType)
    names = bytearray()
    numbers = []
    for node in nodes:
        numbers.append((node.op, node.first, node.count, node.a, node.b, len(names), len(node.name)))
        names += node.name
    turns, offsets = _zone_table(time_zone)
    return _Program(
        rows,
        pa.struct(list(arrow_schema(rows))),
        nodes,
        np.array(numbers, np.int64),
        np.frombuffer(bytes(names) + bytes(8), np.uint8),
        np.array(turns, np.int64),
        np.array(offsets, np.int64),
    )


def _zone_table(name: str) -> tuple[list[int], list[int]]:
    """Returns a time zone as a table: local times at which the offset from UTC changes, and the offsets.

    The first offset is in force before the first change. Where a local time occurs twice, or never, it has
    the offset before the change, as in Java.

    Raises:
        InvalidOptionError: if the time zone is unknown.
    """
    found = zone(name)
    turns = found.starts[1:] + np.maximum(found.offsets[:-1], found.offsets[1:])
    return turns.tolist(), found.offsets.tolist()


def _nodes(schema: types.StructType) -> list[_Node]:
    """Returns the nodes of a schema, level by level."""
    nodes = [_node(schema, "")]
    at, level, past = 0, 1, 1
    while at < len(nodes):
        if at == past:
            level, past = level + 1, len(nodes)
        node = nodes[at]
        node.first = len(nodes)
        nodes.extend(_children(node))
        node.count = len(nodes) - node.first
        if len(nodes) > MAX_FIELDS or level > MAX_DEPTH:
            raise InvalidSchemaError(
                f"the schema of JSON documents has more than {MAX_FIELDS:,} fields, or more than {MAX_DEPTH} "
                f"types inside each other.",
                fix="declare the fields that you need, and the rest as STRING.",
            )
        at += 1
    return nodes


def _children(node: _Node) -> list[_Node]:
    found = node.type
    if isinstance(found, types.ArrayType):
        return [_node(found.elementType, inside(node.path, "[]"))]
    if isinstance(found, types.MapType):
        value = _node(found.valueType, inside(node.path, "{}"))
        return [_Node(Op.STRING, inside(node.path, "{} (its name)"), types.StringType()), value]
    if not isinstance(found, types.StructType):
        return []
    children: list[_Node] = []
    known: dict[str, str] = {}
    for each in found.fields:
        path = inside(node.path, f".{each.name}" if node.path else each.name)
        other = known.get(each.name.casefold())
        if other is not None:
            where = f" in {node.path}" if node.path else ""
            written = "" if other == each.name else f", the other is written {other!r}"
            raise InvalidSchemaError(
                f"the schema of JSON documents has two fields {each.name!r}{where}{written}.",
                fix="declare the field once. Spark does not tell names apart by the case of letters.",
            )
        known[each.name.casefold()] = each.name
        child = _node(each.dataType, path)
        child.name = _encoded(each.name, path)
        children.append(child)
    return children


def _encoded(name: str, path: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidSchemaError(
            f"the name of the field {path!r} contains half of a surrogate pair, which is no character.",
            fix="correct the name.",
        ) from None


def _node(found: types.DataType, path: str) -> _Node:
    if isinstance(found, types.StructType):
        return _Node(Op.STRUCT, path, found, "an object")
    if isinstance(found, types.ArrayType):
        return _Node(Op.ARRAY, path, found, "an array")
    if isinstance(found, types.MapType) and isinstance(found.keyType, _TEXTS):
        return _Node(Op.MAP, path, found, "an object")
    if isinstance(found, types.DecimalType):
        before = found.precision - found.scale
        expected = f"a number, or a string with one, with at most {before} digits before the point"
        return _Node(Op.DECIMAL, path, found, expected, found.precision, found.scale)
    if isinstance(found, _TEXTS):
        found = types.StringType() if not isinstance(found, types.StringType) else found
    plain = _PLAIN.get(type(found))
    if plain is None:
        raise InvalidSchemaError(
            f"field {path}: JSON documents are not decoded to the type {found.simpleString().upper()}.",
            fix="declare the field as STRING, which takes any value as its JSON text, and convert it later; "
            "declare a map with keys of the type STRING.",
        )
    return _Node(plain.op, path, found, plain.expected, plain.a)


#: Types that are read as STRING. As in Spark's parser, nobody checks the lengths of CHAR and VARCHAR.
_TEXTS = (types.StringType, types.CharType, types.VarcharType)


def _nullable(found: types.DataType) -> types.DataType:
    """Returns the type whose fields, items and values can be null, and whose texts are STRING."""
    if isinstance(found, types.StructType):
        return types.StructType(
            [types.StructField(each.name, _nullable(each.dataType), True) for each in found.fields]
        )
    if isinstance(found, types.ArrayType):
        return types.ArrayType(_nullable(found.elementType), True)
    if isinstance(found, types.MapType):
        return types.MapType(_nullable(found.keyType), _nullable(found.valueType), True)
    if isinstance(found, (types.CharType, types.VarcharType)):
        return types.StringType()
    return found


# -- decoding ------------------------------------------------------------------------------------


def _decode(program: _Program, documents: pa.Array, partial: bool, most_bytes: int) -> Converted:
    documents, described = column_of_bytes(documents)
    given = _Input(
        program.numbers.ctypes.data,
        len(program.nodes),
        program.names.ctypes.data,
        _powers().ctypes.data,
        program.turns.ctypes.data,
        program.offsets.ctypes.data,
        len(program.turns),
        *described,
        most_bytes,
        partial,
    )
    kernel, content = _kernel(), "a batch of JSON documents"
    memory = Memory(kernel.decode(ctypes.byref(given)), kernel.free, content)
    if memory.block.status == NO_MEMORY:
        raise MemoryError(f"not enough memory for {content}")
    if not memory.block.rows:
        return Converted(pa.array([], program.arrow_type))
    errors = {
        row: _message(program.nodes[node], code, at, size, text)
        for row, node, code, at, size, text in np.frombuffer(
            memory.buffer(memory.block.errors), _ERROR
        ).tolist()
    }
    return Converted(_array(memory, program.nodes, 0, program.arrow_type), errors)


@lru_cache(maxsize=1)
def _powers() -> npt.NDArray[np.uint64]:
    """Returns the first 128 bits of the powers of five from -342 to 308, which `nearest` of json.c needs."""
    words = []
    for exponent in range(-342, 309):
        power = 5 ** abs(exponent)
        if exponent >= 0:
            found = power << 128 >> power.bit_length()
        else:
            bits = (power - 1).bit_length()
            found = (1 << (bits + 127 if exponent >= -27 else 2 * bits + 128)) // power + 1
            found >>= max(found.bit_length() - 128, 0)
        words += [found >> 64, found & ((1 << 64) - 1)]
    return np.array(words, np.uint64)


# -- errors of rows ------------------------------------------------------------------------------


class Code(IntEnum):
    """Why a row is bad, as in json.c. From EMPTY on, the bytes are not one JSON object."""

    MISFIT = 1
    SURROGATE = 2
    REPEATED_KEY = 3
    LONG_NUMBER = 4
    EMPTY = 16
    NO_OBJECT = 17
    ENDS_EARLY = 18
    UTF8 = 19
    CONTROL_CHARACTER = 20
    ESCAPE = 21
    NO_VALUE = 22
    NUMBER = 23
    NAME = 24
    COLON = 25
    END_OF_FIELD = 26
    END_OF_ITEM = 27
    TOO_DEEP = 28
    TRAILING = 29


_TEXTS_OF_CODES: Mapping[int, str] = {
    Code.MISFIT: "{shown} does not fit {type}; expected {expected}",
    Code.SURROGATE: "{shown} contains half of a surrogate pair, which is no character; expected text",
    Code.REPEATED_KEY: "{shown} contains a name twice; expected an object with different names",
    Code.LONG_NUMBER: "{shown} has {bytes} characters; expected a number of at most 1,000",
    Code.EMPTY: "it is empty",
    Code.NO_OBJECT: "it is {shown}",
    Code.ENDS_EARLY: "it ends at byte {at}, inside a value",
    Code.UTF8: "it is not valid UTF-8",
    Code.CONTROL_CHARACTER: "a string contains a control character at byte {at}, {shown}",
    Code.ESCAPE: "the escape sequence at byte {at} is unknown, {shown}",
    Code.NO_VALUE: "expected a value at byte {at}, found {shown}",
    Code.NUMBER: "expected a digit of a number at byte {at}, found {shown}",
    Code.NAME: "expected the name of a field in double quotes at byte {at}, found {shown}",
    Code.COLON: "expected a colon at byte {at}, found {shown}",
    Code.END_OF_FIELD: "expected a comma or a closing brace at byte {at}, found {shown}",
    Code.END_OF_ITEM: "expected a comma or a closing bracket at byte {at}, found {shown}",
    Code.TOO_DEEP: "it is nested more than 254 levels deep",
    Code.TRAILING: "more follows behind the object at byte {at}, {shown}",
}
_SHOWN = 40


def _message(node: _Node, code: int, at: int, size: int, text: bytes) -> str:
    """Returns the error of a row: the field, the value, and what was expected."""
    found = _TEXTS_OF_CODES[code].format(
        shown=_shown(text, size),
        type=node.type.simpleString().upper() if node.op < Op.STRUCT else node.op.name,
        expected=node.expected,
        at=at,
        bytes=size,
    )
    if code >= Code.EMPTY:
        return f"the value is no JSON object: {found}"
    return f"field {node.path}: {found}"


def _shown(text: bytes, size: int) -> str:
    """Returns the beginning of a value as printable text."""
    cut = text.decode(errors="replace").rstrip("�")[:_SHOWN]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)
    return shown if len(cut.encode()) >= size else shown + "…"


# -- the C library -------------------------------------------------------------------------------

#: ``error_t`` of json.c.
_ERROR = np.dtype(
    [("row", "i8"), ("node", "i8"), ("code", "i8"), ("at", "i8"), ("bytes", "i8"), ("text", "S64")]
)


class _Column(Structure):
    """``column_t``."""

    _fields_ = (
        ("rows", c_int64),
        ("capacity", c_int64),
        ("validity", Part),
        ("values", Part),
        ("heap", Part),
    )


class _Block(Structure):
    """``block_t`` without its columns, of which there are ``column_count``."""

    _fields_ = (
        ("rows", c_int64),
        ("status", c_int64),
        ("column_count", c_int64),
        ("errors", Part),
    )


class _Input(Structure):
    """``input_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("node_count", c_int64),
        ("names", c_void_p),
        ("powers", c_void_p),
        ("zone_turns", c_void_p),
        ("zone_offsets", c_void_p),
        ("zone_turn_count", c_int64),
        ("validity", c_void_p),
        ("offsets", c_void_p),
        ("data", c_void_p),
        ("offset_width", c_int64),
        ("offset", c_int64),
        ("rows", c_int64),
        ("most_bytes", c_int64),
        ("is_partial", c_int64),
    )


class _Kernel:
    """The functions of json.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode: Any = library["kafka_eos_json_decode"]
        self.decode.restype, self.decode.argtypes = POINTER(_Block), (POINTER(_Input),)
        self.free: Any = library["kafka_eos_json_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(_Block),)


@lru_cache(maxsize=1)
def _kernel() -> _Kernel:
    """Returns the library.

    Raises:
        KernelUnavailableError: if it is missing or cannot be used.
    """
    return _Kernel(load("json"))


def _array(memory: Memory, nodes: Sequence[_Node], index: int, found: pa.DataType) -> pa.Array:
    """Returns the column of a node as an array of an Arrow type, which refers to the memory."""
    node, column = nodes[index], memory.columns(_Column)[index]
    buffers = [memory.buffer(column.validity)]
    if node.op != Op.STRUCT:
        buffers.append(memory.buffer(column.values))
    if node.op in (Op.STRING, Op.BINARY):
        buffers.append(memory.buffer(column.heap))
    children = []
    if node.op == Op.STRUCT:
        children = [_array(memory, nodes, node.first + i, found.field(i).type) for i in range(node.count)]
    elif node.op == Op.ARRAY:
        children = [_array(memory, nodes, node.first, found.value_type)]
    elif node.op == Op.MAP:
        entries = [
            _array(memory, nodes, node.first, found.key_type),
            _array(memory, nodes, node.first + 1, found.item_type),
        ]
        children = [pa.StructArray.from_arrays(entries, fields=[found.key_field, found.item_field])]
    return pa.Array.from_buffers(found, column.rows, buffers, -1, 0, children)
