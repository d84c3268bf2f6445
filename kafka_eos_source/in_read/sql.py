"""Runs a SQL text on Arrow batches in the reading task, by DuckDB.

`compile_sql` checks the text before the query starts: the engine resolves its names and types, and
`sql_check` refuses what is not the same for every division of the input into batches. The result,
`SqlTransform`, travels to the tasks.

A row that fails, such as a cast of text that is no number, is an error of that row alone: a query of its own
finds such rows where that is possible (`Engine.failing`), or the batch is divided until they stand alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as spark

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, InvalidSqlError
from kafka_eos_source.in_read.sql_check import SqlText, check, input_first, selected
from kafka_eos_source.in_read.sql_engine import (
    IN_ORDER,
    LARGEST_RESULT_BYTES,
    RESERVED,
    Engine,
    Rows,
    engine_of,
    joined,
    require_engine,
    short,
)
from kafka_eos_source.in_read.sql_order import KeyedOrder
from kafka_eos_source.options.table import LEAST_SQL_MEMORY_BYTES, SQL_MEMORY, SQL_MEMORY_BYTES
from kafka_eos_source.spark.arrow import arrow_schema, fit

#: The most that all static tables of a text may take together. They travel to each task.
LARGEST_TABLES_BYTES = 8 << 20

#: The most that the results for the parts of one batch may take together, in units of the memory limit.
_LARGEST_RESULTS = 4


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
        copies: columns of the result that the text selects unchanged: names in the result and in the input.
        failing: what the engine runs to find the rows that fail; None if only trying can show them.
        is_exact: whether ``failing`` finds these and no others.
        tables: each static table as an Arrow stream.
        table_digests: a hash of the columns and rows of each static table, whatever their order.
        time_zone: time zone of the text, such as ``Europe/Berlin``.
        memory_bytes: the most memory of the engine.
    """

    text: str
    name: str
    input: spark.StructType
    rows: spark.StructType
    query: str = field(repr=False)
    keys: int
    copies: Mapping[str, str]
    failing: str | None = field(repr=False)
    is_exact: bool
    tables: Mapping[str, bytes] = field(repr=False)
    table_digests: Mapping[str, str]
    time_zone: str
    memory_bytes: int

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the fields, and not what was computed from them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __call__(
        self, batch: pa.RecordBatch, *, only_first: bool = False
    ) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        """Returns the result for a batch, and a text for each of its rows that failed.

        The rows of the result are in the order of the input rows from which they come.

        Args:
            batch: the rows.
            only_first: whether one failing row is enough, because an error makes the result useless.

        Raises:
            InvalidSqlError: if the engine fails for another reason than a row.
        """
        engine = engine_of(self)
        batch = fit(batch, self.input_schema, "the step before the SQL text returned")
        good, numbers, errors = _valid_text(batch)
        parts, size = [], 0
        with engine.lock:
            for each in () if errors and only_first else engine.parts(good, numbers, errors, only_first):
                parts.append(each)
                size += each.nbytes
                if size > min(_LARGEST_RESULTS * self.memory_bytes, LARGEST_RESULT_BYTES):
                    raise InvalidSqlError(
                        f"the result of the SQL text for {batch.num_rows:,} records needs more than "
                        f"{_LARGEST_RESULTS} times the memory that {SQL_MEMORY!r} allows "
                        f"({self.memory_bytes:,} bytes), or more than 2 GiB.",
                        fix="return fewer or smaller rows for each record, or raise the option.",
                    )
        return joined(parts, self.schema), dict(sorted(errors.items()))

    @cached_property
    def input_schema(self) -> pa.Schema:
        """Arrow schema of the input."""
        return arrow_schema(self.input)

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the result."""
        return arrow_schema(self.rows)

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides about the result: text, input, time zone, and content of the tables."""
        parts = [self.text, self.name, self.input.jsonValue(), self.time_zone, self.table_digests]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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
            f"the SQL text is {short(repr(text))}; expected a SELECT.",
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
    _check_types(rows, name)
    draft = SqlTransform(
        text=text,
        name=name,
        input=rows,
        rows=spark.StructType(),
        query=text,
        keys=0,
        copies={},
        failing=None,
        is_exact=False,
        tables={each: _to_bytes(table) for each, table in static.items()},
        table_digests={},
        time_zone=time_zone,
        memory_bytes=memory_bytes,
    )
    with closing(Engine(draft)) as engine:
        return _compiled(engine, draft, static)


def _compiled(engine: Engine, draft: SqlTransform, static: Mapping[str, pa.Table]) -> SqlTransform:
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
    on_tables = engine.text_of(input_first(tree, checked.of_input)) if static else None
    query, keys = engine.text_of(tree), 0
    operators = engine.operators(query)
    failing, is_exact = engine.failing(tree)
    if not operators <= IN_ORDER:
        lower = frozenset(each.lower() for each in known)
        order = KeyedOrder(text, draft.name, lower, checked.of_input, engine.tree_of, engine.binds)
        keys = order.add(tree)
        query = engine.text_of(tree)
    copies = selected(tree, draft.name, columns, names)
    digests = {each: engine.digest(each) for each in sorted(static)}
    found = replace(
        draft,
        rows=rows,
        query=query,
        keys=keys,
        copies=copies,
        failing=failing,
        is_exact=is_exact and "UNNEST" not in operators,
        table_digests=digests,
    )
    with closing(Engine(found)) as final:
        final.try_without_rows(text)
        final.check_constants(query, text)
    if on_tables is not None:
        with closing(Engine(draft, as_written=True)) as trial:
            trial.try_tables(on_tables, text)
    return found


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
        _check_values(each, table)
        found[each] = table
    size = sum(table.nbytes for table in found.values())
    if size > LARGEST_TABLES_BYTES:
        raise InvalidOptionError(
            f"the static tables {', '.join(found)} have {size:,} bytes; expected at most "
            f"{LARGEST_TABLES_BYTES:,}, because they travel to each task.",
            fix="keep only the columns and rows that the text needs, or join a larger table with Spark.",
        )
    return found


def _check_values(name: str, table: pa.Table) -> None:
    """Checks that Python has all values of a static table, for its digest."""
    for column in table.column_names:
        try:
            table.column(column).to_pylist()
        except (ArithmeticError, ValueError) as error:  # a year after 9999, or a string that is not UTF-8
            raise InvalidOptionError(
                f"the static table {name!r} has a value in column {column!r} that is not supported: {error}.",
                fix="correct the value, make it null, or drop the column.",
            ) from error


def _check_columns(names: Sequence[str], where: str) -> None:
    seen: dict[str, str] = {}
    for each in names:
        lower = each.lower()
        if not each or lower.startswith(RESERVED) or lower == "rowid":
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


def _check_types(rows: spark.StructType, name: str) -> None:
    """Checks that the engine gets values as they are: Arrow has the bytes of a VARIANT as a struct."""
    for column in rows:
        pending: list[spark.DataType] = [column.dataType]
        while pending:
            each = pending.pop()
            if isinstance(each, spark.VariantType):
                raise InvalidSchemaError(
                    f"column {column.name!r} of the input {name!r} has the type "
                    f"{column.dataType.simpleString()}, and DuckDB would get the bytes of a VARIANT.",
                    fix="convert it to text before, with to_json(), or drop it.",
                )
            if isinstance(each, spark.StructType):
                pending += [inner.dataType for inner in each]
            elif isinstance(each, spark.ArrayType):
                pending.append(each.elementType)
            elif isinstance(each, spark.MapType):
                pending += [each.keyType, each.valueType]


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
    "hugeint": "BIGINT",
    "uhugeint": "DECIMAL(38, 0)",
    "bignum": "DECIMAL(38, 0)",
    "utinyint": "SMALLINT",
    "usmallint": "INTEGER",
    "uinteger": "BIGINT",
    "ubigint": "DECIMAL(20, 0)",
    "timestamp_s": "TIMESTAMP",
    "timestamp_ms": "TIMESTAMP",
    "timestamp_ns": "TIMESTAMP",
    "null": "a type, such as VARCHAR",
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
    whole = table.replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as stream:
        stream.write_table(whole)
    return bytes(sink.getvalue())


def _valid_text(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Rows, dict[int, str]]:
    """Returns the rows of a batch whose strings are UTF-8, their numbers, and an error for each other row.

    Spark does not check bytes that it casts to a string, and the engine relies on it.
    """
    errors: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row in _not_text(column, 0):
            errors.setdefault(row, f"column {name!r} has a string that is not UTF-8")
    numbers = np.arange(batch.num_rows, dtype=np.int64)
    if not errors:
        return batch, numbers, errors
    numbers = np.delete(numbers, list(errors))
    return batch.take(pa.array(numbers)), numbers, errors


def _not_text(column: pa.Array, first: int) -> Iterator[int]:
    """Yields the rows of a column with strings that are not UTF-8; `first` is the number of its first row."""
    try:
        column.validate(full=True)
        return
    except pa.ArrowInvalid:
        # strings inside a list or a struct are shared with the rows around a slice
        column = column.take(pa.array(np.arange(len(column))))
    if len(column) > 1:
        half = len(column) // 2
        yield from _not_text(column.slice(0, half), first)
        yield from _not_text(column.slice(half), first + half)
        return
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        yield first
