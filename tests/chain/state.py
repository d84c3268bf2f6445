"""The stateful part of the chain model: the operator's real decisions, with a dict as the database.

`state.operator.shard.open_shard` and `state.changelog.restore` are the real code. The model replaces their
clients: the committed offset and the changelog come from the model cluster, the database is a dict with
pending changes of task attempts, and every executor has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.reader import LogEnds, Pulled, Records
from kafka_eos_source.protocol.packing import pack_packets
from kafka_eos_source.state.changelog.recovery import Restored, WipeNeeded
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.topic import ChangelogTopic
from kafka_eos_source.state.model import BATCH_PREFIX, BatchRecord, PendingBatch, StoreIdentity
from tests.chain.cluster import Cluster, Process
from tests.chain.product import Deadline, GroupOffset, TopicPartition, shard_module

SHARDS = 2


@dataclass
class Disk:
    """The local data of one shard on one executor."""

    changelog: str
    topic_id: str
    data: dict[bytes, bytes] = field(default_factory=dict)
    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: list[tuple[PendingBatch, dict[bytes, bytes]]] = field(default_factory=list)


class ModelStore:
    """The part of `TransactionalStateStore` that `open_shard` and `restore` use."""

    restoring = False
    last_commit_ms = 0

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.staged: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        return self.staged.get(key, self.disk.data.get(key))

    def put(self, key: bytes, value: bytes) -> None:
        self.staged[key] = value

    def last_batch(self) -> BatchRecord | None:
        return self.disk.batch

    def next_offset(self, tp: TopicPartition) -> int | None:
        return self.disk.next_offset

    def pending(self) -> Collection[PendingBatch]:
        return [each for each, _ in self.disk.pending]

    def promote(self, record: BatchRecord, offsets: Mapping[TopicPartition, int]) -> None:
        for each, changes in self.disk.pending:
            if each.record.task_attempt_id == record.task_attempt_id and each.base == self.disk.batch:
                self.disk.data.update(changes)
                self.disk.pending = []
                self.commit(offsets, record)
                return
        raise AssertionError(f"promoted {record}, and nothing of it is pending")

    def commit(self, offsets: Mapping[TopicPartition, int], batch: BatchRecord | None = None) -> None:
        (self.disk.next_offset,) = offsets.values()
        self.disk.batch = batch

    def drop_pending(self) -> None:
        self.disk.pending = []

    def restore_chunk(
        self,
        keys: pa.Array,
        values: pa.Array,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        self.disk.data.update(zip(keys.to_pylist(), values.to_pylist(), strict=True))
        (self.disk.next_offset,) = changelog_offsets.values()
        self.disk.batch = batch or self.disk.batch
        self.restoring = done is False

    def persist_pending(self, record: BatchRecord) -> list[pa.RecordBatch]:
        staged, self.staged = self.staged, {}
        self.disk.pending.append((PendingBatch(record, self.disk.batch, 0), staged))
        if not staged:
            return []
        columns = [pa.array(list(staged), pa.binary()), pa.array(staged.values(), pa.binary())]
        return [pa.RecordBatch.from_arrays(columns, ["key", "value"])]

    def staged_bytes(self) -> tuple[int, int]:
        return 0, 0

    def approximate_committed_size(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        """Does nothing, because a dict needs no closing."""


Disks = dict[tuple[int, str, str, int], Disk]


@dataclass
class StateWorld:
    """The executors and their disks.

    Attributes:
        process: returns the driver whose tasks run.
        true_ms: returns the time, ms since the epoch.
        host: the executor that runs the tasks.
        ahead_ms: by how much the clock of each executor is ahead.
    """

    process: Callable[[], Process]
    true_ms: Callable[[], int]
    disks: Disks = field(default_factory=dict)
    host: int = 0
    ahead_ms: dict[int, int] = field(default_factory=dict)

    def seams(self) -> dict[str, Any]:
        """Returns replacements for the names that the operator imports."""
        return {
            "changelog_client": lambda _kafka: nullcontext(object()),
            "CommittedShard": self._committed_shard,
            "end_open_transaction": lambda _kafka, transactional_id, _deadline: (
                self.process().cluster.initialise(transactional_id)
            ),
            "ChangelogReader": lambda _consumer, tp: ModelChangelog(self, tp),
            "open_restored": self._open_restored,
            "restore": self._restore,
        }

    def now_ms(self) -> int:
        """What the clock of the executor shows, ms since the epoch."""
        return self.true_ms() + self.ahead_ms.get(self.host, 0)

    def changelog(self, name: str) -> ChangelogTopic:
        cluster = self.process().cluster
        topic = cluster.topics.get(name) or cluster.create(name, SHARDS)
        return ChangelogTopic(name, topic.topic_id, SHARDS, 86_400_000)

    def _committed_shard(
        self,
        _consumer: object,
        group: str,
        tp: TopicPartition,
        *,
        end_transaction: Callable[[Deadline], None],
    ) -> _Committed:
        return _Committed(self, group, tp, end_transaction)

    def _open_restored(
        self,
        _path: object,
        identity: StoreIdentity,
        _config: object,
        bring: Callable[[ModelStore], Restored | WipeNeeded],
        _progress: object,
        _install_snapshot: object,
    ) -> tuple[ModelStore, Restored]:
        key = (self.host, identity.application_id, identity.store, identity.shard)
        for _ in range(2):
            disk = self.disks.get(key)
            if disk is None or disk.topic_id != identity.topic_id:
                disk = self.disks[key] = Disk(identity.changelog_topic, identity.topic_id)
            store = ModelStore(disk)
            outcome = bring(store)
            if isinstance(outcome, Restored):
                return store, outcome
            del self.disks[key]
        raise AssertionError(f"a store was wiped twice: {outcome}")

    def _restore(self, *args: Any, **kwargs: Any) -> Restored | WipeNeeded:
        self.process().reach("restore")
        return restore(*args, **kwargs, clock_ms=self.now_ms)


class ModelChangelog:
    """The `state.changelog.restore.ChangelogSource` of the model. Nothing in its log is uncommitted."""

    last_complaint = ""

    def __init__(self, world: StateWorld, tp: TopicPartition) -> None:
        self._topic = world.process().cluster.topics[tp.topic]
        self._log = self._topic.logs[tp.partition]
        self._first = self._topic.starts[tp.partition]
        self._at = 0

    def start(self, position: int) -> None:
        self._at = position

    def stop(self) -> None:
        """Does nothing: the model fetches only what `take` returns."""

    def take(self, wait_seconds: float, end: int) -> Pulled:
        if self._at < self._first:
            return Pulled(out_of_range=True)
        found = [(at, each) for at, each in enumerate(self._log[self._at : end], self._at) if each]
        self._at = min(end, len(self._log))
        keys = pa.array([each.key for _, each in found], pa.binary())
        values = pa.array([each.value for _, each in found], pa.binary())
        offsets = np.array([at for at, _ in found], np.int64)
        log_end = len(self._log) if self._at == len(self._log) else None
        return Pulled(Records(offsets, keys, values, self._at), log_end)

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        return self._first, len(self._log)

    def ends(self) -> LogEnds:
        return LogEnds(self._first, len(self._log), len(self._log))


class _Committed:
    def __init__(
        self, world: StateWorld, group: str, tp: TopicPartition, end_transaction: Callable[[Deadline], None]
    ) -> None:
        self._world, self._group, self._tp, self._end_transaction = world, group, tp, end_transaction

    def offset(self, deadline: Deadline) -> GroupOffset | None:
        self._world.process().reach("shard_offset")
        return self.offsets((), deadline).get(self._tp)

    def offsets(
        self, others: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        cluster = self._world.process().cluster
        if cluster.is_unstable(self._group) is not None:
            self._end_transaction(deadline)
        if cluster.is_unstable(self._group) is not None:
            raise UnavailableError("an open transaction of another query holds the offset")
        found = cluster.offsets(self._group, self._world.process())
        return {tp: found[tp] for tp in (self._tp, *others) if tp in found}


def count_rows(
    task: shard_module.ShardTask, rows: Collection[tuple[bytes, bytes]]
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Runs one shard for one micro-batch. The operator counts records by key.

    Returns:
        The output rows, each with its number within its key, and the packets of state changes.
    """
    with shard_module.open_shard(task) as opened:
        if not isinstance(opened, shard_module.OpenShard):
            return [], [each.to_pybytes() for each in pack_packets(opened, ())]
        output = []
        for key, value in rows:
            number = int(opened.store.get(b"\x01" + key) or b"0") + 1
            opened.store.put(b"\x01" + key, b"%d" % number)
            output.append((key, b"%s#%d" % (value, number)))
        report, changes = opened.persist_pending()
    return output, [each.to_pybytes() for each in pack_packets(report, changes)]


def changelog_state(cluster: Cluster, topic: str) -> dict[bytes, int]:
    """Returns the state that the committed changelog holds."""
    state: dict[bytes, int] = {}
    for log in cluster.topics[topic].logs:
        for record in log:
            if record is not None and record.key is not None and not record.key.startswith(BATCH_PREFIX):
                assert record.value is not None
                state[record.key[1:]] = int(record.value)
    return state


@contextmanager
def on_host(world: StateWorld, host: int) -> Iterator[None]:
    """Runs the next tasks on this executor."""
    before, world.host = world.host, host
    try:
        yield
    finally:
        world.host = before
