"""A real query on a host that it shares with another user, who was there first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from integration.support.kafka import produce, read_back, values
from kafka_eos_source.state import aggregate
from kafka_eos_source.state import aggregates as agg

OTHER = 61_002
ROWS = 60


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.fault("T385", "another user creates staging folder and state.dir before the query", "start")
def test_t385_a_query_names_the_folders_of_another_user_and_uses_none(
    spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    hostile = {name: shared / name for name in ("staging", "state")}
    for path in hostile.values():
        path.mkdir()
        path.chmod(0o777)
        os.chown(path, OTHER, OTHER)
    source, sink, checkpoint = topic(2), topic(2), tmp_path / "checkpoint"
    produce(broker, source, [f"{row:03d}" for row in range(ROWS)], keys=["k"] * ROWS)
    options = {"kafka.bootstrap.servers": broker, "application.id": f"several-{source}"}
    rows = spark.readStream.format("kafka-eos").options(**options, subscribe=source)
    counted = aggregate(
        rows.option("startingOffsets", "earliest").load().groupBy("key"),
        {"n": agg.count()},
        options={**options, "state.dir": str(hostile["state"])},
        shards=2,
    )

    def run() -> None:
        writer = counted.selectExpr("key", "CAST(n AS STRING) AS value").writeStream
        writer = writer.format("kafka-eos").options(**options, topic=sink, checkpointLocation=str(checkpoint))
        in_files = {"staging.location": str(hostile["staging"]), "staging.inline.bytes": "0"}
        assert writer.options(**in_files).trigger(availableNow=True).start().awaitTermination(120)

    for path in hostile.values():
        with pytest.raises(StreamingQueryException) as caught:
            run()
        assert f"{str(path)!r} (owner: user id {OTHER}, mode 0777) belongs to another" in str(caught.value)
        assert not list(path.iterdir()), "nothing was written there"
        shutil.rmtree(path)
    run()
    assert values(read_back(broker, sink)) == [str(ROWS)]
    for path in (*hostile.values(), checkpoint / "kafka-eos"):
        assert path.stat().st_mode & 0o077 == 0, path
