"""Documents become the rows that a model says, whatever they contain; what does not fit has an error."""

from __future__ import annotations

import ctypes
import json
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types

from kafka_eos_source import native
from kafka_eos_source.documents import decode
from kafka_eos_source.documents.converted import Converted, slices
from kafka_eos_source.documents.decode import JsonDecoding
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from tests.documents import json_model as model
from tests.documents.json_examples import DOCUMENTS, MIXED, SCALARS, VALUES, struct
from tests.support import sanitized

ZONE = "America/New_York"


def rows_of(found: Converted) -> list[Any]:
    found.values.validate(full=True)
    return model.plain(found.values)


def check(schema: types.StructType, documents: list[bytes | None], zone: str = ZONE) -> None:
    """Fails if documents do not become what the model says, in both modes."""
    for partial in (False, True):
        found = JsonDecoding(schema, zone, partial).decode(pa.array(documents, pa.binary()))
        expected = [model.decoded(each, schema, zone, partial) for each in documents]
        rows = rows_of(found)
        for number, (document, (row, is_bad)) in enumerate(zip(documents, expected, strict=True)):
            assert (number in found.errors) == is_bad, (document, found.errors.get(number), row)
            assert model.comparable(rows[number]) == model.comparable(row), document
        for text in found.errors.values():
            assert text.isprintable()
            assert len(text) < 600


# -- what people write ---------------------------------------------------------------------------


@pytest.mark.parametrize("found", SCALARS, ids=lambda each: each.simpleString())
def test_values_near_the_limits_of_each_type(found: types.DataType) -> None:
    schema = struct(c=found, other=types.IntegerType())
    check(schema, [f'{{"c":{text},"other":7}}'.encode() for text in VALUES])
    check(struct(c=types.ArrayType(found)), [f'{{"c":[{text}, null]}}'.encode() for text in VALUES])
    check(
        struct(c=types.MapType(types.StringType(), found)),
        [f'{{"c":{{"k":{text}}}}}'.encode() for text in VALUES],
    )


def test_documents_of_all_shapes() -> None:
    check(MIXED, [*DOCUMENTS, None, *DOCUMENTS])


def test_each_truncation_of_a_document_is_an_error() -> None:
    whole = (
        b'{"a": -12,"s":"\\u00e9x","l":[1,2],"m":{"k":3},"n":{"x":4,"y":"z"},'
        b'"deep":[{"v":[1.5e3],"t":"2020-01-01"}]}'
    )
    cuts = [whole[:size] for size in range(len(whole))]
    found = JsonDecoding(MIXED, ZONE).decode(pa.array([*cuts, whole], pa.binary()))
    assert sorted(found.errors) == list(range(len(cuts)))
    check(MIXED, cuts)


def test_names_at_the_places_of_other_names() -> None:
    """A decoder that takes a name for the one which was there in the document before would be wrong here."""
    inner = struct(abc=types.LongType(), abcd=types.LongType())
    long = "x" * 30
    schema = struct(a=inner, abc=types.LongType(), abcd=types.LongType(), **{long: types.LongType()})
    names = ["abc", "abcd", "ab", "", "a", long, long[1:], long + "x", "abc\\u0064", "\\u0061bc"]
    documents = [
        f'{{"{one}"{space}:{value},"{other}":2,"a":{{"{other}":3,"{one}":4}}}}'.encode()
        for one in names
        for other in names
        for space in ("", " ")
        for value in ("1" if one != "a" else '{"abcd":5}',)
    ]
    check(schema, [*documents, *reversed(documents), *(each[:-1] for each in documents), *documents])


# -- random schemas and documents ----------------------------------------------------------------

NAMES = (
    "a",
    "b",
    "name",
    "a much longer name of a field",
    'q"uote',
    "gr\u00fc\u00df",
    "\U0001f600",
    "sixteen bytes !!",
    "",
)


def structs(inside: st.SearchStrategy[types.DataType]) -> st.SearchStrategy[types.StructType]:
    return st.dictionaries(st.sampled_from(NAMES), inside, min_size=1, max_size=5).map(
        lambda fields: types.StructType([types.StructField(name, each) for name, each in fields.items()])
    )


TYPES: st.SearchStrategy[types.DataType] = st.recursive(
    st.sampled_from(SCALARS),
    lambda inside: st.one_of(
        inside.map(types.ArrayType),
        inside.map(lambda each: types.MapType(types.StringType(), each)),
        structs(inside),
    ),
    max_leaves=6,
)
_NUMBERS = st.one_of(
    st.integers(-(1 << 66), 1 << 66).map(str),
    st.integers(-300, 300).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.builds("{}.{}e{}".format, st.integers(-999, 10**20), st.integers(0, 10**20), st.integers(-400, 400)),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(lambda each: format(each, "f")),
)
_TEXTS = st.one_of(st.text(max_size=20), st.text('ab\\"\n\u00e9', max_size=40)).map(json.dumps)
_SPACES = st.sampled_from(("", "", "", " ", "\n  ", "\t\r\n        "))


@st.composite
def written(draw: st.DrawFn, found: types.DataType, levels: int = 3) -> str:
    """Returns the text of a value that fits a type in most cases."""
    if draw(st.integers(0, 30)) == 0:
        return draw(st.sampled_from(VALUES))
    if isinstance(found, types.StructType):
        names = draw(st.lists(st.sampled_from((*found.names, *NAMES)), max_size=8))
        kinds = {field.name: field.dataType for field in found}
        pairs = [
            f"{_name(draw, name)}{draw(_SPACES)}:{draw(_SPACES)}"
            f"{draw(written(kinds.get(name, types.IntegerType()), levels))}{draw(_SPACES)}"
            for name in names
        ]
        return "{" + draw(_SPACES) + f",{draw(_SPACES)}".join(pairs) + "}"
    if isinstance(found, types.ArrayType):
        return "[" + ",".join(draw(st.lists(written(found.elementType, levels - 1), max_size=4))) + "]"
    if isinstance(found, types.MapType):
        names = draw(st.lists(st.sampled_from((*NAMES, *"cdefghijklmn")), max_size=14))
        return (
            "{" + ",".join(f"{_name(draw, name)}:{draw(written(found.valueType, 1))}" for name in names) + "}"
        )
    if isinstance(found, (types.StringType, types.BinaryType)):
        return draw(_TEXTS)
    if isinstance(found, types.BooleanType):
        return draw(st.sampled_from(("true", "false", "null")))
    if isinstance(found, (types.DateType, types.TimestampType, types.TimestampNTZType)):
        moment = draw(st.datetimes())
        return json.dumps(
            draw(st.sampled_from((str(moment), moment.isoformat(), f"{moment}Z", str(moment.date()))))
        )
    return draw(_NUMBERS)


def _name(draw: st.DrawFn, name: str) -> str:
    return json.dumps(name, ensure_ascii=draw(st.booleans()))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_documents_of_random_schemas(data: st.DataObject) -> None:
    schema = data.draw(structs(TYPES))
    texts = data.draw(st.lists(written(schema), min_size=1, max_size=12))
    check(schema, [each.encode("utf-8", "surrogatepass") for each in texts])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_documents(data: st.DataObject) -> None:
    """A byte is replaced, removed or inserted somewhere, or a part of another document."""
    documents = []
    for _ in range(data.draw(st.integers(1, 10))):
        found = bytearray(data.draw(st.sampled_from([each for each in DOCUMENTS if 2 < len(each) < 400])))
        at = data.draw(st.integers(0, len(found) - 1))
        past = data.draw(st.integers(at, min(at + 3, len(found))))
        inserted = st.sampled_from(
            (b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xc3", b"1", b"e", b" ")
        )
        found[at:past] = data.draw(inserted) + data.draw(st.binary(max_size=2))
        documents.append(bytes(found))
    check(MIXED, documents)


@settings(max_examples=60, deadline=None)
@given(st.lists(_NUMBERS, min_size=10, max_size=40))
def test_numbers_are_rounded_to_the_nearest(numbers: list[str]) -> None:
    schema = struct(d=types.DoubleType(), f=types.FloatType())
    check(schema, [f'{{"d":{each}}}'.encode() for each in numbers])
    check(schema, [f'{{"f":{each}}}'.encode() for each in numbers])


def test_floats_of_all_exponents_and_halfway_numbers() -> None:
    random = np.random.default_rng(3)
    doubles = random.integers(0, 0x7FEFFFFFFFFFFFFF, 5000).view(np.float64)
    floats = random.integers(0, 0x7F7FFFFF, 5000).astype(np.int32).view(np.float32)
    halves = [float(each) + float(np.spacing(each)) / 2 for each in floats]  # exact in double precision
    schema = struct(d=types.DoubleType(), f=types.FloatType())
    documents = [f'{{"d":{each!r}}}'.encode() for each in doubles.tolist()]
    values = JsonDecoding(schema).decode(pa.array(documents)).values
    assert values.field("d").to_pylist() == doubles.tolist()
    texts = [*map(repr, floats.astype(np.float64).tolist()), *map(repr, halves)]
    check(schema, [f'{{"f":{each}}}'.encode() for each in texts[::7]])


@pytest.mark.parametrize(
    "zone", ["UTC", "Europe/Dublin", "Asia/Kolkata", "Australia/Lord_Howe", "Africa/Casablanca"]
)
def test_local_times_around_changes_of_a_time_zone(zone: str) -> None:
    schema = struct(t=types.TimestampType())
    turns, _ = decode._zone_table(zone)
    moments = [
        np.datetime64(turn + step, "s")
        for turn in turns[:60] + turns[-60:]
        for step in (-7200, -1, 0, 1, 1800, 7200)
    ]
    check(
        schema,
        [f'{{"t":"{each}"}}'.encode() for each in [*moments, np.datetime64("2026-07-01T00:00:00")]],
        zone,
    )


# -- the interface -------------------------------------------------------------------------------


def test_errors_name_field_value_and_expectation() -> None:
    schema = struct(
        a=struct(b=types.ArrayType(types.ByteType())), m=types.MapType(types.StringType(), types.DateType())
    )
    documents = [
        b'{"a":{"b":[1,300]}}',
        b'{"m":{"x":"\xe2\x80\xae yesterday ' + b"x" * 100 + b'"}}',
        b'{"a":7}',
        b'{"a":{"b":[1,}}',
        b"[1,2]",
        b'{"a":null} {"a":null}',
    ]
    errors = JsonDecoding(schema).decode(pa.array(documents)).errors
    assert list(errors.values()) == [
        "field a.b[]: 300 does not fit TINYINT; expected a whole number from -128 to 127, written without "
        "fraction, exponent and quotes",
        'field m{}: "\\u202e yesterday xxxxxxxxxxxxxxxxxxxxxxxxxxx… does not fit DATE; expected a string '
        'such as "2026-01-31"',
        "field a: 7 does not fit STRUCT; expected an object",
        "the value is no JSON object: expected a value at byte 13, found }}",
        "the value is no JSON object: it is [1,2]",
        'the value is no JSON object: more follows behind the object at byte 11, {"a":null}',
    ]


def test_a_partial_row_has_its_first_error_unless_the_document_is_broken() -> None:
    schema = struct(a=types.LongType(), b=types.LongType())
    documents = [b'{"a":1,"b":"x","a":true}', b'{"b":"x","a":true,']
    errors = JsonDecoding(schema, partial=True).decode(pa.array(documents)).errors
    assert [text.split(";")[0] for text in errors.values()] == [
        'field b: "x" does not fit BIGINT',
        "the value is no JSON object: it ends at byte 18, inside a value",
    ]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (struct(), "declares no fields"),
        (struct(a=struct(v=types.VariantType())), "field a.v: .* type VARIANT"),
        (struct(a=types.ArrayType(types.DayTimeIntervalType())), r"field a\[\]: .* INTERVAL DAY TO SECOND"),
        (struct(a=types.MapType(types.IntegerType(), types.IntegerType())), "field a: .* MAP<INT,INT>"),
        (struct(a=types.NullType()), "field a: .* VOID"),
        (struct(a=types.IntegerType(), A=types.IntegerType()), "two fields 'A', the other is written 'a'"),
        (types.StructType([types.StructField("a", types.LongType())] * 2), "two fields 'a'"),
        (struct(**{f"f{n}": types.LongType() for n in range(20_001)}), "more than 20,000 fields"),
    ],
)
def test_schemas_that_are_refused(schema: types.StructType, text: str) -> None:
    with pytest.raises(InvalidSchemaError, match=text):
        JsonDecoding(schema)


def test_types_that_are_nested_too_deep_are_refused() -> None:
    found: types.DataType = types.LongType()
    for _ in range(70):
        found = types.ArrayType(found)
    with pytest.raises(InvalidSchemaError, match="64 types inside each other"):
        JsonDecoding(struct(a=found))


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "../../etc/passwd", "+19:00", ""])
@pytest.mark.parametrize("found", [types.TimestampType(), types.LongType()])
def test_time_zones_that_are_refused(zone: str, found: types.DataType) -> None:
    with pytest.raises(InvalidOptionError, match="time zone"):
        JsonDecoding(struct(t=found), zone)


@pytest.mark.parametrize(("zone", "hours"), [("+01:00", 1), ("UTC-5", -5), ("GMT+0530", 5.5), ("Z", 0)])
def test_time_zones_with_a_fixed_offset(zone: str, hours: float) -> None:
    found = JsonDecoding(struct(t=types.TimestampType()), zone).decode(pa.array([b'{"t":"1970-01-02"}']))
    assert rows_of(found) == [{"t": (86_400 - hours * 3600) * 1_000_000}]


def test_rows_are_nullable_and_texts_are_strings() -> None:
    schema = types.StructType(
        [
            types.StructField("c", types.CharType(3), False),
            types.StructField("l", types.ArrayType(types.VarcharType(2), False), False),
        ]
    )
    decoding = pickle.loads(pickle.dumps(JsonDecoding(schema, ZONE)))
    assert decoding == JsonDecoding(schema, ZONE)
    assert decoding.rows == struct(c=types.StringType(), l=types.ArrayType(types.StringType()))
    found = decoding.decode(pa.array([b'{"c":"longer","l":["abc"]}', b"{}"]))
    assert rows_of(found) == [{"c": "longer", "l": ["abc"]}, {"c": None, "l": None}]


@pytest.mark.parametrize(
    "made", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view()]
)
def test_columns_of_all_types_of_bytes_and_slices_of_them(made: pa.DataType) -> None:
    texts = ['{"a":1}', None, '{"a":"x"}', '{"a":4}', "{}", '{"a":6}']
    column = (
        pa.array([None if each is None else each.encode() for each in texts], pa.binary())
        .cast(pa.string())
        .cast(made)
    )
    decoding = JsonDecoding(struct(a=types.IntegerType()))
    for first in range(len(texts)):
        found = decoding.decode(column.slice(first))
        assert rows_of(found) == [{"a": 1}, None, None, {"a": 4}, {"a": None}, {"a": 6}][first:]
        assert list(found.errors) == [2 - first][: first <= 2]
    assert len(decoding.decode(pa.chunked_array([column, column])).values) == 12
    assert len(decoding.decode(column[:0]).values) == 0


# -- limits --------------------------------------------------------------------------------------

WIDE = struct(
    w=types.ArrayType(struct(**{f"f{n}": types.LongType() for n in range(50)})), s=types.StringType()
)


@pytest.mark.parametrize("most", [60_000, 300_000, 1 << 24])
def test_a_call_stops_before_the_columns_become_too_large(most: int) -> None:
    documents = [
        b'{"w":[%s],"s":"x"}' % b",".join([b"{}"] * n) for n in (1, 30, 0, 50, 1, 40, 900_000 // 60, 2)
    ]
    documents[3] = b'{"w":1}'
    decoding = JsonDecoding(WIDE)
    seen: list[Any] = []
    while len(seen) < len(documents):
        found = decoding.decode(pa.array(documents[len(seen) :], pa.binary()), most)
        assert found.values.nbytes <= most
        assert all(row < len(found.values) for row in found.errors)
        rows = [None if row is None else len(row["w"]) for row in rows_of(found)]
        seen += rows or [-1]  # the row alone takes too much
    expected = [1, 30, 0, None, 1, 40, 15_000, 2]
    assert seen == ([each if each != 15_000 else -1 for each in expected] if most < 1 << 24 else expected)


def test_a_schema_so_wide_that_only_a_few_rows_fit() -> None:
    schema = struct(**{f"f{n}": types.DoubleType() for n in range(5000)})
    found = JsonDecoding(schema).decode(pa.array([b"{}", b'{"f4999":1}'] * 500), 2_000_000)
    rows = len(found.values)
    assert 0 < rows < 30
    assert found.values.field("f4999").to_pylist() == [None, 1.0, *[None, 1.0] * 15][:rows]


def use_library(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Uses a library that is compiled with flags, until the test ends."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "json-of-a-test.so"
    source = Path(native.__file__).with_name("json.c")
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", *flags, "-o", library, source], check=True)
    kernel = decode._Kernel(ctypes.CDLL(str(library)))
    monkeypatch.setattr(decode, "_kernel", lambda: kernel)


def test_code_for_other_processors_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(tmp_path, monkeypatch, "-U__SSE2__", "-U__SIZEOF_INT128__")
    check(MIXED, [*DOCUMENTS])
    for found in SCALARS:
        check(struct(c=found), [f'{{"c":{text}}}'.encode() for text in VALUES])


@pytest.fixture
def small_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library for which the largest offset of Arrow is 100."""
    use_library(tmp_path, monkeypatch, "-DKAFKA_EOS_LARGEST_OFFSET=100")


@pytest.mark.parametrize(
    ("schema", "make"),
    [
        (struct(s=types.StringType()), lambda n: b'{"s":"%s"}' % (b"x" * n)),
        (struct(s=types.BinaryType()), lambda n: b'{"s":"%s"}' % (b"YWJj" * (n // 3))),
        (struct(s=types.ArrayType(types.LongType())), lambda n: b'{"s":[%s]}' % b",".join([b"1"] * n)),
        (
            struct(s=types.MapType(types.StringType(), types.LongType())),
            lambda n: b'{"s":{%s}}' % b",".join(b'"%d":1' % each for each in range(n // 3)),
        ),
    ],
)
def test_offsets_do_not_overflow(
    small_offsets: None, schema: types.StructType, make: Callable[[int], bytes]
) -> None:
    documents = [make(n) for n in (30, 60, 3, 90, 45, 0, 300, 3)]
    found = list(slices(JsonDecoding(schema).decode, pa.array(documents, pa.binary()), "decoded"))
    assert len(found) > 2
    bad = []
    for each in found:
        each.values.validate(full=True)
        bad += [row in each.errors for row in range(len(each.values))]
    assert bad == [False] * 6 + [True, False]


def test_hostile_documents_take_linear_time() -> None:
    """Quadratic time would exceed the limit of each test."""
    count = 1_000_000
    schema = struct(
        m=types.MapType(types.StringType(), types.LongType()), a=types.LongType(), d=types.DoubleType()
    )
    names = b",".join(b'"%d":1' % each for each in range(count // 10))
    documents = [
        b'{"m":{' + names + b"}}",
        b'{"a":1,' + b",".join([b'"a":"x"'] * (count // 10)) + b"}",
        b'{"z":' + b"[" * count,
        b'{"z":' + b'{"a":' * count,
        b'{"z":"' + b"\\u0041" * (count // 6) + b'"}',
        b'{"d":' + b"1" * count + b"}",
        b'{"z":' + b" " * count + b"1}",
        b'{"d":0.' + b"0" * count + b"1}",
    ]
    for partial in (False, True):
        found = JsonDecoding(schema, "UTC", partial).decode(pa.array(documents, pa.binary()))
        assert sorted(found.errors) == [1, 2, 3, 5, 7]


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    tests = "values or shapes or truncation or random or damaged or nearest or columns or stops or wide"
    sanitized.check("json", tmp_path, ["documents/test_decode.py"], tests)
