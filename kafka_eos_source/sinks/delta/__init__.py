"""Delta Lake: tasks write data files, one version of the table commits the batch and names it."""

from kafka_eos_source.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
