"""Sends, watches and reads records with confluent-kafka alone, so that kafka-eos does not check itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import admin as client_admin

from benchmarks.progress import Output
from benchmarks.workload import Workload, key_numbers
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.runtime.deadline import Deadline

_AdminClient: Any = client_admin.AdminClient
_NewTopic: Any = client_admin.NewTopic  # type: ignore[attr-defined]
_OffsetSpec: Any = client_admin.OffsetSpec  # type: ignore[attr-defined]

_SECONDS = 60.0
_PAUSE_SECONDS = 0.1
_AT_ONCE = 10_000
#: How many records of the output a reader keeps whole, at least.
_SAMPLE = 1_000
_WARM_TRANSACTIONS = 200


class Cluster:
    """Client operations on one cluster."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = _AdminClient({"bootstrap.servers": bootstrap})

    def create(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Creates a topic and waits for its leaders. Raises: KafkaException: if that fails."""
        made = self._admin.create_topics([_NewTopic(topic, partitions, -1, config=dict(config or {}))])
        made[topic].result(_SECONDS)
        self.stable(topic, partitions)

    def write_once(self, topic: str, partitions: int) -> None:
        """Writes a record to each partition, in a transaction that it aborts.

        A broker creates files at the first write to a partition: 1,000 partitions took it 5 to 20 s, whoever
        the client was. Readers of committed records do not see these.

        Raises:
            KafkaException: if a write fails.
        """
        producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": f"{topic}.once"})
        producer.init_transactions(_SECONDS)
        producer.begin_transaction()
        for partition in range(partitions):
            producer.produce(topic, b"", partition=partition)
        producer.flush(_SECONDS)
        producer.abort_transaction(_SECONDS)
        # a producer can begin again once the broker has ended the transaction in all partitions
        producer.begin_transaction()
        producer.produce(topic, b"", partition=0)
        producer.abort_transaction(_SECONDS)

    def delete(self, topics: Sequence[str]) -> None:
        """Deletes topics. Raises: KafkaException: if one cannot be deleted."""
        for future in self._admin.delete_topics(list(topics)).values() if topics else ():
            future.result(_SECONDS)

    def topics(self) -> list[str]:
        """Returns all topics except the brokers' internal ones."""
        found = self._admin.list_topics(timeout=_SECONDS).topics
        return sorted(name for name in found if not name.startswith("__"))

    def warm_up(self) -> None:
        """Warms up the broker with transactions that commit a group's offsets.

        Otherwise the first contender would pay for the creation of the broker's two internal topics with 50
        partitions, and for the JVM's compiler.

        Raises:
            KafkaException: if a transaction fails.
        """
        topic = f"bench.warm-up.{time.time():.0f}"
        self.create(topic, 4)
        producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": topic, "linger.ms": 0})
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": topic})
        group = consumer.consumer_group_metadata()
        producer.init_transactions(_SECONDS)
        for number in range(_WARM_TRANSACTIONS):
            producer.begin_transaction()
            for partition in range(4):
                producer.produce(topic, bytes(100), partition=partition)
            producer.send_offsets_to_transaction([TopicPartition(topic, 0, number)], group, _SECONDS)
            producer.commit_transaction(_SECONDS)
        consumer.close()
        self.delete([topic])

    def preload(self, workload: Workload, topic: str) -> None:
        """Sends the workload's records with Java's partitioning and ``acks=all``.

        Raises:
            UnavailableError: if the broker did not accept every record.
        """
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 20,
                "batch.size": 1_000_000,
                "partitioner": "murmur2_random",
                "queue.buffering.max.messages": 1_000_000,
                "delivery.report.only.error": True,
                "compression.type": workload.compression,
            }
        )
        for records in workload.sent():
            for key, value in records:
                while True:
                    try:
                        producer.produce(topic, value, key)
                        break
                    except BufferError:  # large records fill the queue before it has many of them
                        producer.poll(0.01)
            while len(producer) > _AT_ONCE * 50:
                producer.poll(0.01)
        producer.flush(_SECONDS)
        ends = sum(self.stable(topic, workload.partitions))
        if ends != workload.records:
            raise UnavailableError(f"{ends} of {workload.records} records are in {topic!r}.")

    def stable(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Returns the last stable offset of each partition.

        Raises:
            KafkaException: if there is no answer within a minute.
        """
        return self._latest(topic, partitions, IsolationLevel.READ_COMMITTED)

    def ends(self, topic: str, partitions: int) -> tuple[int, ...]:
        """Returns the end offset of each partition, open transactions included. Raises: as `stable`."""
        return self._latest(topic, partitions, IsolationLevel.READ_UNCOMMITTED)

    def _latest(self, topic: str, partitions: int, isolation: Any) -> tuple[int, ...]:
        asked = {TopicPartition(topic, number): _OffsetSpec.latest() for number in range(partitions)}
        deadline, pause = Deadline.after_seconds(_SECONDS), threading.Event()
        while True:
            try:
                futures = self._admin.list_offsets(asked, isolation_level=isolation)
                found = {at.partition: future.result(_SECONDS).offset for at, future in futures.items()}
                return tuple(int(found[number]) for number in range(partitions))
            except KafkaException:
                # Not every broker knows a new topic at once, and a client of librdkafka 2.16 that asked too
                # early may report "No leaders found" for over a minute, so this makes a new client.
                if deadline.expired:
                    raise
                self._admin = _AdminClient({"bootstrap.servers": self.bootstrap})
            pause.wait(_PAUSE_SECONDS)


class OutputReader:
    """Reads an output topic with ``read_committed``; each read continues where the last one stopped.

    Args:
        bootstrap: bootstrap servers of the cluster.
        topic: the topic to read.
        partitions: its number of partitions.
        copies: whether records are copies of the input; otherwise each value is the count of its key.

    Attributes:
        output: the output of each partition, as far as it was read.
        sample: keys and values of some records, of each read those that came first.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, *, copies: bool = False) -> None:
        self.output = [Output() for _ in range(partitions)]
        self.sample: list[tuple[bytes, bytes]] = []
        self._topic = topic
        self._copies = copies
        self._next = [0] * partitions
        self._client: Any = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"{topic}-reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 20,
            }
        )

    def read(self) -> None:
        """Reads everything that is visible now.

        Raises:
            KafkaException: if a partition cannot be read.
            UnavailableError: if nothing arrives for a minute.
            ValueError: if a record is not a count, or its key was never sent.
        """
        taken = Taken(len(self.output))
        self._client.assign([TopicPartition(self._topic, *at) for at in enumerate(self._next)])
        silence = Deadline.after_seconds(_SECONDS)
        while not taken.complete:
            messages = self._client.consume(_AT_ONCE, 0.05)
            if messages:
                silence = Deadline.after_seconds(_SECONDS)
                taken.take(messages)
                if len(self.sample) < _SAMPLE:
                    good = [message for message in messages if message.error() is None]
                    self.sample += [(message.key(), message.value()) for message in good]
            elif silence.expired:
                raise UnavailableError(f"nothing more can be read of {self._topic}.")
        self._client.unassign()
        for number, part in enumerate(self.output):
            self._next[number] = taken.ends[number]
            offsets = np.array(taken.offsets[number], np.int64)
            keys = key_numbers(taken.keys[number])
            if self._copies:
                part.add_copies(offsets, keys)
            else:
                part.add(offsets, keys, np.array(taken.values[number], "S20").astype(np.int64))

    def __enter__(self) -> OutputReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()


class Taken:
    """The records of one read, for each partition up to the first end that the read reached.

    Records after that end were written in the meantime; the next read begins with them.
    """

    def __init__(self, partitions: int) -> None:
        self.offsets: list[list[int]] = [[] for _ in range(partitions)]
        self.keys: list[list[bytes]] = [[] for _ in range(partitions)]
        self.values: list[list[bytes]] = [[] for _ in range(partitions)]
        self.ends: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        return len(self.ends) == len(self.offsets)

    def take(self, messages: Sequence[Any]) -> None:
        """Adds messages. Raises: KafkaException: if a partition cannot be read."""
        for message in messages:
            number, error = message.partition(), message.error()
            if number in self.ends:
                continue
            if error is None:
                self.offsets[number].append(message.offset())
                self.keys[number].append(message.key())
                self.values[number].append(message.value()[:20])
            elif error.code() == KafkaError._PARTITION_EOF:
                self.ends[number] = int(message.offset())
            else:
                raise KafkaException(error)
