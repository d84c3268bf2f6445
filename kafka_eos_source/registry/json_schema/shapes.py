"""What a JSON Schema says about the type of values: a tree of shapes, each with an Arrow type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.runtime.json_input import parse_json

INSTALL = 'pip install "kafka-eos-source[jsonschema]"'
_DEFAULT_DRAFT = "http://json-schema.org/draft-07/schema#"  # what Confluent's clients assume
_MAX_DEPTH = 64


class Kind(Enum):
    """What a value is in JSON, and which column it becomes."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    STRING = "string"
    DATE_TIME = "date-time"
    DATE = "date"
    OBJECT = "object"
    MAP = "map"
    ARRAY = "array"
    TEXT = "any JSON value"


_SCALARS = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.INTEGER: pa.int64(),
    Kind.NUMBER: pa.float64(),
    Kind.STRING: pa.string(),
    Kind.DATE_TIME: pa.timestamp("us", "UTC"),
    Kind.DATE: pa.date32(),
    Kind.TEXT: pa.string(),
}


@dataclass(frozen=True)
class Shape:
    """The type of a value.

    Attributes:
        kind: what it is.
        nullable: whether the schema allows null.
        properties: of an object, in the order of the schema.
        required: names of the properties that must exist.
        is_closed: whether the schema forbids other properties.
        items: the shape of an array's elements, or of a map's values.
    """

    kind: Kind
    nullable: bool = False
    properties: dict[str, Shape] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    is_closed: bool = False
    items: Shape | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column."""
        return self.typed(_SCALARS.__getitem__)

    def typed(self, scalar: Callable[[Kind], pa.DataType]) -> pa.DataType:
        """Returns the type of the column, with a function for the types of scalars."""
        if self.kind is Kind.OBJECT:
            return pa.struct([(name, shape.typed(scalar)) for name, shape in self.properties.items()])
        if self.items is not None:
            items = self.items.typed(scalar)
            return pa.list_(items) if self.kind is Kind.ARRAY else pa.map_(pa.string(), items)
        return scalar(self.kind)


def read_shape(schema: Schema) -> Shape:
    """Returns the shape of the values that a schema describes.

    Raises:
        InvalidSchemaError: if the text is not a JSON Schema, or refers to something that does not exist.
    """
    if schema.format != "JSON":
        raise InvalidSchemaError(
            f"the schema has the format {schema.format}, but a JSON Schema was expected",
            fix="use the functions of that format, or another subject",
        )
    contents, resolver = open_schema(schema)
    return _Reader().read(contents, resolver, "#", ())


def open_schema(schema: Schema) -> tuple[Any, Any]:
    """Returns a schema as Python values, and the resolver of its references (of the package referencing)."""
    try:
        from referencing import Registry
    except ImportError as failure:
        raise InvalidSchemaError(f"JSON Schemas need a package: {failure}", fix=INSTALL) from failure
    registry: Any = Registry()
    waiting = [(each.name, each.schema) for each in schema.references]
    while waiting:
        name, each = waiting.pop()
        registry = registry.with_resource(name, _resource(each, f"reference {name!r}"))
        waiting += [(inner.name, inner.schema) for inner in each.references]
    resource = _resource(schema, "schema")
    uri = resource.id() or ""
    return resource.contents, registry.with_resource(uri, resource).resolver(uri)


def _resource(schema: Schema, what: str) -> Any:
    from referencing import Resource
    from referencing.jsonschema import specification_with

    try:
        contents = parse_json(schema.text)
    except ValueError as failure:
        raise InvalidSchemaError(f"the {what} is not JSON: {failure}", fix="correct the schema") from failure
    if not isinstance(contents, (dict, bool)):
        raise InvalidSchemaError(
            f"the {what} is not a JSON Schema, but {contents!r}", fix="correct the schema"
        )
    specification: Any = specification_with(_DEFAULT_DRAFT)
    return Resource.from_contents(contents, default_specification=specification)


class _Reader:
    """Reads the keywords that decide types. All others only restrict values, and do not change the type."""

    def read(self, schema: Any, resolver: Any, path: str, open_references: tuple[str, ...]) -> Shape:
        """Returns the shape of a schema.

        Args:
            schema: a schema at any place.
            resolver: resolves its references.
            path: the place, for the text of errors.
            open_references: the references inside which it is. One that contains itself becomes JSON text,
                because a column cannot have a recursive type.
        """
        if isinstance(schema, bool) or len(path) > _MAX_DEPTH * 64:
            return Shape(Kind.TEXT, nullable=True)
        if not isinstance(schema, dict):
            raise InvalidSchemaError(
                f"{path} of the JSON Schema is not a schema: {schema!r}", fix="correct the schema"
            )
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise InvalidSchemaError(
                    f"{path} of the JSON Schema uses {keyword}, from which no column type follows",
                    fix="use $ref instead",
                )
        if "$ref" in schema:
            return self._reference(schema, resolver, path, open_references)
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema and "properties" not in schema:
                return self._choice(schema, keyword, resolver, path, open_references)
        if "allOf" in schema:
            return self._all(schema, resolver, path, open_references)
        return self._plain(schema, resolver, path, open_references)

    def _reference(self, schema: dict[str, Any], resolver: Any, path: str, outer: tuple[str, ...]) -> Shape:
        from referencing.exceptions import Unresolvable

        name = schema["$ref"]
        try:
            found = resolver.lookup(name)
        except Unresolvable as failure:
            raise InvalidSchemaError(
                f"{path} of the JSON Schema refers to {name!r}, which is not among its references",
                fix="register the schema that it refers to under that name, as a reference",
            ) from failure
        key = f"{found.resolver._base_uri}|{id(found.contents)}"
        if key in outer:
            return Shape(Kind.TEXT, nullable=True)
        return self.read(found.contents, found.resolver, path, (*outer, key))

    def _choice(
        self, schema: dict[str, Any], keyword: str, resolver: Any, path: str, outer: tuple[str, ...]
    ) -> Shape:
        rest = {name: value for name, value in schema.items() if name != keyword}
        shapes, nullable = [], False
        for index, each in enumerate(schema[keyword]):
            if isinstance(each, dict) and each.get("type") == "null":
                nullable = True
                continue
            both = {**rest, **each} if isinstance(each, dict) and "$ref" not in each else each
            shapes.append(self.read(both, resolver, f"{path}/{keyword}/{index}", outer))
        if not shapes:
            return Shape(Kind.TEXT, nullable=True)
        nullable = nullable or any(shape.nullable for shape in shapes)
        if (
            len({str(shape.arrow_type) for shape in shapes}) == 1
            and len({shape.kind for shape in shapes}) == 1
        ):
            return replace(shapes[0], nullable=nullable)
        if {shape.kind for shape in shapes} == {Kind.INTEGER, Kind.NUMBER}:
            return Shape(Kind.NUMBER, nullable)
        return Shape(Kind.TEXT, nullable)

    def _all(self, schema: dict[str, Any], resolver: Any, path: str, outer: tuple[str, ...]) -> Shape:
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        shapes = [
            self.read(each, resolver, f"{path}/allOf/{index}", outer)
            for index, each in enumerate(schema["allOf"])
        ]
        if rest.keys() & {"type", "properties", "items", "enum", "const", "format"}:
            shapes.append(self._plain(rest, resolver, path, outer))
        known = [shape for shape in shapes if shape.kind is not Kind.TEXT]
        if not known:
            return Shape(Kind.TEXT, nullable=True)
        if all(shape.kind is Kind.OBJECT for shape in known):
            properties: dict[str, Shape] = {}
            for shape in known:
                properties |= shape.properties
            required = frozenset().union(*(shape.required for shape in known))
            return Shape(Kind.OBJECT, all(shape.nullable for shape in known), properties, required)
        return known[0] if len(known) == 1 else Shape(Kind.TEXT, nullable=True)

    def _plain(self, schema: dict[str, Any], resolver: Any, path: str, outer: tuple[str, ...]) -> Shape:
        types = _types(schema)
        nullable = "null" in types or not types
        kinds = types - {"null"}
        if kinds == {"integer", "number"}:
            kinds = {"number"}
        if len(kinds) != 1:
            return Shape(Kind.TEXT, nullable)
        kind = next(iter(kinds))
        if kind == "object":
            return self._object(schema, nullable, resolver, path, outer)
        if kind == "array":
            items = schema.get("items")
            if not isinstance(items, dict) or schema.get("prefixItems"):
                return Shape(Kind.TEXT, nullable)
            return Shape(Kind.ARRAY, nullable, items=self.read(items, resolver, f"{path}/items", outer))
        if kind == "string" and schema.get("format") in ("date-time", "date"):
            return Shape(Kind(schema["format"]), nullable)
        try:
            return Shape(Kind(kind), nullable)
        except ValueError as failure:
            raise InvalidSchemaError(
                f"{path} of the JSON Schema has the unknown type {kind!r}", fix="correct the schema"
            ) from failure

    def _object(
        self, schema: dict[str, Any], nullable: bool, resolver: Any, path: str, outer: tuple[str, ...]
    ) -> Shape:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        if properties:
            shapes = {
                name: self.read(each, resolver, f"{path}/properties/{name}", outer)
                for name, each in properties.items()
            }
            required = schema.get("required")
            names = frozenset(required if isinstance(required, list) else ())
            return Shape(Kind.OBJECT, nullable, shapes, names, is_closed=others is False)
        if isinstance(others, dict) and others and not schema.get("patternProperties"):
            return Shape(
                Kind.MAP, nullable, items=self.read(others, resolver, f"{path}/additionalProperties", outer)
            )
        return Shape(Kind.TEXT, nullable)


def _types(schema: dict[str, Any]) -> set[str]:
    """Returns the types that a schema allows, which may follow from other keywords; empty = any."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return set(types)
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is not None:
        return {_type_of(value) for value in values}
    if "properties" in schema or "additionalProperties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names[type(value)]
