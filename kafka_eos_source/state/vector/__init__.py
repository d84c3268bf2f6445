"""Vectorised state operators: aggregates, windows, deduplication and functions over Arrow columns."""

from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import Function, FunctionProcessor, KeyedBatch
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries, decode_state
from kafka_eos_source.state.vector.windows import hopping, session, tumbling

__all__ = [
    "AggregateProcessor",
    "DeduplicateProcessor",
    "Function",
    "FunctionProcessor",
    "KeyedBatch",
    "decode_entries",
    "decode_state",
    "hopping",
    "session",
    "tumbling",
]
