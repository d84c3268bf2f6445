"""The registry of a store: its state variables, their tables, and checks of changes to them.

The store contains its registry (`encoding.describe`). So a changed processor is checked against the state
that an older one wrote, and the state can be read without the processor. Tables::

    0x01          the description, and the watermark of the last batch
    0x02 … 0x7e   one variable each, in order of creation; the table of a deleted variable is reused
    0x82 … 0xfe   times of expiry of the variable in table - 0x80 (only with a time to live)
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
from kafka_eos_source.state.encoding.describe import (
    META_KEY,
    Description,
    TableDescription,
    check_shards_by,
)
from kafka_eos_source.state.encoding.layout import TIMED
from kafka_eos_source.state.model import ShardsBy, StateAccess
from kafka_eos_source.state.processor.codec import StructCodec, schema_problem, shape
from kafka_eos_source.state.processor.schema import arrow_schema

KIND = "stateful-processor"
TIMERS = 0x7F
_FIRST, _LAST = 0x02, 0x7E
_MAX_SCHEMAS = 256

VariableKind = Literal["value", "list", "map"]


@dataclass(frozen=True)
class Declaration:
    """A state variable as a processor declares it in ``init``.

    Attributes:
        name: name of the variable.
        kind: kind of the variable.
        value: schema of its values.
        map_key: schema of the keys of a map; None for other kinds.
        ttl_ms: time to live; None if values do not expire.
    """

    name: str
    kind: VariableKind
    value: t.StructType
    map_key: t.StructType | None = None
    ttl_ms: int | None = None


def check_types(declaration: Declaration) -> None:
    """Raises unless state can hold a variable with these schemas.

    Raises:
        InvalidSchemaError: if a type is not supported, or a key of a map state contains a map.
    """
    StructCodec(declaration.value)
    if declaration.map_key is not None:
        StructCodec(declaration.map_key)
        if "map<" in shape(declaration.map_key):
            raise InvalidSchemaError(
                f"the map keys of state variable {declaration.name!r} are "
                f"{shape(declaration.map_key)}, which contains a map; a map has no order, so equal "
                "keys would not have equal bytes.",
                fix="replace the map in the key by fields, or by an array of structs in a fixed order.",
            )


@dataclass(frozen=True)
class VariableInfo:
    """A state variable as a store holds it.

    Attributes:
        name: name of the variable.
        kind: kind of the variable.
        table: first byte of its keys.
        schemas: schemas that its values have had, oldest first; a value contains the number of its schema.
        map_key: schema of the keys of a map; None for other kinds.
        ttl: whether values expire; each then begins with its time of expiry.
    """

    name: str
    kind: VariableKind
    table: int
    schemas: tuple[t.StructType, ...]
    map_key: t.StructType | None = None
    ttl: bool = False

    @property
    def value(self) -> t.StructType:
        """The newest schema, to which older values are converted."""
        return self.schemas[-1]


@dataclass(frozen=True)
class Registry:
    """What a processor's store records about its state.

    Attributes:
        key: schema of the grouping columns.
        time_mode: "None", "ProcessingTime" or "EventTime".
        variables: the state variables, in order of declaration.
        shards_by: what decides the shard of a key.
    """

    key: t.StructType
    time_mode: str
    variables: tuple[VariableInfo, ...] = ()
    shards_by: ShardsBy = ShardsBy.HASH

    def description(self) -> Description:
        """Returns the registry in the form that the store holds."""
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
        details = {"time_mode": self.time_mode, "key": self.key.jsonValue()}
        return Description(KIND, arrow_schema(self.key), tables, details, self.shards_by)

    @classmethod
    def from_description(cls, description: Description) -> Registry:
        """Returns the registry that a store holds.

        Raises:
            StateMismatchError: if the store belongs to another kind of operator.
        """
        if description.kind != KIND:
            raise StateMismatchError(
                f"the store holds the state of an operator of kind {description.kind!r}, expected {KIND!r}.",
                fix="set a unique store name on this operator (argument 'store').",
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
            description.shards_by,
        )


def read(state: StateAccess) -> Registry | None:
    """Returns the registry in a store; None if nothing was ever written to the store.

    Raises:
        StateMismatchError: if the store belongs to another kind of operator, or to another program.
        StateFormatError: if a newer version of kafka-eos wrote it.
    """
    value = state.get(META_KEY)
    return None if value is None else Registry.from_description(Description.from_json(value))


def reconcile(
    stored: Registry | None, declared: Registry, wanted: Sequence[Declaration], deleted: frozenset[str]
) -> tuple[Registry, list[VariableInfo]]:
    """Checks the declared variables against the stored ones, and merges them.

    Args:
        stored: registry in the store; None if the store is empty.
        declared: registry with the key and the time mode of the query.
        wanted: variables that ``init`` declared, in order.
        deleted: names that ``init`` passed to ``deleteIfExists``.

    Returns:
        The new registry, and the variables whose entries must be removed.

    Raises:
        StateMismatchError: if the declared variables cannot read the stored state.
    """
    if stored is not None:
        _check_query(stored, declared)
    old = {variable.name: variable for variable in stored.variables} if stored else {}
    dropped = [variable for name, variable in old.items() if name in deleted]
    kept = {name: variable for name, variable in old.items() if name not in deleted}
    orphans = sorted(kept.keys() - {declaration.name for declaration in wanted})
    if orphans:
        raise StateMismatchError(
            f"the store holds state variable {', '.join(map(repr, orphans))}, which init() does not create.",
            fix="create it under that name, or delete its state with "
            f"handle.deleteIfExists({orphans[0]!r}) in init().",
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
            raise StatefulProcessorError(
                f"init() creates more than {_LAST - _FIRST + 1} state variables.", fix="create fewer."
            )
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
    was, now = (
        [f"{field.name} {shape(field.dataType)}" for field in key.fields]
        for key in (stored.key, declared.key)
    )
    if was != now:
        raise StateMismatchError(
            f"the state is grouped by {', '.join(was)}, but the query by {', '.join(now)}.",
            fix="group by the same columns in the same order. If they were only renamed, give them their "
            "former names before the operator (withColumnRenamed). For other columns, start over with "
            "another store name, a new application.id and a new checkpoint.",
        )
    check_shards_by(stored.shards_by, declared.shards_by)
    if stored.time_mode != declared.time_mode:
        raise StateMismatchError(
            f"the state was created with time_mode {stored.time_mode!r}, but the query has time_mode "
            f"{declared.time_mode!r}; timers of one mode have no meaning in another.",
            fix=f"set time_mode={stored.time_mode!r}; or start over with another store name, a new "
            "application.id and a new checkpoint.",
        )


def _evolve(stored: VariableInfo, wanted: Declaration) -> VariableInfo:
    """Returns the stored variable with the newest schema.

    Raises:
        StateMismatchError: if the new declaration cannot read the stored values.
    """

    def mismatch(reason: str) -> StateMismatchError:
        return StateMismatchError(
            f"state variable {stored.name!r} does not match its stored state: {reason}.",
            fix="declare it as before, or delete its state with "
            f"handle.deleteIfExists({stored.name!r}) and use another name.",
        )

    if stored.kind != wanted.kind:
        raise mismatch(f"the store holds a {stored.kind} state, init() creates a {wanted.kind} state")
    if stored.ttl != (wanted.ttl_ms is not None):
        raise mismatch(f"it was {'' if stored.ttl else 'not '}created with a time to live")
    if stored.map_key is not None and wanted.map_key is not None:
        was, now = shape(stored.map_key), shape(wanted.map_key)
        if was != now:
            raise mismatch(f"the map's keys were {was} and are now {now}")
    was, now = shape(stored.value), shape(wanted.value)
    if was == now:
        return stored
    for schema in stored.schemas:
        reason = schema_problem(schema, wanted.value)
        if reason is not None:
            raise mismatch(f"values were {shape(schema)} and are now {now}: {reason}")
    if len(stored.schemas) == _MAX_SCHEMAS:
        raise mismatch(f"it has already had {_MAX_SCHEMAS} schemas, the maximum")
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
            f"table {byte} holds a {details.get('kind')!r} state, which this version of kafka-eos does not "
            "know.",
            fix="use the version of kafka-eos that the query runs with.",
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
