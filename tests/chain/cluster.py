"""An in-memory Kafka cluster for the chain model: topics, groups and transactional ids.

The model follows the rules of Kafka on which exactly-once depends: a transactional id has one owner at a
time, a transaction becomes visible as a whole, a recreated topic is another topic, and the offsets of a group
disappear together with their topic. `Process` counts every call that a driver makes, so that at each of them
a schedule can kill the driver, let the call fail, or let something else happen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import pyarrow as pa

from kafka_eos_source.errors import FencedError, KafkaEosError, OutcomeUnknownError, UnavailableError
from kafka_eos_source.model import Epochs, LogEnd
from kafka_eos_source.state.changelog.topic import Tail
from kafka_eos_source.state.model import BATCH_PREFIX, Owner
from tests.chain.product import Deadline, GroupOffset, TopicPartition, is_ours

#: The cluster of all queries that do not run in another region.
CLUSTER_ID = "model-cluster"
#: The broker's ``offsets.retention.minutes``.
RETENTION_MS = 7 * 24 * 3_600_000


class Killed(BaseException):
    """The driver process died. Nothing that its code still does has any effect."""


class Record(NamedTuple):
    """One record of a topic."""

    key: bytes | None
    value: bytes | None


@dataclass
class Interruption:
    """An event that happens at one call of a driver.

    Attributes:
        at: the number of the call, counted from the start of the batch, or its name (``commit:after``).
        action: the event; it may raise.
    """

    at: int | str
    action: Callable[[], None]


@dataclass
class Process:
    """One driver process. Its pooled commit workers keep their producers between batches.

    Attributes:
        cluster: the brokers that it talks to.
        group: the consumer group of its query, which tells the oracle whose records it writes.
        stale: number of transactions that the next answer about committed offsets lacks, because it comes
            from a group coordinator that was cut off.
    """

    name: str
    cluster: Cluster
    interruptions: list[Interruption] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    dead: bool = False
    group: str = ""
    stale: int = 0
    workers: dict[int, dict[str, object]] = field(default_factory=dict)

    def reach(self, call: str) -> None:
        """Records a call of this process, and runs the events that the schedule plans for it."""
        if self.dead:
            raise Killed
        self.calls.append(call)
        for each in list(self.interruptions):
            if each.at in (call, len(self.calls)):
                self.interruptions.remove(each)
                each.action()
        if self.dead:
            raise Killed

    def kill(self) -> None:
        self.dead = True
        raise Killed


@dataclass
class Topic:
    """One incarnation of a topic. None in a log is an offset without a record, such as a control record.

    Attributes:
        starts: first offset that each log still has. A log keeps the records before it for the oracle.
        epochs: number and start offset of each leader epoch that each log has records of.
    """

    name: str
    topic_id: str
    logs: list[list[Record | None]]
    starts: list[int] = field(default_factory=list)
    epochs: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = [0] * len(self.logs)
        self.epochs = [[(0, 0)] for _ in self.logs]

    def epoch_at(self, partition: int, offset: int) -> int:
        """Returns the leader epoch in which the record at this offset was written."""
        return max(epoch for epoch, start in self.epochs[partition] if start <= offset)

    def end_of_epoch(self, partition: int, epoch: int) -> tuple[int, int]:
        """Returns the newest leader epoch up to ``epoch``, and its end: Kafka's OffsetForLeaderEpoch."""
        known = self.epochs[partition]
        later = [start for number, start in known if number > epoch]
        return max(number for number, _ in known if number <= epoch), min(
            later, default=len(self.logs[partition])
        )


@dataclass
class Transaction:
    """What one owner has sent and not yet committed.

    Attributes:
        seen_ids: ids of topics that the owner read after it had sent records. If a topic is deleted after
            that, it could as well have been deleted after the commit, so its records count as written.
    """

    process: Process
    rows: list[tuple[str, TopicPartition, Record]] = field(default_factory=list)
    offsets: dict[tuple[str, TopicPartition], tuple[str, GroupOffset]] = field(default_factory=dict)
    seen_ids: set[str] = field(default_factory=set)


def _effect(topic: str, record: Record) -> str:
    """Returns the effect that a record of an output topic shows: that of one source record; "" if of none."""
    if record.value is None or topic.endswith("-changelog"):
        return ""
    return record.value.decode().partition("#")[0]


class Written(NamedTuple):
    """A record that became visible to readers of committed data."""

    transactional_id: str
    group: str
    topic: str
    record: Record
    effect: str


@dataclass
class DirectWrite:
    """A record that a task wrote without a transaction (``at_least_once``).

    Attributes:
        settled: whether Spark logged the batch as committed; None as long as it has not. Until then the
            guarantee allows that the record is written again, and False means that it was, in a transaction.
    """

    group: str
    topic: str
    record: Record
    effect: str
    settled: bool | None = None


class Backwards(NamedTuple):
    """A commit of this package that moved an offset back."""

    group: str
    tp: TopicPartition
    before: int
    after: int


class Cluster:
    """The brokers of one cluster.

    Attributes:
        members: the live members of each group.
    """

    def __init__(self, cluster_id: str = CLUSTER_ID) -> None:
        self.cluster_id = cluster_id
        self.members: dict[str, set[str]] = {}
        self.direct: list[DirectWrite] = []
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, dict[TopicPartition, GroupOffset]] = {}
        self.epochs: dict[str, int] = {}
        self.open: dict[str, Transaction] = {}
        self.written: list[Written] = []
        self.backwards: list[Backwards] = []
        self.history: list[dict[str, dict[TopicPartition, GroupOffset]]] = []
        self._ids = count()
        self.create("__consumer_offsets", 1)

    # -- topics, as an administrator and other producers see them

    def create(self, name: str, partitions: int) -> Topic:
        topic_id = f"{name}.{next(self._ids)}"
        if self.cluster_id != CLUSTER_ID:
            topic_id = f"{self.cluster_id}.{topic_id}"
        topic = self.topics[name] = Topic(name, topic_id, [[] for _ in range(partitions)])
        return topic

    def delete(self, name: str) -> None:
        del self.topics[name]
        for offsets in self.groups.values():
            for tp in [each for each in offsets if each.topic == name]:
                del offsets[tp]

    def recreate(self, name: str) -> Topic:
        partitions = len(self.topics[name].logs)
        self.delete(name)
        return self.create(name, partitions)

    def append(self, tp: TopicPartition, records: Iterable[Record | None]) -> None:
        self.topics[tp.topic].logs[tp.partition] += records

    def truncate(self, tp: TopicPartition, end: int) -> None:
        """Elects a leader whose log ends earlier: an unclean election, or a broker that lost its disk."""
        topic = self.topics[tp.topic]
        epochs = topic.epochs[tp.partition]
        del topic.logs[tp.partition][end:]
        # an epoch whose records are gone is forgotten, but its number is never used again
        topic.epochs[tp.partition] = [each for each in epochs if each[1] < max(end, 1)]
        topic.epochs[tp.partition].append((epochs[-1][0] + 1, end))

    def delete_records(self, tp: TopicPartition, before: int) -> None:
        """Removes the beginning of a log, as ``kafka-delete-records`` and ``retention.ms`` do."""
        topic = self.topics[tp.topic]
        topic.starts[tp.partition] = max(topic.starts[tp.partition], before)

    def partitions(self, topics: Iterable[str]) -> tuple[TopicPartition, ...]:
        return tuple(
            sorted(TopicPartition(name, at) for name in topics for at in range(len(self.topics[name].logs)))
        )

    def end(self, tp: TopicPartition) -> int:
        return len(self.topics[tp.topic].logs[tp.partition])

    # -- transactions

    def initialise(self, transactional_id: str) -> int:
        """Aborts the open transaction of a transactional id, and returns a new epoch."""
        self.open.pop(transactional_id, None)
        self.epochs[transactional_id] = self.epochs.get(transactional_id, 0) + 1
        return self.epochs[transactional_id]

    def commit(self, transactional_id: str) -> None:
        transaction = self.open.pop(transactional_id, None)
        if transaction is None:
            return
        group = next((group for group, _ in transaction.offsets), "")
        touched = set()
        for topic_id, tp, record in transaction.rows:
            topic = self.topics.get(tp.topic)
            if topic is not None and topic.topic_id == topic_id:
                topic.logs[tp.partition].append(record)
                touched.add(tp)
            elif topic_id not in transaction.seen_ids:
                continue
            self.written.append(Written(transactional_id, group, tp.topic, record, _effect(tp.topic, record)))
        for tp in touched:
            self.append(tp, [None])  # the control record
        self.history.append({name: dict(offsets) for name, offsets in self.groups.items()})
        for (group, tp), (topic_id, offset) in transaction.offsets.items():
            topic = self.topics.get(tp.topic)
            if topic is not None and topic.topic_id == topic_id:
                before = self.groups.setdefault(group, {}).get(tp)
                # an offset that another program moved may be overwritten, because the checkpoint is right
                if before is not None and is_ours(before.metadata) and before.offset > offset.offset:
                    self.backwards.append(Backwards(group, tp, before.offset, offset.offset))
                self.groups[group][tp] = offset

    def offsets(self, group: str, process: Process) -> dict[TopicPartition, GroupOffset]:
        """Returns the answer of a coordinator to this process; it may be outdated (`Process.stale`)."""
        behind, process.stale = process.stale, 0
        if 0 < behind <= len(self.history):
            return dict(self.history[-behind].get(group, {}))
        return dict(self.groups.get(group, {}))

    def is_unstable(self, group: str) -> str | None:
        """Returns the id of an open transaction that will change offsets of the group, if there is one."""
        for transactional_id, transaction in self.open.items():
            if any(each == group for each, _ in transaction.offsets):
                return transactional_id
        return None

    def ours(self, group: str) -> dict[TopicPartition, int]:
        """Returns the offsets that transactions of this package committed."""
        return {tp: each.offset for tp, each in self.groups.get(group, {}).items() if is_ours(each.metadata)}


class ModelKafka:
    """The `commit.request.Clients` of one driver process in the model."""

    def __init__(self, process: Process) -> None:
        self.cluster = process.cluster
        self.cluster_id = process.cluster.cluster_id
        self.process = process

    def producer(self, transactional_id: str) -> ModelProducer:
        return ModelProducer(self.cluster, self.process, transactional_id)

    def changelog_tail(self, tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
        self.process.reach("changelog_tail")
        log = self.cluster.topics[tp.topic].logs[tp.partition]
        records = [each for each in log[start:] if each is not None]
        keys = {each.key for each in records if each.key is not None and each.key.startswith(BATCH_PREFIX)}
        return Tail(len(log), len(records), frozenset(map(Owner.of_key, keys)))

    def group_members(self, group_id: str, deadline: Deadline) -> list[str]:
        self.process.reach("group_members")
        return sorted(self.cluster.members.get(group_id, ()))

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.process.reach("committed_now")
        return dict(self.cluster.groups.get(group_id, {}))

    proved_offsets = committed_now

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.process.reach("group_offsets")
        if (rival := self.cluster.is_unstable(group_id)) is not None:
            raise UnavailableError(f"an open transaction of {rival} holds offsets of group {group_id}")
        return self.cluster.offsets(group_id, self.process)


class ModelProducer:
    """The `commit.request.Producer` of the model."""

    def __init__(self, cluster: Cluster, process: Process, transactional_id: str) -> None:
        self._cluster = cluster
        self._process = process
        self._id = transactional_id
        self._epoch: int | None = None
        self._asked_ids: tuple[list[str], Mapping[str, str]] = [], {}
        self.enqueued = 0

    @property
    def queued(self) -> int:
        return 0

    @property
    def complaint(self) -> str:
        return ""

    def init(self, deadline: Deadline) -> None:
        self._process.reach("init")
        self._epoch = self._cluster.initialise(self._id)
        self._process.reach("init:after")

    def is_clean(self) -> bool:
        return True

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        self._process.reach("cluster")
        return self._cluster.cluster_id, {
            name: len(topic.logs) for name, topic in self._cluster.topics.items()
        }

    def ask_topic_ids(self, topics: Collection[str]) -> None:
        self._asked_ids = sorted(topics), self._ids(topics)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        self._process.reach("topic_ids")
        (asked, found), self._asked_ids = self._asked_ids, ([], {})
        return found if asked == sorted(topics) else self._ids(topics)

    def _ids(self, topics: Collection[str]) -> Mapping[str, str]:
        known = self._cluster.topics
        found = {name: known[name].topic_id for name in topics if name in known}
        if self._id in self._cluster.open:
            self._cluster.open[self._id].seen_ids = set(found.values())
        return found

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        self._process.reach("check_partitions")
        missing = sorted(set(highest) - set(self._cluster.topics))
        if missing:
            raise UnavailableError(f"no topic {missing}")

    def begin(self) -> None:
        self._process.reach("begin")
        self.enqueued = 0

    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline, _partitions: int = 0) -> None:
        self._process.reach("send")
        transaction = self._transaction()
        for row in rows.to_pylist():
            name = topic or row["topic"]
            there = self._cluster.topics.get(name)
            if there is None:
                raise UnavailableError(f"no topic {name}")
            at = row.get("partition")
            at = sum(row["key"] or b"") % len(there.logs) if at is None else at
            tp = TopicPartition(name, at)
            transaction.rows.append((there.topic_id, tp, Record(row["key"], row["value"])))
            self.enqueued += 1
        self._process.reach("send:after")

    def flush(self, deadline: Deadline) -> None:
        self._process.reach("flush")
        self._transaction()
        self._process.reach("flush:after")

    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        self._process.reach("ends")
        mine = self._transaction().rows
        return {tp: self._cluster.end(tp) + sum(each == tp for _, each, _ in mine) for tp in partitions}

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        self._process.reach("send_offsets")
        transaction = self._transaction()
        for each in offsets:
            there = self._cluster.topics.get(each.tp.topic)
            if there is None:
                raise UnavailableError(f"no topic {each.tp.topic}")
            transaction.offsets[group_id, each.tp] = (there.topic_id, each)
        self._process.reach("send_offsets:after")

    def commit(self, deadline: Deadline) -> None:
        try:
            self._process.reach("commit")
            self._fence()
            self._cluster.commit(self._id)
            self._process.reach("commit:after")
        except KafkaEosError as error:
            raise OutcomeUnknownError("no answer to the commit") from error

    def abort(self, deadline: Deadline) -> None:
        if not self._process.dead and self._epoch == self._cluster.epochs.get(self._id):
            self._cluster.open.pop(self._id, None)

    def close(self) -> None:
        """Does nothing: an open transaction stays until the next owner initialises."""

    def _transaction(self) -> Transaction:
        self._fence()
        return self._cluster.open.setdefault(self._id, Transaction(self._process))

    def _fence(self) -> None:
        if self._epoch != self._cluster.epochs.get(self._id):
            raise FencedError("a newer owner of the transactional id initialised")


class ModelDirectProducer:
    """The `kafka.producer.RecordProducer` of the model, for ``at_least_once``.

    Args:
        current: returns the driver whose task writes. Tasks of several drivers share a producer.
    """

    def __init__(self, current: Callable[[], Process]) -> None:
        self._current = current
        self.enqueued = 0

    def begin_count(self) -> None:
        self.enqueued = 0

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        self._current().reach("check_partitions")

    def send(self, rows: pa.RecordBatch, topic: str, deadline: Deadline) -> None:
        process = self._current()
        process.reach("send")
        cluster = process.cluster
        for row in rows.to_pylist():
            record = Record(row["key"], row["value"])
            at = sum(row["key"] or b"") % len(cluster.topics[topic].logs)
            cluster.append(TopicPartition(topic, at), [record])
            cluster.direct.append(DirectWrite(process.group, topic, record, _effect(topic, record)))
            self.enqueued += 1
        process.reach("send:after")

    def flush(self, deadline: Deadline) -> None:
        self._current().reach("flush")

    def close(self) -> None:
        """Does nothing: a producer without a transaction leaves nothing open."""


class ModelTopics(NamedTuple):
    """The `kafka.admin.Topics` of the model."""

    partitions: tuple[TopicPartition, ...]
    ids: Mapping[str, str]
    cluster_id: str | None


class ModelAdmin:
    """The `kafka.admin.SourceAdmin` of the model."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def new_query(self) -> None:
        pass

    def named(self, topics: Iterable[str]) -> ModelTopics:
        wanted = sorted(set(topics))
        missing = [name for name in wanted if name not in self._cluster.topics]
        if missing:
            raise UnavailableError(f"no topic {missing}")
        ids = {name: self._cluster.topics[name].topic_id for name in wanted}
        return ModelTopics(self._cluster.partitions(wanted), ids, self._cluster.cluster_id)

    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self._cluster.topics[tp.topic].starts[tp.partition] for tp in partitions}

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        newest = {tp: self._cluster.topics[tp.topic].epochs[tp.partition][-1][0] for tp in partitions}
        return {tp: LogEnd(self._cluster.end(tp), epoch) for tp, epoch in newest.items()}

    def epoch_ends(self, epochs: Epochs, leaders: Epochs) -> Mapping[TopicPartition, int]:
        topics = self._cluster.topics
        return {tp: topics[tp.topic].end_of_epoch(tp.partition, epoch)[1] for tp, epoch in epochs.items()}

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self._cluster.end(tp) for tp in partitions}

    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {}

    def committed(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, GroupOffset]:
        rival = self._cluster.is_unstable(group_id)
        if rival is not None and not self._cluster.open[rival].process.dead:
            raise UnavailableError(f"an open transaction of {rival} holds offsets of group {group_id}")
        if rival is not None:
            self._cluster.initialise(rival)  # the client waits until the transaction times out
        found = self._cluster.groups.get(group_id, {})
        return {tp: each for tp, each in found.items() if tp in partitions}

    def all_committed(self, group_id: str) -> Mapping[TopicPartition, GroupOffset]:
        return self._cluster.groups.get(group_id, {})

    def existing_topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        there = self._cluster.topics
        return {name: there[name].topic_id for name in topics if name in there}

    def offsets_retention_ms(self) -> int:
        return RETENTION_MS

    def matching(self, pattern: str) -> ModelTopics:
        raise NotImplementedError


def records(topic: Topic) -> Iterator[tuple[TopicPartition, int, Record]]:
    """Yields every record of a topic with its partition and offset."""
    for at, log in enumerate(topic.logs):
        for offset, record in enumerate(log):
            if record is not None:
                yield TopicPartition(topic.name, at), offset, record
