"""What Spark writes for a value, in Python; and random types with values that test it."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_EPOCH = datetime.datetime(1970, 1, 1)
_DAY = datetime.date(1970, 1, 1)
_WHOLE = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
#: From 0001-01-02 to 9999-12-30, which Python's own types hold with every offset.
_FIRST_DAY, _LAST_DAY = -719_161, 2_932_895
_MICROS = 86_400 * 10**6

ARROW: dict[type[DataType], pa.DataType] = {
    NullType: pa.null(),
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us", "UTC"),
    TimestampNTZType: pa.timestamp("us"),
}


def arrow_type(type_: DataType) -> pa.DataType:
    """Returns the Arrow type of a Spark type."""
    if isinstance(type_, StructType):
        return pa.struct([pa.field(each.name, arrow_type(each.dataType)) for each in type_])
    if isinstance(type_, ArrayType):
        return pa.list_(arrow_type(type_.elementType))
    if isinstance(type_, MapType):
        return pa.map_(arrow_type(type_.keyType), arrow_type(type_.valueType))
    if isinstance(type_, DecimalType):
        return pa.decimal128(type_.precision, type_.scale)
    return ARROW[type(type_)]


# -- what Spark writes ---------------------------------------------------------------------------


def quoted(text: str) -> str:
    """Returns a string as Jackson writes it."""
    made = json.dumps(text, ensure_ascii=False)
    return re.sub(r"\\u00[01][0-9a-f]", lambda found: "\\u" + found[0][2:].upper(), made)


def double(number: float, *, is_float: bool = False) -> str:
    """Returns a number as Java 19 and later print it."""
    if math.isnan(number) or math.isinf(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if number == 0:
        return "-0.0" if math.copysign(1, number) < 0 else "0.0"
    digits, exponent = _shortest(abs(number), is_float)
    point = len(digits) + exponent
    if -3 < point <= 7:
        digits = "0" * max(1 - point, 0) + digits + "0" * max(point + 1 - len(digits), 0)
        place = max(point, 1)
        text = f"{digits[:place]}.{digits[place:]}"
    else:
        text = f"{digits[0]}.{digits[1:] or '0'}E{point - 1}"
    return "-" + text if number < 0 else text


def _shortest(number: float, is_float: bool) -> tuple[str, int]:
    """Returns digits and exponent of the shortest decimal of at least two digits; of several, the closest."""
    text = np.format_float_scientific(np.float32(number) if is_float else number, unique=True)
    if len(text.partition("e")[0].rstrip(".0")) == 1:
        text = f"{number:.1e}"
    mantissa, _, exponent = text.partition("e")
    kept = mantissa.replace(".", "").rstrip("0")
    return kept, int(exponent) - len(kept) + 1


def day(days: int) -> str:
    """Returns a date as Java writes it; years beyond 9999 and before 0 have a sign."""
    cycles, rest = divmod(days + 719_162, 146_097)
    found = datetime.date(1, 1, 1) + datetime.timedelta(days=rest)
    year = found.year + 400 * cycles
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{found.month:02}-{found.day:02}"


def moment(micros: int, separator: str = "T", digits: int = 3) -> str:
    """Returns a timestamp without its offset."""
    days, rest = divmod(micros, _MICROS)
    second, fraction = divmod(rest, 10**6)
    time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return f"{day(days)}{separator}{time}.{f'{fraction:06}'[:digits]}"


def _zoned(micros: int, zone: str, digits: int, has_seconds: bool) -> str:
    found = datetime.timedelta(microseconds=micros) + _EPOCH.replace(tzinfo=datetime.timezone.utc)
    offset = found.astimezone(ZoneInfo(zone)).utcoffset()
    assert offset is not None
    seconds = round(offset.total_seconds())
    text = moment(micros + seconds * 10**6, digits=digits)
    size = abs(seconds)
    if size < (1 if has_seconds else 60):
        return text + "Z"
    text += f"{'-' if seconds < 0 else '+'}{size // 3600:02}:{size // 60 % 60:02}"
    return text + (f":{size % 60:02}" if has_seconds and size % 60 else "")


def as_json(type_: DataType, value: Any, zone: str = "UTC", *, is_key: bool = False) -> str:
    """Returns what ``to_json`` writes; ``is_key`` = with the formats of keys."""
    if value is None:
        return "null"
    if isinstance(type_, StructType):
        fields = (
            f"{quoted(each.name)}:{as_json(each.dataType, value[each.name], zone, is_key=is_key)}"
            for each in type_
            if value[each.name] is not None
        )
        return "{" + ",".join(fields) + "}"
    if isinstance(type_, ArrayType):
        return "[" + ",".join(as_json(type_.elementType, each, zone, is_key=is_key) for each in value) + "]"
    if isinstance(type_, MapType):
        entries = (
            f"{quoted(_map_key(type_.keyType, key))}:{as_json(type_.valueType, item, zone, is_key=is_key)}"
            for key, item in value
        )
        return "{" + ",".join(entries) + "}"
    if isinstance(type_, TimestampType):
        return f'"{_zoned(value, zone, 6 if is_key else 3, not is_key)}"'
    if isinstance(type_, TimestampNTZType):
        return f'"{moment(value, digits=6 if is_key else 3)}"'
    if isinstance(type_, BinaryType):
        return f'"{base64.b64encode(value).decode()}"'
    if isinstance(type_, DateType):
        return f'"{day(value)}"'
    if isinstance(type_, StringType):
        return quoted(value)
    text = _plain(type_, value)
    return f'"{text}"' if isinstance(type_, FloatType | DoubleType) and not math.isfinite(value) else text


def _map_key(type_: DataType, value: Any) -> str:
    if isinstance(type_, DateType | TimestampType | TimestampNTZType):
        return str(value)
    return str(value) if isinstance(type_, StringType) else _plain(type_, value)


def _plain(type_: DataType, value: Any) -> str:
    if isinstance(type_, FloatType | DoubleType):
        return double(value, is_float=isinstance(type_, FloatType))
    if isinstance(type_, DecimalType):
        with decimal.localcontext(prec=100):
            return str(value.quantize(decimal.Decimal(1).scaleb(-type_.scale)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_key(type_: DataType, value: Any, zone: str = "UTC") -> str:
    """Returns what `app.records.as_text` makes of a key."""
    if isinstance(type_, StructType | ArrayType | MapType):
        return as_json(type_, value, zone, is_key=True)
    if isinstance(type_, TimestampType):
        return _zoned(value, zone, 6, False)
    if isinstance(type_, TimestampNTZType):
        return moment(value, " ", 6).rstrip("0").rstrip(".")
    if isinstance(type_, DateType):
        return day(value)
    if isinstance(type_, DecimalType):
        return f"{value:f}" if value else "0" + ("." + "0" * type_.scale if type_.scale else "")
    return _plain(type_, value)


# -- random types and values ---------------------------------------------------------------------

_TEXT = st.text(max_size=20) | st.text('\x00\x08\x1f\x7f"\\/\n\r\t\fé😀\u2028 a', max_size=30)
_SPECIAL = [math.nan, math.inf, -math.inf, -0.0]
_LEAVES = [
    st.sampled_from(
        [
            *(each() for each in _WHOLE),
            StringType(),
            BinaryType(),
            BooleanType(),
            DateType(),
            TimestampType(),
            TimestampNTZType(),
        ]
    ),
    st.integers(1, 38).flatmap(lambda size: st.builds(DecimalType, st.just(size), st.integers(0, size))),
]


def leaves(*, floating: bool) -> st.SearchStrategy[DataType]:
    """Returns types without children that can be written."""
    return st.one_of(*_LEAVES, *([st.sampled_from([FloatType(), DoubleType()])] if floating else []))


def types(*, floating: bool, depth: int = 2) -> st.SearchStrategy[DataType]:
    """Returns types that can be written."""
    found = leaves(floating=floating)
    for _ in range(depth):
        keys = leaves(floating=floating).filter(lambda each: not isinstance(each, BinaryType))
        found = found | structs(found) | st.builds(ArrayType, found) | st.builds(MapType, keys, found)
    return found


def structs(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[StructType]:
    """Returns types of rows, with names that need quotes too."""
    names = st.lists(st.text("ab\"\\é\x01 '", min_size=1, max_size=4), min_size=1, max_size=5, unique=True)
    return names.flatmap(
        lambda found: st.tuples(*(inner for _ in found)).map(
            lambda made: StructType([StructField(n, t) for n, t in zip(found, made, strict=True)])
        )
    )


def values(type_: DataType) -> st.SearchStrategy[Any]:
    """Returns values, or None, in the form that Arrow takes: timestamps and dates are numbers."""
    return st.none() | present(type_)


def present(type_: DataType) -> st.SearchStrategy[Any]:
    """Returns values that are not None."""
    if isinstance(type_, StructType):
        return st.fixed_dictionaries({each.name: values(each.dataType) for each in type_})
    if isinstance(type_, ArrayType):
        return st.lists(values(type_.elementType), max_size=3)
    if isinstance(type_, MapType):
        entries = st.tuples(present(type_.keyType), values(type_.valueType))
        return st.lists(entries, max_size=3, unique_by=lambda entry: repr(entry[0]))
    if type(type_) in _WHOLE:
        edge = 2 ** (_WHOLE[type(type_)] - 1)
        return st.integers(-edge, edge - 1)
    if isinstance(type_, DecimalType):
        edge = 10**type_.precision - 1
        scale = type_.scale
        return (st.integers(-edge, edge) | st.integers(-min(edge, 99), min(edge, 99))).map(
            lambda unscaled: decimal.Decimal((unscaled < 0, tuple(map(int, str(abs(unscaled)))), -scale))
        )
    found: st.SearchStrategy[Any] = {
        BooleanType: st.booleans(),
        BinaryType: st.binary(max_size=20),
        StringType: _TEXT,
        DateType: st.integers(-(2**31), 2**31 - 1) | st.integers(_FIRST_DAY, _LAST_DAY),
        TimestampType: st.integers(_FIRST_DAY * _MICROS, _LAST_DAY * _MICROS) | st.integers(0, 2 * 10**15),
        TimestampNTZType: st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**15), 2 * 10**15),
        # Java before 19 prints larger ones in other digits; numbers of any bits have tests of their own
        FloatType: st.floats(-(2.0**23), 2.0**23, width=32) | st.sampled_from(_SPECIAL),
        DoubleType: st.integers(-(10**12), 10**12).map(lambda whole: whole / 100)
        | st.floats(-(2.0**52), 2.0**52)
        | st.sampled_from(_SPECIAL),
    }[type(type_)]
    return found
