"""Metrics: their values, Prometheus's text format, the endpoint, and the generated page."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe import exporters
from kafka_eos_source.observe import journal as journals
from kafka_eos_source.observe.exporters import (
    CONTENT_TYPE,
    MetricsServer,
    exposition,
    queries_of_source,
    serve_source,
)
from kafka_eos_source.observe.figures import (
    Outcome,
    SourceRead,
    SourceState,
    position_id,
)
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.metrics import METRICS, Query, action_of, query_of, with_table
from kafka_eos_source.runtime.folders import PrivateFolder
from tests import ROOT
from tests.observe.metrics_kit import END, NOW, batch, query, source, values, waiting


def test_the_values_are_those_of_the_figures() -> None:
    found = values(query(batch()))
    assert found["messaging.client.sent.messages",] == 12
    assert found["kafka_eos.source.offsets",] == 14
    assert found["kafka_eos.source.lag", "in", "0"] == 0
    assert found["kafka_eos.source.lag", "in", "1"] == 20
    assert found["kafka_eos.source.lag.time", "in"] == 30
    assert found["kafka_eos.batches", "committed"] == 1
    assert found["kafka_eos.batches", "failed"] == 0
    assert found["kafka_eos.transactions", "committed"] == 2
    assert found["kafka_eos.batch.step.duration", "produce"] == 0.25
    assert found["kafka_eos.batch.duration",] == 1.25
    assert found["kafka_eos.token.age",] == 3
    assert found["kafka_eos.sink.rows", "db"] == 12
    assert found["kafka_eos.sink.held_back.duration", "db"] == 0.5
    assert found["kafka_eos.sink.held_back.time",] == 0
    assert found["kafka_eos.query.status", "waiting_for_data"] == 1
    assert found["kafka_eos.query.standstill",] == 3, "since the last commit, and no longer than the lag"
    assert not [name for name in found if name[0] == "kafka_eos.query.failed"]


def test_a_commit_that_waits_stands_still_and_a_sink_holds_it_back() -> None:
    found = values(query(batch(), waiting=waiting("finish")))
    assert found["kafka_eos.sink.held_back.time",] == 40
    assert found["kafka_eos.query.standstill",] == 3
    found = values(query(batch(at=NOW - 100), waiting=waiting("commit")))
    assert found["kafka_eos.sink.held_back.time",] == 0
    assert found["kafka_eos.query.standstill",] == 60


def test_a_first_batch_that_never_commits_stands_still() -> None:
    assert values(query())["kafka_eos.query.standstill",] == 30
    failed = batch(outcome=Outcome.FAILED, sources=(), sequence=None, error="x")
    assert values(query(failed))["kafka_eos.query.standstill",] == 30


def test_nothing_to_read_is_no_standstill() -> None:
    idle = source(latest=END, behind_since={})
    assert values(query(batch(at=NOW - 9000), sources=(idle,)))["kafka_eos.query.standstill",] == 0


def test_another_producers_transaction_hides_records() -> None:
    hidden = source(hidden={TopicPartition("in", 0): 3}, hidden_since=NOW - 50)
    assert values(query(batch(), sources=(hidden,)))["kafka_eos.source.hidden.time",] == 50
    assert values(query(batch()))["kafka_eos.source.hidden.time",] == 0


@pytest.mark.parametrize(
    ("error", "condition", "action"),
    [
        ("[KAFKA_EOS.TOKEN_MISSING] gone", "KAFKA_EOS.TOKEN_MISSING", "operator"),
        ("[KAFKA_EOS.FENCED] fenced", "KAFKA_EOS.FENCED", "restart"),
        ("[KAFKA_EOS.RETRIABLE] again", "KAFKA_EOS.RETRIABLE", "retry"),
        ("[KAFKA_EOS.OF_A_LATER_VERSION] x", "KAFKA_EOS.OF_A_LATER_VERSION", "unknown"),
        ("division by zero", "unknown", "unknown"),
    ],
)
def test_a_failed_query_says_who_acts(error: str, condition: str, action: str) -> None:
    stopped = source(state=SourceState.STOPPED)
    found = values(query(batch(outcome=Outcome.FAILED, error=error), sources=(stopped,)))
    assert found["kafka_eos.query.failed", condition, action] == 1
    assert action_of(condition) == action


def test_names_are_unique_and_declared_completely() -> None:
    assert (
        len({each.name for each in METRICS})
        == len({each.prometheus_name for each in METRICS})
        == len(METRICS)
    )
    for each in METRICS:
        assert each.meaning.endswith(".")
        assert len(set(each.labels)) == len(each.labels)


def every_metric() -> Query:
    figures = batch(
        counts={
            "shards": 2,
            "records": 1,
            "restores": 1,
            "restored_records": 9,
            "restore_ms": 1500,
            "staging_ms": 250,
        },
        pressure=0.5,
        processor_counts={"late_rows": 3},
        state={"changelog": {"keys": 5, "bytes": 900, "uncommitted_bytes": 7}},
        topics={"out": {"records": 3, "bytes": 40}},
        gauges={"tasks": 2, "median_task_seconds": 0.5, "longest_task_seconds": 2.0, "queued_messages": 9},
        error="",
    )
    return query(figures, sources=(source(retention_seconds=600.0),))


def test_each_metric_has_values_of_its_labels() -> None:
    shown = values(every_metric())
    failed = values(
        query(batch(outcome=Outcome.FAILED, error="x"), sources=(source(state=SourceState.STOPPED),))
    )
    for each in METRICS:
        found = [name for name in (*shown, *failed) if name[0] == each.name]
        assert found, each.name
        assert all(len(name) == 1 + len(each.labels) for name in found), each.name


def test_state_restores_and_the_tokens_expiry_are_shown() -> None:
    found = values(every_metric())
    assert found["kafka_eos.state.keys", "changelog"] == 5
    assert found["kafka_eos.state.size", "changelog"] == 900
    assert found["kafka_eos.state.restore.duration",] == 1.5
    assert found["kafka_eos.token.expiry",] == 600 - 3
    assert found["kafka_eos.query.runs",] == 1
    assert found["kafka_eos.batch.step.time", "tasks"] == 1


def test_tasks_topics_and_the_clients_queue_are_shown() -> None:
    found = values(every_metric())
    assert found["kafka_eos.topic.sent.records", "out"] == 3
    assert found["kafka_eos.topic.sent.size", "out"] == 40
    assert found["kafka_eos.batch.staging.time",] == 0.25
    assert found["kafka_eos.batch.tasks",] == 2
    assert found["kafka_eos.batch.task.duration", "median"] == 0.5
    assert found["kafka_eos.batch.task.duration", "longest"] == 2
    assert found["kafka_eos.producer.queue",] == 9


def test_the_text_is_valid_for_prometheus() -> None:
    strange = replace(every_metric().journal, application_id='a "quoted"\\name\nof two lines \ud800')
    text = exposition([query_of(strange, NOW, lambda _process: True), every_metric()])
    assert 'kafka_eos_application_id="a \\"quoted\\"\\\\name\\nof two lines ?"' in text
    assert text.count("# TYPE kafka_eos_batches_total counter") == 1
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_endpoint_serves_the_query_of_the_source() -> None:
    now = time.time()
    Journal("app").finished(batch(at=now))
    Journal("other").finished(batch("other", at=now))
    journals.SourceFile("mine").write(source(at=now))
    server = MetricsServer("127.0.0.1", 0, queries_of_source)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            text = answer.read().decode()
        assert 'messaging_client_sent_messages_total{kafka_eos_application_id="app"} 12' in text
        assert '"other"' not in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=30)
    finally:
        server.close()


def test_a_source_reads_the_journal_of_its_own_query_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    for name in ("app", "other", "third"):
        Journal(name).finished(batch(name, at=now))
    journals.SourceFile("mine").write(source(at=now))
    stranger = replace(this_writer(), process=replace(this_writer().process, pid=1))
    journals.SourceFile("theirs").write(source(at=now, application_id="other", writer=stranger))
    journals.SourceFile("ended").write(source(at=now - 9000, application_id="third", writer=stranger))
    folder = PrivateFolder.of_user("kafka-eos-live").folder("sources")
    os.utime(os.path.join(folder.path, "ended"), (now - 9000, now - 9000))
    contents, read_file = [], PrivateFolder.read

    def reading(self: PrivateFolder, name: str, *size: int) -> str | None:
        contents.append(name)
        return read_file(self, name, *size)

    monkeypatch.setattr(PrivateFolder, "read", reading)
    read: list[str] = []
    lines = PrivateFolder.lines

    def counting(self: PrivateFolder, name: str, last_bytes: int) -> list[str]:
        read.append(name)
        return lines(self, name, last_bytes)

    monkeypatch.setattr(PrivateFolder, "lines", counting)
    (found,) = queries_of_source()
    assert (found.journal.application_id, read) == ("app", ["app"])
    assert {"mine", "theirs"} <= set(contents)
    assert "ended" not in contents, "a source that runs renews its file"
    assert found.view.lag["in"].offsets == 20


def test_a_source_without_an_application_id_finds_its_query_by_its_positions() -> None:
    now = time.time()
    Journal("app").finished(batch(at=now))
    Journal("other").finished(batch("other", at=now, sources=(SourceRead("elsewhere", {"in": 1}),)))
    unnamed = source(at=now, application_id="", positions=(position_id(END),))
    journals.SourceFile("mine").write(unnamed)
    assert [each.journal.application_id for each in queries_of_source()] == ["app"]
    journals.SourceFile("mine").write(replace(unnamed, positions=("nowhere",)))
    (nameless,) = queries_of_source()
    assert (nameless.journal.application_id, nameless.view.lag["in"].offsets) == ("", 20)
    assert 'kafka_eos_source_lag{kafka_eos_application_id="",' in exposition([nameless])


def test_a_finished_series_of_batch_writes_has_no_token_that_expires() -> None:
    series = query(batch(query_id="txnAppId:nightly:out", at=NOW - 6 * 24 * 3600))
    assert series.view.token_at is None
    assert "kafka_eos_token" not in exposition([series]).replace("kafka_eos_token_sequence", "")
    stream = query(batch(at=NOW - 6 * 24 * 3600))
    assert "kafka_eos_token_age" in exposition([stream])


def test_figures_that_cannot_be_read_are_an_error_of_the_scrape_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> list[Query]:
        raise PermissionError("another user's folder")

    server = MetricsServer("127.0.0.1", 0, broken)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30)
    finally:
        server.close()


@pytest.fixture
def endpoint() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, queries_of_source)
    yield server
    server.close()


def _answer(port: int, request: bytes) -> bytes:
    """Sends a request, and returns all that the server answers until it ends the connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        found = b""
        try:
            connection.sendall(request)
            while more := connection.recv(65536):
                found += more
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server did not read all of a request that is too long
        return found


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: localhost:9307\r\n\r\n", b"200"),
        (b"GET /metrics?x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.0\nHost: [::1]:1\n\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: host.docker.internal:9307\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: attacker.example\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost.attacker.example:9307\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: a@localhost\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: [\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: [1.2]\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),  # health checks of load balancers; browsers name a host
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", b"200"),
        (
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n",
            b"400",
        ),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"501"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 9000 + b"\r\n\r\n", b""),
        (b"x" * 100_000, b""),
    ],
)
def test_the_endpoint_answers_only_short_requests_for_a_name_of_this_host(
    endpoint: MetricsServer, request_: bytes, code: bytes
) -> None:
    answer = _answer(endpoint.port, request_)
    assert answer[9:12] == code
    assert b"Python" not in answer


def test_idle_connections_occupy_few_threads_and_nobody_else_waits_for_them(endpoint: MetricsServer) -> None:
    before, idle = threading.active_count(), list[socket.socket]()
    try:
        for _ in range(400):
            idle.append(socket.create_connection(("127.0.0.1", endpoint.port), 30))
        answer = _answer(endpoint.port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer[9:12] == b"200"
        assert threading.active_count() - before <= 16
    finally:
        for each in idle:
            each.close()


def test_a_slow_request_is_ended(endpoint: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "_HEAD_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", endpoint.port), 30) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert connection.recv(100) == b"", "the server waited for longer than this socket"


def test_an_endpoint_for_other_hosts_answers_every_name() -> None:
    server = MetricsServer("0.0.0.0", 0, queries_of_source)
    try:
        answer = _answer(server.port, b"GET /metrics HTTP/1.1\r\nHost: driver.example:9307\r\n\r\n")
        assert answer[9:12] == b"200"
    finally:
        server.close()


def test_a_port_in_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first = serve_source("127.0.0.1", 0)
        assert first is not None
        try:
            assert f"http://127.0.0.1:{first.port}/metrics" in caplog.text
            assert serve_source("127.0.0.1", first.port) is None
        finally:
            first.close()
    assert "(metrics.port)" in caplog.text
    assert "The query runs without the endpoint" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "printed"),
    [
        ([], ["orders-1", "orders-2", "payments", "refunds"]),
        (["orders-*", "payments"], ["orders-1", "orders-2", "payments"]),
    ],
)
def test_the_command_prints_the_queries_of_the_host_that_match(
    patterns: list[str], printed: list[str]
) -> None:
    for name in ("orders-1", "orders-2", "payments", "refunds"):
        Journal(name).finished(batch(name, at=time.time()))
    chosen = [each for pattern in patterns for each in ("--application-id", pattern)]
    result = CliRunner().invoke(main, ["metrics", "--once", *chosen])
    assert result.exit_code == 0, result.output
    found = re.findall(
        r'^kafka_eos_token_sequence\{kafka_eos_application_id="(.*)"\} 1$', result.stdout, re.MULTILINE
    )
    assert sorted(found) == printed


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python -m kafka_eos_source.observe.metrics"
