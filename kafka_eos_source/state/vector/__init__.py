"""State computed in columns: aggregates by key and window, duplicates, and functions of a user's own."""

from kafka_eos_source.state.vector.aggregates import Aggregate, count, latest, max_, mean, min_, sum_
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import hopping, session, tumbling

__all__ = [
    "Aggregate",
    "AggregateProcessor",
    "count",
    "hopping",
    "latest",
    "max_",
    "mean",
    "min_",
    "session",
    "sum_",
    "tumbling",
]
