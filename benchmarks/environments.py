"""Creates a virtual environment for each peer, once, in the user's cache folder."""

from __future__ import annotations

import compileall
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kafka_eos_source
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.runtime.folders import cache_directory

_STAMP = "installed"


def python_with(name: str, requirements: Sequence[str]) -> Path:
    """Returns the Python of an environment with these packages, and creates it if it does not exist.

    Raises:
        UnavailableError: if the environment cannot be created, or pip cannot get the packages.
    """
    asked = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:8]
    folder = cache_directory() / "benchmarks" / f"{name}-{asked}"
    python = folder / "bin" / "python"
    if not (folder / _STAMP).exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {', '.join(requirements)}, once", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", str(folder)], name)
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements], name)
        (folder / _STAMP).touch()
    return python


def compile_package() -> None:
    """Compiles the modules of kafka-eos, as ``pip install`` does.

    In a checkout with ``PYTHONDONTWRITEBYTECODE``, each process of a query would compile them again.
    """
    compileall.compile_dir(Path(kafka_eos_source.__file__).parent, quiet=2)


def jdk() -> str:
    """Returns a ``java`` that can run a source file.

    Raises:
        UnavailableError: if there is no Java, or only one without a compiler.
    """
    found = java.find()
    modules = subprocess.run([found, "--list-modules"], capture_output=True, text=True, check=False).stdout
    if "jdk.compiler" not in modules:
        raise UnavailableError(
            f"{found} is a Java runtime without a compiler; Kafka Streams' program is compiled as it is run.",
            fix="install a JDK (Debian, Ubuntu: apt-get install openjdk-17-jdk-headless) and put it on the "
            "PATH or into JAVA_HOME; or leave it out: --only with the other contenders.",
        )
    return found


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-5:])
        raise UnavailableError(
            f"the environment of {name} cannot be made:\n{said}",
            fix="check the network and pip's configuration, then try again.",
        )
