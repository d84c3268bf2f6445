"""Parses the text of an Avro schema, with its references, into a tree of types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import MAX_DEPTH, MAX_FIELDS, Schema, inside
from kafka_eos_source.runtime.json_input import parse_json

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
        for reference in schema.imports():
            if reference.name in names:
                continue
            _Parser(names).parse(_json(reference.schema.text, f"the referenced schema {reference.name!r}"))
            if reference.name not in names:
                raise InvalidSchemaError(
                    f"the schema that is referenced as {reference.name!r} defines no type of that name",
                    fix="register the reference under the full name of the type that it defines",
                )
        return _Parser(names).parse(_json(schema.text, "the schema"))
    except RecursionError:
        raise InvalidSchemaError("the Avro schema is nested too deeply", fix="flatten the schema") from None


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as failure:
        raise InvalidSchemaError(
            f"{what} cannot be read as JSON ({failure}): {text[:200]!r}", fix="register an Avro schema"
        ) from failure


@dataclass
class _Parser:
    names: dict[str, Type]
    path: list[str] = field(default_factory=list)

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
            return self._definition(kind, found, namespace)
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
        raise self._refusal(
            f"type {_shown(name)} is not defined",
            "define it before its first use, or register the schema with a reference to it",
        )

    def _union(self, found: list[Any], namespace: str) -> Type:
        branches = tuple(self.parse(branch, namespace) for branch in found)
        keys = [branch.name or branch.kind for branch in branches]
        if not branches or "union" in keys or len(set(keys)) < len(keys):
            raise self._refusal(
                f"the union {_shown(keys)} is empty, or has a type twice, or a union as a branch"
            )
        return self._measured(Type("union", branches=branches))

    def _definition(self, kind: str, found: dict[str, Any], namespace: str) -> Type:
        name = found.get("name")
        if not isinstance(name, str) or not name:
            raise self._refusal(f"a type of kind {kind} has no name")
        space = found.get("namespace", namespace) or ""
        if not isinstance(space, str):
            raise self._refusal(f"type {name!r} has namespace {_shown(space)}: expected a string")
        if max(len(name), len(space)) > _MOST_CHARACTERS:  # each type inside repeats its namespace
            raise self._refusal(
                f"type {_shown(name)} has a name or namespace of more than {_MOST_CHARACTERS} characters"
            )
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
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST_BYTES_OF_FIXED:
                raise self._refusal(
                    f"fixed type {full!r} has size {_shown(size)}: expected a number of bytes up to "
                    f"{MOST_BYTES_OF_FIXED}"
                )
            made.size = size
            self._with_logical(made, found)
        return self._measured(made)

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
        made.default = found.get("default")
        if made.default is not None and made.default not in made.symbols:
            raise self._refusal(
                f"the default {_shown(made.default)} of enum {made.name!r} is not one of its symbols"
            )

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


def _fits(precision: int, size: int) -> bool:
    """Returns whether a number of bytes holds all decimals of a precision."""
    if (
        precision > 3 * size
    ):  # 8 bits are less than 3 digits; without this, a hostile schema asks for huge powers
        return False
    return size > 64 or 10**precision <= 1 << (8 * size - 1)
