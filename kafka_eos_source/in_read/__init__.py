"""Query steps that run inside the read tasks, on Arrow batches, before Spark sees any row.

One way down, from a frame to the rows of a task::

    lineage   which columns of a frame come from the source without a step of Spark in between
    step      what travels to the tasks: a step takes columns of the source, or of the step before it
    rows      steps that make plain rows, by a transform, or set aside records that they cannot process
    decode, sql, records      the transforms: documents to columns, SQL, rows to records
    frame     `map_in_read`: a user's function, whose rows go to the sink packed
    staged    rows that the tasks which read stage for the sink

`App` puts these together (`app.plan`). An aggregation and an operator with a shard for each partition have
steps of their own (`state.vector.in_read`, `state.operator.in_read`).
"""
