"""The interfaces between the commit and Kafka, the checkpoint, the staged rows and the sinks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.commit.recovered import TokenRecords
from kafka_eos_source.commit.request import Cluster
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import UNDECIDED, PreparedSinks, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.topic import Tail


class Producer(Protocol):
    """What a commit uses of a client that writes transactions (`kafka.producer`)."""

    enqueued: int

    @property
    def queued(self) -> int: ...
    @property
    def complaint(self) -> str: ...
    def init(self, deadline: Deadline) -> None: ...
    def is_clean(self) -> bool: ...
    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]: ...
    def ask_topic_ids(self, topics: Collection[str]) -> None: ...
    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]: ...
    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None: ...
    def begin(self) -> None: ...
    def send(
        self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline, partitions: int = 0
    ) -> None: ...
    def send_sealed(
        self, batches: Iterable[tuple[int, memoryview]], topic: str, deadline: Deadline
    ) -> None: ...
    def flush(self, deadline: Deadline) -> None: ...
    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None: ...
    def commit(self, deadline: Deadline) -> None: ...
    def abort(self, deadline: Deadline) -> None: ...
    def close(self) -> None: ...


class Clients(Protocol):
    """Clients of the cluster that the sink writes to."""

    def producer(self, transactional_id: str) -> Producer:
        """Returns a new producer that is not yet initialised."""

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the committed offsets of a group; waits for open transactions (`GroupOffsets.fetch`)."""

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        """Returns client id and host of each member of a group (`GroupOffsets.members`)."""

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the currently committed offsets of a group; does not wait for open transactions."""

    def proved_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the currently committed offsets from a coordinator that knows of the open transaction.

        The transaction must have sent an offset of one of the partitions (`GroupOffsets.proved`).
        """

    def changelog_tail(self, tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
        """Returns what a changelog partition holds from an offset on (`state.changelog.topic`)."""

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        """Checks the token topic and returns it (`kafka.token_topic_reader.TopicRecords.checked`)."""


class IdentityMarker(Protocol):
    """The identity file of the checkpoint (`commit.identity_file.IdentityFile`)."""

    def write(self) -> None:
        """Records in the checkpoint that the genesis token is committed, unless that is recorded already."""

    def has_all_tokens(self, token_topic: str) -> bool:
        """Whether the token topic has a record of every transaction, so that the newest record is current."""

    def confirm_token_topic(self) -> None:
        """Records in the checkpoint that the token topic has a record of the newest transaction."""


class NoCheckpoint:
    """The `IdentityMarker` of a batch write, which has no checkpoint."""

    def write(self) -> None:
        return

    def has_all_tokens(self, token_topic: str) -> bool:
        return True

    def confirm_token_topic(self) -> None:
        return


class StagedBatch(Protocol):
    """The staged rows of a batch. They were checked for completeness before the commit starts."""

    rows: int
    topics: Mapping[str, int]
    sealed_partitions: int

    @property
    def shards(self) -> Sequence[ShardReport]: ...

    def batches(self) -> Iterable[pa.RecordBatch]: ...
    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]: ...


class Sinks(Protocol):
    """All two-phase sinks of the query (`commit.sinks.SinkWork`, or `NoSinks`)."""

    @property
    def cluster_id(self) -> str:
        """Kafka's id of the cluster for which the sinks were opened; "" if there are no sinks."""

    def list_prepared(self, deadline: Deadline) -> None:
        """Asks every sink for its prepared batches.

        Call it before `Producer.init`: the token that is read after that decides the fate of all of it.
        """

    def has_prepared(self) -> bool:
        """Whether `list_prepared` found prepared work."""

    def resolve_prepared(self, token: Token | None, deadline: Deadline) -> None:
        """Commits or aborts the work that `list_prepared` found, as the token decides."""

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        """Prepares the batch in the sinks, with a new sink transaction id.

        Args:
            sequence: sequence number of the transaction that will commit the batch.
            deadline: time limit for all sinks together.

        Returns:
            None if the batch has no rows for any sink.
        """

    def roll_back(self, deadline: Deadline) -> None:
        """Aborts the work of the last `prepare`, also if it failed halfway. Does not raise."""

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Commits the prepared work that the token names. Call it after Kafka has committed the token."""


class NoSinks:
    """The `Sinks` of a query that writes only to Kafka."""

    cluster_id = ""

    def list_prepared(self, deadline: Deadline) -> None:
        return

    def has_prepared(self) -> bool:
        return False

    def resolve_prepared(self, token: Token | None, deadline: Deadline) -> None:
        """Does nothing: this query has no sink that could hold prepared work."""

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        return None

    def roll_back(self, deadline: Deadline) -> None:
        return

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises InvalidOptionError if the token names sinks, because the query no longer has them."""
        if token.sinks is not None and token.sinks.names:
            raise missing_sinks(token, token.sinks.names)


class UndecidedSinks(NoSinks):
    """The `Sinks` of ``kafka-eos adopt``, whose token must not decide the fate of prepared work.

    Args:
        finished: whether the person who runs the command declared that the sinks have committed the work that
            the previous token names.
    """

    def __init__(self, *, finished: bool = False) -> None:
        self._finished = finished

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        return UNDECIDED

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises InvalidOptionError if the token names sinks, and nobody declared that they committed."""
        if not self._finished and token.sinks is not None and token.sinks.names:
            raise InvalidOptionError(
                f"transaction {token.sequence} of application.id={token.application_id!r} was prepared in "
                f"the sinks {', '.join(map(repr, token.sinks.names))}. A new token would hide that they may "
                "not have committed it.",
                fix="let the query itself adopt, with the same sinks and .option('onForeignQuery', 'adopt'); "
                "the sinks then commit first. If you know that they have committed, add --sinks-finished.",
            )


def missing_sinks(token: Token, names: Iterable[str]) -> InvalidOptionError:
    """Returns the error for a token that names sinks which the option ``sinks`` no longer names."""
    return InvalidOptionError(
        f"batch {token.batch_id} of application.id={token.application_id!r} is committed in Kafka and "
        f"prepared in the sinks {', '.join(map(repr, names))}, but the option 'sinks' no longer names them.",
        fix="start the query once with those sinks, so that they commit the batch; after that you may remove "
        "them.",
    )


@dataclass
class ProducerSession:
    """What a process keeps between batches: the producer, and what Kafka held after its last commit.

    Attributes:
        producer: the initialised producer; None if there is none.
        held: what the group holds, read after the last initialisation and updated by each commit.
        group_id: the group of ``held``.
        run_id: Spark's id of the run that read ``held``.
        cluster: the cluster, as it was last listed.
        topic_ids: ids of topics, as they were last read.
        confirmed: whether the group coordinator that returned ``held`` has accepted an offset commit of this
            producer, which proves that its answer was not outdated.
        token_records: the token topic, as the last initialisation saw it; None if the query has none.
        looked_at: when this process last made sure that no other program uses the group, in seconds of
            `time.monotonic`.
    """

    producer: Producer | None = None
    held: Held | None = None
    group_id: str = ""
    run_id: str = ""
    cluster: Cluster = field(default_factory=Cluster)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    confirmed: bool = False
    token_records: TokenRecords | None = None
    looked_at: float = 0.0

    def drop(self) -> None:
        """Closes the producer. The next commit initialises a new one, which raises the epoch."""
        producer, self.producer, self.confirmed = self.producer, None, False
        if producer is not None:
            producer.close()
