"""Records as no well-behaved producer writes them, and what decodes them, for fuzz tests of the border.

`cases()` has a `Case` for each format. `payloads(case)` is a strategy for values of records: damaged ones,
values at and beyond the limits of each type, and bytes at random. `check(case, values)` decodes them as a
query does, and checks what must hold whatever they are; a harness can call it with bytes of its own.
"""

from __future__ import annotations

import functools
import json
import sys
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from kafka_eos_source.kafka.schema_registry import SchemaId
from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.registry.records import MOST_CHARACTERS, Decoding

#: Ids in the registry: the reader schema, schemas that do not fit it, and one that is not known.
READER, OTHERS, UNKNOWN = 1, 2, 99


@dataclass(frozen=True)
class Case:
    """A schema, and records of it.

    Attributes:
        name: of the test.
        schema: the reader schema, under the id `READER`.
        valid: payloads of valid records, without frame.
        strange: payloads of values at and beyond the limits of their types, valid or not.
        prefix: what stands between the schema id and the payload.
        is_glue: whether records have the form of AWS Glue, and some are compressed.
    """

    name: str
    schema: Schema
    valid: Sequence[bytes] = field(repr=False)
    strange: Sequence[bytes] = field(repr=False)
    prefix: bytes = b""
    message: str | None = None
    is_glue: bool = False

    @property
    def registry(self) -> dict[str, str]:
        """Options of a registry in memory that has the schemas of all cases."""
        options = {"url": f"{'glue://' if self.is_glue else 'memory:'}{self.name}"}
        key = tuple(sorted(options.items()))
        if key not in catalogs._catalogs:
            catalogs._catalogs[key] = _Catalog(options, self.schema)
        return options

    def decoding(self) -> Decoding:
        """Returns what `from_registry` and `map_in_read` decode with."""
        return RegistrySchema(self.registry, self.schema, READER, self.message).decoding()

    def framed(self, payload: bytes, schema_id: int = READER) -> bytes:
        """Returns the value of a record in Kafka."""
        if not self.is_glue:
            return b"\0" + schema_id.to_bytes(4, "big") + self.prefix + payload
        body = self.prefix + payload
        version = uuid.UUID(int=schema_id).bytes
        return b"\3\5" + version + zlib.compress(body) if len(body) % 2 else b"\3\0" + version + body


class _Catalog(catalogs.Catalog):
    """The schemas of a registry, without its waiting for ids that may be new."""

    def __init__(self, options: Mapping[str, Any], reader: Schema) -> None:
        super().__init__(options)
        others = [_AVRO, _OTHER_AVRO, _PROTOBUF, Schema("JSON", '{"type":"integer"}'), Schema("AVRO", "[[[")]
        self._all = {READER: reader, **dict(enumerate(others, OTHERS))}

    def of_ids(self, ids: Iterable[SchemaId]) -> dict[SchemaId, Schema | str]:
        return {each: self._all.get(int(each), f"schema id {each} is not known") for each in ids}


# -- JSON Schema ---------------------------------------------------------------------------------

#: Texts of JSON values that programs disagree about, besides some harmless ones.
JSON_VALUES = (
    *("null", "true", "0", "-0", "-0.0", "1.0", "1e2", "1e-999", "0.1", '""', '"a"', "[]", "{}", "[null]"),
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400000000000000", "1e", "01", "+1", ".5", "0x1"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616"),
    *("9007199254740993", "9007199254740993.0", "9.3e18", "1e18", "9" * 400, "9" * 5_000, "0." + "1" * 400),
    *(r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"', r'"\u0000"', r'"\x"', '"\x01"', '"\x7f\u2028"', '"'),
    *('"2024-02-29"', '"2023-02-29"', '"0000-01-01"', '"9999-12-31"', '"10000-01-01"', '"-0001-01-01"'),
    *('"20240229"', '"2024-W01-1"', '"2024-02-29 "', '"2024-02-30T25:61:61Z"', '"2024-02-29T10:00:00Z"'),
    *('"2024-02-29t10:00:00.1234567z"', '"0001-01-01T00:00:00+23:59"', '"0001-01-01t00:00:00+23:59"'),
    *('"9999-12-31t23:59:59-23:59"', '"2024-02-29T10:00:00"', '"2016-12-31T23:59:60Z"', '"2024-02-29T10Z"'),
    *("[[]", "{]", '{"a"}', '{"a":1,"a":"b"}', '{"":{"":[]}}', "tru", "// comment", "\ufeff1", "1 2", "{}{}"),
    *('{"a":1}', '{"k":1,"k":2}', '{"k":"2024-01-01T00:00:00Z"}', '{"' + "k" * 5_000 + '":"no number"}'),
    *("[" * levels + "]" * levels for levels in (2, 200, 254, 255, 300, 1_024, 1_025, 20_000)),
    *('{"k":' * levels + "1" + "}" * levels for levels in (2, 200, 254, 255, 300, 1_024, 1_025, 20_000)),
    *(
        "[" * 300,
        '{"k":' * 300,
        '{"k":[' * 150 + "]}" * 150,
        "[" + "[]," * 5_000 + "[]]",
        "[" + "{}," * 5_000 + "{}]",
    ),
)

_JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "integer": {"type": "integer"},
        "number": {"type": "number", "multipleOf": 0.01},
        "text": {"type": ["string", "null"], "maxLength": 4_000},
        "paid": {"type": "boolean"},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "list": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "objects": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}},
            },
        },
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "times": {"type": "object", "additionalProperties": {"type": "string", "format": "date-time"}},
        "any": {},
    },
    "required": ["integer"],
}
_JSON_NAMES = (*_JSON_SCHEMA["properties"], "unknown")


def _json_payload(name: str, value: str) -> bytes:
    return f'{{"integer":1,"{name}":{value}}}'.encode()


#: Documents that each have one strange value.
JSON_DOCUMENTS = tuple(
    each
    for value in JSON_VALUES
    for each in (value.encode(), *(_json_payload(name, value) for name in _JSON_NAMES))
)

_JSON_VALID = (
    b'{"integer":1,"number":1.25,"text":"a","paid":true,"at":"2024-02-29T10:00:00Z","day":"2024-02-29",'
    b'"list":[1,2],"objects":[{"x":1,"at":"2024-02-29T10:00:00.5+01:00"},{}],"map":{"a":1,"b":2},'
    b'"times":{"a":"2024-02-29T10:00:00Z"},"any":{"a":[1,"b",null,1e3]}}',
    b'{"integer":-5}',
    b' {"integer":0,"list":[],"objects":[],"map":{},"times":{},"any":"x","unknown":[{"a":[]}]}\r\n',
)


def _without(*names: str) -> Schema:
    """Returns the schema without properties for which Arrow's parser is not used."""
    left = {name: each for name, each in _JSON_SCHEMA["properties"].items() if name not in names}
    return Schema("JSON", json.dumps({**_JSON_SCHEMA, "properties": left}))


# -- Avro ----------------------------------------------------------------------------------------

_AVRO_FIELDS: dict[str, Any] = {
    "flag": "boolean",
    "int": "int",
    "long": "long",
    "double": "double",
    "text": "string",
    "bytes": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "micros": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-millis"},
    "nanos": {"type": "long", "logicalType": "timestamp-nanos"},
    "time": {"type": "int", "logicalType": "time-millis"},
    "times": {"type": "long", "logicalType": "time-micros"},
    "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
    "uuid": {"type": "string", "logicalType": "uuid"},
    "enum": {"type": "enum", "name": "E", "symbols": ["A", "B"]},
    "fixed": {"type": "fixed", "name": "F", "size": 3},
    "union": ["null", "long", "string"],
    "map": {"type": "map", "values": {"type": "long", "logicalType": "timestamp-millis"}},
    "list": {"type": "array", "items": "null"},
}
_AVRO_RECORD = {
    "type": "record",
    "name": "R",
    "fields": [{"name": name, "type": each} for name, each in _AVRO_FIELDS.items()],
}
_AVRO = Schema("AVRO", json.dumps(_AVRO_RECORD))
_OTHER_AVRO = Schema("AVRO", '{"type":"record","name":"R","fields":[{"name":"text","type":"long"}]}')


def varint(number: int) -> bytes:
    """Returns a number as Avro writes it (zigzag), also one of more than 64 bits."""
    left = number << 1 if number >= 0 else (-number << 1) - 1
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


_NUMBERS = (0, 1, -1, 7, 1 << 31, -(1 << 31) - 1, (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 70)
_AVRO_PLAIN: dict[str, bytes] = {
    "flag": b"\1",
    "double": bytes(8),
    "text": b"\2a",
    "bytes": b"\2\xff",
    "decimal": b"\2\x64",
    "uuid": varint(36) + b"01234567-89ab-cdef-0123-456789abcdef",
    "fixed": b"abc",
    "map": b"\2\2k\2\0",
    "list": b"\4\0",
}


def _avro_payload(name: str = "", value: bytes = b"") -> bytes:
    """Returns a record with one field in place of a valid one."""
    return b"".join(value if each == name else _AVRO_PLAIN.get(each, b"\2") for each in _AVRO_FIELDS_BYTES)


_AVRO_FIELDS_BYTES = tuple(_AVRO_FIELDS)
_AVRO_PLAIN["union"] = b"\2\2"

AVRO_PAYLOADS = (
    *(_avro_payload(name, varint(number)) for name in _AVRO_FIELDS for number in _NUMBERS),
    *(_avro_payload("double", bytes.fromhex(each)) for each in ("000000000000f87f", "000000000000f0ff")),
    *(
        _avro_payload(name, varint(len(text)) + text)
        for name in ("text", "uuid", "bytes")
        for text in (b"\xed\xa0\x80", b"\xff", b"\0")
    ),
    *(
        _avro_payload("decimal", varint(len(each)) + each)
        for each in (b"", b"\x7f\xff", b"\x80" + bytes(20), bytes(40), b"\xff" * 40)
    ),
    *(
        _avro_payload("millis", varint(each))
        for each in (9_223_372_036_854_775, 9_223_372_036_854_776, -9_223_372_036_854_777)
    ),
    *(_avro_payload("nanos", varint(each)) for each in (1, 999, 1_000, -1)),
    *(_avro_payload("times", varint(each)) for each in (86_400_000_000, -1, 86_399_999_999)),
    *(_avro_payload("time", varint(each)) for each in (86_400_000, -1, 86_399_999)),
    _avro_payload("map", b"\4\2k\2\2k\4\0"),
    _avro_payload("map", b"\4\2k" + varint(1 << 62) + b"\2j\4\0"),
    _avro_payload("map", b"\1\x02\2k\2\0"),
    _avro_payload("list", varint(1 << 40) + b"\0"),
    _avro_payload("list", varint(100_000) + b"\0"),
    _avro_payload("list", varint(-(1 << 63)) + b"\2\0"),
)

# -- Protobuf ------------------------------------------------------------------------------------

_PROTOBUF_TEXT = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/wrappers.proto";
enum E { A = 0; B = 5; }
message M {
  int32 i = 1;
  uint64 u = 2;
  sint64 s = 3;
  double d = 4;
  string text = 5;
  bytes raw = 6;
  bool flag = 7;
  E e = 8;
  google.protobuf.Timestamp at = 9;
  google.protobuf.Duration took = 10;
  google.protobuf.Struct any = 11;
  google.protobuf.Value value = 12;
  google.protobuf.ListValue listed = 13;
  google.protobuf.Int64Value boxed = 14;
  map<string, google.protobuf.Timestamp> map = 15;
  repeated int32 list = 16;
  N inner = 17;
  oneof one { int32 x = 18; string y = 19; }
}
message N { N2 next = 1; map<int32, string> map = 2; }
message N2 { string a = 1; repeated E es = 2; }
"""
_PROTOBUF = Schema("PROTOBUF", _PROTOBUF_TEXT)


def _unsigned(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def tagged(number: int, value: int | bytes) -> bytes:
    """Returns a field of a Protobuf message: a varint, or bytes with their length."""
    if isinstance(value, int):
        return _unsigned(number << 3) + _unsigned(value & ((1 << 70) - 1))
    return _unsigned(number << 3 | 2) + _unsigned(len(value)) + value


def _nested_value(levels: int) -> bytes:
    """Returns a google.protobuf.Value of lists inside each other."""
    found = b""
    for _ in range(levels):
        found = tagged(6, tagged(1, found))
    return found


_TIMES = (0, 1, -62_135_596_800, -62_135_596_801, 253_402_300_799, 253_402_300_800, (1 << 63) - 1, -(1 << 63))
PROTOBUF_PAYLOADS = (
    *(tagged(number, each & ((1 << 64) - 1)) for number in range(1, 21) for each in _NUMBERS),
    *(
        tagged(number, text)
        for number in range(1, 21)
        for text in (b"", b"a", b"\xff", b"\xed\xa0\x80", b"\x08\x01", bytes(9))
    ),
    *(tagged(9, tagged(1, each & ((1 << 64) - 1))) for each in _TIMES),
    *(tagged(10, tagged(1, each & ((1 << 64) - 1))) for each in (*_TIMES, 315_576_000_000, 315_576_000_001)),
    *(tagged(9, tagged(2, each & ((1 << 64) - 1))) for each in (999_999_999, 1_000_000_000, -1)),
    *(tagged(15, tagged(1, b"k") + tagged(2, tagged(1, each & ((1 << 64) - 1)))) * 2 for each in _TIMES),
    *(
        tagged(12, b"\x11" + bytes.fromhex(each))
        for each in ("000000000000f87f", "000000000000f0ff", "ffffffffffffef7f")
    ),
    *(tagged(12, tagged(3, text)) for text in (b"\xff", b"\xed\xa0\x80", b"\0", b"\xe2\x80\xa8")),
    *(tagged(12, _nested_value(levels)) for levels in (1, 20, 49, 50, 51, 100, 1_000)),
    *(tagged(11, (tagged(1, tagged(1, b"k") + tagged(2, tagged(1, 0)))) * times) for times in (1, 2, 1_000)),
    tagged(17, tagged(2, tagged(1, 1) + tagged(2, b"a")) * 3),
    b"\x0b" * 5_000,
    b"\x0c",
    tagged(16, bytes(10_000)),
    tagged(18, 1) + tagged(19, b"y") + tagged(18, 2),
)

# -- cases and strategies --------------------------------------------------------------------------


class Steps:
    """Counts the lines of Python that run in a block. They do not depend on how busy the machine is."""

    def __enter__(self) -> Steps:
        self.count = 0
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: Any, event: str, _argument: Any) -> Any:
        self.count += event == "line"
        return self._trace


def check(case: Case, values: Sequence[bytes | None]) -> tuple[list[str], list[str | None]]:
    """Decodes values of records, and returns the value of each row as text, and its error.

    Fails if anything is raised, if a row has both or neither, if the column is not valid, or if it takes more
    than a number of steps that is linear in the size of the records.
    """
    column = pa.array(values, pa.binary())
    decoding = case.decoding()
    decoding.decode(column[:0])
    with Steps() as steps:
        parts = list(decoding.slices(column))
    assert steps.count <= 20_000 + 300 * len(values) + 40 * sum(len(each or b"") for each in values)
    found: list[str] = []
    errors: list[str | None] = []
    for part in parts:
        part.values.validate(full=True)
        assert part.values.type == decoding.arrow_type
        missing = part.values.is_null().to_pylist()
        texts = [part.errors.get(row) for row in range(len(part.values))]
        for text, is_null in zip(texts, missing, strict=True):
            assert text is None or (is_null and text and len(text.encode()) < 8 * MOST_CHARACTERS)
        found += [str(_plain(value)) for value in part.values]
        errors += texts
    assert len(found) == len(values)
    return found, errors


def _plain(value: Any) -> Any:
    """Returns an Arrow scalar as a Python value; times as numbers, because Python has no year 0."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, pa.ListScalar):  # or a map
        return [_plain(inner) for inner in value.values]
    return value.value if pa.types.is_temporal(value.type) else value.as_py()


@functools.cache
def cases() -> tuple[Case, ...]:
    """Returns a case for each format, for each of the two parsers of JSON, and for compressed records."""
    avro = _avro_payload()
    return (
        Case("json", Schema("JSON", json.dumps(_JSON_SCHEMA)), _JSON_VALID, JSON_DOCUMENTS),
        Case("json-arrow", _without("any", "map", "times"), _JSON_VALID, JSON_DOCUMENTS),
        Case("avro", _AVRO, (avro,), AVRO_PAYLOADS),
        Case("avro-glue", _AVRO, (avro,), AVRO_PAYLOADS, is_glue=True),
        Case("protobuf", _PROTOBUF, (tagged(1, 5) + tagged(5, b"a"), b""), PROTOBUF_PAYLOADS, b"\0", "M"),
    )


@st.composite
def mutations(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes with up to four changes: a bit, some bytes in place of others, a part that is repeated."""
    found = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found)))
        until = draw(st.integers(at, min(len(found), at + 8)))
        match draw(st.sampled_from(["replace", "bit", "repeat", "cut"])):
            case "replace":
                found[at:until] = draw(st.binary(max_size=6))
            case "bit" if at < len(found):
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "repeat":
                found[at:at] = found[at:until] * draw(st.integers(1, 40))
            case "cut":
                del found[at:]
    return bytes(found)


def payloads(case: Case) -> st.SearchStrategy[bytes | None]:
    """Returns a strategy for values of records of a case, with their frames, or without."""
    known = st.sampled_from([*case.valid, *case.strange])
    damaged = known.filter(lambda each: len(each) < 2_000).flatmap(mutations)
    of_reader = st.one_of(known, damaged, st.binary(max_size=80)).map(case.framed)
    of_others = st.builds(
        case.framed, known, st.sampled_from([*range(OTHERS, OTHERS + 5), UNKNOWN, (1 << 32) - 1])
    )
    return st.one_of(of_reader, of_reader, of_others, known, st.binary(max_size=12), st.none())
