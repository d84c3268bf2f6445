"""Aggregates in Spark's words become declarations, and their operands columns of the frame."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pyspark.sql.functions as spark_functions
import pytest
from hypothesis import given
from pyspark.errors import AnalysisException

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.operator.spark_aggregates import NAMES, read_aggregates
from tests import ROOT

F = pytest.importorskip("pyspark.sql.connect.functions")
Window = pytest.importorskip("pyspark.sql.connect.window").Window


@pytest.fixture(autouse=True)
def connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``pyspark.sql.functions`` return columns of Spark Connect, which need no JVM."""
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")


class Frame:
    """A frame that records which columns were computed."""

    COLUMNS = ("k", "x", "y", "amount", "flag", "a.b")

    def __init__(
        self, columns: tuple[str, ...] = COLUMNS, *, case_sensitive: bool = False, refuses: bool = False
    ) -> None:
        self.columns = list(columns)
        self.computed: dict[str, str] = {}
        self._refuses = refuses
        settings = {"spark.sql.caseSensitive": str(case_sensitive).lower()}
        self.sparkSession = SimpleNamespace(conf=settings)

    @property
    def schema(self) -> None:
        if self._refuses:
            raise AnalysisException("[UNRESOLVED_COLUMN] there is no nix;\n'Project [a lot of text]")

    def select(self, column: Any) -> Frame:
        name = column._expr._unparsed_identifier
        if name not in self.columns:
            raise AnalysisException(f"[MISSING_ATTRIBUTES] {name} is missing;\n'Project")
        return Frame((name,))

    def withColumns(self, columns: dict[str, Any]) -> Frame:  # noqa: N802
        frame = Frame((*self.columns, *columns), refuses=self._refuses)
        frame.computed = {name: str(column._expr) for name, column in columns.items()}
        return frame


def read(aggregate: Any, frame: Frame | None = None, result: str = "r") -> tuple[Aggregate, dict[str, str]]:
    """Returns the declaration of one aggregate, and the columns that were computed for it."""
    given: Any = frame or Frame()
    found: Any
    found, aggregates = read_aggregates(given, {result: aggregate})
    return aggregates[result], found.computed


def refusal(aggregate: Any, frame: Frame | None = None, result: str = "r") -> str:
    with pytest.raises(InvalidSchemaError) as error:
        read(aggregate, frame, result)
    return str(error.value)


#: For each function of Spark that takes one column: the declaration of it for the column ``x``.
ONE_COLUMN = {
    "any_value": agg.first("x"),
    "approx_count_distinct": agg.approx_count_distinct("x"),
    "array_agg": agg.collect_list("x"),
    "avg": agg.avg("x"),
    "bool_and": agg.bool_and("x"),
    "bool_or": agg.bool_or("x"),
    "collect_list": agg.collect_list("x"),
    "collect_set": agg.collect_set("x"),
    "count": agg.count("x"),
    "count_distinct": agg.count_distinct("x"),
    "every": agg.bool_and("x"),
    "first": agg.first("x"),
    "first_value": agg.first("x"),
    "last": agg.last("x"),
    "last_value": agg.last("x"),
    "max": agg.max("x"),
    "mean": agg.avg("x"),
    "min": agg.min("x"),
    "some": agg.bool_or("x"),
    "std": agg.stddev_samp("x"),
    "stddev": agg.stddev_samp("x"),
    "stddev_pop": agg.stddev_pop("x"),
    "stddev_samp": agg.stddev_samp("x"),
    "sum": agg.sum("x"),
    "var_pop": agg.var_pop("x"),
    "var_samp": agg.var_samp("x"),
    "variance": agg.var_samp("x"),
}

#: Other forms: what a user writes, and the declaration.
FORMS: dict[str, tuple[Any, Aggregate]] = {
    "count rows": (F.count("*"), agg.count()),
    "count a literal": (F.count(F.lit(1)), agg.count()),
    "count rows, text": ("count(*)", agg.count()),
    "count a literal, text": ("count(1)", agg.count()),
    "count, a word": ("count", agg.count()),
    "count, a word in capitals": ("COUNT", agg.count()),
    "distinct, text": ("count(DISTINCT x, y)", agg.count_distinct("x", "y")),
    "distinct": (F.count_distinct("x", F.col("y")), agg.count_distinct("x", "y")),
    "distinct, old name": (F.countDistinct("x"), agg.count_distinct("x")),
    "max_by": (F.max_by("x", "y"), agg.max_by("x", "y")),
    "min_by": (F.min_by(F.col("x"), "y"), agg.min_by("x", "y")),
    "max_by, text": ("max_by(x, y)", agg.max_by("x", "y")),
    "min_by, text": ("min_by(x, y)", agg.min_by("x", "y")),
    "rsd": (F.approx_count_distinct("x", 0.01), agg.approx_count_distinct("x", 0.01)),
    "rsd, text": ("approx_count_distinct(x, 0.01)", agg.approx_count_distinct("x", 0.01)),
    "first, nulls": (F.first("x", ignorenulls=True), agg.first("x", True)),
    "last, nulls": (F.last("x", True), agg.last("x", True)),
    "any_value, nulls": (F.any_value("x", True), agg.first("x", True)),
    "last, text": ("last(x, true)", agg.last("x", True)),
    "percentile": (F.percentile_approx("x", 0.5), agg.percentile_approx("x", 0.5)),
    "percentiles": (
        F.percentile_approx("x", [0.5, 0.9], 100),
        agg.percentile_approx("x", [0.5, 0.9], 100),
    ),
    "percentile, other name": (
        F.approx_percentile("x", (0.5,), F.lit(7)),
        agg.percentile_approx("x", (0.5,), 7),
    ),
    "percentile, text": ("approx_percentile(x, 0.5)", agg.percentile_approx("x", 0.5)),
    "a declaration": (agg.last("x", by=("y", "amount")), agg.last("x", by=("y", "amount"))),
}


def test_the_tables_of_this_test_have_each_function() -> None:
    others = {"max_by", "min_by", "percentile_approx", "approx_percentile", "count_if"}
    assert {*ONE_COLUMN, *others} == set(NAMES)


@pytest.mark.parametrize("form", ["name", "column", "alias of the operand", "alias", "text", "other case"])
@pytest.mark.parametrize("name", ONE_COLUMN)
def test_a_function_of_a_column(name: str, form: str) -> None:
    function = getattr(F, name)
    written: dict[str, Callable[[], Any]] = {
        "name": lambda: function("x"),
        "column": lambda: function(F.col("x")),
        "alias of the operand": lambda: function(F.col("x").alias("other")),
        "alias": lambda: function("x").alias("r"),
        "text": lambda: f"{name}(x)",
        "other case": lambda: f" {name.upper()} ( X ) ",
    }
    assert read(written[form]()) == (ONE_COLUMN[name], {})


@pytest.mark.parametrize("name", ONE_COLUMN)
def test_a_function_of_an_expression_reads_a_computed_column(name: str) -> None:
    found, computed = read(getattr(F, name)(F.col("x") * 2), result="twice")
    assert found.columns() == ("twice__input",)
    assert found.kind == ONE_COLUMN[name].kind
    assert computed == {"twice__input": "coalesce(*(x, 2))"}


@pytest.mark.parametrize("which", FORMS)
def test_another_form(which: str) -> None:
    written, expected = FORMS[which]
    assert read(written) == (expected, {})


def test_each_operand_that_is_an_expression_is_a_column_of_its_own() -> None:
    found, computed = read(F.max_by(F.upper("x"), F.col("y") + 1))
    assert found == agg.max_by("r__input", "r__input2")
    assert computed == {"r__input": "coalesce(upper(x))", "r__input2": "coalesce(+(y, 1))"}
    found, computed = read(F.count_distinct("x", F.upper("y"), "amount"))
    assert found == agg.count_distinct("x", "r__input2", "amount")
    assert computed == {"r__input2": "coalesce(upper(y))"}


def test_count_if_counts_the_rows_in_which_a_condition_is_true() -> None:
    expected = (agg.count("r__input"), {"r__input": "CASE WHEN coalesce(>(x, 1)) THEN True END"})
    assert read(F.count_if(F.col("x") > 1)) == expected
    _, computed = read("count_if(flag)")
    assert computed == {"r__input": "CASE WHEN `flag` THEN True END"}


def test_names_with_dots_are_columns_only_in_backquotes() -> None:
    assert read(F.sum("`a.b`")) == (agg.sum("a.b"), {})
    assert read("sum(`a.b`)") == (agg.sum("a.b"), {})
    assert read(F.sum("a.b")) == (agg.sum("r__input"), {"r__input": "coalesce(a.b)"})
    assert read("sum(a.b)") == (agg.sum("r__input"), {"r__input": "`a`.`b`"})


def test_a_literal_operand_is_computed_unless_count_counts_it() -> None:
    assert read(F.sum(F.lit(2))) == (agg.sum("r__input"), {"r__input": "coalesce(2)"})
    assert read(F.count(F.lit(None))) == (agg.count("r__input"), {"r__input": "coalesce(NULL)"})
    assert read("sum(2)") == (agg.sum("r__input"), {"r__input": "2"})


def test_names_are_compared_as_spark_does() -> None:
    assert read(F.sum("AMOUNT")) == (agg.sum("amount"), {})
    assert read(F.sum("X"), Frame(("X", "x"))) == (agg.sum("X"), {})
    assert "'AMOUNT'" in refusal(F.sum("AMOUNT"), Frame(case_sensitive=True))
    assert "'Xx'" in refusal(F.sum("Xx"), Frame(("xx", "XX")))


def test_a_column_that_was_taken_from_the_frame_stays_plain() -> None:
    from pyspark.sql.connect.column import Column
    from pyspark.sql.connect.expressions import ColumnReference

    assert read(F.sum(Column(ColumnReference("x", 3)))) == (agg.sum("x"), {})
    message = refusal(F.sum(Column(ColumnReference("z", 3))))
    assert "'z' of another frame" in message
    assert "[MISSING_ATTRIBUTES] z is missing;" in message
    assert "Project" not in message


def test_results_can_be_named_by_aliases_in_a_sequence() -> None:
    columns = [F.count("*").alias("orders"), F.sum(F.col("x") * 2).alias("revenue")]
    frame, found = read_aggregates(Frame(), columns)  # type: ignore[arg-type]
    assert found == {"orders": agg.count(), "revenue": agg.sum("revenue__input")}
    assert frame.columns[-1] == "revenue__input"
    _, found = read_aggregates(Frame(), columns[0])  # type: ignore[arg-type]
    assert found == {"orders": agg.count()}


def test_the_outer_one_of_two_aliases_counts() -> None:
    assert read(F.count("*").alias("inner").alias("r")) == (agg.count(), {})


@pytest.mark.parametrize(
    ("aggregates", "text"),
    [
        ([F.count("*")], "count(*) has no name"),
        (["count"], "'count' (str) has no name"),
        ([agg.count()], "Aggregate"),
        ([F.count("*").alias("n"), F.max("x").alias("n")], "two aggregates have the alias 'n'"),
        (3, "the aggregates are 3 (int)"),
        ("count", "the aggregates are 'count' (str)"),
        ({1: "count"}, "the result 1"),
    ],
)
def test_aggregates_without_a_name_are_refused(aggregates: Any, text: str) -> None:
    with pytest.raises(InvalidSchemaError) as error:
        read_aggregates(Frame(), aggregates)  # type: ignore[arg-type]
    assert text in error.value.message
    assert error.value.fix


REFUSED: dict[str, tuple[Any, str, str]] = {
    "expression of aggregates": (
        lambda: F.sum("x") / F.sum("y"),
        "is sum(x) / sum(y), an expression around sum",
        "after the operator",
    ),
    "function of an aggregate": (
        lambda: F.round(F.avg("x")),
        "is round(avg(x)), an expression around avg",
        "after the operator",
    ),
    "cast of an aggregate": (lambda: F.count("*").cast("int"), "around count", "after the operator"),
    "aggregate of an aggregate": (lambda: F.max(F.sum("x")), "an aggregate of the aggregate sum", "twice"),
    "aggregate within an expression": (
        lambda: F.max(F.abs(F.sum("x"))),
        "an aggregate of the aggregate sum",
        "twice",
    ),
    "aggregate of another's aggregate": (
        lambda: F.max(F.median("x")),
        "an aggregate of the aggregate median",
        "twice",
    ),
    "sum of distinct": (lambda: F.sum_distinct("x"), "sum(DISTINCT x)", "F.collect_set"),
    "sum of distinct, text": (lambda: "sum(DISTINCT x)", "sum(DISTINCT x)", "F.collect_set"),
    "window": (
        lambda: F.sum("x").over(Window.partitionBy("k")),
        "is the window function sum(x) OVER (…)",
        "remove .over(…)",
    ),
    "operand with a window": (
        lambda: F.sum(F.row_number().over(Window.partitionBy("k"))),
        "is the window function row_number() OVER (…)",
        "remove .over(…)",
    ),
    "text of Spark": (lambda: F.expr("sum(x)"), "is F.expr('sum(x)')", "without F.expr: 'sum(amount)'"),
    "filter in text of Spark": (
        lambda: F.expr("sum(x) FILTER (WHERE flag)"),
        "is F.expr('sum(x) FILTER (WHERE flag)')",
        "without F.expr",
    ),
    "function by name": (lambda: F.call_function("sum", "x"), "call_function('sum', …)", "use F.sum(…)"),
    "unknown function by name": (
        lambda: F.call_function("mine", "x"),
        "call_function('mine', …)",
        "count_if",
    ),
    "aggregate of Spark only": (
        lambda: F.median("x"),
        "the aggregate median of Spark",
        "F.percentile_approx(column, 0.5)",
    ),
    "another of Spark only": (lambda: F.corr("x", "y"), "the aggregate corr of Spark", "count_if"),
    "scalar function": (lambda: F.upper("x"), "is 'upper', which is not an aggregate", "count_if"),
    "operator": (lambda: F.col("x") * 2, "is x * 2, which is not an aggregate", "count_if"),
    "column": (lambda: F.col("x"), "is x, which is not an aggregate", "F.max('x')"),
    "literal": (lambda: F.lit(1), "is 1, which is not an aggregate", "count_if"),
    "misspelt": (lambda: "avgg(x)", "'avgg', which is not an aggregate. Did you mean 'avg'", "count_if"),
    "misspelt word": (lambda: "cuont", "Did you mean 'count'", "count_if"),
    "word without a column": (lambda: "sum", "is the function 'sum' without a column", "{'r': 'sum(k)'}"),
    "name of a column": (lambda: "amount", "is the column 'amount' and no aggregate", "'max(amount)'"),
    "number": (lambda: 3, "is 3 (int)", "F.sum('amount')"),
    "None": (lambda: None, "is None (NoneType)", "'sum(amount)'"),
    "function itself": (lambda: F.sum, "(function)", "F.sum(…)"),
    "Python's function": (lambda: sum, "(builtin_function_or_method)", "F.sum(…)"),
    "other alias": (lambda: F.count("*").alias("n"), "has the alias 'n'", "name the result 'n'"),
    "metadata": (lambda: F.count("*").alias("r", metadata={"a": 1}), "has metadata", "withMetadata"),
    "distinct star": (lambda: F.count_distinct("*"), "count(DISTINCT *)", "F.count_distinct('a', 'b')"),
    "star of a frame": (lambda: F.count("t.*"), "count(t.*)", "F.count('*')"),
    "too few arguments": (lambda: "max_by(x)", "expected 2 columns", "max_by"),
    "too many arguments": (lambda: "sum(x, y)", "expected one column", "sum"),
    "no argument": (lambda: "count()", "expected count(*) or one column", "count"),
    "several columns of count": (lambda: "count(x, y)", "expected count(*) or one column", "count"),
    "no percentage": (lambda: "percentile_approx(x)", "one column and a percentage", "percentile_approx"),
    "a column for a literal": (
        lambda: F.percentile_approx("x", F.col("y")),
        "expected a literal for 'percentage'",
        "Python value",
    ),
    "expression in text": (lambda: "sum(abs(x))", "abs(x)", "F.sum(F.col('amount') * 2)"),
    "unknown column": (
        lambda: F.sum("amuont"),
        "reads the column 'amuont', which the frame does not have. Did you mean 'amount'",
        "k, x, y, amount, flag, a.b",
    ),
    "unknown column in text": (lambda: "sum(amuont)", "Did you mean 'amount'", "k, x, y, amount"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_is_no_aggregate_is_refused(which: str) -> None:
    written, found, fix = REFUSED[which]
    with pytest.raises(InvalidSchemaError) as error:
        read(written())
    assert found in error.value.message
    assert fix in error.value.fix
    if which != "unknown function by name" and "column" not in which:
        assert "'r'" in error.value.message or "operand" in error.value.message


def test_a_misspelt_argument_of_aggregate_is_recognised() -> None:
    assert "Did you mean the argument 'window'?" in refusal(SimpleNamespace(), result="windw")


def test_literals_are_checked_by_the_declaration() -> None:
    with pytest.raises(InvalidOptionError, match="rsd=2"):
        read(F.approx_count_distinct("x", 2.0))
    with pytest.raises(InvalidOptionError, match="percentage=7"):
        read("percentile_approx(x, 7)")


def test_a_computed_column_does_not_replace_one_of_the_frame() -> None:
    message = refusal(F.sum(F.col("x") * 2), Frame(("x", "R__INPUT")))
    assert "needs a column 'r__input' for x * 2" in message


def test_an_expression_that_spark_cannot_compute_is_refused_with_sparks_reason() -> None:
    message = refusal(F.sum(F.upper("nix")), Frame(refuses=True))
    assert "upper(nix) of 'r__input'" in message
    assert "[UNRESOLVED_COLUMN] there is no nix;" in message
    assert "Project" not in message


def test_each_name_is_a_function_of_spark_that_can_be_called_with_columns() -> None:
    for name in NAMES:
        assert inspect.signature(getattr(spark_functions, name)).parameters


@given(st.sampled_from(NAMES), st.text(st.sampled_from("xy,*( )1.5true`")))
def test_any_text_is_read_or_refused(name: str, rest: str) -> None:
    with contextlib.suppress(InvalidSchemaError, InvalidOptionError):
        assert isinstance(read(name + rest)[0], Aggregate)


def test_the_documentation_lists_the_same_names() -> None:
    page = (ROOT / "docs" / "aggregates.md").read_text("utf-8")
    section = page.partition("## In Spark's words")[2].partition("\n## ")[0]
    table = section.partition("| Spark | declaration")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    assert {name for spark, _ in rows for name in re.findall(r"`(\w+)`", spark)} == set(NAMES)
    declared = {name for _, ours in rows for name in re.findall(r"`(\w+)`", ours)}
    assert all(callable(getattr(agg, name)) for name in declared)
