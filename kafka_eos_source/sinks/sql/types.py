"""Mapping of Arrow types to SQL types, and the check that rows fit an existing table."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.specs import require

#: Length of text columns in a primary key, because some databases cannot index text of unlimited length.
_KEY_CHARACTERS = 255


def sqlalchemy() -> Any:
    """Imports SQLAlchemy.

    Raises:
        InvalidOptionError: if it is not installed.
    """
    return require("sqlalchemy", "sql")


def sql_type(arrow: pa.DataType, *, key: bool) -> Any:
    """Returns the SQL type that can hold every value of an Arrow type.

    Args:
        arrow: Arrow type of the column.
        key: whether the column belongs to the primary key.

    Raises:
        InvalidSchemaError: if no SQL type can.
    """
    sa = sqlalchemy()
    mysql = require("sqlalchemy.dialects.mysql", "sql")
    t = pa.types
    if t.is_boolean(arrow):
        return sa.Boolean()
    if t.is_integer(arrow):
        if arrow.bit_width <= 16:
            return sa.SmallInteger()
        if arrow.bit_width == 32 and t.is_signed_integer(arrow):
            return sa.Integer()
        return sa.BigInteger() if t.is_signed_integer(arrow) or arrow.bit_width == 32 else sa.Numeric(20, 0)
    if t.is_floating(arrow):
        return sa.Double() if arrow.bit_width == 64 else sa.Float(24)
    if t.is_decimal(arrow):
        return sa.Numeric(arrow.precision, arrow.scale)
    if is_text(arrow):
        text = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
        return sa.String(_KEY_CHARACTERS) if key else text
    if is_bytes(arrow):
        return sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
    if t.is_timestamp(arrow):
        with_zone = sa.DateTime(timezone=arrow.tz is not None)
        return with_zone.with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    if t.is_date(arrow):
        return sa.Date()
    if t.is_nested(arrow):
        return sa.JSON()
    raise InvalidSchemaError(
        f"a column has the Arrow type {arrow}, for which there is no SQL type.",
        fix="cast the column, or exclude it with sink.<name>.columns.",
    )


def is_text(arrow: pa.DataType) -> bool:
    """Returns whether the type is one of Arrow's string types."""
    return bool(
        pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow)
    )


def is_bytes(arrow: pa.DataType) -> bool:
    """Returns whether the type is one of Arrow's binary types."""
    return bool(
        pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow)
    )


def check(schema: pa.Schema, table: Any, keys: Sequence[str]) -> None:
    """Checks that rows of a schema fit a table.

    Args:
        schema: schema of the rows.
        table: SQLAlchemy table, as loaded from the database.
        keys: key columns of an upsert.

    Raises:
        InvalidSchemaError: if they do not fit; the message names the column and both types.
    """
    missing = [name for name in schema.names if name not in table.columns]
    if missing:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(map(repr, table.columns.keys()))}.",
            fix="add it to the table, rename it in the frame, or choose columns with sink.<name>.columns.",
        )
    for field in schema:
        _check_type(field, table)
    left_out = [
        column.name
        for column in table.columns
        if column.name not in schema.names and not column.nullable and not _fills_itself(column)
    ]
    if left_out:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} requires the column {', '.join(map(repr, left_out))}, but the "
            "frame does not contain it.",
            fix="add the column to the frame, or define a default for it in the table.",
        )
    if keys:
        _check_keys(table, set(keys))


def _check_type(field: pa.Field, table: Any) -> None:
    if pa.types.is_nested(field.type) and isinstance(table.columns[field.name].type, sqlalchemy().JSON):
        return
    try:
        found = table.columns[field.name].type.python_type
    except NotImplementedError:
        return  # a type that only this database has; the database checks the values
    accepted = _accepted(field.type)
    if accepted and not issubclass(found, tuple(accepted)):
        raise InvalidSchemaError(
            f"column {field.name!r} has type {field.type} in the frame; in the table {table.fullname!r} it "
            f"is {table.columns[field.name].type}.",
            fix="cast the column in the frame, or change the table.",
        )


def _accepted(arrow: pa.DataType) -> Iterable[type]:
    t = pa.types
    if t.is_boolean(arrow):
        return (bool, int)
    if t.is_integer(arrow):
        return (int, float, decimal.Decimal)
    if t.is_floating(arrow):
        return (float, decimal.Decimal)
    if t.is_decimal(arrow):
        return (decimal.Decimal, float)
    if t.is_timestamp(arrow):
        return (datetime.datetime,)
    if t.is_date(arrow):
        return (datetime.date,)
    if is_bytes(arrow):
        return (bytes, str)
    if t.is_nested(arrow):
        return (str,)
    return ()


def _fills_itself(column: Any) -> bool:
    serial = column.primary_key and column.autoincrement in (True, "auto") and _is_integer(column.type)
    return bool(serial or column.server_default is not None or column.identity or column.computed)


def _is_integer(kind: Any) -> bool:
    try:
        return issubclass(kind.python_type, int)
    except NotImplementedError:
        return False


def _check_keys(table: Any, keys: set[str]) -> None:
    sa = sqlalchemy()
    unique = [set(table.primary_key.columns.keys())]
    unique += [
        set(each.columns.keys()) for each in table.constraints if isinstance(each, sa.UniqueConstraint)
    ]
    unique += [set(each.columns.keys()) for each in table.indexes if each.unique]
    if keys not in unique:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} has no primary key or unique constraint on exactly "
            f"{', '.join(map(repr, sorted(keys)))}; mode=upsert requires one.",
            fix="add a primary key or unique constraint, or correct sink.<name>.keys.",
        )
