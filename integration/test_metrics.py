"""A real Prometheus scrapes a real query, and faults make alarms fire and clear."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from integration.support.kafka import produce, transaction
from integration.support.processes import await_condition
from integration.support.prometheus import ROOT, Prometheus, free_port, needs_prometheus
from integration.support.query import Query
from integration.test_sink_stream import rows
from kafka_eos_source import observe_batches
from kafka_eos_source.observe.listener import FinishedBatch

SECONDS = 60
#: Panels about state, sinks outside Kafka, and failures, which the query of this test does not have.
EMPTY = {
    "Failed, and who acts",
    "State: keys",
    "State: size",
    "State: changes of the newest micro-batch",
    "State: seconds of shards spent on restores",
    "Uncommitted state of the fullest shard",
    "Rows that processors count, such as late rows, per second",
    "Sinks: rows per second",
    "Sinks: seconds per second in prepare and commit",
    "Sinks: transactions recovered, aborted, and repeated calls",
}


@pytest.fixture
def exporter() -> Iterator[int]:
    """Runs ``kafka-eos metrics``, and yields its port."""
    command = [sys.executable, "-m", "kafka_eos_source.cli", "metrics", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
            yield int(url.rpartition(":")[2].partition("/")[0])
        finally:
            process.kill()


def start(query: Query, application_id: str, port: int) -> StreamingQuery:
    """Starts the query with the trigger that never ends."""
    return (
        query.frame(**{"metrics.port": str(port)})
        .selectExpr("key", "value")
        .writeStream.format("kafka-eos")
        .options(**{"kafka.bootstrap.servers": query.broker, "topic": query.sink})
        .options(**{"application.id": application_id, "checkpointLocation": query.checkpoint})
        .start()
    )


@needs_prometheus
@pytest.mark.fault("T115", "another producer's transaction stays open in the source", "an idle source")
def test_alarms_of_a_real_query_fire_and_clear(
    spark: SparkSession,
    broker: str,
    topic: Callable[..., str],
    checkpoint: str,
    tmp_path: Path,
    exporter: int,
) -> None:
    query = Query(spark, broker, topic(1), topic(1), checkpoint)
    name, port = f"metrics-{query.sink}", free_port()

    def of(job: str) -> str:
        return f'{{job="{job}",kafka_eos_application_id="{name}"}}'

    with Prometheus(tmp_path / "prometheus", exporter=exporter, query=port) as prometheus:
        produce(broker, query.source, rows(0, 300))
        seen: list[FinishedBatch] = []
        end = observe_batches(spark, seen.append)
        running = start(query, name, port)
        try:
            running.processAllAvailable()
            for job in ("query", "exporter"):
                sent = f"messaging_client_sent_messages_total{of(job)}"
                await_condition(lambda sent=sent: prometheus.value(sent) == 300, SECONDS, f"{job} shows 300")
            # an idle query whose token gets old, and one more batch
            prometheus.await_firing("KafkaEosTokenCloseToExpiry", name)
            assert "KafkaEosQueryStandsStill" not in prometheus.firing(name), "there is nothing to do"
            produce(broker, query.source, rows(300, 310))
            running.processAllAvailable()
            fresh = f"resets(kafka_eos_token_age_seconds{of('exporter')}[1m])"
            await_condition(lambda: bool(prometheus.value(fresh)), SECONDS, "the token is fresh")
            other = transaction(broker, f"other-{query.source}")
            other.produce(query.source, b"hidden")
            other.flush()
            prometheus.await_firing("KafkaEosHiddenByTransaction", name)
            other.commit_transaction()
            prometheus.await_firing("KafkaEosHiddenByTransaction", name, fires=False)
            assert_panels(prometheus, name)
            joined = [each for each in seen if each.query_id == str(running.id) and each.figures]
            assert joined[0].figures is not None
            assert joined[0].figures["counts"]["records"] == joined[0].progress["numInputRows"] == 300
        finally:
            end()
            running.stop()


def assert_panels(prometheus: Prometheus, name: str) -> None:
    """Checks that each query of the dashboard is valid, and shows something if the query has it."""
    dashboard = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "kafka-eos.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$application", name).replace("$__rate_interval", "10s")
            prometheus.query(expression)  # raises if it is not valid
            if panel["title"] in EMPTY or "sink_held_back_duration" in expression:
                continue
            # a scrape may have timed out on a busy machine
            await_condition(lambda each=expression: bool(prometheus.query(each)), SECONDS, expression)
