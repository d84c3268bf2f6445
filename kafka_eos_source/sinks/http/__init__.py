"""A web service: prepare, commit and abort endpoints, or one POST under an idempotency key."""

from kafka_eos_source.sinks.http.sink import HttpSink

__all__ = ["HttpSink"]
