"""Chooses how a query of an `App` runs: in the tasks that read, or with steps of Spark; and explains it.

The tasks that read can run the whole query if every step before the sink runs there (`in_read.lineage`) and
the sink writes exactly once. They then make the records too, and stage them for the sink's transaction, so
that no row passes through Spark. Otherwise Spark makes the records of rows that it gets from the read. The
records are the same, byte for byte, and so are offsets, token and checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from kafka_eos_source.app.records import Records, columns_of_user
from kafka_eos_source.datasource.checks_on_server import own_errors
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.lineage import Lineage, Obstacle, steps_in_read, trace
from kafka_eos_source.in_read.records import RecordShape
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.staged import BY_APP, staged_frame
from kafka_eos_source.in_read.step import (
    ORIGIN_FIELD,
    MapInRead,
    ReadColumn,
    ReadColumns,
    schema_of_packed_rows,
    with_column_of_packets,
)
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.parse import parse_sink_in_read
from kafka_eos_source.options.table import SINK_IN_READ
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.secrets import shown
from kafka_eos_source.sinks.constructors import Sink, sink_options
from kafka_eos_source.sinks.sink_options import PREFIX
from kafka_eos_source.sinks.specs import OBJECT
from kafka_eos_source.spark.operator_frame import refused_elsewhere, writer_for_kafka
from kafka_eos_source.spark.schema import ORIGIN
from kafka_eos_source.spark.session import SessionRules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_GUARANTEE = "processing.guarantee"


@dataclass(frozen=True)
class QueryPlan:
    """How a query runs.

    Attributes:
        frame: the frame for the sink.
        sink: options of the sink.
        in_read: what the tasks that read do, step by step.
        obstacle: what keeps the rest of the query from running there; None if all of it does.
    """

    frame: DataFrame
    sink: dict[str, str]
    in_read: tuple[str, ...]
    obstacle: Obstacle | None

    def text(self, query: str) -> str:
        """Returns the plan in a few lines, for people."""
        steps = " → ".join(["reads Kafka", *self.in_read])
        if self.obstacle is None:
            return (
                f"query {query!r}: all of it runs in the tasks that read, and no row passes through Spark.\n"
                f"  the tasks that read: {steps} → stages the records"
            )
        fix = f"; fix: {self.obstacle.fix}" if self.obstacle.fix else ""
        return (
            f"query {query!r}: rows pass through Spark between the tasks that read and those that write.\n"
            f"  the tasks that read: {steps}\n"
            f"  not in the read: {self.obstacle.what}{fix}"
        )


def plan_query(
    frame: DataFrame,
    records: Records,
    sinks: Mapping[str, Sink],
    stated: Mapping[str, str],
    *,
    has_timestamp: bool,
) -> QueryPlan:
    """Returns how a query runs that writes a frame.

    Args:
        frame: the rows to write.
        records: how they become records.
        sinks: systems outside Kafka that receive the rows too.
        stated: the other options of the sink.
        has_timestamp: whether the column ``timestamp`` is the record's timestamp (``includeTimestamp``).

    Raises:
        InvalidSchemaError, InvalidOptionError: as `Records.shape`.
    """
    schema = frame.schema
    if schema_of_packed_rows(schema) is not None or staged_frame(schema) is not None:
        records.check_none("the frame comes from map_in_read, whose function makes the records")
        packed = Obstacle("map_in_read() without write=") if staged_frame(schema) is None else None
        return QueryPlan(frame, {**_of_sinks(sinks, None), **stated}, steps_in_read(frame), packed)
    shape = records.shape(schema, for_sinks=bool(sinks), has_timestamp=has_timestamp)
    columns = columns_of_user(schema, for_sinks=True) if sinks and shape is not None else None
    sink = {**_of_sinks(sinks, columns), **stated}
    origin = trace(frame, frame.columns)
    steps = steps_in_read(frame)
    staged = _staged(frame, schema, shape, records, sinks, sink, origin)
    if not isinstance(staged, Obstacle):
        return QueryPlan(staged, sink, (*steps, *(["makes records"] if shape is not None else [])), None)
    rows, _ = records.of(frame, for_sinks=bool(sinks), has_timestamp=has_timestamp)
    return QueryPlan(rows, sink, steps, staged)


def _staged(
    frame: DataFrame,
    schema: StructType,
    shape: RecordShape | None,
    records: Records,
    sinks: Mapping[str, Sink],
    sink: Mapping[str, str],
    origin: Lineage | Obstacle,
) -> DataFrame | Obstacle:
    """Returns the frame of a query that runs in the tasks that read, or why it does not."""
    if isinstance(origin, Obstacle):
        return origin
    objects = [name for name, each in sinks.items() if each.type == OBJECT]
    if objects:
        return Obstacle(
            f"the sink {objects[0]!r}, which is an object",
            "name its class: custom('module:Class', …)",
        )
    guarantee = {name.lower(): value for name, value in sink.items()}.get(_GUARANTEE, "exactly_once")
    if guarantee.lower() != "exactly_once":
        return Obstacle(f"{_GUARANTEE}={guarantee}", "leave the option out")
    try:
        options = parse_sink_in_read(sink)
    except InvalidOptionError as error:  # what is wrong with them, the checks of the query say
        return Obstacle(f"the options of the sink: {error.message}")
    columns = origin.columns
    rows = StructType([each for each in schema if each.name != CHANGELOG])
    if shape is not None:
        shape = replace(shape, kept=tuple(name for name in shape.kept if name != CHANGELOG))
        made = records.in_read(rows, shape, SessionRules.of(frame.sparkSession))
        if isinstance(made, Obstacle):
            return made
        before = RowsInRead.of(made, columns, "makes records")
        columns, rows = (
            ReadColumns(tuple(ReadColumn(name, name) for name in made.rows.names), before),
            made.rows,
        )
    is_needed = bool(options.sinks) or options.on_invalid_record != "fail"
    if is_needed and ORIGIN not in rows.names and (columns.before is None or columns.before.is_aligned):
        columns, rows = replace(columns, with_origin=True), StructType([*rows, ORIGIN_FIELD])
    if columns.sets_aside:
        rows = with_column_of_packets(rows)
    step = MapInRead(columns, rows, None, uuid.uuid4().hex, BY_APP)
    own = {f"{SINK_IN_READ}{name}": value for name, value in sink.items()}
    with own_errors():
        return origin.read(step, frame.sparkSession, own)


def _of_sinks(sinks: Mapping[str, Sink], columns: Sequence[str] | None) -> dict[str, str]:
    """Returns the options of sinks, which receive these columns unless they state their own; None = all."""
    if not sinks:
        return {}
    found = sink_options(sinks)
    if columns is not None:
        for name in sinks:
            found.setdefault(f"{PREFIX}{name}.columns", ",".join(columns))
    return found


# ------------------------------------------------------------------ the writer


def writer_of(rows: DataFrame, frame: DataFrame, query: str, sink: Mapping[str, str]) -> DataStreamWriter:
    """Returns the writer of a query. It writes to no other sink, because its frame consists of records.

    Args:
        rows: the frame that the user wrote.
        frame: the records that were made of it.
        query: name of the query.
        sink: options of the sink. The writer refuses other values for them, because they were checked, and
            the tasks that read may stage the records with them.
    """
    stated = {name.lower(): value for name, value in sink.items()}

    def check_option(name: str, value: object) -> None:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        own = stated.get(name.lower(), text)
        if value is not None and own != text:
            raise InvalidOptionError(
                f"option {name!r} is set to {shown(name, text)!r} on the writer of App.write(), which has "
                f"checked the query with {shown(name, own)!r}; expected no other value.",
                fix="give this value to App(…) or App.write(…). For another query of the program, use "
                "app.query(name).",
            )

    refused = refused_elsewhere(rows) or _records_elsewhere
    writer: DataStreamWriter = writer_for_kafka(frame, refused, check_option)
    return writer.format(FORMAT_NAME).queryName(query).options(**sink)


def _records_elsewhere(call: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{call} on the writer of App.write(), whose frame consists of records for Kafka, which the tasks "
        "that read may have staged.",
        fix=f"call {call} on the rows themselves: frame.writeStream.{call}; or name further systems in "
        "sinks= of App.write().",
    )
