"""The Java that PySpark needs anyway."""

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
    """Path of a ``java`` that is new enough: ``JAVA_HOME``'s, else the PATH's.

    Raises:
        UnavailableError: there is none, or it is too old.
    """
    return found()[0]


def found() -> tuple[str, int]:
    """As `find`, with its major version.

    Raises:
        UnavailableError: as `find`.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise UnavailableError("no Java found: neither in JAVA_HOME nor on the PATH.", fix=_FIX)
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    major = version(said)
    if major is None or major < LOWEST:
        raise UnavailableError(
            f"{java} is Java {major or 'of unknown version'}; Kafka 4 needs {LOWEST}.", fix=_FIX
        )
    return java, major


def version(said: str) -> int | None:
    """The major version in ``java -version``'s text: ``"1.8.0_392"`` is 8, ``"17.0.9"`` is 17."""
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None
