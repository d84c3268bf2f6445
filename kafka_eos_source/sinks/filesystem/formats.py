"""Arrow batches into files: Parquet, JSON lines, CSV; and what a format cannot hold."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.filesystem import jsonlines

FORMATS = ("parquet", "json", "csv")
COMPRESSIONS = ("default", "none", "snappy", "zstd", "gzip", "lz4")
ENDINGS = {"parquet": ".parquet", "json": ".jsonl", "csv": ".csv"}


class Writer(Protocol):
    """One file."""

    def write_batch(self, batch: pa.RecordBatch) -> object: ...
    def close(self) -> object: ...


def writer(kind: str, out: pa.NativeFile, schema: pa.Schema, compression: str) -> Writer:
    """A writer of one file into a stream that the caller closes.

    Args:
        kind: one of `FORMATS`.
        out: an open stream.
        schema: of the batches.
        compression: one of `COMPRESSIONS`, of Parquet's pages; ``default`` is snappy.
    """
    if kind == "parquet":
        codec = "snappy" if compression == "default" else compression
        found: Writer = pq.ParquetWriter(out, schema, compression=codec)
        return found
    if kind == "csv":
        return _Csv(out, schema)
    return jsonlines.Writer(out)


class _Csv:
    """RFC 4180 with a header: null is an empty field, an empty string is ``""``."""

    def __init__(self, out: pa.NativeFile, schema: pa.Schema) -> None:
        self._writer = pacsv.CSVWriter(out, schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


def check(kind: str, schema: pa.Schema) -> None:
    """Can a file of this format hold such rows, and be read back?

    Raises:
        InvalidSchemaError: naming the column.
    """
    for field in schema:
        wrong = (
            kind == "csv" and (pa.types.is_nested(field.type) or pa.types.is_binary(field.type))
        ) or pa.types.is_null(field.type)
        if wrong:
            raise InvalidSchemaError(
                f"column {field.name!r} has type {field.type}, which a {kind} file does not hold.",
                fix="cast it (a struct with to_json), leave it out with sink.<name>.columns, or use "
                "format=parquet.",
            )
    if len(set(schema.names)) < len(schema.names):
        raise InvalidSchemaError(f"two columns have one name: {', '.join(schema.names)}.", fix="rename one.")
