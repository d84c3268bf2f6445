"""What the bench knows of a contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.processes import Command

#: Where the programs are that run in the contenders' own processes.
PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@dataclass(frozen=True)
class Job:
    """One run's work.

    Attributes:
        name: of the run; application id, consumer group.
        bootstrap: of the cluster.
        topic_in, topic_out: as they are called; both exist, the output is empty.
        partitions: of the output.
        cores: to be used, by whatever the contender calls its parallelism.
        batch_records: of a micro-batch, for those that have such.
        folder: for state, checkpoints, logs.
        compression: of what is written: ``none``, ``lz4``, ``zstd``.
        documents: what the program must know of the values (`Workload.documents`).
    """

    name: str
    bootstrap: str
    topic_in: str
    topic_out: str
    partitions: int
    cores: int
    batch_records: int
    folder: Path
    compression: str = "none"
    documents: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """So many times as fast as a peer is what a contender of ours is to be."""

    ours: str
    peer: str
    times: float


class Contender(Protocol):
    """Does a task's work (`benchmarks.tasks`), as its users would have it done.

    Attributes:
        name: as the command line has it.
        title: as the table has it, with the version.
        guarantee: what it promises.
        exactly_once: whether that is exactly once.
        settings: what was set, other than the defaults.
        ends: whether it ends by itself once the input is done.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def guarantee(self) -> str: ...
    @property
    def exactly_once(self) -> bool: ...
    @property
    def settings(self) -> str: ...
    @property
    def ends(self) -> bool: ...

    def prepare(self) -> None:
        """Fetches and installs what it needs, once.

        Raises:
            UnavailableError: something cannot be had.
        """

    def commands(self, job: Job) -> Sequence[Command]:
        """The processes that do the job. Each prints ``FIRST <time.time()>`` when its first record is
        processed, and ends by itself or on SIGTERM."""
