"""Exactly-once Kafka for Spark Structured Streaming: ``format("kafka-eos")``.

Spark discovers the format once the package is installed. `register` registers it explicitly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka_eos_source.native.loader import report_if_not_built
from kafka_eos_source.runtime.log_format import configure_if_wanted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafka_eos_source.datasource import KafkaEosDataSource
    from kafka_eos_source.in_read.frame import map_in_read
    from kafka_eos_source.observe.listener import observe_batches
    from kafka_eos_source.observe.notebook import watch
    from kafka_eos_source.spark.invalid import invalid_record, record_origin
    from kafka_eos_source.spark.quiet import quiet_logs
    from kafka_eos_source.spark.session import local_checkpoints

__all__ = [
    "KafkaEosDataSource",
    "invalid_record",
    "local_checkpoints",
    "map_in_read",
    "observe_batches",
    "quiet_logs",
    "record_origin",
    "register",
    "watch",
]


configure_if_wanted()
report_if_not_built()


def register(spark: SparkSession) -> None:
    """Registers the format with a session, like ``spark.dataSource.register(KafkaEosDataSource)``."""
    from kafka_eos_source.datasource import KafkaEosDataSource

    spark.dataSource.register(KafkaEosDataSource)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that ``kafka-eos broker`` starts without PySpark."""
    if name == "KafkaEosDataSource":
        from kafka_eos_source.datasource import KafkaEosDataSource

        return KafkaEosDataSource
    if name == "invalid_record":
        from kafka_eos_source.spark.invalid import invalid_record

        return invalid_record
    if name == "local_checkpoints":
        from kafka_eos_source.spark.session import local_checkpoints

        return local_checkpoints
    if name == "map_in_read":
        from kafka_eos_source.in_read.frame import map_in_read

        return map_in_read
    if name == "observe_batches":
        from kafka_eos_source.observe.listener import observe_batches

        return observe_batches
    if name == "quiet_logs":
        from kafka_eos_source.spark.quiet import quiet_logs

        return quiet_logs
    if name == "record_origin":
        from kafka_eos_source.spark.invalid import record_origin

        return record_origin
    if name == "watch":
        from kafka_eos_source.observe.notebook import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
