"""Runs a `StatefulProcessor` on one micro-batch of one shard, with the same order of calls as in Spark.

1. Call ``init``, and check the variables that it declares against the store (`registry`).
2. In the first batch, call ``handleInitialState`` for each row of the initial state.
3. Call ``handleInputRows`` once for each key that has rows, in order of arrival of the keys' first rows.
4. After the rows of *all* keys, call ``handleExpiredTimer`` for each timer that is due, earliest first. A
   timer that another handler deleted does not fire. A timer that is registered during this step waits for the
   next batch.
5. Remove the values whose time to live has ended, and call ``close``.

The calls never run concurrently. They all change the state in one overlay, so a failed batch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import get_args

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.batch import ProcessorBatch
from kafka_eos_source.state.processor.clock import Clock, drop_late, read_clock
from kafka_eos_source.state.processor.handle import Phase, StatefulProcessorHandle, TimeMode
from kafka_eos_source.state.processor.output import Output
from kafka_eos_source.state.processor.registry import Registry
from kafka_eos_source.state.processor.rows import KeyColumns, RowStyle
from kafka_eos_source.state.processor.window import KeyWindow
from kafka_eos_source.state.shard_rows import RowsByKey, record_event_times

#: Yields the rows of the initial state that belong to this shard, with the grouping columns by name.
InitialState = Callable[[BatchContext], Iterator[pa.RecordBatch]]


class StatefulProcessorRunner:
    """Adapts a `StatefulProcessor` to `ShardProcessor`. The driver creates and pickles it for the tasks.

    Args:
        processor: the user's processor; must be picklable, as in Spark.
        key_schema: schema of the grouping columns, with their names in the input.
        input_schema: schema of the input rows; the processor receives all columns, as in Spark.
        output_schema: schema of the rows that the processor returns.
        time_mode: time mode of timers and times to live.
        event_time: timestamp column with the event time; required for "EventTime".
        delay_ms: how far the watermark lags behind the largest event time (Spark's ``withWatermark``).
        rows: "rows" for classes written for ``transformWithState``, "pandas" for those written for
            ``transformWithStateInPandas``.
        initial: reads the initial state; each shard calls it in its first batch. None for no initial state.
        timezone: time zone of the Spark session.

    Attributes:
        declared: the variables that ``init`` creates, as a new store would hold them.

    Raises:
        InvalidOptionError, InvalidSchemaError: if an argument is invalid, or contradicts another one.
        StatefulProcessorError: if ``init`` uses the handle in a way that Spark refuses.
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
        self.declared = self._declared_by_init()

    @property
    def output(self) -> pa.Schema:
        """Arrow schema of the batches that `process` yields."""
        return self._output

    @property
    def schema(self) -> str:
        """Empty: `process` compares the registry in the store with what ``init`` declares."""
        return ""

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Runs the steps in the docstring of this module on one micro-batch of this shard.

        Counts the metrics ``late_rows`` (dropped rows) and ``expired_values`` (removed values).

        Raises:
            StateMismatchError: if the declared variables cannot read the stored state.
            StatefulProcessorError, InvalidSchemaError: if the processor does what Spark refuses.
            Exception: whatever the processor raises.
        """
        clock = read_clock(state, context, self.time_mode, self._delay_ms)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(state), context.batch_id)
        columns = KeyColumns(self._key, self._style)
        output = Output(self._output, self._style, self._timezone)
        batch = ProcessorBatch(self.processor, handle, clock, columns, output)
        self.processor.init(handle)
        try:
            batch.open(state, Registry(self._key_schema, self.time_mode, shards_by=context.shards_by))
            if context.first and self._initial is not None:
                batch.handle_initial(list(self._initial(context)))
            with RowsByKey([field.name for field in self._key]) as rows:
                self._gather(batches, rows, context, clock)
                yield from batch.handle_rows(pa.Table.from_batches(part) for part in rows.parts())
            yield from batch.handle_timers()
            yield from batch.finish(context)
        finally:
            batch.close()

    def _check(self) -> None:
        """Raises unless the arguments are valid and fit together."""
        if self.time_mode not in get_args(TimeMode):
            raise InvalidOptionError(
                f"time_mode is {self.time_mode!r}, expected one of {', '.join(get_args(TimeMode))}."
            )
        if self._style not in get_args(RowStyle):
            raise InvalidOptionError(
                f"style is {self._style!r}, expected one of {', '.join(get_args(RowStyle))}."
            )
        if self._delay_ms < 0:
            raise InvalidOptionError(
                f"delay, by which the watermark lags, is {self._delay_ms} ms; expected 0 or more."
            )
        KeyColumns(self._key, self._style)  # raises if a key column has an unsupported type
        names = self._input.names
        for field in self._key:
            if field.name not in names or self._input.field(field.name).type != field.type:
                raise InvalidSchemaError(
                    f"grouping column {field.name!r} of type {field.type} is not among the input columns "
                    f"{names}."
                )
        if self.time_mode == "EventTime" and self._event_time is None:
            raise InvalidOptionError(
                "time_mode is 'EventTime', but event_time does not name a column.",
                fix="set event_time, and a delay for late rows.",
            )
        if self._event_time is not None:
            if self._event_time not in names:
                raise InvalidSchemaError(
                    f"event time column {self._event_time!r} is not among the input columns {names}."
                )
            drop_late(self._input.empty_table(), self._event_time, None)

    def _declared_by_init(self) -> Registry:
        """Returns the variables that ``init`` declares.

        Calls ``init`` of a copy, because the processor itself must be pickled as the user created it.
        """
        copy: StatefulProcessor = deepcopy(self.processor)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(), phase=Phase.PRE_INIT)
        copy.init(handle)
        copy.close()
        handle.move_to(Phase.CLOSED)
        declared = Registry(self._key_schema, self.time_mode)
        return registry.reconcile(None, declared, handle.declarations, frozenset())[0]

    def _gather(
        self, batches: Iterator[pa.RecordBatch], rows: RowsByKey, context: BatchContext, clock: Clock
    ) -> None:
        """Adds all rows of the shard that are not late to ``rows``; counts the late ones."""
        for batch in batches:
            on_time = pa.Table.from_batches([batch])
            if self._event_time is not None and batch.num_rows:
                on_time, times_ms = drop_late(on_time, self._event_time, clock.late_ms)
                record_event_times(context, times_ms)
            if on_time.num_rows < batch.num_rows:
                context.count("late_rows", batch.num_rows - on_time.num_rows)
            for part in on_time.to_batches():
                rows.add(part)
