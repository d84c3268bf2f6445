"""Found by Spark itself: any top-level ``pyspark_*`` module with a ``DefaultSource`` is registered."""

from kafka_eos_source.datasource import KafkaEosDataSource as DefaultSource

__all__ = ["DefaultSource"]
