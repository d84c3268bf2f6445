"""kafka-eos: Spark, with state that commits in the transaction of the micro-batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.contenders.spark_query import Tuning
from benchmarks.environments import compile_package
from benchmarks.processes import Command
from kafka_eos_source.embedded import java

_TITLES = {
    "columns": "aggregate",
    "in-read": "aggregate with shards='partitions'",
    "rows": "StatefulProcessor",
}


@dataclass(frozen=True)
class KafkaEos:
    """Counts by key, with state.

    Attributes:
        form: ``"columns"``: an aggregate, after a shuffle by key; ``"in-read"``: the same in the tasks that
            read, with a shard for each partition of the topic; ``"rows"``: a `StatefulProcessor` with a value
            state.
        batch: records of a micro-batch; 0 = what the command line says.
        tuning: settings of Spark; None = Spark's defaults.
        trigger: trigger of a query that runs forever; empty = the query ends after the existing records.
    """

    name: str
    form: str
    batch: int = 0
    tuning: Tuning | None = None
    trigger: str = ""
    guarantee: str = "exactly once"
    exactly_once: bool = True

    @property
    def ends(self) -> bool:
        return not self.trigger

    @property
    def title(self) -> str:
        batch = f", batches of {self.batch:,}" if self.batch else ""
        tuning = f", {self.tuning.title}" if self.tuning else ""
        return f"kafka-eos, {_TITLES[self.form]}{batch}{tuning} (Spark {metadata.version('pyspark')})"

    @property
    def settings(self) -> str:
        shards = "'partitions'" if self.form == "in-read" else "cores"
        conf = "".join(
            f", {name}={value}" for name, value in (self.tuning.conf if self.tuning else {}).items()
        )
        return f"shards={shards}, maxOffsetsPerTrigger{conf}"

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
        arguments += [self.form, self.trigger, json.dumps(dict(self.tuning.conf) if self.tuning else {})]
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
