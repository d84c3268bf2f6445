"""Each form of the stateful operator in a Spark session, and how they combine in one query."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.functions import expr
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from integration.support.kafka import Admin, produce, read_back
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.lineage import lineage
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.state import (
    KeyedBatch,
    aggregate,
    apply,
    deduplicate,
    transform,
    tumbling,
)
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.vector.windows import Window

ROWS, KEYS = 300, 7
#: Whether this PySpark supports read limits (4.2 and later).
LIMITED = hasattr(DataSourceStreamReader, "getDefaultReadLimit")


class Stage:
    """A source topic, a sink topic, a Spark session and one query between them."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.source, self.sink = topic(2), topic(2)
        self.application = f"app-{uuid.uuid4().hex[:8]}"
        self.wanted: Counter[str] = Counter()
        self.feed(ROWS)

    def feed(self, rows: int) -> None:
        keys = [f"k{row % KEYS}" for row in range(rows)]
        produce(self.broker, self.source, [f"v{row}" for row in range(rows)], keys=keys)
        self.wanted.update(keys)

    def options(self, **more: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "state.dir": str(self.folder / "state"),
            **more,
        }

    def rows(self, rest: Sequence[str] = ("timestamp",), **more: str) -> DataFrame:
        read = {
            "kafka.bootstrap.servers": self.broker,
            "subscribe": self.source,
            "startingOffsets": "earliest",
            **({"maxOffsetsPerTrigger": "100"} if LIMITED else {}),
            **more,
        }
        frame = self.spark.readStream.format("kafka-eos").options(**read).load()
        return frame.selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v", *rest)

    def run(self, frame: DataFrame, *, application: bool = True) -> StreamingQuery:
        write = {
            "kafka.bootstrap.servers": self.broker,
            "topic": self.sink,
            "checkpointLocation": str(self.folder / "checkpoint"),
            **({"application.id": self.application} if application else {}),
        }
        query = frame.writeStream.format("kafka-eos").options(**write).trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    def results(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for record in read_back(self.broker, self.sink):
            found.setdefault((record.key or b"").decode(), []).append((record.value or b"").decode())
        return found


@pytest.fixture
def stage(spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path) -> Stage:
    return Stage(spark, broker, topic, tmp_path)


class CountFromInitialState(StatefulProcessor):
    """Counts rows per key, starting from an initial state."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:  # noqa: N802, N803
        self._count.update((initialState.before,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        before = self._count.get()[0] if self._count.exists() else 0
        now = before + sum(1 for _ in rows)
        self._count.update((now,))
        yield Row(key=key[0], value=str(now))

    def close(self) -> None:
        return


@pytest.mark.core
def test_a_stateful_processor_continues_from_an_initial_state(stage: Stage) -> None:
    initial = stage.spark.createDataFrame([("k0", 1000), ("other", 5)], "k string, before long")

    def frame() -> DataFrame:
        return transform(
            stage.rows().groupBy("k"),
            CountFromInitialState(),
            "key string, value string",
            options=stage.options(),
            shards=2,
            initial_state=initial,
        )

    stage.run(frame())
    wanted = {**stage.wanted, "k0": stage.wanted["k0"] + 1000}
    assert {key: int(values[-1]) for key, values in stage.results().items()} == wanted
    stage.feed(50)  # a later start must not apply the initial state again
    stage.run(frame())
    wanted = {**stage.wanted, "k0": stage.wanted["k0"] + 1000}
    assert {key: int(values[-1]) for key, values in stage.results().items()} == wanted


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"shards": 0}, r"shards is 0; expected a whole number"),
        ({"shards": "4"}, r"shards is '4'; expected a whole number"),
        ({"shards": True}, r"shards is True; expected a whole number"),
        ({"store": "a b"}, r"store 'a b' of application.id"),
        ({"grace": "soon"}, r"grace"),
        ({"time_mode": "Sometimes"}, r"time_mode is 'Sometimes'"),
    ],
)
def test_arguments_are_checked_before_an_initial_state_is_written(
    stage: Stage, argument: dict[str, Any], message: str
) -> None:
    """No broker listens at this address, so a request to it would be the error."""
    options = {**stage.options(), "kafka.bootstrap.servers": "127.0.0.1:1", "state.timeout.ms": "2000"}
    initial = stage.spark.createDataFrame([("k0", 1000)], "k string, before long")
    arguments = {"options": options, "initial_state": initial, **argument}
    with pytest.raises(InvalidOptionError, match=message):
        transform(stage.rows().groupBy("k"), CountFromInitialState(), "key string, value string", **arguments)


def test_two_operators_commit_their_state_in_one_transaction(stage: Stage, admin: Admin) -> None:
    """A deduplication followed by a count commits both operators' state in one transaction."""
    produce(stage.broker, stage.source, [f"v{row}" for row in range(50)], keys=["again"] * 50)
    first = deduplicate(stage.rows(), key="v", options=stage.options(), shards=2)
    words = {
        "n": sf.count("*"),
        "size": sf.sum(sf.length("v")),
    }  # computed beside the changelog column
    second = aggregate(first.groupBy("k"), words, options=stage.options(), shards=3)
    stage.run(second.selectExpr("k AS key", "to_json(struct(n, size)) AS value"))
    counted = [json.loads(values[-1]) for values in stage.results().values()]
    assert sum(each["n"] for each in counted) == ROWS, "each value once, under whichever key came first"
    assert sum(each["size"] for each in counted) == sum(len(f"v{row}") for row in range(ROWS))
    topics = {topic for topic, _ in admin.group(group_of(stage.application))}
    assert {
        f"{stage.application}-duplicates-changelog",
        f"{stage.application}-aggregates-changelog",
    } <= topics


def totals(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    rows = pa.table({"key": batch.key_of_row, "length": pc.binary_length(batch.rows.column("v"))})
    sums = rows.group_by("key").aggregate([("length", "sum")]).sort_by("key")
    before = pc.fill_null(batch.state.field("bytes"), 0)
    now = pc.add(before, sums["length_sum"].combine_chunks().cast(pa.int64()))
    output = pa.record_batch([batch.keys.column("k"), now.cast(pa.string())], ["key", "value"])
    return output, pa.StructArray.from_arrays([now], ["bytes"])


@pytest.mark.core
def test_a_users_function_keeps_its_state_in_columns(stage: Stage) -> None:
    """A user's function keeps state in columns. Query and operator derive the same application.id."""
    options = {name: value for name, value in stage.options().items() if name != "application.id"}
    frame = apply(
        stage.rows().groupBy("k"), totals, "key string, value string", "bytes long", options=options, shards=2
    )
    query = stage.run(frame, application=False)
    wanted: Counter[str] = Counter()
    for row in range(ROWS):
        wanted[f"k{row % KEYS}"] += len(f"v{row}")
    assert {key: int(values[-1]) for key, values in stage.results().items()} == wanted
    assert query.exception() is None


def test_thousands_of_keys_are_counted_over_several_batches(stage: Stage) -> None:
    """State of thousands of keys carries over from batch to batch, in several packets per commit."""
    keys = [f"key-{row * 7919 % 5000:05d}" for row in range(20_000)]
    produce(stage.broker, stage.source, ["x"] * len(keys), keys=keys)
    stage.wanted.update(keys)
    rows = stage.rows(**({"maxOffsetsPerTrigger": "5000"} if LIMITED else {}))
    frame = aggregate(rows.groupBy("k"), {"n": agg.count()}, options=stage.options(), shards=2)
    stage.run(frame.selectExpr("k AS key", "CAST(n AS STRING) AS value"))
    counted = {key: [int(value) for value in values] for key, values in stage.results().items()}
    assert {key: values[-1] for key, values in counted.items()} == stage.wanted
    assert all(values == sorted(set(values)) for values in counted.values()), "the counts of a key must grow"


DATA = "id LONG, i INT, f DOUBLE, d DECIMAL(12, 3), s STRING, b BOOLEAN, t TIMESTAMP, day DATE"

#: Each aggregate, and Spark's own expression for it.
LIKE_SPARK: dict[str, tuple[Aggregate, str]] = {
    "count": (agg.count(), "count(*)"),
    "count_i": (agg.count("i"), "count(i)"),
    "sum_i": (agg.sum("i"), "sum(i)"),
    "sum_d": (agg.sum("d"), "sum(d)"),
    "avg_i": (agg.avg("i"), "avg(i)"),
    "avg_d": (agg.mean("d"), "avg(d)"),
    "min_f": (agg.min("f"), "min(f)"),
    "max_f": (agg.max("f"), "max(f)"),
    "min_t": (agg.min("t"), "min(t)"),
    "every": (agg.bool_and("b"), "bool_and(b)"),
    "some": (agg.bool_or("b"), "bool_or(b)"),
    "first": (agg.first("s", by="id"), "min_by(s, id)"),
    "last": (agg.last("d", by="id"), "max_by(d, id)"),
    "first_known": (
        agg.first("s", ignore_nulls=True, by="id"),
        "min_by(s, id) FILTER (WHERE s IS NOT NULL)",
    ),
    "max_by": (agg.max_by("day", "id"), "max_by(day, id)"),
    "min_by": (agg.min_by("i", "id"), "min_by(i, id)"),
    "stddev": (agg.stddev("i"), "stddev(i)"),
    "stddev_pop": (agg.stddev_pop("d"), "stddev_pop(d)"),
    "variance": (agg.variance("d"), "variance(d)"),
    "var_pop": (agg.var_pop("i"), "var_pop(i)"),
    "var_samp_f": (agg.var_samp("f"), "var_samp(f)"),
    "distinct": (agg.count_distinct("i"), "count(DISTINCT i)"),
    "distinct_pairs": (agg.count_distinct("s", "b", "f"), "count(DISTINCT s, b, f)"),
    "about": (agg.approx_count_distinct("id"), "approx_count_distinct(id)"),
    "list": (agg.collect_list("s"), "collect_list(s)"),
    "set": (agg.collect_set("f"), "collect_set(f)"),
    "set_d": (agg.collect_set("d"), "collect_set(d)"),
    "median": (agg.percentile_approx("i", 0.5), "percentile_approx(i, 0.5)"),
    "shares": (
        agg.percentile_approx("f", [0.0, 0.1, 0.9, 1.0]),
        "percentile_approx(f, array(0.0, 0.1, 0.9, 1.0))",
    ),
    "median_d": (agg.percentile_approx("d", 0.5), "percentile_approx(d, 0.5)"),
    "median_t": (agg.percentile_approx("t", 0.5), "percentile_approx(t, 0.5)"),
    "median_day": (agg.percentile_approx("day", 0.25), "percentile_approx(day, 0.25)"),
}


def random_rows(count: int) -> list[tuple[str, str]]:
    """Returns rows as pairs of key and JSON. One key has a single row, and one has only nulls."""
    draw = random.Random(38)

    def some(value: Any) -> Any:
        return value if draw.random() > 0.15 else None

    found = []
    for number in range(count):
        key = "single" if number == 7 else "nulls" if number % 40 == 3 else draw.choice("abc")
        row = {
            "i": some(draw.randrange(-20, 20)),
            "f": some(draw.choice([2.5, "NaN", "Infinity"]) if key == "c" else draw.random()),
            "d": some(draw.randrange(-5000, 5000) / 1000),
            "s": some(draw.choice(["", "a", "b", "ä", "zz"])),
            "b": some(draw.random() > 0.02),
            "t": some(f"2024-01-0{draw.randrange(1, 9)}T00:00:01.{draw.randrange(10**6):06d}Z"),
            "day": some(f"2024-0{draw.randrange(1, 9)}-1{draw.randrange(9)}"),
        }
        row = dict.fromkeys(row) if key == "nulls" else row
        found.append((key, json.dumps({"id": number, **row})))
    return found


def test_every_aggregate_has_the_result_and_the_type_of_sparks_own(stage: Stage) -> None:
    """Over several batches and both ways into the state: of rows, and of rows that were combined before."""
    rows = random_rows(1000)
    parsed = [f"from_json(v, '{DATA}') AS row", "k"]

    def run(some: Sequence[tuple[str, str]], combine: Any) -> DataFrame:
        produce(stage.broker, stage.source, [value for _, value in some], keys=[key for key, _ in some])
        frame = stage.rows().where("v LIKE '{%'").selectExpr(*parsed).selectExpr("k", "row.*")
        declared = {name: declared for name, (declared, _) in LIKE_SPARK.items()}
        options = stage.options()
        found = aggregate(frame.groupBy("k"), declared, options=options, shards=2, combine=combine)
        values = [field.name for field in found.schema.fields if field.name in LIKE_SPARK]
        written = found.selectExpr("k AS key", f"to_json(struct({', '.join(values)})) AS value", CHANGELOG)
        stage.run(written)
        return found

    run(rows[:600], True)
    found = run(rows[600:], False)
    batch = stage.spark.createDataFrame(rows, "k STRING, v STRING").selectExpr(*parsed)
    own = (expr(spark).alias(name) for name, (_, spark) in LIKE_SPARK.items())
    wanted = batch.selectExpr("k", "row.*").groupBy("k").agg(*own)
    types, spark_types = (
        {name: frame.schema[name].dataType.simpleString() for name in LIKE_SPARK} for frame in (found, wanted)
    )
    assert types == spark_types
    results = {key: json.loads(values[-1]) for key, values in stage.results().items()}
    for key, value in wanted.selectExpr("k", "to_json(struct(*)) AS value").collect():
        for name in LIKE_SPARK:
            ours, spark = (each.get(name) for each in (results[key], json.loads(value)))
            if name in ("list", "set", "set_d"):
                ours, spark = (sorted(each, key=str) for each in (ours, spark))
            if name == "about":
                spark = pytest.approx(len([row for row in rows if row[0] == key]), rel=0.2)
            elif isinstance(spark, float):
                spark = pytest.approx(spark, rel=1e-12)
            assert ours == spark, (key, name)
    assert set(results) == {"a", "b", "c", "single", "nulls"}


@pytest.mark.core
def test_aggregates_in_sparks_words_have_the_results_of_spark(stage: Stage) -> None:
    """One query with each function, compared with Spark's own batch aggregation of the same records."""
    columns = ["CAST(substr(CAST(value AS STRING), 2) AS INT) AS n"]

    def prepared(rows: DataFrame) -> DataFrame:
        return rows.withColumn("third", sf.when(sf.col("n") % 3 > 0, sf.col("n") % 3))

    rows = prepared(stage.rows(columns))
    n, third = sf.col("n"), rows["third"]
    words = {
        "rows": sf.count("*"),
        "thirds": sf.count(third),
        "distinct": sf.count_distinct("third"),
        "pairs": sf.count_distinct("third", n % 2),
        "even": sf.count_if(n % 2 == 0),
        "total": sf.sum("n"),
        "twice": sf.sum(n * 2),
        "decimal": sf.sum(n.cast("decimal(9, 2)") / 3),
        "mean": sf.avg("n"),
        "least": sf.min("n"),
        "most": sf.max("v"),
        "first": sf.first("third"),
        "first_known": sf.first("third", ignorenulls=True),
        "last": sf.last("v"),
        "any": sf.any_value("v"),
        "of_most": sf.max_by("v", "n"),
        "of_least": sf.min_by(sf.upper("v"), -n),
        "stddev": sf.stddev("n"),
        "var_pop": sf.var_pop(n / 7),
        "about": sf.approx_count_distinct("third", 0.01),
        "set": sf.collect_set("third"),
        "list": sf.collect_list("n"),
        "all": sf.bool_and(n >= 0),
        "some": sf.some(n > 1000),
        "median": sf.percentile_approx("n", 0.5),
        "shares": sf.percentile_approx("n", [0.1, 0.9], 1000),
    }
    texts = {"t_rows": "count", "t_total": "sum(n)", "t_pairs": "count(DISTINCT third, v)"}
    in_spark = {**texts, "t_rows": "count(*)"}
    results = [*words, *texts]
    value = f"to_json(struct({', '.join(f'`{name}`' for name in results)})) AS value"
    with pytest.raises(InvalidSchemaError, match="UNSUPPORTED_GENERATOR"):  # it would multiply the rows
        aggregate(rows.groupBy("k"), {"n": sf.max(sf.explode(sf.array(n, n)))}, options=stage.options())
    frame = aggregate(rows.groupBy("k"), {**words, **texts}, options=stage.options(), shards=2)
    assert [*frame.columns] == ["k", *results, CHANGELOG]
    stage.run(frame.selectExpr("k AS key", value))

    read = {"kafka.bootstrap.servers": stage.broker, "subscribe": stage.source}
    batch = stage.spark.read.format("kafka-eos").options(**read).load()
    # One task, in the order of the records: `first`, `last` and `collect_list` depend on it in Spark.
    batch = batch.coalesce(1).sortWithinPartitions("partition", "offset")
    rows = prepared(batch.selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v", *columns))
    expected = rows.groupBy("k").agg(
        *(column.alias(name) for name, column in {**words, "thirds": sf.count("third")}.items()),
        *(sf.expr(text).alias(name) for name, text in in_spark.items()),
    )
    types = {name: kind for name, kind in expected.dtypes if name != "k"}
    assert {name: kind for name, kind in frame.dtypes if name in types} == types
    for key, text in expected.selectExpr("k", value).collect():
        found, wanted = json.loads(stage.results()[key][-1]), json.loads(text)
        found["set"], wanted["set"] = sorted(found["set"]), sorted(wanted["set"])
        # these depend on the order of the rows, which only the operator keeps
        numbers = [number for number in range(ROWS) if f"k{number % KEYS}" == key]
        thirds = [number % 3 or None for number in numbers]
        wanted |= {"list": numbers, "any": f"v{numbers[0]}", "last": f"v{numbers[-1]}", "first": thirds[0]}
        wanted["first_known"] = next(each for each in thirds if each is not None)
        found.setdefault("first", None)  # to_json leaves out what is null
        assert found == {
            name: pytest.approx(each) if isinstance(each, float) else each for name, each in wanted.items()
        }


WINDOW = tumbling("1 hour", on="at", grace="1 hour")


@pytest.mark.core
@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_that_come_directly_from_the_source_are_aggregated_in_the_read(
    stage: Stage, window: Window | None
) -> None:
    """Aggregating inside the read gives the same results with fewer rows, even if enabled at a restart."""
    rows = stage.rows(["timestamp AS at", "offset"])
    output = "to_json(struct(n, last, longest)) AS value"

    def run(combine: Any) -> StreamingQuery:
        frame = aggregate(
            rows.select("v", "at", "k", "offset").groupBy("k"),
            {"n": sf.count("*"), "last": agg.last("v", by="offset"), "longest": sf.max(rows["v"])},
            options=stage.options(),
            shards=2,
            window=window,
            combine=combine,
        )
        return stage.run(frame.selectExpr("k AS key", output))

    after = sum(sizes(run("after_read")))
    stage.feed(ROWS)
    within = sum(sizes(run(True)))
    assert after == ROWS > within > 0
    for key, values in stage.results().items():
        mine = [f"v{row}" for row in range(ROWS) if f"k{row % KEYS}" == key]
        assert json.loads(values[-1]) == {"n": 2 * len(mine), "last": mine[-1], "longest": max(mine)}


def test_rows_that_passed_other_steps_are_not_aggregated_in_the_read(stage: Stage) -> None:
    rows = stage.rows()
    assert lineage(rows, ["k", "v"]) is not None
    assert lineage(rows.select("v", "k", "timestamp"), ["timestamp", "k", "v"]) is not None
    others = {
        "filter": rows.where("k = 'k1'"),
        "expression": rows.selectExpr("upper(k) AS k", "v"),
        "number": stage.rows(["CAST(offset AS STRING) AS n"]).selectExpr("n AS k", "v"),
        "watermark": rows.withWatermark("timestamp", "1 minute"),
        "union": rows.union(rows),
        "other source": stage.spark.readStream.format("rate").load().selectExpr("value AS k", "value AS v"),
        "twice": rows.selectExpr("k", "v", "v AS k"),
    }
    assert {name: lineage(frame, ["k", "v"]) for name, frame in others.items()} == dict.fromkeys(others)


def sizes(query: StreamingQuery) -> list[int]:
    progress: list[Mapping[str, Any]] = [json.loads(each.json) for each in query.recentProgress]
    return [each["numInputRows"] for each in progress if each["numInputRows"]]
