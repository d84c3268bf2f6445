"""Sends records from Arrow batches to Kafka: in bulk where possible, else one by one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka import deliveries, librdkafka
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, kafka_error, unreachable
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.native import end_poll, has_pointers
from kafka_eos_source.kafka.partition_counts import PartitionCounts
from kafka_eos_source.kafka.request import Complaints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.runtime.watchdog import Watchdog

T = TypeVar("T")

#: Longest wait of one call to the client. Deadlines are met to about this precision.
SLICE_SECONDS = 5.0
#: Longest wait of a call that runs callbacks. From 0.2 s on, confluent-kafka splits a flush into several
#: calls, and runs callbacks even after one of them has failed. The exception is then pending in the callback,
#: and a lock that the callback takes is never released.
_EVENTS_SECONDS = 0.1
_CLOSE_SECONDS = 30.0
#: A flush checks at this interval whether its topics still exist: librdkafka waits for a deleted topic.
_TOPIC_CHECK_SECONDS = 10.0
#: librdkafka's partitioners that place records with keys as `librdkafka.place` does.
_AS_JAVA = ("murmur2_random", "murmur2")

_log = logging.getLogger(__name__)


class RecordProducer:
    """A producing client, and the thread that serves its events. Create it after any fork.

    Its methods take the deadline of the caller's whole operation, and raise only errors of
    `kafka_eos_source.errors`. Not thread-safe.

    Attributes:
        enqueued: number of records that the client accepted since `begin_count`.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Creates the client without contacting a broker.

        Args:
            config: librdkafka properties and callbacks.
            name: name of the producer in log lines.

        Raises:
            InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
        """
        self.name = name
        self.enqueued = 0
        self._topics: set[str] = set()
        self._bootstrap = str(config.get("bootstrap.servers", ""))
        self._complaints = Complaints(config)
        self._delivery_error: KafkaError | None = None
        self._partition_counts = PartitionCounts(self._partition_count)
        self._places_as_java = config.get("partitioner") in _AS_JAVA
        self._fatal: KafkaError | None = None
        in_transactions = "transactional.id" in config
        self._client: Any = make(
            Producer,
            {
                **(config if in_transactions else deliveries.with_counter(config)),
                "error_cb": self._on_error,
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
            },
        )
        #: the client whose poll `close` ends; None if that is not possible
        self._polled: Any = self._client if has_pointers() else None
        self._batches: librdkafka.BatchProducer | None = None
        self._deliveries: deliveries.Deliveries | None = None
        if has_pointers():
            self._batches = librdkafka.BatchProducer(self._client)
            self._deliveries = None if in_transactions else deliveries.counter_of(self._client)
        self._watchdog = Watchdog(f"client of {name}")
        # confluent-kafka runs no delivery callback for records that were sent as a batch; a transaction
        # fails if one of its records does
        self._reports_batches = in_transactions or self._deliveries is not None
        self._closed = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="kafka-eos-producer", daemon=True)
        self._poller.start()

    @property
    def complaint(self) -> str:
        """What the client reported since the last transaction was committed; "" if nothing."""
        return self._complaints.last

    @property
    def queued(self) -> int:
        """Number of records in the client that no broker has acknowledged yet."""
        return len(self._client)

    def begin_count(self) -> None:
        """Resets the count of records, the topics written to, and earlier delivery errors."""
        self.enqueued = 0
        self._topics.clear()
        self._delivery_error = None
        if self._deliveries is not None:
            self._deliveries.reset()

    def send(
        self,
        rows: pa.RecordBatch,
        topic: str | None,
        deadline: Deadline,
        partitions: int = 0,  # noqa: ARG002 - only for a client that sends sealed batches too
    ) -> None:
        """Enqueues every row of a staged batch, in order.

        Args:
            rows: column ``value``, and optionally ``key``, ``topic``, ``partition``, ``headers`` and
                ``timestamp``, as in `schema.STAGED_ARROW`.
            topic: topic of all rows; None = the column ``topic`` names it.
            deadline: for room in the client's queue.
            partitions: has no effect.

        Raises:
            InvalidRecordError: if a record is larger than ``message.max.bytes``.
            AbortableError: if the transaction has failed.
        """
        columns = {name: rows.column(name) for name in rows.schema.names}
        for each_topic, part in by_topic(columns, topic):
            self._topics.add(each_topic)
            extra = _needs_produceva(part)
            if (
                self._batches is not None
                and self._reports_batches
                and not (extra and choice().kernel is None)
            ):
                batch = librdkafka.messages(part.get("key"), part["value"], part.get("partition"))
                more = librdkafka.extras(part.get("timestamp"), part.get("headers")) if extra else None
                self._send_batch(each_topic, *self._grouped(each_topic, batch, more), deadline)
            else:
                self._send_one_by_one(each_topic, part, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Waits until the brokers have acknowledged every record.

        Raises:
            UnavailableError: if brokers did not acknowledge the records before ``deadline``, or a topic was
                deleted.
            KafkaEosError: if a record failed; the class depends on the reason.
        """
        next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
        while self._serve(lambda: self._client.flush(deadline.remaining_seconds(_EVENTS_SECONDS))) > 0:
            self._raise_if_failed()
            self._raise_if_expired(deadline)
            if next_check.expired:
                self._partition_counts.clear()
                self.check_partitions(dict.fromkeys(self._topics, -1), deadline)
                next_check = Deadline.after_seconds(_TOPIC_CHECK_SECONDS)
        self._raise_if_failed()

    def close(self) -> None:
        """Ends the client and its thread. Drops unsent records, and leaves an open transaction open.

        This method does not call the client's own ``close``, which aborts the transaction (confluent-kafka
        2.16) and waits for the answer without a time limit. After a commit of unknown outcome, nothing may
        abort the transaction. Instead, the client ends when its last reference, held here, is dropped.
        """
        self._closed.set()
        polled, self._polled = self._polled, None
        if polled is not None:
            end_poll(polled)
        self._poller.join()
        self._watchdog.end(self._destroy, _CLOSE_SECONDS)

    def _destroy(self) -> None:
        self._deliveries = None
        if self._batches is not None:
            self._batches.close()
        self._client.purge()
        self._serve(lambda: self._client.flush(0.01))  # purged records hold memory until they are reported
        self._client = None

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """Returns the cluster's id, and the partition count of every topic that the principal may see."""
        metadata: Any = self._call(
            deadline,
            "reading the cluster's metadata",
            lambda seconds: self._client.list_topics(timeout=seconds),
        )
        return metadata.cluster_id, {
            name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None
        }

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        """Checks that every topic exists and has enough partitions. `flush` notices later deletions.

        Raises:
            UnavailableError, AuthorizationError, InvalidRecordError: as `PartitionCounts.check`.
        """
        self._partition_counts.check(highest, deadline)

    # -- inside ----------------------------------------------------------------------------------

    def _partition_count(self, name: str, deadline: Deadline) -> int:
        def ask(seconds: float) -> int:
            topic = self._client.list_topics(name, timeout=seconds).topics[name]
            if topic.error is not None:
                raise KafkaException(topic.error)
            return len(topic.partitions)

        return self._call(deadline, f"looking up output topic {name!r}", ask)

    def _call(
        self,
        deadline: Deadline,
        doing: str,
        call: Callable[[float], T],
        slice_seconds: float = SLICE_SECONDS,
    ) -> T:
        """Makes a blocking call of the client; repeats it while its error is temporary.

        A repeated call of librdkafka's continues where the last one stopped, so no pause is needed. A login
        that is refused for good ends the tries.
        """

        def once() -> T:
            seconds = max(0.1, deadline.remaining_seconds(slice_seconds))
            return self._watchdog.call(doing, partial(call, seconds), seconds)

        def permanent(failure: KafkaException) -> KafkaEosError | None:
            error = kafka_error(failure)
            if error.txn_requires_abort() or error.fatal() or not (is_transient(error) or is_login(error)):
                return self._cause(error, doing)
            if is_login(error):
                self._complaints.on_error(error)
            return self._complaints.permanent_login_error(doing)

        def timed_out(failure: KafkaException) -> KafkaEosError:
            refused = self._complaints.login_error(doing)
            if refused is not None:
                return refused
            reason = f"{doing}: {self._complaints.last or kafka_error(failure).str()}"
            return unreachable(self._bootstrap, deadline.budget_seconds * 1000, reason)

        answer = retry(once, KafkaException, Pauses(deadline, 0.0), permanent=permanent, timed_out=timed_out)
        self._complaints.answered()
        return answer

    def _cause(self, failure: KafkaError, doing: str) -> KafkaEosError:
        """Returns the error to raise. Prefers the fatal error behind a vague "fatal" or "wrong state"."""
        return classify(self._fatal_error() or failure, doing)

    def _fatal_error(self) -> KafkaError | None:
        found = self._batches.fatal_error() if self._batches is not None else None
        return found or self._fatal

    def _grouped(
        self, topic: str, batch: librdkafka.Messages, more: librdkafka.Extras | None
    ) -> tuple[librdkafka.Messages, librdkafka.Extras | None]:
        """Returns the same messages grouped by partition, as far as their partitions are known."""
        partitions = self._partition_counts.last(topic)
        if self._places_as_java and partitions is not None:
            librdkafka.place(batch, partitions)
        order = librdkafka.by_partition(batch)
        if order is None:
            return batch, more
        return batch[order], None if more is None else more.of(order)

    def _send_batch(
        self, topic: str, batch: librdkafka.Messages, more: librdkafka.Extras | None, deadline: Deadline
    ) -> None:
        assert self._batches is not None
        rest = batch
        while True:
            taken = self._batches.produce(topic, rest, more)
            self.enqueued += taken
            if taken == len(rest):
                return
            failed = np.flatnonzero(rest["err"])
            if rest["err"][failed[0]] != KafkaError._QUEUE_FULL:
                row = rest[failed[0]]
                raise self._refused(topic, int(row["err"]), int(row["len"]) + int(row["key_len"]))
            rest = rest[failed[0] :]
            rest["err"] = 0
            more = more.of(slice(int(failed[0]), None)) if more is not None else None
            self._wait_for_room(deadline)

    def _send_one_by_one(self, topic: str, part: Mapping[str, pa.Array], deadline: Deadline) -> None:
        """Enqueues each record with a call of its own, where the C kernel is not available."""
        rows = len(part["value"])
        none = [None] * rows
        columns = [
            part[name].to_pylist() if name in part else none
            for name in ("value", "key", "partition", "timestamp", "headers")
        ]
        for value, key, partition, timestamp, headers in zip(*columns, strict=True):
            while True:
                try:
                    self._client.produce(
                        topic,
                        value,
                        key,
                        partition=librdkafka.PARTITION_UNASSIGNED if partition is None else partition,
                        timestamp=timestamp or 0,
                        headers=[(h["key"], h["value"]) for h in headers] if headers else None,
                    )
                    break
                except BufferError:
                    self._wait_for_room(deadline)
                except KafkaException as error:
                    size = len(value or b"") + len(key or b"")
                    raise self._refused(topic, kafka_error(error).code(), size) from error
            self.enqueued += 1

    def _refused(self, topic: str, code: int, size_bytes: int) -> KafkaEosError:
        """Returns the error to raise for a record that the client did not accept."""
        if code in (KafkaError._STATE, KafkaError._FATAL):
            # the client accepts no records at all: an earlier failure is the reason
            return classify(self._failure() or KafkaError(code), self._writing())
        return self._cause(KafkaError(code), f"writing a record of {size_bytes:,} bytes to topic {topic!r}")

    def _wait_for_room(self, deadline: Deadline) -> None:
        """Waits until half of the queued records have been sent, so that many more fit in at once."""
        target = len(self._client) // 2
        while len(self._client) > target:
            self._raise_if_failed()
            self._raise_if_expired(deadline)
            self._serve(lambda: self._client.flush(0.01))

    def _raise_if_expired(self, deadline: Deadline) -> None:
        if deadline.expired:
            raise self._complaints.login_error(self._writing()) or unreachable(
                self._bootstrap, deadline.budget_seconds * 1000, self._complaints.last
            )

    def _raise_if_failed(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise classify(failure, self._writing())

    def _writing(self) -> str:
        """Describes what the producer is doing, for messages."""
        return f"writing records to {', '.join(map(repr, sorted(self._topics)))}"

    def _failure(self) -> KafkaError | None:
        """Returns why some enqueued record will not be written; None = no failure is known."""
        counted = self._deliveries.error() if self._deliveries is not None else None
        return self._fatal_error() or self._delivery_error or counted

    def _serve(self, call: Callable[[], int]) -> int:
        """Makes a call that runs the client's callbacks, and returns what it returns.

        confluent-kafka passes a fatal error to no callback. It raises the error once, from whichever call
        runs callbacks first, in this thread or in the polling thread.
        """
        try:
            return call()
        except KafkaException as error:
            self._fatal = kafka_error(error)
            return len(self._client)

    def _poll(self) -> None:
        while not self._closed.is_set():
            self._serve(lambda: self._client.poll(_EVENTS_SECONDS))

    def _on_error(self, error: KafkaError) -> None:
        self._complaints.on_error(error)
        _log.info("producer %s: %s (%s)", self.name, self._complaints.last, error.name())

    def _on_delivery(self, error: KafkaError | None, _message: object) -> None:
        if error is not None and self._delivery_error is None:
            self._delivery_error = error


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


def _needs_produceva(part: Mapping[str, pa.Array]) -> bool:
    """Returns whether any record has headers or a timestamp, which ``rd_kafka_produce_batch`` cannot send."""
    return any(name in part and part[name].null_count < len(part[name]) for name in ("headers", "timestamp"))
