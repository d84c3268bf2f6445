"""Who takes part in a commit, as the machine sees them: client, cluster, staged rows, owner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.commit.decide import Batch, Verdict
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import UNDECIDED, PreparedSinks, Token
from kafka_eos_source.runtime.deadline import Deadline


class Producer(Protocol):
    """What the machine needs of `kafka.producer.TransactionalProducer`."""

    enqueued: int

    def init(self, deadline: Deadline) -> None: ...
    def is_clean(self) -> bool: ...
    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]: ...
    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None: ...
    def begin(self) -> None: ...
    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline) -> None: ...
    def flush(self, deadline: Deadline) -> None: ...
    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None: ...
    def commit(self, deadline: Deadline) -> None: ...
    def abort(self, deadline: Deadline) -> None: ...
    def close(self) -> None: ...


class Cluster(Protocol):
    """The Kafka cluster written to."""

    def producer(self) -> Producer:
        """A new client, not yet initialised."""

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """As `kafka.group.GroupOffsets.fetch`."""


class Staged(Protocol):
    """The rows of a batch, proved whole before the machine starts."""

    rows: int
    topics: Mapping[str, int]

    @property
    def shards(self) -> Sequence[ShardReport]: ...

    def batches(self) -> Iterable[pa.RecordBatch]: ...
    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]: ...


class Sinks(Protocol):
    """Every two-phase sink of the query, as one. `commit.sinks.SinkWork`, or `NoSinks`."""

    def look(self, deadline: Deadline) -> None:
        """Lists what is prepared. Before `Producer.init`: then the token, read after it, is final for all."""

    def settle(self, token: Token | None, batch: Batch, verdict: Verdict | None, deadline: Deadline) -> None:
        """Commits or takes back what `look` found, as the token says."""

    def prepare(self, deadline: Deadline) -> PreparedSinks | None:
        """Prepares the batch under a new id; None = no sink has rows of it."""

    def roll_back(self, deadline: Deadline) -> None:
        """Takes back what the last `prepare` did, half of it too. Raises nothing."""

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Commits what the token names, which is in Kafka."""


class NoSinks:
    """Of a query that writes nothing but Kafka."""

    def look(self, deadline: Deadline) -> None:
        return

    def settle(self, token: Token | None, batch: Batch, verdict: Verdict | None, deadline: Deadline) -> None:
        """Nothing is prepared anywhere that this query knows of."""

    def prepare(self, deadline: Deadline) -> PreparedSinks | None:
        return None

    def roll_back(self, deadline: Deadline) -> None:
        return

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises: InvalidOptionError: the batch had sinks, and the query has none any more."""
        if token.sinks is not None and token.sinks.names:
            raise missing_sinks(token, token.sinks.names)


class UndecidedSinks(NoSinks):
    """Of a token that a person has written: it must not seem to decide what sinks hold."""

    def prepare(self, deadline: Deadline) -> PreparedSinks | None:
        return UNDECIDED


def missing_sinks(token: Token, names: Iterable[str]) -> InvalidOptionError:
    """A batch was prepared in sinks which the query names no more, so nobody would finish it there."""
    return InvalidOptionError(
        f"batch {token.batch_id} of application.id={token.application_id!r} is in Kafka, and the sinks "
        f"{', '.join(map(repr, names))} had prepared it; the option 'sinks' names them no more.",
        fix="start the query once with those sinks, which then take it; after that they may be left out.",
    )


@dataclass
class Owner:
    """What one process keeps of a transactional id between batches.

    Attributes:
        producer: the initialised client, None = none.
        token: the newest token known to be in Kafka.
        topics: partitions of each topic of the cluster, as seen when the producer was made.
        cluster_id: the cluster's id.
    """

    producer: Producer | None = None
    token: Token | None = None
    topics: Mapping[str, int] = field(default_factory=dict)
    cluster_id: str = ""

    def drop(self) -> None:
        """Closes the producer; the next one raises the epoch."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()
