"""Tables of SQL databases, by SQLAlchemy Core."""

from kafka_eos_source.sinks.sql.sink import SqlSink

__all__ = ["SqlSink"]
