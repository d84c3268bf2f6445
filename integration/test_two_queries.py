"""Two queries of one driver commit in the same Python processes without disturbing each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from integration.chaos.oracle import outcome
from integration.support.faults import MEASURES, Measures
from integration.support.kafka import Admin, produce
from integration.support.processes import await_condition
from integration.support.query import Query
from integration.support.tools import describe_transaction, producers
from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.protocol.identity import group_of

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter
    from pyspark.sql.types import StructType

BATCHES, ROWS_A_BATCH = 30, 5
KEYS = 7
SECONDS = 240


def recording_sink(commits: Path) -> type[KafkaEosDataSource]:
    """Registers a sink that records, for each commit, its query and the process that makes it."""

    class RecordingSink(
        KafkaEosDataSource
    ):  # a local class is pickled by value, so workers need not import this module
        @classmethod
        def name(cls) -> str:
            return "kafka-eos-recording"

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
            # Spark also makes a writer when it plans a batch, in another process
            if "pyspark.sql.worker.python_streaming_sink_runner" in sys.modules:
                with open(commits, "a") as notes:
                    notes.write(f"{self.options['application.id']} {os.getpid()}\n")
            return super().streamWriter(schema, overwrite)

    return RecordingSink


@pytest.mark.fault("T27", "two queries commit in each other's processes", "always")
@pytest.mark.long
def test_two_queries_commit_in_the_same_processes(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    broker: str,
    admin: Admin,
    topic: Callable[..., str],
    tmp_path: Path,
) -> None:
    commits = tmp_path / "commits"
    spark.dataSource.register(recording_sink(commits))
    sent, queries = {}, {}
    for name in ("a", "b"):
        query = Query(spark, broker, topic(1), topic(1), str(tmp_path / name))
        rows = [(f"{name}{row % KEYS}", f"{name}{row:05d}") for row in range(BATCHES * ROWS_A_BATCH)]
        produce(broker, query.source, [value for _, value in rows], keys=[key for key, _ in rows])
        sent[f"app-{query.sink}"], queries[f"app-{query.sink}"] = rows, query

    running = []
    for application_id, query in queries.items():
        frame = query.frame(maxOffsetsPerTrigger=str(ROWS_A_BATCH))
        started = query.start(frame, sink="kafka-eos-recording", application__id=application_id)
        running.append(started)
        # see the README: Spark can fail if two queries start at the same instant
        await_condition(
            lambda query=started: query.status["isDataAvailable"] or not query.isActive,
            SECONDS,
            "the query has started",
        )
    for started in running:
        assert started.awaitTermination(SECONDS), "the query did not end"

    noted = [line.split() for line in commits.read_text().splitlines()]
    processes = {name: [pid for whose, pid in noted if whose == name] for name in queries}
    lost = doubled = 0
    for application_id, query in queries.items():
        found = outcome(broker, query.source, query.sink, group_of(application_id), sent[application_id])
        assert found.exactly_once, found
        assert found.token is not None
        assert (found.token.query_id, found.token.batch_id) == (query.query_id, BATCHES - 1)
        assert {name for name, _ in admin.group(group_of(application_id))} == {query.source, query.sink}
        writers = {each["ProducerId"] for each in producers(broker, query.sink, 0)}
        own = describe_transaction(broker, application_id)["ProducerId"]
        assert writers == {own}, "each query writes only under its own transactional id"
        assert len(processes[application_id]) == BATCHES, "no batch was committed twice"
        lost += found.rows.missing
        doubled += found.rows.doubled + found.rows.foreign
    moves = [one != other for each in processes.values() for one, other in pairwise(each)]
    assert any(moves), "each query stayed in one process"
    assert set.intersection(*map(set, processes.values())), "no process committed for both"
    measures = Measures(
        drivers=1, batches=len(noted), rows=sum(map(len, sent.values())), lost=lost, doubled=doubled
    )
    request.node.user_properties.append((MEASURES, asdict(measures)))
