"""The public functions that add a stateful operator to a streaming DataFrame."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.lineage import lineage, source_options, unused_watermark
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.session import time_zone
from kafka_eos_source.state.operator.frame import (
    PARTITIONS,
    Shards,
    chosen_shards,
    combine_partitions,
    grouping,
    publish,
    shard_count,
    with_operator,
    with_store,
)
from kafka_eos_source.state.operator.spark_aggregates import SparkAggregate, read_aggregates
from kafka_eos_source.state.operator.task import InitialTopic
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.processor.run import StatefulProcessorRunner
from kafka_eos_source.state.processor.schema import arrow_schema, as_struct
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import Function, FunctionProcessor
from kafka_eos_source.state.vector.in_read import AggregateInRead, used_columns
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import milliseconds, no_time_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from kafka_eos_source.state.processor.handle import TimeMode
    from kafka_eos_source.state.processor.rows import RowStyle
    from kafka_eos_source.state.vector.windows import Duration, Window


_log = logging.getLogger(__name__)


def transform(
    rows: DataFrame | GroupedData,
    processor: StatefulProcessor,
    output_schema: StructType | str,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "state",
    shards: Shards = None,
    time_mode: TimeMode = "None",
    on: str | None = None,
    grace: Duration = "0s",
    style: RowStyle = "rows",
    initial_state: DataFrame | None = None,
) -> DataFrame:
    """Runs a `StatefulProcessor` whose state commits in the sink's Kafka transaction.

    The same class also runs in Spark's ``transformWithState``.

    Args:
        rows: ``df.groupBy(columns)``, or the streaming frame together with ``key``.
        processor: the processor; state variables, timers and times to live work as in Spark.
        output_schema: schema of the rows that the processor returns.
        options: options of the operator, see ``docs/options.md``: at least ``kafka.bootstrap.servers``, and
            the ``application.id`` and ``kafka.group.id`` of the sink if they are set there.
        key: name or names of the key columns, if ``rows`` is not grouped.
        store: name of the state within the query; each operator of a query needs its own.
        shards: number of shards of the state and of partitions of its changelog; None for 4. Only
            ``kafka-eos state rescale`` can change it later. ``"partitions"`` makes a shard of each partition
            of the input topics; the tasks that read them then run the operator, without a shuffle. This
            requires a grouping by the record's key, and one source whose columns are only selected, renamed
            or cast to string; see ``docs/state.md``.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``.
        on: name of the timestamp column with the event time; required with ``"EventTime"``.
        grace: how far the watermark lags behind the largest event time, so how late a row may be.
        style: ``"rows"`` for processors that take rows, ``"pandas"`` for those written for
            ``transformWithStateInPandas``.
        initial_state: batch frame with the key columns, for ``handleInitialState`` in the first batch;
            requires ``application.id``.

    Returns:
        The output columns and `CHANGELOG`, in a frame whose methods keep it and its rows
        (`spark.operator_frame`).

    Raises:
        InvalidOptionError, InvalidSchemaError: if an argument is invalid, before any broker is contacted.
        StateMismatchError, ChangelogError, UnavailableError: if ``application.id`` is set and the changelog
            topic is unsuitable or unreachable.
    """
    frame, keys = grouping(rows, key)
    senders = with_store(frame, store)
    _refuse_watermark(frame, "time_mode='EventTime', on={on}, grace={grace}")
    shards = chosen_shards(frame, keys, shards)
    zone = time_zone(frame.sparkSession)
    data = _data_columns(frame)

    def runner(initial: InitialTopic | None) -> StatefulProcessorRunner:
        return StatefulProcessorRunner(
            processor,
            StructType([data[name] for name in keys]),
            data,
            as_struct(output_schema, "the output"),
            time_mode=time_mode,
            event_time=on,
            delay_ms=milliseconds("grace", grace),
            rows=style,
            timezone=zone,
            initial=initial,
        )

    run = runner(None)  # checks the arguments before `publish` writes anything
    if time_mode == "ProcessingTime":
        _warn_of_late_timers(frame, options)
    if initial_state is not None and shards == PARTITIONS:
        raise InvalidOptionError(
            "initial_state is set and shards is 'partitions'; expected a number of shards, because only "
            "Kafka's producers know the partition of a key.",
            fix="send the initial state to the input topic as records, or pass a number of shards.",
        )
    if initial_state is not None:
        count = shard_count(shards)
        initial = publish(
            initial_state,
            keys,
            store=store,
            shards=count,
            options=parse_state(options),
            user_options=options,
        )
        run = runner(initial)
    return with_operator(
        frame,
        keys,
        run,
        store=store,
        shards=shards,
        options=options,
        has_event_times=on is not None,
        senders=senders,
    )


def aggregate(
    rows: DataFrame | GroupedData,
    aggregates: Mapping[str, SparkAggregate] | Sequence[Column] | Column,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "aggregates",
    shards: Shards = None,
    window: Window | None = None,
    emit: str = "on_update",
    removed: str | None = None,
    at_most_every: Duration | None = None,
    combine: bool | Literal["after_read"] = True,
) -> DataFrame:
    """Aggregates rows by key, and optionally by window; computes on Arrow columns.

    Args:
        rows, options, key, store, shards: as in `transform`.
        aggregates: aggregates by the name of their result column, in Spark's words:
            ``{"views": F.count("*"), "longest": F.max("seconds")}``, text such as ``"sum(amount)"``, or
            declarations of `state.aggregates`; or columns with an alias: ``[F.count("*").alias("views")]``.
            An operand that is an expression becomes the column ``<result>__input`` before the operator.
            ``docs/aggregates.md`` lists the functions.
        window: ``tumbling``, ``hopping`` or ``session`` from `state.vector`; None for no window.
        emit: ``"on_update"`` emits each changed result in each micro-batch. ``"changes"`` emits before it the
            result that it replaces, with true in the column ``removed``, for a following aggregation.
            ``"on_close"`` emits the result of each window once, when the watermark has passed the end of the
            window and its grace.
        removed: name of a boolean column; the aggregates take back the rows in which it is true. Set it to
            ``"removed"`` if the rows come from an aggregation with ``emit="changes"``. Only count, and sum
            and avg of integers and decimals, can take rows back.
        at_most_every: time span, such as ``"1 minute"``. A changed result is emitted when the span has passed
            since its first change that was not emitted, and when its window closes; so each key and window
            emits at most one result per span. The span is event time if there is a window, and processing
            time otherwise.
        combine: True combines the rows of each key in each input partition before the shuffle. The read does
            this itself if keys and columns come straight from this source (renamed, or
            ``cast(… as string)``); the combined rows then bypass Spark's row format, and Spark's
            ``numInputRows`` counts packed batches. Otherwise, and always with ``"after_read"``, a step after
            the read combines. False disables combining.

    Returns:
        The key columns, ``window_start`` and ``window_end``, the results, ``removed`` if there can be removed
        rows, and `CHANGELOG`.

    Raises:
        InvalidOptionError, InvalidSchemaError: see `transform`.
        StateMismatchError, ChangelogError, UnavailableError: see `transform`.
    """
    frame, keys = grouping(rows, key)
    senders = with_store(frame, store)
    _refuse_watermark(frame, "window=tumbling(…, on={on}, grace={grace})")
    if window is not None and window.on not in frame.columns:
        raise no_time_column(window.on, _data_columns(frame).names)
    frame, read = read_aggregates(frame, aggregates)
    # Drop the other columns, because Spark would convert them to rows and back.
    used = used_columns(keys, read, window, removed)
    frame = _select(frame, used)
    shards = chosen_shards(frame, keys, shards)
    processor = AggregateProcessor(
        arrow_schema(_data_columns(frame), time_zone(frame.sparkSession)),
        keys,
        read,
        window=window,
        emit=emit,
        removed=removed,
        at_most_every=at_most_every,
        max_values=parse_state(options).aggregate_max_values,
    )
    packed_schema = None
    if combine and shards != PARTITIONS:
        packed_schema, count = processor.partial_schema, shard_count(shards)
        # No column of the source can mark removed rows, so the read never combines them.
        source = lineage(frame, used) if combine is True and removed is None else None
        if source is not None:
            in_read = AggregateInRead(source.columns, tuple(keys), read, window, count)
            frame = source.read(in_read, frame.sparkSession)
        else:
            frame = combine_partitions(frame, processor.partial, processor.partial_schema, keys, count)
    return with_operator(
        frame,
        keys,
        processor,
        store=store,
        shards=shards,
        options=options,
        packed_schema=packed_schema,
        combines=bool(combine),
        has_event_times=window is not None,
        senders=senders,
    )


def apply(
    rows: DataFrame | GroupedData,
    function: Function,
    output_schema: StructType | str,
    state_schema: StructType | str,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "state",
    shards: Shards = None,
    on: str | None = None,
    version: str = "1",
) -> DataFrame:
    """Applies a function to Arrow batches and the state of their keys, many keys in each call.

    Args:
        rows, options, key, store, shards: as in `transform`.
        function: takes a `state.vector.KeyedBatch`; returns its output rows and the new state of its keys.
        output_schema: schema of the rows that the function returns.
        state_schema: columns of the state of a key.
        on: name of the event-time column, whose largest value is the watermark; None for no watermark.
        version: version of the state. Change it when the meaning of the state's columns changes without a
            change of the schema; the operator then refuses older state.

    Returns:
        The output columns and `CHANGELOG`.

    Raises:
        InvalidOptionError, InvalidSchemaError: see `transform`.
        StateMismatchError, ChangelogError, UnavailableError: see `transform`.
    """
    frame, keys = grouping(rows, key)
    senders = with_store(frame, store)
    _refuse_watermark(frame, "on={on}")
    shards = chosen_shards(frame, keys, shards)
    zone = time_zone(frame.sparkSession)
    processor = FunctionProcessor(
        arrow_schema(_data_columns(frame), zone),
        keys,
        function,
        output=arrow_schema(as_struct(output_schema, "the output"), zone),
        state=arrow_schema(as_struct(state_schema, "the state"), zone),
        event_time=on,
        version=version,
    )
    return with_operator(
        frame,
        keys,
        processor,
        store=store,
        shards=shards,
        options=options,
        has_event_times=on is not None,
        senders=senders,
    )


def deduplicate(
    rows: DataFrame | GroupedData,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "duplicates",
    shards: Shards = None,
    within: Duration | None = None,
    on: str | None = None,
    grace: Duration = "0s",
    combine: bool = True,
) -> DataFrame:
    """Passes the first row of each key and drops its duplicates.

    Args:
        rows, options, key, store, shards: as in `transform`.
        within: largest distance in event time between duplicates; None for no limit, in which case the state
            grows with every new key.
        on: the event time column; required with ``within``.
        grace: how much earlier than the newest row a row may be.
        combine: whether to drop duplicates within each input partition before the shuffle.

    Returns:
        All columns and `CHANGELOG`.

    Raises:
        InvalidOptionError, InvalidSchemaError: see `transform`.
        StateMismatchError, ChangelogError, UnavailableError: see `transform`.
    """
    frame, keys = grouping(rows, key)
    senders = with_store(frame, store)
    _refuse_watermark(frame, "on={on}, grace={grace}")
    shards = chosen_shards(frame, keys, shards)
    schema = arrow_schema(_data_columns(frame), time_zone(frame.sparkSession))
    processor = DeduplicateProcessor(schema, keys, within=within, on=on, grace=grace)
    packed_schema = None
    if combine and shards != PARTITIONS:
        packed_schema = schema
        frame = combine_partitions(frame, processor.partial, schema, keys, shard_count(shards))
    return with_operator(
        frame,
        keys,
        processor,
        store=store,
        shards=shards,
        options=options,
        packed_schema=packed_schema,
        combines=combine,
        has_event_times=on is not None,
        senders=senders,
    )


def _refuse_watermark(frame: DataFrame, instead: str) -> None:
    """Refuses a frame with a watermark of Spark, which no operator of this package looks at.

    An operator has its own watermark, because it must commit in Kafka's transaction.

    Args:
        frame: the operator's input.
        instead: the arguments that have the same effect, with ``{on}`` and ``{grace}`` for their values.

    Raises:
        InvalidOptionError: if it has one that no stateful step of Spark before it uses.
    """
    found = unused_watermark(frame)
    if found is None:
        return
    column, delay = found
    arguments = instead.format(on=repr(column), grace=repr(_grace(delay)))
    raise InvalidOptionError(
        f"the frame has withWatermark({column!r}, {delay!r}), which a stateful operator of kafka-eos does "
        "not use: its own watermark commits with the micro-batch in Kafka's transaction.",
        fix=f"remove withWatermark, and pass {arguments}; without event time, only remove it.",
    )


def _grace(delay: str) -> str:
    """Returns the delay of a Spark watermark as a time span that ``grace`` accepts."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", delay.lower())
    months = sum(int(number) for number, unit in parts if unit.startswith("month"))  # 31 days each, in Spark
    try:
        spans = [
            milliseconds("delay", f"{number} {unit}")
            for number, unit in [("31", "days")] * months
            + [each for each in parts if not each[1].startswith("month")]
        ]
    except InvalidOptionError:
        return delay
    if len(spans) > 1 or not parts:
        return f"{sum(spans)}ms"
    number, unit = ("31", "days") if months else parts[0]
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


def _warn_of_late_timers(frame: DataFrame, options: Mapping[str, str]) -> None:
    """Logs a warning if no source of the query can find out when the operator's timers are due."""
    found = [source.get("application.id") for source in source_options(frame)]
    own = parse_state(options).application_id
    if found and (own is None or own not in found):
        _log.warning(
            "the source has application.id=%s, and the operator has %s. While there is nothing to read, "
            "timers and times to live wait for the next record or renewal of the token. To avoid that, set "
            "the same application.id on source, operator and sink.",
            " and ".join(sorted({repr(each) for each in found})),
            repr(own),
        )


def _select(frame: DataFrame, used: Sequence[str]) -> DataFrame:
    """Returns the frame with these columns and `CHANGELOG`; the processor reports those that are missing."""
    columns = [name for name in frame.columns if name in {*used, CHANGELOG}]
    return frame.select(*(f"`{name}`" for name in columns))


def _data_columns(frame: DataFrame) -> StructType:
    """Returns the frame's columns except `CHANGELOG`."""
    return StructType([field for field in frame.schema.fields if field.name != CHANGELOG])
