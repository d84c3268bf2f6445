"""The description that every store contains, so that its state can be read without the query that wrote it.

Every processor writes one entry, `META_KEY`: table 0x01 with an empty group key. This table has no other
entries, because real rows may have an empty group key too. Every shard has the entry; a tool that changes the
number of shards copies it.

Types are written as Arrow's names (``"int64"``), or as ``["timestamp", "us", "UTC"]``,
``["decimal", 10, 2]``, ``["list", type]``, ``["map", key, value]``,
``["struct", [[name, type, nullable], …]]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import StateFormatError, StateMismatchError
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.model import ShardsBy

#: The table that holds only the description. Processors use the tables 2 to 127 and 129 to 255.
META_TABLE = 0x01
META_KEY = layout.keyed(META_TABLE, b"")

#: Version of the document.
VERSION = 1

_NAMES = {
    str(type_): type_
    for type_ in (
        pa.null(),
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.binary(),
        pa.large_string(),
        pa.large_binary(),
        pa.date32(),
    )
}


@dataclass(frozen=True)
class TableDescription:
    """One table of a store.

    Attributes:
        name: name of the variable or the aggregates in the table.
        value: columns of a value; no columns if values are empty.
        rest: columns that follow the group key in the key, if any.
        encoding: how values are encoded: ``"rows"`` (see `binary`), or a name that the processor defines.
        details: properties that the processor defines: kind of variable, time to live, windows.
    """

    name: str
    value: pa.Schema = field(default_factory=lambda: pa.schema([]))
    rest: pa.Schema = field(default_factory=lambda: pa.schema([]))
    encoding: str = "rows"
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """Describes the contents of a store.

    Attributes:
        kind: kind of the processor: ``"aggregate"``, ``"deduplicate"``, ``"function"`` or
            ``"stateful-processor"``.
        key: the grouping columns, which `layout.KeyCodec` encodes.
        tables: tables by their byte.
        details: properties that the processor defines.
        shards_by: what decides the shard of a key.
    """

    kind: str
    key: pa.Schema
    tables: Mapping[int, TableDescription]
    details: Mapping[str, Any] = field(default_factory=dict)
    shards_by: ShardsBy = ShardsBy.HASH

    def to_json(self) -> bytes:
        """Returns the value of `META_KEY`. Equal descriptions have equal bytes."""
        tables = {
            str(byte): {
                "name": table.name,
                "value": fields_to_json(table.value),
                "rest": fields_to_json(table.rest),
                "encoding": table.encoding,
                "details": dict(table.details),
            }
            for byte, table in sorted(self.tables.items())
        }
        document = {
            "version": VERSION,
            "kind": self.kind,
            "key": fields_to_json(self.key),
            "tables": tables,
            "details": dict(self.details),
            "shards_by": self.shards_by.value,
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Description:
        """Returns the description that `to_json` wrote.

        Raises:
            StateFormatError: if a newer version of kafka-eos wrote it.
            StateMismatchError: if the value is not a description.
        """
        try:
            document = parse_json(value)
            version = document["version"]
            if version == VERSION:
                return cls(
                    kind=document["kind"],
                    key=fields_from_json(document["key"]),
                    tables={
                        int(byte): TableDescription(
                            name=table["name"],
                            value=fields_from_json(table["value"]),
                            rest=fields_from_json(table["rest"]),
                            encoding=table["encoding"],
                            details=table["details"],
                        )
                        for byte, table in sorted(document["tables"].items(), key=lambda each: int(each[0]))
                    },
                    details=document["details"],
                    shards_by=ShardsBy(document["shards_by"]),
                )
        except SHAPE_ERRORS as error:
            raise StateMismatchError(
                f"the description of the store cannot be read: {value[:80]!r} is damaged, or another program "
                "wrote it.",
                fix="find out which other program writes to the store or to its changelog topic.",
            ) from error
        raise StateFormatError(
            f"the description of the store has version {version}, expected {VERSION}.",
            fix="use the version of kafka-eos that the query runs with.",
        )


def check_shards_by(stored: ShardsBy, declared: ShardsBy) -> None:
    """Checks that the operator finds each key in the shard that holds its state.

    Raises:
        StateMismatchError: if the state was distributed by something else.
    """
    if stored is declared:
        return
    was, now = (
        "shards='partitions'" if each is ShardsBy.INPUT_PARTITION else "a number of shards"
        for each in (stored, declared)
    )
    raise StateMismatchError(
        f"the state was written by an operator with {was}, and this one has {now}: keys would meet shards "
        "that do not hold their state.",
        fix=f"use {was} as before; or start over with another store name, a new application.id and a new "
        "checkpoint.",
    )


def fields_to_json(schema: Iterable[pa.Field]) -> list[Any]:
    """Returns columns as ``[[name, type, nullable], …]``."""
    return [[column.name, type_to_json(column.type), column.nullable] for column in schema]


def fields_from_json(columns: list[Any]) -> pa.Schema:
    """Returns the schema that `fields_to_json` wrote."""
    return pa.schema([pa.field(name, type_from_json(type_), nullable) for name, type_, nullable in columns])


def type_to_json(type_: pa.DataType) -> Any:
    """Returns a type in the form that the docstring of this module defines.

    Raises:
        TypeError: if the type has no such form.
    """
    name = str(type_)
    if name in _NAMES:
        return name
    if pa.types.is_timestamp(type_):
        return ["timestamp", type_.unit, type_.tz]
    if pa.types.is_decimal128(type_):
        return ["decimal", type_.precision, type_.scale]
    if pa.types.is_time(type_) or pa.types.is_duration(type_):
        return ["duration" if pa.types.is_duration(type_) else f"time{type_.bit_width}", type_.unit]
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return ["list", type_to_json(type_.value_type)]
    if pa.types.is_struct(type_):
        return ["struct", fields_to_json([type_.field(index) for index in range(type_.num_fields)])]
    if pa.types.is_map(type_):
        return ["map", type_to_json(type_.key_type), type_to_json(type_.item_type)]
    raise TypeError(f"a description cannot contain the type {type_}")


def type_from_json(written: Any) -> pa.DataType:
    """Returns the type that `type_to_json` wrote.

    Raises:
        ValueError: if it is not a type.
    """
    if isinstance(written, str):
        if written not in _NAMES:
            raise ValueError(f"unknown type {written!r}")
        return _NAMES[written]
    kind, *rest = written
    if kind in ("timestamp", "duration", "time32", "time64"):
        return getattr(pa, kind)(*rest)
    if kind == "decimal":
        return pa.decimal128(*rest)
    if kind == "list":
        return pa.list_(type_from_json(rest[0]))
    if kind == "struct":
        return pa.struct(list(fields_from_json(rest[0])))
    if kind == "map":
        return pa.map_(type_from_json(rest[0]), type_from_json(rest[1]))
    raise ValueError(f"unknown type {written!r}")
