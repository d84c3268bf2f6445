"""Do rows of an Arrow schema fit a Delta table, and may files be added that its own writer did not make?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: A field's metadata that asks the writer for more than rows (PROTOCOL.md: generated and identity columns,
#: invariants).
_FIELD = ("delta.generationExpression", "delta.identity.", "delta.invariants")
#: Table properties that do, by their beginnings, with the values that ask for nothing.
_TABLE = {
    "delta.constraints.": (),
    "delta.columnMapping.mode": ("none",),
    "delta.enableRowTracking": ("false",),
    "delta.enableIcebergCompatV": ("false",),
}


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """Of the table's rows."""
    return pa.schema(table.schema().to_arrow())


def demands(table: DeltaTable) -> str:
    """What the table asks of each row or file that this sink cannot give; "" = nothing."""
    found = [
        f"the property {name}={value}"
        for name, value in table.metadata().configuration.items()
        for beginning, harmless in _TABLE.items()
        if name.startswith(beginning) and value not in harmless
    ]
    found += [
        f"column {field.name!r} has {name}"
        for field in table.schema().fields
        for name in field.metadata
        if name.startswith(_FIELD)
    ]
    own = arrow_schema(table)
    found += [
        f"it is partitioned by the binary column {name!r}"
        for name in table.metadata().partition_columns
        if pa.types.is_binary(own.field(name).type)
    ]
    return "; ".join(found)


def misfit(own: pa.Schema, given: pa.Schema) -> str:
    """Why rows of a schema cannot go to a table of another one; "" = they can."""
    found = [f"it has no column {name!r}" for name in new_columns(own, given)]
    for field in own:
        at = given.get_field_index(field.name)
        if at >= 0 and not _fits(given.field(at).type, field.type):
            found.append(f"{field.name!r} is {given.field(at).type}, the table has {field.type}")
        elif at < 0 and not field.nullable:
            found.append(f"it requires the column {field.name!r}")
    return "; ".join(found)


def new_columns(own: pa.Schema, given: pa.Schema) -> list[str]:
    """Names that the table has not."""
    return [name for name in given.names if name not in own.names]


def has_null_type(kind: pa.DataType) -> bool:
    """Whether it is, or holds, the type of Spark's bare ``NULL``."""
    inside = (kind.field(at).type for at in range(kind.num_fields))
    return pa.types.is_null(kind) or any(has_null_type(each) for each in inside)


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """The same, but for the names inside lists; or the same numbers with room for more."""
    if given == wanted:
        return True
    kind = pa.types
    if kind.is_signed_integer(given) and kind.is_signed_integer(wanted):
        return bool(given.bit_width <= wanted.bit_width)
    if kind.is_decimal(given) and kind.is_decimal(wanted):
        whole = given.precision - given.scale <= wanted.precision - wanted.scale
        return bool(given.scale <= wanted.scale and whole)
    if kind.is_timestamp(given) and kind.is_timestamp(wanted):
        return given.unit in ("s", "ms", "us") and (given.tz is None) == (wanted.tz is None)
    if kind.is_struct(given) and kind.is_struct(wanted):
        names = [field.name for field in given]
        return names == [field.name for field in wanted] and all(
            _fits(given.field(at).type, wanted.field(at).type) for at in range(given.num_fields)
        )
    if kind.is_list(given) and kind.is_list(wanted):
        return _fits(given.value_type, wanted.value_type)
    if kind.is_map(given) and kind.is_map(wanted):
        return _fits(given.key_type, wanted.key_type) and _fits(given.item_type, wanted.item_type)
    return bool(kind.is_float32(given) and kind.is_float64(wanted))
