"""What the native clients remember of the cluster."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.kafka.wire.cluster import Cluster
from kafka_eos_source.model import TopicPartition

FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)
TP = TopicPartition("t", 0)


def answer(leader: int, epoch: int, topic_id: uuid.UUID = FIRST) -> Any:
    """Returns the answer to a Metadata request about a topic of one partition."""
    partition = SimpleNamespace(partition_index=0, leader_id=leader, leader_epoch=epoch)
    topic = SimpleNamespace(error_code=0, name="t", topic_id=topic_id, partitions=[partition])
    return SimpleNamespace(brokers=[], topics=[topic])


@pytest.mark.parametrize(
    ("later", "leader"),
    [
        pytest.param(answer(2, 4), 1, id="older"),
        pytest.param(answer(2, 5), 2, id="same epoch"),
        pytest.param(answer(2, 6), 2, id="newer"),
        pytest.param(answer(2, 0, SECOND), 2, id="topic created again"),
        pytest.param(answer(2, -1), 2, id="broker without epochs"),
    ],
)
def test_an_older_leader_does_not_replace_the_known_one(later: Any, leader: int) -> None:
    cluster = Cluster({"bootstrap.servers": "b:1"})
    cluster._learned(answer(1, 5), has_topics=True)
    cluster._learned(later, has_topics=True)
    assert cluster.leader(TP) == leader
    cluster.close()


def test_without_topic_ids_the_newest_answer_counts() -> None:
    none = uuid.UUID(int=0)
    cluster = Cluster({"bootstrap.servers": "b:1"})
    cluster._learned(answer(1, 5, none), has_topics=True)
    cluster._learned(answer(2, 4, none), has_topics=True)
    assert cluster.leader(TP) == 2
    cluster.close()
