"""Versions of this machine's software, and combinations of them that are known not to work."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from kafka_eos_source.kafka.clients import librdkafka_version
from kafka_eos_source.operate.doctor.finding import Finding, Severity, ok

_PACKAGES = ("kafka-eos-source", "pyspark", "confluent-kafka", "pyarrow", "pandas", "rocksdict")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Versions:
    """What is installed.

    Attributes:
        packages: version of each package as text; None = it is not installed.
        python: version of this Python.
        java: major version of Java; None = there is no usable Java.
    """

    packages: Mapping[str, str | None]
    python: str
    java: int | None

    def of(self, package: str) -> Version:
        """Returns the version of a package as numbers; empty = it is not installed."""
        return numbers(self.packages.get(package) or "")


@dataclass(frozen=True)
class _Combination:
    """A combination that does not work, or not as documented.

    Attributes:
        holds: whether these versions are such a combination.
        severity: how bad it is.
        what: the combination.
        why: what happens with it.
        fix: what to install instead.
    """

    holds: Callable[[Versions], bool]
    severity: Severity
    what: str
    why: str
    fix: str


def _below(package: str, *least: int) -> Callable[[Versions], bool]:
    return lambda versions: () < versions.of(package) < least


_COMBINATIONS = (
    _Combination(
        _below("pyspark", 4, 0),
        Severity.BAD,
        "PySpark older than 4.0",
        "it has no Python data sources for streams, so format('kafka-eos') does not exist",
        "install pyspark 4.0 or newer.",
    ),
    _Combination(
        lambda versions: (4, 0) <= versions.of("pyspark") < (4, 2),
        Severity.NOTE,
        "PySpark older than 4.2",
        "limits per trigger and onRolledBackCheckpoint=jump do not exist, and Trigger.AvailableNow reads "
        "everything in one batch",
        "install pyspark 4.2 or newer (docs/supported-versions.md).",
    ),
    _Combination(
        lambda versions: (versions.java or 0) >= 24 and () < versions.of("pyspark") < (4, 2),
        Severity.BAD,
        "Java 24 or newer with PySpark older than 4.2",
        "Spark's Hadoop client calls Subject.getSubject, which Java 24 removed (HADOOP-19212), so Spark does "
        "not start",
        "use Java 17 or 21.",
    ),
    _Combination(
        lambda versions: versions.java == 23 and () < versions.of("pyspark") < (4, 2),
        Severity.WARNING,
        "Java 23 with PySpark older than 4.2",
        "Spark starts only with -Djava.security.manager=allow (HADOOP-19212)",
        "use Java 17 or 21.",
    ),
    _Combination(
        lambda versions: versions.of("pandas") >= (3,),
        Severity.BAD,
        "pandas 3 or newer",
        "PySpark's Arrow workers import pandas and do not support version 3 yet",
        "install 'pandas>=2.2,<3'.",
    ),
    _Combination(
        _below("pandas", 2, 2),
        Severity.BAD,
        "pandas older than 2.2",
        "PySpark's Arrow workers refuse it",
        "install 'pandas>=2.2,<3'.",
    ),
    _Combination(
        _below("confluent-kafka", 2, 6),
        Severity.BAD,
        "confluent-kafka older than 2.6",
        "the transactional producer and the admin requests that this package uses are incomplete in it",
        "install confluent-kafka 2.6 or newer.",
    ),
    _Combination(
        _below("pyarrow", 18),
        Severity.BAD,
        "PyArrow older than 18",
        "PySpark 4 refuses it, or this package's Arrow code fails",
        "install pyarrow 18 or newer.",
    ),
    _Combination(
        lambda versions: numbers(versions.python)[:2] >= (3, 14),
        Severity.NOTE,
        "Python 3.14 or newer",
        "this package is tested with Python 3.10 to 3.13",
        "use Python 3.13 if something fails.",
    ),
)


def installed(java: int | None) -> Versions:
    """Returns the versions of this machine.

    Args:
        java: major version of the Java that Spark uses; None = none was found.
    """
    return Versions(
        {name: version_of(name) for name in _PACKAGES},
        platform.python_version(),
        java,
    )


def check_versions(versions: Versions) -> Iterator[Finding]:
    """Yields the versions, and each known problem of their combination."""
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.packages.items())
    text = f"Python {versions.python}, {listed}, librdkafka {librdkafka_version()}"
    missing = [name for name, version in versions.packages.items() if version is None]
    if missing:
        yield Finding(
            "versions",
            Severity.BAD,
            text,
            "a query needs these packages in the driver and in every executor",
            f"install {', '.join(missing)}.",
        )
    else:
        yield ok("versions", text)
    for each in _COMBINATIONS:
        if each.holds(versions):
            yield Finding("versions", each.severity, each.what, each.why, each.fix)


def numbers(version: str) -> Version:
    """Returns the numbers at the beginning of a version: ``(4, 1, 0)`` for ``"4.1.0.dev3"``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None = it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
