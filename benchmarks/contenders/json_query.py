"""Queries for the everyday job: parse JSON documents, keep some, choose fields, and write a topic."""

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
from benchmarks.contenders.spark_query import Query
from benchmarks.environments import compile_package, python_with
from benchmarks.processes import Command
from kafka_eos_source import App
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError

_TITLES = {
    "sql": "Spark SQL",
    "msgspec": "map_in_read with write=, msgspec row by row",
    "app-sql": "App.sql",
    "app-where": "App, where of Spark",
}


@dataclass(frozen=True)
class JsonQuery(Query):
    """The everyday job.

    Attributes:
        form: as in ``programs/json_query.py``.
        connector: ``kafka-eos``, or ``kafka`` for Spark's own, in an environment of its own.
        app: further arguments of `App.read`.
    """

    form: str = "sql"
    connector: str = "kafka-eos"
    app: Mapping[str, str] = field(default_factory=dict)

    @property
    def exactly_once(self) -> bool:
        return self.connector == "kafka-eos"

    @property
    def guarantee(self) -> str:
        return "exactly once" if self.exactly_once else "at least once"

    @property
    def title(self) -> str:
        version = metadata.version("pyspark") if self.exactly_once else versions.SPARK_VERSION
        form = _TITLES[self.form] + "".join(f", {name}={value!r}" for name, value in self.app.items())
        return f"{form} on {self.connector}{self._size_and_tuning} (Spark {version})"

    def prepare(self) -> None:
        if not self.exactly_once:
            python_with("spark", versions.SPARK)
            java.jars(versions.SPARK_KAFKA)
            return
        java.find()
        compile_package()
        if self.form == "app-sql" and not hasattr(App, "sql"):
            raise UnavailableError("App of this version has no method 'sql'.")
        missing = self.app.keys() - inspect.signature(App.read).parameters.keys()
        if missing:
            raise UnavailableError(f"App.read of this version has no argument {min(missing)!r}.")

    def commands(self, job: Job) -> Sequence[Command]:
        python = sys.executable if self.exactly_once else str(python_with("spark", versions.SPARK))
        environment = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
        arguments = self.arguments(job, self.connector)
        arguments |= {**job.documents, "form": self.form, "app": dict(self.app)}
        if self.exactly_once:
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        else:
            jars = java.jars(versions.SPARK_KAFKA)
            arguments["jars"] = ",".join(map(str, sorted(jars.glob("*.jar"))))
        return [Command([python, str(PROGRAMS / "json_query.py"), json.dumps(arguments)], environment)]
