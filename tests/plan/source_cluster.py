"""A Kafka cluster in memory for tests of the source's planning, and short ways to plan against it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import KafkaEosError, UnavailableError
from kafka_eos_source.kafka.admin import Topics
from kafka_eos_source.model import Epochs, GroupOffset, LogEnd, OffsetRange, TopicPartition
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import SourcePosition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
A_WEEK_MS = 7 * 24 * 3_600_000


@dataclass
class Cluster:
    """Answers as a `SourceAdmin`.

    Attributes:
        logs: earliest offset and high watermark of each partition.
        ids_by_topic: topic ids; a topic that is not named has the id ``id-<name>``.
        open_transactions: last stable offset of partitions with an open transaction.
        groups: committed offsets of consumer groups.
        times: first offset at or after a time, per partition.
        retention: ``offsets.retention.minutes`` in ms, or the error that asking for it raises.
        refusal: the error that asking for committed offsets raises.
        requests: names of the methods that were called.
        epochs: leader epochs in the log of the leader of a partition, each with its first offset; a partition
            that is not named has brokers that do not know epochs.
    """

    logs: dict[TopicPartition, tuple[int, int]]
    ids_by_topic: dict[str, str] = field(default_factory=dict)
    open_transactions: dict[TopicPartition, int] = field(default_factory=dict)
    groups: dict[str, dict[TopicPartition, GroupOffset]] = field(default_factory=dict)
    times: dict[TopicPartition, dict[int, int]] = field(default_factory=dict)
    retention: int | KafkaEosError = A_WEEK_MS
    refusal: KafkaEosError | None = None
    requests: list[str] = field(default_factory=list)
    cluster_id: str | None = "cluster-1"
    epochs: dict[TopicPartition, list[tuple[int, int]]] = field(default_factory=dict)

    def append(self, tp: TopicPartition, count: int) -> None:
        """Appends records to a partition."""
        low, high = self.logs[tp]
        self.logs[tp] = low, high + count

    def elect(self, tp: TopicPartition, epoch: int, *, end: int | None = None, forgets: bool = False) -> None:
        """Elects another leader of a partition.

        Args:
            tp: the partition.
            epoch: of the leader, higher than those before.
            end: where its log ends, if the election is unclean.
            forgets: whether it was no leader before, so that its log lacks epochs without records.
        """
        low, high = self.logs[tp]
        end = high if end is None else end
        known = [each for each in self.epochs.get(tp, []) if each[1] < end or not forgets]
        self.epochs[tp] = [each for each in known if each[1] <= end] + [(epoch, end)]
        self.logs[tp] = low, end

    def commit(self, group_id: str, offsets: Mapping[TopicPartition, int], metadata: str = "") -> None:
        """Sets offsets of a group."""
        self.groups.setdefault(group_id, {}).update(
            {tp: GroupOffset(tp, offset, metadata) for tp, offset in offsets.items()}
        )

    def recreate(self, topic: str, logs: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Deletes a topic and creates it again, if there are logs."""
        self.logs = {tp: log for tp, log in self.logs.items() if tp.topic != topic} | dict(logs)
        self.ids_by_topic[topic] = self._id(topic) + "+"

    def new_query(self) -> None:
        pass

    def named(self, topics: Iterable[str]) -> Topics:
        self.requests.append("named")
        wanted = set(topics)
        missing = wanted - {tp.topic for tp in self.logs}
        if missing:
            raise UnavailableError(f"no topic {sorted(missing)}")
        return self._topics(wanted)

    def matching(self, pattern: str) -> Topics:
        self.requests.append("matching")
        return self._topics({tp.topic for tp in self.logs if re.search(pattern, tp.topic)})

    def existing_topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        self.requests.append("existing_topic_ids")
        return {topic: self._id(topic) for topic in topics if topic in {tp.topic for tp in self.logs}}

    def _id(self, topic: str) -> str:
        return self.ids_by_topic.get(topic, f"id-{topic}")

    def _topics(self, names: set[str]) -> Topics:
        ids = {name: self._id(name) for name in names}
        return Topics(tuple(sorted(tp for tp in self.logs if tp.topic in names)), ids, self.cluster_id)

    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        if partitions:
            self.requests.append("earliest")
        return {tp: self.logs[tp][0] for tp in partitions}

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        self.requests.append("latest")
        ends = {tp: self.open_transactions.get(tp, self.logs[tp][1]) for tp in partitions}
        return {tp: LogEnd(end, self.epochs.get(tp, [(-1, 0)])[-1][0]) for tp, end in ends.items()}

    def epoch_ends(self, epochs: Epochs, leaders: Epochs) -> Mapping[TopicPartition, int]:
        self.requests.append("epoch_ends")
        assert leaders == {tp: self.epochs[tp][-1][0] for tp in epochs}
        return {tp: self._epoch_end(tp, epoch) for tp, epoch in epochs.items()}

    def _epoch_end(self, tp: TopicPartition, epoch: int) -> int:
        """Returns what Kafka's leader answers to OffsetForLeaderEpoch."""
        known = self.epochs[tp]
        if epoch == known[-1][0]:
            return self.logs[tp][1]
        return next((start for each, start in known if each > epoch), -1)

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        self.requests.append("high_watermarks")
        return {tp: self.logs[tp][1] for tp in partitions}

    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {tp: self.times.get(tp, {}).get(at) for tp, at in times_ms.items()}

    def committed(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.requests.append("committed")
        if self.refusal is not None:
            raise self.refusal
        return {tp: held for tp, held in self.groups.get(group_id, {}).items() if tp in partitions}

    def all_committed(self, group_id: str) -> Mapping[TopicPartition, GroupOffset]:
        self.requests.append("all_committed")
        if self.refusal is not None:
            raise self.refusal
        return dict(self.groups.get(group_id, {}))

    def offsets_retention_ms(self) -> int:
        self.requests.append("offsets_retention_ms")
        if isinstance(self.retention, KafkaEosError):
            raise self.retention
        return self.retention


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def plan(
    cluster: Cluster, *, streaming: bool = True, clock: Clock | None = None, **options: str
) -> SourcePlan:
    """Returns the plan of a run that begins now."""
    return SourcePlan(read_options(streaming=streaming, **options), cluster, clock or Clock())


def read_options(*, streaming: bool = True, **options: str) -> Any:
    stated = {"kafka.bootstrap.servers": "h:1", **options}
    if not {"subscribe", "subscribePattern", "assign"} & set(stated):
        stated["subscribe"] = "a"
    return parse_read(stated, streaming=streaming, pyspark_version="4.3.0")


def over_the_wire(position: SourcePosition) -> SourcePosition:
    """Returns the position as it comes back from Spark, which keeps it as JSON."""
    return SourcePosition.from_json(position.to_json())


def ranges(found: Iterable[tuple[OffsetRange, ...]]) -> set[tuple[TopicPartition, int, int]]:
    """Returns the ranges of tasks, in any order."""
    return {(each.tp, each.start, each.end) for task in found for each in task}
