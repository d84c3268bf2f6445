"""Serves the metrics of queries in Prometheus's text format."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kafka_eos_source.observe.figures import BatchFigures
from kafka_eos_source.observe.guard import guarded
from kafka_eos_source.observe.journal import (
    QueryJournal,
    newest_batches,
    query_journal,
    query_journals,
    source_figures,
    sources_of,
)
from kafka_eos_source.observe.metric_values import Query, query_of
from kafka_eos_source.observe.metrics import APPLICATION, METRICS
from kafka_eos_source.observe.process import this_writer
from kafka_eos_source.observe.source_figures import SourceFigures, SourceState

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Queries that have neither committed nor planned for this long are not exported.
_RECENT_SECONDS = 26 * 3600.0
_REQUEST_SECONDS = 10.0
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
    sources = source_figures()
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

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

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, "the metrics are at /metrics\n")
                return
            text = guarded(lambda: exposition(queries()))
            if text is None:
                self._answer(500, "the figures cannot be read; the log of this process has the reason\n")
            else:
                self._answer(200, text)

        def _answer(self, code: int, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler


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
