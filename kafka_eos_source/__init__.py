"""kafka-eos: a Kafka connector for Spark Structured Streaming that is exactly once from end to end."""
