"""What a JSON Schema says about the type of values: a tree of shapes, each with an Arrow type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import urljoin

import pyarrow as pa

from kafka_eos_source.documents.converted import MAX_DEPTH, MAX_FIELDS, inside
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.runtime.json_input import parse_json

INSTALL = 'pip install "kafka-eos-source[jsonschema]"'
_DEFAULT_DRAFT = "http://json-schema.org/draft-07/schema#"  # what Confluent's clients assume
#: The schemas of JSON Schema itself, which all clients know. They contain themselves.
_META_SCHEMA = re.compile(r"https?://json-schema\.org/(?:draft-\d\d|draft/\d{4}-\d\d)/")
#: What a malformed schema raises, here and in the package referencing, which does not check schemas.
_MALFORMED = (TypeError, AttributeError, KeyError, ValueError, LookupError, RecursionError)
#: The keywords that decide types, and on which one another's effect depends.
_KEYWORDS = (
    *("type", "enum", "const", "format", "properties", "required", "additionalProperties"),
    *("patternProperties", "items", "prefixItems", "$ref", "oneOf", "anyOf", "allOf"),
)
#: How deep schemas may be in each other: an object is as deep as its references and keywords.
_DEEPEST = 2 * MAX_DEPTH


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
        if self.kind is Kind.OBJECT:
            return pa.struct([(name, shape.arrow_type) for name, shape in self.properties.items()])
        if self.items is not None:
            items = self.items.arrow_type
            return pa.list_(items) if self.kind is Kind.ARRAY else pa.map_(pa.string(), items)
        return _SCALARS[self.kind]


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
    try:
        return _Reader(_combines(contents)).read(contents, resolver, "#", ())
    except _MALFORMED as failure:
        raise InvalidSchemaError(
            f"a keyword of the JSON Schema has a malformed value ({type(failure).__name__}: "
            f"{str(failure)[:200]})",
            fix="correct the schema",
        ) from failure


def open_schema(schema: Schema) -> tuple[Any, Any]:
    """Returns a schema as Python values, and the resolver of its references (of the package referencing)."""
    try:
        from referencing import Registry
    except ImportError as failure:
        raise InvalidOptionError(f"JSON Schemas need a package: {failure}", fix=INSTALL) from failure
    try:
        resource = _resource(schema, "schema")
        uri = resource.id() or ""
        registry = Registry().with_resources([*_references(schema, uri), (uri, resource)])
        return resource.contents, _crawled(registry).resolver(uri)
    except _MALFORMED as failure:
        raise InvalidSchemaError(
            f"a keyword of the JSON Schema, or of its references, has a malformed value "
            f"({type(failure).__name__}: {str(failure)[:200]})",
            fix="correct the schema",
        ) from failure


def _references(schema: Schema, uri: str) -> Iterable[tuple[str, Any]]:
    """Returns what a schema imports under each URI that may stand for it, as for Confluent's clients.

    A ``$ref`` to the name of a reference is relative to the ``$id`` of the schema around it, if that has one,
    or to that of the whole. An imported schema may have an ``$id`` of its own, which `Registry.crawl` finds.
    """
    resources = {each.schema: _resource(each.schema, f"reference {each.name!r}") for each in schema.imports()}
    found: dict[str, Any] = {}
    for outer in (schema, *resources):
        base = uri if outer is schema else resources[outer].id() or ""
        for each in outer.references:
            for name in (each.name, f"./{each.name}", urljoin(uri, each.name), urljoin(base, each.name)):
                found.setdefault(name, resources[each.schema])
    return found.items()


def _crawled(registry: Any) -> Any:
    """Returns a registry that knows the anchors in its schemas, so that look-ups do not search them again."""
    try:
        return registry.crawl()
    except _MALFORMED:
        return registry  # somewhere; a look-up that needs the place says so


def _resource(schema: Schema, what: str) -> Any:
    from referencing import Resource

    try:
        contents = parse_json(schema.text)
    except ValueError as failure:
        raise InvalidSchemaError(f"the {what} is not JSON: {failure}", fix="correct the schema") from failure
    if not isinstance(contents, (dict, bool)):
        raise InvalidSchemaError(
            f"the {what} is not a JSON Schema, but a {type(contents).__name__}", fix="correct the schema"
        )
    return Resource.from_contents(contents, default_specification=_specification(contents))


def _specification(contents: Any) -> Any:
    """Returns the draft that a schema names; draft 7 if it names none, or none that is known."""
    from referencing.jsonschema import UnknownDialect, specification_with

    named = contents.get("$schema") if isinstance(contents, dict) else None
    for scheme in ("http", "https") if isinstance(named, str) else ():
        try:
            return specification_with(re.sub(r"^https?", scheme, str(named).rstrip("#")))
        except UnknownDialect:
            pass
    return specification_with(_DEFAULT_DRAFT)


class _Reader:
    """Reads the keywords that decide types. All others only restrict values, and do not change the type."""

    def __init__(self, combines: bool) -> None:
        #: Whether keywords beside a reference count.
        self._combines = combines
        self._read = 0
        self._depth = 0
        #: The types of the values of each enum, by its identity: it may be used at many places.
        self._enums: dict[int, set[str]] = {}

    def read(self, schema: Any, resolver: Any, path: str, open_references: tuple[str, ...]) -> Shape:
        """Returns the shape of a schema.

        Args:
            schema: a schema at any place.
            resolver: resolves its references.
            path: the place, for the text of errors.
            open_references: the references inside which it is. One that contains itself becomes JSON text,
                because a column cannot have a recursive type.
        """
        self._read += 1
        if self._read > MAX_FIELDS:
            raise InvalidSchemaError(
                f"the JSON Schema has more than {MAX_FIELDS:,} schemas inside, counting each at every place "
                "where it is used",
                fix="read with a reader schema that leaves out properties",
            )
        if self._depth == _DEEPEST:
            raise InvalidSchemaError(
                f"{path} of the JSON Schema: schemas are nested more than {_DEEPEST} levels deep",
                fix="flatten the schema",
            )
        self._depth += 1
        try:
            return self._shape(schema, resolver, path, open_references)
        finally:
            self._depth -= 1

    def _shape(self, schema: Any, resolver: Any, path: str, open_references: tuple[str, ...]) -> Shape:
        if isinstance(schema, bool):
            return Shape(Kind.TEXT, nullable=True)
        if not isinstance(schema, dict):
            raise InvalidSchemaError(
                f"{path} of the JSON Schema is not a schema, but a {type(schema).__name__}",
                fix="correct the schema",
            )
        if "$dynamicRef" in schema or "$recursiveRef" in schema:  # mostly for schemas inside themselves
            return Shape(Kind.TEXT, nullable=True)
        if "$ref" in schema:
            if self._combines and schema.keys() & {"properties", "allOf"}:  # both count since draft 2019-09
                rest = {name: schema[name] for name in _KEYWORDS if name in schema and name != "$ref"}
                both = [{"$ref": schema["$ref"]}, *rest.pop("allOf", ())]
                return self._all({**rest, "allOf": both}, resolver, path, open_references)
            return self._reference(schema, resolver, path, open_references)
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema and "properties" not in schema:
                return self._choice(schema, keyword, resolver, path, open_references)
        if "allOf" in schema:
            return self._all(schema, resolver, path, open_references)
        return self._plain(schema, resolver, path, open_references)

    def _reference(self, schema: dict[str, Any], resolver: Any, path: str, outer: tuple[str, ...]) -> Shape:
        name = schema["$ref"]
        found = _looked_up(resolver, name)
        if found is None and isinstance(name, str) and "#/$defs/" in name:  # as Confluent's Java client
            found = _looked_up(resolver, name.replace("#/$defs/", "#/definitions/", 1))
        if found is None and isinstance(name, str) and _META_SCHEMA.match(name):
            return Shape(Kind.TEXT, nullable=True)
        if found is None:
            raise InvalidSchemaError(
                f"{path} of the JSON Schema refers to {str(name)[:300]!r}, which is not among its references",
                fix="register the schema that it refers to under that name, as a reference. Other addresses "
                "are not asked for schemas",
            )
        key = f"{found.resolver._base_uri}|{id(found.contents)}"
        if key in outer:
            return Shape(Kind.TEXT, nullable=True)
        return self.read(found.contents, found.resolver, path, (*outer, key))

    def _choice(
        self, schema: dict[str, Any], keyword: str, resolver: Any, path: str, outer: tuple[str, ...]
    ) -> Shape:
        rest = {name: schema[name] for name in _KEYWORDS if name in schema and name != keyword}
        shapes, nullable = [], False
        for index, each in enumerate(schema[keyword]):
            if isinstance(each, dict) and self._types(each) == {"null"}:
                nullable = True
                continue
            both = {**rest, **each} if isinstance(each, dict) and "$ref" not in each else each
            shapes.append(self.read(both, resolver, inside(path, f"/{keyword}/{index}"), outer))
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
        rest = {name: schema[name] for name in _KEYWORDS if name in schema and name != "allOf"}
        shapes = [
            self.read(each, resolver, inside(path, f"/allOf/{index}"), outer)
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
        types = self._types(schema)
        nullable = "null" in types or not types
        kinds = types - {"null"}
        if kinds == {"integer", "number"}:
            kinds = {"number"}
        if len(kinds) != 1 or "any" in kinds:  # of draft 3
            return Shape(Kind.TEXT, nullable)
        kind = next(iter(kinds))
        if kind == "object":
            return self._object(schema, nullable, resolver, path, outer)
        if kind == "array":
            items = schema.get("items")
            if not isinstance(items, dict) or schema.get("prefixItems"):
                return Shape(Kind.TEXT, nullable)
            return Shape(
                Kind.ARRAY, nullable, items=self.read(items, resolver, inside(path, "/items"), outer)
            )
        if kind == "string" and schema.get("format") in ("date-time", "date"):
            return Shape(Kind(schema["format"]), nullable)
        try:
            return Shape(Kind(kind), nullable)
        except ValueError as failure:
            raise InvalidSchemaError(
                f"{path} of the JSON Schema has the unknown type {str(kind)[:100]!r}",
                fix="correct the schema",
            ) from failure

    def _object(
        self, schema: dict[str, Any], nullable: bool, resolver: Any, path: str, outer: tuple[str, ...]
    ) -> Shape:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        if properties:
            shapes = {
                name: self.read(each, resolver, inside(path, f"/properties/{name}"), outer)
                for name, each in properties.items()
            }
            required = schema.get("required")
            names = frozenset(required if isinstance(required, list) else ())
            return Shape(Kind.OBJECT, nullable, shapes, names, is_closed=others is False)
        if isinstance(others, dict) and others and not schema.get("patternProperties"):
            return Shape(
                Kind.MAP,
                nullable,
                items=self.read(others, resolver, inside(path, "/additionalProperties"), outer),
            )
        return Shape(Kind.TEXT, nullable)

    def _types(self, schema: dict[str, Any]) -> set[str]:
        """Returns the types that a schema allows, which may follow from other keywords; empty = any."""
        types = schema.get("type")
        if isinstance(types, str):
            return {types}
        if isinstance(types, list):
            return set(types)
        if (values := schema.get("enum")) is not None:
            if id(values) not in self._enums:
                self._enums[id(values)] = {_type_of(value) for value in values}
            return self._enums[id(values)]
        if "const" in schema:
            return {_type_of(schema["const"])}
        if "properties" in schema or "additionalProperties" in schema:
            return {"object"}
        return {"array"} if "items" in schema else set()


def _combines(contents: Any) -> bool:
    """Returns whether keywords beside ``$ref`` count in a schema, which depends on its draft."""
    return _specification(contents).name in ("draft2019-09", "draft2020-12")


def _looked_up(resolver: Any, name: Any) -> Any | None:
    """Returns what a reference leads to; None if it leads nowhere."""
    from referencing.exceptions import Unresolvable

    try:
        return resolver.lookup(name)
    except Unresolvable:
        return None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names[type(value)]
