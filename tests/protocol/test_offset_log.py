"""Source positions in Spark's offset log, and how the sink distinguishes them from other sources' offsets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.offset_log import SourcePosition, is_kafka_offset_json

_TOPICS = st.text("abc.-_019", min_size=1, max_size=6)
_OFFSETS = st.dictionaries(
    st.builds(TopicPartition, _TOPICS, st.integers(0, 99)), st.integers(0, 2**63 - 1), max_size=6
)
_POSITIONS = st.builds(
    lambda end, epochs, **more: SourcePosition(
        end, epochs={tp: epoch for tp, epoch in zip(end, epochs, strict=False) if epoch >= 0}, **more
    ),
    end=_OFFSETS,
    epochs=st.lists(st.integers(-1, 2**31 - 1)),
    start=st.none() | _OFFSETS,
    cluster_id=st.none() | st.text(max_size=5),
    topic_ids=st.dictionaries(_TOPICS, st.text(min_size=1, max_size=5), max_size=3),
    tick=st.integers(0, 2**40),
    jump=st.booleans(),
    lossy=st.booleans(),
)


@given(_POSITIONS)
def test_a_position_survives_encoding_and_decoding(position: SourcePosition) -> None:
    text = position.to_json()
    assert SourcePosition.from_json(text) == position
    assert is_kafka_offset_json(text)


@given(_OFFSETS)
def test_the_order_of_partitions_does_not_change_the_text(offsets: dict[TopicPartition, int]) -> None:
    backwards = dict(reversed(offsets.items()))
    assert SourcePosition(backwards).to_json() == SourcePosition(offsets).to_json()


def test_sparks_own_offsets_are_read() -> None:
    position = SourcePosition.from_json('{"b":{"1":4,"0":3},"a":{"0":2}}')
    assert position == SourcePosition(
        {TopicPartition("a", 0): 2, TopicPartition("b", 0): 3, TopicPartition("b", 1): 4}
    )
    assert json.loads(position.to_json()) == {"a": {"0": 2}, "b": {"0": 3, "1": 4}}


@pytest.mark.parametrize(
    "line",
    [
        "42",
        "null",
        '"x"',
        "[]",
        '{"logOffset":3}',
        '{"sourceVersion":1,"reservoirId":"x","reservoirVersion":3,"index":-1,"isStartingVersion":false}',
        '{"offset":{"value":3}}',
        '{"offset":{"0":"3"}}',
        '{"0":{"0":true}}',
        "not JSON",
    ],
)
def test_offsets_of_other_sources_are_not_taken_for_kafkas(line: str) -> None:
    assert not is_kafka_offset_json(line)
    with pytest.raises(OperatorError):
        SourcePosition.from_json(line)


def test_an_empty_position_of_sparks_kafka_source_is_recognised() -> None:
    assert is_kafka_offset_json("{}")


@pytest.mark.parametrize(
    "line",
    [
        '{"t":{}}',
        '{"t":{"0":-1}}',
        '{"t":{"00":1}}',
        '{"t":{"²":1}}',
        '{"a b":{"0":1}}',
        '{"@":3}',
        '{"@":{"start":5},"t":{"0":1}}',
        '{"@":{"start":{"t":{"0":"1"}}},"t":{"0":1}}',
        '{"@":{"topics":[1]},"t":{"0":1}}',
        '{"@":{"cluster":7},"t":{"0":1}}',
        '{"@":{"epochs":[1]},"t":{"0":1}}',
        '{"@":{"epochs":{"t":1}},"t":{"0":1}}',
        '{"@":{"epochs":{"t":[1,1]}},"t":{"0":1}}',
        '{"@":{"epochs":{"u":[1]}},"t":{"0":1}}',
        '{"@":{"epochs":{"t":[-2]}},"t":{"0":1}}',
        '{"@":{"epochs":{"t":[true]}},"t":{"0":1}}',
        '{"@":{"tick":"1"},"t":{"0":1}}',
        '{"@":{"tick":true},"t":{"0":1}}',
        '{"@":{"jump":1},"t":{"0":1}}',
        '{"@":{"lossy":"true"},"t":{"0":1}}',
        '{"0":7}',
        "[" * 100_000,
    ],
)
def test_similar_or_damaged_text_is_not_a_position(line: str) -> None:
    assert not is_kafka_offset_json(line)
    with pytest.raises(OperatorError) as caught:
        SourcePosition.from_json(line)
    assert caught.value.fix


def test_the_json_of_an_ordinary_position_omits_all_optional_keys() -> None:
    """Each optional key appears only with a value other than its default."""
    ordinary = SourcePosition({TopicPartition("t", 0): 1}, cluster_id="c", topic_ids={"t": "i"})
    assert ordinary.to_json() == '{"@":{"cluster":"c","topics":{"t":"i"}},"t":{"0":1}}'


def test_epochs_are_listed_in_the_order_of_the_partitions() -> None:
    ends = {TopicPartition("t", number): 1 for number in (10, 2, 0)}
    position = SourcePosition(ends, epochs={TopicPartition("t", 10): 7, TopicPartition("t", 0): 0})
    assert position.to_json() == '{"@":{"epochs":{"t":[0,-1,7]}},"t":{"0":1,"2":1,"10":1}}'


def test_keys_of_later_versions_are_ignored() -> None:
    position = SourcePosition.from_json('{"@":{"cluster":"c","later":[1]},"t":{"0":1}}')
    assert position == SourcePosition({TopicPartition("t", 0): 1}, cluster_id="c")


@given(
    st.text()
    | st.recursive(st.integers() | st.text(), lambda s: st.dictionaries(st.text(), s)).map(json.dumps)
)
def test_any_text_is_decoded_or_refused(text: str) -> None:
    if is_kafka_offset_json(text):
        assert is_kafka_offset_json(SourcePosition.from_json(text).to_json())
    else:
        with pytest.raises(OperatorError):
            SourcePosition.from_json(text)
