"""Measures a first batch of new keys in a task of a stateful operator: time, and peak of its memory.

It needs neither Spark nor a broker, and counts CPU seconds. A process does what the task of one shard does,
from the rows that arrive to the packets that leave, and then promotes the batch as the next task does::

    python -m benchmarks.spill --keys 12500000          # one of four shards of 50 million keys
    python -m benchmarks.spill --keys 2000000 --limit-mib 16 --operator dedup
    python -m benchmarks.spill --keys 5000000 --limit-mib 16 --operator windows
    python -m benchmarks.spill --keys 4000000 --limit-mib 16 --plot memory.png  # with this limit and without

Operators with event time run a second batch in another process: a single row, whose event time closes all
windows or sessions, or lets all duplicates expire.

The table has one line for each part of the task; ``peak`` is the largest resident memory of the process so
far, of which ``began at`` is what Python and its libraries take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_ROWS_PER_BATCH = 100_000
_MIB = 1 << 20
_TIME_MS = 1_700_006_400_000  # the start of an hour

_SAMPLE_SECONDS = 0.1

_WITHOUT_TIME = ("function", "count", "dedup")
_WITH_TIME = ("windows", "on close", "changes", "held", "hopping", "sessions", "within")


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class _MemorySamples:
    """Samples the resident memory of this process in a thread, while the context is entered.

    Attributes:
        points: seconds since the beginning, and MiB.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _MemorySamples:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        began, page = time.perf_counter(), resource.getpagesize()
        while not self._end.wait(_SAMPLE_SECONDS):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            self.points.append((round(time.perf_counter() - began, 2), round(resident / _MIB, 1)))


def _batches(keys: int, schema: Any) -> Iterator[Any]:
    """Yields rows with distinct keys in no particular order: id (int64), amount (int64), and time (ms).

    The times of all rows are in the same hour.
    """
    import numpy as np
    import pyarrow as pa

    for start in range(0, keys, _ROWS_PER_BATCH):
        number = np.arange(start, min(start + _ROWS_PER_BATCH, keys), dtype=np.int64)
        scattered = (number * np.int64(0x9E3779B97F4A7C15 - (1 << 64))).view(np.int64)
        names = pa.array(scattered).cast(pa.string())
        times = pa.array(_TIME_MS + number % 3_600_000)
        yield pa.record_batch([names, pa.array(number), times], schema=schema)


def _last_batch(schema: Any) -> Iterator[Any]:
    """Yields a row that is a month later."""
    import pyarrow as pa

    yield pa.record_batch([["last"], [1], [_TIME_MS + 30 * 86_400_000]], schema=schema)


def _processor(operator: str, schema: Any) -> Any:
    import pyarrow as pa

    from kafka_eos_source.state import aggregates as agg
    from kafka_eos_source.state import hopping, session, tumbling
    from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
    from kafka_eos_source.state.vector.function import FunctionProcessor
    from kafka_eos_source.state.vector.processor import AggregateProcessor

    if operator == "dedup":
        return DeduplicateProcessor(schema, ["id"])
    if operator == "within":
        return DeduplicateProcessor(schema, ["id"], within="1 day", on="time")
    if operator != "function":
        hour = tumbling("1 hour", on="time", grace="1 hour")
        windows: dict[str, dict[str, Any]] = {
            "count": {},
            "windows": {"window": hour},
            "on close": {"window": hour, "emit": "on_close"},
            "changes": {"window": hour, "emit": "changes"},
            "held": {"window": hour, "emit": "changes", "at_most_every": "2 hours"},
            "hopping": {"window": hopping("1 hour", every="10 minutes", on="time", grace="1 hour")},
            "sessions": {"window": session("1 hour", on="time", grace="1 hour"), "emit": "on_close"},
        }
        aggregates = {"rows": agg.count(), "total": agg.sum("amount")}
        return AggregateProcessor(schema, ["id"], aggregates, **windows[operator])

    def number(batch: Any) -> Any:
        return None, pa.StructArray.from_arrays([pa.array([1] * len(batch.keys))], names=["n"])

    return FunctionProcessor(schema, ["id"], number, output=schema, state=pa.schema([("n", pa.int64())]))


def _run(keys: int, limit_mib: int, operator: str, folder: str, batch_id: int) -> list[dict[str, Any]]:
    """Runs the task of one batch in this process; returns seconds and peak memory of each of its parts."""
    import pyarrow as pa

    from kafka_eos_source.model import TopicPartition
    from kafka_eos_source.state.model import BatchContext, BatchRecord, StoreIdentity
    from kafka_eos_source.state.store.rocksdb import StoreConfig
    from kafka_eos_source.state.store.transactional import StateHandle, TransactionalStateStore

    tp = TopicPartition("bench-changelog", 0)
    schema = pa.schema([("id", pa.string()), ("amount", pa.int64()), ("time", pa.int64())])
    processor = _processor(operator, schema)
    identity = StoreIdentity("bench", "counts", 0, 1, tp.topic)
    record = BatchRecord("query", batch_id, "attempt")
    limit = limit_mib * _MIB if limit_mib > 0 else -1
    parts: list[dict[str, Any]] = [{"part": "began at", "seconds": 0.0, "peak_mib": _peak_mib()}]
    clock = time.process_time()

    def done(part: str, **more: Any) -> None:
        nonlocal clock
        parts.append(
            {"part": part, "seconds": round(time.process_time() - clock, 1), "peak_mib": _peak_mib(), **more}
        )
        clock = time.process_time()

    rows = _last_batch(schema) if batch_id else _batches(keys, schema)
    seen_ms = _TIME_MS + 31 * 86_400_000 if batch_id and operator == "within" else None
    with TransactionalStateStore.open(Path(folder, "s"), identity, StoreConfig(limit)) as store:
        clock = time.process_time()
        context = BatchContext(batch_id, 0, 1, batch_id == 0, 0, seen_ms)
        emitted = 0
        for out in processor.process(rows, StateHandle(store), context):
            emitted += out.num_rows
        done("process", rows=emitted)
        spilled = store.staged_bytes()[1]
        changes = 0
        if spilled:
            store.persist_pending(record)
            done("make pending")
            for each in store.pending_changes(record):
                changes += each.num_rows
            done("read changes", rows=changes)
        else:
            held = list(store.staged_changes())
            changes = sum(each.num_rows for each in held)
            done("read changes", rows=changes)
            store.persist_pending(record)
            done("make pending")
    with TransactionalStateStore.open(Path(folder, "s"), identity, StoreConfig(limit)) as store:
        clock = time.process_time()
        store.promote(record, {tp: 1 + batch_id})
        done("promote", spilled_mib=spilled // _MIB)
    assert changes >= keys
    return parts


def _measure(
    keys: int, limit_mib: int, operator: str, folder: str, batch_id: int
) -> list[tuple[float, float]]:
    """Runs a batch in a process of its own, and prints its table; returns samples of its memory."""
    command = [sys.executable, "-m", "benchmarks.spill", "--child", folder, "--batch", str(batch_id)]
    command += ["--keys", str(keys), "--limit-mib", str(limit_mib), "--operator", operator]
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(f"{operator}, {keys:,} new keys, limit {limit_mib} MiB" if batch_id == 0 else "all of them end")
    print(f"{'part':<14}{'CPU s':>8}{'peak MiB':>10}")
    for each in said["parts"]:
        print(
            f"{each['part']:<14}{each['seconds']:>8}{each['peak_mib']:>10}  {each.get('rows', '')}",
            flush=True,
        )
    return [(seconds, mib) for seconds, mib in said["memory"]]


def _draw(path: Path, title: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot([seconds for seconds, _ in points], [mib for _, mib in points], label=label)
    axes.set_title(title)
    axes.set_xlabel("seconds since the task began")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keys", type=int, default=12_500_000)
    parser.add_argument("--limit-mib", type=int, default=64, help="-1 = no limit: everything in memory")
    parser.add_argument("--operator", choices=[*_WITHOUT_TIME, *_WITH_TIME], default="count")
    parser.add_argument(
        "--plot", type=Path, help="draw the memory of the first batch, with limit and without"
    )
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keys, limit_mib, operator = arguments.keys, arguments.limit_mib, arguments.operator
    if arguments.child:
        with _MemorySamples() as memory:
            parts = _run(keys, limit_mib, operator, arguments.child, arguments.batch)
        print(json.dumps({"parts": parts, "memory": memory.points}))
        return
    if arguments.plot:
        lines = {}
        for limit, label in ((-1, "without a limit"), (limit_mib, f"limit {limit_mib} MiB")):
            with tempfile.TemporaryDirectory(prefix="spill-") as folder:
                lines[label] = _measure(keys, limit, operator, folder, 0)
        _draw(arguments.plot, f"A micro-batch with {keys:,} new keys in one task: {operator}", lines)
        return
    with tempfile.TemporaryDirectory(prefix="spill-") as folder:
        for batch_id in (0, 1) if operator in _WITH_TIME else (0,):
            _measure(keys, limit_mib, operator, folder, batch_id)


if __name__ == "__main__":
    main()
