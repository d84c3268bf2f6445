"""Queries of an `App` that run in the tasks that read: SQL, records, staging; and the same through Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from integration.support.kafka import produce, read_back
from kafka_eos_source import App, custom, files, map_in_read
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.sinks.memory import MemorySink

pytest.importorskip("duckdb")

FLIGHTS = "carrier STRING, dest STRING, dep_delay INT"
LATE = "SELECT key, carrier, dest, dep_delay FROM {flights} WHERE dep_delay > 60"
AIRLINES = pa.table({"carrier": ["AA", "UA"], "name": ["American", "United"]})


def flight(number: int) -> dict[str, Any]:
    return {"carrier": ("AA", "UA", "DL")[number % 3], "dest": f"D{number % 5}", "dep_delay": 10 * number}


def late(first: int, end: int) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"k%d" % n, flight(n)) for n in range(first, end) if 10 * n > 60]


class World:
    """An App, its input topic and its output topic."""

    def __init__(self, broker: str, spark: SparkSession, source: str, target: str, checkpoint: str) -> None:
        self.broker, self.source, self.target = broker, source, target
        options = {"state.dir": f"{checkpoint}-state"}
        name = f"app-{uuid.uuid4().hex[:8]}"
        self.app = App(name, broker, checkpoint=checkpoint, options=options, spark=spark)
        self.sent = 0

    def send(self, count: int) -> None:
        numbers = range(self.sent, self.sent + count)
        produce(
            self.broker,
            self.source,
            [json.dumps(flight(n)) for n in numbers],
            keys=[f"k{n}" for n in numbers],
        )
        self.sent += count

    def flights(self, **arguments: Any) -> DataFrame:
        return self.app.read(self.source, schema=FLIGHTS, keep="key", **arguments)

    def run(self, frame: DataFrame, **arguments: Any) -> None:
        writer = self.app.write(frame, self.target, **{"key": "key", **arguments})
        assert writer.trigger(availableNow=True).start().awaitTermination(120)

    def written(self) -> list[tuple[bytes | None, dict[str, Any]]]:
        found = read_back(self.broker, self.target)
        return sorted(
            ((each.key, json.loads(each.value or b"")) for each in found), key=lambda each: int(each[0][1:])
        )


@pytest.fixture
def world(broker: str, spark: SparkSession, topic: Callable[..., str], checkpoint: str) -> World:
    return World(broker, spark, topic(2), topic(), checkpoint)


@pytest.mark.core
def test_the_everyday_job_runs_in_the_read_and_a_query_may_change_both_ways(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offsets, token and checkpoint are the same: each row is written once across the switches."""
    app = world.app
    result = app.sql(LATE, flights=world.flights())
    assert result.columns == ["key", "carrier", "dest", "dep_delay"]
    through_spark = result.where(sf.lit(True))
    app.explain(result, world.target, key="key")
    said = capsys.readouterr().out
    assert "no row passes through Spark" in said
    assert "reads Kafka → decodes JSON → runs SQL → makes records → stages the records" in said
    app.explain(through_spark, world.target, key="key")
    said = capsys.readouterr().out
    assert "reads Kafka → decodes JSON → runs SQL\n" in said
    assert "where(); fix: write it in app.sql" in said
    for frame in (result, through_spark, result, result):  # the last run finds nothing
        world.send(10 if world.sent < 30 else 0)
        world.run(frame)
    assert world.written() == late(0, world.sent)


def test_sql_runs_after_other_steps_with_static_tables_and_behind_operators(
    world: World, spark: SparkSession
) -> None:
    app = world.app
    world.send(30)
    joined = "SELECT key, name, dep_delay FROM {flights} JOIN {airlines} USING (carrier) WHERE dep_delay > 60"
    pandas = AIRLINES.to_pandas()
    airlines = spark.createDataFrame(pandas)
    for table in (AIRLINES, pandas, airlines):
        assert app.sql(joined, flights=world.flights(), airlines=table).columns == [
            "key",
            "name",
            "dep_delay",
        ]
    frame = world.flights().where("dest <> 'D0'").withColumn("dep_delay", sf.col("dep_delay") + 1)
    world.run(app.sql(joined, flights=frame, airlines=airlines))
    names = {"AA": "American", "UA": "United"}
    assert world.written() == [
        (key, {"name": names[row["carrier"]], "dep_delay": row["dep_delay"] + 1})
        for key, row in [(b"k6", flight(6)), *late(0, 30)]
        if row["carrier"] in names and row["dest"] != "D0"
    ]
    changed = app.sql(joined, flights=frame, airlines=AIRLINES.slice(1))
    with pytest.raises(InvalidOptionError, match="static table 'airlines'"):
        app.write(changed, world.target, key="key")
    world.run(changed, options={"onChangedTable": "continue"})


def test_sql_after_an_operator_keeps_its_state_changes(world: World) -> None:
    app = world.app
    for _ in range(2):
        world.send(30)
        counts = app.aggregate(world.flights().groupBy("carrier"), n=sf.count("*"))
        text = "SELECT 'k' || n AS key, carrier, n FROM {counts} WHERE carrier <> 'DL'"
        world.run(app.sql(text, counts=counts))
    assert sorted((key, row["carrier"], row["n"]) for key, row in world.written()) == [
        (b"k%d" % n, carrier, n) for n in (10, 20) for carrier in ("AA", "UA")
    ]


def test_an_aggregation_of_decoded_rows_combines_in_the_read(world: World) -> None:
    counts = world.app.aggregate(world.flights().groupBy("carrier"), n=sf.sum("dep_delay"))
    plan = counts._jdf.queryExecution().analyzed().toString()  # type: ignore[operator]
    assert "__kafka_eos_packed_batch" in plan
    assert "from_json" not in plan
    world.send(9)
    world.run(counts.selectExpr("concat('k', n) AS key", "carrier"))
    assert world.written() == [
        (b"k%d" % sum(10 * n for n in range(start, 9, 3)), {"carrier": carrier})
        for start, carrier in enumerate(("AA", "UA", "DL"))
    ]


def test_keyed_topics_need_no_shuffle_after_decoding_and_sql(world: World) -> None:
    late = world.app.sql("SELECT * FROM {f} WHERE dep_delay >= 0", f=world.flights(keyed=True))
    counts = world.app.aggregate(late.groupBy("key"), n=sf.sum("dep_delay"))
    assert "Repartition" not in counts._jdf.queryExecution().analyzed().toString()  # type: ignore[operator]
    world.send(20)
    world.run(counts.select("key", "n"))
    assert world.written() == [(b"k%d" % n, {"n": 10 * n}) for n in range(20)]


def test_map_in_read_takes_a_text_and_decodes_json(world: World) -> None:
    world.send(10)
    text = "SELECT key, to_json({dest: value.dest}) AS value FROM batch WHERE value.dep_delay > 60"
    for step in (lambda frame: frame, lambda frame: frame.where(sf.lit(True))):
        app = world.app.query(uuid.uuid4().hex[:4])
        packed = map_in_read(step(app.read(world.source)), text, decode={"value": FLIGHTS})
        app.write(packed, world.target).trigger(availableNow=True).start().awaitTermination()
    wanted = [(key, {"dest": row["dest"]}) for key, row in late(0, 10)]
    assert world.written() == sorted([*wanted, *wanted], key=lambda each: each[0])


def test_a_bad_record_and_a_bad_row_stop_the_query_with_one_short_error(world: World) -> None:
    produce(world.broker, world.source, [json.dumps(flight(0)), '{"dep_delay": "late"}'], partition=1)
    with pytest.raises(PySparkException) as failed:
        world.run(world.flights())
    said = str(failed.value)
    assert f"the record of topic {world.source}, partition 1, offset 1 cannot be decoded" in said, said
    assert "Traceback" not in said.partition("KAFKA_EOS.INVALID_RECORD")[2]
    sql = "SELECT key, CAST(dest AS INTEGER) AS n FROM {flights}"
    flights = world.app.read(world.source, schema="dest STRING", keep="key")
    for frame in (flights, flights.where(sf.lit(True))):
        with pytest.raises(PySparkException) as failed:
            world.run(world.app.sql(sql, flights=frame))
        assert "INVALID_RECORD" in str(failed.value)
        assert "D0" in str(failed.value)
    assert read_back(world.broker, world.target) == []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda writer: writer.foreachBatch(lambda *_: None), r"foreachBatch\(\) .* frame.writeStream"),
        (lambda writer: writer.format("console"), r"format\('console'\)"),
        (lambda writer: writer.toTable("t"), r"toTable\(\)"),
    ],
)
def test_the_writer_writes_only_to_kafka(world: World, step: Any, said: str) -> None:
    writer = world.app.write(world.flights(), world.target, key="key")
    with pytest.raises(InvalidOptionError, match=said):
        step(writer)


def test_an_option_of_the_writer_that_disagrees_names_the_way_of_the_app(world: World) -> None:
    writer = world.app.write(world.flights(), world.target, key="key").option("topic", "other")
    with pytest.raises(PySparkException, match=r"App\.write\(options=\{…\}\)"):
        writer.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"options": {"processing.guarantee": "at_least_once"}}, "processing.guarantee=at_least_once"),
        ({"key": sf.upper}, "key=, which is an expression; fix: compute it in app.sql"),
        ({"sinks": {"mine": "object"}}, "the sink 'mine', which is an object"),
    ],
)
def test_explain_names_what_keeps_a_query_from_the_faster_way(
    world: World, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], said: str
) -> None:
    frame = world.flights().withColumnRenamed("key", "id")
    given = {"key": "id", **arguments}
    if "sinks" in given:
        given["sinks"] = {"mine": custom(MemorySink())}
    if given["key"] is sf.upper:
        given["key"] = sf.upper("carrier")  # needs a session
    world.app.explain(frame, world.target, **given)
    assert said in capsys.readouterr().out


def test_sinks_outside_kafka_get_all_columns_from_the_tasks_that_read(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.send(20)
    lake = {"lake": files(str(tmp_path / "lake"), format="json")}
    result = world.app.sql(LATE.replace("key,", "CAST(key AS VARCHAR) AS id,"), flights=world.flights())
    world.app.explain(result, world.target, key="id", sinks=lake)
    assert "no row passes through Spark" in capsys.readouterr().out
    world.run(result, key="id", sinks=lake)
    rows = [
        json.loads(line)
        for each in (tmp_path / "lake").rglob("part-*.jsonl")
        for line in each.read_text().splitlines()
    ]
    assert sorted((row["id"], row["dep_delay"]) for row in rows) == sorted(
        (key.decode(), row["dep_delay"]) for key, row in late(0, 20)
    )
    assert len(world.written()) == len(rows)


@pytest.mark.parametrize(
    ("text", "frames", "said"),
    [
        ("SELECT * FROM {flights} JOIN {other} USING (carrier)", {}, r"names \{other\}"),
        ("SELECT 1 AS n", {}, "'flights' of app.sql is not in the text"),
        ("SELECT * FROM {flights}, {airlines}", {"airlines": [1]}, "'airlines' .* is a list"),
        ("SELECT carier FROM {flights}", {}, "carrier"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_at_once(
    world: World, text: str, frames: dict[str, Any], said: str
) -> None:
    with pytest.raises(KafkaEosError, match=said):
        world.app.sql(text, flights=world.flights(), **frames)


def test_exactly_one_frame_is_a_stream(world: World) -> None:
    with pytest.raises(InvalidOptionError, match="2 streams"):
        world.app.sql("SELECT * FROM {a} JOIN {b} USING (key)", a=world.flights(), b=world.flights())
    with pytest.raises(InvalidOptionError, match="no stream"):
        world.app.sql("SELECT * FROM {a}", a=AIRLINES)


#: A client of Spark Connect; the plan that it sends shows that the whole query can run in the read.
CONNECT = """
import sys
from pyspark.sql import SparkSession
from kafka_eos_source import App

broker, source, target, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
app = App("connect-" + target, broker, checkpoint=folder + "/checkpoint", spark=spark)
flights = app.read(source, schema="carrier STRING, dest STRING, dep_delay INT", keep="key")
late = app.sql("SELECT key, carrier, dest, dep_delay FROM {flights} WHERE dep_delay > 60", flights=flights)
late = late.select("key", "carrier", late.dest.alias("to")).withColumnRenamed("to", "dest").select("*")
app.explain(late, target, key="key")
app.explain(late.where("true"), target, key="key")
query = app.write(late, target, key="key").trigger(availableNow=True).start()
assert query.awaitTermination(180)
counts = app.query("counts").aggregate(flights.groupBy("carrier"), n="count")
print("COMBINES", "step.in.read" in str(counts._plan.plan(spark.client)))
spark.stop()
"""


@pytest.mark.long
def test_a_query_runs_in_the_read_over_spark_connect(world: World, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    world.send(20)
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    arguments = [world.broker, world.source, world.target, str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, "-c", CONNECT, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("no row passes through Spark") == 1, finished.stdout
    assert "where(); fix" in finished.stdout
    assert "COMBINES True" in finished.stdout
    assert world.written() == [
        (key, {name: row[name] for name in ("carrier", "dest")}) for key, row in late(0, 20)
    ]
