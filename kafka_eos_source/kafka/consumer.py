"""Consumers of read tasks: assigned by hand, never in a group, kept open between batches.

A Python worker of an executor is reused for many tasks, so a consumer that stays connected saves each
small batch the TCP, TLS and metadata round trips. Positions do not survive a task: every task assigns its
ranges anew, so nothing prefetched for one batch can appear in the next.

librdkafka facts this module rests on (all tried):

- ``consume(n, timeout)`` waits for the whole timeout when fewer than ``n`` messages are there; with timeout
  0 it returns what is there at once. So: take what is there, and only when nothing is, wait for *one*.
- Partition EOF comes with the first fetch answer at the log's end, that is after ``fetch.wait.max.ms``; the
  same wait stands before a newly assigned partition's first fetch. The default of 500 ms would be the
  latency of every small batch.
- ``fetch.queue.backoff.ms`` (default 1000) stops a fast reader for a second each time its queue is full.
- ``auto.offset.reset=error`` turns an offset that is gone into an event; any other value would move the
  position in silence.
- A consumer with a ``group.id`` asks for its coordinator though it never joins: a missing ACL on the group
  comes as an event, and means nothing to an assigned reader.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import classify, is_login
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.model import TopicPartition

_log = logging.getLogger(__name__)

#: Under the user's own settings; the first two are explained above. 2 MiB a fetch and partition cost a fifth
#: less than 1 MiB; 4 MiB save no more, and what is compressed grows when it comes. Two Arrow batches ahead
#: are enough; the default of 100,000 messages, thrown away at the end of each task, made tasks of 100,000
#: records 1.3 times as slow.
TUNED: Mapping[str, str] = {
    "fetch.wait.max.ms": "10",
    "fetch.queue.backoff.ms": "1",
    "fetch.message.max.bytes": str(2 << 20),
    "queued.min.messages": "20000",
}

_ALIASES = {"fetch.message.max.bytes": "max.partition.fetch.bytes"}

_OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
_GONE = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)


@dataclass(slots=True)
class Taken:
    """What one look at the consumer's queue gave.

    Attributes:
        messages: of any assigned partition, in offset order within each. The client's ``Message`` objects, or
            `kernel_messages.KernelMessages`.
        log_ends: partitions that were read to the end of their log, and the offset of that end.
        out_of_range: partitions whose position is not in their log (any more).
        gone: partitions that the cluster does not know (any more).
    """

    messages: Any
    log_ends: dict[TopicPartition, int] = field(default_factory=dict)
    out_of_range: list[TopicPartition] = field(default_factory=list)
    gone: list[TopicPartition] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (len(self.messages) or self.log_ends or self.out_of_range or self.gone)


class AssignedConsumer:
    """One client, reading partitions that it is told. Not thread-safe.

    Args:
        conf: from `kafka.config.consumer_config`.

    Raises:
        InvalidOptionError: librdkafka refuses a property, or two of them together.

    Attributes:
        drains: `take` gives all that is there, however much that is.
    """

    drains: ClassVar[bool] = False

    def __init__(self, conf: Mapping[str, str]) -> None:
        merged: dict[str, Any] = {k: v for k, v in TUNED.items() if _ALIASES.get(k) not in conf}
        merged.update(conf)
        merged["error_cb"] = self._on_error
        #: Properties that say how to reach the cluster.
        self.connection = admin_config(conf)
        self.bootstrap_servers = str(conf.get("bootstrap.servers", ""))
        #: What the client last complained about, without a partition: the likely reason of a time-out.
        self.last_complaint = ""
        self._refused: KafkaError | None = None
        self._client = make(Consumer, merged, logger=_log)

    @property
    def client(self) -> Consumer:
        """confluent-kafka's client, for the rest of this package."""
        return self._client

    def want(self, columns: Collection[str]) -> None:
        """Which columns of Spark's schema are made of what is taken. Here messages have all of them."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reads these partitions, each from its position, and no others."""
        self.last_complaint = ""
        self._refused = None
        self._client.assign([KafkaTopicPartition(tp.topic, tp.partition, at) for tp, at in positions.items()])

    def move(self, tp: TopicPartition, position: int) -> None:
        """Reads an assigned partition on from another offset, whatever state its fetcher is in."""
        self._client.incremental_unassign([KafkaTopicPartition(tp.topic, tp.partition)])
        self._client.incremental_assign([KafkaTopicPartition(tp.topic, tp.partition, position)])

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        """Stops reading these; what is queued of them is thrown away."""
        self._client.incremental_unassign([KafkaTopicPartition(tp.topic, tp.partition) for tp in tps])

    def take(self, at_most: int, wait_seconds: float) -> Taken:
        """What is there now; when nothing is, waits up to ``wait_seconds`` for something.

        Raises:
            AuthorizationError: credentials or an ACL on a topic.
            KafkaEosError: any other error that waiting does not mend.
        """
        found = self._client.consume(at_most, 0)
        if not found:
            one = self._client.poll(wait_seconds)
            if self._refused is not None:
                raise classify(self._refused, "reading")
            if one is None:
                return Taken(())
            found = [one]
        if any([message.error() is not None for message in found]):  # noqa: C419  a list is twice as fast
            return self._sort(found)
        return Taken(found)

    def _sort(self, found: Sequence[Any]) -> Taken:
        taken = Taken([message for message in found if message.error() is None])
        for event in found:
            error = event.error()
            if error is None:
                continue
            code = error.code()
            if event.topic() is None or event.partition() < 0:
                if code != KafkaError.GROUP_AUTHORIZATION_FAILED:
                    self._on_error(error)
                continue
            tp = TopicPartition(event.topic(), event.partition())
            if code == KafkaError._PARTITION_EOF:
                taken.log_ends[tp] = event.offset()
            elif code in _OUT_OF_RANGE:
                taken.out_of_range.append(tp)
            elif code in _GONE:
                taken.gone.append(tp)
            elif error.retriable() or code == KafkaError._TRANSPORT:
                self.last_complaint = concealed(f"{tp}: {error.str()}")
            else:
                raise classify(error, f"reading {tp}")
        return taken

    def log_bounds(self, tp: TopicPartition, timeout_seconds: float) -> tuple[int, int]:
        """First offset in the log, and the end a reader may read to: the last stable offset under
        ``read_committed``, else the high watermark.

        Raises:
            RetriableError: not answered in time.
            UnavailableError: no such partition.
        """
        try:
            low, high = self._client.get_watermark_offsets(
                KafkaTopicPartition(tp.topic, tp.partition), timeout=timeout_seconds, cached=False
            )
        except KafkaException as failure:
            raise classify(failure, f"looking up the offsets of {tp}") from failure
        return low, high

    def raise_if_refused(self, doing: str) -> None:
        """Hears what the client has to complain about. To be called while nothing is assigned.

        Raises:
            AuthorizationError: credentials.
        """
        self._client.poll(0)
        if self._refused is not None:
            raise classify(self._refused, doing)

    def release(self) -> None:
        """Stops all fetching; connections stay."""
        self._client.unassign()

    def close(self) -> None:
        self._client.close()

    def _on_error(self, error: KafkaError) -> None:
        self.last_complaint = concealed(error.str())
        if is_login(error) or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._refused = error


#: What makes consumers interchangeable.
_Key = tuple[type[AssignedConsumer], frozenset[tuple[str, str]]]


@dataclass(slots=True)
class _Idle:
    consumer: AssignedConsumer
    since: float


class ConsumerPool:
    """Idle consumers of this process, by configuration.

    A worker runs one task at a time, so there is rarely more than one; the bound matters to a process that
    serves many queries in turn. A forked child must neither use nor close its parent's clients (their
    threads are not there): it forgets them without freeing them.

    Args:
        capacity: idle consumers kept.
        idle_seconds: those idle for longer are closed when the next one is asked for (5 min, as
            ``spark.kafka.consumer.cache.timeout``).
    """

    def __init__(self, capacity: int = 4, idle_seconds: float = 300.0) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[_Key, _Idle]] = []
        self._pid = os.getpid()
        self._forgotten: list[object] = []

    @contextmanager
    def borrow(
        self, conf: Mapping[str, str], kind: type[AssignedConsumer] = AssignedConsumer
    ) -> Iterator[AssignedConsumer]:
        """A consumer of this kind and configuration; given back when the block ends well, else closed."""
        self._after_fork()
        self._close_stale()
        key = (kind, frozenset(conf.items()))
        consumer = self._pop(key) or kind(conf)
        sound = False
        try:
            yield consumer
            sound = True
        except GeneratorExit:
            sound = True  # a LIMIT was satisfied
            raise
        finally:
            if sound:
                consumer.release()
                self._idle.append((key, _Idle(consumer, time.monotonic())))
                self._shrink(self._capacity)
            else:
                consumer.close()

    def close(self) -> None:
        """Closes all idle consumers."""
        self._after_fork()
        self._shrink(0)

    def __len__(self) -> int:
        return len(self._idle)

    def _pop(self, key: _Key) -> AssignedConsumer | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index][0] == key:
                return self._idle.pop(index)[1].consumer
        return None

    def _close_stale(self) -> None:
        before = time.monotonic() - self._idle_seconds
        while self._idle and self._idle[0][1].since < before:
            self._idle.pop(0)[1].consumer.close()

    def _shrink(self, to: int) -> None:
        while len(self._idle) > to:
            self._idle.pop(0)[1].consumer.close()

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._forgotten.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()


#: The pool of this process.
POOL = ConsumerPool()
