"""The leader of each partition, as the answers to Metadata requests name it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kafka_eos_source.model import TopicPartition


class Leaders:
    """Keeps the newest leader of each partition.

    Attributes:
        as_of: number of answers from which leaders were learned.
    """

    def __init__(self) -> None:
        self.as_of = 0
        self._nodes: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, Any] = {}

    def of(self, tp: TopicPartition) -> int | None:
        """Returns the node id of a partition's leader; None if it has none."""
        found = self._nodes.get(tp, -1)
        return None if found < 0 else found

    def epoch(self, tp: TopicPartition) -> int:
        """Returns the epoch of a partition's leader (KIP-320); -1 if unknown."""
        return self._epochs.get(tp, -1)

    def learn(self, topics: Iterable[Any]) -> None:
        """Takes leaders over from the topics in an answer to a Metadata request.

        An answer does not replace a leader by one with a lower epoch: a broker that is cut off from the
        others may still name an older leader, whose log may be shorter.
        """
        self.as_of += 1
        for topic in topics:
            if topic.error_code == 0:
                self._learn(topic)

    def _learn(self, topic: Any) -> None:
        topic_id = getattr(topic, "topic_id", None)
        # before Kafka 2.8 all ids are zero
        is_same = topic_id is not None and topic_id.int != 0 and self._topic_ids.get(topic.name) == topic_id
        self._topic_ids[topic.name] = topic_id
        found = {TopicPartition(topic.name, each.partition_index): each for each in topic.partitions or ()}
        # if the topic was created again with fewer partitions, the others have no leader any more
        for tp in [tp for tp in self._nodes if tp.topic == topic.name and tp not in found]:
            del self._nodes[tp]
            self._epochs.pop(tp, None)
        for tp, each in found.items():
            epoch = getattr(each, "leader_epoch", -1)
            if not is_same or epoch < 0 or epoch >= self.epoch(tp):
                self._nodes[tp] = each.leader_id
                self._epochs[tp] = epoch
