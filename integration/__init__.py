"""The real thing: a real Kafka, real Spark, real processes that are killed."""
