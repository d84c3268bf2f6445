"""Checks whether rows of an Arrow schema fit a Delta table, and whether this sink can write to the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: Metadata of columns that only writers with more features may write (PROTOCOL.md: generated and identity
#: columns, invariants).
_UNSUPPORTED_METADATA = ("delta.generationExpression", "delta.identity.", "delta.invariants")
#: Prefixes of table properties that require such writers, with the values that do not.
_UNSUPPORTED_PROPERTIES = {
    "delta.constraints.": (),
    "delta.columnMapping.mode": ("none",),
    "delta.enableRowTracking": ("false",),
    "delta.enableIcebergCompatV": ("false",),
}


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """Returns the Arrow schema of the table's rows."""
    return pa.schema(table.schema().to_arrow())


def unsupported_features(table: DeltaTable) -> str:
    """Describes features of the table that this sink cannot write; empty if there are none."""
    found = [
        f"the property {name}={value}"
        for name, value in table.metadata().configuration.items()
        for prefix, harmless in _UNSUPPORTED_PROPERTIES.items()
        if name.startswith(prefix) and value not in harmless
    ]
    found += [
        f"column {field.name!r} has {name}"
        for field in table.schema().fields
        for name in field.metadata
        if name.startswith(_UNSUPPORTED_METADATA)
    ]
    table_schema = arrow_schema(table)
    found += [
        f"it is partitioned by the binary column {name!r}"
        for name in table.metadata().partition_columns
        if pa.types.is_binary(table_schema.field(name).type)
    ]
    return "; ".join(found)


def schema_mismatch(table: pa.Schema, frame: pa.Schema) -> str:
    """Describes why rows of the frame's schema do not fit the table's schema; empty if they do."""
    found = [f"it has no column {name!r}" for name in new_columns(table, frame)]
    for field in table:
        at = frame.get_field_index(field.name)
        if at >= 0 and not _fits(frame.field(at).type, field.type):
            found.append(
                f"column {field.name!r} is {frame.field(at).type} in the frame and {field.type} in the table"
            )
        elif at < 0 and not field.nullable:
            found.append(f"it requires the column {field.name!r}")
    return "; ".join(found)


def new_columns(table: pa.Schema, frame: pa.Schema) -> list[str]:
    """Returns the columns of the frame that the table does not have."""
    return [name for name in frame.names if name not in table.names]


def has_null_type(kind: pa.DataType) -> bool:
    """Returns whether a type is or contains the type of Spark's untyped ``NULL``."""
    inside = (kind.field(at).type for at in range(kind.num_fields))
    return pa.types.is_null(kind) or any(has_null_type(each) for each in inside)


def _fits(frame: pa.DataType, table: pa.DataType) -> bool:
    """Returns whether types are equal except for names inside lists, or the table's has a wider range."""
    if frame == table:
        return True
    kind = pa.types
    if kind.is_signed_integer(frame) and kind.is_signed_integer(table):
        return bool(frame.bit_width <= table.bit_width)
    if kind.is_decimal(frame) and kind.is_decimal(table):
        whole = frame.precision - frame.scale <= table.precision - table.scale
        return bool(frame.scale <= table.scale and whole)
    if kind.is_timestamp(frame) and kind.is_timestamp(table):
        return frame.unit in ("s", "ms", "us") and (frame.tz is None) == (table.tz is None)
    if kind.is_struct(frame) and kind.is_struct(table):
        names = [field.name for field in frame]
        return names == [field.name for field in table] and all(
            _fits(frame.field(at).type, table.field(at).type) for at in range(frame.num_fields)
        )
    if kind.is_list(frame) and kind.is_list(table):
        return _fits(frame.value_type, table.value_type)
    if kind.is_map(frame) and kind.is_map(table):
        return _fits(frame.key_type, table.key_type) and _fits(frame.item_type, table.item_type)
    return bool(kind.is_float32(frame) and kind.is_float64(table))
