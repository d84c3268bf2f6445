"""Apache Iceberg: tasks write data files, one snapshot commits the batch, and says which batch it is."""

from kafka_eos_source.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
