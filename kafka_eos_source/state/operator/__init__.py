"""Stateful operators on Spark: DataFrames that contain one, and its tasks, which work on one shard each."""
