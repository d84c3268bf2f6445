"""Kafka and external sinks get the same rows exactly once, in queries that run in Spark."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from integration.support.kafka import produce, read_back, values
from kafka_eos_source import custom, record_origin, sink_options
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.filesystem import committed_files

pytest.importorskip("sqlalchemy")


def rows(first: int, end: int) -> list[str]:
    return [f"{row:05d}" for row in range(first, end)]


def test_rows_are_routed_and_a_replay_changes_nothing(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    """Rows go to the sinks that they name, and a batch that Spark replays changes nothing."""
    source, output = topic(2), topic(1)
    archive, warehouse = tmp_path / "archive", tmp_path / "warehouse.db"

    def run() -> None:
        frame = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
        frame = frame.option("subscribe", source).option("startingOffsets", "earliest").load()
        writer = frame.selectExpr(
            "key",
            "value",
            "CAST(CAST(value AS STRING) AS INT) AS number",
            "timestamp AS at",
            "CASE CAST(CAST(value AS STRING) AS INT) % 4 "
            "WHEN 0 THEN 'kafka' WHEN 1 THEN 'warehouse' WHEN 2 THEN 'archive' END AS sink",
        ).writeStream.format("kafka-eos")
        query = (
            writer.option("kafka.bootstrap.servers", broker)
            .option("topic", output)
            .option("checkpointLocation", checkpoint)
            .option("sinks", "archive,warehouse")
            .option("sink.archive.type", "filesystem")
            .option("sink.archive.path", str(archive))
            .option("sink.warehouse.type", "sql")
            .option("sink.warehouse.url", f"sqlite:///{warehouse}")
            .option("sink.warehouse.table", "numbers")
            .option("sink.warehouse.columns", "number,at")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def everywhere(end: int) -> None:
        assert values(read_back(broker, output)) == [row for row in rows(0, end) if int(row) % 4 in (0, 3)]
        files = [pq.ParquetFile(file).read() for file in committed_files(str(archive))]
        archived = sorted(number for table in files for number in table["number"].to_pylist())
        assert archived == [row for row in range(end) if row % 4 in (2, 3)]
        assert files[0].schema.names == ["key", "value", "number", "at"]
        with sqlite3.connect(warehouse) as connection:
            stored = [
                number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY number")
            ]
        assert stored == [row for row in range(end) if row % 4 in (1, 3)]

    produce(broker, source, rows(0, 100))
    run()
    everywhere(100)
    for name in ("0", ".0.crc"):
        Path(checkpoint, "commits", name).unlink(missing_ok=True)
    produce(broker, source, rows(100, 140))
    run()
    everywhere(140)
    found = spark.read.parquet(str(archive))
    assert "batch" in found.columns, "a batch is a partition of the folder"
    assert found.count() == 70


def test_two_sinks_on_one_target_are_refused_at_the_start(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    """Two sinks that would write Parquet and JSON into one folder are refused before anything is written."""
    source = topic(1)
    produce(broker, source, rows(0, 40))
    frame = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
    frame = frame.option("subscribe", source).option("startingOffsets", "earliest").load()

    def run(second: str) -> None:
        writer = frame.selectExpr("CAST(value AS STRING) AS text").writeStream.format("kafka-eos")
        writer = writer.option("kafka.bootstrap.servers", broker).option("checkpointLocation", checkpoint)
        writer = writer.option("sinks", "parquet,json")
        for name, path in (("parquet", str(tmp_path / "rows")), ("json", second)):
            writer = writer.option(f"sink.{name}.type", "filesystem").option(f"sink.{name}.path", path)
        writer = writer.option("sink.json.format", "json")
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="'parquet' and 'json' write to the same target"):
        run(f"file://{tmp_path}/rows/")
    assert not committed_files(str(tmp_path / "rows")), "nothing was written"
    run(str(tmp_path / "lines"))
    columns = [pq.ParquetFile(file).read()["text"] for file in committed_files(str(tmp_path / "rows"))]
    lines = [Path(file).read_text().splitlines() for file in committed_files(str(tmp_path / "lines"))]
    assert sorted(text for column in columns for text in column.to_pylist()) == rows(0, 40)
    assert sorted(json.loads(line)["text"] for each in lines for line in each) == rows(0, 40)


def test_a_query_without_an_output_topic_and_with_a_sink_as_an_object(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    source = topic(1)
    produce(broker, source, rows(0, 30))
    frame = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
    frame = frame.option("subscribe", source).option("startingOffsets", "earliest").load()
    writer = frame.selectExpr("CAST(value AS STRING) AS text", "offset").writeStream.format("kafka-eos")
    archive = constructors.files(str(tmp_path / "archive"), format="json").build()
    writer = writer.options(**sink_options({"archive": custom(archive)}))
    options = {"kafka.bootstrap.servers": broker, "checkpointLocation": checkpoint}
    for _ in range(2):
        writer.options(**options).trigger(availableNow=True).start().awaitTermination()
    found = [
        line
        for file in committed_files(str(tmp_path / "archive"))
        for line in Path(file).read_text().splitlines()
    ]
    assert sorted(found) == [f'{{"text":"{row}","offset":{int(row)}}}' for row in rows(0, 30)]


def test_a_row_that_a_sink_refuses_leaves_all_sinks_of_a_query_without_an_output_topic(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    """First the query stops with an error that names the record; then it goes on with dead letters."""
    source, dead = topic(1), topic(1)
    produce(broker, source, rows(0, 30))
    frame = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
    frame = frame.option("subscribe", source).option("startingOffsets", "earliest").load()
    archive, database = str(tmp_path / "archive"), tmp_path / "warehouse.db"
    sinks = {
        "sinks": "archive,picky",
        "sink.archive.type": "filesystem",
        "sink.archive.path": archive,
        "sink.picky.type": "integration.chaos.picky:Picky",
        "sink.picky.url": f"sqlite:///{database}",
        "sink.picky.table": "orders",
        "sink.picky.columns": "value",
    }

    def run(**options: str) -> None:
        written = frame.select("value", col("offset").alias("number"), record_origin())
        writer = written.writeStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
        writer = writer.option("checkpointLocation", checkpoint).options(**sinks, **options)
        writer.trigger(availableNow=True).start().awaitTermination()

    frame = frame.where("CAST(value AS STRING) NOT LIKE '%5'")
    with pytest.raises(
        StreamingQueryException, match=r"sink 'picky' refuses 6 of 27 rows of batch 0"
    ) as refused:
        run()
    assert f"column 'value': bad luck (made from the record of topic {source}, partition 0, offset 3)" in str(
        refused.value
    )
    assert not committed_files(archive)
    run(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
    good = [row for row in rows(0, 30) if row[-1] not in "359"]
    files = [pq.ParquetFile(file).read() for file in committed_files(archive)]
    assert sorted(value.decode() for table in files for value in table["value"].to_pylist()) == good
    with sqlite3.connect(database) as connection:
        assert sorted(value.decode() for (value,) in connection.execute("SELECT value FROM orders")) == good
    letters = read_back(broker, dead)
    for letter in letters:
        about, row = DeadLetter.parse(letter.headers or ()), json.loads(letter.value or b"")
        assert (letter.key, about.error, about.sink) == (None, "RefusedBySink", "picky")
        assert (about.origin_topic, about.origin_offset, about.target_topic) == (source, row["number"], None)
    found = sorted(json.loads(letter.value or b"")["number"] for letter in letters)
    assert found == [3, 9, 13, 19, 23, 29]
