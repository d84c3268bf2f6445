"""The tasks of the benchmark: their records, their contenders, and how the output is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from benchmarks.contenders.base import Contender, Target
from benchmarks.contenders.json_query import JsonQuery
from benchmarks.contenders.kafka_eos import KafkaEos
from benchmarks.contenders.kafka_streams import KafkaStreams, KafkaStreamsCopy
from benchmarks.contenders.quix import Quix, QuixCopy
from benchmarks.contenders.spark import SparkState
from benchmarks.contenders.spark_query import (
    AT_ONCE,
    CONSUMERS,
    EOS_TUNED,
    LOCAL_CHECKPOINTS,
    SPARK_TUNED,
    TUNED,
    UNCHECKED,
    EosQuery,
    SparkQuery,
)
from benchmarks.workload import Documents, Workload


class Judge(Enum):
    """How a run's progress is measured and its output checked."""

    COUNTS = "output: the count of each key, as it grows"
    COPIES = "output: every record once"
    PROGRESS = "the program tells of its micro-batches; there is no output"
    LATENCY = "records come all the time; how late are they visible?"
    RESTART_COUNTS = "counts, of a run that is killed on the way and started again"
    RESTART_COPIES = "copies, of such a run"


@dataclass(frozen=True)
class Task:
    """A piece of work that is the same for every contender.

    Attributes:
        name: its name on the command line.
        title: title of its table.
        judge: how its output is checked.
        workload: the records sent beforehand; the command line can change its size.
        contenders: all contenders that can do the task.
        targets: target ratios between contenders.
        on_request: names of contenders that run only if they are named.
        output_partitions: number of partitions of the output topic.
        rate: records per second sent during the run, for `Judge.LATENCY`.
        warm_seconds: how long it is not measured, for `Judge.LATENCY`.
        batch: records of a micro-batch; 0 means the command line's value.
    """

    name: str
    title: str
    judge: Judge
    workload: Workload
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...] = ()
    on_request: tuple[str, ...] = ()
    output_partitions: int = 4
    rate: int = 0
    warm_seconds: float = 60.0
    batch: int = 0

    @property
    def ours(self) -> tuple[str, ...]:
        """Names of the contenders that are kafka-eos."""
        return tuple(each.name for each in self.contenders if each.name.startswith("kafka-eos"))


_EOS, _SPARK = EosQuery("kafka-eos"), SparkQuery("spark")
_STREAMS, _QUIX = KafkaStreamsCopy("kafka-streams", exactly_once=True), QuixCopy("quix")
_STREAMS_AT_LEAST_ONCE = KafkaStreamsCopy("kafka-streams-at-least-once", exactly_once=False)
_COPIERS: tuple[Contender, ...] = (
    _EOS,
    EosQuery("kafka-eos-in-read", in_read=True),
    EosQuery("kafka-eos-stages-in-read", in_read=True, stages_in_read=True),
    EosQuery("kafka-eos-at-least-once", guarantee="at least once"),
    _SPARK,
    SparkQuery("spark-tuned", tuning=SPARK_TUNED),
    _STREAMS,
    KafkaStreamsCopy("kafka-streams-tuned", exactly_once=True, tuned=True),
    _STREAMS_AT_LEAST_ONCE,
    _QUIX,
    QuixCopy("quix-tuned", tuned=True),
)

_READERS: tuple[Contender, ...] = (
    EosQuery("kafka-eos", to_nothing=True),
    SparkQuery("spark", to_nothing=True),
    SparkQuery("spark-tuned", to_nothing=True, tuning=SPARK_TUNED),
)

_EOS_COUNT = KafkaEos("kafka-eos", form="columns")
_STREAMS_TRANSACTIONAL = KafkaStreams(
    "kafka-streams-transactional", commit_interval_ms=1_000, tuned=True, transactional=True
)
_STREAMS_COUNT, _QUIX_COUNT = KafkaStreams("kafka-streams", commit_interval_ms=100), Quix("quix")


def _copy(name: str, title: str, workload: Workload, **more: object) -> Task:
    settings: dict[str, object] = {"contenders": _COPIERS, **more}
    return Task(name, title, Judge.COPIES, workload, **settings)  # type: ignore[arg-type]


TASKS: Mapping[str, Task] = {
    each.name: each
    for each in (
        Task(
            "keyed-count",
            "Keyed count, with state",
            Judge.COUNTS,
            Workload(),
            (
                _EOS_COUNT,
                KafkaEos("kafka-eos-processor", form="rows"),
                _STREAMS_COUNT,
                KafkaStreams("kafka-streams-1s", commit_interval_ms=1_000),
                KafkaStreams("kafka-streams-tuned", commit_interval_ms=1_000, tuned=True),
                _STREAMS_TRANSACTIONAL,
                _QUIX_COUNT,
                Quix("quix-scaled", every_core=True),
                Quix("quix-scaled-tuned", every_core=True, tuned=True),
                SparkState("spark-tws", pandas=False),
                SparkState("spark-tws-pandas", pandas=True),
            ),
            (
                Target("kafka-eos", "kafka-streams", 5),
                Target("kafka-eos", "quix", 25),
                Target("kafka-eos-processor", "quix", 4),
                Target("kafka-eos-processor", "spark-tws", 1),
            ),
            # slower than the same peer in its other form, and takes long
            on_request=("spark-tws-pandas",),
        ),
        Task(
            "keyed-count-backlog",
            "Keyed count, of a backlog: what batches of 2,000,000 save",
            Judge.COUNTS,
            Workload(records=8_000_000),
            (
                _EOS_COUNT,
                KafkaEos("kafka-eos-in-read", form="in-read"),
                KafkaEos("kafka-eos-tuned", form="columns", tuning=EOS_TUNED),
                KafkaEos("kafka-eos-in-read-tuned", form="in-read", tuning=EOS_TUNED),
                KafkaEos("kafka-eos-2m", form="columns", batch=2_000_000),
                _STREAMS_COUNT,
                KafkaStreams("kafka-streams-1s", commit_interval_ms=1_000),
                KafkaStreams("kafka-streams-tuned", commit_interval_ms=1_000, tuned=True),
                _STREAMS_TRANSACTIONAL,
                _QUIX_COUNT,
                Quix("quix-scaled-tuned", every_core=True, tuned=True),
            ),
            (Target("kafka-eos-2m", "kafka-streams", 5), Target("kafka-eos-2m", "quix", 25)),
        ),
        Task(
            "read",
            "Read to nothing",
            Judge.PROGRESS,
            Workload(records=16_000_000),
            (*_READERS, EosQuery("kafka-eos-unchecked", to_nothing=True, tuning=UNCHECKED)),
            (Target("kafka-eos", "spark", 1.8), Target("kafka-eos-unchecked", "spark", 1.8)),
        ),
        Task(
            "read-1000",
            "Read to nothing, from 1,000 partitions",
            Judge.PROGRESS,
            Workload(records=4_000_000, partitions=1000),
            (*_READERS, SparkQuery("spark-consumers", to_nothing=True, tuning=CONSUMERS)),
        ),
        _copy(
            "copy",
            "Topic to topic",
            Workload(records=8_000_000),
            contenders=(
                *_COPIERS,
                EosQuery("kafka-eos-2m", batch=2_000_000),
                EosQuery("kafka-eos-tuned", batch=2_000_000, in_read=True, tuning=TUNED),
                SparkQuery("spark-2m", batch=2_000_000, tuning=LOCAL_CHECKPOINTS),
            ),
            targets=(
                Target("kafka-eos", "spark", 1.3),
                Target("kafka-eos", "kafka-streams", 2.5),
                Target("kafka-eos", "quix", 8),
                Target("kafka-eos", "spark-tuned", 1.7),
                Target("kafka-eos-stages-in-read", "spark-tuned", 3),
                Target("kafka-eos-stages-in-read", "kafka-streams-tuned", 3),
                Target("kafka-eos-stages-in-read", "quix-tuned", 15),
                Target("kafka-eos-2m", "quix", 8),
                Target("kafka-eos-in-read", "kafka-streams", 2.5),
                Target("kafka-eos-in-read", "quix", 8),
                Target("kafka-eos-tuned", "kafka-streams", 2.5),
                Target("kafka-eos-tuned", "spark-2m", 1.3),
                Target("kafka-eos", "kafka-eos-at-least-once", 0.9),
            ),
        ),
        _copy(
            "copy-1k-lz4",
            "Topic to topic, 1 KiB, lz4",
            Workload(3_000_000, record_bytes=1024, compression="lz4"),
            batch=250_000,
        ),
        _copy(
            "copy-1k-zstd",
            "Topic to topic, 1 KiB, zstd",
            Workload(3_000_000, record_bytes=1024, compression="zstd"),
            batch=250_000,
        ),
        _copy(
            "copy-to-1",
            "To 1 partition",
            Workload(records=2_000_000),
            contenders=(_EOS,),
            output_partitions=1,
        ),
        _copy(
            "copy-to-1000",
            "To 1,000 partitions",
            Workload(records=2_000_000),
            contenders=(_EOS,),
            output_partitions=1000,
        ),
        _copy(
            "start",
            "Cold start: from the start of the process until 1,000 records are committed",
            Workload(records=1_000),
            contenders=(
                _EOS,
                EosQuery("kafka-eos-tuned", tuning=EOS_TUNED),
                _SPARK,
                SparkQuery("spark-tuned", tuning=SPARK_TUNED),
                _STREAMS,
                _STREAMS_AT_LEAST_ONCE,
                _QUIX,
            ),
        ),
        Task(
            "json",
            "Everyday JSON job: parse, filter, choose fields, write a topic",
            Judge.COPIES,
            Documents(records=8_000_000),
            (
                JsonQuery("kafka-eos", form="app-sql", tuning=EOS_TUNED),
                JsonQuery("kafka-eos-where", form="app-where", tuning=EOS_TUNED),
                JsonQuery("kafka-eos-msgspec", form="msgspec", tuning=EOS_TUNED),
                JsonQuery("kafka-eos-spark-sql", tuning=EOS_TUNED),
                JsonQuery("spark", connector="kafka", tuning=SPARK_TUNED),
            ),
            (Target("kafka-eos", "spark", 3.3), Target("kafka-eos", "kafka-eos-spark-sql", 3)),
        ),
        Task(
            "latency",
            "1,000 records a second, micro-batches as fast as they come",
            Judge.LATENCY,
            Workload(records=30_000),
            (
                EosQuery("kafka-eos", trigger=AT_ONCE),
                EosQuery("kafka-eos-local-checkpoints", trigger=AT_ONCE, tuning=LOCAL_CHECKPOINTS),
                SparkQuery("spark", trigger=AT_ONCE),
                SparkQuery("spark-local-checkpoints", trigger=AT_ONCE, tuning=LOCAL_CHECKPOINTS),
                _STREAMS,
                _QUIX,
            ),
            rate=1_000,
        ),
        Task(
            "cadence",
            "How often to commit: 1,000 records a second, by trigger",
            Judge.LATENCY,
            Workload(records=90_000),
            (
                EosQuery("kafka-eos", trigger=AT_ONCE),
                *(EosQuery(f"kafka-eos-{seconds}s", trigger=f"{seconds} seconds") for seconds in (1, 5, 30)),
                *(
                    EosQuery(f"kafka-eos-files-{trigger.replace(' ', '-')}", trigger=trigger, files=True)
                    for trigger in (AT_ONCE, "5 seconds")
                ),
            ),
            rate=1_000,
        ),
        Task(
            "restart",
            "Killed, and started again: topic to topic",
            Judge.RESTART_COPIES,
            Workload(records=1_000_000),
            (
                _EOS,
                EosQuery("kafka-eos-tuned", tuning=EOS_TUNED),
                _SPARK,
                SparkQuery("spark-tuned", tuning=SPARK_TUNED),
                _STREAMS,
                _QUIX,
            ),
            batch=50_000,
        ),
        Task(
            "restart-count",
            "Killed, and started again: keyed count, with state",
            Judge.RESTART_COUNTS,
            Workload(records=1_000_000),
            (
                _EOS_COUNT,
                KafkaEos("kafka-eos-in-read", form="in-read"),
                _STREAMS_COUNT,
                _STREAMS_TRANSACTIONAL,
                _QUIX_COUNT,
            ),
            batch=50_000,
        ),
    )
}
