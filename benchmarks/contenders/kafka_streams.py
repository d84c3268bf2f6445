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
        arguments = [
            jdk(),
            "-cp",
            f"{jars.jars(versions.STREAMS)}/*",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        ]
        arguments += [str(PROGRAMS / "KeyedCount.java"), job.bootstrap, job.topic_in, job.topic_out, job.name]
        arguments += [
            str(job.folder / "state"),
            str(min(job.cores, job.partitions)),
            str(self.commit_interval_ms),
        ]
        return [Command(arguments)]
