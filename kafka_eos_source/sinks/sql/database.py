"""Connections to the database, and creation, loading and checks of the table that receives the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, SinkFailedError
from kafka_eos_source.sinks.sql import types
from kafka_eos_source.sinks.sql.types import sqlalchemy

FIX = "correct the rows or the table, then restart the query."
#: Checks deferred constraints before the end of the transaction. See `_check_foreign_keys` for SQLite.
_CHECK_NOW = dict.fromkeys(("postgresql", "cockroachdb", "oracle"), "SET CONSTRAINTS ALL IMMEDIATE")
#: Parameters of libpq, unless the URL sets them. They detect a lost network within half a minute, both while
#: waiting for an answer (keep-alive) and while sending.
_LIBPQ = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def autocommit(engine: Any) -> Any:
    """Opens a connection in autocommit mode."""
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def new_engine(url: str) -> Any:
    """Creates an engine that keeps one connection and tests it before use.

    Keeping the connection matters, because connecting to MariaDB takes some 50 ms.

    Raises:
        InvalidOptionError: if the URL is malformed, or the database's driver is not installed.
    """
    sa = sqlalchemy()
    sa_url = parsed(url)
    libpq = sa_url.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2")
    try:
        return sa.create_engine(
            sa_url,
            poolclass=sa.pool.QueuePool,
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
            connect_args={name: n for name, n in _LIBPQ.items() if libpq and name not in sa_url.query},
        )
    except sa.exc.ArgumentError as error:  # the dialect is unknown
        raise _invalid_url() from error
    except ImportError as error:
        raise InvalidOptionError(
            f"the Python driver of the database is not installed: {error}.",
            fix=f"run pip install {error.name} on Spark's driver.",
        ) from error


def parsed(url: str) -> Any:
    """Parses an SQLAlchemy URL.

    Raises:
        InvalidOptionError: if it is malformed.
    """
    sa = sqlalchemy()
    try:
        return sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise _invalid_url() from error


def _invalid_url() -> InvalidOptionError:
    return InvalidOptionError(  # without the value, which may contain a password
        "the option 'url' has a value (not shown) that SQLAlchemy cannot use; expected "
        "dialect+driver://user:password@host/database.",
        fix="correct the URL, for example to postgresql+psycopg://… or mysql+pymysql://….",
    )


def create(connection: Any, table: Any) -> None:
    """Creates a table unless it exists. Another process may create it at the same time."""
    errors = sqlalchemy().exc
    try:
        table.create(connection, checkfirst=True)
    except (errors.ProgrammingError, errors.OperationalError, errors.IntegrityError):
        if not sqlalchemy().inspect(connection).has_table(table.name, schema=table.schema):
            raise


def create_for(engine: Any, table: str, schema: str | None, rows: pa.Schema, keys: Sequence[str]) -> None:
    """Creates a table for rows of an Arrow schema, unless it exists.

    Args:
        engine: SQLAlchemy engine.
        table: name of the table.
        schema: database schema of the table; None for the connection's default.
        rows: Arrow schema of the rows.
        keys: columns of the primary key.

    Raises:
        InvalidSchemaError: if a column has no SQL type.
    """
    sa = sqlalchemy()
    columns = [
        sa.Column(
            field.name,
            types.sql_type(field.type, key=field.name in keys),
            primary_key=field.name in keys,
            autoincrement=False,  # MySQL and MariaDB would store a key of 0 as the next number
        )
        for field in rows
    ]
    with autocommit(engine) as connection:
        create(connection, sa.Table(table, sa.MetaData(), *columns, schema=schema))


def load_for(engine: Any, table: str, schema: str | None, rows: pa.Schema, keys: Sequence[str]) -> Any:
    """Loads the definition of a table, and checks that it can hold rows of an Arrow schema.

    Args:
        engine, table, schema, rows: as in `create_for`.
        keys: key columns of an upsert.

    Returns:
        The SQLAlchemy table.

    Raises:
        InvalidSchemaError: if the table does not exist, cannot hold the rows, or has no transactions.
    """
    sa = sqlalchemy()
    with autocommit(engine) as connection:
        try:
            found = sa.Table(table, sa.MetaData(), schema=schema, autoload_with=connection)
        except sa.exc.NoSuchTableError as error:
            raise InvalidSchemaError(
                f"there is no table {table!r} in the database, and the option sink.<name>.create is false.",
                fix="create the table, correct sink.<name>.table, or set sink.<name>.create=true.",
            ) from error
    for column in found.columns:
        if isinstance(column.type, sa.JSON):
            column.type.none_as_null = True  # write null as SQL's NULL, not as JSON's null
    types.check(rows, found, keys)
    with autocommit(engine) as connection:
        refuse_without_rollback(connection, table)
    return found


def refuse_without_rollback(connection: Any, table: str) -> None:
    """Raises if a MySQL table has a storage engine without transactions, such as MyISAM or Aria.

    Raises:
        InvalidSchemaError: if so; the message names the engine.
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
            fix=f"run ALTER TABLE {table} ENGINE = InnoDB.",
        )


def dry_run(engine: Any, work: Callable[[Any], None], table: str) -> None:
    """Calls `work` in a transaction, checks all constraints, and rolls the transaction back.

    Args:
        engine: SQLAlchemy engine.
        work: writes rows to a connection.
        table: name of the table that it writes to.

    Raises:
        sqlalchemy.exc.DBAPIError: if the database refuses the rows, as it would at the commit.
        SinkFailedError: if a row violates a foreign key in SQLite.
    """
    with engine.connect() as connection, connection.begin() as transaction:
        work(connection)
        if statement := _CHECK_NOW.get(connection.dialect.name):
            connection.exec_driver_sql(statement)
        if connection.dialect.name == "sqlite":
            _check_foreign_keys(connection, table)
        transaction.rollback()


def _check_foreign_keys(connection: Any, table: str) -> None:
    """Checks deferred foreign keys in SQLite, which otherwise checks them only at the commit.

    SQLite reads the whole table for the check.

    Raises:
        SinkFailedError: if a row violates a foreign key.
    """
    definition = "SELECT upper(sql) FROM sqlite_master WHERE name = ?"
    defined = str(connection.exec_driver_sql(definition, (table,)).scalar())
    if "DEFERRED" not in defined or not connection.exec_driver_sql("PRAGMA foreign_keys").scalar():
        return
    quoted = connection.dialect.identifier_preparer.quote_identifier(table)
    broken = connection.exec_driver_sql(f"PRAGMA foreign_key_check({quoted})").first()
    if broken is not None:
        raise SinkFailedError(
            f"a row of the table {table!r} violates a foreign key: the table {broken[2]!r} has no such row.",
            fix=FIX,
        )
