"""Figures leave the query by OpenTelemetry, structured logs and a callback, and errors there stay there."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.observe import notebook
from kafka_eos_source.observe.exporters import OtelExporter
from kafka_eos_source.observe.figures import Event, EventKind, Outcome
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.notebook import FinishedBatch, finished_batch, observe_batches
from kafka_eos_source.observe.trace import BatchLog
from kafka_eos_source.runtime.logs import FORMAT_VARIABLE, JsonFormatter
from tests import ROOT
from tests.observe.metrics_kit import batch, query

sdk = pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


class InMemory:
    """An SDK whose exporters keep everything in memory."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.reader = InMemoryMetricReader()
        self.spans = InMemorySpanExporter()
        self.meters = MeterProvider([self.reader])
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        return {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}


def test_opentelemetry_gets_the_table_of_metrics() -> None:
    memory = InMemory()
    exporter = OtelExporter(lambda: [query(batch())], memory.meters, memory.tracers)
    try:
        found = memory.metrics()
        sent = found["messaging.client.sent.messages"]
        assert (sent.unit, sent.data.is_monotonic) == ("{message}", True)
        (point,) = sent.data.data_points
        assert (point.value, dict(point.attributes)) == (12, {"kafka_eos.application.id": "app"})
        lags = {
            each.attributes["messaging.destination.partition.id"]: each.value
            for each in found["kafka_eos.source.lag"].data.data_points
        }
        assert lags == {"0": 0, "1": 20}
    finally:
        exporter.close()


def test_a_batch_is_one_span_with_a_child_per_step() -> None:
    memory = InMemory()
    now = time.time() + 5
    figures = [batch(at=now)]
    exporter = OtelExporter(lambda: [query(*figures)], memory.meters, memory.tracers)
    exporter.close()
    tasks, produce, whole = memory.spans.get_finished_spans()
    assert (tasks.name, produce.name, whole.name) == ("tasks", "produce", "kafka-eos batch")
    assert tasks.parent.span_id == produce.parent.span_id == whole.context.span_id
    assert tasks.start_time == whole.start_time
    assert (tasks.end_time - tasks.start_time, tasks.end_time) == (
        pytest.approx(1e9, abs=1000),
        produce.start_time,
    )
    assert whole.attributes["kafka_eos.batch.id"] == 4
    assert whole.links == ()
    exporter.export_spans()
    assert len(memory.spans.get_finished_spans()) == 3, "a batch is exported once"
    event = Event(now + 1, EventKind.ABORTED, "the reason")
    figures.append(batch(at=now + 2, batch_id=5, outcome=Outcome.FAILED, error="broken", events=(event,)))
    exporter.export_spans()
    failed = memory.spans.get_finished_spans()[-1]
    assert (failed.status.description, failed.events[0].name) == ("broken", "aborted")


def test_the_span_is_linked_to_the_traces_of_records() -> None:
    memory = InMemory()
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    links = (trace, f"00-{'0' * 32}-{'b' * 16}-01")  # an id of zeros is not valid
    figures = batch(at=time.time() + 5, links=links)
    OtelExporter(lambda: [query(figures)], memory.meters, memory.tracers).close()
    (link,) = memory.spans.get_finished_spans()[-1].links
    assert (f"{link.context.trace_id:x}", f"{link.context.span_id:x}") == ("a" * 32, "b" * 16)


def test_figures_that_cannot_be_read_are_missing_and_nothing_else() -> None:
    def broken() -> list[Any]:
        raise PermissionError("another user's folder")

    memory = InMemory()
    exporter = OtelExporter(broken, memory.meters, memory.tracers)
    assert memory.reader.get_metrics_data() is None or not memory.metrics()
    exporter.close()
    assert memory.spans.get_finished_spans() == ()


class Receiver:
    """An OTLP receiver over HTTP: keeps what arrives at each path. A context manager."""

    def __init__(self) -> None:
        found: dict[str, list[bytes]] = {}
        self.found = found

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                found.setdefault(self.path, []).append(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Receiver:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


OTLP = """
import sys
from tests.observe.metrics_kit import batch, query
import time
from kafka_eos_source.observe.exporters import export
figures = []
close = export(lambda: [query(*figures)])
figures.append(batch(at=time.time() + 5))
close()
"""


def test_figures_reach_an_otlp_receiver(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with Receiver() as receiver:
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server.server_address[1]}",
            "OTEL_SERVICE_NAME": "scores",
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run([sys.executable, "-c", OTLP], env=environment, check=True, timeout=60)
    spans = [ExportTraceServiceRequest.FromString(each) for each in receiver.found["/v1/traces"]]
    names = [s.name for r in spans for x in r.resource_spans for y in x.scope_spans for s in y.spans]
    assert names == ["tasks", "produce", "kafka-eos batch"]
    metrics = ExportMetricsServiceRequest.FromString(receiver.found["/v1/metrics"][-1])
    (resource,) = metrics.resource_metrics
    assert "scores" in str(resource.resource)
    assert "messaging.client.sent.messages" in {m.name for s in resource.scope_metrics for m in s.metrics}


def test_each_batch_is_one_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("kafka_eos_source.batches")
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="kafka_eos_source"):
            BatchLog().finished(batch())
            BatchLog().finished(batch(outcome=Outcome.FAILED, error="broken"))
    finally:
        log.removeHandler(handler)
    first, second = map(json.loads, text.getvalue().splitlines())
    assert (first["level"], first["batch"]["counts"]["records"]) == ("INFO", 12)
    assert (second["level"], second["batch"]["error"]) == ("WARNING", "broken")
    assert first["message"] == "batch 4 of app: committed"


@pytest.mark.parametrize(("value", "lines"), [("json", 1), ("", 0), ("text", 0)])
def test_the_environment_switches_structured_logs_on(value: str, lines: int) -> None:
    code = "import logging, kafka_eos_source; logging.getLogger('kafka_eos_source.x').info('one %d', 2)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, FORMAT_VARIABLE: value},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = [each for each in found.stderr.splitlines() if '"one 2"' in each]
    assert len(said) == lines, found.stderr
    if lines:
        assert json.loads(said[0])["logger"] == "kafka_eos_source.x"


def progress(**changed: Any) -> dict[str, Any]:
    return {"id": "query", "runId": "run", "batchId": 4, "sources": [], **changed}


def test_a_progress_report_is_joined_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_names", {})
    Journal("app").finished(batch())
    found = finished_batch(progress())
    assert found.figures is not None
    assert found.figures["counts"]["records"] == 12
    later = finished_batch(progress(batchId=5))
    assert later.figures is None
    assert later.latest == found.figures


def test_over_connect_the_figures_come_with_the_report() -> None:
    figures = json.loads(replace(batch(), query_id="remote").to_json())
    source = {"latestOffset": {"in": {"0": 5}, "@": {"live": figures}}}
    found = finished_batch(progress(id="remote", batchId=5, sources=[source]))
    assert found.figures is None
    assert found.latest == figures


def test_an_error_of_the_callback_does_not_reach_spark() -> None:
    listeners: list[Any] = []
    spark: Any = SimpleNamespace(
        streams=SimpleNamespace(addListener=listeners.append, removeListener=listeners.remove)
    )
    seen: list[FinishedBatch] = []

    def callback(found: FinishedBatch) -> None:
        seen.append(found)
        raise ZeroDivisionError

    end: Callable[[], None] = observe_batches(spark, callback)
    listeners[0].onQueryProgress(SimpleNamespace(progress=SimpleNamespace(json=json.dumps(progress()))))
    assert [each.batch_id for each in seen] == [4]
    end()
    assert listeners == []
