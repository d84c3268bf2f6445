"""`map_in_read`: applies a function to Arrow batches inside the read tasks.

A step can run there only if all columns of the frame come directly from this source. To find that out, this
module reads Spark's analysed plan through the JVM. The plan must consist of the source and of projections
that select columns, rename them, or apply ``cast(… as string)`` to bytes. With any other or unknown plan, the
step runs after the read, as with any other source.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import ParseException, PySparkTypeError
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.registry_columns import registry_columns
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.staged import staged_frame
from kafka_eos_source.in_read.step import (
    ArrowFunction,
    MapInRead,
    ReadColumn,
    ReadColumns,
    StepInRead,
    pack,
    packed_frame_schema,
    schema_of_packed_rows,
)
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.parse import parse_sink_in_read
from kafka_eos_source.options.table import SINK_IN_READ, STEP_IN_READ
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.changelog_check import connect_relations, elements, node_kind
from kafka_eos_source.spark.operator_frame import past_packets, spark_frame
from kafka_eos_source.spark.pickled import from_option, to_bytes
from kafka_eos_source.spark.session import warn_of_large_batches
from kafka_eos_source.spark.worker import task_begins

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def map_in_read(
    frame: DataFrame,
    function: ArrowFunction | None = None,
    schema: StructType | str | None = None,
    *,
    decode: Mapping[str, RegistrySchema] | None = None,
    encode: Mapping[str, RegistrySchema] | None = None,
    write: Mapping[str, Any] | None = None,
) -> DataFrame:
    """Maps the rows of a frame as Arrow batches that go to the sink without being converted to Spark rows.

    If all columns of the frame come directly from this source (selected, renamed, or ``cast(… as string)``),
    the function runs in the tasks that read Kafka. Otherwise it runs after Spark's steps, like
    ``mapInArrow``. In both cases its rows travel in packed batches: one Spark row carries many of them. The
    sink ``format("kafka-eos")`` unpacks them, with any guarantee, in a stream and in ``foreachBatch``.
    Spark's ``numInputRows`` counts packed batches.

    With ``write``, the tasks that read also stage the rows for the sink's transaction, and only a short
    report of each task passes through Spark. That is the fastest way from topic to topic::

        sink = {"kafka.bootstrap.servers": …, "topic": …, "checkpointLocation": …}
        staged = map_in_read(frame, function, schema, write=sink)
        staged.writeStream.format("kafka-eos").options(**sink).start()

    Spark's ``numInputRows`` then counts reports.

    Args:
        frame: input of the function. It is faster if the frame has only columns of the source.
        function: takes an iterator of record batches and returns an iterable of record batches, like the
            function of ``DataFrame.mapInArrow``. It gets the batches of one task, in the order of offsets
            within each partition. It may drop and add rows. Spark calls it again when it repeats a task, so
            it must not have side effects. None leaves the rows unchanged.
        schema: schema of the batches that the function returns, as `StructType` or DDL, with columns that the
            sink accepts (``value``, ``key``, ``topic``, …). Columns are matched by name. None means the
            frame's schema.
        decode: columns to decode with a schema registry before the function, and what `registry_schema`
            returned for them. Rows that cannot be decoded do not reach the function. The sink gets them
            unchanged and marked as invalid, so that its option ``onInvalidRecord`` decides what becomes of
            them. The frame should have the columns ``topic``, ``partition`` and ``offset``, to name the
            record.
        encode: columns to encode after the function. Rows that do not fit the schema are marked as invalid.
            ``schema`` declares these columns as binary.
        write: options of the sink, the same that ``writeStream.options(…)`` gets. The frame can then be
            written only by that ``writeStream.format("kafka-eos")``, exactly once. It has no effect if the
            function cannot run in the tasks that read.

    Returns:
        A frame that must be written with ``format("kafka-eos")`` without changes.

    Raises:
        InvalidSchemaError: if ``schema`` is malformed, or given without a function, or ``decode`` or
            ``encode`` names a column that does not consist of bytes.
        InvalidOptionError: if the function cannot be pickled, or ``write`` is not the options of a sink that
            writes exactly once.
    """
    frame = spark_frame(frame)
    columns = StructType([each for each in frame.schema if each.name != CHANGELOG])
    rows = _schema_of_result(columns, function, schema)
    sink = {} if write is None else _options_of_source(frame, write)
    if decode or encode:
        function = registry_columns(function, decode or {}, encode or {}, columns, rows)
        rows = function.marked
    origin = lineage(frame, frame.columns)
    if origin is None or write is None:
        warn_of_large_batches(frame.sparkSession, "map_in_read without write= in the read")
    if origin is None:
        return _map_after_read(frame, function, rows)
    pickled = None
    if function is not None:
        fix = "create clients, files and locks inside the function, not outside of it."
        pickled = to_bytes(function, f"the function of map_in_read, {function!r},", fix=fix)
    step = MapInRead(origin.columns, rows, pickled, uuid.uuid4().hex)
    return origin.read(step, frame.sparkSession, sink)


def _options_of_source(frame: DataFrame, write: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of the sink as options of the source, after checking them.

    Raises:
        InvalidOptionError: if one of them is wrong, or the frame is not a stream.
    """
    if not frame.isStreaming:
        raise InvalidOptionError(
            "map_in_read has the argument write=, but the frame is a batch read; expected a stream, because "
            "the rows are staged for a micro-batch.",
            fix="leave out write=, or read with spark.readStream.",
        )
    for name, value in write.items():
        if value is None:
            raise InvalidOptionError(
                f"write= of map_in_read: option {name!r} is None; expected text.", fix="leave it out."
            )
    # booleans in lower case, as Spark's options() has them
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in write.items()
    }
    try:
        parse_sink_in_read(texts)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"write= of map_in_read: {error.message}", fix=error.fix) from error
    return {f"{SINK_IN_READ}{name}": text for name, text in texts.items()}


def _map_after_read(frame: DataFrame, function: ArrowFunction | None, rows: StructType) -> DataFrame:
    """Returns the frame mapped and packed by Spark's ``mapInArrow``; state changes pass the function."""
    if CHANGELOG in frame.columns and CHANGELOG not in rows.names:
        function = past_packets(function or _unchanged, arrow_schema(rows))
        rows = StructType([*rows.fields, StructField(CHANGELOG, BinaryType())])

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        return pack(batches if function is None else function(batches), rows)

    return frame.mapInArrow(run, packed_frame_schema(rows))


def _unchanged(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    return batches


def _schema_of_result(
    columns: StructType, function: ArrowFunction | None, schema: StructType | str | None
) -> StructType:
    if schema_of_packed_rows(columns) is not None or staged_frame(columns) is not None:
        raise InvalidSchemaError(
            "map_in_read is applied to a frame that map_in_read returned; expected a frame with plain rows.",
            fix="combine the two functions into one.",
        )
    if schema is None:
        return columns
    if function is None:
        raise InvalidSchemaError(
            "map_in_read has a schema but no function that returns rows of this schema.",
            fix="leave out the schema if the rows stay unchanged, or pass a function.",
        )
    if isinstance(schema, StructType):
        return schema
    try:
        parsed = StructType.fromDDL(schema)
        if isinstance(parsed, StructType):
            return parsed
        reason: Exception | str = "it is a single type without column names"
    except (ParseException, PySparkTypeError, ValueError) as error:
        reason = error
    raise InvalidSchemaError(
        f"the schema {schema!r} of map_in_read is malformed: {reason}.",
        fix="write it in DDL, for example 'key BINARY, value STRING'.",
    )


# ------------------------------------------------------------------ lineage

#: Number of fields of a ``StreamingRelationV2`` in Spark versions that have named sources.
_NAMED = 9


@dataclass(frozen=True)
class Lineage:
    """The source that the columns of a frame come from.

    Attributes:
        options: options of the source.
        name: name of the source from ``readStream.name(…)``; None if it has none.
        columns: the columns of the frame.
    """

    options: dict[str, str]
    name: str | None
    columns: ReadColumns

    def read(
        self, step: StepInRead, session: SparkSession, more: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Returns a frame that reads the source with a step that its tasks apply before Spark sees a row.

        Args:
            step: the step.
            session: session of the frame.
            more: further options of the source.
        """
        reader: Any = session.readStream.format(FORMAT_NAME).options(**self.options)
        if self.name is not None:
            reader = reader.name(self.name)
        frame: DataFrame = reader.option(STEP_IN_READ, step.to_option()).options(**(more or {})).load()
        return frame


def lineage(frame: DataFrame, names: Sequence[str]) -> Lineage | None:
    """Returns the lineage of columns of a frame; None if they do not all come directly from this source.

    With Spark Connect it is always None, because the client cannot read the plan.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        return None
    return _of_plan(jdf.queryExecution().analyzed(), names)


def source_options(frame: DataFrame) -> list[dict[str, str]]:
    """Returns the options of each source of this package that a frame reads, with names in lower case.

    Spark Connect does not show the sources of a view or of SQL text.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        plan: Any = getattr(frame, "_plan", None)
        return [] if plan is None else list(_connect_sources(plan.to_proto(frame.sparkSession.client).root))
    leaves = elements(jdf.queryExecution().analyzed().collectLeaves())
    return [
        {str(name).lower(): str(value) for name, value in leaf.extraOptions().asCaseSensitiveMap().items()}
        for leaf in leaves
        if node_kind(leaf) == "StreamingRelationV2" and str(leaf.sourceName()) == FORMAT_NAME
    ]


def is_of_source(frame: DataFrame, name: str) -> bool:
    """Returns whether a column of a frame is one of a source of this package that no step has computed anew.

    With Spark Connect it is always False, because the client cannot read the plan.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        return False
    plan = jdf.queryExecution().analyzed()
    of_sources = set()
    for leaf in elements(plan.collectLeaves()):
        if node_kind(leaf) == "StreamingRelationV2" and str(leaf.sourceName()) == FORMAT_NAME:
            outputs = {each.name(): each.exprId().id() for each in elements(leaf.output())}
            source = _of_source(leaf, list(outputs))
            of_sources |= {
                id_
                for column, id_ in outputs.items()
                if source is None or source.columns.column_of_source(column) == column
            }
    return any(each.name() == name and each.exprId().id() in of_sources for each in elements(plan.output()))


def _connect_sources(relation: Any) -> Iterator[dict[str, str]]:
    """Yields the options of the streams of this package below a relation of Spark Connect's protocol."""
    kind = str(relation.WhichOneof("rel_type"))
    if kind == "read" and relation.read.is_streaming and relation.read.data_source.format == FORMAT_NAME:
        options = relation.read.data_source.options
        yield {str(name).lower(): str(value) for name, value in options.items()}
    for below in connect_relations(getattr(relation, kind)):
        yield from _connect_sources(below)


#: Spark's steps that use a watermark below them: classes of plans of classic sessions and of Spark Connect.
_STATEFUL = frozenset(
    {
        *("Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark"),
        *("Join", "AsOfJoin", "LateralJoin"),
        *("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState", "ApplyInPandasWithState"),
        *("TransformWithState", "TransformWithStateInPandas", "TransformWithStateInPySpark"),
    }
)


def unused_watermark(frame: DataFrame) -> tuple[str, str] | None:
    """Returns the column and the delay of a ``withWatermark`` that no step of Spark below the frame uses.

    Spark Connect does not show the plan of a view or of SQL text, so it finds none in them.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is not None:
        return _unused_in_plan(jdf.queryExecution().analyzed())
    plan: Any = getattr(frame, "_plan", None)
    return None if plan is None else _unused_in_connect(plan)


def _unused_in_plan(plan: Any) -> tuple[str, str] | None:
    kind = node_kind(plan)
    if kind in _STATEFUL:
        return None
    if kind == "EventTimeWatermark":
        return str(plan.eventTime().name()), str(plan.delay().toString())
    found = map(_unused_in_plan, elements(plan.children()))
    return next((each for each in found if each is not None), None)


def _unused_in_connect(plan: Any) -> tuple[str, str] | None:
    kind = type(plan).__name__
    if kind in _STATEFUL:
        return None
    if kind == "WithWatermark":
        return str(plan._event_time), str(plan._delay_threshold)
    below = [plan._child, *(getattr(plan, name, None) for name in ("left", "right", "other"))]
    found = (_unused_in_connect(each) for each in below if each is not None)
    return next((each for each in found if each is not None), None)


def _of_plan(plan: Any, names: Sequence[str]) -> Lineage | None:
    kind = node_kind(plan)
    if kind == "SubqueryAlias":
        return _of_plan(plan.child(), names)
    if kind == "StreamingRelationV2":
        return _of_source(plan, names)
    if kind != "Project":
        return None
    projection = list(elements(plan.projectList()))
    projected = {each.name(): each for each in projection}
    if len(projected) < len(projection):
        return None  # two columns have the same name
    found = [_column(projected.get(name)) for name in names]
    wanted = [each.source for each in found if each is not None]
    beneath = _of_plan(plan.child(), list(dict.fromkeys(wanted))) if len(wanted) == len(names) else None
    if beneath is None:
        return None
    known = {each.name: each for each in beneath.columns.columns}
    columns = []
    for own in found:
        assert own is not None
        below = known[own.source]
        if own.as_text and not below.as_text and not _is_bytes(beneath.columns, below.source):
            return None  # only Spark converts numbers to text
        columns.append(replace(below, name=own.name, as_text=own.as_text or below.as_text))
    return replace(beneath, columns=replace(beneath.columns, columns=tuple(columns)))


def _of_source(plan: Any, names: Sequence[str]) -> Lineage | None:
    options = {str(name): str(value) for name, value in plan.extraOptions().asCaseSensitiveMap().items()}
    known = {each.name() for each in elements(plan.output())}
    if str(plan.sourceName()) != FORMAT_NAME or not known.issuperset(names):
        return None
    return _of_options(options, _name(plan), names)


def _of_options(options: dict[str, str], name: str | None, columns: Sequence[str]) -> Lineage | None:
    """Returns the lineage of columns of a source with these options; None if a step of Spark made its rows.

    The rows of a `RowsInRead` are columns as those of the source itself. Rows of other steps in the read are
    not: they are packed, or carry state changes.
    """
    before = None
    carried = [each for each in options if each.lower() == STEP_IN_READ]
    if carried:
        before = from_option(options[carried[0]])
        if not isinstance(before, RowsInRead):
            return None
        options = {each: value for each, value in options.items() if each not in carried}
    return Lineage(options, name, ReadColumns(tuple(ReadColumn(each, each) for each in columns), before))


def _column(expression: Any) -> ReadColumn | None:
    """Returns the column that an expression of a projection selects; None for any other expression."""
    if expression is None:
        return None
    if node_kind(expression) == "AttributeReference":
        return ReadColumn(expression.name(), expression.name())
    if node_kind(expression) != "Alias":
        return None
    child = expression.child()
    if node_kind(child) == "AttributeReference":
        return ReadColumn(expression.name(), child.name())
    if node_kind(child) != "Cast" or node_kind(child.child()) != "AttributeReference":
        return None
    if child.dataType().catalogString() != "string":
        return None
    return ReadColumn(expression.name(), child.child().name(), as_text=True)


def _is_bytes(columns: ReadColumns, source: str) -> bool:
    return bool(pa.types.is_binary(columns.given.field(source).type))


def _name(plan: Any) -> str | None:
    """Returns the name that the user gave the source; None if it has none or Spark has no such names."""
    if plan.productArity() < _NAMED:
        return None
    found = plan.sourceIdentifyingName()
    return str(found.name()) if node_kind(found) == "UserProvided" else None
