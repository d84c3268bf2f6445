"""The driver's side of one source: positions in, positions and tasks out; brokers are asked by `Admin`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from kafka_eos_source import admission
from kafka_eos_source.checked_options import ReadOptions
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import OffsetRange, Offsets, TopicPartition
from kafka_eos_source.option_bounds import Bound
from kafka_eos_source.plan.limits import backlog, held_back, rate_limit
from kafka_eos_source.plan.loss import Loss, data_loss, reconcile, remade
from kafka_eos_source.plan.positions import Known, resolve, times
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
    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...
    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]: ...
    def committed(self, group_id: str, partitions: Collection[TopicPartition]) -> Offsets: ...


class SourcePlan:
    """Plans the batches of one stream, or one batch read. Lives in one driver process."""

    def __init__(self, options: ReadOptions, admin: Admin) -> None:
        self._options = options
        self._admin = admin
        self._turn = 0
        self._last_batch_at: float | None = None
        self._stop_at: Offsets | None = None
        self._available: SourcePosition | None = None

    @property
    def available(self) -> SourcePosition | None:
        """Where the log ended when it was last looked at."""
        return self._available

    def initial(self) -> SourcePosition:
        """Where a new query starts. Its ``start`` equals its ``end``: that is how it is known again.

        Raises:
            InvalidOptionError: the starting offsets do not fit the partitions, or no record is late enough.
            UnavailableError, AuthorizationError: the brokers.
        """
        topics = self._topics()
        offsets = self._resolve(self._options.starting, topics.partitions)
        return SourcePosition(offsets, offsets, topics.cluster_id, topics.ids)

    def stop_at_latest(self) -> None:
        """Trigger.AvailableNow: what is there now is all that this run reads."""
        self._stop_at = self._admin.latest(self._topics().partitions)

    def latest(self, start: SourcePosition, *, unlimited: bool = False) -> SourcePosition:
        """The end of the next batch; equal to ``start`` when there is nothing to read.

        Args:
            start: where it begins.
            unlimited: whether Spark asked for all there is (Trigger.Once).

        Raises:
            DataLossError: what was not read is gone, with ``failOnDataLoss``.
            UnavailableError, AuthorizationError: the brokers.
        """
        topics = self._topics()
        now = self._not_behind(start, topics, self._admin.latest(topics.partitions))
        self._available = SourcePosition(now, None, topics.cluster_id, topics.ids)
        anew = self._admin.earliest(_unknown(start.end, start.topic_ids, topics.partitions, topics.ids))
        belongs = self._options.subscription.has
        found = reconcile(start.end, start.topic_ids, topics.partitions, anew, now, topics.ids, belongs)
        self._tell(found.losses)
        ends = {tp: max(end, found.starts[tp]) for tp, end in now.items()}
        if self._stop_at is not None:
            ends = {
                tp: max(found.starts[tp], min(end, self._stop_at.get(tp, found.starts[tp])))
                for tp, end in ends.items()
            }
        ends = self._limited(found.starts, ends, unlimited)
        if not backlog(found.starts, ends) and not found.losses:
            return start  # new partitions without records can wait: another position would make a batch
        first = start.start if start.start == start.end else None
        return SourcePosition(ends, first, topics.cluster_id, topics.ids)

    def tasks(self, start: SourcePosition, end: SourcePosition) -> list[Task]:
        """The tasks of a batch, the same whenever it is planned again.

        A replay of batch 0 comes with whatever `initial` says then; its end knows where it really began.
        """
        starts = dict(start.end)
        if end.start is not None and start.start == start.end:
            starts = dict(end.start)
        found = reconcile(
            starts,
            start.topic_ids,
            list(end.end),
            self._admin.earliest(_unknown(starts, start.topic_ids, end.end, end.topic_ids)),
            end.end,
            end.topic_ids,
            self._options.subscription.has,
        )
        self._tell(found.losses)
        return self.split([OffsetRange(tp, found.starts[tp], until) for tp, until in end.end.items()])

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
            committed=self._admin.committed(group_id, partitions)
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

    def _limited(self, starts: Offsets, ends: Offsets, unlimited: bool) -> dict[TopicPartition, int]:
        options = self._options
        waiting = backlog(starts, ends)
        if unlimited or not waiting:
            return dict(ends)
        since = None if self._last_batch_at is None else (time.monotonic() - self._last_batch_at) * 1000
        if self._stop_at is None and held_back(
            waiting, options.min_offsets_per_trigger, since, options.max_trigger_delay_ms
        ):
            return dict(starts)
        self._last_batch_at = time.monotonic()
        limits = [each for each in (options.max_offsets_per_trigger, self._admitted()) if each is not None]
        if not limits:
            return dict(ends)
        self._turn += 1
        return rate_limit(starts, ends, min(limits), self._turn)

    def _admitted(self) -> int | None:
        """What the query's state can take (`admission`)."""
        application_id = self._options.application_id
        return None if application_id is None else admission.read(application_id)

    def _tell(self, losses: list[Loss]) -> None:
        if losses and self._options.fail_on_data_loss:
            raise data_loss(losses)
        for loss in losses:
            _log.warning("%s: %s; going on (failOnDataLoss=false)", loss.kind, loss.text)


def _unknown(
    position: Offsets,
    topic_ids: Mapping[str, str],
    partitions: Collection[TopicPartition],
    current_ids: Mapping[str, str],
) -> list[TopicPartition]:
    """Partitions whose first offset has to be asked for: new ones, and those of topics made anew."""
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
