"""Prepared transactions of databases that have them: they outlive the connection, and the server.

Spoken as statements, not by ``begin_twophase`` of SQLAlchemy: drivers rewrite its ids, each in its own way,
and then another process does not find them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.sinks.sql.types import sqlalchemy


class TwoPhase(ABC):
    """How one kind of database does it. What is prepared belongs to no connection.

    Attributes:
        is_exact: whether what `prepared` does not list any more is over, and what it did is seen by all. If
            not, an id may be listed while the connection that prepared it is about to end, and nothing says
            that it stays listed until its rows are seen; then `await_end` tells.
    """

    is_exact: bool

    def await_end(self, connection: Any, seconds: int) -> None:
        """Has the next locking read of a row that such a transaction wrote wait for its end, or fail."""
        return

    @abstractmethod
    def prepare(self, engine: Any, gid: str, work: Callable[[Any], None], lock_seconds: int) -> None:
        """Does the work in a transaction and prepares it. After an error it may be prepared all the same."""

    @abstractmethod
    def commit(self, connection: Any, gid: str) -> None:
        """Raises: the driver's error, also when nothing is prepared."""

    @abstractmethod
    def roll_back(self, connection: Any, gid: str) -> None:
        """Raises: as `commit`."""

    @abstractmethod
    def prepared(self, connection: Any) -> list[str]:
        """The gids of this database, others' among them."""


class Postgres(TwoPhase):
    """``PREPARE TRANSACTION``, if ``max_prepared_transactions`` allows it; 0, the default, does not."""

    is_exact = True

    def prepare(self, engine: Any, gid: str, work: Callable[[Any], None], lock_seconds: int) -> None:
        with engine.connect() as connection, connection.begin() as transaction:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{lock_seconds}s'")
            work(connection)
            connection.exec_driver_sql(f"PREPARE TRANSACTION '{gid}'")
            transaction.rollback()  # there is none any more: the driver is to know it

    def commit(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"COMMIT PREPARED '{gid}'")

    def roll_back(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"ROLLBACK PREPARED '{gid}'")

    def prepared(self, connection: Any) -> list[str]:
        rows = connection.exec_driver_sql(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        return [row[0] for row in rows]


class MySql(TwoPhase):
    """XA. The transaction is anybody's once the connection that prepared it is closed."""

    is_exact = False

    def await_end(self, connection: Any, seconds: int) -> None:
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
                # ends it, and with it what is not prepared; a ROLLBACK would be refused within XA
                connection.invalidate()

    def commit(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"XA COMMIT '{gid}'")

    def roll_back(self, connection: Any, gid: str) -> None:
        connection.exec_driver_sql(f"XA ROLLBACK '{gid}'")

    def prepared(self, connection: Any) -> list[str]:
        rows = connection.exec_driver_sql("XA RECOVER")
        return [each.decode() if isinstance(each, bytes) else str(each) for *_, each in rows]


def of(connection: Any) -> tuple[TwoPhase | None, str]:
    """What the database can do, and if it cannot, why not."""
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
        return None, f"{version} forgets prepared transactions when the connection ends"
    return None, f"{dialect} has no prepared transactions that are known here"


def refuse_without_rollback(connection: Any, table: str) -> None:
    """Refuses a table of MySQL whose storage engine has no transactions: MyISAM, Aria and others.

    Raises:
        InvalidSchemaError: naming the engine.
    """
    if connection.dialect.name not in ("mysql", "mariadb"):
        return
    parameter = {"name": table}
    statement = sqlalchemy().text(
        "SELECT t.engine FROM information_schema.tables t JOIN information_schema.engines e "
        "ON e.engine = t.engine WHERE t.table_name = :name AND t.table_schema = DATABASE() "
        "AND e.transactions <> 'YES'"
    )
    engine = connection.execute(statement, parameter).scalar()
    if engine is not None:
        raise InvalidSchemaError(
            f"the table {table!r} has the storage engine {engine}, which has no transactions.",
            fix=f"ALTER TABLE {table} ENGINE = InnoDB.",
        )


def autocommit(engine: Any) -> Any:
    """A connection without a transaction of its own."""
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


#: libpq's, where the URL does not say otherwise: a network that is cut without a word is noticed in half a
#: minute, both while an answer is waited for (keep-alive) and while something is sent.
_LIBPQ = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def new_engine(url: str) -> Any:
    """One connection is kept, and tried before it is used: to connect costs MariaDB some 50 ms.

    Raises:
        InvalidOptionError: the URL is none, or the database's driver is not installed.
    """
    sa = sqlalchemy()
    found = parsed(url)
    libpq = found.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2")
    try:
        return sa.create_engine(
            found,
            poolclass=sa.pool.QueuePool,
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
            connect_args={name: n for name, n in _LIBPQ.items() if libpq and name not in found.query},
        )
    except sa.exc.ArgumentError as error:  # no such dialect; the text may have a password
        raise _not_a_url() from error
    except ImportError as error:
        raise InvalidOptionError(
            f"the database's driver is not installed: {error}.",
            fix=f"pip install {error.name}, on the driver.",
        ) from error


def parsed(url: str) -> Any:
    """SQLAlchemy's URL. Raises: InvalidOptionError: it is not one."""
    sa = sqlalchemy()
    try:
        return sa.make_url(url)
    except sa.exc.ArgumentError as error:  # the text may have a password
        raise _not_a_url() from error


def _not_a_url() -> InvalidOptionError:
    return InvalidOptionError(
        "SQLAlchemy does not know such a url; expected dialect+driver://user:password@host/database.",
        fix="correct it, for example postgresql+psycopg://… or mysql+pymysql://….",
    )
