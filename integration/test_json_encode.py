"""Random rows through Spark's ``to_json`` and casts, and through the encoder in C: the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kafka_eos_source.app.records import as_text
from kafka_eos_source.documents.encode import JsonEncoding, KeyEncoding
from kafka_eos_source.errors import InvalidSchemaError
from tests import ROOT
from tests.support.spark_text import arrow_type, double, leaves, types, values

ROWS = 25
TYPES = 60
#: Zones in whose history the databases of Java and Python agree, and other forms of names.
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Africa/Monrovia",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "-07:00:30",
    "GMT+5:30",
    "PST",
)
_MICROS = 10**6
#: Where the offset of a zone changes, years with another number of digits, the first and the last timestamps.
MOMENTS = [
    moment + step
    for moment in (
        *(0, -1, 10**15, 253_402_300_800 * _MICROS, -62_135_596_800 * _MICROS, -62_167_219_200 * _MICROS),
        *(1_711_846_800 * _MICROS, 1_729_990_800 * _MICROS, 1_710_054_000 * _MICROS, 1_730_613_600 * _MICROS),
        *(-2_422_054_408 * _MICROS, -2_717_650_800 * _MICROS, 63_593_070 * _MICROS, 4_102_444_800 * _MICROS),
        *(40_000_000_000 * _MICROS, 2**63 - 2, -(2**63) + 1),
    )
    for step in (-1, 0, 1)
]


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Returns examples, always the same."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found[:count]


def has_floating(type_: DataType) -> bool:
    text = type_.simpleString()
    return "float" in text or "double" in text


@pytest.fixture
def read(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[[pa.Table, StructType], DataFrame]]:
    """Gives Spark a table through a file, in which Spark converts nothing and checks no string."""
    rebase = "spark.sql.parquet.datetimeRebaseModeInRead"
    spark.conf.set(rebase, "CORRECTED")
    number = itertools.count()

    def by_file(table: pa.Table, schema: StructType) -> DataFrame:
        path = tmp_path / f"{next(number)}.parquet"
        pq.write_table(table, path)
        return spark.read.schema(schema).parquet(str(path))

    yield by_file
    spark.conf.unset(rebase)
    spark.conf.unset("spark.sql.session.timeZone")


def test_documents_and_keys_have_the_bytes_that_spark_writes(
    spark: SparkSession, read: Callable[[pa.Table, StructType], DataFrame]
) -> None:
    found = [each for each in drawn(types(floating=True), TYPES) if not isinstance(each, ArrayType | MapType)]
    found += [MapType(each, StringType()) for each in drawn(leaves(floating=True), 25)]
    found = [each for each in found if "map<binary" not in each.simpleString()]
    columns = [pa.array(drawn(values(each), ROWS), arrow_type(each)) for each in found]
    simple: list[DataType] = [DecimalType(38, 0), DecimalType(38, 10), DateType(), TimestampType()]
    for each in (*simple, TimestampNTZType(), StringType(), BinaryType()):
        found.append(each)
        columns.append(pa.array(drawn(values(each), ROWS), arrow_type(each)))
    slices = [MOMENTS[at : at + ROWS] for at in range(0, len(MOMENTS), ROWS)]
    for moments, each in itertools.product(slices, (TimestampType(), TimestampNTZType())):
        found.append(each)
        columns.append(pa.array([*moments, *[None] * (ROWS - len(moments))], arrow_type(each)))
    schema = StructType([StructField(f"c{number}", each) for number, each in enumerate(found)])
    table = pa.table(columns, schema.names)
    keys = [each for each in schema if not has_floating(each.dataType)]
    assert len(keys) > 40, "the random types are of all kinds"

    frame = read(table, schema)
    (batch,) = table.to_batches()
    for zone in ZONES:
        spark.conf.set("spark.sql.session.timeZone", zone)
        written = frame.select(
            sf.to_json(sf.struct(*schema.names)).alias("value"),
            as_text(sf.struct(*(each.name for each in keys)), StructType(keys)).alias("key"),
            *(as_text(sf.col(each.name), each.dataType).cast("binary").alias(each.name) for each in keys),
        ).toArrow()
        assert_equal(schema, zone, JsonEncoding(schema, zone).encode(batch), written["value"])
        together = KeyEncoding(StructType(keys), zone).encode(batch.select([each.name for each in keys]))
        assert_equal(StructType(keys), zone, together, written["key"])
        for each in keys:
            made = KeyEncoding(each.dataType, zone).encode(batch[each.name])
            assert_equal(each.dataType, zone, made, written[each.name])

    spark.conf.set("spark.sql.jsonGenerator.ignoreNullFields", "false")
    written = frame.select(sf.to_json(sf.struct(*schema.names)).alias("value")).toArrow()
    spark.conf.unset("spark.sql.jsonGenerator.ignoreNullFields")
    assert_equal(schema, zone, JsonEncoding(schema, zone, has_nulls=True).encode(batch), written["value"])

    spark.conf.set("spark.sql.ansi.enabled", "false")
    small = [each for each in keys if isinstance(each.dataType, DecimalType)]
    texts = (as_text(sf.col(each.name), each.dataType).alias(each.name) for each in small)
    written = frame.select(*texts).toArrow()
    spark.conf.unset("spark.sql.ansi.enabled")
    for each in small:
        made = KeyEncoding(each.dataType, "UTC", is_ansi=False).encode(batch[each.name])
        assert_equal(each.dataType, "UTC", made, written[each.name])


def test_the_table_of_the_documentation(spark: SparkSession, read: object) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    page = (ROOT / "docs" / "json.md").read_text()
    table = page.partition("<!-- read by integration/test_json_encode.py -->\n")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert len(lines) == 20
    cells = [[each.strip(" `") for each in line.strip("|").split(" | ")[1:]] for line in lines]
    columns = [sf.expr(value).alias(f"c{number}") for number, (value, _, _) in enumerate(cells)]
    frame = spark.range(1).select(*columns)
    (batch,) = frame.toArrow().to_batches()
    keys = [as_text(sf.col(each.name), each.dataType).alias(each.name) for each in frame.schema]
    written = frame.select(sf.to_json(sf.struct("*")).alias("all"), *keys).toArrow()
    for (_, value, key), each in zip(cells, frame.schema, strict=True):
        column = batch.select([each.name])
        (document,) = JsonEncoding(StructType([each]), "Europe/Berlin").encode(column).to_pylist()
        expected = f'"{each.name}":{value}'
        assert document.decode() == "{" + expected + "}"
        assert expected in written["all"][0].as_py()
        if key == "by Spark":
            with pytest.raises(InvalidSchemaError):
                KeyEncoding(each.dataType, "Europe/Berlin")
        else:
            (made,) = KeyEncoding(each.dataType, "Europe/Berlin").encode(batch[each.name]).to_pylist()
            assert key in (made.decode(), "its bytes")
            assert made == written[each.name].cast(pa.binary())[0].as_py()


def assert_equal(type_: DataType, zone: str, made: pa.Array, written: pa.ChunkedArray) -> None:
    ours, theirs = made.to_pylist(), written.cast(pa.binary()).to_pylist()
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            assert one is not None, (zone, row, other)
            assert other is not None, (zone, row, one)
            at = next(i for i in itertools.count() if one[i : i + 1] != other[i : i + 1])
            around = slice(max(at - 60, 0), at + 60)
            what = f"{zone}, row {row}, {type_.simpleString()[:200]}"
            raise AssertionError(f"{what}: {one[around]!r} != {other[around]!r}")


def test_strings_that_are_no_utf8_and_floating_point_numbers(
    read: Callable[[pa.Table, StructType], DataFrame],
) -> None:
    kinds = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c1 c2 e0 e1 ed ef f0 f1 f4 f5 22")
    texts = [bytes(each) for size in (1, 2, 3) for each in itertools.product(kinds, repeat=size)]
    texts += [bytes([a, *rest]) for a in (0xF0, 0xF1, 0xF4) for rest in itertools.product(kinds, repeat=3)]
    encoded = pa.array(texts, pa.binary())
    strings = pa.Array.from_buffers(pa.string(), len(texts), encoded.buffers())
    rng = np.random.default_rng(5)
    doubles = rng.integers(0, 2**64, 100_000, np.uint64).view(np.float64)
    doubles[:50_000] = np.round(rng.random(50_000) * 10.0 ** rng.integers(-9, 9, 50_000), 4)
    floats = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    schema = StructType(
        [
            StructField("s", ArrayType(StringType())),
            StructField("d", ArrayType(DoubleType())),
            StructField("f", ArrayType(FloatType())),
        ]
    )
    columns = [
        pa.ListArray.from_arrays(pa.array([0, len(each)], pa.int32()), each)
        for each in (strings, pa.array(doubles), pa.array(floats))
    ]
    table = pa.table(columns, ["s", "d", "f"])
    (written,) = (
        read(table, schema).select(*(sf.to_json(name).alias(name) for name in schema.names)).collect()
    )
    made = {
        name: JsonEncoding(schema[name].dataType, "UTC").encode(column)[0].as_py().decode()
        for name, column in zip(schema.names, columns, strict=True)
    }
    assert made["s"] == written["s"]
    for name, numbers in (("d", doubles), ("f", floats)):
        longer = 0
        pairs = zip(
            made[name][1:-1].split(","), written[name][1:-1].split(","), numbers.tolist(), strict=True
        )
        for ours, theirs, number in pairs:
            assert ours.strip('"') == double(number, is_float=name == "f")
            if ours != theirs:  # Java before 19 writes too many digits, or not the closest ones
                longer += 1
                assert numbers.dtype.type(theirs) == number
                assert len(theirs) >= len(ours)
                assert abs(number) >= (2**53 if name == "d" else 2**24) or abs(number) < 1e-3, number
        assert longer < (0.01 if name == "d" else 0.2) * len(numbers)
