"""What doctor runs in Spark's executors.

Spark ships this module by value, because executors may lack the package. Hence it imports only the standard
library at its top.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any


def describe(staging: str | None, probe: str, nonce: str) -> dict[str, Any]:
    """Describes the Python process that runs this function.

    Args:
        staging: staging folder; None = do not look at it.
        probe: name of the file in it that the driver wrote.
        nonce: what the driver wrote.
    """
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "at_seconds": time.time(),
        "free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "temporary": tempfile.gettempdir(),
        "package": None,
        "problem": "",
        "staging": None,
        "files": None,
    }
    try:
        import resource

        found["files"] = list(resource.getrlimit(resource.RLIMIT_NOFILE))
        found["package"] = importlib.metadata.version("kafka-eos-source")
        from kafka_eos_source import native

        native.check()
    except Exception as error:  # noqa: BLE001  whatever is broken on that machine is the result
        found["problem"] = f"{type(error).__name__}: {error}"
        return found
    if staging is not None:
        found["staging"] = _use(staging, probe, nonce)
    return found


def _use(staging: str, probe: str, nonce: str) -> str:
    """Reads the driver's file and writes one; returns the problem, or "" if there is none."""
    from kafka_eos_source.runtime.file_systems import file_system

    try:
        fs, path = file_system(staging)
        with fs.open_input_stream(f"{path}/{probe}") as file:
            if file.read().decode() != nonce:
                return "the driver's file has other contents here"
        mine = f"{path}/{probe}-{socket.gethostname()}-{os.getpid()}"
        with fs.open_output_stream(mine) as out:
            out.write(nonce.encode())
    except Exception as error:  # noqa: BLE001  whatever a file system raises is the result
        return f"{type(error).__name__}: {error}"
    return ""


def task(staging: str | None, probe: str, nonce: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the function of a task: it yields one row with a description of its process, as JSON."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for _ in batches:
            pass
        yield pa.record_batch({"found": [json.dumps(describe(staging, probe, nonce))]})

    return run
