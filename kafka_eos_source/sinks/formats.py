"""Writes Arrow batches as Parquet, JSON lines or CSV, and checks what a format can hold.

pyarrow itself cannot write JSON. The encoder here works column by column, also inside structs, lists and
maps. It encodes values as Spark's ``to_json`` does: maps as objects, binary as base64, NaN and infinities as
strings, times as ISO 8601. Unlike there, a null field is written as ``null``.
"""

from __future__ import annotations

import base64
import decimal
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks.contract import StageContext
from kafka_eos_source.sinks.row_checks import NotNull, RowRule
from kafka_eos_source.sinks.sink_options import SinkOption
from kafka_eos_source.sinks.table_columns import (
    conform,
    has_null_type,
    items_of,
    optional,
    utf8_rules,
    year_rules,
)

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
        return _ParquetWriter(out, schema, compression)
    if kind == "csv":
        # RFC 4180 with a header; null is an empty field, an empty string is ""
        csv: Writer = pacsv.CSVWriter(out, schema)
        return csv
    return JsonLinesWriter(out)


class _ParquetWriter:
    """Writes batches to a Parquet file whose nested fields may all be null.

    Arrow's writer refuses a null in a required field of a struct even where the whole struct is null.
    """

    def __init__(self, out: pa.NativeFile, schema: pa.Schema, compression: str) -> None:
        self._schema = pa.schema([field.with_type(optional(field.type)) for field in schema])
        self._is_same = self._schema.equals(schema)
        self._writer = pq.ParquetWriter(out, self._schema, compression=compression)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        if self._is_same:
            self._writer.write_batch(batch)
        else:
            self._writer.write_table(conform(pa.Table.from_batches([batch]), self._schema))

    def close(self) -> None:
        self._writer.close()


def check(kind: str, schema: pa.Schema) -> None:
    """Checks that a file of this format can hold rows of this schema and be read back.

    Raises:
        InvalidSchemaError: if it cannot; the message names the column.
    """
    for field in schema:
        if has_null_type(field.type) or not _is_writable(kind, field):
            raise InvalidSchemaError(
                f"column {field.name!r} has type {field.type}, which a {kind} file cannot hold.",
                fix="cast the column (a struct with to_json), exclude it with sink.<name>.columns, or use "
                "format=parquet.",
            )
    if len(set(schema.names)) < len(schema.names):
        raise InvalidSchemaError(
            f"two columns have the same name: {', '.join(schema.names)}.", fix="rename one of them."
        )


def row_rules(kind: str, schema: pa.Schema) -> list[RowRule]:
    """Returns the rules for rows of files of this format.

    Parquet's texts, and files of the other formats, must be UTF-8; readers refuse the whole file otherwise.
    """
    label = f"a {kind} file"
    if kind == "parquet":
        return utf8_rules(schema, label)
    found = [*utf8_rules(schema, label), *year_rules(schema, label)]
    if kind == "csv" and len(schema) == 1:
        of = "the only column of a csv file, whose readers pass over empty lines"
        found.append(NotNull(column=schema.names[0], of=of))
    return found


def unchecked_rules(kind: str, context: StageContext) -> list[RowRule]:
    """Returns the rules for rows that a task has not checked."""
    return [each for each in row_rules(kind, context.schema) if each not in context.checked]


def _is_writable(kind: str, field: pa.Field) -> bool:
    """Returns whether a file of this format can hold a column, by writing a row to memory."""
    if kind == "csv" and (pa.types.is_nested(field.type) or pa.types.is_binary(field.type)):
        return False
    schema = pa.schema([field])
    try:
        with pa.BufferOutputStream() as out:
            trial = writer(kind, out, schema, "none")
            trial.write_batch(pa.record_batch([pa.nulls(1, field.type)], schema=schema))
            trial.close()
    except (pa.ArrowException, TypeError):
        return False
    return True


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
    return _objects(batch.schema.names, batch.columns, batch.num_rows)


def _objects(names: Sequence[str], columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """Returns the texts of objects with these members."""
    if not columns:
        return pa.array(["{}"] * rows, pa.large_string())
    pieces: list[Any] = []
    for number, (name, column) in enumerate(zip(names, columns, strict=True)):
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
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):  # Arrow cannot encode base64
        encoded = (None if each is None else base64.b64encode(each).decode() for each in column.to_pylist())
        return _quoted(pa.array(encoded, pa.large_string()))
    if pa.types.is_struct(kind):
        members = _objects([field.name for field in kind], column.flatten(), len(column))
        return _where_valid(column, members)
    if pa.types.is_list(kind):
        offsets, (items,) = items_of(column)
        return _where_valid(column, _joined("[", offsets, _values(items), "]"))
    if pa.types.is_map(kind):
        offsets, (keys, items) = items_of(column)
        entries = pc.binary_join_element_wise(_names(keys), _large(":"), _values(items), _large(""))
        return _where_valid(column, _joined("{", offsets, entries, "}"))
    raise TypeError(f"JSON cannot hold values of the type {kind}")


def _where_valid(column: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, texts.type))


def _joined(begin: str, offsets: pa.Array, items: pa.Array, end: str) -> pa.Array:
    """Returns the texts of lists: their items, with commas between them."""
    lists = pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), items)
    inner = pc.binary_join(lists, _large(","))
    return pc.binary_join_element_wise(_large(begin), inner, _large(end), _large(""))


def _names(keys: pa.Array) -> pa.Array:
    """Returns the keys of a map as names of an object."""
    found = texts(keys).cast(pa.large_string())
    if pa.types.is_nested(keys.type):
        return _quoted(found)
    quote = pc.if_else(pc.starts_with(found, '"'), "", '"').cast(pa.large_string())
    return pc.binary_join_element_wise(quote, found, quote, _large(""))


def _quoted(text: pa.Array) -> pa.Array:
    text = text.cast(pa.large_string())
    if pc.any(pc.match_substring_regex(text, _ESCAPED)).as_py():
        text = pc.replace_substring(text, "\\", "\\\\")
        text = pc.replace_substring(text, '"', '\\"')
        if pc.any(pc.match_substring_regex(text, r"[\x00-\x1f]")).as_py():
            for code in range(32):
                text = pc.replace_substring(text, chr(code), _CONTROL.get(code, f"\\u{code:04x}"))
    return pc.binary_join_element_wise(_large('"'), text, _large('"'), _large(""))


# -- rows that nothing else accepts ----------------------------------------------------------------


def rows_as_json(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Encodes each row as a JSON object, whatever bytes and values it contains.

    `encode` is for rows that a file can hold, and is faster. The text is the same, except that times beyond
    the year 9999 are written too, and bytes in texts that are not UTF-8 become U+FFFD.

    Returns:
        The objects, as UTF-8 bytes, and whether each of them contains all of its row.
    """
    names = [json.dumps(name, ensure_ascii=False) for name in batch.schema.names]
    kinds = [_decoded(field.type) for field in batch.schema]
    columns = [_raw(column).to_pylist() for column in batch.columns]
    encoded, exact = [], []
    for row in zip(*columns, strict=True):
        losses: list[bytes] = []
        values = [_json_of(value, kind, losses) for value, kind in zip(row, kinds, strict=True)]
        pairs = (f"{name}:{value}" for name, value in zip(names, values, strict=True))
        encoded.append(f"{{{','.join(pairs)}}}".encode())
        exact.append(not losses)
    return pa.array(encoded, pa.binary()), pa.array(exact, pa.bool_())


def _decoded(kind: pa.DataType) -> pa.DataType:
    """Returns the type of values that a dictionary, runs or an extension type stand for."""
    while pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _raw(column: pa.Array) -> pa.Array:
    """Returns a column whose values Python can hold: texts as bytes, and times as numbers."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    return column.cast(_raw_type(column.type))


def _raw_type(kind: pa.DataType) -> pa.DataType:
    is_ = pa.types
    kind = _decoded(kind)
    if is_.is_string(kind) or is_.is_string_view(kind):
        return pa.binary()
    if is_.is_large_string(kind):
        return pa.large_binary()
    if is_.is_timestamp(kind):
        return pa.int64()
    if is_.is_date32(kind):
        return pa.int32()
    if is_.is_struct(kind):
        return pa.struct([pa.field(each.name, _raw_type(each.type)) for each in kind])
    if is_.is_map(kind):
        return pa.map_(_raw_type(kind.key_type), _raw_type(kind.item_type))
    if is_.is_fixed_size_list(kind):
        return pa.list_(_raw_type(kind.value_type), kind.list_size)
    if is_.is_large_list(kind):
        return pa.large_list(_raw_type(kind.value_type))
    if is_.is_list(kind):
        return pa.list_(_raw_type(kind.value_type))
    return kind


def _json_of(value: Any, kind: pa.DataType, losses: list[bytes]) -> str:
    """Encodes one value of `_raw`; adds texts that are not UTF-8 to ``losses``."""
    is_ = pa.types
    if value is None:
        return "null"
    if is_.is_struct(kind):
        fields = (
            f"{json.dumps(each.name, ensure_ascii=False)}:{_json_of(value[each.name], each.type, losses)}"
            for each in kind
        )
        return f"{{{','.join(fields)}}}"
    if is_.is_map(kind):
        pairs = (
            f"{_key_of(key, kind.key_type, losses)}:{_json_of(each, kind.item_type, losses)}"
            for key, each in value
        )
        return f"{{{','.join(pairs)}}}"
    if is_.is_nested(kind):
        return f"[{','.join(_json_of(each, kind.value_type, losses) for each in value)}]"
    if is_.is_timestamp(kind):
        text = _time_of(value, kind.unit)
        return json.dumps(f"{text}Z" if kind.tz else text)
    if is_.is_date32(kind):
        return json.dumps(str(np.datetime64(value, "D")))
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        text = value.decode(errors="replace")
        if "\ufffd" in text and text.encode() != value:
            losses.append(value)
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, bytes):
        return json.dumps(base64.b64encode(value).decode())
    if isinstance(value, float):
        special = {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value)
        return json.dumps("NaN" if value != value else special) if special or value != value else repr(value)
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    return json.dumps(value) if isinstance(value, bool | int) else json.dumps(str(value))


def _time_of(value: int, unit: Any) -> str:
    """Returns a number of units since 1970 as text.

    NumPy takes the smallest number for "not a time", so its digits after the point are added here.
    """
    if value != np.iinfo(np.int64).min or unit == "s":
        return str(np.datetime64(value, unit))
    digits = {"ms": 3, "us": 6, "ns": 9}[unit]
    seconds, rest = divmod(value, 10**digits)
    return f"{np.datetime64(seconds, 's')}.{rest:0{digits}}"


def _key_of(value: Any, kind: pa.DataType, losses: list[bytes]) -> str:
    """Encodes the key of a map as text, because the names in a JSON object are texts."""
    text = _json_of(value, kind, losses)
    return text if text.startswith('"') else json.dumps(text, ensure_ascii=False)
