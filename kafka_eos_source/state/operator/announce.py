"""Tells the sink's tasks which stateful operators ran for a batch on their host.

A projection can drop the column with an operator's state changes, and with it everything the sink would
know of that operator. Spark runs the sink in the tasks of the last operator, after the tasks of the operators
before it. So each operator's task leaves the name of its changelog in a file, each task of the sink reports
the names that it finds, and the driver compares. Where no task of an operator ran on the host of a sink's
task (there is a shuffle between them), the next batch notices: the shards find that their state was not
committed.
"""

from __future__ import annotations

import logging

from kafka_eos_source.runtime.private_folders import PrivateFolder, warn_once
from kafka_eos_source.spark.task import StreamingTask

_log = logging.getLogger(__name__)

_LOST = (
    "If a projection drops the operator's state changes, the query notices only at the next batch, and fails "
    "there."
)


def announce(task: StreamingTask, changelog: str) -> None:
    """Records on this host that the operator of this changelog runs for the task's batch.

    The record names the run too, because a later run may replay the batch without the operator.
    """
    try:
        _folder(task).write(changelog, _batch(task))
    except OSError as error:
        warn_once(_log, f"cannot record on this host that operator {changelog!r} runs: {error}. {_LOST}")


def announced(task: StreamingTask) -> tuple[str, ...]:
    """Changelogs of the operators that ran for the task's batch on this host, sorted."""
    if not task.query_id:
        return ()
    try:
        found = _folder(task).files()
    except (OSError, UnicodeDecodeError) as error:
        warn_once(_log, f"cannot read which operators run on this host: {error}. {_LOST}")
        return ()
    return tuple(sorted(changelog for changelog, batch in found.items() if batch == _batch(task)))


def _batch(task: StreamingTask) -> str:
    return f"{task.run_id} {task.batch_id}"


def _folder(task: StreamingTask) -> PrivateFolder:
    """Of this user and query."""
    return PrivateFolder.of_user("kafka-eos-operators").folder(task.query_id)
