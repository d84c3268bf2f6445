"""Compiles an Avro schema and an Arrow type into an encoder, and derives schemas of Arrow types."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro_schema import (
    MAX_PRECISION,
    Field,
    Type,
    encode_default,
    is_struct_of_members,
    to_arrow,
)
from kafka_eos_source.registry.codec import Schema, zigzag


class Put(IntEnum):
    """What a node writes, as in avro.c. The comments name the operands."""

    NOTHING = 0
    TEXT_OF_PROGRAM = 1  # a: offset in `text`; b: bytes
    BOOLEAN = 2
    INTEGER = 3  # a: bytes of the Arrow value; b: bytes of the Avro type
    TIMESTAMP = 4  # a: factor; b: divisor
    FLOAT = 5
    DOUBLE = 6
    FLOAT_AS_DOUBLE = 7
    BYTES = 8  # a: bytes of an Arrow offset; 0 = the array is of fixed size; b: that size
    STRING = 9  # likewise
    FIXED = 10  # likewise; size: bytes of the Avro type
    ENUM = 11  # likewise; first: index in `symbols`; size: symbols
    DECIMAL = 12  # first: index of the limit in `symbols`; a: bytes of a fixed type; b: digits to append
    RECORD = 13
    ARRAY = 14  # a: node of the items; b: bytes of an Arrow offset
    MAP = 15  # likewise; first: node of the keys
    MEMBERS = 16


@dataclass
class PutNode:
    """``put_t`` of avro.c."""

    op: int
    array: int = 0
    first: int = 0
    size: int = 0
    a: int = 0
    b: int = 0
    null_branch: int = -1
    branch: int = -1

    def numbers(self) -> tuple[int, ...]:
        """Returns the members in the order of the C structure."""
        return (self.op, self.array, self.first, self.size, self.a, self.b, self.null_branch, self.branch)


@dataclass
class EncodeProgram:
    """A compiled schema. Node 0 encodes a value of `type`.

    Attributes:
        type: The Arrow type that the program reads; callers cast arrays to it.
        array_count: How many arrays an array of the type consists of.
        nodes, links, symbols, text: See avro.c.
        paths: The field that each node writes, for messages.
    """

    type: pa.DataType
    array_count: int = 0
    nodes: list[PutNode] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    symbols: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    paths: list[str] = field(default_factory=list)


class _RefusalError(Exception):
    """A schema cannot take an Arrow type."""

    def __init__(self, path: str, text: str, fix: str) -> None:
        super().__init__(text)
        self.path, self.fix = path, fix


def compile_encoder(schema: Type, values: pa.DataType) -> EncodeProgram:
    """Compiles the program that encodes values of an Arrow type.

    Raises:
        InvalidSchemaError: if the schema cannot take the type. The message names the field and both types.
    """
    plain = plain_type(values)
    compiler = _Compiler(EncodeProgram(plain, len(_places(plain))))
    try:
        compiler.compile(schema, plain, 0, "")
    except _RefusalError as refusal:
        where = f"field {refusal.path.lstrip('.')}: " if refusal.path else ""
        raise InvalidSchemaError(
            f"the Avro schema cannot take the column: {where}{refusal}", fix=refusal.fix
        ) from None
    return compiler.program


def plain_type(found: pa.DataType) -> pa.DataType:
    """Returns the type to which a column is cast before it is encoded; most types stay as they are."""
    kinds = pa.types
    if isinstance(found, pa.BaseExtensionType):
        return plain_type(found.storage_type)
    if kinds.is_dictionary(found):
        return plain_type(found.value_type)
    if kinds.is_struct(found):
        return pa.struct([each.with_type(plain_type(each.type)) for each in found])
    if kinds.is_map(found):
        return pa.map_(plain_type(found.key_type), plain_type(found.item_type))
    if kinds.is_large_list(found):
        return pa.large_list(plain_type(found.value_type))
    if kinds.is_list(found) or kinds.is_fixed_size_list(found) or kinds.is_list_view(found):
        return pa.list_(plain_type(found.value_type))
    if kinds.is_decimal(found) and found.precision <= MAX_PRECISION:
        return pa.decimal128(found.precision, found.scale)
    return _PLAIN.get(found, found)


_PLAIN = {
    pa.string_view(): pa.large_string(),
    pa.binary_view(): pa.large_binary(),
    pa.date64(): pa.date32(),
    pa.float16(): pa.float32(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
}

#: Units of Arrow's and Avro's timestamps per second.
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "millis": 10**3, "micros": 10**6, "nanos": 10**9}


def _places(found: pa.DataType) -> list[pa.DataType]:
    """Returns the types of all arrays of a type in the order of a depth-first walk, parents first."""
    if pa.types.is_map(found):
        return [found, found, *_places(found.key_type), *_places(found.item_type)]
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        return [found, *_places(found.value_type)]
    if pa.types.is_struct(found):
        return [found, *(place for each in found for place in _places(each.type))]
    return [found]


def _children(found: pa.DataType, place: int) -> list[int]:
    """Returns the places of the fields of a struct."""
    places = []
    at = place + 1
    for each in found:
        places.append(at)
        at += len(_places(each.type))
    return places


@dataclass
class _Compiler:
    program: EncodeProgram

    def compile(self, avro: Type, arrow: pa.DataType, place: int, path: str) -> int:
        """Adds the nodes that write values of an Arrow type, and returns the number of the first."""
        if avro.kind == "union":
            return self._union(avro, arrow, place, path)
        if avro.kind == "null" and pa.types.is_null(arrow):
            return self._add(PutNode(Put.NOTHING), path)
        if avro.kind == "record" and pa.types.is_struct(arrow):
            return self._record(avro, arrow, place, path)
        if avro.kind == "map" and pa.types.is_map(arrow):
            return self._map(avro, arrow, place, path)
        if avro.kind == "array" and (pa.types.is_list(arrow) or pa.types.is_large_list(arrow)):
            index = self._add(PutNode(Put.ARRAY, place, b=8 if pa.types.is_large_list(arrow) else 4), path)
            self.program.nodes[index].a = self.compile(avro.item, arrow.value_type, place + 1, f"{path}[]")
            return index
        node = self._primitive(avro, arrow)
        if node is None:
            raise self._refusal(avro, arrow, path)
        node.array = place
        return self._add(node, path)

    def _add(self, node: PutNode, path: str) -> int:
        self.program.nodes.append(node)
        self.program.paths.append(path)
        return len(self.program.nodes) - 1

    def _refusal(self, avro: Type, arrow: pa.DataType, path: str) -> _RefusalError:
        try:
            fix = f"cast the column to {to_arrow(avro)} (in Arrow's words), or write with another schema"
        except InvalidSchemaError:
            fix = "write with another schema"
        return _RefusalError(path, f"its Arrow type is {arrow}, the schema's type is {avro}", fix)

    def _constant(self, encoded: bytes, path: str) -> int:
        self.program.text.extend(encoded)
        start = len(self.program.text) - len(encoded)
        return self._add(PutNode(Put.TEXT_OF_PROGRAM, a=start, b=len(encoded)), path)

    def _union(self, avro: Type, arrow: pa.DataType, place: int, path: str) -> int:
        kinds = [branch.kind for branch in avro.branches]
        null_branch = kinds.index("null") if "null" in kinds else -1
        if pa.types.is_null(arrow) and null_branch >= 0:
            return self._constant(zigzag(null_branch), path)
        if is_struct_of_members(avro) and _has_members(arrow, len(avro.values)):
            return self._members(avro, arrow, place, path, null_branch)
        numbers = [number for number, kind in enumerate(kinds) if kind != "null"]
        numbers.sort(key=lambda number: not _is_exact(avro.branches[number], arrow))
        refusal = self._refusal(avro, arrow, path)
        for number in numbers:
            known = len(self.program.nodes)
            try:
                index = self.compile(avro.branches[number], arrow, place, path)
            except _RefusalError as failure:
                del self.program.nodes[known:], self.program.paths[known:]
                refusal = failure if len(numbers) == 1 else refusal
                continue
            node = self.program.nodes[index]
            self.program.nodes[index] = replace(node, null_branch=null_branch, branch=number)
            return index
        raise refusal

    def _members(self, avro: Type, arrow: pa.DataType, place: int, path: str, null_branch: int) -> int:
        index = self._add(PutNode(Put.MEMBERS, place, null_branch=null_branch), path)
        children = []
        numbers = [number for number, branch in enumerate(avro.branches) if branch.kind != "null"]
        for number, each, inside in zip(numbers, arrow, _children(arrow, place), strict=True):
            child = self.compile(avro.branches[number], each.type, inside, f"{path}.{each.name}")
            self.program.nodes[child].branch = number
            children.append(child)
        self._link(index, children)
        return index

    def _record(self, avro: Type, arrow: pa.DataType, place: int, path: str) -> int:
        names = [each.name for each in arrow]
        known = {one.name for one in avro.fields}
        for name in names:
            if name not in known or names.count(name) > 1:
                raise _RefusalError(
                    f"{path}.{name}",
                    f"record {avro.name} has no such field (it has {', '.join(sorted(known)) or 'none'})"
                    if name not in known
                    else "the column has two fields of this name",
                    "drop or rename the column, or add the field to the schema",
                )
        index = self._add(PutNode(Put.RECORD, place), path)
        places = dict(zip(names, _children(arrow, place), strict=True))
        children = []
        for one in avro.fields:
            inside = f"{path}.{one.name}"
            if one.name in places:
                column = arrow.field(one.name).type
                children.append(self.compile(one.type, column, places[one.name], inside))
            else:
                children.append(self._absent(avro, one, inside))
        self._link(index, children)
        return index

    def _absent(self, avro: Type, one: Field, path: str) -> int:
        if one.has_default:
            return self._constant(encode_default(one.type, one.default, path), path)
        if one.type.is_nullable:
            kinds = [branch.kind for branch in one.type.branches]
            return self._constant(zigzag(kinds.index("null")), path)
        raise _RefusalError(
            path,
            f"the column has no such field, and the schema's record {avro.name} has no default for it",
            "add the column, or a default to the field in the schema",
        )

    def _link(self, index: int, children: list[int]) -> None:
        node = self.program.nodes[index]
        node.first, node.size = len(self.program.links), len(children)
        self.program.links.extend(children)

    def _map(self, avro: Type, arrow: pa.DataType, place: int, path: str) -> int:
        index = self._add(PutNode(Put.MAP, place, b=4), path)
        node = self.program.nodes[index]
        node.first = self.compile(Type("string"), arrow.key_type, place + 2, f"{path}{{}} (key)")
        items = place + 2 + len(_places(arrow.key_type))
        node.a = self.compile(avro.item, arrow.item_type, items, f"{path}{{}}")
        return index

    def _primitive(self, avro: Type, arrow: pa.DataType) -> PutNode | None:
        if avro.logical == "decimal":
            return self._decimal(avro, arrow)
        if avro.logical and "timestamp" in avro.logical and pa.types.is_timestamp(arrow):
            return _timestamp(avro, arrow)
        if avro.kind in ("fixed", "enum", "string", "bytes"):
            return self._text(avro, arrow)
        return _NUMBERS[avro.kind](arrow, avro) if avro.kind in _NUMBERS else None

    def _text(self, avro: Type, arrow: pa.DataType) -> PutNode | None:
        is_string = pa.types.is_string(arrow) or pa.types.is_large_string(arrow)
        is_binary = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
        width = 8 if pa.types.is_large_string(arrow) or pa.types.is_large_binary(arrow) else 4
        size = 0
        if pa.types.is_fixed_size_binary(arrow):
            is_binary, width, size = True, 0, arrow.byte_width
        if avro.kind == "string" and is_string:
            return PutNode(Put.STRING, a=width)
        if avro.kind == "bytes" and is_binary:
            return PutNode(Put.BYTES, a=width, b=size)
        if avro.kind == "fixed" and is_binary:
            return PutNode(Put.FIXED, size=avro.size, a=width, b=size)
        if avro.kind == "enum" and is_string:
            first = len(self.program.symbols)
            for symbol in avro.symbols:
                encoded = symbol.encode()
                self.program.symbols.extend((len(self.program.text), len(encoded)))
                self.program.text.extend(encoded)
            return PutNode(Put.ENUM, first=first, size=len(avro.symbols), a=width)
        return None

    def _decimal(self, avro: Type, arrow: pa.DataType) -> PutNode | None:
        if not pa.types.is_decimal128(arrow) or arrow.scale > avro.scale or arrow.scale < 0:
            return None
        if avro.precision > MAX_PRECISION:  # a value with the schema's scale may need more than 128 bits
            return None
        digits = avro.scale - arrow.scale
        first = len(self.program.symbols)
        most = max(avro.precision - digits, 0)
        self.program.symbols.extend(struct.unpack("<qq", (10**most).to_bytes(16, "little")))
        return PutNode(Put.DECIMAL, first=first, a=avro.size, b=digits)


def _is_exact(avro: Type, arrow: pa.DataType) -> bool:
    try:
        return bool(to_arrow(avro).equals(arrow))
    except InvalidSchemaError:
        return False


def _has_members(arrow: pa.DataType, count: int) -> bool:
    """Returns whether a type is the struct that `from_avro` makes of a union."""
    return pa.types.is_struct(arrow) and [each.name for each in arrow] == [
        f"member{number}" for number in range(count)
    ]


def _timestamp(avro: Type, arrow: pa.DataType) -> PutNode | None:
    logical = avro.logical or ""
    if (arrow.tz is None) != logical.startswith("local-"):
        return None
    unit, wanted = _UNITS[arrow.unit], _UNITS[logical.rpartition("-")[2]]
    return PutNode(Put.TIMESTAMP, a=max(wanted // unit, 1), b=max(unit // wanted, 1))


def _integer(arrow: pa.DataType, avro: Type) -> PutNode | None:
    is_date = avro.logical == "date" and pa.types.is_date32(arrow)
    if not is_date and not pa.types.is_signed_integer(arrow):
        return None
    return PutNode(Put.INTEGER, a=arrow.bit_width // 8, b=4 if avro.kind == "int" else 8)


def _double(arrow: pa.DataType) -> PutNode | None:
    if pa.types.is_float32(arrow):
        return PutNode(Put.FLOAT_AS_DOUBLE)
    return PutNode(Put.DOUBLE) if pa.types.is_float64(arrow) else None


_NUMBERS: dict[str, Callable[[pa.DataType, Type], PutNode | None]] = {
    "boolean": lambda arrow, _: PutNode(Put.BOOLEAN) if pa.types.is_boolean(arrow) else None,
    "int": _integer,
    "long": _integer,
    "float": lambda arrow, _: PutNode(Put.FLOAT) if pa.types.is_float32(arrow) else None,
    "double": lambda arrow, _: _double(arrow),
}


# -- deriving a schema ---------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIMPLE: dict[pa.DataType, Any] = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
}


def derive(found: pa.DataType, name: str) -> Schema:
    """Returns the schema for values of an Arrow type, which is usually a struct."""
    return Schema("AVRO", json.dumps(_type(plain_type(found), name, "", "")))


def _type(found: pa.DataType, name: str, namespace: str, path: str) -> Any:
    inside = f"{namespace}.{name}" if namespace else name
    if found in _SIMPLE:
        return _SIMPLE[found]
    if pa.types.is_timestamp(found):
        return {
            "type": "long",
            "logicalType": "local-timestamp-micros" if found.tz is None else "timestamp-micros",
        }
    if pa.types.is_fixed_size_binary(found):
        return "bytes"
    if pa.types.is_decimal128(found) and 0 <= found.scale <= found.precision:
        size = ((10**found.precision - 1).bit_length() + 8) // 8
        return {
            "type": "fixed",
            "name": f"{inside}.fixed",
            "size": size,
            "logicalType": "decimal",
            "precision": found.precision,
            "scale": found.scale,
        }
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        return {"type": "array", "items": _nullable(found.value_field, name, namespace, f"{path}[]")}
    if pa.types.is_map(found) and found.key_type in (pa.string(), pa.large_string()):
        return {"type": "map", "values": _nullable(found.item_field, name, namespace, f"{path}{{}}")}
    if pa.types.is_struct(found):
        return _record(found, name, namespace, path)
    raise InvalidSchemaError(
        f"{'field ' + path.lstrip('.') if path else 'the column'} has type {found}, which Avro does not have",
        fix="cast or drop the column before it is encoded",
    )


def _record(found: pa.DataType, name: str, namespace: str, path: str) -> Any:
    fields = []
    for each in found:
        inside = f"{path}.{each.name}"
        if not _NAME.fullmatch(each.name):
            raise InvalidSchemaError(
                f"field {inside.lstrip('.')}: {each.name!r} is no name that Avro accepts (letters, digits "
                "and underscores, and no digit first)",
                fix="rename the column before it is encoded",
            )
        one: dict[str, Any] = {
            "name": each.name,
            "type": _nullable(each, each.name, f"{namespace}.{name}" if namespace else name, inside),
        }
        if each.nullable:
            one["default"] = None
        fields.append(one)
    return {
        "type": "record",
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "fields": fields,
    }


def _nullable(found: pa.Field, name: str, namespace: str, path: str) -> Any:
    made = _type(found.type, name, namespace, path)
    return ["null", made] if found.nullable and made != "null" else made
