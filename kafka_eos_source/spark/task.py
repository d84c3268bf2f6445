"""Query and micro-batch of the running task, from local properties that Spark's ``StreamExecution`` sets."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import TaskContext


@dataclass(frozen=True)
class StreamingTask:
    """A running task. Outside of a streaming query, the ids are "".

    Attributes:
        query_id: id of the query in the checkpoint, the same in every run.
        batch_id: id of the micro-batch, as text.
        run_id: id of this run of the query.
        partition: number of the task in its stage.
    """

    query_id: str
    batch_id: str
    run_id: str
    partition: int = 0


def running_task() -> StreamingTask | None:
    """Returns the task that this process runs; None if it runs no task, as on the driver."""
    context = TaskContext.get()
    if context is None:
        return None

    def local_property(name: str) -> str:
        return context.getLocalProperty(name) or ""

    return StreamingTask(
        query_id=local_property("sql.streaming.queryId"),
        batch_id=local_property("streaming.sql.batchId"),
        run_id=local_property("spark.jobGroup.id"),
        partition=context.partitionId(),
    )
