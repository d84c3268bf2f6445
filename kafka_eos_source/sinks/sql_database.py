"""The table that receives the rows: connections, types, creation and checks, and how rows are written."""

from __future__ import annotations

import datetime
import decimal
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    SinkFailedError,
)
from kafka_eos_source.sinks.formats import texts
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.targets import not_writable

#: Length of text columns in a primary key, because some databases cannot index text of unlimited length.
_KEY_CHARACTERS = 255


def sqlalchemy() -> Any:
    """Imports SQLAlchemy.

    Raises:
        InvalidOptionError: if it is not installed.
    """
    return require("sqlalchemy", "database")


def sql_type(arrow: pa.DataType, *, key: bool) -> Any:
    """Returns the SQL type that can hold every value of an Arrow type.

    Args:
        arrow: Arrow type of the column.
        key: whether the column belongs to the primary key.

    Raises:
        InvalidSchemaError: if no SQL type can.
    """
    sa = sqlalchemy()
    mysql = require("sqlalchemy.dialects.mysql", "database")
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


def check_columns(schema: pa.Schema, table: Any, keys: Sequence[str]) -> None:
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


# -- connections and tables ----------------------------------------------------------------------

FIX = "correct the rows or the table, then restart the query."
#: Checks deferred constraints before the end of the transaction. See `_check_foreign_keys` for SQLite.
_CHECK_NOW = dict.fromkeys(("postgresql", "cockroachdb", "oracle"), "SET CONSTRAINTS ALL IMMEDIATE")
#: Parameters of libpq, unless the URL sets them. They detect a lost network within half a minute, both while
#: waiting for an answer (keep-alive) and while sending.
_LIBPQ = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_CONNECT_SECONDS = 10
#: SQLAlchemy's names of the drivers of MySQL and MariaDB that take a ``connect_timeout``.
_MYSQL_DRIVERS = [f"{kind}+{driver}" for kind in ("mysql", "mariadb") for driver in ("pymysql", "mysqldb")]
#: MySQL and MariaDB would otherwise replace 0 in an AUTO_INCREMENT column by the next number, and, where an
#: administrator switched the strict mode off, shorten values that do not fit.
_MYSQL_MODES = "SET SESSION sql_mode = CONCAT(@@sql_mode, ',NO_AUTO_VALUE_ON_ZERO,STRICT_ALL_TABLES')"


def autocommit(engine: Any) -> Any:
    """Opens a connection in autocommit mode."""
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def new_engine(url: str, connect_seconds: int = _CONNECT_SECONDS) -> Any:
    """Creates an engine that keeps one connection and tests it before use.

    Keeping the connection matters, because connecting to MariaDB takes some 50 ms.

    Args:
        url: SQLAlchemy URL.
        connect_seconds: time limit for connecting to Postgres, MySQL or MariaDB, unless the URL states one.

    Raises:
        InvalidOptionError: if the URL is malformed, or the database's driver is not installed.
    """
    sa = sqlalchemy()
    sa_url = parsed_url(url)
    parameters: Mapping[str, int] = {}
    if sa_url.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        parameters = {**_LIBPQ, "connect_timeout": connect_seconds}
    elif sa_url.drivername in _MYSQL_DRIVERS:
        parameters = {"connect_timeout": connect_seconds}
    try:
        engine = sa.create_engine(
            sa_url,
            poolclass=sa.pool.QueuePool,
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
            connect_args={name: n for name, n in parameters.items() if name not in sa_url.query},
        )
    except sa.exc.ArgumentError as error:  # the dialect is unknown
        raise _invalid_url() from error
    except ImportError as error:
        raise InvalidOptionError(
            f"the Python driver of the database is not installed: {error}.",
            fix=f"run pip install {error.name} on Spark's driver.",
        ) from error
    if engine.dialect.name in ("mysql", "mariadb"):
        sa.event.listen(engine, "connect", _set_mysql_modes)
    return engine


def _set_mysql_modes(connection: Any, _record: Any) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(_MYSQL_MODES)


def parsed_url(url: str) -> Any:
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


def create_table(connection: Any, table: Any) -> None:
    """Creates a table unless it exists. Another process may create it at the same time."""
    errors = sqlalchemy().exc
    try:
        table.create(connection, checkfirst=True)
    except (errors.ProgrammingError, errors.OperationalError, errors.IntegrityError):
        if not sqlalchemy().inspect(connection).has_table(table.name, schema=table.schema):
            raise


def create_table_for(
    engine: Any, table: str, schema: str | None, rows: pa.Schema, keys: Sequence[str]
) -> None:
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
    with autocommit(engine) as connection:
        create_table(connection, define_table(table, schema, rows, keys))


def define_table(table: str, schema: str | None, rows: pa.Schema, keys: Sequence[str]) -> Any:
    """Returns a table for rows of an Arrow schema, as SQLAlchemy's definition; see `create_table_for`."""
    sa = sqlalchemy()
    columns = [
        sa.Column(
            field.name,
            sql_type(field.type, key=field.name in keys),
            primary_key=field.name in keys,
            autoincrement=False,  # SQLAlchemy's default makes a single integer key one that numbers itself
        )
        for field in rows
    ]
    return sa.Table(table, sa.MetaData(), *columns, schema=schema)


def load_table_for(engine: Any, table: str, schema: str | None, rows: pa.Schema, keys: Sequence[str]) -> Any:
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
            raise no_table(table) from error
    for column in found.columns:
        if isinstance(column.type, sa.JSON):
            column.type.none_as_null = True  # write null as SQL's NULL, not as JSON's null
    check_columns(rows, found, keys)
    with autocommit(engine) as connection:
        refuse_without_rollback(connection, table)
    return found


def no_table(table: str) -> InvalidSchemaError:
    """Returns the error for a table that does not exist, and that the sink must not create."""
    return InvalidSchemaError(
        f"there is no table {table!r} in the database, and the option sink.<name>.create is false.",
        fix="create the table, correct sink.<name>.table, or set sink.<name>.create=true.",
    )


def has_database_file(url: str) -> bool:
    """Returns whether a database exists that is a file; true for one on a server. Does not create the file.

    Args:
        url: SQLAlchemy URL.

    Raises:
        InvalidOptionError, UnavailableError: if the file of an SQLite database, or the folder in which it
            would be created, is not one or cannot be written.
    """
    sa_url = parsed_url(url)
    if sa_url.get_backend_name() != "sqlite":
        return True
    if not sa_url.database or sa_url.database.startswith(("file:", ":")):  # in memory, or not just a path
        return False
    path = os.path.abspath(sa_url.database)
    if not os.path.exists(path):
        if not os.path.isdir(os.path.dirname(path)):
            raise InvalidOptionError(
                f"the folder of the SQLite database {path!r} does not exist.",
                fix="create the folder, or correct the path in the URL.",
            )
        path = os.path.dirname(path)
    if not os.access(path, os.W_OK):
        raise not_writable(path, "this user has no right to write")
    return os.path.isfile(path)


def has_schema(connection: Any, schema: str) -> bool:
    """Returns whether a database schema exists; true if the database has its own rules for their names."""
    if connection.dialect.name not in ("postgresql", "mysql", "mariadb", "sqlite"):
        return True
    names = sqlalchemy().inspect(connection).get_schema_names()
    return schema.lower() in [each.lower() for each in names]


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


def refuse_without_right(connection: Any, table: Any, rights: Sequence[str]) -> None:
    """Raises if the user may not write to a table. Only Postgres can be asked without writing.

    Args:
        connection: SQLAlchemy connection.
        table: SQLAlchemy table, as loaded from the database.
        rights: names of the rights, such as ``INSERT``.

    Raises:
        AuthorizationError: if a right is missing.
    """
    if connection.dialect.name != "postgresql":
        return
    name = connection.dialect.identifier_preparer.format_table(table)
    statement = sqlalchemy().text("SELECT current_user, has_table_privilege(:name, :right)")
    for right in rights:
        user, is_granted = connection.execute(statement, {"name": name, "right": right}).one()
        if not is_granted:
            raise AuthorizationError(
                f"the user {user!r} of the database has no right to {right} into the table {name}.",
                fix=f"run GRANT {', '.join(rights)} ON {name} TO {user}.",
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


# -- rows ----------------------------------------------------------------------------------------


def write_rows(
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
        insert = require(f"sqlalchemy.dialects.{dialect}", "database").insert(table)
        changes = {name: insert.excluded[name] for name in names if name not in keys}
        if changes:
            return insert.on_conflict_do_update(index_elements=list(keys), set_=changes)
        return insert.on_conflict_do_nothing(index_elements=list(keys))
    if dialect in ("mysql", "mariadb"):
        insert = require("sqlalchemy.dialects.mysql", "database").insert(table)
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
