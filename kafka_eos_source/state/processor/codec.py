"""Encodes rows of a state variable (tuples that match a `StructType`) as bytes, and decodes them.

::

    version (1) │ nulls (1 bit per field, lowest bit first) │ slot of each field │ tails

    slot    of a fixed-width type: the value, big endian; of other types: the length of the tail (4)
    tail    string: UTF-8 · binary: the bytes · decimal: unscaled integer, two's complement · struct: a row
            array: count (4) │ 1 and nulls, or 0 for none │ fixed-width values, or lengths (4 each) │ tails
            map: length of the array of keys (4) │ array of keys │ array of values

*version* is the number of the schema among those that the variable has had (`registry`); `VersionedCodec`
reads rows of all of them. Equal rows have equal bytes, so the bytes of a map key can be looked up. Values are
converted as Spark does it (``toInternal`` and ``fromInternal`` of `pyspark.sql.types`): a `TimestampType` is
read as a naive datetime in the local time zone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from pyspark.sql import Row
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidSchemaError, StatefulProcessorError

Value = tuple[Any, ...]
_LENGTH = struct.Struct(">I")
_WIDE = Context(prec=100)
_new = tuple.__new__
_set = object.__setattr__
_contains = tuple.__contains__  # Row's own method searches the field names, not the values


@dataclass(frozen=True)
class _Fixed:
    """A fixed-width type: its `struct` format, and conversions before packing and after unpacking, if any."""

    format: str
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class _Tail:
    """A variable-length type."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def make_row(names: Sequence[str], values: Value) -> Row:
    """Returns a `pyspark.sql.Row` with these field names; bypasses its slow constructor and setter."""
    row = _new(Row, values)
    _set(row, "__fields__", names)
    return row


class StructCodec:
    """Encodes and decodes rows of one schema.

    Args:
        schema: schema of the rows; every field may be null, as in Spark's state.
        version: first byte of the encoded rows, 0 to 255.

    Raises:
        InvalidSchemaError: if state cannot hold the type of a field.
    """

    def __init__(self, schema: t.StructType, version: int = 0) -> None:
        self.schema = schema
        self.names: list[str] = schema.names
        self._count = len(schema.fields)
        kinds = [_kind(field.dataType, field.name) for field in schema.fields]
        self._fixed = [(i, kind) for i, kind in enumerate(kinds) if isinstance(kind, _Fixed)]
        self._tails = [(i, kind) for i, kind in enumerate(kinds) if isinstance(kind, _Tail)]
        self._encoders = [(i, kind.encode) for i, kind in self._fixed if kind.encode is not None]
        self._decoders = [(i, kind.decode) for i, kind in self._fixed if kind.decode is not None]
        #: Whether `struct` alone packs and unpacks the rows: no field needs a conversion or a tail.
        self._plain = not (self._tails or self._encoders or self._decoders)
        width = 1 + (self._count + 7) // 8
        self._version = bytes([version])
        self._head = self._version + bytes(width - 1)
        slots = "".join(kind.format if isinstance(kind, _Fixed) else "I" for kind in kinds)
        packer = struct.Struct(f">{width}s{slots}")
        self._pack, self._unpack, self._size = packer.pack, packer.unpack_from, packer.size

    def encode(self, row: Value) -> bytes:
        """Returns the row as bytes.

        Raises:
            StatefulProcessorError: if the row is not a tuple or list, or does not match the schema.
        """
        try:
            if self._plain and isinstance(row, tuple) and not _contains(row, None):
                return self._pack(self._head, *row)
            return self._encode(row)
        except (struct.error, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise StatefulProcessorError(
                f"STATE_STORE_VALUE: {_shorten(row)} is not a row of {self.schema.simpleString()}: {error}.",
                fix="pass a tuple with one value for each field, of the field's type.",
            ) from error

    def _encode(self, row: Any) -> bytes:
        if not isinstance(row, (tuple, list)):
            raise TypeError(f"it is a {type(row).__name__}, expected a tuple")
        slots = list(row)
        head = self._head
        nulls = sum(1 << i for i, slot in enumerate(slots) if slot is None)
        if nulls:
            head = self._version + nulls.to_bytes(len(head) - 1, "little")
        for i, encode in self._encoders:
            if slots[i] is not None:
                slots[i] = encode(slots[i])
        tails: list[bytes] = []
        for i, kind in self._tails:
            if slots[i] is not None:
                tail = kind.encode(slots[i])
                slots[i] = len(tail)
                tails.append(tail)
        if nulls:
            slots = [0 if slot is None else slot for slot in slots]
        return self._pack(head, *slots) + b"".join(tails)

    def decode(self, data: bytes) -> Value:
        """Returns the row that `encode` encoded, as a tuple.

        Raises:
            StatefulProcessorError: if the bytes are not a row of this schema.
        """
        try:
            values = self._unpack(data)
            if self._plain and values[0] == self._head:
                return values[1:]
            return self._decode(values[0], list(values[1:]), data)
        except (struct.error, ValueError, IndexError) as error:
            raise StatefulProcessorError(
                f"STATE_STORE_VALUE: {data[:64]!r} ({len(data)} bytes) is not a row of "
                f"{self.schema.simpleString()}: {error}.",
                fix="declare the schema that the state was written with; if the schema never changed, the "
                "state is damaged.",
            ) from error

    def _decode(self, head: bytes, values: list[Any], data: bytes) -> Value:
        if head[:1] != self._version:
            raise ValueError(f"it has schema version {head[0]}, expected {self._version[0]}")
        nulls = int.from_bytes(head[1:], "little")
        for i, decode in self._decoders:
            values[i] = decode(values[i])
        at = self._size
        for i, kind in self._tails:
            if nulls >> i & 1:
                continue
            end = at + values[i]
            if end > len(data):
                raise ValueError(f"it is truncated at {len(data)} bytes")
            values[i] = kind.decode(data[at:end])
            at = end
        if nulls:
            for i in range(self._count):
                if nulls >> i & 1:
                    values[i] = None
        return tuple(values)

    def decode_row(self, data: bytes) -> Row:
        """Returns the row that `encode` encoded, with the names of its fields."""
        return make_row(self.names, self.decode(data))


def _shorten(row: object) -> str:
    text = repr(row)
    return text if len(text) <= 200 else text[:200] + "…"


def _kind(type_: t.DataType, name: str) -> _Fixed | _Tail:
    """Returns how values of a type are encoded.

    Raises:
        InvalidSchemaError: if state cannot hold the type.
    """
    if type(type_) in _SIMPLE:
        return _SIMPLE[type(type_)]
    if isinstance(type_, (t.DateType, t.TimestampType, t.TimestampNTZType, t.DayTimeIntervalType)):
        format_ = "i" if isinstance(type_, t.DateType) else "q"
        return _Fixed(format_, type_.toInternal, type_.fromInternal)
    if isinstance(type_, (t.StringType, t.CharType, t.VarcharType)):
        return _Tail(_encode_text, _decode_text)
    if isinstance(type_, t.DecimalType):
        return _decimal(type_)
    if isinstance(type_, t.StructType):
        return _struct(type_)
    if isinstance(type_, t.ArrayType):
        return _array(_kind(type_.elementType, name))
    if isinstance(type_, t.MapType):
        return _map(_kind(type_.keyType, name), _kind(type_.valueType, name))
    raise InvalidSchemaError(
        f"field {name!r} has type {type_.simpleString()}, which state cannot hold.",
        fix="use boolean, numeric, string, binary, date, timestamp or day-time interval types, or arrays, "
        "maps and structs of them.",
    )


def _boolean(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{value!r} is not a boolean")


def _encode_text(value: str) -> bytes:
    return value.encode()


def _decode_text(data: bytes) -> str:
    return data.decode()


def _encode_binary(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{value!r} is not bytes")


_SIMPLE: dict[type[t.DataType], _Fixed | _Tail] = {
    t.BooleanType: _Fixed("?", _boolean),
    t.ByteType: _Fixed("b"),
    t.ShortType: _Fixed("h"),
    t.IntegerType: _Fixed("i"),
    t.LongType: _Fixed("q"),
    t.FloatType: _Fixed("f"),
    t.DoubleType: _Fixed("d"),
    t.BinaryType: _Tail(_encode_binary, bytes),
}


def _decimal(type_: t.DecimalType) -> _Tail:
    unit = Decimal(1).scaleb(-type_.scale)
    limit = 10**type_.precision

    def encode(value: Any) -> bytes:
        rounded = Decimal(value).quantize(unit, ROUND_HALF_UP, _WIDE)  # as Spark's Decimal.changePrecision
        unscaled = int(rounded.scaleb(type_.scale, _WIDE))
        if abs(unscaled) >= limit:
            raise ValueError(f"{value} does not fit into {type_.simpleString()}")
        return unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True)

    def decode(data: bytes) -> Decimal:
        return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-type_.scale, _WIDE)

    return _Tail(encode, decode)


def _struct(type_: t.StructType) -> _Tail:
    codec = StructCodec(type_)
    names = type_.names

    def encode(value: Any) -> bytes:
        if isinstance(value, dict):
            value = tuple(value.get(name) for name in names)
        return codec.encode(value)

    return _Tail(encode, codec.decode_row)


def _array(element: _Fixed | _Tail) -> _Tail:
    def encode(values: Any) -> bytes:
        if isinstance(values, (str, bytes, dict)):
            raise TypeError(f"{values!r} is not a list")
        items = values.tolist() if isinstance(values, np.ndarray) else list(values)
        count = len(items)
        nulls = b"\0"
        if None in items:
            bits = sum(1 << i for i, item in enumerate(items) if item is None)
            nulls = b"\1" + bits.to_bytes((count + 7) // 8, "little")
        if isinstance(element, _Fixed):
            convert = element.encode
            if convert is not None:
                items = [item if item is None else convert(item) for item in items]
            slots = [0 if item is None else item for item in items]
            return _LENGTH.pack(count) + nulls + struct.pack(f">{count}{element.format}", *slots)
        tails = [b"" if item is None else element.encode(item) for item in items]
        return b"".join((_LENGTH.pack(count), nulls, struct.pack(f">{count}I", *map(len, tails)), *tails))

    def decode(data: bytes) -> list[Any]:
        (count,) = _LENGTH.unpack_from(data)
        at, bits = 5, 0
        if data[4]:
            at += (count + 7) // 8
            bits = int.from_bytes(data[5:at], "little")
        if isinstance(element, _Fixed):
            items = list(struct.unpack_from(f">{count}{element.format}", data, at))
            if element.decode is not None:
                items = [element.decode(item) for item in items]
        else:
            lengths = struct.unpack_from(f">{count}I", data, at)
            edges = list(accumulate(lengths, initial=at + 4 * count))
            if edges[-1] > len(data):
                raise ValueError(f"an array is truncated at {len(data)} bytes")
            items = [
                None if bits >> i & 1 else element.decode(data[start:end])
                for i, (start, end) in enumerate(pairwise(edges))
            ]
        return [None if bits >> i & 1 else item for i, item in enumerate(items)] if bits else items

    return _Tail(encode, decode)


def _map(key: _Fixed | _Tail, value: _Fixed | _Tail) -> _Tail:
    keys, values = _array(key), _array(value)

    def encode(mapping: Any) -> bytes:
        packed = keys.encode(mapping.keys())
        return _LENGTH.pack(len(packed)) + packed + values.encode(mapping.values())

    def decode(data: bytes) -> dict[Any, Any]:
        (length,) = _LENGTH.unpack_from(data)
        return dict(zip(keys.decode(data[4 : 4 + length]), values.decode(data[4 + length :]), strict=True))

    return _Tail(encode, decode)


# -- changes to the schema of a variable: which are allowed, and how older rows are read
#
# The rules are those of Spark's Avro-encoded state, without the changes that lose data silently. Fields are
# matched by name. A new schema may add fields (null in old rows), drop fields, reorder them, and widen their
# types. A schema that adds *and* drops fields is refused: it looks like a rename, which would lose the
# values.

_INTS: tuple[type[t.DataType], ...] = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_WIDER: dict[type[t.DataType], tuple[type[t.DataType], ...]] = {
    t.ByteType: (*_INTS[1:], t.FloatType, t.DoubleType),
    t.ShortType: (*_INTS[2:], t.FloatType, t.DoubleType),
    t.IntegerType: (t.LongType, t.DoubleType),
    t.FloatType: (t.DoubleType,),
}


def shape(type_: t.DataType) -> str:
    """Returns a type as text, without what does not affect the encoding (nullability, comments)."""
    return type_.simpleString()


def schema_problem(old: t.StructType, new: t.StructType) -> str | None:
    """Returns why rows of ``old`` cannot be read as rows of ``new``; None if they can."""
    was = {field.name: field.dataType for field in old.fields}
    now = {field.name: field.dataType for field in new.fields}
    dropped = [name for name in was if name not in now]
    added = [name for name in now if name not in was]
    if dropped and added:
        return f"{', '.join(dropped)} was dropped and {', '.join(added)} added, which looks like a rename"
    for name in was.keys() & now.keys():
        if not _widens(was[name], now[name]):
            return f"{name} was {shape(was[name])} and is now {shape(now[name])}"
    return None


def row_converter(old: t.StructType, new: t.StructType) -> Callable[[Value], Value]:
    """Returns a function that converts rows of ``old`` to ``new``. Requires that `problem` is None."""
    position = {name: i for i, name in enumerate(old.names)}
    sources = [position.get(name, -1) for name in new.names]
    floats = [isinstance(field.dataType, (t.FloatType, t.DoubleType)) for field in new.fields]

    def convert(row: Value) -> Value:
        extended = tuple(chain(row, (None,)))  # position -1, of a new field, is this null
        return tuple(
            float(extended[i]) if is_float and extended[i] is not None else extended[i]
            for i, is_float in zip(sources, floats, strict=True)
        )

    return convert


class VersionedCodec:
    """Writes rows in the newest schema; reads rows of all schemas and converts them to the newest.

    Args:
        schemas: all schemas, oldest first; the first byte of a row is the position of its schema.

    Attributes:
        encode: encodes a row, see `StructCodec.encode`.
        decode: decodes a row and converts it to the newest schema, see `StructCodec.decode`.
        names: names of the fields in the newest schema.
    """

    def __init__(self, schemas: tuple[t.StructType, ...]) -> None:
        newest = StructCodec(schemas[-1], len(schemas) - 1)
        self.names = newest.names
        self.encode: Callable[[Value], bytes] = newest.encode
        self.decode: Callable[[bytes], Value] = self._decode if len(schemas) > 1 else newest.decode
        self._newest = newest
        self._version = len(schemas) - 1
        self._older = [
            (StructCodec(schema, version), row_converter(schema, schemas[-1]))
            for version, schema in enumerate(schemas[:-1])
        ]

    def _decode(self, data: bytes) -> Value:
        version = data[0] if data else -1
        if version == self._version:
            return self._newest.decode(data)
        if 0 <= version < self._version:
            codec, convert = self._older[version]
            return convert(codec.decode(data))
        raise StatefulProcessorError(
            f"STATE_STORE_VALUE: {data[:64]!r} has schema version {version}, expected 0 to {self._version}.",
            fix="run the newest version of the processor; if this is the newest, the state is damaged.",
        )


def _widens(old: t.DataType, new: t.DataType) -> bool:
    if isinstance(old, t.DecimalType) and isinstance(new, t.DecimalType):
        return old.scale == new.scale and old.precision <= new.precision
    return shape(old) == shape(new) or type(new) in _WIDER.get(type(old), ())
