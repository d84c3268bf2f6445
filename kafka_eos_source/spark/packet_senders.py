"""Records on each host what ran for a batch and sends packets, so that the sink can check that they arrive.

Stateful operators send their state changes to the sink in packets, and reads their bad records
(`protocol.packing`). A projection can drop the column of packets, and the sink then receives no trace of the
sender. Spark runs the sink in the tasks of the last step, after or in the tasks of the senders. So the task
of a sender writes its name to a file on its host, each task of the sink reports the names that it reads
there, and the driver compares them with the packets that it received.

If no task of the sender ran on a host of the sink's tasks (there is a shuffle between them), the next batch
detects the loss of state changes: the shards see that their state was not committed. Of reads, the process
that plans a batch notes on the driver's host, where the commit runs too, that their tasks will send packets
(`PlannedReads`), and up to which position the batch reads.
"""

from __future__ import annotations

import contextlib
import logging
from typing import BinaryIO

from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.spark.worker import StreamingTask

_log = logging.getLogger(__name__)

#: Folder and batch of the last record of each sender that this process wrote. A task may run many shards.
_recorded: dict[str, tuple[str, str]] = {}

_CONSEQUENCE = (
    "If a projection drops the state changes of an operator, the query notices only at the next batch, and "
    "fails there."
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


# -- Reads, as the process that plans them sees it --------------------------------------------------

#: Ends the name of the file that a planning process holds as long as it lives.
_HELD = ".held"


class PlannedReads:
    """Notes on the driver's host which batches the reading tasks of one frame send packets for.

    The commit finds no other trace of the tasks if a step of the query drops the column of packets, and no
    task of the sink runs on the hosts of these tasks.

    Args:
        application_id: the query.
        frame: id of the frame that reads (`model.ReadTask.frame`).
    """

    def __init__(self, application_id: str, frame: str) -> None:
        self._folder, self._frame = _planned(application_id), frame
        self._held: BinaryIO | None = None

    def plan(self, position: str) -> None:
        """Notes that tasks will run for a batch.

        Args:
            position: digest of the position of the source at the end of the batch.
        """
        try:
            if self._held is None:
                _forget_dead(self._folder)
                self._held = self._folder.hold(self._frame + _HELD)
            self._folder.write(self._frame, position)
        except (OSError, UnicodeDecodeError) as error:
            warn_once(
                _log,
                f"the source cannot note on this host that its reading tasks send packets: {error}. If a "
                "step of the query drops bad records, nothing may notice.",
            )

    def close(self) -> None:
        """Removes the notes, because the run has ended."""
        if self._held is not None:
            with contextlib.suppress(OSError):
                for name in (self._frame, self._frame + _HELD):
                    self._folder.remove(name)
            self._held.close()


def planned_reads(application_id: str) -> dict[str, str]:
    """Returns the frames whose tasks send packets, and up to which position their newest batch reads.

    Frames of earlier runs may be among them, see `is_running`.
    """
    try:
        found = _planned(application_id).files()
    except (OSError, UnicodeDecodeError) as error:
        warn_once(_log, f"cannot read which reading tasks send packets: {error}. {_CONSEQUENCE}")
        return {}
    return {frame: position for frame, position in found.items() if not frame.endswith(_HELD)}


def is_running(application_id: str, frame: str) -> bool:
    """Returns whether the process that plans the reads of a frame lives (`PrivateFolder.stays_held`)."""
    folder = _planned(application_id)
    try:
        return folder.stays_held(frame + _HELD)
    except OSError as error:
        warn_once(_log, f"cannot find out whether a read still runs: {error}. {_CONSEQUENCE}")
    return False


def _forget_dead(folder: PrivateFolder) -> None:
    """Removes the notes of planning processes that were killed."""
    for name in folder.files():
        if name.endswith(_HELD) and not folder.is_held(name):
            folder.remove(name)
            folder.remove(name.removesuffix(_HELD))


def _planned(application_id: str) -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-planned-reads").folder(application_id)
