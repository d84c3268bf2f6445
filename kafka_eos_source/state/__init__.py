"""Stateful operators whose state commits in the micro-batch's Kafka transaction (KIP-892).

These are the public names. Each is imported on first use, because most processes of a query need only some.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_eos_source.protocol.packing import CHANGELOG
    from kafka_eos_source.state.operator.transform import (
        aggregate,
        apply,
        deduplicate,
        transform,
    )
    from kafka_eos_source.state.reading.query import StateQuery
    from kafka_eos_source.state.vector.function import KeyedBatch
    from kafka_eos_source.state.vector.windows import hopping, session, tumbling

__all__ = [
    "CHANGELOG",
    "KeyedBatch",
    "StateQuery",
    "aggregate",
    "apply",
    "deduplicate",
    "hopping",
    "session",
    "transform",
    "tumbling",
]

_MODULES = {
    "CHANGELOG": "kafka_eos_source.protocol.packing",
    "KeyedBatch": "kafka_eos_source.state.vector.function",
    "StateQuery": "kafka_eos_source.state.reading.query",
    "aggregate": "kafka_eos_source.state.operator.transform",
    "apply": "kafka_eos_source.state.operator.transform",
    "deduplicate": "kafka_eos_source.state.operator.transform",
    "hopping": "kafka_eos_source.state.vector.windows",
    "session": "kafka_eos_source.state.vector.windows",
    "transform": "kafka_eos_source.state.operator.transform",
    "tumbling": "kafka_eos_source.state.vector.windows",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
