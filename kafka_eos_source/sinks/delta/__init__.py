"""Delta Lake sink: tasks write data files, and one table version commits the batch and records its id."""

from kafka_eos_source.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
