"""Spark's schemas of the source and the sink, and the columns that tell the sink about invalid rows.

The schema of the source is that of Spark's own connector (``KafkaRecordToRowConverter.kafkaSchema``), so that
a query only has to change the name of the format. The rules of the sink are those of Spark's own connector
too (``KafkaWriter.validateQuery``): column names are case-sensitive, the first of several columns with the
same name counts, and other columns are ignored.

This module does not import PyArrow, which takes 0.1 s, because the process in which Spark asks for the schema
does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from pyspark.sql import Column

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

#: Names of the columns that the source and the sink have in common. The sink stages them in this order.
NAMES = ("key", "value", "topic", "partition", "headers", "timestamp")
KEY, VALUE, TOPIC, PARTITION, HEADERS, TIMESTAMP = NAMES


def quoted(*parts: str) -> str:
    """Returns the name of a column, or of a field in it, in backquotes, as Spark's functions take it."""
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def read_schema(include_headers: bool, columns: tuple[str, ...] | None = None) -> StructType:
    """Returns the schema of the source. All columns are nullable.

    Args:
        include_headers: whether it has the column ``headers``.
        columns: names of the requested columns, in order; None = all.
    """
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
        # what key and value are (`protocol.records`): null = what was read; else `OUTPUT` or `INCOMPLETE`
        StructField("holds", StringType()),
        # headers of the record that was read, if the row has no column for them
        StructField(HEADERS, HEADERS_TYPE),
    ]
)

#: Key in the metadata of the column of packets (`protocol.packing`) of a frame without stateful operators:
#: the packets have only bad records of the source.
ONLY_BAD_RECORDS = "kafka_eos.only_bad_records"

#: Column with the place and time of the record from which a row was made, for its dead letter.
ORIGIN = "kafka_eos_origin"
ORIGIN_TYPE = StructType(
    [field for field in INVALID_TYPE.fields if field.name not in ("error", "message", "holds", HEADERS)]
)


@dataclass(frozen=True)
class SinkColumns:
    """Positions in the frame of the columns that the sink uses; None = the frame does not have the column.

    ``topic`` is also None if the option ``topic`` is set, because the option takes precedence. If the rows go
    only to sinks outside Kafka, only ``changelog`` is set, and what dead letters need. ``only_bad_records``
    says that no packet in the column ``changelog`` has state changes.
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
    only_bad_records: bool = False


def check_frame(schema: StructType, *, topic_option: str | None, include_timestamp: bool) -> SinkColumns:
    """Finds the columns of the sink in a frame and checks their types.

    Args:
        schema: schema of the frame to write.
        topic_option: option ``topic``. If it is set, a column ``topic`` is ignored.
        include_timestamp: option ``includeTimestamp``: the column ``timestamp`` is the time of the record.

    Raises:
        InvalidSchemaError: if a column is missing or has the wrong type.
    """
    from kafka_eos_source.protocol.packing import CHANGELOG  # imports PyArrow

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
                fix=f"cast it: in the text of app.sql with CAST(… AS …) AS {name}; in Spark with "
                f".withColumn({name!r}, col({name!r}).cast({wanted.split()[0]!r})).",
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
        only_bad_records=_has_only_bad_records(schema, position.get(CHANGELOG)),
    )


def _has_only_bad_records(schema: StructType, packets: int | None) -> bool:
    return packets is not None and ONLY_BAD_RECORDS in (schema.fields[packets].metadata or {})


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
    from kafka_eos_source.protocol.packing import CHANGELOG  # imports PyArrow

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
        only_bad_records=_has_only_bad_records(schema, position),
    )


def _of_dead_letters(schema: StructType) -> dict[str, int]:
    """Returns the positions of key and value in a frame whose rows do not become records."""
    return {
        name: schema.names.index(name)
        for name in (KEY, VALUE)
        if name in schema.names and isinstance(schema[name].dataType, (StringType, BinaryType))
    }


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


def invalid_record(condition: Column | str, message: Column | str, error: str = "InvalidRecord") -> Column:
    """Returns the column ``kafka_eos_invalid``, which marks rows for the option ``onInvalidRecord``.

    The column also names where the row was read, so the frame must still have the source's columns ``topic``,
    ``partition``, ``offset`` and ``timestamp``. Key and value of a marked row must be those of the record
    that was read, because ``kafka-eos dead-letters replay`` sends them to that topic again::

        frame.select("key", "value", invalid_record("parsed IS NULL", "the value is not JSON"))

    Args:
        condition: which rows are invalid, as a column or as SQL. Null counts as false.
        message: why, as text, or as a column of strings.
        error: class of the error, for people who look for dead letters of one kind.
    """
    from pyspark.sql import functions as f

    when = f.expr(condition) if isinstance(condition, str) else condition
    why = f.lit(message) if isinstance(message, str) else message
    mark = f.struct(
        f.lit(error).alias("error"),
        why.cast("string").alias("message"),
        *(f.col(name) for name in ORIGIN_TYPE.names),
        f.lit(None).cast("string").alias("holds"),  # the record that was read
    )
    return f.when(when, mark).alias(INVALID)


def record_place() -> Column:
    """Returns a column with the place of each row's record: ``record of topic t, partition 0, offset 5``.

    The frame must still have the source's columns ``topic``, ``partition`` and ``offset``.
    """
    from pyspark.sql import functions as f

    parts = [f.lit("record of topic "), _text_of("topic")]
    parts += [f.lit(", partition "), _text_of("partition"), f.lit(", offset "), _text_of("offset")]
    return f.concat(*parts)


def _text_of(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.coalesce(f.col(name).cast("string"), f.lit("null"))


def record_origin() -> Column:
    """Returns the column ``kafka_eos_origin``: where the record was read from which the row is made.

    If a row breaks a rule of the sink and becomes a dead letter, the letter then names that record, as that
    of a row which `invalid_record` marks does. Add the column where the frame still has the source's columns
    ``topic``, ``partition``, ``offset`` and ``timestamp``, and keep it::

        frame.select("key", upper("value").alias("value"), record_origin())
    """
    from pyspark.sql import functions as f

    return f.struct(*(f.col(name) for name in ORIGIN_TYPE.names)).alias(ORIGIN)
