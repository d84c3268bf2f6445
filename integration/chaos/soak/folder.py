"""The folder of a run: from it, a run resumes and its report is made.

======================  ===================================================================
``run.json``            seed and settings, written when the run begins
``chunks.jsonl``        one line for each chunk that was judged, with what the next one needs
``faults.jsonl``        faults and recoveries
``events.jsonl``        starts of drivers, failed queries, sessions, help that a query needed
``samples.jsonl``       samples of processes
``batches.jsonl``       micro-batches of the chunk under way, from the offset logs
``history/``            what the loops recorded in the chunk under way (`integration.support.history`)
``run.lock``            locked by the process that runs the soak in this folder
``kafka/``              data of the brokers
``checkpoints/`` …      checkpoints, state and sinks of the queries; logs of the drivers
``report.md, .json``    the report
======================  ===================================================================
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORMAT = 1


class HeldError(Exception):
    """Another process runs the soak in this folder."""


class JsonLines:
    """An append-only file with one JSON object per line. A killed process loses at most its last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def append(self, **entry: Any) -> None:
        """Adds a line and the time; when this returns, the line survives the death of this process."""
        line = json.dumps({"at": time.time(), **entry}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._remove_torn_line()
            with open(self._path, "ab", buffering=0) as out:
                out.write(line)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields all complete lines."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def clear(self) -> None:
        """Deletes all lines."""
        with self._lock:
            self._path.unlink(missing_ok=True)

    def last(self) -> dict[str, Any] | None:
        """Returns the last complete line; None if there is none."""
        return next(iter(deque(self, maxlen=1)), None)

    def _remove_torn_line(self) -> None:
        if not self._path.exists() or not self._path.stat().st_size:
            return
        with open(self._path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


class RunFolder:
    """The folder of one run.

    Attributes:
        path: the folder.
        chunks, faults, events, samples, batches: the files that grow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.chunks, self.faults, self.events, self.samples, self.batches = (
            JsonLines(self.path / f"{name}.jsonl")
            for name in ("chunks", "faults", "events", "samples", "batches")
        )

    @property
    def exists(self) -> bool:
        """Whether a run began in this folder."""
        return (self.path / "run.json").exists()

    def begin(self, **settings: Any) -> None:
        """Writes the settings of a new run.

        Raises:
            FileExistsError: if the folder already holds a run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.exists:
            raise FileExistsError(f"{self.path} already holds a run; continue it with --resume.")
        temporary = self.path / "run.json.tmp"
        temporary.write_text(json.dumps({"format": _FORMAT, **settings}, indent=1))
        temporary.rename(self.path / "run.json")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for this process. The operating system releases the lock of a killed process.

        Raises:
            HeldError: if another process holds it.
        """
        with open(self.path / "run.lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HeldError(
                    f"another process runs the soak in {self.path}; end it first, or wait for its end."
                ) from None
            yield

    def settings(self) -> dict[str, Any]:
        """Returns what `begin` wrote.

        Raises:
            ValueError: if another version of the soak wrote it.
        """
        found = dict(json.loads((self.path / "run.json").read_text()))
        if found.pop("format") != _FORMAT:
            raise ValueError(f"{self.path} holds the run of another version of the soak.")
        return found
