"""Produces and reads back records without the product, so that it does not check itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError as KafkaPythonError

from integration.support.processes import await_condition
from kafka_eos_source.kafka import error_codes, failure
from kafka_eos_source.runtime.deadline import Deadline

TIMEOUT_SECONDS = 60.0
#: How long `read_back` waits for the control records of transactions before it asks for the transactions.
_CONTROL_RECORD_SECONDS = 5.0
#: States of a transaction that is over, while its control records are written.
_ENDING = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
#: Names of kafka-python for properties of a login.
_KAFKA_PYTHON = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}


@dataclass(frozen=True)
class Record:
    """One record that was read back."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    timestamp_ms: int


_KEPT_FOR_EVER = {"retention.ms": "-1"}


class Admin:
    """Creates, changes and inspects topics and groups of one cluster."""

    def __init__(self, bootstrap: str, **config: Any) -> None:
        self._config = {"bootstrap.servers": bootstrap, **config}
        self.client = AdminClient(self._config)

    def create(self, name: str, partitions: int = 1, **config: str) -> str:
        """Creates a topic. The broker keeps its records, whatever their timestamps are."""
        named = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, partitions, -1, config={**_KEPT_FOR_EVER, **named})
        return self._created(topic, partitions)

    def create_on(self, name: str, brokers: Sequence[int | Sequence[int]], **config: str) -> str:
        """Creates a topic with these replicas of each partition; a number stands for one replica."""
        assignment = [[each] if isinstance(each, int) else list(each) for each in brokers]
        named = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(
            name, len(brokers), replica_assignment=assignment, config={**_KEPT_FOR_EVER, **named}
        )
        return self._created(topic, len(brokers))

    def _created(self, topic: NewTopic, partitions: int) -> str:
        name = str(topic.topic)
        self.client.create_topics([topic])[name].result(TIMEOUT_SECONDS)
        self._await_partitions(name, partitions)
        return name

    def delete(self, name: str) -> None:
        """Deletes a topic; returns when a broker no longer names it."""
        self.client.delete_topics([name])[name].result(TIMEOUT_SECONDS)
        self._await_partitions(name, 0)

    def grow(self, name: str, partitions: int) -> None:
        """Adds partitions, so that the topic has this number of them."""
        self.client.create_partitions([NewPartitions(name, partitions)])[name].result(TIMEOUT_SECONDS)
        self._await_partitions(name, partitions)

    def partitions(self, name: str) -> int:
        """Returns how many partitions of a topic a broker names; 0 = it does not know the topic."""
        # asked for all topics, because a broker that creates topics creates one that it is asked for
        found = self.client.list_topics(timeout=TIMEOUT_SECONDS).topics.get(name)
        return 0 if found is None or found.error is not None else len(found.partitions)

    def _await_partitions(self, name: str, number: int) -> None:
        """Waits for what the controller has accepted: it answers before the brokers know of a change."""
        await_condition(
            lambda: self.partitions(name) == number, TIMEOUT_SECONDS, f"{name!r} has {number} partitions"
        )

    def elect_preferred_leaders(self) -> None:
        """Makes the first replica of each partition its leader."""
        self.client.elect_leaders(ElectionType.PREFERRED).result(TIMEOUT_SECONDS)

    def configure(self, name: str, config: Mapping[str, str]) -> None:
        """Changes the configuration of a topic; returns when a broker shows the new values."""
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        for future in self.client.incremental_alter_configs([resource]).values():
            future.result(TIMEOUT_SECONDS)

        def is_shown() -> bool:
            asked = ConfigResource(ResourceType.TOPIC, name)
            shown = self.client.describe_configs([asked])[asked].result(TIMEOUT_SECONDS)
            return all(shown[key].value == value for key, value in config.items())

        # the controller answers before the brokers know of a change
        await_condition(is_shown, TIMEOUT_SECONDS, f"the configuration of {name!r}")

    def delete_records(self, name: str, partition: int, before: int) -> None:
        futures = self.client.delete_records([TopicPartition(name, partition, before)])
        for future in futures.values():
            future.result(TIMEOUT_SECONDS)

    def deleted_records(self, name: str, partition: int, before: int) -> bool:
        """As `delete_records`. Returns False while the broker does not know yet that its policy allows it."""
        try:
            self.delete_records(name, partition, before)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.POLICY_VIOLATION:
                raise
            return False
        return True

    def commit(self, group_id: str, offsets: Mapping[tuple[str, int], tuple[int, str]]) -> None:
        """Commits offsets with metadata for a group without members."""
        partitions = [
            TopicPartition(topic, number, offset, metadata)
            for (topic, number), (offset, metadata) in offsets.items()
        ]
        # the admin client's alter_consumer_group_offsets drops the metadata
        consumer = Consumer({**self._config, "group.id": group_id})
        try:
            for each in consumer.commit(offsets=partitions, asynchronous=False):
                assert each.error is None, each
        finally:
            consumer.close()

    def reset_offsets(self, group_id: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commits offsets without metadata, as ``kafka-consumer-groups --reset-offsets`` does.

        The future succeeds although the broker refused each partition, for example because a new broker still
        loads the group's coordinator. The method asks again then.
        """
        wanted = [TopicPartition(topic, number, offset) for number, offset in offsets.items()]

        def is_done() -> bool:
            asked = [ConsumerGroupTopicPartitions(group_id, wanted)]
            (future,) = self.client.alter_consumer_group_offsets(asked).values()
            answered = future.result(TIMEOUT_SECONDS).topic_partitions
            refused = [KafkaException(each.error) for each in answered if each.error is not None]
            for error in refused:
                if not _is_transient(error):
                    raise error
            return not refused

        await_condition(is_done, TIMEOUT_SECONDS, f"offsets of group {group_id!r}")

    def stable_offsets(self, name: str) -> dict[int, int]:
        """Returns last stable offsets, which equal the end offsets if no transaction is open."""
        asked = {TopicPartition(name, number): OffsetSpec.latest() for number in range(self.partitions(name))}
        found = self.client.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return {tp.partition: future.result(TIMEOUT_SECONDS).offset for tp, future in found.items()}

    def group(self, group_id: str, *, may_be_empty: bool = False) -> dict[tuple[str, int], tuple[int, str]]:
        """Returns a group's committed offsets and their metadata.

        Kafka answers a commit before the offsets are stable, so the method waits for that. It does not list
        those of a new group at all until then.

        Args:
            group_id: the group.
            may_be_empty: whether the group may hold no offsets; otherwise, the method waits for some.
        """
        limit = Deadline.after_seconds(TIMEOUT_SECONDS)
        while True:
            future = self.client.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group_id)], require_stable=True
            )[group_id]
            try:
                found = future.result(TIMEOUT_SECONDS).topic_partitions
            except KafkaException as error:  # a new broker loads the group's coordinator
                if limit.expired or not _is_transient(error):
                    raise
                continue
            is_stable = all(each.error is None for each in found) and (may_be_empty or found)
            if limit.expired or is_stable:
                break
        return {
            (each.topic, each.partition): (each.offset, (each.metadata or "").rstrip("\0")) for each in found
        }

    def delete_group(self, group_id: str) -> None:
        self.client.delete_consumer_groups([group_id])[group_id].result(TIMEOUT_SECONDS)

    def groups(self) -> list[str]:
        """Returns the ids of all groups, once every coordinator can list its own."""
        found: list[str] = []

        def is_complete() -> bool:
            listed = self.client.list_consumer_groups().result(TIMEOUT_SECONDS)
            for error in listed.errors:
                if not _is_transient(error):
                    raise error
            found[:] = [each.group_id for each in listed.valid]
            # of a coordinator that still loads, there is only an error, in a result that has succeeded
            return not listed.errors

        await_condition(is_complete, TIMEOUT_SECONDS, "all groups are listed")
        return found


def _is_transient(error: KafkaError | KafkaException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    if error.code() < error_codes.ErrorCode.UNKNOWN_SERVER_ERROR:
        passing = ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_DESTROY_BROKER")
        return error.name() in passing
    return failure.is_transient(error_codes.KafkaError(error.code()))


def produce(
    bootstrap: str,
    topic: str,
    values: Iterable[str | bytes | None],
    *,
    keys: Sequence[str | bytes | None] | None = None,
    partition: int = -1,
    headers: Any = None,
    timestamp_ms: int = 0,
    timestamps_ms: Sequence[int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Sends records without a transaction and waits until the broker has them.

    The few records that a test sends to a partition appear there at once, because the producer collects them
    until it is flushed, which does not wait for ``linger.ms``. So a running query reads them in one batch.
    """
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 60_000, **(config or {})})
    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: object) -> None:
        if error is not None:
            refused.append(error)

    for index, value in enumerate(values):
        key = keys[index] if keys is not None else None
        while True:
            try:
                at = timestamp_ms if timestamps_ms is None else timestamps_ms[index]
                producer.produce(
                    topic,
                    value,
                    key,
                    partition=partition,
                    headers=headers,
                    timestamp=at,
                    on_delivery=delivered,
                )
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(TIMEOUT_SECONDS) == 0
    producer.close()
    assert not refused, refused[0]  # a record that the broker refused is flushed too


def transaction(bootstrap: str, transactional_id: str, config: Mapping[str, Any] | None = None) -> Producer:
    """Returns a producer with an open transaction; the caller commits, aborts or closes it.

    Brokers leave it open for ten minutes, because a test may read several times meanwhile.
    """
    producer = Producer(
        {
            "transaction.timeout.ms": 600_000,
            **(config or {}),
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
        }
    )
    producer.init_transactions(TIMEOUT_SECONDS)
    producer.begin_transaction()
    return producer


def read_back(
    bootstrap: str, *topics: str, committed: bool = True, config: Mapping[str, Any] | None = None
) -> list[Record]:
    """Returns every record that is in the topics now, by partition and offset.

    Kafka answers a commit before the partitions have its control record. So if open transactions hide
    records, the function waits for them a moment, and then as long as a coordinator says that it still has to
    write control records.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "read-back",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            **(config or {}),
        }
    )
    found: list[Record] = []
    try:
        open_partitions = {(topic, number) for topic in topics for number in _numbers(consumer, topic)}
        consumer.assign([TopicPartition(topic, number, 0) for topic, number in open_partitions])
        hidden: dict[tuple[str, int], int] = {}
        patience = Deadline.after_seconds(_CONTROL_RECORD_SECONDS)
        limit = Deadline.after_seconds(TIMEOUT_SECONDS)
        while open_partitions:
            left = {tp: hidden[tp] for tp in open_partitions if tp in hidden}
            if (
                len(left) == len(open_partitions)
                and patience.expired
                and (limit.expired or _stay_hidden(consumer, left, bootstrap, config))
            ):
                break
            for message in consumer.consume(10_000, 0.1):
                tp = message.topic(), message.partition()
                if message.error() is not None:
                    assert message.error().name() == "_PARTITION_EOF", message.error()
                    _, end = consumer.get_watermark_offsets(TopicPartition(*tp), cached=True)
                    if message.offset() < end:
                        hidden[tp] = message.offset()
                    else:
                        open_partitions.discard(tp)
                else:
                    found.append(
                        Record(
                            message.topic(),
                            message.partition(),
                            message.offset(),
                            message.key(),
                            message.value(),
                            message.headers(),
                            message.timestamp()[1],
                        )
                    )
    finally:
        consumer.close()
    return sorted(found, key=lambda record: (record.topic, record.partition, record.offset))


def _numbers(client: Consumer, topic: str) -> list[int]:
    """Returns the partitions of a topic; waits for a broker that does not know the topic yet."""
    found: list[int] = []

    def is_known() -> bool:
        metadata = client.list_topics(topic, timeout=TIMEOUT_SECONDS).topics[topic]
        found[:] = () if metadata.error is not None else metadata.partitions
        return bool(found)

    await_condition(is_known, TIMEOUT_SECONDS, f"a broker knows topic {topic!r}")
    return found


def _stay_hidden(
    consumer: Consumer,
    positions: Mapping[tuple[str, int], int],
    bootstrap: str,
    config: Mapping[str, Any] | None,
) -> bool:
    """Whether the records after these positions stay hidden, because their transactions are not over."""
    if _is_ending_transactions(bootstrap, config or {}):
        return False
    # a transaction may have been over just before the coordinator was asked
    return all(
        consumer.get_watermark_offsets(TopicPartition(*tp), timeout=TIMEOUT_SECONDS)[1] <= position
        for tp, position in positions.items()
    )


def _is_ending_transactions(bootstrap: str, config: Mapping[str, Any]) -> bool:
    """Whether control records of transactions that were committed or aborted still have to be written."""
    login = {_KAFKA_PYTHON[name]: value for name, value in config.items() if name in _KAFKA_PYTHON}
    try:
        with closing(KafkaAdminClient(bootstrap_servers=bootstrap.split(","), **login)) as admin:
            return any(admin.list_transactions(state_filters=list(_ENDING)).values())
    except KafkaPythonError:  # a coordinator moves or loads
        return True


def values(records: Iterable[Record]) -> list[str]:
    """Returns the records' values as text, sorted."""
    return sorted("" if record.value is None else record.value.decode() for record in records)


def end_offsets(bootstrap: str, topic: str, isolation_level: str = "read_uncommitted") -> dict[int, int]:
    """Returns end offsets, which every write moves; with read_committed, last stable offsets."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "read-back", "isolation.level": isolation_level}
    )
    try:
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=TIMEOUT_SECONDS)[1]
            for number in _numbers(consumer, topic)
        }
    finally:
        consumer.close()


def final_end_offsets(bootstrap: str, topic: str) -> dict[int, int]:
    """Returns end offsets that stay as they are until somebody writes again.

    Raises:
        AssertionError: if a transaction stays open.
    """
    await_stable(bootstrap, topic)
    return end_offsets(bootstrap, topic)


def await_stable(bootstrap: str, topic: str) -> None:
    """Waits until no transaction is open in a topic.

    Kafka answers a commit before the partitions have its control record. Until then nobody can read the
    records of the transaction, and the end offsets still grow.

    Raises:
        AssertionError: if a transaction stays open.
    """
    await_condition(
        lambda: is_stable(bootstrap, topic), TIMEOUT_SECONDS, f"no transaction is open in {topic}"
    )


def is_stable(bootstrap: str, topic: str) -> bool:
    """Whether no transaction is open in any partition of a topic."""
    return end_offsets(bootstrap, topic, "read_committed") == end_offsets(bootstrap, topic)
