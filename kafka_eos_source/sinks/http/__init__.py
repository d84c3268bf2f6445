"""HTTP sink: a web service with prepare, commit and abort endpoints, or with idempotency keys."""

from kafka_eos_source.sinks.http.sink import HttpSink

__all__ = ["HttpSink"]
