"""Arrow batches as a processor takes them: the columns that it reads, in batches that are worth a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError

# #: Rows and bytes that are grouped at once. More rows make fewer passes; fewer keep what waits for a pass
# small.
CHUNK_ROWS = 1 << 19
CHUNK_BYTES = 64 << 20

# #: Rows of an output batch: as many as Spark takes from a Python worker at a time without growing its
# buffers much.
OUTPUT_ROWS = 1 << 16


def chunks(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The columns of ``schema``, in batches of `CHUNK_ROWS` or a little more; never an empty one.

    Raises:
        InvalidSchemaError: a column is missing, or its values do not fit its type.
    """
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = conform(batch, schema)
        waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield whole(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield whole(waiting)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of ``schema`` in its order, cast where their types are others.

    Raises:
        InvalidSchemaError: a column is missing, or its values do not fit its type.
    """
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            raise InvalidSchemaError(
                f"column {field.name!r} is missing from the rows",
                fix=f"they have {', '.join(batch.schema.names)}",
            )
        column = batch.column(at)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidSchemaError(
                    f"column {field.name!r} is {column.type}, expected {field.type}: {error}",
                    fix="declare the columns as the rows have them",
                ) from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def whole(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of several of one schema."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def output(schema: pa.Schema, columns: list[pa.Array]) -> Iterator[pa.RecordBatch]:
    """The columns as batches of rows that Spark takes well; none if there are no rows."""
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for start in range(0, batch.num_rows, OUTPUT_ROWS):
        yield batch.slice(start, OUTPUT_ROWS)
