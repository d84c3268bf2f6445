"""Encoding of rows of state variables, and the DDL parser."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidSchemaError, StatefulProcessorError
from kafka_eos_source.state.processor.codec import StructCodec
from kafka_eos_source.state.processor.schema import as_struct

_INTS = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}
_TIMES = st.datetimes(dt.datetime(1971, 1, 2), dt.datetime(2099, 1, 1))
_SCALARS: list[tuple[t.DataType, st.SearchStrategy[Any]]] = [
    (t.BooleanType(), st.booleans()),
    *((type_(), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for type_, bits in _INTS.items()),
    (t.FloatType(), st.floats(width=32, allow_nan=False)),
    (t.DoubleType(), st.floats(allow_nan=False)),
    (t.StringType(), st.text(max_size=20)),
    (t.BinaryType(), st.binary(max_size=20)),
    (t.DateType(), st.dates()),
    (t.TimestampNTZType(), _TIMES),
    (t.DayTimeIntervalType(), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
    (t.DecimalType(20, 4), st.decimals(-(10**15), 10**15, places=4, allow_nan=False)),
]
_KEYS = [pair for pair in _SCALARS if not isinstance(pair[0], (t.FloatType, t.DoubleType))]
Typed = tuple[t.DataType, st.SearchStrategy[Any]]


def _structs(element: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def build(fields: list[Typed]) -> Typed:
        type_ = t.StructType([t.StructField(f"f{i}", field) for i, (field, _) in enumerate(fields)])
        return type_, st.tuples(*(st.none() | values for _, values in fields))

    return st.lists(element, min_size=1, max_size=10).map(build)


def _nested(element: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def array(typed: Typed) -> Typed:
        return t.ArrayType(typed[0]), st.lists(st.none() | typed[1], max_size=12)

    def map_(key: Typed, value: Typed) -> Typed:
        return t.MapType(key[0], value[0]), st.dictionaries(key[1], st.none() | value[1], max_size=4)

    return element.map(array) | st.builds(map_, st.sampled_from(_KEYS), element) | _structs(element)


_TYPES = st.recursive(st.sampled_from(_SCALARS), _nested, max_leaves=6)


@st.composite
def _rows(draw: st.DrawFn) -> tuple[t.StructType, tuple[Any, ...]]:
    schema, values = draw(_structs(_TYPES))
    assert isinstance(schema, t.StructType)
    return schema, draw(values)


@settings(max_examples=50)
@given(_rows())
def test_a_row_survives_encoding_and_decoding(case: tuple[t.StructType, tuple[Any, ...]]) -> None:
    schema, row = case
    codec = StructCodec(schema, version=7)
    data = codec.encode(row)
    assert codec.decode(data) == row
    assert data[0] == 7
    assert codec.encode(codec.decode(data)) == data


@settings(max_examples=50)
@given(_rows())
def test_the_ddl_that_spark_writes_is_parsed(case: tuple[t.StructType, tuple[Any, ...]]) -> None:
    schema, _ = case
    assert as_struct(schema.simpleString(), "x") == schema
    inner = ", ".join(f"`{field.name}` {field.dataType.simpleString().upper()}" for field in schema)
    assert [field.dataType.simpleString().lower() for field in as_struct(inner, "x")] == [
        field.dataType.simpleString().lower() for field in schema
    ]


@settings(max_examples=50)
@given(_rows(), st.data())
def test_damaged_bytes_raise_only_the_documented_error(
    case: tuple[t.StructType, tuple[Any, ...]], data: st.DataObject
) -> None:
    schema, row = case
    codec = StructCodec(schema)
    whole = codec.encode(row)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with suppress(StatefulProcessorError):
        assert isinstance(codec.decode(whole[:cut]), tuple)


def test_the_encoded_bytes_are_stable() -> None:
    """The layout is a format on disk: a change needs a new version number."""
    codec = StructCodec(as_struct("n LONG, s STRING, b BOOLEAN", "x"), version=1)
    assert (
        codec.encode((5, "ab", None)).hex() == "01" + "04" + "0000000000000005" + "00000002" + "00" + "6162"
    )
    arrays = StructCodec(as_struct("a ARRAY<SHORT>, m MAP<STRING, INT>", "x"))
    assert arrays.encode(([1, None], {"k": 9})).hex() == (
        "0000" + "0000000a" + "00000017" + "00000002" + "0102" + "00010000"
        "0000000a" + "00000001" + "00" + "00000001" + "6b" + "00000001" + "00" + "00000009"
    )


def test_values_are_converted_as_spark_converts_them() -> None:
    codec = StructCodec(as_struct("at TIMESTAMP, n INT, d DECIMAL(5, 2), s STRUCT<x: INT>, f FLOAT", "x"))
    utc = dt.datetime(2026, 7, 1, 12, tzinfo=dt.timezone.utc)
    at, n, d, s, f = codec.decode(
        codec.encode((utc, np.int64(3), Decimal("1.005"), {"x": 4}, np.float32(0.5)))
    )
    assert at == utc.astimezone().replace(tzinfo=None)
    assert (n, d, f) == (3, Decimal("1.01"), 0.5)
    assert s == Row(x=4)
    assert s.x == 4
    plain = StructCodec(as_struct("a LONG, b LONG", "x"))
    assert plain.decode(plain.encode(Row(a=1, b=None))) == (1, None)  # a Row has its own idea of "in"
    lists = StructCodec(as_struct("a ARRAY<DOUBLE>", "x"))
    assert lists.decode(lists.encode((np.array([1.5, 2.5]),))) == ([1.5, 2.5],)


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        ("n LONG", (1, 2)),
        ("n LONG", ()),
        ("n LONG", 5),
        ("n LONG", None),
        ("n LONG", ("5",)),
        ("n BYTE", (128,)),
        ("n LONG, m LONG", {"n": 1, "m": 2}),
        ("s STRING", (5,)),
        ("s STRING", "x"),
        ("s STRING, t STRING", "xy"),
        ("b BOOLEAN", (1,)),
        ("b BINARY", (5,)),
        ("d DECIMAL(3, 1)", (Decimal(100),)),
        ("a ARRAY<INT>", ("12",)),
        ("m MAP<INT, INT>", ([1],)),
        ("t TIMESTAMP", (5,)),
    ],
)
def test_a_row_that_does_not_fit_is_refused(schema: str, row: Any) -> None:
    with pytest.raises(StatefulProcessorError, match=r"STATE_STORE_VALUE.*is not a row of"):
        StructCodec(as_struct(schema, "x")).encode(row)


@pytest.mark.parametrize("type_", [t.NullType(), t.YearMonthIntervalType(), t.VariantType()])
def test_a_type_that_state_cannot_hold_is_refused(type_: t.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match=r"'v'.*which state cannot hold"):
        StructCodec(t.StructType().add("v", t.ArrayType(type_)))


def test_ddl_is_parsed() -> None:
    schema = as_struct(
        "a int NOT NULL COMMENT 'it is', `b c` Decimal(10,2), d: interval day to second, e varchar(3)", "x"
    )
    assert [(field.name, field.dataType, field.nullable) for field in schema] == [
        ("a", t.IntegerType(), False),
        ("b c", t.DecimalType(10, 2), True),
        ("d", t.DayTimeIntervalType(0, 3), True),
        ("e", t.StringType(), True),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a INT b INT",
        "a INT,",
        "a FOO",
        "a ARRAY<INT",
        "a DECIMAL(x)",
        "a INTERVAL YEAR",
        "INT",
        "a INT >",
    ],
)
def test_invalid_ddl_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchemaError, match="the schema of variable 'v'"):
        as_struct(text, "variable 'v'")


def test_a_schema_that_is_neither_struct_nor_ddl_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="expected a StructType or DDL"):
        as_struct(t.LongType(), "variable 'v'")  # type: ignore[arg-type]
