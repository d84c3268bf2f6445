"""Sends the record batches of a producer in order; keeps each until a broker has acknowledged it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kafka.protocol.producer import ProduceRequest

from kafka_eos_source.errors import (
    AbortableError,
    InvalidRecordError,
    KafkaEosError,
    RestartQueryError,
    StagedPartError,
)
from kafka_eos_source.kafka.batches import EncodedBatch, next_sequence
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.connection import MOST_IN_FLIGHT, Connection
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import is_transient
from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.messages import produce_body
from kafka_eos_source.kafka.transaction import (
    FORGOTTEN,
    ProducerId,
    TransactionRequests,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses

#: How long a topic's partition count is cached.
_VALID_SECONDS = 60.0
Owner: TypeAlias = TransactionRequests | ProducerId
#: Largest Produce request.
_REQUEST_BYTES = 1 << 20
#: A request of at least this size is sent without a look for another batch that fits. So is a request for
#: which `_MOST_TOO_LARGE` batches in turn did not fit.
_ENOUGH_BYTES, _MOST_TOO_LARGE = _REQUEST_BYTES * 3 // 4, 16
_TOPIC_CHECK_SECONDS = 10.0
_TICK_SECONDS = 0.5
_DUPLICATE = ErrorCode.DUPLICATE_SEQUENCE_NUMBER
_TOO_LARGE = frozenset({ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE})
#: Batch sizes by cluster and topic, where the topic's ``max.message.bytes`` is smaller than ``batch.size``.
_smaller_batches: dict[tuple[str, str], int] = {}


@dataclass(frozen=True)
class _Count:
    """The cached partition count of a topic."""

    partitions: int
    valid_until: Deadline


class PartitionCounts:
    """Partition counts of topics, each cached for a minute: asking takes almost as long as a small batch.

    Args:
        ask: returns the partition count of a topic, before a deadline.
    """

    def __init__(self, ask: Callable[[str, Deadline], int]) -> None:
        self._ask = ask
        self._counts: dict[str, _Count] = {}

    def last(self, topic: str) -> int | None:
        """Returns the count of the last check, however old; None if there was no check."""
        known = self._counts.get(topic)
        return None if known is None else known.partitions

    def clear(self) -> None:
        """Forgets all counts."""
        self._counts.clear()

    def check(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        """Checks that every topic exists and has enough partitions.

        librdkafka does not check this before it queues a record.

        Args:
            highest: topic → the highest partition that any record names; -1 = no record names one.
            deadline: for the brokers' answer.

        Raises:
            UnavailableError: if a topic does not exist.
            AuthorizationError: if the principal may not describe a topic.
            InvalidRecordError: if a record names a partition that its topic does not have.
        """
        for topic, partition in highest.items():
            known = self._counts.get(topic)
            if known is not None and partition < known.partitions and not known.valid_until.expired:
                continue
            count = self._ask(topic, deadline)
            self._counts[topic] = _Count(count, Deadline.after_seconds(_VALID_SECONDS))
            if partition >= count:
                raise InvalidRecordError(
                    f"column 'partition' has the value {partition}, but topic {topic!r} has {count} "
                    f"partitions (0 to {count - 1}).",
                    fix="correct the column, set it to null to let the partitioner choose, "
                    "or add partitions to the topic.",
                )


@dataclass
class _Partition:
    """What a producer writes to one partition.

    Attributes:
        producer_id, epoch: of the producer in this partition.
        waiting: batches without an acknowledgement, in order.
        sent: how many of them are in flight.
        most: how many may be in flight. It is 1 until the broker has acknowledged a batch after
            `RecordQueue.begin` or an error: a leader that knows nothing of this producer accepts any
            sequence number, so it might take the second batch although it refused the first.
        sequence: of the next record.
        end: offset after the last acknowledged record.
        is_ready: whether the partition is in `RecordQueue._ready`.
        is_forgotten: whether the broker has lost what it knew of the producer.
        is_too_large: whether the topic does not accept the first of ``waiting``.
    """

    producer_id: int
    epoch: int
    waiting: deque[EncodedBatch] = field(default_factory=deque)
    sent: int = 0
    most: int = 1
    sequence: int = 0
    end: int = 0
    is_ready: bool = False
    is_forgotten: bool = False
    is_too_large: bool = False

    @property
    def is_due(self) -> bool:
        """Whether another batch may be sent now."""
        return self.sent < min(len(self.waiting), self.most)


class RecordQueue:
    """Stamps the record batches of a producer, and sends them to the leaders of their partitions.

    After an error the queue drains: it waits for the answers to all requests in flight, asks for leaders
    again, and sends everything that was not acknowledged again, in order.

    Args:
        cluster: the brokers.
        kernel: the C kernel.
        owner: whose producer id and epoch the batches get.
        counts: partition counts of topics.
        acks: -1 = a leader waits for the in-sync replicas; 1 = it does not.
        acks_ms: how long it waits for them.

    Attributes:
        records: number of records without an acknowledgement.
        acknowledged: number of records that brokers have acknowledged since `begin`.
        bytes: size of their batches.
        in_flight: number of Produce requests without an answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        kernel: Kernel,
        owner: Owner,
        counts: PartitionCounts,
        acks: int,
        acks_ms: int,
    ) -> None:
        self.records = self.acknowledged = self.bytes = self.in_flight = 0
        self._cluster = cluster
        self._kernel = kernel
        self._owner = owner
        self._counts = counts
        self._acks, self._acks_ms = acks, acks_ms
        #: a broker that does not recognise a batch must not get the next one before it has accepted this one
        self._most = MOST_IN_FLIGHT if isinstance(owner, TransactionRequests) or owner.is_wanted else 1
        self._partitions: dict[TopicPartition, _Partition] = {}
        #: the partitions that are due, by leader; None = they have none. Those that were served go to the
        #: end, so that none waits for the others for long.
        self._ready: dict[int | None, deque[TopicPartition]] = {}
        self._leaders_as_of = cluster.leaders.as_of
        #: partitions of which the coordinator does not know that the transaction writes there
        self._not_enlisted: list[TopicPartition] = []
        self._must_drain = False
        self._failure: KafkaEosError | None = None

    def begin(self) -> None:
        """Counts from 0 again. Call it only while no batch waits."""
        self.acknowledged = 0
        for state in self._partitions.values():
            state.most = 1

    def add(self, topic: str, batches: Iterable[tuple[int, EncodedBatch]]) -> None:
        """Stamps batches with producer id, epoch and sequence, and enqueues them.

        Call it only while a transaction is open, if there are transactions.

        Args:
            topic: the topic.
            batches: its next batches, in order, each with its partition. Their memory must not change until
                they are acknowledged.
        """
        for number, batch in batches:
            tp = TopicPartition(topic, number)
            state = self._partitions.get(tp)
            if state is None:
                owner = self._owner
                state = self._partitions[tp] = _Partition(owner.producer_id, owner.epoch)
                self._not_enlisted.append(tp)
            self._stamp(batch, state)
            state.waiting.append(batch)
            self._make_ready(tp, state)
            self.records += batch.records
            self.bytes += batch.size_bytes

    def _stamp(self, batch: EncodedBatch, state: _Partition) -> None:
        """Gives a batch the partition's next sequence number."""
        sequence = state.sequence if state.producer_id >= 0 else -1
        batch.stamp(self._kernel, state.producer_id, state.epoch, sequence)
        state.sequence = next_sequence(state.sequence, batch.records)

    def end_of(self, tp: TopicPartition) -> int:
        """Returns the offset after the last acknowledged record of this transaction; 0 if there is none."""
        found = self._partitions.get(tp)
        return 0 if found is None else found.end

    def batch_bytes(self, topic: str, wanted: int) -> int:
        """Returns the largest batch that a topic accepts, as far as it is known; at most ``wanted``."""
        return min(wanted, _smaller_batches.get((self._cluster.bootstrap, topic), wanted))

    def raise_if_failed(self) -> None:
        """Raises the error with which a batch failed, if one did."""
        if self._failure is not None:
            raise self._failure

    def send(self, deadline: Deadline, *, until_bytes: int) -> None:
        """Sends batches until at most that many bytes wait for an acknowledgement."""
        if self.bytes and not self._must_drain:
            self._fill(deadline)  # the brokers work while the caller prepares the next batches
            self._cluster.network.wait(0)
        pauses: Pauses | None = None
        next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
        while self.bytes > until_bytes:
            self.raise_if_failed()
            if deadline.expired:
                raise self._cluster.out_of_time(deadline, self._cluster.complaint)
            if next_check.expired:
                self._check_topics(deadline)
                next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
            if self._must_drain and self.in_flight == 0:
                pauses = pauses or Pauses(deadline, 0.01, 0.5)
                pauses.wait()
                self._recover(deadline)
            if not self._must_drain:
                self._fill(deadline)
            if self.bytes > until_bytes and (self.in_flight or not self._must_drain):
                self._cluster.network.wait(deadline.remaining_seconds(_TICK_SECONDS))
        self.raise_if_failed()

    def _unsent(self) -> list[TopicPartition]:
        return [tp for tp, state in self._partitions.items() if state.waiting]

    def _check_topics(self, deadline: Deadline) -> None:
        """Checks that the partitions of unsent batches still exist.

        Raises:
            UnavailableError: if a topic was deleted.
            AbortableError: if a topic was deleted and created again with fewer partitions.
        """
        highest: dict[str, int] = {}
        for tp in self._unsent():
            highest[tp.topic] = max(tp.partition, highest.get(tp.topic, -1))
        self._counts.clear()
        try:
            self._counts.check(highest, deadline)
        except InvalidRecordError as error:
            raise AbortableError(
                f"a topic was deleted and created again meanwhile: {error.message}"
            ) from error

    def _recover(self, deadline: Deadline) -> None:
        """Asks for leaders again, and prepares to send everything that was not acknowledged, in order."""
        self._cluster.ask_another()
        try:
            self._cluster.metadata({tp.topic for tp in self._unsent()}, deadline)
        except TemporaryError as error:
            self._cluster.complain(error)
            return
        for tp, state in self._partitions.items():
            state.sent, state.most = 0, 1
            if state.is_too_large:
                self._make_smaller(tp, state)
            if state.is_forgotten:
                self._begin_again(state, deadline)
        self._must_drain = False
        self._look_for_ready()

    def _make_smaller(self, tp: TopicPartition, state: _Partition) -> None:
        """Encodes batches of a partition again, as smaller ones with the same sequence numbers.

        The topic does not accept the first one. Others that are not much smaller are also encoded again,
        because each would need a request, and a pause, until it is refused too.
        """
        large, after = state.waiting[0], state.sequence
        assert large.again is not None, "such a batch of a task fails"
        # the limit applies to records before compression, and the broker's to those after it
        limit_bytes, pieces = large.limit_bytes, 1
        while pieces == 1:  # the batch may be much smaller than its limit
            limit_bytes = max(1, limit_bytes // 2)
            pieces = len(large.again(limit_bytes))
        key = self._cluster.bootstrap, tp.topic
        _smaller_batches[key] = min(limit_bytes, _smaller_batches.get(key, limit_bytes))
        waiting, state.waiting = state.waiting, deque()
        for batch in waiting:
            is_large = batch.size_bytes > large.size_bytes // 2 and batch.limit_bytes > limit_bytes
            if batch.again is None or not is_large:
                state.waiting.append(batch)
                continue
            state.sequence = batch.sequence
            self.bytes -= batch.size_bytes
            for _, smaller in batch.again(limit_bytes).encoded():
                self._stamp(smaller, state)
                state.waiting.append(smaller)
                self.bytes += smaller.size_bytes
        state.sequence = after
        state.is_too_large = False

    def _begin_again(self, state: _Partition, deadline: Deadline) -> None:
        """Gives the batches of a partition the next epoch, in which sequence numbers begin at 0."""
        assert isinstance(self._owner, ProducerId), "a transaction fails"
        state.producer_id, state.epoch = self._owner.after(state.producer_id, state.epoch, deadline)
        state.sequence = 0
        for batch in state.waiting:
            self._stamp(batch, state)
        state.is_forgotten = False

    def _look_for_ready(self) -> None:
        """Finds out which partitions are due, and who leads them."""
        self._ready.clear()
        self._leaders_as_of = self._cluster.leaders.as_of
        for tp, state in self._partitions.items():
            state.is_ready = False
            self._make_ready(tp, state)

    def _make_ready(self, tp: TopicPartition, state: _Partition) -> None:
        if state.is_due and not state.is_ready:
            state.is_ready = True
            self._ready.setdefault(self._cluster.leaders.of(tp), deque()).append(tp)

    def _fill(self, deadline: Deadline) -> None:
        """Sends the next batch of each partition, to every leader that has room."""
        if self._leaders_as_of != self._cluster.leaders.as_of:
            self._look_for_ready()
        if self._ready.get(None):
            self._cluster.complain(f"{self._ready[None][0]} has no leader")
            self._must_drain = True
            return
        try:
            if self._not_enlisted:
                self._owner.enlist(self._not_enlisted, deadline)
                self._not_enlisted.clear()
            for node, ready in list(self._ready.items()):
                if self._must_drain:  # an answer that arrived meanwhile was an error
                    return
                if node is not None and ready:
                    connection = self._cluster.broker(node, deadline)
                    while connection.has_room and self._send_one(connection, ready):
                        pass
        except TemporaryError as error:
            self._cluster.complain(error)
            self._must_drain = True

    def _send_one(self, connection: Connection, ready: deque[TopicPartition]) -> bool:
        """Sends one request with at most one batch for each partition; returns whether there was any."""
        size = 0
        topics: dict[str, list[tuple[int, EncodedBatch]]] = {}
        sent: list[tuple[TopicPartition, EncodedBatch]] = []
        too_large: list[TopicPartition] = []
        while ready and size <= _ENOUGH_BYTES and len(too_large) < _MOST_TOO_LARGE:
            tp = ready.popleft()
            state = self._partitions[tp]
            batch = state.waiting[state.sent]
            if sent and size + batch.size_bytes > _REQUEST_BYTES:
                too_large.append(tp)
                continue
            size += batch.size_bytes
            state.sent += 1
            state.is_ready = False
            sent.append((tp, batch))
            topics.setdefault(tp.topic, []).append((tp.partition, batch))
        ready.extendleft(reversed(too_large))
        for tp, _ in sent:
            self._make_ready(tp, self._partitions[tp])
        if not sent:
            return False
        version = connection.version(ProduceRequest, *((12, 12) if self._owner.version >= 2 else (11, 9)))
        body = produce_body(self._owner.transactional_id, self._acks, self._acks_ms, topics)
        request = ProduceRequest(acks=self._acks, version=version)
        self.in_flight += 1
        connection.send(request, lambda answer, error: self._on_produced(sent, answer, error), body)
        return True

    def _on_produced(
        self,
        sent: list[tuple[TopicPartition, EncodedBatch]],
        answer: Any,
        error: Exception | None,
    ) -> None:
        self.in_flight -= 1
        if error is not None:
            self._cluster.complain(error)
            self._must_drain = True
            return
        answers = {
            TopicPartition(topic.name, each.index): each
            for topic in answer.responses or ()
            for each in topic.partition_responses or ()
        }
        for tp, batch in sent:
            found = answers.get(tp)
            if found is None:
                self._fail(AbortableError(f"the broker's answer does not mention {tp}"))
            else:
                self._on_batch(tp, batch, found.error_code, found.base_offset, found.error_message)

    def _on_batch(
        self, tp: TopicPartition, batch: EncodedBatch, code: int, offset: int, text: str | None
    ) -> None:
        state = self._partitions[tp]
        if code in (0, _DUPLICATE):
            if not state.waiting or state.waiting[0] is not batch:
                # an earlier batch failed, perhaps after it was appended; both are sent again in order, and
                # the broker recognises what it has
                self._must_drain = True
                return
            if offset >= 0:
                state.end = max(state.end, offset + batch.records)
            state.waiting.popleft()
            state.sent -= 1
            state.most = self._most
            self._make_ready(tp, state)
            self.acknowledged += batch.records
            self.records -= batch.records
            self.bytes -= batch.size_bytes
            return
        failure = KafkaError(code, text) if text else KafkaError(code)
        self._cluster.complain(f"{tp}: {failure.text}")
        is_first = bool(state.waiting) and state.waiting[0] is batch
        if code in FORGOTTEN and not is_first:
            self._must_drain = True  # an earlier batch failed
        elif code in FORGOTTEN and isinstance(self._owner, ProducerId) and self._owner.is_wanted:
            state.is_forgotten = self._must_drain = True
        elif code in _TOO_LARGE and batch.records > 1 and batch.again is not None:
            state.is_too_large = state.is_too_large or is_first
            self._must_drain = True
        elif code in _TOO_LARGE and batch.again is None:
            self._fail(
                RestartQueryError(
                    f"topic {tp.topic!r} does not accept a record batch of {batch.size_bytes:,} bytes "
                    f"({failure.name}): its max.message.bytes or segment.bytes was lowered after tasks had "
                    "encoded the batch.",
                    fix="restart the query a minute later; its tasks then encode smaller batches.",
                )
            )
        elif is_transient(failure) or code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            self._must_drain = True
        else:
            if code == ErrorCode.CORRUPT_MESSAGE:
                try:
                    batch.check(self._kernel)
                except StagedPartError as error:
                    self._fail(error)
            name = self._owner.transactional_id
            under = "" if name is None else f" under transactional id {name!r}"
            self._fail(self._owner.explained(failure, f"writing records to {tp}{under}"))

    def _fail(self, error: KafkaEosError) -> None:
        self._failure = self._failure or error
