"""The columns of a frame and those of a table: which is which, whether rows fit, and their conversion.

Names are matched as by the engines that read such tables: the letter case does not matter, unless the table
has several names that differ only in it. Spark resolves names so by default, Delta Lake has no two columns
that differ only in case, and Trino cannot read an Iceberg table that has. This holds for fields of structs,
too. What cannot be decided is refused by name, before the first batch.

Both table formats describe their schema as an Arrow schema, with the nullability of each nested field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError

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
        InvalidSchemaError: if two names of the frame are the same one in the table, or one may be several.
    """
    problems: list[str] = []
    found = pa.schema(_spelled(list(frame), list(table), "", problems))
    if problems:
        raise InvalidSchemaError(
            f"the {label} cannot hold the frame: {'; '.join(problems)}. The letter case of a name does not "
            "distinguish columns for the engines that read the table.",
            fix="rename a column, or exclude it with sink.<name>.columns.",
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
        return pa.struct(_spelled(list(frame), list(table) if kind.is_struct(table) else [], at, problems))
    if kind.is_list(frame):
        element = table.value_field if _is_list(table) else _UNKNOWN
        inner = _spelled_type(frame.value_type, element.type, f"{at}.element", problems)
        return pa.list_(pa.field("element", inner, element.nullable))
    if kind.is_map(frame):
        key, item = (table.key_field, table.item_field) if kind.is_map(table) else (_UNKNOWN, _UNKNOWN)
        of_keys = _spelled_type(frame.key_type, key.type, f"{at}.key", problems)
        of_items = _spelled_type(frame.item_type, item.type, f"{at}.value", problems)
        return pa.map_(
            pa.field("key", of_keys, nullable=False), pa.field("value", of_items, item.nullable)
        )
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
    """Returns the columns of the frame, as `spelled`, that the table does not have."""
    return [name for name in frame.names if name not in table.names]


def has_null_type(kind: pa.DataType) -> bool:
    """Returns whether a type is or contains the type of Spark's untyped ``NULL``."""
    inside = (kind.field(at).type for at in range(kind.num_fields))
    return pa.types.is_null(kind) or any(has_null_type(each) for each in inside)


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


# -- conversion ------------------------------------------------------------------------------------


def conform(rows: pa.Table, table: pa.Schema, *, by_position: bool = False) -> pa.Table:
    """Returns rows with the columns of a table: its order, names, types, nullability and metadata of fields.

    Columns and nested fields that the rows lack are null. Texts, bytes and lists stay small.

    Args:
        rows: rows that fit (`misfit`) and keep the rules.
        table: schema of the table, or of some of its columns.
        by_position: whether the rows have all fields, and only other names for them.
    """
    of_rows = _sources(rows.schema.names, table.names, by_position)
    columns, fields = [], []
    for field in table:
        if field.name in of_rows:
            chunks = [_conformed(each, field.type, by_position) for each in rows[of_rows[field.name]].chunks]
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


def _conformed(column: pa.Array, kind: pa.DataType, by_position: bool) -> pa.Array:
    own, types = column.type, pa.types
    if own.equals(kind, check_metadata=True):
        return column
    if (_is_text(own) and _is_text(kind)) or (_is_bytes(own) and _is_bytes(kind)):
        return column
    if types.is_struct(own):
        of_own = _sources([field.name for field in own], [field.name for field in kind], by_position)
        children = [
            _conformed(column.field(of_own[field.name]), field.type, by_position)
            if field.name in of_own
            else pa.nulls(len(column), field.type)
            for field in kind
        ]
        fields = [field.with_type(each.type) for field, each in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=column.is_null())
    if types.is_list(own):
        offsets, (values,) = unsliced(column, [column.values])
        values = _conformed(values, kind.value_type, by_position)
        of = pa.list_(kind.value_field.with_type(values.type))
        return pa.ListArray.from_arrays(offsets, values, type=of, mask=column.is_null())
    if types.is_map(own):
        offsets, (keys, items) = unsliced(column, [column.keys, column.items])
        keys = _conformed(keys, kind.key_type, by_position)
        items = _conformed(items, kind.item_type, by_position)
        of = pa.map_(kind.key_field.with_type(keys.type), kind.item_field.with_type(items.type))
        return pa.MapArray.from_arrays(offsets, keys, items, type=of, mask=column.is_null())
    if isinstance(kind, pa.UuidType):
        return _uuids(column)
    return column.cast(kind)


def unsliced(column: pa.Array, values: Sequence[pa.Array]) -> tuple[pa.Array, list[pa.Array]]:
    """Returns offsets that begin with 0, and the values between the first and the last one."""
    offsets = column.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    of_zero = pa.array(offsets.to_numpy() - first) if first or offsets.offset else offsets
    return of_zero, [each.slice(first, last - first) for each in values]


_HEX = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(16)


def _uuids(column: pa.Array) -> pa.Array:
    """Returns UUIDs of their texts, or of 16 bytes each."""
    if _is_bytes(column.type):
        raw = column.cast(pa.binary(16))
    else:
        texts = pc.replace_substring(pc.fill_null(column.cast(pa.string()), "0" * 32), "-", "")
        digits = _HEX[np.frombuffer(texts.buffers()[2] or b"", np.uint8, 32 * len(texts))]
        values = (digits[0::2] << 4 | digits[1::2]).tobytes()
        raw = pa.Array.from_buffers(pa.binary(16), len(column), [None, pa.py_buffer(values)])
        raw = pc.if_else(column.is_valid(), raw, pa.scalar(None, pa.binary(16)))
    return pa.ExtensionArray.from_storage(pa.uuid(), raw)
