"""Which query and batch a Spark task works for: local properties, which Spark's ``StreamExecution`` sets."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import TaskContext


@dataclass(frozen=True)
class StreamingTask:
    """A running task. Each is "" where Spark did not set it: outside of a streaming query.

    Attributes:
        query_id: of the checkpoint, the same in every run.
        batch_id: number of the micro-batch, as text.
        run_id: of this run of the query.
        partition: number of the task in its stage.
    """

    query_id: str
    batch_id: str
    run_id: str
    partition: int = 0


def running_task() -> StreamingTask | None:
    """The task that this process runs; None = it runs none, as on the driver."""
    context = TaskContext.get()
    if context is None:
        return None

    def told(name: str) -> str:
        return context.getLocalProperty(name) or ""

    return StreamingTask(
        query_id=told("sql.streaming.queryId"),
        batch_id=told("streaming.sql.batchId"),
        run_id=told("spark.jobGroup.id"),
        partition=context.partitionId(),
    )
