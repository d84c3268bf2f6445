"""Writers of Arrow batches as Parquet, JSON lines or CSV, and the check of what a format can hold."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.filesystem import jsonlines
from kafka_eos_source.sinks.specs import SinkOption

ENDINGS = {"parquet": ".parquet", "json": ".jsonl", "csv": ".csv"}
#: Options of every sink that writes files.
FORMAT = SinkOption(
    "format",
    values.choice("parquet", "json", "csv"),
    "parquet",
    "`parquet`, `json`, `csv`",
    "Format of the files. `json` writes one JSON object per line.",
)
COMPRESSION = SinkOption(
    "compression",
    values.choice("default", "none", "snappy", "zstd", "gzip", "lz4"),
    "default",
    "`none`, `snappy`, `zstd`, `gzip`, `lz4`",
    "Compression of Parquet's pages.",
    "snappy",
)


class Writer(Protocol):
    """Writer of one file."""

    def write_batch(self, batch: pa.RecordBatch) -> object: ...
    def close(self) -> object: ...


def writer(kind: str, out: pa.NativeFile, schema: pa.Schema, compression: str) -> Writer:
    """Returns a writer of one file.

    Args:
        kind: value of the option `FORMAT`.
        out: open stream, which the caller closes.
        schema: schema of the batches.
        compression: value of the option `COMPRESSION`; ``default`` means snappy.
    """
    if kind == "parquet":
        codec = "snappy" if compression == "default" else compression
        parquet: Writer = pq.ParquetWriter(out, schema, compression=codec)
        return parquet
    if kind == "csv":
        # RFC 4180 with a header; null is an empty field, an empty string is ""
        csv: Writer = pacsv.CSVWriter(out, schema)
        return csv
    return jsonlines.JsonLinesWriter(out)


def check(kind: str, schema: pa.Schema) -> None:
    """Checks that a file of this format can hold rows of this schema and be read back.

    Raises:
        InvalidSchemaError: if it cannot; the message names the column.
    """
    for field in schema:
        unsupported = (
            kind == "csv" and (pa.types.is_nested(field.type) or pa.types.is_binary(field.type))
        ) or pa.types.is_null(field.type)
        if unsupported:
            raise InvalidSchemaError(
                f"column {field.name!r} has type {field.type}, which a {kind} file cannot hold.",
                fix="cast the column (a struct with to_json), exclude it with sink.<name>.columns, or use "
                "format=parquet.",
            )
    if len(set(schema.names)) < len(schema.names):
        raise InvalidSchemaError(
            f"two columns have the same name: {', '.join(schema.names)}.", fix="rename one of them."
        )
