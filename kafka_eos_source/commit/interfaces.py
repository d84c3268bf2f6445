"""Who takes part in a commit, as the machine sees them: client, cluster, staged rows, owner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.commit.facts import Batch, Held
from kafka_eos_source.commit.recovered import TokenRecords
from kafka_eos_source.commit.request import Cluster
from kafka_eos_source.commit.verdict import Verdict
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
    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]: ...
    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None: ...
    def begin(self) -> None: ...
    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline) -> None: ...
    def flush(self, deadline: Deadline) -> None: ...
    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None: ...
    def commit(self, deadline: Deadline) -> None: ...
    def abort(self, deadline: Deadline) -> None: ...
    def close(self) -> None: ...


class Clients(Protocol):
    """The clients of the cluster that is written to."""

    def producer(self, transactional_id: str) -> Producer:
        """A new producer, not yet initialised."""

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """The committed offsets of a group. Waits for open transactions, as `GroupOffsets.fetch`."""

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """The offsets that are committed at this moment, whatever open transactions will make of them."""

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        """The checked token topic, as `kafka.token_topic_reader.TopicRecords.checked`."""


class FirstBatchMarker(Protocol):
    """The checkpoint's first-batch file, as `commit.first_batch.FirstBatchFile`."""

    def write(self) -> None:
        """Says in the checkpoint that a genesis token is in Kafka. Does nothing if it is said already."""

    def has_all_tokens(self, token_topic: str) -> bool:
        """Whether the topic has a record of every transaction, so that its newest record is up to date."""

    def confirm_token_topic(self) -> None:
        """Says in the checkpoint that the token topic of the query has a record of the newest transaction."""


class NoCheckpoint:
    """`FirstBatchMarker` of a batch write, which has no checkpoint."""

    def write(self) -> None:
        return

    def has_all_tokens(self, token_topic: str) -> bool:
        return True

    def confirm_token_topic(self) -> None:
        return


class StagedBatch(Protocol):
    """The rows of a batch, proved whole before the machine starts."""

    rows: int
    topics: Mapping[str, int]

    @property
    def shards(self) -> Sequence[ShardReport]: ...

    def batches(self) -> Iterable[pa.RecordBatch]: ...
    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]: ...


class Sinks(Protocol):
    """Every two-phase sink of the query, as one. `commit.sinks.SinkWork`, or `NoSinks`."""

    def list_prepared(self, deadline: Deadline) -> None:
        """Lists what is prepared. Before `Producer.init`: then the token, read after it, is final for all."""

    def has_prepared(self) -> bool:
        """Whether `list_prepared` found anything."""

    def resolve_prepared(
        self, token: Token | None, batch: Batch, verdict: Verdict | None, deadline: Deadline
    ) -> None:
        """Commits or takes back what `list_prepared` found, as the token says."""

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        """Prepares the batch under a new id.

        Args:
            sequence: sequence number of the transaction that will commit it.
            deadline: for all sinks.

        Returns:
            None if no sink has rows of the batch.
        """

    def roll_back(self, deadline: Deadline) -> None:
        """Takes back what the last `prepare` did, half of it too. Raises nothing."""

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Commits what the token names, which is in Kafka."""


class NoSinks:
    """Of a query that writes nothing but Kafka."""

    def list_prepared(self, deadline: Deadline) -> None:
        return

    def has_prepared(self) -> bool:
        return False

    def resolve_prepared(
        self, token: Token | None, batch: Batch, verdict: Verdict | None, deadline: Deadline
    ) -> None:
        """Nothing is prepared anywhere that this query knows of."""

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        return None

    def roll_back(self, deadline: Deadline) -> None:
        return

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises: InvalidOptionError: the batch had sinks, and the query has none any more."""
        if token.sinks is not None and token.sinks.names:
            raise missing_sinks(token, token.sinks.names)


class UndecidedSinks(NoSinks):
    """Of a token that a person has written: it must not seem to decide what sinks hold.

    Args:
        finished: whether that person said that the sinks have committed what the token before names.
    """

    def __init__(self, *, finished: bool = False) -> None:
        self._finished = finished

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        return UNDECIDED

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises: InvalidOptionError: the token names sinks, and nobody said that they have committed."""
        if not self._finished and token.sinks is not None and token.sinks.names:
            raise InvalidOptionError(
                f"transaction {token.sequence} of application.id={token.application_id!r} was prepared in "
                f"the sinks {', '.join(map(repr, token.sinks.names))}. A new token would hide that.",
                fix="let the query itself adopt, with the same sinks and .option('onForeignQuery', 'adopt'): "
                "it finishes them first. If you know that they have committed, say --sinks-finished.",
            )


def missing_sinks(token: Token, names: Iterable[str]) -> InvalidOptionError:
    """A batch was prepared in sinks which the query names no more, so nobody would finish it there."""
    return InvalidOptionError(
        f"batch {token.batch_id} of application.id={token.application_id!r} is in Kafka, and the sinks "
        f"{', '.join(map(repr, names))} had prepared it; the option 'sinks' names them no more.",
        fix="start the query once with those sinks, which then take it; after that they may be left out.",
    )


@dataclass
class ProducerSession:
    """What one process keeps of a transactional id between batches.

    Attributes:
        producer: the initialised client; None if there is none.
        held: what the group holds, as known since the last initialisation and the commits after it.
        group_id: the group of ``held``.
        cluster: the cluster as it was last listed.
        topic_ids: ids of topics, as they were last looked up.
        confirmed: whether the group coordinator that answered for ``held`` also took a commit of ours.
        token_records: the token topic as the last initialisation saw it; None = the query has none.
    """

    producer: Producer | None = None
    held: Held | None = None
    group_id: str = ""
    cluster: Cluster = field(default_factory=Cluster)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    confirmed: bool = False
    token_records: TokenRecords | None = None

    def drop(self) -> None:
        """Closes the producer; the next one raises the epoch."""
        producer, self.producer, self.confirmed = self.producer, None, False
        if producer is not None:
            producer.close()
