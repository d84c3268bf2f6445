"""Arrow schemas of the source and of staged rows, and functions on batches that keep schema and packets."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.protocol.packing import (
    WaitingPackets,
    rows_of_packets,
    split_packets,
    with_packets,
)
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

HEADERS_ARROW = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

#: Bad records in packets (`protocol.packing.BadRecords`): what was read, where, and the class and the text of
#: the error. The names are those of the source's columns and of `schema.INVALID_TYPE`.
BAD_RECORDS = pa.schema(
    [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(HEADERS, HEADERS_ARROW),
        pa.field("error", pa.string()),
        pa.field("message", pa.string()),
        pa.field(TOPIC, pa.string()),
        pa.field(PARTITION, pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", tz="UTC")),
    ]
)

#: Staged column with packets (`CHANGELOG` in the frame).
CHANGES = "changelog"

#: Column of staged parts with sealed record batches (`stage.staging`); the other columns of such a row are
#: null, but for the partition.
SEALED = "sealed"


@lru_cache(maxsize=16)
def read_arrow_schema(include_headers: bool, columns: tuple[str, ...] | None = None) -> pa.Schema:
    """Returns `read_schema` as the Arrow schema that PySpark expects of a reader's batches.

    Timestamps are in microseconds in UTC, as in ``pyspark.sql.pandas.types.to_arrow_type``.
    """
    fields = [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(TOPIC, pa.string()),
        pa.field(PARTITION, pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    if include_headers:
        fields.append(pa.field(HEADERS, HEADERS_ARROW))
    schema = pa.schema(fields)
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


#: Schema of staged rows. ``timestamp`` is in ms since 1970; null = the time at which the record is sent. A
#: row with a ``changelog`` is a packet (`protocol.packing`), and its other columns are null.
STAGED_ARROW = pa.schema(
    [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(TOPIC, pa.string()),
        pa.field(PARTITION, pa.int32()),
        pa.field(HEADERS, HEADERS_ARROW),
        pa.field(TIMESTAMP, pa.int64()),
        pa.field(CHANGES, pa.binary()),
    ]
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema of a writer's batches: timestamps in UTC, every field nullable.

    Raises:
        InvalidSchemaError: if Arrow has no equivalent of a type.
    """
    known = inspect.signature(to_arrow_schema).parameters
    zone = {"timezone": "UTC"} if "timezone" in known else {"timestamp_utc": True}  # until PySpark 4.1
    try:
        found = to_arrow_schema(schema, **zone)
    except (PySparkTypeError, ValueError) as error:  # array<void>
        raise InvalidSchemaError(
            f"the frame has a column whose type Arrow cannot represent: {error}.",
            fix="cast the column, or exclude it with sink.<name>.columns.",
        ) from error
    return pa.schema([field.with_nullable(True) for field in found])


def has_arrow_type(field: StructField) -> bool:
    """Returns whether Arrow can represent the values of a column."""
    try:
        arrow_schema(StructType([field]))
    except InvalidSchemaError:
        return False
    return True


def fit(batch: pa.RecordBatch, schema: pa.Schema, origin: str) -> pa.RecordBatch:
    """Returns a batch with its columns in the order and with the types of a schema.

    Spark and users' functions may produce another variant of a type, such as large strings, or timestamps in
    the time zone of the session.

    Args:
        batch: its columns are matched by name. Columns that fit are not copied.
        schema: the schema of the result.
        origin: who made the batch and how, for errors, such as "the function returned".

    Raises:
        InvalidRecordError: if the batch has other columns, or a value does not fit its type.
    """
    if batch.schema.equals(schema):
        return batch
    if sorted(batch.schema.names) != sorted(schema.names):
        raise InvalidRecordError(
            f"{origin} a batch with the columns {', '.join(batch.schema.names)}; expected the columns of its "
            f"schema, {', '.join(schema.names)}.",
            fix="declare the schema that the batches have.",
        )
    columns = []
    for field in schema:
        found = batch.column(field.name)
        try:
            columns.append(found if found.type.equals(field.type) else found.cast(field.type))
        except pa.ArrowException as error:
            raise InvalidRecordError(
                f"{origin} column {field.name!r} with type {found.type}, which cannot be cast to "
                f"{field.type}, its type in the schema: {error}.",
                fix="cast the column where the batch is made, or correct the schema.",
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def past_packets(
    function: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]], schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns a function on Arrow batches that sees the rows without packets; the packets pass it unchanged.

    Args:
        function: takes the rows without the column `CHANGELOG`. It need not read all of them.
        schema: schema of the rows that it returns. The rows of the result have the column in addition.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting = WaitingPackets()

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                data, packets = split_packets(batch)
                waiting.append(packets)
                if data.num_rows:
                    yield data

        def passed() -> Iterator[pa.RecordBatch]:
            return (rows_of_packets(each, schema) for each in waiting.taken())

        given = rows()
        for batch in function(given):
            yield with_packets(fit(batch, schema, "the function of mapInArrow returned"))
            yield from passed()
        for _ in given:  # the function may have stopped early
            yield from passed()
        yield from passed()

    return run


# -- Names of headers that are not UTF-8 ------------------------------------------------------------

_ESCAPED = re.compile(rb"\\x([0-9A-Fa-f]{2})")
#: What an escaped name cannot contain as it is, besides bytes that are not UTF-8.
_TO_ESCAPE = re.compile(rb"[\\\x00]")
_BACKSLASH = re.compile(rb"\\")


def escaped_names(names: pa.StringArray) -> pa.StringArray:
    r"""Returns names of headers as text, from which `unescaped_names` makes the same bytes again.

    A byte that is not UTF-8, a backslash and NUL become ``\xHH``, with the hexadecimal digits of the byte.

    Args:
        names: any bytes, as strings that nobody has checked.
    """
    try:
        names.validate(full=True)
    except pa.ArrowInvalid:
        pass
    else:
        if not _has(names, _TO_ESCAPE):
            return names
    return _converted(names, lambda name: _escaped(name).encode())


def unescaped_names(names: pa.StringArray) -> pa.StringArray:
    """Returns the bytes for which escaped names stand, as strings that need not be UTF-8.

    A backslash that begins no escape stays as it is.
    """
    if not _has(names, _BACKSLASH):
        return names
    return _converted(names, lambda name: _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), name))


def with_unescaped_names(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows with the column ``headers`` as `STAGED_ARROW` has it, whose names were escaped."""
    headers = rows.column(HEADERS)
    entries = headers.values
    struct = pa.StructArray.from_arrays(
        [unescaped_names(entries.field(0)), entries.field(1)], fields=list(HEADERS_ARROW.value_type)
    )
    bare = pa.ListArray.from_arrays(headers.offsets, struct, type=HEADERS_ARROW, mask=headers.is_null())
    return rows.set_column(rows.schema.get_field_index(HEADERS), rows.schema.field(HEADERS), bare)


def _escaped(name: bytes) -> str:
    text = name.decode(errors="surrogateescape")
    return "".join(
        f"\\x{ord(each) & 0xFF:02X}" if each in "\\\0" or "\udc80" <= each <= "\udcff" else each
        for each in text
    )


def _has(names: pa.StringArray, pattern: re.Pattern[bytes]) -> bool:
    """Returns whether the bytes of a column contain something; without a Python object per value."""
    data = names.buffers()[2]
    return data is not None and pattern.search(memoryview(data)) is not None


def _converted(names: pa.StringArray, of: Callable[[bytes], bytes]) -> pa.StringArray:
    """Returns names converted one by one, each different one once."""
    found = names.cast(pa.binary()).dictionary_encode()
    made = pa.array(
        [each if each is None else of(each) for each in found.dictionary.to_pylist()], pa.binary()
    )
    return made.take(found.indices).view(pa.string())
