"""Makes decoders, encoders and schemas of JSON documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema
from kafka_eos_source.registry.json_schema.decode import JsonDecoder
from kafka_eos_source.registry.json_schema.encode import JsonEncoder, check_key, is_list
from kafka_eos_source.registry.json_schema.shapes import INSTALL, open_schema, read_shape

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
