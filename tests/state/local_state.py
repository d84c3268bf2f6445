"""Creates an operator's local stores without Spark and Kafka, and fakes the answers of Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.model import BatchContext, BatchRecord, ShardProcessor, ShardsBy, StoreIdentity
from kafka_eos_source.state.reading.stores import Cut
from kafka_eos_source.state.store.transactional import TransactionalStateStore

APP, STORE = "app", "counts"
TOPIC = f"{APP}-{STORE}-changelog"
TOPIC_ID = "topic-id"


def record(batch_id: int, shard: int, task_attempt_id: str = "") -> BatchRecord:
    return BatchRecord(
        "query", batch_id, task_attempt_id or f"attempt-{batch_id}-{shard}", time_ms=1000 * batch_id + 1
    )


class Machine:
    """The state directory of one store on one machine, and its changelog.

    Attributes:
        ends: committed end of each shard's changelog.
        committed: for each shard, the batch that the token in Kafka names.
        logs: the changelog: the changes committed to each shard, in order.
        shards_by: what decides the shard of a key. If it is the partition, each key is in another shard than
            that of Spark's hash.
    """

    def __init__(
        self,
        root: Path,
        processor: ShardProcessor,
        keys: Sequence[str],
        shards: int = 3,
        shards_by: ShardsBy = ShardsBy.HASH,
    ) -> None:
        self.root = root
        self.shards_by = shards_by
        self.processor = processor
        self.keys = keys
        self.shards = shards
        self.ends = dict.fromkeys(range(shards), 0)
        self.committed: dict[int, BatchRecord | None] = dict.fromkeys(range(shards))
        self.logs: dict[int, list[tuple[bytes, bytes | None]]] = {k: [] for k in range(shards)}
        self.event_time_ms: int | None = None
        self.topic_id = TOPIC_ID

    def identity(self, shard: int) -> StoreIdentity:
        return StoreIdentity(APP, STORE, shard, self.shards, TOPIC, self.topic_id)

    def path(self, shard: int) -> Path:
        return self.identity(shard).folder(self.root)

    def open(self, shard: int) -> TransactionalStateStore:
        return TransactionalStateStore.open(self.path(shard), self.identity(shard))

    def batch(
        self,
        batch_id: int,
        rows: pa.RecordBatch,
        *,
        only: Sequence[int] | None = None,
        task_attempt_id: str = "",
    ) -> None:
        """Runs the tasks of a micro-batch: each promotes committed changes, and leaves its own pending."""
        placed = shards_of([rows.column(name) for name in self.keys], self.shards)
        if self.shards_by is ShardsBy.INPUT_PARTITION:
            placed = (placed + 1) % self.shards
        seen = []
        for shard in range(self.shards) if only is None else only:
            own = rows.filter(pa.array(placed == shard))
            with self.open(shard) as store:
                self._promote(store, shard)
                context = BatchContext(
                    batch_id,
                    shard,
                    self.shards,
                    batch_id == 0,
                    1000 * batch_id,
                    self.event_time_ms,
                    shards_by=self.shards_by,
                )
                list(self.processor.process(iter([own] if own.num_rows else []), store, context))
                changes = [
                    pair
                    for batch in store.staged_changes()
                    for pair in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
                ]
                kept = record(batch_id, shard, task_attempt_id)
                store.persist_pending(kept)
            seen.append(context.seen_event_time_ms)
            self._staged = {**getattr(self, "_staged", {}), shard: (kept, changes)}
        self.event_time_ms = max(
            (each for each in (self.event_time_ms, *seen) if each is not None), default=None
        )

    def commit(self) -> None:
        """Commits, as the sink's transaction does, so that the last pending changes are in Kafka."""
        for shard, (kept, changes) in self._staged.items():
            self.committed[shard] = kept
            self.logs[shard] += changes
            self.ends[shard] = len(self.logs[shard])

    def promote(self, shard: int) -> None:
        """Promotes committed changes, as the shard's next task does when it begins."""
        with self.open(shard) as store:
            self._promote(store, shard)

    def cut(self, inputs: Mapping[TopicPartition, int] | None = None) -> Cut:
        return Cut(
            APP, STORE, TOPIC, self.topic_id, self.shards, dict(self.ends), dict(self.committed), inputs or {}
        )

    def _promote(self, store: TransactionalStateStore, shard: int) -> None:
        wanted = self.committed[shard]
        if wanted is not None and any(
            p.record.task_attempt_id == wanted.task_attempt_id for p in store.pending()
        ):
            store.promote(wanted, {TopicPartition(TOPIC, shard): self.ends[shard]})
        store.drop_pending()


def rows_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
