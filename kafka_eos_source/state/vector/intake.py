"""Converts Arrow batches to the columns and batch sizes that a processor reads and emits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError

#: Rows and bytes that are processed at once. Larger chunks need fewer passes, smaller ones less memory.
CHUNK_ROWS = 1 << 19
CHUNK_BYTES = 64 << 20

#: Largest number of rows in an output batch. Larger batches make Spark grow its buffers.
OUTPUT_ROWS = 1 << 16


def chunks(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, most_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the columns of ``schema`` in batches of about ``most_rows`` rows; never an empty batch.

    Args:
        batches: the rows.
        schema: the columns.
        most_rows: None for `CHUNK_ROWS`.

    Raises:
        InvalidSchemaError: if a column is missing, or a value cannot be cast to the column's type.
    """
    waiting: list[pa.RecordBatch] = []
    most_rows = most_rows or CHUNK_ROWS
    count = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = conform(batch, schema)
        waiting.append(batch)
        count += batch.num_rows
        size += batch.nbytes
        if count >= most_rows or size >= CHUNK_BYTES:
            yield concat_batches(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield concat_batches(waiting)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Selects the columns of ``schema`` in its order and casts them to its types.

    Raises:
        InvalidSchemaError: if a column is missing, or a value cannot be cast to the column's type.
    """
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            raise InvalidSchemaError(
                f"column {field.name!r} is missing from the rows, which have the columns "
                f"{', '.join(batch.schema.names)}.",
                fix="declare the columns that the rows have.",
            )
        column = batch.column(at)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidSchemaError(
                    f"column {field.name!r} has type {column.type}; expected {field.type}: {error}.",
                    fix=f"declare {field.name!r} with the type that the rows have.",
                ) from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenates one or more batches of the same schema into one."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def output_batches(schema: pa.Schema, columns: list[pa.Array]) -> Iterator[pa.RecordBatch]:
    """Yields the columns as batches of at most `OUTPUT_ROWS` rows; nothing if there are no rows."""
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for start in range(0, batch.num_rows, OUTPUT_ROWS):
        yield batch.slice(start, OUTPUT_ROWS)
