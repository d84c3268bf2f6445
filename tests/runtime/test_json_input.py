"""JSON of other programs: any bytes become a document that can be written again, or a JsonError."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.runtime.json_input import MOST_LEVELS, JsonError, parse_json, parse_json_fast

_PARSERS = pytest.mark.parametrize("parse", [parse_json, parse_json_fast])


def _nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def _accepted(parse, document: bytes) -> bool:
    try:
        found = parse(document)
    except JsonError:
        return False
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return True


@_PARSERS
@pytest.mark.parametrize("levels", [1, MOST_LEVELS - 1, MOST_LEVELS])
def test_what_is_read_can_be_written_again(parse, levels):
    assert msgspec.json.encode(parse(_nested(levels))) == _nested(levels)


@_PARSERS
@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 300, 1_024, 1_025, 100_000])
def test_more_levels_are_refused(parse, levels):
    with pytest.raises(JsonError, match=r"nested|depth"):
        parse(_nested(levels))
    with pytest.raises(JsonError, match=r"nested|depth"):
        parse(b'{"a":' * levels + b"1" + b"}" * levels)


@_PARSERS
@pytest.mark.parametrize("extra", [b"[]", b'{"b":1}', b'"' + b"[" * 1_000 + b'"'])
def test_only_levels_count_and_not_brackets(parse, extra):
    document = b"[" + b",".join([extra] * 1_000) + b"]"
    assert len(parse(document)) == 1_000


@_PARSERS
@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"nothing",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5_000,
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'{"\\uDC00":1}',
        b'{"a":1',
        b"[" * 100_000,
        "{}".encode("utf-16"),
    ],
)
def test_a_text_that_is_not_json_is_refused(parse, document):
    with pytest.raises(JsonError):
        parse(document)


def test_text_with_half_a_surrogate_pair_is_refused_and_a_whole_pair_is_read():
    with pytest.raises(JsonError):
        parse_json('"\ud800"')
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert parse_json('"\\\\ud800"') == "\\ud800"  # an escaped backslash, and four characters


@_PARSERS
@given(
    st.one_of(st.binary(max_size=60), st.text(alphabet='[]{}",:\\ud8eE+-.01Na ', max_size=60).map(str.encode))
)
def test_any_bytes_are_read_or_refused(parse, document):
    _accepted(parse, document)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_every_document_of_pythons_encoder_is_read_as_it_is(document):
    assert parse_json(json.dumps(document)) == document
    assert parse_json(json.dumps(document, ensure_ascii=False).encode()) == document
