"""Checks that a machine has what a query needs: versions, Java, the C kernel, data sources, the broker."""

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
    "install kafka-eos-source into the Python of Spark's driver. An editable install needs "
    "--config-settings editable_mode=compat, because Spark searches sys.path and ignores import hooks."
)


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        text: what was found.
        fix: what to do; empty = nothing.
    """

    name: str
    text: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be fixed."""
        return not self.fix


def checks(kafka: Mapping[str, str] | None, deadline: Deadline) -> Iterator[Check]:
    """Runs the checks one after another.

    Args:
        kafka: librdkafka properties of a cluster, from `target.Target`; None = do not contact a broker.
        deadline: limits the wait for the broker.
    """
    yield versions()
    yield check_java()
    yield check_kernel()
    yield discovery()
    yield executors_python(os.environ, sys.executable)
    yield zipped_pyspark(Path(pyspark.__file__).parent)
    yield checkpoint_files(local_checkpoints())
    if kafka is not None:
        yield broker(kafka, deadline)


def versions() -> Check:
    """Checks that the packages are installed, and reports their versions."""
    found = {name: _version(name) for name in _PACKAGES}
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    missing = [name for name, version in found.items() if version is None]
    return Check(
        "versions",
        f"Python {platform.python_version()}, {listed}, librdkafka {librdkafka_version()}",
        f"install {', '.join(missing)}." if missing else "",
    )


def check_java() -> Check:
    """Checks that there is a Java that Kafka and Spark can use."""
    try:
        path, major = java.found()
    except KafkaEosError as failure:
        return Check("java", failure.message, failure.fix)
    return Check("java", f"{path}, version {major}")


def check_kernel() -> Check:
    """Reports whether the C kernel is in use; it is optional."""
    chosen = kernel.choice()
    if chosen.kernel is not None:
        return Check("kernel", "in use")
    return Check("kernel", f"not in use; the slower Python code is used instead: {chosen.why_not}")


def discovery() -> Check:
    """Checks that Spark finds the data sources, searching as ``pyspark.sql.worker.lookup_data_sources`` does.

    One ``pyspark_…`` module that cannot be imported makes Spark find no data source at all.
    """
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
                f"Spark cannot find any data source, because importing {info.name} fails with "
                f"{type(failure).__name__}: {failure}",
                f"repair or uninstall {info.name}.",
            )
    missing = [name for name in FORMATS if name not in found]
    if missing:
        return Check("discovery", f"Spark does not find format({missing[0]!r})", _NOT_FOUND_FIX)
    return Check("discovery", f"Spark finds {', '.join(map(repr, FORMATS))}")


def executors_python(environment: Mapping[str, str], ours: str) -> Check:
    """Checks that Spark's Python workers use this Python.

    They use ``PYSPARK_PYTHON``, else the first ``python3`` on the PATH.
    """
    value = environment.get("PYSPARK_PYTHON")
    found = shutil.which(value or "python3", path=environment.get("PATH"))
    text = (
        f"PYSPARK_PYTHON={value}" if value else "PYSPARK_PYTHON is not set, so Spark uses python3 on the PATH"
    )
    if found is None:
        return Check("executors", f"{text}, which does not exist", f"set PYSPARK_PYTHON={ours}.")
    fix = f"set PYSPARK_PYTHON={ours}, or install kafka-eos-source into that Python."
    return Check(
        "executors",
        text if value == found else f"{text}, which is {found}",
        "" if _folder(found) == _folder(ours) else f"this is another Python than the driver's: {fix}",
    )


def zipped_pyspark(package: Path) -> Check:
    """Reports whether Python processes import PySpark from a zip file, which is slow and no error.

    pip's PySpark contains every module twice. The zip has no bytecode and comes first in the path of workers.
    """
    archive = package / "python" / "lib" / "pyspark.zip"
    if not archive.exists():
        return Check("workers", "Python processes import PySpark as bytecode")
    return Check(
        "workers",
        f"each Python process compiles PySpark again, because it imports {archive}. This takes 0.6 s each, "
        "for five processes at the start of a query. Spark itself was installed by pip, so you can delete "
        "the file",
    )


def checkpoint_files(local: Mapping[str, str]) -> Check:
    """Reports settings that speed up checkpoints in local folders; without them, nothing is wrong."""
    return Check(
        "checkpoints",
        "; ".join(
            f"with a checkpoint in a local folder, {name}={value} shortens a micro-batch by 60 ms"
            for name, value in local.items()
        )
        or "this PySpark does not include Spark; the remote driver writes the checkpoints",
    )


def broker(kafka: Mapping[str, str], deadline: Deadline) -> Check:
    """Checks that a broker answers."""
    from kafka_eos_source.kafka.cluster_reader import ClusterReader
    from kafka_eos_source.kafka.config import admin_config

    servers = kafka.get("bootstrap.servers", "")
    try:
        # librdkafka's own log is off, because the check reports the error.
        with ClusterReader({**admin_config(kafka), "log_level": "0"}) as reader:
            cluster_id, topics = reader.topics(deadline)
    except KafkaEosError as failure:
        return Check("broker", failure.message, failure.fix or "see docs/security.md.")
    return Check("broker", f"{servers} answers: cluster {cluster_id}, {len(topics)} visible topics")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folder(python: str) -> str:
    """Returns the folder of a Python, which identifies its environment.

    In a virtual environment, the program is a link to another environment's, but its folder is not.
    """
    return os.path.realpath(os.path.dirname(os.path.abspath(python)))
