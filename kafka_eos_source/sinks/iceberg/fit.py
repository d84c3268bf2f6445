"""Checks whether rows of an Arrow schema fit an Iceberg table, by the rules of the format's schema evolution.

pyiceberg's own check is not usable here. It prints to standard output, which Spark uses in a Python worker.
It also refuses every frame for a table with a required column, because Spark declares all columns as
nullable; this sink checks the rows for nulls instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType


def schema_mismatch(table: Table, schema: pa.Schema) -> str:
    """Describes in one sentence why rows of this schema do not fit the table; empty if they do."""
    from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, pyarrow_to_schema

    table_schema = table.schema()
    known = {field.name for field in table_schema.fields}
    extra = [f"it has no column {name!r}" for name in schema.names if name not in known]
    if extra:
        return "; ".join(extra) + "."
    try:
        frame_schema = pyarrow_to_schema(
            schema, name_mapping=table_schema.name_mapping, format_version=table.metadata.format_version
        )
    except (ValueError, TypeError, UnsupportedPyArrowTypeException) as error:
        return f"{error}."
    found = "; ".join(_differences(frame_schema.as_struct(), table_schema.as_struct(), ""))
    return f"{found}." if found else ""


def _differences(frame: IcebergType, table: IcebergType, at: str) -> Iterator[str]:
    """Yields the differences between a type of the frame and one of the table.

    Args:
        frame: type in the frame.
        table: type in the table.
        at: path of the column or nested field; empty for the whole schema.
    """
    from pyiceberg.exceptions import ResolveError
    from pyiceberg.schema import promote
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(frame, StructType) and isinstance(table, StructType):
        by_id = {field.field_id: field for field in frame.fields}
        for field in table.fields:
            name = f"{at}.{field.name}" if at else field.name
            other = by_id.get(field.field_id)
            if other is not None:
                yield from _differences(other.field_type, field.field_type, name)
            if field.required and (other is None or (at and not other.required)):
                yield f"it requires the column {name!r}" + (
                    ", which may be null in the frame" if other else ""
                )
    elif isinstance(frame, ListType) and isinstance(table, ListType):
        yield from _differences(frame.element_type, table.element_type, f"{at}.element")
    elif isinstance(frame, MapType) and isinstance(table, MapType):
        yield from _differences(frame.key_type, table.key_type, f"{at}.key")
        yield from _differences(frame.value_type, table.value_type, f"{at}.value")
    elif frame != table:
        try:
            promote(frame, table)
        except ResolveError:
            yield f"column {at!r} is {frame} in the frame and {table} in the table"
