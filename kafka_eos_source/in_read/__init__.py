"""Query steps that run inside the read tasks, on Arrow batches, before Spark sees any row.

Users call `frame.map_in_read` (``from kafka_eos_source import map_in_read``). An aggregation starts in the
read automatically (`state.vector.in_read`).
"""
