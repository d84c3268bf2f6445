"""Parses Avro schemas into trees of types, maps these to Arrow as `from_avro` does, and encodes defaults."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from kafka_eos_source.documents.converted import MAX_DEPTH, MAX_FIELDS, inside
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema, zigzag
from kafka_eos_source.runtime.json_input import JsonError, parse_json

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})

#: How many bytes a value takes at least; the others take one.
_MIN_BYTES = {"null": 0, "float": 4, "double": 8}
#: Avro's lengths are ints of Java, and no record is larger.
MOST_BYTES_OF_FIXED = (1 << 31) - 1
_MOST_CHARACTERS = 1000
_MOST_SHOWN = 100
_MOST_BRANCHES_SHOWN = 5

#: The logical types that change how a value is stored, and the types that may carry them. All others are
#: ignored, as the specification demands of unknown logical types.
_LOGICAL: dict[str, tuple[str, ...]] = {
    "decimal": ("bytes", "fixed"),
    "date": ("int",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
}


@dataclass(eq=False)
class Field:
    """A field of a record. `has_default` tells a default of null from no default."""

    name: str
    type: Type
    aliases: tuple[str, ...] = ()
    has_default: bool = False
    default: Any = None


@dataclass(eq=False)
class Type:
    """A type of an Avro schema. All uses of a named type share one object, so recursive types are cycles.

    Attributes:
        kind: A primitive type, or "record", "enum", "fixed", "array", "map" or "union".
        logical: The logical type, if it is known, and valid for this kind.
        name: The full name of a named type.
        aliases: Full names under which a reader also accepts a writer's type.
        fields: Of a record.
        symbols: Of an enum.
        default: Of an enum: the symbol for symbols that a reader does not know.
        items: The type of the items of an array or the values of a map.
        branches: Of a union.
        size: Of a fixed type, in bytes.
        precision, scale: Of a decimal.
        depth: How many levels of types are nested in it. These three are 0 while the type is being parsed,
            which is what a type sees that contains itself.
        places: How many types are in it, counting each at every place where it is used; `MAX_FIELDS` + 1 if
            there are more.
        min_bytes: How many bytes a value takes at least.
    """

    kind: str
    logical: str | None = None
    name: str = ""
    aliases: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    symbols: tuple[str, ...] = ()
    default: str | None = None
    items: Type | None = None
    branches: tuple[Type, ...] = ()
    size: int = 0
    precision: int = 0
    scale: int = 0
    depth: int = 0
    places: int = 0
    min_bytes: int = 0

    @property
    def item(self) -> Type:
        """The type of the items of an array or the values of a map."""
        assert self.items is not None
        return self.items

    @property
    def is_nullable(self) -> bool:
        """Whether this is a union that contains null."""
        return any(branch.kind == "null" for branch in self.branches)

    @property
    def values(self) -> tuple[Type, ...]:
        """The branches of a union, without null."""
        return tuple(branch for branch in self.branches if branch.kind != "null")

    def __str__(self) -> str:
        if self.kind in ("array", "map"):
            return f"{self.kind} of {self.item}"
        if self.kind == "union":
            shown = [*map(str, self.branches[:_MOST_BRANCHES_SHOWN])]
            return f"union [{', '.join(shown)}{', …' if len(shown) < len(self.branches) else ''}]"
        name = self.name if len(self.name) <= _MOST_SHOWN else f"{self.name[:_MOST_SHOWN]}…"
        if self.logical == "decimal":
            return f"{name or self.kind} (decimal({self.precision}, {self.scale}))"
        named = f"{self.kind} {name}" if name else self.kind
        return f"{named} ({self.logical})" if self.logical else named


def parse(schema: Schema) -> Type:
    """Parses a schema.

    The schema may use all types that its references define, whatever the references are called.

    Raises:
        InvalidSchemaError: if the text is not a valid Avro schema, or its references define a type in
            different ways. The message says where.
    """
    if schema.format != "AVRO":
        raise InvalidSchemaError(
            f"the schema has format {schema.format}, but its records are read or written as Avro",
            fix="name the schema of an Avro subject",
        )
    parser = _Parser()
    try:
        for each in {each.schema: each for each in schema.imports()}.values():
            where = f"the schema that is referenced as {_shown(each.name)}"
            where += f" ({each.origin})" if each.origin else ""
            parser.define(_json(each.schema.text, where), where)
        found = _json(schema.text, "the schema")
        parser.define(found, "the schema")
        return parser.parse(found)
    except RecursionError:
        raise InvalidSchemaError("the Avro schema is nested too deeply", fix="flatten the schema") from None


#: A text, or a comment. Both also end with the schema, so that each character is looked at once.
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*"?)|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)


def _json(text: str, what: str) -> Any:
    """Returns the JSON of a schema, in which Avro's Java library accepts comments."""
    try:
        try:
            return parse_json(text)
        except JsonError:
            if "//" not in text and "/*" not in text:
                raise
            return parse_json(_COMMENT.sub(lambda found: found[1] or " ", text))
    except JsonError as failure:
        raise InvalidSchemaError(
            f"{what} cannot be read as JSON ({failure}): {text[:200]!r}", fix="register an Avro schema"
        ) from failure


class _Definition(NamedTuple):
    """Where a named type is defined.

    Attributes:
        found: the JSON of the type.
        namespace: the namespace around it.
        where: the schema that contains it, for errors.
    """

    found: dict[str, Any]
    namespace: str
    where: str


@dataclass
class _Parser:
    """Parses schemas that share their named types.

    A type may be used before it is defined, and in another schema than the one that defines it, whatever the
    name of the reference between the two is. So `define` collects the definitions first, and each is parsed
    where it is used for the first time. Definitions that nothing uses are not parsed.

    Attributes:
        definitions: All definitions of each full name.
        names: The types that were parsed, or are being parsed, by full name.
        path: The field that is being parsed.
    """

    definitions: dict[str, list[_Definition]] = field(default_factory=dict)
    names: dict[str, Type] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)

    def define(self, document: Any, where: str) -> None:
        """Collects the named types that a schema defines, in the order of its text.

        Args:
            document: The JSON of the schema.
            where: What the schema is, for errors.
        """
        waiting: list[tuple[Any, str]] = [(document, "")]
        while waiting:
            found, namespace = waiting.pop()
            if isinstance(found, list):
                waiting.extend((branch, namespace) for branch in reversed(found))
            if not isinstance(found, dict):
                continue
            kind = found.get("type")
            if not isinstance(kind, str):
                waiting.append((kind, namespace))
            elif kind in ("array", "map"):
                waiting.append((found.get("items" if kind == "array" else "values"), namespace))
            elif kind in _NAMED and (full := _defined_name(found, namespace)):
                self.definitions.setdefault(full, []).append(_Definition(found, namespace, where))
                fields = found.get("fields")
                inside = [one for one in fields if isinstance(one, dict)] if isinstance(fields, list) else []
                waiting.extend((one.get("type"), _namespace(full)) for one in reversed(inside))

    def parse(self, found: Any, namespace: str = "") -> Type:
        while isinstance(found, dict) and isinstance(found.get("type"), dict | list):
            found = found["type"]  # {"type": {"type": …}}
        if isinstance(found, str):
            return self._named(found, namespace)
        if isinstance(found, list):
            return self._union(found, namespace)
        if not isinstance(found, dict) or "type" not in found:
            raise self._refusal(
                f"{_shown(found)} is not a type: expected a name, a list or an object with 'type'"
            )
        kind = found["type"]
        if not isinstance(kind, str):
            raise self._refusal(f"{_shown(kind)} is not a type: expected a name, a list or an object")
        if kind in _NAMED:
            return self._definition(found, namespace)
        if kind == "array":
            return self._measured(Type("array", items=self._within("[]", found.get("items"), namespace)))
        if kind == "map":
            return self._measured(Type("map", items=self._within("{}", found.get("values"), namespace)))
        if kind in PRIMITIVES:
            return self._measured(self._with_logical(Type(kind), found))
        return self._named(kind, namespace)

    def _within(self, step: str, found: Any, namespace: str) -> Type:
        self.path.append(step)
        if len(self.path) > MAX_DEPTH:
            raise self._too_deep()
        try:
            return self.parse(found, namespace)
        finally:
            self.path.pop()

    def _measured(self, made: Type) -> Type:
        """Fills in what follows from the types inside a type, once these are known."""
        parts = [one.type for one in made.fields] or list(made.branches)
        parts += [made.items] if made.items is not None else []
        made.depth = 1 + max((each.depth for each in parts), default=0)
        made.places = min(1 + sum(each.places for each in parts), MAX_FIELDS + 1)
        if made.depth > MAX_DEPTH * 2:  # a nullable type is two: the union, and the type in it
            raise self._too_deep()
        if made.kind == "record":
            made.min_bytes = min(sum(each.min_bytes for each in parts), MOST_BYTES_OF_FIXED)
        else:
            made.min_bytes = made.size if made.kind == "fixed" else _MIN_BYTES.get(made.kind, 1)
        return made

    def _too_deep(self) -> InvalidSchemaError:
        return self._refusal(f"types are nested more than {MAX_DEPTH} levels deep", "flatten the schema")

    def _named(self, name: str, namespace: str) -> Type:
        if name in PRIMITIVES:
            return self._measured(Type(name))
        for full in (_full_name(name, namespace), name):
            if full in self.names:
                return self.names[full]
            if full in self.definitions:
                first = self.definitions[full][0]
                return self._definition(first.found, first.namespace)
        raise self._refusal(
            f"type {_shown(name)} is not defined",
            "define it, or register the schema with a reference to the schema that defines it",
        )

    def _union(self, found: list[Any], namespace: str) -> Type:
        branches = tuple(self.parse(branch, namespace) for branch in found)
        keys = [branch.name or branch.kind for branch in branches]
        if "union" in keys or len(set(keys)) < len(keys):
            raise self._refusal(f"the union {_shown(keys)} has a type twice, or a union as a branch")
        return self._measured(Type("union", branches=branches))

    def _definition(self, found: dict[str, Any], namespace: str) -> Type:
        """Returns a named type, and parses it unless it was parsed, or is being parsed, elsewhere."""
        full = self._name_of(found, namespace)
        if full in self.names:
            return self.names[full]
        made = self.names[full] = Type("", name=full)
        self._fill(made, found)
        definitions = self.definitions[full]
        here = next(each.where for each in definitions if each.found is found)
        for other in definitions:
            if other.found is found:
                continue
            copy = Type("", name=full)
            self._fill(copy, other.found)
            if _contents(copy) != _contents(made):
                raise self._refusal(
                    f"type {full!r} is defined in {here} and, differently{_differing(made, copy)}, in "
                    f"{other.where}",
                    "register a new version of the schema that has, or refers to, only one of these "
                    "definitions, and let the producers use it; on_bad='dead-letter' of the read sets aside "
                    "records that have the old version",
                )
        return made

    def _name_of(self, found: dict[str, Any], around: str) -> str:
        name = found.get("name")
        if not isinstance(name, str) or not name:
            raise self._refusal(f"a type of kind {found['type']} has no name")
        full = _defined_name(found, around)
        if full is None:
            raise self._refusal(
                f"type {_shown(name)} has a name or namespace of more than {_MOST_CHARACTERS} characters"
            )
        return full

    def _fill(self, made: Type, found: dict[str, Any]) -> None:
        space = _namespace(made.name)
        made.kind = "record" if found["type"] == "error" else found["type"]
        made.aliases = tuple(_full_name(alias, space) for alias in self._aliases(found))
        if made.kind == "record":
            made.fields = self._fields(found.get("fields"), made.name, space)
        elif made.kind == "enum":
            self._fill_enum(made, found)
        else:
            size = found.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST_BYTES_OF_FIXED:
                raise self._refusal(
                    f"fixed type {made.name!r} has size {_shown(size)}: expected a number of bytes up to "
                    f"{MOST_BYTES_OF_FIXED}"
                )
            made.size = size
            self._with_logical(made, found)
        self._measured(made)

    def _fill_enum(self, made: Type, found: dict[str, Any]) -> None:
        symbols = found.get("symbols")
        if (
            not isinstance(symbols, list)
            or not all(isinstance(symbol, str) for symbol in symbols)
            or len(set(symbols)) < len(symbols)
        ):
            raise self._refusal(
                f"enum {made.name!r} has symbols {_shown(symbols)}: expected different strings"
            )
        made.symbols = tuple(symbols)
        default = found.get("default")
        made.default = default if default in symbols else None

    def _fields(self, found: Any, record: str, namespace: str) -> tuple[Field, ...]:
        if not isinstance(found, list):
            raise self._refusal(f"record {record!r} has no list of fields")
        made: list[Field] = []
        names: set[str] = set()
        for one in found:
            name = one.get("name") if isinstance(one, dict) else None
            if not isinstance(name, str) or "type" not in one:
                raise self._refusal(f"record {record!r} has a field without a name or type: {_shown(one)}")
            if name in names:
                raise self._refusal(f"record {record!r} has two fields {name!r}")
            names.add(name)
            kind = self._within(f".{name}", one["type"], namespace)
            made.append(Field(name, kind, self._aliases(one), "default" in one, one.get("default")))
        return tuple(made)

    def _aliases(self, found: dict[str, Any]) -> tuple[str, ...]:
        aliases = found.get("aliases") or []
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise self._refusal(f"{found['name']!r} has aliases {_shown(aliases)}: expected a list of names")
        return tuple(aliases)

    def _with_logical(self, made: Type, found: dict[str, Any]) -> Type:
        logical = found.get("logicalType")
        if not isinstance(logical, str) or made.kind not in _LOGICAL.get(logical, ()):
            return made
        if logical == "decimal":
            precision, scale = found.get("precision"), found.get("scale", 0)
            if not isinstance(precision, int) or not isinstance(scale, int):
                return made
            if not precision > 0 or not 0 <= scale <= precision:
                return made
            if made.kind == "fixed" and not _fits(precision, made.size):
                return made
            made.precision, made.scale = precision, scale
        made.logical = logical
        return made

    def _refusal(self, message: str, fix: str = "correct the schema") -> InvalidSchemaError:
        where = inside("", "".join(self.path).lstrip("."))
        return InvalidSchemaError(f"Avro schema{f', field {where}' if where else ''}: {message}", fix=fix)


def _shown(found: Any) -> str:
    """Returns a part of a schema for an error, without converting all of a large one to text."""
    if isinstance(found, list | dict) and len(found) > _MOST_BRANCHES_SHOWN:
        return f"a {type(found).__name__} of {len(found)} entries"
    if isinstance(found, int) and found.bit_length() > 64:
        return "a number of more than 64 bits"
    text = repr(found)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _full_name(name: str, namespace: str) -> str:
    return name.lstrip(".") if "." in name or not namespace else f"{namespace}.{name}"


def _namespace(full: str) -> str:
    return full.rpartition(".")[0]


def _defined_name(found: dict[str, Any], around: str) -> str | None:
    """Returns the full name of the type that some JSON defines; None if it has no usable name."""
    name, space = found.get("name"), found.get("namespace")
    space = space if isinstance(space, str) else around
    if not isinstance(name, str) or not name:
        return None
    if max(len(name), len(space)) > _MOST_CHARACTERS:  # each type inside repeats its namespace
        return None
    return _full_name(name, space)


def _contents(found: Type) -> tuple[Any, ...]:
    """Returns what a definition says about values. Of named types in it, only the names."""
    fields = tuple(
        (one.name, one.aliases, one.has_default, one.default, _outline(one.type)) for one in found.fields
    )
    return (*_outline(found)[1:], found.aliases, found.symbols, found.default, found.size, fields)


def _outline(found: Type) -> tuple[Any, ...]:
    parts = [] if found.name else [*found.branches, *([found.items] if found.items else [])]
    inside = tuple(map(_outline, parts))
    return (found.name, found.kind, found.logical, found.precision, found.scale, inside)


def _differing(one: Type, other: Type) -> str:
    """Names the fields in which two definitions of a record differ, for an error."""
    fields = [{field[0]: field for field in _contents(each)[-1]} for each in (one, other)]
    names = [name for name in fields[0] | fields[1] if fields[0].get(name) != fields[1].get(name)]
    return f" (fields {', '.join(map(_shown, names[:_MOST_BRANCHES_SHOWN]))})" if names else ""


def _fits(precision: int, size: int) -> bool:
    """Returns whether a number of bytes holds all decimals of a precision."""
    if (
        precision > 3 * size
    ):  # 8 bits are less than 3 digits; without this, a hostile schema asks for huge powers
        return False
    return size > 64 or 10**precision <= 1 << (8 * size - 1)


# -- Arrow types ---------------------------------------------------------------------------------

#: The largest precision of Spark's decimals.
MAX_PRECISION = 38

_ARROW_OF_PRIMITIVE: dict[str, pa.DataType] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}

#: Spark has no timestamps of nanoseconds: these stay numbers, as in `from_avro`, so that no digit is lost.
_ARROW_OF_LOGICAL: dict[str, pa.DataType] = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}


def to_arrow(found: Type, path: str = "", around: tuple[Type, ...] = ()) -> pa.DataType:
    """Returns the Arrow type of decoded values. Every field is nullable, as with `from_avro`.

    Raises:
        InvalidSchemaError: if no Spark type can hold the values: a recursive type, a decimal of more than 38
            digits, or a type with more fields than `MAX_FIELDS`.
    """
    if found.places > MAX_FIELDS:
        raise InvalidSchemaError(
            f"{_where(path)} has more than {MAX_FIELDS:,} fields, counting those of a type at each place "
            "where it is used",
            fix="read with a reader schema that leaves out fields",
        )
    if found in around:
        raise InvalidSchemaError(
            f"{_where(path)} has the recursive type {found.name!r}, which no Spark type can express",
            fix="read with a reader schema that leaves out the field that makes the type recursive",
        )
    if found.kind == "record":
        outer = (*around, found)
        return pa.struct(
            [pa.field(f.name, to_arrow(f.type, inside(path, f".{f.name}"), outer)) for f in found.fields]
        )
    if found.kind == "array":
        return pa.list_(to_arrow(found.item, inside(path, "[]"), around))
    if found.kind == "map":
        return pa.map_(pa.string(), to_arrow(found.item, inside(path, "{}"), around))
    if found.kind == "union":
        values = found.values
        if is_struct_of_members(found):
            return pa.struct(
                [
                    pa.field(f"member{number}", to_arrow(value, inside(path, f".member{number}"), around))
                    for number, value in enumerate(values)
                ]
            )
        if len(values) > 1:
            return pa.int64() if {"int", "long"} == {value.kind for value in values} else pa.float64()
        return to_arrow(values[0], path, around) if values else pa.null()
    if found.logical == "decimal":
        if found.precision > MAX_PRECISION:
            raise InvalidSchemaError(
                f"{_where(path)} is a decimal of {found.precision} digits; Spark allows {MAX_PRECISION}",
                fix="read with a reader schema that declares the field without the logical type, as bytes",
            )
        return pa.decimal128(found.precision, found.scale)
    return _ARROW_OF_LOGICAL.get(found.logical or "", _ARROW_OF_PRIMITIVE[found.kind])


def is_struct_of_members(union: Type) -> bool:
    """Returns whether the values of a union become a struct with one field per type, as with `from_avro`.

    Unions of one type, of int and long, and of float and double become one number.
    """
    kinds = {value.kind for value in union.values}
    is_number = kinds in ({"int", "long"}, {"float", "double"}) and not any(v.logical for v in union.values)
    return len(union.values) > 1 and not is_number


def _where(path: str) -> str:
    return f"field {path.lstrip('.')}" if path else "the schema"


# -- default values ------------------------------------------------------------------------------

_LIMITS = {"int": 1 << 31, "long": 1 << 63}


def encode_default(found: Type, value: Any, path: str) -> bytes:
    """Returns the encoding of a default value.

    Raises:
        InvalidSchemaError: if the value does not have the type of its field.
    """
    encoded = _encode(found, value)
    if encoded is None:
        raise InvalidSchemaError(
            f"field {path.lstrip('.')} has default {value!r}, which is not of type {found}",
            fix="correct the default in the schema",
        )
    return encoded


def _encode(found: Type, value: Any) -> bytes | None:
    kind = found.kind
    if kind == "union":
        return _encode_union(found, value)
    if kind == "null":
        return b"" if value is None else None
    if kind == "boolean":
        return bytes([value]) if isinstance(value, bool) else None
    if kind in ("int", "long", "float", "double"):
        return _encode_number(kind, value)
    if kind == "record":
        return _encode_record(found, value)
    if kind == "array":
        if not isinstance(value, list):
            return None
        return _blocks([_encode(found.item, item) for item in value])
    if kind == "map":
        if not isinstance(value, dict):
            return None
        return _blocks([_join([_text(key), _encode(found.item, item)]) for key, item in value.items()])
    if not isinstance(value, str):
        return None
    if kind == "string":
        return _text(value)
    if kind == "enum":
        return zigzag(found.symbols.index(value)) if value in found.symbols else None
    try:
        plain = value.encode("latin-1")
    except UnicodeEncodeError:
        return None
    if kind == "bytes":
        return zigzag(len(plain)) + plain
    return plain if len(plain) == found.size else None


def _encode_union(found: Type, value: Any) -> bytes | None:
    for number, branch in enumerate(found.branches):
        encoded = _encode(branch, value)
        if encoded is not None:
            return zigzag(number) + encoded
    return None


def _encode_number(kind: str, value: Any) -> bytes | None:
    """Encodes a number, which Avro's Java library also accepts as 1.0 for an int, and as text for a float."""
    if kind in ("float", "double"):
        if isinstance(value, str) and _FLOAT.fullmatch(value):
            value = float(value)
        try:
            return struct.pack("<f" if kind == "float" else "<d", value) if _is_number(value) else None
        except OverflowError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    limit = _LIMITS[kind]
    is_fitting = _is_number(value) and isinstance(value, int) and -limit <= value < limit
    return zigzag(value) if is_fitting else None


_FLOAT = re.compile(r"[+-]?(?:NaN|Infinity|\d{1,400}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,9})?)", re.ASCII)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _encode_record(found: Type, value: Any) -> bytes | None:
    if not isinstance(value, dict):
        return None
    parts: list[bytes | None] = []
    for one in found.fields:
        if one.name in value:
            parts.append(_encode(one.type, value[one.name]))
        else:
            parts.append(_encode(one.type, one.default) if one.has_default else None)
    return _join(parts)


def _text(value: str) -> bytes | None:
    try:
        plain = value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can write
        return None
    return zigzag(len(plain)) + plain


def _blocks(parts: list[bytes | None]) -> bytes | None:
    joined = _join(parts)
    if joined is None or not parts:
        return None if joined is None else b"\0"
    return zigzag(len(parts)) + joined + b"\0"


def _join(parts: list[bytes | None]) -> bytes | None:
    known = [part for part in parts if part is not None]
    return b"".join(known) if len(known) == len(parts) else None
