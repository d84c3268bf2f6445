"""Compiles a writer's and a reader's Avro schema into a program that decodes, which native/avro.c interprets.

A program is a flat array of nodes. A node has six numbers: what to read, the column to append to (-1 = only
skip), the first and the number of its children in `links`, and two operands. Each node appends exactly one
value to its column. The children of a union append to the column of the union, and leave exactly one value
there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa

from kafka_eos_source.documents.converted import inside
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro_schema import Field, Type, encode_default, is_struct_of_members, to_arrow


class Op(IntEnum):
    """What a node reads, as in avro.c. The comments name the operands."""

    NULL = 0
    BOOLEAN = 1
    INT = 2  # a: factor, b: divisor of the number, if the column stores int64
    LONG = 3  # likewise
    FLOAT = 4
    DOUBLE = 5
    BYTES = 6
    STRING = 7
    FIXED = 8  # a: bytes
    ENUM = 9  # first: index of the first symbol in `symbols`; size: symbols
    DECIMAL = 10  # first: index in `symbols` of a power of ten, low half first; b: digits to append
    DECIMAL_FIXED = 11  # likewise; a: bytes
    RECORD = 12
    ARRAY = 13  # a: node of the items; b: bytes that an item takes at least
    MAP = 14  # likewise, of an entry
    UNION = 15
    MEMBER = 16  # a: number of the member in the struct; b: node that reads it
    DEFAULT = 17  # first: node; a: offset of the encoded default in `text`; b: bytes
    MISMATCH = 18  # a branch of the writer that the reader cannot take


class Kind(IntEnum):
    """How a column stores its values, as in avro.c."""

    NONE = 0
    BITS = 1
    I32 = 2
    I64 = 3
    F32 = 4
    F64 = 5
    D128 = 6
    TEXT = 7
    STRUCT = 8
    LIST = 9


class Node(NamedTuple):
    """``node_t`` of avro.c."""

    op: int
    column: int = -1
    first: int = 0
    size: int = 0
    a: int = 0
    b: int = 0


@dataclass(eq=False)
class Column:
    """A column that decoding fills; `index` is its place in the program."""

    index: int
    kind: Kind
    type: pa.DataType
    children: tuple[Column, ...] = ()


@dataclass
class Program:
    """A compiled pair of writer and reader schema. Node 0 decodes a message into column 0.

    Attributes:
        nodes, links, symbols, text: See avro.c.
        columns: All columns; parents come before their children.
        paths: The field that each node reads, for messages.
        reasons: Why nodes of kind MISMATCH do not match.
    """

    nodes: list[Node] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    symbols: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    columns: list[Column] = field(default_factory=list)
    column_links: dict[int, int] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def reserve(self, path: str) -> int:
        """Adds a node that `set` fills later, so that parents come before their children."""
        self.nodes.append(Node(Op.NULL))
        self.paths.append(path)
        return len(self.nodes) - 1

    def add(self, node: Node, path: str) -> int:
        """Adds a node, and returns its number."""
        index = self.reserve(path)
        self.nodes[index] = node
        return index

    def link(self, children: Sequence[int]) -> int:
        """Adds the numbers of children, and returns the place of the first."""
        self.links.extend(children)
        return len(self.links) - len(children)

    def add_columns(self, found: pa.DataType) -> Column:
        """Adds the columns for values of an Arrow type."""
        column = Column(len(self.columns), _kind(found), found)
        self.columns.append(column)
        if pa.types.is_map(found):
            entries = Column(len(self.columns), Kind.STRUCT, found)
            self.columns.append(entries)
            entries.children = (self.add_columns(found.key_type), self.add_columns(found.item_type))
            self.column_links[entries.index] = self.link([child.index for child in entries.children])
            column.children = (entries,)
        elif pa.types.is_list(found):
            column.children = (self.add_columns(found.value_type),)
        elif pa.types.is_struct(found):
            column.children = tuple(self.add_columns(found.field(i).type) for i in range(found.num_fields))
        self.column_links[column.index] = self.link([child.index for child in column.children])
        return column


_KINDS: tuple[tuple[pa.DataType, Kind], ...] = (
    (pa.null(), Kind.NONE),
    (pa.bool_(), Kind.BITS),
    (pa.int32(), Kind.I32),
    (pa.date32(), Kind.I32),
    (pa.float32(), Kind.F32),
    (pa.float64(), Kind.F64),
    (pa.string(), Kind.TEXT),
    (pa.binary(), Kind.TEXT),
)


def _kind(found: pa.DataType) -> Kind:
    if pa.types.is_struct(found):
        return Kind.STRUCT
    if pa.types.is_list(found) or pa.types.is_map(found):
        return Kind.LIST
    if pa.types.is_decimal(found):
        return Kind.D128
    return next((kind for known, kind in _KINDS if known == found), Kind.I64)


# -- compiling -----------------------------------------------------------------------------------

#: The types that a reader may declare for a type of the writer.
_READABLE_AS = {
    "int": ("int", "long", "float", "double"),
    "long": ("long", "float", "double"),
    "float": ("float", "double"),
    "string": ("string", "bytes"),
    "bytes": ("bytes", "string"),
}
_OPS = {
    "null": Op.NULL,
    "boolean": Op.BOOLEAN,
    "int": Op.INT,
    "long": Op.LONG,
    "float": Op.FLOAT,
    "double": Op.DOUBLE,
    "bytes": Op.BYTES,
    "string": Op.STRING,
    "fixed": Op.FIXED,
    "enum": Op.ENUM,
}
#: The most types of the writer and symbols of enums that are compared with the reader's. Each is compared at
#: every place where it is used, and each branch of a union with each branch of the reader's.
_MOST_STEPS = 200_000

#: Units of timestamps per second.
_UNITS = {"millis": 10**3, "micros": 10**6, "nanos": 10**9}


class _MismatchError(Exception):
    """A reader cannot take what the writer writes. `path` is the field."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


def compile_program(writer: Type, reader: Type) -> Program:
    """Compiles the program that decodes the writer's records into columns of the reader's types.

    Raises:
        InvalidSchemaError: if the schemas do not match, or a type of the reader has no Arrow type.
    """
    compiler = _Compiler()
    column = compiler.program.add_columns(to_arrow(reader))
    try:
        compiler.compile(writer, reader, column, "")
    except _MismatchError as mismatch:
        where = f"field {mismatch.path.lstrip('.')}: " if mismatch.path else ""
        raise InvalidSchemaError(
            f"the reader schema cannot read records of the writer schema: {where}{mismatch}",
            fix="change the reader schema so that it is compatible with the writer's, or read without one",
        ) from None
    return compiler.program


@dataclass
class _Compiler:
    program: Program = field(default_factory=Program)
    _skipped: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    def compile(self, writer: Type, reader: Type, column: Column, path: str) -> int:
        """Adds the nodes that read the writer's type into a column, and returns the number of the first."""
        self._count(1)
        if writer.kind == "union":
            return self._from_union(writer, reader, column, path)
        if reader.kind == "union":
            return self._into_union(writer, reader, column, path)
        if writer.kind == reader.kind == "record":
            return self._record(writer, reader, column, path)
        if writer.kind == reader.kind and writer.kind in ("array", "map"):
            step = "[]" if writer.kind == "array" else "{}"
            index = self.program.reserve(path)
            target = column.children[0] if writer.kind == "array" else column.children[0].children[1]
            item = self.compile(writer.item, reader.item, target, inside(path, step))
            self._fill_container(index, writer, item, column.index)
            return index
        if writer.kind == reader.kind and writer.name and not _has_name(reader, writer):
            raise _MismatchError(path, f"the writer's type is {writer}, the reader's is {reader}")
        if writer.kind == reader.kind == "enum":
            return self.program.add(self._enum(writer, reader, column.index), path)
        if writer.kind == reader.kind == "fixed" and writer.size != reader.size:
            raise _MismatchError(
                path,
                f"{writer} has {writer.size} bytes in the writer's schema, {reader.size} in the reader's",
            )
        if reader.kind not in _READABLE_AS.get(writer.kind, (writer.kind,)):
            raise _MismatchError(path, f"the writer's type is {writer}, the reader's is {reader}")
        return self.program.add(self._primitive(writer, reader, column, path), path)

    def _primitive(self, writer: Type, reader: Type, column: Column, path: str) -> Node:
        if reader.logical == "decimal":
            digits = reader.scale - writer.scale if writer.logical == "decimal" else 0
            if digits < 0:
                raise _MismatchError(path, f"the writer's type is {writer}, the reader's is {reader}")
            op = Op.DECIMAL_FIXED if writer.kind == "fixed" else Op.DECIMAL
            limit = self._limit(max(reader.precision - digits, 0))
            return Node(op, column.index, limit, 0, writer.size, digits)
        if column.kind is Kind.TEXT and writer.kind in ("bytes", "string"):
            # Bytes become a string only if they are valid UTF-8. A string becomes bytes even if it is not.
            return Node(Op.STRING if reader.kind == "string" else Op.BYTES, column.index)
        if writer.kind in ("int", "long") and column.kind is Kind.I64:
            factor, divisor = _scaling(writer, reader)
            return Node(_OPS[writer.kind], column.index, a=factor, b=divisor)
        return Node(_OPS[writer.kind], column.index, a=writer.size)

    def _limit(self, precision: int) -> int:
        """Adds 10^precision, and returns its place."""
        limit = struct.unpack("<qq", (10**precision).to_bytes(16, "little"))
        self.program.symbols.extend(limit)
        return len(self.program.symbols) - 2

    def _enum(self, writer: Type, reader: Type, column: int) -> Node:
        program = self.program
        first = len(program.symbols)
        self._count(len(writer.symbols))
        symbols = frozenset(reader.symbols)
        for symbol in writer.symbols:
            known = symbol if symbol in symbols else reader.default
            encoded = b"" if known is None else known.encode()
            program.symbols.extend((len(program.text), -1 if known is None else len(encoded)))
            program.text.extend(encoded)
        return Node(Op.ENUM, column, first, len(writer.symbols))

    def _record(self, writer: Type, reader: Type, column: Column, path: str) -> int:
        index = self.program.reserve(path)
        sources = _sources(writer, reader)
        targets = {
            source.name: (one, child)
            for source, one, child in zip(sources, reader.fields, column.children, strict=True)
            if source is not None
        }
        children = []
        for source in writer.fields:
            place = inside(path, f".{source.name}")
            if source.name in targets:
                one, child = targets[source.name]
                children.append(self.compile(source.type, one.type, child, place))
            else:
                children.append(self._skip(source.type, place))
        for found, one, child in zip(sources, reader.fields, column.children, strict=True):
            if found is None:
                children.append(self._default(one, child, inside(path, f".{one.name}")))
        first = self.program.link(children)
        self.program.nodes[index] = Node(Op.RECORD, column.index, first, len(children))
        return index

    def _default(self, one: Field, column: Column, path: str) -> int:
        if not one.has_default:
            raise _MismatchError(
                path, "the writer's schema has no such field, and the reader's no default for it"
            )
        if one.default is None and one.type.kind != "null" and not one.type.is_nullable:
            # registries do not check defaults, and other clients read this one as null
            return self.program.add(Node(Op.NULL, column.index), path)
        index = self.program.reserve(path)
        encoded = encode_default(one.type, one.default, path)
        node = self.compile(one.type, one.type, column, path)
        place = len(self.program.text)
        self.program.text.extend(encoded)
        self.program.nodes[index] = Node(Op.DEFAULT, column.index, node, 0, place, len(encoded))
        return index

    def _from_union(self, writer: Type, reader: Type, column: Column, path: str) -> int:
        index = self.program.reserve(path)
        children, mismatches = [], []
        for branch in writer.branches:
            known = len(self.program.nodes)
            try:
                children.append(self.compile(branch, reader, column, path))
            except _MismatchError as mismatch:
                mismatches.append(mismatch)
                self._forget(known)
                node = self.program.add(Node(Op.MISMATCH, column.index), mismatch.path)
                self.program.reasons[node] = str(mismatch)
                children.append(node)
        if len(mismatches) == len(writer.branches):
            raise mismatches[-1]
        first = self.program.link(children)
        self.program.nodes[index] = Node(Op.UNION, column.index, first, len(children))
        return index

    def _into_union(self, writer: Type, reader: Type, column: Column, path: str) -> int:
        if writer.kind == "null":
            if not reader.is_nullable:
                raise _MismatchError(path, f"the writer's value is null, the reader's type is {reader}")
            return self.program.add(Node(Op.NULL, column.index), path)
        values = reader.values
        ordered = sorted(range(len(values)), key=lambda number: not _is_same(values[number], writer))
        mismatch = _MismatchError(path, f"the writer's type is {writer}, the reader's is {reader}")
        for number in ordered:
            if writer.name and not _is_same(values[number], writer):
                continue
            known = len(self.program.nodes)
            try:
                if not is_struct_of_members(reader):
                    return self.compile(writer, values[number], column, path)
                index = self.program.reserve(path)
                child = self.compile(
                    writer, values[number], column.children[number], inside(path, f".member{number}")
                )
                self.program.nodes[index] = Node(Op.MEMBER, column.index, a=number, b=child)
                return index
            except _MismatchError as failure:
                mismatch = failure if _is_same(values[number], writer) else mismatch
                self._forget(known)
        raise mismatch

    def _forget(self, known: int) -> None:
        """Removes the nodes of a branch that turned out not to match."""
        del self.program.nodes[known:], self.program.paths[known:]
        skipped, reasons = self._skipped, self.program.reasons  # both are in the order of their nodes
        while skipped and next(reversed(skipped.values())) >= known:
            skipped.popitem()
        while reasons and next(reversed(reasons)) >= known:
            reasons.popitem()

    def _skip(self, writer: Type, path: str) -> int:
        """Adds the nodes that skip a field. A named type is compiled once, so that recursion ends."""
        self._count(1)
        if id(writer) in self._skipped:
            return self._skipped[id(writer)]
        index = self.program.reserve(path)
        if writer.kind in ("record", "enum", "fixed"):
            self._skipped[id(writer)] = index
        if writer.kind == "record":
            children = [self._skip(one.type, inside(path, f".{one.name}")) for one in writer.fields]
            self.program.nodes[index] = Node(Op.RECORD, -1, self.program.link(children), len(children))
        elif writer.kind == "union":
            children = [self._skip(branch, path) for branch in writer.branches]
            self.program.nodes[index] = Node(Op.UNION, -1, self.program.link(children), len(children))
        elif writer.kind in ("array", "map"):
            self._fill_container(index, writer, self._skip(writer.item, inside(path, "[]")), -1)
        else:
            op = Op.BYTES if writer.kind == "string" else _OPS[writer.kind]
            self.program.nodes[index] = Node(op, -1, 0, len(writer.symbols), writer.size)
        return index

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise InvalidSchemaError(
                f"reading the writer schema takes more than {_MOST_STEPS:,} steps: it has too many types in "
                "unions, or symbols in enums",
                fix="simplify the schema of the records",
            )

    def _fill_container(self, index: int, writer: Type, item: int, column: int) -> None:
        is_map = writer.kind == "map"
        at_least = writer.item.min_bytes + is_map
        self.program.nodes[index] = Node(Op.MAP if is_map else Op.ARRAY, column, a=item, b=at_least)


def _sources(writer: Type, reader: Type) -> list[Field | None]:
    """Returns the writer's field for each field of the reader: of that name, or else of an alias."""
    by_name = {one.name: one for one in writer.fields}
    taken: set[str] = {one.name for one in reader.fields}
    sources = []
    for one in reader.fields:
        found = by_name.get(one.name)
        for alias in one.aliases:
            if found is None and alias in by_name and alias not in taken:
                found = by_name[alias]
                taken.add(alias)
        sources.append(found)
    return sources


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _has_name(reader: Type, writer: Type) -> bool:
    """Returns whether names match: without the namespace, as the specification says, or by an alias."""
    return _short(reader.name) == _short(writer.name) or writer.name in reader.aliases


def _is_same(reader: Type, writer: Type) -> bool:
    return reader.kind == writer.kind and (not writer.name or _has_name(reader, writer))


def _scaling(writer: Type, reader: Type) -> tuple[int, int]:
    """Returns factor and divisor that turn the writer's number into the column's unit."""
    if not reader.logical or "timestamp" not in reader.logical:
        return 1, 1
    logical = writer.logical if writer.logical and "timestamp" in writer.logical else reader.logical
    unit = _UNITS[logical.rpartition("-")[2]]
    wanted = max(_UNITS[reader.logical.rpartition("-")[2]], _UNITS["micros"])
    return max(wanted // unit, 1), max(unit // wanted, 1)
