"""`App` on real Spark and a real broker: what it reads and writes, and its plan beside that of options."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from integration.support.kafka import Admin, produce, read_back
from kafka_eos_source import App, record_origin
from kafka_eos_source.app.records import Records
from kafka_eos_source.errors import KafkaEosError

SCHEMA = "id BIGINT, category STRING, amount DOUBLE, ts TIMESTAMP"


def order(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "id": number,
        "category": f"c{number % 3}",
        "amount": number / 2,
        "ts": f"2026-01-01T00:{number % 60:02}:00Z",
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
    def made(**arguments: Any) -> App:
        options = {"state.dir": f"{checkpoint}-state", **arguments.pop("options", {})}
        return App("app-" + checkpoint[-12:].strip("/-").replace("/", "-"), broker, checkpoint=checkpoint,
                   options=options, spark=spark, **arguments)  # fmt: skip

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


@pytest.mark.parametrize("bad", ['{"id": "one"}', "no json", "[1]"])
def test_a_value_that_does_not_fit_the_schema_is_named(
    start: Start, broker: str, topic: Callable[..., str], bad: str
) -> None:
    source, target = topic(), topic()
    produce(broker, source, [json.dumps(order(0)), bad])
    app = start()
    with pytest.raises(PySparkException) as failed:
        run(app, app.read(source, schema=SCHEMA), target)
    wanted = (
        f"[KAFKA_EOS.INVALID_RECORD] the value of the record of topic {source}, partition 0, offset 1 is no"
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


def _plan(frame: DataFrame) -> str:
    """Returns the optimised plan without the ids of its expressions and what is random in it."""
    text = frame._jdf.queryExecution().optimizedPlan().toString()  # type: ignore[operator]
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
