"""`SqlSink`: writes the rows of a batch, and its entry in the ledger, in one database transaction.

If the database supports prepared transactions, `prepare` writes the rows, so a violated constraint is found
before Kafka commits them. Otherwise, `prepare` writes the rows in a transaction that it rolls back, which
finds the same violations, and stores the rows in the checkpoint; `commit` writes them. In that mode, rows
that another program writes in between can still violate a constraint. The driver logs a warning about that at
the start.

After a restart, the sink believes the database: the ledger about what is committed, and the list of prepared
transactions, whose content nobody can change. Rows in the checkpoint must have the digest in their note, and
the note the digest in the token in Kafka.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    SinkFailedError,
    SinkRetryableError,
    SinkUnavailableError,
)
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.secrets import shown_url
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    RowRefusal,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.division import DivisionLimitError
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sink_options import SinkOption, columns
from kafka_eos_source.sinks.sql_database import (
    autocommit,
    create_table,
    create_table_for,
    define_table,
    has_database_file,
    has_schema,
    load_table_for,
    new_engine,
    no_table,
    parsed_url,
    refuse_without_right,
    sqlalchemy,
)
from kafka_eos_source.sinks.sql_errors import FIX_ROWS, Kind, RowRefusedError, driver_text, meaning_of
from kafka_eos_source.sinks.sql_rows import divide, dry_run, write_rows
from kafka_eos_source.sinks.sql_rules import table_rules
from kafka_eos_source.sinks.sql_transactions import (
    PreparedTransactions,
    add_to_ledger,
    define_ledger,
    gid_of,
    gid_prefix,
    is_in_ledger,
    prune_ledger,
    supported_by,
    txn_of,
    utc_now,
)
from kafka_eos_source.sinks.table_columns import matching
from kafka_eos_source.sinks.targets import address

F = TypeVar("F", bound=Callable[..., Outcome])


def errors_as_outcomes(call: F) -> F:
    """Turns errors of the database into `Retryable` if a retry can help, else into `Fatal`."""

    @functools.wraps(call)
    def wrapped(self: SqlSink, *args: Any) -> Outcome:
        try:
            return call(self, *args)
        except Exception as error:
            if not self.is_of_database(error):
                raise
            return meaning_of(error, self.dialect).outcome(self.table)

    return cast(F, wrapped)


class _RowsRefusedError(Exception):
    """Rolls a transaction back in which rows were refused."""

    def __init__(self, rows: Mapping[int, RowRefusal]) -> None:
        super().__init__()
        self.rows = rows


# -- the sink ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

#: Longest wait for locks of other transactions. The lock may belong to a prepared transaction of this sink
#: that the next `recover` finds and the driver rolls back.
_LOCK_SECONDS = 20
#: Number of retries if the list of prepared transactions is not exact, the first pause and the longest; 0.6 s
#: in total. MariaDB releases a transaction some ms after its connection was closed.
_RETRIES, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 7, 0.005, 0.32
#: Longest wait for another process that is ending the same prepared transaction.
_END_SECONDS = 5
_PRUNE_EVERY_BATCHES = 100
_LEDGER_RETENTION = datetime.timedelta(days=7)


class SqlSink(TwoPhaseSink):
    """``type=sql``: writes to a table. Only the driver connects to the database.

    Made from its `OPTIONS`, which describe the arguments; `constructors.sql` is for users.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption(
            "url",
            values.text,
            None,
            "SQLAlchemy URL",
            "Database and Python driver: `postgresql+psycopg://…`, `mysql+pymysql://…`, `sqlite:////path`.",
            required=True,
            secret=True,
        ),
        SinkOption("table", values.text, None, "text", "Table that receives the rows.", required=True),
        SinkOption(
            "schema", values.text, None, "text", "Schema of the table and the ledger.", "the connection's"
        ),
        SinkOption(
            "mode",
            values.choice("append", "upsert"),
            "append",
            "`append`, `upsert`",
            "`upsert` replaces the row that has the same values in `keys`.",
        ),
        SinkOption(
            "keys",
            columns,
            (),
            "comma-separated columns",
            "Key columns of an upsert. The table needs a primary key or unique constraint on them.",
            "none",
        ),
        SinkOption(
            "create",
            values.boolean,
            True,
            "boolean",
            "Whether to create the table if it does not exist, with `keys` as its primary key.",
        ),
        SinkOption(
            "two.phase",
            values.choice("auto", "require", "never"),
            "auto",
            "`auto`, `require`, `never`",
            "Whether to use prepared transactions. `auto`: if the database supports them. Without them, the "
            "sink writes the rows in one transaction at commit.",
        ),
        SinkOption("batch.rows", values.integer(1), 10_000, "rows", "Most rows per INSERT statement."),
        SinkOption(
            "ledger.table",
            values.text,
            "kafka_eos_ledger",
            "text",
            "Table in which the sink records committed batches; created if it does not exist.",
        ),
    )

    def __init__(
        self,
        *,
        url: str,
        table: str,
        schema: str | None,
        mode: str,
        keys: Sequence[str],
        create: bool,
        two_phase: str,
        batch_rows: int,
        ledger_table: str,
    ) -> None:
        if (mode == "upsert") != bool(keys):
            raise InvalidOptionError(
                f"option 'mode' has the value {mode!r}, and option 'keys' is "
                f"{', '.join(keys) if keys else 'not set'}; mode=upsert requires keys, and mode=append must "
                "not have any.",
                fix="set mode=upsert together with the option 'keys', or neither.",
            )
        self.url, self.table, self.schema = url, table, schema
        self.mode, self.keys, self.create = mode, tuple(keys), create
        self.two_phase, self.batch_rows, self.ledger_table = two_phase, batch_rows, ledger_table

    def __repr__(self) -> str:
        return f"SqlSink(table={self.table!r}, mode={self.mode!r})"

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._engine: Any = None
        self._transactions: PreparedTransactions | None = None
        self._prepares_transactions = False
        self._unsupported_reason = ""
        self._table: Any = None
        self._ledger: Any = None
        self._is_complete = False

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def target(self) -> str | None:
        url = parsed_url(self.url)
        kind = url.get_backend_name()
        if kind == "sqlite":
            place = os.path.realpath(url.database) if url.database else "memory"
        else:
            # libpq and MySQL's drivers take the host, or the path of a socket, from the query too
            host = url.host or next((url.query[n] for n in ("host", "unix_socket") if n in url.query), None)
            place = f"{address(kind, str(host) if host else None, url.port)}/{url.database or ''}"
        table = f"{self.schema}.{self.table}" if self.schema else self.table
        return f"the table {table} of {kind.replace('mariadb', 'mysql')}://{place}"

    @property
    def dialect(self) -> Any:
        """SQLAlchemy dialect of the database; None before the first connection."""
        return None if self._engine is None else self._engine.dialect

    def is_of_database(self, error: Exception) -> bool:
        """Returns whether SQLAlchemy, the driver or the writing of rows raised an error."""
        if isinstance(error, (sqlalchemy().exc.SQLAlchemyError, RowRefusedError, OverflowError)):
            return True
        dialect = self.dialect
        return dialect is not None and isinstance(error, dialect.loaded_dbapi.Error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises errors of the database as errors that name the table and say what to do."""
        try:
            yield
        except Exception as error:
            if not self.is_of_database(error):
                raise
            outcome = meaning_of(error, self.dialect).outcome(self.table)
            if isinstance(outcome, Fatal):
                raise SinkFailedError(outcome.why, fix=outcome.fix) from error
            assert isinstance(outcome, Retryable)
            raise SinkRetryableError(outcome.why) from error

    def risks(self) -> Sequence[str]:
        if self._prepares_transactions:
            return ()
        reason = self._unsupported_reason or "two.phase is never"
        return (
            f"{reason}, so the sink writes rows after Kafka committed them. If another program adds rows "
            "between prepare and commit that violate a constraint together with the batch, the query stops "
            "with SINK_FAILED. two.phase=require refuses such a database",
        )

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        """Logs in, and compares the columns of the table with the schema if the table exists.

        Raises:
            InvalidOptionError: if ``two.phase=require``, and the database has no prepared transactions; or if
                the database schema does not exist.
            InvalidSchemaError: if the table does not fit, or is missing and must not be created.
            AuthorizationError: if the user may not write to the table (only Postgres says so).
            SinkUnavailableError: if the database refuses the login, or cannot be reached.
        """
        sa = sqlalchemy()
        engine = new_engine(self.url, max(2, int(deadline.remaining_seconds())))
        try:
            if not has_database_file(self.url):
                self._check_creation(schema)
                return
            with autocommit(engine) as connection:
                self._refuse_unsupported(*supported_by(connection))
                found = sa.inspect(connection)
                if not found.has_table(self.table, schema=self.schema):
                    if self.schema is not None and not has_schema(connection, self.schema):
                        raise InvalidOptionError(
                            f"option 'schema' has the value {self.schema!r}, which the database lacks.",
                            fix="create the schema, or correct the option 'schema'.",
                        )
                    self._check_creation(schema)
                    return
            table = load_table_for(engine, self.table, self.schema, schema, self._keys(schema))
            with autocommit(engine) as connection:
                refuse_without_right(connection, table, ("INSERT", *(("UPDATE",) if self.keys else ())))
        except sa.exc.DBAPIError as error:
            raise SinkUnavailableError(
                f"the database {shown_url(self.url)!r} cannot be used: {driver_text(error)}.",
                fix="correct user, password, host and database in the option 'url', or start the database.",
            ) from error
        finally:
            engine.dispose()

    def _check_creation(self, schema: pa.Schema) -> None:
        if not self.create:
            raise no_table(self.table)
        missing = [key for key in self._keys(schema) if key not in schema.names]
        if missing:
            raise InvalidOptionError(
                f"option 'keys' names {', '.join(map(repr, missing))}; the frame has "
                f"{', '.join(map(repr, schema.names))}.",
                fix="correct the option 'keys', or select the columns in the frame.",
            )
        define_table(self.table, self.schema, schema, self._keys(schema))

    def _refuse_unsupported(self, transactions: PreparedTransactions | None, reason: str) -> None:
        if transactions is None and self.two_phase == "require":
            raise InvalidOptionError(
                f"option 'two.phase' has the value 'require', but {reason}.",
                fix="enable prepared transactions in the database, or set 'two.phase' to auto.",
            )

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        with self._errors():
            self._connect()
            self._table_for(schema)

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        """Loads the table anew, and returns what its columns cannot hold.

        Raises:
            SinkRetryableError: if the database cannot be reached.
            InvalidSchemaError: if the table no longer fits the rows.
        """
        with self._errors():
            self._connect()
            table = load_table_for(self._engine, self.table, self.schema, schema, self._keys(schema))
            with autocommit(self._engine) as connection:
                found = table_rules(connection, table, schema, self._keys(schema))
        self._table, self._is_complete = table, found.is_complete
        return found.rules

    @property
    def refuses_rows(self) -> bool:
        """False if the rules of the table's columns cover everything that the database may refuse."""
        return not self._is_complete

    @errors_as_outcomes
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        self._connect()
        gid = gid_of(txn)
        try:
            table = self._table_for(staged.schema)
        except InvalidSchemaError as error:
            return Fatal(error.message, error.fix)
        with autocommit(self._engine) as connection:
            if is_in_ledger(connection, self._ledger, gid):
                return OK
            if self._prepares_transactions and gid in self._listed(connection):
                return Ok(_IN_DATABASE)

        try:
            return self._prepare_rows(gid, txn, staged, table, deadline, divided=False)
        except Exception as error:
            if not self.is_of_database(error) or meaning_of(error, self.dialect).kind is not Kind.ROW:
                raise
        try:
            return self._prepare_rows(gid, txn, staged, table, deadline, divided=True)
        except _RowsRefusedError as refused:
            return Refused(refused.rows)
        except DivisionLimitError as limit:
            return Refused(limit.refused) if limit.suffices else _too_many(self.table, limit, deadline)

    def _prepare_rows(
        self, gid: str, txn: SinkTxn, staged: Staged, table: Any, deadline: Deadline, *, divided: bool
    ) -> Outcome:
        """Prepares the batch in one database transaction.

        Args:
            divided: whether to write the rows range by range, and look for those that the database refuses.

        Raises:
            _RowsRefusedError: if the database refuses rows; nothing is prepared.
            Exception: of SQLAlchemy or of the driver.
        """
        keys = self._keys(staged.schema)

        def work(connection: Any) -> None:
            try:
                add_to_ledger(connection, self._ledger, gid, txn, staged.rows)
            except sqlalchemy().exc.IntegrityError as error:
                raise SinkRetryableError(f"another process prepares {gid}") from error
            if divided:
                enough = self.context.enough_refused
                refused = divide(connection, table, staged.batches(), keys, self.batch_rows, deadline, enough)
                if refused:
                    raise _RowsRefusedError(refused)
            else:
                write_rows(connection, table, staged.batches(), keys, self.batch_rows)
            failpoints.reach("sink.sql.before_prepare")

        if self._transactions is None or not self._prepares_transactions:
            dry_run(self._engine, work, self.table)
            digest = self._store.put_rows(gid, staged.schema, staged.batches())
            note = {"id": str(txn), "rows": staged.rows, "table": self.table, "digest": digest}
            return Ok(self._store.put(gid, note))
        seconds = max(1, int(deadline.remaining_seconds(_LOCK_SECONDS)))
        self._transactions.prepare(self._engine, gid, work, seconds)
        return Ok(_IN_DATABASE)

    @errors_as_outcomes
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._connect()
        gid = gid_of(txn)
        failpoints.reach("sink.sql.before_commit")
        # The token says where the batch was prepared, perhaps with another two.phase. Without it, both places
        # are searched.
        is_in_database = txn.digest == _IN_DATABASE if txn.digest else self._prepares_transactions
        if is_in_database and self._transactions is not None:
            return self._commit_prepared(gid, txn)
        return self._commit_stored(gid, txn)

    @errors_as_outcomes
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._connect()
        gid = gid_of(txn)
        if (transactions := self._transactions) is not None:

            def roll_back() -> None:
                with autocommit(self._engine) as connection:
                    if gid in self._listed(connection):
                        transactions.roll_back(connection, gid)

            retry(
                roll_back,
                sqlalchemy().exc.DBAPIError,
                self._pauses(),
                permanent=lambda error: error if error.connection_invalidated else None,
            )
        if self.context.store is not None:
            self.context.store.remove(gid)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        with self._errors():
            return self._recover()

    def _recover(self) -> Sequence[SinkTxn]:
        self._connect()
        found: set[str] = set()
        with autocommit(self._engine) as connection:
            # Both places are listed, whatever two.phase is now: the batch may have been prepared when it had
            # another value, or when the database did not allow prepared transactions.
            found.update(self._listed(connection))
            for gid in self.context.store.names() if self.context.store is not None else ():
                if txn_of(self.context, gid) is not None and is_in_ledger(connection, self._ledger, gid):
                    self._store.remove(gid)
                else:
                    found.add(gid)
        txns = (txn_of(self.context, gid) for gid in found)
        return sorted(txn for txn in txns if txn is not None)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        if batch_id % _PRUNE_EVERY_BATCHES == 0:
            self._connect()
            with self._errors(), self._engine.begin() as connection:
                prune_ledger(
                    connection,
                    self._ledger,
                    gid_prefix(self.context),
                    utc_now() - _LEDGER_RETENTION,
                )

    def _listed(self, connection: Any) -> Sequence[str]:
        """Lists the gids of the prepared transactions in the database.

        With ``two.phase=never``, the user may have no right to list them, as MySQL requires one. Then nothing
        is listed; a commit finds a transaction by its gid all the same.
        """
        if self._transactions is None:
            return ()
        try:
            return self._transactions.prepared(connection)
        except sqlalchemy().exc.DBAPIError as error:
            if self._prepares_transactions or error.connection_invalidated:
                raise
            _log.warning(
                "sink %r cannot list transactions that it may have prepared before two.phase=never: %s",
                self.context.name,
                self.context.secrets.hide(driver_text(error)),
            )
            return ()

    @property
    def _store(self) -> NotesFolder:
        if self.context.store is None:
            raise InvalidOptionError(
                f"sink {self.context.name!r} has to keep rows in the query's checkpoint, because the "
                "database does not support prepared transactions, but the option 'checkpointLocation' is "
                "not set.",
                fix="set 'checkpointLocation', or enable prepared transactions in the database.",
            )
        return self.context.store

    def _commit_prepared(self, gid: str, txn: SinkTxn) -> Outcome:
        assert self._transactions is not None
        errors = sqlalchemy().exc
        pauses = self._pauses()
        while True:
            with autocommit(self._engine) as connection:
                try:
                    self._transactions.commit(connection, gid)
                    return OK
                except errors.DBAPIError as error:
                    if error.connection_invalidated:
                        raise
                    message = driver_text(error)
            # Either the transaction is not prepared (any more), or another process is ending it. Read the
            # list before the ledger: a committed transaction that is no longer listed is in the ledger.
            with autocommit(self._engine) as connection:
                listed = gid in self._listed(connection)
                if is_in_ledger(connection, self._ledger, gid):
                    return OK
            store = None if txn.digest else self.context.store
            if store is not None and store.digest(gid) is not None:
                return self._commit_stored(gid, txn)
            if pauses.expired:
                break
            pauses.wait()
        if listed:
            return Retryable(f"the database cannot commit {gid} for the table {self.table!r} now: {message}")
        if not self._transactions.is_exact:
            # Another process may be committing the transaction, so that it is neither listed nor visible yet.
            # Its rows stay locked until it has ended.
            with autocommit(self._engine) as connection:
                self._transactions.limit_lock_wait(connection, _END_SECONDS)
                if is_in_ledger(connection, self._ledger, gid, locking=True):
                    return OK
        return Fatal(f"nothing is prepared under {gid}: {message}", _LOST)

    def _pauses(self) -> Pauses:
        assert self._transactions is not None
        most = 0 if self._transactions.is_exact else _RETRIES
        return Pauses(None, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, most=most)

    def _commit_stored(self, gid: str, txn: SinkTxn) -> Outcome:
        errors = sqlalchemy().exc
        note = self._store.get(gid, txn.digest, _read_note)
        with autocommit(self._engine) as connection:
            done = is_in_ledger(connection, self._ledger, gid)
        if done:
            self._store.remove(gid)
            return OK
        if note is None and self._transactions is not None and not txn.digest:
            return self._commit_prepared(gid, txn)
        if note is None:
            return Fatal(f"nothing is prepared under {gid}", _LOST)
        row_count, digest = note
        batches = self._store.rows(gid, digest)
        first = next(batches, None)
        table = None if first is None else self._table_for(first.schema)
        try:
            with self._engine.begin() as connection:
                # insert into the ledger first, so that a second process that commits the batch waits here
                add_to_ledger(connection, self._ledger, gid, txn, row_count)
                if first is not None:
                    rows, keys = itertools.chain([first], batches), self._keys(first.schema)
                    write_rows(connection, table, rows, keys, self.batch_rows)
                failpoints.reach("sink.sql.within_commit")
        except errors.IntegrityError:
            with autocommit(self._engine) as connection:
                if not is_in_ledger(connection, self._ledger, gid):
                    raise
        self._store.remove(gid)
        return OK

    def _connect(self) -> None:
        """Connects to the database at the first call, and creates the ledger if it does not exist.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: if the database cannot be reached.
            InvalidOptionError: if ``two.phase=require``, and the database has no prepared transactions.
        """
        if self._ledger is not None:
            return
        engine = new_engine(self.url)
        defined = define_ledger(self.ledger_table, self.schema)
        with autocommit(engine) as connection:
            transactions, reason = supported_by(connection)
            self._refuse_unsupported(transactions, reason)
            create_table(connection, defined)
        self._unsupported_reason = reason
        self._transactions = transactions
        self._prepares_transactions = transactions is not None and self.two_phase != "never"
        self._engine, self._ledger = engine, defined

    def _keys(self, schema: pa.Schema) -> tuple[str, ...]:
        """Returns the key columns as the frame spells them."""
        found, _ = matching(self.keys, schema.names)
        return tuple(found.get(key, key) for key in self.keys)

    def _table_for(self, schema: pa.Schema) -> Any:
        """Loads the table at the first call; creates it if necessary and checks that the schema fits.

        Raises:
            InvalidSchemaError: if the table does not exist or cannot hold the rows.
        """
        if self._table is None:
            if self.create:
                create_table_for(self._engine, self.table, self.schema, schema, self._keys(schema))
            self._table = load_table_for(self._engine, self.table, self.schema, schema, self._keys(schema))
        return self._table


def _too_many(table: str, limit: DivisionLimitError, deadline: Deadline) -> Fatal:
    """Returns the outcome of a search for refused rows that took too long."""
    return Fatal(
        f"the database refuses rows of the batch for the table {table!r}, and to find all of them takes "
        f"longer than half of {deadline.budget_seconds:.0f} s (commitTimeoutMs); {limit.found}",
        f"increase commitTimeoutMs, or {FIX_ROWS}",
    )


def _read_note(note: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the number of rows, and their digest."""
    if not isinstance(note["digest"], str) or not note["digest"]:
        raise ValueError("the digest of the rows is missing")
    return manifests.count(note["rows"]), note["digest"]


#: Digest of a batch that the database holds as a prepared transaction. No note in the checkpoint has it.
_IN_DATABASE = "database"
_LOST = "see SINK_FAILED in docs/runbooks.md: neither the database nor the checkpoint has the prepared batch."
