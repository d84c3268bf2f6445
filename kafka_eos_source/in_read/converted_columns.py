"""Decodes and encodes columns around the function of `map_in_read`: with a schema registry, or JSON.

Decoded values stay in Arrow batches between Kafka and Kafka. With ``on_bad="dead-letter"``, rows that cannot
be decoded go around the function: they reach the sink unchanged, and marked for its option
``onInvalidRecord``. They need no packets, because no step of Spark can be between `map_in_read` and the sink.

The headers of a record may name the schema of its key or value. Rows that are encoded get such headers if the
registry's option ``schema.id.location`` says so, and lose those of the record that was read.

`App.read` decodes with a step of its own before other steps (`in_read.decode`). `map_in_read` does not use
that step, because its function may run after Spark's steps, and may encode: then rows of the function, which
come from no single record, are marked too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.in_read.bad_records import (
    DEAD_LETTER,
    FAIL,
    NULL,
    OnBad,
    Records,
    bad_record,
    bad_records,
)
from kafka_eos_source.in_read.decode import RESERVED, ColumnDecoder
from kafka_eos_source.in_read.step import ArrowFunction, no_batches
from kafka_eos_source.protocol import records
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.registry.frames import KEY_HEADER, VALUE_HEADER, headers_naming
from kafka_eos_source.registry.records import Encoding
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.schema import HEADERS, HEADERS_TYPE, INVALID, INVALID_TYPE, KEY, ORIGIN_TYPE

#: Columns of the source that say where and when a record was written.
_ORIGIN = tuple(ORIGIN_TYPE.names)
_MARK = pa.struct(list(arrow_schema(INVALID_TYPE)))
#: Column with the headers of records that a step in the read adds for decoders, and takes out again.
HIDDEN_HEADERS = f"{RESERVED}_headers"


@dataclass(frozen=True)
class ConvertedColumns:
    """A function over Arrow batches, with columns decoded before it and encoded after it.

    Attributes:
        function: the user's function; None leaves the rows unchanged.
        decodes: how to decode columns of the frame, by name.
        encodes: how to encode columns of the result, by name.
        rows: schema of the result, without the mark of invalid rows.
        on_bad: what becomes of rows that cannot be decoded.
        headers: column of the frame with the headers of the records; None if it has none.
    """

    function: ArrowFunction | None
    decodes: Mapping[str, ColumnDecoder]
    encodes: Mapping[str, Encoding]
    rows: StructType
    on_bad: OnBad = DEAD_LETTER
    headers: str | None = None

    @property
    def marked(self) -> StructType:
        """Schema of the result with the mark of invalid rows, and with the headers that name schemas."""
        return StructType([*self._rows.fields, StructField(INVALID, INVALID_TYPE)])

    @property
    def _rows(self) -> StructType:
        if HEADERS in self.rows.names or not any(each.header for each in self.encodes.values()):
            return self.rows
        return StructType([*self.rows.fields, StructField(HEADERS, HEADERS_TYPE)])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Applies decoders, function and encoders to the batches of one task."""
        undecodable: list[pa.RecordBatch] = []

        def decoded() -> Iterator[pa.RecordBatch]:
            for whole in batches:
                for batch, found in _by_slices(self.decodes, whole, self.headers):
                    good, bad = self._decoded(batch, found)
                    if bad is not None:
                        undecodable.append(bad)
                    if good.num_rows:
                        yield good

        result: Iterable[Any] = decoded() if self.function is None else self.function(decoded())
        if not isinstance(result, Iterable):
            raise no_batches(result)
        for batch in result:
            if not isinstance(batch, pa.RecordBatch):
                raise no_batches(batch)
            yield from _taken(undecodable)
            for name in self.encodes:
                if name not in batch.schema.names:
                    raise InvalidRecordError(
                        f"the function of map_in_read returned a batch without the column {name!r}, which "
                        f"encode names; it has the columns {', '.join(batch.schema.names)}.",
                        fix="return the column, or leave it out of encode.",
                    )
            for part, found in _by_slices(self.encodes, batch):
                yield self._encoded(part, found)
        yield from _taken(undecodable)

    def _decoded(
        self, batch: pa.RecordBatch, decoded: Mapping[str, Converted]
    ) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Returns the decodable rows, decoded, and the others as they are, with their marks; None if none.

        Raises:
            InvalidRecordError: if a row cannot be decoded, and that is an error.
        """
        errors: dict[int, str] = {}
        columns = {name: batch.column(name) for name in batch.schema.names if name != HIDDEN_HEADERS}
        for name, found in decoded.items():
            columns[name] = found.values
            for row, text in found.errors.items():
                errors.setdefault(row, f"column {name!r}: {text}")
        if not errors or self.on_bad == NULL:
            return pa.RecordBatch.from_pydict(columns), None
        if self.on_bad == FAIL:
            raise bad_record(bad_records(Records.of([batch]), errors))
        rows = np.array(sorted(errors))
        good = np.ones(batch.num_rows, bool)
        good[rows] = False
        bad = batch.take(pa.array(rows))
        # a replay must not lose the header that names the schema
        headers = None if HEADERS in self._rows.names else self.headers
        marks = _marks([errors[row] for row in rows.tolist()], bad, headers)
        return pa.RecordBatch.from_pydict(columns).filter(pa.array(good)), self._around(bad, marks)

    def _around(self, bad: pa.RecordBatch, marks: pa.Array) -> pa.RecordBatch:
        """Returns undecodable rows with the columns of the result: those that have the same bytes or type."""
        schema = arrow_schema(self._rows)
        given = {name: bad.column(name) for name in bad.schema.names if name not in _ORIGIN}
        if self.headers is not None:
            given.setdefault(HEADERS, bad.column(self.headers))
        columns = [
            _same(given[field.name], field.type)
            if field.name in given
            else pa.nulls(bad.num_rows, field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays([*columns, marks], [*schema.names, INVALID])

    def _encoded(self, batch: pa.RecordBatch, encoded: Mapping[str, Converted]) -> pa.RecordBatch:
        """Returns rows of the function with their columns encoded; those that do not fit are marked.

        Where something is encoded, key and value of a marked row are not those of the record that was read,
        and its columns `topic` and `partition` are its destination. Marks say so, because a replay would
        otherwise send the row, or a tombstone in its place, to the topic of the input.
        """
        errors: dict[int, str] = {}
        incomplete = np.zeros(batch.num_rows, bool)
        columns = {name: batch.column(name) for name in batch.schema.names}
        for name, found in encoded.items():
            columns[name] = found.values
            incomplete |= found.values.is_null().to_numpy(zero_copy_only=False)
            for row, text in found.errors.items():
                errors.setdefault(row, f"column {name!r}: {text}")
            header = self.encodes[name].header
            if header is not None or HEADERS in columns:
                is_present = found.values.is_valid().to_numpy(zero_copy_only=False)
                naming = None if header is None else self.encodes[name].name
                of_column = header or (KEY_HEADER if name == KEY else VALUE_HEADER)
                columns[HEADERS] = headers_naming(of_column, naming, is_present, columns.get(HEADERS))
        own = columns.pop(INVALID, None)
        failed = pa.array([errors.get(row) for row in range(batch.num_rows)] if errors else [], pa.string())
        marks = _marks_of_result(own, failed if errors else None, batch.num_rows)
        if self.encodes and marks.null_count < batch.num_rows:
            holds = pc.if_else(pa.array(incomplete), records.INCOMPLETE, records.OUTPUT)
            marks = _with_field(marks, "holds", holds)
        return pa.RecordBatch.from_pydict({**columns, INVALID: marks})


def converted_columns(
    function: ArrowFunction | None,
    decode: Mapping[str, ColumnDecoder],
    encode: Mapping[str, RegistrySchema],
    frame: StructType,
    rows: StructType,
    on_bad: OnBad = DEAD_LETTER,
    headers: str | None = None,
) -> ConvertedColumns:
    """Returns the function of `map_in_read` with its decoders and encoders.

    Args:
        function, on_bad, headers: as the attributes of `ConvertedColumns`.
        decode: how to decode columns of the frame.
        encode: in which schemas to encode columns of the result.
        frame: schema of the frame.
        rows: schema of the result.

    Raises:
        InvalidSchemaError: if the frame or the result has no such column, or it is not of bytes.
        InvalidOptionError: if a schema to encode with has no id.
    """
    for what, named, schema in (("decode", decode, frame), ("encode", encode, rows)):
        for name in named:
            found = schema[name].dataType.simpleString() if name in schema.names else "missing"
            if found != "binary":
                raise InvalidSchemaError(
                    f"{what} names the column {name!r}, which is {found} in the schema "
                    f"{schema.simpleString()}; expected a binary column.",
                    fix="select the column from the source."
                    if what == "decode"
                    else "declare the encoded column, as in 'key BINARY, value BINARY'.",
                )
    left = [name for name in decode if function is None and name not in encode]
    if left:
        raise InvalidSchemaError(
            f"decode names the column {left[0]!r}, but there is no function that takes the decoded values, "
            "and encode does not name the column.",
            fix="pass a function, or encode the column again.",
        )
    own = StructType([field for field in rows.fields if field.name != INVALID])
    encodes = {name: each.encoding(is_key=name == KEY) for name, each in encode.items()}
    declared = own[HEADERS].dataType.simpleString() if HEADERS in own.names else None
    if encodes and declared not in (None, HEADERS_TYPE.simpleString()):
        raise InvalidSchemaError(
            f"the column {HEADERS!r} of the result is {declared}; expected {HEADERS_TYPE.simpleString()}, "
            "because encode changes it.",
            fix="declare it with this type.",
        )
    return ConvertedColumns(function, decode, encodes, own, on_bad, headers)


def with_decoded(columns: StructType, decoders: Mapping[str, ColumnDecoder]) -> StructType:
    """Returns the schema of the rows that a function gets if columns are decoded before it."""
    return StructType(
        [
            StructField(each.name, from_arrow_type(decoders[each.name].arrow_type, prefer_timestamp_ntz=True))
            if each.name in decoders
            else each
            for each in columns
        ]
    )


def _by_slices(
    codecs: Mapping[str, ColumnDecoder | Encoding], batch: pa.RecordBatch, headers: str | None = None
) -> Iterator[tuple[pa.RecordBatch, Mapping[str, Converted]]]:
    """Yields parts of a batch with their converted columns, each as large as `MOST_BYTES` allows.

    A column that ends a slice later than another one is converted again from there on. That happens only if
    columns are large.

    Args:
        codecs: how to convert columns, by name.
        batch: the batch.
        headers: column with the headers of the records, for decoders that take them; None if there is none.
    """
    at = 0
    while at < batch.num_rows or not at:
        rows = batch.num_rows - at
        found: dict[str, Converted] = {}
        for name, codec in codecs.items():
            given = [batch.column(name)]
            if headers is not None and not isinstance(codec, Encoding) and codec.takes_headers:
                given.append(batch.column(headers))
            found[name] = next(codec.slices(*(each.slice(at, rows) for each in given)))
            rows = len(found[name].values)
        yield batch.slice(at, rows), {name: each.first(rows) for name, each in found.items()}
        if not batch.num_rows:
            return
        at += rows


def _taken(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while batches:
        yield batches.pop(0)


def _marks(texts: Sequence[str], bad: pa.RecordBatch, headers: str | None) -> pa.Array:
    """Returns the marks of undecodable rows, with where they were read if the frame has these columns.

    Args:
        texts: why the rows cannot be decoded.
        bad: the rows.
        headers: column with headers that the marks keep; None if they keep none.
    """
    fields = {
        "error": pa.repeat(pa.scalar(records.UNDECODABLE, pa.string()), len(texts)),
        "message": pa.array(texts),
    }
    fields |= {name: bad.column(name) for name in _ORIGIN if name in bad.schema.names}
    if headers is not None:
        fields[HEADERS] = bad.column(headers)
    return _struct(fields, len(texts))


def _marks_of_result(own: pa.Array | None, failed: pa.Array | None, rows: int) -> pa.Array:
    """Returns the marks of rows of the function.

    Args:
        own: marks that the function set, as text or as a struct; None if it set none.
        failed: why rows could not be encoded, null for the others; None if all could be encoded. A mark of
            the function counts more.
        rows: number of rows.
    """
    if own is None:
        marks = pa.nulls(rows, _MARK)
    elif pa.types.is_struct(own.type):
        given = {name: pc.struct_field(own, name) for name in own.type.names if name in _MARK.names}
        marks = _struct(given, rows, own.is_null())
    else:
        error = pa.repeat(pa.scalar(records.UNDECODABLE, pa.string()), rows)
        marks = _struct({"error": error, "message": own}, rows, own.is_null())
    if failed is None:
        return marks
    only_failed = pc.and_(failed.is_valid(), marks.is_null())
    texts = {"error": pa.scalar(records.UNDECODABLE, pa.string()), "message": failed}
    fields = {name: pc.struct_field(marks, name) for name in _MARK.names}
    fields |= {name: pc.if_else(only_failed, text, fields[name]) for name, text in texts.items()}
    return _struct(fields, rows, pc.and_(marks.is_null(), pc.invert(only_failed)))


def _with_field(marks: pa.Array, name: str, values: pa.Array) -> pa.Array:
    fields = {each: pc.struct_field(marks, each) for each in _MARK.names}
    return _struct(fields | {name: values}, len(marks), marks.is_null())


def _struct(fields: Mapping[str, pa.Array], rows: int, mask: pa.Array | None = None) -> pa.Array:
    """Returns marks with these fields; the others are null."""
    columns = [
        fields[each.name].cast(each.type) if each.name in fields else pa.nulls(rows, each.type)
        for each in _MARK
    ]
    return pa.StructArray.from_arrays(columns, fields=list(_MARK), mask=mask)


def _same(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Returns a column of an undecodable row with the type of the result; null if the types differ."""
    if column.type.equals(type_):
        return column
    if pa.types.is_binary(column.type) and pa.types.is_string(type_):
        return column.view(type_)  # like Spark's cast, without a check that the bytes are UTF-8
    return pa.nulls(len(column), type_)
