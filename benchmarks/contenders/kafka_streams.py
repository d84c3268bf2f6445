"""Kafka Streams, ``exactly_once_v2``: the field's measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import versions
from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import jdk
from benchmarks.processes import Command
from kafka_eos_source.embedded import java

#: The settings that Kafka's documentation names for throughput: fewer commits, and larger fetches, polls,
#: batches and buffers. "Optimizing for throughput" of Confluent's white paper has the same list.
_THROUGHPUT = {
    "consumer.fetch.min.bytes": "100000",
    "consumer.fetch.max.bytes": str(64 << 20),
    "consumer.max.partition.fetch.bytes": str(16 << 20),
    "consumer.max.poll.records": "10000",
    "consumer.receive.buffer.bytes": str(1 << 20),
    "producer.linger.ms": "100",
    "producer.batch.size": str(1 << 20),
    "producer.buffer.memory": str(128 << 20),
    "producer.send.buffer.bytes": str(1 << 20),
    "buffered.records.per.partition": "20000",
}

#: Room for the counts of all keys, so that each key is written once per commit.
_CACHE = {"statestore.cache.max.bytes": str(256 << 20)}


@dataclass(frozen=True)
class KafkaStreams:
    """``stream().groupByKey().count()``: RocksDB, changelog, cache as they come.

    Attributes:
        tuned: whether it has the settings for throughput, and a cache for all keys.
        transactional: whether its state stores are transactional (KIP-892) and survive a crash.
    """

    name: str
    commit_interval_ms: int
    tuned: bool = False
    transactional: bool = False
    guarantee: str = "exactly once (exactly_once_v2)"
    exactly_once: bool = True
    ends: bool = False

    @property
    def title(self) -> str:
        form = f"commit.interval.ms={self.commit_interval_ms}{', tuned' if self.tuned else ''}"
        form += ", transactional stores" if self.transactional else ""
        return f"Kafka Streams {versions.STREAMS.version}, {form}"

    @property
    def settings(self) -> str:
        default = " (its default for exactly once)" if self.commit_interval_ms == 100 else ""
        commits = f"commit.interval.ms={self.commit_interval_ms}{default}"
        return ", ".join(["num.stream.threads=cores", commits, *self._more])

    @property
    def _more(self) -> list[str]:
        return _settings(
            {
                **({**_THROUGHPUT, **_CACHE} if self.tuned else {}),
                **({"enable.transactional.statestores": "true"} if self.transactional else {}),
            }
        )

    def prepare(self) -> None:
        jdk()
        java.jars(versions.STREAMS)

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = _program("KeyedCount.java", job)
        return [Command([*arguments, str(self.commit_interval_ms), *self._more])]


@dataclass(frozen=True)
class KafkaStreamsCopy:
    """``stream().to()``.

    Attributes:
        tuned: whether it has the settings for throughput, and commits once a second.
    """

    name: str
    exactly_once: bool
    tuned: bool = False
    ends: bool = False

    @property
    def _commit_interval_ms(self) -> int:
        return 1_000 if self.tuned else 100

    @property
    def guarantee(self) -> str:
        return "exactly once (exactly_once_v2)" if self.exactly_once else "at least once"

    @property
    def title(self) -> str:
        form = "exactly_once_v2" if self.exactly_once else "at_least_once"
        return f"Kafka Streams {versions.STREAMS.version}, {form}{', tuned' if self.tuned else ''}"

    @property
    def settings(self) -> str:
        commits = f"commit.interval.ms={self._commit_interval_ms}"
        return ", ".join(["num.stream.threads=cores", commits, *self._more])

    @property
    def _more(self) -> list[str]:
        return _settings(_THROUGHPUT) if self.tuned else []

    def prepare(self) -> None:
        jdk()
        java.jars(versions.STREAMS)

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = _program("Copy.java", job)
        arguments += ["exactly_once_v2" if self.exactly_once else "at_least_once"]
        return [Command([*arguments, str(self._commit_interval_ms), job.compression, *self._more])]


def _settings(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def _program(name: str, job: Job) -> list[str]:
    """The start of a program's command line, which all of them have."""
    return [
        jdk(),
        "-cp",
        f"{java.jars(versions.STREAMS)}/*",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        str(PROGRAMS / name),
        job.bootstrap,
        job.topic_in,
        job.topic_out,
        job.name,
        str(job.folder / "state"),
        str(job.cores),
    ]
