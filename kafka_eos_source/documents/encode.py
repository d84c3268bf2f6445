"""Writes Arrow columns as JSON documents and as the text of keys, byte for byte as Spark does.

A stream whose records are made in the read, without the JVM, must write the same bytes as with Spark's
``to_json`` and ``cast(… as string)``. native/json_text.c writes them; this module compiles a type to its
program. docs/json.md lists how each type is written.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kafka_eos_source.documents.converted import MAX_DEPTH, MOST_BYTES
from kafka_eos_source.documents.zone import Zone, zone
from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.native import load
from kafka_eos_source.native.buffers import NO_MEMORY, Memory, Part, array_pointer


class _Write(IntEnum):
    """What a node writes, as in json_text.c. The comments name the operands."""

    NULL = 0
    BOOLEAN = 1
    INTEGER = 2  # a: bytes of the Arrow value
    FLOAT = 3
    DOUBLE = 4
    DECIMAL = 5  # a: scale; b: 1 = with an exponent below 10^-6
    STRING = 6  # a: bytes of an Arrow offset
    BINARY = 7  # likewise
    DATE = 8
    TIMESTAMP = 9  # a: `_Form`
    STRUCT = 10  # a: 1 = fields that are null are written too
    LIST = 11  # a: bytes of an Arrow offset; link 0: items
    MAP = 12  # likewise; links: keys, items, entries


class _Quotes(IntEnum):
    """Which values are put between quotes."""

    BARE = 0
    JSON = 1
    KEY = 2


class _Form(IntFlag):
    """How a timestamp is written, as in json_text.c."""

    SPACE = 1
    MICROS = 2
    TRIMMED = 4
    MINUTES = 8
    SECONDS = 16


@dataclass(frozen=True)
class _Forms:
    """How timestamps are written, and whether small decimals have exponents and null fields are written."""

    timestamp: _Form
    timestamp_ntz: _Form
    has_exponents: bool = True
    has_nulls: bool = False


#: ``to_json`` without options.
_VALUE = _Forms(_Form.SECONDS, _Form(0))
#: ``to_json`` with the formats that `app.records` sets for keys: without microseconds, or the offset from
#: UTC, different keys would become the same text.
_KEY = _Forms(_Form.MICROS | _Form.MINUTES, _Form.MICROS)


@dataclass(frozen=True)
class JsonEncoding:
    """Writes rows as JSON objects, as ``to_json`` does without options.

    Attributes:
        type_: the type of the values, usually a struct; it may be an array or a map too.
        time_zone: ``spark.sql.session.timeZone``.
        has_nulls: whether fields that are null are written too, as Spark does without
            ``spark.sql.jsonGenerator.ignoreNullFields``.

    Raises:
        InvalidSchemaError: if only Spark can write the type, or the time zone is unknown.
    """

    type_: DataType
    time_zone: str
    has_nulls: bool = False
    _writer: _Writer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compiles the type."""
        if not isinstance(self.type_, StructType | ArrayType | MapType):
            raise _refusal("", self.type_, "is no struct, array or map, which to_json needs")
        object.__setattr__(
            self,
            "_writer",
            _Writer(self.type_, self.time_zone, replace(_VALUE, has_nulls=self.has_nulls), _Quotes.JSON),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments only."""
        return JsonEncoding, (self.type_, self.time_zone, self.has_nulls)

    def encode(self, values: pa.Array | pa.RecordBatch, most_bytes: int | None = None) -> pa.Array:
        """Writes rows; null where the row is null.

        Args:
            values: the rows; fields are matched by position.
            most_bytes: the most memory of the text; None = `MOST_BYTES`.

        Returns:
            One document for each row (binary). If more would take too much memory, only the first rows were
            written; none if the first row alone takes too much.

        Raises:
            InvalidSchemaError: if the rows are not of the type.
        """
        return self._writer.write(values, most_bytes)

    def slices(self, values: pa.Array | pa.RecordBatch) -> Iterator[pa.Array]:
        """Writes all rows, and yields the documents slice by slice; one slice unless they are very large.

        Raises:
            InvalidRecordError: if one row alone takes more than `MOST_BYTES`.
            InvalidSchemaError: if the rows are not of the type.
        """
        return _slices(self, values)


@dataclass(frozen=True)
class KeyEncoding:
    """Writes the keys of records as `app.records.as_text` does in Spark.

    Strings and bytes stay as they are, nested values become JSON, and all others are cast to strings. Several
    columns that make up a key are one struct.

    Attributes:
        type_: the type of the keys.
        time_zone: ``spark.sql.session.timeZone``.
        is_ansi: ``spark.sql.ansi.enabled``: without it, casts write small decimals with an exponent.
        has_nulls: see `JsonEncoding`.

    Raises:
        InvalidSchemaError: if only Spark can write the type, or the time zone is unknown. Spark writes some
            floating point numbers with more digits on versions of Java before 19; a key, and thus its
            partition, must not depend on who writes it.
    """

    type_: DataType
    time_zone: str
    is_ansi: bool = True
    has_nulls: bool = False
    _writer: _Writer | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compiles the type."""
        writer = None
        if not isinstance(self.type_, StringType | BinaryType):
            _check_key(self.type_, "")
            forms, quotes = replace(_KEY, has_nulls=self.has_nulls), _Quotes.JSON
            if not isinstance(self.type_, StructType | ArrayType | MapType):
                ntz = _Form.SPACE | _Form.TRIMMED
                forms, quotes = _Forms(_KEY.timestamp, ntz, not self.is_ansi), _Quotes.BARE
            writer = _Writer(self.type_, self.time_zone, forms, quotes)
        object.__setattr__(self, "_writer", writer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments only."""
        return KeyEncoding, (self.type_, self.time_zone, self.is_ansi, self.has_nulls)

    def encode(self, values: pa.Array | pa.RecordBatch, most_bytes: int | None = None) -> pa.Array:
        """Writes keys (binary), as `JsonEncoding.encode` does."""
        if self._writer is None:
            return _cast(_one(values), pa.binary())
        return self._writer.write(values, most_bytes)

    def slices(self, values: pa.Array | pa.RecordBatch) -> Iterator[pa.Array]:
        """Writes all keys, as `JsonEncoding.slices` does."""
        return _slices(self, values)


def _slices(encoding: JsonEncoding | KeyEncoding, values: pa.Array | pa.RecordBatch) -> Iterator[pa.Array]:
    rows, at = len(values), 0
    while True:
        made = encoding.encode(values.slice(at))
        if not len(made) and at < rows:
            raise InvalidRecordError(
                f"row {at} of a batch takes more than {MOST_BYTES >> 20} MiB as text.",
                fix="leave the large column out of the record, or write it in parts.",
            )
        yield made
        at += len(made)
        if at >= rows:
            return


def _check_key(type_: DataType, path: str) -> None:
    if isinstance(type_, FloatType | DoubleType):
        raise _refusal(path, type_, "has a text that depends on the version of Java")
    for each, inside in _children(type_, path):
        _check_key(each, inside)


def _children(type_: DataType, path: str) -> list[tuple[DataType, str]]:
    if isinstance(type_, StructType):
        return [(each.dataType, f"{path}.{each.name}") for each in type_]
    if isinstance(type_, ArrayType):
        return [(type_.elementType, f"{path}[]")]
    if isinstance(type_, MapType):
        return [(type_.keyType, f"{path}{{}} (key)"), (type_.valueType, f"{path}{{}}")]
    return []


def _refusal(path: str, type_: DataType, why: str) -> InvalidSchemaError:
    what = f"column {path.lstrip('.')!r} of type" if path else "the type"
    return InvalidSchemaError(
        f"{what} {type_.simpleString()} {why}.",
        fix="cast the column to string, or let Spark write the records.",
    )


# -- compiling a type ----------------------------------------------------------------------------

_INTEGERS: dict[type[DataType], pa.DataType] = {
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
}


@dataclass
class _Node:
    """``node_t`` of json_text.c."""

    op: _Write
    quotes: _Quotes
    array: int
    first: int = 0
    size: int = 0
    a: int = 0
    b: int = 0
    name: int = 0
    name_bytes: int = 0

    def numbers(self) -> tuple[int, ...]:
        """Returns the members in the order of the C structure."""
        return (
            self.op,
            self.quotes,
            self.array,
            self.first,
            self.size,
            self.a,
            self.b,
            self.name,
            self.name_bytes,
        )


@dataclass
class _Program:
    """A compiled type. Node 0 writes a value of the type `arrow`, which consists of `array_count` arrays."""

    arrow: pa.DataType
    array_count: int = 0
    nodes: list[_Node] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    arrays: tuple[npt.NDArray[Any], ...] = ()

    def freeze(self) -> _Program:
        """Makes the arrays that the library reads."""
        self.arrays = (
            np.array([node.numbers() for node in self.nodes], np.int64),
            np.array(self.links or [0], np.int64),
            np.frombuffer(bytes(self.text) or b"\0", np.uint8),
        )
        return self


class _Compiler:
    """Compiles a Spark type together with the Arrow type of the values."""

    def __init__(self, forms: _Forms, program: _Program) -> None:
        self._forms = forms
        self._program = program

    def compile(self, type_: DataType, arrow: pa.DataType, quotes: _Quotes) -> int:
        """Adds the nodes that write values of a type, and returns the number of the first."""
        place = self._program.array_count
        self._program.array_count += 1
        node = _Node(_Write.NULL, quotes, place)
        self._program.nodes.append(node)
        index = len(self._program.nodes) - 1
        if isinstance(type_, StructType):
            node.op, node.a = _Write.STRUCT, self._forms.has_nulls
            links = []
            for each, inner in zip(type_, arrow, strict=True):
                child = self.compile(each.dataType, inner.type, quotes)
                self._name(self._program.nodes[child], each.name)
                links.append(child)
            self._link(node, links)
        elif isinstance(type_, ArrayType):
            node.op, node.a = _Write.LIST, _width(arrow)
            self._link(node, [self.compile(type_.elementType, arrow.value_type, quotes)])
        elif isinstance(type_, MapType):
            node.op, node.a = _Write.MAP, 4
            self._program.nodes.append(_Node(_Write.STRUCT, quotes, self._program.array_count))
            entries = len(self._program.nodes) - 1
            self._program.array_count += 1
            keys = self.compile(type_.keyType, arrow.key_type, _Quotes.KEY)
            items = self.compile(type_.valueType, arrow.item_type, quotes)
            self._link(node, [keys, items, entries])
        else:
            self._value(node, type_, arrow)
        return index

    def _value(self, node: _Node, type_: DataType, arrow: pa.DataType) -> None:
        is_key = node.quotes is _Quotes.KEY
        if isinstance(type_, StringType | BinaryType):
            node.op = _Write.STRING if isinstance(type_, StringType) else _Write.BINARY
            node.a = _width(arrow)
        elif type(type_) in _INTEGERS:
            node.op, node.a = _Write.INTEGER, arrow.bit_width // 8
        elif isinstance(type_, DecimalType):
            node.op, node.a, node.b = _Write.DECIMAL, type_.scale, self._forms.has_exponents
        elif isinstance(type_, DateType):  # as a key of a map, Spark writes how it stores the date
            node.op, node.a = (_Write.INTEGER, 4) if is_key else (_Write.DATE, 0)
        elif isinstance(type_, TimestampType | TimestampNTZType):
            is_ntz = isinstance(type_, TimestampNTZType)
            form = self._forms.timestamp_ntz if is_ntz else self._forms.timestamp
            node.op, node.a = (_Write.INTEGER, 8) if is_key else (_Write.TIMESTAMP, form)
        elif isinstance(type_, FloatType):
            node.op = _Write.FLOAT
        elif isinstance(type_, DoubleType):
            node.op = _Write.DOUBLE
        elif isinstance(type_, BooleanType):
            node.op = _Write.BOOLEAN

    def _name(self, node: _Node, name: str) -> None:
        node.name = len(self._program.text)
        self._program.text += _named(name)
        node.name_bytes = len(self._program.text) - node.name

    def _link(self, node: _Node, links: list[int]) -> None:
        node.first, node.size = len(self._program.links), len(links)
        self._program.links.extend(links)


def _named(name: str) -> bytes:
    """Returns what precedes the value of a field: a comma, its name as Jackson writes it, and a colon."""
    quoted = json.dumps(name, ensure_ascii=False)
    quoted = re.sub(r"\\u[0-9a-f]{4}", lambda found: "\\u" + found[0][2:].upper(), quoted)
    return f",{quoted}:".encode()


def _width(arrow: pa.DataType) -> int:
    kinds = pa.types
    is_large = kinds.is_large_string(arrow) or kinds.is_large_binary(arrow) or kinds.is_large_list(arrow)
    return 8 if is_large else 4


def _check(type_: DataType, path: str, depth: int, is_map_key: bool = False) -> bool:
    """Checks that a type can be written. Returns whether it contains timestamps with a time zone.

    Raises:
        InvalidSchemaError: if only Spark can write it.
    """
    if depth > MAX_DEPTH:
        raise _refusal(path, type_, f"is nested more than {MAX_DEPTH} levels deep")
    if is_map_key and isinstance(type_, BinaryType | StructType | ArrayType | MapType | NullType):
        raise _refusal(path, type_, "is the key of a map; to_json has no text for such keys")
    if isinstance(type_, DecimalType) and type_.scale < 0:
        raise _refusal(path, type_, "has a negative scale")
    if not isinstance(type_, StructType | ArrayType | MapType):
        if not isinstance(type_, StringType) and type(type_) not in _SIMPLE:
            raise _refusal(path, type_, "is a type that only Spark can write")
        return isinstance(type_, TimestampType)
    has_zone = False
    for number, (each, inside) in enumerate(_children(type_, path)):
        try:
            inside.encode()
        except UnicodeEncodeError as failure:
            raise _refusal(inside, each, f"has a name that is no text: {failure}") from failure
        is_key = isinstance(type_, MapType) and number == 0
        has_zone = _check(each, inside, depth + 1, is_key) or has_zone
    return has_zone


_SIMPLE = {
    *_INTEGERS,
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    NullType,
    TimestampNTZType,
    TimestampType,
}


def _plain(type_: DataType, arrow: pa.DataType, path: str) -> pa.DataType:
    """Returns the Arrow type to which values are cast before they are written; mostly the one they have.

    Raises:
        InvalidSchemaError: if values of the Arrow type are none of the Spark type.
    """
    kinds = pa.types
    if isinstance(arrow, pa.BaseExtensionType):
        return _plain(type_, arrow.storage_type, path)
    if kinds.is_dictionary(arrow):
        return _plain(type_, arrow.value_type, path)
    if isinstance(type_, StructType) and kinds.is_struct(arrow) and arrow.num_fields == len(type_):
        return pa.struct(
            [
                inner.with_type(_plain(each.dataType, inner.type, f"{path}.{each.name}"))
                for each, inner in zip(type_, arrow, strict=True)
            ]
        )
    if isinstance(type_, ArrayType):
        if kinds.is_large_list(arrow):
            return pa.large_list(_field(arrow.value_field, type_.elementType, f"{path}[]"))
        if kinds.is_list(arrow) or kinds.is_fixed_size_list(arrow) or kinds.is_list_view(arrow):
            return pa.list_(_field(arrow.value_field, type_.elementType, f"{path}[]"))
    if isinstance(type_, MapType) and kinds.is_map(arrow):
        return pa.map_(
            _field(arrow.key_field, type_.keyType, f"{path}{{}} (key)"),
            _field(arrow.item_field, type_.valueType, f"{path}{{}}"),
        )
    found = _leaf(type_, arrow)
    if found is None:
        raise InvalidSchemaError(
            f"{f'column {path.lstrip(chr(46))!r}' if path else 'the values'}: Arrow type {arrow} is not "
            f"{type_.simpleString()}.",
            fix="give the column the declared type.",
        )
    return found


def _field(inner: pa.Field, type_: DataType, path: str) -> pa.Field:
    return inner.with_type(_plain(type_, inner.type, path))


def _leaf(type_: DataType, arrow: pa.DataType) -> pa.DataType | None:
    """Returns the type to which a column without children is cast; None if it is of another kind."""
    kinds = pa.types
    if isinstance(type_, NullType):
        return pa.null() if kinds.is_null(arrow) else None
    if isinstance(type_, StructType | ArrayType | MapType):
        return None
    if isinstance(type_, StringType):
        return _text(arrow, pa.string(), pa.large_string(), "string")
    if isinstance(type_, BinaryType):
        return _text(arrow, pa.binary(), pa.large_binary(), "binary")
    if type(type_) in _INTEGERS:
        return _INTEGERS[type(type_)] if kinds.is_integer(arrow) or kinds.is_null(arrow) else None
    if isinstance(type_, DecimalType):
        wanted = pa.decimal128(type_.precision, type_.scale)
        return wanted if kinds.is_decimal(arrow) or kinds.is_null(arrow) else None
    if isinstance(type_, TimestampType):
        if kinds.is_timestamp(arrow) and arrow.tz is not None:
            return pa.timestamp("us", arrow.tz)
        return pa.timestamp("us", "UTC") if kinds.is_null(arrow) else None
    if isinstance(type_, TimestampNTZType):
        is_local = kinds.is_timestamp(arrow) and arrow.tz is None
        return pa.timestamp("us") if is_local or kinds.is_null(arrow) else None
    wanted, is_kind = _KINDS[type(type_)]
    return wanted if is_kind(arrow) or kinds.is_null(arrow) else None


_KINDS: dict[type[DataType], tuple[pa.DataType, Callable[[pa.DataType], bool]]] = {
    BooleanType: (pa.bool_(), pa.types.is_boolean),
    DateType: (pa.date32(), pa.types.is_date),
    FloatType: (pa.float32(), pa.types.is_floating),
    DoubleType: (pa.float64(), pa.types.is_floating),
}


def _text(arrow: pa.DataType, narrow: pa.DataType, large: pa.DataType, name: str) -> pa.DataType | None:
    if arrow == large:
        return large
    is_kind = str(arrow).removesuffix("_view") == name or pa.types.is_null(arrow)
    if name == "binary" and pa.types.is_fixed_size_binary(arrow):
        is_kind = True
    return narrow if is_kind else None


# -- running the program -------------------------------------------------------------------------


class _Writer:
    """Writes values of one Spark type, whatever Arrow type they have."""

    def __init__(self, type_: DataType, time_zone: str, forms: _Forms, quotes: _Quotes) -> None:
        has_zone = _check(type_, "", 0)
        self._type = type_
        self._forms = forms
        self._quotes = quotes
        try:
            self._zone: Zone = zone(time_zone if has_zone else "UTC")
        except InvalidOptionError as failure:
            raise InvalidSchemaError(failure.message, fix=failure.fix) from failure
        self._programs: dict[pa.DataType, _Program] = {}

    def write(self, values: pa.Array | pa.RecordBatch, most_bytes: int | None) -> pa.Array:
        """Writes the first rows as text (binary), as many as fit (see `JsonEncoding.encode`)."""
        values = _one(values)
        program = self._programs.get(values.type)
        if program is None:
            program = _Program(_plain(self._type, values.type, ""))
            _Compiler(self._forms, program).compile(self._type, program.arrow, self._quotes)
            self._programs[values.type] = program.freeze()
        values = _cast(values, program.arrow)
        rows = len(values)
        ends = np.empty(rows + 1, np.int32)
        validity = np.zeros((rows + 7) // 8, np.uint8) if values.null_count else None
        capsules = values.__arrow_c_array__()  # keeps the exported array alive
        nodes, links, text = program.arrays
        given = _Input(
            nodes.ctypes.data,
            len(program.nodes),
            links.ctypes.data,
            text.ctypes.data,
            array_pointer(capsules[1]),
            program.array_count,
            self._zone.starts.ctypes.data,
            self._zone.offsets.ctypes.data,
            len(self._zone.starts),
            self._zone.repeats,
            _powers().ctypes.data,
            MOST_BYTES if most_bytes is None else most_bytes,
            ends.ctypes.data,
            None if validity is None else validity.ctypes.data,
        )
        kernel, content = _kernel(), "a batch of JSON documents"
        memory = Memory(kernel.write(ctypes.byref(given)), kernel.free, content)
        block = memory.block
        if block.status == NO_MEMORY:
            raise MemoryError(f"not enough memory for {content}")
        bitmap = None if validity is None else pa.py_buffer(validity)
        return pa.Array.from_buffers(
            pa.binary(), block.rows, [bitmap, pa.py_buffer(ends), memory.buffer(block.heap)]
        )


def _one(values: pa.Array | pa.RecordBatch) -> pa.Array:
    if isinstance(values, pa.RecordBatch):
        return values.to_struct_array()
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return values.storage if isinstance(values, pa.ExtensionArray) else values


def _cast(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    if values.type.equals(wanted):
        return values
    try:
        return values.cast(wanted)
    except pa.ArrowException as failure:
        raise InvalidSchemaError(
            f"values of Arrow type {values.type} do not fit into {wanted}: {failure}.",
            fix="give the column the declared type.",
        ) from failure


# -- the C library -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _powers() -> npt.NDArray[np.uint64]:
    """Returns the 126 highest bits of 10^-k for k from -324 to 292, rounded up, in halves of 63 bits."""
    found = []
    for k in range(-324, 293):
        shift = (-k * 913_124_641_741 >> 38) - 125  # floor(log2(10^-k)) - 125
        number = 10 ** max(-k, 0) << max(-shift, 0)
        power = number // (10 ** max(k, 0) << max(shift, 0)) + 1
        found.append((power >> 63, power & (1 << 63) - 1))
    return np.array(found, np.uint64)


class _Block(Structure):
    """``block_t``."""

    _fields_ = (("rows", c_int64), ("status", c_int64), ("heap", Part))


class _Input(Structure):
    """``input_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("node_count", c_int64),
        ("links", c_void_p),
        ("text", c_void_p),
        ("array", c_void_p),
        ("array_count", c_int64),
        ("zone_starts", c_void_p),
        ("zone_offsets", c_void_p),
        ("zone_count", c_int64),
        ("zone_repeats", c_int64),
        ("powers", c_void_p),
        ("most_bytes", c_int64),
        ("ends", c_void_p),
        ("validity", c_void_p),
    )


class _Kernel:
    """The functions of json_text.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.write: Any = library["kafka_eos_json_text_write"]
        self.write.restype, self.write.argtypes = POINTER(_Block), (POINTER(_Input),)
        self.free: Any = library["kafka_eos_json_text_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(_Block),)


@lru_cache(maxsize=1)
def _kernel() -> _Kernel:
    return _Kernel(load("json_text"))
