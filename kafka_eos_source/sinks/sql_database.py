"""The table that receives the rows: connections, types, creation and checks."""

from __future__ import annotations

import datetime
import decimal
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidSchemaError,
)
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.table_columns import matching
from kafka_eos_source.sinks.targets import not_writable

#: Keys of `Table.info`: whether nested values are sent as the text of a JSON document; whether rows must not
#: be sent by COPY.
JSON_AS_TEXT, TAKES_NO_COPY = "json_as_text", "takes_no_copy"
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


def check_columns(schema: pa.Schema, table: Any, keys: Sequence[str], dialect: Any) -> None:
    """Checks that rows of a schema fit a table.

    Args:
        schema: schema of the rows.
        table: SQLAlchemy table, as loaded from the database.
        keys: key columns of an upsert.
        dialect: SQLAlchemy dialect of the database.

    Raises:
        InvalidSchemaError: if they do not fit; the message names the column and both types.
    """
    missing = [name for name in schema.names if name not in table.columns]
    if missing:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(repr(column.name) for column in table.columns)}.",
            fix="add it to the table, rename it in the frame, or choose columns with sink.<name>.columns.",
        )
    for field in schema:
        _check_type(field, table)
        if is_text(field.type) and (keys or dialect.name != "postgresql"):
            _check_driver_takes_text(field, table, dialect)
    generated = [name for name in schema.names if table.columns[name].computed is not None]
    if generated:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} computes the column {', '.join(map(repr, generated))} itself, and "
            "accepts no values for it.",
            fix="exclude the column with sink.<name>.columns.",
        )
    left_out = [
        column.name
        for column in table.columns
        if column.key not in schema.names and not column.nullable and not _fills_itself(column)
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
    sa, kind = sqlalchemy(), without_domain(table.columns[field.name].type)
    if pa.types.is_nested(field.type) and isinstance(kind, sa.JSON):
        return
    if is_text(field.type) and isinstance(kind, sa.LargeBinary | sa.types._Binary):
        raise _wrong_type(field, table)
    try:
        found = kind.python_type
    except NotImplementedError:
        return  # a type that only this database has; the database checks the values
    accepted = _accepted(field.type)
    if accepted and not issubclass(found, tuple(accepted)):
        raise _wrong_type(field, table)


def _check_driver_takes_text(field: pa.Field, table: Any, dialect: Any) -> None:
    """Refuses text for a type of which the driver takes Python's objects only, such as dates of SQLite."""
    convert = table.columns[field.name].type.dialect_impl(dialect).bind_processor(dialect)
    try:
        if convert is not None:
            convert("")
    except TypeError:
        raise _wrong_type(field, table) from None
    except ValueError:
        return


def _wrong_type(field: pa.Field, table: Any) -> InvalidSchemaError:
    return InvalidSchemaError(
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


def without_domain(kind: Any) -> Any:
    """Returns the type that a domain of Postgres stands for; any other type as it is."""
    while getattr(kind, "data_type", None) is not None:
        kind = kind.data_type
    return kind


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

#: Parameters of libpq, unless the URL sets them. They detect a lost network within half a minute, both while
#: waiting for an answer (keep-alive) and while sending.
_LIBPQ = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_CONNECT_SECONDS = 10
#: Databases whose JSON columns receive the text of a document. SQLAlchemy would encode the text once more.
_JSON_AS_TEXT = frozenset({"postgresql", "sqlite", "mysql", "mariadb"})
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
    arguments = {"json_serializer": _json_text} if sa_url.get_backend_name() in _JSON_AS_TEXT else {}
    try:
        engine = sa.create_engine(
            sa_url,
            poolclass=sa.pool.QueuePool,
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
            connect_args={name: n for name, n in parameters.items() if name not in sa_url.query},
            **arguments,
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


def _json_text(value: Any) -> str:
    """Returns a value for a JSON column; a text is the text of a document."""
    return value if isinstance(value, str) else json.dumps(value)


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
        engine, table, schema, rows: as in `create_table_for`.
        keys: key columns of an upsert.

    Returns:
        The SQLAlchemy table. The ``key`` of each column is its name in the frame.

    Raises:
        InvalidSchemaError: if the table does not exist, cannot hold the rows, or has no transactions.
    """
    sa = sqlalchemy()
    with autocommit(engine) as connection:

        def load(**arguments: Any) -> Any:
            return sa.Table(table, sa.MetaData(), schema=schema, autoload_with=connection, **arguments)

        try:
            found = load()
            if renamed := _names_in_frame(rows, found):

                def rename(_inspector: Any, _table: Any, column: Any) -> None:
                    column["key"] = renamed.get(column["name"], column["name"])

                found = load(listeners=[("column_reflect", rename)])
        except sa.exc.NoSuchTableError as error:
            raise no_table(table) from error
    for column in found.columns:
        if isinstance(column.type, sa.JSON):
            column.type.none_as_null = True  # write null as SQL's NULL, not as JSON's null
    check_columns(rows, found, keys, engine.dialect)
    with autocommit(engine) as connection:
        refuse_without_rollback(connection, table)
        found.info[JSON_AS_TEXT] = connection.dialect.name in _JSON_AS_TEXT
        found.info[TAKES_NO_COPY] = _takes_no_copy(connection, found)
    return found


def _names_in_frame(rows: pa.Schema, table: Any) -> dict[str, str]:
    """Returns how the frame spells columns of a table whose names differ from it in letter case.

    Raises:
        InvalidSchemaError: if a column of the frame may be several of the table, or the other way round.
    """
    names = [column.name for column in table.columns]
    found, problems = matching(rows.names, names)
    in_frame = {target: name for name, target in found.items()}
    same = [name for name, target in found.items() if in_frame[target] != name]
    problems += [
        f"the columns {name!r} and {in_frame[found[name]]!r} are both {found[name]!r}" for name in same
    ]
    if problems:
        raise InvalidSchemaError(
            f"the table {table.fullname!r} cannot hold the frame, because letter case does not tell its "
            f"columns apart: {'; '.join(problems)}.",
            fix="rename a column of the frame to the exact name in the table, or exclude it with "
            "sink.<name>.columns.",
        )
    return {target: name for target, name in in_frame.items() if target != name}


def _takes_no_copy(connection: Any, table: Any) -> bool:
    """Returns whether Postgres refuses COPY to a table: a view, or one with row-level security."""
    if connection.dialect.name != "postgresql":
        return False
    name = connection.dialect.identifier_preparer.format_table(table)
    statement = sqlalchemy().text(
        "SELECT relkind = 'v' OR row_security_active(oid) FROM pg_class WHERE oid = to_regclass(:name)"
    )
    return bool(connection.execute(statement, {"name": name}).scalar())


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
