"""``python -m benchmarks.movement``: time until a shard's state is there, with and without snapshots.

One shard with random, distinct, unordered keys and random values, without Spark. The storage for snapshots is
a folder on the local disk, so the network's share of the time is missing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from benchmarks.arrow_records import random_changes, send
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import topic as changelog
from kafka_eos_source.state.changelog.recovery import Restored, RestoreProgress, WipeNeeded, open_restored
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.topic import changelog_client
from kafka_eos_source.state.model import BatchRecord, Owner, StoreIdentity
from kafka_eos_source.state.operator.shard_store import ShardSnapshots, SnapshotUse
from kafka_eos_source.state.reading.snapshot import ChangelogCopy
from kafka_eos_source.state.reading.stores import Changelog, Cut
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage
from kafka_eos_source.state.snapshots.upload import LocalCopy, is_due, upload
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_MINUTES = 900.0
_LOOKS = 10_000

T = TypeVar("T")


@click.command()
@click.option("--records", default=4_000_000, show_default=True, help="Number of keys.")
@click.option("--value-bytes", default=230, show_default=True)
@click.option(
    "--changed", default=40_000, show_default=True, help="Keys that change after the first snapshot."
)
def main(records: int, value_bytes: int, changed: int) -> None:
    """Times a restore from the changelog, uploads, and a start from a snapshot."""
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        _Measured(kafka.bootstrap_servers, Path(folder)).run(records, value_bytes, changed)


@dataclass
class _Measured:
    bootstrap: str
    folder: Path

    def __post_init__(self) -> None:
        self.kafka = check_consumer({"bootstrap.servers": self.bootstrap})
        name = changelog.changelog_name("movement", "s")
        made = changelog.ensure(self.kafka, name, 1, deadline=Deadline.after_seconds(_MINUTES))
        self.tp = TopicPartition(name, 0)
        self.identity = StoreIdentity("movement", "s", 0, 1, name, made.topic_id)
        self.storage = SnapshotStorage(str(self.folder / "shared"), self.identity)

    def run(self, records: int, value_bytes: int, changed: int) -> None:
        send(self.bootstrap, self.tp.topic, random_changes(records, value_bytes, seed=1))
        first = self.folder / "first"
        seconds, _ = _timed(lambda: self._open(first, records, None))
        click.echo(f"{records:,} records of {value_bytes} bytes")
        click.echo(f"restored from the changelog: {seconds:.1f} s, {_megabytes(first):.0f} MB on disk")
        self._upload("first snapshot", first, records)
        send(self.bootstrap, self.tp.topic, random_changes(changed, value_bytes, seed=2))
        seconds, _ = _timed(lambda: self._open(first, records + changed, None))
        click.echo(f"{changed:,} further records read: {seconds:.1f} s")
        self._upload("second snapshot", first, records + changed)
        send(self.bootstrap, self.tp.topic, random_changes(changed, value_bytes, seed=3))
        end = records + 2 * changed
        second = self.folder / "second"
        seconds, read = _timed(lambda: self._open(second, end, self._snapshots(second, end)))
        click.echo(f"another host, snapshot and {read:,} records of the changelog: {seconds:.1f} s")
        for name, location in (("the changelog", None), ("a snapshot", str(self.folder / "shared"))):
            cpu = time.process_time()
            seconds, _ = _timed(partial(self._read, end, location))
            cpu = time.process_time() - cpu
            click.echo(f"a read from {name}: {seconds:.1f} s, {cpu:.1f} s of CPU")
        seconds, _ = _timed(lambda: [is_due(first, 0, 1 << 62) for _ in range(_LOOKS)])
        click.echo(f"a micro-batch that is not due: {seconds / _LOOKS * 1e6:.0f} µs")

    def _snapshots(self, path: Path, end: int) -> ShardSnapshots:
        use = SnapshotUse(str(self.folder / "shared"), 3_600_000)
        return ShardSnapshots(use, path, self.identity, end, lambda: 0, None)

    def _read(self, end: int, location: str | None) -> None:
        """Reads the state as a `StateQuery` does, up to its first row."""
        changelog = Changelog("movement", "s", "movement", self.kafka, location)
        batch = BatchRecord("q", end, f"a{end}", "r", int(time.time() * 1000))
        cut = Cut("movement", "s", self.tp.topic, self.identity.topic_id, 1, {0: end}, {0: batch})
        with closing(ChangelogCopy(changelog, Deadline.after_seconds(_MINUTES))) as copy:
            copy.follow(cut, [0])
            with copy.show([0]) as shown:
                next(shown.shard(0).view.all())

    def _open(self, path: Path, end: int, snapshots: ShardSnapshots | None) -> int:
        """Opens a store at an offset as a task does; returns the number of records that were read."""
        progress = RestoreProgress(self.tp)
        with changelog_client(self.kafka) as client:

            def read(store: TransactionalStateStore) -> Restored | WipeNeeded:
                reader = ChangelogReader(client, self.tp)
                owner = Owner(self.identity.application_id, self.identity.store, self.identity.shards)
                deadline = Deadline.after_seconds(_MINUTES)
                return restore(store, self.tp, end, reader, owner=owner, deadline=deadline)

            store, restored = open_restored(
                path,
                self.identity,
                StoreConfig(),
                read,
                progress,
                None if snapshots is None else snapshots.install,
            )
        with store:
            store.commit({self.tp: end}, batch=BatchRecord("q", end, f"a{end}", "r", int(time.time() * 1000)))
        return restored.records

    def _upload(self, name: str, path: Path, end: int) -> None:
        with TransactionalStateStore.open(path, self.identity) as store:
            freeze_seconds, copy = _timed(lambda: LocalCopy.freeze(store))
            batch = store.last_batch()
        if copy is None or batch is None:
            raise click.ClickException("the state could not be frozen")
        state = Manifest(self.identity, end, batch, int(time.time() * 1000), ())
        cpu = time.process_time()
        seconds, (outcome, _, sent_bytes) = _timed(lambda: upload(copy, self.storage, state, 0))
        cpu = time.process_time() - cpu
        copy.remove()
        click.echo(
            f"{name} ({outcome.value}): the task waits {freeze_seconds * 1000:.0f} ms; the thread sends "
            f"{sent_bytes / 1e6:.0f} MB in {seconds:.1f} s, {cpu:.1f} s of CPU"
        )


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _megabytes(path: Path) -> float:
    return sum(each.stat().st_size for each in path.rglob("*.sst")) / 1e6


if __name__ == "__main__":
    main()
