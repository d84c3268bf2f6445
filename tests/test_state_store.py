"""The store by itself: staging, own writes, scans (state A), offsets and commits (state C)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store import TransactionalStateStore

TOPIC = "app-counts-changelog"
TP = TopicPartition(TOPIC, 0)
IDENTITY = StoreIdentity("app", "counts", 0, 4, TOPIC)


def record(batch_id: int, attempt: str = "") -> BatchRecord:
    return BatchRecord("query", batch_id, attempt or f"attempt{batch_id}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TransactionalStateStore]:
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as opened:
        yield opened


def test_a_batch_is_kept_promoted_and_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.put(b"\1a", b"1")
        store.commit({TP: 1}, batch=record(0))
        store.put(b"\1b", b"2")
        store.delete(b"\1a")
        assert list(store.all()) == [(b"\1b", b"2")]
        store.persist_pending(record(1))
        assert list(store.all()) == [(b"\1a", b"1")]
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert [p.record for p in store.pending()] == [record(1)]
        store.promote(record(1), {TP: 3})
        assert store.pending() == []
        assert store.next_offset(TP) == 3
        assert store.committed_offset(TP) == 2
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert list(store.all()) == [(b"\1b", b"2")]
        assert store.last_batch() == record(1)
