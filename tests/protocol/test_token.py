"""Tokens survive a round trip through offset metadata; other metadata is not mistaken for a token."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import NewerVersionError, OperatorError, StateError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol import token
from kafka_eos_source.protocol.token import (
    FORMAT,
    Due,
    PreparedSinks,
    ShardProgress,
    Token,
    digest,
    newest,
    number_of_shards,
    package_version,
)
from kafka_eos_source.sinks.contract import Ok
from kafka_eos_source.state.model import BatchContext

NOW_MS = 1_800_000_000_000
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


def test_a_newer_format_is_refused_with_the_version_that_wrote_it() -> None:
    with pytest.raises(NewerVersionError, match=r"format 2, written by kafka-eos 9\.1;.* reads format 1\."):
        Token.decode('{"kafka-eos":2,"by":"9.1","batch":1}')
    with pytest.raises(NewerVersionError, match="written by a newer version"):
        Token.decode('{"kafka-eos":2,"by":[7]}')


def test_a_copy_without_package_metadata_has_no_version_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "package_version", str)
    with pytest.raises(NewerVersionError, match="this is a copy of kafka-eos without a version, which reads"):
        Token.decode('{"kafka-eos":2,"by":"9.1","batch":1}')


@pytest.mark.parametrize("version", ["0", "-1", "null", "true", '"2"', "2.5", "[]"])
def test_a_format_that_no_version_wrote_is_damage(version: str) -> None:
    fields = {**json.loads(TOKEN.encode()), "kafka-eos": json.loads(version)}
    with pytest.raises(OperatorError, match="damaged"):
        Token.decode(json.dumps(fields, separators=(",", ":")))


def test_a_token_names_the_version_that_wrote_it_and_its_own_format_is_readable() -> None:
    assert json.loads(TOKEN.encode()) == {**TOKEN.to_json(), "by": package_version()}
    assert "by" not in TOKEN.to_json(), "a token that was read is not this version's"
    assert TOKEN.to_json()["kafka-eos"] == FORMAT == 1


@given(st.integers(-(2**62), 2**62), st.integers(0, 2**62))
def test_a_token_says_when_the_next_batch_is_due(at_ms: int, clock_ms: int) -> None:
    token = replace(TOKEN, due=Due(at_ms, clock_ms))
    assert Token.decode(token.encode()) == token
    assert json.loads(token.encode())["due"] == [at_ms, clock_ms]
    assert "due" not in json.loads(TOKEN.encode())


@pytest.mark.parametrize("due", ["7", "[7]", '["a",1]', "null", "{}", "[1,2,3]", "[1.5,2]"])
def test_a_damaged_due_time_is_an_error(due: str) -> None:
    fields = {**json.loads(TOKEN.encode()), "due": json.loads(due)}
    with pytest.raises(OperatorError, match="damaged"):
        Token.decode(json.dumps(fields, separators=(",", ":")))


def test_a_key_that_the_format_does_not_have_is_ignored() -> None:
    text = json.dumps({**json.loads(TOKEN.encode()), "later": {"key": 1}}, separators=(",", ":"))
    assert Token.decode(text) == TOKEN


def test_the_longest_legal_token_is_under_one_and_a_quarter_kilobytes() -> None:
    token = Token(
        "a" * 249, "q" * 36, "r" * 36, 2**62, 2**62, "s" * 16, "e" * 16, 2**62, "t" * 249 + ":" + "d" * 16, 99
    )
    assert len(token.encode().encode()) < 1280


def test_the_newest_token_wins() -> None:
    def at(partition: int, metadata: str) -> GroupOffset:
        return GroupOffset(TopicPartition("t", partition), 1, metadata)

    older = Token("app", "query", "run", 6, 6, "aa", "bb", 100)
    assert newest([at(0, older.encode()), at(1, TOKEN.encode()), at(2, "")]) == TOKEN
    assert newest([at(0, "")]) is None
    of_shard = replace(TOKEN, shard=ShardProgress("a", 1, None), shards=1, partitions=-1)
    both = [at(0, of_shard.encode()), at(1, TOKEN.encode())]
    assert newest(both) == newest(reversed(both)) == TOKEN, "the token on a changelog partition says less"


def test_the_newest_token_of_a_changelog_names_the_number_of_shards() -> None:
    older = replace(TOKEN, sequence=6, shard=ShardProgress("a", 1, None), shards=5)
    newer = replace(TOKEN, shard=ShardProgress("b", 1, None), shards=3)
    assert Token.decode(newer.encode()) == newer
    assert number_of_shards([older, None, newer]) == 3
    assert number_of_shards([]) is None


def test_different_lines_have_different_digests() -> None:
    assert digest(["a", "b"]) == digest(["a", "b"])
    assert digest(["a", "b"]) != digest(["b", "a"])
    assert digest(["a"]) != digest(["a", ""])


def test_the_largest_token_fits_into_what_brokers_accept() -> None:
    """A token that they refuse stops its query for good: every attempt of the batch fails at its end."""
    context = BatchContext(1, 0, 64, first=True, time_ms=NOW_MS)
    for number in range(16):
        context.count(f"{number:02}".rjust(64, "m"), 10**15)
    names = tuple(f"{number:02}".rjust(32, "s") for number in range(16))
    token = Token(
        application_id="a" * 200,
        query_id=str(uuid.uuid4()),
        run_id=str(uuid.uuid4()),
        sequence=10**9,
        batch_id=10**9,
        start_digest=digest("a"),
        end_digest=digest("b"),
        rows=10**12,
        target=f"{'t' * 249}:{digest('c')}",
        cluster_id="c" * 22,
        transaction_number=10**4,
        partitions=10**4,
        shard=ShardProgress("f" * 16, NOW_MS, NOW_MS, context.metrics, 10**12),
        shards=10**4,
        in_read=True,
        sinks=PreparedSinks("f" * 20, names, {name: Ok("d" * 64).digest for name in names}),
        due=Due(NOW_MS, NOW_MS),
        unproven_since=10**9,
    )
    assert len(token.encode()) <= 4096
    assert Token.decode(token.encode()) == token


def test_a_token_knows_which_of_its_sinks_has_which_digest() -> None:
    sinks = PreparedSinks("f" * 20, ("a", "b", "c"), {"c": "33", "a": "11"})
    found = Token.decode(replace(TOKEN, sinks=sinks).encode())
    assert found is not None
    assert found.sinks == sinks


@pytest.mark.parametrize("digests", [["11"], ["1", "2", "3", "4"], {"a": "11"}, "11"])
def test_a_token_whose_digests_do_not_fit_its_sinks_is_damaged(digests: object) -> None:
    sinks = PreparedSinks("f" * 20, ("a", "b", "c"), {"a": "11"})
    text = json.dumps({**replace(TOKEN, sinks=sinks).to_json(), "digests": digests}, separators=(",", ":"))
    with pytest.raises(OperatorError, match="damaged"):
        Token.decode(text)


@pytest.mark.parametrize("metric", ["é" * 11, "\0" * 11, '"' * 33])
def test_a_metric_counts_as_long_as_it_is_in_the_token(metric: str) -> None:
    with pytest.raises(StateError, match="up to 64 characters"):
        BatchContext(1, 0, 64, first=True, time_ms=NOW_MS).count(metric, 1)


@pytest.mark.parametrize("text", ["\0" * 32, '"' * 32, "a b", "d" * 65, "ü"])
def test_a_digest_is_as_long_in_the_token_as_it_is(text: str) -> None:
    with pytest.raises(ValueError, match="because the token in Kafka holds those of all sinks"):
        Ok(text)
