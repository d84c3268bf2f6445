"""What a store holds, kept in the store itself: so that its state can be read without the query that made it.

Every processor writes one entry, `META_KEY`: table 0x01 with an empty group key. The table is for nothing
else, since an empty group key may be that of real rows. The entry belongs to every shard: a tool that makes
other shards of a store copies it.

Types are written as names that Arrow knows (``"int64"``), or as ``["timestamp", "us", "UTC"]``,
``["decimal", 10, 2]``, ``["list", type]``, ``["map", key, value]``,
``["struct", [[name, type, nullable], …]]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import StateFormatError, StateMismatchError
from kafka_eos_source.state import layout
from kafka_eos_source.state.model import StateAccess

#: The table that holds the description, and nothing else. Tables of processors are 2 to 127 and 129 to 255.
META_TABLE = 0x01
META_KEY = layout.keyed(META_TABLE, b"")

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
        name: of the variable or the aggregates it holds.
        value: columns of a value; empty = there is nothing in it.
        rest: columns that follow the group key in the key; empty = none.
        encoding: how values are made bytes: ``"rows"`` (see `rows`), or a name that the processor knows.
        details: more that the processor knows: its kind of variable, time to live, windows.
    """

    name: str
    value: pa.Schema = field(default_factory=lambda: pa.schema([]))
    rest: pa.Schema = field(default_factory=lambda: pa.schema([]))
    encoding: str = "rows"
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What a store holds.

    Attributes:
        kind: of the processor: ``"aggregate"``, ``"deduplicate"``, ``"function"``, ``"stateful-processor"``.
        key: the grouping columns, as `keys.KeyCodec` encodes them.
        tables: by their byte.
        details: more that the processor knows.
    """

    kind: str
    key: pa.Schema
    tables: Mapping[int, TableDescription]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The value of `META_KEY`; the same bytes for the same description."""
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
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    def fingerprint(self) -> str:
        """For `StoreIdentity.schema`: another one for whatever is described in another way.

        But for time zones: they only say how an instant is shown, and may be the session's of the day.
        """
        document = _without_zones(json.loads(self.to_json()))
        return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]

    @classmethod
    def from_json(cls, value: bytes) -> Description:
        """The description that `to_json` wrote.

        Raises:
            StateFormatError: a newer kafka-eos wrote it.
            StateMismatchError: it is no description.
        """
        try:
            document = json.loads(value)
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
                )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise StateMismatchError(
                f"the description of the store cannot be read: {value[:80]!r}",
                fix="the store was not written by kafka-eos, or is damaged",
            ) from error
        raise StateFormatError(
            f"the description of the store has version {version}, expected {VERSION}",
            fix="read it with the version of kafka-eos that the query runs on",
        )


def _without_zones(written: Any) -> Any:
    if isinstance(written, dict):
        return {name: _without_zones(value) for name, value in written.items()}
    if isinstance(written, list):
        if len(written) == 3 and written[0] == "timestamp" and written[2] is not None:
            return [*written[:2], "UTC"]
        return [_without_zones(value) for value in written]
    return written


def describe(state: StateAccess, description: Description) -> None:
    """Writes the description into a store that has none, or an older one."""
    written = description.to_json()
    if state.get(META_KEY) != written:
        state.put(META_KEY, written)


def fields_to_json(schema: pa.Schema | pa.StructType) -> list[Any]:
    """Columns as ``[[name, type, nullable], …]``."""
    return [[column.name, type_to_json(column.type), column.nullable] for column in schema]


def fields_from_json(columns: list[Any]) -> pa.Schema:
    """The schema of `fields_to_json`."""
    return pa.schema([pa.field(name, type_from_json(type_), nullable) for name, type_, nullable in columns])


def type_to_json(type_: pa.DataType) -> Any:
    """A type as the head of this module says.

    Raises:
        TypeError: a type that Spark does not have.
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
    raise TypeError(f"no way to write down the type {type_}")


def type_from_json(written: Any) -> pa.DataType:
    """The type of `type_to_json`.

    Raises:
        ValueError: it is none.
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
