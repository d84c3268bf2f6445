"""What `JsonDecoding` must return, computed with Python's own JSON parser and plain arithmetic."""

from __future__ import annotations

import base64
import json
import re
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, DecimalException
from fractions import Fraction
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from pyspark.sql import types

MOST_LEVELS = 254
LONGEST_NUMBER = 1000


class MisfitError(Exception):
    """A value does not fit its type."""


class BrokenError(Exception):
    """The bytes are not one JSON object."""


class Value:
    """A JSON value: its kind, how it was written, and what is in it."""

    def __init__(self, kind: str, raw: str, inside: Any = None) -> None:
        self.kind, self.raw, self.inside = kind, raw, inside


def decoded(document: bytes | None, schema: types.StructType, zone: str, partial: bool) -> tuple[Any, bool]:
    """Returns the row of a document, and whether the document is bad."""
    if document is None:
        return None, False
    model = _Model(zone, partial)
    try:
        row = model.convert(parsed(document), schema)
    except BrokenError:
        return ({field.name: None for field in schema} if partial else None), True
    except MisfitError:
        assert not partial
        return None, True
    return row, model.is_bad


def parsed(document: bytes) -> Value:
    """Returns the object that a document is."""
    try:
        text = document.decode()
        json.JSONDecoder(parse_constant=_refused, parse_int=str, parse_float=str).decode(text)
    except (ValueError, RecursionError) as error:
        raise BrokenError(str(error)) from None
    found, _ = _value(text, _space(text, 0), 0)
    if found.kind != "object":
        raise BrokenError("no object")
    return found


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _value(text: str, at: int, levels: int) -> tuple[Value, int]:
    """Takes apart a value of a document that is well-formed."""
    start = at
    if text[at] == '"':
        found, at = json.decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
        return Value("string", text[start:at], found), at
    if text[at] not in "{[":
        scalar = re.compile(r"[-+.0-9a-zA-Z]+").match(text, at)
        assert scalar is not None
        kind = {"t": "boolean", "f": "boolean", "n": "null"}.get(text[at], "number")
        return Value(kind, scalar.group()), scalar.end()
    if levels == MOST_LEVELS:
        raise BrokenError("too deep")
    is_object = text[at] == "{"
    inside: list[Any] = []
    at = _space(text, at + 1)
    while text[at] not in "}]":
        if text[at] == ",":
            at = _space(text, at + 1)
        name = None
        if is_object:
            name, at = json.decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
            at = _space(text, _space(text, at) + 1)
        found, at = _value(text, at, levels + 1)
        inside.append((name, found) if is_object else found)
        at = _space(text, at)
    return Value("object" if is_object else "array", text[start : at + 1], inside), at + 1


class _Model:
    """Converts values; `is_bad` says whether one did not fit."""

    def __init__(self, zone: str, partial: bool) -> None:
        self.zone, self.partial, self.is_bad = ZoneInfo(zone), partial, False

    def convert(self, value: Value, found: types.DataType) -> Any:
        if value.kind == "null":
            return None
        name = type(found).__name__.removesuffix("Type").lower()
        return getattr(self, f"_{name}")(value, found)

    def _struct(self, value: Value, found: types.StructType) -> Any:
        _expect(value.kind == "object")
        row = dict.fromkeys(found.names)
        for name, each in value.inside:
            if name in row:
                try:
                    row[name] = self.convert(each, found[name].dataType)
                except MisfitError:
                    if not self.partial:
                        raise
                    self.is_bad, row[name] = True, None
        return row

    def _array(self, value: Value, found: types.ArrayType) -> Any:
        _expect(value.kind == "array")
        return [self.convert(each, found.elementType) for each in value.inside]

    def _map(self, value: Value, found: types.MapType) -> Any:
        _expect(value.kind == "object")
        entries = [(_text(name), self.convert(each, found.valueType)) for name, each in value.inside]
        _expect(len({name for name, _ in entries}) == len(entries))
        return entries

    def _boolean(self, value: Value, _: Any) -> bool:
        _expect(value.kind == "boolean")
        return value.raw == "true"

    def _integer(self, value: Value, _: Any, bits: int = 32) -> int:
        _expect(value.kind == "number" and re.fullmatch(r"-?\d{1,1000}", value.raw) is not None)
        number = int(value.raw)
        _expect(-(1 << (bits - 1)) <= number < 1 << (bits - 1))
        return number

    def _byte(self, value: Value, _: Any) -> int:
        return self._integer(value, None, 8)

    def _short(self, value: Value, _: Any) -> int:
        return self._integer(value, None, 16)

    def _long(self, value: Value, _: Any) -> int:
        return self._integer(value, None, 64)

    def _double(self, value: Value, _: Any) -> float:
        if value.kind == "string":
            return _special(value.inside)
        _expect(value.kind == "number" and len(value.raw) <= LONGEST_NUMBER)
        number = float(value.raw)
        _expect(abs(number) != float("inf"))
        return 0.0 if value.raw == "-0" else number

    def _float(self, value: Value, _: Any) -> float:
        if value.kind == "string":
            return _special(value.inside)
        _expect(value.kind == "number" and len(value.raw) <= LONGEST_NUMBER)
        return 0.0 if value.raw == "-0" else nearest_float(value.raw)

    def _decimal(self, value: Value, found: types.DecimalType) -> Decimal:
        text = value.raw
        if value.kind == "string":
            text = value.inside.replace(",", "")
            _expect(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII) is not None)
            text = text if len(value.inside.encode("utf-8", "replace")) <= LONGEST_NUMBER else "x"
        else:
            _expect(value.kind == "number" and len(value.raw) <= LONGEST_NUMBER)
        text = clamped(text)
        wide = Context(prec=8000, Emin=-999999, Emax=999999)
        try:
            number = wide.create_decimal(text)
            if number.adjusted() < -100:
                return Decimal(0)
            scaled = number.quantize(Decimal(1).scaleb(-found.scale), ROUND_HALF_UP, wide)
        except DecimalException:
            raise MisfitError from None
        _expect(scaled.copy_abs() < Decimal(1).scaleb(found.precision - found.scale))
        return scaled

    def _string(self, value: Value, _: Any) -> str:
        return _text(value.inside) if value.kind == "string" else value.raw

    def _binary(self, value: Value, _: Any) -> bytes:
        _expect(value.kind == "string")
        found, rest = b"", value.inside
        while rest := rest.lstrip(_BLANK[:33]):
            group, rest = rest[:4], rest[4:]
            is_last = re.fullmatch(r"[A-Za-z0-9+/]{2}(==|[A-Za-z0-9+/]=)", group) is not None
            _expect(is_last or re.fullmatch(r"[A-Za-z0-9+/]{4}", group) is not None)
            _expect(not is_last or not rest.strip(_BLANK[:33]))
            found += base64.b64decode(group)
        return found

    def _date(self, value: Value, _: Any) -> int:
        _expect(value.kind == "string")
        found = re.fullmatch(_DATE.format(most=7) + r"([ T].*)?", _trimmed(value.inside), re.ASCII | re.S)
        _expect(found is not None)
        assert found is not None
        _expect(found.group(5) is None or found.group(4) is not None)
        return _days(*found.group(1, 2, 3, 4))

    def _timestamp(self, value: Value, _: Any) -> int:
        if value.kind == "number":
            seconds = self._integer(value, None, 64)
            _expect(abs(seconds) <= 9_223_372_036_854)
            return seconds * 1_000_000
        seconds, micros, zone = self._time(value)
        if zone is None:
            seconds -= _offset(self.zone, seconds)
        else:
            seconds -= _fixed(zone.strip(_BLANK))
        return _micros(seconds, micros)

    def _timestampntz(self, value: Value, _: Any) -> int:
        seconds, micros, zone = self._time(value)
        _expect(zone is None)
        return _micros(seconds, micros)

    def _time(self, value: Value) -> tuple[int, int, str | None]:
        _expect(value.kind == "string")
        clock = r"(?:[ T](\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?(\D.*)?)?)?)?"
        found = re.fullmatch(_DATE.format(most=6) + clock, _trimmed(value.inside), re.ASCII | re.S)
        _expect(found is not None)
        assert found is not None
        sign, year, month, day, hour, minute, second, fraction, zone = found.groups()
        _expect(hour is None or day is not None)
        hours, minutes, seconds = (int(each or 0) for each in (hour, minute, second))
        _expect(hours < 24 and minutes < 60 and seconds < 60)
        whole = _days(sign, year, month, day) * 86400 + hours * 3600 + minutes * 60 + seconds
        return whole, int(((fraction or "") + "000000")[:6]), zone


_BLANK = "".join(map(chr, range(33))) + "\x7f"
_DATE = r"([+-]?)(\d{{4,{most}}})(?:-(\d{{1,2}})(?:-(\d{{1,2}}))?)?"


def _expect(fits: bool) -> None:
    if not fits:
        raise MisfitError


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MisfitError from None
    return text


def _trimmed(text: str) -> str:
    _text(text)
    return text.strip(_BLANK)


def _special(text: str) -> float:
    known = {"NaN": "nan", "+INF": "inf", "+Infinity": "inf", "Infinity": "inf", "-INF": "-inf"}
    known["-Infinity"] = "-inf"
    _expect(text in known)
    return float(known[text])


def clamped(text: str) -> str:
    """Returns a number with an exponent that Python's decimals can have; the result is the same."""
    mantissa, _, exponent = text.lower().partition("e")
    return f"{mantissa}e{min(max(int(exponent or 0), -5000), 5000)}" if mantissa != "x" else text


def nearest_float(text: str) -> float:
    """Returns the single-precision number that is nearest to a number; of two, the even one."""
    text = clamped(text)
    exact = Fraction(Decimal(text)) if abs(Decimal(text).adjusted()) < 100 else Fraction(0)
    _expect(exact != 0 or Decimal(text).adjusted() < 39 or Decimal(text) == 0)
    if exact == 0:
        return -0.0 if text.startswith("-") else 0.0
    with np.errstate(over="ignore", under="ignore"):
        guess = np.float32(min(max(float(exact), -3.4028235e38), 3.4028235e38))
        around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [each for each in around if np.isfinite(each)]
    best = min(finite, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.int32)) & 1))
    _expect(abs(exact) < Fraction(2) ** 128 - Fraction(2) ** 103)  # halfway to what would be the next one
    return -0.0 if best == 0 and exact < 0 else float(best)


def _days(sign: str, year: str, month: str | None, day: str | None) -> int:
    number = int(year) * (-1 if sign == "-" else 1)
    cycles, within = divmod(number - 2000, 400)
    try:
        date = datetime(2000 + within, int(month or 1), int(day or 1))
    except ValueError:
        raise MisfitError from None
    days = (date - datetime(1970, 1, 1)).days + cycles * 146097
    _expect(-(1 << 31) <= days < 1 << 31)
    return days


def _offset(zone: ZoneInfo, local: int) -> int:
    cycles = max((local - 16_725_225_600) // (146097 * 86400) + 1, 0)  # from 2500-01-01 on
    local -= cycles * 146097 * 86400
    if local < -5_364_662_400:  # before 1800-01-01
        local = -5_364_662_400
    found = (datetime(1970, 1, 1) + timedelta(seconds=local)).replace(tzinfo=zone).utcoffset()
    assert found is not None
    return int(found.total_seconds())


def _fixed(text: str) -> int:
    if text in ("Z", "UTC", "GMT", "UT"):
        return 0
    sign = r"([+-])"
    plain = rf"{sign}(\d\d?)|{sign}(\d\d?):(\d\d)(?::(\d\d))?|{sign}(\d\d)(\d\d)(\d\d)?|{sign}(\d\d?):(\d)"
    found = re.fullmatch(rf"(?:UTC|GMT|UT)?(?:{plain})", text, re.ASCII)
    _expect(found is not None)
    assert found is not None
    direction, *numbers = [each for each in found.groups() if each is not None]
    hours, minutes, seconds = (int(each) for each in [*numbers, 0, 0][:3])
    total = hours * 3600 + minutes * 60 + seconds
    _expect(minutes < 60 and seconds < 60 and total <= 18 * 3600)
    return -total if direction == "-" else total


def _micros(seconds: int, micros: int) -> int:
    found = seconds * 1_000_000 + micros
    _expect(-(1 << 63) <= found < 1 << 63)
    return found


def comparable(value: Any) -> Any:
    """Returns a value in which NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(value, float):
        return np.float64(value).tobytes() if value == value else "NaN"
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value


def plain(array: pa.Array) -> list[Any]:
    """Returns values as Python's; dates and times as numbers, which Python's own cannot all be."""
    found = array.type
    if pa.types.is_struct(found):
        columns = {each.name: plain(array.field(i)) for i, each in enumerate(found)}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = rows if found.num_fields else [{} for _ in range(len(array))]
        return [row if known else None for row, known in zip(rows, array.is_valid().to_pylist(), strict=True)]
    if pa.types.is_list(found) or pa.types.is_map(found):
        items = plain(array.values if pa.types.is_list(found) else array.items)
        if pa.types.is_map(found):
            items = list(zip(array.keys.to_pylist(), items, strict=True))
        offsets = array.offsets.to_pylist()
        rows = [items[first:past] for first, past in pairwise(offsets)]
        return [row if known else None for row, known in zip(rows, array.is_valid().to_pylist(), strict=True)]
    if pa.types.is_date(found):
        return array.cast(pa.int32()).to_pylist()
    if pa.types.is_timestamp(found):
        return array.cast(pa.int64()).to_pylist()
    return array.to_pylist()
