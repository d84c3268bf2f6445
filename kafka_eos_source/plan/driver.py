"""The planner of one source on the driver: takes and returns positions as JSON, as Spark stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.plan.pushdown import narrowed
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.source_position import SourcePosition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.plan.split import Task

Json = dict[str, Any]


class Planning:
    """Plans the batches of one source; the methods raise the errors of `SourcePlan`."""

    def __init__(self, plan: SourcePlan, admin: SourceAdmin) -> None:
        self._plan = plan
        self._admin = admin

    @classmethod
    def of(cls, options: ReadOptions) -> Planning:
        """Returns the planner for these options, without contacting a broker."""
        admin = SourceAdmin(
            admin_config(options.kafka),
            options.isolation_level,
            options.fetch_num_retries,
            options.fetch_retry_interval_ms,
        )
        return cls(SourcePlan(options, admin), admin)

    def close(self) -> None:
        """Closes the Kafka client."""
        self._admin.close()

    def initial(self) -> Json:
        return self._plan.initial().to_dict()

    def latest(self, start: Json, *, once: bool = False, may_jump: bool = True) -> Json:
        return self._plan.latest(SourcePosition.from_dict(start), once=once, may_jump=may_jump).to_dict()

    def available(self) -> Json | None:
        found = self._plan.available
        return None if found is None else found.to_dict()

    def stop_at_latest(self) -> None:
        self._plan.stop_at_latest()

    def tasks(self, start: Json, end: Json) -> list[Task]:
        return self._plan.tasks(SourcePosition.from_dict(start), SourcePosition.from_dict(end))

    def batch(self, filters: Sequence[Filter] = ()) -> list[Task]:
        """Returns the tasks of a batch read, without offsets that the filters exclude."""
        ranges = self._plan.batch()
        return self._plan.split(narrowed(ranges, filters, self._admin.at_time) if filters else ranges)
