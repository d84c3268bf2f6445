"""Writes Arrow batches to a table within the caller's open transaction."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.sinks.formats import texts
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.sql.types import is_bytes, sqlalchemy


def write(
    connection: Any, table: Any, batches: Iterable[pa.RecordBatch], keys: Sequence[str], chunk_rows: int
) -> int:
    """Appends the rows, or upserts them if there are keys.

    Postgres receives appended rows by ``COPY``, which is encoded column by column.

    Args:
        connection: SQLAlchemy connection with an open transaction.
        table: SQLAlchemy table, as loaded from the database.
        batches: rows; their columns are a subset of the table's.
        keys: key columns of an upsert; empty to append. Of several rows with the same key in one batch, the
            last one wins. If keys that differ here are equal for the database (``citext``, ``char``, a
            collation), its upsert statement runs row by row, so the last one wins too.
        chunk_rows: most rows per statement.

    Returns:
        Number of rows written.
    """
    written = 0
    driver = f"{connection.dialect.name}+{connection.dialect.driver}"
    for batch in _last_row_per_key(batches, keys) if keys else batches:
        if not keys and driver in _COPY and batch.num_rows:
            _COPY[driver](connection, table, batch)
        else:
            statement = _upsert(connection, table, batch.schema.names, keys) if keys else table.insert()
            for start in range(0, batch.num_rows, chunk_rows):
                _execute(connection, table, statement, batch.slice(start, chunk_rows), keys)
        written += batch.num_rows
    return written


def _execute(connection: Any, table: Any, statement: Any, batch: pa.RecordBatch, keys: Sequence[str]) -> None:
    rows = _rows(_for_driver(batch, table))
    if keys and statement is None:  # without an upsert statement: delete, then insert
        sa = sqlalchemy()
        of_keys = [table.c[key] == sa.bindparam(f"key_{key}") for key in keys]
        connection.execute(
            table.delete().where(*of_keys), [{f"key_{key}": row[key] for key in keys} for row in rows]
        )
        statement = table.insert()
    connection.execute(statement, rows)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows for the driver.

    Raises:
        InvalidRecordError: if Python has no object for a value.
    """
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except (OverflowError, ValueError) as error:
                raise InvalidRecordError(
                    f"column {name!r} has a value for which Python has no object ({error}), such as a time "
                    "after the year 9999; the driver of the database cannot take it.",
                    fix="filter such rows, or set the value to null, before the sink.",
                ) from error
        raise


def _upsert(connection: Any, table: Any, names: Sequence[str], keys: Sequence[str]) -> Any:
    """Returns the upsert statement of the database; None if this module does not know one."""
    dialect = connection.dialect.name
    if dialect in ("postgresql", "sqlite"):
        insert = require(f"sqlalchemy.dialects.{dialect}", "sql").insert(table)
        changes = {name: insert.excluded[name] for name in names if name not in keys}
        if changes:
            return insert.on_conflict_do_update(index_elements=list(keys), set_=changes)
        return insert.on_conflict_do_nothing(index_elements=list(keys))
    if dialect in ("mysql", "mariadb"):
        insert = require("sqlalchemy.dialects.mysql", "sql").insert(table)
        changed = [name for name in names if name not in keys] or list(keys)
        return insert.on_duplicate_key_update({name: insert.inserted[name] for name in changed})
    return None


def _last_row_per_key(batches: Iterable[pa.RecordBatch], keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Keeps only the last row of each key, because one upsert statement must not change a row twice."""
    whole = pa.Table.from_batches(list(batches))
    numbered = whole.append_column("__row", pa.array(range(whole.num_rows), pa.int64()))
    last = numbered.group_by(list(keys)).aggregate([("__row", "max")])["__row_max"]
    yield from whole.take(pc.take(last, pc.sort_indices(last))).to_batches()


def _for_driver(batch: pa.RecordBatch, table: Any) -> pa.RecordBatch:
    """Converts columns for the driver: bytes for a text column to UTF-8 text, nested values to JSON."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if is_bytes(field.type) and not _holds_bytes(table.columns[field.name]):
            columns.append(column.cast(pa.string()))
        elif pa.types.is_nested(field.type) and not _holds_json(table.columns[field.name]):
            columns.append(texts(column))
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _csv(batch: pa.RecordBatch, table: Any) -> bytes:
    """Encodes rows as CSV for Postgres: null is an empty field, an empty string is ``""``."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if is_bytes(field.type):
            if _holds_bytes(table.columns[field.name]):
                hexed = [None if each is None else f"\\x{each.hex()}" for each in column.to_pylist()]
                columns.append(pa.array(hexed, pa.string()))
            else:
                columns.append(column.cast(pa.string()))
        elif pa.types.is_nested(field.type):
            columns.append(texts(column))
        else:
            columns.append(column)
    out = io.BytesIO()
    options = pacsv.WriteOptions(include_header=False)
    pacsv.write_csv(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), out, options)
    return out.getvalue()


def _copy_statement(connection: Any, table: Any, batch: pa.RecordBatch) -> str:
    preparer = connection.dialect.identifier_preparer
    columns = ", ".join(preparer.quote(name) for name in batch.schema.names)
    return f"COPY {preparer.format_table(table)} ({columns}) FROM STDIN (FORMAT csv)"


def _copy_by_psycopg(connection: Any, table: Any, batch: pa.RecordBatch) -> None:
    with (
        connection.connection.driver_connection.cursor() as cursor,
        cursor.copy(_copy_statement(connection, table, batch)) as copy,
    ):
        copy.write(_csv(batch, table))


def _copy_by_psycopg2(connection: Any, table: Any, batch: pa.RecordBatch) -> None:
    with connection.connection.driver_connection.cursor() as cursor:
        cursor.copy_expert(_copy_statement(connection, table, batch), io.BytesIO(_csv(batch, table)))


_COPY = {"postgresql+psycopg": _copy_by_psycopg, "postgresql+psycopg2": _copy_by_psycopg2}


def _holds_bytes(column: Any) -> bool:
    sa = sqlalchemy()
    return isinstance(column.type, sa.LargeBinary | sa.types._Binary)


def _holds_json(column: Any) -> bool:
    return isinstance(column.type, sqlalchemy().JSON)
