"""Follows the checkpoints of the queries: their batches, stalls, and recoveries after faults."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration.chaos.soak.folder import JsonLines
from integration.chaos.soak.workload import SOURCE, Batch, Carry


def batch_ids(folder: Path) -> list[int]:
    """Returns the batch ids in an offset or commit log, ascending."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except FileNotFoundError:
        return []


def read_batch(checkpoint: Path, batch_id: int) -> Batch:
    """Reads one entry of the offset log."""
    line = (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[-1]
    ends = json.loads(line)[SOURCE]
    return Batch(batch_id, {int(partition): offset for partition, offset in ends.items()})


@dataclass
class _Fault:
    number: int
    since: float
    before: dict[str, int]
    waiting: set[str]
    helped: bool = False


@dataclass
class _Followed:
    """One query: its checkpoint, its newest planned batch and newest commit, its batches of this chunk."""

    checkpoint: Path
    planned: Batch
    committed: int
    batches: dict[int, Batch] = field(default_factory=dict)
    since: float = 0.0
    has_moved: bool = False


class Watch:
    """Follows all queries. `look` must be called more often than Spark removes 100 batches.

    Args:
        checkpoints: folder of each query's checkpoint.
        carries: what the last chunk left.
        faults: file to which recoveries are written.
        log: file that keeps the batches of the chunk under way, because Spark deletes old ones.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Path],
        carries: Mapping[str, Carry],
        faults: JsonLines,
        log: JsonLines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queries = {
            name: _Followed(
                path,
                Batch(carries[name].next_batch - 1, carries[name].position),
                carries[name].next_batch - 1,
            )
            for name, path in checkpoints.items()
        }
        self._file = faults
        self._log = log
        for each in log:
            query = self._queries[each["query"]]
            if each["batch"] > query.planned.batch_id:
                ends = {int(partition): offset for partition, offset in each["ends"].items()}
                query.planned = query.batches[each["batch"]] = Batch(each["batch"], ends)
        self._clock = clock
        self._lock = threading.RLock()
        self._faults: list[_Fault] = []
        self._has_input = False
        self._looked = clock()
        self._calm = [0.0, 0]
        self.longest_stall: tuple[float, str] = (0.0, "")

    def look(self) -> None:
        """Reads what is new in all checkpoints."""
        with self._lock:
            committed = 0
            for name, query in self._queries.items():
                self._collect(name, query)
                newest = max(batch_ids(query.checkpoint / "commits"), default=-1)
                if newest > query.committed:
                    committed += newest - query.committed
                    query.committed = newest
                    self._moved(name, query)
            now = self._clock()
            if self._has_input and not self._faults:
                self._calm[0] += now - self._looked
                self._calm[1] += committed
            self._looked = now
            self._check_faults()

    def _collect(self, name: str, query: _Followed) -> None:
        for batch_id in batch_ids(query.checkpoint / "offsets"):
            if batch_id > query.planned.batch_id:
                batch = read_batch(query.checkpoint, batch_id)
                self._log.append(query=name, batch=batch_id, ends=batch.ends)
                query.planned = query.batches[batch_id] = batch

    def _moved(self, name: str, query: _Followed) -> None:
        now = self._clock()
        if self._has_input and query.has_moved:
            self.longest_stall = max(self.longest_stall, (now - query.since, name))
        query.since = now
        query.has_moved = True

    def _check_faults(self) -> None:
        now = self._clock()
        for fault in self._faults:
            # the first commit after a fault may be of a batch from before it
            fault.waiting = {
                name for name in fault.waiting if self._queries[name].committed < fault.before[name] + 2
            }
            if not fault.waiting:
                self._file.append(
                    kind="recovered", fault=fault.number, seconds=now - fault.since, helped=fault.helped
                )
        self._faults = [fault for fault in self._faults if fault.waiting]

    def begin_input(self) -> None:
        """The queries have input from now on, so pauses between commits count as stalls."""
        with self._lock:
            self._has_input = True
            for query in self._queries.values():
                query.since = self._clock()

    def end_input(self) -> None:
        """The input has stopped."""
        with self._lock:
            self._has_input = False

    def injected(self, number: int) -> None:
        """A fault was injected; from now on, each query must commit twice more."""
        with self._lock:
            before = {name: query.committed for name, query in self._queries.items()}
            self._faults.append(_Fault(number, self._clock(), before, set(before)))

    @property
    def without_commit(self) -> list[str]:
        """The queries that have not committed since the run or its session began."""
        with self._lock:
            return [name for name, query in self._queries.items() if not query.has_moved]

    @property
    def open_faults(self) -> int:
        """How many faults some query has not recovered from yet."""
        with self._lock:
            return len(self._faults)

    def helped(self) -> None:
        """Somebody helped, so that open faults do not count as recovered without help."""
        with self._lock:
            for fault in self._faults:
                fault.helped = True

    def stalled(self, seconds: float) -> list[str]:
        """Returns the queries that have had input for this long and committed nothing."""
        with self._lock:
            if not self._has_input:
                return []
            now = self._clock()
            return [name for name, query in self._queries.items() if now - query.since > seconds]

    def unfinished(self, ends: Mapping[int, int]) -> list[str]:
        """Returns the queries that have not committed everything up to these source offsets."""
        self.look()
        with self._lock:
            return [name for name, query in self._queries.items() if not self._is_at(query, ends)]

    def _is_at(self, query: _Followed, ends: Mapping[int, int]) -> bool:
        planned = query.planned
        return planned.batch_id <= query.committed and all(
            planned.ends.get(number, 0) == end for number, end in ends.items()
        )

    def take_calm(self) -> dict[str, float]:
        """Returns how long no fault was open while there was input, and how many batches committed then."""
        with self._lock:
            seconds, batches = self._calm
            self._calm = [0.0, 0]
            return {"seconds": seconds, "batches": batches}

    def take_batches(self, name: str) -> list[Batch]:
        """Returns the committed batches of the chunk that ends; the next chunk begins after them."""
        with self._lock:
            query = self._queries[name]
            return [query.batches.pop(batch_id) for batch_id in sorted(query.batches)]


def prune(checkpoint: Path, before: int) -> None:
    """Deletes entries of both logs before a batch, as Spark does by itself."""
    for log in ("offsets", "commits"):
        for batch_id in batch_ids(checkpoint / log):
            if batch_id < before:
                (checkpoint / log / str(batch_id)).unlink()
