"""Two-phase sinks: external systems that receive each micro-batch exactly once, together with Kafka."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import (
        OK,
        Fatal,
        Ok,
        Outcome,
        Retryable,
        SinkContext,
        SinkTxn,
        Stage,
        StageContext,
        Staged,
        TwoPhaseSink,
    )
    from kafka_eos_source.sinks.sink_options import SinkOption
    from kafka_eos_source.sinks.specs import with_two_phase_sinks

__all__ = [
    "OK",
    "Fatal",
    "Ok",
    "Outcome",
    "Retryable",
    "SinkContext",
    "SinkOption",
    "SinkTxn",
    "Stage",
    "StageContext",
    "Staged",
    "TwoPhaseSink",
    "with_two_phase_sinks",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: all queries parse the sinks' options, and few have a sink."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = {"SinkOption": "sink_options", "with_two_phase_sinks": "specs"}.get(name, "contract")
    return getattr(import_module(f"kafka_eos_source.sinks.{place}"), name)
