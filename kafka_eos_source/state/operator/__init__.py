"""A stateful operator on Spark: frames with one, its tasks, and what a shard does before its batch."""
