"""The operators as users name them: a streaming DataFrame in, one whose state commits with its sink out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql.types import StructType

from kafka_eos_source.in_read.lineage import lineage
from kafka_eos_source.option_values import duration_ms
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.state.operator.frame import SHARDS, combined, grouping, shard_count, with_operator
from kafka_eos_source.state.operator.initial import InitialTopic, publish
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.ddl import as_struct
from kafka_eos_source.state.processor.run import StatefulProcessorRunner
from kafka_eos_source.state.vector import Aggregate, AggregateProcessor
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import Function, FunctionProcessor
from kafka_eos_source.state.vector.in_read import AggregateInRead, used_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from kafka_eos_source.state.processor.handle import TimeMode
    from kafka_eos_source.state.processor.rows import RowStyle
    from kafka_eos_source.state.vector.windows import Duration, Window


def transform_with_changelog_state(
    rows: DataFrame | GroupedData,
    processor: StatefulProcessor,
    output_schema: StructType | str,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "state",
    shards: int | None = None,
    time_mode: TimeMode = "None",
    event_time: str | None = None,
    delay: str = "0s",
    style: RowStyle = "rows",
    initial_state: DataFrame | None = None,
) -> DataFrame:
    """Runs a `StatefulProcessor` on state that commits in the sink's transaction.

    The class is one of Spark's own (``transformWithState``): it runs there and here.

    Args:
        rows: ``df.groupBy(columns)``, or the streaming frame with ``key``.
        processor: state variables, timers and times to live as in Spark.
        output_schema: of the rows that it returns.
        options: of the operator, see ``docs/options.md``; at least ``kafka.bootstrap.servers``, and the
            ``application.id`` and ``kafka.group.id`` of the sink if it has them.
        key: one column or several, when ``rows`` is not grouped.
        store: name of the state within the query; a query with several operators needs several.
        shards: parts of the state, partitions of its changelog; stays as it is for the life of the state.
            None = 4.
        time_mode: ``"None"``, ``"ProcessingTime"`` or ``"EventTime"``.
        event_time: the column with the event time (timestamp).
        delay: how far the watermark lags behind the largest event time.
        style: ``"rows"`` for processors that take rows, ``"pandas"`` for those of
            ``transformWithStateInPandas``.
        initial_state: a batch frame with the key columns, for ``handleInitialState`` in the first batch;
            needs ``application.id``.

    Returns:
        The output columns and `CHANGELOG`, which the sink needs: hand it on in every projection.

    Raises:
        InvalidOptionError, InvalidSchemaError: an argument, before any broker is asked.
        StateMismatchError, ChangelogError, UnavailableError: of the changelog, if ``application.id`` is set.
    """
    frame, keys = grouping(rows, key)
    zone = _timezone(frame)
    visible = _rows_of(frame)

    def runner(initial: InitialTopic | None) -> StatefulProcessorRunner:
        return StatefulProcessorRunner(
            processor,
            StructType([visible[name] for name in keys]),
            visible,
            as_struct(output_schema, "the output"),
            time_mode=time_mode,
            event_time=event_time,
            delay_ms=duration_ms("delay", delay),
            rows=style,
            timezone=zone,
            initial=initial,
        )

    made = runner(None)  # checked before anything is written
    if initial_state is not None:
        count = SHARDS if shards is None else shards
        checked = parse_state(options)
        made = runner(publish(initial_state, keys, store=store, shards=count, options=checked, own=options))
    return with_operator(frame, keys, made, store=store, shards=shards, options=options)


def aggregate_with_changelog_state(
    rows: DataFrame | GroupedData,
    aggregates: Mapping[str, Aggregate],
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "aggregates",
    shards: int | None = None,
    window: Window | None = None,
    emit: str = "on_update",
    combine: bool | Literal["after_read"] = True,
) -> DataFrame:
    """Aggregates by key, and by window if there is one, computed in columns: the fast form.

    Args:
        rows, options, key, store, shards: as `transform_with_changelog_state`.
        aggregates: by the name of their result: ``{"views": count(), "longest": max_("seconds")}``.
        window: ``tumbling``, ``hopping`` or ``session`` of `state.vector`.
        emit: ``"on_update"``: each changed result in each micro-batch; ``"on_close"``: each window's once,
            when the watermark has passed its end and its grace.
        combine: rows of a key are combined in their input partition before they travel: by the read itself
            where keys and columns come straight from this source (renamed, or ``cast(… as string)``), else
            after it. What the read has combined never becomes Spark's rows, and Spark's ``numInputRows``
            counts what is left. ``"after_read"`` = never by the read, False = not at all.

    Returns:
        The key columns, ``window_start`` and ``window_end``, the results, and `CHANGELOG`.

    Raises:
        As `transform_with_changelog_state`.
    """
    frame, keys = grouping(rows, key)
    # every other column would be turned into rows and back for nothing
    used = used_columns(keys, aggregates, window)
    frame = _narrowed(frame, used)
    processor = AggregateProcessor(
        arrow_schema(_rows_of(frame), _timezone(frame)), keys, aggregates, window=window, emit=emit
    )
    parcel, count = processor.partial_schema if combine else None, shard_count(shards)
    found = lineage(frame, used) if combine is True else None
    if found is not None:
        in_read = AggregateInRead(found.columns, tuple(keys), aggregates, window, count)
        frame = found.read("aggregate.in.read", in_read.to_json(), frame.sparkSession)
    elif combine:
        frame = combined(frame, processor.partial, processor.partial_schema, keys, count)
    return with_operator(frame, keys, processor, store=store, shards=shards, options=options, parcel=parcel)


def apply_with_changelog_state(
    rows: DataFrame | GroupedData,
    function: Function,
    output_schema: StructType | str,
    state_schema: StructType | str,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "state",
    shards: int | None = None,
    event_time: str | None = None,
    version: str = "1",
) -> DataFrame:
    """A function of your own over Arrow batches and the state of their keys, called with many keys at once.

    Args:
        rows, options, key, store, shards: as `transform_with_changelog_state`.
        function: from a `state.vector.KeyedBatch` to its output rows and the keys' new state.
        output_schema: of the rows that it gives.
        state_schema: columns of the state of a key.
        event_time: a column whose largest value makes the watermark; None = there is none.
        version: change it when the same columns of state get another meaning: older state is refused then.

    Returns:
        The output columns and `CHANGELOG`.

    Raises:
        As `transform_with_changelog_state`.
    """
    frame, keys = grouping(rows, key)
    zone = _timezone(frame)
    processor = FunctionProcessor(
        arrow_schema(_rows_of(frame), zone),
        keys,
        function,
        output=arrow_schema(as_struct(output_schema, "the output"), zone),
        state=arrow_schema(as_struct(state_schema, "the state"), zone),
        event_time=event_time,
        version=version,
    )
    return with_operator(frame, keys, processor, store=store, shards=shards, options=options)


def deduplicate_with_changelog_state(
    rows: DataFrame | GroupedData,
    *,
    options: Mapping[str, str],
    key: str | Sequence[str] | None = None,
    store: str = "duplicates",
    shards: int | None = None,
    within: Duration | None = None,
    on: str | None = None,
    grace: Duration = "0s",
    combine: bool = True,
) -> DataFrame:
    """The first row of each key passes: for ever, or once in a stretch of event time.

    Args:
        rows, options, key, store, shards: as `transform_with_changelog_state`.
        within: how far apart in event time duplicates are at most; None = any time, and state only grows.
        on: the column of event time; needed with ``within``.
        grace: how much earlier than the newest row a row may come.
        combine: duplicates within an input partition are dropped before they travel.

    Returns:
        All columns and `CHANGELOG`.

    Raises:
        As `transform_with_changelog_state`.
    """
    frame, keys = grouping(rows, key)
    schema = arrow_schema(_rows_of(frame), _timezone(frame))
    processor = DeduplicateProcessor(schema, keys, within=within, on=on, grace=grace)
    if combine:
        frame = combined(frame, processor.partial, schema, keys, shard_count(shards))
    return with_operator(
        frame,
        keys,
        processor,
        store=store,
        shards=shards,
        options=options,
        parcel=schema if combine else None,
    )


def _narrowed(frame: DataFrame, used: Sequence[str]) -> DataFrame:
    """The frame with these columns only, and that of changes; what is missing is the processor's to name."""
    kept = [name for name in frame.columns if name in {*used, CHANGELOG}]
    return frame.select(*(f"`{name}`" for name in kept))


def _rows_of(frame: DataFrame) -> StructType:
    """The columns of the frame that are data."""
    return StructType([field for field in frame.schema.fields if field.name != CHANGELOG])


def _timezone(frame: DataFrame) -> str:
    zone: Any = frame.sparkSession.conf.get("spark.sql.session.timeZone")
    return str(zone)
