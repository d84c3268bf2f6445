"""Small frozen records and protocols that the parts of `state` share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.errors import StateError

#: A broker takes 4096 bytes of metadata with an offset.
_MOST_METRICS = 16
_LONGEST_METRIC = 64


@dataclass(frozen=True)
class StoreIdentity:
    """What a store is the state of. Written in its database; another one's database is refused.

    Attributes:
        application_id: of the query, as in the names of its changelog topics.
        store: name of the store within the query.
        shard: number of this shard, and of its changelog partition.
        shards: how many there are, fixed when the changelog is created.
        changelog_topic: ``<application.id>-<store>-changelog``.
        topic_id: Kafka's id of that topic, "" = not known. Another id means another topic of the same name:
            the local state is worth nothing then.
        schema: fingerprint of how keys and values are encoded.
    """

    application_id: str
    store: str
    shard: int
    shards: int
    changelog_topic: str
    topic_id: str = ""
    schema: str = ""

    def folder(self, root: str | os.PathLike[str]) -> Path:
        """Where the shard's database is on each machine that has one, under ``state.dir``."""
        return Path(root, self.application_id, self.store, str(self.shard))


@dataclass(frozen=True)
class BatchRecord:
    """The micro-batch whose state a store holds, written in the same `WriteBatch` as the state.

    Attributes:
        query_id: Spark's id of the query.
        batch_id: Spark's batch id; -1 = state that was there before the first batch.
        attempt: the task attempt (UUID, hex) whose rows are in the changelog. Two attempts of one batch may
            have computed different states: the token in Kafka names the one that counts.
        run_id: Spark's id of the run.
        time_ms: when the task began, ms since the epoch; never goes back from batch to batch.
        event_time_ms: largest event time that any shard saw up to and including this batch; None = none.
        counts: what the shard's processor has counted (`BatchContext.count`) in all batches so far.
    """

    query_id: str
    batch_id: int
    attempt: str
    run_id: str = ""
    time_ms: int = 0
    event_time_ms: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class PendingBatch:
    """One attempt's changes, kept in the database and not applied: the token decides whether they will be.

    Attributes:
        record: of the batch and attempt.
        base: the batch record of the state that these changes are made to; None = an empty store.
        size_bytes: of the changes.
    """

    record: BatchRecord
    base: BatchRecord | None
    size_bytes: int


class StateAccess(Protocol):
    """What a processor does with the state of its shard: its own writes are seen by every read.

    Keys are made by `layout` (never empty, first byte at least 1); order is that of bytes; a value of None
    deletes. Bounds: ``low`` included, ``high`` excluded, None = unbounded.
    """

    def get(self, key: bytes) -> bytes | None: ...
    def put(self, key: bytes, value: bytes | None) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def delete_range(self, low: bytes, high: bytes | None) -> None: ...
    def range(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]: ...
    def prefix_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]: ...
    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The value of each key, null where there is none. Keys may repeat."""

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """A null value deletes. Of a key that repeats, the last value counts."""


@dataclass
class BatchContext:
    """What a processor knows of the micro-batch that it works on.

    Attributes:
        batch_id: Spark's.
        shard, shards: which one of how many.
        first: no batch was ever committed on this state.
        time_ms: processing time of the batch, ms since the epoch: the same for all rows and timers of it.
        event_time_ms: largest event time seen by *all* shards up to the batch before; None = none yet. The
            watermark of the batch is this less the operator's delay.
        seen_event_time_ms: set by the processor: largest event time among its own rows of this batch.
        metrics: counted by the processor in this batch, by name (``late_rows``). Their sums over all batches
            commit with the state: a batch that runs again is counted once.
    """

    batch_id: int
    shard: int
    shards: int
    first: bool
    time_ms: int
    event_time_ms: int | None = None
    seen_event_time_ms: int | None = None
    metrics: dict[str, int] = field(default_factory=dict)

    def count(self, metric: str, more: int) -> None:
        """Adds to a metric. There may be few, of short names: their sums are in the token.

        Raises:
            StateError: there are too many, or the name is too long.
        """
        is_new = metric not in self.metrics
        if is_new and (len(self.metrics) >= _MOST_METRICS or len(metric) > _LONGEST_METRIC):
            raise StateError(
                f"a processor counts {metric[:80]!r} beside {len(self.metrics)} other metrics; expected up "
                f"to {_MOST_METRICS}, with names of up to {_LONGEST_METRIC} characters.",
                fix="count fewer things; what is counted by key belongs into the state.",
            )
        self.metrics[metric] = self.metrics.get(metric, 0) + more

    def watermark_ms(self, delay_ms: int) -> int | None:
        """Nothing earlier than this is expected any more; None = no event was seen yet."""
        return None if self.event_time_ms is None else self.event_time_ms - delay_ms


class ShardProcessor(Protocol):
    """The part of an operator that works on one shard. Made on the driver, pickled to the tasks.

    Attributes:
        output: Arrow schema of what it emits.
        schema: fingerprint of how it encodes keys and values, for `StoreIdentity.schema`.
    """

    @property
    def output(self) -> pa.Schema: ...
    @property
    def schema(self) -> str: ...
    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """All rows of this shard in this micro-batch, in; output rows, out; state changed on the way.

        Runs also when there are no rows: timers fire and windows close by time alone.
        """
