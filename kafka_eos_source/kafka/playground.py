"""Small clients for the demo and the examples: create topics, send events, and read the output back.

They read with confluent-kafka alone, so they check the output independently of this package's own reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import confluent_kafka
import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import classify, is_transient
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

T = TypeVar("T")

_SECONDS = 60.0
_PAUSE_SECONDS = 0.1
#: Failures of confluent-kafka that pass by themselves, besides those that it marks as retriable.
_PASSING = frozenset({"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_DESTROY_BROKER"})


def create_topics(bootstrap_servers: str, partitions: Mapping[str, int]) -> None:
    """Creates topics with these partition counts, and waits until each partition has a leader.

    Raises:
        OperatorError: if a topic exists already.
        KafkaEosError: if a topic could not be created.
    """
    deadline = Deadline.after_seconds(_SECONDS)
    with TopicAdmin({"bootstrap.servers": bootstrap_servers}) as admin:
        for name, count in partitions.items():
            exists = admin.shape(name, deadline) is not None
            if exists or not admin.create(name, count, -1, {}, deadline):
                raise OperatorError(f"topic {name!r} exists already.", fix="use it, or choose another name.")
            admin.await_led(name, deadline)


def records_in(bootstrap_servers: str, topic: str) -> int | None:
    """Returns how many offsets a topic holds; None if it does not exist.

    Raises:
        KafkaEosError: if no broker answers.
    """
    deadline = Deadline.after_seconds(_SECONDS)
    with TopicAdmin({"bootstrap.servers": bootstrap_servers}) as admin:
        shape = admin.shape(topic, deadline)
        if shape is None:
            return None
        admin.await_led(topic, deadline)
    watch = Watch(bootstrap_servers, "kafka-eos-flights", {}, {topic: shape.partitions})
    try:
        return watch.written()
    finally:
        watch.close()


def send(
    bootstrap_servers: str, topic: str, values: list[str], keys: list[str], report: Callable[[int], None]
) -> None:
    """Sends events without a transaction; calls ``report`` with the size of each chunk."""
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
            report(rows.num_rows)
        producer.flush(Deadline.after_seconds(_SECONDS))
    finally:
        producer.close()


class Watch:
    """Watches the progress of a query from outside, with one client for all requests.

    The client uses the query's group id but never joins the group. Unlike `GroupOffsets`, it does not wait
    for open transactions: what a killed driver left open is not committed yet.

    Args:
        bootstrap_servers: of the cluster.
        group_id: the group whose committed offsets show the progress.
        read: input topics, and their partition counts.
        written: output topics, and their partition counts.
    """

    def __init__(
        self, bootstrap_servers: str, group_id: str, read: Mapping[str, int], written: Mapping[str, int]
    ) -> None:
        self._client = _consumer(bootstrap_servers, "read_uncommitted", group_id)
        self._read = _partitions(read)
        self._written = _partitions(written)

    def committed(self) -> int:
        """Returns the sum of the group's committed offsets.

        Raises:
            KafkaEosError: if no broker answers.
        """
        found = _retried(
            "reading the offsets of the demo's group",
            lambda: self._client.committed(self._read, timeout=_SECONDS),
        )
        return sum(max(0, each.offset) for each in found)

    def written(self) -> int:
        """Returns the sum of the output topics' high watermarks.

        Raises:
            KafkaEosError: if no broker answers.
        """
        return _retried(
            "reading the ends of the demo's topics",
            lambda: sum(
                int(self._client.get_watermark_offsets(each, timeout=_SECONDS)[1]) for each in self._written
            ),
        )

    def close(self) -> None:
        """Closes the client."""
        self._client.close()


def read_back(
    bootstrap_servers: str, topics: Mapping[str, int], isolation_level: str = "read_committed"
) -> Iterator[tuple[str, bytes]]:
    """Yields the topic and value of every record that the topics contain now.

    Kafka answers a commit before the records of the transaction can be read. So with read_committed, the
    function waits for the end of transactions that are open.

    Args:
        bootstrap_servers: of the cluster.
        topics: name → partition count.
        isolation_level: of the consumer.

    Raises:
        KafkaEosError: if a partition cannot be read, nothing arrives for a minute, or a transaction stays
            open so long.
    """
    client = _consumer(bootstrap_servers, isolation_level, "kafka-eos-demo-reader")
    left = {(each.topic, each.partition) for each in _partitions(topics)}
    silence = Deadline.after_seconds(_SECONDS)
    try:
        client.assign([confluent_kafka.TopicPartition(name, number, 0) for name, number in left])
        while left:
            messages = client.consume(10_000, 0.2)
            if messages:
                silence = Deadline.after_seconds(_SECONDS)
            elif silence.expired:
                raise UnavailableError(
                    f"no records arrived for {_SECONDS:.0f} s from the partitions {sorted(left)}.",
                    fix="check that the brokers run, that every partition has a leader, and that no "
                    "transaction is open.",
                )
            for message in messages:
                error = message.error()
                if error is None:
                    yield message.topic(), message.value()
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    tp = confluent_kafka.TopicPartition(message.topic(), message.partition())
                    # open transactions end the readable part of a log before the end that the broker told
                    if message.offset() >= client.get_watermark_offsets(tp, cached=True)[1]:
                        left.discard((tp.topic, tp.partition))
                elif not is_transient(_translated(error)):
                    raise classify(_translated(error), f"reading {message.topic()!r}")
    finally:
        client.close()


def _partitions(topics: Mapping[str, int]) -> list[confluent_kafka.TopicPartition]:
    return [
        confluent_kafka.TopicPartition(name, number)
        for name, count in topics.items()
        for number in range(count)
    ]


def _retried(doing: str, ask: Callable[[], T]) -> T:
    """Calls ``ask``, and retries while the cluster is starting or a coordinator moves."""

    def translated() -> T:
        try:
            return ask()
        except confluent_kafka.KafkaException as failure:
            raise _translated(failure.args[0]) from failure

    def permanent(failure: KafkaError) -> KafkaEosError | None:
        return None if is_transient(failure) else classify(failure, doing)

    return retry(
        translated,
        KafkaError,
        Pauses(Deadline.after_seconds(_SECONDS), _PAUSE_SECONDS),
        permanent=permanent,
        timed_out=lambda failure: classify(failure, doing),
    )


def _translated(error: confluent_kafka.KafkaError) -> KafkaError:
    """Returns an error of confluent-kafka as one of this package. Its codes below -1 are its own."""
    if error.code() >= ErrorCode.UNKNOWN_SERVER_ERROR:
        return KafkaError(error.code(), error.str())
    passes = error.retriable() or error.name() in _PASSING
    return KafkaError(
        ErrorCode.CONNECTION_FAILED if passes else ErrorCode.UNKNOWN_SERVER_ERROR,
        f"{error.str()}, {error.name()}",
    )


def _consumer(bootstrap_servers: str, isolation_level: str, group_id: str) -> Any:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group_id,
            "isolation.level": isolation_level,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
        }
    )
