"""`App.sql`: a SQL text over one stream and static tables, in the read if possible, else after Spark's steps.

Both ways run the same engine (`in_read.sql`), so a text has one dialect and one result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from kafka_eos_source.datasource.checks_on_server import own_errors
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.lineage import Lineage, source_options, trace
from kafka_eos_source.in_read.rows import MappedRows, RowsInRead
from kafka_eos_source.in_read.staged import staged_frame
from kafka_eos_source.in_read.step import schema_of_packed_rows
from kafka_eos_source.option_values import integer
from kafka_eos_source.options.table import LEAST_SQL_MEMORY_BYTES, SQL_MEMORY, SQL_MEMORY_BYTES
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.session import time_zone
from kafka_eos_source.spark.worker import task_begins

#: What the tasks do, for people.
RUNS_SQL = "runs SQL"

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")


def sql_frame(text: str, frames: Mapping[str, Any]) -> tuple[DataFrame, Mapping[str, str]]:
    """Returns the result of a SQL text as a stream, and a digest of each static table.

    Args:
        text: the text; ``{name}`` stands for a frame.
        frames: the frames by name: one stream, and static tables (batch frames, pandas, PyArrow).

    Raises:
        InvalidOptionError: if the text names a frame that is not given, or the other way round, or not
            exactly one of the frames is a stream, or a table has another type.
        KafkaEosError: as `in_read.sql.compile_sql`.
    """
    from kafka_eos_source.in_read.sql import compile_sql  # imports the engine

    stream, frame = _stream(text, frames)
    tables = {name: _table(name, each) for name, each in frames.items() if name != stream}
    written = _NAME.sub(lambda match: f'"{match[1]}"', text)
    columns = StructType([each for each in frame.schema if each.name != CHANGELOG])
    if schema_of_packed_rows(columns) is not None or staged_frame(columns) is not None:
        raise InvalidSchemaError(
            f"{{{stream}}} is a frame of map_in_read, whose rows only the sink reads; expected plain rows.",
            fix="use app.sql() before map_in_read, or pass the text to map_in_read instead of a function.",
        )
    zone = time_zone(frame.sparkSession)
    parse = integer(LEAST_SQL_MEMORY_BYTES)
    memory = [parse(SQL_MEMORY, each[SQL_MEMORY]) for each in source_options(frame) if SQL_MEMORY in each]
    transform = compile_sql(
        written,
        columns,
        name=stream,
        tables=tables,
        time_zone=zone,
        memory_bytes=max(memory, default=SQL_MEMORY_BYTES),
    )
    origin = trace(frame, frame.columns)
    if isinstance(origin, Lineage):
        step = RowsInRead.of(transform, origin.columns, RUNS_SQL, transform.copies)
        with own_errors():
            return origin.read(step, frame.sparkSession), transform.table_digests
    function = MappedRows(transform, columns)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        return function(batches)

    return frame.mapInArrow(run, transform.rows), transform.table_digests


def _stream(text: str, frames: Mapping[str, Any]) -> tuple[str, DataFrame]:
    """Returns the name of the only stream, and the stream, after checking the names."""
    named = set(_NAME.findall(text))
    listed = ", ".join(map(repr, frames)) or "none"
    missing = sorted(named - set(frames))
    if missing:
        raise InvalidOptionError(
            f"the SQL text names {{{missing[0]}}}, but there is no argument {missing[0]!r}; given: {listed}.",
            fix=f"pass it: app.sql(…, {missing[0]}=…).",
        )
    unused = sorted(set(frames) - named)
    if unused:
        raise InvalidOptionError(
            f"the argument {unused[0]!r} of app.sql is not in the text; expected {{{unused[0]}}} there.",
            fix=f"write FROM {{{unused[0]}}} or JOIN {{{unused[0]}}}, or leave the argument out.",
        )
    streams = {
        name: each for name, each in frames.items() if isinstance(each, DataFrame) and each.isStreaming
    }
    if len(streams) != 1:
        given = f"{len(streams)} streams ({', '.join(streams)})" if streams else "no stream"
        raise InvalidOptionError(
            f"app.sql got {given} among its arguments ({listed}); expected exactly one, and static tables.",
            fix="join streams with Spark's join() before app.sql(), or by key in a stateful operator."
            if streams
            else "read the stream with app.read(…), and name it in the text: FROM {flights}.",
        )
    return next(iter(streams.items()))


def _table(name: str, table: Any) -> pa.Table:
    """Returns a static table."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, DataFrame):
        return table.toArrow()
    if type(table).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(table, preserve_index=False)
    raise InvalidOptionError(
        f"the argument {name!r} of app.sql is a {type(table).__name__}; expected a frame of Spark or pandas, "
        "or a pyarrow.Table.",
        fix="make a pyarrow.Table of it.",
    )
