"""Decides whether a batch is written, skipped or refused, given what Kafka holds. Pure functions.

The decision never compares the batch ids of a streaming query. Spark counts batches again after a checkpoint
was restored from a copy, and then one number stands for two different batches. The decision compares digests
of offset log entries, which identify one plan of one batch; where the digests differ, it compares offsets.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from kafka_eos_source.commit import refusals
from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.identity import ONCE, adopts
from kafka_eos_source.protocol.token import ADOPTED, Mark, Token, application_hash, newest


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


# -- the decision ---------------------------------------------------------------------------------------


class Verdict(Enum):
    """What the commit does with the batch."""

    WRITE = "write"  #: Kafka does not hold the batch
    SKIP = "skip"  #: Kafka holds the whole batch
    WRITE_TOKEN_ONLY = "write token only"  #: no token says so, but a person declared the batch committed


def continues(batch: Batch, token: Token) -> bool:
    """Whether the batch starts exactly where the token ends."""
    return bool(token.end_digest) and batch.start == token.end_digest


def is_batch_of(batch: Batch, token: Token) -> bool:
    """Whether the token was committed with this very batch."""
    return bool(token.end_digest) and batch.end == token.end_digest


def batch_verdict(
    batch: Batch,
    held: Held,
    anchor: TopicPartition,
    *,
    missing_token: str = "fail",
    foreign_query: str = "fail",
    moved_offsets: str = "fail",
    token_topic: str | None = None,
    group_id: str = "",
) -> Verdict:
    """Decides what the commit does with ``batch``, given what Kafka holds.

    Args:
        batch: the batch to commit.
        held: what the group holds, read after ``init_transactions``.
        anchor: the partition whose offset carries the full token.
        missing_token: option ``onMissingToken``: ``fail``, ``assume_committed:<batch>`` or
            ``assume_not_committed:<batch>``. An answer that names another batch has no effect.
        foreign_query: option ``onForeignQuery``: ``fail``, ``adopt`` or ``adopt_unchecked:<query id>``.
        moved_offsets: option ``onMovedOffsets``: ``fail`` or ``overwrite:<batch>``.
        token_topic: option ``token.topic``, for messages only: ``held`` includes what was found there.
        group_id: the consumer group, for messages only.

    Raises:
        TokenMissingError: if Kafka lost the token.
        ForeignQueryError: if the group or the ``application.id`` belongs to another query.
        GroupInUseError: if the query is new, and another program has committed offsets in its group.
        OffsetsMovedError: if another program moved the offsets of the group.
        GuaranteeChangedError: if batches were written with ``at_least_once`` since the token, of which the
            checkpoint of the batch knows nothing.
        CheckpointRolledBackError: if Kafka already holds a part of the batch.
        CheckpointAheadError: if records between the token and the batch were never committed.
    """
    _refuse_shared_group(batch, held, anchor)
    token = held.whole_token
    if token is None:
        verdict = _without_token(batch, held, missing_token, token_topic)
        if moved_offsets != f"overwrite:{batch.batch_id}":
            _refuse_offsets_of_others(batch, held, anchor, group_id)
        return verdict
    if batch.once:
        if not token.query_id.startswith(ONCE):
            raise refusals.foreign_query(batch, token)
        return Verdict.SKIP if token.query_id == batch.query_id else Verdict.WRITE
    if token.query_id != batch.query_id:
        _check_adoption(batch, token, held, foreign_query)
        return Verdict.WRITE
    if batch.versioned:
        _refuse_other_topics(batch, token)
        return Verdict.SKIP if batch.batch_id <= token.batch_id else Verdict.WRITE
    if token.unproven_since >= 0 and not batch.unproven:
        raise refusals.guarantee_changed(batch, token)
    if is_batch_of(batch, token) and token.unproven_since < 0:
        return Verdict.SKIP
    if batch.unproven:
        return _after_at_least_once(batch, token, held)
    if moved_offsets != f"overwrite:{batch.batch_id}":
        _refuse_moved_offsets(batch, held, anchor, token, group_id)
    if continues(batch, token) and not batch.jump:
        if token.run_id == ADOPTED and token.target not in ("", batch.target):
            raise refusals.handed_over_with_another_target(batch, token)
        _check_first_batch(batch, token, held)
        return Verdict.WRITE
    return _by_offsets(batch, token, held)


def written_partitions(batch: Batch, anchor: TopicPartition) -> set[TopicPartition]:
    """Returns the partitions whose offsets the batch commits, without those of changelogs."""
    return {anchor, *(batch.starts or ()), *(batch.ends or ())}


def moved_partitions(partitions: Iterable[TopicPartition], held: Held) -> list[TopicPartition]:
    """Returns those partitions whose offset another program has committed since the query did."""
    return sorted(tp for tp in partitions if tp in held.offsets and not held.is_marked(tp))


def _refuse_shared_group(batch: Batch, held: Held, anchor: TopicPartition) -> None:
    """Raises ForeignQueryError if another application commits its offsets to the same partitions."""
    for tp in sorted(written_partitions(batch, anchor)):
        if held.mark(tp) is None or held.is_marked(tp):
            continue
        token = Token.decode(held.offsets[tp].metadata)
        if batch.once and token is not None and token.query_id.startswith(ONCE):
            continue
        raise refusals.shared_group(batch, tp, token)


def _without_token(batch: Batch, held: Held, missing_token: str, token_topic: str | None) -> Verdict:
    # an offset with a mark proves that there was a token, whatever the checkpoint says
    lost = batch.promised or held.newest_sequence >= 0
    if batch.once or not lost or missing_token == f"assume_not_committed:{batch.batch_id}":
        return Verdict.WRITE
    if missing_token == f"assume_committed:{batch.batch_id}" and not batch.versioned:
        return Verdict.WRITE_TOKEN_ONLY
    raise refusals.token_missing(batch, token_topic)


def _after_at_least_once(batch: Batch, token: Token, held: Held) -> Verdict:
    """Decides about the newest batch that is in the output, after batches that left no token.

    It is the newest in Spark's commit log, or the one that Kafka holds and Spark has not logged. The token
    must not go back: the batches between were written exactly once, and would be written again.

    Raises:
        CheckpointRolledBackError: if Kafka holds later batches, because the checkpoint is an old copy.
    """
    ends = batch.ends or {}
    behind = any(held.is_marked(tp) and held.offsets[tp].offset > end for tp, end in ends.items())
    if behind or batch.batch_id < token.batch_id:
        raise refusals.older_than_token(batch, token)
    return Verdict.WRITE_TOKEN_ONLY


def _refuse_other_topics(batch: Batch, token: Token) -> None:
    """Raises InvalidOptionError if the version was written before, but to other topics.

    With a column ``topic``, the topics are no part of the names of the series. So a second write of one
    version to another topic would look like a repetition of the first one, and its rows would be skipped.
    """
    is_repeated = batch.batch_id == token.batch_id
    if is_repeated and batch.topics and token.end_digest and batch.end != token.end_digest:
        raise refusals.other_topics(batch)


def _check_adoption(batch: Batch, token: Token, held: Held, foreign_query: str) -> None:
    """Raises unless offsets prove that the batch starts where the other query's last batch ended.

    The proof must cover every source of the query, and something must have been compared. A person may assert
    what offsets cannot show (``adopt_unchecked``).
    """
    if not adopts(foreign_query, token.query_id) or batch.versioned:
        raise refusals.foreign_query(batch, token)
    if foreign_query != "adopt":
        return
    if token.unproven_since >= 0:
        raise refusals.guarantee_changed(batch, token)
    if batch.starts is None:
        raise refusals.adopted_start_not_logged(token)
    if batch.shared:
        raise refusals.adopted_with_shared_partitions(batch, token)
    committed = held.committed
    starts = {tp: batch.starts.get(tp) for tp in {*batch.starts, *(batch.ends or {})}}
    unknown = sorted(tp for tp in starts if tp not in committed)
    if unknown and held.lacks_offsets():
        raise refusals.adopted_offsets_deleted(token, unknown)
    if not batch.comparable or len(unknown) == len(starts):
        raise refusals.adopted_without_proof(token)
    if token.target != batch.target:
        raise refusals.adopted_with_another_target(batch, token)
    moved = moved_partitions(starts, held)
    if moved:
        raise refusals.adopted_moved_offsets(token, moved)
    wrong = sorted(tp for tp, start in starts.items() if tp in committed and committed[tp] != start)
    if wrong:
        raise refusals.adopted_from_another_offset(token, wrong[0], starts[wrong[0]], committed[wrong[0]])


def _refuse_offsets_of_others(batch: Batch, held: Held, anchor: TopicPartition, group_id: str) -> None:
    """Raises if the group holds no token, but offsets that another program committed.

    A new query may start exactly where another program stopped (``startingOffsets=group``).
    """
    moved = moved_partitions(written_partitions(batch, anchor), held)
    if batch.promised or held.newest_sequence >= 0:
        if moved:
            raise refusals.offsets_moved(batch, None, group_id, held, moved)
        return
    starts = batch.starts or {}
    found = [tp for tp in moved if held.offsets[tp].offset != starts.get(tp)]
    if found:
        raise refusals.group_has_offsets(batch, group_id, held, found)


def _refuse_moved_offsets(
    batch: Batch, held: Held, anchor: TopicPartition, token: Token, group_id: str
) -> None:
    """Raises OffsetsMovedError if another program has committed an offset since the last batch."""
    moved = moved_partitions(written_partitions(batch, anchor), held)
    if moved:
        raise refusals.offsets_moved(batch, token, group_id, held, moved)


def _check_first_batch(batch: Batch, token: Token, held: Held) -> None:
    """Raises unless the first batch starts at the offsets that the genesis transaction committed.

    The start digest of the first batch does not cover its offsets, because the offset log has no entry before
    it. If the log loses the entry of the first batch after the genesis token was committed, Spark plans the
    batch again, and with ``startingOffsets=latest`` that plan would skip the records in between.
    """
    if token.sequence > 0 or batch.starts is None:
        return
    for tp, start in batch.starts.items():
        if tp not in batch.shared and held.is_marked(tp) and held.offsets[tp].offset != start:
            raise refusals.not_continued(batch, token, held)


def _by_offsets(batch: Batch, token: Token, held: Held) -> Verdict:
    """Decides by offsets, for an offset log that is not the one that the token continues.

    Raises:
        CheckpointRolledBackError, CheckpointAheadError: if offsets do not identify the batch, if Kafka holds
            a part of it, or if the token's transaction wrote to another target.
    """
    committed = held.committed
    same_target = token.target == batch.target  # offsets say nothing about what another target holds
    if same_target and batch.comparable and batch.starts is not None and batch.ends is not None:
        starts = {tp: batch.starts.get(tp) for tp in batch.ends}
        all_marked = all(held.is_marked(tp) for tp in batch.ends if tp in committed)
        if all_marked and not batch.jump and all(committed.get(tp) == starts[tp] for tp in batch.ends):
            return Verdict.WRITE
        if all_marked and all(_end_is_held(tp, batch, committed) for tp in batch.ends):
            return Verdict.SKIP
        # one source jumps to the committed offsets; another one is already there and has new records
        if all_marked and batch.jumped and all(_continues_there(tp, batch, committed) for tp in batch.ends):
            return Verdict.WRITE
    raise refusals.not_continued(batch, token, held)


def _end_is_held(tp: TopicPartition, batch: Batch, committed: Offsets) -> bool:
    """Whether Kafka holds everything that the batch read from the partition."""
    end = (batch.ends or {})[tp]
    if tp in committed:
        return end <= committed[tp]
    return end == (batch.starts or {}).get(tp, 0)  # the batch read nothing, so there is nothing to hold


def _continues_there(tp: TopicPartition, batch: Batch, committed: Offsets) -> bool:
    """Whether writing a batch with a jump skips and repeats no record of the partition."""
    end, start = (batch.ends or {})[tp], (batch.starts or {}).get(tp)
    if tp in batch.jumped:
        return end == committed.get(tp, start)
    return start == committed.get(tp)
