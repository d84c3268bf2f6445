"""SQL sink: writes to a table of a database through SQLAlchemy Core."""

from kafka_eos_source.sinks.sql.sink import SqlSink

__all__ = ["SqlSink"]
