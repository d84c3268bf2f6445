"""Row schemas in Spark's and Arrow's terms, and the check of a frame to be written.

The read schema is that of Spark's own connector (``KafkaRecordToRowConverter.kafkaSchema``), column by
column, so that a query changes the format's name and nothing else. The write contract is Spark's too
(``KafkaWriter.validateQuery``): names are matched case-sensitively, a repeated name uses its first
occurrence, other columns are ignored.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.protocol.packet import CHANGELOG

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
HEADERS_ARROW = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

#: `StructField` name of every column the sink knows, in the order in which they are staged.
KEY, VALUE, TOPIC, PARTITION, HEADERS, TIMESTAMP = (
    "key",
    "value",
    "topic",
    "partition",
    "headers",
    "timestamp",
)

#: The staged column of the changes of operators' state (`CHANGELOG` in the frame).
CHANGES = "changelog"


def read_schema(include_headers: bool, columns: tuple[str, ...] | None = None) -> StructType:
    """Spark's schema of a read: all columns nullable; ``headers``, and fewer columns, only when asked for."""
    fields = [
        StructField(KEY, BinaryType()),
        StructField(VALUE, BinaryType()),
        StructField(TOPIC, StringType()),
        StructField(PARTITION, IntegerType()),
        StructField("offset", LongType()),
        StructField(TIMESTAMP, TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
    if include_headers:
        fields.append(StructField(HEADERS, HEADERS_TYPE))
    if columns is not None:
        by_name = {field.name: field for field in fields}
        fields = [by_name[name] for name in columns]
    return StructType(fields)


@lru_cache(maxsize=16)
def read_arrow_schema(include_headers: bool, columns: tuple[str, ...] | None = None) -> pa.Schema:
    """`read_schema` as the Arrow schema that PySpark compares a reader's batches with.

    Timestamps are microseconds in UTC, as ``pyspark.sql.pandas.types.to_arrow_type`` makes them.
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


#: What a row is staged as. ``timestamp`` is Kafka's: ms since the epoch, null = when it is sent. A row with
#: a ``changelog`` is a packet of an operator's changes (`state.packet`) and has nothing else.
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


@dataclass(frozen=True)
class SinkColumns:
    """Position of each column of the contract in the frame to be written; None = not there.

    ``topic`` is None when the ``topic`` option is set, since the option wins over the column. All but
    ``changelog`` are None when only sinks outside Kafka take the rows.
    """

    value: int | None
    key: int | None
    topic: int | None
    partition: int | None
    headers: int | None
    timestamp: int | None
    changelog: int | None = None


def check_frame(schema: StructType, *, topic_option: str | None, include_timestamp: bool) -> SinkColumns:
    """Finds the contract's columns in ``schema`` and checks their types.

    Args:
        schema: of the frame to be written.
        topic_option: the ``topic`` option, which wins over a ``topic`` column (not even looked at then).
        include_timestamp: whether a ``timestamp`` column is the record's time (option ``includeTimestamp``).

    Raises:
        InvalidSchemaError: a column is missing or of the wrong type.
    """
    position: dict[str, int] = {}
    for index, field in enumerate(schema.fields):
        position.setdefault(field.name, index)

    def find(name: str, accepted: tuple[type[DataType], ...], wanted: str) -> int | None:
        index = position.get(name)
        if index is None:
            return None
        found = schema.fields[index].dataType
        if not isinstance(found, accepted):
            raise InvalidSchemaError(
                f"column {name!r} has type {found.simpleString()}; expected {wanted}.",
                fix=f"cast it, for example .withColumn({name!r}, col({name!r}).cast({wanted.split()[0]!r})).",
            )
        return index

    names = ", ".join(repr(field.name) for field in schema.fields) or "none"
    value = find(VALUE, (StringType, BinaryType), "string or binary")
    if value is None:
        raise InvalidSchemaError(
            f"required column 'value' not found; the frame has {names}.",
            fix="select the record's value as 'value' (names are case-sensitive), "
            "for example df.selectExpr('to_json(struct(*)) AS value').",
        )
    topic = None if topic_option is not None else find(TOPIC, (StringType,), "string")
    if topic is None and topic_option is None:
        raise InvalidSchemaError(
            f"no topic to write to: neither the option 'topic' nor a column 'topic'; the frame has {names}.",
            fix="set .option('topic', …) or add a string column 'topic'.",
        )
    headers = position.get(HEADERS)
    if headers is not None:
        _check_headers(schema.fields[headers].dataType)
    timestamp = None
    if include_timestamp:
        timestamp = find(TIMESTAMP, (TimestampType,), "timestamp")
        if timestamp is None:
            raise InvalidSchemaError(
                f"option 'includeTimestamp' is true but there is no column 'timestamp'; found {names}.",
                fix="add the column, or drop the option to let Kafka set the time.",
            )
    if CHANGELOG in position:
        find(CHANGELOG, (BinaryType,), "binary")
    return SinkColumns(
        value=value,
        key=find(KEY, (StringType, BinaryType), "string or binary"),
        topic=topic,
        partition=find(PARTITION, (IntegerType,), "int"),
        headers=headers,
        timestamp=timestamp,
        changelog=position.get(CHANGELOG),
    )


def takes_records(schema: StructType, *, topic_option: str | None) -> bool:
    """Whether a frame of a query with other sinks is for Kafka too: it has a topic, by option or column."""
    return topic_option is not None or TOPIC in schema.names


def only_changelog(schema: StructType) -> SinkColumns:
    """The columns of a frame whose rows all go to sinks outside Kafka: changes of state still go to Kafka.

    Raises:
        InvalidSchemaError: the column of changes has the wrong type.
    """
    position = schema.names.index(CHANGELOG) if CHANGELOG in schema.names else None
    if position is not None and not isinstance(found := schema.fields[position].dataType, BinaryType):
        raise InvalidSchemaError(
            f"column {CHANGELOG!r} has type {found.simpleString()}; expected binary.",
            fix="hand it on as the operator made it.",
        )
    return SinkColumns(None, None, None, None, None, None, position)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's schema as the Arrow batches of a writer have it: timestamps in UTC, every field nullable.

    Raises:
        InvalidSchemaError: a type has no Arrow form.
    """
    known = inspect.signature(to_arrow_schema).parameters
    zone = {"timezone": "UTC"} if "timezone" in known else {"timestamp_utc": True}  # until PySpark 4.1
    try:
        found = to_arrow_schema(schema, **zone)
    except PySparkTypeError as error:
        raise InvalidSchemaError(
            f"the frame has a type that sinks outside Kafka cannot take: {error}.",
            fix="cast it, or leave the column out with sink.<name>.columns.",
        ) from error
    return pa.schema([field.with_nullable(True) for field in found])


def _check_headers(found: DataType) -> None:
    """``array<struct<key:string,value:binary>>``; letter case and nullability do not matter, as in Spark."""
    fields = (
        found.elementType.fields
        if isinstance(found, ArrayType) and isinstance(found.elementType, StructType)
        else []
    )
    shape = [(field.name.lower(), type(field.dataType)) for field in fields]
    if shape != [(KEY, StringType), (VALUE, BinaryType)]:
        raise InvalidSchemaError(
            f"column 'headers' has type {found.simpleString()}; "
            "expected array<struct<key:string,value:binary>>.",
            fix="build it with array(struct(lit('k') AS key, CAST(v AS BINARY) AS value)).",
        )
