"""Plans the micro-batches of one source on the driver.

Besides batches that read records, there are two kinds of empty batches. Only a source can start them, because
Spark starts a batch when the position of a source changes:

* A *tick* runs the operators of an idle query when something in their state is due (`due.due_batches`), or
  renews the query's commit token before Kafka deletes it (`due.Renewal`).
* A *jump* moves a source whose checkpoint is an old copy to the offsets that Kafka has for the query
  (`continuity.jump_target`).

An unclean leader election, or a lost or restored disk, can cut a log below the position of the query, and
producers fill it again: other records then have the offsets that the query has read. Offsets alone do not
show that, so a position also has leader epochs (KIP-320). The brokers name the epoch of the leader with
each end of a log. If it is another one than when the position was taken, or last compared, the planner asks
the leader where the position's epoch ends in its log (`continuity.cut_logs`). So this costs no request
while leaders stay the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kafka_eos_source.errors import AuthorizationError, InvalidOptionError
from kafka_eos_source.model import Epochs, GroupOffset, LogEnd, OffsetRange, Offsets, TopicPartition
from kafka_eos_source.option_values import EARLIEST, LATEST
from kafka_eos_source.options.checked import Bound, ReadOptions
from kafka_eos_source.plan.continuity import (
    Loss,
    cut_logs,
    data_loss,
    holds_batch,
    is_comparable,
    jump_target,
    lost_since_planned,
    reconcile,
    recreated,
)
from kafka_eos_source.plan.due import Renewal, due_batches
from kafka_eos_source.plan.split import Task, backlog, rate_limit, should_wait, split
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.offset_log import SourcePosition

if TYPE_CHECKING:
    from kafka_eos_source.kafka.admin import SourceAdmin, Topics

_log = logging.getLogger(__name__)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class SourcePlan:
    """Plans the batches of one run of a stream, or a single batch read.

    Args:
        options: options of the source.
        admin: asks the brokers.
        clock: returns seconds, such as ``time.monotonic``.
        now_ms: returns ms since the epoch.
    """

    def __init__(
        self,
        options: ReadOptions,
        admin: SourceAdmin,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = _now_ms,
    ) -> None:
        self._options = options
        self._admin = admin
        self._clock = clock
        self._renewal = Renewal(options.token_renewal_interval_ms, admin.offsets_retention_ms, clock)
        self._due = due_batches(options, admin.all_committed, clock, now_ms)
        self._turn = 0
        self._last_batch_at: float | None = None
        #: Offsets of the query that were found in the log of a leader with another epoch, and that epoch.
        self._verified: dict[TopicPartition, LogEnd] = {}
        self._stop_at: Offsets | None = None
        self._available: SourcePosition | None = None
        self._initial: SourcePosition | None = None
        self._planned: SourcePosition | None = None
        self._asked_for_latest = False
        self._waits_for = ""

    @property
    def waits_for(self) -> str:
        """Why the last call of `latest` returned no batch although there are records; "" = there are none."""
        return self._waits_for

    @property
    def retention_ms(self) -> int | None:
        """How long Kafka keeps the offsets of an idle query, in ms; None if that is not known (yet)."""
        return self._renewal.retention_ms

    @property
    def available(self) -> SourcePosition | None:
        """End of the log when the brokers were last asked; None before that."""
        return self._available

    def initial(self) -> SourcePosition:
        """Returns where a new query starts. Its ``start`` equals its ``end``, so that `tasks` recognises it.

        Raises:
            InvalidOptionError: if the starting options do not fit the partitions, or no record is at or after
                the starting time.
            UnavailableError: if no broker answers in time.
            AuthorizationError: if the brokers refuse a request.
        """
        self._admin.new_query()
        topics = self._topics()
        offsets, epochs = self._resolve(self._options.starting, topics.partitions)
        self._initial = self._position(offsets, offsets, topics, epochs)
        return self._initial

    def stop_at_latest(self) -> None:
        """Limits this run to the records that exist now (Trigger.AvailableNow)."""
        ends = self._admin.latest(self._topics().partitions)
        self._stop_at = {tp: end.offset for tp, end in ends.items()}

    def latest(self, start: SourcePosition, *, once: bool = False, may_jump: bool = True) -> SourcePosition:
        """Returns the end of the next batch; equal to ``start`` if there is no batch to run.

        Args:
            start: where the batch begins.
            once: whether the run has only this batch (Trigger.Once). Such a batch ignores the limits in the
                options.
            may_jump: whether Spark will ask for another batch after one without records.

        Raises:
            DataLossError: if records were lost before they were read, with ``failOnDataLoss=true``.
            UnavailableError: if no broker answers in time, or a transaction on the group's offsets stays
            open.
            AuthorizationError: if the brokers refuse a request.
        """
        end = self._next_end(start, once, may_jump)
        if end != start:
            self._planned = end
        return end

    def _next_end(self, start: SourcePosition, once: bool, may_jump: bool) -> SourcePosition:
        first_of_run, self._asked_for_latest = not self._asked_for_latest, True
        topics = self._topics()
        newest = self._admin.latest(topics.partitions)
        cuts = self._cut_logs(start, topics, newest)
        now = self._without_false_losses(
            start, topics, {tp: each.offset for tp, each in newest.items()}, cuts
        )
        self._available = SourcePosition(now, None, topics.cluster_id, topics.ids)
        if first_of_run and may_jump and not once:
            target = self._jump_target(start, topics)
            if target is not None:
                first = _recorded_start(start, {})
                jumped = replace(target, start=first, tick=0, jump=True)
                return replace(jumped, lossy=self._accepts_loss, application_id=self._options.application_id)
        new = self._admin.earliest(_new_partitions(start.end, start.topic_ids, topics.partitions, topics.ids))
        subscribed = self._options.subscription.has
        found = reconcile(
            start.end, start.topic_ids, topics.partitions, new, now, topics.ids, subscribed, cuts
        )
        has_topic = self._options.subscription.has_topic
        other_topics = not any(has_topic(tp.topic) for tp in start.end)
        clusters = (start.cluster_id, topics.cluster_id)
        self._raise_or_log(
            found.losses, accepted=self._accepts_loss, other_topics=other_topics, clusters=clusters
        )
        ends = {tp: max(end, found.starts[tp]) for tp, end in now.items()}
        if self._stop_at is not None:
            ends = {
                tp: max(found.starts[tp], min(end, self._stop_at.get(tp, found.starts[tp])))
                for tp, end in ends.items()
            }
        ends = self._limited(found.starts, ends, once)
        if backlog(found.starts, ends) or found.losses:
            self._renewal.batch_caused()
            begins = {tp: found.starts[tp] for tp in (*new, *cuts)}
            moved = {tp for tp, end in ends.items() if tp in begins or start.end[tp] != end}
            epochs = {
                **{tp: epoch for tp, epoch in start.epochs.items() if tp in ends and tp not in moved},
                **{tp: newest[tp].epoch for tp in moved},
            }
            return self._position(ends, _recorded_start(start, begins), topics, epochs)
        # a new partition without records is not added to the position yet, because that would start a batch
        if once or self._stop_at is not None:
            return start
        # before PySpark 4.2, the first request may be the only one of the run
        return self._tick_if_due(start, may_be_last=first_of_run and not may_jump)

    def _tick_if_due(self, start: SourcePosition, *, may_be_last: bool) -> SourcePosition:
        """Returns ``start``; or the position of an empty batch if something is due, the token's renewal too.

        Args:
            start: where the batch begins.
            may_be_last: whether Spark may not ask for another batch in this run.
        """
        must_renew = self._renewal.is_due()
        if self._due is not None and not may_be_last and self._due.is_due():
            self._due.batch_caused()
            _log.debug("the query has nothing to read; an empty micro-batch runs its operators")
        elif must_renew:
            _log.info(
                "the query has nothing to read; an empty micro-batch renews its commit token "
                "(token.renewal.interval.ms)"
            )
        else:
            return start
        self._renewal.batch_caused()
        first = _recorded_start(start, {})
        ticked = replace(start, start=first, tick=start.tick + 1, jump=False)
        return replace(ticked, lossy=self._accepts_loss, application_id=self._options.application_id)

    def _cut_logs(
        self, start: SourcePosition, topics: Topics, newest: Mapping[TopicPartition, LogEnd]
    ) -> dict[TopicPartition, int]:
        """Returns where logs were cut below the query's position; asks only about those with a new leader."""
        changed = recreated(start.topic_ids, topics.ids)
        epochs = {
            tp: start.epochs[tp]
            for tp in topics.partitions
            if tp in start.epochs
            and tp.topic not in changed
            and newest[tp].epoch not in (-1, start.epochs[tp])
            and self._verified.get(tp) != (start.end[tp], newest[tp].epoch)
        }
        if not epochs:
            return {}
        leaders = {tp: newest[tp].epoch for tp in epochs}
        cuts = cut_logs(start.end, self._admin.epoch_ends(epochs, leaders))
        found = {tp: LogEnd(start.end[tp], epoch) for tp, epoch in leaders.items() if tp not in cuts}
        self._verified.update(found)
        return cuts

    def _jump_target(self, start: SourcePosition, topics: Topics) -> SourcePosition | None:
        """Returns the offsets that the query has committed, if the checkpoint is an old copy; else None.

        A new query never jumps, because its starting options define where it begins.
        """
        options = self._options
        if options.rolled_back_checkpoint != "jump" or options.application_id is None:
            return None
        if not start.end or start == self._initial:
            return None
        if not is_comparable(start, topics.partitions, topics.ids, topics.cluster_id):
            return None
        committed = self._committed_by(options.application_id, topics.partitions)
        if committed is None:
            return None
        target = jump_target(start, committed, topics.ids, options.application_id)
        if target is not None:
            _log.warning(
                "the checkpoint is an old copy: application %r has committed higher offsets. The source "
                "jumps to the offsets of consumer group %r in an empty micro-batch.",
                options.application_id,
                group_of(options.application_id, options.group_id),
            )
        return target

    def _committed_by(
        self, application_id: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, GroupOffset] | None:
        """Returns the offsets in the group of the query; None if the brokers refuse to show them."""
        group_id = group_of(application_id, self._options.group_id)
        try:
            return self._admin.committed(group_id, partitions)
        except AuthorizationError as refused:
            _log.warning(
                "the source is not authorized to read the offsets of consumer group %r, so it cannot check "
                "whether the checkpoint is an old copy. If it is, the sink refuses it. Grant Describe on "
                "the group, or set onRolledBackCheckpoint=read. %s",
                group_id,
                refused.message,
            )
            return None

    def tasks(self, start: SourcePosition, end: SourcePosition) -> list[Task]:
        """Returns the tasks of a batch. They are the same whenever Spark plans the batch again.

        Raises: as `ranges`.
        """
        return self.split(self.ranges(start, end))

    def ranges(self, start: SourcePosition, end: SourcePosition) -> list[OffsetRange]:
        """Returns the offset ranges of a batch, the same whenever Spark plans the batch again.

        When Spark repeats batch 0, it passes the start that `initial` returns then. The end of the batch
        records where the batch really began.

        Raises:
            DataLossError: if records of the batch were lost since it was planned, with
                ``failOnDataLoss=true``. Otherwise the batch reads nothing from a topic that was deleted or
                recreated, and the next batch starts at the beginning of the new topic.
            UnavailableError: if no broker answers in time; or if records of the batch are gone, and a
                transaction on the group's offsets stays open, so that Kafka cannot tell its outcome yet.
            AuthorizationError: if the brokers refuse a request.
        """
        if end.tick or end.jump or end == start:
            return []
        starts, ids = dict(start.end), start.topic_ids
        recorded = end.start or {}
        if start.begins_query and end.start is not None:
            starts, ids = dict(end.start), end.topic_ids
        new = {tp for tp in _new_partitions(starts, ids, end.end, end.topic_ids) if tp not in recorded}
        known = {**starts, **recorded}
        reads = [tp for tp, until in end.end.items() if tp in new or known[tp] != until]
        lost = self._topics_lost_since_planned(reads, end)
        if not lost and self._is_lost_and_held([tp for tp in reads if tp not in new], known, end):
            return []
        ends = {tp: until for tp, until in end.end.items() if tp.topic not in lost}
        starts = {tp: offset for tp, offset in starts.items() if tp.topic not in lost}
        earliest = {**self._admin.earliest([tp for tp in ends if tp in new]), **recorded}
        cuts = {tp: at for tp, at in recorded.items() if at < starts.get(tp, at)}
        found = reconcile(
            starts, ids, list(ends), earliest, ends, end.topic_ids, self._options.subscription.has, cuts
        )
        self._raise_or_log(found.losses, accepted=self._accepts_loss or end.lossy)
        epochs = end.epochs
        return [OffsetRange(tp, found.starts[tp], until, epochs.get(tp, -1)) for tp, until in ends.items()]

    def _topics_lost_since_planned(self, reads: Collection[TopicPartition], end: SourcePosition) -> set[str]:
        """Returns topics of the batch that were deleted or recreated after `latest` planned it.

        It asks the brokers only if Spark repeats a batch, because `latest` has just seen the topics of any
        other batch. If a topic changes later, the sink detects that before it commits.
        """
        planned = {topic: end.topic_ids[topic] for topic in {tp.topic for tp in reads} & set(end.topic_ids)}
        if not planned or end == self._planned:
            return set()
        current = self._admin.existing_topic_ids(planned)
        self._raise_or_log(lost_since_planned(reads, planned, current), accepted=self._accepts_loss)
        return {topic for topic, was in planned.items() if current.get(topic) != was}

    def _is_lost_and_held(
        self, reads: Collection[TopicPartition], starts: Offsets, end: SourcePosition
    ) -> bool:
        """Returns whether a batch that Spark repeats lost records, but Kafka holds what it wrote already.

        That is so if the driver died between Kafka's commit and Spark's, and the records were removed before
        the restart. The batch then reads nothing, and the sink skips it by its token. The sink never writes
        this empty batch: position and source name one ``application.id``, and the sink refuses a position
        that names another one, so these marks are those of its own transactions. A transaction commits the
        token together with the offsets. So the token is that of this batch or of a later one, and the batch
        does not start where the token's batch ended. Such a batch is skipped or refused. Only the answer
        ``adopt_unchecked`` lets it be written; the marks then show that the adopted query had its records.

        With a sink of another format, the offsets would prove nothing. Therefore this needs
        ``onRolledBackCheckpoint=jump``, with which the user states that the sink is the query's own.
        """
        application_id = self._options.application_id
        if self._options.rolled_back_checkpoint != "jump" or application_id is None:
            return False
        if not reads or end == self._planned or end.application_id != application_id:
            return False
        topics = self._admin.named({tp.topic for tp in reads})
        if not is_comparable(
            replace(end, end=dict.fromkeys(reads, 0)), topics.partitions, topics.ids, topics.cluster_id
        ):
            return False
        earliest = self._admin.earliest(reads)
        if all(earliest[tp] <= starts[tp] for tp in reads):
            return False
        committed = self._committed_by(application_id, reads)
        if committed is None or not holds_batch({tp: end.end[tp] for tp in reads}, committed, application_id):
            return False
        _log.warning(
            "records of a batch that Spark repeats no longer exist, but application %r has committed the "
            "batch: the source reads nothing, and the sink skips the batch.",
            application_id,
        )
        return True

    def batch(self) -> list[OffsetRange]:
        """Returns the offset ranges of a batch read.

        Raises:
            InvalidOptionError: if the offsets in the options do not fit the partitions, or a start is after
            its end.
            UnavailableError: if no broker answers in time.
            AuthorizationError: if the brokers refuse a request.
        """
        topics = self._topics()
        starts, _ = self._resolve(self._options.starting, topics.partitions)
        ends, epochs = self._resolve(self._options.ending, topics.partitions)
        for tp, start in starts.items():
            if start > ends[tp] and self._options.fail_on_data_loss:
                raise InvalidOptionError(
                    f"the read of {tp} starts at offset {start}, which is after its end offset {ends[tp]}.",
                    fix="correct the starting or ending option, or set failOnDataLoss=false to skip such "
                    "partitions.",
                )
        return [
            OffsetRange(tp, starts[tp], ends[tp], epochs.get(tp, -1))
            for tp in topics.partitions
            if starts[tp] < ends[tp]
        ]

    def split(self, ranges: list[OffsetRange]) -> list[Task]:
        """Returns the ranges divided into tasks, as the options demand."""
        return split(
            ranges,
            min_partitions=self._options.min_partitions,
            max_records_per_partition=self._options.max_records_per_partition,
        )

    def _topics(self) -> Topics:
        subscription = self._options.subscription
        if subscription.kind == "subscribePattern":
            return self._admin.matching(subscription.pattern)
        if subscription.kind == "subscribe":
            return self._admin.named(subscription.topics)
        found = self._admin.named(sorted({tp.topic for tp in subscription.partitions}))
        existing = set(found.partitions)
        assigned = tuple(tp for tp in subscription.partitions if tp in existing)
        return replace(found, partitions=assigned)

    def _resolve(
        self, bound: Bound, partitions: Collection[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Returns the offset of every partition, and the leader epochs that belong to them."""
        application_id, group_id = self._options.application_id, self._options.group_id
        if application_id is not None:
            group_id = group_of(application_id, group_id)
        newest = self._admin.latest(partitions)
        committed: Mapping[TopicPartition, GroupOffset] = {}
        if bound.kind == "group" and group_id and partitions:
            committed = self._admin.committed(group_id, partitions)
        known = BrokerOffsets(
            earliest=self._admin.earliest(partitions),
            latest={tp: end.offset for tp, end in newest.items()},
            at_time=self._admin.at_time(times(bound, partitions)),
            committed={tp: held.offset for tp, held in committed.items()},
        )
        offsets = resolve(bound, partitions, known)
        # an offset that is not in the log belongs to no epoch
        epochs = {tp: newest[tp].epoch for tp, at in offsets.items() if at <= newest[tp].offset}
        return offsets, {**epochs, **{tp: held.epoch for tp, held in committed.items() if held.epoch >= 0}}

    def _without_false_losses(
        self, start: SourcePosition, topics: Topics, now: Offsets, cuts: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Returns ``now``, corrected where the log only seems to end before the position of the query.

        There are two harmless reasons. A query that read uncommitted records before may be past the last
        stable offset; this is the default of Spark's own source, so it is true of checkpoints taken over from
        it. And a broker that has just become leader may lag behind (KIP-207). So this asks for the high
        watermark before the query reports a loss.
        """
        behind = [
            tp
            for tp in topics.partitions
            if start.end.get(tp, 0) > now[tp]
            and tp not in cuts
            and start.topic_ids.get(tp.topic) in (None, topics.ids.get(tp.topic))
        ]
        if not behind:
            return dict(now)
        log_ends = self._admin.high_watermarks(behind)
        return {**now, **{tp: start.end[tp] for tp in behind if log_ends[tp] >= start.end[tp]}}

    def _limited(self, starts: Offsets, ends: Offsets, once: bool) -> dict[TopicPartition, int]:
        options = self._options
        waiting = backlog(starts, ends)
        self._waits_for = ""
        limited = not (options.max_offsets_per_trigger is None and options.min_offsets_per_trigger is None)
        if not waiting or (once and limited):
            return dict(ends)
        since = None if self._last_batch_at is None else (self._clock() - self._last_batch_at) * 1000
        if self._stop_at is None and should_wait(
            waiting, options.min_offsets_per_trigger, since, options.max_trigger_delay_ms
        ):
            self._waits_for = (
                f"minOffsetsPerTrigger={options.min_offsets_per_trigger}: {waiting} offsets are available"
            )
            return dict(starts)
        self._last_batch_at = self._clock()
        if options.max_offsets_per_trigger is None:
            return dict(ends)
        self._turn += 1
        return rate_limit(starts, ends, options.max_offsets_per_trigger, self._turn)

    @property
    def _accepts_loss(self) -> bool:
        return not self._options.fail_on_data_loss

    def _position(
        self, end: Offsets, start: Offsets | None, topics: Topics, epochs: Epochs
    ) -> SourcePosition:
        known = {tp: epoch for tp, epoch in epochs.items() if epoch >= 0}
        return SourcePosition(
            end,
            start,
            topics.cluster_id,
            topics.ids,
            lossy=self._accepts_loss,
            epochs=known,
            application_id=self._options.application_id,
        )

    def _raise_or_log(
        self,
        losses: list[Loss],
        *,
        accepted: bool,
        other_topics: bool = False,
        clusters: tuple[str | None, str | None] = (None, None),
    ) -> None:
        if losses and not accepted:
            raise data_loss(losses, other_topics=other_topics, clusters=clusters)
        for loss in losses:
            _log.warning("%s: %s. The query continues, because failOnDataLoss=false.", loss.kind, loss.text)


def _recorded_start(start: SourcePosition, begins: Offsets) -> Offsets | None:
    """Returns the ``start`` of the next position: first offsets of partitions that the position lacks.

    As long as a query has read nothing, it contains all partitions, because a repeated batch 0 needs them.

    Args:
        start: the previous position.
        begins: first offset of each partition that is new, whose topic was recreated, or whose log was cut.
    """
    if start.begins_query:
        return {**(start.start or {}), **begins}
    return begins or None


def _new_partitions(
    position: Offsets,
    topic_ids: Mapping[str, str],
    partitions: Collection[TopicPartition],
    current_ids: Mapping[str, str],
) -> list[TopicPartition]:
    """Returns partitions that the position does not contain, or whose topic was recreated since then."""
    changed = recreated(topic_ids, current_ids)
    return [tp for tp in partitions if tp not in position or tp.topic in changed]


# -- Bounds of the options, such as ``earliest`` or a time, as offsets ----------------------------


@dataclass(frozen=True)
class BrokerOffsets:
    """Offsets that the brokers reported for the partitions to read.

    Attributes:
        earliest: first offset of the log.
        latest: end of the log; the last stable offset (LSO) with ``isolation.level=read_committed``.
        at_time: first offset at or after the requested time; None = no such record.
        committed: committed offsets of the consumer group.
    """

    earliest: Offsets
    latest: Offsets
    at_time: Mapping[TopicPartition, int | None] = field(default_factory=dict)
    committed: Offsets = field(default_factory=dict)


def times(bound: Bound, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Returns the time (ms since 1970) to look up for each partition; empty if the bound is not a time.

    Raises:
        InvalidOptionError: if the option does not name exactly the partitions that exist.
    """
    if bound.kind == "timestamp" and bound.timestamp_ms is not None:
        return dict.fromkeys(partitions, bound.timestamp_ms)
    if bound.kind == "timestamps":
        _check_covers(bound, bound.timestamps_ms, partitions)
        return dict(bound.timestamps_ms)
    return {}


def resolve(
    bound: Bound, partitions: Collection[TopicPartition], known: BrokerOffsets
) -> dict[TopicPartition, int]:
    """Returns the offset of every partition.

    Args:
        bound: where to start or stop.
        partitions: subscribed partitions that exist now.
        known: offsets from the brokers, with `at_time` for times and `committed` for ``group``.

    Raises:
        InvalidOptionError: if the option does not name exactly the partitions that exist, or no record is at
            or after the time and the strategy is ``error``.
    """
    if bound.kind == "offsets":
        _check_covers(bound, bound.offsets, partitions)
    return {tp: _offset(bound, tp, known) for tp in partitions}


def _offset(bound: Bound, tp: TopicPartition, known: BrokerOffsets) -> int:
    if bound.kind == "earliest":
        return known.earliest[tp]
    if bound.kind == "latest":
        return known.latest[tp]
    if bound.kind == "group":
        return known.committed.get(tp, known.earliest[tp])
    if bound.kind == "offsets":
        offset = bound.offsets.get(tp, bound.default_of(tp.topic))
        if offset is None or offset == EARLIEST:
            return known.earliest[tp]
        return known.latest[tp] if offset == LATEST else offset
    found = known.at_time.get(tp)
    if found is not None:
        return found
    if bound.no_match == "latest":
        return known.latest[tp]
    at_ms = bound.timestamp_ms if bound.kind == "timestamp" else bound.timestamps_ms[tp]
    raise InvalidOptionError(
        f"option {bound.option!r} starts {tp} at time {at_ms} (ms since 1970), but the partition has no "
        "record at or after that time.",
        fix="set an earlier time, or startingOffsetsByTimestampStrategy=latest to start such partitions at "
        "their end.",
    )


def _check_covers(
    bound: Bound, named: Collection[TopicPartition], partitions: Collection[TopicPartition]
) -> None:
    """Checks that an option names exactly the partitions that exist, as Spark does, or whole topics.

    Raises:
        InvalidOptionError: if partitions are missing, or do not exist.
    """
    missing = {tp for tp in partitions if tp not in named and bound.default_of(tp.topic) is None}
    extra = set(named) - set(partitions)
    if missing or extra:
        raise InvalidOptionError(
            f"option {bound.option!r} must name exactly the partitions to read (missing: {_list(missing)}; "
            f"unknown: {_list(extra)}).",
            fix='name all partitions, or use {"topic":"earliest"} for a whole topic and {"*":"latest"} for '
            "all topics that are not named."
            if bound.kind == "offsets"
            else "name all partitions, or set one time for all with startingTimestamp or endingTimestamp.",
        )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in sorted(partitions)) or "none"
