"""Exactly-once Kafka for Spark Structured Streaming: ``format("kafka-eos")``.

Spark discovers the format once the package is installed. `register` registers it explicitly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kafka_eos_source.runtime.logs import configure_if_wanted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafka_eos_source.app.app import App
    from kafka_eos_source.datasource import KafkaEosDataSource
    from kafka_eos_source.in_read.frame import map_in_read
    from kafka_eos_source.observe.notebook import observe_batches, watch
    from kafka_eos_source.registry.columns import (
        from_registry,
        registry_schema,
        to_registry,
        undecodable_record,
    )
    from kafka_eos_source.sinks.constructors import (
        custom,
        delta,
        files,
        http,
        iceberg,
        s3,
        sink_options,
        sql,
    )
    from kafka_eos_source.spark.quiet import quiet_logs
    from kafka_eos_source.spark.schema import invalid_record, record_origin
    from kafka_eos_source.spark.session import local_checkpoints, recommended_settings
    from kafka_eos_source.state.reading.live import watch_state
    from kafka_eos_source.state.vector.windows import hopping, session, tumbling

__all__ = [
    "App",
    "KafkaEosDataSource",
    "custom",
    "delta",
    "files",
    "from_registry",
    "hopping",
    "http",
    "iceberg",
    "invalid_record",
    "local_checkpoints",
    "map_in_read",
    "observe_batches",
    "quiet_logs",
    "recommended_settings",
    "record_origin",
    "register",
    "registry_schema",
    "s3",
    "session",
    "sink_options",
    "sql",
    "to_registry",
    "tumbling",
    "undecodable_record",
    "watch",
    "watch_state",
]


configure_if_wanted()


def register(spark: SparkSession) -> None:
    """Registers the format with a session, like ``spark.dataSource.register(KafkaEosDataSource)``.

    Raises:
        KernelUnavailableError: if this installation lacks the C kernel.
    """
    from kafka_eos_source import native
    from kafka_eos_source.datasource import KafkaEosDataSource

    native.check()
    spark.dataSource.register(KafkaEosDataSource)


#: Where each public name is defined.
_DEFINED_IN = {
    "App": "kafka_eos_source.app.app",
    "KafkaEosDataSource": "kafka_eos_source.datasource",
    "custom": "kafka_eos_source.sinks.constructors",
    "delta": "kafka_eos_source.sinks.constructors",
    "files": "kafka_eos_source.sinks.constructors",
    "from_registry": "kafka_eos_source.registry.columns",
    "hopping": "kafka_eos_source.state.vector.windows",
    "http": "kafka_eos_source.sinks.constructors",
    "iceberg": "kafka_eos_source.sinks.constructors",
    "invalid_record": "kafka_eos_source.spark.schema",
    "local_checkpoints": "kafka_eos_source.spark.session",
    "map_in_read": "kafka_eos_source.in_read.frame",
    "observe_batches": "kafka_eos_source.observe.notebook",
    "quiet_logs": "kafka_eos_source.spark.quiet",
    "recommended_settings": "kafka_eos_source.spark.session",
    "record_origin": "kafka_eos_source.spark.schema",
    "registry_schema": "kafka_eos_source.registry.columns",
    "s3": "kafka_eos_source.sinks.constructors",
    "session": "kafka_eos_source.state.vector.windows",
    "sink_options": "kafka_eos_source.sinks.constructors",
    "sql": "kafka_eos_source.sinks.constructors",
    "to_registry": "kafka_eos_source.registry.columns",
    "tumbling": "kafka_eos_source.state.vector.windows",
    "undecodable_record": "kafka_eos_source.registry.columns",
    "watch": "kafka_eos_source.observe.notebook",
    "watch_state": "kafka_eos_source.state.reading.live",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that ``kafka-eos broker`` starts without PySpark."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DEFINED_IN[name]), name)
