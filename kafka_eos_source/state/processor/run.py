"""One micro-batch of one shard through a `StatefulProcessor`: the order of calls is that of Spark's operator.

1. ``init``; what it declares meets what the store holds (`registry`).
2. In the first batch, ``handleInitialState`` for each row of the initial state.
3. ``handleInputRows`` once for each key that has rows, in order of arrival of the keys' first rows.
4. ``handleExpiredTimer`` for each timer that is due when the rows of *all* keys were handled, earliest
   first. One that an earlier handler deleted does not fire; one set meanwhile waits for the next batch.
5. Values whose time to live is over are removed, and ``close`` is called.

Nothing is called concurrently. All of it sees the state through one overlay: what fails leaves no trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import get_args

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import evolution, registry
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.batch import ProcessorBatch
from kafka_eos_source.state.processor.clock import Clock, drop_late, read_clock
from kafka_eos_source.state.processor.handle import Phase, StatefulProcessorHandle, TimeMode
from kafka_eos_source.state.processor.output import Output
from kafka_eos_source.state.processor.registry import Registry
from kafka_eos_source.state.processor.rows import KeyColumns, RowStyle
from kafka_eos_source.state.processor.window import KeyWindow

#: Rows of the initial state that belong to this shard, with the grouping columns under their own names.
InitialState = Callable[[BatchContext], Iterator[pa.RecordBatch]]

_FORMAT = 1


class StatefulProcessorRunner:
    """A `StatefulProcessor` as a `ShardProcessor`; made on the driver, pickled to the tasks.

    Args:
        processor: of the user; must be picklable, as for Spark.
        key_schema: the grouping columns, by the names they have in the input.
        input_schema: of the rows; all columns reach the processor, as in Spark.
        output_schema: of what it returns.
        time_mode: of timers and times to live.
        event_time: column with the event time, a timestamp; needed for "EventTime".
        delay_ms: how far the watermark lags behind the largest event time (Spark's ``withWatermark``).
        rows: "rows" for classes written for ``transformWithState``, "pandas" for those of
            ``transformWithStateInPandas``.
        initial: called by each shard in the first batch.
        timezone: Spark's session time zone.

    Attributes:
        declared: the variables that ``init`` creates, as a new store would hold them.

    Raises:
        InvalidOptionError, InvalidSchemaError: these do not fit together.
        StatefulProcessorError: ``init`` does what Spark refuses.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        key_schema: StructType,
        input_schema: StructType,
        output_schema: StructType,
        *,
        time_mode: TimeMode = "None",
        event_time: str | None = None,
        delay_ms: int = 0,
        rows: RowStyle = "rows",
        initial: InitialState | None = None,
        timezone: str = "UTC",
    ) -> None:
        self.processor = processor
        self.time_mode = time_mode
        self._key_schema = key_schema
        self._event_time = event_time
        self._delay_ms = delay_ms
        self._style: RowStyle = rows
        self._initial = initial
        self._timezone = timezone
        self._key = arrow_schema(key_schema, timezone)
        self._input = arrow_schema(input_schema, timezone)
        self._output = arrow_schema(output_schema, timezone)
        self._check()
        self.declared = self._ask()

    @property
    def output(self) -> pa.Schema:
        """Arrow schema of what `process` yields."""
        return self._output

    @property
    def schema(self) -> str:
        """Fingerprint of the grouping columns' types: variables may come and go, these may not."""
        types = [evolution.shape(field.dataType) for field in self._key_schema.fields]
        return hashlib.sha256(f"{registry.KIND}/{_FORMAT}/{types}".encode()).hexdigest()[:16]

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """One micro-batch of this shard, see the head of this module.

        Counts ``late_rows``, which were dropped, and ``expired_values``, which were removed (`BatchContext`).

        Raises:
            StateMismatchError: the store's state is not that of this processor.
            StatefulProcessorError, InvalidSchemaError: the processor does what Spark refuses.
            Exception: whatever the processor raises.
        """
        clock = read_clock(state, context, self.time_mode, self._delay_ms)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(state), context.batch_id)
        columns = KeyColumns(self._key, self._style)
        output = Output(self._output, self._style, self._timezone)
        batch = ProcessorBatch(self.processor, handle, clock, columns, output)
        self.processor.init(handle)
        try:
            batch.open(state, Registry(self._key_schema, self.time_mode))
            if context.first and self._initial is not None:
                batch.handle_initial(list(self._initial(context)))
            yield from batch.handle_rows(self._gather(batches, context, clock))
            yield from batch.handle_timers()
            yield from batch.finish(context)
        finally:
            batch.close()

    def _check(self) -> None:
        if self.time_mode not in get_args(TimeMode):
            raise InvalidOptionError(
                f"timeMode is {self.time_mode!r}, expected one of {', '.join(get_args(TimeMode))}"
            )
        if self._style not in get_args(RowStyle):
            raise InvalidOptionError(
                f"rows is {self._style!r}, expected one of {', '.join(get_args(RowStyle))}"
            )
        if self._delay_ms < 0:
            raise InvalidOptionError(f"the delay of the watermark is {self._delay_ms} ms, expected 0 or more")
        KeyColumns(self._key, self._style)  # refuses types that keys cannot have
        names = self._input.names
        for field in self._key:
            if field.name not in names or self._input.field(field.name).type != field.type:
                raise InvalidSchemaError(
                    f"grouping column {field.name!r} of type {field.type} is not in the input {names}"
                )
        if self.time_mode == "EventTime" and self._event_time is None:
            raise InvalidOptionError(
                "timeMode is 'EventTime' and no event time column is named", fix="name it, with a delay"
            )
        if self._event_time is not None:
            if self._event_time not in names:
                raise InvalidSchemaError(
                    f"event time column {self._event_time!r} is not in the input {names}"
                )
            drop_late(self._input.empty_table(), self._event_time, None)

    def _ask(self) -> Registry:
        """What ``init`` declares, asked of a copy: the processor itself is pickled as the user made it."""
        copy: StatefulProcessor = deepcopy(self.processor)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(), phase=Phase.PRE_INIT)
        copy.init(handle)
        copy.close()
        handle.move_to(Phase.CLOSED)
        declared = Registry(self._key_schema, self.time_mode)
        return registry.reconcile(None, declared, handle.declarations, frozenset())[0]

    def _gather(self, batches: Iterator[pa.RecordBatch], context: BatchContext, clock: Clock) -> pa.Table:
        """All rows of the shard that are not late."""
        parts = [batch for batch in batches if batch.num_rows]
        table = pa.Table.from_batches(parts) if parts else self._input.empty_table()
        if self._event_time is None or not parts:
            return table
        on_time, context.seen_event_time_ms = drop_late(table, self._event_time, clock.late_ms)
        if on_time.num_rows < table.num_rows:
            context.count("late_rows", table.num_rows - on_time.num_rows)
        return on_time
