"""The planner of one source on the driver: takes and returns positions as JSON, as Spark stores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.observe.source import SourceObserver
from kafka_eos_source.observe.summary import with_figures
from kafka_eos_source.plan.open_transactions import OpenTransactions, reason
from kafka_eos_source.plan.pushdown import narrowed
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.plan.split import other_partitions, split_by_shard
from kafka_eos_source.protocol.offset_log import SourcePosition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from kafka_eos_source.model import ShardRanges
    from kafka_eos_source.observe.prometheus import MetricsServer
    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.plan.split import Task

Json = dict[str, Any]


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
                from kafka_eos_source.observe.prometheus import serve_source

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
