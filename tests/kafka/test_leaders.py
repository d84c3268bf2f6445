"""Which leaders the native clients know after several answers."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.kafka.cluster import Leaders
from kafka_eos_source.model import TopicPartition

FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)
TP = TopicPartition("t", 0)


def answer(leader: int, epoch: int, topic_id: uuid.UUID = FIRST) -> list[Any]:
    """Returns the topics in an answer to a Metadata request: one topic with one partition."""
    partition = SimpleNamespace(partition_index=0, leader_id=leader, leader_epoch=epoch)
    topic = SimpleNamespace(error_code=0, name="t", topic_id=topic_id, partitions=[partition])
    return [topic]


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
def test_an_older_leader_does_not_replace_the_known_one(later: list[Any], leader: int) -> None:
    leaders = Leaders()
    leaders.learn(answer(1, 5))
    leaders.learn(later)
    assert leaders.of(TP) == leader


def test_without_topic_ids_the_newest_answer_counts() -> None:
    none = uuid.UUID(int=0)
    leaders = Leaders()
    leaders.learn(answer(1, 5, none))
    leaders.learn(answer(2, 4, none))
    assert leaders.of(TP) == 2
