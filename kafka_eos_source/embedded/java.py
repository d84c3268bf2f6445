"""Finds the Java that PySpark needs anyway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from kafka_eos_source.errors import UnavailableError

LOWEST = 17
_FIX = (
    f"install Java {LOWEST} or newer (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) "
    "and put it on the PATH or into JAVA_HOME."
)


def find() -> str:
    """Returns the path of a ``java`` that is new enough: that of ``JAVA_HOME``, else of the PATH.

    Raises:
        UnavailableError: if there is no Java, or it is too old.
    """
    return found()[0]


def found() -> tuple[str, int]:
    """Returns the path of a ``java`` that is new enough, and its major version.

    Raises:
        UnavailableError: if there is no Java, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise UnavailableError("there is no Java in JAVA_HOME or on the PATH.", fix=_FIX)
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    major = version(output)
    if major is None or major < LOWEST:
        raise UnavailableError(
            f"{java} is Java {major or 'of unknown version'}; Kafka 4 needs {LOWEST} or newer.", fix=_FIX
        )
    return java, major


def version(output: str) -> int | None:
    """Returns the major version in the output of ``java -version``.

    ``"1.8.0_392"`` is 8, ``"17.0.9"`` is 17.
    """
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(found[1]) if found else None
