"""The vectorised keys and hash agree with plain Python; the description of a store is read back."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import struct
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import InvalidSchemaError, StateFormatError, StateMismatchError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.binary import RowCodec
from kafka_eos_source.state.encoding.describe import META_KEY, Description, TableDescription
from kafka_eos_source.state.encoding.layout import (
    KeyCodec,
    hash_columns,
    keyed_keys,
    shards_of,
    split_keys,
    timed_keys,
)

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def _timestamps(unit: str, tz: str | None) -> st.SearchStrategy:
    return _INT64.map(lambda value: pa.scalar(value, pa.int64()).cast(pa.timestamp(unit, tz)))


VALUES: dict[pa.DataType, st.SearchStrategy] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): _INT64,
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(38, 4): st.integers(-(10**38) + 1, 10**38 - 1).map(
        lambda value: decimal.Decimal(value).scaleb(-4, decimal.Context(prec=40))
    ),
    pa.decimal128(5, 0): st.integers(-99999, 99999).map(decimal.Decimal),
    pa.string(): st.text(max_size=6),
    pa.large_string(): st.text(max_size=6),
    pa.binary(): st.binary(max_size=6) | st.sampled_from([b"\xff", b"\xff\xff", b"\xff\x00", b"\x00"]),
    pa.large_binary(): st.binary(max_size=6),
    pa.date32(): st.dates(),
    pa.timestamp("us"): _timestamps("us", None),
    pa.timestamp("us", "UTC"): _timestamps("us", "UTC"),
    pa.timestamp("ms", "Europe/Berlin"): _timestamps("ms", "Europe/Berlin"),
}


@st.composite
def tables(draw: st.DrawFn, *, columns: int = 3, normal: bool = False) -> pa.Table:
    types = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=columns))
    rows = draw(st.integers(0, 6))
    arrays = [
        pa.array(draw(st.lists(st.none() | VALUES[type_], min_size=rows, max_size=rows)), type_)
        for type_ in types
    ]
    table = pa.table(arrays, names=[f"c{index}" for index in range(len(types))])
    # A slice has offsets of its own in every buffer.
    return table.slice(draw(st.integers(0, min(1, rows))))


def plain(column: pa.Array) -> list[object]:
    """Returns values that are equal if Spark groups them together."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    if pa.types.is_floating(column.type):
        return [
            None if value is None else ("nan" if math.isnan(value) else value + 0.0)
            for value in column.to_pylist()
        ]
    return column.to_pylist()


def columns_of(table: pa.Table) -> list[pa.Array]:
    return [
        column.combine_chunks() if column.num_chunks != 1 else column.chunk(0) for column in table.columns
    ]


@given(tables())
def test_keys_are_unambiguous_and_can_be_decoded(table: pa.Table) -> None:
    codec = KeyCodec(table.schema)
    keys = codec.encode(columns_of(table))
    assert keys.type == pa.binary()
    assert keys.null_count == 0
    decoded = codec.decode(keys)
    for column, given_column in zip(decoded, columns_of(table), strict=True):
        assert column.type == given_column.type
        column.validate(full=True)
        assert plain(column) == plain(given_column)
    # The same key for the same group, and for no other.
    groups = list(zip(*(plain(column) for column in columns_of(table)), strict=True))
    for one, one_group in zip(keys.to_pylist(), groups, strict=True):
        for other, other_group in zip(keys.to_pylist(), groups, strict=True):
            assert (one == other) == (one_group == other_group)


@given(st.sampled_from([type_ for type_ in VALUES if not pa.types.is_floating(type_)]), st.data())
def test_keys_of_one_column_sort_like_its_values(type_: pa.DataType, data: st.DataObject) -> None:
    column = pa.array(data.draw(st.lists(VALUES[type_], min_size=2, max_size=8)), type_)
    keys = KeyCodec(pa.schema([("k", type_)])).encode([column]).to_pylist()
    values = plain(column)
    as_bytes = [value.encode() if isinstance(value, str) else value for value in values]
    assert sorted(keys) == [key for _, key in sorted(zip(as_bytes, keys, strict=True))]


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=8))
def test_floats_sort_and_nan_is_the_largest(values: list[float]) -> None:
    keys = KeyCodec(pa.schema([("k", pa.float64())])).encode([pa.array([*values, math.nan])]).to_pylist()
    assert sorted(keys)[-1] == keys[-1]
    order = sorted(range(len(values)), key=lambda index: keys[index])
    assert [values[index] for index in order] == sorted(values)


def test_every_nan_is_one_group() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    keys = KeyCodec(pa.schema([("k", pa.float64())])).encode([pa.array([math.nan, odd, -0.0, 0.0])])
    assert len(set(keys.to_pylist())) == 2


def test_the_key_of_one_string_column_is_its_bytes_without_a_copy() -> None:
    column = pa.array(["a", "", "ä"])
    keys = KeyCodec(pa.schema([("k", pa.string())])).encode([column])
    assert keys.to_pylist() == [b"a", b"", "ä".encode()]
    assert keys.buffers()[2].address == column.buffers()[2].address


def test_strings_with_invalid_utf8_survive_encoding_and_decoding() -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"\xfe"]).buffers())
    codec = KeyCodec(pa.schema([("k", pa.string())]))
    assert codec.decode(codec.encode([bad]))[0].cast(pa.binary()).to_pylist() == [b"\xff", b"\xfe"]


def test_a_column_type_that_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match=r"'k' is list<.*which state cannot hold"):
        KeyCodec(pa.schema([("k", pa.list_(pa.int64()))]))
    with pytest.raises(InvalidSchemaError, match="no grouping column"):
        KeyCodec(pa.schema([]))


def test_keys_of_another_codec_are_refused() -> None:
    text = KeyCodec(pa.schema([("a", pa.string()), ("b", pa.int32())]))
    with pytest.raises(ValueError, match="expected"):
        text.decode(pa.array([b"x"]))
    with pytest.raises(ValueError, match="longer or shorter"):
        text.decode(pa.array([b"\x00\x00\x00\x00\x01\x00\x00\x00\x00more"]))
    with pytest.raises(ValueError, match="shorter"):
        text.decode(pa.array([b"\x00\x00\x00\x09\x01\x00\x00\x00\x00mor"]))
    with pytest.raises(ValueError, match="not 8 bytes long"):
        KeyCodec(pa.schema([("a", pa.int64())])).decode(pa.array([b"1234567"]))


_GROUPS = st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5), _INT64), max_size=6)


@given(st.integers(1, 127), _GROUPS, st.booleans())
def test_vectorised_keys_equal_those_of_the_scalar_function(
    table: int, rows: list[tuple[bytes, bytes, int]], with_rest: bool
) -> None:
    groups = pa.array([group for group, _, _ in rows], pa.binary())
    rests = pa.array([rest for _, rest, _ in rows], pa.binary())
    keys = keyed_keys(table, groups, rests if with_rest else None)
    assert keys.to_pylist() == [
        layout.keyed(table, group, rest if with_rest else b"") for group, rest, _ in rows
    ]


@given(st.integers(129, 255), _GROUPS, st.booleans())
def test_vectorised_time_keys_equal_those_of_the_scalar_function(
    table: int, rows: list[tuple[bytes, bytes, int]], with_rest: bool
) -> None:
    groups = pa.array([group for group, _, _ in rows], pa.binary())
    rests = pa.array([rest for _, rest, _ in rows], pa.binary())
    times = np.array([time for _, _, time in rows], np.int64)
    keys = timed_keys(table, times, groups, rests if with_rest else None)
    assert keys.to_pylist() == [
        layout.timed(table, time, group, rest if with_rest else b"") for group, rest, time in rows
    ]


_KEYS = st.lists(
    st.builds(layout.keyed, st.integers(1, 127), st.binary(max_size=5), st.binary(max_size=5))
    | st.builds(layout.timed, st.integers(129, 255), _INT64, st.binary(max_size=5), st.binary(max_size=5)),
    max_size=8,
)


@given(_KEYS, st.integers(0, 1))
def test_vectorised_splitting_equals_the_scalar_function(keys: list[bytes], skip: int) -> None:
    entries = split_keys(pa.array(keys, pa.binary()).slice(skip))
    columns = entries.tables.tolist(), entries.group_keys.to_pylist(), entries.rests.to_pylist()
    found = zip(*columns, entries.times_ms.tolist(), strict=True)
    expected = [layout.split(key) for key in keys[skip:]]
    assert [layout.Entry(*row) for row in found] == [
        entry._replace(time_ms=entry.time_ms or 0) for entry in expected
    ]


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4))
def test_vectorised_splitting_refuses_the_same_keys_as_the_scalar_function(keys: list[bytes]) -> None:
    def refused(key: bytes) -> bool:
        try:
            layout.split(key)
        except ValueError:
            return True
        return False

    if any(refused(key) for key in keys):
        with pytest.raises(ValueError, match="among the keys"):
            split_keys(pa.array(keys, pa.binary()))
    else:
        split_keys(pa.array(keys, pa.binary()))


@given(tables(columns=4))
def test_rows_survive_encoding_and_decoding_bit_for_bit(table: pa.Table) -> None:
    codec = RowCodec(table.schema)
    rows = codec.encode(columns_of(table))
    with_missing = pa.concat_arrays([pa.array([None], pa.binary()), rows])
    for column, given_column in zip(codec.decode(with_missing), columns_of(table), strict=True):
        assert not column[0].is_valid
        assert column[1:].type == given_column.type
        if pa.types.is_floating(column.type):
            signs = [
                math.copysign(1, value) for value in given_column.drop_null().to_pylist() if value == value
            ]
            assert [math.copysign(1, v) for v in column.drop_null().to_pylist() if v == v] == signs
        assert plain(column[1:]) == plain(given_column)


def test_columns_that_are_never_null_have_no_null_byte() -> None:
    codec = RowCodec(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    assert codec.encode([pa.array([1])]).to_pylist() == [b"\x80\0\0\0\0\0\0\1"]
    with pytest.raises(InvalidSchemaError, match="'n', which is declared not nullable"):
        codec.encode([pa.array([None], pa.int64())])


_DESCRIPTION = Description(
    kind="aggregate",
    key=pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC")), ("d", pa.decimal128(10, 2))]),
    tables={
        2: TableDescription("counts", pa.schema([pa.field("n", pa.int64(), nullable=False)])),
        0x81: TableDescription(
            "lists",
            rest=pa.schema([("i", pa.int32())]),
            value=pa.schema(
                [
                    (
                        "l",
                        pa.list_(
                            pa.struct([("a", pa.date32()), ("b", pa.map_(pa.string(), pa.duration("us")))])
                        ),
                    ),
                    ("b", pa.time64("us")),
                ]
            ),
            encoding="lists",
            details={"ttl_ms": 5},
        ),
    },
    details={"größe": [1, None]},
)


def test_a_description_survives_encoding_and_decoding() -> None:
    written = _DESCRIPTION.to_json()
    assert Description.from_json(written) == _DESCRIPTION
    assert Description.from_json(written).to_json() == written
    assert layout.split(META_KEY) == (1, b"", b"", None)


def test_invalid_bytes_are_not_a_description() -> None:
    for bad in (
        b"",
        b"[]",
        b"{}",
        b'"x"',
        b"\xff",
        b'{"version":1}',
        _DESCRIPTION.to_json().replace(b'"shards_by"', b'"other"'),
        _DESCRIPTION.to_json().replace(b'"int32"', b'"x"'),
    ):
        with pytest.raises(StateMismatchError, match="cannot be read"):
            Description.from_json(bad)
    with pytest.raises(StateFormatError, match="version 2, expected 1"):
        Description.from_json(_DESCRIPTION.to_json().replace(b'"version":1', b'"version":2'))
    with pytest.raises(TypeError, match="a description cannot contain the type"):
        Description("x", pa.schema([("k", pa.month_day_nano_interval())]), {}).to_json()


def test_dates_survive_encoding_and_decoding() -> None:
    codec = KeyCodec(pa.schema([("d", pa.date32())]))
    assert codec.decode(codec.encode([pa.array([dt.date(1969, 12, 31)])]))[0].to_pylist() == [
        dt.date(1969, 12, 31)
    ]


# ---------------------------------------- Spark's hash
#
# The numpy version equals values that Spark computed, and a plain Python version.
# ``integration/test_state_reading.py`` compares with a running Spark.


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
