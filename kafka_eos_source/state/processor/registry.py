"""Which variables a store holds, in which tables, and how what a processor declares in ``init`` meets them.

The registry is kept in the store (`describe`), so that a processor that was changed meets its old state
knowingly, and state can be read without the processor. Tables::

    0x01          the description, and the watermark of the last batch
    0x02 … 0x7e   a variable each, in order of creation; a table whose variable was deleted is used again
    0x82 … 0xfe   when the values of the variable in table - 0x80 expire (only with a time to live)
    0x7f, 0xff    timers, by key and by time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import types as t

from kafka_eos_source.errors import (
    InvalidSchemaError,
    StateFormatError,
    StatefulProcessorError,
    StateMismatchError,
)
from kafka_eos_source.state.encoding.describe import META_KEY, Description, TableDescription
from kafka_eos_source.state.layout import TIMED
from kafka_eos_source.state.model import StateAccess
from kafka_eos_source.state.processor import evolution
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.codec import StructCodec

KIND = "stateful-processor"
TIMERS = 0x7F
_FIRST, _LAST = 0x02, 0x7E
_MAX_SCHEMAS = 256

VariableKind = Literal["value", "list", "map"]


@dataclass(frozen=True)
class Declaration:
    """A variable as a processor declares it in ``init``.

    Attributes:
        map_key: schema of the keys of a map; None for other kinds.
        ttl_ms: time to live; None = for ever.
    """

    name: str
    kind: VariableKind
    value: t.StructType
    map_key: t.StructType | None = None
    ttl_ms: int | None = None


def check_types(declaration: Declaration) -> None:
    """Whether a variable of these schemas can be kept.

    Raises:
        InvalidSchemaError: it cannot.
    """
    StructCodec(declaration.value)
    if declaration.map_key is not None:
        StructCodec(declaration.map_key)
        if "map<" in evolution.shape(declaration.map_key):
            raise InvalidSchemaError(
                f"keys of state variable {declaration.name!r} are {evolution.shape(declaration.map_key)}: "
                "a map has no order, equal ones could not be found",
                fix="take the map apart, or make it an array of structs in a fixed order",
            )


@dataclass(frozen=True)
class VariableInfo:
    """A variable as a store holds it.

    Attributes:
        table: first byte of its keys.
        schemas: of its values, oldest first; the first byte of a value tells which one it has.
        map_key: schema of the keys of a map; None for other kinds.
        ttl: values expire, and begin with the time at which they do.
    """

    name: str
    kind: VariableKind
    table: int
    schemas: tuple[t.StructType, ...]
    map_key: t.StructType | None = None
    ttl: bool = False

    @property
    def value(self) -> t.StructType:
        """The schema that values are read as."""
        return self.schemas[-1]


@dataclass(frozen=True)
class Registry:
    """All that a store of a processor says of itself.

    Attributes:
        key: the grouping columns.
        time_mode: "None", "ProcessingTime" or "EventTime".
    """

    key: t.StructType
    time_mode: str
    variables: tuple[VariableInfo, ...] = ()

    def description(self) -> Description:
        """As it is kept."""
        tables: dict[int, TableDescription] = {}
        for variable in self.variables:
            tables[variable.table] = _describe(variable)
            if variable.ttl:
                tables[variable.table | TIMED] = _index(f"$ttl_{variable.name}")
        if self.time_mode != "None":
            expiry = pa.schema([pa.field("expiryTimestampMs", pa.int64(), False)])
            tables[TIMERS] = TableDescription(
                "$timers", rest=expiry, encoding=KIND, details={"kind": "timers"}
            )
            tables[TIMERS | TIMED] = _index("$timers")
        return Description(
            KIND, arrow_schema(self.key), tables, {"time_mode": self.time_mode, "key": self.key.jsonValue()}
        )

    @classmethod
    def from_description(cls, description: Description) -> Registry:
        """The registry that a store holds.

        Raises:
            StateMismatchError: the store is another processor's.
        """
        if description.kind != KIND:
            raise StateMismatchError(
                f"the store holds the state of {description.kind!r}, expected {KIND!r}",
                fix="give this operator a store name of its own",
            )
        variables = [
            _variable(byte, table)
            for byte, table in sorted(description.tables.items())
            if _FIRST <= byte <= _LAST
        ]
        return cls(
            t.StructType.fromJson(description.details["key"]),
            description.details["time_mode"],
            tuple(variables),
        )


def read(state: StateAccess) -> Registry | None:
    """The registry in a store; None = nothing was ever written to it.

    Raises:
        StateMismatchError: the store is another processor's, or not one of this package.
        StateFormatError: a newer version wrote it.
    """
    value = state.get(META_KEY)
    return None if value is None else Registry.from_description(Description.from_json(value))


def describe(state: StateAccess) -> list[VariableInfo]:
    """The variables in a store, by table; none where nothing was written yet.

    Raises:
        StateMismatchError: the store is another processor's, or not one of this package.
        StateFormatError: a newer version wrote it.
    """
    registry = read(state)
    return [] if registry is None else list(registry.variables)


def reconcile(
    stored: Registry | None, declared: Registry, wanted: Sequence[Declaration], deleted: frozenset[str]
) -> tuple[Registry, list[VariableInfo]]:
    """What the store is to hold from now on.

    Args:
        stored: what it holds; None = nothing yet.
        declared: key and time mode of the query.
        wanted: what ``init`` declared, in order.
        deleted: names that ``init`` gave to ``deleteIfExists``.

    Returns: the new registry, and the variables whose entries are to be removed.

    Raises:
        StateMismatchError: what is stored cannot be read as what is declared.
    """
    if stored is not None:
        _check_query(stored, declared)
    old = {variable.name: variable for variable in stored.variables} if stored else {}
    dropped = [variable for name, variable in old.items() if name in deleted]
    kept = {name: variable for name, variable in old.items() if name not in deleted}
    orphans = sorted(kept.keys() - {declaration.name for declaration in wanted})
    if orphans:
        raise StateMismatchError(
            f"the store holds state variable {', '.join(map(repr, orphans))}, which init() does not create",
            fix=f"give it its old name, or drop its state by handle.deleteIfExists({orphans[0]!r}) in init()",
        )
    used = {variable.table for variable in kept.values()}
    free = (table for table in range(_FIRST, _LAST + 1) if table not in used)
    variables = []
    for declaration in wanted:
        if declaration.name in kept:
            variables.append(_evolve(kept[declaration.name], declaration))
            continue
        table = next(free, None)
        if table is None:
            raise StatefulProcessorError(f"more than {_LAST - _FIRST + 1} state variables", fix="use fewer")
        schemas = (declaration.value,)
        variables.append(
            VariableInfo(
                declaration.name,
                declaration.kind,
                table,
                schemas,
                declaration.map_key,
                declaration.ttl_ms is not None,
            )
        )
    return replace(declared, variables=tuple(variables)), dropped


def _check_query(stored: Registry, declared: Registry) -> None:
    was = [evolution.shape(field.dataType) for field in stored.key.fields]
    now = [evolution.shape(field.dataType) for field in declared.key.fields]
    if was != now:
        raise StateMismatchError(
            f"the state is grouped by {', '.join(was)}, the query by {', '.join(now)}",
            fix="group by columns of the old types, or begin with a new store name",
        )
    if stored.time_mode != declared.time_mode:
        raise StateMismatchError(
            f"the state was made with timeMode {stored.time_mode!r}, the query has {declared.time_mode!r}",
            fix="keep the time mode: timers of one clock mean nothing to the other",
        )


def _evolve(stored: VariableInfo, wanted: Declaration) -> VariableInfo:
    def refuse(what: str) -> StateMismatchError:
        return StateMismatchError(
            f"state variable {stored.name!r}: {what}",
            fix=f"declare it as it was, or call deleteIfExists({stored.name!r}) and use another name",
        )

    if stored.kind != wanted.kind:
        raise refuse(f"the store holds a {stored.kind} state, init() creates a {wanted.kind} state")
    if stored.ttl != (wanted.ttl_ms is not None):
        raise refuse(f"it was {'' if stored.ttl else 'not '}created with a time to live")
    if stored.map_key is not None and wanted.map_key is not None:
        was, now = evolution.shape(stored.map_key), evolution.shape(wanted.map_key)
        if was != now:
            raise refuse(f"the map's keys were {was} and are {now}")
    was, now = evolution.shape(stored.value), evolution.shape(wanted.value)
    if was == now:
        return stored
    for schema in stored.schemas:
        reason = evolution.problem(schema, wanted.value)
        if reason is not None:
            raise refuse(f"values were {evolution.shape(schema)} and are {now}: {reason}")
    if len(stored.schemas) == _MAX_SCHEMAS:
        raise refuse(f"it had {_MAX_SCHEMAS} schemas already")
    return replace(stored, schemas=(*stored.schemas, wanted.value))


def _describe(variable: VariableInfo) -> TableDescription:
    rest = pa.schema([])
    if variable.map_key is not None:
        rest = arrow_schema(variable.map_key)
    elif variable.kind == "list":
        rest = pa.schema([pa.field("position", pa.int64(), False)])
    details = {
        "kind": variable.kind,
        "ttl": variable.ttl,
        "schemas": [schema.jsonValue() for schema in variable.schemas],
        "map_key": None if variable.map_key is None else variable.map_key.jsonValue(),
    }
    return TableDescription(variable.name, arrow_schema(variable.value), rest, KIND, details)


def _index(name: str) -> TableDescription:
    return TableDescription(name, encoding=KIND, details={"kind": "index"})


def _variable(byte: int, table: TableDescription) -> VariableInfo:
    details: Mapping[str, Any] = table.details
    if details.get("kind") not in ("value", "list", "map"):
        raise StateFormatError(
            f"table {byte} holds a {details.get('kind')!r} state, which this version does not know",
            fix="read it with the version of kafka-eos that the query runs on",
        )
    key = details["map_key"]
    return VariableInfo(
        table.name,
        details["kind"],
        byte,
        tuple(t.StructType.fromJson(schema) for schema in details["schemas"]),
        None if key is None else t.StructType.fromJson(key),
        details["ttl"],
    )
