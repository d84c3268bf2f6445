"""Producers: an idempotent one without transactions, and one with an epoch for each transaction (KIP-890).

With ``transaction.version`` 2, EndTxn raises the epoch. Otherwise the producer initialises itself again
before each transaction with its own id and epoch (KIP-360), which fails if another producer has initialised
since. So a request that the network delayed can never change a later transaction, and a producer whose commit
was answered can always run another one.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import (
    AbortableError,
    AuthorizationError,
    KafkaEosError,
    OutcomeUnknownError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.batches import CollectedRows, EncodedBatch, Encoder
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import missing_topic
from kafka_eos_source.kafka.group import send_in_parts
from kafka_eos_source.kafka.kernel import DEFAULT_PARTITIONER, kernel
from kafka_eos_source.kafka.messages import topic_id_text
from kafka_eos_source.kafka.queue import Owner, PartitionCounts, RecordQueue
from kafka_eos_source.kafka.transaction import NewTopics, ProducerId, TransactionRequests
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

#: Rows are encoded when this many bytes have been collected, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Most encoded bytes that wait for the brokers.
_QUEUE_BYTES = 64 << 20
#: How long `begin` waits for a coordinator. The commit then starts over, until its own deadline.
_BEGIN_SECONDS = 10.0
#: How long to wait for the names of other topics, for a message.
_SIMILAR_SECONDS = 3.0
#: Longest time to try an abort, which the next owner of the transactional id can do without.
_ABORT_SECONDS = 5.0


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
    State.READY: frozenset({State.OPEN}),
    State.OPEN: frozenset({State.FAILED, State.UNKNOWN}),
    State.FAILED: frozenset({State.UNKNOWN}),
    State.UNKNOWN: frozenset({State.READY}),
    State.CLOSED: frozenset(),
}


class _Sender:
    """What all producers share: they encode rows, and send record batches. Not thread-safe.

    Attributes:
        name: of the producer, for log lines.
        enqueued: number of records since the producer began to count.
    """

    def __init__(self, config: Mapping[str, Any], name: str, cluster: Cluster, owner: Owner) -> None:
        self.name = name
        self.enqueued = 0
        self._kernel = kernel()
        self._cluster = cluster
        self._timeout_ms = int(config.get("transaction.timeout.ms", 60_000))
        level = config.get("compression.level")
        encoder = Encoder(
            self._kernel,
            str(config.get("compression.type", "none")),
            None if level in (None, "-1", -1) else int(str(level)),
            transactional=isinstance(owner, TransactionRequests),
        )
        self._batch_bytes = int(config.get("batch.size", 1_000_000))
        self._counts = PartitionCounts(self._partition_count)
        # the leader answers before the connection gives up
        patience_ms = int(config.get("socket.timeout.ms", 10_000))
        acks_ms = min(int(config.get("request.timeout.ms", 30_000)), max(100, patience_ms - 500))
        acks = -1 if str(config.get("acks", "all")) == "all" else int(config["acks"])
        self._new_queue = partial(RecordQueue, cluster, self._kernel, owner, self._counts, acks, acks_ms)
        self._queue = self._new_queue()
        self._new_collection = partial(
            CollectedRows,
            self._kernel,
            encoder,
            int(config.get("message.max.bytes", 1_000_000)),
            str(config.get("partitioner", DEFAULT_PARTITIONER)),
        )
        self._collected = self._new_collection()
        self._partitions_of: dict[str, int] = {}
        #: topics whose ids were asked for, and what waits for the answer
        self._asked_ids: tuple[list[str], Callable[[], Any]] | None = None

    @property
    def queued(self) -> int:
        """Number of records that no broker has acknowledged yet."""
        return self._collected.records + self._queue.records

    @property
    def complaint(self) -> str:
        """What went wrong last since the producer began to count; "" if nothing did."""
        return self._cluster.complaint

    # -- records ---------------------------------------------------------------------------------

    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline, partitions: int = 0) -> None:
        """Enqueues every row of a staged batch, in order.

        Args:
            rows: column ``value``, and optionally ``key``, ``topic``, ``partition``, ``headers`` and
                ``timestamp``, as in `spark.arrow.STAGED_ARROW`.
            topic: topic of all rows; None = the column ``topic`` names it.
            deadline: for room in the queue.
            partitions: how many partitions of ``topic`` the rows go to: as many as it had when tasks sealed
                other rows of the batch, so that no key goes to two partitions because the topic grows
                meanwhile. 0 = as many as it has now.

        Raises:
            InvalidRecordError: if a record is larger than ``message.max.bytes``.
            KafkaEosError: if an earlier record failed; the class depends on the reason.
        """
        columns = {name: rows.column(name) for name in rows.schema.names}
        if partitions and topic is not None:
            self._partitions_of[topic] = partitions
        for each_topic, part in by_topic(columns, topic):
            self._collected.add(each_topic, part, rows.nbytes * len(part["value"]) // max(1, rows.num_rows))
        self.enqueued += rows.num_rows
        if self._collected.bytes >= _COLLECT_BYTES:
            with self._failing():
                self._encode(deadline)
                self._queue.send(deadline, until_bytes=_QUEUE_BYTES)

    def flush(self, deadline: Deadline) -> None:
        """Waits until the brokers have acknowledged every record.

        Raises:
            UnavailableError: if brokers did not acknowledge the records before ``deadline``, or a topic was
                deleted.
            KafkaEosError: if a record failed; the class depends on the reason.
        """
        with self._failing():
            self._encode(deadline)
            self._queue.send(deadline, until_bytes=0)
            if self._queue.acknowledged != self.enqueued:
                raise AbortableError(  # a bug of this client
                    f"brokers acknowledged {self._queue.acknowledged} of {self.enqueued} records"
                )

    def _encode(self, deadline: Deadline) -> None:
        """Encodes the collected rows, and enqueues their batches."""
        for topic in self._collected:
            self._encode_topic(topic, deadline)

    def _encode_topic(self, topic: str, deadline: Deadline, only: set[int] | None = None) -> None:
        self._identify(deadline)
        if self._counts.last(topic) is None:
            self._counts.check({topic: -1}, deadline)
        count = self._partitions_of.get(topic) or self._counts.last(topic) or 1
        limit = self._queue.batch_bytes(topic, self._batch_bytes)
        self._queue.add(topic, self._collected.take(topic, count, limit, only).encoded())

    def _identify(self, deadline: Deadline) -> None:
        """Takes a producer id, if the producer has none."""

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Encloses what makes the records, or the transaction, fail if it raises an error."""
        yield

    def _begin_count(self) -> None:
        self.enqueued = 0
        self._collected = self._new_collection()
        self._partitions_of = {}
        self._asked_ids = None
        self._cluster.complaint = ""
        self._cluster.network.wait(0)  # notices connections that brokers closed because they were idle

    def close(self) -> None:
        """Closes all connections. Drops unsent records, and leaves an open transaction open."""
        self._cluster.close()

    # -- facts about the cluster -----------------------------------------------------------------

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """Returns the cluster's id, and the partition count of every topic that the principal may see."""
        doing = "reading the cluster's metadata"
        answer = self._cluster.retried(doing, deadline, lambda: self._cluster.metadata(None, deadline))
        counts = {
            each.name: len(each.partitions or ()) for each in answer.topics or () if each.error_code == 0
        }
        return str(answer.cluster_id or ""), counts

    def ask_topic_ids(self, topics: Collection[str]) -> None:
        """Sends the request of the next `topic_ids` call for the same topics, so that it waits less."""
        deadline = Deadline.after_ms(self._timeout_ms)
        wanted = sorted(topics)
        try:
            self._asked_ids = (wanted, self._cluster.ask_metadata(wanted, deadline)) if wanted else None
        except TemporaryError as error:
            self._cluster.complain(error)  # the call asks again

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns the present ids (KIP-516) of topics, without topics that were deleted or are not visible.

        The ids are those at the time of this call, or of `ask_topic_ids` just before it.

        Raises:
            UnavailableError: if no broker answers.
        """
        deadline = Deadline.after_ms(self._timeout_ms)
        doing = "reading the ids of topics"
        wanted = sorted(topics)
        if not wanted:
            return {}

        def ask() -> Any:
            asked, self._asked_ids = self._asked_ids, None
            if asked is not None and asked[0] == wanted:
                return asked[1]()
            return self._cluster.metadata(wanted, deadline)

        answer = self._cluster.retried(doing, deadline, ask)
        return {
            each.name: topic_id_text(each.topic_id) for each in answer.topics or () if each.error_code == 0
        }

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
            found = self._cluster.offsets(partitions, deadline)
            for tp, end in found.items():
                if end < self._queue.end_of(tp):
                    self._cluster.ask_another()
                    raise TemporaryError(f"an outdated leader says that {tp} ends at {end}")
            return found

        return self._cluster.retried("reading the ends of partitions", deadline, ask)

    def _partition_count(self, topic: str, deadline: Deadline) -> int:
        doing = f"looking up output topic {topic!r}"
        new = NewTopics(doing, deadline)

        def ask() -> int:
            try:
                return self._cluster.partition_count(topic, deadline)
            except KafkaError as failure:
                if failure.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                error = new.error(f"topic {topic!r} does not exist")
                if isinstance(error, TemporaryError):
                    raise error from failure
                raise missing_topic(doing, topic, self._topics()) from failure

        return self._cluster.retried(doing, deadline, ask)

    def _topics(self) -> list[str]:
        """Returns the topics of the cluster, for a message; none if no broker lists them at once."""
        try:
            answer = self._cluster.metadata(None, Deadline.after_seconds(_SIMILAR_SECONDS))
        except (TemporaryError, KafkaEosError):
            return []
        return [str(each.name) for each in answer.topics or () if not each.error_code]


class RecordProducer(_Sender):
    """A producer without transactions. Brokers recognise a batch that it sends again.

    After any error, call only `close`.

    Args:
        config: librdkafka properties. Without ``enable.idempotence``, a batch whose acknowledgement was lost
            is written twice.
        name: of the producer, for log lines.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        cluster = Cluster(config)
        is_idempotent = str(config.get("enable.idempotence", "true")) == "true"
        self._id = ProducerId(cluster, is_wanted=is_idempotent)
        super().__init__(config, name, cluster, self._id)

    def begin_count(self) -> None:
        """Counts `enqueued` from 0 again. Call it only if no record waits for an acknowledgement."""
        self._begin_count()
        self._queue.begin()

    def _identify(self, deadline: Deadline) -> None:
        if self._id.is_wanted and self._id.producer_id < 0:
            self._id.init(deadline)


class TransactionalProducer(_Sender):
    """The `commit.request.Producer` that speaks Kafka's protocol itself. Not thread-safe.

    After any error, call only `abort` and `close`.

    Args:
        config: librdkafka properties, including ``transactional.id``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.transactional_id = str(config["transactional.id"])
        cluster = Cluster(config)
        timeout_ms = int(config.get("transaction.timeout.ms", 60_000))
        self._transaction = TransactionRequests(cluster, self.transactional_id, timeout_ms)
        super().__init__(config, self.transactional_id, cluster, self._transaction)
        self._state = State.NEW
        self._has_offsets = False

    def init(self, deadline: Deadline) -> None:
        """Fences older owners of the transactional id, and ends their transaction (InitProducerId).

        Raises:
            UnavailableError: if no broker or coordinator answered before ``deadline``.
            AuthorizationError: if the ACL on the transactional id is missing.
            InvalidOptionError: if the broker refuses ``transaction.timeout.ms``.
        """
        self._transaction.init(-1, -1, deadline)
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
        self._begin_count()
        self._queue = self._new_queue()
        self._has_offsets = False
        try:
            self._transaction.begin(deadline)
        except (UnavailableError, AuthorizationError) as error:
            if not deadline.expired:
                raise
            raise RetriableError(error.message) from error
        self._move(State.OPEN)

    def send_sealed(self, batches: Iterable[tuple[int, memoryview]], topic: str, deadline: Deadline) -> None:
        """Enqueues record batches that tasks have encoded, after all rows of their partitions.

        Args:
            batches: sealed batches, in order, each with its partition. Their memory must not change before
                `flush` returns.
            topic: their topic.
            deadline: for room in the queue.

        Raises:
            AbortableError: if the transaction has failed.
        """
        encoded = [(partition, EncodedBatch(sealed)) for partition, sealed in batches]
        with self._failing():
            conflicts = self._collected.conflicts(topic, {partition for partition, _ in encoded})
            if conflicts is None:
                self._encode(deadline)
            elif conflicts:
                self._encode_topic(topic, deadline, conflicts)
            before = self._queue.records
            self._queue.add(topic, encoded)
            self.enqueued += self._queue.records - before
            self._queue.send(deadline, until_bytes=_QUEUE_BYTES)

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        """Adds the group's offsets to the transaction (TxnOffsetCommit, KIP-98 and KIP-447).

        Raises:
            AbortableError, UnavailableError: if the request failed; see `failure.classify`.
        """
        with self._failing():
            self._has_offsets = True
            self._transaction.confirm_version(deadline)
            if self._transaction.version < 2:
                self._transaction.add_offsets(group_id, deadline)
            ask, send = self._cluster.topic_property, self._transaction.commit_offsets
            send_in_parts(ask, offsets, group_id, deadline, send)

    def commit(self, deadline: Deadline) -> None:
        """Commits the transaction.

        Raises:
            OutcomeUnknownError: after *any* error, because the transaction may be committed nevertheless.
                Close this producer, `init` another one, and read the commit token.
        """
        if self._state is not State.OPEN or self.queued:
            raise AssertionError(f"{self._state}, and {self.queued} records were not acknowledged")
        if not self.enqueued and not self._has_offsets:
            # brokers know nothing of this transaction, and would refuse its end
            self._move(State.UNKNOWN)
            self._move(State.READY)
            return
        with self._failing():
            self._transaction.confirm_version(deadline)
        self._move(State.UNKNOWN)  # whatever happens now, only the answer to EndTxn changes that
        try:
            self._transaction.end(True, deadline)
        except KafkaEosError as error:
            raise OutcomeUnknownError(f"the commit was sent, but not confirmed: {error}") from error
        self._move(State.READY)

    def abort(self, deadline: Deadline) -> None:
        """Tries to abort the transaction. If that fails, `init` of the next producer ends it."""
        if self._state in (State.OPEN, State.FAILED):
            if self._transaction.version < 2 and (self._queue.in_flight or self._queue.bytes):
                # a record that arrives after the end could join the next transaction: the next owner's epoch
                # ends this one instead
                self._move(State.UNKNOWN)
                return
            soon = Deadline.after_seconds(deadline.remaining_seconds(_ABORT_SECONDS))
            self._move(State.UNKNOWN)
            try:
                if self._transaction.version >= 2:
                    self._transaction.confirm_version(soon)  # else the next owner ends it
                self._transaction.end(False, soon)
            except KafkaEosError as error:
                _log.info("cannot abort the transaction of %s: %s", self.transactional_id, error)

    def close(self) -> None:
        self._state = State.CLOSED
        super().close()

    def _move(self, to: State) -> None:
        if to not in _MOVES[self._state]:
            raise AssertionError(f"a producer cannot move from {self._state} to {to}")
        self._state = to

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Makes sure that a transaction in which something failed is never committed."""
        try:
            yield
        except BaseException:
            if self._state is State.OPEN:
                self._move(State.FAILED)
            raise


def by_topic(
    columns: Mapping[str, pa.Array], topic: str | None
) -> Iterable[tuple[str, Mapping[str, pa.Array]]]:
    """Returns the rows of each topic, in order. Copies nothing if there is only one topic."""
    if topic is not None:
        yield topic, columns
        return
    encoded = columns["topic"].dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], columns
        return
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    for code, name in enumerate(names):
        rows = pa.array(np.flatnonzero(codes == code))
        yield name, {column: array.take(rows) for column, array in columns.items()}
