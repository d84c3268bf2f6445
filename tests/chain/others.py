"""Programs of the chain model that are no queries of this package."""

from __future__ import annotations

from collections import Counter

from tests.chain.cluster import Cluster
from tests.chain.product import GroupOffset, TopicPartition


class Consumer:
    """A plain Kafka consumer, which commits its offsets after it has used the records.

    It never dies between the two, so on its own it sees each record once.

    Attributes:
        seen: how often it used each record, by id of the topic, partition and offset.
        stopped: whether it is not a member of its group.
    """

    def __init__(self, cluster: Cluster, group: str, topic: str) -> None:
        self._cluster, self._group, self._topic = cluster, group, topic
        self.seen: Counter[tuple[str, int, int]] = Counter()
        self.stopped = True
        self._positions: dict[TopicPartition, int] = {}
        self._first: dict[tuple[str, int], int] = {}

    def poll(self) -> None:
        """Uses all new records, and commits. A stopped consumer first continues where the group is."""
        cluster = self._cluster
        topic = cluster.topics[self._topic]
        offsets = cluster.groups.setdefault(self._group, {})
        if self.stopped:
            self.stopped = False
            cluster.members.setdefault(self._group, set()).add(self._name)
            self._positions = {tp: each.offset for tp, each in offsets.items()}
        for tp in cluster.partitions([self._topic]):
            start, end = self._positions.get(tp, 0), cluster.end(tp)
            if start > end:
                start = 0  # auto.offset.reset=earliest
            for offset in range(start, end):
                self.seen[topic.topic_id, tp.partition, offset] += (
                    topic.logs[tp.partition][offset] is not None
                )
            if end > start:
                # until it has committed, nothing shows anybody that it was here
                self._first.setdefault((topic.topic_id, tp.partition), start)
                self._positions[tp] = end
                offsets[tp] = GroupOffset(tp, end, "")

    def stop(self) -> None:
        self.stopped = True
        self._cluster.members.get(self._group, set()).discard(self._name)

    def harm(self) -> str:
        """Returns which records it used twice, or passed over; "" if there are none."""
        doubled = sum(times > 1 for times in self.seen.values())
        passed = sum(
            (topic_id, partition, offset) not in self.seen
            for (topic_id, partition), first in self._first.items()
            for offset in range(first, self._positions.get(TopicPartition(self._topic, partition), 0))
            if self._holds(partition, offset)
        )
        if not doubled and not passed:
            return ""
        return f"{self._name} lost {passed} and doubled {doubled} of {len(self.seen)} records"

    def _holds(self, partition: int, offset: int) -> bool:
        log = self._cluster.topics[self._topic].logs[partition]
        return offset < len(log) and log[offset] is not None

    @property
    def _name(self) -> str:
        return f"the consumer of {self._topic!r} in group {self._group!r}"
