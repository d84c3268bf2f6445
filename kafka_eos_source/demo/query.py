"""The driver of the demo, in its own process so that it can be killed: ``… demo.query SPEC.json``.

It runs the same query twice at the same time, with the same input: exactly once, and at least once. So every
kill hits both.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_eos_source.demo.flights import Names, enriched
from kafka_eos_source.runtime.deadline import Pauses
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.runtime.watchdog import on_end_of_parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Spec:
    """What a driver runs.

    Attributes:
        bootstrap_servers: address of the cluster.
        source: topic of events.
        outputs: prefix of the output topics, by guarantee.
        checkpoints: folder with one checkpoint for each guarantee.
        application_id: the exactly-once query's application.id.
        offsets_per_trigger: size of a micro-batch; 0 = no limit (PySpark before 4.2).
        names: names to join. Passed to the driver, because loading the data set takes a second.
    """

    bootstrap_servers: str
    source: str
    outputs: dict[str, str]
    checkpoints: str
    application_id: str
    offsets_per_trigger: int
    names: Names

    def write(self, path: Path) -> None:
        """Writes the spec as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Reads what `write` wrote."""
        fields = parse_json(path.read_text())
        return cls(**{**fields, "names": Names(**fields["names"])})


def main(spec: Spec) -> None:
    """Runs the queries to the end of the input."""
    end_with_parent()
    spark = session()
    flights = enriched(spark, events(spark, spec), spec.names)
    queries = []
    for guarantee, prefix in spec.outputs.items():
        writer = (
            flights.selectExpr(f"concat('{prefix}.', status) AS topic", "key", "value")
            .writeStream.format("kafka-eos")
            .option("kafka.bootstrap.servers", spec.bootstrap_servers)
            .option("processing.guarantee", guarantee)
            .option("checkpointLocation", f"{spec.checkpoints}/{guarantee}")
        )
        if guarantee == "exactly_once":
            writer = writer.option("application.id", spec.application_id)
        query = writer.trigger(availableNow=True).start()
        queries.append(query)
        await_reading(query)
    for query in queries:
        query.awaitTermination()
    spark.stop()


def session(name: str = "kafka-eos demo") -> SparkSession:
    """Returns a small local Spark session that starts quickly. Its time zone is UTC."""
    from pyspark.sql import SparkSession

    from kafka_eos_source import local_checkpoints

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config(map=local_checkpoints())
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def events(spark: SparkSession, spec: Spec) -> DataFrame:
    """Returns the records of the source topic as a stream."""
    reader = (
        spark.readStream.format("kafka-eos")
        .option("kafka.bootstrap.servers", spec.bootstrap_servers)
        .option("subscribe", spec.source)
        .option("startingOffsets", "earliest")
    )
    if spec.offsets_per_trigger:
        reader = reader.option("maxOffsetsPerTrigger", spec.offsets_per_trigger)
    return reader.load()


def end_with_parent() -> None:
    """Makes this process end when its parent process ends or is killed.

    The JVM ends with this process.
    """
    on_end_of_parent(lambda: os._exit(1))


def await_reading(query: StreamingQuery) -> None:
    """Waits until the query's source has started.

    Spark keeps one environment map for all Python sources and writes to it while it starts a reader. Two
    readers that start together corrupt it ("Task not serializable: Illegal size … of collection").
    """
    pauses = Pauses(None, _POLL_SECONDS)
    while query.isActive and not query.status["isDataAvailable"]:
        pauses.wait()


if __name__ == "__main__":
    main(Spec.read(Path(sys.argv[1])))
