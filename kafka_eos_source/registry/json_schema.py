"""The codec of JSON documents whose JSON Schema lives in a schema registry.

`json_schema_shapes` reads schemas; `json_schema_encode` encodes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema, is_list
from kafka_eos_source.registry.json_schema_encode import JsonEncoder, check_key
from kafka_eos_source.registry.json_schema_shapes import Kind, Shape, read_shape
from kafka_eos_source.runtime.json_input import JsonError, parse_json, parse_json_fast, typed_parser

_types = pa.types


def decoder(writer: Schema, reader: Schema | None = None) -> Decoder:
    """Returns a decoder of the documents that were written with a schema.

    Args:
        writer: the schema with which they were written.
        reader: the schema that decides the type of the column.

    Raises:
        InvalidSchemaError: if a schema is not usable.
    """
    return _decoder(reader or writer)


@lru_cache(maxsize=16)
def _decoder(schema: Schema) -> Decoder:
    """Returns the decoder, which is the same for all writers' schemas if there is a reader's schema."""
    return JsonDecoder(read_shape(schema))


def encoder(schema: Schema, values: pa.DataType) -> Encoder:
    """Returns an encoder of values as documents of a schema.

    Args:
        schema: the schema.
        values: the type of the values.

    Raises:
        InvalidSchemaError: if the schema is not usable, or a column does not fit it.
    """
    return JsonEncoder(read_shape(schema), values)


def arrow_type(schema: Schema) -> pa.DataType:
    """Returns the type of the column that documents of the schema become."""
    return read_shape(schema).arrow_type


def schema_for(arrow_type: pa.DataType, title: str) -> Schema:
    """Returns a JSON Schema (draft 7) for values of a type, whose columns may be null.

    Raises:
        InvalidSchemaError: if a column has a type that JSON does not have.
    """
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return Schema("JSON", json.dumps(head | _described(arrow_type, "")))


def _described(arrow_type: pa.DataType, path: str) -> dict[str, Any]:
    if _types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if _types.is_struct(arrow_type):
        inside = {
            each.name: _nullable(_described(each.type, f"{path}.{each.name}".lstrip(".")))
            for each in arrow_type
        }
        return {"type": "object", "properties": inside, "additionalProperties": False}
    if _types.is_map(arrow_type):
        check_key(arrow_type, path)
        values = _nullable(_described(arrow_type.item_type, f"{path}.value"))
        return {"type": "object", "additionalProperties": values}
    if is_list(arrow_type):
        return {"type": "array", "items": _nullable(_described(arrow_type.value_type, f"{path}[]"))}
    if _types.is_boolean(arrow_type):
        return {"type": "boolean"}
    if _types.is_integer(arrow_type):
        return {"type": "integer"}
    if _types.is_floating(arrow_type) or _types.is_decimal(arrow_type):
        return {"type": "number"}
    if _types.is_string(arrow_type) or _types.is_large_string(arrow_type):
        return {"type": "string"}
    if _types.is_timestamp(arrow_type) and arrow_type.tz:
        return {"type": "string", "format": "date-time"}
    if _types.is_date(arrow_type):
        return {"type": "string", "format": "date"}
    raise InvalidSchemaError(
        f"column {path!r} has the type {arrow_type}, which JSON does not have",
        fix="cast the column to string, for binary with base64(…), for timestamps with a time zone",
    )


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"type": [schema["type"], "null"]}


# -- decoding ------------------------------------------------------------------------------------

#: So many bytes of documents are Python values at once.
_CHUNK_BYTES = 1 << 20
_INT64 = range(-(1 << 63), 1 << 63)
#: Beyond this, a float does not say which integer was meant.
_EXACT_FLOATS = 1 << 53
_TIMES = (Kind.DATE_TIME, Kind.DATE)
_RFC3339 = r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:(\.\d{1,6})\d*)?(Z|[+-]\d\d:\d\d)$"

_Rows = npt.NDArray[np.int64]
_TYPED_DICT: Any = TypedDict


class JsonDecoder:
    """Decodes the documents of one schema (see `codec.Decoder`).

    msgspec reads each document by itself, so whether it is a row does not depend on its neighbours. If a
    document does not fit, it is read again, to say why.

    Args:
        shape: the shape that decides the type of the column.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._type = shape.arrow_type
        self._values = _Values(shape, "")
        self._parse = typed_parser(self._values.parsed_type)

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column."""
        return self._type

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (see `codec.Decoder`)."""
        if isinstance(messages, pa.ChunkedArray):
            messages = messages.combine_chunks()
        fitting = fitting_rows(self._shape, messages, most_bytes)
        if fitting or not len(messages):
            return self._decode(messages[:fitting], start)
        found = self._decode(messages[:1], start)  # the estimate is too high for some documents
        return found if found.values.nbytes <= most_bytes else Converted(found.values[:0])

    def _decode(self, messages: pa.Array, start: int) -> Converted:
        errors: dict[int, str] = {}
        ends = np.cumsum(pc.binary_length(messages).fill_null(0).to_numpy(zero_copy_only=False))
        parts = [pa.array([], self._type)]
        first = 0
        while first < len(messages):
            most = _CHUNK_BYTES + (int(ends[first - 1]) if first else 0)
            end = max(first + 1, int(np.searchsorted(ends, most, side="right")))
            parts.append(self._chunk(messages[first:end].to_pylist(), first, start, errors))
            first = end
        values = pa.concat_arrays(parts)
        if errors:
            places = np.arange(len(messages))
            values = values.take(pa.array(places, mask=np.isin(places, list(errors))))
        return Converted(values, dict(sorted(errors.items())))

    def _chunk(
        self, messages: list[bytes | None], first: int, start: int, errors: dict[int, str]
    ) -> pa.Array:
        """Returns the column of some messages, of which `first` is the number of the first row."""
        values: list[Any] = []
        for row, message in enumerate(messages, first):
            value = None
            if message is not None and len(message) < start:
                errors[row] = f"the value has {len(message)} bytes, fewer than its frame"
            elif message is not None:
                try:
                    value = self._parse(message[start:])
                except JsonError as failure:
                    errors[row] = self._reason(message[start:], failure)
            values.append(value)
        unfit: dict[int, str] = {}
        column = self._values.column(values, np.arange(first, first + len(values)), unfit)
        for row, text in unfit.items():
            message = messages[row - first]
            errors[row] = text if message is None else self._reason(message[start:], text)
        return column

    def _reason(self, document: bytes, otherwise: object) -> str:
        """Returns why a document does not fit, with the full path of the field if its type is wrong."""
        try:
            reason = _misfit(self._shape, parse_json_fast(document), "")
        except JsonError as failure:
            return f"the value is not JSON that can be read: {failure}"
        return reason or str(otherwise)


class _Values:
    """The values of one shape: the type that msgspec makes of each, and the column that they become.

    Args:
        shape: the shape.
        path: the field, for errors.
    """

    def __init__(self, shape: Shape, path: str) -> None:
        self._kind = shape.kind
        self._path = path
        self._type = shape.arrow_type
        #: How to get a property from an object, and its values.
        self._properties: list[tuple[Callable[[Any], Any], _Values]] = []
        self._items: _Values | None = None
        if shape.kind is Kind.OBJECT:
            self.parsed_type = self._object(shape)
        elif shape.kind is Kind.ARRAY and shape.items is not None:
            self._items = _Values(shape.items, f"{path}[]")
            self.parsed_type = list[self._items.parsed_type] | None  # type: ignore[name-defined]
        elif shape.kind is Kind.MAP and shape.items is not None:
            self._items = _Values(shape.items, f"{path}.*".lstrip("."))
            self.parsed_type = dict[str, self._items.parsed_type] | None  # type: ignore[name-defined]
        else:
            self.parsed_type = _parsed_types()[shape.kind]

    def _object(self, shape: Shape) -> Any:
        from msgspec import defstruct

        inside = {
            name: _Values(each, f"{self._path}.{name}".lstrip(".")) for name, each in shape.properties.items()
        }
        names = {f"f{number}": name for number, name in enumerate(inside)}
        fields = [(of, inside[name].parsed_type, None) for of, name in names.items()]
        getters: list[Callable[[Any], Any]] = [attrgetter(of) for of in names]
        try:
            made: Any = defstruct("Object", fields, rename=names, gc=False)
        except ValueError:  # msgspec's objects with slots cannot have quotes and backslashes in names
            made = _TYPED_DICT(
                "Object", {name: each.parsed_type for name, each in inside.items()}, total=False
            )
            getters = [methodcaller("get", name) for name in inside]
        self._properties = list(zip(getters, inside.values(), strict=True))
        return made | None

    def column(self, values: list[Any], rows: _Rows, unfit: dict[int, str]) -> pa.Array:
        """Returns the column of some values.

        Args:
            values: the values.
            rows: for each value, the row to which it belongs.
            unfit: receives a text for each row with a value that the column cannot hold.
        """
        if self._kind is Kind.OBJECT:
            missing = np.array([each is None for each in values], bool)
            present = values if not missing.any() else [each for each in values if each is not None]
            columns = [
                each.column(_spread(list(map(get, present)), missing), rows, unfit)
                for get, each in self._properties
            ]
            return pa.StructArray.from_arrays(columns, fields=list(self._type), mask=pa.array(missing))
        if self._items is not None:
            missing = pa.array([each is None for each in values], pa.bool_())
            lengths = [0 if each is None else len(each) for each in values]
            inside = np.repeat(rows, lengths)
            offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
            present = [each for each in values if each is not None]
            if self._kind is Kind.ARRAY:
                items = self._items.column(list(chain.from_iterable(present)), inside, unfit)
                return pa.ListArray.from_arrays(offsets, items, self._type, mask=missing)
            keys = pa.array(list(chain.from_iterable(present)), pa.string())
            items = self._items.column([item for each in present for item in each.values()], inside, unfit)
            return pa.MapArray.from_arrays(offsets, keys, items, self._type, mask=missing)
        if self._kind in _TIMES:
            return _times(self._kind, pa.array(values, pa.string()), rows, unfit, self._path)
        if self._kind is Kind.TEXT:
            values = [self._text(value, int(row), unfit) for value, row in zip(values, rows, strict=True)]
        elif self._kind is Kind.INTEGER:
            values = self._integers(values, rows, unfit)
        return pa.array(values, self._type)

    def _integers(self, values: list[Any], rows: _Rows, unfit: dict[int, str]) -> list[Any]:
        """Returns integers; msgspec returns those as floats that were written with a fraction or exponent."""
        known = [each for each in values if each is not None]
        if not known or (
            float not in set(map(type, known)) and min(known) in _INT64 and max(known) in _INT64
        ):
            return values
        found = []
        for value, row in zip(values, rows.tolist(), strict=True):
            whole = None if value is None else _whole(value)
            if value is not None and whole is None:
                unfit.setdefault(row, f"{_where(self._path)}{str(value)[:100]} is not an integer of 64 bits")
            found.append(whole)
        return found

    def _text(self, value: Any, row: int, unfit: dict[int, str]) -> str | None:
        """Returns a value as JSON text without spaces, in which numbers are as they were written."""
        from msgspec.json import encode

        if value is None or (document := bytes(value)) == b"null":
            return None
        try:
            found = parse_json(document, parse_float=_as_written, parse_int=_as_written)
        except JsonError as failure:
            unfit.setdefault(row, f"{_where(self._path)}{failure}")
            return None
        return str(encode(found), "utf-8")


def _as_written(number: str) -> Any:
    """Returns a number that is written again with the digits that it has."""
    from msgspec import Raw

    if math.isinf(float(number)):
        raise ValueError(f"the number {number[:40]} does not fit into a double")
    return Raw(number.encode())


@lru_cache(maxsize=1)
def _parsed_types() -> dict[Kind, Any]:
    """Returns what msgspec makes of scalars."""
    import msgspec

    return {
        Kind.BOOLEAN: bool | None,
        Kind.INTEGER: int | float | None,
        Kind.NUMBER: float | None,
        **dict.fromkeys((Kind.STRING, *_TIMES), str | None),
        Kind.TEXT: msgspec.Raw,
    }


def _spread(present: list[Any], missing: npt.NDArray[np.bool_]) -> list[Any]:
    """Returns values with None where they are missing."""
    if len(present) == len(missing):
        return present
    found = iter(present)
    return [None if absent else next(found) for absent in missing.tolist()]


def _whole(value: Any) -> int | None:
    """Returns the integer of 64 bits that a number is; None if it is none, or an inexact float."""
    if isinstance(value, float):
        return int(value) if abs(value) <= _EXACT_FLOATS and value.is_integer() else None
    return value if value in _INT64 else None


def _misfit(shape: Shape, value: Any, path: str) -> str | None:
    """Returns why a value of a document does not have the type of its column; None if it does."""
    if value is None or shape.kind is Kind.TEXT:
        return None
    inside: Iterable[tuple[Shape, Any, str]] = ()
    if shape.kind is Kind.OBJECT and isinstance(value, dict):
        inside = ((each, value.get(name), f"{path}.{name}") for name, each in shape.properties.items())
    elif shape.kind is Kind.MAP and isinstance(value, dict) and shape.items is not None:
        inside = ((shape.items, each, f"{path}.{key}") for key, each in value.items())
    elif shape.kind is Kind.ARRAY and isinstance(value, list) and shape.items is not None:
        inside = ((shape.items, each, f"{path}[{index}]") for index, each in enumerate(value))
    elif not _is_of_kind(shape.kind, value):
        return f"{_where(path)}expected {shape.kind.value}, found {_shown(value)}"
    elif shape.kind is Kind.INTEGER and _whole(value) is None:
        if isinstance(value, float) and abs(value) <= _EXACT_FLOATS:
            return f"{_where(path)}expected integer, found {_shown(value)}"
        why = "does not fit into 64 bits" if abs(value) >= 1 << 63 else "is not exact in a float"
        return f"{_where(path)}{_shown(value)} {why}"
    elif shape.kind is Kind.NUMBER and abs(value) > sys.float_info.max:
        return f"{_where(path)}{_shown(value)} does not fit into a double"
    reasons = (_misfit(each, found, place.lstrip(".")) for each, found, place in inside)
    return next((reason for reason in reasons if reason is not None), None)


def _is_of_kind(kind: Kind, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is Kind.BOOLEAN
    return isinstance(value, _PYTHON_TYPES.get(kind, ()))


_PYTHON_TYPES: dict[Kind, tuple[type, ...]] = {
    **dict.fromkeys((Kind.INTEGER, Kind.NUMBER), (int, float)),
    **dict.fromkeys((Kind.STRING, *_TIMES), (str,)),
}


def _where(path: str) -> str:
    return f"field {path}: " if path else ""


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))[:100]


def _times(kind: Kind, array: pa.Array, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    try:
        return array.cast(Shape(kind).arrow_type)
    except pa.ArrowInvalid:
        pass
    texts = array
    if kind is Kind.DATE_TIME:  # Arrow knows neither digits behind microseconds, nor small letters
        texts = pc.replace_substring_regex(pc.utf8_upper(array), _RFC3339, r"\1T\2\3\4")
    bad: list[int] = []
    values = _cast(texts, Shape(kind).arrow_type, 0, bad)
    for at in bad:
        needs = "a date with time and time zone" if kind is Kind.DATE_TIME else "a date"
        text = array[at].as_py()
        errors.setdefault(int(rows[at]), f"{_where(path)}{text[:100]!r} is not {needs} (RFC 3339)")
    return values


def _cast(texts: pa.Array, to: pa.DataType, first: int, bad: list[int]) -> pa.Array:
    """Returns the texts as times; null for those that are none, whose places are added to `bad`."""
    try:
        return texts.cast(to)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            bad.append(first)
            return pa.nulls(1, to)
    middle = len(texts) // 2
    halves = ((texts[:middle], first), (texts[middle:], first + middle))
    return pa.concat_arrays([_cast(half, to, at, bad) for half, at in halves])


# -- the size of columns -------------------------------------------------------------------------

#: Texts are in a column of text first, and times then become numbers. Bytes that are not UTF-8 become longer.
_COPIES = 3
#: A number or an offset, and the bit that says whether the value is null.
_VALUE_BYTES = 9
#: What stands between the values of a document, or begins an array or an object.
_SEPARATORS = (",", "[", "{")


def fitting_rows(shape: Shape, messages: pa.Array, most_bytes: int) -> int:
    """Returns how many of the first messages surely fit into columns of `most_bytes`.

    A null or missing property takes memory, too, so an array of a few bytes can become a wide column.

    Args:
        shape: the shape of the documents.
        messages: the messages (binary).
        most_bytes: the most memory.
    """
    row, item = _bytes_of(shape), _bytes_of_items(shape)
    _, offsets, data = messages.buffers()
    if data is None or not len(messages):
        return len(messages)
    width = np.int64 if pa.types.is_large_binary(messages.type) else np.int32
    ends = np.frombuffer(offsets, width)[messages.offset : messages.offset + len(messages) + 1]
    used = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    values = 0 if not item else sum(int(np.count_nonzero(used == ord(each))) for each in _SEPARATORS)
    if _COPIES * len(used) + row * len(messages) + item * values <= most_bytes:  # the usual case
        return len(messages)
    found: npt.NDArray[np.int64] = _COPIES * np.diff(ends).astype(np.int64) + row
    for each in _SEPARATORS if item else ():
        counts = pc.count_substring(messages, each).fill_null(0)
        found += item * counts.to_numpy(zero_copy_only=False).astype(np.int64)
    return int(np.searchsorted(np.cumsum(found), most_bytes, side="right"))


def _bytes_of(shape: Shape) -> int:
    """Returns the memory of a value without its text and its items."""
    return _VALUE_BYTES + sum(_bytes_of(each) for each in shape.properties.values())


def _bytes_of_items(shape: Shape) -> int:
    """Returns the memory of the largest item of an array or a map inside a shape; 0 if it has neither."""
    inside = [_bytes_of_items(each) for each in shape.properties.values()]
    if shape.items is not None:
        key = _VALUE_BYTES if shape.kind is Kind.MAP else 0
        inside += [key + _bytes_of(shape.items), _bytes_of_items(shape.items)]
    return max(inside, default=0)
