"""DuckDB in a task: opened once for each text in each process, and locked to computing.

The engine has one thread, a limit of memory, and no access to files, the network, the environment or
settings. Before a query starts, it also parses the text for `sql_check`, and resolves its names and types.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, InvalidSqlError
from kafka_eos_source.in_read.sql_check import AGGREGATE, Functions, SqlText
from kafka_eos_source.in_read.sql_order import KEY
from kafka_eos_source.options.table import SQL_MEMORY
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.spark.arrow import arrow_schema

if TYPE_CHECKING:
    import duckdb

    from kafka_eos_source.in_read.sql import SqlTransform

#: Prefix of names that this package gives to columns of its own.
RESERVED = "__kafka_eos"

#: Rows of the result that the engine hands over at a time. The size of the result is checked in between.
_RESULT_ROWS = 1 << 16

#: The most that a result may take whatever the limit of memory is: a column of text holds no more.
LARGEST_RESULT_BYTES = 2**31 - 1

#: Numbers of rows.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_SHOWN = 300

#: Rows of a batch that are tried alone to learn their errors, if a query names those that fail exactly.
_TRIED = 10

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
IN_ORDER = frozenset({"PROJECTION", "FILTER", "UNNEST", "PYTHON_ARROW_SCAN", "EMPTY_RESULT"})


#: The cast of a constant in a plan, and the constant.
_CAST_OF_CONSTANT = re.compile(r"(?<!\w)(CAST\(('(?:[^']|'')*') AS [A-Z][A-Z0-9_ (),]*?\))")


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


#: The functions of the engine, once they are known.
_FUNCTIONS: list[Functions] = []

#: Expressions that cannot fail.
_NEVER_FAIL = frozenset({"COLUMN_REF", "STAR", "CONSTANT"})


def _arguments(tried: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments in ``TRY(ROW(…))``."""
    found: list[Any] = tried["children"][0]["arguments"]
    return found


class _FailedError(Exception):
    """The engine did not return the result for a batch.

    Attributes:
        text: what it says.
        of_memory: whether it, or the result, needs more memory than allowed.
        is_broken: whether the engine must be opened again.
    """

    def __init__(self, text: str, *, of_memory: bool = False, is_broken: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.of_memory = of_memory
        self.is_broken = is_broken

    @classmethod
    def of(cls, error: Exception) -> _FailedError:
        """Returns what an exception of the engine, or of the Arrow stream of its result, means."""
        kind = str(_details(error).get("exception_type") or type(error).__name__).lower()
        broken = kind.startswith(("internal", "fatal"))
        return cls(_message(error), of_memory=kind.startswith(("out of memory", "outof")), is_broken=broken)


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
        self.empty = _empty(schema)
        self.set(self.empty)

    def set(self, batch: pa.RecordBatch) -> None:
        """Sets the batch to read next."""
        if self._numbered:
            rows = pa.py_buffer(np.arange(batch.num_rows, dtype=np.int64))
            numbers = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, rows])
            columns = [*batch.columns, numbers]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._batch = batch

    def __arrow_c_schema__(self) -> object:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._batch.__arrow_c_stream__()


class Engine:
    """DuckDB in memory, with the static tables and the input of one text.

    Args:
        step: the text.
        as_written: whether the engine joins in the order of the text, and reads the right side of each join
            even if the left side has no rows.

    Attributes:
        lock: its user must hold it, because a connection runs one query at a time.
    """

    def __init__(self, step: SqlTransform, *, as_written: bool = False) -> None:
        self.step = step
        self._more = {"disabled_optimizers": "join_order,build_side_probe_side"} if as_written else {}
        self.lock = threading.Lock()
        self.connection = self._opened()
        self.empty = self.source.empty
        self._relation: duckdb.DuckDBPyRelation | None = None

    def _opened(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        step = self.step
        self.source = _Source(arrow_schema(step.input), numbered=step.keys > 0)
        config = {**_CONFIG, **self._more, "memory_limit": f"{step.memory_bytes}B"}
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
                connection.register(f"{RESERVED}_table", table)
                # a table has no order of its own: the same rows give the same result
                rows = f"SELECT * FROM {RESERVED}_table ORDER BY ALL"
                connection.sql(f"CREATE TABLE {_quoted(name)} AS {rows}")
            except duckdb.Error as error:
                raise InvalidSchemaError(
                    f"DuckDB cannot read the static table {name!r}: {_message(error)}.",
                    fix="drop the column, or cast it to another type.",
                ) from error
            connection.unregister(f"{RESERVED}_table")
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
        try:
            found = parse_json(written)
        except JsonError as error:
            raise text.error("its parts are nested too deeply", "simplify it.") from error
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

    def digest(self, table: str) -> str:
        """Returns a hash of the columns and rows of a static table, whatever the order of its rows."""
        row = f"{RESERVED}_row"
        columns = self._values(f"DESCRIBE {_quoted(table)}")
        rows = self._values(f"SELECT to_json({row})::VARCHAR FROM {_quoted(table)} AS {row}")
        content = json.dumps([[each[:2] for each in columns], sorted(rows)])
        return hashlib.sha256(content.encode()).hexdigest()

    def failing(self, tree: Mapping[str, Any]) -> tuple[str | None, bool]:
        """Returns a query that tells for each row of the input whether it fails, and whether that is exact.

        ``TRY`` of a row of values is null only if one of them fails. So the query tries what a SELECT
        computes of the input's columns alone. It is exact if the SELECT computes that for each row. Otherwise
        it may name rows that do not fail, because they find no partner. It may leave rows out, such as those
        for which a condition of a join fails. None if there is nothing to try.

        Args:
            tree: the text.
        """
        source, keeps_all = self._input_of(tree.get("from_table") or {})
        if tree["type"] != "SELECT_NODE" or source is None:
            return None, False
        values = [{**each, "alias": ""} for each in tree["select_list"] if each["class"] not in _NEVER_FAIL]
        alone = [each for each in values if self._failing(source, None, [each]) is not None]
        condition = tree.get("where_clause")
        if condition is not None and self._failing(source, condition, ()) is None:
            condition, keeps_all = None, False
        return self._failing(source, condition, alone), keeps_all

    def _input_of(self, table: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
        """Returns the input in the tables of a SELECT, and whether they keep each of its rows.

        It is None if the tables do not begin with it.
        """
        keeps_all = True
        while table.get("type") == "JOIN":
            keeps_all = keeps_all and table["join_type"] == "LEFT"
            table = table["left"]
        is_input = table.get("type") == "BASE_TABLE" and table["table_name"].lower() == self.step.name.lower()
        return (table, keeps_all) if is_input else (None, False)

    def _failing(
        self, source: Mapping[str, Any], condition: Mapping[str, Any] | None, values: Sequence[Any]
    ) -> str | None:
        """Returns a query that tries a condition, and values where it is true; None if there is none."""
        import duckdb

        if condition is None and not values:
            return None
        row = self.tree_of(
            "SELECT CASE WHEN TRY(ROW(true)) IS NULL THEN true WHEN TRY(true) THEN TRY(ROW(1)) IS NULL "
            "ELSE false END AS failing FROM x"
        )
        row["from_table"] = source
        [chosen] = row["select_list"]
        first, second = chosen["case_checks"]
        if condition is not None:
            _arguments(first["when_expr"]["children"][0])[:] = [{"expression": condition}]
            second["when_expr"]["children"] = [condition]
        if values:
            template = _arguments(second["then_expr"]["children"][0])
            template[:] = [{**template[0], "expression": each} for each in values]
        query = self.text_of(row)
        try:
            self.connection.sql(query)
        except duckdb.Error:
            return None
        return query

    def functions(self) -> Functions:
        """Returns the functions of the engine."""
        if not _FUNCTIONS:
            query = "SELECT DISTINCT lower(function_name), function_type, stability FROM duckdb_functions()"
            _FUNCTIONS.append(Functions.of(self._values(query)))
        return _FUNCTIONS[0]

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

    def _plan(self, query: str) -> Iterator[Mapping[str, Any]]:
        """Yields the operators in the plan of a query."""
        pending = list(parse_json(self._values(f"EXPLAIN (FORMAT json) {query}")[0][1]))
        while pending:
            each = pending.pop()
            yield each
            pending += each.get("children", ())

    def operators(self, query: str) -> set[str]:
        """Returns the names of the operators in the plan of a query."""
        return {str(each["name"]).strip() for each in self._plan(query)}

    def check_constants(self, query: str, text: SqlText) -> None:
        """Checks the constants that conditions compare with columns of another type.

        The engine leaves the cast of a constant in the plan only if it fails; it would fail for each record.

        Args:
            query: the text, or what the engine runs in its place.
            text: the text, for the error.

        Raises:
            InvalidSqlError: if a constant does not fit.
        """
        import duckdb

        for operator in self._plan(query):
            shown = "\n".join(_texts(operator.get("extra_info")))
            for cast, constant in () if "TRY(" in shown else _CAST_OF_CONSTANT.findall(shown):
                try:
                    self._values(f"SELECT {cast}")
                except duckdb.Error as error:
                    raise text.error(
                        f"the constant {constant} does not fit, whatever the records: {_message(error)}",
                        "correct the constant, or cast the column that it is compared with to VARCHAR.",
                    ) from error

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
        except (duckdb.Error, _FailedError) as error:
            failed = error if isinstance(error, _FailedError) else _FailedError.of(error)
            if RESERVED in failed.text:  # it names our columns, which are in no aggregate
                raise text.error("an aggregate takes a column of the input", AGGREGATE) from error
            raise text.error(f"it fails without any row: {failed.text}", "correct the text.") from error
        if result.num_rows:
            raise text.error(
                f"it returns {result.num_rows} row(s) for a batch without records; these would come once for "
                "each batch",
                "let each row come from a row of the input.",
            )

    def try_tables(self, query: str, text: SqlText) -> None:
        """Tries what a text computes of the static tables alone, such as a cast of a column to join by.

        In a task, such an error would come with each record. Without rows of the input, only the static
        tables can be its cause.

        Args:
            query: the text, with the input on the left side of each join. The engine must join `as_written`.
            text: the text, for the error.

        Raises:
            InvalidSqlError: if it fails.
        """
        import duckdb

        try:
            found = self.connection.sql(query)
        except duckdb.Error:  # the sides of a join cannot be exchanged in this text
            return
        try:
            found.fetchall()
        except duckdb.Error as error:
            failed = _FailedError.of(error)
            if failed.of_memory:  # in a task, the engine may join in another order
                return
            raise text.error(
                f"it fails on the static tables, whatever the records: {failed.text}",
                "correct the values of the static table; or convert them in the text, where TRY_CAST(… AS …) "
                "makes null of a value that does not fit.",
            ) from error

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
            _FailedError: if the engine fails, or the result is larger than the limit of memory.
        """
        import duckdb

        found: list[pa.RecordBatch] = []
        size = 0
        self.source.set(batch)
        try:
            with self.relation.to_arrow_reader(_RESULT_ROWS) as reader:  # closed, it frees the connection
                for each in reader:
                    size += each.nbytes
                    if size > min(self.step.memory_bytes, LARGEST_RESULT_BYTES):
                        raise _FailedError("the result is too large", of_memory=True)
                    found.append(each)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise _FailedError.of(error) from error
        finally:
            self.source.set(self.empty)
        return joined(_in_order(found, self.step.keys), self.step.schema)

    def parts(
        self, batch: pa.RecordBatch, rows: Rows, errors: dict[int, str], only_first: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yields the results for the parts of a batch between the rows that fail.

        Args:
            batch: the batch.
            rows: number of each of its rows, for the errors.
            errors: the text for each row that fails; this method fills it.
            only_first: whether to stop at the first row that fails.

        Raises:
            InvalidSqlError: if the engine fails even without rows.
        """
        pending = [(batch, rows, self.step.failing)]
        tried = False
        while pending and not (only_first and errors):
            part, numbers, failing = pending.pop()
            if not part.num_rows:
                continue
            try:
                result = self.run(part)
            except _FailedError as error:
                if error.is_broken:
                    self.reset()
                if not tried:
                    self._without_rows(error)
                    tried = True
                if part.num_rows == 1:
                    errors[int(numbers[0])] = self._of_row(error)
                    continue
                good = None
                if failing and not error.of_memory:
                    good = self._good(part, numbers, errors, only_first)
                if good is not None:
                    pending.append((part.filter(pa.array(good)), numbers[good], None))
                    continue
                half = part.num_rows // 2
                pending.append((part.slice(half), numbers[half:], failing))
                pending.append((part.slice(0, half), numbers[:half], failing))
                continue
            yield result

    def _good(
        self, part: pa.RecordBatch, numbers: Rows, errors: dict[int, str], only_first: bool
    ) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Returns which rows of a batch do not fail, and adds the errors of those that do.

        One query names the rows, so that many of them do not cost as many divisions of the batch. The engine
        needs about 1 ms for the error of one row. So if the query is exact, only the first rows are tried,
        and the error of each further one names the first of these.

        Returns:
            None if that query fails itself, or mostly names rows that do not fail on their own.
        """
        import duckdb

        self.source.set(part)
        try:
            found = self.connection.sql(str(self.step.failing)).to_arrow_table()
        except duckdb.Error:
            return None
        finally:
            self.source.set(self.empty)
        bad: np.ndarray[Any, np.dtype[np.bool_]] = np.array(found.column(0).to_numpy(), bool)
        if len(bad) != part.num_rows or not bad.any():
            return None
        texts: dict[int, str] = {}
        innocent = 0
        for tried, row in enumerate(np.flatnonzero(bad).tolist()):
            if only_first and texts:
                break
            if self.step.is_exact and tried >= _TRIED:
                first = next(iter(texts.values()))
                texts[int(numbers[row])] = f"fails like others of its batch, of which the first: {first}"
                continue
            try:
                self.run(part.slice(row, 1))
            except _FailedError as error:
                if error.of_memory or error.is_broken:
                    return None
                texts[int(numbers[row])] = self._of_row(error)
            else:
                innocent += 1
                bad[row] = False
                if self.step.is_exact or innocent > _TRIED + len(texts):
                    return None
        errors.update(texts)
        good: np.ndarray[Any, np.dtype[np.bool_]] = np.logical_not(bad)
        return good if texts else None

    def _without_rows(self, error: _FailedError) -> None:
        """Checks that the rows are to blame for an error, and not the static tables or the engine."""
        try:
            self.run(self.empty)
        except _FailedError as found:
            raise InvalidSqlError(
                f"DuckDB cannot run the SQL text, even without any row: {self._of_row(found)} (before that: "
                f"{error.text}).\n    {short(self.step.text)}\n",
                fix=f"if it needs more memory, raise {SQL_MEMORY!r}; else correct the text or the static "
                "tables.",
            ) from found

    def _of_row(self, error: _FailedError) -> str:
        if error.of_memory:
            return f"needs more memory than {SQL_MEMORY!r} allows ({self.step.memory_bytes:,} bytes)"
        return error.text


_ENGINES: OrderedDict[tuple[int, str], Engine] = OrderedDict()
_ENGINES_LOCK = threading.Lock()
_MOST_ENGINES = 8


def engine_of(step: SqlTransform) -> Engine:
    """Returns the engine of this process for a step; opens it for the first batch."""
    key = (os.getpid(), f"{step.digest} {step.memory_bytes}")  # a forked process must not use its parent's
    with _ENGINES_LOCK:
        found = _ENGINES.get(key)
        if found is None:
            require_engine()
            found = _ENGINES[key] = Engine(step)
            while len(_ENGINES) > _MOST_ENGINES:
                _ENGINES.popitem(last=False)
        _ENGINES.move_to_end(key)
        return found


# ------------------------------------------------------------------ values and texts


def _in_order(batches: Sequence[pa.RecordBatch], keys: int) -> Sequence[pa.RecordBatch]:
    """Returns the rows in the order of the keys in the last columns, without the keys."""
    if not keys or not batches:
        return batches
    whole = pa.concat_batches(batches)
    names = whole.schema.names[-keys:]
    numbers = whole.column(names[0])  # not to_numpy(), which imports pandas
    first = np.frombuffer(numbers.buffers()[1], np.int64, len(numbers), numbers.offset * 8)
    kept = whole.select(range(whole.num_columns - keys))
    if np.all(first[1:] > first[:-1]):  # one row of the result for each row, and in order
        return [kept]
    order = pc.sort_indices(whole.select(names), sort_keys=[(name, "ascending") for name in names])  # stable
    return [kept.take(order)]


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    # not pa.array([]), which imports pandas: 0.2 s in a new process
    return pa.RecordBatch.from_arrays([pa.nulls(0, each.type) for each in schema], schema=schema)


def joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Returns batches as one, with the types of a schema."""
    if len(batches) == 1:
        whole = batches[0]
    elif batches:
        whole = pa.concat_batches(batches)
    else:
        return _empty(schema)
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
        found = parse_json(text[text.index("{") :])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


#: Functions of Spark that the engine lacks, or has for other arguments, and what to write.
OF_SPARK: Mapping[str, str] = {
    "date_format": "strftime(t, '%Y-%m-%d')",
    "explode": "unnest(items) AS item",
    "filter": "list_filter(items, lambda x: x > 1)",
    "from_unixtime": "to_timestamp(seconds)",
    "get_json_object": "doc ->> '$.a'",
    "isnotnull": "a IS NOT NULL",
    "isnull": "a IS NULL",
    "locate": "instr(s, 'part')",
    "named_struct": "{'a': a, 'b': b}",
    "nvl": "ifnull(a, b)",
    "nvl2": "CASE WHEN a IS NOT NULL THEN a ELSE b END",
    "sha2": "sha256(s)",
    "size": "len(items)",
    "struct": "{'a': a, 'b': b}",
    "substring_index": "split_part(s, ',', 1)",
    "timestamp_micros": "make_timestamp(n)",
    "timestamp_millis": "make_timestamp_ms(n)",
    "timestamp_seconds": "to_timestamp(seconds)",
    "to_date": "CAST(strptime(s, '%d.%m.%Y') AS DATE)",
    "to_timestamp": "strptime(s, '%d.%m.%Y')",
    "transform": "list_transform(items, lambda x: x + 1)",
    "unix_timestamp": "epoch(t)",
}


def _nearest(details: Mapping[str, Any], columns: set[str]) -> str:
    """Returns what to do about a name that the engine does not know."""
    wanted = str(details.get("name", "")).lower()
    hint = ""
    if details.get("error_subtype") in ("MISSING_ENTRY", "NO_MATCHING_FUNCTION") and wanted in OF_SPARK:
        return f"the dialect is DuckDB's, which has for it: {OF_SPARK[wanted]}."
    if details.get("error_subtype") == "MISSING_ENTRY":
        hint = str(details.get("candidates", "")).split(",", 1)[0].strip()
    if details.get("error_subtype") == "COLUMN_NOT_FOUND":
        names = {each.lower(): each for each in columns}
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = names[near[0]] if near else ""
        return (
            f"did you mean {hint!r}?"
            if hint
            else (f"the columns are {short(', '.join(sorted(columns)))}; a text stands in single quotes.")
        )
    return f"did you mean {hint!r}?" if hint else "correct the text, or add a CAST."


def _message(error: Exception) -> str:
    """Returns the first line of an error, without advice that does not apply here."""
    text = str(_details(error).get("exception_message") or error)
    return _first_line(text)


def _first_line(text: str) -> str:
    line = text.split("\n", 1)[0].split(" Use TRY(", 1)[0].strip().rstrip(".!")
    return short(line)


def short(text: str) -> str:
    """Returns a text with a limited length, for an error."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _texts(found: object) -> Iterator[str]:
    """Yields the texts in what the engine says of an operator."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from _texts(each)
    elif isinstance(found, str):
        yield found


def _quoted(name: str, quote: str = '"') -> str:
    return f"{quote}{name.replace(quote, quote * 2)}{quote}"
