"""Commits one batch with the real commit code and the real producer on a simulated cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.commit.request import CommitRequest, ProducerSession, SourceRange, TokenRecords
from kafka_eos_source.commit.verdict import Batch
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, newest
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.staging import stage
from tests.support.simulated_kafka import Fault, SimulatedKafka

APPLICATION_ID = "app"
SOURCE = TopicPartition("in", 0)
OUTPUT = "out"
OUTPUT_PARTITIONS = 2
ROWS = 10


def cluster(brokers: int = 1, version: int = 2) -> SimulatedKafka:
    """Returns a cluster with the topics of the batch."""
    return SimulatedKafka({OUTPUT: OUTPUT_PARTITIONS, SOURCE.topic: 1}, brokers=brokers, version=version)


class RecordingClients:
    """`KafkaClients` of a simulated cluster that record every transactional call.

    Attributes:
        calls: the product's transactional calls, in order.
        before: functions to run once, before the next call of a name.
        faults: what happens to the next requests of a kind, in order.
    """

    def __init__(self, simulated: SimulatedKafka, **kafka: str) -> None:
        """Creates the clients; ``kafka`` holds more client properties, with ``_`` for ``.``."""
        self.cluster = simulated
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.faults: dict[str, list[Fault]] = {}
        properties = {name.replace("_", "."): value for name, value in kafka.items()}
        self._clients = KafkaClients({"bootstrap.servers": simulated.bootstrap, **properties})
        simulated.fault = self._fault
        genesis = Token(APPLICATION_ID, "query", "run", 0, -1, "", "d0", 0).encode()
        simulated.offsets = {SOURCE: (0, genesis), (OUTPUT, 0): (0, genesis)}

    def _fault(self, kind: str) -> Fault | None:
        waiting = self.faults.get(kind)
        return waiting.pop(0) if waiting else None

    # commit.request.Clients
    def producer(self, transactional_id: str) -> WatchedProducer:
        producer = self._clients.producer(transactional_id)
        assert isinstance(producer, TransactionalProducer)
        return WatchedProducer(producer, self)

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        return self._clients.token_records(name, deadline)

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        return ()

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return self._offsets()

    proved_offsets = committed_now

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        self.record_call("token")
        return self._offsets()

    def _offsets(self) -> Mapping[TopicPartition, GroupOffset]:
        found = {TopicPartition(*tp): each for tp, each in self.cluster.offsets.items()}
        return {tp: GroupOffset(tp, offset, metadata) for tp, (offset, metadata) in found.items()}

    def record_call(self, call: str) -> None:
        self.calls.append(call)
        self.before.pop(call, lambda: None)()

    def token(self) -> Token | None:
        """Returns the newest token in the group; None if it is only the genesis token."""
        found = newest(self._offsets().values())
        return None if found is not None and found.sequence == 0 else found

    def visible(self) -> list[str]:
        """Returns the values of all committed records."""
        return [value.decode() for part in self.cluster.committed(OUTPUT).values() for value in part]


class WatchedProducer:
    """A `TransactionalProducer` that records the calls made to it."""

    def __init__(self, producer: TransactionalProducer, kafka: RecordingClients) -> None:
        self._producer = producer
        self._kafka = kafka

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init(self, deadline: Deadline) -> None:
        self._kafka.record_call("init")
        self._producer.init(deadline)

    def begin(self) -> None:
        self._kafka.record_call("begin")
        self._producer.begin()

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns no ids, because the simulated cluster has none."""
        return {}

    def flush(self, deadline: Deadline) -> None:
        self._kafka.record_call("flush")
        self._producer.flush(deadline)

    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None:
        self._kafka.record_call("offsets")
        self._producer.send_offsets(offsets, group_id, deadline)

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


def staged(values: Sequence[str]) -> StagedRows:
    """Returns staged rows, spread over the output partitions."""
    columns = {
        "value": pa.array([value.encode() for value in values]),
        "partition": pa.array([row % OUTPUT_PARTITIONS for row in range(len(values))], pa.int32()),
    }
    batch = pa.record_batch(columns)
    part = stage([batch], batch.schema, folder=None, batch="0", inline_bytes=1 << 20, topic=OUTPUT)
    return StagedRows(StagingFolder("no file is written"), "0", [part])


def commit(
    kafka: RecordingClients,
    session: ProducerSession,
    batch_id: int = 0,
    rows: StagedRows | None = None,
    deadline: Deadline | None = None,
) -> Result:
    """Commits a batch as `commit.micro_batch` does; by default with the batch's `values` and a far deadline.

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


def visible_values_and_token(kafka: RecordingClients) -> tuple[list[str], Token | None]:
    """Returns the visible values, sorted, and the group's token; fails if only one of them exists."""
    visible, token = kafka.visible(), kafka.token()
    assert bool(visible) == (token is not None), f"{len(visible)} records are visible, the token is {token}"
    return sorted(visible), token
