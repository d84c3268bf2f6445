"""Makes the rows of a batch durable before the commit; readers of Kafka cannot see them yet."""
