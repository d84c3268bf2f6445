"""kafka-eos: Spark, with state that commits in the transaction of the micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import compile_package
from benchmarks.processes import Command
from kafka_eos_source.embedded import java


@dataclass(frozen=True)
class KafkaEos:
    """Counts in columns, or by a `StatefulProcessor` with a value state.

    Attributes:
        batch: records of a micro-batch; 0 = what the command line says.
    """

    name: str
    vectorised: bool
    batch: int = 0
    guarantee: str = "exactly once"
    exactly_once: bool = True
    ends: bool = True

    @property
    def title(self) -> str:
        form = "aggregate in columns" if self.vectorised else "StatefulProcessor"
        batch = f", batches of {self.batch:,}" if self.batch else ""
        return f"kafka-eos, {form}{batch} (Spark {metadata.version('pyspark')})"

    @property
    def settings(self) -> str:
        return "shards=cores, maxOffsetsPerTrigger"

    def prepare(self) -> None:
        java.find()
        compile_package()

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = [
            sys.executable,
            str(PROGRAMS / "kafka_eos_count.py"),
            job.bootstrap,
            job.topic_in,
            job.topic_out,
        ]
        arguments += [str(job.folder), str(job.cores), str(self.batch or job.batch_records), job.name]
        arguments += ["columns" if self.vectorised else "rows"]
        root = str(Path(__file__).resolve().parents[2])
        return [
            Command(
                arguments,
                {
                    "PYTHONPATH": root,
                    "PYSPARK_PYTHON": sys.executable,
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                },
            )
        ]
