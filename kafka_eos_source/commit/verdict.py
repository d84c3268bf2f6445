"""Whether a batch continues the chain of tokens in Kafka: the decision of a fresh owner, as pure functions.

The decision never compares batch ids of a streaming query. Spark numbers batches again after a checkpoint
was restored from a copy, and one number then stands for two different batches. It compares digests of offset
log entries, which identify one plan of one batch, and where they differ, offsets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    KafkaEosError,
    OffsetsMovedError,
    TokenMissingError,
)
from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.identity import ONCE
from kafka_eos_source.protocol.token import Mark, Token, application_hash, newest

#: So many partitions are named in a message; the rest are counted.
_NAMED = 5


class Verdict(Enum):
    """What to do with the batch."""

    WRITE = "write"  #: Kafka does not hold it
    SKIP = "skip"  #: Kafka holds all of it
    WRITE_TOKEN_ONLY = "write token only"  #: a person said that Kafka holds it although no token says so


@dataclass(frozen=True)
class Digests:
    """Digests of one entry of Spark's offset log.

    Attributes:
        current: as tokens of today's format have it (`offset_log.LoggedOffsets.digest`).
        format_1: as tokens of format 1 have it.
    """

    current: str = ""
    format_1: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one batch write, as the decision sees it.

    Attributes:
        application_id: transactional id.
        query_id: of the checkpoint, or the identity of a batch write.
        run_id: of this run, "" when not known.
        batch_id: Spark's batch id, or ``txnVersion``.
        start, end: digests of the offset log entries before and of the batch; empty for batch writes.
        starts, ends: offsets of the Kafka sources on the sink's own cluster, as far as they are known.
        comparable: whether those are *all* sources of the query and their topics are the logged ones, so that
            offsets alone can tell whether Kafka holds the batch.
        jump: whether a source of the batch passed over records that Kafka should hold already.
        jumped: partitions of those sources; the batch reads nothing of them.
        shared: partitions that several sources of the query read.
        versioned: a batch write with ``txnVersion``: versions only grow, gaps are allowed.
        once: a batch write without it: only its own token counts, which settles an unknown outcome.
        promised: whether a token must exist, because the checkpoint says that a genesis token was committed.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    start: Digests = Digests()
    end: Digests = Digests()
    starts: Offsets | None = None
    ends: Offsets | None = None
    comparable: bool = False
    jump: bool = False
    jumped: frozenset[TopicPartition] = frozenset()
    shared: frozenset[TopicPartition] = frozenset()
    versioned: bool = False
    once: bool = False
    promised: bool = False


@dataclass(frozen=True)
class Held:
    """What the consumer group of a query holds, read after ``init_transactions``.

    Attributes:
        application_id: whose tokens count.
        offsets: every committed offset of the group.
        token: newest token of the application; None = there is none.
    """

    application_id: str
    offsets: Mapping[TopicPartition, GroupOffset] = field(default_factory=dict)
    token: Token | None = None

    @classmethod
    def of(cls, application_id: str, offsets: Mapping[TopicPartition, GroupOffset]) -> Held:
        """Finds the newest token.

        Raises:
            OperatorError: a token is damaged or of a newer format.
            StateError: the state of an operator is being moved.
        """
        return cls(application_id, offsets, newest(offsets.values(), application_id))

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The committed offsets without their metadata."""
        return {tp: each.offset for tp, each in self.offsets.items()}

    def mark(self, tp: TopicPartition) -> Mark | None:
        """The mark on a partition's offset; None if another program committed it, or nobody did."""
        return Mark.decode(self.offsets[tp].metadata) if tp in self.offsets else None

    def is_marked(self, tp: TopicPartition) -> bool:
        """Whether the partition's offset was committed by a transaction of the application."""
        mark = self.mark(tp)
        return mark is not None and mark.application == application_hash(self.application_id)

    @cached_property
    def newest_sequence(self) -> int:
        """The highest sequence number on any offset of the application, -1 = there is none."""
        own = application_hash(self.application_id)
        marks = (Mark.decode(each.metadata) for each in self.offsets.values())
        return max((mark.sequence for mark in marks if mark and mark.application == own), default=-1)

    @property
    def whole_token(self) -> Token | None:
        """The newest token, unless a newer mark proves that a newer token was lost."""
        token = self.token
        return None if token is None or token.sequence < self.newest_sequence else token

    def lacks_offsets(self) -> bool:
        """Whether offsets that the token's transaction committed are not in the group any more."""
        token = self.token
        if token is None or token.partitions < 0:
            return False
        marks = (self.mark(tp) for tp in self.offsets if not self._is_shard(tp))
        return sum(mark == Mark.of(token) for mark in marks) < token.partitions

    def _is_shard(self, tp: TopicPartition) -> bool:
        token = Token.decode(self.offsets[tp].metadata)
        return token is not None and token.shard is not None

    def next_sequence(self) -> int:
        """The number of the next transaction.

        If the token was lost, numbering continues at the current time in ms, which is above any number that
        one transaction per ms could have reached. So sinks never meet a number a second time.
        """
        token = self.whole_token
        if token is not None:
            return token.sequence + 1
        return max(time.time_ns() // 1_000_000, self.newest_sequence + 1)

    def after(self, token: Token, written: Mapping[TopicPartition, GroupOffset]) -> Held:
        """What the group holds once a transaction with these offsets was committed."""
        return Held(self.application_id, {**self.offsets, **written}, token)


def continues(batch: Batch, token: Token) -> bool:
    """Whether the batch starts exactly where the token ends."""
    if token.format == 1:
        return batch.batch_id == token.batch_id + 1 and batch.start.format_1 == token.end_digest
    return bool(token.end_digest) and batch.start.current == token.end_digest


def is_batch_of(batch: Batch, token: Token) -> bool:
    """Whether the token was committed with this very batch."""
    if token.format == 1:
        return batch.batch_id == token.batch_id and batch.end.format_1 == token.end_digest
    return bool(token.end_digest) and batch.end.current == token.end_digest


def batch_verdict(
    batch: Batch,
    held: Held,
    anchor: TopicPartition,
    *,
    missing_token: str = "fail",
    foreign_query: str = "fail",
    moved_offsets: str = "fail",
    token_topic: str | None = None,
) -> Verdict:
    """Decides what to do with ``batch``, given what Kafka holds.

    Args:
        batch: the batch at hand.
        held: what the group holds, read after ``init_transactions``.
        anchor: partition of the full token.
        missing_token: option ``onMissingToken``: ``fail``, ``assume_committed``, ``assume_not_committed``.
        foreign_query: option ``onForeignQuery``: ``fail`` or ``adopt``.
        moved_offsets: option ``onMovedOffsets``: ``fail`` or ``overwrite``.
        token_topic: option ``token.topic``, for messages: ``held`` says what was found there.

    Raises:
        TokenMissingError: Kafka lost the token.
        ForeignQueryError: the group or the ``application.id`` is another query's.
        OffsetsMovedError: another program moved the offsets of the group.
        CheckpointRolledBackError: a part of the batch is in Kafka already.
        CheckpointAheadError: records between the token and the batch were never committed.
    """
    _refuse_shared_group(batch, held, anchor)
    token = held.whole_token
    if token is None:
        return _without_token(batch, held, missing_token, token_topic)
    if batch.once:
        if not token.query_id.startswith(ONCE):
            raise _foreign(batch, token)
        return Verdict.SKIP if token.query_id == batch.query_id else Verdict.WRITE
    if token.query_id != batch.query_id:
        _check_adoption(batch, token, held, foreign_query)
        return Verdict.WRITE
    if batch.versioned:
        return Verdict.SKIP if batch.batch_id <= token.batch_id else Verdict.WRITE
    if is_batch_of(batch, token):
        return Verdict.SKIP
    if moved_offsets != "overwrite":
        _refuse_moved_offsets(batch, held, token)
    if continues(batch, token) and not batch.jump:
        _check_first_batch(batch, token, held)
        return Verdict.WRITE
    return _by_offsets(batch, token, held)


def _refuse_shared_group(batch: Batch, held: Held, anchor: TopicPartition) -> None:
    """Raises ForeignQueryError if another application commits its offsets to the same partitions."""
    for tp in sorted({anchor, *(batch.ends or {}), *(batch.starts or {})}):
        mark = held.mark(tp)
        if mark is None or held.is_marked(tp):
            continue
        token = Token.decode(held.offsets[tp].metadata)
        if batch.once and token is not None and token.query_id.startswith(ONCE):
            continue
        name = "another application.id" if token is None else f"application.id={token.application_id!r}"
        raise ForeignQueryError(
            f"the offset of {tp} in the consumer group of this query was committed by {name}; this query has "
            f"application.id={batch.application_id!r}. Two transactional ids cannot share one group: neither "
            "would fence the other.",
            fix="give each query a kafka.group.id of its own; or, if this query is to continue the other "
            "one's work, give it the other one's application.id and .option('onForeignQuery', 'adopt').",
        )


def _without_token(batch: Batch, held: Held, missing_token: str, token_topic: str | None) -> Verdict:
    # an offset with a mark proves that there was a token, whatever the checkpoint says
    lost = batch.promised or held.newest_sequence >= 0
    if batch.once or not lost or missing_token == "assume_not_committed":
        return Verdict.WRITE
    if missing_token == "assume_committed" and not batch.versioned:
        return Verdict.WRITE_TOKEN_ONLY
    places = "" if token_topic is None else f", in the consumer group or in token.topic={token_topic!r}"
    if batch.versioned:
        fix = (
            f"look whether version {batch.batch_id} is in the output. If it is not, write it once with "
            ".option('onMissingToken', 'assume_not_committed'). If it is, leave it out, and write the next "
            "version once with that option."
        )
    else:
        fix = (
            "look whether the batch is in the output; then restart once with "
            ".option('onMissingToken', 'assume_committed') or 'assume_not_committed'."
        )
    raise TokenMissingError(
        f"Kafka holds no token of application.id={batch.application_id!r}{places}, although batches of "
        f"this query were committed: whether batch {batch.batch_id} is in the output cannot be told. The "
        "consumer group was deleted, its offsets expired (offsets.retention.minutes), or the topic that "
        "carried the token was deleted.",
        fix=fix,
    )


def _foreign(batch: Batch, token: Token) -> ForeignQueryError:
    return ForeignQueryError(
        f"application.id={batch.application_id!r} belongs to query {token.query_id} (last batch "
        f"{token.batch_id}, run {token.run_id or 'unknown'}); this is query {batch.query_id}: another "
        "checkpoint, or a new one in place of a lost one.",
        fix="give this query an application.id of its own; or, to go on where the other query stopped, "
        "start with startingOffsets=group and .option('onForeignQuery', 'adopt').",
    )


def _check_adoption(batch: Batch, token: Token, held: Held, foreign_query: str) -> None:
    """Raises unless the batch starts where the other query's last batch ended, as far as Kafka can tell."""
    if foreign_query != "adopt" or batch.versioned:
        raise _foreign(batch, token)
    if batch.starts is None:
        raise CheckpointRolledBackError(
            f"adopting query {token.query_id}: where this query starts is not known, so it cannot be "
            "compared with where the other one stopped. Spark's own Kafka source does not log where its "
            "first batch starts.",
            fix="read with format('kafka-eos') and startingOffsets=group.",
        )
    if batch.shared:
        raise CheckpointRolledBackError(
            f"adopting query {token.query_id}: two sources of this query read {_list(sorted(batch.shared))}. "
            "The group holds one offset of each partition, that of the slower source, so it does not tell "
            "where the faster one stopped.",
            fix="restore the other checkpoint; or give this query a new application.id and say in "
            "startingOffsets of each source where it starts.",
        )
    committed = held.committed
    starts = {tp: batch.starts.get(tp) for tp in {*batch.starts, *(batch.ends or {})}}
    unknown = sorted(tp for tp in starts if tp not in committed)
    if unknown and held.lacks_offsets():
        raise CheckpointRolledBackError(
            f"adopting query {token.query_id}: the group has no offset of {_list(unknown)}, and offsets that "
            "the other query committed are missing in it. They were deleted, so where that query stopped is "
            "not known.",
            fix="restore the other checkpoint; or give this query a new application.id and say in "
            "startingOffsets where it starts.",
        )
    wrong = sorted(tp for tp, start in starts.items() if tp in committed and committed[tp] != start)
    if wrong:
        first = wrong[0]
        raise CheckpointRolledBackError(
            f"adopting query {token.query_id}: this query starts {first} at offset "
            f"{'unknown' if starts[first] is None else starts[first]}, the other one stopped at "
            f"{committed[first]}.",
            fix="start the new checkpoint with startingOffsets=group.",
        )


def _refuse_moved_offsets(batch: Batch, held: Held, token: Token) -> None:
    """Raises OffsetsMovedError if an offset that our last batch committed lacks our mark."""
    moved = sorted(tp for tp in batch.starts or {} if tp in held.offsets and not held.is_marked(tp))
    if not moved:
        return
    raise OffsetsMovedError(
        f"another program committed the offsets of {_list(moved)} in the consumer group of "
        f"application.id={batch.application_id!r} after its batch {token.batch_id}: they carry no mark of a "
        f"transaction of this query. Committed now: {_offsets(held.committed, moved)}; the checkpoint stands "
        f"at {_offsets(batch.starts or {}, moved)}.",
        fix="to continue from the checkpoint, restart once with .option('onMovedOffsets', 'overwrite'); to "
        "continue from the moved offsets, start a new checkpoint with startingOffsets=group and "
        ".option('onForeignQuery', 'adopt').",
    )


def _check_first_batch(batch: Batch, token: Token, held: Held) -> None:
    """Raises unless the first batch starts at the offsets that the genesis transaction committed.

    The digest that the first batch starts with says nothing about its offsets, because no entry of the offset
    log stands before it. If the entry of the first batch is lost after the genesis token was committed, Spark
    plans the batch anew, and with ``startingOffsets=latest`` it would leave out the records in between.
    """
    if token.sequence > 0 or token.format == 1 or batch.starts is None:
        return
    for tp, start in batch.starts.items():
        if tp not in batch.shared and held.is_marked(tp) and held.offsets[tp].offset != start:
            raise _not_continued(batch, token, held)


def _by_offsets(batch: Batch, token: Token, held: Held) -> Verdict:
    """The offset log is not the one that the token continues: compare offsets, if they tell everything."""
    committed = held.committed
    if batch.comparable and batch.starts is not None and batch.ends is not None:
        starts = {tp: batch.starts.get(tp) for tp in batch.ends}
        all_marked = all(held.is_marked(tp) for tp in batch.ends if tp in committed)
        if all_marked and not batch.jump and all(committed.get(tp) == starts[tp] for tp in batch.ends):
            return Verdict.WRITE
        if all_marked and all(_end_is_held(tp, batch, committed) for tp in batch.ends):
            return Verdict.SKIP
        # one source jumps to the committed offsets, another one stands there and has something new
        if all_marked and batch.jumped and all(_continues_there(tp, batch, committed) for tp in batch.ends):
            return Verdict.WRITE
    raise _not_continued(batch, token, held)


def _end_is_held(tp: TopicPartition, batch: Batch, committed: Offsets) -> bool:
    end = (batch.ends or {})[tp]
    if tp in committed:
        return end <= committed[tp]
    return end == (batch.starts or {}).get(tp, 0)  # nothing was read of it, so there is nothing to hold


def _continues_there(tp: TopicPartition, batch: Batch, committed: Offsets) -> bool:
    """Whether a batch with a jump leaves out or repeats nothing of the partition if it is written."""
    end, start = (batch.ends or {})[tp], (batch.starts or {}).get(tp)
    if tp in batch.jumped:
        return end == committed.get(tp, start)
    return start == committed.get(tp)


def _not_continued(batch: Batch, token: Token, held: Held) -> KafkaEosError:
    committed = held.committed
    known = sorted(tp for tp in batch.ends or {} if tp in committed)
    starts, ends = batch.starts or {}, batch.ends or {}
    differing = [
        tp for tp in known if starts.get(tp) != committed[tp] or (ends[tp] > committed[tp]) is batch.jump
    ] or known
    ahead = (
        bool(known) and all(starts.get(tp, 0) >= committed[tp] for tp in known)
        if batch.comparable
        else batch.batch_id > token.batch_id
    )
    ranges = (
        f" Offsets of the batch: {_ranges(starts, ends, differing)}; committed: "
        f"{_offsets(committed, differing)}."
        if differing
        else ""
    )
    transaction = (
        f"transaction {token.sequence} with batch {token.batch_id}"
        if token.sequence > 0
        else "the transaction that recorded where the query starts"
    )
    text = (
        f"batch {batch.batch_id} does not continue what Kafka holds of application.id="
        f"{batch.application_id!r}: {transaction}.{ranges}"
    )
    if ahead:
        return CheckpointAheadError(
            f"{text} Batches between them were written elsewhere or lost.",
            fix="point the sink at the cluster and application.id that it wrote before; or, if the batches "
            "between may be left out, start a new checkpoint with startingOffsets=group and "
            ".option('onForeignQuery', 'adopt').",
        )
    why = (
        "A part of its input is in the output already."
        if batch.comparable
        else "The query has sources other than Kafka, two sources on one partition, a recreated topic, or "
        "state of Spark's own, so offsets cannot tell which part of its input is in the output already."
    )
    return CheckpointRolledBackError(
        f"{text} {why}",
        fix="restore the newest checkpoint; or set application.id and onRolledBackCheckpoint=jump on the "
        "source, so that it continues where Kafka stands; or start a new checkpoint with "
        "startingOffsets=group and .option('onForeignQuery', 'adopt').",
    )


def _list(partitions: list[TopicPartition]) -> str:
    more = f" and {len(partitions) - _NAMED} more" if len(partitions) > _NAMED else ""
    return ", ".join(str(tp) for tp in partitions[:_NAMED]) + more


def _offsets(offsets: Offsets, partitions: list[TopicPartition]) -> str:
    more = f" and {len(partitions) - _NAMED} more" if len(partitions) > _NAMED else ""
    return ", ".join(f"{tp} at {offsets.get(tp, 'none')}" for tp in partitions[:_NAMED]) + more


def _ranges(starts: Offsets, ends: Offsets, partitions: list[TopicPartition]) -> str:
    more = f" and {len(partitions) - _NAMED} more" if len(partitions) > _NAMED else ""
    return ", ".join(f"{tp} [{starts.get(tp, '?')}, {ends[tp]})" for tp in partitions[:_NAMED]) + more
