"""Records of the token topic survive a round trip through Kafka; any other record is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import (
    RECORD_FORMAT,
    Mark,
    PreparedSinks,
    ShardProgress,
    Token,
    TokenRecord,
)
from tests.protocol.token_records import ANCHOR, RECORD, TOKEN

whole = st.integers(0, 2**63 - 1)
topics = st.text("abc.-_", min_size=1, max_size=8)
partitions = st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1) | st.integers(0, 12))
progress = st.builds(
    ShardProgress,
    st.text(max_size=8),
    st.integers(-(2**62), 2**62),
    st.none() | st.integers(-(2**62), 2**62),
    st.dictionaries(st.text(max_size=5), whole, max_size=3),
)
tokens = st.builds(
    Token,
    st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    st.text(max_size=10),
    st.text(max_size=10),
    whole,
    whole,
    st.text(max_size=16),
    st.text(max_size=16),
    whole,
    sinks=st.none()
    | st.dictionaries(st.text(max_size=5), st.text(max_size=32), max_size=3).map(
        lambda found: PreparedSinks("id", tuple(found), {name: each for name, each in found.items() if each})
    ),
)


@st.composite
def records(draw: st.DrawFn) -> TokenRecord:
    ends = draw(st.dictionaries(partitions, whole, max_size=30))
    sharded = draw(st.sets(st.sampled_from(sorted(ends)))) if ends else set()
    stores = sorted({tp.topic for tp in sharded})
    return TokenRecord(
        draw(tokens),
        ends,
        draw(partitions),
        draw(st.text(max_size=10)),
        draw(st.text(max_size=10)),
        draw(st.integers(0, 100)),
        draw(st.integers(-(2**62), 2**62)),
        {tp: draw(progress) for tp in sorted(sharded)},
        draw(st.frozensets(st.sampled_from(stores))) if stores else frozenset(),
    )


@given(records())
def test_a_record_survives_encoding_and_decoding(record: TokenRecord) -> None:
    assert TokenRecord.decode(record.key, record.encode()) == record


@given(records(), st.data())
def test_a_truncated_record_is_damaged(record: TokenRecord, data: st.DataObject) -> None:
    value = record.encode()
    with pytest.raises(OperatorError, match="damaged"):
        TokenRecord.decode(record.key, value[: data.draw(st.integers(0, len(value) - 1))])


@given(records())
def test_a_record_restores_the_groups_offsets_with_tokens_and_marks(record: TokenRecord) -> None:
    offsets = record.group_offsets()
    assert {tp: each.offset for tp, each in offsets.items()} == record.ends
    again = TokenRecord.of(
        record.token,
        offsets.values(),
        record.anchor,
        record.group_id,
        record.topic_id,
        record.partition,
        record.time_ms,
    )
    assert again == record
    for tp, each in offsets.items():
        assert Mark.decode(each.metadata) == Mark.of(record.token)
        full = Token.decode(each.metadata)
        if tp in record.shards:
            siblings = sum(each.topic == tp.topic for each in record.shards)
            of_shard = replace(record.token, shard=record.shards[tp], shards=siblings)
            assert full == replace(of_shard, in_read=tp.topic in record.in_read)
        else:
            assert full == (record.token if tp == record.anchor else None)


def test_offsets_that_other_programs_committed_are_part_of_the_record() -> None:
    other = GroupOffset(TopicPartition("in", 1), 9, "somebody else's")
    record = TokenRecord.of(TOKEN, [other], ANCHOR, "group", "id-1", 0, 0)
    assert record.ends == {other.tp: 9}
    assert record.shards == {}


@pytest.mark.parametrize(("sources", "size_bytes"), [(1, 500), (100, 1_600), (4_000, 50_000)])
def test_the_size_stays_far_below_the_largest_message(sources: int, size_bytes: int) -> None:
    ends = {TopicPartition("in", number): 1_234_567_890 + number for number in range(sources)}
    record = replace(RECORD, ends={**ends, ANCHOR: 5})
    assert len(record.encode()) <= size_bytes


SHARDS = {"in": [[0, "attempt", 1, None, {}, 0]]}


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(RECORD.encode()), **fields}).encode()


def with_operator_in_read(topics: object) -> bytes:
    return changed(**{"shards": SHARDS, "in-read": topics})


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(OperatorError, match=f"format {RECORD_FORMAT + 1}, written by kafka-eos 9"):
        TokenRecord.decode(
            RECORD.key, changed(**{"kafka-eos-record": RECORD_FORMAT + 1, "by": "9", "new": 1})
        )


def test_a_record_names_the_operators_in_the_read() -> None:
    record = TokenRecord.decode(RECORD.key, with_operator_in_read(["in"]))
    assert record.in_read == {"in"}
    assert "in-read" not in json.loads(RECORD.encode())
    assert TokenRecord.decode(RECORD.key, record.encode()) == record


def test_a_newer_token_in_the_record_is_refused() -> None:
    token = json.loads(TOKEN.encode())
    text = json.dumps({**token, "kafka-eos": 99}, separators=(",", ":"))
    with pytest.raises(OperatorError, match="format 99"):
        TokenRecord.decode(RECORD.key, changed(token=text))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"{}",
        b'{"kafka-eos-record":0}',
        changed(something="unknown"),
        changed(token="no token"),
        changed(token=None),
        changed(anchor=["out"]),
        changed(anchor=["out", -1]),
        changed(partition="0"),
        changed(group=None),
        changed(time="now"),
        changed(ends=[]),
        changed(ends={"in": [[0, -1]]}),
        changed(ends={"in": [[0, 1.5]]}),
        changed(ends={"in": [[0, True]]}),
        changed(ends={"in": [[0, 1, 2], [1, 3]]}),
        changed(ends={"in": [[]]}),
        changed(ends={"in": [[0, 2**63]]}),
        changed(shards={"in": [[0, "attempt", 1, None]]}),
        changed(shards={"in": [[0, "attempt", 1, None, {}, 0], [0, "attempt", 1, None, {}, 0]]}),
        changed(shards={"elsewhere": [[0, "attempt", 1, None, {}, 0]]}),
        changed(**{"in-read": ["in"]}),
        json.dumps(
            {name: each for name, each in json.loads(RECORD.encode()).items() if name != "by"}
        ).encode(),
        with_operator_in_read(["out"]),
        with_operator_in_read([1]),
        with_operator_in_read([]),
        with_operator_in_read(["in", "in"]),
        with_operator_in_read({"in": 1}),
    ],
)
def test_a_damaged_record_is_refused(value: bytes) -> None:
    with pytest.raises(OperatorError, match="'orders' in the token topic is damaged"):
        TokenRecord.decode(RECORD.key, value)


def test_a_record_under_the_key_of_another_application_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"belongs to application\.id='orders'"):
        TokenRecord.decode(b"invoices", RECORD.encode())
