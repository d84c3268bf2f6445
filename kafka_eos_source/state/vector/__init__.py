"""Vectorised state operators: aggregates, windows, deduplication and functions over Arrow columns."""

from kafka_eos_source.state.vector.aggregates import Aggregate, count, latest, max_, mean, min_, sum_
from kafka_eos_source.state.vector.decode import decode_entries, decode_state
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import Function, FunctionProcessor, KeyedBatch
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import hopping, session, tumbling

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
