"""Commits one batch with the real commit code and real clients on a mock cluster, and checks the result.

No part of the product is replaced. This module watches the producer and adds what the mock cluster lacks: it
writes the offsets of a transaction to the group once the transaction's commit control record is in the log,
so that the product finds its token where a real broker would keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientTopicPartition
from mock_cluster import MockCluster
from mock_log import Entry, commits, committed, read

from kafka_eos_source.commit.facts import Batch
from kafka_eos_source.commit.interfaces import ProducerSession
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.recovered import TokenRecords
from kafka_eos_source.commit.request import CommitRequest
from kafka_eos_source.commit.session import KafkaClients
from kafka_eos_source.commit.sources import SourceRange
from kafka_eos_source.kafka.native_support import LIBRDKAFKA
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, newest
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.writer import stage

APPLICATION_ID = "app"
SOURCE = TopicPartition("in", 0)
OUTPUT = "out"
OUTPUT_PARTITIONS = 2
ROWS = 10


class MockKafka:
    """`KafkaClients` on a mock cluster that record every transactional call.

    Attributes:
        calls: the product's transactional calls, in order.
        before: functions to run once, before the next call of a name.
    """

    def __init__(self, mock: MockCluster, **kafka: str) -> None:
        """Creates the clients; ``kafka`` holds more client properties, with ``_`` for ``.``."""
        self.mock = mock
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.kafka = {
            "bootstrap.servers": mock.bootstrap_servers,
            "log_level": "0",
            **{name.replace("_", "."): value for name, value in kafka.items()},
        }
        self._clients = KafkaClients(self.kafka, LIBRDKAFKA)  # the mock is librdkafka's; see wire_cluster
        self._sent: list[GroupOffset] | None = None
        self._commits_seen = 0
        mock.create_topic(OUTPUT, OUTPUT_PARTITIONS)
        mock.create_topic(SOURCE.topic, 1)
        genesis = Token(APPLICATION_ID, "query", "run", 0, -1, "", "d0", 0).encode()
        self.commit_offsets(
            [GroupOffset(SOURCE, 0, genesis), GroupOffset(TopicPartition(OUTPUT, 0), 0, genesis)]
        )

    # commit.interfaces.Clients
    def producer(self, transactional_id: str) -> WatchedProducer:
        return WatchedProducer(self._clients.producer(transactional_id), self)

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        return self._clients.token_records(name, deadline)

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        return ()  # the mock does not know the request

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return self._clients.committed_now(group_id, certainly, deadline)

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.record_committed_offsets()
        self.record_call("token")
        return self._clients.group_offsets(group_id, certainly, deadline)

    def record_call(self, call: str) -> None:
        self.calls.append(call)
        self.before.pop(call, lambda: None)()

    def record_offsets(self, offsets: Collection[GroupOffset] | None) -> None:
        """Records the offsets that the open transaction carries; None = none yet."""
        self._sent = None if offsets is None else list(offsets)

    def record_committed_offsets(self) -> None:
        """Writes a transaction's offsets to the group if it was committed since the last call."""
        ends = [commits(self._log(partition)) for partition in range(OUTPUT_PARTITIONS)]
        assert len(set(ends)) == 1, f"a transaction ended in one partition and not in another: {ends}"
        if ends[0] == self._commits_seen:
            return
        assert ends[0] == self._commits_seen + 1, (
            "two transactions were committed between two calls of this method"
        )
        assert self._sent is not None, "records were committed without a token"
        self._commits_seen = ends[0]
        self.commit_offsets(self._sent)
        self._sent = None

    def commit_offsets(self, offsets: Collection[GroupOffset]) -> None:
        """Commits ``offsets`` for the group."""
        consumer = Consumer({**self.kafka, "group.id": APPLICATION_ID})
        try:
            consumer.commit(
                offsets=[
                    ClientTopicPartition(each.tp.topic, each.tp.partition, each.offset, each.metadata)
                    for each in offsets
                ],
                asynchronous=False,
            )
        finally:
            consumer.close()

    def token(self) -> Token | None:
        """Returns the newest token in the group; None if it is only the genesis token."""
        wanted = {SOURCE, TopicPartition(OUTPUT, 0)}
        found = self._clients.group_offsets(APPLICATION_ID, wanted, Deadline.after_seconds(20))
        found_token = newest(found.values())
        return None if found_token is not None and found_token.sequence == 0 else found_token

    def visible(self) -> list[str]:
        """Returns the values of all committed records."""
        return [
            (value or b"").decode()
            for partition in range(OUTPUT_PARTITIONS)
            for value in committed(self._log(partition))
        ]

    def _log(self, partition: int) -> list[Entry]:
        return read(self.mock.bootstrap_servers, OUTPUT, partition)


class WatchedProducer:
    """A `TransactionalProducer` that records the calls made to it."""

    def __init__(self, producer: TransactionalProducer, kafka: MockKafka) -> None:
        self._producer = producer
        self._kafka = kafka

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init(self, deadline: Deadline) -> None:
        self._kafka.record_call("init")
        self._producer.init(deadline)

    def begin(self) -> None:
        self._kafka.record_committed_offsets()
        self._kafka.record_call("begin")
        self._kafka.record_offsets(None)
        self._producer.begin()

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns no ids, because the mock cluster has none."""
        return {}

    def flush(self, deadline: Deadline) -> None:
        self._kafka.record_call("flush")
        self._producer.flush(deadline)

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        self._kafka.record_call("offsets")
        self._producer.send_offsets(offsets, group_id, deadline)
        self._kafka.record_offsets(offsets)

    def commit(self, deadline: Deadline) -> None:
        self._kafka.record_call("commit")
        self._producer.commit(deadline)

    def abort(self, deadline: Deadline) -> None:
        self._kafka.record_call("abort")
        self._producer.abort(deadline)


def request(batch_id: int = 0) -> CommitRequest:
    """Returns batch ``batch_id`` of a query that reads topic ``in`` and writes topic ``out``."""
    return CommitRequest(
        batch=Batch(
            application_id=APPLICATION_ID,
            query_id="query",
            run_id="run",
            batch_id=batch_id,
            start=f"d{batch_id}",
            end=f"d{batch_id + 1}",
        ),
        group_id=APPLICATION_ID,
        anchor=TopicPartition(OUTPUT, 0),
        sources=(SourceRange({SOURCE: 10 * (batch_id + 1)}, {SOURCE: 10 * batch_id}),),
        topic=OUTPUT,
        source_cluster="same",
    )


def values(batch_id: int = 0, rows: int = ROWS) -> list[str]:
    """Returns the values of one batch."""
    return [f"{batch_id}:{row}" for row in range(rows)]


def staged(values: Sequence[str], *, timestamps: bool = False) -> StagedRows:
    """Returns staged rows, spread over the output partitions.

    With ``timestamps``, each row has one, so that the producer sends rows one by one and not in batches.
    """
    columns = {
        "value": pa.array([value.encode() for value in values]),
        "partition": pa.array([row % OUTPUT_PARTITIONS for row in range(len(values))], pa.int32()),
    }
    if timestamps:
        columns["timestamp"] = pa.array([1_700_000_000_000] * len(values))
    batch = pa.record_batch(columns)
    part = stage([batch], batch.schema, folder=None, batch="0", inline_bytes=1 << 20, topic=OUTPUT)
    return StagedRows(StagingFolder("no file is written"), "0", [part])


def commit(
    kafka: MockKafka,
    session: ProducerSession,
    batch_id: int = 0,
    rows: StagedRows | None = None,
    deadline: Deadline | None = None,
) -> Result:
    """Commits a batch as `commit.session` does; by default with the batch's `values` and a far deadline.

    Raises:
        KafkaEosError: as `Commit.run`.
    """
    if rows is None:
        rows = staged(values(batch_id))
    return Commit(request(batch_id), rows, kafka, session, deadline or far_off()).run()


def far_off() -> Deadline:
    """Returns a deadline of five minutes, the product's default."""
    return Deadline.after_seconds(300)


def shorten(deadline: Deadline, seconds: float) -> None:
    """Moves a deadline that is in use, so that time runs out in exactly one step of the commit."""
    object.__setattr__(deadline, "at", time.monotonic() + seconds)


def visible_values_and_token(kafka: MockKafka) -> tuple[list[str], Token | None]:
    """Returns the visible values, sorted, and the group's token; fails if only one of them exists."""
    kafka.record_committed_offsets()
    visible, token = kafka.visible(), kafka.token()
    assert bool(visible) == (token is not None), f"{len(visible)} records are visible, the token is {token}"
    return sorted(visible), token
