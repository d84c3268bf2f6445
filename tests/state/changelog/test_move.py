"""Tests of moving state to another number of shards: the mark, the next stage, the shard of each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    ChangelogError,
    OperatorError,
    StateError,
    StateMismatchError,
    TokenMissingError,
)
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.rescale import RescaleTopics, copy_name
from kafka_eos_source.protocol.token import ShardProgress, Token, newest
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.move import (
    EVERY_SHARD,
    Move,
    MoveState,
    Placement,
    Stage,
    begin_move,
    merge_keyless_entries,
    next_stage,
)
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.describe import META_KEY, Description, TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, shards_of
from kafka_eos_source.state.model import ShardsBy
from kafka_eos_source.state.operator.shard import _check_shards

TOKEN = Token("app", "query", "run", 7, 7, "start", "end", 12, transaction_number=2)
MOVE = Move("counts", 3, 5, "old", TOKEN, "rescale-1", 1000, None)
WATERMARK = layout.keyed(1, b"", b"watermark")


def shape(partitions: int, topic_id: str = "new") -> TopicShape:
    return TopicShape(partitions, True, topic_id)


def token(batch_id: int = 7, time_ms: int = 1, event: int | None = None, query: str = "query") -> Token:
    return replace(TOKEN, batch_id=batch_id, query_id=query, shard=ShardProgress("a", time_ms, event))


def test_a_move_record_survives_encoding_and_is_not_read_as_a_token() -> None:
    for move in (MOVE, replace(MOVE, event_time_ms=-5)):
        text = move.encode()
        assert len(text) < 1024
        assert Move.decode(text) == move
        assert Move.decode(text + "\0") == move  # as librdkafka returns it
        with pytest.raises(
            StateError, match=r"store 'counts' is being moved to 5 shards.*continues where it stopped"
        ):
            Token.decode(text)
        with pytest.raises(StateError, match="being moved"):
            newest(
                [
                    GroupOffset(TopicPartition("t", 0), 1, TOKEN.encode()),
                    GroupOffset(TopicPartition("t", 1), 1, text),
                ]
            )
    counted = replace(MOVE, counts={"late_rows": 5})
    assert Move.decode(counted.encode()) == counted
    assert counted.shard_token(0) == replace(
        TOKEN, shard=ShardProgress("rescale-1", 1000, None, {"late_rows": 5}), shards=5
    )
    assert counted.shard_token(1) == replace(TOKEN, shard=ShardProgress("rescale-1", 1000, None), shards=5)
    assert Token.decode(counted.shard_token(0).encode()) == counted.shard_token(0)


def test_metadata_without_a_move_record() -> None:
    for text in ("", "free text", TOKEN.encode(), '"moving"', 'not json "moving"'):
        assert Move.decode(text) is None
    newer = MOVE.encode().replace('"kafka-eos":1', '"kafka-eos":2', 1)
    with pytest.raises(OperatorError, match="cannot read"):
        Move.decode(newer)
    damaged = json.loads(MOVE.encode())
    del damaged["moving"]["to"]
    with pytest.raises(OperatorError, match="cannot be decoded"):
        Move.decode(json.dumps(damaged))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (MoveState(shape(3), None, None), Stage.COPY),
        (MoveState(shape(3), shape(5), None), Stage.COPY),  # left by a move killed before its commit
        (MoveState(shape(3, "old"), shape(5), MOVE), Stage.REMAKE),
        (MoveState(None, shape(5), MOVE), Stage.REMAKE),
        (MoveState(shape(3), shape(5), MOVE), Stage.REMAKE),  # a task of the query created the topic
        (MoveState(shape(5, "old"), shape(5), replace(MOVE, was=5)), Stage.REMAKE),
        (MoveState(shape(5), shape(5), MOVE), Stage.FILL),
        (MoveState(shape(5), shape(5), None), Stage.CLEAN),
        (MoveState(shape(5), None, None), Stage.DONE),
        (MoveState(shape(5), None, None, shards=5), Stage.DONE),
        (MoveState(shape(5), None, None, shards=3), Stage.COPY),  # somebody added two partitions
        (MoveState(shape(7), None, None, shards=5), Stage.COPY),
    ],
)
def test_the_next_stage_follows_from_the_state_of_the_move(seen: MoveState, expected: Stage) -> None:
    assert next_stage(seen, 5) is expected


def test_a_contradictory_state_of_the_move_is_refused() -> None:
    with pytest.raises(StateError, match="from 3 to 5 shards is under way"):
        next_stage(MoveState(shape(3), shape(5), MOVE), 4)
    with pytest.raises(ChangelogError, match="no changelog topic"):
        next_stage(MoveState(None, None, None), 5)
    for copy in (None, shape(3)):
        with pytest.raises(ChangelogError, match="copy of the state is gone"):
            next_stage(MoveState(None, copy, MOVE), 5)


def test_a_move_begins_with_the_latest_times_of_one_batch() -> None:
    tokens = {0: token(time_ms=5, event=None), 1: token(time_ms=9, event=30), 2: token(time_ms=7, event=20)}
    found = begin_move("counts", tokens, "id", 5, "attempt")
    assert found == Move("counts", 3, 5, "id", TOKEN, "attempt", 9, 30)
    assert begin_move("counts", {0: token()}, "id", 2, "a").event_time_ms is None
    counting = [
        replace(TOKEN, shard=ShardProgress("a", 1, None, {"late_rows": n, f"own_{n}": 1})) for n in (2, 3)
    ]
    summed = begin_move("counts", dict(enumerate(counting)), "id", 5, "a").counts
    assert summed == {"late_rows": 5, "own_2": 1, "own_3": 1}
    for missing in (None, TOKEN):
        with pytest.raises(TokenMissingError, match=r"shards \[1\] of store 'counts' have no token"):
            begin_move("counts", {0: token(), 1: missing}, "id", 5, "a")
    for some in ({0: token(), 1: None}, {0: None, 1: token()}):
        with pytest.raises(TokenMissingError) as caught:
            begin_move("counts", some, "id", 5, "a")
        assert "keep the changelog topic" in caught.value.fix, "it holds the state of a shard"
        assert "delete its changelog" not in caught.value.fix
    with pytest.raises(TokenMissingError) as caught:
        begin_move("counts", {0: None, 1: None}, "id", 5, "a")
    assert "delete its changelog topic" in caught.value.fix
    for other in (token(batch_id=6), token(query="another")):
        with pytest.raises(StateMismatchError, match="different batches: 0 at batch 7 of query query, 1 at"):
            begin_move("counts", {0: token(), 1: other}, "id", 5, "a")


def offsets_of(tokens: Mapping[int, Token]) -> dict[TopicPartition, GroupOffset]:
    tps = {number: TopicPartition("app-counts-changelog", number) for number in tokens}
    return {tps[number]: GroupOffset(tps[number], 9, each.encode()) for number, each in tokens.items()}


def test_a_changelog_that_grew_is_moved_from_the_shards_that_hold_state() -> None:
    topics = RescaleTopics({"bootstrap.servers": "b:9092"}, "app", "counts", "app", 4, timeout_ms=1000)
    offsets = offsets_of(dict.fromkeys(range(4), replace(token(), shards=4)))
    seen = MoveState(shape(6), None, None, topics.shards(offsets, 6))
    assert (seen.was, next_stage(seen, 4)) == (4, Stage.COPY)
    cut, move = topics.plan_move(seen, offsets)
    assert (cut.shards, move.was, move.to) == (4, 4, 4)


class Offsets:
    """The committed offsets of a changelog, as `CommittedShard` reads them."""

    def __init__(self, tokens: Mapping[int, Token]) -> None:
        self.found = offsets_of(tokens)

    def offsets(self, _partitions: object, _deadline: object) -> dict[TopicPartition, GroupOffset]:
        return self.found


def check_shards(
    shard: int, shards: int, tokens: Mapping[int, Token], shards_by: ShardsBy = ShardsBy.HASH
) -> None:
    task = SimpleNamespace(
        identity=SimpleNamespace(shards=shards),
        tp=TopicPartition("app-counts-changelog", shard),
        shards_by=shards_by,
    )
    deadline = Deadline.after_seconds(60)
    _check_shards(cast(Any, task), cast(Any, Offsets(tokens)), tokens.get(shard), deadline)


def test_a_shard_of_a_changelog_that_grew_is_refused() -> None:
    tokens = dict.fromkeys(range(4), replace(token(), shards=4))
    with pytest.raises(StateMismatchError, match="holds the state of 4 shards, but it has 6") as caught:
        check_shards(5, 6, tokens)
    assert "somebody added partitions" in str(caught.value)
    assert "rescale QUERY --shards 6" in caught.value.fix
    check_shards(3, 4, tokens)
    check_shards(5, 6, {})  # no batch was committed yet
    with pytest.raises(StateMismatchError, match="the input topic had 4 partitions before") as caught:
        check_shards(5, 6, tokens, ShardsBy.INPUT_PARTITION)
    assert "rescale" not in caught.value.fix


def test_state_with_a_shard_for_each_partition_of_the_input_is_not_even_planned_to_move() -> None:
    topics = RescaleTopics({}, "app", "counts", "app", 6, 1000)
    offsets = offsets_of(dict.fromkeys(range(4), replace(token(), shards=4, in_read=True)))
    with pytest.raises(StateMismatchError, match="cannot be moved to other shards"):
        topics.shards(offsets, 4)


def test_a_changelog_with_fewer_partitions_than_shards_hold_state_did_not_grow() -> None:
    tokens = dict.fromkeys(range(6), replace(token(), shards=6))
    with pytest.raises(StateMismatchError, match="holds the state of 6 shards, but it has 4") as caught:
        check_shards(1, 4, tokens)
    assert "added" not in str(caught.value)
    assert "rescale" not in caught.value.fix


KEY = pa.schema([("user", pa.string()), ("day", pa.int64())])
DESCRIPTION = Description("aggregate", KEY, {2: TableDescription("aggregates")})


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.none() | st.text(max_size=9), st.none() | st.integers(-9, 9)), min_size=1, max_size=30
    ),
    st.integers(1, 7),
    st.integers(1, 7),
)
def test_every_key_is_moved_to_the_shard_to_which_spark_sends_its_rows(
    keys: list[tuple[str | None, int | None]], was: int, to: int
) -> None:
    users, days = zip(*keys, strict=True)
    columns = [pa.array(users, pa.string()), pa.array(days, pa.int64())]
    group_keys = KeyCodec(KEY).encode(columns).to_pylist()
    old, new = shards_of(columns, was).tolist(), shards_of(columns, to).tolist()
    placement = Placement(DESCRIPTION, was, to)
    for shard in range(was):
        own = [n for n, at in enumerate(old) if at == shard]
        entries = [META_KEY, WATERMARK]
        entries += [layout.keyed(2, group_keys[n], b"rest") for n in own]
        entries += [layout.timed(0x81, -n, group_keys[n]) for n in own]
        placed = placement.of(pa.array(entries, pa.binary()), shard).tolist()
        assert placed == [EVERY_SHARD, EVERY_SHARD, *[new[n] for n in own] * 2]


def test_a_key_in_a_shard_to_which_spark_would_not_send_it_is_refused() -> None:
    columns = [pa.array(["a"]), pa.array([1])]
    (group_key,) = KeyCodec(KEY).encode(columns).to_pylist()
    shard = int(shards_of(columns, 3)[0])
    placement = Placement(DESCRIPTION, 3, 5)
    with pytest.raises(StateMismatchError, match=rf"key \['a', 1\] belongs to shard {shard} by Spark's hash"):
        placement.of(pa.array([layout.keyed(2, group_key)]), (shard + 1) % 3)
    for key in (b"\x00raw", layout.keyed(2, b"x"), b"\x02\x00"):
        with pytest.raises(StateMismatchError, match="holds an entry that cannot be assigned"):
            placement.of(pa.array([key]), shard)


def test_entries_without_a_key_are_copied_to_every_shard() -> None:
    early, late = (5).to_bytes(8, "big"), (300).to_bytes(8, "big")
    shards = {
        0: {META_KEY: b"d", WATERMARK: late},
        1: {META_KEY: b"d", WATERMARK: early},
        2: {META_KEY: b"d"},
    }
    assert merge_keyless_entries(shards) == {META_KEY: b"d", WATERMARK: late}
    with pytest.raises(StateMismatchError, match="different descriptions"):
        merge_keyless_entries({0: {META_KEY: b"d"}, 1: {META_KEY: b"e"}})


def test_the_copy_of_a_changelog_is_not_taken_for_a_changelog() -> None:
    assert copy_name("app", "counts") == "app-counts-changelog-rescale"
    assert not copy_name("app", "counts").endswith("-changelog")
