"""Kafka Streams, ``exactly_once_v2``: the field's measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import versions
from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import jdk
from benchmarks.processes import Command
from kafka_eos_source.embedded import jars


@dataclass(frozen=True)
class KafkaStreams:
    """``stream().groupByKey().count()``: RocksDB, changelog, cache as they come."""

    name: str
    commit_interval_ms: int
    guarantee: str = "exactly once (exactly_once_v2)"
    exactly_once: bool = True
    ends: bool = False

    @property
    def title(self) -> str:
        return f"Kafka Streams {versions.STREAMS.version}, commit.interval.ms={self.commit_interval_ms}"

    @property
    def settings(self) -> str:
        default = " (its default for exactly once)" if self.commit_interval_ms == 100 else ""
        return f"num.stream.threads=cores, commit.interval.ms={self.commit_interval_ms}{default}"

    def prepare(self) -> None:
        jdk()
        jars.jars(versions.STREAMS)

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = _program("KeyedCount.java", job)
        return [Command([*arguments, str(self.commit_interval_ms)])]


@dataclass(frozen=True)
class KafkaStreamsCopy:
    """``stream().to()``."""

    name: str
    exactly_once: bool
    commit_interval_ms: int = 100
    ends: bool = False

    @property
    def guarantee(self) -> str:
        return "exactly once (exactly_once_v2)" if self.exactly_once else "at least once"

    @property
    def title(self) -> str:
        form = "exactly_once_v2" if self.exactly_once else "at_least_once"
        return f"Kafka Streams {versions.STREAMS.version}, {form}"

    @property
    def settings(self) -> str:
        return f"num.stream.threads=cores, commit.interval.ms={self.commit_interval_ms}"

    def prepare(self) -> None:
        jdk()
        jars.jars(versions.STREAMS)

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = _program("Copy.java", job)
        arguments += ["exactly_once_v2" if self.exactly_once else "at_least_once"]
        return [Command([*arguments, str(self.commit_interval_ms), job.compression])]


def _program(name: str, job: Job) -> list[str]:
    """The start of a program's command line, which all of them have."""
    return [
        jdk(),
        "-cp",
        f"{jars.jars(versions.STREAMS)}/*",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        str(PROGRAMS / name),
        job.bootstrap,
        job.topic_in,
        job.topic_out,
        job.name,
        str(job.folder / "state"),
        str(job.cores),
    ]
