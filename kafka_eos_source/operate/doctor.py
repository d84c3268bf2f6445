"""Whether what a query needs is there: versions, Java, the kernel, Spark's discovery, the broker."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pyspark

from kafka_eos_source.embedded import java
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.clients import librdkafka_version
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.session import local_checkpoints

FORMATS = ("kafka-eos", "kafka-eos-state")

_PACKAGES = ("kafka-eos-source", "pyspark", "confluent-kafka", "pyarrow", "rocksdict")

_NOT_FOUND_FIX = (
    "install kafka-eos-source into the Python of Spark's driver; an editable install needs "
    "--config-settings editable_mode=compat, for Spark looks along sys.path and runs no import hook."
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        text: what was found.
        fix: what to do; empty = nothing has to be done.
    """

    name: str
    text: str
    fix: str = ""

    @property
    def fine(self) -> bool:
        return not self.fix


def checks(kafka: Mapping[str, str] | None, deadline: Deadline) -> Iterator[Check]:
    """Looks at one thing after the other.

    Args:
        kafka: librdkafka properties of a cluster, from `target.Target`; None = no broker is asked.
        deadline: for the brokers' answer.
    """
    yield versions()
    yield found_java()
    yield chosen_kernel()
    yield discovery()
    yield executors_python(os.environ, sys.executable)
    yield zipped_pyspark(Path(pyspark.__file__).parent)
    yield checkpoint_files(local_checkpoints())
    if kafka is not None:
        yield broker(kafka, deadline)


def versions() -> Check:
    found = {name: _version(name) for name in _PACKAGES}
    said = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    missing = [name for name, version in found.items() if version is None]
    return Check(
        "versions",
        f"Python {platform.python_version()}, {said}, librdkafka {librdkafka_version()}",
        f"install {', '.join(missing)}" if missing else "",
    )


def found_java() -> Check:
    try:
        path, major = java.found()
    except KafkaEosError as failure:
        return Check("java", failure.message, failure.fix)
    return Check("java", f"{path}, version {major}")


def chosen_kernel() -> Check:
    """That it is not in use is no fault."""
    chosen = kernel.choice()
    if chosen.kernel is not None:
        return Check("kernel", "in use")
    return Check("kernel", f"not in use, its slower Python twin is: {chosen.why_not}")


def discovery() -> Check:
    """As ``pyspark.sql.worker.lookup_data_sources`` looks; a module that it cannot import ends all of it."""
    found: dict[str, str] = {}
    for info in iter_modules():
        if not info.name.startswith("pyspark_"):
            continue
        try:
            source: Any = getattr(import_module(info.name), "DefaultSource", None)
            if source is not None:
                found[source.name()] = info.name
        except Exception as failure:  # noqa: BLE001  whatever a module raises while it is imported
            return Check(
                "discovery",
                f"Spark finds no data source at all: importing {info.name} fails, "
                f"{type(failure).__name__}: {failure}",
                f"mend or uninstall {info.name}.",
            )
    missing = [name for name in FORMATS if name not in found]
    if missing:
        return Check("discovery", f"Spark does not find format({missing[0]!r}) by itself", _NOT_FOUND_FIX)
    return Check("discovery", f"Spark finds {', '.join(map(repr, FORMATS))} by itself")


def executors_python(environment: Mapping[str, str], ours: str) -> Check:
    """Spark's Python workers are ``PYSPARK_PYTHON``'s, else the ``python3`` that comes first on the PATH."""
    stated = environment.get("PYSPARK_PYTHON")
    found = shutil.which(stated or "python3", path=environment.get("PATH"))
    said = f"PYSPARK_PYTHON={stated}" if stated else "PYSPARK_PYTHON is not set: python3 on the PATH"
    if found is None:
        return Check("executors", f"{said}, which is not there", f"set PYSPARK_PYTHON={ours}.")
    fix = f"set PYSPARK_PYTHON={ours}, or install kafka-eos-source into that one."
    return Check(
        "executors",
        said if stated == found else f"{said}, which is {found}",
        "" if _folder(found) == _folder(ours) else f"it is not this Python: {fix}",
    )


def zipped_pyspark(package: Path) -> Check:
    """pip's PySpark is there twice, and the zip, which has no bytecode, comes first in workers' paths."""
    archive = package / "python" / "lib" / "pyspark.zip"
    if not archive.exists():
        return Check("workers", "Python processes import PySpark's bytecode")
    return Check(
        "workers",
        "each Python process compiles PySpark anew, 0.6 s of a query's start five times over: "
        f"{archive} comes first. Where Spark itself is that of pip, as here, the file may be deleted",
    )


def checkpoint_files(local: Mapping[str, str]) -> Check:
    """That Spark starts programs for each file of a checkpoint is no fault of anybody's."""
    return Check(
        "checkpoints",
        "; ".join(
            f"in a local folder, a micro-batch is 60 ms shorter with {name}={value}"
            for name, value in local.items()
        )
        or "this PySpark has no Spark of its own: its driver writes them",
    )


def broker(kafka: Mapping[str, str], deadline: Deadline) -> Check:
    from kafka_eos_source.kafka.cluster_reader import ClusterReader
    from kafka_eos_source.kafka.config import admin_config

    servers = kafka.get("bootstrap.servers", "")
    try:
        with ClusterReader({**admin_config(kafka), "log_level": "0"}) as look:  # its errors are told below
            cluster_id, topics = look.topics(deadline)
    except KafkaEosError as failure:
        return Check("broker", failure.message, failure.fix or "see docs/security.md.")
    return Check("broker", f"{servers} answers: cluster {cluster_id}, {len(topics)} topics to be seen")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folder(python: str) -> str:
    """The environment that a Python is of: a venv's is a link to another's, but its folder is not."""
    return os.path.realpath(os.path.dirname(os.path.abspath(python)))
