"""Steps of a query that the tasks that read Kafka do themselves, in Arrow, before Spark has a row.

`frame.map_in_read` is for users (``from kafka_eos_source import map_in_read``); an aggregation begins there
by itself (`state.vector.in_read`).
"""
