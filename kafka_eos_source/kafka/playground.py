"""Small clients for the demo: topics made, events sent, output read back by confluent-kafka alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import admin as client_admin

from kafka_eos_source.deadline import Deadline
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.failure import classify
from kafka_eos_source.kafka.producer import RecordProducer

_AdminClient: Any = client_admin.AdminClient
_NewTopic: Any = client_admin.NewTopic  # type: ignore[attr-defined]
_SECONDS = 60.0


def create_topics(bootstrap_servers: str, partitions: Mapping[str, int]) -> None:
    """Raises: KafkaEosError: a topic could not be made."""
    client = _AdminClient({"bootstrap.servers": bootstrap_servers})
    futures = client.create_topics([_NewTopic(name, count, -1) for name, count in partitions.items()])
    for name, future in futures.items():
        try:
            future.result(_SECONDS)
        except KafkaException as error:
            raise classify(error, f"creating topic {name!r}") from error


def send(
    bootstrap_servers: str, topic: str, values: list[str], keys: list[str], tell: Callable[[int], None]
) -> None:
    """Plain events; ``tell`` is given the number of each chunk."""
    producer = RecordProducer(producer_config({"bootstrap.servers": bootstrap_servers}), "demo")
    try:
        for start in range(0, len(values), 10_000):
            rows = pa.record_batch(
                {
                    "value": pa.array(values[start : start + 10_000]).cast(pa.binary()),
                    "key": pa.array(keys[start : start + 10_000]).cast(pa.binary()),
                }
            )
            producer.send(rows, topic, Deadline.after_seconds(_SECONDS))
            tell(rows.num_rows)
        producer.flush(Deadline.after_seconds(_SECONDS))
    finally:
        producer.close()


class Ends:
    """How far topics reach, asked again and again with one client."""

    def __init__(self, bootstrap_servers: str, topics: Mapping[str, int]) -> None:
        self._client = _consumer(bootstrap_servers, "read_uncommitted")
        self._partitions = [TopicPartition(name, n) for name, count in topics.items() for n in range(count)]

    def total(self) -> int:
        """Sum of the high watermarks."""
        return sum(self._client.get_watermark_offsets(each, timeout=_SECONDS)[1] for each in self._partitions)

    def close(self) -> None:
        self._client.close()


def read_back(
    bootstrap_servers: str, topics: Iterable[str], isolation_level: str = "read_committed"
) -> Iterator[tuple[str, bytes]]:
    """Topic and value of every record that is in the topics now."""
    client = _consumer(bootstrap_servers, isolation_level)
    try:
        listed = client.list_topics(timeout=_SECONDS).topics
        left = {(name, number) for name in topics for number in listed[name].partitions}
        client.assign([TopicPartition(name, number, 0) for name, number in left])
        while left:
            for message in client.consume(10_000, 0.2):
                if message.error() is not None:
                    left.discard((message.topic(), message.partition()))
                else:
                    yield message.topic(), message.value()
    finally:
        client.close()


def _consumer(bootstrap_servers: str, isolation_level: str) -> Any:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "kafka-eos-demo-reader",
            "isolation.level": isolation_level,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
        }
    )
