"""Exports the metrics: serves them to Prometheus, or sends them to OpenTelemetry together with spans.

Both read the journals of this host. No process that commits takes part, so a slow or broken collector costs a
query nothing.
"""

from __future__ import annotations

import io
import logging
import math
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from itertools import islice
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.figures import BatchFigures, Outcome, SourceFigures, SourceState, Step
from kafka_eos_source.observe.journal import (
    RENEWAL_SECONDS,
    QueryJournal,
    newest_batches,
    query_journal,
    query_journals,
    source_figures,
    sources_of,
)
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.metrics import APPLICATION, METRICS, Kind, Metric, Query, query_of
from kafka_eos_source.runtime.deadline import Deadline, limit
from kafka_eos_source.secrets import is_loopback

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, Tracer, TracerProvider

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Queries that have neither committed nor planned for this long are not exported.
_RECENT_SECONDS = 26 * 3600.0
#: How long an answer may take, and how long a client may take to send its request.
_REQUEST_SECONDS, _HEAD_SECONDS = 10.0, 5.0
_MOST_CONNECTIONS = 16
_MOST_HEAD_BYTES = 8192
#: Under this name, Docker Desktop forwards connections to ports that listen on this host only. Nobody can
#: register a name in .internal.
_DOCKERS_HOST = "host.docker.internal"
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
#: How much of a journal a scrape reads in the process that plans: the newest line, and usually dozens more.
_SCRAPED_BYTES = 128 << 10


def exposition(queries: Sequence[Query]) -> str:
    """Returns the metrics of these queries in the text format, version 0.0.4."""
    lines: list[str] = []
    for metric in METRICS:
        name = metric.prometheus_name
        labels = [_label_name(each) for each in (APPLICATION, *metric.labels)]
        samples = [
            f"{name}{{{_pairs(labels, (query.journal.application_id, *values))}}} {_number(number)}"
            for query in queries
            for values, number in metric.values(query)
        ]
        if samples:
            lines += [
                f"# HELP {name} {_escaped(metric.meaning)}",
                f"# TYPE {name} {metric.kind.value}",
                *samples,
            ]
    return "".join(f"{line}\n" for line in lines)


def queries_of_host(patterns: Sequence[str] = ()) -> list[Query]:
    """Returns the queries of this user on this host, also those that stopped during the last days.

    Queries without a known ``application.id`` are left out: they have not committed a micro-batch yet, or
    write to another sink.

    Args:
        patterns: patterns of a shell (``*``, ``?``, ``[a-z]``); the ``application.id`` matches one of them.
            Empty = all queries.

    Raises:
        OSError: if the figures cannot be read.
    """
    now = time.time()

    def is_wanted(application_id: str) -> bool:
        is_matched = not patterns or any(fnmatchcase(application_id, pattern) for pattern in patterns)
        return is_matched and application_id != ""

    return [query_of(each, now) for each in query_journals(is_wanted=is_wanted)]


def queries_of_source() -> list[Query]:
    """Returns the query whose source this process plans.

    Only the journal of that query is read. While the source does not know its ``application.id``, the newest
    batches of this host are searched for the positions that it planned. Until one is found, and always with a
    sink of another package, the query has no name and only the figures of its sources.

    Raises:
        OSError: if the figures cannot be read.
    """
    now, process = time.time(), this_writer().process
    sources = source_figures(now - 2 * RENEWAL_SECONDS)  # a host may have thousands of files of ended runs
    own = [each for each in sources if each.writer.process == process]
    names = {each.application_id for each in own if each.application_id}
    unnamed = [each for each in own if not each.application_id and each.state is not SourceState.STOPPED]
    if unnamed:
        names |= {
            batch.application_id for batch in newest_batches(now - _RECENT_SECONDS) if _is_of(batch, own)
        }
    found = [query_journal(name, sources, _SCRAPED_BYTES) for name in sorted(names)]
    queries = [each for each in found if each is not None]
    matched = {(each.writer, each.name) for query in queries for each in query.sources}
    unnamed = [each for each in unnamed if (each.writer, each.name) not in matched]
    if unnamed:
        nameless = QueryJournal("")
        queries.append(replace(nameless, sources=sources_of(nameless, unnamed)))
    return [query_of(each, now) for each in queries]


def _is_of(batch: BatchFigures, sources: Iterable[SourceFigures]) -> bool:
    """Whether a micro-batch ends at a position that one of these sources planned."""
    positions = {read.position for read in batch.sources}
    return any(
        each.writer.driver == batch.writer.driver and not positions.isdisjoint(each.positions)
        for each in sources
    )


class MetricsServer:
    """Serves ``/metrics`` from a thread until `close`.

    Args:
        host: address to listen on.
        port: port to listen on; 0 = any free port.
        queries: returns what to export.

    Raises:
        OSError: if the port is in use, or the address is not one of this host.
    """

    def __init__(self, host: str, port: int, queries: Callable[[], Sequence[Query]]) -> None:
        self._server = _Server((host, port), _handler(queries))
        self.port: int = self._server.server_address[1]
        thread = threading.Thread(target=self._server.serve_forever, name="kafka-eos-metrics", daemon=True)
        thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections, at most `_MOST_CONNECTIONS` at a time, each for one request.

    If there are more, the connection that has waited longest without sending a request is ended. So nobody
    can keep others from the metrics by opening connections.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.Semaphore(_MOST_CONNECTIONS)
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)
        self.is_local = is_loopback(str(self.server_address[0]))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread."""
        if not self._slots.acquire(blocking=False):
            with self._lock:
                for oldest in islice(self._waiting, 1):
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end of the request
            if not self._slots.acquire(timeout=_REQUEST_SECONDS):
                self.shutdown_request(request)
                return
        try:
            with self._lock:
                self._waiting[request] = None
            super().process_request(request, client_address)
        except BaseException:
            self.has_sent(request)
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection, and makes room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_sent(request)
            self._slots.release()

    def has_sent(self, request: Any) -> None:
        """Takes note that a connection does not wait for its client any more."""
        with self._lock:
            self._waiting.pop(request, None)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Logs what a request failed with, instead of printing a traceback."""
        _log.debug("a request for metrics from %s failed", client_address, exc_info=True)


def serve_source(host: str, port: int) -> MetricsServer | None:
    """Serves the metrics of the query whose source this process plans.

    If the port cannot be opened, the function logs a warning and returns None: a query is not stopped because
    nobody can watch it, and after a restart the old process may still hold the port for a moment.
    """
    try:
        server = MetricsServer(host, port, queries_of_source)
    except OSError as error:
        _log.warning(
            "cannot serve metrics on %s:%d (metrics.port): %s. The query runs without the endpoint. Set "
            "another metrics.port, 0 for any free port, or use `kafka-eos metrics` for all queries.",
            host,
            port,
            error,
        )
        return None
    # a level that is printed without configuration, because nobody else knows a port that the system chose
    _log.log(
        logging.INFO if port else logging.WARNING, "metrics are at http://%s:%d/metrics", host, server.port
    )
    return server


def _handler(queries: Callable[[], Sequence[Query]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS
        server: _Server
        server_version, sys_version = "kafka-eos", ""

        def handle(self) -> None:
            head = _head(self.connection)
            self.server.has_sent(self.connection)
            if head is not None:
                self.rfile: Any = io.BytesIO(head)
                self.handle_one_request()

        def do_GET(self) -> None:
            refusal = self._refusal()
            if refusal:
                self._answer(400, f"{refusal}\n")
                return
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, "the metrics are at /metrics\n")
                return
            text = guarded(lambda: exposition(queries()))
            if text is None:
                self._answer(500, "the figures cannot be read; the log of this process has the reason\n")
            else:
                self._answer(200, text)

        def _refusal(self) -> str:
            """Returns why a request is not answered; "" if it is.

            A page of the web can make a browser on this host send requests here, under the name of the page's
            own server, whose address it has changed to this host's (DNS rebinding). So an endpoint that only
            this host can reach answers only requests for a name of this host. Browsers always name one, but
            programs that speak HTTP/1.0 need not.
            """
            if (
                set(self.headers.get_all("Content-Length", ["0"])) != {"0"}
                or "Transfer-Encoding" in self.headers
            ):
                return "expected a request without a body"
            hosts = self.headers.get_all("Host", [])
            if not hosts and self.request_version == "HTTP/1.0":
                return ""
            found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
            if found is None:
                return "expected one header Host"
            if self.server.is_local and found[1] != _DOCKERS_HOST and not is_loopback(found[1]):
                return "this endpoint has the name localhost"
            return ""

        def _answer(self, code: int, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler


def _head(connection: socket.socket) -> bytes | None:
    """Reads a request up to the empty line; returns None if it is too long, or too slow."""
    head, deadline = b"", Deadline.after_seconds(_HEAD_SECONDS)
    while not _END_OF_HEAD.search(head):
        limit(connection, deadline)
        more = connection.recv(_MOST_HEAD_BYTES + 1 - len(head))
        head += more
        if not more or len(head) > _MOST_HEAD_BYTES:
            return None
    connection.settimeout(_REQUEST_SECONDS)
    return head


def _label_name(name: str) -> str:
    return name.replace(".", "_")


def _pairs(names: Sequence[str], values: Iterable[str]) -> str:
    return ",".join(f'{name}="{_quoted(value)}"' for name, value in zip(names, values, strict=True))


def _quoted(value: str) -> str:
    # surrogates of damaged text would make the whole answer invalid
    value = value.encode("utf-8", "replace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(number: float) -> str:
    if math.isfinite(number) and number == int(number):
        return str(int(number))
    return repr(float(number))


# -- OpenTelemetry ---------------------------------------------------------------------------------

_SCOPE = "kafka_eos_source"
_INTERVAL_SECONDS = 1.0
#: A scrape of the journals serves all instruments that are read within this time.
_FRESH_SECONDS = 0.5
_NANOSECONDS = 1_000_000_000


class OtelExporter:
    """Exports the figures of queries from a thread until `close`.

    Args:
        queries: returns what to export.
        meters: makes the instruments.
        tracers: makes the tracer.
    """

    def __init__(
        self, queries: Callable[[], Sequence[Query]], meters: MeterProvider, tracers: TracerProvider
    ) -> None:
        self._queries = queries
        self._tracer: Tracer = tracers.get_tracer(_SCOPE)
        self._began_at = time.time()
        self._exported: dict[str, tuple[float, str, int]] = {}
        self._read_at, self._found = 0.0, list[Query]()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        meter = meters.get_meter(_SCOPE)
        for metric in METRICS:
            # totals come from the figures, so a counter is observed, too
            make = (
                meter.create_observable_counter
                if metric.kind is Kind.COUNTER
                else meter.create_observable_gauge
            )
            make(metric.name, [self._callback(metric)], unit=metric.unit, description=metric.meaning)
        self._thread = threading.Thread(target=self._watch, name="kafka-eos-otel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports what is new, and ends the thread."""
        self._stopped.set()
        self._thread.join()
        guarded(self.export_spans)

    def export_spans(self) -> None:
        """Makes the spans of micro-batches that ended since the last call."""
        for query in self._queries():
            name = query.journal.application_id
            last = self._exported.get(name, (self._began_at, "", -1))
            for batch in query.journal.batches:
                key = (batch.ended_at, batch.run_id, batch.batch_id)
                if key > last:
                    self._exported[name] = last = key
                    make_spans(self._tracer, batch)

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL_SECONDS):
            guarded(self.export_spans)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observations() -> list[Observation]:
            return [
                Observation(
                    number,
                    {
                        APPLICATION: query.journal.application_id,
                        **dict(zip(metric.labels, labels, strict=True)),
                    },
                )
                for query in self._fresh()
                for labels, number in metric.values(query)
            ]

        return lambda _options: guarded(observations) or []

    def _fresh(self) -> list[Query]:
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_SECONDS:
                self._found = list(self._queries())
                self._read_at = time.monotonic()
            return self._found


def make_spans(tracer: Tracer, batch: BatchFigures) -> None:
    """Makes the span of a micro-batch, with a child per step and an event per event.

    The figures have one duration per step, so the children follow each other in the order of the steps, and a
    step that was repeated is one child. The span is linked to the traces of some records of the batch.

    Args:
        tracer: makes the spans.
        batch: the micro-batch.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    begin = batch.began_at - batch.seconds.get(Step.TASKS.value, 0.0)
    attributes: dict[str, Any] = {
        APPLICATION: batch.application_id,
        "messaging.system": "kafka",
        "messaging.batch.message_count": batch.counts.get("records", 0),
        "kafka_eos.query.id": batch.query_id,
        "kafka_eos.run.id": batch.run_id,
        "kafka_eos.batch.id": batch.batch_id,
        "kafka_eos.batch.outcome": batch.outcome.value,
        "kafka_eos.batch.offsets_read": batch.counts.get("offsets_read", 0),
    }
    if batch.sequence is not None:
        attributes["kafka_eos.token.sequence"] = batch.sequence
    propagator = TraceContextTextMapPropagator()
    linked = [propagator.extract({"traceparent": each}, Context()) for each in batch.links]
    contexts = [get_current_span(each).get_span_context() for each in linked]
    span: Span = tracer.start_span(
        "kafka-eos batch",
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        links=[Link(each) for each in contexts if each.is_valid],
        start_time=_ns(begin),
    )
    for event in batch.events:
        span.add_event(event.kind.value, {"kafka_eos.reason": event.text}, timestamp=_ns(event.at))
    if batch.outcome is Outcome.FAILED:
        span.set_status(Status(StatusCode.ERROR, batch.error))
    context = set_span_in_context(span)
    order = {step.value: number for number, step in enumerate(Step)}
    at = begin
    for step, seconds in sorted(batch.seconds.items(), key=lambda each: order.get(each[0], len(order))):
        child = tracer.start_span(step, context=context, start_time=_ns(at))
        at += seconds
        child.end(end_time=_ns(at))
    span.end(end_time=_ns(max(at, batch.ended_at)))


def export(queries: Callable[[], Sequence[Query]]) -> Callable[[], None]:
    """Exports to the SDK of this process; sets one up with OTLP if there is none.

    Args:
        queries: returns what to export.

    Returns:
        A function that exports the rest and ends.

    Raises:
        InvalidOptionError: if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidOptionError(
            f"OpenTelemetry is not installed: {error}.", fix="pip install 'kafka-eos-source[otel]'."
        ) from error
    found = metrics.get_meter_provider(), trace.get_tracer_provider()
    if isinstance(found[0], MeterProvider) and isinstance(found[1], TracerProvider):  # auto-instrumentation
        return OtelExporter(queries, *found).close
    meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    exporter = OtelExporter(queries, meters, tracers)

    def close() -> None:
        exporter.close()
        tracers.shutdown()
        meters.shutdown()

    return close


def _ns(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
