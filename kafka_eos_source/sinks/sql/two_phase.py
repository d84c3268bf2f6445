"""Prepared transactions of databases that support them; they survive the connection and a server restart.

This module sends SQL statements instead of using SQLAlchemy's ``begin_twophase``, because each driver
rewrites the ids in its own way, and another process could not find them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kafka_eos_source.sinks.sql.database import autocommit


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
