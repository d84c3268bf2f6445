"""Two-phase sinks: external systems that receive each micro-batch exactly once, together with Kafka."""

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
from kafka_eos_source.sinks.options import SinkOption
from kafka_eos_source.sinks.writer import with_two_phase_sinks

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
