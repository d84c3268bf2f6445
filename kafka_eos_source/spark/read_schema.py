"""Spark's schema of the source.

The schema is that of Spark's own connector (``KafkaRecordToRowConverter.kafkaSchema``), so that a query only
has to change the name of the format. The process that asks for it needs no PyArrow, which takes 0.1 s to
import.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

#: Names of the columns that the source and the sink have in common. The sink stages them in this order.
NAMES = ("key", "value", "topic", "partition", "headers", "timestamp")
KEY, VALUE, TOPIC, PARTITION, HEADERS, TIMESTAMP = NAMES


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
