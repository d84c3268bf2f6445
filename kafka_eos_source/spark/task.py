"""Query and micro-batch of the running task, from local properties that Spark's ``StreamExecution`` sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


#: The task for which a resident worker works at present.
_on_behalf_of: StreamingTask | None = None


@contextmanager
def working_for(task: StreamingTask | None) -> Iterator[None]:
    """Makes `running_task` return ``task`` during the block, in a process that is no worker of Spark."""
    global _on_behalf_of
    _on_behalf_of = task
    try:
        yield
    finally:
        _on_behalf_of = None


def running_task() -> StreamingTask | None:
    """Returns the task that this process runs; None if it runs no task, as on the driver."""
    if _on_behalf_of is not None:
        return _on_behalf_of
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
