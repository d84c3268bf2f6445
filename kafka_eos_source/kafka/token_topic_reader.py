"""Reads the token topic, and never misses a query's newest record.

A ``read_committed`` reader sees nothing above the last stable offset, which any open transaction of any
producer holds. So a certain answer waits until the last stable offset has passed the end that the log had
when the question was asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import KafkaEosError, RetriableError, UnavailableError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader, Records
from kafka_eos_source.kafka.cluster_reader import ClusterReader, LogEnds
from kafka_eos_source.kafka.config import admin_config, consumer_config
from kafka_eos_source.kafka.consumer import POOL, AssignedConsumer
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.token_topic import TokenTopic, check
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token_record import TokenRecord
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

#: librdkafka wants a group id of any consumer. The reader never joins the group, and needs no right to it.
_READER = "kafka-eos-token-topic"

_WAIT_SECONDS = 0.5
_PAUSE_SECONDS = 0.05
#: How long the record that holds the last stable offset is looked for, to name its query in an error.
_HOLDER_SECONDS = 5.0


@dataclass(frozen=True)
class Found:
    """One key's newest value in the token topic.

    Attributes:
        key: of the record.
        tp, offset: where the record is.
        value: of the record, never a tombstone.
    """

    key: bytes
    tp: TopicPartition
    offset: int
    value: bytes

    def decode(self) -> TokenRecord:
        """The record. Raises: as `TokenRecord.decode`."""
        return TokenRecord.decode(self.key, self.value)


@dataclass
class Survey:
    """What a reader of the whole topic came across.

    Attributes:
        records: how many, outdated ones included.
        size_bytes: of their keys and values.
        newest: the newest value of each key in each partition; None = a tombstone.
    """

    records: int
    size_bytes: int
    newest: dict[tuple[bytes, TopicPartition], Found | None]


def last(
    kafka: Mapping[str, Any],
    topic: TokenTopic,
    application_id: str,
    deadline: Deadline,
    *,
    certain: bool = True,
) -> TokenRecord | None:
    """The newest committed record of a query; None if there is none, or only a tombstone.

    Call it after ``init_transactions`` of the query's transactional id: before that, a dead driver's
    transaction may still commit a newer record.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        topic: from `check`.
        application_id: of the query.
        deadline: for the brokers, and for the transactions of other queries that share the topic.
        certain: False = read only what can be read at once. The newest record may be missed while another
            query's transaction is open in the same partition, so that None proves nothing.

    Raises:
        UnavailableError: no broker answers, or an unfinished transaction holds a partition, until
            ``deadline``.
        AuthorizationError: the topic may not be read.
        OperatorError: the record is damaged or of a newer format.
    """
    survey = read(kafka, topic, deadline, certain=certain, key=application_id.encode())
    records = [found.decode() for found in survey.newest.values() if found is not None]
    # a key has records in several partitions after partitions were added: the old ones stay behind
    return max(records, key=lambda record: record.token.sequence, default=None)


def read(
    kafka: Mapping[str, Any],
    topic: TokenTopic,
    deadline: Deadline,
    *,
    certain: bool,
    key: bytes | None = None,
) -> Survey:
    """Reads the committed records of all partitions.

    Args:
        kafka, topic, deadline, certain: as for `last`.
        key: keep only this key's values; None = all keys'.

    Raises:
        UnavailableError, AuthorizationError: as `last`.
    """
    connection = admin_config(kafka)
    survey = Survey(0, 0, {})
    with ClusterReader(connection) as look:
        bounds = _Bounds(connection, look, topic, deadline)
        ranges = bounds.settled() if certain else bounds.now()
    with POOL.borrow(consumer_config(connection, _READER, "read_committed"), range_consumer()) as consumer:
        for tp, (start, end) in ranges.items():
            for records in _records(consumer, tp, start, end, deadline):
                _keep(survey, tp, records, key)
    return survey


@dataclass(frozen=True)
class TopicRecords:
    """The records of one checked token topic, as the commit reads them."""

    kafka: Mapping[str, Any] = field(repr=False)  # may hold passwords
    topic: TokenTopic

    @classmethod
    def checked(cls, kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TopicRecords:
        """Looks at the topic and logs its warnings. Raises: as `kafka.token_topic.check`."""
        topic = check(kafka, name, deadline)
        for warning in topic.warnings:
            _log.warning("%s", warning)
        return cls(kafka, topic)

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def topic_id(self) -> str:
        return self.topic.topic_id

    def partition_of(self, application_id: str) -> int:
        return self.topic.partition_of(application_id)

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        return last(self.kafka, self.topic, application_id, deadline, certain=certain)


_Ranges = dict[TopicPartition, tuple[int, int]]


class _Bounds:
    """Which offsets of each partition are to be read."""

    def __init__(
        self, connection: Mapping[str, Any], look: ClusterReader, topic: TokenTopic, deadline: Deadline
    ) -> None:
        self._connection = connection
        self._look = look
        self._partitions = [TopicPartition(topic.name, number) for number in range(topic.partitions)]
        self._deadline = deadline
        self._pause = threading.Event()

    def now(self) -> _Ranges:
        """All that can be read at this moment. Open transactions may hold more."""
        found = self._logs(self._partitions)
        return {tp: (ends.earliest, min(ends.stable, ends.end)) for tp, ends in found.items()}

    def settled(self) -> _Ranges:
        """All that is in the logs at this moment, once every transaction in it has ended.

        Raises:
            UnavailableError: a transaction does not end before the deadline.
        """
        found = self._logs(self._partitions)
        wanted = {tp: ends.end for tp, ends in found.items()}
        said = False
        while held := [tp for tp in found if found[tp].stable < wanted[tp]]:
            if self._deadline.expired:
                raise self._held(held[0], found[held[0]])
            if not said:
                said = True
                _log.info("waiting for unfinished transactions in %s", ", ".join(map(str, held)))
            self._pause.wait(min(_PAUSE_SECONDS, self._deadline.remaining_seconds()))
            found.update(self._logs(held))
        return {tp: (ends.earliest, wanted[tp]) for tp, ends in found.items()}

    def _logs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnds]:
        while True:
            try:
                return dict(self._look.logs(partitions))
            except (UnavailableError, RetriableError):  # for example while a leader is elected
                if self._deadline.expired:
                    raise
            self._pause.wait(min(_PAUSE_SECONDS, self._deadline.remaining_seconds()))

    def _held(self, tp: TopicPartition, ends: LogEnds) -> UnavailableError:
        holder = self._holder(tp, ends)
        if holder is None:
            whose = "of an unknown producer"
            end_it = "find its producer with kafka-transactions.sh find-hanging and end it"
        else:
            whose = f"of application.id={holder!r}"
            end_it = f"end it with kafka-eos fence --application-id {holder} --yes"
        return UnavailableError(
            f"an unfinished transaction {whose} holds partition {tp} of the token topic at offset "
            f"{ends.stable}, and the log goes on to {ends.end}. Newer tokens cannot be read until it ends; "
            f"waited {self._deadline.budget_seconds:.0f} s.",
            fix=f"if the driver of that query is gone, {end_it}; then restart this query. Give queries "
            "different token topics if they must not wait for each other.",
        )

    def _holder(self, tp: TopicPartition, ends: LogEnds) -> str | None:
        """The query whose transaction is open. It wrote the record at the last stable offset."""
        conf = consumer_config(self._connection, _READER, "read_uncommitted")
        soon = Deadline.after_seconds(_HOLDER_SECONDS)
        try:
            with POOL.borrow(conf, range_consumer()) as consumer:
                records = _records(consumer, tp, ends.stable, ends.stable + 1, soon)
                keys = [key for each in records for key in each.keys.to_pylist()]
        except KafkaEosError as error:
            _log.info("the producer that holds %s at offset %d is unknown: %s", tp, ends.stable, error)
            return None
        return keys[0].decode(errors="replace") if keys and keys[0] is not None else None


def _records(
    consumer: AssignedConsumer, tp: TopicPartition, start: int, end: int, deadline: Deadline
) -> Iterator[Records]:
    """The records from offset ``start`` to ``end`` (excluded), in offset order.

    Raises:
        UnavailableError: the topic was deleted, or nothing arrives until ``deadline``.
        AuthorizationError: the topic may not be read.
    """
    if start >= end:
        return
    reader = ChangelogReader(consumer, tp)
    position = start
    reader.start(position)
    try:
        while position < end:
            pulled = reader.take(min(_WAIT_SECONDS, deadline.remaining_seconds()), end)
            if pulled.gone:
                raise UnavailableError(
                    f"partition {tp} of the token topic is gone: the topic was deleted.",
                    fix="create it again with kafka-eos token-topic create, then restart the query.",
                )
            if pulled.records is not None:
                position = pulled.records.position
                yield pulled.records
            if pulled.log_end is not None and pulled.log_end >= end:
                return  # only control records were left
            if pulled.out_of_range:  # somebody deletes records at this moment
                position, _ = reader.readable(deadline)
                reader.start(position)
            elif pulled.records is None and deadline.expired:
                raise unreachable(
                    consumer.bootstrap_servers,
                    deadline.budget_seconds * 1000,
                    f"reading {tp}: {reader.last_complaint or 'nothing arrives'}",
                )
    finally:
        reader.stop()


def _keep(survey: Survey, tp: TopicPartition, records: Records, key: bytes | None) -> None:
    """Adds records to the survey: of each key the last value."""
    survey.records += len(records)
    survey.size_bytes += records.keys.nbytes + records.values.nbytes
    wanted: Sequence[int] = range(len(records))
    if key is not None:
        own = pc.equal(records.keys, pa.scalar(key, pa.binary())).fill_null(False)
        wanted = pc.indices_nonzero(own).to_pylist()[-1:]
    for index in wanted:
        name, value = records.keys[index].as_py(), records.values[index].as_py()
        if name is not None:
            found = None if value is None else Found(name, tp, int(records.offsets[index]), value)
            survey.newest[name, tp] = found
