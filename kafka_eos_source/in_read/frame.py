"""`map_in_read`: a frame in, one whose rows only this package's sink unpacks, out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import ParseException, PySparkTypeError
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.in_read.lineage import lineage
from kafka_eos_source.in_read.mapping import ArrowFunction, MapInRead
from kafka_eos_source.in_read.packed import pack, packed_rows, packed_schema
from kafka_eos_source.spark.pickled import to_option
from kafka_eos_source.spark.worker import task_begins

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def map_in_read(
    frame: DataFrame, function: ArrowFunction | None = None, schema: StructType | str | None = None
) -> DataFrame:
    """Maps a frame's rows in Arrow, and hands them to the sink without making Spark's rows of them.

    Where the frame's columns come straight from this source (chosen, renamed, or ``cast(… as string)``) the
    function runs in the tasks that read Kafka; anywhere else after Spark's own steps, as ``mapInArrow`` does.
    Either way its rows travel in parcels, many in one row of Spark's, which ``format("kafka-eos")`` takes
    apart, with any guarantee, on a stream and in ``foreachBatch``. Spark's ``numInputRows`` counts parcels.

    Args:
        frame: what the function is given; with columns of the source alone, the faster way.
        function: from an iterator of record batches to an iterable of record batches, as that of
            ``DataFrame.mapInArrow``: of one task, in the order of offsets within a partition. It may filter,
            and give more rows than it got. Called again for a task that is repeated, so it must be free of
            side effects. None = rows as they are.
        schema: of what the function gives, as `StructType` or DDL, with the columns that the sink knows
            (``value``, ``key``, ``topic``, …); batches' columns are taken by name. None = that of the frame.

    Returns:
        A frame to be written with ``format("kafka-eos")`` as it is.

    Raises:
        InvalidSchemaError: ``schema`` is none, or is given without a function.
        InvalidOptionError: the function cannot be pickled.
    """
    rows = _rows(frame, function, schema)
    found = lineage(frame, frame.columns)
    if found is None:
        return _after(frame, function, rows)
    pickled = None
    if function is not None:
        fix = "make clients, files and locks inside the function, not outside of it."
        pickled = to_option(function, f"the function of map_in_read, {function!r},", fix=fix)
    step = MapInRead(found.columns, rows, pickled)
    return found.read("map.in.read", step.to_json(), frame.sparkSession)


def _after(frame: DataFrame, function: ArrowFunction | None, rows: StructType) -> DataFrame:
    """The same, by Spark's ``mapInArrow``."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        return pack(batches if function is None else function(batches), rows)

    return frame.mapInArrow(run, packed_schema(rows))


def _rows(frame: DataFrame, function: ArrowFunction | None, schema: StructType | str | None) -> StructType:
    if packed_rows(frame.schema) is not None:
        raise InvalidSchemaError(
            "the frame is one of map_in_read already.", fix="make one function of the two."
        )
    if schema is None:
        return frame.schema
    if function is None:
        raise InvalidSchemaError(
            "map_in_read has a schema and no function that would give rows of it.",
            fix="leave the schema out: rows stay as they are.",
        )
    if isinstance(schema, StructType):
        return schema
    try:
        found = StructType.fromDDL(schema)
        if isinstance(found, StructType):
            return found
        why: Exception | str = "it is one type and has no names"
    except (ParseException, PySparkTypeError, ValueError) as error:
        why = error
    raise InvalidSchemaError(
        f"the schema of map_in_read, {schema!r}, cannot be read: {why}.",
        fix="write it as in DDL, for example 'key BINARY, value STRING'.",
    )
