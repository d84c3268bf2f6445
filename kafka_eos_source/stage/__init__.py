"""Spark's rows made durable, and invisible to every reader of Kafka until the commit forwards them."""
