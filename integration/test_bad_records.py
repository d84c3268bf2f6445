"""Records that a read sets aside become dead letters, once, whatever steps of a query follow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import produce, read_back
from kafka_eos_source import App, files, map_in_read
from kafka_eos_source.cli import main
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.protocol import records
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks.filesystem import committed_files

ROWS = 400
SCHEMA = "n INT, carrier STRING"
#: Every hundredth record, and what is wrong with it.
BAD = {
    50: '{"n": "fifty", "carrier": "c0"}',
    150: '{"n": 150, "carrier": "c0"',
    250: "",
    350: '{"n": 1e30}',
}
HEADERS = [("trace", b"1")]
GOOD = [n for n in range(ROWS) if n not in BAD]

#: An array that is null in rows with bad records: the same number, and a negative one.
HALVES = f"CASE WHEN {CHANGELOG} IS NULL THEN array(int(half), -1) END"


def carrier(n: int) -> str:
    return f"c{n % 3}"


def document(n: int) -> str:
    return BAD.get(n, json.dumps({"n": n, "carrier": carrier(n)}))


class Flights:
    """A query that reads flights, of which 1 % are bad, and its topics."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> None:
        self.spark, self.broker, self.checkpoint = spark, broker, checkpoint
        self.source, self.target, self.dead = topic(2), topic(2), topic(1)
        self.app = App(
            f"app-{self.target}",
            broker,
            checkpoint=checkpoint,
            options={"state.dir": f"{checkpoint}-state"},
            spark=spark,
        )
        self.send(document(n) for n in range(ROWS))

    def send(self, documents: Iterator[str]) -> None:
        values = list(documents)
        keys = [carrier(n) for n in range(len(values))]
        produce(self.broker, self.source, values, keys=keys, headers=HEADERS)

    def read(self, **arguments: Any) -> DataFrame:
        usual = {"schema": SCHEMA, "keep": "key", "on_bad": "dead-letter", "options": {"minPartitions": 4}}
        return self.app.read(self.source, **{**usual, **arguments})

    @property
    def dead_letters(self) -> dict[str, str]:
        return {"onInvalidRecord": "dead-letter", "deadLetter.topic": self.dead}

    def write(self, frame: DataFrame, **arguments: Any) -> None:
        """Runs the query to its end, then again as if the driver had died before Spark's commit."""
        for _ in range(2):
            self.start(frame, **arguments)
            for name in ("0", ".0.crc"):
                Path(self.checkpoint, "commits", name).unlink(missing_ok=True)

    def start(self, frame: DataFrame, **arguments: Any) -> None:
        writer = self.app.write(frame, self.target, **{"options": self.dead_letters, **arguments})
        writer.trigger(availableNow=True).start().awaitTermination()

    def written(self) -> list[tuple[str | None, Any]]:
        found = read_back(self.broker, self.target)
        return [(each.key and each.key.decode(), json.loads(each.value or b"null")) for each in found]

    def check_letters(self, bad: dict[int, str] = BAD) -> None:
        """Checks that there is one letter of each bad record, which holds it and names it."""
        letters = read_back(self.broker, self.dead)
        assert Counter((each.value or b"").decode() for each in letters) == Counter(bad.values())
        read = {(each.partition, each.offset): each for each in read_back(self.broker, self.source)}
        for each in letters:
            said = DeadLetter.parse(each.headers or ())
            assert (said.origin_topic, said.holds) == (self.source, records.INPUT)
            assert said.origin_partition is not None
            assert said.origin_offset is not None
            record = read[said.origin_partition, said.origin_offset]
            assert (record.key, record.value) == (each.key, each.value)
            assert list(records.without_ours(each.headers or ())) == HEADERS
            assert said.origin_timestamp_ms == record.timestamp_ms


@pytest.fixture
def flights(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Flights:
    return Flights(spark, broker, topic, checkpoint)


@pytest.mark.core
def test_through_sql_in_the_read_and_staged_there(
    flights: Flights, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record for which the SQL fails is set aside too."""
    app = flights.app
    frame = app.sql(
        "SELECT key, CASE WHEN n = 77 THEN CAST(carrier AS INTEGER) ELSE n END AS n "
        "FROM {f} WHERE n % 7 <> 5",
        f=flights.read(),
    )
    app.explain(frame, flights.target, key="key")
    assert "no row passes through Spark" in capsys.readouterr().out
    flights.write(frame, key="key")
    assert sorted(row["n"] for _, row in flights.written()) == [n for n in GOOD if n % 7 != 5 and n != 77]
    flights.check_letters({**BAD, 77: document(77)})


def test_through_steps_of_spark_and_to_a_sink_outside_kafka(flights: Flights, tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    frame = (
        flights.read()
        .where("n % 2 = 0")
        .withColumn("half", f.col("n") / 2)
        .withColumnRenamed("key", "carrier_key")
        .select("carrier_key", f.explode_outer(f.expr(HALVES)).alias("half"))
        .where("half >= 0")
        .coalesce(1)
    )
    flights.write(frame, key="carrier_key", sinks={"archive": files(archive, format="json")})
    wanted = [n // 2 for n in GOOD if n % 2 == 0]
    assert sorted(row["half"] for _, row in flights.written()) == wanted
    archived = [
        json.loads(line) for file in committed_files(archive) for line in Path(file).read_text().splitlines()
    ]
    assert sorted(row["half"] for row in archived) == wanted, "no bad record, and no packet"
    flights.check_letters()


def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"value": pc.multiply(batch["n"], 2).cast(pa.string())})


@pytest.mark.core
def test_through_map_in_read_after_a_step_of_spark(flights: Flights) -> None:
    flights.write(map_in_read(flights.read().where("n > 5"), doubled, "value STRING"))
    assert sorted(row for _, row in flights.written()) == [2 * n for n in GOOD if n > 5]
    flights.check_letters()


@pytest.mark.parametrize("way", ["combined in the read", "two operators", "partitions"])
def test_through_stateful_operators(flights: Flights, way: str) -> None:
    app = flights.app
    if way == "partitions":
        read = flights.read(keyed=True, options={})
        counted = app.aggregate(read.groupBy("key"), n=f.count("*"))
        key = "key"
    else:
        rows = flights.read()
        if way == "two operators":
            rows = app.deduplicate(rows.groupBy("carrier", "n"), shards=2)
        counted = app.aggregate(rows.groupBy("carrier"), n=f.count("*"), shards=2)
        key = "carrier"
    flights.write(counted, key=key)
    assert dict(flights.written()) == {
        name: {"n": count} for name, count in Counter(map(carrier, GOOD)).items()
    }
    flights.check_letters()


def test_a_step_that_would_lose_bad_records_is_refused_at_the_start_or_stops_the_batch(
    flights: Flights, caplog: pytest.LogCaptureFixture
) -> None:
    frame = flights.read()
    with pytest.raises(InvalidSchemaError, match=r"distinct\(\) after a read with on_bad='dead-letter'"):
        frame.distinct()
    with pytest.raises(InvalidSchemaError, match="come from one read with on_bad='dead-letter'"):
        frame.where("n > 5").unionByName(frame.where("n <= 5"))
    with pytest.raises(InvalidOptionError, match=r"format\('json'\) after a read with on_bad='dead-letter'"):
        frame.where("n > 5").writeStream.format("json")
    with pytest.raises(InvalidOptionError, match=r"format\('json'\) after a read with on_bad='dead-letter'"):
        flights.app.write(frame, flights.target).format("json")  # does not advise frame.writeStream
    letters_back = {**flights.dead_letters, "deadLetter.topic": flights.source}
    with pytest.raises(InvalidOptionError, match="is a topic that the query reads"):
        flights.app.write(frame, flights.target, options=letters_back)
    frame.createOrReplaceTempView("flights_with_bad")
    lossy = flights.spark.sql("SELECT key, CAST(n AS STRING) AS value FROM flights_with_bad")
    with pytest.raises(InvalidSchemaError, match=f"drops the column '{CHANGELOG}'"):
        flights.app.write(lossy, flights.target)
    # without App.write, nothing checks the plan of a view
    sink = {**flights.app.options("sink"), **flights.dead_letters, "topic": flights.target}
    writer = lossy.writeStream.format("kafka-eos").options(**sink).trigger(availableNow=True)
    with pytest.raises(PySparkException, match=r"KAFKA_EOS\.STAGED_READ.*nothing that they sent"):
        writer.start().awaitTermination()
    assert read_back(flights.broker, flights.target) == []
    keeping = f"SELECT key, CAST(n AS STRING) AS value, {CHANGELOG} FROM flights_with_bad"
    flights.write(flights.spark.sql(keeping))
    assert "Spark also calls the Python function" not in caplog.text
    doubled_n = f.udf(lambda n: None if n is None else 2 * n, "int")
    flights.app.write(frame.where(doubled_n("n") > 5).withColumn("n", f.col("n") + 1), flights.target)
    assert "calls the Python function(s) <lambda> for the rows that carry bad records" in caplog.text
    assert sorted(value for _, value in flights.written()) == GOOD
    flights.check_letters()


@pytest.mark.parametrize("way", ["the frame", "a view", "a view, after a shuffle"])
def test_foreach_batch_is_refused_before_it_writes_anything(flights: Flights, way: str) -> None:
    """The function gets a frame of Spark, whose ``select`` drops the packets, and leaves rows of nulls."""
    frame = flights.read()
    if way != "the frame":
        frame.createOrReplaceTempView("flights")
        frame = flights.spark.table("flights")

    def write(batch: DataFrame, _: int) -> None:
        rows = batch.repartition(3) if way.endswith("shuffle") else batch
        (
            rows.selectExpr("key", "CAST(n AS STRING) AS value")
            .write.format("kafka-eos")
            .options(**{"kafka.bootstrap.servers": flights.broker, "topic": flights.target})
            .mode("append")
            .save()
        )

    with pytest.raises((PySparkException, InvalidOptionError), match="on_bad='dead-letter'"):
        frame.writeStream.foreachBatch(write).option("checkpointLocation", flights.checkpoint).trigger(
            availableNow=True
        ).start().awaitTermination()
    assert flights.written() == []


@pytest.mark.parametrize("way", ["the frame", "a view"])
def test_foreach_batch_would_lose_the_state_of_an_operator_too(flights: Flights, way: str) -> None:
    frame = flights.app.aggregate(flights.read(on_bad="null").groupBy("carrier"), n=f.count("*"), shards=2)
    if way == "a view":
        frame.createOrReplaceTempView("counted")
        frame = flights.spark.table("counted")

    def write(batch: DataFrame, _: int) -> None:
        (
            batch.selectExpr("carrier AS key", "CAST(n AS STRING) AS value")
            .write.format("kafka-eos")
            .options(**{"kafka.bootstrap.servers": flights.broker, "topic": flights.target})
            .mode("append")
            .save()
        )

    with pytest.raises((PySparkException, InvalidOptionError), match="operator"):
        frame.writeStream.foreachBatch(write).option("checkpointLocation", flights.checkpoint).trigger(
            availableNow=True
        ).start().awaitTermination()
    assert flights.written() == []


def test_letters_are_sent_again_and_read_with_the_correct_schema(flights: Flights) -> None:
    """The producer wrote texts for some time; then the query is corrected."""
    flights.start(flights.read(schema="n INT"), key="key")
    flights.check_letters()
    command = ["dead-letters", "replay", flights.dead, "--bootstrap-servers", flights.broker]
    assert CliRunner().invoke(main, command).exit_code == 0
    flights.start(flights.read(schema="n STRING"), key="key")
    again = [row for _, row in flights.written()][len(GOOD) :]
    assert {"n": "fifty"} in again


def test_a_topic_of_bad_records_stops_the_query_until_a_person_says_that_it_is_meant(
    flights: Flights,
) -> None:
    """The schema is that of another topic; the tasks that read stage the records."""
    flights.send(json.dumps({"n": f"text {n}"}) for n in range(900))
    app = flights.app

    def start(schema: str, **options: str) -> None:
        frame = flights.read(schema=schema)
        rows = app.sql("SELECT key, n FROM {f}", f=frame) if schema == "n INT" else frame
        flights.start(rows, key="key", options={**flights.dead_letters, **options})

    with pytest.raises(
        PySparkException, match=r"all 1,300 records of topic.*does not fit BINARY.*onAllRecordsBad"
    ):
        start("carrier INT NOT NULL, n BINARY")
    assert read_back(flights.broker, flights.target) == read_back(flights.broker, flights.dead) == []
    start("n INT")  # corrected: some records are good
    assert len(flights.written()) == len(GOOD)
    assert len(read_back(flights.broker, flights.dead)) == len(BAD) + 900
    flights.send(json.dumps({"n": f"text {n}"}) for n in range(1100))
    with pytest.raises(PySparkException, match=r"all 1,100 records of topic"):
        start("n INT")
    assert len(read_back(flights.broker, flights.dead)) == len(BAD) + 900
    start("n INT", onAllRecordsBad="continue")
    assert len(read_back(flights.broker, flights.dead)) == len(BAD) + 2000
    assert len(flights.written()) == len(GOOD)


def test_a_copy_keeps_names_of_headers_that_are_not_utf8(flights: Flights) -> None:
    kafka = {"kafka.bootstrap.servers": flights.broker}
    names = ["a\\xFFb", "\\x00", "c\\x5Cx41", "\\xED\\xA0\\x80", "ü"]
    entries = ", ".join(f"named_struct('key', '{each}', 'value', X'01')" for each in names)
    rows = flights.spark.sql(f"SELECT 'v' AS value, array({entries}) AS headers".replace("\\", "\\\\"))
    rows.write.format("kafka-eos").options(**kafka, topic=flights.dead, headerNames="escape").mode(
        "append"
    ).save()
    source = {**kafka, "subscribe": flights.dead, "includeHeaders": "true", "startingOffsets": "earliest"}

    def read(**options: str) -> list[str]:
        frame = flights.spark.read.format("kafka-eos").options(**{**source, **options}).load()
        return [each["key"] for row in frame.collect() for each in row["headers"]]

    assert read(headerNames="escape") == names
    assert read() == ["a\ufffdb", "", "c\\x41", "\ufffd\ufffd\ufffd", "ü"]  # as Kafka's Java client
    with pytest.raises(PySparkException, match=r"offset 0 of .* name is not UTF-8: b'a\\xffb'.*headerNames"):
        read(headerNames="fail")
    copy = {"topic": flights.target, "headerNames": "escape", "checkpointLocation": flights.checkpoint}
    stream = flights.spark.readStream.format("kafka-eos").options(**source, headerNames="escape").load()
    writer = stream.drop("topic").writeStream.format("kafka-eos").options(**kafka, **copy)
    writer.trigger(availableNow=True).start().awaitTermination()
    assert read(subscribe=flights.target, headerNames="escape") == names


def test_a_bad_record_stops_the_query_or_becomes_nulls(flights: Flights) -> None:
    with pytest.raises(PySparkException, match=r"KAFKA_EOS\.INVALID_RECORD.*cannot be decoded") as failed:
        flights.start(flights.read(on_bad="fail"), key="key")
    assert f"topic {flights.source}, partition " in str(failed.value)
    assert read_back(flights.broker, flights.target) == []
    flights.start(flights.read(on_bad="null"), key="key")
    found = flights.written()
    assert len(found) == ROWS
    assert ("c2", {"carrier": "c0"}) in found, "only the field that does not fit is null"
    flights.check_letters({})
