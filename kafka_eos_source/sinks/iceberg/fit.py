"""Do rows of an Arrow schema fit an Iceberg table? By the rules of the format's schema evolution.

pyiceberg's own check prints to standard output, which in a Python worker is Spark's, and refuses every frame
of Spark for a table with a required column, as Spark's columns may all be null: here rows are judged for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType


def misfit(table: Table, schema: pa.Schema) -> str:
    """Why rows of this schema cannot go there; "" = they can."""
    from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, pyarrow_to_schema

    own = table.schema()
    known = {field.name for field in own.fields}
    extra = [f"it has no column {name!r}" for name in schema.names if name not in known]
    if extra:
        return "; ".join(extra) + "."
    try:
        given = pyarrow_to_schema(
            schema, name_mapping=own.name_mapping, format_version=table.metadata.format_version
        )
    except (ValueError, TypeError, UnsupportedPyArrowTypeException) as error:
        return f"{error}."
    found = "; ".join(_differences(given.as_struct(), own.as_struct(), ""))
    return f"{found}." if found else ""


def _differences(given: IcebergType, wanted: IcebergType, at: str) -> Iterator[str]:
    from pyiceberg.exceptions import ResolveError
    from pyiceberg.schema import promote
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(given, StructType) and isinstance(wanted, StructType):
        by_id = {field.field_id: field for field in given.fields}
        for field in wanted.fields:
            name = f"{at}.{field.name}" if at else field.name
            other = by_id.get(field.field_id)
            if other is not None:
                yield from _differences(other.field_type, field.field_type, name)
            if field.required and (other is None or (at and not other.required)):
                yield f"it requires the column {name!r}" + (", which may be null here" if other else "")
    elif isinstance(given, ListType) and isinstance(wanted, ListType):
        yield from _differences(given.element_type, wanted.element_type, f"{at}.element")
    elif isinstance(given, MapType) and isinstance(wanted, MapType):
        yield from _differences(given.key_type, wanted.key_type, f"{at}.key")
        yield from _differences(given.value_type, wanted.value_type, f"{at}.value")
    elif given != wanted:
        try:
            promote(given, wanted)
        except ResolveError:
            yield f"{at!r} is {given}, the table has {wanted}"
