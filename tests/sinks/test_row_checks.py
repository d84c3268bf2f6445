"""Rules for rows, on every form of array that Spark or a user's function may produce."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.sinks.row_checks import (
    DecimalFits,
    FixedBytes,
    FloatRange,
    IntegerRange,
    LongestText,
    NotNull,
    OneOf,
    RowRule,
    TimestampRange,
    Utf8,
    UuidText,
    WithoutNul,
    kind_of,
)


def forms(column: pa.Array) -> Iterator[pa.Array]:
    """Yields the same values as they are, in a slice, and in each encoding that Arrow has for the type."""
    yield column
    yield pa.concat_arrays([column[:1], column, column[:1]]).slice(1, len(column))
    kind = column.type
    if pa.types.is_string(kind):
        yield column.cast(pa.large_string())
        yield column.cast(pa.string_view())
    if pa.types.is_binary(kind):
        yield column.cast(pa.large_binary())
        yield column.cast(pa.binary_view())
    if not pa.types.is_nested(kind):
        yield column.dictionary_encode()
        yield pc.run_end_encode(column)


def broken(rule: RowRule, column: pa.Array) -> list[bool]:
    """Returns which rows break a rule, the same for every form of the column; also after pickling."""
    rule = pickle.loads(pickle.dumps(rule))
    found = [rule.broken(each) for each in forms(column)]
    assert all(each.type == pa.bool_() and not each.null_count for each in found)
    assert all(each == found[0] for each in found), [each.to_pylist() for each in found]
    return [bool(each) for each in found[0].to_pylist()]


def texts(*values: bytes | None) -> pa.Array:
    """Returns texts that need not be UTF-8, as Spark may pass them."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


def test_null() -> None:
    assert broken(NotNull(column="a"), pa.array([1, None, 3])) == [False, True, False]
    assert broken(NotNull(column="a"), pa.array([1, 2])) == [False, False]
    assert broken(NotNull(column="a"), pa.nulls(2, pa.string())) == [True, True]


def test_null_in_a_dictionary() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([None, "x"]))
    assert NotNull(column="a").broken(column).to_pylist() == [True, False, True]


NESTED = pa.array(
    [
        {"city": "a", "tags": [{"n": 1}, {"n": 2}], "by": [("k", 1)]},
        {"city": None, "tags": [{"n": 1}], "by": []},
        None,
        {"city": "b", "tags": [{"n": 1}, {"n": None}], "by": None},
        {"city": "c", "tags": [None], "by": [("k", None), ("l", 2)]},
        {"city": "d", "tags": None, "by": [("m", 3)]},
        {"city": "e\0", "tags": [], "by": [("\0", 3)]},
    ],
    pa.struct(
        [
            ("city", pa.string()),
            ("tags", pa.list_(pa.struct([("n", pa.int64())]))),
            ("by", pa.map_(pa.string(), pa.int64())),
        ]
    ),
)


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ((), [2]),
        (("city",), [1]),
        (("tags",), [5]),
        (("tags", "element"), [4]),
        (("tags", "element", "n"), [3]),
        (("by",), [3]),
        (("by", "value"), [4]),
        (("by", "key"), []),
    ],
)
def test_null_in_nested_values(path: tuple[str, ...], rows: list[int]) -> None:
    """A value inside of something that is null is not there, so it breaks no rule."""
    rule = NotNull(column="a", path=path)
    assert [number for number, bad in enumerate(broken(rule, NESTED)) if bad] == rows


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.string()), pa.large_list(pa.string()), pa.list_(pa.string(), 2), pa.list_view(pa.string())],
)
def test_every_kind_of_list(kind: pa.DataType) -> None:
    column = pa.array([["a", "b"], ["c", None], None, ["d\0", "e"]], kind)
    assert broken(NotNull(column="a", path=("element",)), column) == [False, True, False, False]
    assert broken(WithoutNul(column="a"), column) == [False, False, False, True]


def test_texts_are_found_at_any_depth() -> None:
    assert [number for number, bad in enumerate(broken(WithoutNul(column="a"), NESTED)) if bad] == [6]
    assert broken(WithoutNul(column="a", path=("city",)), NESTED)[6]
    assert not any(broken(WithoutNul(column="a", path=("tags",)), NESTED))
    inner = texts(b"good", b"\xff", None)
    listed = pa.ListArray.from_arrays(pa.array([0, 1, 1, 3], pa.int32()), inner)
    assert broken(Utf8(column="a"), listed) == [False, False, True]


def test_a_path_that_does_not_exist_is_a_mistake_of_the_sink() -> None:
    with pytest.raises(KeyError, match="street"):
        NotNull(column="a", path=("street",)).broken(NESTED)


def test_zero_bytes() -> None:
    rule = WithoutNul(column="a")
    assert broken(rule, texts(b"a\0b", b"ab", None, b"\0", b"")) == [True, False, False, True, False]
    assert broken(rule, texts(b"ab", None)) == [False, False]
    assert rule.broken(texts(b"\0", b"good", b"\0").slice(1, 1)).to_pylist() == [False]
    assert broken(rule, pa.nulls(2, pa.string())) == [False, False]
    assert broken(rule, pa.array([], pa.string())) == []


def test_invalid_utf8() -> None:
    assert broken(Utf8(column="a"), texts("žluť".encode(), b"\xc5", None, b"\xed\xa0\x80", b"\0")) == [
        False,
        True,
        False,
        True,
        False,
    ]


@given(st.lists(st.none() | st.binary(max_size=8), max_size=20))
def test_rules_for_texts_of_any_bytes(values: list[bytes | None]) -> None:
    def decodes(value: bytes) -> bool:
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True

    def expected(wrong: Callable[[bytes], bool]) -> list[bool]:
        return [value is not None and wrong(value) for value in values]

    column = texts(*values)
    assert broken(Utf8(column="a"), column) == expected(lambda value: not decodes(value))
    assert broken(WithoutNul(column="a"), column) == expected(lambda value: b"\0" in value)
    bytes_ = LongestText(column="a", most=3, unit="bytes")
    assert broken(bytes_, column) == expected(lambda value: len(value) > 3)
    assert broken(FixedBytes(column="a", length=3), column) == expected(lambda value: len(value) != 3)
    broken(LongestText(column="a", most=3), column)  # whatever the bytes are, no error


@given(st.lists(st.none() | st.text(max_size=8), max_size=20))
def test_lengths_of_texts(values: list[str | None]) -> None:
    column = pa.array(values, pa.string())
    assert broken(LongestText(column="a", most=3), column) == [len(each or "") > 3 for each in values]
    of_bytes = LongestText(column="a", most=3, unit="bytes")
    assert broken(of_bytes, column) == [len((each or "").encode()) > 3 for each in values]
    cut = LongestText(column="a", most=3, spaces_count=False)
    assert broken(cut, column) == [len((each or "").rstrip(" ")) > 3 for each in values]


def test_the_length_of_bytes() -> None:
    column = pa.array([b"1234", b"123", None])
    assert broken(LongestText(column="a", most=3, unit="bytes"), column) == [True, False, False]
    assert FixedBytes(column="a", length=4).broken(pa.array([b"1234", None], pa.binary(4))).to_pylist() == [
        False,
        False,
    ]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integers(values: list[int | None]) -> None:
    column = pa.array(values, pa.int64())
    for low, high in ((-32768, 32767), (0, 2**64 - 1), (-(2**63), 2**63 - 1), (2**63, 2**64)):
        rule = IntegerRange(column="a", low=low, high=high)
        assert broken(rule, column) == [each is not None and not low <= each <= high for each in values]


def test_small_integers_are_not_compared_with_limits_beyond_their_type() -> None:
    column = pa.array([-128, 127, None], pa.int8())
    assert broken(IntegerRange(column="a", low=-32768, high=32767), column) == [False] * 3
    assert broken(IntegerRange(column="a", low=0, high=255), column) == [True, False, False]


@given(
    st.lists(st.none() | st.decimals(-99999, 99999, places=4), max_size=20),
    st.integers(1, 12),
    st.integers(-2, 6),
    st.booleans(),
)
def test_decimals(values: list[Decimal | None], precision: int, scale: int, rounds: bool) -> None:
    column = pa.array(values, pa.decimal128(12, 4))

    def wrong(value: Decimal) -> bool:
        rounded = value.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)
        too_large = abs(rounded if rounds else value) >= Decimal(10) ** (precision - scale)
        return too_large or (not rounds and rounded != value)

    rule = DecimalFits(column="a", precision=precision, scale=scale, rounds=rounds)
    assert broken(rule, column) == [each is not None and wrong(each) for each in values]


def test_decimals_of_other_numbers() -> None:
    rule = DecimalFits(column="a", precision=5, scale=2)
    assert broken(rule, pa.array([999, 1000, -1000, None])) == [False, True, True, False]
    assert broken(rule, pa.array([999.99, 999.996, -1e300, float("inf"), None])) == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert broken(DecimalFits(column="a", precision=38), pa.array([2**63 - 1])) == [False]
    column = pa.array([Decimal("9" * 76), Decimal(1)], pa.decimal256(76, 0))
    assert broken(DecimalFits(column="a", precision=65), column) == [True, False]
    small = pa.array([Decimal("99.9"), None], pa.decimal128(3, 1))
    assert broken(DecimalFits(column="a", precision=38, scale=18), small) == [False, False]


def test_floating_point_numbers() -> None:
    column = pa.array([1.0, float("nan"), float("-inf"), 1e39, -1e39, None])
    single = FloatRange(column="a", most=3.4028235e38)
    assert broken(single, column) == [False, False, False, True, True, False]
    assert broken(FloatRange(column="a", finite=True), column) == [False, True, True, False, False, False]
    both = FloatRange(column="a", most=3.4028235e38, finite=True)
    assert broken(both, column) == [False, True, True, True, True, False]
    assert broken(both, pa.array([1.0, None], pa.float32())) == [False, False]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times(unit: str) -> None:
    first, last = datetime.datetime(1970, 1, 2), datetime.datetime(2038, 1, 19, 3, 14, 7, 999999)
    rule = TimestampRange(column="a", first_us=86_400_000_000, last_us=2**31 * 1_000_000 - 1)
    second = datetime.timedelta(seconds=1)
    values = [first - second, first, last.replace(microsecond=0), last + second, None]
    for zone in (None, "UTC"):
        column = pa.array(values, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
        column = column.cast(pa.timestamp(unit, zone))
        assert broken(rule, column) == [True, False, False, True, False]


def test_dates() -> None:
    rule = TimestampRange(column="a", first_us=0, last_us=86_400_000_000 - 1)
    days = [datetime.date(1969, 12, 31), datetime.date(1970, 1, 1), datetime.date(1970, 1, 2), None]
    for kind in (pa.date32(), pa.date64()):
        assert broken(rule, pa.array(days, kind)) == [True, False, True, False]
    far = pa.array([2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32())
    assert broken(rule, far) == [True, True]


def test_uuids() -> None:
    uuid = "123e4567-E89B-12d3-a456-426614174000"
    forms_of_postgres = ["{" + uuid + "}", uuid.replace("-", ""), "123e-4567-e89b-12d3-a456-4266-1417-4000"]
    wrong = ["", "1" * 31, "g" + uuid[1:], uuid + "\n", "{" + uuid, None]
    column = pa.array([uuid, *forms_of_postgres, *wrong])
    assert broken(UuidText(column="a"), column) == [False, *[True] * 3, *[True] * 5, False]
    assert broken(UuidText(column="a", any_form=True), column) == [*[False] * 4, *[True] * 5, False]
    assert broken(UuidText(column="a"), texts(b"\xff", uuid.encode())) == [True, False]


def test_one_of_a_few() -> None:
    rule = OneOf(column="a", values=("red", "žlutá"))
    assert broken(rule, pa.array(["red", "žlutá", "blue", None])) == [False, False, True, False]
    assert broken(rule, texts(b"\xff", b"red")) == [True, False]
    assert rule.text == "is not one of 'red', 'žlutá'"


def test_a_message_names_column_kind_and_rule() -> None:
    rule = LongestText(column="name", most=1000, of="varchar(1000) of table 'orders'")
    assert rule.text == "is longer than 1,000 characters (varchar(1000) of table 'orders')"
    assert rule.message(pa.string_view()) == (
        "column 'name' (text) is longer than 1,000 characters (varchar(1000) of table 'orders')"
    )
    nested = NotNull(column="a", path=("tags", "element", "n"))
    assert nested.message(NESTED.type) == "column 'a.tags.element.n' (integer) is null"
    assert DecimalFits(column="a", precision=5, scale=2).text == (
        "has more than 3 digits before the decimal point"
    )
    assert TimestampRange(column="a", first_us=0, last_us=2**53).text == (
        "is before 1970-01-01 or after 2255-06-05"
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.dictionary(pa.int8(), pa.large_string()), "text"),
        (pa.binary_view(), "bytes"),
        (pa.binary(4), "bytes"),
        (pa.uint8(), "integer"),
        (pa.float32(), "floating-point number"),
        (pa.decimal256(40, 1), "decimal"),
        (pa.timestamp("ns"), "timestamp"),
        (pa.date64(), "date"),
        (pa.bool_(), "boolean"),
        (pa.struct([]), "struct"),
        (pa.map_(pa.string(), pa.string()), "map"),
        (pa.list_(pa.int8(), 2), "list"),
        (pa.time64("us"), "time64[us]"),
    ],
)
def test_the_kind_of_a_value(kind: pa.DataType, name: Any) -> None:
    assert kind_of(kind) == name
