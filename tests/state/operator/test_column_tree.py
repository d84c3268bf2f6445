"""Columns of classic sessions, columns of Spark Connect and text are read into the same tree."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.spark.schema import quoted
from kafka_eos_source.state.operator.column_tree import (
    Alias,
    Call,
    Constant,
    Name,
    Node,
    Other,
    Over,
    Sql,
    Star,
    calls,
    name_parts,
    parse,
    tree,
)
from tests.state.operator.classic_columns import classic, of_frame

F = pytest.importorskip("pyspark.sql.connect.functions")
Window = pytest.importorskip("pyspark.sql.connect.window").Window


def name(*parts: str, of_frame: bool = False) -> Name:
    return Name(None, parts, of_frame)


def call(function: str, *arguments: Node, **more: Any) -> Call:
    return Call(None, function, arguments, **more)


X, Y = name("x"), name("y")

TREES: dict[str, tuple[Any, Node]] = {
    "rows": (F.count("*"), call("count", Star(None))),
    "star of a name": (F.count("t.*"), call("count", Star(None, "t.*"))),
    "name": (F.sum("x"), call("sum", X)),
    "field": (F.sum("a.b"), call("sum", name("a", "b"))),
    "dot in a name": (F.sum("`a.b`"), call("sum", name("a.b"))),
    "two columns": (F.max_by("x", F.col("y")), call("max_by", X, Y)),
    "distinct": (F.count_distinct("x", "y"), call("count", X, Y, distinct=True)),
    "sum of distinct": (F.sum_distinct("x"), call("sum", X, distinct=True)),
    "literal": (F.first("x", True), call("first", X, Constant(None, True))),
    "array": (
        F.percentile_approx("x", [0.5, 0.9], 100),
        call(
            "percentile_approx",
            X,
            call("array", Constant(None, 0.5), Constant(None, 0.9)),
            Constant(None, 100),
        ),
    ),
    "operator": (F.sum(F.col("x") * 2), call("sum", call("*", X, Constant(None, 2)))),
    "alias": (F.sum("x").alias("total"), Alias(None, call("sum", X), ("total",))),
    "metadata": (
        F.sum("x").alias("total", metadata={"a": 1}),
        Alias(None, call("sum", X), ("total",), has_metadata=True),
    ),
    "window": (F.sum("x").over(Window.partitionBy("y")), Over(None, call("sum", X))),
    "text": (F.expr("sum(x)"), Sql(None, "sum(x)")),
    "function by name": (F.call_function("Sum", "x"), call("sum", X, by_name=True)),
    "cast": (F.sum("x").cast("int"), Other(None, "Cast", (call("sum", X),))),
    "condition": (
        F.sum(F.when(F.col("x") > 1, F.col("y"))),
        call("sum", Other(None, "CaseWhen", (call(">", X, Constant(None, 1)), Y))),
    ),
}


@pytest.mark.parametrize("form", ["classic", "connect"])
@pytest.mark.parametrize("which", TREES)
def test_the_tree_of_a_column(which: str, form: str) -> None:
    column, expected = TREES[which]
    assert tree(column if form == "connect" else classic(column)) == expected


def test_columns_that_were_taken_from_a_frame() -> None:
    from pyspark.sql.connect.column import Column
    from pyspark.sql.connect.expressions import ColumnReference, UnresolvedStar

    assert tree(of_frame("x")) == name("x", of_frame=True)
    assert tree(Column(ColumnReference("x", 7))) == name("x", of_frame=True)
    assert tree(classic(Column(ColumnReference("x", 7)))) == name("x", of_frame=True)
    star = Column(UnresolvedStar(None, 7))
    assert tree(star) == tree(classic(star)) == Star(None, "df['*']")


def test_each_node_knows_the_node_of_spark_that_it_stands_for() -> None:
    column = F.sum(F.col("x") * 2)
    read = tree(column)
    assert isinstance(read, Call)
    assert read.source is column._expr
    assert read.arguments[0].source is column._expr._args[0]


def test_a_classic_column_takes_unknown_attributes_for_fields_of_a_struct() -> None:
    """``column._expr`` of a classic column is a column, so its absence cannot be found out by asking."""

    class Classic(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return Classic()

    assert tree(Classic(_jc=classic(F.sum("x"))._jc)) == call("sum", X)


def test_calls_finds_nested_calls() -> None:
    within = F.when(F.sum("x") > 1, F.max(F.col("y"))).cast("int")
    assert [each.name for each in calls(tree(within))] == [">", "sum", "max"]
    assert [each.name for each in calls(tree(F.sum("x").over(Window.partitionBy("y"))))] == ["sum"]


@pytest.mark.parametrize("which", [each for each in TREES if each not in ("metadata",)])
def test_a_tree_is_shown_as_a_user_wrote_it(which: str) -> None:
    shown = {
        "rows": "count(*)",
        "star of a name": "count(t.*)",
        "name": "sum(x)",
        "field": "sum(a.b)",
        "dot in a name": "sum(a.b)",
        "two columns": "max_by(x, y)",
        "distinct": "count(DISTINCT x, y)",
        "sum of distinct": "sum(DISTINCT x)",
        "literal": "first(x, True)",
        "array": "percentile_approx(x, array(0.5, 0.9), 100)",
        "operator": "sum(x * 2)",
        "alias": "sum(x) AS total",
        "window": "sum(x) OVER (…)",
        "text": "expr('sum(x)')",
        "function by name": "sum(x)",
        "cast": "Cast(sum(x))",
        "condition": "sum(CaseWhen(x > 1, y))",
    }
    assert str(TREES[which][1]) == shown[which]


# -- names


@given(st.lists(st.text(st.sampled_from("ab.` "), min_size=1), min_size=1))
def test_a_quoted_name_is_split_into_its_parts(parts: list[str]) -> None:
    assert name_parts(quoted(*parts)) == tuple(parts)


@pytest.mark.parametrize(
    ("identifier", "parts"),
    [("x", ("x",)), ("a.b.c", ("a", "b", "c")), ("`a.b`.c", ("a.b", "c")), ("a``", ("a``",)), ("", ("",))],
)
def test_a_name_is_split_at_its_dots(identifier: str, parts: tuple[str, ...]) -> None:
    assert name_parts(identifier) == parts


# -- text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count", name("count")),
        ("count(*)", call("count", Star(None))),
        (" COUNT ( * ) ", call("count", Star(None))),
        ("count(1)", call("count", Constant(None, 1))),
        ("sum(x)", call("sum", X)),
        ("sum(`a.b`)", call("sum", name("a.b"))),
        ("sum(a.`b c`)", call("sum", name("a", "b c"))),
        ("sum(größe)", call("sum", name("größe"))),
        ("count(DISTINCT x, y)", call("count", X, Y, distinct=True)),
        ("count(distinct)", call("count", name("distinct"))),
        ("max_by(x, y)", call("max_by", X, Y)),
        ("first(x, true)", call("first", X, Constant(None, True))),
        ("approx_count_distinct(x, 1e-2)", call("approx_count_distinct", X, Constant(None, 0.01))),
        (
            "percentile_approx(x, array(0.5, .9), 100)",
            call(
                "percentile_approx",
                X,
                call("array", Constant(None, 0.5), Constant(None, 0.9)),
                Constant(None, 100),
            ),
        ),
        ("sum()", call("sum")),
    ],
)
def test_text_is_read_into_the_tree(text: str, expected: Node) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "sum(x", "sum(x))", "sum(x y)", "sum(x,)", "sum(x * 2)", "sum(x) / 2", "'x'", "(x)", "sum(x;)"],
)
def test_other_text_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(InvalidSchemaError, match=r"F\.sum\(F\.col\('amount'\) \* 2\)") as error:
        parse(text)
    assert repr(text) in error.value.message


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidSchemaError):
        assert isinstance(parse(text), Node)
