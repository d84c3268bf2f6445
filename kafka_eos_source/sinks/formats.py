"""Writes Arrow batches as Parquet, JSON lines or CSV, and checks what a format can hold.

pyarrow itself cannot write JSON. The encoder here works column by column. It encodes values as Spark's
``to_json`` does: binary as base64, NaN and infinities as strings, times as ISO 8601. Unlike there, a null
field is written as ``null``.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.sink_options import SinkOption

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
    values.choice("none", "snappy", "zstd", "gzip", "lz4"),
    "snappy",
    "`none`, `snappy`, `zstd`, `gzip`, `lz4`",
    "Compression of Parquet's pages.",
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
        compression: value of the option `COMPRESSION`.
    """
    if kind == "parquet":
        parquet: Writer = pq.ParquetWriter(out, schema, compression=compression)
        return parquet
    if kind == "csv":
        # RFC 4180 with a header; null is an empty field, an empty string is ""
        csv: Writer = pacsv.CSVWriter(out, schema)
        return csv
    return JsonLinesWriter(out)


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


# -- JSON lines ----------------------------------------------------------------------------------

_CONTROL = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_ESCAPED = r'[\x00-\x1f"\\]'


class JsonLinesWriter:
    """Writes batches to one file of JSON lines."""

    def __init__(self, out: pa.NativeFile) -> None:
        self._out = out

    def write_batch(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            ends = pa.array([0, batch.num_rows], pa.int64())
            lines = pa.LargeListArray.from_arrays(ends, encode(batch).cast(pa.large_string()))
            self._out.write(pc.binary_join(lines, pa.scalar("\n", pa.large_string()))[0].as_buffer())
            self._out.write(b"\n")

    def close(self) -> None:
        """Does nothing, because the caller closes the stream."""


def encode(batch: pa.RecordBatch) -> pa.Array:
    """Encodes each row as the text of a JSON object, without a line break."""
    pieces: list[Any] = []
    for number, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        pieces += [f"{'{' if number == 0 else ','}{json.dumps(name, ensure_ascii=False)}:", _values(column)]
    return pc.binary_join_element_wise(*[_large(each) for each in [*pieces, "}", ""]])


def _large(piece: Any) -> Any:
    return pa.scalar(piece, pa.large_string()) if isinstance(piece, str) else piece.cast(pa.large_string())


def _values(column: pa.Array) -> pa.Array:
    return pc.fill_null(texts(column).cast(pa.large_string()), "null")


def texts(column: pa.Array) -> pa.Array:
    """Encodes each value of a column as JSON; nulls stay null."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    if pa.types.is_floating(kind):
        finite = pc.is_finite(column)
        special = pc.if_else(
            pc.is_nan(column), '"NaN"', pc.if_else(pc.less(column, 0), '"-Infinity"', '"Infinity"')
        )
        return pc.if_else(finite, column.cast(pa.string()), special)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _quoted(column.cast(pa.large_string()))
    if pa.types.is_timestamp(kind):
        text = pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
        return _quoted(pc.binary_join_element_wise(text, "Z", "") if kind.tz else text)
    if pa.types.is_date(kind):
        return _quoted(column.cast(pa.string()))
    # pyarrow has no compute function for nested values and bytes, so encode them one by one
    return pa.array([None if each is None else json.dumps(_plain(each)) for each in column.to_pylist()])


def _quoted(text: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(text, _ESCAPED)).as_py():
        text = pc.replace_substring(text, "\\", "\\\\")
        text = pc.replace_substring(text, '"', '\\"')
        if pc.any(pc.match_substring_regex(text, r"[\x00-\x1f]")).as_py():
            for code in range(32):
                text = pc.replace_substring(text, chr(code), _CONTROL.get(code, f"\\u{code:04x}"))
    quote = pa.scalar('"', text.type)
    return pc.binary_join_element_wise(quote, text, quote, pa.scalar("", text.type))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return str(value)
