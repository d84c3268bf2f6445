"""The codec of JSON documents whose JSON Schema lives in a schema registry.

`json_schema_shapes` reads schemas; `json_schema_encode` encodes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.registry.codec import MOST_BYTES, Collector, Converted, Decoder, Encoder, Schema
from kafka_eos_source.registry.json_schema_encode import JsonEncoder, check_key, is_list
from kafka_eos_source.registry.json_schema_shapes import INSTALL, Kind, Shape, open_schema, read_shape
from kafka_eos_source.runtime.json_input import MOST_LEVELS, JsonError, parse_json, parse_json_fast

_types = pa.types


def decoder(writer: Schema, reader: Schema | None = None, *, validate: bool = False) -> Decoder:
    """Returns a decoder of the documents that were written with a schema.

    Args:
        writer: the schema with which they were written.
        reader: the schema that decides the type of the column.
        validate: checks each document against all keywords of the writer's schema, which is slow.

    Raises:
        InvalidSchemaError: if a schema is not usable.
    """
    return JsonDecoder(read_shape(reader or writer), _validator(writer) if validate else None)


def encoder(schema: Schema, values: pa.DataType, *, validate: bool = False) -> Encoder:
    """Returns an encoder of values as documents of a schema.

    Args:
        schema: the schema.
        values: the type of the values.
        validate: checks each document against all keywords of the schema, which is slow.

    Raises:
        InvalidSchemaError: if the schema is not usable, or a column does not fit it.
    """
    return JsonEncoder(read_shape(schema), values, _validator(schema) if validate else None)


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


def _validator(schema: Schema) -> Callable[[Any], str | None]:
    """Returns a function that says why a document violates the schema."""
    try:
        from jsonschema import exceptions, validators
        from referencing.exceptions import Unresolvable
    except ImportError as failure:
        raise InvalidOptionError(f"validation needs a package: {failure}", fix=INSTALL) from failure
    contents, resolver = open_schema(schema)
    kind = validators.validator_for(contents, default=validators.Draft7Validator)
    try:
        kind.check_schema(contents)
    except exceptions.SchemaError as failure:
        raise InvalidSchemaError(
            f"the JSON Schema is not valid: {failure.message}", fix="correct the schema"
        ) from failure
    validator = kind(contents, registry=resolver._registry, format_checker=kind.FORMAT_CHECKER)

    def explain(document: Any) -> str | None:
        try:
            found = exceptions.best_match(validator.iter_errors(document))
        except RecursionError:
            return "the value is nested too deeply for the schema, which refers to itself"
        except (Unresolvable, re.error, ArithmeticError) as failure:
            return f"the schema cannot be applied to the value: {type(failure).__name__}: {failure}"
        if found is None:
            return None
        where = ".".join(str(part) for part in found.absolute_path)
        return f"field {where}: {found.message[:300]}" if where else found.message[:300]

    return explain


# -- decoding ------------------------------------------------------------------------------------

#: Fewer documents than this are parsed one by one if Arrow's parser refuses one of them.
_FEW = 64
_UNLIMITED = sys.maxsize
_INT64 = range(-(1 << 63), 1 << 63)
#: Beyond this, a float does not say which integer was meant.
_EXACT_FLOATS = 1 << 53
_DIGITS_OF_INT64 = 19
_TIMES = {Kind.DATE_TIME: pa.timestamp("us", "UTC"), Kind.DATE: pa.date32()}
_RFC3339 = r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:(\.\d{1,6})\d*)?(Z|[+-]\d\d:\d\d)$"

#: In each document that has, without an exponent, a number beyond a double; in few others.
_LARGE_NUMBER = re.compile(rb"[0-9]{100}")

_Rows = npt.NDArray[np.int64]


class UnfitError(ValueError):
    """A document does not fit its schema. The text names the field and the reason."""


class _Number(float):
    """A number of a document that keeps its text, because a float or 64 bits would change it."""

    def __new__(cls, text: str) -> _Number:
        """Parses the text."""
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


class JsonDecoder:
    """Decodes the documents of one schema (see `codec.Decoder`).

    Args:
        shape: the shape that decides the type of the column.
        validate: returns why a document violates the schema, or None; without it, only types are checked.
    """

    def __init__(self, shape: Shape, validate: Callable[[Any], str | None] | None = None) -> None:
        self._shape = shape
        self._validate = validate
        self._type = shape.arrow_type
        self._parsed_type = shape.typed(_parsed)
        self._has_text = _has_text(shape)
        self._is_exact_with_arrow = validate is None and shape.kind is Kind.OBJECT and _suits_arrow(shape)

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column."""
        return self._type

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (see `codec.Decoder`)."""
        if isinstance(messages, pa.ChunkedArray):
            messages = messages.combine_chunks()
        fitting = fitting_rows(self._shape, messages, most_bytes)
        if not fitting and len(messages):  # the estimate is too high for some documents
            return self._decode(messages[:1], start, Collector(self._parsed_type, most_bytes))
        return self._decode(messages[:fitting], start, None)

    def _decode(self, messages: pa.Array, start: int, collector: Collector | None) -> Converted:
        """Decodes messages.

        Args:
            messages: the messages.
            start: how many bytes of each are not payload.
            collector: a collector for the one message, whose size is not known; None for messages that fit.
        """
        errors: dict[int, str] = {}
        rows: _Rows = np.flatnonzero(messages.is_valid().to_numpy(zero_copy_only=False))
        lengths = pc.binary_length(messages).fill_null(start).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths < start).tolist():
            errors[row] = f"the value has {lengths[row]} bytes, fewer than its frame"
        rows = rows[lengths[rows] >= start]
        payloads = messages.take(rows).cast(pa.large_binary())
        if start:
            payloads = pc.binary_replace_slice(payloads, 0, start, b"")
        if collector is not None:
            parsed = self._parse_each(payloads, rows, errors, collector)
            if len(parsed) < len(payloads):
                return Converted(pa.array([], self._type))
        else:
            parsed = self._parse(payloads, rows, errors)
        values = _convert_times(self._shape, parsed, rows, errors)
        places = np.full(len(messages), -1)
        places[rows] = np.arange(len(rows))
        places[list(errors)] = -1
        return Converted(values.take(pa.array(places, mask=places < 0)), dict(sorted(errors.items())))

    def _parse(self, payloads: pa.Array, rows: _Rows, errors: dict[int, str]) -> pa.Array:
        """Returns the documents with times as text. Halves the column until Arrow can parse most of it."""
        if self._is_exact_with_arrow and len(payloads):
            found = self._parse_with_arrow(payloads)
            if found is not None:
                return found
            if len(payloads) > _FEW:
                middle = len(payloads) // 2
                halves = ((payloads[:middle], rows[:middle]), (payloads[middle:], rows[middle:]))
                return pa.concat_arrays([self._parse(half, of, errors) for half, of in halves])
        return self._parse_each(payloads, rows, errors, Collector(self._parsed_type, _UNLIMITED))

    def _with_skipped_properties(self, payload: pa.Array) -> pa.Scalar | None:
        """Returns a document as Arrow reads it, which skips properties with too many levels or large numbers.

        So it is read alone as it is read among others. None for all other documents.
        """
        text = payload[0].as_py()
        has_levels = text.count(b"[") + text.count(b"{") > MOST_LEVELS
        if not self._is_exact_with_arrow or not (has_levels or _LARGE_NUMBER.search(text)):
            return None
        found = self._parse_with_arrow(payload)
        return None if found is None else found[0]

    def _parse_with_arrow(self, payloads: pa.Array) -> pa.Array | None:
        """Returns the documents; None if Arrow refuses one, or might read one differently.

        Arrow reads a text with a message per line. Each message begins with a brace and ends with one. If one
        is not complete, the brace of the next one is an error, so each contains at least one document; and if
        there are as many documents as messages, each contains exactly one.
        """
        try:
            texts = pc.ascii_trim(payloads.cast(pa.large_string()), " \t\r\n")
        except pa.ArrowInvalid:  # not UTF-8
            return None
        whole = pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))
        odd = pc.match_substring_regex(texts, "NaN|Inf")  # which Arrow accepts as numbers
        if not pc.all(whole).as_py() or pc.any(odd).as_py():
            return None
        nothing, newline = (pa.scalar(text, pa.large_string()) for text in ("", "\n"))
        lines = pc.binary_join_element_wise(texts, newline, nothing)
        _, offsets, data = lines.buffers()
        size = int(np.frombuffer(offsets, np.int64)[lines.offset + len(lines)])
        if size >= (1 << 31) - 1:
            return None
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(data.slice(0, size)),
                pyarrow.json.ReadOptions(use_threads=False, block_size=size + 1),
                pyarrow.json.ParseOptions(
                    explicit_schema=pa.schema(list(self._parsed_type)), unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid:
            return None
        if table.num_rows != len(payloads):
            return None
        columns = [column.combine_chunks() for column in table.columns]
        if any(map(_has_infinity, columns)):  # made of a number beyond a double
            return None
        return pa.StructArray.from_arrays(columns, fields=list(self._parsed_type))

    def _parse_each(
        self, payloads: pa.Array, rows: _Rows, errors: dict[int, str], collector: Collector
    ) -> pa.Array:
        for at, row in enumerate(rows.tolist()):
            payload, value = payloads[at].as_py(), None
            # Whatever the bytes are, nothing else is raised here; tests/registry/test_foreign.py tries.
            try:
                document = parse_json_fast(payload)
                if self._has_text:  # with numbers as they are written
                    document = parse_json(payload, parse_float=_Number, parse_int=_integer)
                if self._validate is None or (reason := self._validate(document)) is None:
                    value = _fit(self._shape, document, "")
                else:
                    errors[row] = reason
            except JsonError as failure:
                skipped = self._with_skipped_properties(payloads[at : at + 1])
                if skipped is None:
                    errors[row] = f"the value is not JSON that can be read: {failure}"
                else:
                    value = skipped.as_py()
            except UnfitError as failure:
                errors[row] = str(failure)
            collector.add(value)
        return collector.converted({}).values


def _has_infinity(array: pa.Array) -> bool:
    if pa.types.is_floating(array.type):
        return bool(pc.any(pc.is_inf(array)).as_py())
    if pa.types.is_struct(array.type):
        return any(map(_has_infinity, array.flatten()))
    return pa.types.is_list(array.type) and _has_infinity(array.values)


def _parsed(kind: Kind) -> pa.DataType:
    return pa.string() if kind in _TIMES else Shape(kind).arrow_type


def _integer(text: str) -> int | _Number:
    return int(text) if len(text) < _DIGITS_OF_INT64 else _Number(text)


def _has_text(shape: Shape) -> bool:
    inside = [*shape.properties.values(), *([] if shape.items is None else [shape.items])]
    return shape.kind is Kind.TEXT or any(_has_text(each) for each in inside)


def _suits_arrow(shape: Shape) -> bool:
    """Whether Arrow's parser has this type. It reads neither any JSON value, nor objects as maps."""
    if shape.kind in (Kind.TEXT, Kind.MAP) or (shape.kind is Kind.OBJECT and not shape.properties):
        return False
    inside = [*shape.properties.values(), *([] if shape.items is None else [shape.items])]
    return all(_suits_arrow(each) for each in inside)


def _fit(shape: Shape, value: Any, path: str) -> Any:
    """Returns a value of a document as Arrow expects it.

    Raises:
        UnfitError: if it has another type.
    """
    if shape.kind is Kind.TEXT:
        return None if value is None else _text(value)
    if value is None:
        return None
    if shape.kind is Kind.OBJECT and isinstance(value, dict):
        return {
            name: _fit(inner, value.get(name), f"{path}.{name}".lstrip("."))
            for name, inner in shape.properties.items()
        }
    if shape.kind is Kind.MAP and isinstance(value, dict) and shape.items is not None:
        return [(key, _fit(shape.items, each, f"{path}.{key}".lstrip("."))) for key, each in value.items()]
    if shape.kind is Kind.ARRAY and isinstance(value, list) and shape.items is not None:
        return [_fit(shape.items, each, f"{path}[{index}]") for index, each in enumerate(value)]
    if shape.kind is Kind.BOOLEAN and isinstance(value, bool):
        return value
    if shape.kind in (Kind.STRING, Kind.DATE_TIME, Kind.DATE) and isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if shape.kind is Kind.NUMBER:
            if not math.isfinite(value):
                raise UnfitError(f"{_where(path)}{_text(value)[:100]} does not fit into a double")
            return float(value)
        if shape.kind is Kind.INTEGER:
            found = _exact_integer(value)
            if found is not None and found in _INT64:
                return found
            if found is not None or not math.isfinite(value) or abs(value) > _EXACT_FLOATS:
                why = "does not fit into 64 bits" if abs(value) >= 1 << 63 else "is not exact in a float"
                raise UnfitError(f"{_where(path)}{_text(value)[:100]} {why}")
    raise UnfitError(f"{_where(path)}expected {shape.kind.value}, found {_text(value)[:100]}")


def _exact_integer(value: float) -> int | None:
    """Returns the integer that a number of a document is; None if it is none, or an inexact float."""
    if isinstance(value, int):
        return value
    if (
        isinstance(value, _Number)
        and value.text.lstrip("-").isdigit()
        and len(value.text) <= _DIGITS_OF_INT64 + 1
    ):
        return int(value.text)
    return int(value) if abs(value) <= _EXACT_FLOATS and value.is_integer() else None


def _where(path: str) -> str:
    return f"field {path}: " if path else ""


def _text(value: Any) -> str:
    import orjson

    return orjson.dumps(value, default=_as_written).decode()


def _as_written(number: _Number) -> Any:
    import orjson

    return orjson.Fragment(number.text)


# -- times ---------------------------------------------------------------------------------------


def _convert_times(
    shape: Shape, array: pa.Array, rows: _Rows, errors: dict[int, str], path: str = ""
) -> pa.Array:
    """Converts texts to timestamps and dates. `rows` tells for each value to which message it belongs."""
    if shape.kind in _TIMES:
        return _times(shape.kind, array, rows, errors, path)
    if shape.arrow_type == array.type:
        return array
    if shape.kind is Kind.OBJECT:
        fields = array.flatten()  # null inside a null struct, where `array.field` has empty texts
        columns = [
            _convert_times(inner, each, rows, errors, f"{path}.{name}".lstrip("."))
            for (name, inner), each in zip(shape.properties.items(), fields, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(shape.arrow_type), mask=array.is_null())
    assert shape.items is not None
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first, last = int(offsets[0]), int(offsets[-1])
    inside = np.repeat(rows, np.diff(offsets))
    mask = array.is_null()
    moved = pa.array((offsets - first).astype(np.int32))
    if shape.kind is Kind.MAP:
        items = _convert_times(shape.items, array.items[first:last], inside, errors, f"{path}.*".lstrip("."))
        return pa.MapArray.from_arrays(moved, array.keys[first:last], items, shape.arrow_type, mask=mask)
    values = _convert_times(shape.items, array.values[first:last], inside, errors, f"{path}[]")
    return pa.ListArray.from_arrays(moved, values, shape.arrow_type, mask=mask)


def _times(kind: Kind, array: pa.Array, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    try:
        return array.cast(_TIMES[kind])
    except pa.ArrowInvalid:
        pass
    texts = array
    if kind is Kind.DATE_TIME:  # Arrow knows neither digits behind microseconds, nor small letters
        texts = pc.replace_substring_regex(pc.utf8_upper(array), _RFC3339, r"\1T\2\3\4")
    bad: list[int] = []
    values = _cast(texts, _TIMES[kind], 0, bad)
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
