"""The planner of one source on the driver: takes and returns positions as JSON, as Spark stores them.

Around `source.SourcePlan`, which decides, it reports what the source waits for (such as an open transaction
of another producer) and narrows batch reads by Spark's filters.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.model import OffsetRange, Offsets, TopicPartition
from kafka_eos_source.observe.source import SourceObserver, with_figures
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.plan.split import other_partitions, split_by_shard
from kafka_eos_source.protocol.offset_log import SourcePosition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from kafka_eos_source.model import ShardRanges
    from kafka_eos_source.observe.exporters import MetricsServer
    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.plan.split import Task

_log = logging.getLogger(__name__)

Json = dict[str, Any]

#: How often the source asks for the ends of the logs: while it has nothing to read, and while it reads.
_IDLE_SECONDS = 5.0
_BUSY_SECONDS = 30.0


class Planning:
    """Plans the batches of one source; the methods raise the errors of `SourcePlan`."""

    def __init__(
        self,
        plan: SourcePlan,
        admin: SourceAdmin,
        observer: SourceObserver | None = None,
        metrics: MetricsServer | None = None,
    ) -> None:
        self._plan = plan
        self._admin = admin
        self._observer = observer
        self._metrics = metrics
        self._open_transactions = OpenTransactions(admin)
        self._reports = False  # whether Spark asks for `available`; not all versions do

    @classmethod
    def of(cls, options: ReadOptions, *, observed: bool = False) -> Planning:
        """Returns the planner for these options, without contacting a broker.

        Args:
            options: options of the source.
            observed: whether to write down what the source sees, for `kafka-eos top` and the notebook.
        """
        admin = SourceAdmin(
            admin_config(options.kafka),
            options.isolation_level,
            options.fetch_num_retries,
            options.fetch_retry_interval_ms,
        )
        observer = metrics = None
        if observed:
            observer = SourceObserver(str(options.subscription), options.application_id or "")
            observer.explained_by(lambda: admin.complaint)
            if options.metrics_port is not None:
                # imported here, because few queries serve metrics and an HTTP server takes long to import
                from kafka_eos_source.observe.exporters import serve_source

                metrics = serve_source(options.metrics_host, options.metrics_port)
        return cls(SourcePlan(options, admin), admin, observer, metrics)

    def close(self) -> None:
        """Closes the Kafka client and the metrics' endpoint."""
        self._admin.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._observer is not None:
            self._observer.stopped()

    def initial(self) -> Json:
        with self._asking():
            return self._plan.initial().to_dict()

    def latest(self, start: Json, *, once: bool = False, may_jump: bool = True) -> Json:
        position = SourcePosition.from_dict(start)
        if self._observer is not None and self._reports:
            self._observer.look_up_newest_batch()
        with self._asking():
            end = self._plan.latest(position, once=once, may_jump=may_jump)
            if self._observer is None:
                return end.to_dict()
            latest = {} if self._plan.available is None else self._plan.available.end
            is_batch = end != position
            hidden = self._open_transactions.hidden(latest, is_idle=not is_batch)
        self._observer.planned(
            position.end,
            end.end,
            latest,
            is_batch=is_batch,
            reason="" if is_batch else self._plan.waits_for or reason(hidden),
            hidden=hidden,
            retention_ms=self._plan.retention_ms,
        )
        return end.to_dict()

    def available(self) -> Json | None:
        self._reports = True
        found = self._plan.available
        if found is None:
            return None
        return with_figures(
            found.to_dict(), None if self._observer is None else self._observer.newest_batch()
        )

    def stop_at_latest(self) -> None:
        self._plan.stop_at_latest()

    def tasks(self, start: Json, end: Json) -> list[Task]:
        with self._asking():
            return self._plan.tasks(SourcePosition.from_dict(start), SourcePosition.from_dict(end))

    def shard_tasks(
        self, start: Json, end: Json, shards: int, parallelism: int
    ) -> list[tuple[ShardRanges, ...]]:
        """Returns the tasks of a batch whose stateful operator runs in the read; see `split_by_shard`."""
        before, position = SourcePosition.from_dict(start), SourcePosition.from_dict(end)
        with self._asking():
            ranges = self._plan.ranges(before, position)
            # Described again, because producers may have found new partitions after `latest` listed them, and
            # before it read the end offsets. A topic that is gone is not described.
            described = self._admin.existing({tp.topic for tp in position.end}).partitions
        # not the ranges, because a partition without records may have none
        for found in (position.end, described):
            for topic, partitions in Counter(tp.topic for tp in found).items():
                if partitions != shards:
                    raise other_partitions(topic, partitions, shards)
        return split_by_shard(ranges, shards, parallelism)

    def _asking(self) -> AbstractContextManager[None]:
        """Encloses requests to brokers, so that others see what a query waits for."""
        return nullcontext() if self._observer is None else self._observer.asking()

    def batch(self, filters: Sequence[Filter] = ()) -> list[Task]:
        """Returns the tasks of a batch read, without offsets that the filters exclude."""
        ranges = self._plan.batch()
        return self._plan.split(narrowed(ranges, filters, self._admin.at_time) if filters else ranges)


# -- What hides records: transactions that are still open ------------------------------------------


class OpenTransactions:
    """Compares the ends of the logs with what readers may read (the LSO).

    A partition counts as hidden if its LSO has not moved since its log was seen to be longer than that.

    Args:
        admin: asks the brokers.
        clock: returns seconds, such as ``time.monotonic``.
    """

    def __init__(self, admin: SourceAdmin, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._clock = clock
        self._asked_at = clock()
        self._idle_since: float | None = None
        self._ends: dict[TopicPartition, tuple[int, int]] = {}  # the LSO before the question, and the answer

    def hidden(self, latest: Offsets, *, is_idle: bool) -> Offsets:
        """Returns how many offsets open transactions hide, per partition; without partitions that show all.

        Args:
            latest: the LSO of each partition. It was read after the last call, so a partition whose log was
                longer even then has an open transaction.
            is_idle: whether the source has nothing to read.
        """
        now = self._clock()
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._ends = {
            tp: (stable, end)
            for tp, (stable, end) in self._ends.items()
            if latest.get(tp) == stable and end > stable
        }
        found = {tp: end - stable for tp, (stable, end) in self._ends.items()}
        if self._is_due(now):
            self._asked_at = now
            self._ask(latest)
        return found

    def _is_due(self, now: float) -> bool:
        """Returns whether to ask the brokers. A source that was busy a moment ago does not ask at once."""
        if self._idle_since is None:
            return now - self._asked_at >= _BUSY_SECONDS
        return now - max(self._asked_at, self._idle_since) >= _IDLE_SECONDS

    def _ask(self, latest: Offsets) -> None:
        try:
            ends = self._admin.high_watermarks(list(latest))
        except KafkaEosError as error:
            _log.info("the source cannot tell whether a transaction is open: %s", error.message)
            self._ends = {}
            return
        self._ends = {tp: (latest[tp], end) for tp, end in ends.items() if tp in latest and end > latest[tp]}


def reason(hidden: Offsets) -> str:
    """Returns which open transactions hide records from readers, for people; "" if none does."""
    if not hidden:
        return ""
    others = f" and {len(hidden) - 1} other partitions" if len(hidden) > 1 else ""
    return f"open transactions in {min(hidden)}{others} hide {sum(hidden.values()):,} offsets"


# -- Filters of a batch read -------------------------------------------------------------------------
#
# Only offsets of records that the filters exclude are removed, and Spark applies every filter again. An upper
# bound on the timestamp removes nothing, because records are not necessarily in order of time.

#: Returns the first offset at or after a time in ms, per partition; None = no such record.
AtTime = Callable[[Mapping[TopicPartition, int]], Mapping[TopicPartition, int | None]]


def narrowed(ranges: Iterable[OffsetRange], filters: Iterable[Filter], at_time: AtTime) -> list[OffsetRange]:
    """Returns the ranges without offsets that the filters exclude.

    Args:
        ranges: offset ranges of the read.
        filters: Spark's filters, all of which a row must pass.
        at_time: asks the brokers; called only if a filter has a lower bound on the timestamp.
    """
    left = list(ranges)
    since_ms: int | None = None
    for each in filters:
        kind, column, value = type(each).__name__, _column(each), getattr(each, "value", None)
        if column == "partition":
            left = [one for one in left if _keeps(kind, one.tp.partition, value)]
        elif column == "topic":
            left = [one for one in left if _keeps(kind, one.tp.topic, value)]
        elif column == "offset" and isinstance(value, int):
            left = [_cut(one, kind, value) for one in left]
        elif column == "timestamp" and kind in _FROM and isinstance(value, datetime):
            at_ms = int(value.timestamp() * 1000)
            since_ms = at_ms if since_ms is None else max(since_ms, at_ms)
    if since_ms is not None:
        found = at_time({one.tp: since_ms for one in left})
        left = [_from(one, found.get(one.tp)) for one in left]
    return [one for one in left if one.size > 0]


_FROM = frozenset({"GreaterThan", "GreaterThanOrEqual", "EqualTo"})


def _column(each: Filter) -> str:
    attribute: tuple[str, ...] = getattr(each, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


def _keeps(kind: str, have: Any, value: Any) -> bool:
    if kind == "EqualTo":
        return bool(have == value)
    if kind == "In":
        return have in value
    if kind == "GreaterThan":
        return bool(have > value)
    if kind == "GreaterThanOrEqual":
        return bool(have >= value)
    if kind == "LessThan":
        return bool(have < value)
    if kind == "LessThanOrEqual":
        return bool(have <= value)
    return True


def _cut(one: OffsetRange, kind: str, value: int) -> OffsetRange:
    start = {"GreaterThan": value + 1, "GreaterThanOrEqual": value, "EqualTo": value}.get(kind, one.start)
    end = {"LessThan": value, "LessThanOrEqual": value + 1, "EqualTo": value + 1}.get(kind, one.end)
    return OffsetRange(one.tp, max(one.start, start), min(one.end, end))


def _from(one: OffsetRange, first: int | None) -> OffsetRange:
    """Returns the range from offset ``first`` on; empty if no record is late enough (``first`` is None)."""
    return OffsetRange(one.tp, one.end if first is None else max(one.start, first), one.end)
