"""Arrow schema of the source, schemas of the sink, and the check of a frame to write.

The rules of the sink are those of Spark's own connector (``KafkaWriter.validateQuery``): column names are
case-sensitive, the first of several columns with the same name counts, and other columns are ignored.
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

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.spark.read_schema import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

HEADERS_ARROW = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

#: Column that marks rows of a frame as invalid: null = valid; else why not, as text or as `INVALID_TYPE`.
INVALID = "kafka_eos_invalid"
INVALID_TYPE = StructType(
    [
        StructField("error", StringType()),
        StructField("message", StringType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        # what key and value are: null = the record that was read; else `dead_letters.OUTPUT` or `INCOMPLETE`
        StructField("holds", StringType()),
    ]
)

#: Column with the place and time of the record from which a row was made, for its dead letter.
ORIGIN = "kafka_eos_origin"
ORIGIN_TYPE = StructType(
    [field for field in INVALID_TYPE.fields if field.name not in ("error", "message", "holds")]
)

#: Staged column with state changes of operators (`CHANGELOG` in the frame).
CHANGES = "changelog"

#: Column of staged parts with sealed record batches (`stage.sealing`); the other columns of such a row are
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
#: row with a ``changelog`` is a packet of an operator's state changes (`protocol.packet`), and its other
#: columns are null.
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
    """Positions in the frame of the columns that the sink uses; None = the frame does not have the column.

    ``topic`` is also None if the option ``topic`` is set, because the option takes precedence. If the rows go
    only to sinks outside Kafka, only ``changelog`` is set, and what dead letters need.
    """

    value: int | None
    key: int | None
    topic: int | None
    partition: int | None
    headers: int | None
    timestamp: int | None
    changelog: int | None = None
    invalid: int | None = None
    origin: int | None = None


def check_frame(schema: StructType, *, topic_option: str | None, include_timestamp: bool) -> SinkColumns:
    """Finds the columns of the sink in a frame and checks their types.

    Args:
        schema: schema of the frame to write.
        topic_option: option ``topic``. If it is set, a column ``topic`` is ignored.
        include_timestamp: option ``includeTimestamp``: the column ``timestamp`` is the time of the record.

    Raises:
        InvalidSchemaError: if a column is missing or has the wrong type.
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
                fix=f"cast it with .withColumn({name!r}, col({name!r}).cast({wanted.split()[0]!r})).",
            )
        return index

    names = ", ".join(repr(field.name) for field in schema.fields) or "none"
    value = find(VALUE, (StringType, BinaryType), "string or binary")
    if value is None:
        raise InvalidSchemaError(
            f"the frame has no column 'value', which the sink requires; it has the columns {names}.",
            fix="select the value of the record as 'value' (names are case-sensitive), "
            "for example with df.selectExpr('to_json(struct(*)) AS value').",
        )
    topic = None if topic_option is not None else find(TOPIC, (StringType,), "string")
    if topic is None and topic_option is None:
        raise InvalidSchemaError(
            "no topic to write to: the option 'topic' is not set, and the frame has no column 'topic'; it "
            f"has the columns {names}.",
            fix="set .option('topic', …), or add a string column 'topic'.",
        )
    headers = position.get(HEADERS)
    if headers is not None:
        _check_headers(schema.fields[headers].dataType)
    timestamp = None
    if include_timestamp:
        timestamp = find(TIMESTAMP, (TimestampType,), "timestamp")
        if timestamp is None:
            raise InvalidSchemaError(
                "option 'includeTimestamp' has the value 'true', but the frame has no column 'timestamp'; "
                f"it has the columns {names}.",
                fix="add the column, or remove the option to let Kafka set the time.",
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
        invalid=_invalid(schema),
        origin=_origin(schema),
    )


def _invalid(schema: StructType) -> int | None:
    """Returns the position of the column that marks invalid rows; None if the frame has none.

    Raises:
        InvalidSchemaError: if it has another type.
    """
    if INVALID not in schema.names:
        return None
    index = schema.names.index(INVALID)
    found = schema.fields[index].dataType
    is_struct = _has_fields_of(found, INVALID_TYPE)
    if not is_struct and not isinstance(found, StringType):
        raise InvalidSchemaError(
            f"column {INVALID!r}, which marks invalid rows, has type {found.simpleString()}; expected "
            f"string, or {INVALID_TYPE.simpleString()}.",
            fix="make it with invalid_record(condition, message), or cast it to string.",
        )
    return index


def _origin(schema: StructType) -> int | None:
    """Returns the position of the column with the origin of rows; None if the frame has none.

    Raises:
        InvalidSchemaError: if it has another type.
    """
    if ORIGIN not in schema.names:
        return None
    index = schema.names.index(ORIGIN)
    found = schema.fields[index].dataType
    if not _has_fields_of(found, ORIGIN_TYPE):
        raise InvalidSchemaError(
            f"column {ORIGIN!r}, the origin of rows, has type {found.simpleString()}; expected "
            f"{ORIGIN_TYPE.simpleString()}.",
            fix="make it with record_origin().",
        )
    return index


def _has_fields_of(found: DataType, wanted: StructType) -> bool:
    """Returns whether a type is a struct that has only fields of another one."""
    known = {field.name: field.dataType for field in wanted}
    return isinstance(found, StructType) and all(
        known.get(field.name) == field.dataType for field in found.fields
    )


def takes_records(schema: StructType, *, topic_option: str | None) -> bool:
    """Returns whether rows also go to Kafka: there is an option or a column ``topic``."""
    return topic_option is not None or TOPIC in schema.names


def only_changelog(schema: StructType) -> SinkColumns:
    """Returns the columns for a frame of which only the state changes go to Kafka.

    Raises:
        InvalidSchemaError: if the column with state changes has the wrong type, or rows are marked as invalid
            and have no value.
    """
    position = schema.names.index(CHANGELOG) if CHANGELOG in schema.names else None
    if position is not None and not isinstance(found := schema.fields[position].dataType, BinaryType):
        raise InvalidSchemaError(
            f"column {CHANGELOG!r} has type {found.simpleString()}; expected binary.",
            fix="select the column as the operator returned it, without changes.",
        )
    invalid = _invalid(schema)
    carried = {} if invalid is None else _of_dead_letters(schema)
    if invalid is not None and VALUE not in carried:
        raise InvalidSchemaError(
            f"column {INVALID!r} marks invalid rows, but the frame has no string or binary column 'value' "
            "for their dead letters.",
            fix="add the value of the record that was read as 'value', and name the columns of each sink "
            "outside Kafka with sink.<name>.columns.",
        )
    return SinkColumns(
        value=carried.get(VALUE),
        key=carried.get(KEY),
        topic=None,
        partition=None,
        headers=None,
        timestamp=None,
        changelog=position,
        invalid=invalid,
        origin=_origin(schema),
    )


def _of_dead_letters(schema: StructType) -> dict[str, int]:
    """Returns the positions of key and value in a frame whose rows do not become records."""
    return {
        name: schema.names.index(name)
        for name in (KEY, VALUE)
        if name in schema.names and isinstance(schema[name].dataType, (StringType, BinaryType))
    }


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema of a writer's batches: timestamps in UTC, every field nullable.

    Raises:
        InvalidSchemaError: if Arrow has no equivalent of a type.
    """
    known = inspect.signature(to_arrow_schema).parameters
    zone = {"timezone": "UTC"} if "timezone" in known else {"timestamp_utc": True}  # until PySpark 4.1
    try:
        found = to_arrow_schema(schema, **zone)
    except PySparkTypeError as error:
        raise InvalidSchemaError(
            f"the frame has a column whose type Arrow cannot represent: {error}.",
            fix="cast the column, or exclude it with sink.<name>.columns.",
        ) from error
    return pa.schema([field.with_nullable(True) for field in found])


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


def _check_headers(found: DataType) -> None:
    """Checks the type of the column `headers`. As in Spark, letter case and nullability do not matter.

    Raises:
        InvalidSchemaError: if it is not ``array<struct<key:string,value:binary>>``.
    """
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
            fix="create it with array(struct('k' AS key, CAST(v AS BINARY) AS value)).",
        )
