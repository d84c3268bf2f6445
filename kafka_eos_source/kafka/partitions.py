"""What a consumer knows of the partitions that it reads: how far, from which broker, how large they are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.error_codes import ErrorCode
from kafka_eos_source.kafka.fetched_batches import FetchedBatches
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_PAUSE_SECONDS = 0.1
#: The most bytes of one answer, and of all answers that may be in memory, unless the user sets
#: ``fetch.max.bytes``.
_MOST_BYTES, _MOST_BYTES_OF_ALL = 16 << 20, 64 << 20
#: The most bytes of one partition in an answer, unless the user sets ``max.partition.fetch.bytes``. Fetches
#: of 2 MiB take 20 % less time than 1 MiB; 4 MiB save no more, and compressed data grows when it arrives.
_PARTITION_BYTES = 2 << 20
#: Bytes per offset, and of one record batch, that the first Fetch of a topic expects.
_FIRST_MEAN_BYTES, _FIRST_BATCH_BYTES = 1024.0, 64 << 10


@dataclass(slots=True)
class Partition:
    """A partition that is being read.

    Attributes:
        position: the next offset to fetch.
        end: no offset from this one on is wanted.
        epoch: leader epoch that belongs to ``end``; -1 = unknown. Records before ``end`` with a later epoch
            are others than those that were there when somebody named the end.
        last_epoch: the epoch that Fetch requests name: ``epoch``, or the newest one below it in the leader's
            log. An epoch in which nothing was written is missing in the logs of other brokers.
        resumes_at: when to fetch again after an error, on the monotonic clock.
        is_waiting: whether a request for it is on its way, or an event about it was returned and the caller
            has not moved or dropped it.
        unknown_since: since when brokers have not known it, on the monotonic clock; None = they know it.
        stalled_since: since when its leader has sent nothing although its log does not end here and the
            answer had room, on the monotonic clock; None = it does not do that.
        is_slow: whether its leader ever did that.
        replica: the broker to read from instead of the leader (KIP-392); -1 = the leader, which may not refer
            the consumer to another broker.
        replica_until: until when ``replica`` counts, on the monotonic clock. Then the leader is asked, and
            may refer the consumer to another broker.
        replica_epoch: the leader's epoch when it did that; a new leader is asked again.
        reported_end: the end of the log that was last reported to the caller. Each end is reported once,
            because callers take silence as a sign that something is wrong.
    """

    position: int
    end: int
    epoch: int = -1
    last_epoch: int = -1
    resumes_at: float = 0.0
    is_waiting: bool = False
    unknown_since: float | None = None
    stalled_since: float | None = None
    is_slow: bool = False
    replica: int = -1
    replica_until: float = 0.0
    replica_epoch: int = -1
    reported_end: int = -1


@dataclass(frozen=True)
class FoundTopics:
    """What a broker knows of the topics that it was asked for.

    Attributes:
        codes: Kafka's error code of each topic; 0 = none.
        partitions: the partitions of the topics without an error.
    """

    codes: dict[str, int]
    partitions: set[TopicPartition]


class LeaderLookup:
    """Decides when leaders are looked up, and changes the broker that is asked.

    Args:
        cluster: the brokers; it keeps the leaders that they name.
        seconds: limits one lookup.

    Attributes:
        is_wanted: whether leaders are to be looked up.
        next_at: when to do that at the earliest, on the monotonic clock.
        tries: number of lookups since a leader last answered.
    """

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self.is_wanted = False
        self.next_at = 0.0
        self.tries = 0

    @property
    def is_due(self) -> bool:
        """Whether leaders are to be looked up now."""
        return self.is_wanted and time.monotonic() >= self.next_at

    def find(self, topics: Collection[str]) -> FoundTopics:
        """Asks a broker for the leaders of topics.

        Raises:
            TemporaryError: if it does not answer. The next lookup asks another broker.
        """
        self.next_at = time.monotonic() + _PAUSE_SECONDS
        self.tries += 1
        # No leader has answered since the last lookup, so the broker that named them may be out of date.
        # Another broker is asked at the 2nd, 4th, 8th, … lookup only: an election takes seconds, and each
        # change of the broker costs a connection and a login.
        if self.tries > 1 and self.tries.bit_count() == 1:
            self._cluster.ask_another()
        try:
            answer = self._cluster.metadata(topics, Deadline.after_seconds(self._seconds))
        except TemporaryError:
            self._cluster.ask_another()
            raise
        self.is_wanted = False
        codes = dict.fromkeys(topics, int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        partitions: set[TopicPartition] = set()
        for topic in answer.topics or ():
            codes[topic.name] = topic.error_code
            if not topic.error_code:
                indices = (each.partition_index for each in topic.partitions or ())
                partitions.update(TopicPartition(topic.name, index) for index in indices)
        return FoundTopics(codes, partitions)

    def pause(self, seconds: float) -> None:
        """Delays the next lookup by so many seconds from now, and by a short pause at least."""
        self.next_at = time.monotonic() + max(_PAUSE_SECONDS, seconds)


@dataclass(slots=True)
class _Topic:
    """What the answers about a topic have shown.

    Attributes:
        mean_bytes: bytes per offset.
        batch_bytes: size of the largest record batch.
    """

    mean_bytes: float = _FIRST_MEAN_BYTES
    batch_bytes: int = _FIRST_BATCH_BYTES


class FetchSizes:
    """Estimates how large answers will be from those that have arrived.

    Args:
        conf: properties of the consumer.
    """

    def __init__(self, conf: Mapping[str, str]) -> None:
        asked_bytes = conf.get("fetch.max.bytes")
        #: The most bytes of one answer that the user wants; None = any.
        self._most_bytes = None if asked_bytes is None else int(asked_bytes)
        self._partition_bytes = int(conf.get("max.partition.fetch.bytes", _PARTITION_BYTES))
        self._topics: dict[str, _Topic] = {}

    def of_partition(self, topic: str, offsets: int) -> int:
        """Returns the most bytes to ask of a partition of which so many offsets are wanted."""
        seen = self._topics.setdefault(topic, _Topic())
        return min(int(offsets * seen.mean_bytes) + seen.batch_bytes, self._partition_bytes)

    def of_answer(self, answers: int) -> int:
        """Returns the most bytes of one answer, if so many answers may be in memory at once."""
        if self._most_bytes is not None:
            return self._most_bytes
        return min(_MOST_BYTES, _MOST_BYTES_OF_ALL // answers)

    def learn(self, batches: FetchedBatches) -> None:
        """Adjusts the estimates to batches that have arrived."""
        seen = self._topics.setdefault(batches.tp.topic, _Topic())
        seen.mean_bytes = batches.mean_bytes
        seen.batch_bytes = max(batches.largest_bytes, seen.batch_bytes // 2)
