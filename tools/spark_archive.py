"""A short Spark program for the JVM to learn from: `./dev` keeps the classes that it loads in an archive
(Java's application class-data sharing, JEP 350), and every driver after it starts in a third of the time.

It does what the demo and the tests do, without Kafka: Arrow to Python workers and back, a broadcast join,
JSON, streaming with a checkpoint, foreachBatch.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

_WAIT_SECONDS = 120


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def main(archive: str) -> None:
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
    names = spark.createDataFrame(pa.table({"n": [0, 1], "name": ["even", "odd"]}))

    def query(source: DataFrame) -> DataFrame:
        parsed = source.select(
            sf.from_json(sf.format_string('{"n": %d}', sf.col("value") % 2), "n INT").alias("e")
        )
        joined = parsed.select("e.*").join(sf.broadcast(names), "n", "left")
        value = joined.select(sf.to_json(sf.struct("n", "name")).alias("value"))
        return value.mapInArrow(same, "value STRING")

    query(spark.range(100).toDF("value")).toArrow()
    with tempfile.TemporaryDirectory() as folder:
        stream = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
        written = query(stream).writeStream.option("checkpointLocation", f"{folder}/1")
        counted = stream.groupBy(sf.col("value") % 2).count().writeStream.outputMode("update")
        for started in (
            written.format("noop").start(),
            counted.foreachBatch(lambda frame, _: frame.count()).start(),
        ):
            while started.isActive and not started.lastProgress:
                started.awaitTermination(0.2)
            started.stop()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # what the JVM waits for; it writes the archive before it ends
    gateway.proc.wait(_WAIT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
