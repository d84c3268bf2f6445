"""A real Prometheus scrapes a real query, and faults make alarms fire and clear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from integration.support import broker as brokers
from integration.support.databases import Postgres
from integration.support.driver import Driver
from integration.support.kafka import Admin, produce, read_back, transaction, values
from integration.support.processes import await_condition
from integration.support.prometheus import ROOT, Prometheus, needs_prometheus
from integration.support.query import Query
from integration.support.sink_stream import LOOP, rows, spec, without_spark
from kafka_eos_source import observe_batches
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.observe.notebook import FinishedBatch

SECONDS = 120
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


@contextmanager
def exporting(*arguments: str) -> Iterator[int]:
    """Runs ``kafka-eos metrics``, and yields its port."""
    command = [sys.executable, "-m", "kafka_eos_source.cli", "metrics", "--port", "0", "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
            yield int(url.rpartition(":")[2].partition("/")[0])
        finally:
            process.kill()


@pytest.fixture
def exporter() -> Iterator[int]:
    """Runs ``kafka-eos metrics`` for all queries, and yields its port."""
    with exporting() as port:
        yield port


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
) -> None:
    query = Query(spark, broker, topic(1), topic(1), checkpoint)
    name, (port,) = f"metrics-{query.sink}", free_ports([0])

    def of(job: str) -> str:
        return f'{{job="{job}",kafka_eos_application_id="{name}"}}'

    # this host also has the figures of all queries of other tests: thousands, which take seconds to export
    with (
        exporting("--application-id", name) as exporter,
        Prometheus(tmp_path / "prometheus", scrape_seconds=5, exporter=exporter, query=port) as prometheus,
    ):
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
            # there is nothing to do; it may have fired while Spark prepared the first batch
            prometheus.await_firing("KafkaEosQueryStandsStill", name, fires=False)
            before_second_batch = time.time()
            produce(broker, query.source, rows(300, 310))
            running.processAllAvailable()
            # one scrape reads both metrics, so this age is the age of the second batch's token
            age = f"kafka_eos_token_age_seconds{of('exporter')}"
            age_of_second = f"{age} and (messaging_client_sent_messages_total{of('exporter')} == 310)"
            ages: list[float] = []

            def shows() -> bool:
                age = prometheus.value(age_of_second)
                if age is not None:  # it is gone again after a scrape that timed out
                    ages.append(age)
                return bool(ages)

            await_condition(shows, SECONDS, "the second batch shows")
            assert ages[0] <= time.time() - before_second_batch
            other = transaction(broker, f"other-{query.source}")
            other.produce(query.source, b"hidden")
            assert other.flush(60) == 0
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


# -- each alarm with its fault ---------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the figures of other queries on this host, so that a scrape is quick."""
    folder = tmp_path / "figures"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))  # of the processes that the test starts


@pytest.fixture
def prometheus(tmp_path: Path, alone: None, exporter: int) -> Iterator[Prometheus]:
    with Prometheus(tmp_path / "prometheus", exporter=exporter) as running:
        yield running


@dataclass(frozen=True)
class Fault:
    """A query without Spark (`integration.chaos.loop`) for the test of one alarm.

    Attributes:
        bootstrap: the cluster.
        source, sink: its topics.
        checkpoint: its checkpoint.
    """

    bootstrap: str
    source: str
    sink: str
    checkpoint: str

    @property
    def name(self) -> str:
        """The ``application.id``."""
        return f"alarm-{self.sink}-{os.getpid()}"

    def plan(self, limit: int = 100, *, ends: bool = False, **options: str) -> dict[str, Any]:
        """Returns the spec of a driver. ``options`` are those of the sink, with ``__`` for dots."""
        found = without_spark(spec(self.bootstrap, self.source, self.sink, self.checkpoint, limit))
        named = {name.replace("__", "."): value for name, value in options.items()}
        found["source"]["application.id"] = self.name
        found["sink"].update({"application.id": self.name, **named})
        return {**found, "available_now": ends}


@pytest.fixture
def query_of_alarm(broker: str, topic: Callable[..., str], checkpoint: str) -> Fault:
    return Fault(broker, topic(1), topic(1), checkpoint)


@needs_prometheus
@pytest.mark.long
@pytest.mark.fault("T116", "records arrive faster than the query reads them", "a running query")
def test_the_alarm_about_a_lag_that_grows(
    query_of_alarm: Fault, driver: Callable[..., Driver], prometheus: Prometheus
) -> None:
    query, made = query_of_alarm, 0
    running = driver(query.plan(limit=2), module=LOOP)

    def fires() -> bool:
        nonlocal made
        produce(query.bootstrap, query.source, rows(made, made + 1000))
        made += 1000
        return "KafkaEosLagGrows" in prometheus.firing(query.name)

    await_condition(fires, SECONDS, "KafkaEosLagGrows fires")
    prometheus.await_firing("KafkaEosLagGrows", query.name, fires=False)
    running.kill()


@needs_prometheus
@pytest.mark.long
@pytest.mark.fault("T116", "the broker is gone, and the query can neither read nor commit", "commit")
@pytest.mark.fault("T119", "a query is idle for most of offsets.retention.minutes", "an idle query")
@pytest.mark.timeout(600)
def test_the_alarms_about_a_standstill_and_about_a_token_that_expires(
    driver: Callable[..., Driver], checkpoint: str, tmp_path: Path, alone: None, exporter: int
) -> None:
    """The rule about the token is the published one, and the brokers delete tokens after one minute."""
    config = {"offsets.retention.minutes": "1"}
    with (
        EmbeddedKafka(java_options=brokers.JAVA_OPTIONS, config=config) as kafka,
        Prometheus(tmp_path / "real", rules=str, exporter=exporter) as published,
        Prometheus(tmp_path / "fast", exporter=exporter) as prometheus,
    ):
        admin = Admin(kafka.bootstrap_servers)
        query = Fault(kafka.bootstrap_servers, admin.create("in", 1), admin.create("out", 1), checkpoint)
        produce(kafka.bootstrap_servers, query.source, rows(0, 100))
        plan = query.plan(limit=100)
        plan["source"]["token.renewal.interval.ms"] = "0"
        once = tmp_path / "once"
        running = driver(plan, f"commit.before_commit=stop*2@{once}", module=LOOP)
        published.await_firing("KafkaEosTokenCloseToExpiry", query.name)
        assert prometheus.firing(query.name) >= {"KafkaEosTokenCloseToExpiry"}
        produce(kafka.bootstrap_servers, query.source, rows(100, 200))
        await_condition(once.exists, SECONDS, "the driver is inside the transaction of the second batch")
        kafka.kill_node(1)
        running.resume()
        prometheus.await_firing("KafkaEosQueryStandsStill", query.name)
        kafka.start_node(1)
        prometheus.await_firing("KafkaEosQueryStandsStill", query.name, fires=False)
        published.await_firing("KafkaEosTokenCloseToExpiry", query.name, fires=False)
        assert values(read_back(kafka.bootstrap_servers, query.sink)) == rows(0, 200)
        running.kill()


@needs_prometheus
@pytest.mark.long
@pytest.mark.fault(
    "T117", "the group with the token was deleted, and a supervisor restarts the query", "start"
)
def test_the_alarms_about_a_fatal_commit_and_a_restart_loop(
    query_of_alarm: Fault, driver: Callable[..., Driver], admin: Admin, prometheus: Prometheus
) -> None:
    query = query_of_alarm
    produce(query.bootstrap, query.source, rows(0, 100))
    driver(query.plan(ends=True), module=LOOP).finish()
    (group,) = [each for each in admin.groups() if query.name in each]
    admin.delete_group(group)
    produce(query.bootstrap, query.source, rows(100, 200))

    def fires() -> bool:
        assert driver({**query.plan(ends=True), "restarts": 2}, module=LOOP).wait() != 0
        return "KafkaEosRestartLoop" in prometheus.firing(query.name)

    await_condition(fires, SECONDS, "KafkaEosRestartLoop fires")
    prometheus.await_firing("KafkaEosCommitFatal", query.name)
    driver(query.plan(ends=True, onMissingToken="assume_not_committed:1"), module=LOOP).finish()
    prometheus.await_firing("KafkaEosCommitFatal", query.name, fires=False)
    prometheus.await_firing("KafkaEosRestartLoop", query.name, fires=False)
    assert values(read_back(query.bootstrap, query.sink)) == rows(0, 200)


@needs_prometheus
@pytest.mark.long
@pytest.mark.fault("T118", "the database of a sink dies after Kafka has committed", "sink")
def test_the_alarm_about_a_sink_that_is_held_back(
    query_of_alarm: Fault, driver: Callable[..., Driver], prometheus: Prometheus, tmp_path: Path
) -> None:
    query, server = query_of_alarm, Postgres()
    try:
        produce(query.bootstrap, query.source, rows(0, 100))
        table, once = server.new_table(), tmp_path / "once"
        options = {"sinks": "db", "sink__db__type": "sql", "sink__db__url": server.url}
        plan = query.plan(sink__db__table=table, **options)
        running = driver(plan, f"commit.after_commit=stop@{once}", module=LOOP)
        await_condition(once.exists, SECONDS, "Kafka has committed, and the database has not")
        server.kill()
        running.resume()
        prometheus.await_firing("KafkaEosSinkHeldBack", query.name)
        assert values(read_back(query.bootstrap, query.sink)) == rows(0, 100)
        server.start()
        prometheus.await_firing("KafkaEosSinkHeldBack", query.name, fires=False)
        await_condition(lambda: len(server.rows(table)) == 100, SECONDS, "the database has the rows")
        running.kill()
    finally:
        server.close()


def assert_panels(prometheus: Prometheus, name: str) -> None:
    """Checks that each query of the dashboard is valid, and shows something if the query has it."""
    dashboard = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "kafka-eos.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$application", name).replace("$__rate_interval", "20s")
            prometheus.query(expression)  # raises if it is not valid
            if panel["title"] in EMPTY or "sink_held_back_duration" in expression:
                continue
            # a scrape may have timed out on a busy machine
            await_condition(lambda each=expression: bool(prometheus.query(each)), SECONDS, expression)
