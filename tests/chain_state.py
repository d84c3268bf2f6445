"""The stateful part of the chain model: the operator's real decisions, with a dict as the database.

`state.operator.shard.open_shard` is the real code. The model replaces its clients: the committed offset and
the changelog come from the model cluster, and the database is a dict with pending changes of task attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from chain_cluster import Cluster, Process, Record
from chain_product import Deadline, GroupOffset, TopicPartition, shard_module

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.protocol.packet import pack
from kafka_eos_source.state.batch_record import decode_batch
from kafka_eos_source.state.changelog.restore import Restored
from kafka_eos_source.state.changelog.restore_plan import Reason, WipeNeeded
from kafka_eos_source.state.changelog.topic import ChangelogTopic
from kafka_eos_source.state.layout import BATCH_PREFIX
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity

SHARDS = 2


@dataclass
class Disk:
    """The local data of one shard on one executor."""

    topic_id: str
    data: dict[bytes, bytes] = field(default_factory=dict)
    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: list[tuple[PendingBatch, dict[bytes, bytes]]] = field(default_factory=list)


class ModelStore:
    """The part of `TransactionalStateStore` that `open_shard` uses."""

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
        host: the executor that runs the tasks.
    """

    cluster: Cluster
    process: Callable[[], Process]
    disks: Disks = field(default_factory=dict)
    host: int = 0

    def seams(self) -> dict[str, Any]:
        """Returns replacements for the names that the operator imports."""
        return {
            "changelog_client": lambda _kafka, _group: nullcontext(object()),
            "CommittedShard": self._committed_shard,
            "end_open_transaction": lambda _kafka, transactional_id, _deadline: self.cluster.initialise(
                transactional_id
            ),
            "open_restored": self._open_restored,
            "restore": self._restore,
        }

    def changelog(self, name: str) -> ChangelogTopic:
        topic = self.cluster.topics.get(name) or self.cluster.create(name, SHARDS)
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
                disk = self.disks[key] = Disk(identity.topic_id)
            store = ModelStore(disk)
            outcome = bring(store)
            if isinstance(outcome, Restored):
                return store, outcome
            del self.disks[key]
        raise AssertionError(f"a store was wiped twice: {outcome}")

    def _restore(
        self, store: ModelStore, tp: TopicPartition, until: int | None, *_: object, **__: object
    ) -> Restored | WipeNeeded:
        self.process().reach("restore")
        disk = store.disk
        end = self.cluster.end(tp) if until is None else until
        start = disk.next_offset or 0
        if start > self.cluster.end(tp) or start > end:
            return WipeNeeded(Reason.OUT_OF_RANGE, f"{start} > {end}")
        if disk.batch is not None and disk.next_offset is None:
            return WipeNeeded(Reason.NO_OFFSET, "no offset")
        read = [each for each in self.cluster.topics[tp.topic].logs[tp.partition][start:end] if each]
        for record in read:
            self._apply(disk, record)
        disk.next_offset = end
        return Restored(len(read), end - start - len(read), Reason.CATCH_UP, 0.0)

    @staticmethod
    def _apply(disk: Disk, record: Record) -> None:
        assert record.key is not None
        assert record.value is not None
        if record.key.startswith(BATCH_PREFIX):
            disk.batch = decode_batch(record.value)
        else:
            disk.data[record.key] = record.value


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
        if self._world.cluster.is_unstable(self._group) is not None:
            self._end_transaction(deadline)
        if self._world.cluster.is_unstable(self._group) is not None:
            raise UnavailableError("an open transaction of another query holds the offset")
        found = self._world.cluster.offsets(self._group, self._world.process())
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
            return [], [each.to_pybytes() for each in pack(opened, ())]
        output = []
        for key, value in rows:
            number = int(opened.store.get(b"\x01" + key) or b"0") + 1
            opened.store.put(b"\x01" + key, b"%d" % number)
            output.append((key, b"%s#%d" % (value, number)))
        report, changes = opened.persist_pending()
    return output, [each.to_pybytes() for each in pack(report, changes)]


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
