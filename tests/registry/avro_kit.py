"""Decodes Avro for the tests of decoding, encoding and evolution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.registry.avro import AvroDecoder, kernel
from kafka_eos_source.registry.avro_decode import compile_program
from kafka_eos_source.registry.avro_schema import parse
from kafka_eos_source.registry.codec import Schema
from tests.registry.avro_model import (
    schema_of,
)


def decode(
    writer: Schema, messages: Sequence[bytes | None], reader: Schema | None = None, start: int = 0
) -> Converted:
    program = compile_program(parse(writer), parse(reader or writer))
    made = AvroDecoder(program, kernel()).decode(pa.array(messages, pa.binary()), start)
    made.values.validate(full=True)
    return made


def numbers(array: pa.Array) -> list[Any]:
    """Shows times as numbers, because those of random payloads are often too large for Python."""
    found = array.type
    shown: list[Any]
    if pa.types.is_struct(found):
        fields = [numbers(array.field(number)) for number in range(found.num_fields)]
        shown = list(zip(*fields, strict=True)) if fields else [()] * len(array)
    elif pa.types.is_list(found) or pa.types.is_map(found):
        offsets = array.offsets.to_pylist()
        if pa.types.is_map(found):
            items = list(zip(numbers(array.keys), numbers(array.items), strict=True))
        else:
            items = numbers(array.values)
        shown = [items[first:past] for first, past in pairwise(offsets)]
    elif pa.types.is_timestamp(found):
        shown = array.view(pa.int64()).to_pylist()
    else:
        shown = (array.view(pa.int32()) if pa.types.is_date(found) else array).to_pylist()
    return [
        value if valid else None for value, valid in zip(shown, array.is_valid().to_pylist(), strict=True)
    ]


def one(schema: Any, payload: bytes, reader: Any = None) -> Any:
    """Decodes one payload, which must be valid."""
    made = decode(schema_of(schema), [payload], None if reader is None else schema_of(reader))
    assert not made.errors
    return made.values.to_pylist()[0]


def error(schema: Any, payload: bytes, reader: Any = None) -> str:
    """Decodes one payload that is not valid between two that are null, and returns its message."""
    made = decode(schema_of(schema), [None, payload, None], None if reader is None else schema_of(reader))
    assert made.values.null_count == 3
    assert list(made.errors) == [1]
    return made.errors[1]


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}
