"""What makes a batch exactly once in a database: its name, its entry in the ledger, its prepared transaction.

The ledger is a table that records committed batches, in the same database transaction as their rows. The sink
believes it, so whoever may write to it can pretend that a batch is committed. Prepared transactions survive
the connection and a restart of the server. This module sends SQL statements instead of using SQLAlchemy's
``begin_twophase``, because each driver rewrites the ids in its own way, and another process could not find
them.
"""

from __future__ import annotations

import datetime
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.sql_database import autocommit, sqlalchemy

_PREFIX = "keos"
_GID = re.compile(r"keos_([0-9a-f]{16})_([0-9]{1,19})_([0-9a-f]{20})")


def gid_prefix(context: SinkContext) -> str:
    """Returns the prefix of all gids of one sink of one query on one cluster, which may share a database."""
    return f"{_PREFIX}_{context.owner}"


def gid_of(txn: SinkTxn) -> str:
    """Returns the gid of an id: at most 62 bytes. XA allows 64 and Postgres 200."""
    return f"{_PREFIX}_{txn.owner}_{txn.sequence}_{txn.attempt}"


def txn_of(context: SinkContext, text: str) -> SinkTxn | None:
    """Parses a gid; returns None if it does not belong to this sink."""
    found = _GID.fullmatch(text)
    if found is None or found[1] != context.owner:
        return None
    return context.txn(int(found[2]), found[3])


# -- the ledger ----------------------------------------------------------------------------------


def define_ledger(name: str, schema: str | None) -> Any:
    """Defines the ledger, which has one row for each batch of each sink."""
    sa = sqlalchemy()
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("gid", sa.String(64), primary_key=True),
        sa.Column("application_id", sa.String(200), nullable=False),
        sa.Column("cluster", sa.String(12), nullable=False),
        sa.Column("sink", sa.String(32), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("written_at", sa.DateTime, nullable=False),
        schema=schema,
    )


def is_in_ledger(connection: Any, ledger: Any, gid: str, *, locking: bool = False) -> bool:
    """Returns whether the ledger contains the batch, that is, whether it is committed.

    Args:
        connection: SQLAlchemy connection.
        ledger: result of `table`.
        gid: id of the batch in the database; see `gid_of`.
        locking: whether to wait for a transaction that is committing the row or rolling it back.

    Raises:
        sqlalchemy.exc.OperationalError: if the wait exceeds the lock timeout.
    """
    wanted = sqlalchemy().select(ledger.c.gid).where(ledger.c.gid == gid)
    return connection.execute(wanted.with_for_update(read=True) if locking else wanted).first() is not None


def add_to_ledger(connection: Any, ledger: Any, gid: str, txn: SinkTxn, rows: int) -> None:
    """Adds the batch to the ledger.

    Raises:
        sqlalchemy.exc.IntegrityError: if the ledger already contains the batch.
    """
    connection.execute(
        ledger.insert(),
        {
            "gid": gid,
            "application_id": txn.application_id,
            "cluster": txn.cluster,
            "sink": txn.sink,
            "sequence": txn.sequence,
            "row_count": rows,
            "written_at": utc_now(),
        },
    )


def prune_ledger(connection: Any, ledger: Any, prefix: str, before: datetime.datetime) -> None:
    """Deletes batches that were written before a time, and that no driver asks for any more."""
    connection.execute(
        ledger.delete().where(ledger.c.gid.like(f"{prefix}\\_%", escape="\\"), ledger.c.written_at < before)
    )


def utc_now() -> datetime.datetime:
    """Returns the time in UTC without a time zone, because not every database supports time zones."""
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)


# -- prepared transactions -----------------------------------------------------------------------


class PreparedTransactions(ABC):
    """Prepared transactions of one kind of database. They do not belong to a connection.

    Attributes:
        is_exact: whether a transaction that `prepared` no longer lists has ended, and its rows are visible
            if it was committed. If false, the list may be stale: it may contain an id although its connection
            is just closing, and it may omit an id before its rows are visible. `limit_lock_wait` and a
            locking read give certainty in that case.
    """

    is_exact: bool

    def limit_lock_wait(self, connection: Any, seconds: int) -> None:
        """Limits how long the next locking read waits for a transaction that wrote the row."""
        return

    @abstractmethod
    def prepare(self, engine: Any, gid: str, work: Callable[[Any], None], lock_seconds: int) -> None:
        """Calls `work` in a transaction and prepares it. May have prepared it even if it raises.

        Args:
            engine: SQLAlchemy engine.
            gid: name of the transaction.
            work: function that writes the rows to a connection.
            lock_seconds: longest wait for locks of other transactions.
        """

    @abstractmethod
    def commit(self, connection: Any, gid: str) -> None:
        """Commits a prepared transaction. Raises the driver's error, also if nothing is prepared."""

    @abstractmethod
    def roll_back(self, connection: Any, gid: str) -> None:
        """Rolls back a prepared transaction. Raises the driver's error, also if nothing is prepared."""

    @abstractmethod
    def prepared(self, connection: Any) -> list[str]:
        """Lists the gids of all prepared transactions in this database, including other programs'."""


class Postgres(PreparedTransactions):
    """``PREPARE TRANSACTION``, which ``max_prepared_transactions`` must allow. Its default, 0, does not."""

    is_exact = True

    def prepare(self, engine: Any, gid: str, work: Callable[[Any], None], lock_seconds: int) -> None:
        with engine.connect() as connection, connection.begin() as transaction:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{lock_seconds}s'")
            work(connection)
            connection.exec_driver_sql(f"PREPARE TRANSACTION '{gid}'")
            transaction.rollback()  # PREPARE ended the transaction; this tells the driver so

    def commit(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"COMMIT PREPARED '{gid}'")

    def roll_back(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"ROLLBACK PREPARED '{gid}'")

    def prepared(self, connection: Any) -> list[str]:
        rows = connection.exec_driver_sql(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        return [row[0] for row in rows]


class MySql(PreparedTransactions):
    """XA transactions. Any connection may end one, once the connection that prepared it is closed."""

    is_exact = False

    def limit_lock_wait(self, connection: Any, seconds: int) -> None:
        connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {seconds}")

    def prepare(self, engine: Any, gid: str, work: Callable[[Any], None], lock_seconds: int) -> None:
        with autocommit(engine) as connection:
            try:
                connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {lock_seconds}")
                connection.exec_driver_sql(f"XA START '{gid}'")
                work(connection)
                connection.exec_driver_sql(f"XA END '{gid}'")
                connection.exec_driver_sql(f"XA PREPARE '{gid}'")
            finally:
                # Closes the connection, which rolls back a transaction that is not prepared. XA would refuse
                # a ROLLBACK.
                connection.invalidate()

    def commit(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"XA COMMIT '{gid}'")

    def roll_back(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"XA ROLLBACK '{gid}'")

    def prepared(self, connection: Any) -> list[str]:
        rows = connection.exec_driver_sql("XA RECOVER")
        # other programs' ids may be any bytes
        return [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for *_, each in rows]


def supported_by(connection: Any) -> tuple[PreparedTransactions | None, str]:
    """Returns the prepared transactions of the database; or None, and the reason why it has none."""
    dialect = connection.dialect.name
    if dialect == "postgresql":
        allowed = int(connection.exec_driver_sql("SHOW max_prepared_transactions").scalar())
        if allowed > 0:
            return Postgres(), ""
        return None, "max_prepared_transactions is 0 on this Postgres"
    if dialect in ("mysql", "mariadb"):
        version = str(connection.exec_driver_sql("SELECT VERSION()").scalar())
        numbers = tuple(int(each) for each in re.findall("[0-9]+", version)[:3])
        least = (10, 5, 2) if "mariadb" in version.lower() else (5, 7, 7)
        if numbers >= least:
            return MySql(), ""
        return None, f"{version} rolls back prepared transactions when the connection ends"
    return None, f"{dialect} has no prepared transactions that this sink supports"
