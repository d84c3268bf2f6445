"""Encodes Arrow columns as JSON documents by joining columns of text, without a Python object per value."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import decoded_type, is_list
from kafka_eos_source.registry.json_schema_shapes import Kind, Shape
from kafka_eos_source.runtime.json_input import JsonError, parse_json_fast

_types = pa.types
_NULL = pa.scalar("null", pa.large_string())
_NEEDS_ESCAPE = r'[\x00-\x1f"\\]'
#: The shape of columns about which the schema says nothing; their strings are strings, and not JSON text.
_UNMENTIONED = Shape(Kind.TEXT)
_Rows = npt.NDArray[np.int64]


class JsonEncoder:
    """Encodes values of one type as documents of one schema (see `codec.Encoder`).

    Args:
        shape: the shape of the schema.
        values: the type of the values.

    Raises:
        InvalidSchemaError: if a column does not fit the schema.
    """

    def __init__(self, shape: Shape, values: pa.DataType) -> None:
        _check(shape, values, "")
        self._shape = shape
        self._values = values

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values (see `codec.Encoder`)."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if values.type != self._values:
            raise TypeError(f"this encoder is for values of type {self._values}, not {values.type}")
        errors: dict[int, str] = {}
        texts = _encode(self._shape, values, np.arange(len(values)), errors, "")
        if errors:
            bad = np.zeros(len(texts), bool)
            bad[list(errors)] = True
            texts = pc.if_else(pa.array(bad), None, texts)
        payloads = texts.cast(pa.large_binary())
        if prefix:
            payloads = pc.binary_join_element_wise(
                pa.scalar(prefix, pa.large_binary()), payloads, pa.scalar(b"", pa.large_binary())
            )
        ends = np.cumsum(pc.binary_length(payloads).fill_null(0).to_numpy(zero_copy_only=False))
        fitting = int(np.searchsorted(ends, most_bytes, side="right"))
        return Converted.of(payloads[:fitting].cast(pa.binary()), dict(sorted(errors.items())))


def _check(shape: Shape, arrow_type: pa.DataType, path: str) -> None:
    arrow_type = decoded_type(arrow_type)
    if _types.is_null(arrow_type):
        return
    if shape.kind is Kind.OBJECT and _types.is_struct(arrow_type):
        names = {column.name for column in arrow_type}
        missing = [name for name in shape.properties if name in shape.required and name not in names]
        if missing:
            raise InvalidSchemaError(
                f"the schema requires {f'{path}.{missing[0]}'.lstrip('.')!r}, and there is no such column",
                fix="add the column",
            )
        for column in arrow_type:
            inside = f"{path}.{column.name}".lstrip(".")
            if column.name not in shape.properties and shape.is_closed:
                raise InvalidSchemaError(
                    f"column {inside!r}: the schema has no such property and forbids others; "
                    f"its properties are: {', '.join(shape.properties)}",
                    fix="drop or rename the column, or register a schema that has the property",
                )
            _check(shape.properties.get(column.name, _UNMENTIONED), column.type, inside)
    elif shape.kind is Kind.MAP and _types.is_map(arrow_type) and shape.items is not None:
        check_key(arrow_type, path)
        _check(shape.items, arrow_type.item_type, f"{path}.value")
    elif shape.kind is Kind.ARRAY and is_list(arrow_type) and shape.items is not None:
        _check(shape.items, arrow_type.value_type, f"{path}[]")
    elif shape.kind is Kind.TEXT:
        _check_any(arrow_type, path)
    elif not _fits(shape.kind, arrow_type):
        raise InvalidSchemaError(
            f"column {path!r} has the type {arrow_type}, but the schema has {shape.kind.value} there",
            fix=f"cast the column to {shape.arrow_type}",
        )


def _fits(kind: Kind, arrow_type: pa.DataType) -> bool:
    is_number = _types.is_integer(arrow_type)
    if kind is Kind.NUMBER:
        return bool(is_number or _types.is_floating(arrow_type) or _types.is_decimal(arrow_type))
    return bool(
        (kind is Kind.BOOLEAN and _types.is_boolean(arrow_type))
        or (kind is Kind.INTEGER and (is_number or (_types.is_decimal(arrow_type) and arrow_type.scale == 0)))
        or (kind is Kind.STRING and _is_string(arrow_type))
        or (kind is Kind.DATE_TIME and _types.is_timestamp(arrow_type) and arrow_type.tz)
        or (kind is Kind.DATE and _types.is_date(arrow_type))
    )


def _check_any(arrow_type: pa.DataType, path: str) -> None:
    """Checks a column for which the schema says nothing: strings are JSON text, and others what they are."""
    arrow_type = decoded_type(arrow_type)
    if _types.is_struct(arrow_type):
        for column in arrow_type:
            _check_any(column.type, f"{path}.{column.name}".lstrip("."))
    elif _types.is_map(arrow_type):
        check_key(arrow_type, path)
        _check_any(arrow_type.item_type, f"{path}.value")
    elif is_list(arrow_type):
        _check_any(arrow_type.value_type, f"{path}[]")
    elif not any(_fits(kind, arrow_type) for kind in Kind) and not _types.is_null(arrow_type):
        raise InvalidSchemaError(
            f"column {path!r} has the type {arrow_type}, which JSON does not have",
            fix="cast the column to string, for binary with base64(…), for timestamps with a time zone",
        )


def check_key(arrow_type: pa.MapType, path: str) -> None:
    """Checks that a map can be an object.

    Raises:
        InvalidSchemaError: if its keys are not strings.
    """
    if not _is_string(arrow_type.key_type):
        raise InvalidSchemaError(
            f"column {path!r} is a map with keys of type {arrow_type.key_type}; JSON keys are strings",
            fix="cast the keys to string",
        )


def _is_string(arrow_type: pa.DataType) -> bool:
    is_view = getattr(_types, "is_string_view", _types.is_string)
    return bool(_types.is_string(arrow_type) or _types.is_large_string(arrow_type) or is_view(arrow_type))


# -- values --------------------------------------------------------------------------------------


def _encode(shape: Shape, array: pa.Array, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    """Returns a JSON text per value (large_string), null for null. `rows` tells to which row each belongs."""
    if _types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if _types.is_null(kind):
        return pa.nulls(len(array), pa.large_string())
    if _types.is_struct(kind):
        return _objects(shape, array, rows, errors, path)
    if _types.is_map(kind) or is_list(kind):
        return _arrays(shape, array, rows, errors, path)
    if _is_string(kind):
        text = array.cast(pa.large_string())
        is_json = shape.kind is Kind.TEXT and shape is not _UNMENTIONED
        return _checked_json(text, rows, errors, path) if is_json else _quoted(text)
    if _types.is_timestamp(kind):
        text = array.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.large_string())
        return _join('"', pc.replace_substring(text, " ", "T"), '"')
    if _types.is_date(kind):
        return _join('"', array.cast(pa.date32()).cast(pa.large_string()), '"')
    if _types.is_floating(kind):
        odd = pc.and_kleene(array.is_valid(), pc.invert(pc.is_finite(array))).fill_null(False)
        for index in np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist():
            errors.setdefault(
                int(rows[index]), f"field {path}: {array[index].as_py()} is not a number in JSON"
            )
        array = array.cast(pa.float32()) if _types.is_float16(kind) else array
    return array.cast(pa.large_string())


def _objects(shape: Shape, array: pa.StructArray, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    present = array.is_valid()
    parts = []
    for index, column in enumerate(array.type):
        inner = shape.properties.get(column.name, _UNMENTIONED)
        inside = f"{path}.{column.name}".lstrip(".")
        child = array.field(index)
        if array.null_count:  # what is below a null is undefined
            child = pc.if_else(present, child, pa.scalar(None, child.type))
        text = _encode(inner, child, rows, errors, inside)
        if column.name in shape.required and not inner.nullable and text.null_count:
            for at in np.flatnonzero(
                pc.and_(text.is_null(), present).to_numpy(zero_copy_only=False)
            ).tolist():
                errors.setdefault(
                    int(rows[at]), f"field {inside}: the schema requires it, and the column is null"
                )
        if inner.nullable and column.name in shape.properties:
            text = text.fill_null(_NULL)
        parts.append(_join(f",{json.dumps(column.name)}:", text, ""))
    if parts:
        body = pc.binary_join_element_wise(
            *parts, pa.scalar("", pa.large_string()), null_handling="replace", null_replacement=""
        )
    else:
        body = pa.array([""] * len(array), pa.large_string())
    whole = _join("{", pc.binary_replace_slice(body, 0, 1, ""), "}")
    return pc.if_else(present, whole, pa.scalar(None, pa.large_string())) if array.null_count else whole


def _arrays(shape: Shape, array: pa.Array, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    is_map = _types.is_map(array.type)
    if not is_map and not _types.is_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    if array.null_count:  # the offsets of a null may span values
        array = array.take(pa.array(np.arange(len(array))))
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first, last = int(offsets[0]), int(offsets[-1])
    inside = np.repeat(rows, np.diff(offsets))
    inner = shape.items or _UNMENTIONED
    if is_map:
        texts = _encode(inner, array.items[first:last], inside, errors, f"{path}.value").fill_null(_NULL)
        keys = _quoted(array.keys[first:last].cast(pa.large_string()))
        texts = pc.binary_join_element_wise(keys, texts, pa.scalar(":", pa.large_string()))
    else:
        texts = _encode(inner, array.values[first:last], inside, errors, f"{path}[]").fill_null(_NULL)
    lists = pa.ListArray.from_arrays(pa.array((offsets - first).astype(np.int32)), texts)
    joined = pc.binary_join(lists, pa.scalar(",", pa.large_string()))
    whole = _join("{", joined, "}") if is_map else _join("[", joined, "]")
    return (
        pc.if_else(array.is_valid(), whole, pa.scalar(None, pa.large_string())) if array.null_count else whole
    )


def _join(before: str, text: pa.Array, after: str) -> pa.Array:
    first, last, separator = (pa.scalar(part, pa.large_string()) for part in (before, after, ""))
    return pc.binary_join_element_wise(first, text, last, separator)


def _quoted(text: pa.Array) -> pa.Array:
    special = pc.match_substring_regex(text, _NEEDS_ESCAPE).fill_null(False)
    if pc.any(special).as_py():
        places = np.flatnonzero(special.to_numpy(zero_copy_only=False))
        escaped = [
            json.dumps(each, ensure_ascii=False)[1:-1] for each in text.take(pa.array(places)).to_pylist()
        ]
        text = pc.replace_with_mask(text, special, pa.array(escaped, pa.large_string()))
    return _join('"', text, '"')


def _checked_json(text: pa.Array, rows: _Rows, errors: dict[int, str], path: str) -> pa.Array:
    for row, each in zip(rows.tolist(), text.to_pylist(), strict=True):
        if each is not None:
            try:
                parse_json_fast(each.encode())
            except JsonError as failure:
                errors.setdefault(row, f"field {path}: the string must be JSON text: {failure}")
    return text
