"""Which operators ran for a batch: left by their tasks on their machine, found by the sink's.

A projection can drop the column of the changes, and with it all that the sink would know of an operator. But
Spark runs the sink in the tasks of the last operator, and after those of the ones before it. So each operator
leaves its changelog's name in a file, each task of the sink says what it found, and the driver compares.
Where no task of an operator ran on the machine of a task of the sink (a shuffle between them), the next
batch notices: the shards find that their state was not committed.
"""

from __future__ import annotations

import logging
import os
import tempfile

from kafka_eos_source.streaming_task import StreamingTask

_log = logging.getLogger(__name__)


def announce(task: StreamingTask, changelog: str) -> None:
    """Says on this machine that the operator of this changelog runs for the task's batch.

    A batch that runs again in another run of the query may be without the operator, so the run is said too.
    """
    folder = _folder(task)
    own = os.path.join(folder, f".{changelog}.{os.getpid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(own, "w", encoding="utf-8") as file:
            file.write(_batch(task))
        os.replace(own, os.path.join(folder, changelog))
    except OSError as error:
        _log.warning("that the operator of %s runs cannot be said on this machine: %s", changelog, error)


def announced(task: StreamingTask) -> tuple[str, ...]:
    """Changelogs of the operators that ran for the task's batch on this machine, sorted."""
    folder = _folder(task)
    if not task.query_id or not os.path.isdir(folder):
        return ()
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        return tuple(sorted(name for name in names if _read(folder, name) == _batch(task)))
    except OSError as error:
        _log.warning("which operators run on this machine cannot be read: %s", error)
        return ()


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read()


def _batch(task: StreamingTask) -> str:
    return f"{task.run_id} {task.batch_id}"


def _folder(task: StreamingTask) -> str:
    """Of this user and query."""
    return os.path.join(tempfile.gettempdir(), f"kafka-eos-operators-{os.getuid()}", task.query_id)
