"""Records on each host which stateful operators ran for a batch, so that the sink can check them.

A projection can drop the column with an operator's state changes. The sink then receives no trace of that
operator. Spark runs the sink in the tasks of the last operator, after the tasks of the operators before it.
So each operator's task writes the name of its changelog to a file on its host, each task of the sink reports
the names that it reads there, and the driver compares them with the changes that it received. If no task of
the operator ran on a host of the sink's tasks (there is a shuffle between them), the next batch detects the
loss: the shards see that their state was not committed.
"""

from __future__ import annotations

import logging

from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.spark.worker import StreamingTask

_log = logging.getLogger(__name__)

#: Folder and batch of the last record of each operator that this process wrote. A task may run many shards.
_recorded: dict[str, tuple[str, str]] = {}

_CONSEQUENCE = (
    "If a projection drops the operator's state changes, the query notices only at the next batch, and fails "
    "there."
)


def record_operator(task: StreamingTask, changelog: str) -> None:
    """Records on this host that the operator with this changelog runs for the task's batch.

    The record includes the run, because a later run may replay the batch without the operator.
    """
    folder, batch = _folder(task), _batch(task)
    if _recorded.get(changelog) == (folder.path, batch):
        return
    try:
        folder.write(changelog, batch)
        _recorded[changelog] = folder.path, batch
    except OSError as error:
        warn_once(
            _log, f"cannot record on this host that operator {changelog!r} runs: {error}. {_CONSEQUENCE}"
        )


def recorded_operators(task: StreamingTask) -> tuple[str, ...]:
    """Returns the changelogs of the operators that ran for the task's batch on this host, sorted."""
    if not task.query_id:
        return ()
    try:
        batch_of_changelog = _folder(task).files()
    except (OSError, UnicodeDecodeError) as error:
        warn_once(_log, f"cannot read which operators run on this host: {error}. {_CONSEQUENCE}")
        return ()
    batch = _batch(task)
    return tuple(sorted(changelog for changelog, recorded in batch_of_changelog.items() if recorded == batch))


def _batch(task: StreamingTask) -> str:
    return f"{task.run_id} {task.batch_id}"


def _folder(task: StreamingTask) -> PrivateFolder:
    """Returns the folder of this user and query."""
    return PrivateFolder.of_user("kafka-eos-operators").folder(task.query_id)
