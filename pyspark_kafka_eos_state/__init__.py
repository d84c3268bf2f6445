"""Found by Spark itself, as `pyspark_kafka_eos`: ``spark.read.format("kafka-eos-state")``."""

from kafka_eos_source.datasource import KafkaEosStateDataSource as DefaultSource

__all__ = ["DefaultSource"]
