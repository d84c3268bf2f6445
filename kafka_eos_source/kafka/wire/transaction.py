"""The requests of a transaction to its coordinators, and the epoch that each transaction has for itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from kafka_eos_source.errors import AbortableError, FencedError, KafkaEosError
from kafka_eos_source.kafka.failure import FENCED_FIX, classify
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.kafka.wire.cluster import GROUP, TRANSACTION, Cluster, TemporaryError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

T = TypeVar("T")

#: The broker expects another sequence number.
OUT_OF_ORDER = 45

#: Errors that mean that another producer has this transactional id now.
_FENCED = frozenset({KafkaError.INVALID_PRODUCER_EPOCH, 90, KafkaError.INVALID_PRODUCER_ID_MAPPING})
#: The broker did not look at a partition, because it refused another one of the request.
_NOT_ATTEMPTED = 55
#: Errors that end this transaction, and nothing else.
_ABORTABLE = frozenset(
    {
        KafkaError.UNKNOWN,
        KafkaError.INVALID_MSG,
        OUT_OF_ORDER,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.UNKNOWN_PRODUCER_ID,
        120,  # TRANSACTION_ABORTABLE (KIP-890), which confluent-kafka does not name
    }
)


class TransactionRequests:
    """The requests of one transactional id.

    Args:
        cluster: the brokers.
        transactional_id: of the producer.
        timeout_ms: after this time the coordinator aborts a transaction that was not ended.

    Attributes:
        producer_id: of the producer.
        epoch: of the producer, for the present transaction.
        version: the finalized ``transaction.version``, as of the last `begin`.
        epoch_is_used: whether a transaction was begun with this epoch.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, timeout_ms: int) -> None:
        self.transactional_id = transactional_id
        self.producer_id, self.epoch = -1, -1
        self.version = 0
        self.epoch_is_used = False
        self._cluster = cluster
        self._timeout_ms = timeout_ms

    def begin(self, deadline: Deadline) -> None:
        """Takes an epoch that no transaction has used.

        Raises:
            FencedError: if another producer took over.
            UnavailableError: if no coordinator answered in time.
            KafkaEosError: if the coordinator refuses.
        """
        self.version = self._transaction_version(deadline)
        if self.epoch_is_used:
            self.init(self.producer_id, self.epoch, deadline)
        self.epoch_is_used = True

    def _transaction_version(self, deadline: Deadline) -> int:
        """Returns the finalized ``transaction.version`` as it is now."""

        def ask() -> int:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            return self._cluster.features(connection, deadline).get("transaction.version", 0)

        doing = f"beginning a transaction of transactional id {self.transactional_id!r}"
        return self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def init(self, producer_id: int, epoch: int, deadline: Deadline) -> None:
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
            check(answer.error_code)
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.epoch_is_used = False

        doing = f"initialising transactional id {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def end(self, commit: bool, deadline: Deadline) -> None:
        """Sends EndTxn, the same request again while its outcome is open, and takes over the next epoch."""

        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            highest = 5 if self.version >= 2 else 4
            version = connection.version(EndTxnRequest, highest)
            if self.version >= 2 and version < highest:
                raise TemporaryError(f"broker {connection.address} does not support EndTxn, version 5")
            request = EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                committed=commit,
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            check(answer.error_code)
            if self.version >= 2:
                self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
                self.epoch_is_used = False

        verb = "committing" if commit else "aborting"
        doing = f"{verb} the transaction of transactional id {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def add_offsets(self, group_id: str, deadline: Deadline) -> None:
        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            request = AddOffsetsToTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                group_id=group_id,
                version=connection.version(AddOffsetsToTxnRequest, 3),
            )
            check(self._cluster.ask(connection, request, deadline).error_code)

        doing = f"adding the offsets of group {group_id!r} to the transaction"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def commit_offsets(self, offsets: Iterable[GroupOffset], group_id: str, deadline: Deadline) -> None:
        topics: dict[str, list[GroupOffset]] = {}
        for each in offsets:
            topics.setdefault(each.tp.topic, []).append(each)

        def ask() -> None:
            connection = self._cluster.coordinator(GROUP, group_id, deadline)
            version = connection.version(TxnOffsetCommitRequest, 5 if self.version >= 2 else 3)
            kind = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
            request = TxnOffsetCommitRequest(
                transactional_id=self.transactional_id,
                group_id=group_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
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
                    check(each.error_code, TopicPartition(topic.name, each.partition_index))

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

        return self._cluster.retried(doing, deadline, once, self.explained)

    def explained(self, error: KafkaError, doing: str) -> KafkaEosError:
        """Returns the error to raise for a broker's error in a transaction."""
        code = error.code()
        text = concealed(f"{doing}: {error.str()} ({error.name()})")
        if code in _FENCED:
            return FencedError(text, fix=FENCED_FIX)
        return AbortableError(text) if code in _ABORTABLE else classify(error, doing)

    def add_partitions(self, tps: Collection[TopicPartition], deadline: Deadline) -> None:
        """Tells the coordinator to which partitions the transaction writes (``transaction.version`` 1)."""
        topics: dict[str, list[int]] = {}
        for tp in tps:
            topics.setdefault(tp.topic, []).append(tp.partition)

        def ask() -> None:
            connection = self._cluster.coordinator(TRANSACTION, self.transactional_id, deadline)
            version = connection.version(AddPartitionsToTxnRequest, 3)
            kind = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
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
                check(code, tp)

        doing = f"adding partitions to the transaction of {self.transactional_id!r}"
        self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)


def check(code: int, tp: TopicPartition | None = None) -> None:
    """Raises the broker's error, if there is one; the text names the partition that it concerns."""
    if code:
        error = KafkaError(code)
        raise KafkaException(error if tp is None else KafkaError(code, f"{tp}: {error.str()}"))
