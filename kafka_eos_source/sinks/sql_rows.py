"""Writes the rows of a batch to the table, and finds the rows that the database refuses.

The batch is first written as a whole. Only if the database refuses it for its rows, `divide` writes it again,
range by range, each behind a savepoint of one transaction that is rolled back. If no row is refused then, the
batch is written as a whole once more, in the order that the search found. So what is prepared was always
written by `write_rows` from the same statements, which a later commit uses too.
"""

from __future__ import annotations

import datetime
import heapq
import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from kafka_eos_source.sinks.sql_errors import Kind, Meaning, RowRefusedError, meaning_of

#: Checks deferred constraints before the end of the transaction. See `_foreign_keys_broken` for SQLite.
_CHECK_NOW = dict.fromkeys(("postgresql", "cockroachdb", "oracle"), "SET CONSTRAINTS ALL IMMEDIATE")
_SAVEPOINT = "kafka_eos_rows"


# -- checks at the end of a transaction ------------------------------------------------------------


def dry_run(engine: Any, work: Callable[[Any], None]) -> None:
    """Calls `work` in a transaction, checks all constraints, and rolls the transaction back.

    Args:
        engine: SQLAlchemy engine.
        work: writes rows to a connection.

    Raises:
        sqlalchemy.exc.DBAPIError: if the database refuses the rows, as it would at the commit.
        RowRefusedError: if a row violates a foreign key in SQLite.
    """
    with engine.connect() as connection, connection.begin() as transaction:
        check = end_check(connection)
        work(connection)
        check()
        transaction.rollback()


def end_check(connection: Any) -> Callable[[], None]:
    """Returns a function that checks what the database would check at the end of the transaction.

    The result raises what `dry_run` raises. Call it in the transaction, and `end_check` before the
    first write.
    """
    dialect = connection.dialect.name
    if statement := _CHECK_NOW.get(dialect):
        return partial(connection.exec_driver_sql, statement)
    if dialect != "sqlite" or not (tables := _with_deferred_foreign_keys(connection)):
        return lambda: None
    before = _foreign_keys_broken(connection, tables)

    def check() -> None:
        if _foreign_keys_broken(connection, tables) > before:
            raise RowRefusedError("violates a foreign key", depends_on_rows=True)

    return check


def _with_deferred_foreign_keys(connection: Any) -> list[str]:
    """Returns the tables in SQLite with foreign keys that are checked at the end, if any are checked.

    Triggers may write to tables other than the sink's.
    """
    if not connection.exec_driver_sql("PRAGMA foreign_keys").scalar():
        return []
    statement = "SELECT name FROM sqlite_master WHERE type = 'table' AND upper(sql) LIKE '%DEFERRED%'"
    return [str(name) for (name,) in connection.exec_driver_sql(statement)]


def _foreign_keys_broken(connection: Any, tables: Iterable[str]) -> int:
    """Counts the rows that violate a foreign key in SQLite, which reads the whole tables."""
    quote = connection.dialect.identifier_preparer.quote_identifier
    return sum(
        len(connection.exec_driver_sql(f"PRAGMA foreign_key_check({quote(each)})").all()) for each in tables
    )


# -- the batch as a whole --------------------------------------------------------------------------


@dataclass
class Order:
    """The order in which the database accepts the rows of a batch, and what is written together.

    Attributes:
        ranges: ascending ranges of row numbers, each with its end; each within one record batch.
        later: rows that come after all ranges.
        refused: the rows that the database refuses, by number. If there are any, the rest is incomplete.
    """

    ranges: list[tuple[int, int]]
    later: list[pa.RecordBatch]
    refused: Mapping[int, RowRefusal]

    def pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Returns the rows in this order."""
        wanted = iter(self.ranges)
        found = next(wanted, None)
        before = 0
        for batch in batches:
            while found is not None and found[0] < before + batch.num_rows:
                yield batch.slice(found[0] - before, found[1] - found[0])
                found = next(wanted, None)
            before += batch.num_rows
        yield from self.later


def statements(
    dialect: Any,
    table: Any,
    batches: Iterable[pa.RecordBatch],
    keys: Sequence[str],
    chunk_rows: int,
    order: Order | None = None,
) -> Iterator[pa.RecordBatch]:
    """Returns the rows that `write_rows` writes, those of one statement at a time.

    Args:
        dialect: SQLAlchemy dialect of the database.
        table: SQLAlchemy table, as loaded from the database.
        batches: rows; their columns are a subset of the table's.
        keys: key columns of an upsert; empty to append. Of several rows with the same key in one batch, the
            last one wins.
        chunk_rows: most rows per statement, except for ``COPY``.
        order: result of `divide`; None = the order of the rows.
    """
    if order is not None:
        batches = order.pieces(batches)
    elif keys:
        whole = pa.Table.from_batches(list(batches))
        batches = whole.take(pa.array(_last_per_key(whole, keys))).to_batches()
    for batch in batches:
        yield from _chunks(dialect, table, batch, keys, chunk_rows)


def _chunks(
    dialect: Any, table: Any, batch: pa.RecordBatch, keys: Sequence[str], chunk_rows: int
) -> Iterator[pa.RecordBatch]:
    if not keys and copier(dialect, table) is not None:
        chunk_rows = max(1, batch.num_rows)
    for start in range(0, batch.num_rows, chunk_rows):
        yield batch.slice(start, chunk_rows)


def write_rows(connection: Any, table: Any, rows: Iterable[pa.RecordBatch], keys: Sequence[str]) -> None:
    """Appends the rows, or upserts them if there are keys.

    Postgres receives appended rows by ``COPY``, which is encoded column by column. Constraints that can be
    deferred are checked at the end, so that they depend neither on the order of the rows nor on statements.

    Args:
        connection: SQLAlchemy connection with an open transaction.
        table: SQLAlchemy table, as loaded from the database.
        rows: result of `statements`.
        keys: key columns of an upsert; empty to append. If keys that differ here are equal for the database
            (``citext``, ``char``, a collation), its upsert statement runs row by row, so the last one wins.

    Raises:
        Exception: of SQLAlchemy or of the driver; `sql_errors.meaning_of` says what it means.
    """
    _defer(connection)
    for each in rows:
        _write(connection, table, each, keys)


def _defer(connection: Any) -> None:
    if connection.dialect.name in _CHECK_NOW:
        connection.exec_driver_sql("SET CONSTRAINTS ALL DEFERRED")


def _write(connection: Any, table: Any, batch: pa.RecordBatch, keys: Sequence[str]) -> None:
    """Writes the rows by one statement."""
    if not keys and (copy := copier(connection.dialect, table)) is not None:
        copy(connection, table, batch)
        return
    statement = _upsert(connection, table, batch.schema.names, keys) if keys else table.insert()
    _execute(connection, table, statement, batch, keys)


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


class RollsBackError(Exception):
    """The refusal of a row ended the whole transaction, so that no row can be searched for in it."""


#: (start, stop): the database accepted these rows of those that are tried.
_Accept = Callable[[int, int], None]


@dataclass
class _Attempt:
    """Writes ranges of rows behind a savepoint each.

    Attributes:
        connection: as in `write_rows`.
        table, keys, chunk_rows: as in `statements`.
        check: result of `end_check`; None if no constraint is deferred.
        rows: the rows.
        number: returns the number under which a row is reported.
        accept: called with each range that the database accepts.
        curable: numbers of refused rows that rows after them may cure.
    """

    connection: Any
    table: Any
    keys: Sequence[str]
    chunk_rows: int
    check: Callable[[], None] | None
    rows: pa.RecordBatch
    number: Callable[[int], int]
    accept: _Accept
    curable: set[int]

    def __call__(self, start: int, stop: int) -> RangeRefusal | None:
        dialect = self.connection.dialect
        failpoints.reach("sink.sql.within_search")
        dialect.do_savepoint(self.connection, _SAVEPOINT)
        rows = self.rows.slice(start, stop - start)
        try:
            if self.check is not None:
                _defer(self.connection)  # so that rows of one range may refer to each other
            for each in _chunks(dialect, self.table, rows, self.keys, self.chunk_rows):
                _write(self.connection, self.table, each, self.keys)
            if self.check is not None:
                self.check()
        except Exception as error:
            found = meaning_of(error, dialect)
            if not found.may_be_of_rows:
                raise
            self._roll_back(found)
            if found.kind is Kind.STATEMENT and not self._is_valid(rows.schema.names):
                raise
        else:
            dialect.do_release_savepoint(self.connection, _SAVEPOINT)
            self.accept(start, stop)
            return None
        if stop - start == 1 and found.depends_on_rows:
            self.curable.add(self.number(start))
        return RangeRefusal(found.refusal(self.table), found.row)

    def _roll_back(self, found: Meaning) -> None:
        dialect = self.connection.dialect
        try:
            dialect.do_rollback_to_savepoint(self.connection, _SAVEPOINT)
            dialect.do_release_savepoint(self.connection, _SAVEPOINT)
        except sqlalchemy().exc.DBAPIError as error:
            if meaning_of(error, dialect).kind is Kind.LATER:
                raise
            raise RollsBackError(found.why) from error

    def _is_valid(self, names: Sequence[str]) -> bool:
        """Returns whether the database can execute the statement, if not for all rows.

        ``EXPLAIN`` of SQLite, MySQL and MariaDB compiles the statement and the triggers, and looks for all
        tables, columns and functions in them, but computes nothing from a row.
        """
        dialect = self.connection.dialect
        statement = _upsert(self.connection, self.table, names, self.keys) if self.keys else None
        if statement is None:
            statement = self.table.insert()
        compiled = statement.compile(dialect=dialect, column_keys=list(names))
        bound = [compiled.escaped_bind_names.get(each, each) for each in compiled.params]
        values: Any = (None,) * len(bound) if compiled.positional else dict.fromkeys(bound)
        try:
            self.connection.exec_driver_sql(f"EXPLAIN {compiled}", values).close()
        except sqlalchemy().exc.DBAPIError as error:
            return meaning_of(error, dialect).kind is Kind.ROW
        return True


def divide(
    connection: Any,
    table: Any,
    batches: Iterable[pa.RecordBatch],
    keys: Sequence[str],
    chunk_rows: int,
    deadline: Deadline,
    enough: int | None = None,
) -> Order:
    """Writes the rows range by range, and returns those that the database refuses, or an order of all.

    Args:
        connection: as in `write_rows`.
        table, batches, keys, chunk_rows: as in `statements`.
        deadline: time limit of the call, half of which the search may take.
        enough: the number of refused rows after which the search may stop; None = it finds all. If rows of
            the table refer to others of it, it finds all, because a later row may cure a refused one.

    Raises:
        DivisionLimitError: if the search takes too long.
        RollsBackError: if the database ends the transaction when it refuses a row.
        Exception: of SQLAlchemy or of the driver, if it is not about rows.
    """
    references = _references_to_itself(table)
    division = Division.within(deadline, enough=None if references else enough)
    check = end_check(connection) if _defers(connection) else None
    order = Order([], [], division.refused)

    def run(rows: pa.RecordBatch, number: Callable[[int], int], accept: _Accept | None = None) -> set[int]:
        """Tries rows; returns the numbers of refused ones that rows after them may cure."""
        curable: set[int] = set()

        def add(start: int, stop: int) -> None:
            order.later.append(rows.slice(start, stop - start))

        attempt = _Attempt(connection, table, keys, chunk_rows, check, rows, number, accept or add, curable)
        division.run(rows.num_rows, attempt, number)
        return curable if references else set()

    if keys:
        whole = pa.Table.from_batches(list(batches))
        _divide_upserts(whole, keys, division, run, references)
        return order
    left: dict[int, pa.RecordBatch] = {}
    before = 0
    for batch in batches:

        def accept(start: int, stop: int, before: int = before) -> None:
            order.ranges.append((before + start, before + stop))

        for each in run(batch, _numbers_of(range(before, before + batch.num_rows)), accept):
            left[each] = batch.take(pa.array([each - before]))  # a copy, which does not keep the batch
        before += batch.num_rows
        if division.has_enough:
            break
    _retry(left, division, run, references)
    return order


def _numbers_of(found: Sequence[int]) -> Callable[[int], int]:
    return lambda at: int(found[at])


_Run = Callable[[pa.RecordBatch, Callable[[int], int]], set[int]]
#: Columns of a table, and those of the same table to which they refer.
_References = Sequence[tuple[Sequence[str], Sequence[str]]]


def _references_to_itself(table: Any) -> _References:
    """Returns the foreign keys of the table to itself, with the names of the frame's columns."""
    in_frame = {column.name: column.key for column in table.columns}
    found = []
    for each in table.foreign_key_constraints:
        targets = [of_column.target_fullname.rpartition(".") for of_column in each.elements]
        if all(owner == table.fullname for owner, _, _ in targets):
            of_parent = [in_frame.get(name, name) for _, _, name in targets]
            found.append(([column.key for column in each.columns], of_parent))
    return found


def _divide_upserts(
    whole: pa.Table, keys: Sequence[str], division: Division, run: _Run, references: _References
) -> None:
    """Tries the last row of each key; if it is refused, the row before it with the same key."""
    tried: set[int] = set()
    while True:
        last = [int(each) for each in _last_per_key(whole, keys, division.refused) if int(each) not in tried]
        if not last or division.has_enough:
            return
        tried.update(last)
        rows = whole.take(pa.array(last)).combine_chunks().to_batches()[0]
        curable = run(rows, _numbers_of(last))
        at = {number: each for each, number in enumerate(last)}
        _retry({each: rows.slice(at[each], 1) for each in curable}, division, run, references)


def _retry(left: dict[int, pa.RecordBatch], division: Division, run: _Run, references: _References) -> None:
    """Tries refused rows again, now that the rows after them are written, as long as one is accepted.

    A row comes after the one to which it refers. In case the database compares them in another way, every
    second time the rows come in reversed order, and so trees in any order need few rounds.
    """
    for turn in itertools.count():
        if not left:
            return
        numbers = sorted(left)
        rows = pa.Table.from_batches([left[each] for each in numbers]).combine_chunks().to_batches()[0]
        order = range(len(numbers))[::-1] if turn % 2 else _parents_first(rows, references)
        numbers = [numbers[each] for each in order]
        why = {each: division.refused.pop(each) for each in numbers}
        try:
            run(rows.take(pa.array(order, pa.int64())), _numbers_of(numbers))
        except Exception:
            division.refused.update(why)
            raise
        refused = [each for each in numbers if each in division.refused]
        if len(refused) == len(numbers):
            return
        left = {each: left[each] for each in refused}


def _parents_first(rows: pa.RecordBatch, references: _References) -> Sequence[int]:
    """Returns the rows in an order in which none refers to a later one, otherwise in their own order.

    Rows that refer to each other in a circle come last.
    """
    children: dict[int, list[int]] = {}
    parents = [0] * rows.num_rows
    for of_child, of_parent in references:
        if not {*of_child, *of_parent} <= set(rows.schema.names):
            continue
        try:
            named = {name: rows[name].to_pylist() for name in {*of_child, *of_parent}}
        except (OverflowError, ValueError):  # Python has no object for a value
            continue
        first: dict[tuple[object, ...], int] = {}
        for at, key in enumerate(zip(*(named[name] for name in of_parent), strict=True)):
            first.setdefault(key, at)
        for at, key in enumerate(zip(*(named[name] for name in of_child), strict=True)):
            parent = first.get(key)
            if parent is not None and parent != at and None not in key:
                children.setdefault(parent, []).append(at)
                parents[at] += 1
    ready = [at for at, count in enumerate(parents) if not count]
    found: list[int] = []
    while ready:
        found.append(heapq.heappop(ready))
        for at in children.get(found[-1], ()):
            parents[at] -= 1
            if not parents[at]:
                heapq.heappush(ready, at)
    return [*found, *(at for at, count in enumerate(parents) if count)]


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
