"""Spark's own: Kafka source and sink, and its Python ``transformWithState``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import versions
from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import python_with
from benchmarks.processes import Command
from kafka_eos_source.embedded import java


@dataclass(frozen=True)
class SparkState:
    """A `StatefulProcessor` with a value state, over Spark's RocksDB. Its sink repeats records on a retry."""

    name: str
    pandas: bool
    guarantee: str = "at least once (Spark's sink)"
    exactly_once: bool = False
    ends: bool = True

    @property
    def title(self) -> str:
        return f"Spark {versions.SPARK_VERSION} transformWithState{'InPandas' if self.pandas else ''}"

    @property
    def settings(self) -> str:
        return "RocksDB with changelog checkpointing, shuffle partitions=cores, maxOffsetsPerTrigger"

    def prepare(self) -> None:
        python_with("spark", versions.SPARK)
        java.jars(versions.SPARK_KAFKA)

    def commands(self, job: Job) -> Sequence[Command]:
        python = str(python_with("spark", versions.SPARK))
        kafka = ",".join(map(str, sorted(java.jars(versions.SPARK_KAFKA).glob("*.jar"))))
        arguments = [python, str(PROGRAMS / "spark_count.py"), job.bootstrap, job.topic_in, job.topic_out]
        arguments += [
            str(job.folder),
            str(job.cores),
            str(job.batch_records),
            kafka,
            "pandas" if self.pandas else "row",
        ]
        return [Command(arguments, {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python})]
