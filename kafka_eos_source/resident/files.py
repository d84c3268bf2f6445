"""Files of resident workers, in a folder that only the current user may enter.

::

    kafka-eos-resident-<user>/<process id>-<code>/<slot>.lock     locked by the worker as long as it lives
                                                  <slot>          its socket

The process id is that of the process that started Spark's Python worker: PySpark's daemon, or the JVM.
Resident workers end with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kafka_eos_source.runtime.private_folders import PrivateFolder
from kafka_eos_source.runtime.processes import is_alive


@lru_cache(maxsize=1)
def slots_of() -> int:
    """Returns the number of slots of an executor: the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True)
class SlotFiles:
    """Files of one slot.

    Attributes:
        watched_pid: process with which the worker ends.
        code: short hash of the Python program and its import path.
        slot: number of the slot.
    """

    watched_pid: int
    code: str
    slot: int

    @property
    def _folder(self) -> PrivateFolder:
        return _all_workers().folder(f"{self.watched_pid}-{self.code}")

    @property
    def socket_path(self) -> str:
        """Path of the worker's socket."""
        return os.path.join(self._folder.path, str(self.slot))

    @contextmanager
    def claimed(self) -> Iterator[int | None]:
        """Locks the slot for a new worker, which inherits the descriptor, and with it the lock.

        Yields:
            The descriptor; None if another process has the lock, so that there is a worker already.

        Raises:
            OSError: if the folder cannot be created, or belongs to another user.
        """
        path = self._folder.create()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(os.path.join(path, f"{self.slot}.lock"), flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield descriptor
        finally:
            os.close(descriptor)


def remove_leftovers() -> None:
    """Removes the files of workers whose watched process has ended."""
    for folder in Path(_all_workers().create()).iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _all_workers() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-resident")
