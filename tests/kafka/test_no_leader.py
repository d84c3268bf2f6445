"""A partition without a leader: the answer to a Metadata request says whether it exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.kafka.admin_client import AdminClient
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.messages import LATEST
from kafka_eos_source.model import TopicPartition


def _topic(name: str, *, error: int = 0, leaders: tuple[int, ...] = ()) -> Any:
    partitions = [
        SimpleNamespace(partition_index=number, leader_id=leader, leader_epoch=0)
        for number, leader in enumerate(leaders)
    ]
    return SimpleNamespace(name=name, error_code=error, topic_id=None, partitions=partitions)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        pytest.param(_topic("t", error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), 3, id="no topic"),
        pytest.param(_topic("t", error=ErrorCode.TOPIC_AUTHORIZATION_FAILED), 29, id="not authorized"),
        pytest.param(_topic("t", leaders=(1,)), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, id="no partition"),
        pytest.param(_topic("t", leaders=(1, -1)), ErrorCode.NO_ANSWER, id="no leader yet"),
    ],
)
def test_only_a_partition_that_exists_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, topic: Any, code: int
) -> None:
    """The others would seem to be brokers that do not answer, and be asked for until the time is up."""

    def metadata(cluster: Cluster, *_: object) -> Any:
        cluster.leaders.learn([topic])
        return SimpleNamespace(topics=[topic])

    monkeypatch.setattr(Cluster, "metadata", metadata)
    client = AdminClient({"bootstrap.servers": "127.0.0.1:1"})
    for ask in (
        lambda: client.offsets_at({TopicPartition("t", 1): LATEST}, 0.3, committed=True),
        lambda: client.epoch_ends({TopicPartition("t", 1): 0}, 0.3),
    ):
        with pytest.raises(KafkaError) as raised:
            ask()
        assert raised.value.code == code
    client.close()
