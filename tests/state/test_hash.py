"""The numpy version of Spark's hash equals values that Spark computed, and a plain Python version.

``integration/test_state_reading.py`` compares with a running Spark.
"""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding.layout import hash_columns, shards_of

_MASK = 0xFFFFFFFF


def _word(seed: int, word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK
    word = (word << 15 | word >> 17) & _MASK
    seed ^= word * 0x1B873593 & _MASK
    seed = (seed << 13 | seed >> 19) & _MASK
    return (seed * 5 + 0xE6546B64) & _MASK


def _end(seed: int, length: int) -> int:
    seed ^= length
    seed = (seed ^ seed >> 16) * 0x85EBCA6B & _MASK
    seed = (seed ^ seed >> 13) * 0xC2B2AE35 & _MASK
    seed ^= seed >> 16
    return seed - (1 << 32) if seed >> 31 else seed


def _hash_bytes(value: bytes, seed: int = 42) -> int:
    whole = len(value) // 4 * 4
    for at in range(0, whole, 4):
        seed = _word(seed, int.from_bytes(value[at : at + 4], "little"))
    for byte in value[whole:]:
        seed = _word(seed, (byte - 256 if byte > 127 else byte) & _MASK)
    return _end(seed, len(value))


def _hash_long(value: int, seed: int = 42) -> int:
    return _end(_word(_word(seed, value & _MASK), value >> 32 & _MASK), 8)


#: Results of ``SELECT hash(…)`` on Spark 4.3.
_SPARK: list[tuple[list[tuple[Any, pa.DataType]], int]] = [
    ([("", pa.string())], 142593372),
    ([("ABC", pa.string())], -757602832),
    ([("żółć 🔑", pa.string())], 210670754),
    ([(b"\xff\x80\x00", pa.binary())], -165584264),
    ([(True, pa.bool_())], -559580957),
    ([(-7, pa.int8())], -1618159745),
    ([(-32768, pa.int16())], -1871935946),
    ([(42, pa.int32())], 29417773),
    ([(-9223372036854775808, pa.int64())], -853646085),
    ([(-0.0, pa.float32())], 933211791),
    ([(1.5, pa.float32())], -221251528),
    ([(-0.0, pa.float64())], -1670924195),
    ([(float("nan"), pa.float64())], -1281358385),
    ([(-1e308, pa.float64())], -1836746541),
    ([(date(1969, 12, 31), pa.date32())], -1604776387),
    ([(datetime(2026, 11, 21, 14, 5, tzinfo=timezone.utc), pa.timestamp("us", "UTC"))], 913837073),
    ([(Decimal("-1.25"), pa.decimal128(18, 2))], -550551638),
    ([(Decimal("-1.25"), pa.decimal128(38, 2))], -342901333),
    ([(Decimal("128"), pa.decimal128(20, 0))], -544401882),
    ([(None, pa.string())], 42),
    ([(None, pa.int64()), ("a", pa.string())], 1485273170),
    ([("a", pa.string()), (1, pa.int64()), (None, pa.float64())], 1838122449),
]


@pytest.mark.parametrize(("key", "expected"), _SPARK)
def test_hashes_equal_those_that_spark_computed(key: list[tuple[Any, pa.DataType]], expected: int) -> None:
    assert hash_columns([pa.array([value], type_) for value, type_ in key]).tolist() == [expected]


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=30), st.integers(0, 5))
def test_bytes_of_any_length_and_offset_are_hashed_like_spark(values: list[bytes], cut: int) -> None:
    column = pa.array(values).slice(cut % len(values))
    assert hash_columns([column]).tolist() == [_hash_bytes(value) for value in column.to_pylist()]
    large = pa.array([value.hex() for value in values], pa.large_string())
    assert hash_columns([large]).tolist() == [_hash_bytes(value.hex().encode()) for value in values]
    repeated = pa.array([value.hex() for value in values]).dictionary_encode()
    assert hash_columns([repeated]).tolist() == hash_columns([large]).tolist()


@settings(max_examples=40)
@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_longs_and_nulls_are_hashed_like_spark(values: list[int | None]) -> None:
    expected = [42 if value is None else _hash_long(value) for value in values]
    assert hash_columns([pa.array(values, pa.int64())]).tolist() == expected
    text = pa.array(["x"] * len(values))
    chained = [_hash_bytes(b"x", seed & _MASK) for seed in expected]
    assert hash_columns([pa.array(values, pa.int64()), text]).tolist() == chained


@settings(max_examples=40)
@given(st.lists(st.integers(-(10**38) + 1, 10**38 - 1), min_size=1, max_size=20))
def test_large_decimals_are_hashed_by_their_shortest_encoding(values: list[int]) -> None:
    def java(value: int) -> bytes:
        size = ((value if value >= 0 else ~value).bit_length() // 8) + 1
        return value.to_bytes(size, "big", signed=True)

    column = pa.array([Decimal(value) for value in values], pa.decimal128(38, 0))
    assert hash_columns([column]).tolist() == [_hash_bytes(java(value)) for value in values]


def test_both_zeros_have_one_hash_and_all_nans_have_one() -> None:
    for type_, int_type in ((pa.float32(), np.uint32), (pa.float64(), np.uint64)):
        bits = np.array([0, 1 << (type_.bit_width - 1)], int_type)
        zeros = pa.array(bits.view(type_.to_pandas_dtype()))
        assert len(set(hash_columns([zeros]).tolist())) == 1
        nan = np.array([np.nan, -np.nan], type_.to_pandas_dtype())
        assert len(set(hash_columns([pa.array(nan, from_pandas=False)]).tolist())) == 1


def test_the_unit_of_a_timestamp_does_not_change_its_hash() -> None:
    moment = datetime(1969, 7, 20, 20, 17, 40, tzinfo=timezone.utc)
    units = [pa.array([moment], pa.timestamp(unit, "UTC")) for unit in ("s", "ms", "us")]
    assert len({hash_columns([column])[0] for column in units}) == 1


@settings(max_examples=40)
@given(st.lists(st.text(), min_size=1, max_size=30), st.integers(1, 50))
def test_the_shard_of_a_key_is_within_range(keys: list[str], shards: int) -> None:
    found = shards_of([pa.array(keys)], shards)
    hashes = hash_columns([pa.array(keys)]).tolist()
    assert found.tolist() == [value % shards for value in hashes]


def test_no_rows_have_no_hashes_and_an_unsupported_type_is_refused() -> None:
    assert hash_columns([pa.array([], pa.string())]).tolist() == []
    with pytest.raises(InvalidSchemaError, match="list<item: int32>"):
        hash_columns([pa.array([[1]], pa.list_(pa.int32()))])
