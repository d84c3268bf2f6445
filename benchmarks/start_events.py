"""Records when the Python processes of a query start, what they import, and how long their first calls take.

`benchmarks.start` uses it. Every process appends lines of JSON to one file, so the events of all processes
have one clock. The module imports nothing but the standard library, so that it hardly changes what it
measures.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import _bootstrap
from typing import Any

#: File for the events. Without the variable, `install` does nothing.
FILE = "KAFKA_EOS_BENCH_START"
#: JSON with more functions whose calls are recorded, as in `_CALLS`.
CALLS = "KAFKA_EOS_BENCH_CALLS"
_importer: Any = _bootstrap
#: Imports that take less are not told.
_SHORT_SECONDS = 0.002

#: Functions whose calls are recorded, by module.
_CALLS: dict[str, Sequence[str]] = {
    "pyspark.java_gateway": ("launch_gateway",),
    "pyspark.sql.session": ("SparkSession.Builder.getOrCreate",),
    "pyspark.sql.streaming.readwriter": ("DataStreamReader.load", "DataStreamWriter.start"),
    "kafka_eos_source.datasource": (
        "KafkaEosDataSource.schema",
        "KafkaEosDataSource.streamReader",
        "KafkaEosDataSource.streamWriter",
    ),
    "kafka_eos_source.datasource.reader": (
        "_StreamReader.initialOffset",
        "_StreamReader.latestOffset",
        "_StreamReader.prepareForTriggerAvailableNow",
        "_StreamReader.partitions",
        "_UnlimitedStreamReader.initialOffset",
        "_UnlimitedStreamReader.latestOffset",
        "_UnlimitedStreamReader.partitions",
        "_Reader.__setstate__",
    ),
    "kafka_eos_source.datasource.writer": (
        "_ArrowStreamWriter.write",
        "_ArrowStreamWriter.commit",
        "_RowStreamWriter.write",
        "_RowStreamWriter.commit",
    ),
}


class _Events:
    """Writes the events of this process, and counts the time that its imports take."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._importing = threading.local()

    def begin(self, kind: str) -> None:
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read().decode(errors="replace").split("\0")
        self.tell(kind, _born(), time.time(), time.process_time(), command=command[:4])

    def tell(self, kind: str, began: float, ended: float, cpu: float, **more: object) -> None:
        event = {"kind": kind, "pid": os.getpid(), "began": began, "ended": ended, "cpu": cpu, **more}
        os.write(self._file, f"{json.dumps(event)}\n".encode())

    def trace_imports(self) -> None:
        """Times the outermost imports. The interpreter calls this function for each module not yet loaded."""
        find_and_load = _importer._find_and_load

        def timed(name: str, import_: Any) -> Any:
            if getattr(self._importing, "active", False):
                module = find_and_load(name, import_)
                _wrap_calls_of(self)
                return module
            self._importing.active = True
            began, cpu = time.time(), time.process_time()
            try:
                return find_and_load(name, import_)
            finally:
                self._importing.active = False
                ended, cpu = time.time(), time.process_time() - cpu
                _wrap_calls_of(self)
                if ended - began >= _SHORT_SECONDS:
                    self.tell("import", began, ended, cpu, name=name)

        _importer._find_and_load = timed


def install() -> None:
    """Starts to record the events of this process, and of the processes that it forks."""
    path = os.environ.get(FILE)
    if not path:
        return
    events = _Events(path)
    _CALLS.update(json.loads(os.environ.get(CALLS, "{}")))
    events.begin("process")
    events.trace_imports()
    os.register_at_fork(after_in_child=lambda: events.begin("fork"))


_wrapped: set[str] = set()


def _wrap_calls_of(events: _Events) -> None:
    """Wraps the functions of modules that have been loaded since the last call."""
    for module_name in _CALLS.keys() - _wrapped:
        module = sys.modules.get(module_name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        _wrapped.add(module_name)
        for path in _CALLS[module_name]:
            *owners, name = path.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            if owner is not None and hasattr(owner, name):
                timed: Any = _timed(events, path, getattr(owner, name))
                if isinstance(vars(owner).get(name), classmethod):  # already bound to the class
                    timed = staticmethod(timed)
                setattr(owner, name, timed)


def _timed(events: _Events, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began, cpu = time.time(), time.process_time()
        more: dict[str, object] = {}
        try:
            result = function(*args, **kwargs)
            shard = getattr(getattr(result, "identity", None), "shard", None)
            if shard is not None:
                more["shard"] = shard
            return result
        finally:
            events.tell("call", began, time.time(), time.process_time() - cpu, name=name, **more)

    return call


def _born() -> float:
    """Returns when the kernel created this process, in seconds since the epoch (Linux)."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")
