"""Records on each host what ran for a batch and sends packets, so that the sink can check that they arrive.

Stateful operators send their state changes to the sink in packets, and reads their bad records
(`protocol.packing`). A projection can drop the column of packets, and the sink then receives no trace of the
sender. Spark runs the sink in the tasks of the last step, after or in the tasks of the senders. So the task
of a sender writes its name to a file on its host, each task of the sink reports the names that it reads
there, and the driver compares them with the packets that it received.

If no task of the sender ran on a host of the sink's tasks (there is a shuffle between them), the next batch
detects the loss of state changes: the shards see that their state was not committed. Nothing detects the loss
of bad records then, so all steps that a frame with them can take are checked when the query starts
(`spark.operator_frame`, `spark.changelog_check`).
"""

from __future__ import annotations

import logging

from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.spark.worker import StreamingTask

_log = logging.getLogger(__name__)

#: Folder and batch of the last record of each sender that this process wrote. A task may run many shards.
_recorded: dict[str, tuple[str, str]] = {}

_CONSEQUENCE = (
    "If a projection drops the state changes of an operator, the query notices only at the next batch, and "
    "fails there; if one drops bad records, nothing notices."
)


def record_sender(task: StreamingTask, name: str) -> None:
    """Records on this host that the sender of this name runs for the task's batch.

    The record includes the run, because a later run may replay the batch without the sender.

    Args:
        task: the running task.
        name: changelog of an operator, or name of a read (`sender_of_read`).
    """
    folder, batch = _folder(task), _batch(task)
    if _recorded.get(name) == (folder.path, batch):
        return
    try:
        if name not in _recorded:
            _forget_other_runs(folder, task)
        folder.write(name, batch)
        _recorded[name] = folder.path, batch
    except (OSError, UnicodeDecodeError) as error:
        warn_once(_log, f"cannot record on this host that {name!r} sends packets: {error}. {_CONSEQUENCE}")


#: Begins the names of reads; no topic can have such a name.
READ = "read "


def sender_of_read(frame: str) -> str:
    """Returns the name of a read as a sender.

    Args:
        frame: `model.ReadTask.frame`.
    """
    return f"{READ}{frame}"


def recorded_senders(task: StreamingTask) -> tuple[str, ...]:
    """Returns the names of the senders that ran for the task's batch on this host, sorted."""
    if not task.query_id:
        return ()
    try:
        batch_of_sender = _folder(task).files()
    except (OSError, UnicodeDecodeError) as error:
        warn_once(_log, f"cannot read what sends packets on this host: {error}. {_CONSEQUENCE}")
        return ()
    batch = _batch(task)
    return tuple(sorted(name for name, recorded in batch_of_sender.items() if recorded == batch))


def _forget_other_runs(folder: PrivateFolder, task: StreamingTask) -> None:
    """Deletes the records of earlier runs, because each run gives its reads new names."""
    for name, recorded in folder.files().items():
        if recorded.partition(" ")[0] != task.run_id:
            folder.remove(name)


def _batch(task: StreamingTask) -> str:
    return f"{task.run_id} {task.batch_id}"


def _folder(task: StreamingTask) -> PrivateFolder:
    """Returns the folder of this user and query."""
    return PrivateFolder.of_user("kafka-eos-senders").folder(task.query_id)
