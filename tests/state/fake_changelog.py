"""A stateful query without Spark and Kafka: its shards, its changelog in memory, and its snapshots."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.reader import LogEnds, Pulled, Records
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import stores
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.model import BatchRecord, Owner, StoreIdentity, encode_batch
from kafka_eos_source.state.reading import frames, query, snapshot
from kafka_eos_source.state.reading import stores as cuts
from kafka_eos_source.state.reading.stores import Changelog, Cut
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage
from kafka_eos_source.state.snapshots.upload import LocalCopy, upload
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import TINY, binary, put_rows

APP, STORE, TOPIC, TOPIC_ID = "app", "counts", "app-counts-changelog", "topic-1"
KAFKA = {"kafka.bootstrap.servers": "127.0.0.1:1"}
HOUR_MS = 3_600_000

#: A key and its value, or None if the key was deleted. No entry = a control record, or a compacted one.
Entry = tuple[bytes, "bytes | None"] | None


def now_ms() -> int:
    return int(time.time() * 1000)


@dataclass
class FakeQuery:
    """A query whose host has the databases of all shards.

    Attributes:
        root: its ``state.dir``.
        location: where its snapshots are.
        logs: for each shard, the entry at each offset of the changelog.
        starts: first offset of each shard's log.
        retention_ms: ``delete.retention.ms``; None = readers may not see it.
        cuts: what was committed after each batch.
        models: the state of each shard after each batch.
        reads: the shard and the first offset of each read of the changelog.
    """

    root: Path
    location: str
    shards: int = 2
    topic_id: str = TOPIC_ID
    retention_ms: int | None = 24 * HOUR_MS
    logs: dict[int, list[Entry]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    models: list[dict[int, dict[bytes, bytes]]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    seed: int = 7

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.logs = {shard: [] for shard in range(self.shards)}
        self.starts = dict.fromkeys(range(self.shards), 0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets all readers of the changelog read this one."""
        for module in (snapshot, stores, frames):
            monkeypatch.setattr(module, "changelog_client", lambda _kafka: nullcontext(self))
            monkeypatch.setattr(module, "ChangelogReader", lambda query, tp: _Reader(query, tp.partition))
        monkeypatch.setattr(snapshot, "CommittedShard", _Committed)
        monkeypatch.setattr(Changelog, "cut", lambda _self, _deadline, _at_least=None: self.cuts[-1])
        monkeypatch.setattr(cuts, "TopicAdmin", lambda _: nullcontext(self))
        monkeypatch.setattr(query, "check_consumer", dict)

    def config(self, _topic: str, _deadline: Deadline) -> Mapping[str, str]:
        if self.retention_ms is None:
            raise AuthorizationError("the principal may not see it.")
        return {"delete.retention.ms": str(self.retention_ms)}

    @property
    def changelog(self) -> Changelog:
        return Changelog(APP, STORE, APP, {})

    @property
    def changelog_and_snapshots(self) -> Changelog:
        return replace(self.changelog, snapshot_location=self.location)

    def identity(self, shard: int) -> StoreIdentity:
        return StoreIdentity(APP, STORE, shard, self.shards, TOPIC, self.topic_id)

    def open(self, shard: int) -> TransactionalStateStore:
        identity = self.identity(shard)
        return TransactionalStateStore.open(identity.folder(self.root), identity, TINY)

    def batch(self, changes: Mapping[bytes, bytes | None] | None = None, *, hours_ago: float = 0) -> Cut:
        """Runs a micro-batch, which also writes the changelog, and commits it.

        Args:
            changes: made in each shard; None = random ones.
            hours_ago: when it began.
        """
        number = len(self.cuts)
        ends, batches, model = {}, {}, {}
        for shard, log in self.logs.items():
            record = BatchRecord("query", number, f"attempt-{number}-{shard}", "run")
            record = replace(record, time_ms=now_ms() - int(hours_ago * HOUR_MS))
            with self.open(shard) as store:
                put_rows(store, list((self._changes() if changes is None else changes).items()))
                for each in store.staged_changes():
                    log += zip(each["key"].to_pylist(), each["value"].to_pylist(), strict=True)
                log.append((Owner(APP, STORE, self.shards).key, encode_batch(record)))
                ends[shard], batches[shard] = len(log), record
                store.commit({TopicPartition(TOPIC, shard): len(log)}, batch=record)
                model[shard] = dict(store.all())
            log.append(None)
        self.cuts.append(Cut(APP, STORE, TOPIC, self.topic_id, self.shards, ends, batches))
        self.models.append(model)
        return self.cuts[-1]

    def upload(self, *shards: int, **manifest: Any) -> None:
        """Makes snapshots of the newest batch.

        Args:
            shards: of these shards; none = of all.
            manifest: values of the manifest that differ from the truth.
        """
        cut = self.cuts[-1]
        for shard in shards or range(self.shards):
            with self.open(shard) as store:
                copy = LocalCopy.freeze(store)
            batch = cut.batches[shard]
            assert copy is not None
            assert batch is not None
            state = replace(Manifest(self.identity(shard), cut.ends[shard], batch, now_ms(), ()), **manifest)
            try:
                upload(copy, SnapshotStorage(self.location, state.identity), state, 0)
            finally:
                copy.remove()

    def shared(self, shard: int) -> Path:
        """Folder of a shard's snapshots."""
        return self.identity(shard).folder(self.location)

    def _changes(self) -> dict[bytes, bytes | None]:
        return {
            b"\1k%03d" % self._random.randrange(200): None
            if self._random.random() < 0.3
            else b"%d" % self._random.randrange(1000)
            for _ in range(self._random.choice((0, 3, 60)))
        }


class _Reader:
    """Reads a shard of the changelog in memory; a `ChangelogSource`."""

    last_complaint = ""

    def __init__(self, query: FakeQuery, shard: int) -> None:
        self._query = query
        self._shard = shard
        self._log = query.logs[shard]
        self._at = 0

    def start(self, position: int) -> None:
        self._at = position
        self._query.reads.append((self._shard, position))

    def stop(self) -> None:
        self._at = -1

    def take(self, wait_seconds: float, end: int) -> Pulled:
        if self._at < self._query.starts[self._shard]:
            return Pulled(out_of_range=True)
        found = [(at, each) for at, each in enumerate(self._log) if each is not None and self._at <= at < end]
        self._at = len(self._log)
        if not found:
            return Pulled(log_end=self._at)
        keys, values = binary(each[0] for _, each in found), binary(each[1] for _, each in found)
        return Pulled(Records(np.array([at for at, _ in found], np.int64), keys, values, found[-1][0] + 1))

    def read(self, position: int, end: int, _deadline: Deadline, *, if_gone: str) -> Iterator[Records]:
        self._at = position
        pulled = self.take(0, end)
        if pulled.records is not None:
            yield pulled.records

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        return self._query.starts[self._shard], len(self._log)

    def ends(self) -> LogEnds:
        return LogEnds(self._query.starts[self._shard], len(self._log), len(self._log))


class _Committed:
    def __init__(self, query: FakeQuery, _group: str, tp: TopicPartition) -> None:
        self._query = query
        self._shard = tp.partition

    def offset(self, deadline: Deadline) -> GroupOffset | None:
        cut = self._query.cuts[-1]
        return GroupOffset(cut.tp(self._shard), cut.ends[self._shard], "")
