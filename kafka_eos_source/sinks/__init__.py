"""Two-phase sinks: external systems that receive each micro-batch exactly once, together with Kafka.

Queries name them by options, or by `kafka_eos_source.delta`, `kafka_eos_source.sql` and so on. Those are not
in this package's namespace, because it has modules of these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_eos_source.sinks.constructors import Sink
    from kafka_eos_source.sinks.contract import (
        OK,
        Fatal,
        Ok,
        Outcome,
        Refused,
        Retryable,
        RowRefusal,
        SinkContext,
        SinkTxn,
        Stage,
        StageContext,
        Staged,
        TwoPhaseSink,
    )
    from kafka_eos_source.sinks.row_checks import RowRule
    from kafka_eos_source.sinks.sink_options import SinkOption

__all__ = [
    "OK",
    "Fatal",
    "Ok",
    "Outcome",
    "Refused",
    "Retryable",
    "RowRefusal",
    "RowRule",
    "Sink",
    "SinkContext",
    "SinkOption",
    "SinkTxn",
    "Stage",
    "StageContext",
    "Staged",
    "TwoPhaseSink",
]

_DEFINED_IN = {"RowRule": "row_checks", "Sink": "constructors", "SinkOption": "sink_options"}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: all queries parse the sinks' options, and few have a sink."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _DEFINED_IN.get(name, "contract")
    return getattr(import_module(f"kafka_eos_source.sinks.{place}"), name)
