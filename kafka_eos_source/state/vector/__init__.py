"""Vectorised state operators: aggregates, windows, deduplication and functions over Arrow columns."""

from kafka_eos_source.state.vector.declarations import (
    Aggregate,
    count,
    hopping,
    latest,
    max_,
    mean,
    min_,
    session,
    sum_,
    tumbling,
)
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import Function, FunctionProcessor, KeyedBatch
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries, decode_state

__all__ = [
    "Aggregate",
    "AggregateProcessor",
    "DeduplicateProcessor",
    "Function",
    "FunctionProcessor",
    "KeyedBatch",
    "count",
    "decode_entries",
    "decode_state",
    "hopping",
    "latest",
    "max_",
    "mean",
    "min_",
    "session",
    "sum_",
    "tumbling",
]
