"""Iceberg sink: tasks write data files, and one snapshot commits the batch and records its id."""

from kafka_eos_source.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
