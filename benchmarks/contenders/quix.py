"""Quix Streams: Kafka Streams' idea in Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import versions
from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import python_with
from benchmarks.processes import Command

#: Seconds between two commits, without and with tuning.
_COMMIT_SECONDS = {False: 1, True: 5}
#: librdkafka's properties for throughput, of Quix's producer and consumer.
_THROUGHPUT: dict[str, dict[str, str]] = {
    "producer": {"linger.ms": "100", "batch.size": "1000000", "queue.buffering.max.messages": "1000000"},
    "consumer": {"fetch.min.bytes": "100000", "queued.min.messages": "1000000"},
}


@dataclass(frozen=True)
class Quix:
    """A stateful ``apply`` over RocksDB with a changelog topic. It uses one core; more by more processes."""

    name: str
    every_core: bool = False
    tuned: bool = False
    guarantee: str = "exactly once"
    exactly_once: bool = True
    ends: bool = False

    @property
    def title(self) -> str:
        processes = "a process per core" if self.every_core else "one process"
        return f"Quix Streams {versions.QUIX_VERSION}, {processes}{', tuned' if self.tuned else ''}"

    @property
    def settings(self) -> str:
        return _settings(self.tuned)

    def prepare(self) -> None:
        python_with("quix", versions.QUIX)

    def commands(self, job: Job) -> Sequence[Command]:
        python = python_with("quix", versions.QUIX)
        processes = min(job.cores, job.partitions) if self.every_core else 1
        arguments = [
            str(python),
            str(PROGRAMS / "quix_count.py"),
            job.bootstrap,
            job.topic_in,
            job.topic_out,
            job.name,
        ]
        return [
            Command([*arguments, str(job.folder / f"state-{number}"), *_tuning(self.tuned)])
            for number in range(processes)
        ]


@dataclass(frozen=True)
class QuixCopy:
    """``dataframe(topic).to_topic(other)``, in one process.

    Attributes:
        tuned: whether it commits less often, and its clients fetch and send more at once.
    """

    name: str
    tuned: bool = False
    guarantee: str = "exactly once"
    exactly_once: bool = True
    ends: bool = False

    @property
    def title(self) -> str:
        return f"Quix Streams {versions.QUIX_VERSION}, one process{', tuned' if self.tuned else ''}"

    @property
    def settings(self) -> str:
        return _settings(self.tuned)

    def prepare(self) -> None:
        python_with("quix", versions.QUIX)

    def commands(self, job: Job) -> Sequence[Command]:
        python = str(python_with("quix", versions.QUIX))
        arguments = [python, str(PROGRAMS / "quix_copy.py"), job.bootstrap, job.topic_in, job.topic_out]
        arguments += [job.name, str(job.folder / "state"), "exactly-once", job.compression]
        return [Command([*arguments, *_tuning(self.tuned)])]


def _tuning(tuned: bool) -> list[str]:
    """Returns the arguments of both programs: seconds between two commits, properties of the clients."""
    return [str(_COMMIT_SECONDS[tuned]), json.dumps(_THROUGHPUT if tuned else {})]


def _settings(tuned: bool) -> str:
    more = f", {json.dumps(_THROUGHPUT)}" if tuned else ""
    return f"processing_guarantee=exactly-once, commit_interval={_COMMIT_SECONDS[tuned]} s{more}"
