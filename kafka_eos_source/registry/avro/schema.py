"""Parses the text of an Avro schema, with its references, into a tree of types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.runtime.json_input import parse_json

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})

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
            return f"union [{', '.join(map(str, self.branches))}]"
        if self.logical == "decimal":
            return f"{self.name or self.kind} (decimal({self.precision}, {self.scale}))"
        named = f"{self.kind} {self.name}" if self.name else self.kind
        return f"{named} ({self.logical})" if self.logical else named


def parse(schema: Schema) -> Type:
    """Parses a schema.

    Raises:
        InvalidSchemaError: if the text is not a valid Avro schema. The message says where.
    """
    if schema.format != "AVRO":
        raise InvalidSchemaError(
            f"the schema has format {schema.format}, but its records are read or written as Avro",
            fix="name the schema of an Avro subject",
        )
    names: dict[str, Type] = {}
    try:
        _add_references(schema, names)
        return _Parser(names).parse(_json(schema.text, "the schema"))
    except RecursionError:
        raise InvalidSchemaError("the Avro schema is nested too deeply", fix="flatten the schema") from None


def _add_references(schema: Schema, names: dict[str, Type]) -> None:
    for reference in schema.references:
        if reference.name in names:
            continue
        _add_references(reference.schema, names)
        _Parser(names).parse(_json(reference.schema.text, f"the referenced schema {reference.name!r}"))
        if reference.name not in names:
            raise InvalidSchemaError(
                f"the schema that is referenced as {reference.name!r} defines no type of that name",
                fix="register the reference under the full name of the type that it defines",
            )


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as failure:
        raise InvalidSchemaError(
            f"{what} is not JSON ({failure}): {text[:200]!r}", fix="register an Avro schema"
        ) from failure


@dataclass
class _Parser:
    names: dict[str, Type]
    path: list[str] = field(default_factory=list)

    def parse(self, found: Any, namespace: str = "") -> Type:
        if isinstance(found, str):
            return self._named(found, namespace)
        if isinstance(found, list):
            return self._union(found, namespace)
        if not isinstance(found, dict) or "type" not in found:
            raise self._refusal(f"{found!r} is not a type: expected a name, a list or an object with 'type'")
        kind = found["type"]
        if not isinstance(kind, str):
            return self.parse(kind, namespace)  # {"type": {"type": …}}
        if kind in _NAMED:
            return self._definition(kind, found, namespace)
        if kind == "array":
            return Type("array", items=self._within("[]", found.get("items"), namespace))
        if kind == "map":
            return Type("map", items=self._within("{}", found.get("values"), namespace))
        if kind in PRIMITIVES:
            return self._with_logical(Type(kind), found)
        return self._named(kind, namespace)

    def _within(self, step: str, found: Any, namespace: str) -> Type:
        self.path.append(step)
        try:
            return self.parse(found, namespace)
        finally:
            self.path.pop()

    def _named(self, name: str, namespace: str) -> Type:
        if name in PRIMITIVES:
            return Type(name)
        for full in (_full_name(name, namespace), name):
            if full in self.names:
                return self.names[full]
        raise self._refusal(
            f"type {name!r} is not defined",
            "define it before its first use, or register the schema with a reference to it",
        )

    def _union(self, found: list[Any], namespace: str) -> Type:
        branches = tuple(self.parse(branch, namespace) for branch in found)
        keys = [branch.name or branch.kind for branch in branches]
        if not branches or "union" in keys or len(set(keys)) < len(keys):
            raise self._refusal(
                f"the union [{', '.join(keys)}] is empty, or has a type twice, or a union as a branch"
            )
        return Type("union", branches=branches)

    def _definition(self, kind: str, found: dict[str, Any], namespace: str) -> Type:
        name = found.get("name")
        if not isinstance(name, str) or not name:
            raise self._refusal(f"a type of kind {kind} has no name")
        space = found.get("namespace", namespace) or ""
        if not isinstance(space, str):
            raise self._refusal(f"type {name!r} has namespace {space!r}: expected a string")
        full = _full_name(name, space)
        if full in self.names:
            raise self._refusal(f"type {full!r} is defined twice")
        space = full.rpartition(".")[0]
        aliases = tuple(_full_name(alias, space) for alias in self._aliases(found))
        made = Type("record" if kind == "error" else kind, name=full, aliases=aliases)
        self.names[full] = made
        if made.kind == "record":
            made.fields = self._fields(found.get("fields"), full, space)
        elif made.kind == "enum":
            self._fill_enum(made, found)
        else:
            size = found.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self._refusal(f"fixed type {full!r} has size {size!r}: expected a number of bytes")
            made.size = size
            self._with_logical(made, found)
        return made

    def _fill_enum(self, made: Type, found: dict[str, Any]) -> None:
        symbols = found.get("symbols")
        if (
            not isinstance(symbols, list)
            or not all(isinstance(symbol, str) for symbol in symbols)
            or len(set(symbols)) < len(symbols)
        ):
            raise self._refusal(f"enum {made.name!r} has symbols {symbols!r}: expected different strings")
        made.symbols = tuple(symbols)
        made.default = found.get("default")
        if made.default is not None and made.default not in made.symbols:
            raise self._refusal(
                f"the default {made.default!r} of enum {made.name!r} is not one of its symbols"
            )

    def _fields(self, found: Any, record: str, namespace: str) -> tuple[Field, ...]:
        if not isinstance(found, list):
            raise self._refusal(f"record {record!r} has no list of fields")
        made: list[Field] = []
        for one in found:
            name = one.get("name") if isinstance(one, dict) else None
            if not isinstance(name, str) or "type" not in one:
                raise self._refusal(f"record {record!r} has a field without a name or type: {one!r}")
            if any(other.name == name for other in made):
                raise self._refusal(f"record {record!r} has two fields {name!r}")
            kind = self._within(f".{name}", one["type"], namespace)
            made.append(Field(name, kind, self._aliases(one), "default" in one, one.get("default")))
        return tuple(made)

    def _aliases(self, found: dict[str, Any]) -> tuple[str, ...]:
        aliases = found.get("aliases") or []
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise self._refusal(f"{found['name']!r} has aliases {aliases!r}: expected a list of names")
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
        where = "".join(self.path).lstrip(".")
        return InvalidSchemaError(f"Avro schema{f', field {where}' if where else ''}: {message}", fix=fix)


def _full_name(name: str, namespace: str) -> str:
    return name.lstrip(".") if "." in name or not namespace else f"{namespace}.{name}"


def _fits(precision: int, size: int) -> bool:
    """Returns whether a number of bytes holds all decimals of a precision."""
    if (
        precision > 3 * size
    ):  # 8 bits are less than 3 digits; without this, a hostile schema asks for huge powers
        return False
    return size > 64 or 10**precision <= 1 << (8 * size - 1)
