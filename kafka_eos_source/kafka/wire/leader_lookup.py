"""Looks leaders of partitions up again after errors: when, and at which broker."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from confluent_kafka import KafkaError

from kafka_eos_source.kafka.wire.cluster import Cluster, TemporaryError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_PAUSE_SECONDS = 0.1


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
        codes = dict.fromkeys(topics, KafkaError.UNKNOWN_TOPIC_OR_PART)
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
