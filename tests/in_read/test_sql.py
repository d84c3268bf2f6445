"""SQL in the read: its result does not depend on batches, what is refused says why, and rows fail alone."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings
from pyspark.sql import types as spark

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    InvalidSqlError,
    KafkaEosError,
)
from kafka_eos_source.in_read import sql, sql_engine
from kafka_eos_source.in_read.rows import MappedRows
from kafka_eos_source.in_read.sql import (
    LARGEST_TABLES_BYTES,
    SqlTransform,
    compile_sql,
)
from kafka_eos_source.in_read.sql_engine import _TRIED, OF_SPARK
from kafka_eos_source.options.table import LEAST_SQL_MEMORY_BYTES
from kafka_eos_source.spark.arrow import arrow_schema

pytest.importorskip("duckdb", minversion="2")

ROWS = (
    spark.StructType()
    .add("id", spark.IntegerType())
    .add("code", spark.StringType())
    .add("items", spark.ArrayType(spark.IntegerType()))
    .add("seen", spark.TimestampType())
    .add("place", spark.StructType().add("x", spark.DoubleType()).add("name", spark.StringType()))
    .add("doc", spark.StringType())
    .add("key", spark.BinaryType())
)
RATES = pa.table({"code": ["a", "a", "b", None, "7"], "rate": [1, 2, 3, 4, 5]})
TABLES = {"rates": RATES, "wide": pa.table({"n": list(range(300)), "label": [f"n{n}" for n in range(300)]})}


def rows_of(ids: list[int], codes: list[str | None] | None = None) -> pa.RecordBatch:
    codes = codes or [None, "a", "b", "7", "x"]
    return pa.RecordBatch.from_pylist(
        [
            {
                "id": number,
                "code": codes[number % len(codes)],
                "items": list(range(number % 4)) if number % 5 else None,
                "seen": datetime.datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))
                + datetime.timedelta(hours=number),
                "place": {"x": number / 4, "name": "ü"},
                "doc": f'{{"n": {number}, "list": [1, {number}]}}',
                "key": b"k%d" % number,
            }
            for number in ids
        ],
        arrow_schema(ROWS),
    )


def result(step: SqlTransform, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows, errors = step(batch)
    assert not errors
    assert rows.schema.equals(arrow_schema(step.rows))
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


# ------------------------------------------------------------------ results and types


def test_names_and_types_are_known_before_the_first_batch() -> None:
    step = compile_sql(
        """
        SELECT key, id + 1 AS next, id / 2 AS half, upper(code) AS code, seen, seen::DATE AS day,
               date_trunc('hour', seen) AS hour, seen::TIMESTAMP AS wall, place.x AS x, items,
               doc ->> '$.n' AS n, (doc -> '$.list') AS list, {'a': id, 'b': [code]} AS both,
               map {'k': id} AS m, 1.50 AS price, id > 1 AS big, id::SMALLINT AS small, id::FLOAT AS f
        FROM batch WHERE id > 0; -- comment
        """,
        ROWS,
        time_zone="Europe/Berlin",
    )
    assert step.rows.simpleString() == (
        "struct<key:binary,next:int,half:double,code:string,seen:timestamp,day:date,hour:timestamp,"
        "wall:timestamp_ntz,x:double,items:array<int>,n:string,list:string,both:struct<a:int,b:array<string>>,"
        "m:map<string,int>,price:decimal(3,2),big:boolean,small:smallint,f:float>"
    )
    [row] = result(step, rows_of([0, 1]))
    utc = ZoneInfo("UTC")
    assert row == {
        "key": b"k1",
        "next": 2,
        "half": 0.5,
        "code": "A",
        "seen": datetime.datetime(2024, 1, 1, 1, tzinfo=utc),
        "day": datetime.date(2024, 1, 1),
        "hour": datetime.datetime(2024, 1, 1, 1, tzinfo=utc),
        "wall": datetime.datetime(2024, 1, 1, 2),  # in Berlin
        "x": 0.25,
        "items": [0],
        "n": "1",
        "list": "[1,1]",
        "both": {"a": 1, "b": ["a"]},
        "m": [("k", 1)],
        "price": Decimal("1.50"),
        "big": False,
        "small": 1,
        "f": 1.0,
    }


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("SELECT * FROM batch", {"id": "id", "code": "code"}),
        ("SELECT b.* EXCLUDE (id) FROM batch AS b WHERE id > 1", {"code": "code"}),
        ("SELECT * EXCLUDE (ID, items), upper(code) AS id FROM batch", {"code": "code"}),
        ("SELECT * REPLACE (id + 1 AS id) FROM batch", {}),
        ("SELECT * RENAME (id AS code, code AS id) FROM batch", {}),
        ("SELECT ID AS n, batch.code, upper(code) AS key FROM batch", {"n": "id", "code": "code"}),
        ("SELECT upper(code) AS id, id AS code FROM batch", {"code": "id"}),
        ("SELECT place.id FROM batch AS place", {"id": "id"}),
        ("SELECT code.id FROM (SELECT {'id': 1} AS code FROM batch)", {}),
        ("WITH batch2 AS (SELECT code AS id FROM batch) SELECT id FROM batch2", {}),
        ("SELECT id FROM batch UNION ALL SELECT id + 1 FROM batch", {}),
        ("SELECT id FROM batch JOIN rates USING (code)", {}),
    ],
)
def test_columns_that_are_only_selected_are_known(text: str, copies: dict[str, str]) -> None:
    """An operator finds the record's key by them, and then needs no shuffle."""
    found = compile_sql(text, ROWS, tables={"rates": RATES}).copies
    assert {name: each for name, each in found.items() if each in ("id", "code")} == copies


def test_a_field_of_a_struct_with_the_name_of_the_input_is_no_column_of_it() -> None:
    rows = spark.StructType().add("id", spark.IntegerType())
    rows = rows.add("batch", spark.StructType().add("id", spark.IntegerType()))
    assert compile_sql("SELECT batch.id FROM batch AS b", rows).copies == {}
    assert compile_sql("SELECT b.batch.id FROM batch AS b", rows).copies == {}
    assert compile_sql("SELECT b.id FROM batch AS b", rows).copies == {"id": "id"}


def test_one_row_gives_any_number_of_rows() -> None:
    step = compile_sql("SELECT id, unnest(items) AS item FROM batch WHERE id <> 2", ROWS)
    assert [tuple(row.values()) for row in result(step, rows_of([1, 2, 3, 5]))] == [
        (1, 0),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert result(step, rows_of([])) == []


def test_the_input_may_have_another_name() -> None:
    step = compile_sql('SELECT f.id FROM "the flights" AS f', ROWS, name="the flights")
    assert result(step, rows_of([4])) == [{"id": 4}]


def test_a_step_travels_and_knows_its_content() -> None:
    step = compile_sql("SELECT id, rate FROM batch JOIN rates USING (code)", ROWS, tables={"rates": RATES})
    copy = pickle.loads(pickle.dumps(step))
    assert copy == step
    assert copy.digest == step.digest
    assert result(copy, rows_of([1, 2])) == [{"id": 1, "rate": 1}, {"id": 1, "rate": 2}, {"id": 2, "rate": 3}]

    def digests(table: pa.Table, text: str = step.text) -> tuple[str, str]:
        other = compile_sql(text, ROWS, tables={"rates": table})
        return other.digest, other.table_digests["rates"]

    mine = (step.digest, step.table_digests["rates"])
    assert digests(pa.concat_tables([RATES.slice(2), RATES.slice(0, 2)])) == mine  # a table has no order
    large = RATES.cast(pa.schema([("code", pa.large_string()), ("rate", pa.int64())]))
    assert digests(large) == mine  # nor does it matter how Arrow stores it
    assert digests(RATES.slice(1))[1] != mine[1]
    assert digests(RATES.rename_columns(["code", "rates"]), "SELECT id FROM batch")[1] != mine[1]
    assert digests(RATES, step.text + " ") == (digests(RATES, step.text + " ")[0], mine[1])
    assert digests(RATES, step.text + " ")[0] != mine[0]


# ------------------------------------------------------------------ batches do not matter

SAME_FOR_ALL_BATCHES = (
    "SELECT * FROM batch",
    "SELECT * EXCLUDE (doc) REPLACE (id + 1 AS id) FROM batch WHERE code <> 'x'",
    "SELECT id, unnest(items) AS item, unnest([1, 2]) AS other FROM batch",
    "SELECT id, list_distinct([code, 'q', 'r', id::VARCHAR, code]) AS d, list_sort(items) AS s, "
    "list_aggr([code, 'a'], 'mode') AS m, list_aggr(items, 'histogram')::VARCHAR AS h FROM batch",
    "SELECT b.id, r.rate FROM batch b JOIN rates r ON b.code = r.code",
    "SELECT b.id, r.rate FROM rates r JOIN batch b ON b.code = r.code",
    "SELECT * FROM rates r RIGHT JOIN batch b USING (code)",
    "SELECT b.*, r.rate, r.rowid AS n FROM batch b LEFT JOIN rates r ON b.code = r.code",
    "SELECT b.id, unnest(items) AS item, rate FROM batch b, rates WHERE rate < b.id % 6",
    "SELECT id, label FROM batch JOIN wide ON n BETWEEN id AND id + 2",
    "SELECT id, label, rate FROM batch b JOIN wide ON n = id LEFT JOIN rates r ON r.code = b.code",
    "SELECT id FROM batch UNION ALL SELECT -id FROM batch WHERE id % 2 = 0",
    "SELECT id, 'a' AS x FROM batch UNION ALL "
    "(SELECT id, code FROM batch UNION ALL SELECT id, 'c' FROM batch)",
    "SELECT id, 1 AS x FROM batch UNION ALL BY NAME SELECT 2 AS x, id FROM batch",
    "WITH c AS (SELECT id, unnest(items) AS item FROM batch) SELECT c.*, label FROM c JOIN wide ON n = item",
    "WITH c AS (SELECT id, code FROM batch), d AS (SELECT * FROM c UNION ALL SELECT -id, code FROM c) "
    "SELECT d.*, rate FROM d JOIN rates USING (code)",
    "SELECT id FROM batch WHERE code IN (SELECT code FROM rates)",
    "SELECT id FROM batch WHERE code NOT IN ('a', 'b', 'c', 'd', 'e', 'f', 'g')",
    "SELECT id FROM batch b SEMI JOIN rates r ON b.code = r.code",
    "SELECT id FROM batch b ANTI JOIN rates r ON b.code = r.code",
    "SELECT id, (SELECT max(n) FROM wide WHERE n < id) AS m FROM batch",
    "SELECT id, EXISTS (SELECT 1 FROM rates r WHERE r.code = batch.code) AS e FROM batch",
    "SELECT id, total FROM batch JOIN (SELECT code AS c, sum(rate)::INT AS total FROM rates GROUP BY ALL) "
    "ON c = code",
    "WITH top AS (SELECT code, rate, row_number() OVER (ORDER BY rate DESC) AS rank FROM rates "
    "ORDER BY 2 LIMIT 3) "
    "SELECT id, rank FROM batch JOIN top USING (code)",
    "SELECT id, word FROM batch JOIN (VALUES ('a', 'one'), ('a', 'two'), ('b', 'x')) v(c, word) ON c = code",
)


@pytest.mark.parametrize("text", SAME_FOR_ALL_BATCHES)
def test_the_result_is_the_same_for_every_division_into_batches(text: str) -> None:
    step = compile_sql(text, ROWS, tables=TABLES)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, 30), max_size=30), st.lists(st.integers(1, 12), min_size=1))
    def same(ids: list[int], sizes: list[int]) -> None:
        whole = rows_of(ids)
        parts, start = [], 0
        for size in sizes * (len(ids) + 1):
            if start < len(ids):
                parts += result(step, whole.slice(start, size))
            start += size
        assert parts == result(step, whole)

    same()


def test_large_batches_keep_the_order_of_the_input() -> None:
    batch = rows_of(list(range(5000)))
    step = compile_sql(
        "SELECT id, rate FROM batch LEFT JOIN rates r ON r.code = batch.code", ROWS, tables=TABLES
    )
    found = result(step, batch)
    assert found == sorted(found, key=lambda row: (row["id"], row["rate"] or 0))
    assert {row["id"] for row in found} == set(range(5000))


BROKEN = pa.table({"number": ["1", "x"], "code": ["a", "b"], "rate": [1, 2]})


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, rate FROM batch JOIN r ON r.number = id",
        "SELECT id, rate FROM r JOIN batch ON r.number = id",
        "SELECT id, rate FROM batch b LEFT JOIN r ON r.number = b.id",
        "SELECT r.*, id FROM r RIGHT JOIN batch ON r.number = id",
        "SELECT id, rate FROM batch, r WHERE r.number = id",
        "SELECT id, rate FROM r CROSS JOIN batch WHERE r.number::INT = id",
        "SELECT id FROM batch SEMI JOIN r ON r.number = id",
        "SELECT id, rate FROM batch JOIN r USING (code) WHERE number::INT > 0",
        "SELECT id, rate FROM batch JOIN r ON number::INT > id",
        "SELECT id FROM batch WHERE id IN (SELECT number::INT FROM r)",
        "WITH w AS (SELECT id FROM batch) "
        "SELECT w.id, t.rate FROM (r JOIN w ON r.number = w.id) JOIN r t USING (rate)",
        "SELECT id FROM batch UNION ALL SELECT id FROM r JOIN batch ON r.number = id",
    ],
)
def test_a_static_table_that_cannot_be_converted_is_an_error_of_the_text(text: str) -> None:
    """It would come with each record, and one after the other would be a bad record."""
    with pytest.raises(InvalidSqlError, match="Could not convert string 'x' to INT32") as refused:
        compile_sql(text, ROWS, tables={"r": BROKEN})
    assert refused.value.fix
    found, errors = compile_sql(text, ROWS, tables={"r": BROKEN.slice(0, 1)})(rows_of([0, 1, 2]))
    assert not errors
    assert found.num_rows


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, rate FROM r JOIN batch ON TRY_CAST(number AS INT) = id",
        "SELECT id, rate FROM r JOIN batch ON number::INT = id WHERE r.code = 'a'",
        "SELECT id, rate FROM r JOIN batch ON CASE r.code WHEN 'a' THEN number::INT END = id",
        "SELECT id, rate / coalesce(id, 0) AS share FROM r JOIN batch USING (code) WHERE id > 0",
    ],
)
def test_what_a_text_does_not_compute_of_a_static_table_is_no_error(text: str) -> None:
    found, errors = compile_sql(text, ROWS, tables={"r": BROKEN})(rows_of([1, 11]))
    assert not errors
    assert found.num_rows


@pytest.mark.parametrize("name", sorted(OF_SPARK))
def test_a_function_of_spark_names_what_to_write(name: str) -> None:
    rows = (
        spark.StructType()
        .add("a", spark.IntegerType())
        .add("b", spark.IntegerType())
        .add("n", spark.LongType())
        .add("seconds", spark.DoubleType())
        .add("s", spark.StringType())
        .add("doc", spark.StringType())
        .add("t", spark.TimestampType())
        .add("items", spark.ArrayType(spark.IntegerType()))
    )
    with pytest.raises(InvalidSqlError) as refused:
        compile_sql(f"SELECT {name}(s, s, s, s) AS x FROM batch", rows)
    assert OF_SPARK[name] in refused.value.fix
    written = OF_SPARK[name].removesuffix(" AS item")
    compile_sql(f"SELECT {written} AS x FROM batch", rows)


def test_a_text_in_double_quotes_is_a_column() -> None:
    with pytest.raises(InvalidSqlError) as refused:
        compile_sql('SELECT id FROM batch WHERE code = "books"', ROWS)
    assert "single quotes" in refused.value.fix


@pytest.mark.parametrize(
    ("where", "constant"),
    [
        ("id > 'fifty'", "'fifty'"),
        ("id BETWEEN '1' AND 'it''s'", "'it''s'"),
        ("seen > '2024-13-01'", "'2024-13-01'"),
        ("place.x IN ('1', 'y')", "'y'"),
        ("id > CAST('1,5' AS DECIMAL(10, 2))", "'1,5'"),
        ("id = 1 OR id > 'x' AND code = 'y'", "'x'"),
    ],
)
def test_a_constant_that_fits_no_record_is_an_error_of_the_text(where: str, constant: str) -> None:
    """It would make each record bad."""
    with pytest.raises(InvalidSqlError, match="whatever the records") as refused:
        compile_sql(f"SELECT id FROM batch WHERE {where}", ROWS)
    assert f"the constant {constant} does not fit" in str(refused.value)
    with pytest.raises(InvalidSqlError, match="whatever the records"):
        compile_sql(f"SELECT id FROM batch JOIN rates USING (code) WHERE {where}", ROWS, tables=TABLES)


@pytest.mark.parametrize(
    "where",
    [
        "id < '50'",
        "code <> 'CAST(''x'' AS INTEGER)'",
        "TRY_CAST('x' AS INTEGER) IS NULL",
        "TRY(id > 'x') IS NULL",
        "seen > '2020-01-01'",
        "CAST(code AS INTEGER) = 7",
    ],
)
def test_a_constant_that_fits_is_no_error(where: str) -> None:
    found, _ = compile_sql(f"SELECT id FROM batch WHERE {where}", ROWS)(rows_of([3]))
    assert found.to_pylist() == [{"id": 3}]


def test_a_static_value_that_fails_only_for_the_records_that_join_it_fails_these() -> None:
    step = compile_sql(
        "SELECT id, number::INT AS n FROM batch JOIN r USING (code)", ROWS, tables={"r": BROKEN}
    )
    found, errors = step(rows_of([1, 2, 3]))
    assert found.to_pylist() == [{"id": 1, "n": 1}]
    assert list(errors) == [1]


def test_a_static_table_follows_the_rules_of_sql_for_nulls() -> None:
    step = compile_sql("SELECT id FROM batch JOIN rates USING (code)", ROWS, tables=TABLES)
    assert result(step, rows_of([0])) == []  # null = null is not true
    step = compile_sql("SELECT id FROM batch WHERE code NOT IN (SELECT code FROM rates)", ROWS, tables=TABLES)
    assert result(step, rows_of([0, 1, 4])) == []  # rates has a null


# ------------------------------------------------------------------ what is refused

REFUSED = [
    # text, words of the error, words of the fix
    ("SELECT 1; SELECT 2", "2 statements", "one SELECT"),
    ("", "expected a SELECT", "SELECT * FROM"),
    ("SELEC id FROM batch", 'line 1, column 1: syntax error at or near "SELEC"', "DuckDB's dialect"),
    ("SELECT id,\n  ('ü', FROM batch", 'line 2, column 9: syntax error at or near "FROM"', "correct"),
    ("INSERT INTO batch VALUES (1)", "INSERT", "write a SELECT"),
    ("SET threads = 4", "SET", "write a SELECT"),
    ("PRAGMA version", "PRAGMA", "write a SELECT"),
    ("ATTACH 'x.db'", "ATTACH", "write a SELECT"),
    ("INSTALL httpfs", "LOAD", "write a SELECT"),
    ("COPY batch TO 'x.csv'", "COPY", "write a SELECT"),
    ("CREATE MACRO f(a) AS a", "CREATE", "write a SELECT"),
    ("PIVOT batch ON id USING sum(id)", "PIVOT", "write a SELECT"),
    ("DESCRIBE batch", "DESCRIBE", "write a SELECT"),
    ("SELECT count(*) FROM batch", "column 8: the aggregate count(*)", "aggregate()"),
    ("SELECT max(id) AS m FROM batch", "the aggregate max", "aggregate()"),
    ("SELECT code FROM batch GROUP BY code", "GROUP BY", "aggregate()"),
    ("SELECT code FROM batch GROUP BY ALL", "GROUP BY", "aggregate()"),
    ("SELECT code FROM batch HAVING true", "GROUP BY and HAVING", "aggregate()"),
    ("SELECT DISTINCT code FROM batch", "DISTINCT", "drop_duplicates"),
    ("SELECT DISTINCT ON (code) id FROM batch", "DISTINCT", "drop_duplicates"),
    ("SELECT (SELECT max(b.id)) AS m FROM batch b", "the aggregate max", "aggregate()"),
    ("SELECT (SELECT max(b.id) FROM rates) AS m FROM batch b", "aggregate", "aggregate()"),
    ("SELECT list(id) AS l FROM batch", "the aggregate list", "aggregate()"),
    ("SELECT lag(id) OVER () AS l FROM batch", "window function lag", "state"),
    ("SELECT id FROM batch QUALIFY row_number() OVER () = 1", "QUALIFY", "aggregate()"),
    ("SELECT id FROM batch ORDER BY id", "ORDER BY", "remove it"),
    ("SELECT id FROM batch LIMIT 3", "LIMIT", "remove it"),
    ("SELECT id FROM batch OFFSET 3", "OFFSET", "remove it"),
    ("SELECT id FROM batch LIMIT 10%", "LIMIT", "remove it"),
    ("SELECT id FROM (SELECT id FROM batch LIMIT 3)", "LIMIT", "remove it"),
    ("WITH c AS (SELECT id FROM batch ORDER BY id) SELECT * FROM c", "ORDER BY", "remove it"),
    ("SELECT id FROM batch UNION SELECT id FROM batch", "UNION", "UNION ALL"),
    ("SELECT id FROM batch EXCEPT ALL SELECT id FROM batch", "EXCEPT", "UNION ALL"),
    ("SELECT id FROM batch INTERSECT SELECT rate FROM rates", "INTERSECT", "UNION ALL"),
    ("SELECT id FROM batch UNION ALL SELECT rate FROM rates", "one side", "both sides"),
    ("(SELECT id FROM batch UNION ALL SELECT id FROM batch) LIMIT 1", "LIMIT", "remove it"),
    ("SELECT a.id FROM batch a, batch b", "with itself", "state"),
    ("SELECT a.id FROM batch a JOIN (SELECT id AS i FROM batch) b ON a.id = b.i", "with itself", "state"),
    ("WITH c AS (SELECT * FROM batch) SELECT a.id FROM c a JOIN c b USING (id)", "with itself", "state"),
    ("SELECT id FROM batch WHERE id > (SELECT avg(id) FROM batch)", "aggregate", "aggregate()"),
    ("SELECT id FROM batch WHERE id IN (SELECT id FROM batch)", "subquery over the input", "static table"),
    (
        "SELECT id FROM batch b WHERE EXISTS (FROM batch c WHERE c.id > b.id)",
        "subquery over the input",
        "static",
    ),
    ("SELECT id FROM batch POSITIONAL JOIN rates", "POSITIONAL", "ON"),
    ("SELECT id FROM batch ASOF JOIN rates ON id >= rate", "ASOF", "until"),
    ("SELECT id FROM batch NATURAL JOIN rates", "NATURAL", "USING"),
    ("SELECT id FROM batch FULL JOIN rates USING (code)", "FULL", "LEFT JOIN"),
    ("SELECT id FROM batch b RIGHT JOIN rates USING (code)", "RIGHT", "LEFT JOIN"),
    ("SELECT rate FROM rates SEMI JOIN batch USING (code)", "SEMI", "LEFT JOIN"),
    ("SELECT id, q.rate FROM batch b, (SELECT rate FROM rates r WHERE r.code = b.code) q", "before it", "ON"),
    ("SELECT id, x FROM batch, unnest(items) u(x)", "unnest", "select list"),
    ("SELECT * FROM range(10)", "table function range", "static table"),
    ("SELECT * FROM read_csv('/etc/passwd')", "table function read_csv", "static table"),
    ("SELECT * FROM '/etc/passwd'", "no table '/etc/passwd'", "cannot read files"),
    ("SELECT * FROM duckdb_settings()", "table function", "static table"),
    ("SELECT * FROM information_schema.tables", "no table 'information_schema.tables'", "may read batch"),
    ("SELECT * FROM bacth", "no table 'bacth'", "Did you mean 'batch'"),
    ("WITH RECURSIVE c AS (FROM batch UNION ALL FROM c) SELECT * FROM c", "RECURSIVE", "one by one"),
    ("WITH rates AS (SELECT 1 AS a) SELECT id FROM batch", "name of a table", "another name"),
    ("WITH batch AS (SELECT 1 AS a) SELECT a FROM batch", "name of a table", "another name"),
    ("SELECT 1 AS one", "does not read its input", "FROM batch"),
    ("VALUES (1)", "does not read its input", "FROM batch"),
    ("SELECT rate FROM rates", "does not read its input", "FROM batch"),
    ("SELECT id FROM batch USING SAMPLE 10%", "sample", "remove"),
    ("SELECT id FROM batch TABLESAMPLE 10%", "sample", "remove"),
    ("SELECT random() AS r FROM batch", "random", "column"),
    ("SELECT uuid() AS r FROM batch", "uuid", "column"),
    ("SELECT now() AS r FROM batch", "now", "column"),
    ("SELECT id FROM batch WHERE seen < current_timestamp", "current_timestamp", "timestamp of the record"),
    ("SELECT id FROM batch WHERE seen::DATE < current_date", "current_date", "timestamp of the record"),
    ("SELECT today() AS r FROM batch", "today", "column"),
    ("SELECT age(seen::TIMESTAMP) AS r FROM batch", "age", "column"),
    ("SELECT nextval('s') AS r FROM batch", "nextval", "column"),
    ("SELECT getvariable('x') AS r FROM batch", "getvariable", "column"),
    ("SELECT current_setting('threads') AS r FROM batch", "current_setting", "column"),
    ("SELECT ago(INTERVAL 1 DAY) AS r FROM batch", "ago", "column"),
    ("SELECT timezone('Europe/Berlin', code::TIMETZ)::VARCHAR AS r FROM batch", "time zone", "column"),
    ("SELECT user AS r FROM batch", "user", "column"),
    ("SELECT list_aggr(items, code) AS r FROM batch", "list_aggr", "'sum'"),
    ("SELECT list_aggr(items, 'reservoir_quantile', 0.5) AS r FROM batch", "not random", "list_aggr"),
    (
        "SELECT id FROM batch JOIN (SELECT reservoir_quantile(rate, 0.5) AS q FROM rates) ON true",
        "reservoir",
        "",
    ),
    ("SELECT range(id) AS r FROM batch", "range", "least"),
    ("SELECT unnest(generate_series(1, id)) AS r FROM batch", "generate_series", "least"),
    ("SELECT repeat(code, 1000000000) AS r FROM batch", "repeat", "100,000"),
    ("SELECT lpad(code, id, ' ') AS r FROM batch", "lpad", "least"),
    ("SELECT id FROM batch WHERE id = $1", "parameter", "value"),
    ("SELECT #1 AS r FROM batch", "position", "name"),
    ("SELECT idd FROM batch", 'line 1, column 8: Referenced column "idd"', "did you mean 'id'?"),
    ("SELECT rats FROM batch JOIN rates USING (code)", '"rats"', "did you mean 'rate'?"),
    ("SELECT uper(code) AS c FROM batch", "uper", "did you mean 'upper'?"),
    ("SELECT code + id AS c, [1] + 'x' AS d FROM batch", "line 1", "correct"),
    ("SELECT id + 1 FROM batch", "line 1, column 8: a column of the result has no name", "AS name"),
    ("SELECT id + 1 FROM batch UNION ALL SELECT id FROM batch", "has no name", "AS name"),
    ("SELECT id, code AS ID FROM batch", "'id' and 'ID'", "AS name"),
    ("SELECT * FROM batch JOIN rates ON true", "'code' and 'code'", "EXCLUDE"),
    ("SELECT id AS __kafka_eos_x FROM batch", "__kafka_eos_x", "another name"),
    ("SELECT id::HUGEINT AS h FROM batch", "type HUGEINT", "BIGINT"),
    ("SELECT [id::UTINYINT] AS h FROM batch", "contains UTINYINT", "SMALLINT"),
    ("SELECT hash(id) AS h FROM batch", "type UBIGINT", "DECIMAL(20, 0)"),
    ("SELECT seen::TIME AS h FROM batch", "type TIME", "VARCHAR"),
    ("SELECT INTERVAL 1 DAY AS h FROM batch", "type INTERVAL", "VARCHAR"),
    ("SELECT code::UUID AS h FROM batch", "type UUID", "VARCHAR"),
    ("SELECT code::ENUM('a') AS h FROM batch", "type ENUM", "VARCHAR"),
    ("SELECT union_value(a := id) AS h FROM batch", "type UNION", "VARCHAR"),
    ("SELECT NULL AS h FROM batch", "NULL", "cast it"),
    ("SELECT array_value(id, id) AS h FROM batch", "INTEGER[2]", "INTEGER[]"),
    ("SELECT row(id, id) AS h FROM batch", "TUPLE", "struct with names"),
    ("SELECT b AS h, rate FROM batch b JOIN rates ON true", "whole row", "struct"),
    ("SELECT id FROM batch b JOIN rates ON to_json(b) = ''", "whole row", "struct"),
    ("SELECT COLUMNS('id') FROM batch b JOIN rates ON true", "COLUMNS", "name the columns"),
]


@pytest.mark.parametrize(("text", "why", "fix"), REFUSED, ids=[text for text, _, _ in REFUSED])
def test_what_a_step_cannot_do_is_refused_before_the_query_starts(text: str, why: str, fix: str) -> None:
    with pytest.raises(KafkaEosError) as refused:
        compile_sql(text, ROWS, tables=TABLES)
    assert why in refused.value.message
    assert fix in refused.value.fix
    assert isinstance(refused.value, (InvalidSqlError, InvalidSchemaError))


def test_an_error_shows_the_line_with_a_caret() -> None:
    with pytest.raises(InvalidSqlError) as refused:
        compile_sql("SELECT\tid,\n\t'ü' AS u, carier\nFROM batch", ROWS)
    assert refused.value.message == (
        'SQL text, line 2, column 12: Referenced column "carier" not found in FROM clause.\n'
        "     'ü' AS u, carier\n"
        "               ^\n"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("SELECT list_sum(items)::BIGINT AS r FROM batch", 3),
        ("SELECT list_transform(items, lambda x: x + id) AS r FROM batch", [3, 4, 5]),
        ("SELECT [x * 2 FOR x IN items IF x > 0] AS r FROM batch", [2, 4]),
        ("SELECT CASE WHEN id = 3 THEN regexp_replace(code, '[0-9]', 'd') END AS r FROM batch", "d"),
        ("SELECT range(least(id, 10)) AS r FROM batch", [0, 1, 2]),
        ("SELECT range(len(items)) AS r FROM batch", [0, 1, 2]),
        ("SELECT array_to_string(items, '-') AS r FROM batch", "0-1-2"),
        ("SELECT json_extract_string(doc, '$.list[1]') AS r FROM batch", "3"),
        ("SELECT age(seen::TIMESTAMP, seen::TIMESTAMP)::VARCHAR AS r FROM batch", "00:00:00"),
        ("SELECT split_part('a,b', ',', 2) AS r FROM batch", "b"),
        ("SELECT strftime(seen, '%H') AS r FROM batch", "03"),
        ("SELECT to_json(batch)->>'id' AS r FROM batch", "3"),
        ("SELECT coalesce(nullif(id, 3), 9) AS r FROM batch", 9),
        ("SELECT try_cast('x' AS INT) AS r FROM batch", None),
        ("SELECT TRY(('x')::INT) AS r FROM batch", None),
        ("SELECT id // 2 AS r FROM batch", 1),
    ],
)
def test_what_a_step_can_do(text: str, value: object) -> None:
    assert result(compile_sql(text, ROWS), rows_of([3])) == [{"r": value}]


# ------------------------------------------------------------------ rows that fail


def failing(text: str, batch: pa.RecordBatch, **more: Any) -> tuple[list[Any], Mapping[int, str]]:
    """Returns the values of the first column, and the errors, which are the same if rows are only tried."""
    step = compile_sql(text, ROWS, tables=TABLES, **more)
    rows, errors = step(batch)
    slow = dataclasses.replace(step, failing=None, memory_bytes=step.memory_bytes + 1)
    assert slow(batch) == (rows, errors)
    return rows.column(0).to_pylist(), errors


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["1", "22", "x", "", None, "99999999999"]), max_size=40))
def test_only_the_rows_that_fail_have_errors(codes: list[str | None]) -> None:
    def number(code: str | None) -> int | None:
        return None if code is None else int(code)

    good = {"1", "22", None}
    batch = rows_of(list(range(len(codes))), codes or ["1"])
    step = compile_sql("SELECT id, code::INT AS n FROM batch WHERE id >= 0", ROWS)
    rows, errors = step(batch)
    assert rows.to_pylist() == [
        {"id": row, "n": number(code)} for row, code in enumerate(codes) if code in good
    ]
    assert {row: codes[row] for row in errors} == {
        row: code for row, code in enumerate(codes) if code not in good
    }
    for tried, (row, text) in enumerate(errors.items()):
        assert f"'{codes[row]}'" in text or (tried >= _TRIED and text.startswith("fails like others"))


@pytest.mark.parametrize(
    ("text", "bad", "why"),
    [
        ("SELECT id, 10 / (id - 2) AS r FROM batch", {2}, "Division by zero"),
        ("SELECT id, 10 % (id - 2) AS r FROM batch", {2}, "Division by zero"),
        ("SELECT id FROM batch WHERE 10 // (id - 2) < 100", {2}, "Division by zero"),
        ("SELECT id, (id + 253)::TINYINT AS r FROM batch WHERE id > 1", {2, 3, 4}, "out of range"),
        ("SELECT id, 2147483644 + id AS r FROM batch", {4}, "Overflow"),
        ("SELECT id, sqrt(id - 1) AS r FROM batch", {0}, "negative"),
        ("SELECT id, regexp_matches(code, '(' || code) AS r FROM batch WHERE id = 1", {1}, "("),
        ("SELECT id, unnest(items) / (id - 2) AS r FROM batch", {2}, "Division by zero"),
        (
            "SELECT id, rate FROM batch JOIN rates r ON r.code = batch.code AND 1 // (id - 2) <> 9",
            {2},
            "zero",
        ),
        (
            "SELECT id, (SELECT rate FROM rates r WHERE r.code = b.code) AS r FROM batch b",
            {1},
            "More than one row",
        ),
        ("SELECT id, CASE WHEN id = 3 THEN error('no ' || code) ELSE 1 END AS r FROM batch", {3}, "no 7"),
        ("SELECT id, strptime(code, '%Y') AS r FROM batch WHERE id = 4", {4}, "Could not parse"),
        ("SELECT id, (doc || code)->>'$.n' AS r FROM batch WHERE id = 4", {4}, "Malformed JSON"),
    ],
)
def test_a_row_that_fails_is_named_and_the_others_stay(text: str, bad: set[int], why: str) -> None:
    rows, errors = failing(text, rows_of([0, 1, 2, 3, 4]))
    assert set(errors) == bad
    assert all(why in each and len(each) < 400 and "SET" not in each for each in errors.values())
    assert not bad & set(rows)


def test_many_rows_that_fail_do_not_need_as_many_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    from kafka_eos_source.in_read.sql_engine import Engine

    step = compile_sql("SELECT code::INT AS n FROM batch", ROWS)
    sizes: list[int] = []
    run = Engine.run
    monkeypatch.setattr(
        Engine, "run", lambda self, batch: (sizes.append(batch.num_rows), run(self, batch))[1]
    )
    codes = [*["1"] * 50, "x"]
    _, errors = step(rows_of(list(range(2040)), codes))
    assert len(errors) == 40
    assert sorted(sizes) == [0, *[1] * _TRIED, 2000, 2040]
    texts = list(errors.values())
    assert (
        texts[0]
        == texts[_TRIED - 1]
        == "Could not convert string 'x' to INT32 when casting from source column code"
    )
    assert texts[_TRIED] == texts[-1] == f"fails like others of its batch, of which the first: {texts[0]}"


@pytest.mark.parametrize(
    ("text", "calls", "fails"),
    [
        ("batch.code::INT AS n, name FROM batch LEFT JOIN c ON c.code = batch.code", _TRIED, lambda _: True),
        ("code::INT AS n, unnest([id, 1]) AS u FROM batch", 40, lambda _: True),
        # the engine computes the cast only for rows that the join and the condition leave
        (
            "batch.code::INT AS n FROM batch LEFT JOIN c USING (id) WHERE name IS NULL",
            40,
            lambda id: id != 50,
        ),
        ("batch.code::INT AS n, name FROM batch JOIN c ON c.id = batch.id", 100, lambda n: n == 50),
    ],
)
def test_rows_that_fail_beside_a_join_or_unnest_are_found_by_what_their_columns_alone_show(
    monkeypatch: pytest.MonkeyPatch, text: str, calls: int, fails: Callable[[int], bool]
) -> None:
    from kafka_eos_source.in_read.sql_engine import Engine

    tables = {"c": pa.table({"code": ["1"], "id": [50], "name": ["one"]})}
    step = compile_sql(f"SELECT {text}", ROWS, tables=tables)
    run, sizes = Engine.run, []
    monkeypatch.setattr(
        Engine, "run", lambda self, batch: (sizes.append(batch.num_rows), run(self, batch))[1]
    )
    codes = [*["1"] * 50, "x"]
    found, errors = step(rows_of(list(range(2040)), codes))
    assert list(errors) == [id for id in range(50, 2040, 51) if fails(id)]
    assert sum(size == 1 for size in sizes) <= calls
    assert sum(sizes) < 8 * 2040, "few divisions of the batch"
    assert set(found.column("n").to_pylist()) <= {1}


def test_one_failing_row_is_enough_where_it_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from kafka_eos_source.in_read.sql_engine import Engine

    tried: list[int] = []
    run = Engine.run
    monkeypatch.setattr(
        Engine, "run", lambda self, batch: (tried.append(batch.num_rows), run(self, batch))[1]
    )
    for text in ("SELECT code::INT AS n FROM batch", "SELECT unnest([code::INT]) AS n FROM batch"):
        step = compile_sql(text, ROWS)
        tried.clear()
        _, errors = step(rows_of(list(range(2040)), [*["1"] * 50, "x"]), only_first=True)
        assert list(errors) == [50]
        assert len(tried) < 30
    wrong = pa.array([b"\xff", *[b"x"] * 9]).view(pa.string())
    batch = rows_of(list(range(10)))
    batch = batch.set_column(1, batch.schema.field("code"), wrong)
    assert list(compile_sql("SELECT code::INT AS n FROM batch", ROWS)(batch, only_first=True)[1]) == [0]


def test_text_that_is_not_utf8_is_an_error_of_its_row() -> None:
    batch = rows_of([0, 1, 2, 3])
    codes = pa.array([b"a", b"\xff", b"b", b"c\xfe"]).view(pa.string())
    batch = batch.set_column(1, batch.schema.field("code"), codes)
    rows, errors = compile_sql("SELECT upper(code) AS c FROM batch", ROWS)(batch)
    assert rows.to_pylist() == [{"c": "A"}, {"c": "B"}]
    assert errors == dict.fromkeys((1, 3), "column 'code' has a string that is not UTF-8")


@pytest.mark.parametrize("kind", ["ARRAY", "STRUCT"])
def test_text_inside_a_list_or_a_struct_that_is_not_utf8_is_an_error_of_its_row(kind: str) -> None:
    texts = pa.array([b"a", b"\xff", b"b", b"c"]).view(pa.string())
    rows = spark.StructType()
    if kind == "ARRAY":
        rows = rows.add("v", spark.ArrayType(spark.StringType()))
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), texts)
    else:
        rows = rows.add("v", spark.StructType().add("x", spark.StringType()))
        column = pa.StructArray.from_arrays([texts], ["x"])
    batch = pa.RecordBatch.from_arrays([column], ["v"])
    step = compile_sql("SELECT v FROM batch", rows)
    assert step(batch)[1] == {1: "column 'v' has a string that is not UTF-8"}
    assert step(batch.slice(2))[1] == {}


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pa.array([b"\xff"]).view(pa.string()), "b'\\xff'"),
        (pa.array([2**60], pa.timestamp("us", "UTC")), "out of range"),
    ],
)
def test_an_error_after_steps_of_spark_shows_rows_that_python_cannot_hold(
    column: pa.Array, shown: str
) -> None:
    type_ = spark.StringType() if pa.types.is_string(column.type) else spark.TimestampType()
    rows = spark.StructType().add("v", type_).add("code", spark.StringType())
    step = compile_sql("SELECT v, CAST(code AS INTEGER) AS n FROM batch", rows)
    batch = pa.RecordBatch.from_arrays([column, pa.array(["x"])], ["v", "code"])
    with pytest.raises(InvalidRecordError, match=re.escape(shown)):
        list(MappedRows(step, rows)([batch]))


# ------------------------------------------------------------------ memory


def test_a_row_that_needs_too_much_memory_fails_alone() -> None:
    codes = ["a" * 10, "b" * 4000, "c"]
    text = "SELECT id, repeat(code, 20000) AS r FROM batch"
    step = compile_sql(text, ROWS, memory_bytes=LEAST_SQL_MEMORY_BYTES)
    rows, errors = step(rows_of([0, 1, 2], codes))
    assert rows.column("id").to_pylist() == [0, 2]
    assert set(errors) == {1}
    assert "'sql.memory.bytes'" in errors[1]
    assert step(rows_of([0], codes))[1] == {}  # the engine is still usable


def test_a_batch_that_needs_too_much_memory_is_divided() -> None:
    step = compile_sql(
        "SELECT id, repeat(code, 100000) AS r FROM batch", ROWS, memory_bytes=LEAST_SQL_MEMORY_BYTES
    )
    rows, errors = step(rows_of(list(range(60)), ["abcdefghij"]))
    assert not errors
    assert rows.column("id").to_pylist() == list(range(60))


def test_a_result_that_is_too_large_in_all_is_a_named_error() -> None:
    step = compile_sql(
        "SELECT repeat(code, 100000) AS r FROM batch", ROWS, memory_bytes=LEAST_SQL_MEMORY_BYTES
    )
    with pytest.raises(InvalidSqlError, match=r"200 records needs more than 4 times .*sql.memory.bytes"):
        step(rows_of(list(range(200)), ["abcdefghij"]))


def test_a_result_of_more_than_2_gib_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sql, sql_engine):
        monkeypatch.setattr(module, "LARGEST_RESULT_BYTES", 20 << 20)
    step = compile_sql("SELECT id, repeat(code, 100000) AS r FROM batch", ROWS)
    with pytest.raises(InvalidSqlError, match="2 GiB"):
        step(rows_of(list(range(60)), ["abcdefghij"]))
    assert step(rows_of(list(range(10)), ["abcdefghij"]))[1] == {}


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"sql.memory.bytes.*at least"):
        compile_sql("SELECT id FROM batch", ROWS, memory_bytes=1)


# ------------------------------------------------------------------ tables, columns, the engine


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"Batch": RATES}, "same name as 'batch'"),
        ({"a": RATES, "A": RATES}, "same name as 'a'"),
        ({"a": pa.table({"x": [1], "X": [2]})}, "'x' and 'X'"),
        ({"a": pa.table({"rowid": [1]})}, "'rowid'"),
        ({"a": 7}, "expected a pyarrow.Table"),
        ({"a": pa.table({"x": pa.array([2**60], pa.timestamp("us"))})}, "a value in column 'x'"),
        ({"a": pa.table({"x": pa.array([b"\xff"]).view(pa.string())})}, "a value in column 'x'"),
        ({"a": pa.table({"x": [b"0" * (LARGEST_TABLES_BYTES + 1)]})}, "expected at most"),
    ],
)
def test_tables_that_are_not_usable_are_refused(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(KafkaEosError, match=why):
        compile_sql("SELECT id FROM batch", ROWS, tables=tables)


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        (spark.VariantType(), "the bytes of a VARIANT"),
        (spark.ArrayType(spark.StructType().add("x", spark.VariantType())), "the bytes of a VARIANT"),
        (spark.MapType(spark.StringType(), spark.VariantType()), "the bytes of a VARIANT"),
        (spark.ArrayType(spark.NullType(), containsNull=False), "Arrow cannot represent"),
    ],
)
def test_columns_that_the_engine_would_not_get_as_they_are_are_refused(
    type_: spark.DataType, why: str
) -> None:
    with pytest.raises(InvalidSchemaError, match=why):
        compile_sql("SELECT v FROM batch", spark.StructType().add("v", type_))


def test_columns_that_sql_cannot_tell_apart_are_refused() -> None:
    schema = spark.StructType().add("a", spark.IntegerType()).add("A", spark.IntegerType())
    with pytest.raises(InvalidSchemaError, match="the input 'batch' has the columns 'a' and 'A'"):
        compile_sql("SELECT a FROM batch", schema)


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="Mars/Base"):
        compile_sql("SELECT id FROM batch", ROWS, time_zone="Mars/Base")


def test_the_engine_has_no_access_to_anything(tmp_path: Any) -> None:
    from kafka_eos_source.in_read.sql_engine import Engine

    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    engine = Engine(compile_sql("SELECT id FROM batch", ROWS))
    secret_frame = pa.table({"a": [1]})
    for statement in (
        f"SELECT * FROM '{secret}'",
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM read_text('{secret}')",
        f"COPY (SELECT 1) TO '{tmp_path}/out.csv'",
        f"ATTACH '{tmp_path}/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 4",
        "SET enable_external_access = true",
        "RESET memory_limit",
        "SELECT getenv('HOME')",
        "SELECT * FROM secret_frame",
    ):
        with pytest.raises(Exception, match=r"(?i)permission|locked|disabled|does not exist"):
            engine.connection.execute(statement).fetchall()
    assert [each.name for each in tmp_path.iterdir()] == ["secret.csv"]
    assert secret_frame.num_rows == 1
    engine.close()


def test_without_the_engine_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(InvalidOptionError, match=r"kafka-eos-source\[sql\]"):
        compile_sql("SELECT id FROM batch", ROWS)


def test_the_first_batch_of_a_task_does_not_import_pandas() -> None:
    step = compile_sql("SELECT id FROM batch JOIN rates USING (code)", ROWS, tables=TABLES)
    program = (
        "import pickle, sys\n"
        "step, batch = pickle.load(sys.stdin.buffer)\n"
        "assert step(batch)[0].num_rows == 2\n"
        "assert 'pandas' not in sys.modules\n"
    )
    pickled = pickle.dumps((step, rows_of([1])))
    subprocess.run([sys.executable, "-c", program], input=pickled, check=True)


# ------------------------------------------------------------------ docs/sql.md

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
DIALECT = [
    tuple(cell.strip() for cell in line.replace(r"\|", "¦").strip("| ").split(" | "))
    for line in PAGE.split("| expression |")[1].split("\n\n")[0].splitlines()[2:]
]


def test_the_first_text_of_the_page_runs() -> None:
    text = PAGE.split("```sql\n")[1].split("```")[0]
    flights = (
        spark.StructType()
        .add("key", spark.BinaryType())
        .add("carrier", spark.StringType())
        .add("dep_delay", spark.IntegerType())
        .add("extra", spark.StringType())
    )
    carriers = pa.table({"code": ["UA"], "name": ["United"]})
    step = compile_sql(text, flights, name="flights", tables={"carriers": carriers})
    batch = pa.RecordBatch.from_pylist(
        [
            {"key": b"1", "carrier": "UA", "dep_delay": 130, "extra": '{"gate": "A7"}'},
            {"key": b"2", "carrier": "UA", "dep_delay": 60, "extra": None},
            {"key": b"3", "carrier": "?", "dep_delay": 61, "extra": None},
        ],
        arrow_schema(flights),
    )
    assert [tuple(row.values()) for row in result(step, batch)] == [
        (b"1", "UA", "United", 2, "A7"),
        (b"3", "?", None, 1, None),
    ]


@pytest.mark.parametrize(("expression", "shown", "spark_sql"), DIALECT, ids=[row[0] for row in DIALECT])
def test_the_dialect_is_as_the_page_says(expression: str, shown: str, spark_sql: str) -> None:
    expression = expression.strip("`").replace("¦", "|")
    schema = spark.StructType().add("x", spark.IntegerType())
    batch = pa.RecordBatch.from_pylist([{"x": 42}], arrow_schema(schema))

    def value() -> Any:
        cast = "::VARCHAR" if shown == "null" else ""  # a null alone has no type
        text = f"SELECT ({expression}){cast} AS r FROM batch"
        rows, errors = compile_sql(text, schema)(batch)
        if errors:
            raise ArithmeticError(errors)
        return rows.to_pylist()[0]["r"]

    if shown.startswith("error"):
        with pytest.raises((ArithmeticError, KafkaEosError)):
            value()
        return
    found = value()
    if shown == "a column":
        assert found == 42
        return
    wanted = shown.split("`")[1] if "`" in shown else shown
    assert wanted in {str(found), str(found).lower(), "null" if found is None else ""}
    assert spark_sql
