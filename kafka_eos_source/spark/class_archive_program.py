"""A short Spark program that loads the classes of a streaming query, for `class_archive`.

It passes Arrow batches to Python workers and back, joins, parses JSON, and runs streaming queries with a
checkpoint: one with a source and a sink that are written in Python, as those of this package are, one with
state, and one with ``foreachBatch``. It needs no Kafka. When the JVM ends, it writes the archive of all
classes that it has loaded.

This file is a program, which nothing imports: it imports nothing of this package.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as spark_datasource
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition, WriterCommitMessage

_WAIT_SECONDS = 300
_ROWS = 100

#: Spark 4.0 has no writer that takes Arrow batches.
_StreamWriter: Any = getattr(
    spark_datasource, "DataSourceStreamArrowWriter", spark_datasource.DataSourceStreamWriter
)


class Numbers(DataSourceStreamReader):
    """Reads the numbers from 0 on, and ends after some."""

    def initialOffset(self) -> dict[str, int]:
        return {"number": 0}

    def latestOffset(self, *_: object) -> dict[str, int]:  # with two arguments since Spark 4.1
        return {"number": _ROWS}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["number"], end["number"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        first, last = partition.value
        numbers = pa.array(range(first, last))
        yield pa.record_batch([numbers, numbers.cast(pa.string()).cast(pa.binary())], ["value", "bytes"])


class Nothing(_StreamWriter):  # type: ignore[misc]
    """Drops all rows."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            continue
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing, because nothing was written."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing, because nothing was written."""


class Formats(DataSource):
    """A source and a sink that are written in Python."""

    @classmethod
    def name(cls) -> str:
        return "class-archive"

    def schema(self) -> str:
        return "value LONG, bytes BINARY"

    def streamReader(self, schema: object) -> DataSourceStreamReader:
        return Numbers()

    def streamWriter(self, schema: object, overwrite: bool) -> Any:
        return Nothing()


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Returns what arrives, for ``mapInArrow``."""
    yield from batches


def run(frame: DataFrame, _batch_id: int) -> None:
    """Runs the query of a micro-batch, for ``foreachBatch``."""
    frame.count()


def main(archive: str) -> None:
    """Runs the queries, and ends the JVM, which writes the archive."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config(
            "spark.driver.extraJavaOptions",
            f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={archive}",
        )
        .getOrCreate()
    )
    spark.dataSource.register(Formats)
    names = spark.createDataFrame(pa.table({"n": [0, 1], "name": ["even", "odd"]}))

    def query(source: DataFrame) -> DataFrame:
        parsed = source.select(
            sf.from_json(sf.format_string('{"n": %d}', sf.col("value") % 2), "n INT").alias("e")
        )
        joined = parsed.select("e.*").join(sf.broadcast(names), "n", "left")
        value = joined.select(sf.to_json(sf.struct("n", "name")).alias("value"))
        return value.mapInArrow(same, "value STRING")

    query(spark.range(_ROWS).toDF("value")).toArrow()
    with tempfile.TemporaryDirectory() as folder:
        numbers = spark.readStream.format("class-archive").load()
        rate = spark.readStream.format("rate").option("rowsPerSecond", _ROWS).load()
        by_key = numbers.select(sf.col("bytes").cast("string").alias("key")).repartition(2, "key")
        counted = rate.groupBy(sf.col("value") % 2).count().writeStream.outputMode("update")
        for number, writer in enumerate(
            (
                query(numbers).writeStream.format("class-archive"),
                by_key.mapInArrow(same, "key STRING").writeStream.format("class-archive"),
                query(rate).writeStream.format("noop"),
                counted.foreachBatch(run),
            )
        ):
            started = writer.option("checkpointLocation", f"{folder}/{number}").start()
            while started.isActive and not started.lastProgress:
                started.awaitTermination(1)
            if started.exception() is not None:
                sys.exit(str(started.exception()))
            started.stop()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # what the JVM waits for; it writes the archive before it ends
    gateway.proc.wait(_WAIT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
