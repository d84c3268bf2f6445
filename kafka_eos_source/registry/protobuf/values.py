"""Values that both decoders convert in Python, and the text of errors."""

from __future__ import annotations

import json
from typing import Any

from kafka_eos_source.registry.protobuf.tree import Field


class UnfitError(ValueError):
    """A value does not fit the type of its column. The text names the field and the reason."""


def json_text(field: Field, payload: bytes) -> str:
    """Returns a Struct, Value or ListValue as JSON text with sorted keys.

    Raises:
        UnfitError: if it is malformed, or has a number that JSON does not have.
    """
    from google.protobuf import json_format, message_factory
    from google.protobuf.message import DecodeError

    try:
        message = message_factory.GetMessageClass(field.descriptor.message_type).FromString(payload)
        plain = _plain(message)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (DecodeError, ValueError, json_format.Error, RecursionError) as failure:
        name = field.descriptor.message_type.full_name
        raise UnfitError(f"field {field.path}: the {name} is not valid JSON: {failure}") from failure


def _plain(message: Any) -> Any:
    from google.protobuf import json_format

    return json_format.MessageToDict(message)


def enum_name(field: Field, number: int) -> str:
    """Returns the name of an enum's number; the number itself if an open enum does not have it."""
    value = field.descriptor.enum_type.values_by_number.get(number)
    return str(number) if value is None else str(value.name)


def time_text(field: Field, seconds: int) -> str:
    """Describes a Timestamp or Duration that Protobuf does not allow."""
    if field.descriptor.message_type.full_name.endswith("Timestamp"):
        return (
            f"field {field.path}: the Timestamp with {seconds} seconds is not between the years 1 and 9999, "
            "or its nanos are not between 0 and 999,999,999"
        )
    return (
        f"field {field.path}: the Duration with {seconds} seconds is longer than 10,000 years, "
        "or its seconds and nanos differ in sign"
    )
