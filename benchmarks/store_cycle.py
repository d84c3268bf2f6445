"""``python -m benchmarks.store_cycle``: what small batches cost in the store of one shard, without Spark.

The store holds many keys. Each batch does what a task does: it opens the store, promotes the changes of the
batch before, reads and changes some keys at random, makes the changes pending, and closes the store. The
number of compacted bytes is from RocksDB's log.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from benchmarks.arrow_records import random_changes
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_CHANGELOG = TopicPartition("app-s-changelog", 0)
_IDENTITY = StoreIdentity("app", "s", 0, 1, _CHANGELOG.topic)
_CHUNK = 500_000
_COMPACTED = re.compile(r'"event": "compaction_finished".*?"total_output_size": (\d+)')


@click.command()
@click.option("--keys", default=2_000_000, show_default=True)
@click.option("--value-bytes", default=40, show_default=True)
@click.option("--changed", default=2_000, show_default=True, help="Keys that each batch changes.")
@click.option("--batches", default=200, show_default=True)
def main(keys: int, value_bytes: int, changed: int, batches: int) -> None:
    """Prints what a batch costs, in the second half of the batches."""
    with tempfile.TemporaryDirectory() as folder:
        shard = _Shard(Path(folder) / "0", value_bytes)
        shard.fill(keys)
        for number in range(1, batches + 1):
            shard.run(number, changed)
    click.echo(
        f"{keys:,} keys, {value_bytes} bytes each; batches of {changed:,} changed keys:\n{shard.costs}"
    )


@dataclass
class _Costs:
    """What each batch cost: ms of its steps, ms and CPU ms in all, and bytes that compactions wrote."""

    steps: list[dict[str, float]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    compacted: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        half = len(self.ms) // 2
        ms, cpu_ms = self.ms[half:], self.cpu_ms[half:]
        medians = {
            name: statistics.median(each[name] for each in self.steps[half:]) for name in self.steps[0]
        }
        steps = ", ".join(f"{name} {median:.1f}" for name, median in medians.items())
        return (
            f"median {statistics.median(ms):.1f} ms ({steps}), slowest {max(ms):.0f} ms; "
            f"CPU {statistics.mean(cpu_ms):.1f} ms on average; "
            f"compacted {sum(self.compacted) / 1e6:,.0f} MB in all batches"
        )


class _Shard:
    def __init__(self, path: Path, value_bytes: int) -> None:
        self.costs = _Costs()
        self._path, self._value_bytes = path, value_bytes
        self._keys: pa.BinaryArray = pa.array([], pa.binary())
        self._offset = 0
        self._last: BatchRecord | None = None

    def fill(self, keys: int) -> None:
        """Restores the state from chunks of records, as a new host does."""
        rows = pa.Table.from_batches(random_changes(keys, self._value_bytes, seed=1))
        self._keys = rows["key"].combine_chunks()
        with TransactionalStateStore.open(self._path, _IDENTITY) as store:
            for first in range(0, keys, _CHUNK):
                part = rows.slice(first, _CHUNK).combine_chunks()
                self._offset += len(part)
                store.restore_chunk(
                    part["key"].chunk(0),
                    part["value"].chunk(0),
                    {_CHANGELOG: self._offset},
                    batch=BatchRecord("query", 0, "first", time_ms=1),
                    done=self._offset == keys,
                )

    def run(self, number: int, changed: int) -> None:
        """Runs one batch, and adds its costs."""
        random = np.random.default_rng(number)
        keys = self._keys.take(pa.array(random.choice(len(self._keys), changed, replace=False)))
        value = b"%0*d" % (self._value_bytes, number)
        values = pa.array([value] * changed, pa.binary())
        began, cpu = time.perf_counter(), time.process_time()
        steps: dict[str, float] = {}

        def ended(step: str) -> None:
            steps[step] = 1000 * (time.perf_counter() - began) - sum(steps.values())

        store = TransactionalStateStore.open(self._path, _IDENTITY)
        ended("open")
        if self._last is not None:
            store.promote(self._last, {_CHANGELOG: self._offset})
        ended("promote")
        store.get_many(keys)
        ended("read")
        store.put_many(keys, values)
        self._last = BatchRecord("query", number, f"attempt-{number}", time_ms=number)
        store.persist_pending(self._last)
        ended("write")
        store.close()
        ended("close")
        self._offset += changed
        self.costs.steps.append(steps)
        self.costs.ms.append(sum(steps.values()))
        self.costs.cpu_ms.append(1000 * (time.process_time() - cpu))
        log = (self._path / "db" / "LOG").read_text(errors="replace")
        self.costs.compacted.append(sum(map(int, _COMPACTED.findall(log))))


if __name__ == "__main__":
    main()
