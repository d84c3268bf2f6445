"""`recommended_settings` on a real session: workers are forked from a daemon that has imported everything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from integration.support.kafka import produce, read_back, values

_PROGRAM = """
import json
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from kafka_eos_source import local_checkpoints, recommended_settings

broker, source, sink, checkpoint = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.sql.shuffle.partitions", "2")
spark = builder.config(map={**local_checkpoints(), **recommended_settings()}).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")


@f.udf("string")
def worker(_):
    import sys
    from kafka_eos_source.spark.worker_daemon import MODULES

    # the daemon is the main module of the processes that it forks
    daemon = sys.modules["__main__"].__spec__.name
    return json.dumps([daemon, sorted(set(MODULES) - set(sys.modules))])


@f.pandas_udf("long")
def doubled(numbers):
    return numbers * 2


# this session has run no query of kafka-eos yet, so only the daemon can have imported its modules
found = spark.range(2).select(worker("id")).collect()
print(json.dumps([json.loads(row[0]) for row in found]))
print(json.dumps([row[0] for row in spark.range(3).select(doubled("id")).collect()]))

rows = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
rows = rows.option("subscribe", source).option("startingOffsets", "earliest").load()
rows = rows.withColumn("value", f.udf(lambda value: value.decode().upper())("value"))
query = rows.select("key", "value").writeStream.format("kafka-eos")
query = query.option("kafka.bootstrap.servers", broker).option("topic", sink)
query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


def test_workers_are_forked_from_a_daemon_that_has_imported_kafka_eos(
    broker: str, topic: Callable[..., str], checkpoint: str
) -> None:
    source, sink = topic(2), topic(2)
    produce(broker, source, [f"row-{number}" for number in range(200)])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, broker, source, sink, checkpoint],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers, doubled = map(json.loads, done.stdout.splitlines()[:2])
    assert workers == [["kafka_eos_source.spark.worker_daemon", []]] * 2
    assert doubled == [0, 2, 4]  # other Python functions run in such workers too, and may import pandas
    assert values(read_back(broker, sink)) == sorted(f"ROW-{number}" for number in range(200))
