"""Where columns of a frame of Spark Connect come from, as the plan says that its client sends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("grpc")

from pyspark.sql.connect import functions as f
from pyspark.sql.connect import plan as connect
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from kafka_eos_source.in_read.lineage import Lineage, Obstacle, is_of_source, trace
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns

SOURCE = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
NUMBERS = StructType([StructField("key", BinaryType()), StructField("n", LongType())])
READ = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}


@dataclass(frozen=True)
class Unchanged:
    """A transform whose rows are those of `NUMBERS`; nobody calls it."""

    rows: StructType = NUMBERS

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        raise AssertionError


class Frame:
    """A frame of Spark Connect, as far as `trace` looks at it."""

    def __init__(self, plan: Any, columns: tuple[str, ...] = SOURCE) -> None:
        self._plan = plan
        self.columns = list(columns)
        self.sparkSession = SimpleNamespace(client=None)

    def with_(self, plan: Callable[[Any], Any], *columns: str) -> Any:
        return Frame(plan(self._plan), columns)


def source(format_: str = "kafka-eos", **options: str) -> Frame:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return Frame(connect.DataSource(format=format_, schema="", options={**READ, **named}, is_streaming=True))


def select(*columns: Any) -> Callable[[Any], Any]:
    return lambda plan: connect.Project(plan, list(columns))


def columns_of(frame: Any) -> list[tuple[str, str, bool]]:
    found = trace(frame, frame.columns)
    assert isinstance(found, Lineage), found
    return [(each.name, each.source, each.as_text) for each in found.columns.columns]


@pytest.mark.parametrize(
    ("step", "names", "wanted"),
    [
        (
            select(f.col("key"), f.col("value")),
            ["key", "value"],
            [("key", "key", False), ("value", "value", False)],
        ),
        (select(f.col("*")), SOURCE, [(name, name, False) for name in SOURCE]),
        (select(f.col("key").alias("k")), ["k"], [("k", "key", False)]),
        (select(f.col("KEY")), ["KEY"], [("KEY", "key", False)]),
        (select(f.col("value").cast("string")), ["value"], [("value", "value", True)]),
        (select(f.col("value").cast(StringType()).alias("v")), ["v"], [("v", "value", True)]),
        (select(f.expr("CAST(value AS STRING) AS text")), ["text"], [("text", "value", True)]),
        (select(f.expr("cast(`value` as string)")), ["value"], [("value", "value", True)]),
        (select(f.expr("key as `the key`")), ["the key"], [("the key", "key", False)]),
        (
            lambda plan: connect.WithColumnsRenamed(plan, {"key": "k"}),
            ["k", *SOURCE[1:]],
            [("k", "key", False), *((name, name, False) for name in SOURCE[1:])],
        ),
        (lambda plan: connect.SubqueryAlias(plan, "t"), SOURCE, [(name, name, False) for name in SOURCE]),
        (
            lambda plan: connect.WithColumns(plan, ["text"], [f.col("value").cast("string")]),
            [*SOURCE, "text"],
            [*((name, name, False) for name in SOURCE), ("text", "value", True)],
        ),
    ],
)
def test_selected_and_renamed_columns_are_followed(step: Any, names: list[str], wanted: Any) -> None:
    assert columns_of(source().with_(step, *names)) == list(wanted)


def test_steps_follow_each_other() -> None:
    first = source().with_(select(f.col("value").cast("string").alias("v"), f.col("key")), "v", "key")
    second = first.with_(select(f.col("v").alias("w")), "w")
    assert columns_of(second) == [("w", "value", True)]


@pytest.mark.parametrize(
    ("step", "names", "said"),
    [
        (lambda plan: connect.Filter(plan, f.col("offset") > 1), SOURCE, r"where\(\)"),
        (select(f.upper(f.col("value")).alias("v")), ["v"], "the expression .*upper"),
        (select(f.expr("upper(value) AS v")), ["v"], r"the expression upper\(value\)"),
        (select(f.col("offset").cast("string")), ["offset"], r"cast\(offset as string\)"),
        (lambda plan: connect.Limit(plan, 1), SOURCE, r"limit\(\)"),
        (select(f.col("value.x").alias("x")), ["x"], "the expression"),
        (select(f.col("key")), ["other"], "cannot read"),
    ],
)
def test_what_the_read_cannot_run_is_named(step: Any, names: list[str], said: str) -> None:
    frame = source().with_(step, *names)
    found = trace(frame, frame.columns)
    assert isinstance(found, Obstacle)
    assert re.search(said, found.what), found.what


def test_rows_of_a_step_in_the_read_are_columns_of_the_source() -> None:
    columns = ReadColumns((ReadColumn("key", "key"), ReadColumn("value", "value")))
    step = RowsInRead.of(Unchanged(), columns, "digits", {"key": "key"})
    read = source(step__in__read=step.to_option())
    read.columns = ["key", "n"]
    frame = read.with_(select(f.col("n").alias("number"), f.col("key")), "number", "key")
    found = trace(frame, ["number", "key"])
    assert isinstance(found, Lineage)
    assert found.columns.before == step
    assert "step.in.read" not in found.options
    assert is_of_source(frame, "key")
    assert not is_of_source(frame, "number")


@pytest.mark.parametrize(
    ("text", "is_copy"),
    [
        ("SELECT * FROM batch", True),
        ("SELECT value, topic FROM batch WHERE topic <> 'x'", True),
        ("SELECT upper(topic) AS topic FROM batch", False),
        ("SELECT key AS topic FROM batch", False),
    ],
)
def test_a_column_that_sql_selects_unchanged_is_one_of_the_source(text: str, is_copy: bool) -> None:
    pytest.importorskip("duckdb")
    from kafka_eos_source.in_read.sql import compile_sql

    names = ("key", "value", "topic")
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in names))
    transform = compile_sql(text, StructType([StructField(name, StringType()) for name in names]))
    step = RowsInRead.of(transform, columns, "runs SQL", transform.copies)
    frame: Any = source(step__in__read=step.to_option())
    frame.columns = transform.rows.names
    assert is_of_source(frame, "topic") is is_copy


def test_packed_rows_and_other_sources_are_no_columns_of_the_source() -> None:
    rows = StructType([StructField("value", BinaryType())])
    packed = MapInRead(ReadColumns((ReadColumn("value", "value"),)), rows, None)
    frame = source(step__in__read=packed.to_option())
    frame.columns = packed.schema.names
    assert trace(frame, frame.columns) == Obstacle("map_in_read() or a stateful operator")
    assert trace(source("kafka"), SOURCE) == Obstacle("the source kafka")
    assert isinstance(trace(source(maxOffsetsPerTrigger="many"), SOURCE), Obstacle)
