"""The sink: rows and the batch's row in the ledger, in one transaction of the database.

Where the database has prepared transactions, the rows are written by `prepare`, so that a constraint which
they break is found before Kafka has them. Where it has none, `prepare` writes them in a transaction that it
rolls back, which finds the same, and puts them into the checkpoint; `commit` writes them. Only what others
write in between can still break a constraint then, which the driver's log says at the start.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, SinkFailedError
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Outcome,
    Retryable,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.notes_folder import NotesFolder
from kafka_eos_source.sinks.options import SinkOption, columns
from kafka_eos_source.sinks.sql import ledger, names, rows, two_phase, types
from kafka_eos_source.sinks.sql.types import sqlalchemy
from kafka_eos_source.sinks.targets import address

_log = logging.getLogger(__name__)

#: Longest wait for another transaction's locks: what holds them may be a prepared one of ours that the next
#: look takes back.
_LOCK_SECONDS = 20
#: How often it is asked again where the list of what is prepared is not exact, and the first pause; each is
#: twice the one before, 0.6 s in all. MariaDB lets go of a transaction some ms after its connection ended.
_LOOKS, _LOOK_SECONDS = 7, 0.005
#: Longest wait for another process that ends the same prepared transaction at this moment.
_END_SECONDS = 5
#: Has deferred constraints checked before the end of the transaction; SQLite tells of foreign keys instead.
_CHECK_NOW = dict.fromkeys(("postgresql", "cockroachdb", "oracle"), "SET CONSTRAINTS ALL IMMEDIATE")
_PRUNE_EVERY_BATCHES = 100
_KEPT = datetime.timedelta(days=7)

F = TypeVar("F", bound=Callable[..., Outcome])


def _answers(call: F) -> F:
    """What the database says, as an outcome: whether another try can help."""

    @functools.wraps(call)
    def answered(self: SqlSink, *args: Any) -> Outcome:
        errors = sqlalchemy().exc
        try:
            return call(self, *args)
        except (
            errors.OperationalError,
            errors.InterfaceError,
            errors.InternalError,
            errors.TimeoutError,
        ) as e:
            return Retryable(_text(e))
        except errors.DBAPIError as e:
            return Retryable(_text(e)) if e.connection_invalidated else Fatal(_text(e), _FIX)

    return cast(F, answered)


_FIX = "correct the rows or the table, then start the query again."


class SqlSink(TwoPhaseSink):
    """``type=sql``. Only the driver connects to the database; executors stage in the checkpoint.

    Args:
        url: SQLAlchemy's, such as ``postgresql+psycopg://user:password@host/database``.
        table: of the rows.
        schema: of table and ledger; None = the connection's own.
        mode: ``append`` or ``upsert``.
        keys: of an upsert.
        create: whether a table that is not there is made.
        two_phase: ``auto``, ``require`` or ``never``: prepared transactions.
        batch_rows: most rows in one ``INSERT``.
        ledger_table: name of the ledger.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption(
            "url",
            values.text,
            None,
            "SQLAlchemy URL",
            "The database, with its driver: `postgresql+psycopg://…`, `mysql+pymysql://…`, `sqlite:////path`.",
            required=True,
            secret=True,
        ),
        SinkOption("table", values.text, None, "text", "The table of the rows.", required=True),
        SinkOption("schema", values.text, None, "text", "Schema of table and ledger.", "the connection's"),
        SinkOption(
            "mode",
            values.choice("append", "upsert"),
            "append",
            "`append`, `upsert`",
            "`upsert` replaces the row with the same `keys`.",
        ),
        SinkOption("keys", columns, (), "columns, comma list", "Of an upsert: a unique key.", "none"),
        SinkOption(
            "create",
            values.boolean,
            True,
            "boolean",
            "Make the table if it is not there, `keys` its primary key.",
        ),
        SinkOption(
            "two.phase",
            values.choice("auto", "require", "never"),
            "auto",
            "`auto`, `require`, `never`",
            "Prepared transactions: `auto` = if the database has them; else rows and ledger in one.",
        ),
        SinkOption("batch.rows", values.integer(1), 10_000, "rows", "Most rows in one INSERT."),
        SinkOption(
            "ledger.table",
            values.text,
            "kafka_eos_ledger",
            "text",
            "Where the database notes which batches it has; made if it is not there.",
        ),
    )

    def __init__(
        self,
        url: str,
        table: str,
        schema: str | None = None,
        mode: str = "append",
        keys: Sequence[str] = (),
        create: bool = True,
        two_phase: str = "auto",
        batch_rows: int = 10_000,
        ledger_table: str = "kafka_eos_ledger",
    ) -> None:
        if (mode == "upsert") != bool(keys):
            raise InvalidOptionError(
                f"mode is {mode!r}, and keys are {', '.join(keys) or 'not set'}.",
                fix="an upsert needs keys, and nothing else does.",
            )
        self.url, self.table, self.schema = url, table, schema
        self.mode, self.keys, self.create = mode, tuple(keys), create
        self.two_phase, self.batch_rows, self.ledger_table = two_phase, batch_rows, ledger_table

    def __repr__(self) -> str:
        return f"SqlSink(table={self.table!r}, mode={self.mode!r})"

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._engine: Any = None
        self._by: two_phase.TwoPhase | None = None
        self._why_not = ""
        self._table: Any = None
        self._ledger: Any = None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def target(self) -> str | None:
        url = two_phase.parsed(self.url)
        kind = url.get_backend_name()
        if kind == "sqlite":
            place = os.path.realpath(url.database) if url.database else "memory"
        else:
            place = f"{address(kind, url.host, url.port)}/{url.database or ''}"
        table = f"{self.schema}.{self.table}" if self.schema else self.table
        return f"the table {table} of {kind.replace('mariadb', 'mysql')}://{place}"

    def risks(self) -> Sequence[str]:
        if self._by is not None:
            return ()
        why_not = self._why_not or "two.phase is never"
        return (
            f"{why_not}: rows are written after Kafka has them. If another writer adds rows after a batch "
            "was tried out, and the two break a constraint, the query stops with SINK_FAILED; "
            "two.phase=require refuses such a database",
        )

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._connect()
        self._table_for(schema)

    @_answers
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        self._connect()
        gid = names.gid(self.context, txn)
        try:
            table = self._table_for(staged.schema)
        except InvalidSchemaError as error:
            return Fatal(error.message, error.fix)
        with two_phase.autocommit(self._engine) as connection:
            if ledger.has(connection, self._ledger, gid):
                return OK
            if self._by is not None and gid in self._by.prepared(connection):
                return OK

        def work(connection: Any) -> None:
            ledger.add(connection, self._ledger, gid, self.context, txn, staged.rows)
            rows.write(connection, table, staged.batches(), self.keys, self.batch_rows)
            failpoints.reach("sink.sql.before_prepare")

        if self._by is None:
            self._try_out(work)
            self._store.put_rows(gid, staged.schema, staged.batches())
            self._store.put(gid, {"id": str(txn), "rows": staged.rows, "table": self.table})
            return OK
        seconds = max(1, int(deadline.remaining_seconds(_LOCK_SECONDS)))
        self._by.prepare(self._engine, gid, work, seconds)
        return OK

    @_answers
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._connect()
        gid = names.gid(self.context, txn)
        failpoints.reach("sink.sql.before_commit")
        return self._commit_prepared(gid, txn) if self._by is not None else self._commit_stored(gid, txn)

    @_answers
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._connect()
        gid = names.gid(self.context, txn)
        if self._by is not None:
            for wait in self._looks():
                try:
                    with two_phase.autocommit(self._engine) as connection:
                        if gid in self._by.prepared(connection):
                            self._by.roll_back(connection, gid)
                    break
                except sqlalchemy().exc.DBAPIError as error:
                    if error.connection_invalidated or not wait():
                        raise
        if self.context.store is not None:
            self.context.store.remove(gid)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        self._connect()
        found: set[str] = set()
        with two_phase.autocommit(self._engine) as connection:
            if self._by is not None:
                found.update(self._by.prepared(connection))
            # there may be some of a time when the database was not allowed to prepare
            for gid in self.context.store.names() if self.context.store is not None else ():
                if names.parse(self.context, gid) is not None and ledger.has(connection, self._ledger, gid):
                    self._store.remove(gid)
                else:
                    found.add(gid)
        txns = (names.parse(self.context, gid) for gid in found)
        return sorted(txn for txn in txns if txn is not None)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        if batch_id % _PRUNE_EVERY_BATCHES == 0:
            self._connect()
            with self._engine.begin() as connection:
                ledger.prune(connection, self._ledger, names.prefix(self.context), ledger.now() - _KEPT)

    @property
    def _store(self) -> NotesFolder:
        if self.context.store is None:
            raise InvalidOptionError(
                f"sink {self.context.name!r}: the database cannot prepare transactions, and there is no "
                "checkpoint to keep rows in.",
                fix="allow the database to prepare, or give the query a checkpointLocation.",
            )
        return self.context.store

    def _commit_prepared(self, gid: str, txn: SinkTxn) -> Outcome:
        assert self._by is not None
        errors = sqlalchemy().exc
        said, listed = "", False
        for wait in self._looks():
            with two_phase.autocommit(self._engine) as connection:
                try:
                    self._by.commit(connection, gid)
                    return OK
                except errors.DBAPIError as error:
                    if error.connection_invalidated:
                        raise
                    said = _text(error)
            # it is not prepared (any more), or another process is at it at this moment. In this order: what
            # is listed no more is in the ledger
            with two_phase.autocommit(self._engine) as connection:
                listed = gid in self._by.prepared(connection)
                if ledger.has(connection, self._ledger, gid):
                    return OK
            if self.context.store is not None and self.context.store.has_rows(gid):
                return self._commit_stored(gid, txn)  # prepared when the database was not allowed to
            if not wait():
                break
        if listed:
            return Retryable(said)
        if not self._by.is_exact:
            # another process may be committing it, and it may be neither listed nor seen yet; but its rows
            # are locked until it has ended
            with two_phase.autocommit(self._engine) as connection:
                self._by.await_end(connection, _END_SECONDS)
                if ledger.has(connection, self._ledger, gid, locking=True):
                    return OK
        return Fatal(f"nothing is prepared under {gid}: {said}", _LOST)

    def _try_out(self, work: Callable[[Any], None]) -> None:
        """Does the work of a commit and takes it back.

        Raises:
            sqlalchemy.exc.DBAPIError: the database refuses it, as it would at the commit.
        """
        with self._engine.connect() as connection, connection.begin() as transaction:
            work(connection)
            if statement := _CHECK_NOW.get(connection.dialect.name):
                connection.exec_driver_sql(statement)
            if connection.dialect.name == "sqlite":
                _check_foreign_keys(connection, self.table)
            transaction.rollback()

    def _looks(self) -> Iterator[Callable[[], bool]]:
        """Tries; each may wait for the next one, if there is to be one."""
        assert self._by is not None
        pause = threading.Event()
        for left in range(0 if self._by.is_exact else _LOOKS, -1, -1):
            yield partial(_again, pause, left)

    def _commit_stored(self, gid: str, txn: SinkTxn) -> Outcome:
        errors = sqlalchemy().exc
        note = self._store.get(gid)
        with two_phase.autocommit(self._engine) as connection:
            done = ledger.has(connection, self._ledger, gid)
        if done:
            self._store.remove(gid)
            return OK
        if note is None:
            return Fatal(f"nothing is prepared under {gid}", _LOST)
        batches = self._store.rows(gid)
        first = next(batches, None)
        table = None if first is None else self._table_for(first.schema)
        try:
            with self._engine.begin() as connection:
                # first, so that of two processes the second waits here
                ledger.add(connection, self._ledger, gid, self.context, txn, int(note["rows"]))
                if first is not None:
                    rows.write(connection, table, _chain(first, batches), self.keys, self.batch_rows)
                failpoints.reach("sink.sql.within_commit")
        except errors.IntegrityError:
            with two_phase.autocommit(self._engine) as connection:
                if not ledger.has(connection, self._ledger, gid):
                    raise
        self._store.remove(gid)
        return OK

    def _connect(self) -> None:
        """Raises: SQLAlchemy's errors; InvalidOptionError: ``require`` cannot be had."""
        if self._ledger is not None:
            return
        engine = two_phase.new_engine(self.url)
        defined = ledger.table(self.ledger_table, self.schema)
        with two_phase.autocommit(engine) as connection:
            by, why_not = two_phase.of(connection)
            if by is None and self.two_phase == "require":
                raise InvalidOptionError(
                    f"sink {self.context.name!r}: two.phase=require, and {why_not}.",
                    fix="allow it in the database, or set two.phase=auto.",
                )
            _create(connection, defined)
            found = ledger.as_found(connection, defined)
        self._why_not = why_not
        self._engine, self._by, self._ledger = engine, None if self.two_phase == "never" else by, found

    def _table_for(self, schema: pa.Schema) -> Any:
        """The table as the database has it, made if need be, and checked."""
        if self._table is None:
            sa = sqlalchemy()
            if self.create:
                wanted = [
                    sa.Column(
                        field.name,
                        types.sql_type(field.type, key=field.name in self.keys),
                        primary_key=field.name in self.keys,
                    )
                    for field in schema
                ]
                with two_phase.autocommit(self._engine) as connection:
                    _create(connection, sa.Table(self.table, sa.MetaData(), *wanted, schema=self.schema))
            try:
                with two_phase.autocommit(self._engine) as connection:
                    found = sa.Table(self.table, sa.MetaData(), schema=self.schema, autoload_with=connection)
            except sa.exc.NoSuchTableError as error:
                raise InvalidSchemaError(
                    f"sink {self.context.name!r}: there is no table {self.table!r}, and create is false.",
                    fix="make it, or correct its name.",
                ) from error
            for column in found.columns:
                if isinstance(column.type, sa.JSON):
                    column.type.none_as_null = True  # null is SQL's, not JSON's
            types.check(schema, found, self.keys)
            with two_phase.autocommit(self._engine) as connection:
                two_phase.refuse_without_rollback(connection, self.table)
            self._table = found
        return self._table


_LOST = "see docs/runbooks.md, SINK_FAILED: what was prepared is not in that database any more."


def _check_foreign_keys(connection: Any, table: str) -> None:
    """SQLite checks deferred foreign keys at the commit, if at all. To check them now it reads the table."""
    definition = "SELECT upper(sql) FROM sqlite_master WHERE name = ?"
    defined = str(connection.exec_driver_sql(definition, (table,)).scalar())
    if "DEFERRED" not in defined or not connection.exec_driver_sql("PRAGMA foreign_keys").scalar():
        return
    quoted = connection.dialect.identifier_preparer.quote_identifier(table)
    broken = connection.exec_driver_sql(f"PRAGMA foreign_key_check({quoted})").first()
    if broken is not None:
        raise SinkFailedError(
            f"a row of table {table!r} has no counterpart in table {broken[2]!r}: a foreign key.", fix=_FIX
        )


def _create(connection: Any, table: Any) -> None:
    """Unless it is there; another process may be making it at this moment."""
    errors = sqlalchemy().exc
    try:
        table.create(connection, checkfirst=True)
    except (errors.ProgrammingError, errors.OperationalError, errors.IntegrityError):
        if not sqlalchemy().inspect(connection).has_table(table.name, schema=table.schema):
            raise


def _again(pause: threading.Event, left: int) -> bool:
    """Waits, if there is to be another try."""
    return left > 0 and not pause.wait(_LOOK_SECONDS * 2 ** (_LOOKS - left))


def _chain(first: pa.RecordBatch, rest: Any) -> Any:
    yield first
    yield from rest


def _text(error: Exception) -> str:
    """The driver's own words: SQLAlchemy adds the statement, with rows in it."""
    original = getattr(error, "orig", None) or error
    said = re.sub(r"\s+", " ", str(original)).strip()
    return concealed(f"{type(original).__name__}: {said}")
