"""Random Avro schemas and values for tests, and what Arrow should make of them."""

from __future__ import annotations

import copy
import datetime
import decimal
import io
import json
import os
from collections.abc import Iterator
from typing import Any

import fastavro
from hypothesis import strategies as st

from kafka_eos_source.registry.codec import Reference, Schema

#: How many random examples a test tries.
EXAMPLES = int(os.environ.get("AVRO_EXAMPLES", "60"))

EPOCH = datetime.datetime(1970, 1, 1)
UTC = datetime.timezone.utc
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
#: Types that a test can tell apart by their Python values are in different groups.
GROUPS = {
    "int": "number",
    "long": "number",
    "float": "number",
    "double": "number",
    "string": "text",
    "enum": "text",
    "bytes": "text",  # unlike Java, fastavro reads a string as bytes if those come first in a union
    "fixed": "text",
    "record": "object",
    "map": "object",
}
LOGICAL: tuple[dict[str, Any], ...] = (
    {"type": "int", "logicalType": "date"},
    {"type": "int", "logicalType": "time-millis"},
    {"type": "long", "logicalType": "time-micros"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "long", "logicalType": "timestamp-nanos"},
    {"type": "long", "logicalType": "local-timestamp-millis"},
    {"type": "long", "logicalType": "local-timestamp-micros"},
    {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 5},
    {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 4},
    {"type": "string", "logicalType": "uuid"},
)
#: 0001-01-02 to 9999-12-30 in microseconds, so that Python can show each time.
_FIRST, _LAST = -62_135_510_400_000_000, 253_402_128_000_000_000


def schema_of(found: Any, *references: Reference) -> Schema:
    return Schema("AVRO", json.dumps(found), references)


def encode(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), value)
    return out.getvalue()


def kind_of(found: Any) -> str:
    if isinstance(found, list):
        return "union"
    return found["type"] if isinstance(found, dict) else found


@st.composite
def schemas(draw: st.DrawFn, *, logical: bool = True) -> Any:
    """A random schema. Without logical types, Python values tell the branches of unions apart."""
    names = (f"N{number}" for number in range(1000))
    if draw(st.integers(0, 4)) == 0:
        return draw(_types(names, 3, logical))
    return draw(_records(names, 3, logical))


@st.composite
def _types(draw: st.DrawFn, names: Iterator[str], depth: int, logical: bool, union: bool = True) -> Any:
    kinds = [*PRIMITIVES, *(["logical"] if logical else []), "enum", "fixed"]
    if depth:
        kinds += ["array", "map", "record", *(["union", "union"] if union else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "logical":
        if draw(st.integers(0, 5)) == 0:
            name = next(names)
            return {
                "type": "fixed",
                "name": name,
                "size": 9,
                "logicalType": "decimal",
                "precision": 20,
                "scale": 3,
            }
        return draw(st.sampled_from(LOGICAL))
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from(["A", "B", "C", "D"]), min_size=1, unique=True))
        return {"type": "enum", "name": next(names), "symbols": symbols}
    if kind == "fixed":
        return {"type": "fixed", "name": next(names), "size": draw(st.integers(0, 20))}
    if kind == "array":
        return {"type": "array", "items": draw(_types(names, depth - 1, logical))}
    if kind == "map":
        return {"type": "map", "values": draw(_types(names, depth - 1, logical))}
    if kind == "record":
        return draw(_records(names, depth - 1, logical))
    if kind == "union":
        branches = []
        taken = set()
        for _ in range(draw(st.integers(1, 4))):
            branch = draw(_types(names, depth - 1, logical, union=False))
            named = isinstance(branch, dict) and "name" in branch
            group = kind_of(branch) if logical else GROUPS.get(kind_of(branch), kind_of(branch))
            if group not in taken or (named and logical):
                branches.append(branch)
            taken.add(group)
        return branches
    return kind


@st.composite
def _records(draw: st.DrawFn, names: Iterator[str], depth: int, logical: bool) -> Any:
    name = next(names)
    types = draw(st.lists(_types(names, depth, logical), max_size=5))
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": f"f{number}", "type": one} for number, one in enumerate(types)],
    }


def values(found: Any) -> st.SearchStrategy[Any]:
    """Values that fastavro can write; those of unions name their branch."""
    kind = kind_of(found)
    if kind == "union":
        return st.one_of(
            *(
                st.tuples(
                    st.just(one["name"] if isinstance(one, dict) and "name" in one else kind_of(one)),
                    values(one),
                )
                for one in found
            )
        )
    logical = found.get("logicalType") if isinstance(found, dict) else None
    if logical == "decimal":
        most = 10 ** found["precision"] - 1
        return st.integers(-most, most).map(
            lambda n: decimal.Decimal(n).scaleb(-found["scale"], decimal.Context(60))
        )
    if logical in ("timestamp-millis", "local-timestamp-millis"):
        return st.integers(_FIRST // 1000, _LAST // 1000)
    if logical in ("timestamp-micros", "local-timestamp-micros"):
        return st.integers(_FIRST, _LAST)
    if logical == "date":
        return st.integers(-700_000, 2_900_000)
    if logical == "uuid":
        return st.uuids().map(str)
    if kind == "record":
        return st.fixed_dictionaries({one["name"]: values(one["type"]) for one in found["fields"]})
    if kind == "array":
        return st.lists(values(found["items"]), max_size=4)
    if kind == "map":
        return st.dictionaries(st.text(max_size=5), values(found["values"]), max_size=4)
    if kind == "fixed":
        return st.binary(min_size=found["size"], max_size=found["size"])
    if kind == "enum":
        return st.sampled_from(found["symbols"])
    return {
        "null": st.none(),
        "boolean": st.booleans(),
        "int": st.integers(-(1 << 31), (1 << 31) - 1),
        "long": st.integers(-(1 << 63), (1 << 63) - 1),
        "float": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
        "bytes": st.binary(max_size=12),
        "string": st.text(max_size=12),
    }[kind]


def is_struct_of_members(found: list[Any]) -> bool:
    branches = [one for one in found if one != "null"]
    ignored = ("time-millis", "time-micros")
    numbers = {kind_of(one) for one in branches if isinstance(one, str) or one.get("logicalType") in ignored}
    return len(branches) > 1 and not (
        len(branches) == 2 and numbers in ({"int", "long"}, {"float", "double"})
    )


def arrow_value(found: Any, value: Any) -> Any:
    """What `to_pylist` of the decoded column shows for a value of `values`."""
    kind = kind_of(found)
    if kind == "union":
        name, inner = value
        branches = [one for one in found if one != "null"]
        if name == "null":
            return None
        number = next(
            n
            for n, one in enumerate(branches)
            if name == (one["name"] if isinstance(one, dict) and "name" in one else kind_of(one))
        )
        shown = arrow_value(branches[number], inner)
        if not is_struct_of_members(found):
            return shown
        return {f"member{n}": shown if n == number else None for n in range(len(branches))}
    logical = found.get("logicalType") if isinstance(found, dict) else None
    if logical == "date":
        return (EPOCH + datetime.timedelta(days=value)).date()
    if logical in ("timestamp-millis", "timestamp-micros"):
        factor = 1000 if logical.endswith("millis") else 1
        return EPOCH.replace(tzinfo=UTC) + datetime.timedelta(microseconds=value * factor)
    if logical in ("local-timestamp-millis", "local-timestamp-micros"):
        return EPOCH + datetime.timedelta(microseconds=value * (1000 if logical.endswith("millis") else 1))
    if kind == "record":
        return {one["name"]: arrow_value(one["type"], value[one["name"]]) for one in found["fields"]}
    if kind == "array":
        return [arrow_value(found["items"], item) for item in value]
    if kind == "map":
        return [(key, arrow_value(found["values"], item)) for key, item in value.items()]
    return value


def tagged(found: Any, value: Any) -> Any:
    """Adds the names of branches to a value that fastavro read; see `schemas` without logical types."""
    kind = kind_of(found)
    if kind == "union":
        for one in found:
            if _is_of(one, value):
                return (
                    one["name"] if isinstance(one, dict) and "name" in one else kind_of(one),
                    tagged(one, value),
                )
        raise AssertionError((found, value))
    if kind == "record":
        return {one["name"]: tagged(one["type"], value[one["name"]]) for one in found["fields"]}
    if kind == "array":
        return [tagged(found["items"], item) for item in value]
    if kind == "map":
        return {key: tagged(found["values"], item) for key, item in value.items()}
    return value


def _is_of(found: Any, value: Any) -> bool:
    kind = kind_of(found)
    python = {
        "null": type(None),
        "boolean": bool,
        "int": int,
        "long": int,
        "float": float,
        "double": float,
        "bytes": bytes,
        "fixed": bytes,
        "string": str,
        "enum": str,
        "array": list,
        "map": dict,
        "record": dict,
    }[kind]
    return type(value) is python
