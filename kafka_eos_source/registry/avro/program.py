"""Programs that decode: a flat array of nodes, which native/avro.c interprets.

A node has six numbers: what to read, the column to append to (-1 = only skip), the first and the number of
its children in `links`, and two operands. Each node appends exactly one value to its column. The children of
a union append to the column of the union, and leave exactly one value there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa


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
    DECIMAL = 10  # first: index in `symbols` of 10^precision, low half first
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
