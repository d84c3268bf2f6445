"""Records from Arrow batches to Kafka: one client, the fast path and the slow one, every failure named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from kafka_eos_source.errors import InvalidRecordError, KafkaEosError
from kafka_eos_source.kafka import deliveries, librdkafka
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, kafka_error, unreachable
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.native import has_pointers
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.watchdog import Watchdog

#: Longest single wait inside a call of the client, so that deadlines are kept to about this.
SLICE_SECONDS = 5.0
#: The same for a call that delivers events. From 0.2 s on confluent-kafka makes several calls of one flush,
#: and runs callbacks after one has failed, with its exception pending: a lock taken there is never released.
_EVENTS_SECONDS = 0.1
_CLOSE_SECONDS = 30.0
#: A flush that takes longer looks whether its topics are still there: librdkafka waits for a deleted one.
_LOOK_AGAIN_SECONDS = 10.0
#: librdkafka's names of what `librdkafka.place` does, as far as records with keys go.
_AS_JAVA = ("murmur2_random", "murmur2")
#: So long the number of a topic's partitions is believed.
_WIDTH_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Width:
    """Partitions of a topic, as they were seen, and until when that is believed."""

    partitions: int
    until: Deadline


class RecordProducer:
    """One producing client and the thread that serves its events. Make it after any fork.

    Its methods take the deadline of the whole piece of work and raise errors of our tree. Not thread-safe.

    Attributes:
        enqueued: records taken by the client since `begin_count`.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Makes the client without talking to a broker.

        Args:
            config: librdkafka properties and callbacks.
            name: for log lines.

        Raises:
            InvalidOptionError: librdkafka refuses a property, or two of them together.
        """
        self.name = name
        self.enqueued = 0
        self._topics: set[str] = set()
        self._bootstrap = str(config.get("bootstrap.servers", ""))
        self._last_said = ""
        self._login_refused: KafkaError | None = None
        self._delivery_error: KafkaError | None = None
        self._widths: dict[str, _Width] = {}
        self._places_as_java = config.get("partitioner") in _AS_JAVA
        self._fatal: KafkaError | None = None
        in_transactions = "transactional.id" in config
        self._client: Any = make(
            Producer,
            {
                **(config if in_transactions else deliveries.counted(config)),
                "error_cb": self._on_error,
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
            },
        )
        self._batches: librdkafka.BatchProducer | None = None
        self._deliveries: deliveries.Deliveries | None = None
        if has_pointers():
            self._batches = librdkafka.BatchProducer(self._client)
            self._deliveries = None if in_transactions else deliveries.of(self._client)
        self._watchdog = Watchdog(f"client of {name}")
        # confluent-kafka reports no record that was sent as a batch; a transaction knows of its own
        self._reports_batches = in_transactions or self._deliveries is not None
        self._closed = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="kafka-eos-producer", daemon=True)
        self._poller.start()

    def begin_count(self) -> None:
        """Forgets what was enqueued and what failed before."""
        self.enqueued = 0
        self._topics.clear()
        self._delivery_error = None
        if self._deliveries is not None:
            self._deliveries.reset()

    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline) -> None:
        """Enqueues every row of a staged batch, in order.

        Args:
            rows: columns ``value`` and, where there, ``key``, ``topic``, ``partition``, ``headers``,
                ``timestamp``, as in `schema.STAGED_ARROW`.
            topic: for all rows; None = each row's own.
            deadline: for room in the client's queue.

        Raises:
            InvalidRecordError: a record is larger than ``message.max.bytes``.
            AbortableError: the transaction failed meanwhile.
        """
        columns = {name: rows.column(name) for name in rows.schema.names}
        for each_topic, part in _by_topic(columns, topic):
            self._topics.add(each_topic)
            extra = _needs_produceva(part)
            if (
                self._batches is not None
                and self._reports_batches
                and not (extra and choice().kernel is None)
            ):
                batch = librdkafka.messages(part.get("key"), part["value"], part.get("partition"))
                more = librdkafka.extras(part.get("timestamp"), part.get("headers")) if extra else None
                self._send_batch(each_topic, *self._together(each_topic, batch, more), deadline)
            else:
                self._send_singly(each_topic, part, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Waits until every record was answered for.

        Raises:
            UnavailableError: brokers did not take the records before ``deadline``, or a topic is gone.
            KafkaEosError: a record failed; by what it failed.
        """
        look = Deadline.after_seconds(_LOOK_AGAIN_SECONDS)
        while self._serve(lambda: self._client.flush(deadline.remaining_seconds(_EVENTS_SECONDS))) > 0:
            self._raise_if_failed()
            if deadline.expired:
                raise unreachable(self._bootstrap, deadline.budget_seconds * 1000, self._last_said)
            if look.expired:
                self._widths.clear()
                self.check_partitions(dict.fromkeys(self._topics, -1), deadline)
                look = Deadline.after_seconds(_LOOK_AGAIN_SECONDS)
        self._raise_if_failed()

    def close(self) -> None:
        """Ends the client and its thread. What was not sent is dropped, an open transaction is left open.

        Not by the client's own ``close``: that aborts the transaction (confluent-kafka 2.16), which nothing
        may after a commit of unknown outcome, and waits for the answer without end. The client ends with its
        last reference, which is this one.
        """
        self._closed.set()
        self._poller.join()
        self._watchdog.end(self._destroy, _CLOSE_SECONDS)

    def _destroy(self) -> None:
        self._deliveries = None
        if self._batches is not None:
            self._batches.close()
        self._client.purge()
        self._serve(lambda: self._client.flush(0.01))  # reports what was purged, which holds memory
        self._client = None

    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """The cluster's id, and the number of partitions of every topic that it shows us."""
        metadata: Any = self._until(
            deadline,
            "reading the cluster's metadata",
            lambda seconds: self._client.list_topics(timeout=seconds),
        )
        return metadata.cluster_id, {
            name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None
        }

    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        """Every topic exists and is wide enough: librdkafka does not look before it queues a record.

        What was seen is believed for a minute, as a small batch takes little longer than this look. A topic
        that was deleted meanwhile is noticed by `flush`.

        Args:
            highest: each topic with the highest partition that a record names (-1 = none does).
            deadline: for the brokers' answer.

        Raises:
            UnavailableError: a topic does not exist.
            AuthorizationError: it may not be described.
            InvalidRecordError: it has fewer partitions.
        """
        for topic, partition in highest.items():
            known = self._widths.get(topic)
            if known is not None and partition < known.partitions and not known.until.expired:
                continue
            count = self._partition_count(topic, deadline)
            self._widths[topic] = _Width(count, Deadline.after_seconds(_WIDTH_SECONDS))
            if partition >= count:
                raise InvalidRecordError(
                    f"column 'partition' has the value {partition}; topic {topic!r} has {count} partitions "
                    f"(0 to {count - 1}).",
                    fix="correct the column, set it to null to let the partitioner choose, "
                    "or add partitions to the topic.",
                )

    # -- inside ----------------------------------------------------------------------------------

    def _partition_count(self, name: str, deadline: Deadline) -> int:
        def ask(seconds: float) -> int:
            topic = self._client.list_topics(name, timeout=seconds).topics[name]
            if topic.error is not None:
                raise KafkaException(topic.error)
            return len(topic.partitions)

        count: int = self._until(deadline, f"looking up output topic {name!r}", ask)
        return count

    def _until(
        self,
        deadline: Deadline,
        doing: str,
        call: Callable[[float], Any],
        slice_seconds: float = SLICE_SECONDS,
    ) -> Any:
        """Repeats ``call`` while its error is transient: librdkafka's calls resume where they were.

        Not when the client complained meanwhile that credentials or certificates do not fit.
        """
        while True:
            seconds = max(0.1, deadline.remaining_seconds(slice_seconds))
            try:
                answer = self._watchdog.call(doing, partial(call, seconds), seconds)
                self._login_refused = None  # by one broker of several, for a while
                return answer
            except KafkaException as error:
                failure = kafka_error(error)
                if failure.txn_requires_abort() or failure.fatal() or not is_transient(failure):
                    raise self._cause(failure, doing) from error
                if self._login_refused is not None:
                    raise classify(self._login_refused, doing) from error
                if deadline.expired:
                    raise unreachable(
                        self._bootstrap,
                        deadline.budget_seconds * 1000,
                        f"{doing}: {self._last_said or failure}",
                    ) from error

    def _cause(self, failure: KafkaError, doing: str) -> KafkaEosError:
        """The client says "fatal" or "wrong state" when it knows better: look what it knows."""
        return classify(self._fatal_error() or failure, doing)

    def _fatal_error(self) -> KafkaError | None:
        found = self._batches.fatal_error() if self._batches is not None else None
        return found or self._fatal

    def _together(
        self, topic: str, batch: librdkafka.Messages, more: librdkafka.Extras | None
    ) -> tuple[librdkafka.Messages, librdkafka.Extras | None]:
        """The same messages, those of each partition together, as far as it is known where they go."""
        width = self._widths.get(topic)
        if self._places_as_java and width is not None:
            librdkafka.place(batch, width.partitions)
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

    def _send_singly(self, topic: str, part: Mapping[str, pa.Array], deadline: Deadline) -> None:
        """One call a record: the twin of the kernel's loop, and of its count of failed deliveries."""
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
        """Why the client did not take a record."""
        if code in (KafkaError._STATE, KafkaError._FATAL):
            # it takes no records any more, whatever their size: the reason is that of an earlier one
            return classify(self._failure() or KafkaError(code), self._writing())
        return self._cause(KafkaError(code), f"writing a record of {size_bytes:,} bytes to topic {topic!r}")

    def _wait_for_room(self, deadline: Deadline) -> None:
        """Until half of what is queued has been sent: then there is room for many records at once."""
        target = len(self._client) // 2
        while len(self._client) > target:
            self._raise_if_failed()
            if deadline.expired:
                raise unreachable(self._bootstrap, deadline.budget_seconds * 1000, self._last_said)
            self._serve(lambda: self._client.flush(0.01))

    def _raise_if_failed(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise classify(failure, self._writing())

    def _writing(self) -> str:
        """For messages."""
        return f"writing records to {', '.join(map(repr, sorted(self._topics)))}"

    def _failure(self) -> KafkaError | None:
        """Why the records enqueued so far will not all be written, as far as it is known."""
        counted = self._deliveries.error() if self._deliveries is not None else None
        return self._fatal_error() or self._delivery_error or counted

    def _serve(self, call: Callable[[], int]) -> int:
        """``call``, which delivers the client's events, and what it returns.

        confluent-kafka hands a fatal error to no callback. It raises it, once, from the call that happens to
        deliver it, be that the poller's or ours.
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
        self._last_said = concealed(error.str())
        if is_login(error):
            self._login_refused = error
        _log.info("producer of %s: %s (%s)", self.name, self._last_said, error.name())

    def _on_delivery(self, error: KafkaError | None, _message: object) -> None:
        if error is not None and self._delivery_error is None:
            self._delivery_error = error


def _by_topic(
    columns: Mapping[str, pa.Array], topic: str | None
) -> Iterable[tuple[str, Mapping[str, pa.Array]]]:
    """The rows of each topic, in their order. One topic, the usual case, copies nothing."""
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
    return any(name in part and part[name].null_count < len(part[name]) for name in ("headers", "timestamp"))
