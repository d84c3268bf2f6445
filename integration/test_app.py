"""`App` on real Spark and a real broker: what it reads and writes, and its plan beside that of options."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from integration.support.driver import ROOT
from integration.support.kafka import Admin, produce, read_back
from integration.support.processes import DRIVER, await_condition, kill_marked
from kafka_eos_source import App, files, record_origin
from kafka_eos_source.app.records import Records
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.runtime.failpoints import ENVIRONMENT_VARIABLE as FAILPOINTS

SCHEMA = "id BIGINT, category STRING, amount DOUBLE, ts TIMESTAMP"


def order(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "id": number,
        "category": f"c{number % 3}",
        "amount": number / 2,
        "ts": f"2026-01-01T00:{number // 8:02}:00Z",
        **changed,
    }


# -- which records a frame becomes


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    rows = [(1, "a", 1.5, [1, 2], True, b"\x01"), (2, "b", None, None, None, None)]
    return spark.createDataFrame(
        rows, "id BIGINT, name STRING, x DOUBLE, list ARRAY<INT>, gone BOOLEAN, raw BINARY"
    )


def written(frame: DataFrame, *, for_sinks: bool = False, **records: Any) -> list[dict[str, Any]]:
    rows, _ = Records(**{"topic": "t", **records}).of(frame, for_sinks=for_sinks, has_timestamp=False)
    return [row.asDict() for row in rows.collect()]


@pytest.mark.core
def test_columns_that_are_not_the_key_become_a_json_object(frame: DataFrame) -> None:
    first, second = written(frame.select("id", "name", "x", "list"), key="name")
    assert first == {"key": "a", "value": '{"id":1,"x":1.5,"list":[1,2]}'}
    assert second == {"key": "b", "value": '{"id":2}'}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ({"key": "id"}, "1", '{"name":"a"}'),
        ({"key": ["id", "name"], "value": "name"}, '{"id":1,"name":"a"}', "a"),
        ({"key": "raw", "value": "raw"}, b"\x01", b"\x01"),
        ({"key": "list", "value": "name"}, "[1,2]", "a"),
        ({"key": "name", "removed": "gone"}, "a", None),
    ],
)
def test_key_and_value(frame: DataFrame, arguments: dict[str, Any], key: Any, value: Any) -> None:
    columns = ["id", "name"]
    columns += [each for each in ("raw", "list", "gone") if each in map(str, arguments.values())]
    assert written(frame.select(*columns), **arguments)[0] == {"key": key, "value": value}


def test_key_and_value_may_be_expressions(frame: DataFrame) -> None:
    found = written(frame.select("id", "name"), key=sf.upper("name"), value=sf.lit("v"))
    assert found[0] == {"key": "A", "value": "v"}


def test_a_row_that_is_not_removed_keeps_its_value(frame: DataFrame) -> None:
    assert written(frame.select("id", "gone"), removed="gone")[1] == {"value": '{"id":2}'}


def test_a_frame_of_records_stays_as_it_is(frame: DataFrame) -> None:
    records = frame.selectExpr("name AS key", "raw AS value", "'t' AS topic", "0 AS partition")
    assert Records().of(records, for_sinks=True, has_timestamp=False) == (records, None)


def test_the_column_topic_names_the_topic_if_nothing_else_does(frame: DataFrame) -> None:
    rows = frame.selectExpr("id", "name AS topic")
    assert written(rows, topic=None)[0] == {"value": '{"id":1}', "topic": "a"}
    assert written(rows, topic="t")[0] == {"value": '{"id":1,"topic":"a"}'}


def test_sinks_outside_kafka_receive_the_columns_of_the_frame(frame: DataFrame) -> None:
    rows, columns = Records("t", "name").of(frame.select("id", "name"), for_sinks=True, has_timestamp=False)
    assert columns == ["id", "name"]
    assert rows.first().asDict() == {"key": "a", "value": '{"id":1}', "id": 1, "name": "a"}


def test_different_timestamps_are_different_keys(spark: SparkSession) -> None:
    """Also when an hour occurs twice, and within a millisecond; else compaction would drop one of them."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        times = ["2026-10-25 02:30:00.000001+02:00", "2026-10-25 02:30:00.000001+01:00"]
        times.append("2026-10-25 02:30:00.000002+01:00")
        rows = spark.createDataFrame([(1, each) for each in times], "id INT, at STRING")
        rows = rows.selectExpr("id", "CAST(at AS TIMESTAMP) AS at", "CAST(at AS TIMESTAMP_NTZ) AS local")
        for key in ("at", ["id", "at"]):
            keys = [row["key"] for row in written(rows, key=key, value=sf.lit("v"))]
            assert len(set(keys)) == len(times), keys
        (first, *_) = written(rows, key=["at", "local"], value=sf.lit("v"))
        wanted = '{"at":"2026-10-25T02:30:00.000001+02:00","local":"2026-10-25T02:30:00.000001"}'
        assert first["key"] == wanted
        (first, *_) = written(rows, key="at", value=sf.lit("v"))
        assert first["key"] == "2026-10-25T02:30:00.000001+02:00"
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_rows_with_state_changes_need_not_fit_the_schema_of_the_registry(spark: SparkSession) -> None:
    """The other columns of such a row are null."""
    pytest.importorskip("fastavro")
    text = '{"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]}'
    registry = RegistrySchema({"url": "http://unused"}, Schema("AVRO", text), 7)
    columns = f"k STRING, n BIGINT, removed BOOLEAN, {CHANGELOG} BINARY"
    rows = spark.createDataFrame(
        [("a", 1, False, None), (None, None, None, b"x"), ("b", None, True, None)], columns
    )
    found = written(rows, key="k", registry=registry, removed="removed")
    assert [each["value"] for each in found] == [b"\x00\x00\x00\x00\x07\x02", None, None]
    assert [each[CHANGELOG] for each in found] == [None, b"x", None]


def test_names_with_dots_and_backticks_are_names(frame: DataFrame) -> None:
    rows = frame.select(sf.col("id").alias("a.b"), sf.col("name").alias("c`d"))
    assert written(rows, key="a.b")[0] == {"key": "1", "value": '{"c`d":"a"}'}


def test_what_dead_letters_need_travels_along(frame: DataFrame) -> None:
    rows = frame.selectExpr("id", "'no' AS kafka_eos_invalid")
    assert written(rows)[0] == {"value": '{"id":1}', "kafka_eos_invalid": "no"}


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        (["id"], {"key": "nme"}, r"key= names 'nme'.*columns 'id'"),
        (["id"], {"key": ["id", "x"]}, r"key= names 'x'"),
        (["id"], {"value": "v"}, r"value= names 'v'"),
        (["id"], {"removed": "gone"}, r"removed= names 'gone'"),
        (
            ["id", "name"],
            {"value": "id"},
            r"value= names column 'id' of type bigint; expected string",
        ),
        (
            ["id", "name"],
            {"removed": "name"},
            r"removed= names column 'name' of type string; expected bool",
        ),
        (["id"], {"topic": None}, r"there is no topic to write to"),
        (["id"], {"key": "id"}, r"no column is left for the record's value"),
        (["id", "id"], {}, r"several columns named 'id'"),
        (["id", "x AS value"], {"for_sinks": True}, r"column 'value' of the frame has the name of a part"),
        (["name AS key", "id"], {"for_sinks": True, "key": "id"}, r"column 'key'.*withColumnRenamed\('key'"),
        (["name AS key", "id"], {"for_sinks": True}, r"column 'key'.*withColumnRenamed\('key'"),
        (["id", "name"], {"value": "name", "registry": "http://r"}, r"value= and registry= are both set"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    frame: DataFrame, columns: list[str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(KafkaEosError, match=message):
        written(frame.selectExpr(*columns), **arguments)


# -- with a broker


Start = Callable[..., App]


@pytest.fixture
def start(broker: str, spark: SparkSession, checkpoint: str) -> Start:
    name = f"app-{uuid.uuid4().hex[:8]}"

    def made(**arguments: Any) -> App:
        options = {"state.dir": f"{checkpoint}-state", **arguments.pop("options", {})}
        return App(name, broker, checkpoint=checkpoint, options=options, spark=spark, **arguments)

    return made


def run(app: App, *arguments: Any, **named: Any) -> None:
    app.write(*arguments, **named).trigger(availableNow=True).start().awaitTermination()


@pytest.mark.core
def test_json_in_json_out(start: Start, broker: str, topic: Callable[..., str]) -> None:
    source, target = topic(), topic()
    produce(broker, source, [json.dumps(order(n)) for n in range(10)], keys=[f"k{n}" for n in range(10)])
    app = start()
    orders = app.read(source, schema=SCHEMA, keep="key")
    assert orders.columns == ["key", "id", "category", "amount", "ts"]
    for _ in range(2):  # the second run finds nothing
        run(app, orders.where("id % 2 = 0").drop("ts"), target, key="key")
    found = [(each.key, json.loads(each.value or b"")) for each in read_back(broker, target)]
    assert found == [
        (f"k{n}".encode(), {"id": n, "category": f"c{n % 3}", "amount": n / 2}) for n in range(0, 10, 2)
    ]


@pytest.mark.parametrize("bad", ['{"id": "one"}', '{"id": 1}{"id": 2}'])
def test_a_value_that_does_not_fit_the_schema_is_named(
    start: Start, broker: str, topic: Callable[..., str], bad: str
) -> None:
    source, target = topic(), topic()
    produce(broker, source, [json.dumps(order(0)), bad])
    app = start()
    with pytest.raises(PySparkException) as failed:
        run(app, app.read(source, schema=SCHEMA), target)
    wanted = (
        f"[KAFKA_EOS.INVALID_RECORD] the record of topic {source}, partition 0, offset 1 cannot be decoded"
    )
    assert wanted in str(failed.value), str(failed.value)
    assert bad in str(failed.value)
    assert read_back(broker, target) == []


def test_a_record_without_a_value_has_null_fields(
    start: Start, broker: str, topic: Callable[..., str]
) -> None:
    source, target = topic(), topic()
    produce(broker, source, [None], keys=["gone"])
    app = start()
    run(app, app.read(source, schema="id BIGINT", keep="key"), target, key="key")
    assert [(each.key, each.value) for each in read_back(broker, target)] == [(b"gone", b"{}")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": "id BIGINT", "keep": "sender"}, r"keep= names 'sender'; expected columns of the source"),
        ({"schema": "key STRING", "keep": ["key"]}, r"'key' would be two columns"),
        ({"keep": ["key"]}, r"keep= is set, but neither schema= nor registry="),
    ],
)
def test_wrong_arguments_of_read_are_named(
    start: Start, topic: Callable[..., str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(KafkaEosError, match=message):
        start().read(topic(), **arguments)


def test_records_are_not_written_to_the_topic_that_they_were_read_from(
    start: Start, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Each would be read again, without end. Sinks receive them only, or the topic is named."""
    source = topic()
    app = start()
    raw, parsed = app.read(source), app.read(source, schema="id BIGINT", keep="topic")
    lake = {"lake": files(str(tmp_path / "lake"))}
    for frame in (raw, parsed, raw.where("offset > 1"), raw.withColumn("value", sf.upper("value"))):
        for sinks in (None, lake):
            with pytest.raises(InvalidOptionError, match="topic that the record was read from"):
                app.write(frame, sinks=sinks)
    app.write(parsed.withColumnRenamed("topic", "source"), sinks=lake)
    app.write(raw, source, sinks=lake)
    app.write(raw.withColumn("topic", sf.lit(source)))


def test_each_operator_has_a_store_of_its_own_and_only_those_of_the_frame_are_checked(
    start: Start, broker: str, topic: Callable[..., str]
) -> None:
    source, target = topic(), topic()
    produce(broker, source, [json.dumps(order(n)) for n in range(6)])
    app = start()
    orders = app.read(source, schema=SCHEMA)
    counts = app.aggregate(orders.groupBy("category", "id"), n=sf.count("*"), emit="changes")
    with pytest.raises(InvalidOptionError, match=r"two stateful operators .* store 'aggregates'"):
        app.aggregate(counts.groupBy("category"), ids=sf.count("*"), removed="removed")
    run(app, orders.select("id"), target)  # somebody tried the aggregation out, and does not write it
    assert len(read_back(broker, target)) == 6


def _plan(frame: DataFrame) -> str:
    """Returns the analysed plan without the ids of its expressions and what is random in it."""
    text = frame._jdf.queryExecution().analyzed().toString()  # type: ignore[operator]
    return re.sub(r"#\d+L?|run\([^)]*\)|@[0-9a-f]+|\[id=[^]]*\]", "", text)


@pytest.mark.core
def test_a_query_of_an_app_has_the_plan_of_one_with_options(
    start: Start, spark: SparkSession, topic: Callable[..., str]
) -> None:
    """So it costs the same per batch, and both continue the same checkpoint and state."""
    from kafka_eos_source.state import aggregate

    source = topic()
    app = start()
    ours = app.aggregate(
        app.read(source).selectExpr("CAST(key AS STRING) AS k").groupBy("k"), n=sf.count("*")
    )
    records, _ = Records("t", "k").of(ours, for_sinks=False, has_timestamp=False)
    plain = spark.readStream.format("kafka-eos").options(**app.options("source"), subscribe=source)
    plain = plain.option("startingOffsets", "earliest").load()
    theirs = aggregate(
        plain.selectExpr("CAST(key AS STRING) AS k").groupBy("k"),
        {"n": sf.count("*")},
        options=app.options("operator"),
    )
    theirs = theirs.selectExpr("k AS key", "to_json(struct(n)) AS value")
    assert _plan(records) == _plan(theirs)


def test_keyed_topics_need_no_shuffle(
    start: Start, broker: str, topic: Callable[..., str], admin: Admin
) -> None:
    source, target = topic(partitions=3), topic()
    produce(broker, source, [""] * 30, keys=[f"k{n % 7}" for n in range(30)],
            config={"partitioner": "murmur2_random"})  # fmt: skip
    app = start()
    views = app.read(source, keyed=True).selectExpr("CAST(key AS STRING) AS page")
    counts = app.aggregate(views.groupBy("page"), views=sf.count("*"))
    assert "Exchange" not in counts._jdf.queryExecution().explainString(_mode("simple", counts))
    run(app, counts, target, key="page")
    found = {each.key: json.loads(each.value or b"")["views"] for each in read_back(broker, target)}
    assert found == Counter(f"k{n % 7}".encode() for n in range(30))
    assert admin.partitions(f"{app.id}-aggregates-changelog") == 3


def _mode(name: str, frame: DataFrame) -> Any:
    return frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode.fromString(name)  # type: ignore[union-attr]


def test_record_origin_is_carried(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [("t", 0, 1, None, 5)], "topic STRING, partition INT, offset LONG, timestamp TIMESTAMP, id INT"
    )
    (found,) = written(rows.select("id", record_origin()))
    assert found["kafka_eos_origin"]["offset"] == 1


# -- the example, killed


class Example:
    """A program such as `examples/revenue.py`, as a user starts it."""

    def __init__(self, program: Path, broker: str, folder: Path) -> None:
        self._command = [sys.executable, str(program), broker, str(folder)]
        self._folder = folder

    @contextlib.contextmanager
    def run(self, failpoints: str = "") -> Iterator[subprocess.Popen[bytes]]:
        mark = uuid.uuid4().hex
        environment = {**os.environ, FAILPOINTS: failpoints, DRIVER: mark, "PYTHONPATH": str(ROOT)}
        with open(self._folder / "log", "ab") as log:
            process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
            try:
                yield process
            finally:
                kill_marked(DRIVER, mark)
                process.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text()


@pytest.mark.timeout(600)
@pytest.mark.fault(
    "T480",
    "SIGKILL to the driver of the App of docs/app.md, before and after Kafka commits",
    "A batch with window results for Kafka, a Delta table and a database commits",
)
def test_the_documented_app_is_exact_in_three_systems_although_it_is_killed(
    broker: str, topic: Callable[..., str], tmp_path: Path, admin: Admin
) -> None:
    """Mutation: a sink that commits without looking for its transaction doubles rows of the killed batch."""
    deltalake, sqlalchemy = pytest.importorskip("deltalake"), pytest.importorskip("sqlalchemy")
    source, target = topic(), topic()
    code = (ROOT / "examples" / "revenue.py").read_text()
    assert len([line for line in code.partition("import sys")[2].splitlines() if line.strip()]) <= 15
    program = tmp_path / "revenue.py"
    program.write_text(code.replace('"orders"', repr(source)).replace('"revenue"', repr(target)))
    example = Example(program, broker, tmp_path)
    orders = [order(n) for n in range(90)]

    def send(first: int) -> None:
        produce(broker, source, [json.dumps(each) for each in orders[first : first + 30]])

    for first, failpoint in ((0, "commit.before_commit"), (30, "commit.after_commit")):
        send(first)
        with example.run(f"{failpoint}=kill") as process:
            assert process.wait(240) == -signal.SIGKILL, example.log()
    send(60)
    database = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with example.run() as process:
        await_condition(
            lambda: process.poll() is not None or _total(database, target) == len(orders), 240, "all counted"
        )
        assert process.poll() is None, example.log()
    wanted = _expected(orders)
    in_kafka = [
        (record.key.decode(), value["window_start"], value["orders"], value["revenue"])
        for record in read_back(broker, target)
        for value in [json.loads(record.value or b"")]
    ]
    table = deltalake.DeltaTable(str(tmp_path / "lake")).to_pyarrow_table()
    in_lake = _rows(table.to_pylist())
    with database.connect() as connection:
        in_database = _rows(
            dict(row._mapping) for row in connection.execute(sqlalchemy.text(f'SELECT * FROM "{target}"'))
        )
    database.dispose()
    assert Counter(in_lake) == Counter(in_database)
    assert len(in_kafka) == len(set(in_kafka)) == len(in_lake) == len(set(in_lake))
    newest: dict[Any, Any] = {}
    for category, start, number, amount in sorted(in_lake):
        newest[category, start] = (number, amount)
    assert newest == wanted
    assert {(category, number, amount) for category, _, number, amount in in_kafka} == {
        (category, number, amount) for category, _, number, amount in in_lake
    }


def _rows(rows: Iterable[dict[str, Any]]) -> list[tuple[str, str, int, float]]:
    return [(r["category"], str(r["window_start"])[:16], r["orders"], r["revenue"]) for r in rows]


def _expected(orders: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns number and revenue of the orders of each category and minute."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for each in orders:
        key = (each["category"], each["ts"][:16].replace("T", " "))
        number, amount = found.get(key, (0, 0.0))
        found[key] = (number + 1, amount + each["amount"])
    return found


def _total(database: Any, table: str) -> int:
    """Returns how many orders the newest revisions in the database count."""
    import sqlalchemy

    try:
        with database.connect() as connection:
            text = (
                f'SELECT SUM(n) FROM (SELECT MAX(orders) AS n FROM "{table}" GROUP BY category, window_start)'
            )
            return int(connection.execute(sqlalchemy.text(text)).scalar() or 0)
    except sqlalchemy.exc.OperationalError:  # the query has not created the table yet
        return 0
