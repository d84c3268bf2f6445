"""Versions of a store's values: codecs that read all of them, and which change of a query begins a new one.

::

    version 1       0x01 │ columns
    version n > 1   n (1 byte) │ check (3 bytes) │ columns

A change of the query that changes the columns of a value begins a new version. Values are not rewritten then:
each one names its version, so values of all versions may be mixed in a database and in its changelog. They
are converted when they are read, and written in the newest version when their group changes. The store's
description lists the versions. *check* is a hash of the columns. It catches a value whose version is not the
one in the description.

A value consists of *parts*, each with an id that no other part of the store ever gets. So the values of an
aggregate that was removed and added again are not confused, and an aggregate may be renamed.

The description of the state commits with the values. In each micro-batch, the shard compares it with what the
query declares (`agree`):

* The state does not depend on the change: the operator continues, and only the description changes.
* The change adds, removes, renames or reorders aggregates (or columns of a function's state), or widens their
  types: the operator begins a new version of the values. Nothing is rewritten.
* Everything else is refused with both declarations, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints, RowCodec
from kafka_eos_source.state.encoding.describe import (
    META_KEY,
    Description,
    check_shards_by,
    fields_from_json,
    fields_to_json,
    type_to_json,
)
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregation import Aggregation

#: Largest number of a version, because a value has one byte for it.
MAX_VERSIONS = 255

_CHECK_BYTES = 3
_NO_COLUMNS = pa.schema([])


@dataclass(frozen=True)
class Part:
    """A part of a value: the state of one aggregate, or one column of a function's state.

    Attributes:
        id: identifies the part in all versions of the store.
        name: name of the aggregate's result, or of the column.
        declared: declaration of the aggregate (`Aggregate.to_json`); None for a column.
        fields: columns of the part.
    """

    id: int
    name: str
    declared: Any
    fields: tuple[pa.Field, ...]


@dataclass(frozen=True)
class Version:
    """One version of a store's values.

    Attributes:
        number: number of the version, from 1.
        parts: the parts, in the order of their columns.
    """

    number: int
    parts: tuple[Part, ...]

    @property
    def fields(self) -> list[pa.Field]:
        """Columns of all parts."""
        return [field for part in self.parts for field in part.fields]

    @cached_property
    def columns(self) -> list[Any]:
        """What the bytes of a value depend on, as JSON values; without the names of aggregates."""
        return [
            [
                part.id,
                part.name if part.declared is None else part.declared,
                [[type_to_json(field.type), field.nullable] for field in part.fields],
            ]
            for part in self.parts
        ]

    @cached_property
    def lead(self) -> bytes:
        """Bytes with which every value of this version begins."""
        if self.number == 1:
            return b"\x01"
        columns = json.dumps(without_zones(self.columns), sort_keys=True)
        hashed = sha256(columns.encode()).digest()
        return bytes([self.number]) + hashed[:_CHECK_BYTES]

    def to_json(self) -> dict[str, Any]:
        """Returns the version as JSON values, as the store's description lists it."""
        parts = [[part.id, part.name, part.declared, fields_to_json(part.fields)] for part in self.parts]
        return {"number": self.number, "parts": parts}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Version:
        """Returns the version that `to_json` wrote."""
        parts = (
            Part(id_, name, declared, tuple(fields_from_json(fields)))
            for id_, name, declared, fields in written["parts"]
        )
        return cls(written["number"], tuple(parts))


def only_version(columns: Iterable[pa.Field]) -> tuple[Version, ...]:
    """Returns the versions of a store whose values always had these columns."""
    return (Version(1, (Part(0, "", None, tuple(columns)),)),)


def without_zones(written: Any) -> Any:
    """Returns the JSON of types without time zones, which only affect how an instant is displayed."""
    if isinstance(written, dict):
        return {name: without_zones(value) for name, value in written.items()}
    if isinstance(written, (list, tuple)):
        if len(written) == 3 and written[0] == "timestamp" and written[2] is not None:
            return [*written[:2], "UTC"]
        return [without_zones(value) for value in written]
    return written


_Decoded = TypeVar("_Decoded")


class _Versions:
    """Finds the version of each value, and converts columns of older versions to the newest one.

    Args:
        versions: all versions, oldest first.
        before: number of columns before those of the parts; they are the same in all versions.
    """

    def __init__(self, versions: Sequence[Version], before: int = 0) -> None:
        self.by_number = {version.number: version for version in versions}
        self.newest = versions[-1]
        self._before = before

    def decode_newest(self, decode: Callable[[pa.BinaryArray], _Decoded], values: pa.BinaryArray) -> _Decoded:
        """Decodes values of the newest version.

        Raises:
            StateMismatchError: if a value has a version that the store's description does not list.
            ValueError: if a value is damaged.
        """
        try:
            return decode(values)
        except ValueError:
            self.split(values)  # raises if the version is the reason
            raise

    def split(self, values: pa.BinaryArray) -> dict[int, Ints] | None:
        """Returns the positions of the values of each version; None if all values are of the newest one.

        A null counts as a value of the newest version.

        Raises:
            StateMismatchError: if the store's description does not list the version of a value.
        """
        present = binary.valid(values)
        starts = binary.offsets(values).astype(np.int64)
        numbers = np.full(len(values), self.newest.number, np.int64)
        has_bytes = present & (starts[1:] > starts[:-1])
        numbers[has_bytes] = binary.data(values)[starts[:-1][has_bytes]]
        if bool((numbers == self.newest.number).all()):
            return None
        found = {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}
        unknown = sorted(found.keys() - self.by_number.keys())
        if unknown:
            raise StateMismatchError(
                f"a value has version {unknown[0]}, but the store's description lists the versions "
                f"{sorted(self.by_number)}.",
                fix="the store is damaged; remove its folder, and it is restored from the changelog.",
            )
        return found

    def convert(self, number: int, columns: Sequence[pa.Array], length: int) -> list[pa.Array]:
        """Returns columns of a version as columns of the newest version."""
        version = self.by_number[number]
        if version is self.newest:
            return list(columns)
        at, own = self._before, {}
        for part in version.parts:
            own[part.id] = columns[at : at + len(part.fields)]
            at += len(part.fields)
        converted = list(columns[: self._before])
        for part in self.newest.parts:
            if part.id in own:
                pairs = zip(own[part.id], part.fields, strict=True)
                converted += [column.cast(field.type) for column, field in pairs]
            else:
                converted += RowCodec(pa.schema(part.fields)).decode(pa.nulls(length, pa.binary()))
        return converted


class VersionedRows:
    """Encodes values in the newest version, and decodes values of all versions; otherwise as `RowCodec`.

    Args:
        versions: all versions, oldest first.
    """

    def __init__(self, versions: Sequence[Version]) -> None:
        self._versions = _Versions(versions)
        self._codecs = {
            version.number: RowCodec(pa.schema(version.fields), lead=version.lead) for version in versions
        }
        self._newest = self._codecs[self._versions.newest.number]

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Returns one value for each row; see `RowCodec.encode`."""
        return self._newest.encode(columns)

    def decode(self, values: pa.BinaryArray) -> list[pa.Array]:
        """Returns the columns of the newest version; see `RowCodec.decode`.

        Raises:
            ValueError, StateMismatchError: if a value is damaged, or of an unknown version.
        """
        found = self._versions.split(values) if len(self._codecs) > 1 else None
        if found is None:
            return self._versions.decode_newest(self._newest.decode, values)
        parts = [
            self._versions.convert(number, self._codecs[number].decode(values.take(pa.array(own))), len(own))
            for number, own in found.items()
        ]
        return _in_order(parts, np.argsort(np.concatenate(list(found.values()))))


class VersionedLists:
    """Encodes lists of rows in the newest version, and decodes lists of all versions; see `ListCodec`.

    Args:
        before: columns of a row before those of the versions.
        versions: all versions, oldest first.
    """

    def __init__(self, before: Sequence[pa.Field], versions: Sequence[Version]) -> None:
        self._versions = _Versions(versions, len(before))
        self._codecs = {
            version.number: ListCodec(pa.schema([*before, *version.fields]), version.lead)
            for version in versions
        }
        self._newest = self._codecs[self._versions.newest.number]
        #: Columns of a row in the newest version.
        self.schema = self._newest.rows.schema

    def encode(self, due_ms: Ints, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Encodes one value per key; see `ListCodec.encode`."""
        return self._newest.encode(due_ms, counts, columns)

    def decode(self, values: pa.BinaryArray) -> Lists:
        """Decodes values of all versions; see `ListCodec.decode`.

        Raises:
            ValueError, StateMismatchError: if a value is damaged, or of an unknown version.
        """
        found = self._versions.split(values) if len(self._codecs) > 1 else None
        if found is None:
            return self._versions.decode_newest(self._newest.decode, values)
        parts, keys = [], []
        due_ms, counts = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
        for number, own in found.items():
            lists = self._codecs[number].decode(values.take(pa.array(own)))
            rows = int(lists.counts.sum())
            parts.append(self._versions.convert(number, lists.columns, rows))
            keys.append(np.repeat(own, lists.counts))
            counts[own] = lists.counts
            due_ms[own] = np.asarray(lists.due_ms.fill_null(0), np.int64)
        columns = _in_order(parts, np.argsort(np.concatenate(keys), kind="stable"))
        return Lists(pa.array(due_ms, mask=~binary.valid(values)), counts, columns)


def _in_order(parts: Sequence[Sequence[pa.Array]], order: Ints) -> list[pa.Array]:
    """Concatenates columns of several versions, and brings their rows into the given order."""
    index = pa.array(order)
    return [pa.concat_arrays(columns).take(index) for columns in zip(*parts, strict=True)]


# -- lists of rows as one value, for keys that have any number of rows, such as open sessions
#
#   lead │ due (8 bytes, big endian, sign flipped) │ number of rows (4, big endian) │ cells │ bodies
#
# *lead* names the version of the rows. `encoding.binary` defines the cells and bodies; here the cells of all
# rows precede the bodies of all rows. *due* is the time of the key's due entry (`groups`).

#: Bytes between the lead and the cells.
_COUNTED = 12


class Lists(NamedTuple):
    """Rows of several keys, key after key.

    Attributes:
        due_ms: time of each key's due entry, ms since the epoch; null = the key has no value.
        counts: number of rows of each key.
        columns: columns of all rows.
    """

    due_ms: pa.Int64Array
    counts: Ints
    columns: list[pa.Array]


class ListCodec:
    """Encodes the rows of each key as one value, and decodes them.

    Args:
        schema: columns of the rows; the same types as for `RowCodec`.
        lead: bytes with which every value begins: its version.
    """

    def __init__(self, schema: pa.Schema, lead: bytes = b"\x01") -> None:
        self.rows = RowCodec(schema)
        self._lead = np.frombuffer(lead, np.uint8)
        self._head = len(lead) + _COUNTED

    def encode(self, due_ms: Ints, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Encodes one value per key; a key without rows gets null, which deletes it from the state.

        Args:
            due_ms: time of each key's due entry, ms since the epoch.
            counts: number of rows of each key.
            columns: columns of all rows, key after key.
        """
        lead = np.empty((len(counts), self._head), np.uint8)
        lead[:, :-_COUNTED] = self._lead
        lead[:, -_COUNTED:-4] = binary.pack(pa.array(due_ms))
        lead[:, -4:] = counts.astype(">u4").view(np.uint8).reshape(-1, 4)
        values = self.rows.encode_lists(lead, counts, columns)
        some = counts > 0
        if bool(some.all()):
            return values
        return pa.Array.from_buffers(values.type, len(values), [binary.bitmap(some), *values.buffers()[1:]])

    def decode(self, values: pa.BinaryArray) -> Lists:
        """Decodes values that `encode` returned; null is a key without rows.

        Raises:
            ValueError: if a value is damaged or has another version.
        """
        present = binary.valid(values)
        if not bool(present.all()):
            values = values.drop_null()
        head = binary.head(values, self._head)
        if not bool((head[:, :-_COUNTED] == self._lead).all()):
            raise ValueError(f"an encoded list does not begin with {self._lead.tobytes()!r}")
        own = np.ascontiguousarray(head[:, -4:]).reshape(-1).view(">u4").astype(np.int64)
        counts = np.zeros(len(present), np.int64)
        counts[present] = own
        due = np.zeros(len(present), np.int64)
        due[present] = binary.raw(binary.unpack(head[:, -_COUNTED:-4], pa.int64()), np.int64)
        columns = self.rows.decode_lists(values, self._head, own)
        return Lists(pa.array(due, mask=~present), counts, columns)


# -- changes of a query

#: Details of a description that `reconcile` compares by rules of its own, or that do not affect the values.
_NOT_COMPARED = ("versions", "aggregates", "columns", "time")

_START_OVER = (
    "undo the change; or start over with another store name, a new application.id and a new checkpoint, so "
    "that the state is computed from the input again (docs/upgrading.md, Changing a running query)."
)
_INTS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
#: Types to which every value of a type can be converted without a change.
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (*_INTS[1:], pa.float32(), pa.float64()),
    pa.int16(): (*_INTS[2:], pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float64()),
    pa.float32(): (pa.float64(),),
}


def agree(state: StateAccess, declared: Description, context: BatchContext) -> Description:
    """Returns the description that fits both the store and the query, and writes it if it is new.

    Args:
        state: state of a shard.
        declared: description of the state as the processor declares it, without versions.
        context: the micro-batch; it knows what decides the shard of a key.

    Raises:
        StateMismatchError: if the query cannot continue with the stored state.
        StateFormatError: if a newer version of kafka-eos wrote the description.
    """
    declared = replace(declared, shards_by=context.shards_by)
    written = state.get(META_KEY)
    if written == declared.to_json():
        return declared
    agreed = declared if written is None else reconcile(Description.from_json(written), declared)
    text = agreed.to_json()
    if text != written:
        state.put(META_KEY, text)
    return agreed


def reconcile(stored: Description, declared: Description) -> Description:
    """Returns the declared description with the versions of the stored values.

    Args:
        stored: description in the store.
        declared: description of the state as the query declares it, without versions.

    Raises:
        StateMismatchError: if the query cannot continue with the stored state.
    """
    _check_same_layout(stored, declared)
    versions = versions_of(stored)
    newest = versions[-1]
    first_id = 1 + max((part.id for version in versions for part in version.parts), default=-1)
    parts = _matched(newest.parts, parts_of(declared), first_id, stored, declared)
    now = Version(newest.number, parts)
    if without_zones(now.columns) != without_zones(newest.columns):
        now = Version(newest.number + 1, parts)
        if now.number > MAX_VERSIONS:
            _refuse(
                f"the store has already had {MAX_VERSIONS} versions of its values, the maximum",
                stored,
                declared,
            )
        versions = (*versions, now)
    else:
        versions = (*versions[:-1], now)
    if len(versions) == 1:
        return declared
    return replace(
        declared, details={**declared.details, "versions": [version.to_json() for version in versions]}
    )


def versions_of(description: Description) -> tuple[Version, ...]:
    """Returns the versions of a store's values, oldest first."""
    written = description.details.get("versions")
    if written is None:
        return (Version(1, parts_of(description)),)
    return tuple(Version.from_json(each) for each in written)


def parts_of(description: Description) -> tuple[Part, ...]:
    """Returns the parts of a declared value, with ids from 0."""
    parts: list[Part] = []
    columns = [column for table in description.tables.values() for column in table.value]
    aggregation: Aggregation | None = None
    if description.kind == "aggregate":
        aggregation = Aggregation.from_json(description.details)
        declared = aggregation.state_declarations()
        if description.details.get("emit") == "changes":  # the row to take back is computed from the state
            declared = {
                name: {**aggregation.aggregates[name].to_json(), **each} for name, each in declared.items()
            }
        for name, fields in aggregation.states_by_name.items():
            parts.append(Part(len(parts), name, declared[name], tuple(fields)))
        # Columns before the states are the same in all versions. Each one after them is a part of its own.
        last = [column.name for column in columns].index(parts[-1].fields[-1].name)
        columns = columns[last + 1 :]
    for column in columns:
        parts.append(Part(len(parts), column.name, _emitted(aggregation, column.name), (column,)))
    return tuple(parts)


def _emitted(aggregation: Aggregation | None, column: str) -> Any:
    """Returns the declaration of a column with an emitted result, which is renamed with its aggregate."""
    name = column.removeprefix("__emitted_")
    if aggregation is None or name == column or name not in aggregation.aggregates:
        return None
    return {"emitted": aggregation.aggregates[name].to_json()}


# -- comparison


def _check_same_layout(stored: Description, declared: Description) -> None:
    """Raises unless the keys have the same layout, and belong to the same kind of operator.

    Raises:
        StateMismatchError: if another kind of operator wrote the store, or it has other keys or windows.
    """
    if stored.kind != declared.kind:
        raise StateMismatchError(
            f"the store holds the state of an operator of kind {stored.kind!r}, expected {declared.kind!r}.",
            fix="set a unique store name on this operator (argument 'store').",
        )
    if _types(stored.key) != _types(declared.key):
        _refuse("the columns of the key, their types or their order changed", stored, declared)
    if stored.key.names != declared.key.names:
        raise StateMismatchError(
            _difference("the columns of the key have other names", stored, declared),
            fix="if the columns were only renamed, give them the former names before the operator "
            "(withColumnRenamed), and the new names after it. Otherwise, " + _START_OVER,
        )
    for what in ("tables", "windows", "version"):
        if _compared(stored)[what] != _compared(declared)[what]:
            changed = "the version of the state" if what == "version" else f"the {what}"
            _refuse(f"{changed} changed", stored, declared)
    check_shards_by(stored.shards_by, declared.shards_by)
    if _others(stored) != _others(declared):
        _refuse("the properties of the state changed", stored, declared)


def _compared(description: Description) -> dict[str, Any]:
    tables = {byte: (table.name, table.encoding) for byte, table in description.tables.items()}
    details = description.details
    return {"tables": tables, "windows": details.get("window"), "version": details.get("version")}


def _others(description: Description) -> dict[str, Any]:
    own = (*_NOT_COMPARED, "window", "version")
    return {name: value for name, value in description.details.items() if name not in own}


def _types(key: pa.Schema) -> Any:
    return without_zones([type_to_json(field.type) for field in key])


def _matched(
    old: Sequence[Part], new: Sequence[Part], first_id: int, stored: Description, declared: Description
) -> tuple[Part, ...]:
    """Returns the new parts with the ids of the old parts that they continue, or with new ids.

    Raises:
        StateMismatchError: if a new part cannot continue the old part of its name, or if some parts seem to
            be renamed.
    """
    by_name = {part.name: part for part in old}
    names = {part.name for part in new}
    removed = [part for part in old if part.name not in names]
    matched: list[Part] = []
    added: list[str] = []
    for part in new:
        before = by_name.get(part.name) or _renamed(part, removed, [p for p in new if p.name not in by_name])
        if before is None:
            if any(not field.nullable for field in part.fields) and part.declared is None:
                _refuse(
                    f"column {part.name!r} was added and is not nullable, but older states have no value for "
                    "it",
                    stored,
                    declared,
                )
            if part.declared is not None and "removed" in declared.details:
                _refuse(
                    f"aggregate {part.name!r} was added to an operator that takes rows back "
                    f"(removed={declared.details['removed']!r}): it would take back rows that it has never "
                    "received",
                    stored,
                    declared,
                )
            matched.append(replace(part, id=first_id))
            first_id += 1
            added.append(part.name)
            continue
        if before in removed:
            removed.remove(before)
        reason = _problem(before, part)
        if reason is not None:
            _refuse(reason, stored, declared)
        matched.append(replace(part, id=before.id))
    if removed and added:
        raise StateMismatchError(
            _difference(
                f"{_named(part.name for part in removed)} was removed and {_named(added)} added in one "
                "change, which looks like a rename that would lose the state",
                stored,
                declared,
            ),
            fix="if a column was renamed, give it the former name before the operator. Otherwise, make two "
            "changes: start the query once without what you remove, then add the new one.",
        )
    return tuple(matched)


def _renamed(part: Part, removed: Sequence[Part], added: Sequence[Part]) -> Part | None:
    """Returns the removed aggregate that the added one continues under another name.

    That is the only removed aggregate with the same declaration, if it is the only added one too. A column of
    a function's state has no declaration except its name, so it cannot be renamed.
    """
    if part.declared is None:
        return None
    same = [each for each in removed if each.declared == part.declared]
    rivals = [each for each in added if each.declared == part.declared]
    return same[0] if len(same) == 1 and len(rivals) == 1 else None


def _problem(old: Part, new: Part) -> str | None:
    """Returns why the new part cannot continue the old one; None if it can."""
    if old.declared != new.declared:
        return f"{new.name!r} was {_aggregate(old)} and is now {_aggregate(new)}"
    for before, after in zip(old.fields, new.fields, strict=True):
        if before.nullable and not after.nullable:
            return f"column {new.name!r} was nullable and no longer is"
        if not _widens(before.type, after.type):
            return f"the state of {new.name!r} has type {before.type}, which cannot become {after.type}"
    return None


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    if pa.types.is_decimal128(old) and pa.types.is_decimal128(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    if pa.types.is_list(old) and pa.types.is_list(new):
        return _widens(old.value_type, new.value_type)
    if pa.types.is_timestamp(old) and pa.types.is_timestamp(new):
        return bool(old.unit == new.unit and (old.tz is None) == (new.tz is None))
    return bool(old == new) or new in _WIDER.get(old, ())


# -- what people read


def _refuse(reason: str, stored: Description, declared: Description) -> NoReturn:
    raise StateMismatchError(_difference(reason, stored, declared), fix=_START_OVER)


def _difference(reason: str, stored: Description, declared: Description) -> str:
    return f"{reason}. The state holds: {show(stored)}. The query declares: {show(declared)}."


def show(description: Description) -> str:
    """Returns what a store holds as text, for errors: its key, its aggregates or columns, and its window."""
    details = description.details
    shown = [f"key ({_columns(description.key)})"]
    if description.kind == "deduplicate":
        shown.append("duplicates within a span of time" if len(description.tables) > 1 else "all duplicates")
    else:
        shown.append(", ".join(_part(part) for part in _shown(description)))
    if "version" in details:
        shown.append(f"version {details['version']!r}")
    if "window" in details:
        shown.append(" ".join(f"{name}={value}" for name, value in details["window"].items()))
    shown += [f"{name}={value}" for name, value in _others(description).items()]
    return "; ".join(shown)


def _shown(description: Description) -> list[Part]:
    """Returns the parts that the user declared, without those of the operator itself."""
    return [part for part in versions_of(description)[-1].parts if not part.name.startswith("__")]


def _part(part: Part) -> str:
    if part.declared is None:
        return _columns(part.fields) + ("" if part.fields[0].nullable else " not null")
    return f"{part.name} = {_aggregate(part)}"


def _aggregate(part: Part) -> str:
    types = ", ".join(str(field.type) for field in part.fields)
    return f"{Aggregate.from_json(part.declared)} with state {types}"


def _columns(columns: pa.Schema | Sequence[pa.Field]) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in columns)


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
