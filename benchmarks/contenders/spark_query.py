"""Queries of Spark that copy a topic, or read it to nothing: with kafka-eos, or Spark's own connector."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from benchmarks import versions
from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.environments import compile_package, python_with
from benchmarks.processes import Command
from kafka_eos_source import local_checkpoints, map_in_read, recommended_settings
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.spark.session import COMPILER_OPTION, DRIVER_OPTIONS_SETTING

#: The next micro-batch begins when the last one is done.
AT_ONCE = "0 seconds"


@dataclass(frozen=True)
class Tuning:
    """What is set, other than the defaults.

    Attributes:
        title: how tables name it.
        conf: settings of Spark.
        source, sink: options of source and sink.
    """

    title: str
    conf: Mapping[str, str]
    source: Mapping[str, str] = field(default_factory=dict)
    sink: Mapping[str, str] = field(default_factory=dict)


#: Both Sparks have the class by the same name.
LOCAL_CHECKPOINTS = Tuning("local_checkpoints()", local_checkpoints())

#: Spark's own keeps 64 unless told otherwise; with more partitions each task makes one anew. For 1,000 of
#: them a driver's default of 1 GiB is too little.
CONSUMERS = Tuning(
    "1,000 consumers kept, 4 GiB",
    {"spark.kafka.consumer.cache.capacity": "1000", "spark.driver.memory": "4g"},
)

#: The JVM makes rows of what our source reads through Arrow, which else checks each access.
UNCHECKED = Tuning(
    "Arrow's checks off",
    {
        "spark.driver.extraJavaOptions": "-Darrow.enable_unsafe_memory_access=true "
        "-Darrow.enable_null_check_for_get=false"
    },
)

#: The collector for throughput: the JVM's default, G1, has threads of its own, which compete for the cores.
#: And the option for the JVM's compilers of `recommended_settings`.
_JVM = {"spark.driver.extraJavaOptions": f"-XX:+UseParallelGC {COMPILER_OPTION}"}

#: The settings with which Spark's own source and sink are fastest: they fetch more at once and let the
#: producer fill its batches. The settings of the session are those that kafka-eos gets too.
SPARK_TUNED = Tuning(
    "tuned",
    {**LOCAL_CHECKPOINTS.conf, **_JVM},
    source={
        "kafka.fetch.max.bytes": str(64 << 20),
        "kafka.max.partition.fetch.bytes": str(16 << 20),
        "kafka.max.poll.records": "10000",
        "kafka.receive.buffer.bytes": str(1 << 20),
    },
    sink={
        "kafka.linger.ms": "20",
        "kafka.batch.size": str(1 << 20),
        "kafka.buffer.memory": str(128 << 20),
        "kafka.send.buffer.bytes": str(1 << 20),
    },
)

#: What a user of kafka-eos sets for throughput. The class archive of `recommended_settings` is left out: the
#: other Spark has none here, although it would gain as much. It has the option for the compilers.
_RECOMMENDED = {
    name: value
    for name, value in recommended_settings(small_rows=True).items()
    if name != DRIVER_OPTIONS_SETTING
}
EOS_TUNED = Tuning("tuned", {**local_checkpoints(), **_RECOMMENDED, **_JVM})

#: Runs the JVM without its second compiler, which takes a core for minutes. A JVM that only passes on packed
#: batches does not need it; other queries do.
TUNED = Tuning(
    "local_checkpoints(), one JVM compiler",
    {**LOCAL_CHECKPOINTS.conf, "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
)


@dataclass(frozen=True)
class Query:
    """A query that copies a topic, with kafka-eos or with Spark's own connector.

    Attributes:
        name: name on the command line.
        to_nothing: whether the rows are discarded instead of written.
        trigger: trigger of a query that runs forever; empty = the query ends after the existing records.
        batch: records of a micro-batch; 0 = the value from the command line.
        tuning: settings of Spark; None = Spark's defaults.
    """

    name: str
    to_nothing: bool = False
    trigger: str = ""
    batch: int = 0
    tuning: Tuning | None = None

    @property
    def ends(self) -> bool:
        return not self.trigger

    @property
    def settings(self) -> str:
        own = [f"trigger {self.trigger}" if self.trigger else "maxOffsetsPerTrigger"]
        if self.tuning is not None:
            stated = {**self.tuning.conf, **self.tuning.source, **self.tuning.sink}
            own += [f"{name}={value}" for name, value in stated.items()]
        return ", ".join(own)

    @property
    def _size_and_tuning(self) -> str:
        """The end of a title."""
        batch = f", batches of {self.batch:,}" if self.batch else ""
        return batch + (f", {self.tuning.title}" if self.tuning else "")

    def arguments(self, job: Job, connector: str) -> dict[str, object]:
        return {
            "format": connector,
            "bootstrap": job.bootstrap,
            "topic_in": job.topic_in,
            "topic_out": "" if self.to_nothing else job.topic_out,
            "folder": str(job.folder),
            "cores": job.cores,
            "batch": 0 if self.trigger else self.batch or job.batch_records,
            "name": job.name,
            "guarantee": "",
            "compression": job.compression,
            "jars": "",
            "trigger": self.trigger,
            "source": dict(self.tuning.source) if self.tuning else {},
            "sink": dict(self.tuning.sink) if self.tuning else {},
            "in_read": False,
            "stages_in_read": False,
            "conf": dict(self.tuning.conf) if self.tuning else {},
        }


@dataclass(frozen=True)
class EosQuery(Query):
    """kafka-eos, on the PySpark that is installed here.

    Attributes:
        files: the same rows go to Parquet files too.
        in_read: rows go through `map_in_read`, and never become Spark's.
        stages_in_read: the tasks that read also stage the rows (`map_in_read` with ``write``).
    """

    guarantee: str = "exactly once"
    files: bool = False
    in_read: bool = False
    stages_in_read: bool = False

    @property
    def exactly_once(self) -> bool:
        return self.guarantee == "exactly once"

    @property
    def title(self) -> str:
        form = "" if self.exactly_once else ", at_least_once"
        if self.trigger not in ("", AT_ONCE):
            form += f", every {self.trigger}"
        if self.files:
            form += ", and Parquet files"
        if self.in_read:
            form += ", map_in_read with write=" if self.stages_in_read else ", map_in_read"
        return f"kafka-eos{form}{self._size_and_tuning} (Spark {metadata.version('pyspark')})"

    def prepare(self) -> None:
        java.find()
        compile_package()
        if self.stages_in_read and "write" not in inspect.signature(map_in_read).parameters:
            raise UnavailableError("map_in_read of this version has no argument 'write'.")

    def commands(self, job: Job) -> Sequence[Command]:
        arguments = self.arguments(job, "kafka-eos")
        arguments["stages_in_read"] = self.stages_in_read
        if self.files:
            arguments["sink"] = {
                "sinks": "files",
                "sink.files.type": "filesystem",
                "sink.files.path": str(job.folder / "files"),
                "sink.files.format": "parquet",
            }
        arguments["in_read"] = self.in_read
        arguments["guarantee"] = "exactly_once" if self.exactly_once else "at_least_once"
        python = sys.executable
        environment = {
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "PYSPARK_PYTHON": python,
            "PYSPARK_DRIVER_PYTHON": python,
        }
        return [Command([python, str(PROGRAMS / "spark_copy.py"), json.dumps(arguments)], environment)]


@dataclass(frozen=True)
class SparkQuery(Query):
    """Spark's own Kafka source and sink, which repeats records when a task or micro-batch is repeated."""

    guarantee: str = "at least once"
    exactly_once: bool = False

    @property
    def title(self) -> str:
        return f"Spark {versions.SPARK_VERSION} kafka{self._size_and_tuning}"

    def prepare(self) -> None:
        python_with("spark", versions.SPARK)
        java.jars(versions.SPARK_KAFKA)

    def commands(self, job: Job) -> Sequence[Command]:
        python = str(python_with("spark", versions.SPARK))
        arguments = self.arguments(job, "kafka")
        arguments["jars"] = ",".join(map(str, sorted(java.jars(versions.SPARK_KAFKA).glob("*.jar"))))
        environment = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
        return [Command([python, str(PROGRAMS / "spark_copy.py"), json.dumps(arguments)], environment)]
