"""What Google's library makes of Protobuf messages: the oracle of the decoder in C."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.registry.protobuf_tree import (
    Field,
    Kind,
    Message,
    UnfitError,
    enum_name,
    json_text,
    time_text,
)


class Oracle:
    """Decodes the messages of one type (see `codec.Decoder`)."""

    def __init__(self, root: Message) -> None:
        self._root = root
        self._class = message_factory.GetMessageClass(root.descriptor)

    def decode(self, messages: pa.Array, start: int) -> Converted:
        rows: list[Any] = []
        errors: dict[int, str] = {}
        for index, payload in enumerate(each.as_py() for each in messages):
            row = None
            if payload is not None:
                try:
                    row = self._row(payload, start)
                except UnfitError as failure:
                    errors[index] = f"message {self._root.descriptor.full_name}: {failure}"
            rows.append(row)
        return Converted(pa.array(rows, self._root.arrow_type), errors)

    def _row(self, payload: bytes, start: int) -> dict[str, Any]:
        if len(payload) < start:
            raise UnfitError(f"the value has {len(payload)} bytes, fewer than its frame")
        try:
            message = self._class.FromString(payload[start:])
        except DecodeError as failure:
            raise UnfitError(f"the bytes are not such a message: {failure}") from failure
        try:
            return _struct(self._root, message)
        except UnicodeDecodeError as failure:  # Google's library does not check the keys of proto2's maps
            raise UnfitError(f"a string is not UTF-8: {failure}") from failure


def _struct(tree: Message, message: Any) -> dict[str, Any]:
    return {field.name: _field(field, message) for field in tree.fields}


def _field(field: Field, message: Any) -> Any:
    if field.nullable and not message.HasField(field.name):
        if field.is_required:
            raise UnfitError(f"field {field.path}: the required field is missing")
        return None
    value = getattr(message, field.name)
    if field.is_map and field.message is not None:
        entry = field.message.fields[1]
        return [(key, _value(entry, value[key])) for key in value]
    if field.is_repeated:
        return [_value(field, each) for each in value]
    return _value(field, value)


def _value(field: Field, value: Any) -> Any:
    if field.message is not None:
        if field.is_wrapper:
            return _value(field.message.fields[0], value.value)
        return _struct(field.message, value)
    if field.kind is Kind.STRING and not isinstance(
        value, str
    ):  # Google's library does not check proto2 strings
        raise UnfitError(f"field {field.path}: the string is not UTF-8")
    if field.kind in (Kind.UINT64, Kind.FIXED64):
        return Decimal(value)
    if field.kind is Kind.ENUM:
        return enum_name(field, value)
    if field.kind is Kind.RAW:
        return json_text(field, value.SerializeToString())
    if field.kind in (Kind.TIMESTAMP, Kind.DURATION):
        return _micros(field, value.seconds, value.nanos)
    return value


def _micros(field: Field, seconds: int, nanos: int) -> int:
    if field.kind is Kind.TIMESTAMP:
        fits = -62135596800 <= seconds <= 253402300799 and 0 <= nanos <= 999999999
    else:
        fits = abs(seconds) <= 315576000000 and abs(nanos) <= 999999999 and seconds * nanos >= 0
    if not fits:
        raise UnfitError(time_text(field, seconds))
    return seconds * 1_000_000 + (nanos // 1000 if nanos >= 0 else -(-nanos // 1000))
