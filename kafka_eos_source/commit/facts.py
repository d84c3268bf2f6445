"""The facts that a verdict is based on: the batch to commit, and what Kafka holds of the query."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.token import Mark, Token, application_hash, newest


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one batch write, as the verdict sees it.

    Attributes:
        application_id: the transactional id.
        query_id: Spark's id of the query (from the checkpoint), or the identity of a batch write.
        run_id: Spark's id of this run; "" if it is not known.
        batch_id: Spark's batch id, or ``txnVersion``.
        start, end: digests of the offset log entries before and of this batch (`offset_log.LoggedOffsets`);
            "" for batch writes.
        target: digest of where the rows of the batch go (`identity.target`).
        starts, ends: offsets of the Kafka sources on the sink's own cluster, as far as they are known.
        comparable: whether these are the offsets of *all* sources of the query, and every topic is still the
            one that the offset log names, so that offsets alone show whether Kafka holds the batch.
        jump: whether a source of the batch skips records because Kafka should already hold them.
        jumped: partitions of those sources. The batch reads nothing from them.
        shared: partitions that more than one source of the query reads.
        versioned: whether this is a batch write with ``txnVersion``. Versions only grow and may have gaps.
        topics: the topics to which a batch write with ``txnVersion`` has rows, if a column names them.
            ``end`` is their digest, also if there are none.
        once: whether this is a batch write without ``txnVersion``. Only its own token counts, and that token
            decides an unknown outcome.
        promised: whether a token must exist, because the checkpoint records a committed genesis token.
        unproven: whether batches were written with ``at_least_once`` since the token, and this is the newest
            of them (``kafka-eos adopt``).
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    start: str = ""
    end: str = ""
    target: str = ""
    starts: Offsets | None = None
    ends: Offsets | None = None
    comparable: bool = False
    jump: bool = False
    jumped: frozenset[TopicPartition] = frozenset()
    shared: frozenset[TopicPartition] = frozenset()
    versioned: bool = False
    topics: tuple[str, ...] = ()
    once: bool = False
    promised: bool = False
    unproven: bool = False


@dataclass(frozen=True)
class Held:
    """What the consumer group of a query holds, read after ``init_transactions``.

    Attributes:
        application_id: the transactional id whose tokens count.
        offsets: every committed offset of the group.
        token: the newest token of that transactional id; None if the group holds none.
    """

    application_id: str
    offsets: Mapping[TopicPartition, GroupOffset] = field(default_factory=dict)
    token: Token | None = None

    @classmethod
    def of(cls, application_id: str, offsets: Mapping[TopicPartition, GroupOffset]) -> Held:
        """Finds the newest token among the committed offsets of a group.

        Raises:
            OperatorError: if a token is damaged or has a newer format.
            StateError: if the state of an operator is being moved to other shards.
        """
        return cls(application_id, offsets, newest(offsets.values(), application_id))

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The committed offsets without their metadata."""
        return {tp: each.offset for tp, each in self.offsets.items()}

    def mark(self, tp: TopicPartition) -> Mark | None:
        """Returns the mark on a partition's offset; None if another program committed it, or nobody did."""
        return Mark.decode(self.offsets[tp].metadata) if tp in self.offsets else None

    def is_marked(self, tp: TopicPartition) -> bool:
        """Whether a transaction of this transactional id committed the partition's offset."""
        mark = self.mark(tp)
        return mark is not None and mark.application == application_hash(self.application_id)

    @cached_property
    def newest_sequence(self) -> int:
        """The highest sequence number on any offset of this transactional id; -1 if there is none."""
        own = application_hash(self.application_id)
        marks = (Mark.decode(each.metadata) for each in self.offsets.values())
        return max((mark.sequence for mark in marks if mark and mark.application == own), default=-1)

    @property
    def whole_token(self) -> Token | None:
        """The newest token; None if there is none, or if a newer mark proves that a newer token was lost."""
        token = self.token
        return None if token is None or token.sequence < self.newest_sequence else token

    def lacks_offsets(self) -> bool:
        """Whether the group has lost offsets that the token's transaction committed."""
        token = self.token
        if token is None or token.partitions < 0:
            return False
        marks = (self.mark(tp) for tp in self.offsets if not self._is_shard(tp))
        return sum(mark == Mark.of(token) for mark in marks) < token.partitions

    def _is_shard(self, tp: TopicPartition) -> bool:
        token = Token.decode(self.offsets[tp].metadata)
        return token is not None and token.shard is not None

    def next_sequence(self) -> int:
        """Returns the sequence number of the next transaction.

        If the token was lost, numbering continues at the current time in ms since the epoch. No query commits
        more than one transaction per ms, so that number is new, and a sink never meets a number twice.
        """
        token = self.whole_token
        if token is not None:
            return token.sequence + 1
        return max(time.time_ns() // 1_000_000, self.newest_sequence + 1)

    def after(self, token: Token, written: Mapping[TopicPartition, GroupOffset]) -> Held:
        """Returns what the group holds after a transaction with this token and these offsets."""
        return Held(self.application_id, {**self.offsets, **written}, token)
