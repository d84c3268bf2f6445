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
    from kafka_eos_source.state.reading.live import watch_state
    from kafka_eos_source.state.reading.query import StateQuery
    from kafka_eos_source.state.store.transactional import TransactionalStateStore

__all__ = [
    "CHANGELOG",
    "StateQuery",
    "TransactionalStateStore",
    "aggregate",
    "apply",
    "deduplicate",
    "transform",
    "watch_state",
]

_MODULES = {
    "CHANGELOG": "kafka_eos_source.protocol.packing",
    "StateQuery": "kafka_eos_source.state.reading.query",
    "TransactionalStateStore": "kafka_eos_source.state.store.transactional",
    "aggregate": "kafka_eos_source.state.operator.transform",
    "apply": "kafka_eos_source.state.operator.transform",
    "deduplicate": "kafka_eos_source.state.operator.transform",
    "transform": "kafka_eos_source.state.operator.transform",
    "watch_state": "kafka_eos_source.state.reading.live",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
