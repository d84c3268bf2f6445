"""Plans the micro-batches of one source on the driver: takes positions, returns positions and tasks.

Besides batches that read records there are two kinds without any. Only a source can cause them, because Spark
starts a batch when a source's position changes:

* A *tick* renews the token of an idle query before Kafka forgets it (`renewal`).
* A *jump* takes a source whose checkpoint is an old copy to the offsets that Kafka holds (`jump`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from kafka_eos_source.errors import AuthorizationError, InvalidOptionError
from kafka_eos_source.model import GroupOffset, OffsetRange, Offsets, TopicPartition
from kafka_eos_source.options.bounds import Bound
from kafka_eos_source.options.checked import ReadOptions
from kafka_eos_source.plan import advice
from kafka_eos_source.plan.jump import is_comparable, jump_target
from kafka_eos_source.plan.limits import backlog, held_back, rate_limit
from kafka_eos_source.plan.loss import Loss, data_loss, lost_since_planned, reconcile, remade
from kafka_eos_source.plan.positions import Known, resolve, times
from kafka_eos_source.plan.renewal import Renewal
from kafka_eos_source.plan.split import Task, split
from kafka_eos_source.protocol.source_position import SourcePosition

_log = logging.getLogger(__name__)


class Topics(Protocol):
    """As `kafka.admin.Topics`."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]: ...
    @property
    def ids(self) -> Mapping[str, str]: ...
    @property
    def cluster_id(self) -> str | None: ...


class Admin(Protocol):
    """What planning needs of `kafka.admin.SourceAdmin`."""

    def named(self, topics: Iterable[str]) -> Topics: ...
    def matching(self, pattern: str) -> Topics: ...
    def existing_topic_ids(self, topics: Collection[str]) -> Mapping[str, str]: ...
    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]: ...
    def committed(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, GroupOffset]: ...
    def offsets_retention_ms(self) -> int: ...


class SourcePlan:
    """Plans the batches of one run of a stream, or one batch read. Lives in one driver process.

    Args:
        options: of the source.
        admin: asks the brokers.
        clock: seconds from any starting point.
    """

    def __init__(
        self, options: ReadOptions, admin: Admin, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._admin = admin
        self._clock = clock
        self._renewal = Renewal(options.token_renewal_interval_ms, admin.offsets_retention_ms, clock)
        self._turn = 0
        self._last_batch_at: float | None = None
        self._stop_at: Offsets | None = None
        self._available: SourcePosition | None = None
        self._initial: SourcePosition | None = None
        self._planned: SourcePosition | None = None
        self._asked_for_latest = False

    @property
    def available(self) -> SourcePosition | None:
        """Where the log ended when it was last looked at."""
        return self._available

    def initial(self) -> SourcePosition:
        """Where a new query starts. Its ``start`` equals its ``end``, by which `tasks` recognises it.

        Raises:
            InvalidOptionError: the starting offsets do not fit the partitions, or no record is late enough.
            UnavailableError, AuthorizationError: the brokers.
        """
        topics = self._topics()
        offsets = self._resolve(self._options.starting, topics.partitions)
        self._initial = self._position(offsets, offsets, topics)
        return self._initial

    def stop_at_latest(self) -> None:
        """Trigger.AvailableNow: what is there now is all that this run reads."""
        self._stop_at = self._admin.latest(self._topics().partitions)

    def latest(self, start: SourcePosition, *, once: bool = False, may_jump: bool = True) -> SourcePosition:
        """The end of the next batch; equal to ``start`` if no batch is needed.

        Args:
            start: where the batch begins.
            once: whether the run has only this batch (Trigger.Once), which ignores the limits of the options.
            may_jump: whether the run asks again after a batch without records.

        Raises:
            DataLossError: records were lost before they were read, with ``failOnDataLoss=true``.
            UnavailableError: no broker answers, or a transaction holds the group's offsets for too long.
            AuthorizationError: the brokers refuse a request.
        """
        end = self._next(start, once, may_jump)
        if end != start:
            self._planned = end
        return end

    def _next(self, start: SourcePosition, once: bool, may_jump: bool) -> SourcePosition:
        first_of_run, self._asked_for_latest = not self._asked_for_latest, True
        topics = self._topics()
        now = self._not_behind(start, topics, self._admin.latest(topics.partitions))
        self._available = SourcePosition(now, None, topics.cluster_id, topics.ids)
        if first_of_run and may_jump and not once:
            target = self._jump_target(start, topics)
            if target is not None:
                first = _first(start, {})
                return replace(start, end=target, start=first, tick=0, jump=True, lossy=self._lossy)
        anew = self._admin.earliest(_unknown(start.end, start.topic_ids, topics.partitions, topics.ids))
        belongs = self._options.subscription.has
        found = reconcile(start.end, start.topic_ids, topics.partitions, anew, now, topics.ids, belongs)
        self._raise_or_log(found.losses, accepted=self._lossy)
        ends = {tp: max(end, found.starts[tp]) for tp, end in now.items()}
        if self._stop_at is not None:
            ends = {
                tp: max(found.starts[tp], min(end, self._stop_at.get(tp, found.starts[tp])))
                for tp, end in ends.items()
            }
        ends = self._limited(found.starts, ends, once)
        if backlog(found.starts, ends) or found.losses:
            self._renewal.batch_caused()
            return self._position(ends, _first(start, {tp: found.starts[tp] for tp in anew}), topics)
        # a new partition without records can wait: to add it to the position would cause a batch
        return start if once or self._stop_at is not None else self._tick_if_due(start)

    def _tick_if_due(self, start: SourcePosition) -> SourcePosition:
        """``start``, or the position of an empty batch when it is time to renew the query's token."""
        if not self._renewal.is_due():
            return start
        self._renewal.batch_caused()
        _log.info("nothing to read: an empty micro-batch renews the token (token.renewal.interval.ms)")
        return replace(start, start=_first(start, {}), tick=start.tick + 1, jump=False, lossy=self._lossy)

    def _jump_target(self, start: SourcePosition, topics: Topics) -> Offsets | None:
        """Where Kafka says that the query stands, if the checkpoint is an old copy; else None.

        A new query never jumps: its starting options say where it begins.
        """
        options = self._options
        if options.rolled_back_checkpoint != "jump" or options.application_id is None:
            return None
        if not start.end or start == self._initial:
            return None
        if not is_comparable(start, topics.partitions, topics.ids, topics.cluster_id):
            return None
        group_id = options.group_id or options.application_id
        try:
            committed = self._admin.committed(group_id, topics.partitions)
        except AuthorizationError as refused:
            _log.warning(
                "the source may not read the offsets of group %r. If the checkpoint is an old copy, the "
                "source cannot continue from them, and the sink refuses the checkpoint. Grant Describe on "
                "the group, or set onRolledBackCheckpoint=read. %s",
                group_id,
                refused.message,
            )
            return None
        target = jump_target(start, committed, topics.ids, options.application_id)
        if target is not None:
            _log.warning(
                "the checkpoint is an old copy: application %r has committed records beyond it. The source "
                "continues from the offsets of group %r, by a micro-batch that reads nothing.",
                options.application_id,
                group_id,
            )
        return target

    def tasks(self, start: SourcePosition, end: SourcePosition) -> list[Task]:
        """The tasks of a batch, the same ones whenever Spark plans the batch again.

        Spark gives a replay of batch 0 the start that `initial` returns at that time. The batch's end says
        where it really began.

        Raises:
            DataLossError: records of the batch were lost since it was planned, with ``failOnDataLoss=true``.
                Otherwise the batch reads nothing of a topic that was deleted or created again, and the next
                one begins where the new topic does.
            UnavailableError, AuthorizationError: the brokers.
        """
        if end.tick or end.jump or end == start:
            return []
        starts, ids = dict(start.end), start.topic_ids
        recorded = end.start or {}
        if start.begins_query and end.start is not None:
            starts, ids = dict(end.start), end.topic_ids
        unknown = {tp for tp in _unknown(starts, ids, end.end, end.topic_ids) if tp not in recorded}
        known = {**starts, **recorded}
        reads = [tp for tp, until in end.end.items() if tp in unknown or known[tp] != until]
        lost = self._topics_lost_since_planned(reads, end)
        ends = {tp: until for tp, until in end.end.items() if tp.topic not in lost}
        starts = {tp: offset for tp, offset in starts.items() if tp.topic not in lost}
        earliest = {**self._admin.earliest([tp for tp in ends if tp in unknown]), **recorded}
        found = reconcile(
            starts, ids, list(ends), earliest, ends, end.topic_ids, self._options.subscription.has
        )
        self._raise_or_log(found.losses, accepted=self._lossy or end.lossy)
        return self.split([OffsetRange(tp, found.starts[tp], until) for tp, until in ends.items()])

    def _topics_lost_since_planned(self, reads: Collection[TopicPartition], end: SourcePosition) -> set[str]:
        """Topics of the batch that are gone or were created again since `latest` planned it.

        The brokers are asked only for a replay: `latest` has just seen the topics of any other batch. A topic
        that changes after that is noticed by the sink, before it commits.
        """
        planned = {topic: end.topic_ids[topic] for topic in {tp.topic for tp in reads} & set(end.topic_ids)}
        if not planned or end == self._planned:
            return set()
        current = self._admin.existing_topic_ids(planned)
        self._raise_or_log(lost_since_planned(reads, planned, current), accepted=self._lossy)
        return {topic for topic, was in planned.items() if current.get(topic) != was}

    def batch(self) -> list[OffsetRange]:
        """The ranges of a batch read.

        Raises:
            InvalidOptionError: offsets that do not fit the partitions, or a start behind its end.
            UnavailableError, AuthorizationError: the brokers.
        """
        topics = self._topics()
        starts = self._resolve(self._options.starting, topics.partitions)
        ends = self._resolve(self._options.ending, topics.partitions)
        for tp, start in starts.items():
            if start > ends[tp] and self._options.fail_on_data_loss:
                raise InvalidOptionError(
                    f"the read of {tp} starts at offset {start}, past its end {ends[tp]}.",
                    fix="correct the starting or ending option; failOnDataLoss=false skips such partitions.",
                )
        return [OffsetRange(tp, starts[tp], ends[tp]) for tp in topics.partitions if starts[tp] < ends[tp]]

    def split(self, ranges: list[OffsetRange]) -> list[Task]:
        """Ranges dealt out to tasks, as the options say."""
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
        there = set(found.partitions)
        wanted = tuple(tp for tp in subscription.partitions if tp in there)
        return _Some(wanted, found.ids, found.cluster_id)

    def _resolve(self, bound: Bound, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        options = self._options
        group_id = options.group_id or options.application_id
        known = Known(
            earliest=self._admin.earliest(partitions),
            latest=self._admin.latest(partitions),
            at_time=self._admin.at_time(times(bound, partitions)),
            committed={tp: held.offset for tp, held in self._admin.committed(group_id, partitions).items()}
            if bound.kind == "group" and group_id and partitions
            else {},
        )
        return resolve(bound, partitions, known)

    def _not_behind(self, start: SourcePosition, topics: Topics, now: Offsets) -> dict[TopicPartition, int]:
        """``now``, less false alarms of offsets that went back.

        A query that read uncommitted records before (Spark's default, so any checkpoint taken over from it)
        may stand past the last stable offset; and a broker that just became leader may lag (KIP-207). The
        log's end is asked again before anything is called lost.
        """
        behind = [
            tp
            for tp in topics.partitions
            if start.end.get(tp, 0) > now[tp]
            and start.topic_ids.get(tp.topic) in (None, topics.ids.get(tp.topic))
        ]
        if not behind:
            return dict(now)
        log_ends = self._admin.high_watermarks(behind)
        return {**now, **{tp: start.end[tp] for tp in behind if log_ends[tp] >= start.end[tp]}}

    def _limited(self, starts: Offsets, ends: Offsets, once: bool) -> dict[TopicPartition, int]:
        options = self._options
        waiting = backlog(starts, ends)
        limited = not (options.max_offsets_per_trigger is None and options.min_offsets_per_trigger is None)
        if not waiting or (once and limited):
            return dict(ends)
        since = None if self._last_batch_at is None else (self._clock() - self._last_batch_at) * 1000
        if self._stop_at is None and held_back(
            waiting, options.min_offsets_per_trigger, since, options.max_trigger_delay_ms
        ):
            return dict(starts)
        self._last_batch_at = self._clock()
        limits = [each for each in (options.max_offsets_per_trigger, self._admitted()) if each is not None]
        if not limits:
            return dict(ends)
        self._turn += 1
        return rate_limit(starts, ends, min(limits), self._turn)

    def _admitted(self) -> int | None:
        """What the query's state can take (`advice`)."""
        application_id = self._options.application_id
        return None if application_id is None else advice.read(application_id)

    @property
    def _lossy(self) -> bool:
        return not self._options.fail_on_data_loss

    def _position(self, end: Offsets, start: Offsets | None, topics: Topics) -> SourcePosition:
        return SourcePosition(end, start, topics.cluster_id, topics.ids, lossy=self._lossy)

    def _raise_or_log(self, losses: list[Loss], *, accepted: bool) -> None:
        if losses and not accepted:
            raise data_loss(losses)
        for loss in losses:
            _log.warning("%s: %s; the query continues (failOnDataLoss=false)", loss.kind, loss.text)


def _first(start: SourcePosition, begins: Offsets) -> Offsets | None:
    """What the next position records as ``start``: where partitions begin that ``start.end`` does not tell.

    As long as a query has read nothing, all of its partitions are named: a replay of batch 0 needs them.

    Args:
        start: the previous position.
        begins: first offset of partitions that are new, or whose topic was created again.
    """
    if start.begins_query:
        return {**(start.start or {}), **begins}
    return begins or None


def _unknown(
    position: Offsets,
    topic_ids: Mapping[str, str],
    partitions: Collection[TopicPartition],
    current_ids: Mapping[str, str],
) -> list[TopicPartition]:
    """Partitions that are new or belong to a topic that was created again: the position is not theirs."""
    anew = remade(topic_ids, current_ids)
    return [tp for tp in partitions if tp not in position or tp.topic in anew]


class _Some:
    """Part of the topics: what was assigned."""

    def __init__(
        self, partitions: tuple[TopicPartition, ...], ids: Mapping[str, str], cluster_id: str | None
    ) -> None:
        self.partitions = partitions
        self.ids = ids
        self.cluster_id = cluster_id
