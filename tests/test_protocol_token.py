"""Tokens survive a round trip through offset metadata; other metadata is not mistaken for a token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, digest, newest

TOKEN = Token("app", "query", "run", 7, 7, "aa", "bb", 100)


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_token_survives_encoding_and_decoding(
    application_id: str, run_id: str, batch_id: int, rows: int
) -> None:
    token = Token(application_id, "query", run_id, batch_id, batch_id, "aa", "bb", rows)
    assert Token.decode(token.encode()) == token


def test_the_null_byte_that_librdkafka_appends_is_ignored() -> None:
    assert Token.decode(TOKEN.encode() + "\0") == TOKEN


def test_keys_after_the_first_may_have_any_order() -> None:
    fields = json.loads(TOKEN.encode())
    shuffled = {"kafka-eos": 1, **dict(reversed(fields.items()))}
    assert Token.decode(json.dumps(shuffled, separators=(",", ":"))) == TOKEN


@pytest.mark.parametrize("metadata", ["", "meta", '{"other":1}', "AQAAAX"])
def test_metadata_of_other_programs_is_not_a_token(metadata: str) -> None:
    assert Token.decode(metadata) is None


@pytest.mark.parametrize("metadata", ['{"kafka-eos":1', '{"kafka-eos":1}', '{"kafka-eos":1,"batch":"x"}'])
def test_a_damaged_token_is_an_error_and_never_read_as_missing(metadata: str) -> None:
    with pytest.raises(OperatorError, match="damaged"):
        Token.decode(metadata)


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(OperatorError, match="format 3"):
        Token.decode('{"kafka-eos":3,"batch":1}')


def test_the_longest_legal_token_is_under_one_kilobyte() -> None:
    token = Token("a" * 249, "q" * 36, "r" * 36, 2**62, 2**62, "s" * 16, "e" * 16, 2**62, 99)
    assert len(token.encode().encode()) < 1024


def test_the_newest_token_wins() -> None:
    def at(partition: int, metadata: str) -> GroupOffset:
        return GroupOffset(TopicPartition("t", partition), 1, metadata)

    older = Token("app", "query", "run", 6, 6, "aa", "bb", 100)
    assert newest([at(0, older.encode()), at(1, TOKEN.encode()), at(2, "")]) == TOKEN
    assert newest([at(0, "")]) is None


def test_different_lines_have_different_digests() -> None:
    assert digest(["a", "b"]) == digest(["a", "b"])
    assert digest(["a", "b"]) != digest(["b", "a"])
    assert digest(["a"]) != digest(["a", ""])
