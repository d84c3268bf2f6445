"""Reads offset ranges of Kafka into Arrow batches, inside Spark tasks."""
