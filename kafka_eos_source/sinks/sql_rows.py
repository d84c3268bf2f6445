"""Writes the rows of a batch to the table, and finds the rows that the database refuses.

The batch is first written as a whole. Only if the database refuses it for its rows, `divide` writes it again,
range by range, each behind a savepoint of one transaction. If no row is refused then, the transaction holds
all rows, as if it had been written as a whole.
"""

from __future__ import annotations

import datetime
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import RowRefusal
from kafka_eos_source.sinks.division import Division, RangeRefusal
from kafka_eos_source.sinks.formats import texts
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.sql_database import (
    JSON_AS_TEXT,
    TAKES_NO_COPY,
    is_bytes,
    sqlalchemy,
)
from kafka_eos_source.sinks.sql_errors import Kind, RowRefusedError, meaning_of

#: Checks deferred constraints before the end of the transaction. See `_foreign_keys_broken` for SQLite.
_CHECK_NOW = dict.fromkeys(("postgresql", "cockroachdb", "oracle"), "SET CONSTRAINTS ALL IMMEDIATE")
_SAVEPOINT = "kafka_eos_rows"
#: Retries of refused rows that rows after them may have cured, such as rows of one tree in any order.
_MOST_RETRIES = 10


# -- checks at the end of a transaction ------------------------------------------------------------


def dry_run(engine: Any, work: Callable[[Any], None], table: str) -> None:
    """Calls `work` in a transaction, checks all constraints, and rolls the transaction back.

    Args:
        engine: SQLAlchemy engine.
        work: writes rows to a connection.
        table: name of the table that it writes to.

    Raises:
        sqlalchemy.exc.DBAPIError: if the database refuses the rows, as it would at the commit.
        RowRefusedError: if a row violates a foreign key in SQLite.
    """
    with engine.connect() as connection, connection.begin() as transaction:
        check = end_check(connection, table)
        work(connection)
        check()
        transaction.rollback()


def end_check(connection: Any, table: str) -> Callable[[], None]:
    """Returns a function that checks what the database would check at the end of the transaction.

    The result raises what `dry_run` raises. Call it in the transaction, and `end_check` before the
    first write.
    """
    dialect = connection.dialect.name
    if statement := _CHECK_NOW.get(dialect):
        return partial(connection.exec_driver_sql, statement)
    if dialect != "sqlite" or not _has_deferred_foreign_keys(connection, table):
        return lambda: None
    before = _foreign_keys_broken(connection, table)

    def check() -> None:
        if _foreign_keys_broken(connection, table) > before:
            raise RowRefusedError("violates a foreign key", depends_on_rows=True)

    return check


def _has_deferred_foreign_keys(connection: Any, table: str) -> bool:
    definition = "SELECT upper(sql) FROM sqlite_master WHERE name = ?"
    defined = str(connection.exec_driver_sql(definition, (table,)).scalar())
    return "DEFERRED" in defined and bool(connection.exec_driver_sql("PRAGMA foreign_keys").scalar())


def _foreign_keys_broken(connection: Any, table: str) -> int:
    """Counts the rows that violate a foreign key in SQLite, which reads the whole table."""
    quoted = connection.dialect.identifier_preparer.quote_identifier(table)
    return len(connection.exec_driver_sql(f"PRAGMA foreign_key_check({quoted})").all())


# -- the batch as a whole --------------------------------------------------------------------------


def write_rows(
    connection: Any, table: Any, batches: Iterable[pa.RecordBatch], keys: Sequence[str], chunk_rows: int
) -> None:
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

    Raises:
        Exception: of SQLAlchemy or of the driver; `sql_errors.meaning_of` says what it means.
    """
    if keys:
        whole = pa.Table.from_batches(list(batches))
        batches = whole.take(pa.array(_last_per_key(whole, keys))).to_batches()
    for batch in batches:
        _write(connection, table, batch, keys, chunk_rows)


def _write(connection: Any, table: Any, batch: pa.RecordBatch, keys: Sequence[str], chunk_rows: int) -> None:
    if not keys and batch.num_rows and (copy := copier(connection.dialect, table)) is not None:
        copy(connection, table, batch)
        return
    statement = _upsert(connection, table, batch.schema.names, keys) if keys else table.insert()
    for start in range(0, batch.num_rows, chunk_rows):
        _execute(connection, table, statement, batch.slice(start, chunk_rows), keys)


def _last_per_key(whole: pa.Table, keys: Sequence[str], without: Iterable[int] = ()) -> npt.NDArray[np.int64]:
    """Returns the numbers of the last row of each key, in order: one upsert must not change a row twice.

    Args:
        whole: all rows.
        keys: the key columns.
        without: numbers of rows that do not count.
    """
    numbers = np.arange(whole.num_rows)
    if left_out := list(without):
        numbers = np.delete(numbers, left_out)
        whole = whole.take(pa.array(numbers))
    numbered = whole.select(list(dict.fromkeys(keys))).append_column("__row", pa.array(numbers))
    last = numbered.group_by(list(keys)).aggregate([("__row", "max")])["__row_max"]
    found: npt.NDArray[np.int64] = np.sort(last.to_numpy())
    return found


# -- the rows that the database refuses --------------------------------------------------------------


def _is_news(record: logging.LogRecord) -> bool:
    """Keeps psycopg from logging each refused statement, whose error it raises too."""
    return not str(record.msg).startswith("error ignored terminating")


logging.getLogger("psycopg").addFilter(_is_news)


@dataclass
class _Attempt:
    """Writes ranges of rows behind a savepoint each.

    Attributes:
        connection, table, keys, chunk_rows: as in `write_rows`.
        check: result of `end_check`; None if no constraint is deferred.
        rows: the rows.
        curable: numbers of refused rows that rows after them may cure; `number` returns them.
    """

    connection: Any
    table: Any
    keys: Sequence[str]
    chunk_rows: int
    check: Callable[[], None] | None
    rows: pa.RecordBatch
    number: Callable[[int], int]
    curable: set[int]

    def __call__(self, start: int, stop: int) -> RangeRefusal | None:
        dialect = self.connection.dialect
        failpoints.reach("sink.sql.within_search")
        dialect.do_savepoint(self.connection, _SAVEPOINT)
        try:
            if self.check is not None and dialect.name in _CHECK_NOW:
                # so that rows of one range may refer to each other
                self.connection.exec_driver_sql("SET CONSTRAINTS ALL DEFERRED")
            rows = self.rows.slice(start, stop - start)
            _write(self.connection, self.table, rows, self.keys, self.chunk_rows)
            if self.check is not None:
                self.check()
        except Exception as error:
            found = meaning_of(error, dialect)
            if found.kind is not Kind.ROW:
                raise
        else:
            dialect.do_release_savepoint(self.connection, _SAVEPOINT)
            return None
        dialect.do_rollback_to_savepoint(self.connection, _SAVEPOINT)
        dialect.do_release_savepoint(self.connection, _SAVEPOINT)
        if stop - start == 1 and found.depends_on_rows:
            self.curable.add(self.number(start))
        return RangeRefusal(found.refusal(self.table), found.row)


def divide(
    connection: Any,
    table: Any,
    batches: Iterable[pa.RecordBatch],
    keys: Sequence[str],
    chunk_rows: int,
    deadline: Deadline,
    enough: int | None = None,
) -> dict[int, RowRefusal]:
    """Writes the rows range by range, and returns those that the database refuses, by number.

    Args:
        connection, table, batches, keys, chunk_rows: as in `write_rows`.
        deadline: time limit of the call, half of which the search may take.
        enough: the number of refused rows after which the search may stop; None = it finds all. If rows of
            the table refer to others of it, it finds all, because a later row may cure a refused one.

    Returns:
        The refused rows; if there are none, the transaction contains all rows.

    Raises:
        DivisionLimitError: if the search takes too long.
        Exception: of SQLAlchemy or of the driver, if it is not about rows.
    """
    refers_to_itself = any(
        each.target_fullname.rpartition(".")[0] == table.fullname for each in table.foreign_keys
    )
    division = Division.within(deadline, enough=None if refers_to_itself else enough)
    check = end_check(connection, table.name) if _defers(connection) else None

    def run(rows: pa.RecordBatch, number: Callable[[int], int]) -> set[int]:
        """Tries rows; returns the numbers of refused ones that rows after them may cure."""
        curable: set[int] = set()
        attempt = _Attempt(connection, table, keys, chunk_rows, check, rows, number, curable)
        division.run(rows.num_rows, attempt, number)
        return curable if refers_to_itself else set()

    def numbers_of(found: Sequence[int]) -> Callable[[int], int]:
        return lambda at: int(found[at])

    if keys:
        whole = pa.Table.from_batches(list(batches))
        _divide_upserts(whole, keys, division, run, numbers_of)
        return division.refused
    left: dict[int, pa.RecordBatch] = {}
    before = 0
    for batch in batches:
        for each in run(batch, numbers_of(range(before, before + batch.num_rows))):
            left[each] = batch.slice(each - before, 1)
        before += batch.num_rows
        if division.has_enough:
            break
    _retry(left, division, run, numbers_of)
    return division.refused


_Run = Callable[[pa.RecordBatch, Callable[[int], int]], set[int]]
_NumbersOf = Callable[[Sequence[int]], Callable[[int], int]]


def _divide_upserts(
    whole: pa.Table, keys: Sequence[str], division: Division, run: _Run, numbers_of: _NumbersOf
) -> None:
    """Tries the last row of each key; if it is refused, the row before it with the same key."""
    tried: set[int] = set()
    while True:
        last = [int(each) for each in _last_per_key(whole, keys, division.refused) if int(each) not in tried]
        if not last or division.has_enough:
            return
        tried.update(last)
        rows = whole.take(pa.array(last)).combine_chunks().to_batches()[0]
        curable = run(rows, numbers_of(last))
        at = {number: each for each, number in enumerate(last)}
        _retry({each: rows.slice(at[each], 1) for each in curable}, division, run, numbers_of)


def _retry(left: dict[int, pa.RecordBatch], division: Division, run: _Run, numbers_of: _NumbersOf) -> None:
    """Tries refused rows again, now that the rows after them are written, as long as one is accepted."""
    for _ in range(_MOST_RETRIES):
        if not left:
            return
        numbers = sorted(left)
        why = {each: division.refused.pop(each) for each in numbers}
        rows = pa.Table.from_batches([left[each] for each in numbers]).combine_chunks().to_batches()[0]
        try:
            run(rows, numbers_of(numbers))
        except Exception:
            division.refused.update(why)
            raise
        refused = [each for each in numbers if each in division.refused]
        if len(refused) == len(numbers):
            return
        left = {each: left[each] for each in refused}


def _defers(connection: Any) -> bool:
    """Returns whether a constraint may be deferred, also one of another table that a trigger writes to."""
    if connection.dialect.name == "postgresql":
        statement = "SELECT EXISTS (SELECT FROM pg_constraint WHERE condeferrable)"
        return bool(connection.exec_driver_sql(statement).scalar())
    return connection.dialect.name in (*_CHECK_NOW, "sqlite")


# -- statements and values -------------------------------------------------------------------------


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
        RowRefusedError: if Python has no object for a value.
    """
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except (OverflowError, ValueError) as error:
                raise RowRefusedError("has a value for which Python has no object", name) from error
        raise


def _upsert(connection: Any, table: Any, names: Sequence[str], keys: Sequence[str]) -> Any:
    """Returns the upsert statement of the database; None if this module does not know one."""
    dialect = connection.dialect.name
    if dialect in ("postgresql", "sqlite"):
        insert = require(f"sqlalchemy.dialects.{dialect}", "database").insert(table)
        changes = {name: insert.excluded[name] for name in names if name not in keys}
        if changes:
            return insert.on_conflict_do_update(index_elements=[table.c[key] for key in keys], set_=changes)
        return insert.on_conflict_do_nothing(index_elements=[table.c[key] for key in keys])
    if dialect in ("mysql", "mariadb"):
        insert = require("sqlalchemy.dialects.mysql", "database").insert(table)
        changed = [name for name in names if name not in keys] or list(keys)
        return insert.on_duplicate_key_update({name: insert.inserted[name] for name in changed})
    return None


def _for_driver(batch: pa.RecordBatch, table: Any) -> pa.RecordBatch:
    """Converts columns for the driver: bytes for a text column to UTF-8 text, nested values to JSON."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        to = table.columns[field.name]
        if is_bytes(field.type) and not _holds_bytes(to):
            columns.append(_as_text(field.name, column))
        elif pa.types.is_nested(field.type) and (table.info[JSON_AS_TEXT] or not _holds_json(to)):
            columns.append(texts(column))
        else:
            columns.append(_boolean_as_integer(column, to))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _as_text(name: str, column: pa.Array) -> pa.Array:
    """Returns bytes as text.

    Raises:
        RowRefusedError: if they are not UTF-8.
    """
    try:
        return column.cast(pa.large_string() if pa.types.is_large_binary(column.type) else pa.string())
    except pa.ArrowInvalid as error:
        raise RowRefusedError("is not valid UTF-8", name) from error


def _boolean_as_integer(column: pa.Array, to: Any) -> pa.Array:
    """Returns booleans that go to a column for integers as 0 and 1. Postgres converts none by itself."""
    if pa.types.is_boolean(column.type) and not isinstance(to.type, sqlalchemy().Boolean):
        return column.cast(pa.int8())
    return column


# -- COPY ------------------------------------------------------------------------------------------


def _csv(batch: pa.RecordBatch, table: Any) -> bytes:
    """Encodes rows as CSV for Postgres: null is an empty field, an empty string is ``""``."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        to = table.columns[field.name]
        if is_bytes(field.type):
            if _holds_bytes(to):
                hexed = [None if each is None else f"\\x{each.hex()}" for each in column.to_pylist()]
                columns.append(pa.array(hexed, pa.string()))
            else:
                columns.append(_as_text(field.name, column))
        elif pa.types.is_nested(field.type):
            columns.append(texts(column))
        elif pa.types.is_date(field.type) or pa.types.is_timestamp(field.type):
            columns.append(_dates(column))
        else:
            columns.append(_boolean_as_integer(column, to))
    out = io.BytesIO()
    options = pacsv.WriteOptions(include_header=False)
    pacsv.write_csv(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), out, options)
    return out.getvalue()


_DAY_US = 86_400_000_000
#: Days since 1970 of the first day of the year 1 and the last one of the year 9999.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAYS_OF_400_YEARS = 146_097


def _dates(column: pa.Array) -> pa.Array:
    """Returns dates and timestamps, as text if a year is not from 1 to 9999, which pyarrow's CSV cannot hold.

    Postgres reads ``0044-03-15 BC`` and ``12026-01-01``.
    """
    is_date = pa.types.is_date(column.type)
    if is_date:
        at, unit, zone = column.cast(pa.date32()).cast(pa.int32()), 1, ""
    else:
        at = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
        unit, zone = _DAY_US, "" if column.type.tz is None else "+00"
    bounds = pc.min_max(at)
    first, last = bounds["min"].as_py(), bounds["max"].as_py()
    if first is None or (first >= _FIRST_DAY * unit and last < (_LAST_DAY + 1) * unit):
        return column
    found = [
        None if each is None else _date_text(*divmod(each, unit), is_date=is_date, zone=zone)
        for each in at.to_pylist()
    ]
    return pa.array(found, pa.string())


def _date_text(day: int, rest_us: int, *, is_date: bool, zone: str) -> str:
    cycles = (day - _FIRST_DAY) // _DAYS_OF_400_YEARS
    found = datetime.date.fromordinal(day - _FIRST_DAY - cycles * _DAYS_OF_400_YEARS + 1)
    year = found.year + 400 * cycles
    time = (
        "" if is_date else f" {datetime.datetime.min + datetime.timedelta(microseconds=rest_us):%H:%M:%S.%f}"
    )
    text = f"{year if year > 0 else 1 - year:04}-{found.month:02}-{found.day:02}{time}{zone}"
    return text if year > 0 else f"{text} BC"


def copier(dialect: Any, table: Any) -> Callable[[Any, Any, pa.RecordBatch], None] | None:
    """Returns the function that sends rows by COPY; None if driver, database or table have no COPY."""
    return None if table.info.get(TAKES_NO_COPY) else _COPY.get(f"{dialect.name}+{dialect.driver}")


def _copy_statement(connection: Any, table: Any, batch: pa.RecordBatch) -> str:
    preparer = connection.dialect.identifier_preparer
    columns = ", ".join(preparer.quote(table.c[name].name) for name in batch.schema.names)
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
