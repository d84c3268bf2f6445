"""What identifies a producer to brokers: a transactional id with its coordinators, or a producer id alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from kafka_eos_source.errors import AbortableError, FencedError, KafkaEosError, OperatorError, RetriableError
from kafka_eos_source.kafka.cluster import GROUP, TRANSACTION, Cluster, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import FENCED_FIX, classify, is_transient
from kafka_eos_source.kafka.messages import features_of, versions_request
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

FEATURE = "transaction.version"

#: A coordinator that is busy for so long, in seconds, although no transaction ends, is stuck. Otherwise it is
#: busy while it writes one record.
_STUCK_SECONDS = 10.0
#: States in which markers are being written, which may take long.
_ENDING = frozenset({"PrepareCommit", "PrepareAbort"})

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ask = Callable[[Connection, Any], Any]

#: A level of ``transaction.version`` is the present one for so long after the request, in seconds.
_PRESENT_SECONDS = 0.1
#: The broker lost what it knew of the producer.
FORGOTTEN = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID})
#: The last epoch of a producer id.
_LAST_EPOCH = 32_767
#: How long a topic that brokers do not know may be one that was just created.
_NEW_TOPIC_SECONDS = 5.0
#: A producer without transactions has no transaction that could time out.
_NO_TIMEOUT_MS = 2**31 - 1

#: Errors that mean that another producer has this transactional id now.
_FENCED = frozenset(
    {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING}
)
#: The broker did not look at a partition, because it refused another one of the request.
_NOT_ATTEMPTED = ErrorCode.OPERATION_NOT_ATTEMPTED
#: The right broker answers, and asks for patience.
_BUSY = frozenset({ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS})
#: Errors that end this transaction, and nothing else.
_ABORTABLE = frozenset(
    {
        _NOT_ATTEMPTED,  # without an error of another partition
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.UNSUPPORTED_VERSION,  # transaction.version was lowered since the transaction began
        ErrorCode.TRANSACTION_ABORTABLE,  # KIP-890
    }
)


def is_lowered(connection: Connection) -> bool:
    """Returns whether a broker that knows ``transaction.version`` 2 has level 0."""
    # brokers hide the features that they support from this version of ApiVersions if the lowest level is 0
    return not connection.features.get(FEATURE, 0) and connection.version(EndTxnRequest, 5) >= 5


class LoweredId:
    """A transactional id of ``transaction.version`` 2, after a person has lowered the feature to 0.

    At level 0, coordinators of Kafka 4 write their state of a transactional id in a format without the
    version of its transactions, and fail to write one of version 2. They then answer CONCURRENT_TRANSACTIONS
    to every request for that id. So no request may ask for version 2 there, and InitProducerId must not find
    an id whose last transaction had that version and has ended, because its new state inherits the version.
    AddOffsetsToTxn sets version 0: it opens a transaction, which InitProducerId then aborts.

    Args:
        transactional_id: the id. The application's group has the same name.
        ask: sends a request on a connection, and returns the answer.
    """

    def __init__(self, transactional_id: str, ask: Ask) -> None:
        self._id = transactional_id
        self._ask = ask
        self._is_prepared = False
        self._busy_since: float | None = None

    def prepare(self, connection: Connection) -> None:
        """Lets the coordinator forget the version of the last transaction, so that InitProducerId works.

        Raises:
            KafkaError: if the coordinator asks for patience.
            TemporaryError: if it does not answer.
        """
        found = None if self._is_prepared else self._described(connection)
        if found is None or found.transaction_state == "Ongoing":
            return
        request = AddOffsetsToTxnRequest(
            transactional_id=self._id,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            group_id=self._id,
            version=connection.version(AddOffsetsToTxnRequest, 3),
        )
        error = KafkaError(self._ask(connection, request).error_code)
        if error.code and is_transient(error):
            raise error
        self._is_prepared = True
        if error.code:  # the principal has another group, or another owner came first: try without
            _log.info("cannot prepare transactional id %r for version 0: %s", self._id, error.text)

    def check(self, connection: Connection, error: KafkaError) -> None:
        """Checks after an error whether the coordinator can ever end what it has begun.

        Raises:
            OperatorError: if not.
        """
        if error.code != ErrorCode.CONCURRENT_TRANSACTIONS:
            self._busy_since = None
            return
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if now - self._busy_since < _STUCK_SECONDS:
            return
        found = self._described(connection)
        if found is not None and found.transaction_state not in _ENDING:
            raise OperatorError(
                f"transaction.version was lowered to 0 after transactional id {self._id!r} had used level 2. "
                f"Its coordinator, broker {connection.address}, cannot write the state of the id any more, "
                "and answers CONCURRENT_TRANSACTIONS to every request for it.",
                fix="raise transaction.version to 1, which means the same to clients as 0 (kafka-features.sh "
                "upgrade --feature transaction.version=1). Then restart that broker and the query. Nothing "
                "is lost. See the runbook of OPERATOR.",
            )

    def _described(self, connection: Connection) -> Any:
        """Returns what the coordinator knows of the id; None if it knows nothing, or may not say it."""
        from kafka.protocol.admin import DescribeTransactionsRequest  # imports many messages, for a rare case

        request = DescribeTransactionsRequest(
            transactional_ids=[self._id], version=connection.version(DescribeTransactionsRequest, 0)
        )
        states = self._ask(connection, request).transaction_states or ()
        found = next((each for each in states if each.transactional_id == self._id), None)
        if found is None:
            raise TemporaryError(f"the answer of {connection.address} does not mention {self._id!r}")
        if found.error_code and is_transient(KafkaError(found.error_code)):
            raise KafkaError(found.error_code)
        return None if found.error_code else found


class NewTopics:
    """Decides whether a topic that a broker does not know was just created, or does not exist.

    Args:
        doing: what is attempted, for the error.
        deadline: of the request and its repetitions.
    """

    def __init__(self, doing: str, deadline: Deadline) -> None:
        self._doing, self._deadline = doing, deadline
        self._until: Deadline | None = None

    def error(self, what: str) -> TemporaryError | KafkaEosError:
        """Returns the error to raise for an answer which says that a topic or partition is unknown.

        Args:
            what: which one, and who says so.
        """
        # counts from the first such answer, and leaves time to ask once more before the deadline
        seconds = min(_NEW_TOPIC_SECONDS, self._deadline.remaining_seconds() / 2)
        self._until = self._until or Deadline.after_seconds(seconds)
        if self._until.expired:
            return classify(KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), f"{self._doing}: {what}")
        return TemporaryError(what)


class _Level:
    """The finalized level of ``transaction.version``, which a request asks for.

    Attributes:
        is_asked: whether the answer is to come.
        found: the level; None = not known.
    """

    def __init__(self) -> None:
        self.is_asked = True
        self.found: int | None = None
        self._asked_at = time.monotonic()

    @property
    def is_present(self) -> bool:
        """Whether the level was asked for a moment ago."""
        return time.monotonic() - self._asked_at < _PRESENT_SECONDS

    def take(self, answer: Any, error: Exception | None) -> None:
        """Takes the answer, or the error instead of one."""
        self.is_asked = False
        if error is None:
            self.found = features_of(answer).get(FEATURE, 0)


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
        self._level = _Level()

    def begin(self, deadline: Deadline) -> None:
        """Takes an epoch that no transaction has used.

        The level of ``transaction.version`` that the coordinator told last decides how the transaction works.
        The request for the present level is sent now, so that `confirm_version` rarely waits for its answer.

        Raises:
            FencedError: if another producer took over.
            AbortableError: if only a new producer can take an epoch.
            UnavailableError: if no coordinator answered in time.
            KafkaEosError: if the coordinator refuses.
        """
        connection = self._transactional(
            f"beginning a transaction of transactional id {self.transactional_id!r}",
            deadline,
            lambda connection: connection,
        )
        before, self.version = self.version, connection.features.get(FEATURE, 0)
        self._ask_level(connection)
        if self.epoch_is_used:
            if before >= 2:  # after an empty transaction; a new producer can take an epoch at level 0
                self.version = before
                self.confirm_version(deadline)
            self.init(self.producer_id, self.epoch, deadline)
        self.epoch_is_used = True

    def confirm_version(self, deadline: Deadline) -> None:
        """Checks that the level of ``transaction.version`` is not lower than that of this transaction.

        Brokers that went back to version 1 still accept every request of a transaction of version 2, but do
        not protect the next transaction from late requests of this one. Brokers that went back to version 0
        cannot go on with the transaction after some of these requests (`LoweredId`).

        Call it before each request of which the coordinator takes note: the first Produce for a partition,
        TxnOffsetCommit, EndTxn.

        Raises:
            AbortableError: if it was lowered.
            UnavailableError: if no coordinator answered in time.
        """
        level = self._level
        while level.is_asked and not deadline.expired:
            self._cluster.network.wait(deadline.remaining_seconds(1.0))
        if level.found is None or (self.version >= 2 and not level.is_present):

            def ask(connection: Connection) -> None:
                answer = self._cluster.ask(connection, versions_request(), deadline)
                self._level = _Level()
                self._level.take(answer, None)

            doing = f"confirming the transaction of transactional id {self.transactional_id!r}"
            self._transactional(doing, deadline, ask)
        found = self._level.found
        if found is not None and found < self.version:
            raise AbortableError(f"transaction.version was lowered from {self.version} to {found}")

    def _ask_level(self, connection: Connection) -> None:
        self._level = _Level()
        connection.send(versions_request(), self._level.take)

    def init(self, producer_id: int, epoch: int, deadline: Deadline) -> None:
        """Takes the next epoch (InitProducerId), which ends the open transaction of any older epoch.

        Args:
            producer_id, epoch: the present ones, so that the request fails if another producer has
                initialised since (KIP-360); -1 = take over from any producer.
            deadline: for the request.

        Raises:
            FencedError: if another producer took over.
            OperatorError: if the coordinator is stuck (`LoweredId`).
            KafkaEosError: if it does not answer, or refuses.
        """
        lowered = LoweredId(self.transactional_id, lambda to, asked: self._cluster.ask(to, asked, deadline))
        is_new = producer_id < 0

        def ask(connection: Connection) -> None:
            if not is_lowered(connection):
                take(connection)
                return
            try:
                if is_new:  # else `begin` has made sure that the last transaction was not of version 2
                    lowered.prepare(connection)
                take(connection)
            except KafkaError as error:
                lowered.check(connection, error)
                raise

        def take(connection: Connection) -> None:
            version = connection.version(InitProducerIdRequest, 5, 3)  # with the own epoch (KIP-360)
            request = InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._timeout_ms,
                producer_id=producer_id,
                producer_epoch=epoch,
                version=version,
            )
            answer = self._cluster.ask(connection, request, deadline)
            check(answer.error_code, f"coordinator {connection.address}")
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.epoch_is_used = False

        doing = f"initialising transactional id {self.transactional_id!r}"
        self._transactional(doing, deadline, ask)

    def end(self, commit: bool, deadline: Deadline) -> None:
        """Sends EndTxn, the same request again while its outcome is open, and takes over the next epoch."""

        def ask(connection: Connection) -> None:
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
            check(answer.error_code, f"coordinator {connection.address}")
            before = self.producer_id, self.epoch
            after = answer.producer_id, answer.producer_epoch
            if self.version >= 2 and min(after) >= 0 and (after[0] != before[0] or after[1] > before[1]):
                self.producer_id, self.epoch = after
                self.epoch_is_used = False

        verb = "committing" if commit else "aborting"
        doing = f"{verb} the transaction of transactional id {self.transactional_id!r}"
        self._transactional(doing, deadline, ask)

    def add_offsets(self, group_id: str, deadline: Deadline) -> None:
        def ask(connection: Connection) -> None:
            request = AddOffsetsToTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                group_id=group_id,
                version=connection.version(AddOffsetsToTxnRequest, 3),
            )
            answer = self._cluster.ask(connection, request, deadline)
            check(answer.error_code, f"coordinator {connection.address}")

        doing = f"adding the offsets of group {group_id!r} to the transaction"
        self._transactional(doing, deadline, ask)

    def commit_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        topics: dict[str, list[GroupOffset]] = {}
        for each in offsets:
            topics.setdefault(each.tp.topic, []).append(each)
        doing = f"committing offsets of group {group_id!r}"
        new = NewTopics(doing, deadline)

        def ask(connection: Connection) -> None:
            needed = 5 if self.version >= 2 else 3
            version = connection.version(TxnOffsetCommitRequest, needed, needed)
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
                                committed_leader_epoch=each.epoch,
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
            accepted = set()
            for topic in answer.topics or ():
                for each in topic.partitions or ():
                    tp = TopicPartition(topic.name, each.partition_index)
                    if each.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                        raise new.error(f"{tp} is unknown to {connection.address}")
                    check(each.error_code, f"coordinator {connection.address}, {tp}")
                    accepted.add(tp)
            _check_complete({each.tp for each in offsets}, accepted, connection)

        self._coordinated(doing, deadline, GROUP, group_id, ask)

    def _transactional(self, doing: str, deadline: Deadline, ask: Callable[[Connection], T]) -> T:
        return self._coordinated(doing, deadline, TRANSACTION, self.transactional_id, ask)

    def _coordinated(
        self, doing: str, deadline: Deadline, kind: int, key: str, ask: Callable[[Connection], T]
    ) -> T:
        """Asks a coordinator, and looks for it again after a failure that another broker may not have."""

        def once() -> T:
            try:
                return ask(self._cluster.coordinator(kind, key, deadline))
            except TemporaryError:
                self._cluster.forget_coordinator(kind, key)
                raise
            except KafkaError as failure:
                if failure.code not in _BUSY:
                    self._cluster.forget_coordinator(kind, key)
                raise

        return self._cluster.retried(doing, deadline, once, self.explained)

    def explained(self, error: KafkaError, doing: str) -> KafkaEosError:
        """Returns the error to raise for a broker's error in a transaction."""
        code = error.code
        text = f"{doing}: {error.text} ({error.name})"
        if code in _FENCED:
            return FencedError(text, fix=FENCED_FIX)
        return AbortableError(text) if code in _ABORTABLE else classify(error, doing)

    def enlist(self, tps: Collection[TopicPartition], deadline: Deadline) -> None:
        """Tells the coordinator about new partitions; since version 2, their leaders do that."""
        if self.version < 2:
            self.add_partitions(tps, deadline)
        else:
            self.confirm_version(deadline)

    def add_partitions(self, tps: Collection[TopicPartition], deadline: Deadline) -> None:
        """Tells the coordinator to which partitions the transaction writes (``transaction.version`` 1)."""
        topics: dict[str, list[int]] = {}
        for tp in tps:
            topics.setdefault(tp.topic, []).append(tp.partition)
        doing = f"adding partitions to the transaction of {self.transactional_id!r}"
        new = NewTopics(doing, deadline)

        def ask(connection: Connection) -> None:
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
            codes = {
                TopicPartition(topic.name, each.partition_index): each.partition_error_code
                for topic in answer.results_by_topic_v3_and_below or ()
                for each in topic.results_by_partition or ()
            }
            refused = {tp: code for tp, code in codes.items() if code}
            reasons = {tp: code for tp, code in refused.items() if code != _NOT_ATTEMPTED} or refused
            for tp, code in reasons.items():
                if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise new.error(f"{tp} is unknown to {connection.address}")
                check(code, f"coordinator {connection.address}, {tp}")
            _check_complete(set(tps), codes.keys(), connection)

        self._transactional(doing, deadline, ask)


class ProducerId:
    """The producer id of a producer without transactions, by which brokers recognise what they have.

    Args:
        cluster: the brokers.
        is_wanted: whether to ask for an id. Without one, a batch that is sent again may be written twice.

    Attributes:
        producer_id: of the producer; -1 = it has none.
        epoch: the first one of each partition.
    """

    transactional_id = None
    version = 0

    def __init__(self, cluster: Cluster, *, is_wanted: bool) -> None:
        self.producer_id, self.epoch = -1, -1
        self.is_wanted = is_wanted
        self._cluster = cluster

    def init(self, deadline: Deadline) -> None:
        """Takes a producer id that no other producer has (InitProducerId).

        Raises:
            AuthorizationError: if the principal may not write idempotently.
            UnavailableError: if no broker answered in time.
        """

        def ask() -> None:
            connection = self._cluster.anyone(deadline)
            request = InitProducerIdRequest(
                transactional_id=None,
                transaction_timeout_ms=_NO_TIMEOUT_MS,
                producer_id=-1,
                producer_epoch=-1,
                version=connection.version(InitProducerIdRequest, 5),
            )
            answer = self._cluster.ask(connection, request, deadline)
            check(answer.error_code, f"broker {connection.address}")
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch

        self._cluster.retried("asking for a producer id", deadline, ask)

    def after(self, producer_id: int, epoch: int, deadline: Deadline) -> tuple[int, int]:
        """Returns the producer id and epoch with which a partition begins again (KIP-360).

        The next epoch of the same id is better than another id, because the broker then refuses late requests
        of the old epoch.
        """
        if producer_id == self.producer_id and epoch >= _LAST_EPOCH:
            self.init(deadline)
        if producer_id != self.producer_id:
            return self.producer_id, self.epoch
        return producer_id, epoch + 1

    def enlist(self, tps: Collection[TopicPartition], deadline: Deadline) -> None:
        """Does nothing: no coordinator has to know."""

    def explained(self, error: KafkaError, doing: str) -> KafkaEosError:
        """Returns the error to raise for a broker's error."""
        if error.code in _FENCED or error.code in (*FORGOTTEN, ErrorCode.CORRUPT_MESSAGE):
            return RetriableError(f"{doing}: {error.text} ({error.name})")
        return classify(error, doing)


def check(code: int, where: str) -> None:
    """Raises the broker's error, if there is one; the text names the broker or partition that it concerns."""
    if code:
        raise KafkaError(code, f"{where}: {KafkaError(code).text}")


def _check_complete(
    asked: Collection[TopicPartition], answered: Collection[TopicPartition], connection: Connection
) -> None:
    missing = set(asked) - set(answered)
    if missing:
        raise TemporaryError(f"the answer of {connection.address} does not mention {min(missing)}")
