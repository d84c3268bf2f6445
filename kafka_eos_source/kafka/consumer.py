"""Consumers of read tasks: they have assigned partitions, join no group, and stay open between batches.

Spark reuses a Python worker for many tasks, so a consumer that stays connected saves each small batch the
TCP, TLS and metadata round trips. Positions do not survive a task: every task assigns its own ranges, so
records that were prefetched for one batch cannot appear in the next.

This module relies on the following behaviour of librdkafka, all of which was tested:

- ``consume(n, timeout)`` waits for the whole timeout if fewer than ``n`` messages are queued; with a timeout
  of 0 it returns the queued messages at once. Hence `AssignedConsumer.take` first calls it with 0, and waits
  for a single message only if nothing is queued.
- Partition EOF arrives with the first fetch response at the end of the log, that is after
  ``fetch.wait.max.ms``. The first fetch of a newly assigned partition waits just as long. The default of
  500 ms would be the latency of every small batch.
- ``fetch.queue.backoff.ms`` (default 1000) pauses a fast reader for a second each time its queue is full.
- ``auto.offset.reset=error`` reports an offset that is out of range as an event. Any other value would
  silently move the position.
- A consumer with a ``group.id`` looks up its coordinator although it never joins. A missing ACL on the group
  is reported as an event, which does not matter to an assigned consumer.
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

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import classify, is_transient
from kafka_eos_source.kafka.request import Complaints
from kafka_eos_source.model import Epochs, TopicPartition

_log = logging.getLogger(__name__)

#: Defaults that the user's settings override. The module's text explains the first two. Fetches of 2 MiB per
#: partition take 20 % less time than 1 MiB; 4 MiB save no more, and compressed data grows when it arrives.
#: Prefetching two Arrow batches is enough: with the default of 100,000 messages, which each task discards at
#: its end, tasks of 100,000 records took 1.3 times as long.
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


@dataclass(frozen=True)
class Damage:
    """A place in a log whose records cannot be read, because a record batch is damaged.

    Attributes:
        tp: the partition.
        offset: the first offset of the batch, as far as it is known.
        past_offset: the offset before which the damage ends; -1 = unknown.
        resume: the next offset that can be read; -1 = unknown. It is ``offset`` if the batch can be read
            nevertheless.
        text: what is wrong, and which brokers have it like that.
        leader: the broker that leads the partition.
        intact_on: other brokers that have an intact copy.
    """

    tp: TopicPartition
    offset: int
    past_offset: int
    resume: int
    text: str
    leader: int = -1
    intact_on: tuple[int, ...] = ()


@dataclass(slots=True)
class Taken:
    """The messages and events that one call of `AssignedConsumer.take` returned.

    Attributes:
        messages: messages of any assigned partitions, in offset order within each. Either the client's
            ``Message`` objects or `kernel_messages.KernelMessages`.
        log_ends: partitions that were read to the end of their log, with the offset of that end.
        out_of_range: partitions whose position is not, or no longer, in their log.
        gone: partitions that the cluster does not know, or no longer knows.
        reached: offsets before which no more messages will come, by partition. Unlike the offset of the last
            message, they include what readers do not see. Only the native consumer tells them.
        cut: partitions whose log was cut below the end of what was asked for, with the offset of the cut.
            Only the native consumer tells them.
        damaged: damaged places at which the next records of a partition would be. Only the native consumer
            finds them.
    """

    messages: Any
    log_ends: dict[TopicPartition, int] = field(default_factory=dict)
    out_of_range: list[TopicPartition] = field(default_factory=list)
    gone: list[TopicPartition] = field(default_factory=list)
    reached: dict[TopicPartition, int] = field(default_factory=dict)
    cut: dict[TopicPartition, int] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is neither a message nor an event."""
        events = self.log_ends or self.out_of_range or self.gone or self.reached or self.cut or self.damaged
        return not (len(self.messages) or events)


class AssignedConsumer:
    """A client that reads the partitions assigned to it. Not thread-safe.

    Args:
        conf: properties from `kafka.config.consumer_config`.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.

    Attributes:
        drains: whether `take` returns everything that is queued, in one call.
    """

    drains: ClassVar[bool] = False

    def __init__(self, conf: Mapping[str, str]) -> None:
        merged: dict[str, Any] = {k: v for k, v in TUNED.items() if _ALIASES.get(k) not in conf}
        merged.update(conf)
        merged["error_cb"] = self._on_error
        #: Properties for connecting to the cluster.
        self.connection = admin_config(conf)
        self.bootstrap_servers = str(conf.get("bootstrap.servers", ""))
        #: What the client reported last; the likely reason of a time-out.
        self.last_complaint = ""
        self._complaints = Complaints(conf)
        self._refused: KafkaError | None = None
        self._properties = merged
        self._connect()

    def _connect(self) -> None:
        self._client = make(Consumer, self._properties, logger=_log)

    def reconnect(self) -> None:
        """Replaces the client by a new one, which looks up all brokers and coordinators again.

        Call this only while nothing is assigned.
        """
        self.close()
        self._connect()

    @property
    def client(self) -> Consumer:
        """The underlying client of confluent-kafka, for other modules of this package."""
        return self._client

    def want(self, columns: Collection[str]) -> None:
        """Sets which columns of Spark's schema the next messages must carry.

        Messages of this class always carry all columns.
        """

    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None = None,  # noqa: ARG002
        epochs: Epochs | None = None,  # noqa: ARG002
    ) -> None:
        """Starts reading these partitions from their positions, and stops reading all others.

        Args:
            positions: the next offset to read, by partition.
            ends: offsets behind which nothing is wanted. librdkafka has no use for them.
            epochs: leader epochs that belong to the ends. They are not used.
        """
        self.last_complaint = ""
        self._refused = None
        self._client.assign([KafkaTopicPartition(tp.topic, tp.partition, at) for tp, at in positions.items()])

    def move(self, tp: TopicPartition, position: int) -> None:
        """Continues an assigned partition at another offset, whatever state its fetcher is in."""
        self._client.incremental_unassign([KafkaTopicPartition(tp.topic, tp.partition)])
        self._client.incremental_assign([KafkaTopicPartition(tp.topic, tp.partition, position)])

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        """Stops reading these partitions and discards their queued messages."""
        self._client.incremental_unassign([KafkaTopicPartition(tp.topic, tp.partition) for tp in tps])

    def take(self, at_most: int, wait_seconds: float) -> Taken:
        """Returns what is queued; if nothing is, waits up to ``wait_seconds`` for a message or event.

        Raises:
            AuthorizationError: if brokers refuse the credentials for good, or an ACL on a topic is missing.
            KafkaEosError: if another error occurred that no waiting mends.
        """
        found = self._client.consume(at_most, 0)
        if not found:
            one = self._client.poll(wait_seconds)
            self._raise_if_refused()
            if one is None:
                return Taken(())
            found = [one]
        if any([message.error() is not None for message in found]):  # noqa: C419  a list is twice as fast
            return self._sort(found)
        self._complaints.answered()
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
            elif is_transient(error):
                self.last_complaint = f"{tp}: {self._complaints.secrets.hide(error.str())}"
            else:
                raise classify(error, f"reading {tp}")
        if not taken.empty:
            self._complaints.answered()
        return taken

    def log_bounds(self, tp: TopicPartition, timeout_seconds: float) -> tuple[int, int]:
        """Returns the first offset of a log, and the offset up to which a reader may read.

        The latter is the last stable offset under ``read_committed``, else the high watermark.

        Raises:
            RetriableError: if no broker answered in time.
            UnavailableError: if the partition does not exist.
        """
        try:
            low, high = self._client.get_watermark_offsets(
                KafkaTopicPartition(tp.topic, tp.partition), timeout=timeout_seconds, cached=False
            )
        except KafkaException as failure:
            raise classify(failure, f"looking up the offsets of {tp}") from failure
        self._complaints.answered()
        return low, high

    def refusal(self, doing: str) -> KafkaEosError | None:
        """Returns the error to raise if the login is refused for good or an ACL is missing; else None.

        Call this only while nothing is assigned: it discards messages.

        Args:
            doing: what the caller was doing, for the message.
        """
        self._client.poll(0)  # runs the error callback
        return self._refusal(doing)

    def login_error(self, doing: str) -> KafkaEosError | None:
        """Returns the error if the login has been refused since the last answer, as reason of a time-out."""
        return self._complaints.login_error(doing)

    def answered(self) -> None:
        """Records that a broker answered a request that another module sent through `client`."""
        self._complaints.answered()

    def release(self) -> None:
        """Stops all fetching; connections stay open."""
        self._client.unassign()

    def close(self) -> None:
        """Closes the client."""
        self._client.close()

    def _on_error(self, error: KafkaError) -> None:
        self.last_complaint = self._complaints.secrets.hide(error.str())
        self._complaints.on_error(error)
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._refused = error

    def _refusal(self, doing: str) -> KafkaEosError | None:
        if self._refused is not None:
            return classify(self._refused, doing)
        return self._complaints.permanent_login_error(doing)

    def _raise_if_refused(self) -> None:
        refused = self._refusal("reading")
        if refused is not None:
            raise refused


#: Consumers with the same key are interchangeable.
_Key = tuple[type[AssignedConsumer], frozenset[tuple[str, str]]]


@dataclass(slots=True)
class _Idle:
    consumer: AssignedConsumer
    since: float


class ConsumerPool:
    """Idle consumers of this process, by class and configuration.

    A worker runs one task at a time, so there is rarely more than one idle consumer. The bound matters to a
    process that serves many queries in turn. A forked child process must neither use nor close the clients
    of its parent, because it does not have their threads. It keeps references to them without using them.

    Args:
        capacity: the number of idle consumers to keep.
        idle_seconds: consumers that were idle for longer are closed at the next `borrow` (5 min, like
            ``spark.kafka.consumer.cache.timeout``).
    """

    def __init__(self, capacity: int = 4, idle_seconds: float = 300.0) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[_Key, _Idle]] = []
        self._pid = os.getpid()
        self._of_parent: list[object] = []

    @contextmanager
    def borrow(
        self, conf: Mapping[str, str], kind: type[AssignedConsumer] = AssignedConsumer
    ) -> Iterator[AssignedConsumer]:
        """Lends a consumer; takes it back if the block succeeds, closes it if the block fails."""
        self._after_fork()
        self._close_stale()
        key = (kind, frozenset(conf.items()))
        consumer = self._pop(key) or kind(conf)
        sound = False
        try:
            yield consumer
            sound = True
        except GeneratorExit:
            sound = True  # Spark stopped the task early, for example because of a LIMIT
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
            self._of_parent.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()


#: The pool of this process.
POOL = ConsumerPool()
