"""An in-memory model of the parts of Kafka that a commit uses: epochs, transactions and group offsets.

A test can inject a fault at any call, before the call takes effect or after it (a lost answer).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.request import CommitRequest, ProducerSession, Restage, SourceRange
from kafka_eos_source.commit.two_phase import Sinks
from kafka_eos_source.commit.verdict import Batch
from kafka_eos_source.errors import FencedError, KafkaEosError, OutcomeUnknownError
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import Token, TokenRecord, newest
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.topic import Tail
from kafka_eos_source.state.model import Owner

CLUSTER_ID = "model-cluster"
TOKENS = "tokens"
IN = TopicPartition("in", 0)
OUT = TopicPartition("out", 0)
ROWS_PER_BATCH = 5


@dataclass
class Fault:
    """Raises ``error`` at the next call named ``call``; a `BaseException` kills the process."""

    call: str
    error: BaseException
    after: bool = False


@dataclass
class ModelBroker:
    """A cluster with a single transactional id."""

    topics: dict[str, int] = field(default_factory=lambda: {"in": 2, "out": 2, "__consumer_offsets": 5})
    ids: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    log: list[str] = field(default_factory=list)
    group: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    open_epoch: int | None = None
    open_rows: list[str] = field(default_factory=list)
    open_offsets: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    records: dict[str, TokenRecord] = field(default_factory=dict)
    open_records: dict[str, TokenRecord] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    clean: bool = True
    lose_rows: int = 0
    lose_records: int = 0
    tail_records: int = 0
    tail_owners: frozenset[Owner] = frozenset()
    dead: bool = False
    members: list[str] = field(default_factory=list)

    # commit.request.Clients
    def producer(self, transactional_id: str) -> ModelProducer:
        return ModelProducer(self)

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        self.reach("group_members", after=False)
        return self.members

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.reach("committed_now", after=False)
        return dict(self.group)

    proved_offsets = committed_now

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        assert self.open_epoch is None, "the token was read while a transaction was open"
        self.reach("group_offsets", after=False)
        return dict(self.group)

    def changelog_tail(self, tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
        self.reach("changelog_tail", after=False)
        committed = sum(row.startswith(f"{tp}/") for row in self.log)
        return Tail(committed, self.tail_records, self.tail_owners)

    def token_records(self, name: str, deadline: Deadline) -> ModelTokens:
        assert name == TOKENS
        self.reach("token_records", after=False)
        return ModelTokens(self)

    def discard_open_transaction(self) -> None:
        self.open_epoch, self.open_rows, self.open_offsets = None, [], {}
        self.open_records = {}

    def reach(self, call: str, *, after: bool) -> None:
        if not after:
            self.calls.append(call)
        for fault in self.faults:
            if fault.call == call and fault.after == after:
                self.faults.remove(fault)
                self.dead = not isinstance(fault.error, Exception)
                raise fault.error


@dataclass
class ModelTokens:
    """The token topic, as the commit uses it."""

    broker: ModelBroker
    name: str = TOKENS

    @property
    def topic_id(self) -> str:
        return self.broker.ids.get(TOKENS, f"id-{TOKENS}")

    def partition_of(self, application_id: str) -> int:
        return 0

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        assert self.broker.open_epoch is None, "the record was read while a transaction was open"
        self.broker.reach("last_record" if certain else "quick_record", after=False)
        return self.broker.records.get(application_id)


class ModelProducer:
    def __init__(self, broker: ModelBroker) -> None:
        self.broker = broker
        self.epoch: int | None = None
        self._asked_ids: dict[str, str] = {}
        self.enqueued = 0
        self.closed = False

    @property
    def queued(self) -> int:
        return self.enqueued

    @property
    def complaint(self) -> str:
        return "the model complains"

    def init(self, deadline: Deadline) -> None:
        self._reach("init")
        self.broker.epoch += 1
        self.epoch = self.broker.epoch
        self.broker.discard_open_transaction()
        self.broker.reach("init", after=True)

    def is_clean(self) -> bool:
        return self.broker.clean

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        return CLUSTER_ID, dict(self.broker.topics)

    def ask_topic_ids(self, topics: Collection[str]) -> None:
        self._asked_ids = self._ids(topics)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        self._reach("topic_ids")
        asked, self._asked_ids = self._asked_ids, {}
        return asked if asked.keys() == set(topics) else self._ids(topics)

    def _ids(self, topics: Collection[str]) -> dict[str, str]:
        return {topic: self.broker.ids.get(topic, f"id-{topic}") for topic in topics}

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        self._reach("check_partitions")

    def begin(self) -> None:
        self._reach("begin")
        self.enqueued = 0

    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline, _partitions: int = 0) -> None:
        self._reach("send")
        self._fence()
        self.broker.open_epoch = self.epoch
        if topic == TOKENS:
            kept = rows.num_rows - self.broker.lose_records
            self.broker.lose_records = 0
            self.enqueued += kept
            for row in rows.to_pylist()[:kept]:
                record = TokenRecord.decode(row["key"], row["value"])
                self.broker.open_records[record.token.application_id] = record
            return
        values = rows.column("value").to_pylist()
        kept = values[: len(values) - self.broker.lose_rows]
        self.broker.lose_rows = 0
        self.broker.open_rows += kept
        self.enqueued += len(kept)
        self.broker.reach("send", after=True)

    def flush(self, deadline: Deadline) -> None:
        self._reach("flush")

    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        self._reach("ends")
        written = [*self.broker.log, *self.broker.open_rows]
        return {tp: sum(row.startswith(f"{tp}/") for row in written) for tp in partitions}

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        self._reach("send_offsets")
        self._fence()
        self.broker.open_epoch = self.epoch
        self.broker.open_offsets.update({each.tp: each for each in offsets})
        self.broker.reach("send_offsets", after=True)

    def commit(self, deadline: Deadline) -> None:
        try:
            self._reach("commit")
            self._fence()
        except KafkaEosError as error:
            raise OutcomeUnknownError("no answer") from error
        self.broker.log += self.broker.open_rows
        self.broker.group.update(self.broker.open_offsets)
        self.broker.records.update(self.broker.open_records)
        self.broker.discard_open_transaction()
        try:
            self.broker.reach("commit", after=True)
        except KafkaEosError as error:
            raise OutcomeUnknownError("no answer") from error

    def abort(self, deadline: Deadline) -> None:
        if self.broker.dead:  # nothing of a killed process reaches the broker
            return
        self.broker.calls.append("abort")
        if self.epoch == self.broker.epoch:
            self.broker.discard_open_transaction()

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    def _reach(self, call: str) -> None:
        assert not self.closed, f"{call} on a closed producer"
        self.broker.reach(call, after=False)

    def _fence(self) -> None:
        if self.epoch != self.broker.epoch:
            raise FencedError("there is a newer owner")


def no_sleep(_seconds: float) -> None:
    """Takes the place of the pauses of a commit."""


class ModelRows:
    """Staged rows that are kept in memory."""

    sealed_partitions = 0

    def __init__(self, rows: Iterable[str], shards: Sequence[ShardReport] = ()) -> None:
        self._rows = list(rows)
        self.shards = shards
        self.rows = len(self._rows) + sum(shard.records + 1 for shard in shards if shard.records)
        self.topics: Mapping[str, int] = {"out": -1} if self._rows else {}

    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]:
        for shard in self.shards:
            if shard.records:
                changes = [f"{shard.tp}/{number}" for number in (*range(shard.records), "batch")]
                yield shard.tp, pa.record_batch({"value": pa.array(changes)})

    def batches(self) -> Iterable[pa.RecordBatch]:
        for start in range(0, len(self._rows), 2):
            yield pa.record_batch({"value": pa.array(self._rows[start : start + 2])})


# -- one query, whose batches the tests commit ----------------------------------------------------


class Killed(BaseException):
    """The driver was killed: no cleanup runs after this exception."""


def request(batch_id: int, run_id: str = "run-1", **batch: object) -> CommitRequest:
    fields: dict[str, object] = {
        "application_id": "app",
        "query_id": "query",
        "run_id": run_id,
        "batch_id": batch_id,
        "start": f"d{batch_id}",
        "end": f"d{batch_id + 1}",
        "promised": True,
    }
    return CommitRequest(
        batch=Batch(**{**fields, **batch}),  # type: ignore[arg-type]
        group_id="app",
        anchor=OUT,
        sources=(SourceRange({IN: 10 * (batch_id + 1)}, {IN: 10 * batch_id}, CLUSTER_ID),),
        topic="out",
    )


def broker_with_genesis(**fields: Any) -> ModelBroker:
    """Returns a broker with the genesis token of the query, which ends where batch 0 starts."""
    broker = ModelBroker(**fields)
    token = Token("app", "query", "run-1", 0, -1, "", "d0", 0)
    broker.group = {
        OUT: GroupOffset(OUT, 0, token.encode()),
        IN: GroupOffset(IN, 0, token.encode()),
    }
    return broker


def rows(batch_id: int) -> list[str]:
    return [f"{batch_id}:{row}" for row in range(ROWS_PER_BATCH)]


def run_commit(
    broker: ModelBroker,
    what: CommitRequest,
    staged: ModelRows,
    session: ProducerSession | None = None,
    *,
    seconds: float = 30,
    sinks: Sinks | None = None,
    restage: Restage | None = None,
) -> Result:
    """Commits a batch in a process that has kept this producer; None = in a new process."""
    kept, deadline = session or ProducerSession(), Deadline.after_seconds(seconds)
    return Commit(what, staged, broker, kept, deadline, sinks, restage=restage, sleep=no_sleep).run()


def commit(
    broker: ModelBroker, session: ProducerSession, batch_id: int, run_id: str = "run-1", seconds: float = 30
) -> Result:
    what, staged = request(batch_id, run_id), ModelRows(rows(batch_id))
    return run_commit(broker, what, staged, session, seconds=seconds)


def committed(broker: ModelBroker) -> Token:
    token = newest(broker.group.values())
    assert token is not None
    return token
