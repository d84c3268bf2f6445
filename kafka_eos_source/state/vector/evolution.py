"""Changes to a vectorised operator: which continue with the stored state, and which are refused.

Each store contains the description of its state, which commits with the values. In each micro-batch, the
shard compares it with what the query declares:

* The state does not depend on the change: the operator continues, and only the description changes.
* The change adds, removes, renames or reorders aggregates (or columns of a function's state), or widens their
  types: the operator begins a new version of the values (`versions`). Nothing is rewritten.
* Everything else is refused with both declarations, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow as pa

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.encoding.describe import META_KEY, Description, check_shards_by, type_to_json
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.versions import MAX_VERSIONS, Part, Version, without_zones

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
        for name, fields in aggregation.states_by_name.items():
            parts.append(Part(len(parts), name, aggregation.aggregates[name].to_json(), tuple(fields)))
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
    declared = Aggregate.from_json(part.declared)
    by = f" by {', '.join(declared.by)}" if declared.by else ""
    types = ", ".join(str(field.type) for field in part.fields)
    return f"{declared.kind}({declared.column or ''}{by}) with state {types}"


def _columns(columns: pa.Schema | Sequence[pa.Field]) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in columns)


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
