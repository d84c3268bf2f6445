"""The columns of a frame and those of a table: which is which, whether rows fit, and their conversion.

Names are matched as by the engines that read such tables: the letter case does not matter, unless the table
has several names that differ only in it. Spark resolves names in this way by default, Delta Lake has no two
columns that differ only in case, and Trino cannot read an Iceberg table that has such columns. This holds for
fields of structs, too. What cannot be decided is refused by name, before the first batch. The SQL sink
matches names in the same way.

Both table formats describe their schema as an Arrow schema, with the nullability of each nested field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.row_checks import (
    ELEMENT,
    KEY,
    VALUE,
    FixedBytes,
    LongestText,
    NotNull,
    RowRule,
    TimestampRange,
    Utf8,
    UuidText,
)

#: Steps to a nested value (`RowRule.path`).
Path = tuple[str, ...]
#: Stands for a field that a table lacks.
_UNKNOWN = pa.field("", pa.null())

# -- names -----------------------------------------------------------------------------------------


def spelled(frame: pa.Schema, table: pa.Schema, label: str) -> pa.Schema:
    """Returns the schema of a frame with the table's names and nullability. New names stay.

    Args:
        frame: schema of the rows.
        table: schema of the table; empty if it does not exist yet.
        label: the table, for errors.

    Raises:
        InvalidSchemaError: if two names of the frame are the same one in the table, or one may be several;
            or if a struct without fields would be added, which Parquet does not have.
    """
    problems: list[str] = []
    found = pa.schema(_spelled(list(frame), list(table), "", problems))
    if problems:
        raise InvalidSchemaError(
            f"the {label} cannot hold the frame: {'; '.join(problems)}.",
            fix="rename or drop a column or field, or exclude it with sink.<name>.columns. Engines that read "
            "the table do not distinguish names by their letter case.",
        )
    return found


def matching(names: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Matches names by their spelling or, if no name is spelled like this, without regard to letter case.

    Returns:
        The known name of each name that has one, and what is ambiguous, as text for people.
    """
    by_case: dict[str, list[str]] = {}
    for each in known:
        by_case.setdefault(each.lower(), []).append(each)
    found, problems = {}, []
    for name in names:
        alike = [name] if name in known else by_case.get(name.lower(), [])
        if len(alike) > 1:
            problems.append(f"column {name!r} may be each of {_quoted(alike)} in the table")
        elif alike:
            found[name] = alike[0]
    return found, problems


def _spelled(
    frame: Sequence[pa.Field], table: Sequence[pa.Field], at: str, problems: list[str]
) -> list[pa.Field]:
    own = [field.name for field in frame]
    of_table = {field.name: field for field in table}
    found, ambiguous = matching(own, list(of_table))
    inside = f" in {at!r}" if at else ""
    problems += [f"{each}{inside}" for each in ambiguous]
    same: dict[str, list[str]] = {}
    for name in own:
        same.setdefault(found.get(name, name.lower()), []).append(name)
    problems += [
        f"the columns {_quoted(names)}{inside} are {'one column' if target in of_table else 'alike'}"
        + (f" in the table, {target!r}" if target in of_table else "")
        for target, names in same.items()
        if len(names) > 1
    ]
    fields = []
    for field in frame:
        name = found.get(field.name, field.name)
        other = of_table[name].type if name in of_table else pa.null()
        kind = _spelled_type(field.type, other, f"{at}.{name}" if at else name, problems)
        # a field that is added to a table is optional, because the rows that are there lack it
        fields.append(pa.field(name, kind, name not in of_table or of_table[name].nullable))
    return fields


def _spelled_type(frame: pa.DataType, table: pa.DataType, at: str, problems: list[str]) -> pa.DataType:
    kind = pa.types
    if kind.is_struct(frame):
        if not frame.num_fields and not kind.is_struct(table):
            problems.append(f"column {at!r} is a struct without fields")
        return pa.struct(_spelled(list(frame), list(table) if kind.is_struct(table) else [], at, problems))
    if kind.is_list(frame):
        element = table.value_field if _is_list(table) else _UNKNOWN
        inner = _spelled_type(frame.value_type, element.type, f"{at}.element", problems)
        return pa.list_(pa.field("element", inner, element.nullable))
    if kind.is_map(frame):
        key, item = (table.key_field, table.item_field) if kind.is_map(table) else (_UNKNOWN, _UNKNOWN)
        of_keys = _spelled_type(frame.key_type, key.type, f"{at}.key", problems)
        of_items = _spelled_type(frame.item_type, item.type, f"{at}.value", problems)
        return pa.map_(pa.field("key", of_keys, nullable=False), pa.field("value", of_items, item.nullable))
    return frame


def _quoted(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} and {last}"


# -- what a table can hold -------------------------------------------------------------------------


def misfit(frame: pa.Schema, table: pa.Schema) -> str:
    """Describes why rows of a schema do not fit a table; empty if they do.

    That a value may be null does not count: only the rows can show whether it is (`rules`).

    Args:
        frame: schema of the rows, as `spelled` returned it.
        table: schema of the table.
    """
    return "; ".join(_differences(list(frame), list(table), ""))


def new_columns(frame: pa.Schema, table: pa.Schema) -> list[str]:
    """Returns the columns of the frame, as `spelled` returned it, that the table does not have."""
    return [name for name in frame.names if name not in table.names]


def has_null_type(kind: pa.DataType) -> bool:
    """Returns whether a type is or contains the type of Spark's untyped ``NULL``."""
    inside = (kind.field(at).type for at in range(kind.num_fields))
    return pa.types.is_null(kind) or any(has_null_type(each) for each in inside)


def optional(kind: pa.DataType) -> pa.DataType:
    """Returns a type in which each nested field may be null, except for the keys of maps."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, optional(each.type)) for each in kind])
    if _is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, optional(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(optional(kind.key_type), optional(kind.item_type))
    return kind


def without_extensions(kind: pa.DataType) -> pa.DataType:
    """Returns a type with the storage of extension types, because Arrow computes nothing with those."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(without_extensions(each.type)) for each in kind])
    if _is_list(kind):
        return pa.list_(kind.value_field.with_type(without_extensions(kind.value_type)))
    if pa.types.is_map(kind):
        key, item = kind.key_field, kind.item_field
        return pa.map_(
            key.with_type(without_extensions(key.type)), item.with_type(without_extensions(item.type))
        )
    return kind


def _differences(frame: Sequence[pa.Field], table: Sequence[pa.Field], at: str) -> Iterator[str]:
    of_frame, of_table = ({field.name: field for field in each} for each in (frame, table))
    prefix = f"{at}." if at else ""
    for name in of_frame:
        if name not in of_table:
            yield f"it has no column {prefix + name!r}"
    for field in table:
        path, other = f"{prefix}{field.name}", of_frame.get(field.name)
        if other is not None:
            yield from _type_differences(other.type, field.type, path)
        elif not field.nullable:
            yield f"it requires the column {path!r}"


def _type_differences(frame: pa.DataType, table: pa.DataType, at: str) -> Iterator[str]:
    kind = pa.types
    if kind.is_struct(frame) and kind.is_struct(table):
        yield from _differences(list(frame), list(table), at)
    elif _is_list(frame) and _is_list(table):
        yield from _type_differences(frame.value_type, table.value_type, f"{at}.element")
    elif kind.is_map(frame) and kind.is_map(table):
        yield from _type_differences(frame.key_type, table.key_type, f"{at}.key")
        yield from _type_differences(frame.item_type, table.item_type, f"{at}.value")
    elif not _fits(frame, table):
        yield f"column {at!r} is {frame} in the frame and {table} in the table"


def _fits(frame: pa.DataType, table: pa.DataType) -> bool:
    """Returns whether values of a flat type fit another one: all of them, or those that keep the `rules`."""
    kind = pa.types
    if frame == table or (_is_text(frame) and _is_text(table)):
        return True
    if _is_text(frame) or _is_bytes(frame):
        if isinstance(table, pa.UuidType) or _is_text(table) or _is_bytes(table):
            return True
        return _is_bytes(frame) and kind.is_fixed_size_binary(table)
    if kind.is_signed_integer(frame) and kind.is_signed_integer(table):
        return bool(frame.bit_width <= table.bit_width)
    if kind.is_decimal(frame) and kind.is_decimal(table):
        whole = frame.precision - frame.scale <= table.precision - table.scale
        return bool(frame.scale <= table.scale and whole)
    if kind.is_timestamp(frame) and kind.is_timestamp(table):
        return frame.unit in ("s", "ms", "us") and (frame.tz is None) == (table.tz is None)
    return bool(kind.is_float32(frame) and kind.is_float64(table))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


# -- rules for rows --------------------------------------------------------------------------------

#: Metadata of a field that names its type in SQL, if that limits the number of characters: ``varchar(10)``.
LENGTH = b"kafka-eos.length"
#: Points in time that have a text in ISO 8601, and that Python can represent, in microseconds since 1970.
YEAR_1_US, YEAR_9999_US = -62_135_596_800_000_000, 253_402_300_799_999_999


def rules(frame: pa.Schema, table: pa.Schema, label: str) -> list[RowRule]:
    """Returns the rules for rows that follow from the schema of a table, also for nested values.

    Args:
        frame: schema of the rows, which fit (`misfit`).
        table: schema of the table.
        label: the table, for errors.
    """
    found, _ = matching(frame.names, table.names)
    pairs = [(field, table.field(found[field.name])) for field in frame if field.name in found]
    return [
        *utf8_rules([own for own, _ in pairs], label),
        *(rule for own, target in pairs for rule in _rules(own.name, (), own.type, target, label)),
    ]


def utf8_rules(fields: Iterable[pa.Field], label: str) -> list[RowRule]:
    """Returns the rules that the texts in some columns are UTF-8, which Spark does not check."""
    with_text = [each for each in fields if any(_is_text(kind) for _, kind in nested_types(each.type))]
    return [Utf8(column=field.name, of=label) for field in with_text]


def year_rules(fields: Iterable[pa.Field], of: str) -> list[RowRule]:
    """Returns the rules that the dates and timestamps in some columns are in the years 1 to 9999."""
    return [
        TimestampRange(column=field.name, path=path, of=of, first_us=YEAR_1_US, last_us=YEAR_9999_US)
        for field in fields
        for path, kind in nested_types(field.type)
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    ]


def nested_types(kind: pa.DataType, path: Path = ()) -> Iterator[tuple[Path, pa.DataType]]:
    """Yields each flat type in a type, and the path to it (`RowRule.path`)."""
    types = pa.types
    if types.is_struct(kind):
        inside = [(field.name, field.type) for field in kind]
    elif _is_list(kind):
        inside = [(ELEMENT, kind.value_type)]
    elif types.is_map(kind):
        inside = [(KEY, kind.key_type), (VALUE, kind.item_type)]
    else:
        yield path, kind
        return
    for step, each in inside:
        yield from nested_types(each, (*path, step))


def _rules(column: str, path: Path, own: pa.DataType, target: pa.Field, label: str) -> Iterator[RowRule]:
    kind, types = target.type, pa.types
    at: dict[str, Any] = {"column": column, "path": path, "of": label}
    if not target.nullable:
        yield NotNull(column=column, path=path, of=f"a required column of the {label}")
    if types.is_struct(own):
        found, _ = matching([field.name for field in own], [field.name for field in kind])
        for field in own:
            inner = kind.field(found[field.name])
            yield from _rules(column, (*path, field.name), field.type, inner, label)
    elif _is_list(own):
        yield from _rules(column, (*path, ELEMENT), own.value_type, kind.value_field, label)
    elif types.is_map(own):
        keys = kind.key_field.with_nullable(True)  # Spark has no null keys
        yield from _rules(column, (*path, KEY), own.key_type, keys, label)
        yield from _rules(column, (*path, VALUE), own.item_type, kind.item_field, label)
    elif isinstance(kind, pa.UuidType):
        yield UuidText(**at) if _is_text(own) else FixedBytes(**at, length=16)
    elif types.is_fixed_size_binary(kind):
        yield FixedBytes(**at, length=kind.byte_width)
    elif _is_bytes(own) and _is_text(kind):
        yield Utf8(**at)
    if declared := (target.metadata or {}).get(LENGTH, b"").decode():
        most = int(declared.partition("(")[2].rstrip(")"))
        yield LongestText(column=column, path=path, of=f"{declared} in the {label}", most=most)


# -- conversion ------------------------------------------------------------------------------------


def conform(rows: pa.Table, table: pa.Schema, *, by_position: bool = False) -> pa.Table:
    """Returns rows with the columns of a table: its order, names, types, nullability and metadata of fields.

    Columns and nested fields that the rows lack are null. Texts, bytes and lists stay small.

    Args:
        rows: rows that fit (`misfit`) and keep the rules.
        table: schema of the table, or of some of its columns.
        by_position: whether to match fields by position: the rows have all fields, under other names.

    Raises:
        ArrowInvalid: if a row breaks a rule.
    """
    of_rows = _sources(rows.schema.names, table.names, by_position)
    columns, fields = [], []
    for field in table:
        if field.name in of_rows:
            chunks = [_conformed(each, field, by_position) for each in rows[of_rows[field.name]].chunks]
            columns.append(pa.chunked_array(chunks, chunks[0].type if chunks else field.type))
        else:
            columns.append(pa.nulls(rows.num_rows, field.type))
        fields.append(field.with_type(columns[-1].type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _sources(own: Sequence[str], wanted: Sequence[str], by_position: bool) -> dict[str, str]:
    """Returns from which field each of the wanted ones is made."""
    if by_position:
        return dict(zip(wanted, own, strict=True))
    return {target: name for name, target in matching(own, wanted)[0].items()}


def _conformed(column: pa.Array, field: pa.Field, by_position: bool, hidden: int = 0) -> pa.Array:
    """Returns an array as a field wants it.

    Args:
        column: the values.
        field: the field.
        by_position: as in `conform`.
        hidden: number of values that are null because the struct around them is. Parquet's writer accepts no
            null in a required field, not even there.
    """
    if not field.nullable and column.null_count > hidden:
        raise pa.ArrowInvalid(f"{field.name!r} is null in a row, but the table requires a value")
    has_nulls = field.nullable or not column.null_count
    own, kind, types = column.type, field.type, pa.types
    mask = column.is_null() if has_nulls and column.null_count else None
    if types.is_struct(own):
        if own.equals(kind, check_metadata=True) and has_nulls and not _requires(kind):
            return column
        of_own = _sources([each.name for each in own], [each.name for each in kind], by_position)
        inside = dict(zip((each.name for each in own), column.flatten(), strict=True))
        children = [
            _conformed(inside[of_own[each.name]], each, by_position, column.null_count)
            if each.name in of_own
            else pa.nulls(len(column), each.type)
            for each in kind
        ]
        fields = [each.with_type(child.type) for each, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if _is_list(own):
        offsets, (values,) = items_of(column)
        values = _conformed(values, kind.value_field, by_position)
        of = pa.list_(kind.value_field.with_type(values.type))
        return pa.ListArray.from_arrays(offsets.cast(pa.int32()), values, type=of, mask=mask)
    if types.is_map(own):
        offsets, (keys, items) = items_of(column)
        keys = _conformed(keys, kind.key_field, by_position)
        items = _conformed(items, kind.item_field, by_position)
        of = pa.map_(kind.key_field.with_type(keys.type), kind.item_field.with_type(items.type))
        return pa.MapArray.from_arrays(offsets, keys, items, type=of, mask=mask)
    found = _converted(column, kind)
    return found if has_nulls else _without_validity(found)


def _requires(kind: pa.DataType) -> bool:
    """Returns whether a type contains a field, except for the keys of a map, that must not be null."""
    if pa.types.is_map(kind):
        inside = [kind.key_field.with_nullable(True), kind.item_field]
    else:
        inside = [kind.field(at) for at in range(kind.num_fields)]
    return any(not each.nullable or _requires(each.type) for each in inside)


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    own = column.type
    if own == kind or (_is_text(own) and _is_text(kind)) or (_is_bytes(own) and _is_bytes(kind)):
        return column
    if isinstance(kind, pa.UuidType):
        return pa.ExtensionArray.from_storage(kind, _converted(column, kind.storage_type))
    return _uuids(column) if _is_text(own) and pa.types.is_fixed_size_binary(kind) else column.cast(kind)


def _without_validity(column: pa.Array) -> pa.Array:
    """Returns an array with any value instead of each null."""
    if isinstance(column, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(column.type, _without_validity(column.storage))
    _, *data = column.buffers()
    return pa.Array.from_buffers(column.type, len(column), [None, *data], 0, column.offset)


def items_of(column: pa.Array) -> tuple[pa.Array, tuple[pa.Array, ...]]:
    """Returns what lists or maps contain: offsets that begin with 0, and the values; or the keys and values.

    What is in a list or map that is null is left out: no rule has seen it.
    """
    if column.null_count and column.drop_null().offsets[-1].as_py() < _extent(column):
        column = column.take(pa.array(np.arange(len(column))))
    offsets, first = column.offsets, column.offsets[0].as_py()
    if first or offsets.offset:
        offsets = pa.array(offsets.to_numpy() - first)
    inside = (column.keys, column.items) if pa.types.is_map(column.type) else (column.values,)
    return offsets, tuple(each.slice(first, offsets[-1].as_py()) for each in inside)


def _extent(column: pa.Array) -> int:
    return int(column.offsets[-1].as_py() - column.offsets[0].as_py())


_HEX = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(16)


def _uuids(column: pa.Array) -> pa.Array:
    """Returns the bytes of texts that are UUIDs."""
    texts = pc.replace_substring(pc.fill_null(column.cast(pa.string()), "0" * 32), "-", "")
    if pc.any(pc.not_equal(pc.binary_length(texts), 32)).as_py():
        raise pa.ArrowInvalid("a text is not a UUID")
    digits = _HEX[np.frombuffer(texts.buffers()[2] or b"", np.uint8, 32 * len(texts))]
    values = pa.py_buffer((digits[0::2] << 4 | digits[1::2]).tobytes())
    found = pa.Array.from_buffers(pa.binary(16), len(column), [None, values])
    return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.binary(16)))
