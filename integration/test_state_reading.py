"""The shard of a key as Python computes it is the shard that Spark sends its rows to."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from kafka_eos_source.state.spark_hash import hash_columns, shards_of

_ROWS = 4_000
_SEED = 20_261_121

_TYPES = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "short": pa.int16(),
    "int": pa.int32(),
    "long": pa.int64(),
    "real": pa.float32(),
    "double": pa.float64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "day": pa.date32(),
    "moment": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
    "small_decimal": pa.decimal128(18, 4),
    "large_decimal": pa.decimal128(38, 6),
}
_FLOATS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-310, -1.5]
_TEXTS = ["", "a", "ab", "abc", "abcd", "żółć", "鍵", "🔑🗝", "\0", "e\u0301", "x" * 1000, "\uffff"]


def _value(name: str, type_: pa.DataType, random_: random.Random) -> Any:
    if random_.random() < 0.05:
        return None
    if pa.types.is_boolean(type_):
        return random_.random() < 0.5
    if pa.types.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        return random_.choice([0, 1, -1, limit - 1, -limit, random_.randrange(-limit, limit)])
    if pa.types.is_floating(type_):
        value = random_.choice([*_FLOATS, random_.gauss(0, 1e6)])
        return float(np.float32(value)) if type_ == pa.float32() else value
    if pa.types.is_string(type_):
        return random_.choice(_TEXTS) + "".join(random_.choices("aż鍵🔑", k=random_.randrange(9)))
    if pa.types.is_binary(type_):
        return random_.randbytes(random_.randrange(20))
    if pa.types.is_date(type_):
        return datetime.date(1970, 1, 1) + datetime.timedelta(days=random_.randrange(-200_000, 200_000))
    if pa.types.is_timestamp(type_):
        at = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc if type_.tz else None)
        return at + datetime.timedelta(microseconds=random_.randrange(-(10**16), 10**16))
    digits = random_.randrange(1, type_.precision + 1)
    unscaled = random_.choice([1, -1]) * random_.randrange(10**digits)
    return Decimal(unscaled).scaleb(-type_.scale)


def _table(random_: random.Random) -> pa.Table:
    return pa.table(
        {
            name: pa.array([_value(name, type_, random_) for _ in range(_ROWS)], type_)
            for name, type_ in _TYPES.items()
        }
    )


def _columns(rows: pa.Table, names: list[str]) -> list[pa.Array]:
    return [rows.column(name).combine_chunks() for name in names]


def test_hash_and_shard_are_those_of_spark(spark: SparkSession) -> None:
    random_ = random.Random(_SEED)
    rows = _table(random_)
    several = [random_.sample(sorted(_TYPES), random_.randrange(2, 5)) for _ in range(6)]
    groups = [[name] for name in _TYPES] + several
    frame = spark.createDataFrame(rows)
    found = frame.select(*(f.hash(*names).alias(f"h{n}") for n, names in enumerate(groups))).toArrow()
    for n, names in enumerate(groups):
        ours = hash_columns(_columns(rows, names))
        theirs = found.column(n).to_numpy()
        wrong = np.flatnonzero(ours != theirs)
        assert len(wrong) == 0, (names, rows.select(names).take(wrong[:3]).to_pylist())

    placed = frame.repartition(7, "text", "long").withColumn("shard", f.spark_partition_id()).toArrow()
    ours_placed = shards_of(_columns(placed, ["text", "long"]), 7)
    assert np.array_equal(ours_placed, placed.column("shard").to_numpy())
    assert len(set(ours_placed.tolist())) == 7
