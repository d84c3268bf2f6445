"""The frame of an operator: what it does with each method of DataFrame, without a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.arrow import past_packets
from kafka_eos_source.spark.operator_frame import (
    METHODS,
    Adapted,
    Inherited,
    Passed,
    Refused,
    Senders,
    is_operator_frame,
    operator_frame,
    refused_elsewhere,
    senders_of,
    spark_frame,
    spark_grouping,
)


class FakeGrouping:
    """Takes the place of GroupedData."""

    def __init__(self, frame: FakeFrame) -> None:
        self._df = frame

    def count(self) -> FakeFrame:
        return FakeFrame(["k", "count"])


class FakeWriter:
    """Takes the place of DataStreamWriter; `calls` are those of Spark's own methods."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def format(self, source: str) -> FakeWriter:
        self.calls.append(source)
        return self

    def option(self, name: str, value: str) -> FakeWriter:
        self.calls.append((name, value))
        return self

    def options(self, **options: str) -> FakeWriter:
        self.calls += options.items()
        return self

    def start(self, path: Any = None, format: str | None = None, *rest: Any, **named: Any) -> str:
        if format is not None:
            self.format(format)
        return "query"

    def foreach(self, f: Any) -> FakeWriter:
        raise AssertionError

    foreachBatch = toTable = foreach  # noqa: N815


class FakeFrame(ClassicDataFrame):
    """A frame of which only the columns exist; `steps` are the calls of Spark's own methods."""

    def __init__(self, columns: Iterable[str], steps: tuple[Any, ...] = (), streaming: bool = False) -> None:
        self.__dict__.update(names=list(columns), steps=steps, streaming=streaming)

    @property
    def writeStream(self) -> Any:  # noqa: N802
        return FakeWriter()

    def _after(self, columns: Iterable[str], *step: Any) -> FakeFrame:
        return FakeFrame(columns, (*self.__dict__["steps"], step))

    @property
    def columns(self) -> list[str]:
        return list(self.__dict__["names"])

    @property
    def isStreaming(self) -> bool:  # noqa: N802
        return bool(self.__dict__["streaming"])

    def select(self, *columns: Any) -> FakeFrame:  # type: ignore[override]
        names = [name for each in columns for name in (self.columns if each == "*" else [each.strip("`")])]
        return self._after(names, "select", *columns)

    selectExpr = select  # noqa: N815

    def drop(self, *columns: Any) -> FakeFrame:
        return self._after([each for each in self.columns if each not in columns], "drop", *columns)

    def toDF(self, *columns: str) -> FakeFrame:  # noqa: N802
        return self._after(columns, "toDF", *columns)

    def union(self, other: DataFrame) -> FakeFrame:
        assert self.columns == other.columns
        return self._after(self.columns, "union")

    def repartition(self, *arguments: Any) -> FakeFrame:
        return self._after(self.columns, "repartition", *arguments)

    def coalesce(self, tasks: int) -> FakeFrame:  # type: ignore[override]
        return self._after(self.columns, "coalesce", tasks)

    def hint(self, name: str, *_: Any) -> FakeFrame:
        return self._after(self.columns, "hint", name)

    def observe(self, *_: Any) -> FakeFrame:
        return self._after([], "observe")

    def groupBy(self, *_: Any) -> Any:  # noqa: N802
        return FakeGrouping(self)

    def join(self, other: DataFrame, on: Any = None, how: str | None = None) -> FakeFrame:
        return self._after([*self.columns, "joined"], "join", on, how)

    def withColumn(self, name: str, column: Any) -> FakeFrame:  # noqa: N802
        return self._after([*self.columns, name], "withColumn", name)


def result(*columns: str, tasks: int = 2) -> Any:
    return operator_frame(FakeFrame(columns or ("k", "n", CHANGELOG)), tasks)


def test_the_table_names_each_public_member_of_dataframe() -> None:
    """A method of a new version of Spark must be put into the table, or state could get lost unnoticed."""
    known = {name for name in dir(DataFrame) if not name.startswith("_")}
    assert sorted(known - METHODS.keys()) == []


#: Members that some of the supported versions lack.
NEWER = {"nearestByJoin", "repartitionById", "toJSON", "zip", "zipWithIndex", "rdd"}


def test_the_table_names_nothing_else() -> None:
    known = {name for name in dir(DataFrame) if not name.startswith("_")}
    assert METHODS.keys() - known - NEWER == set()


def test_a_result_is_a_dataframe_of_its_base_and_of_one_class() -> None:
    frame = result()
    assert isinstance(frame, DataFrame)
    assert isinstance(frame, FakeFrame)
    assert type(frame) is type(result().select("k"))
    assert type(spark_frame(frame)) is FakeFrame
    assert is_operator_frame(frame)
    assert not is_operator_frame(spark_frame(frame))
    assert frame.columns == ["k", "n", CHANGELOG], "the column is visible"


@pytest.mark.parametrize(
    ("step", "columns"),
    [
        (lambda each: each.select("k"), ["k", CHANGELOG]),
        (lambda each: each.select(["k", "n"]), ["k", "n", CHANGELOG]),
        (lambda each: each.select("*"), ["k", "n", CHANGELOG]),
        (lambda each: each.select("k", CHANGELOG), ["k", CHANGELOG]),
        (lambda each: each.selectExpr("k"), ["k", CHANGELOG]),
        (lambda each: each.selectExpr(["n"]), ["n", CHANGELOG]),
        (lambda each: each.drop("k"), ["n", CHANGELOG]),
        (lambda each: each.toDF("a", "b"), ["a", "b", CHANGELOG]),
        (lambda each: each.toDF("a", "b", CHANGELOG), ["a", "b", CHANGELOG]),
        (lambda each: each.hint("broadcast"), ["k", "n", CHANGELOG]),
        (lambda each: each.withColumn("x", None), ["k", "n", CHANGELOG, "x"]),
        (lambda each: each.transform(lambda frame: frame.select("n")), ["n", CHANGELOG]),
        (lambda each: each.join(FakeFrame(["k"]), "k", "left_outer"), ["k", "n", CHANGELOG, "joined"]),
    ],
)
def test_a_step_keeps_the_column(step: Callable[[Any], Any], columns: list[str]) -> None:
    after = step(result())
    assert after.columns == columns
    assert is_operator_frame(after)


@pytest.mark.parametrize(
    "how", [None, "inner", "cross", "full", "right", "right_outer", "left_semi", "leftsemi"]
)
def test_a_join_that_loses_rows_is_refused(how: str | None) -> None:
    with pytest.raises(InvalidSchemaError, match=r"^\[KAFKA_EOS.INVALID_SCHEMA\] join\(.* use how='left'"):
        result().join(FakeFrame(["k"]), "k", how)


def test_a_join_with_a_stream_is_refused_whatever_its_kind() -> None:
    with pytest.raises(InvalidSchemaError, match="with a streaming frame"):
        result().join(FakeFrame(["k"], streaming=True), "k", "left")


@pytest.mark.parametrize("name", [name for name, rule in METHODS.items() if isinstance(rule, Refused)])
def test_a_refused_method_names_itself_and_a_way_out(name: str) -> None:
    if not hasattr(FakeFrame, name):
        pytest.skip("this version of Spark has no such method")
    with pytest.raises(InvalidSchemaError, match=rf" {name}\(\) after a stateful operator .* Fix: "):
        getattr(result(), name)("any", argument=1)


@pytest.mark.parametrize("name", [CHANGELOG, CHANGELOG.upper()])
def test_the_column_cannot_be_dropped_replaced_or_renamed(name: str) -> None:
    for step in (
        lambda: result().drop("k", name),
        lambda: result().withColumn(name, None),
        lambda: result().withColumns({name: None}),
        lambda: result().withColumnRenamed(name, "x"),
        lambda: result().withColumnRenamed("k", name),
        lambda: result().withColumnsRenamed({"k": name}),
    ):
        with pytest.raises(InvalidSchemaError, match="names the column '__kafka_eos_changelog'"):
            step()


def test_a_step_that_unexpectedly_drops_the_column_is_refused() -> None:
    """Nothing is believed: also of a step that Spark changes in a later version, the result is looked at."""
    with pytest.raises(InvalidSchemaError, match=r"observe\(\) after a stateful operator drops the column"):
        result().observe("x")
    with pytest.raises(InvalidSchemaError, match=r"transform\(\) after a stateful operator drops the column"):
        result().transform(lambda frame: spark_frame(frame).select("k"))


def test_only_operators_use_the_grouping_of_a_result() -> None:
    grouped = result().groupBy("k")
    with pytest.raises(InvalidSchemaError, match=r"groupBy\(\)\.count\(\) .* use aggregate\(…\)"):
        grouped.count()
    assert spark_grouping(grouped).count().columns == ["k", "count"]
    assert type(grouped._df) is FakeFrame


def test_the_operator_of_the_second_frame_of_a_union_gets_tasks_of_its_own() -> None:
    """The column also moves to the position that it has in the first frame."""
    seen: list[Any] = []

    class Recording(FakeFrame):
        def union(self, other: DataFrame) -> FakeFrame:
            seen.append(other)
            return super().union(other)

    first = operator_frame(Recording(["k", CHANGELOG, "n"]), 2)
    both = first.union(result("a", "b", CHANGELOG, tasks=3).toDF("k", "n"))
    assert seen[0].columns == ["k", CHANGELOG, "n"]
    assert ("repartition", 3) in seen[0].steps
    after = operator_frame(Recording(["k", CHANGELOG, "n"]), 0).union(both)
    assert ("repartition", 5) in seen[1].steps, "the tasks of both operators"
    assert is_operator_frame(after)
    operator_frame(Recording(["k", CHANGELOG]), 2).union(result("k", CHANGELOG, tasks=0))
    assert [step[0] for step in seen[2].steps] == ["select"], "an operator in the read needs no shuffle"


def test_a_frame_knows_the_stores_of_its_operators() -> None:
    one, two = (
        operator_frame(FakeFrame(["k", "n", CHANGELOG]), 2, Senders((each,))) for each in ("one", "two")
    )
    both = one.select("k").union(two.select("k"))
    assert senders_of(both.hint("broadcast")).stores == ("one", "two")
    assert senders_of(one.transform(lambda _: both)).stores == ("one", "two")
    assert senders_of(FakeFrame(["k"])) == Senders()


def test_an_operator_runs_once() -> None:
    one = operator_frame(FakeFrame(["k", "n", CHANGELOG]), 2, Senders(("one",)))
    with pytest.raises(
        InvalidSchemaError, match=r"union\(\) has two frames with .* store 'one'.*use the frame"
    ):
        one.select("k").union(one.select("k"))


def test_the_kinds_of_the_table_are_complete() -> None:
    assert {type(rule) for rule in METHODS.values()} == {Adapted, Passed, Refused, Inherited}


# ------------------------------------------------------------------ functions on Arrow data

ROWS = pa.schema([("k", pa.string()), ("n", pa.int64())])
WITH_PACKETS = ROWS.append(pa.field(CHANGELOG, pa.binary()))


def batch(*rows: tuple[str | None, int | None, bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(WITH_PACKETS.names, row, strict=True)) for row in rows], schema=WITH_PACKETS
    )


BATCHES = (
    batch(("a", 1, None), (None, None, b"P0"), ("b", 2, None)),
    batch((None, None, b"P1")),
    batch(("c", 3, None), ("ignored", 7, b"P2")),
)


@pytest.mark.parametrize("reads", ["all", "one", "none", "ends"])
def test_packets_pass_a_function_that_does_not_see_them(reads: str) -> None:
    """Also one that stops early, or returns nothing: all packets come out, in their order, once."""

    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if reads == "none":
            return
        for each in batches:
            assert each.schema.names == ["k", "n"]
            assert not each.column("k").null_count
            yield each.select(["n", "k"])
            if reads == "one":
                return
        if reads == "ends":
            yield batch(("z", 9, None)).select(["k", "n"])

    found = pa.Table.from_batches(past_packets(function, ROWS)(iter(BATCHES)), WITH_PACKETS).to_pylist()
    assert [row[CHANGELOG] for row in found if row[CHANGELOG]] == [b"P0", b"P1", b"P2"]
    assert all(row["k"] is row["n"] is None for row in found if row[CHANGELOG])
    kept = [row["k"] for row in found if not row[CHANGELOG]]
    assert (
        kept == {"all": ["a", "b", "c"], "one": ["a", "b"], "none": [], "ends": ["a", "b", "c", "z"]}[reads]
    )


READ = Senders(reads=("f",))


def test_a_read_that_sets_bad_records_aside_names_itself_in_refusals() -> None:
    frame = operator_frame(FakeFrame(["k", "n", CHANGELOG]), senders=READ).select("k")
    assert senders_of(frame) == READ
    with pytest.raises(
        InvalidSchemaError, match=r"distinct\(\) after a read with on_bad='dead-letter' .* bad records are in"
    ):
        frame.distinct()
    with pytest.raises(InvalidSchemaError, match=r"groupBy\(\)\.count\(\) after a read with on_bad"):
        frame.groupBy("k").count()
    after = operator_frame(FakeFrame(["k", CHANGELOG]), senders=READ + Senders(("one",)))
    with pytest.raises(InvalidSchemaError, match=r"distinct\(\) after a stateful operator"):
        after.distinct()


def test_only_shards_of_operators_must_stay_in_their_tasks() -> None:
    frame = operator_frame(FakeFrame(["k", CHANGELOG]), senders=READ)
    after = frame.coalesce(1)
    assert is_operator_frame(after)
    assert senders_of(after) == READ
    for senders in (READ + Senders(("one",)), Senders(("one",)), Senders()):
        with pytest.raises(InvalidSchemaError, match=r"coalesce\(\) after a stateful operator moves shards"):
            operator_frame(FakeFrame(["k", CHANGELOG]), senders=senders).coalesce(1)


def test_a_union_of_two_parts_of_one_read_is_refused() -> None:
    frame = operator_frame(FakeFrame(["k", "n", CHANGELOG]), senders=READ)
    with pytest.raises(InvalidSchemaError, match="come from one read with on_bad='dead-letter'"):
        frame.select("k").union(frame.select("k"))
    other = operator_frame(FakeFrame(["k", "n", CHANGELOG]), senders=Senders(reads=("other",)))
    assert senders_of(frame.union(other)) == Senders(reads=("f", "other"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[DataFrame]:
    """The frames whose plans were checked before their query started."""
    found: list[DataFrame] = []
    monkeypatch.setattr("kafka_eos_source.spark.operator_frame.check_changelog", found.append)
    return found


@pytest.mark.parametrize(
    ("write", "call"),
    [
        (lambda writer: writer.format("json").option("path", "p").start(), r"format('json')"),
        (lambda writer: writer.format("kafka-eos").format("memory"), "format('memory')"),
        (lambda writer: writer.option("path", "p").start(), "start() without format('kafka-eos')"),
        (lambda writer: writer.start("path", "delta"), "format('delta')"),
        (lambda writer: writer.start(format="delta"), "format('delta')"),
        (lambda writer: writer.toTable("t"), "toTable()"),
        (lambda writer: writer.foreach(print), "foreach()"),
        (lambda writer: writer.foreachBatch(print), "foreachBatch()"),
    ],
)
@pytest.mark.parametrize(
    ("senders", "after", "fix"),
    [
        (READ, "a read with on_bad='dead-letter'", "on_bad='fail' or 'null'"),
        (Senders(("one",)), "a stateful operator", "sink_options()"),
        (READ + Senders(("one",)), "a stateful operator", "sink_options()"),
    ],
)
def test_packets_are_not_written_to_another_sink_as_rows(
    write: Callable[[Any], Any],
    call: str,
    senders: Senders,
    after: str,
    fix: str,
    checked: list[DataFrame],
) -> None:
    frame = operator_frame(FakeFrame(["k", "n", CHANGELOG]), senders=senders).select("k")
    with pytest.raises(InvalidOptionError) as refused:
        write(frame.writeStream)
    assert refused.value.message.startswith(f"{call} after {after}; expected format('kafka-eos')")
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    "start",
    [
        lambda writer: writer.format("kafka-eos").option("topic", "t").start(),
        lambda writer: writer.format("Kafka-EOS").start(),  # Spark finds the name in upper case too
        lambda writer: writer.start(None, "kafka-eos"),
        lambda writer: writer.start(format="kafka-eos"),
    ],
)
def test_the_plan_of_a_frame_is_checked_before_its_query_starts(
    start: Callable[[Any], Any], checked: list[DataFrame]
) -> None:
    assert start(result().writeStream) == "query"
    assert [type(each) for each in checked] == [FakeFrame]


def test_a_frame_without_packets_may_be_written_anywhere() -> None:
    assert refused_elsewhere(FakeFrame(["k"])) is None
    frame = operator_frame(FakeFrame(["k", CHANGELOG]), senders=READ)
    for each in (frame, spark_frame(frame)):  # also if a step of which this package knows nothing made it
        refused = refused_elsewhere(each)
        assert refused is not None
        assert "on_bad='dead-letter'" in str(refused("toTable()"))
