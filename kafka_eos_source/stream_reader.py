"""Spark's reader interfaces, streaming and batch: `plan` on the driver, `read` in the tasks.

Of a stream there is one reader in one Python process of the driver, for the whole run. Spark pickles it to
the tasks, so it holds no client: those are made where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config, consumer_config
from kafka_eos_source.option_values import invalid
from kafka_eos_source.plan.offsets import SourcePosition
from kafka_eos_source.plan.pushdown import narrowed
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.plan.split import Task
from kafka_eos_source.prompt_ack import acknowledge
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from kafka_eos_source.schema import read_schema
from kafka_eos_source.state.parcels import PARCELS

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from kafka_eos_source.model import OffsetRange
    from kafka_eos_source.options import ReadOptions
    from kafka_eos_source.state.vector.in_read import AggregateInRead

try:  # PySpark 4.2
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    ReadLimit = ReadAllAvailable = ReadMaxRows = None  # type: ignore[misc,assignment]

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Older PySpark has no such trigger for Python sources: it reads all there is in one batch."""


def rows_of(options: ReadOptions) -> StructType:
    """The schema of what is read. Raises: InvalidOptionError: of an aggregate that is none."""
    if options.aggregate_in_read is None:
        return read_schema(options.include_headers, options.columns)
    _aggregate(options.aggregate_in_read)
    return from_arrow_schema(PARCELS)


def stream_reader(options: ReadOptions) -> DataSourceStreamReader:
    """The source of a streaming query. No broker is asked yet."""
    return _StreamReader(options) if ReadLimit is not None else _UnlimitedStreamReader(options)


def batch_reader(options: ReadOptions) -> DataSourceReader:
    """The source of ``spark.read``. No broker is asked yet."""
    return _FilteringBatchReader(options) if options.push_filters else _BatchReader(options)


class _Task(InputPartition):
    """Ranges of one task."""

    def __init__(self, ranges: Task) -> None:
        super().__init__(None)
        self.ranges = ranges


class _StreamReaderBase(DataSourceStreamReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._settings = _settings(options)
        self._plan: SourcePlan | None = None
        self._admin: SourceAdmin | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._planning().initial().to_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        plan = self._planning()
        return [
            _Task(task) for task in plan.tasks(SourcePosition.from_dict(start), SourcePosition.from_dict(end))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        rows = read_ranges(self._settings, partition.ranges)
        if self._options.aggregate_in_read is None:
            return rows
        return _aggregate(self._options.aggregate_in_read)(rows)

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()

    def _planning(self) -> SourcePlan:
        if self._plan is None:
            self._admin = _admin(self._options)
            self._plan = SourcePlan(self._options, self._admin)
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        """Tasks need the settings only; a client cannot be pickled."""
        return {**self.__dict__, "_plan": None, "_admin": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a task, before its ranges have come."""
        acknowledge()
        self.__dict__.update(state)


class _StreamReader(SupportsTriggerAvailableNow, _StreamReaderBase):
    """For PySpark 4.2 and newer, where Spark tells start and limit."""

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        unlimited = isinstance(limit, ReadAllAvailable) and self._is_limited()
        position = SourcePosition.from_dict(start)
        return self._planning().latest(position, unlimited=unlimited).to_dict()

    def getDefaultReadLimit(self) -> Any:
        """What Spark hands back to `latestOffset`; the limits themselves are applied there."""
        return (
            ReadMaxRows(self._options.max_offsets_per_trigger or 1)
            if self._is_limited()
            else ReadAllAvailable()
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        available = self._planning().available
        return None if available is None else available.to_dict()

    def prepareForTriggerAvailableNow(self) -> None:
        self._planning().stop_at_latest()

    def _is_limited(self) -> bool:
        options = self._options
        return not (options.max_offsets_per_trigger is None and options.min_offsets_per_trigger is None)


class _UnlimitedStreamReader(_StreamReaderBase):
    """For PySpark 4.0 and 4.1, where Spark asks for the latest offset and does not say since when.

    Seen on 4.0: a new query is asked ``latestOffset``, then ``initialOffset``; a restarted one is first told
    the end of its last batch by ``partitions(end, end)``. So the first call tells which it is, and where a
    new one begins is fixed before its end is looked up. A replay of batch 0 asks ``initialOffset`` between.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._initial: SourcePosition | None = None
        self._position: SourcePosition | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._begin().to_dict()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return self._planning().latest(self._position or self._begin()).to_dict()

    def _begin(self) -> SourcePosition:
        if self._initial is None:
            self._initial = self._planning().initial()
        return self._initial

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planned = super().partitions(start, end)
        self._position = SourcePosition.from_dict(end)
        return planned


class _BatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._settings = _settings(options)

    def partitions(self) -> Sequence[InputPartition]:
        admin = _admin(self._options)
        try:
            plan = SourcePlan(self._options, admin)
            return [_Task(task) for task in plan.split(self._narrowed(plan.batch(), admin))]
        finally:
            admin.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # a read of nothing gets no task of ours, but one from Spark
        return read_ranges(self._settings, partition.ranges if isinstance(partition, _Task) else ())

    def _narrowed(self, ranges: list[OffsetRange], admin: SourceAdmin) -> list[OffsetRange]:
        return ranges


class _FilteringBatchReader(_BatchReader):
    """Only with ``pushFilters``: Spark refuses any reader that has `pushFilters` while its conf is off."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Narrows what is fetched; Spark still applies every filter, so nothing here can lose a row."""
        self._filters = filters
        yield from filters

    def _narrowed(self, ranges: list[OffsetRange], admin: SourceAdmin) -> list[OffsetRange]:
        return narrowed(ranges, self._filters, admin.at_time)


def _settings(options: ReadOptions) -> ReadSettings:
    """The group is never joined: librdkafka wants a name, and ACLs may ask for the user's.

    No random part, unlike Spark's: workers find their open consumers again by their configuration.
    """
    group_id = options.group_id or f"{options.group_id_prefix}-read"
    columns = options.columns
    if options.aggregate_in_read is not None:
        columns = _aggregate(options.aggregate_in_read).source_columns
    return ReadSettings(
        conf=consumer_config(options.kafka, group_id, options.isolation_level),
        include_headers=options.include_headers,
        columns=columns,
        fail_on_data_loss=options.fail_on_data_loss,
        poll_timeout_ms=options.poll_timeout_ms,
    )


def _aggregate(written: str) -> AggregateInRead:
    from kafka_eos_source.state.vector.in_read import AggregateInRead  # few reads need it

    try:
        found = AggregateInRead.from_json(written)
        _ = found.partial_schema  # made now, so that it is refused now
    except (ValueError, TypeError, KeyError, InvalidSchemaError) as error:
        raise invalid(
            "aggregate.in.read", written, "what aggregate_with_changelog_state sets there"
        ) from error
    return found


def _admin(options: ReadOptions) -> SourceAdmin:
    return SourceAdmin(
        admin_config(options.kafka),
        options.isolation_level,
        options.fetch_num_retries,
        options.fetch_retry_interval_ms,
    )
