"""The transactional producer of one query: one client, used for one transaction after another while clean.

**Clean** (the epoch rule). librdkafka speaks the transaction protocol without KIP-890's epoch bump, so an
EndTxn of transaction N that was delayed in the network could end transaction N+1, losing its rows while
its offsets move on. A producer may therefore be used again only if its last commit was answered at the
first try: the client's statistics show exactly one EndTxn per commit, and no retry, time-out or
disconnection since the last look. In any other case it is closed, and a new one's ``init_transactions``
raises the epoch, which makes a late request harmless.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientTopicPartition

from kafka_eos_source.errors import (
    AbortableError,
    KafkaEosError,
    OperatorError,
    OutcomeUnknownError,
    RetriableError,
)
from kafka_eos_source.kafka import offset_requests
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import kafka_error
from kafka_eos_source.kafka.producer import SLICE_SECONDS, RecordProducer
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

STATISTICS_INTERVAL_MS = 100

#: Kafka's default of ``max.message.bytes``.
_OFFSETS_TOPIC_BYTES = 1_048_588

#: One request with offsets: longer than a group needs to find another coordinator when its broker is lost.
#: If the coordinator has not taken it by then, the transaction is lost, and the batch is sent again.
_OFFSETS_SECONDS = 30.0

#: How often the end of a log is asked for before the transaction is given up (and begun again).
_LOOK_RETRIES = 3
_LOOK_PAUSE_MS = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """What the statistics say about the conversation with the brokers, summed over them.

    Attributes:
        at_us: when they were taken, on the monotonic clock.
        commits: EndTxn requests sent, retries included.
        trouble: retried, timed-out and cut-off requests so far.
    """

    at_us: int = 0
    commits: int = 0
    trouble: int = 0

    @classmethod
    def parse(cls, statistics: str) -> Traffic:
        parsed = json.loads(statistics)
        brokers = parsed["brokers"].values()
        return cls(
            at_us=parsed["ts"],
            commits=sum(broker["req"].get("EndTxn", 0) for broker in brokers),
            trouble=sum(
                broker[name] for broker in brokers for name in ("txretries", "req_timeouts", "disconnects")
            ),
        )

    def clean_since(self, before: Traffic) -> bool:
        """Whether exactly one EndTxn was sent since ``before``, and nothing went wrong."""
        return self.commits == before.commits + 1 and self.trouble == before.trouble


class TransactionalProducer(RecordProducer):
    """One initialised transactional client.

    After any error the only calls that make sense are `abort` and `close`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Makes the client without talking to a broker.

        Args:
            config: librdkafka properties, ``transactional.id`` included.

        Raises:
            InvalidOptionError: librdkafka refuses a property, or two of them together.
        """
        self.transactional_id = str(config["transactional.id"])
        self._statistics: str | None = None
        self._statistics_changed = threading.Condition()
        self._connection = admin_config(config)
        self._admin: SourceAdmin | None = None
        self._group_metadata: dict[str, Any] = {}
        self._before_commit = Traffic()
        self._committed_at_us: int | None = None
        super().__init__(
            {**config, "statistics.interval.ms": STATISTICS_INTERVAL_MS, "stats_cb": self._on_statistics},
            self.transactional_id,
        )

    def init(self, deadline: Deadline) -> None:
        """``init_transactions``: fences every older owner and settles the transaction it left (KIP-98).

        Raises:
            UnavailableError: no broker or coordinator answered before ``deadline``.
            AuthorizationError: the ACL on the transactional id is missing.
            InvalidOptionError: the broker refuses ``transaction.timeout.ms``.
        """
        self._until(
            deadline,
            f"initialising transactional id {self.transactional_id!r}",
            lambda seconds: self._client.init_transactions(seconds),
        )

    def is_clean(self) -> bool:
        """Whether this producer may carry another transaction (the epoch rule, see the module).

        Waits, at most a few statistics intervals, for the first statistics after the last commit.
        """
        if self._committed_at_us is None:
            return False
        wait = Deadline.after_ms(10 * STATISTICS_INTERVAL_MS)
        after = self._traffic()
        while after.at_us <= self._committed_at_us:
            if wait.expired:
                return False
            with self._statistics_changed:
                self._statistics_changed.wait(wait.remaining_seconds())
            after = self._traffic()
        if not after.clean_since(self._before_commit):
            _log.info(
                "producer of %s is not clean: %s after %s", self.transactional_id, after, self._before_commit
            )
            return False
        self._before_commit = after
        return True

    def begin(self) -> None:
        self.begin_count()
        self._committed_at_us = None
        doing = f"beginning a transaction of transactional id {self.transactional_id!r}"
        try:
            self._watchdog.call(doing, self._client.begin_transaction, 0.0)
        except KafkaException as error:
            raise self._cause(kafka_error(error), doing) from error

    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The end of each partition's log, the records of this open transaction included.

        Raises:
            UnavailableError: a partition is gone, or no broker answers.
        """
        return self._look_up().high_watermarks(partitions)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """The ids (KIP-516) of topics as they are now; one that is gone is left out.

        Raises:
            UnavailableError: no broker answers.
        """
        return self._look_up().visible_topic_ids(topics)

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        """Makes ``offsets`` of the group part of the transaction (TxnOffsetCommit, KIP-98 and KIP-447).

        Many offsets take several requests, each small enough for one record batch of the coordinator's log.
        All of them belong to the transaction, so a producer that dies between two of them commits none.

        Raises:
            OperatorError: the coordinator's log takes no batches of that size.
            AbortableError, UnavailableError: as Kafka's answer says; see `failure.classify`.
        """
        if group_id not in self._group_metadata:
            self._group_metadata[group_id] = self._metadata_of(group_id)
        for request in offset_requests.split(offsets, group_id):
            try:
                self._send_offsets(request, group_id, deadline)
            except AbortableError as error:
                too_large = self._too_large(request, group_id, deadline, error)
                if too_large is None:
                    raise
                raise too_large from error

    def _send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        wanted = [
            ClientTopicPartition(each.tp.topic, each.tp.partition, each.offset, each.metadata)
            for each in offsets
        ]
        self._until(
            deadline,
            f"committing offsets of group {group_id!r}",
            lambda seconds: self._client.send_offsets_to_transaction(
                wanted, self._group_metadata[group_id], seconds
            ),
            _OFFSETS_SECONDS,
        )

    def _too_large(
        self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline, error: AbortableError
    ) -> OperatorError | None:
        """Explains the coordinator's "unknown server error" where its log is set to small batches.

        A coordinator that cannot write a request because it is too large answers with that error, without a
        reason. No retry mends it.

        Returns:
            None if the error has another cause, or if the log's limit cannot be read.
        """
        cause = error.__cause__
        if not isinstance(cause, KafkaException) or kafka_error(cause).code() != KafkaError.UNKNOWN:
            return None
        size = sum(offset_requests.record_bytes(each, group_id) for each in offsets)
        name = offset_requests.OFFSETS_TOPIC
        try:
            with TopicAdmin(self._connection) as admin:
                look = Deadline.after_seconds(deadline.remaining_seconds(SLICE_SECONDS))
                limit = int(admin.config(name, look)["max.message.bytes"])
        except (KafkaEosError, KeyError, ValueError) as unknown:
            _log.warning("cannot read max.message.bytes of topic %s: %s", name, unknown)
            return None
        if size <= limit:
            return None
        return OperatorError(
            f"the coordinator of group {group_id!r} refused {len(offsets):,} offsets, up to {size:,} bytes: "
            f"topic {name!r} has max.message.bytes={limit}. {error.message}",
            fix=f"raise max.message.bytes of {name!r} to {_OFFSETS_TOPIC_BYTES} (Kafka's default) and "
            "restart the query; nothing of this transaction was committed.",
        )

    def commit(self, deadline: Deadline) -> None:
        """``commit_transaction``.

        Raises:
            OutcomeUnknownError: on *any* error: the transaction may be committed. Close this producer,
                `init` another, and read the token.
        """
        try:
            self._until(
                deadline,
                f"committing the transaction of transactional id {self.transactional_id!r}",
                lambda seconds: self._client.commit_transaction(seconds),
            )
        except KafkaEosError as error:
            raise OutcomeUnknownError(f"the commit was sent and not confirmed: {error}") from error
        self._committed_at_us = time.monotonic_ns() // 1000

    def abort(self, deadline: Deadline) -> None:
        """Best effort: whatever is left open is settled by the next owner's `init` anyhow."""
        seconds = deadline.remaining_seconds(SLICE_SECONDS)
        try:
            self._watchdog.call(
                "aborting the transaction", partial(self._client.abort_transaction, seconds), seconds
            )
        except (KafkaException, RetriableError) as error:
            _log.info("abort of %s: %s", self.transactional_id, error)

    def _look_up(self) -> SourceAdmin:
        if self._admin is None:
            self._admin = SourceAdmin(self._connection, "read_committed", _LOOK_RETRIES, _LOOK_PAUSE_MS)
        return self._admin

    def _writing(self) -> str:
        return f"{super()._writing()} under transactional id {self.transactional_id!r}"

    def _failure(self) -> KafkaError | None:
        """Asks the transaction: a record that it took down with it reports no more than "purged"."""
        return self._fatal_error() or self._transaction_error() or self._delivery_error

    def _transaction_error(self) -> KafkaError | None:
        """What the open transaction failed by, None = it has not.

        To begin another is refused with the reason; nothing else tells it without adding to the transaction.
        """
        try:
            self._watchdog.call("asking the transaction", self._client.begin_transaction, 0.0)
        except KafkaException as error:
            failure = kafka_error(error)
            told = failure.txn_requires_abort() or failure.fatal() or failure.code() != KafkaError._STATE
            return failure if told else None
        raise AssertionError("a transaction was begun within a transaction")

    def _metadata_of(self, group_id: str) -> Any:
        """Only a consumer can make group metadata; it never joins, so its generation is -1 (accepted)."""
        consumer = make(Consumer, {**self._connection, "group.id": group_id})
        try:
            return consumer.consumer_group_metadata()
        finally:
            consumer.close()

    def _on_statistics(self, statistics: str) -> None:
        with self._statistics_changed:
            self._statistics = statistics
            self._statistics_changed.notify_all()

    def _traffic(self) -> Traffic:
        with self._statistics_changed:
            statistics = self._statistics
        return Traffic() if statistics is None else Traffic.parse(statistics)
