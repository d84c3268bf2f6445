"""``python -m integration.support.avro_in_spark N``: compares the Avro codec with Spark's on N schemas.

Types and values must be the same, also after they were encoded again. Prints how many were equal; fails at
the first difference. It is a program of its own, because Spark needs the jar when it starts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.avro.functions import from_avro
from pyspark.sql.pandas.types import from_arrow_type

from benchmarks.avro import spark_avro
from integration.support.session import builder, end
from kafka_eos_source.registry.avro import arrow_type, decoder, encoder
from tests.registry.avro_model import encode, schema_of, schemas, values


def main(count: int) -> None:
    """Compares random schemas, with five random values each at most."""
    spark = (
        builder().config("spark.jars", spark_avro()).config("spark.sql.session.timeZone", "UTC").getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    seen: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def compare_all(data: st.DataObject) -> None:
        schema = data.draw(schemas())
        rows = data.draw(st.lists(values(schema), min_size=1, max_size=5))
        seen[_compare(spark, schema, [encode(schema, row) for row in rows])] += 1

    compare_all()
    end(spark)
    print(json.dumps(seen))


def _compare(spark: SparkSession, schema: Any, payloads: list[bytes]) -> str:
    text = json.dumps(schema)
    if '["null"]' in text:
        return "a union of null alone, of which Spark makes an empty struct"
    if isinstance(schema, list) and "null" in schema:
        return "a union with null that is the whole message, whose nulls Spark reads as zeros"
    if '"time-' in text:
        return "a time of day, which spark-avro reads as a number before Spark has a type for it"
    if '-nanos"' in text:
        return "nanoseconds, for which Spark has a type that PySpark does not know"
    if _has_logical_number_in_union(schema):
        return "a union of two numbers, one of a logical type, which Spark reads as a plain number"
    messages = pa.array(payloads, pa.binary())
    made = decoder(schema_of(schema)).decode(messages, 0)
    frame = spark.createDataFrame(pa.table({"v": messages}))
    theirs = frame.select(from_avro("v", text, {"mode": "FAILFAST"}).alias("v"))
    kind = from_arrow_type(arrow_type(schema_of(schema))).simpleString()
    assert theirs.schema["v"].dataType.simpleString() == kind, text
    try:
        expected = [_plain(row.v) for row in theirs.collect()]
        ours = [_plain(row.v) for row in spark.createDataFrame(pa.table({"v": made.values})).collect()]
    except (Py4JJavaError, PySparkException, pa.ArrowException):
        # Spark's or Arrow's conversion lacks a type, such as that of null, or Spark cannot read this union
        return "not comparable"
    assert ours == expected, (text, ours, expected)
    encoded = encoder(schema_of(schema), made.values.type).encode(made.values, b"").values
    again = spark.createDataFrame(pa.table({"v": encoded}))
    read = again.select(from_avro("v", text, {"mode": "FAILFAST"}).alias("v")).collect()
    assert [_plain(row.v) for row in read] == ours, (text, ours)
    return "equal"


def _has_logical_number_in_union(schema: Any) -> bool:
    """Returns whether some union has two numbers, of which one has a logical type (docs/avro-types.md)."""
    if isinstance(schema, dict):
        return any(_has_logical_number_in_union(each) for each in schema.values())
    if not isinstance(schema, list):
        return False
    kinds = [each["type"] if isinstance(each, dict) else each for each in schema]
    numbers = [each for each in kinds if each in ("int", "long", "float", "double")]
    has_logical = any(isinstance(each, dict) and "logicalType" in each for each in schema)
    return (len(numbers) > 1 and has_logical) or any(_has_logical_number_in_union(each) for each in schema)


def _plain(value: Any) -> Any:
    if isinstance(value, Row):
        return tuple(_plain(one) for one in value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]))
