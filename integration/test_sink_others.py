"""Kafka and external sinks get the same rows exactly once, in queries that run in Spark."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from integration.chaos.picky import Picky
from integration.support.kafka import produce, read_back, values
from kafka_eos_source import App, custom, delta, files, iceberg, record_origin, sink_options
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


#: What Spark makes of record `ID`: some rows are no good for one of the outputs.
_ORDERS = [
    *("ID", "key", "value"),
    "CASE ID WHEN 1 THEN CAST(X'61FF' AS STRING) ELSE 'ž' END AS Name",
    "named_struct('X', IF(ID = 2, NULL, 7L)) AS S",
    "IF(ID = 3, 'no uuid', '0123abcd-89ab-cdef-0123-456789abcdef') AS U",
    "IF(ID = 4, CAST(X'FF' AS STRING), 'text') AS lines",
]


@pytest.mark.fault("T487", "rows that one of several tables and files cannot hold", "a task stages them")
@pytest.mark.fault("T488", "the frame spells the columns of tables in another letter case", "every batch")
def test_rows_that_a_table_cannot_hold_become_dead_letters_and_the_others_are_in_all_outputs(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    deltalake, catalogs = pytest.importorskip("deltalake"), pytest.importorskip("pyiceberg.catalog")
    source, output, dead = topic(2), topic(1), topic(1)
    inner = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    table = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string()), ("s", inner)])
    deltalake.DeltaTable.create(str(tmp_path / "delta"), table, partition_by=["name"])
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    loaded = catalogs.load_catalog("default", **catalog)
    loaded.create_namespace("shop")
    loaded.create_table("shop.orders", pa.schema([("id", pa.int32()), ("u", pa.uuid())]))
    sinks = {
        "delta": delta(str(tmp_path / "delta"), columns=["ID", "Name", "S"], schema_evolution="add"),
        "ice": iceberg("shop.orders", catalog=catalog, columns=["ID", "U"], schema_evolution="add"),
        "lines": files(str(tmp_path / "files"), format="json", columns=["ID", "lines"]),
    }
    frame = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
    frame = frame.option("subscribe", source).option("startingOffsets", "earliest").load()

    def run(mode: str) -> None:
        numbered = frame.selectExpr("*", "CAST(CAST(key AS STRING) AS INT) AS ID")
        writer = numbered.select("*", record_origin()).selectExpr("kafka_eos_origin", *_ORDERS)
        options = {"kafka.bootstrap.servers": broker, "topic": output, "checkpointLocation": checkpoint}
        options |= {"onInvalidRecord": mode, **sink_options(sinks)}
        options |= {"deadLetter.topic": dead} if mode == "dead-letter" else {}
        query = writer.writeStream.format("kafka-eos").options(**options)
        query.trigger(availableNow=True).start().awaitTermination()

    produce(broker, source, rows(0, 20), keys=[str(each) for each in range(20)])
    with pytest.raises(StreamingQueryException) as refused:
        run("fail")
    text = str(refused.value)
    assert "KAFKA_EOS.INVALID_RECORD" in text
    assert source in text, "the record is named"
    assert not any(name in text for name in ("ArrowInvalid", "UnicodeDecodeError"))
    run("dead-letter")
    good = [0, *range(5, 20)]
    assert values(read_back(broker, output)) == [f"{each:05d}" for each in good]
    stored = deltalake.DeltaTable(str(tmp_path / "delta")).to_pyarrow_table()
    assert stored.schema.names == ["id", "name", "s"], "no column was added"
    assert sorted(stored["id"].to_pylist()) == good
    assert stored["s"].to_pylist() == [{"x": 7}] * len(good)
    seen = loaded.load_table("shop.orders").scan().to_arrow()
    assert seen.schema.names == ["id", "u"], "no column was added"
    assert sorted(seen["id"].to_pylist()) == good
    assert {str(each) for each in seen["u"].to_pylist()} == {"0123abcd-89ab-cdef-0123-456789abcdef"}
    lines = [
        json.loads(line)
        for file in committed_files(str(tmp_path / "files"))
        for line in Path(file).read_text().splitlines()
    ]
    assert sorted(each["ID"] for each in lines) == good
    letters = {(each.key or b"").decode(): dict(each.headers) for each in read_back(broker, dead)}
    messages = {key: headers["__streams.errors.message"].decode() for key, headers in letters.items()}
    assert sorted(messages) == ["1", "2", "3", "4"]
    for key, part in {
        "1": "'Name' (text) is not valid UTF-8",
        "2": "'S.X' (integer) is null",
        "3": "'U' (text) is not a UUID",
        "4": "'lines' (text) is not valid UTF-8",
    }.items():
        assert part in messages[key], messages
        assert letters[key]["__streams.errors.topic"].decode() == source


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
        StreamingQueryException, match=r"sink 'picky' refuses at least 6 of 27 rows of batch 0"
    ) as refused:
        run()
    assert f"column 'value': bad luck (made from the record of topic {source}, partition 0, offset 3)" in str(
        refused.value
    )
    app = App(f"app-{dead}", broker, checkpoint=f"{checkpoint}-app", spark=spark)
    picky = custom(Picky, url=f"sqlite:///{database}", table="orders")
    few = topic(1)
    produce(broker, few, rows(0, 5))
    with pytest.raises(StreamingQueryException, match=rf"record of topic {few}, partition 0, offset 3\)"):
        app.write(app.read(few).select("value"), sinks={"picky": picky}).start().awaitTermination()
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
