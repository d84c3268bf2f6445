"""The transactional producer of a query. One client runs many transactions, as long as it stays clean.

The **epoch rule** defines "clean". librdkafka implements the transaction protocol without the epoch bump of
KIP-890. An EndTxn request of transaction N that the network delayed could therefore end transaction N+1: the
rows of N+1 would be lost while its offsets advance. So a producer may run another transaction only if the
broker answered its last commit at the first try. The client's statistics prove that: they must show exactly
one EndTxn request for the commit, and no retry, time-out or disconnection. Otherwise the caller closes the
producer, and ``init_transactions`` of the next one raises the epoch, which makes a late request harmless.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientTopicPartition

from kafka_eos_source.errors import (
    KafkaEosError,
    OutcomeUnknownError,
    RestartQueryError,
    RetriableError,
)
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import kafka_error
from kafka_eos_source.kafka.offset_refusals import send_in_parts
from kafka_eos_source.kafka.producer import SLICE_SECONDS, RecordProducer
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

STATISTICS_INTERVAL_MS = 100

#: Time limit of one request with offsets. It is longer than a group takes to move to another coordinator
#: after a broker is lost. If the coordinator does not accept the request in this time, the transaction is
#: aborted and the batch is sent again.
_OFFSETS_SECONDS = 30.0

#: Retries of metadata requests during a transaction. If they all fail, the transaction starts over.
_ADMIN_RETRIES = 3
_ADMIN_PAUSE_MS = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """Requests and failures that the client's statistics counted, summed over all brokers.

    Attributes:
        at_us: when the statistics were taken: µs on the monotonic clock.
        commits: number of EndTxn requests sent, including retries.
        trouble: number of retries, time-outs and disconnections.
    """

    at_us: int = 0
    commits: int = 0
    trouble: int = 0

    @classmethod
    def parse(cls, statistics: str) -> Traffic:
        """Parses librdkafka's statistics, a JSON text."""
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
        """Returns whether exactly one EndTxn was sent since ``before``, and nothing went wrong."""
        return self.commits == before.commits + 1 and self.trouble == before.trouble


class TransactionalProducer(RecordProducer):
    """A producer with a transactional id. Call `init` first.

    After any error, call only `abort` and `close`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Creates the client without contacting a broker.

        Args:
            config: librdkafka properties, including ``transactional.id``.

        Raises:
            InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
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
        """Calls ``init_transactions``: fences older owners of the id and ends their transaction (KIP-98).

        Raises:
            UnavailableError: if no broker or coordinator answered before ``deadline``.
            AuthorizationError: if the ACL on the transactional id is missing.
            InvalidOptionError: if the broker refuses ``transaction.timeout.ms``.
        """
        self._call(
            deadline,
            f"initialising transactional id {self.transactional_id!r}",
            lambda seconds: self._client.init_transactions(seconds),
        )

    def is_clean(self) -> bool:
        """Returns whether this producer may run another transaction (the epoch rule, see the module).

        Waits a few statistics intervals at most for the first statistics after the last commit.
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
                "the producer of %s is not reused: its last commit was not answered at the first try "
                "(%s, and %s before)",
                self.transactional_id,
                after,
                self._before_commit,
            )
            return False
        self._before_commit = after
        return True

    def begin(self) -> None:
        """Begins a transaction.

        Raises:
            KafkaEosError: if the client refuses, for example because it was fenced.
        """
        self.begin_count()
        self._committed_at_us = None
        doing = f"beginning a transaction of transactional id {self.transactional_id!r}"
        try:
            self._watchdog.call(doing, self._client.begin_transaction, 0.0)
        except KafkaException as error:
            raise self._cause(kafka_error(error), doing) from error

    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Returns the end of each partition's log, including the records of this open transaction.

        Raises:
            UnavailableError: if a partition does not exist any more, or no broker answers.
        """
        return self._source_admin().high_watermarks(partitions)

    def ask_topic_ids(self, topics: Collection[str]) -> None:
        """Does nothing: librdkafka's requests cannot be sent without waiting for their answers."""

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns the present ids (KIP-516) of topics, without topics that were deleted or are not visible.

        Raises:
            UnavailableError: if no broker answers.
        """
        return self._source_admin().visible_topic_ids(topics)

    def send_sealed(
        self,
        batches: Iterable[tuple[int, memoryview]],  # noqa: ARG002
        topic: str,
        deadline: Deadline,  # noqa: ARG002
    ) -> None:
        """Refuses record batches that tasks have encoded: librdkafka encodes records itself.

        Raises:
            RestartQueryError: always. Tasks encode for this client only if the process that planned the batch
                has the C kernel, and this one does not.
        """
        raise RestartQueryError(
            f"tasks encoded record batches for topic {topic!r}, but this process writes with librdkafka.",
            fix="install the same build of kafka-eos for all Python processes of the driver, and set the "
            "environment variables KAFKA_EOS_NATIVE and KAFKA_EOS_TRANSACTION_CLIENT alike for all of them.",
        )

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        """Adds the group's offsets to the transaction (TxnOffsetCommit, KIP-98 and KIP-447).

        Many offsets need several requests, each small enough for one record batch in the coordinator's log.
        All requests belong to the transaction, so a producer that dies between two of them commits none.

        Raises:
            OperatorError: if the coordinator's log does not accept record batches of that size.
            AbortableError, UnavailableError: if the request failed; see `failure.classify`.
        """
        if group_id not in self._group_metadata:
            self._group_metadata[group_id] = self._metadata_of(group_id)
        send_in_parts(self._topic_property, offsets, group_id, deadline, self._send_offsets)

    def _topic_property(self, topic: str, name: str, deadline: Deadline) -> str:
        with TopicAdmin(self._connection) as admin:
            return admin.config(topic, deadline)[name]

    def _send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        wanted = [
            ClientTopicPartition(each.tp.topic, each.tp.partition, each.offset, each.metadata, each.epoch)
            for each in offsets
        ]
        self._call(
            deadline,
            f"committing offsets of group {group_id!r}",
            lambda seconds: self._client.send_offsets_to_transaction(
                wanted, self._group_metadata[group_id], seconds
            ),
            _OFFSETS_SECONDS,
        )

    def commit(self, deadline: Deadline) -> None:
        """Commits the transaction.

        Raises:
            OutcomeUnknownError: after *any* error, because the transaction may be committed nevertheless.
                Close this producer, `init` another one, and read the commit token.
        """
        try:
            self._call(
                deadline,
                f"committing the transaction of transactional id {self.transactional_id!r}",
                lambda seconds: self._client.commit_transaction(seconds),
            )
        except KafkaEosError as error:
            raise OutcomeUnknownError(f"the commit was sent, but not confirmed: {error}") from error
        self._committed_at_us = time.monotonic_ns() // 1000
        self._complaints.forget()

    def abort(self, deadline: Deadline) -> None:
        """Tries to abort the transaction. If that fails, `init` of the next producer ends it."""
        seconds = deadline.remaining_seconds(SLICE_SECONDS)
        try:
            self._watchdog.call(
                "aborting the transaction", partial(self._client.abort_transaction, seconds), seconds
            )
        except (KafkaException, RetriableError) as error:
            _log.info("cannot abort the transaction of %s: %s", self.transactional_id, error)

    def _destroy(self) -> None:
        # not left to the garbage collector, which may take very long to find a producer that was dropped
        if self._admin is not None:
            self._admin.close()
        super()._destroy()

    def _source_admin(self) -> SourceAdmin:
        if self._admin is None:
            self._admin = SourceAdmin(self._connection, "read_committed", _ADMIN_RETRIES, _ADMIN_PAUSE_MS)
        return self._admin

    def _writing(self) -> str:
        return f"{super()._writing()} under transactional id {self.transactional_id!r}"

    def _failure(self) -> KafkaError | None:
        """Returns why the transaction or a record failed.

        The transaction's own error comes first, because its records then report only that they were purged.
        """
        return self._fatal_error() or self._transaction_error() or self._delivery_error

    def _transaction_error(self) -> KafkaError | None:
        """Returns why the open transaction failed; None = it has not failed.

        The method tries to begin another transaction, which librdkafka refuses with the reason. No other call
        reveals the reason without adding something to the transaction.
        """
        try:
            self._watchdog.call("checking the transaction", self._client.begin_transaction, 0.0)
        except KafkaException as error:
            failure = kafka_error(error)
            has_failed = (
                failure.txn_requires_abort() or failure.fatal() or failure.code() != KafkaError._STATE
            )
            return failure if has_failed else None
        raise AssertionError("librdkafka began a transaction within a transaction")

    def _metadata_of(self, group_id: str) -> Any:
        """Returns group metadata for ``send_offsets``.

        Only a consumer can create it. This consumer never joins the group, so its generation is -1, which the
        coordinator accepts.
        """
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
