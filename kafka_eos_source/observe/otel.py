"""Exports the metrics to OpenTelemetry, and one span per micro-batch with a child per step.

It reads the journals of this host, in a thread of its own. No process that commits takes part, so a slow or
broken collector costs a query nothing. Where the figures go is configured as for every program that uses
OpenTelemetry: by the SDK that the process has set up, or else by the variables ``OTEL_EXPORTER_OTLP_…``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.observe.figures import BatchFigures, Outcome
from kafka_eos_source.observe.guard import guarded
from kafka_eos_source.observe.metric_values import Query
from kafka_eos_source.observe.metrics import APPLICATION, METRICS, Kind, Metric
from kafka_eos_source.observe.steps import Step

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, Tracer, TracerProvider

_log = logging.getLogger(__name__)

_NAME = "kafka_eos_source"
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
        self._tracer: Tracer = tracers.get_tracer(_NAME)
        self._began_at = time.time()
        self._exported: dict[str, tuple[float, str, int]] = {}
        self._read_at, self._found = 0.0, list[Query]()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        meter = meters.get_meter(_NAME)
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
