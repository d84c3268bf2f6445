"""Runs a SQL text on Arrow batches in the reading task, by DuckDB.

`compile_sql` checks the text before the query starts: the engine resolves its names and types, and `check`
refuses what is not the same for every division of the input into batches. The result, `SqlTransform`,
travels to the tasks. Each process prepares it once, in an engine of its own with one thread, a limit of
memory, and no access to files, the network, the environment or settings.

A row that fails, such as a cast of text that is no number, is an error of that row alone: the batch is
divided until the rows that fail stand alone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, InvalidSqlError
from kafka_eos_source.in_read.sql_check import Functions, SqlText, check
from kafka_eos_source.in_read.sql_order import KEY, KeyedOrder
from kafka_eos_source.spark.arrow import arrow_schema, fit

if TYPE_CHECKING:
    import duckdb

#: Option with the most memory of the engine in one task, in bytes.
SQL_MEMORY = "sql.memory.bytes"
SQL_MEMORY_BYTES = 256 << 20
LEAST_SQL_MEMORY_BYTES = 32 << 20

#: The most that all static tables of a text may take together. They travel to each task.
LARGEST_TABLES_BYTES = 8 << 20

#: Prefix of names that this package gives to columns of its own.
_RESERVED = "__kafka_eos"

#: Rows of the result that the engine hands over at a time. The size of the result is checked in between.
_RESULT_ROWS = 1 << 16
_SHOWN = 300


@dataclass(frozen=True)
class SqlTransform:
    """Applies a SQL text to batches. `compile_sql` makes it.

    Attributes:
        text: the text, as the user wrote it.
        name: name of the input in the text.
        input: schema of the input.
        rows: schema of the result.
        query: what the engine runs.
        keys: how many columns at the end of its result say in which order its rows belong.
        tables: each static table as an Arrow stream.
        time_zone: time zone of the text, such as ``Europe/Berlin``.
        memory_bytes: the most memory of the engine.
    """

    text: str
    name: str
    input: spark.StructType
    rows: spark.StructType
    query: str = field(repr=False)
    keys: int
    tables: Mapping[str, bytes] = field(repr=False)
    time_zone: str
    memory_bytes: int

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the fields, and not what was computed from them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        """Returns the result for a batch, and a text for each of its rows that failed.

        The rows of the result are in the order of the input rows from which they come.

        Raises:
            InvalidSqlError: if the engine fails for another reason than a row.
        """
        engine = _engine(self)
        batch = fit(batch, arrow_schema(self.input), "the step before the SQL text returned")
        good, numbers, errors = _valid_text(batch)
        with engine.lock:
            parts = list(engine.parts(good, numbers, errors))
        return _joined(parts, self.schema), dict(sorted(errors.items()))

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the result."""
        return arrow_schema(self.rows)

    @cached_property
    def table_digests(self) -> Mapping[str, str]:
        """A hash of the schema and the content of each static table."""
        return {name: hashlib.sha256(each).hexdigest() for name, each in sorted(self.tables.items())}

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides about the result: text, input, time zone, and content of the tables."""
        return hashlib.sha256(
            json.dumps(
                [self.text, self.name, self.input.jsonValue(), self.time_zone, self.table_digests],
                sort_keys=True,
            ).encode()
        ).hexdigest()


def compile_sql(
    text: str,
    rows: spark.StructType,
    *,
    name: str = "batch",
    tables: Mapping[str, pa.Table] | None = None,
    time_zone: str = "UTC",
    memory_bytes: int = SQL_MEMORY_BYTES,
) -> SqlTransform:
    """Checks a SQL text, and returns what applies it to batches.

    Args:
        text: one SELECT that reads the input, in DuckDB's dialect.
        rows: schema of the input.
        name: name of the input in the text.
        tables: small static tables that the text may join, by the names that it uses.
        time_zone: time zone in which timestamps are read, shown and truncated.
        memory_bytes: the most memory of the engine in each task, in bytes, and of the result for one batch.

    Raises:
        InvalidOptionError: if DuckDB is not installed, or an argument is not usable.
        InvalidSqlError: if the text is wrong, or asks for what a step in the read cannot do.
        InvalidSchemaError: if the engine does not take a column, or Spark does not take one of the result.
    """
    require_engine()
    if not isinstance(text, str) or not text.strip():
        raise InvalidSqlError(
            f"the SQL text is {_short(repr(text))}; expected a SELECT.",
            fix=f"write a query such as SELECT * FROM {name}.",
        )
    if memory_bytes < LEAST_SQL_MEMORY_BYTES:
        raise InvalidOptionError(
            f"option {SQL_MEMORY!r} has the value {memory_bytes}; expected at least "
            f"{LEAST_SQL_MEMORY_BYTES}.",
            fix="set more, or remove it.",
        )
    static = _checked_tables(tables or {}, name)
    _check_columns(rows.names, f"the input {name!r}")
    draft = SqlTransform(
        text, name, rows, spark.StructType(), text, 0, {each: _to_bytes(static[each]) for each in static},
        time_zone, memory_bytes,
    )  # fmt: skip
    engine = _Engine(draft)
    try:
        return _compiled(engine, draft, static)
    finally:
        engine.close()


def _compiled(engine: _Engine, draft: SqlTransform, static: Mapping[str, pa.Table]) -> SqlTransform:
    text = SqlText(draft.text)
    tree = engine.tree(text)
    columns = draft.input.names
    with_columns = {each: table.column_names for each, table in static.items()}
    checked = check(tree, text, draft.name, columns, with_columns, engine.functions())
    known = {*columns, *(column for names in with_columns.values() for column in names)}
    names, types = engine.bind(draft.text, text, known)
    if checked.unnamed is not None:
        raise text.error("a column of the result has no name", "name it: … AS name.", checked.unnamed)
    _check_columns(names, "the result")
    rows = spark.StructType(
        [
            spark.StructField(each, _spark_type(kind, each, kind))
            for each, kind in zip(names, types, strict=True)
        ]
    )
    query, keys = engine.text_of(tree), 0
    if not engine.operators(query) <= _IN_ORDER:
        lower = frozenset(each.lower() for each in known)
        order = KeyedOrder(text, draft.name, lower, checked.of_input, engine.tree_of, engine.binds)
        keys = order.add(tree)
        query = engine.text_of(tree)
    found = replace(draft, rows=rows, query=query, keys=keys)
    final = _Engine(found)
    try:
        final.try_without_rows(text)
    finally:
        final.close()
    return found


def require_engine() -> None:
    """Checks that DuckDB is installed.

    Raises:
        InvalidOptionError: if it is not.
    """
    try:
        import duckdb
    except ImportError as error:
        raise InvalidOptionError(
            f"SQL in the read needs DuckDB 2, which is not installed: {error}.",
            fix="run pip install 'kafka-eos-source[sql]' on the driver and all executors, with Python 3.11 "
            "or newer.",
        ) from error
    if int(duckdb.__version__.split(".")[0]) < _ENGINE_VERSION:
        raise InvalidOptionError(
            f"SQL in the read needs DuckDB {_ENGINE_VERSION}; version {duckdb.__version__} is installed.",
            fix="run pip install --upgrade 'kafka-eos-source[sql]' on the driver and all executors, with "
            "Python 3.11 or newer.",
        )


# ------------------------------------------------------------------ arguments and types


def _checked_tables(tables: Mapping[str, pa.Table], name: str) -> dict[str, pa.Table]:
    found: dict[str, pa.Table] = {}
    for each, given in tables.items():
        clash = next((other for other in (name, *found) if other.lower() == each.lower()), None)
        if clash is not None:
            raise InvalidOptionError(
                f"the static table {each!r} has the same name as {clash!r}; names in SQL do not distinguish "
                "upper and lower case.",
                fix="rename it.",
            )
        try:
            table = given if isinstance(given, pa.Table) else pa.table(given)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise InvalidOptionError(
                f"the static table {each!r} is a {type(given).__name__}; expected a pyarrow.Table: {error}.",
                fix="pass a pyarrow.Table, such as pa.table({'code': […]}).",
            ) from error
        _check_columns(table.column_names, f"the static table {each!r}")
        found[each] = table
    size = sum(table.nbytes for table in found.values())
    if size > LARGEST_TABLES_BYTES:
        raise InvalidOptionError(
            f"the static tables {', '.join(found)} have {size:,} bytes; expected at most "
            f"{LARGEST_TABLES_BYTES:,}, because they travel to each task.",
            fix="keep only the columns and rows that the text needs, or join a larger table with Spark.",
        )
    return found


def _check_columns(names: Sequence[str], where: str) -> None:
    seen: dict[str, str] = {}
    for each in names:
        lower = each.lower()
        if not each or lower.startswith(_RESERVED) or lower == "rowid":
            raise InvalidSchemaError(
                f"{where} has a column named {each!r}, which SQL in the read reserves.",
                fix="choose another name.",
            )
        if lower in seen:
            raise InvalidSchemaError(
                f"{where} has the columns {seen[lower]!r} and {each!r}; names in SQL do not distinguish "
                "upper and lower case.",
                fix="rename or drop one of them: … AS name, or * EXCLUDE (name).",
            )
        seen[lower] = each


_SPARK_TYPES: Mapping[str, spark.DataType] = {
    "boolean": spark.BooleanType(),
    "tinyint": spark.ByteType(),
    "smallint": spark.ShortType(),
    "integer": spark.IntegerType(),
    "bigint": spark.LongType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "varchar": spark.StringType(),
    "blob": spark.BinaryType(),
    "date": spark.DateType(),
    "timestamp": spark.TimestampNTZType(),
    "timestamp with time zone": spark.TimestampType(),
}

#: Types of the engine that Spark has not, and what to write instead.
_CASTS: Mapping[str, str] = {
    "hugeint": "DECIMAL(38, 0)",
    "uhugeint": "DECIMAL(38, 0)",
    "bignum": "DECIMAL(38, 0)",
    "utinyint": "SMALLINT",
    "usmallint": "INTEGER",
    "uinteger": "BIGINT",
    "ubigint": "DECIMAL(20, 0)",
    "timestamp_s": "TIMESTAMP",
    "timestamp_ms": "TIMESTAMP",
    "timestamp_ns": "TIMESTAMP",
    "null": "the type that it shall have, such as VARCHAR",
}


def _spark_type(kind: Any, column: str, whole: Any) -> spark.DataType:
    """Returns Spark's type for one of the engine.

    Args:
        kind: the type, or a type within it.
        column: name of the column, for errors.
        whole: type of the column.

    Raises:
        InvalidSchemaError: if Spark has no such type.
    """
    found = str(kind.id)
    if found in _SPARK_TYPES:
        return _SPARK_TYPES[found]
    if found == "decimal":
        precision, scale = (value for _, value in kind.children)
        return spark.DecimalType(precision, scale)
    if found == "list":
        return spark.ArrayType(_spark_type(kind.children[0][1], column, whole))
    if found == "struct":
        parts = [spark.StructField(name, _spark_type(part, column, whole)) for name, part in kind.children]
        _check_columns([each.name for each in parts], f"the struct in column {column!r} of the result")
        return spark.StructType(parts)
    if found == "map":
        key, value = (_spark_type(part, column, whole) for _, part in kind.children)
        return spark.MapType(key, value)
    if found == "array":
        cast = f"{kind.children[0][1]}[]"
    elif found == "tuple":
        cast = "a struct with names, such as {'a': x, 'b': y}"
    else:
        cast = _CASTS.get(found, "VARCHAR")
    within = "" if kind is whole else f", which contains {kind}"
    raise InvalidSchemaError(
        f"column {column!r} of the result has the type {whole}{within}; Spark has no such type.",
        fix=f"cast it in the text to {cast}."
        if cast[0].islower()
        else f"write CAST(… AS {cast}) AS {column}.",
    )


def _to_bytes(table: pa.Table) -> bytes:
    """Returns a table as an Arrow stream; the same content gives the same bytes."""
    whole = table.replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as stream:
        stream.write_table(whole)
    return bytes(sink.getvalue())


# ------------------------------------------------------------------ the engine of a process

_ENGINE_VERSION = 2

#: What the engine may do: compute. Only the first settings need to be there when the database is opened.
_CONFIG: Mapping[str, Any] = {
    "threads": 1,
    "async_threads": 0,
    "temp_directory": "",
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,
    "allow_persistent_secrets": False,
    "preserve_insertion_order": True,
    "errors_as_json": True,
}
_SETTINGS = (
    "SET ieee_floating_point_ops = false",  # division by zero is an error, as in Spark
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


#: Operators that keep the order of the rows.
_IN_ORDER = frozenset({"PROJECTION", "FILTER", "UNNEST", "PYTHON_ARROW_SCAN", "EMPTY_RESULT"})


class _TooLargeError(Exception):
    """The result for a batch is larger than the limit of memory."""


class _Source:
    """What the engine reads as the input: the same stream object with another batch each time.

    Args:
        schema: schema of the batches.
        numbered: whether the engine also sees a column with the number of each row.
    """

    def __init__(self, schema: pa.Schema, *, numbered: bool) -> None:
        number = pa.field(f"{KEY}0", pa.int64())
        self._numbered = numbered
        self._schema = schema.append(number) if numbered else schema
        self.empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
        self.set(self.empty)

    def set(self, batch: pa.RecordBatch) -> None:
        """Sets the batch to read next."""
        if self._numbered:
            columns = [*batch.columns, pa.array(np.arange(batch.num_rows, dtype=np.int64))]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._batch = batch

    def __arrow_c_schema__(self) -> object:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._batch.__arrow_c_stream__()


class _Engine:
    """DuckDB in memory, with the static tables and the input of one text.

    Attributes:
        lock: its user must hold it, because a connection runs one query at a time.
    """

    def __init__(self, step: SqlTransform) -> None:
        self.step = step
        self.lock = threading.Lock()
        self.connection = self._opened()
        self.empty = self.source.empty
        self._relation: duckdb.DuckDBPyRelation | None = None

    def _opened(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        step = self.step
        self.source = _Source(arrow_schema(step.input), numbered=step.keys > 0)
        config = {**_CONFIG, "memory_limit": f"{step.memory_bytes}B"}
        connection = duckdb.connect(":memory:", config=config)
        try:
            connection.sql(f"SET TimeZone = {_quoted(step.time_zone, chr(39))}")
        except duckdb.Error as error:
            raise InvalidOptionError(
                f"the time zone of the session is {step.time_zone!r}, which DuckDB does not know: "
                f"{_message(error)}.",
                fix="set spark.sql.session.timeZone to the name of a zone, such as Europe/Berlin.",
            ) from error
        for each in _SETTINGS:
            connection.sql(each)
        for name, stream in step.tables.items():
            table = pa.ipc.open_stream(stream).read_all()
            try:
                connection.register(f"{_RESERVED}_table", table)
                connection.sql(f"CREATE TABLE {_quoted(name)} AS SELECT * FROM {_RESERVED}_table")
            except duckdb.Error as error:
                raise InvalidSchemaError(
                    f"DuckDB cannot read the static table {name!r}: {_message(error)}.",
                    fix="drop the column, or cast it to another type.",
                ) from error
            connection.unregister(f"{_RESERVED}_table")
        try:
            connection.register(step.name, self.source)
            connection.sql(f"SELECT * FROM {_quoted(step.name)}").fetchall()
        except (duckdb.Error, pa.ArrowException) as error:
            raise InvalidSchemaError(
                f"DuckDB cannot read the input {step.name!r} with the schema {step.input.simpleString()}: "
                f"{_message(error)}.",
                fix="select only columns that the text needs, or cast the column before.",
            ) from error
        return connection

    def close(self) -> None:
        self._relation = None
        self.connection.close()

    def reset(self) -> None:
        """Opens the engine again, after an internal error that leaves it unusable."""
        self.close()
        self.connection = self._opened()

    # -------------------------------------------------------------- before the query starts

    def tree(self, text: SqlText) -> dict[str, Any]:
        """Returns the syntax tree of the only statement of a text.

        Raises:
            InvalidSqlError: if the text is no SELECT, or more than one.
        """
        [[written]] = self._values("SELECT json_serialize_sql(?::VARCHAR)", [text.text])
        found = json.loads(written)
        if found.get("error"):
            if found.get("error_type") == "not implemented":
                raise text.error(f"{self._kind(text.text)} is not possible in the read", "write a SELECT.")
            at = found.get("position")
            raise text.error(
                _first_line(found.get("error_message", "")),
                'correct the text. It is DuckDB\'s dialect of SQL: see the page "SQL in the read".',
                None if at is None else int(at),
            )
        statements = found["statements"]
        if len(statements) != 1:
            raise text.error(
                f"it has {len(statements)} statements", "write one SELECT; a WITH may name its parts."
            )
        node: dict[str, Any] = statements[0]["node"]
        return node

    def tree_of(self, query: str) -> dict[str, Any]:
        """Returns the syntax tree of a query that this package wrote."""
        return self.tree(SqlText(query))

    def binds(self, tree: Mapping[str, Any]) -> bool:
        """Returns whether the names in a query have a meaning on their own."""
        import duckdb

        try:
            self.connection.sql(self.text_of(tree))
        except duckdb.Error:
            return False
        return True

    def _kind(self, text: str) -> str:
        import duckdb

        try:
            found = self.connection.extract_statements(text)[0].type.name
        except (duckdb.Error, IndexError):
            return "this statement"
        return "PIVOT" if found == "MULTI" else found.replace("_", " ")

    def text_of(self, tree: Mapping[str, Any]) -> str:
        """Returns a syntax tree as text."""
        whole = json.dumps({"error": False, "statements": [{"node": tree, "named_param_map": []}]})
        [[text]] = self._values("SELECT json_deserialize_sql(?::JSON)", [whole])
        return str(text)

    def functions(self) -> Functions:
        """Returns the functions of the engine."""
        return Functions.of(
            self._values(
                "SELECT DISTINCT lower(function_name), function_type, stability FROM duckdb_functions()"
            )
        )

    def _values(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        found: list[Any] = self.connection.sql(query, params=list(parameters) or None).fetchall()
        return found

    def bind(self, query: str, text: SqlText, known: set[str]) -> tuple[list[str], list[Any]]:
        """Returns the names and types of the columns of a query, without running it.

        Raises:
            InvalidSqlError: if it uses a name that is not there, or a type that does not fit.
        """
        import duckdb

        explain = "EXPLAIN "
        try:
            self.connection.execute(explain + query).fetchall()
            found = self.connection.sql(query)
        except duckdb.Error as error:
            details = _details(error)
            at = details.get("position")
            raise text.error(
                _message(error),
                _nearest(details, known),
                None if at is None else max(0, int(at) - len(explain)),
            ) from error
        return list(found.columns), list(found.types)

    def operators(self, query: str) -> set[str]:
        """Returns the names of the operators in the plan of a query."""
        pending = list(json.loads(self._values(f"EXPLAIN (FORMAT json) {query}")[0][1]))
        found = set()
        while pending:
            each = pending.pop()
            found.add(str(each["name"]).strip())
            pending += each.get("children", ())
        return found

    def try_without_rows(self, text: SqlText) -> None:
        """Tries the text on an empty batch, as a task will run it.

        Raises:
            InvalidSqlError: if it fails, or returns rows.
        """
        import duckdb

        try:
            found = self.relation
            if list(found.columns)[: len(found.columns) - self.step.keys] != self.step.rows.names:
                raise text.error(
                    f"the columns of the result would be {', '.join(found.columns)}", "name the columns."
                )
            result = self.run(self.empty)
        except duckdb.Error as error:
            raise text.error(f"it fails without any row: {_message(error)}", "correct the text.") from error
        if result.num_rows:
            raise text.error(
                f"it returns {result.num_rows} row(s) for a batch without records; these would come once for "
                "each batch",
                "let each row come from a row of the input.",
            )

    # -------------------------------------------------------------- batches

    @property
    def relation(self) -> duckdb.DuckDBPyRelation:
        """The query of the step, prepared."""
        if self._relation is None:
            self._relation = self.connection.sql(self.step.query)
        return self._relation

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the result for a batch.

        Raises:
            duckdb.Error: if the engine fails.
            _TooLargeError: if the result is larger than the limit of memory.
        """
        relation = self.relation
        found: list[pa.RecordBatch] = []
        size = 0
        self.source.set(batch)
        try:
            reader = relation.to_arrow_reader(_RESULT_ROWS)
            try:
                for each in reader:
                    size += each.nbytes
                    if size > self.step.memory_bytes:
                        raise _TooLargeError
                    found.append(each)
            finally:
                reader.close()  # else the connection stays in use
        finally:
            self.source.set(self.empty)
        return _joined(_in_order(found, self.step.keys), self.step.schema)

    def parts(
        self, batch: pa.RecordBatch, rows: Sequence[int], errors: dict[int, str]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the results for the parts of a batch between the rows that fail.

        Args:
            batch: the batch.
            rows: number of each of its rows, for the errors.
            errors: the text for each row that fails; this method fills it.

        Raises:
            InvalidSqlError: if the engine fails even without rows.
        """
        import duckdb

        pending = [(batch, rows)]
        tried = False
        while pending:
            part, numbers = pending.pop()
            if not part.num_rows:
                continue
            try:
                result = self.run(part)
            except (duckdb.Error, _TooLargeError) as error:
                if isinstance(error, (duckdb.FatalException, duckdb.InternalException)):
                    self.reset()
                if not tried:
                    self._without_rows(error)
                    tried = True
                if part.num_rows == 1:
                    errors[numbers[0]] = self._of_row(error)
                    continue
                half = part.num_rows // 2
                pending.append((part.slice(half), numbers[half:]))
                pending.append((part.slice(0, half), numbers[:half]))
                continue
            yield result

    def _without_rows(self, error: Exception) -> None:
        """Checks that the rows are to blame for an error, and not the static tables or the engine."""
        import duckdb

        try:
            self.run(self.empty)
        except (duckdb.Error, _TooLargeError) as found:
            raise InvalidSqlError(
                f"DuckDB cannot run the SQL text, even without any row: {self._of_row(found)} (before that: "
                f"{_message(error)}).\n    {_short(self.step.text)}\n",
                fix=f"if it needs more memory, raise {SQL_MEMORY!r}; else correct the text or the static "
                "tables.",
            ) from found

    def _of_row(self, error: Exception) -> str:
        import duckdb

        if isinstance(error, (duckdb.OutOfMemoryException, _TooLargeError)):
            return f"needs more memory than {SQL_MEMORY!r} allows ({self.step.memory_bytes:,} bytes)"
        return _message(error)


_ENGINES: OrderedDict[tuple[int, str], _Engine] = OrderedDict()
_ENGINES_LOCK = threading.Lock()
_MOST_ENGINES = 8


def _engine(step: SqlTransform) -> _Engine:
    """Returns the engine of this process for a step; opens it for the first batch."""
    key = (os.getpid(), f"{step.digest} {step.memory_bytes}")  # a forked process must not use its parent's
    with _ENGINES_LOCK:
        found = _ENGINES.get(key)
        if found is None:
            require_engine()
            found = _ENGINES[key] = _Engine(step)
            while len(_ENGINES) > _MOST_ENGINES:
                _ENGINES.popitem(last=False)
        _ENGINES.move_to_end(key)
        return found


# ------------------------------------------------------------------ values and texts


def _valid_text(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[int], dict[int, str]]:
    """Returns the rows of a batch whose strings are UTF-8, their numbers, and an error for each other row.

    Spark does not check bytes that it casts to a string, and the engine relies on it.
    """
    errors: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row in _not_text(column, 0):
            errors.setdefault(row, f"column {name!r} has a string that is not UTF-8")
    if not errors:
        return batch, range(batch.num_rows), errors
    numbers = [row for row in range(batch.num_rows) if row not in errors]
    return batch.take(pa.array(numbers, pa.int64())), numbers, errors


def _not_text(column: pa.Array, first: int) -> Iterator[int]:
    """Yields the rows of a column with strings that are not UTF-8; `first` is the number of its first row."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        if len(column) == 1:
            yield first
            return
        half = len(column) // 2
        yield from _not_text(column.slice(0, half), first)
        yield from _not_text(column.slice(half), first + half)


def _in_order(batches: Sequence[pa.RecordBatch], keys: int) -> Sequence[pa.RecordBatch]:
    """Returns the rows in the order of the keys in the last columns, without the keys."""
    if not keys or not batches:
        return batches
    whole = pa.concat_batches(batches)
    names = whole.schema.names[-keys:]
    first = whole.column(names[0]).to_numpy(zero_copy_only=False)
    kept = whole.select(range(whole.num_columns - keys))
    if np.all(first[1:] > first[:-1]):  # one row of the result for each row, and in order
        return [kept]
    order = pc.sort_indices(whole.select(names), sort_keys=[(name, "ascending") for name in names])  # stable
    return [kept.take(order)]


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Returns batches as one, with the types of a schema."""
    if len(batches) == 1:
        whole = batches[0]
    elif batches:
        whole = pa.concat_batches(batches)
    else:
        return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
    if whole.schema.equals(schema):
        return whole
    columns = [
        column if column.type.equals(each.type) else column.cast(each.type)
        for column, each in zip(whole.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _details(error: Exception) -> Mapping[str, Any]:
    """Returns what an error of the engine says, by the names that the engine uses."""
    text = str(error)
    try:
        found = json.loads(text[text.index("{") :])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _nearest(details: Mapping[str, Any], columns: set[str]) -> str:
    """Returns what to do about a name that the engine does not know."""
    wanted = str(details.get("name", "")).lower()
    hint = str(details.get("candidates", "")).split(",", 1)[0].strip()
    if details.get("error_subtype") == "COLUMN_NOT_FOUND":
        names = {each.lower(): each for each in columns}
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = names[near[0]] if near else ""
        return f"did you mean {hint!r}?" if hint else f"the columns are {_short(', '.join(sorted(columns)))}."
    return f"did you mean {hint!r}?" if hint else "correct the text."


def _message(error: Exception) -> str:
    """Returns the first line of an error, without advice that does not apply here."""
    text = str(_details(error).get("exception_message") or error)
    return _first_line(text)


def _first_line(text: str) -> str:
    line = text.split("\n", 1)[0].split(", or SET ", 1)[0].strip().rstrip(".!")
    return _short(line)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _quoted(name: str, quote: str = '"') -> str:
    return f"{quote}{name.replace(quote, quote * 2)}{quote}"
