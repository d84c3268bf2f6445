"""`map_in_read`: applies a function to batches, inside the read tasks if `in_read.lineage` allows it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import ParseException, PySparkTypeError
from pyspark.sql.types import StructType

from kafka_eos_source.documents.decode import JsonDecoding
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.bad_records import NULL, OnBad, check_on_bad
from kafka_eos_source.in_read.converted_columns import HIDDEN_HEADERS, converted_columns, with_decoded
from kafka_eos_source.in_read.decode import ColumnDecoder
from kafka_eos_source.in_read.lineage import Lineage, lineage
from kafka_eos_source.in_read.rows import MappedRows
from kafka_eos_source.in_read.staged import staged_frame
from kafka_eos_source.in_read.step import (
    ArrowFunction,
    MapInRead,
    ReadColumn,
    ReadColumns,
    pack,
    packed_frame_schema,
    schema_of_packed_rows,
    with_column_of_packets,
)
from kafka_eos_source.option_values import option_text
from kafka_eos_source.options.parse import parse_sink_in_read
from kafka_eos_source.options.table import SINK_IN_READ
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.spark.arrow import arrow_schema, past_packets
from kafka_eos_source.spark.operator_frame import spark_frame
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.spark.schema import HEADERS, HEADERS_TYPE, KEY
from kafka_eos_source.spark.session import time_zone, warn_of_large_batches
from kafka_eos_source.spark.worker import task_begins

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Name of the table that a SQL text of `map_in_read` reads.
TABLE = "batch"


def map_in_read(
    frame: DataFrame,
    function: ArrowFunction | str | None = None,
    schema: StructType | str | None = None,
    *,
    decode: Mapping[str, RegistrySchema | StructType | str] | None = None,
    encode: Mapping[str, RegistrySchema] | None = None,
    on_bad: OnBad = "dead-letter",
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
            it must not have side effects. None leaves the rows unchanged. Instead of a function, it may be a
            SQL text that reads the table ``batch``: ``"SELECT key, value FROM batch WHERE …"``; see
            `App.sql`.
        schema: schema of the batches that the function returns, as `StructType` or DDL, with columns that the
            sink accepts (``value``, ``key``, ``topic``, …). Columns are matched by name. None means the
            frame's schema.
        decode: columns to decode before the function, and how: what `registry_schema` returned for them, or,
            for JSON objects, the schema of their fields as `StructType` or DDL. They become structs. The
            frame should have the columns ``topic``, ``partition`` and ``offset``, to name bad records.
        encode: columns to encode after the function. Rows that do not fit the schema are marked as invalid.
            ``schema`` declares these columns as binary.
        on_bad: what becomes of a row that cannot be decoded. ``"dead-letter"`` passes it around the function
            to the sink, unchanged and marked as invalid, so that its option ``onInvalidRecord`` decides,
            which by default fails the batch. ``"fail"`` fails the task; ``"null"`` passes nulls to the
            function in the place of what does not fit.
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
    _check_plain(columns)
    zone = time_zone(frame.sparkSession)
    check_on_bad(on_bad)
    origin = lineage(frame, frame.columns)
    key = KEY if origin is None else _of_keys(origin.columns)
    decoders = {name: _decoder(name, each, zone, on_bad, key) for name, each in (decode or {}).items()}
    if isinstance(function, str):
        function, rows = _of_text(function, schema, with_decoded(columns, decoders), zone)
    else:
        rows = _schema_of_result(columns, function, schema)
    sink = {} if write is None else _options_of_source(frame, write)
    if decode or encode:
        headers: str | None = None
        if any(each.takes_headers for each in decoders.values()):
            headers, origin = _headers(columns, origin)
        function = converted_columns(function, decoders, encode or {}, columns, rows, on_bad, headers)
        rows = function.marked
    if origin is None or write is None:
        warn_of_large_batches(frame.sparkSession, "map_in_read without write= in the read")
    if origin is None:
        return _map_after_read(frame, function, rows)
    pickled = None
    if function is not None:
        fix = "create clients, files and locks inside the function, not outside of it."
        pickled = to_bytes(function, f"the function of map_in_read, {function!r},", fix=fix)
    if origin.columns.sets_aside:
        rows = with_column_of_packets(rows)
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
    texts = {name: option_text(value) for name, value in write.items()}
    try:
        parse_sink_in_read(texts)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"write= of map_in_read: {error.message}", fix=error.fix) from error
    return {f"{SINK_IN_READ}{name}": text for name, text in texts.items()}


def _map_after_read(frame: DataFrame, function: ArrowFunction | None, rows: StructType) -> DataFrame:
    """Returns the frame mapped and packed by Spark's ``mapInArrow``; state changes pass the function."""
    if CHANGELOG in frame.columns and CHANGELOG not in rows.names:
        function = past_packets(function or _unchanged, arrow_schema(rows))
        rows = StructType([*rows.fields, frame.schema[CHANGELOG]])

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        return pack(batches if function is None else function(batches), rows)

    return frame.mapInArrow(run, packed_frame_schema(rows))


def _unchanged(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    return batches


def _check_plain(columns: StructType) -> None:
    if schema_of_packed_rows(columns) is not None or staged_frame(columns) is not None:
        raise InvalidSchemaError(
            "map_in_read is applied to a frame that map_in_read returned; expected a frame with plain rows.",
            fix="combine the two functions into one.",
        )


def _headers(columns: StructType, origin: Lineage | None) -> tuple[str | None, Lineage | None]:
    """Returns the column with the headers of the records, and the lineage of a frame that has it.

    Args:
        columns: schema of the frame.
        origin: lineage of the frame.
    """
    of_type = columns[HEADERS].dataType.simpleString() if HEADERS in columns.names else ""
    if of_type == HEADERS_TYPE.simpleString():
        return HEADERS, origin
    if origin is None or origin.columns.before is not None:
        return None, origin
    hidden = (*origin.columns.columns, ReadColumn(HIDDEN_HEADERS, HEADERS))
    return HIDDEN_HEADERS, replace(origin, columns=replace(origin.columns, columns=hidden))


def _of_keys(columns: ReadColumns) -> str | None:
    """Returns the column that holds the keys of the records; None if no column does."""
    return next((each.name for each in columns.columns if columns.column_of_source(each.name) == KEY), None)


def _decoder(
    column: str, how: RegistrySchema | StructType | str, zone: str, on_bad: OnBad, key: str | None
) -> ColumnDecoder:
    """Returns what decodes a column that ``decode`` names; ``key`` is the column of the keys."""
    if isinstance(how, RegistrySchema):
        return how.decoding(is_key=column == key)
    schema = _struct(how, f"of column {column!r} in decode= of map_in_read")
    return JsonDecoding(schema, zone, partial=on_bad == NULL)


def _of_text(
    text: str, schema: StructType | str | None, columns: StructType, zone: str
) -> tuple[ArrowFunction, StructType]:
    """Returns the function that runs a SQL text, and the schema of its result."""
    from kafka_eos_source.in_read.sql import compile_sql  # imports the engine

    if schema is not None:
        raise InvalidSchemaError(
            "map_in_read has a SQL text and a schema; the text already says which columns its result has.",
            fix="leave out the schema, and cast columns in the text: CAST(x AS INTEGER) AS x.",
        )
    transform = compile_sql(text, columns, name=TABLE, time_zone=zone)
    return MappedRows(transform, columns), transform.rows


def _schema_of_result(
    columns: StructType, function: ArrowFunction | None, schema: StructType | str | None
) -> StructType:
    if schema is None:
        return columns
    if function is None:
        raise InvalidSchemaError(
            "map_in_read has a schema but no function that returns rows of this schema.",
            fix="leave out the schema if the rows stay unchanged, or pass a function.",
        )
    return _struct(schema, "of map_in_read")


def _struct(schema: StructType | str, what: str) -> StructType:
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
        f"the schema {schema!r} {what} is malformed: {reason}.",
        fix="write it in DDL, for example 'key BINARY, value STRING'.",
    )
