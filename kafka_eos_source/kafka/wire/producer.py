"""A transactional producer with an epoch of its own for each transaction (KIP-890).

With ``transaction.version`` 2, EndTxn raises the epoch. Otherwise the producer initialises itself again
before each transaction with its own id and epoch (KIP-360), which fails if another producer has initialised
since. So a request that the network delayed can never change a later transaction, and a producer whose commit
was answered can always run another one.
"""

from __future__ import annotations

import base64
import enum
import logging
import random
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    KafkaEosError,
    OutcomeUnknownError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import FENCED_FIX, classify, is_transient, unreachable
from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.offset_refusals import send_in_parts
from kafka_eos_source.kafka.partition_counts import PartitionCounts
from kafka_eos_source.kafka.producer import by_topic
from kafka_eos_source.kafka.secrets import concealed, register_secrets
from kafka_eos_source.kafka.wire.batches import EncodedBatch, Encoder, Stamp, next_sequence
from kafka_eos_source.kafka.wire.cluster import GROUP, TRANSACTION, Cluster, TemporaryError
from kafka_eos_source.kafka.wire.connection import Connection, produce_body
from kafka_eos_source.kafka.wire.rows import Rows
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Rows are encoded when this many bytes have been collected, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Most encoded bytes that wait for the brokers.
_QUEUE_BYTES = 64 << 20
#: Largest Produce request.
_REQUEST_BYTES = 1 << 20
_TOPIC_CHECK_SECONDS = 10.0
_TICK_SECONDS = 0.5
#: How long `begin` waits for a coordinator. The commit then starts over, until its own deadline.
_BEGIN_SECONDS = 10.0
#: Time limit of a request that the caller can do without, and of a look for a topic that was just created.
_SOON_SECONDS = 5.0
_COLUMNS = ("key", "value", "partition", "timestamp", "headers")
#: Rows without a key go to the same partition in stripes of at least this length.
_STRIPE_ROWS = 500


#: Batch sizes by cluster and topic, where the topic's ``max.message.bytes`` is smaller than ``batch.size``.
_smaller_batches: dict[tuple[str, str], int] = {}


class State(enum.Enum):
    """What the producer may do next."""

    NEW = "not initialised"
    READY = "no transaction is open"
    OPEN = "a transaction is open"
    FAILED = "the transaction must be aborted"
    UNKNOWN = "the outcome of the last transaction is not known"
    CLOSED = "closed"


#: Every legal move. `close` is legal in every state.
_MOVES: Mapping[State, frozenset[State]] = {
    State.NEW: frozenset({State.READY}),
    State.READY: frozenset({State.OPEN, State.READY}),
    State.OPEN: frozenset({State.READY, State.FAILED, State.UNKNOWN}),
    State.FAILED: frozenset({State.UNKNOWN}),
    State.UNKNOWN: frozenset({State.UNKNOWN}),
    State.CLOSED: frozenset(),
}

#: Errors that mean that another producer has this transactional id now.
_FENCED = frozenset({KafkaError.INVALID_PRODUCER_EPOCH, 90, KafkaError.INVALID_PRODUCER_ID_MAPPING})
_DUPLICATE = 46
_OUT_OF_ORDER = 45
_TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
#: The broker did not look at a partition, because it refused another one of the request.
_NOT_ATTEMPTED = 55
#: Errors that end this transaction, and nothing else.
_ABORTABLE = frozenset(
    {
        KafkaError.UNKNOWN,
        KafkaError.INVALID_MSG,
        _OUT_OF_ORDER,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.UNKNOWN_PRODUCER_ID,
        120,  # TRANSACTION_ABORTABLE (KIP-890), which confluent-kafka does not name
    }
)


@dataclass
class _Partition:
    """What one transaction writes to one partition.

    Attributes:
        waiting: batches without an acknowledgement, in order.
        sent: how many of them are in flight.
        sequence: of the next record.
        end: offset after the last acknowledged record.
        is_added: whether the coordinator knows that the transaction writes here (version 1).
    """

    waiting: deque[EncodedBatch] = field(default_factory=deque)
    sent: int = 0
    sequence: int = 0
    end: int = 0
    is_added: bool = False


class WireProducer:
    """The `commit.interfaces.Producer` that speaks Kafka's protocol itself. Not thread-safe.

    Args:
        config: librdkafka properties, including ``transactional.id``.
        kernel: the C kernel.

    Attributes:
        enqueued: number of records since `begin`.
        queued: number of those that no broker has acknowledged yet.
    """

    def __init__(self, config: Mapping[str, Any], kernel: Kernel) -> None:
        self.transactional_id = str(config["transactional.id"])
        self.name = self.transactional_id
        self.enqueued = self.queued = 0
        register_secrets(config)
        self._kernel = kernel
        self._connection = admin_config(config)
        self._cluster = Cluster(config)
        self._timeout_ms = int(config.get("transaction.timeout.ms", 60_000))
        # the leader answers before the connection gives up
        patience_ms = int(config.get("socket.timeout.ms", 10_000))
        self._acks_ms = min(int(config.get("request.timeout.ms", 30_000)), max(100, patience_ms - 500))
        self._largest_record = int(config.get("message.max.bytes", 1_000_000))
        level = config.get("compression.level")
        self._encoder = Encoder(
            kernel,
            str(config.get("compression.type", "none")),
            None if level in (None, "-1", -1) else int(str(level)),
        )
        self._batch_bytes = int(config.get("batch.size", 1_000_000))
        self._counts = PartitionCounts(self._partition_count)
        self._state = State.NEW
        self._producer_id, self._epoch = -1, -1
        self._version = 0
        self._epoch_is_used = False
        self._collected: list[tuple[str, Mapping[str, pa.Array]]] = []
        self._collected_bytes = 0
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._queued_bytes = 0
        self._in_flight = 0
        self._must_drain = False
        self._failure: KafkaEosError | None = None

    @property
    def complaint(self) -> str:
        """What went wrong last, in this transaction; "" if nothing did."""
        return self._cluster.complaint

    # -- transactions ----------------------------------------------------------------------------

    def init(self, deadline: Deadline) -> None:
        """Fences older owners of the transactional id, and ends their transaction (InitProducerId).

        Raises:
            UnavailableError: if no broker or coordinator answered before ``deadline``.
            AuthorizationError: if the ACL on the transactional id is missing.
            InvalidOptionError: if the broker refuses ``transaction.timeout.ms``.
        """
        self._init(-1, -1, deadline)
        self._move(State.READY)

    def is_clean(self) -> bool:
        """Returns whether this producer may run another transaction: its last commit was answered."""
        return self._state is State.READY

    def begin(self) -> None:
        """Begins a transaction, with an epoch that no transaction has used.

        Raises:
            FencedError: if another producer took over.
            RetriableError: if no coordinator answered for some seconds.
            KafkaEosError: if the coordinator refuses.
        """
        deadline = Deadline.after_seconds(_BEGIN_SECONDS)
        self._forget_records()
        self._cluster.complaint = ""
        try:
            self._version = self._transaction_version(deadline)
            if self._epoch_is_used:
                self._init(self._producer_id, self._epoch, deadline)
        except UnavailableError as error:
            raise RetriableError(error.message) from error
        self._epoch_is_used = True
        self._move(State.OPEN)

    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline) -> None:
        """Enqueues every row of a staged batch, in order.

        Args:
            rows: column ``value``, and optionally ``key``, ``topic``, ``partition``, ``headers`` and
                ``timestamp``, as in `schema.STAGED_ARROW`.
            topic: topic of all rows; None = the column ``topic`` names it.
            deadline: for room in the queue.

        Raises:
            InvalidRecordError: if a record is larger than ``message.max.bytes``.
            AbortableError: if the transaction has failed.
        """
        columns = {name: rows.column(name) for name in rows.schema.names}
        for each_topic, part in by_topic(columns, topic):
            self._collected.append((each_topic, part))
        self.enqueued += rows.num_rows
        self.queued += rows.num_rows
        self._collected_bytes += rows.nbytes
        if self._collected_bytes >= _COLLECT_BYTES:
            self._encode(deadline)
            self._send(deadline, until_bytes=_QUEUE_BYTES)

    def flush(self, deadline: Deadline) -> None:
        """Waits until the brokers have acknowledged every record.

        Raises:
            UnavailableError: if brokers did not acknowledge the records before ``deadline``, or a topic was
                deleted.
            KafkaEosError: if a record failed; the class depends on the reason.
        """
        self._encode(deadline)
        self._send(deadline, until_bytes=0)

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        """Adds the group's offsets to the transaction (TxnOffsetCommit, KIP-98 and KIP-447).

        Raises:
            AbortableError, UnavailableError: if the request failed; see `failure.classify`.
        """
        self._raise_if_failed()
        if self._version < 2:
            self._add_offsets(group_id, deadline)
        send_in_parts(self._connection, offsets, group_id, deadline, self._commit_offsets)

    def commit(self, deadline: Deadline) -> None:
        """Commits the transaction.

        Raises:
            OutcomeUnknownError: after *any* error, because the transaction may be committed nevertheless.
                Close this producer, `init` another one, and read the commit token.
        """
        if self._state is not State.OPEN or self._queued_bytes or self._collected:
            raise AssertionError(f"{self._state}, and {self._queued_bytes} bytes were not acknowledged")
        try:
            self._end(True, deadline)
        except KafkaEosError as error:
            self._move(State.UNKNOWN)
            raise OutcomeUnknownError(f"the commit was sent, but not confirmed: {error}") from error
        self._move(State.READY)

    def abort(self, deadline: Deadline) -> None:
        """Tries to abort the transaction. If that fails, `init` of the next producer ends it."""
        if self._state in (State.OPEN, State.FAILED):
            if self._version < 2 and (self._in_flight or self._queued_bytes):
                # a record that arrives after the end could join the next transaction: the next owner's epoch
                # ends this one instead
                self._move(State.UNKNOWN)
                return
            soon = Deadline.after_seconds(deadline.remaining_seconds(_SOON_SECONDS))
            self._move(State.UNKNOWN)
            try:
                self._end(False, soon)
            except KafkaEosError as error:
                _log.info("cannot abort the transaction of %s: %s", self.transactional_id, error)

    def close(self) -> None:
        """Closes all connections, and leaves an open transaction open."""
        self._state = State.CLOSED
        self._cluster.close()

    # -- facts about the cluster -----------------------------------------------------------------

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """Returns the cluster's id, and the partition count of every topic that the principal may see."""
        doing = "reading the cluster's metadata"
        answer = self._cluster.retried(doing, deadline, lambda: self._cluster.metadata(None, deadline))
        counts = {each.name: len(each.partitions) for each in answer.topics if each.error_code == 0}
        return str(answer.cluster_id or ""), counts

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns the present ids (KIP-516) of topics, without topics that were deleted or are not visible.

        Raises:
            UnavailableError: if no broker answers.
        """
        deadline = Deadline.after_ms(self._timeout_ms)
        doing = "reading the ids of topics"
        wanted = sorted(topics)
        if not wanted:
            return {}
        answer = self._cluster.retried(doing, deadline, lambda: self._cluster.metadata(wanted, deadline))
        return {each.name: _base64(each.topic_id) for each in answer.topics if each.error_code == 0}

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        """Checks that every topic exists and has enough partitions.

        Raises:
            UnavailableError, AuthorizationError, InvalidRecordError: as `PartitionCounts.check`.
        """
        self._counts.check(highest, deadline)

    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Returns the end of each partition's log, including the records of this open transaction.

        Raises:
            UnavailableError: if a partition does not exist any more, or no broker answers.
        """
        deadline = Deadline.after_ms(self._timeout_ms)

        def ask() -> Mapping[TopicPartition, int]:
            found = self._cluster.ends(partitions, deadline)
            for tp, end in found.items():
                if tp in self._partitions and end < self._partitions[tp].end:
                    self._cluster.ask_another()
                    raise TemporaryError(f"an outdated leader says that {tp} ends at {end}")
            return found

        return self._cluster.retried("reading the ends of partitions", deadline, ask)

    def _partition_count(self, topic: str, deadline: Deadline) -> int:
        doing = f"looking up output topic {topic!r}"
        soon = Deadline.after_seconds(deadline.remaining_seconds(_SOON_SECONDS))
        try:
            return self._cluster.retried(doing, deadline, lambda: self._existing(topic, soon))
        except TopicGoneError as gone:
            raise classify(gone.args[0], doing) from gone

    def _existing(self, topic: str, patient: Deadline) -> int:
        """Returns the partition count; a topic that was just created may be unknown for a moment."""
        try:
            return self._cluster.partition_count(topic, patient)
        except KafkaException as failure:
            error = failure.args[0]
            if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                if patient.expired:
                    raise TopicGoneError(error) from failure
                raise TemporaryError(f"topic {topic!r} is unknown") from failure
            raise

    # -- coordinator -----------------------------------------------------------------------------

    def _transaction_version(self, deadline: Deadline) -> int:
        """Returns the finalized ``transaction.version`` as it is now."""

        def ask() -> int:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            return self._cluster.features(connection, deadline).get("transaction.version", 0)

        doing = f"beginning a transaction of transactional id {self.transactional_id!r}"
        return self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def _init(self, producer_id: int, epoch: int, deadline: Deadline) -> None:
        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            version = connection.version(InitProducerIdRequest, 5)
            request = InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._timeout_ms,
                producer_id=producer_id,
                producer_epoch=epoch,
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            _check(answer.error_code)
            self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
            self._epoch_is_used = False

        doing = f"initialising transactional id {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def _end(self, commit: bool, deadline: Deadline) -> None:
        """Sends EndTxn, the same request again while its outcome is open, and takes over the next epoch."""

        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            highest = 5 if self._version >= 2 else 4
            version = connection.version(EndTxnRequest, highest)
            if self._version >= 2 and version < highest:
                raise TemporaryError(f"broker {connection.address} does not support EndTxn, version 5")
            request = EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                committed=commit,
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            _check(answer.error_code)
            if self._version >= 2:
                self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
                self._epoch_is_used = False

        verb = "committing" if commit else "aborting"
        doing = f"{verb} the transaction of transactional id {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def _add_offsets(self, group_id: str, deadline: Deadline) -> None:
        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            request = AddOffsetsToTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                group_id=group_id,
                version=connection.version(AddOffsetsToTxnRequest, 3),
            )
            _check(self._cluster.ask(connection, request, deadline).error_code)

        doing = f"adding the offsets of group {group_id!r} to the transaction"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def _commit_offsets(self, offsets: Iterable[GroupOffset], group_id: str, deadline: Deadline) -> None:
        topics: dict[str, list[GroupOffset]] = {}
        for each in offsets:
            topics.setdefault(each.tp.topic, []).append(each)

        def ask() -> None:
            connection = self._cluster.coordinator(GROUP, group_id, deadline)
            version = connection.version(TxnOffsetCommitRequest, 5 if self._version >= 2 else 3)
            kind = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
            request = TxnOffsetCommitRequest(
                transactional_id=self.transactional_id,
                group_id=group_id,
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                generation_id=-1,
                member_id="",
                group_instance_id=None,
                topics=[
                    kind(
                        name=name,
                        partitions=[
                            kind.TxnOffsetCommitRequestPartition(
                                partition_index=each.tp.partition,
                                committed_offset=each.offset,
                                committed_leader_epoch=-1,
                                # librdkafka ends metadata with a NUL, and confluent-kafka reads up to it
                                committed_metadata=each.metadata + "\0" if each.metadata else "",
                                version=version,
                            )
                            for each in parts
                        ],
                        version=version,
                    )
                    for name, parts in topics.items()
                ],
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            for topic in answer.topics:
                for each in topic.partitions:
                    _check(each.error_code, TopicPartition(topic.name, each.partition_index))

        doing = f"committing offsets of group {group_id!r}"
        self._coordinated(doing, deadline, GROUP, group_id, ask)

    def _coordinated(self, doing: str, deadline: Deadline, kind: int, key: str, ask: Callable[[], T]) -> T:
        """Asks a coordinator, and looks for it again after each failure."""

        def once() -> T:
            try:
                return ask()
            except (TemporaryError, KafkaException):
                self._cluster.forget_coordinator(kind, key)
                raise

        return self._cluster.retried(doing, deadline, once, self._explained)

    def _explained(self, error: KafkaError, doing: str) -> KafkaEosError:
        """Returns the error to raise for a broker's error in a transaction."""
        code = error.code()
        text = concealed(f"{doing}: {error.str()} ({error.name()})")
        if code in _FENCED:
            return FencedError(text, fix=FENCED_FIX)
        return AbortableError(text) if code in _ABORTABLE else classify(error, doing)

    # -- records ---------------------------------------------------------------------------------

    def _encode(self, deadline: Deadline) -> None:
        """Encodes the collected rows, grouped by partition and in order within each."""
        collected, self._collected, self._collected_bytes = self._collected, [], 0
        by_topic: dict[str, list[Mapping[str, pa.Array]]] = {}
        for topic, part in collected:
            by_topic.setdefault(topic, []).append(part)
        for topic, parts in by_topic.items():
            names = [name for name in _COLUMNS if any(name in part for part in parts)]
            columns = {name: _concatenated(name, parts) for name in names}
            self._encode_topic(topic, columns, deadline)

    def _encode_topic(self, topic: str, columns: Mapping[str, pa.Array], deadline: Deadline) -> None:
        if self._counts.last(topic) is None:
            self._counts.check({topic: -1}, deadline)
        count = self._counts.last(topic) or 1
        rows = Rows(columns)
        largest = int(rows.sizes.max(initial=0))
        if largest > self._largest_record:
            doing = f"writing a record of {largest:,} bytes to topic {topic!r}"
            raise classify(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), doing)
        rows.place(self._kernel, count, random.randrange(count), _STRIPE_ROWS)
        limit = min(self._batch_bytes, _smaller_batches.get((self._cluster.bootstrap, topic), 1 << 30))
        for partition, order in rows.by_partition():
            state = self._partitions.setdefault(TopicPartition(topic, partition), _Partition())
            stamp = Stamp(self._producer_id, self._epoch, state.sequence)
            for batch in self._encoder.encode(rows, order, stamp, limit):
                state.waiting.append(batch)
                state.sequence = next_sequence(batch.sequence, batch.records)
                self._queued_bytes += batch.size_bytes

    def _send(self, deadline: Deadline, *, until_bytes: int) -> None:
        """Sends batches until at most that many bytes wait for an acknowledgement."""
        pauses: Pauses | None = None
        next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
        while self._queued_bytes > until_bytes:
            self._raise_if_failed()
            if deadline.expired:
                raise self._expired(deadline)
            if next_check.expired:
                self._counts.clear()
                self.check_partitions(dict.fromkeys({tp.topic for tp in self._unsent()}, -1), deadline)
                next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
            if self._must_drain and self._in_flight == 0:
                pauses = pauses or Pauses(deadline, 0.01, 0.5)
                pauses.wait()
                self._recover(deadline)
            if not self._must_drain:
                self._fill(deadline)
            if self._queued_bytes > until_bytes:
                self._cluster.network.wait(deadline.remaining_seconds(_TICK_SECONDS))
        self._raise_if_failed()

    def _unsent(self) -> list[TopicPartition]:
        return [tp for tp, state in self._partitions.items() if state.waiting]

    def _recover(self, deadline: Deadline) -> None:
        """Asks for leaders again, and prepares to send everything that was not acknowledged, in order."""
        for state in self._partitions.values():
            state.sent = 0
        self._cluster.ask_another()
        try:
            self._cluster.metadata({tp.topic for tp in self._unsent()}, deadline)
            self._must_drain = False
        except TemporaryError as error:
            self._cluster.complain(error)

    def _fill(self, deadline: Deadline) -> None:
        """Sends the next batch of each partition, to every leader that has room."""
        by_leader: dict[int, list[TopicPartition]] = {}
        missing = []
        for tp, state in self._partitions.items():
            if state.sent < len(state.waiting):
                node = self._cluster.leader(tp)
                if node is None:
                    missing.append(tp)
                else:
                    by_leader.setdefault(node, []).append(tp)
        if missing:
            self._cluster.complain(f"{missing[0]} has no leader")
            self._must_drain = True
            return
        try:
            if self._version < 2:
                self._add_partitions([tp for tps in by_leader.values() for tp in tps], deadline)
            for node, tps in by_leader.items():
                connection = self._cluster.broker(node)
                random.shuffle(tps)  # so that no partition waits for the others for long
                while connection.has_room and self._send_one(connection, tps):
                    pass
        except TemporaryError as error:
            self._cluster.complain(error)
            self._must_drain = True

    def _send_one(self, connection: Connection, tps: Collection[TopicPartition]) -> bool:
        """Sends one request with at most one batch for each partition; returns whether there was any."""
        size = 0
        topics: dict[str, list[tuple[int, memoryview]]] = {}
        sent: list[tuple[TopicPartition, EncodedBatch]] = []
        for tp in tps:
            state = self._partitions[tp]
            if state.sent >= len(state.waiting):
                continue
            batch = state.waiting[state.sent]
            if sent and size + batch.size_bytes > _REQUEST_BYTES:
                continue
            size += batch.size_bytes
            state.sent += 1
            sent.append((tp, batch))
            topics.setdefault(tp.topic, []).append((tp.partition, batch.data))
        if not sent:
            return False
        version = connection.version(ProduceRequest, 12 if self._version >= 2 else 11, 9)
        body = produce_body(self.transactional_id, self._acks_ms, topics)
        request = ProduceRequest(acks=-1, version=version)
        self._in_flight += 1
        owner = self._producer_id, self._epoch
        connection.send(request, lambda answer, error: self._on_produced(owner, sent, answer, error), body)
        return True

    def _on_produced(
        self,
        owner: tuple[int, int],
        sent: list[tuple[TopicPartition, EncodedBatch]],
        answer: Any,
        error: Exception | None,
    ) -> None:
        if owner != (self._producer_id, self._epoch):
            return  # of an older transaction, which has ended
        self._in_flight -= 1
        if error is not None:
            self._cluster.complain(error)
            self._must_drain = True
            return
        answers = {
            TopicPartition(topic.name, each.index): each
            for topic in answer.responses
            for each in topic.partition_responses
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
            self.queued -= batch.records
            self._queued_bytes -= batch.size_bytes
            return
        failure = KafkaError(code, text) if text else KafkaError(code)
        self._cluster.complain(f"{tp}: {failure.str()}")
        is_first = bool(state.waiting) and state.waiting[0] is batch
        if code == _OUT_OF_ORDER and not is_first:
            self._must_drain = True  # an earlier batch failed
        elif code in _TOO_LARGE and batch.records > 1:
            key = self._cluster.bootstrap, tp.topic
            _smaller_batches[key] = min(_smaller_batches.get(key, batch.size_bytes), batch.size_bytes // 2)
            self._fail(
                AbortableError(
                    f"topic {tp.topic!r} does not accept a batch of {batch.size_bytes:,} bytes; the next try "
                    "sends batches of half that size"
                )
            )
        elif is_transient(failure) or code == KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._must_drain = True
        else:
            self._fail(self._explained(failure, f"writing records to {tp} under {self.transactional_id!r}"))

    def _add_partitions(self, tps: Iterable[TopicPartition], deadline: Deadline) -> None:
        """Tells the coordinator to which partitions the transaction writes (``transaction.version`` 1)."""
        new = [tp for tp in tps if not self._partitions[tp].is_added]
        if not new:
            return
        topics: dict[str, list[int]] = {}
        for tp in new:
            topics.setdefault(tp.topic, []).append(tp.partition)

        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            version = connection.version(AddPartitionsToTxnRequest, 3)
            kind = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self._producer_id,
                v3_and_below_producer_epoch=self._epoch,
                v3_and_below_topics=[
                    kind(name=name, partitions=numbers, version=version) for name, numbers in topics.items()
                ],
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            refused = {
                TopicPartition(topic.name, each.partition_index): each.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for each in topic.results_by_partition
                if each.partition_error_code
            }
            reasons = {tp: code for tp, code in refused.items() if code != _NOT_ATTEMPTED} or refused
            for tp, code in reasons.items():
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    # the coordinator has not heard of a new topic yet
                    raise TemporaryError(f"{tp} is unknown to {connection.address}")
                _check(code, tp)

        doing = f"adding partitions to the transaction of {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)
        for tp in new:
            self._partitions[tp].is_added = True

    # -- state -----------------------------------------------------------------------------------

    def _move(self, to: State) -> None:
        if to not in _MOVES[self._state]:
            raise AssertionError(f"a producer cannot move from {self._state} to {to}")
        self._state = to

    def _forget_records(self) -> None:
        self.enqueued = self.queued = 0
        self._collected, self._collected_bytes = [], 0
        self._partitions, self._queued_bytes = {}, 0
        self._in_flight, self._must_drain, self._failure = 0, False, None

    def _fail(self, error: KafkaEosError) -> None:
        self._failure = self._failure or error

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            if self._state is State.OPEN:
                self._move(State.FAILED)
            raise self._failure

    def _expired(self, deadline: Deadline) -> UnavailableError:
        return unreachable(self._cluster.bootstrap, deadline.budget_seconds * 1000, self.complaint)


class TopicGoneError(Exception):
    """A topic does not exist. The argument is the broker's error."""


def _check(code: int, tp: TopicPartition | None = None) -> None:
    """Raises the broker's error, if there is one; the text names the partition that it concerns."""
    if code:
        error = KafkaError(code)
        raise KafkaException(error if tp is None else KafkaError(code, f"{tp}: {error.str()}"))


def _concatenated(name: str, parts: list[Mapping[str, pa.Array]]) -> pa.Array:
    """Returns one column of several parts; null where a part does not have it."""
    kind = next(part[name].type for part in parts if name in part)
    found = [part[name] if name in part else pa.nulls(len(part["value"]), kind) for part in parts]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


def _base64(topic_id: uuid.UUID) -> str:
    """Returns a topic id as librdkafka prints it, so that ids of both clients compare: without padding."""
    return base64.b64encode(topic_id.bytes).decode().rstrip("=")
