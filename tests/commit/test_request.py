"""Reading Spark's offset log, and selecting the offsets that the sink commits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kafka_eos_source.commit.request import SourceRange, on_cluster, ranges
from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol import offset_log

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'
A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
TOPICS = {"a": 2}


def kafka(partitions: dict[str, dict[str, int]], **at: object) -> str:
    return json.dumps({**partitions, **({"@": at} if at else {})})


def test_an_offset_log_of_version_1_has_one_line_per_source() -> None:
    logged = offset_log.parse(f'v1\n{METADATA}\n{{"a":{{"0":1}}}}\n-', "offsets/0", 0)
    assert logged.sources == {"0": '{"a":{"0":1}}', "1": None}


def test_an_offset_log_of_version_2_names_its_sources() -> None:
    logged = offset_log.parse(f'v2\n{METADATA}\nflights:{{"a":{{"0":1}}}}\n0:7', "offsets/0", 0)
    assert logged.sources == {"flights": '{"a":{"0":1}}', "0": "7"}


@pytest.mark.parametrize("text", ["", "v3\n{}\n", "v1", "garbage"])
def test_an_offset_log_of_any_other_version_is_refused(text: str) -> None:
    with pytest.raises(OperatorError, match="offsets/7"):
        offset_log.parse(text, "offsets/7", 7)


def test_a_source_line_without_a_name_is_refused() -> None:
    with pytest.raises(OperatorError, match="without the name of a source"):
        offset_log.parse(f"v2\n{METADATA}\n42", "offsets/7", 7)


def test_digests_differ_by_source_and_by_offset() -> None:
    def digest(*lines: str) -> str:
        return offset_log.parse("\n".join(["v1", METADATA, *lines]), "x", 0).digest

    assert digest("1", "-") != digest("-", "1")
    assert digest("1") != digest("2")
    assert digest("1") == digest("1")


def test_digests_differ_by_batch_and_by_the_time_of_planning() -> None:
    """After a checkpoint was restored, an opaque source may log the same line for other data."""

    def digest(batch_id: int, planned_ms: int) -> str:
        metadata = f'{{"batchWatermarkMs":0,"batchTimestampMs":{planned_ms},"conf":{{}}}}'
        return offset_log.parse(f'v1\n{metadata}\n{{"logOffset":1}}', "x", batch_id).digest

    assert len({digest(1, 1), digest(2, 1), digest(1, 2)}) == 3
    assert digest(1, 1) == digest(1, 1)


def test_reading_a_missing_offset_log_entry_returns_none(tmp_path: Path) -> None:
    assert offset_log.read(str(tmp_path), 3) is None


def test_the_query_id_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="full URI"):
        offset_log.query_id(str(tmp_path))
    (tmp_path / "metadata").write_text('{"id":"e1e6"}')
    assert offset_log.query_id(f"file://{tmp_path}") == "e1e6"


def logged(*lines: str | None) -> offset_log.LoggedOffsets:
    return offset_log.LoggedOffsets({str(index): line for index, line in enumerate(lines)}, "")


def test_a_batch_starts_where_the_one_before_ended() -> None:
    now = logged(kafka({"a": {"0": 5}}), "42", None)
    before = logged(kafka({"a": {"0": 3}}), "41", None)
    assert ranges(now, before) == [SourceRange({A0: 5}, {A0: 3}), SourceRange(None)]


def test_the_start_of_the_first_batch_is_known_for_kafka_eos_and_unknown_for_sparks_source() -> None:
    ours = kafka({"a": {"0": 5}}, start={"a": {"0": 2}}, cluster="c")
    assert ranges(logged(ours), None) == [SourceRange({A0: 5}, {A0: 2}, "c")]
    assert ranges(logged(kafka({"a": {"0": 5}})), None) == [SourceRange({A0: 5}, None)]


def test_offsets_of_sources_on_the_sinks_cluster_are_committed_to_the_group() -> None:
    own = on_cluster([SourceRange({A0: 5}, {A0: 3}, "c")], "c", TOPICS, "auto")
    assert (own.ends, own.starts, own.comparable) == ({A0: 5}, {A0: 3}, True)


def test_offsets_of_sources_on_another_cluster_are_not_committed() -> None:
    own = on_cluster([SourceRange({A0: 5}, {A0: 3}, "other")], "c", TOPICS, "auto")
    assert (own.ends, own.comparable) == ({}, False)


def test_a_query_with_another_kind_of_source_is_not_comparable_by_offsets() -> None:
    own = on_cluster([SourceRange({A0: 5}, {A0: 3}, "c"), SourceRange(None)], "c", TOPICS, "auto")
    assert (own.ends, own.comparable) == ({A0: 5}, False)


def test_a_query_without_sources_is_not_comparable_by_offsets() -> None:
    assert not on_cluster([], "c", TOPICS, "auto").comparable


@pytest.mark.parametrize(
    ("source_cluster", "topic", "is_own"),
    [("auto", "a", True), ("auto", "b", False), ("same", "b", True), ("other", "a", False)],
)
def test_the_option_source_cluster_decides_for_sparks_own_source(
    source_cluster: str, topic: str, is_own: bool
) -> None:
    own = on_cluster([SourceRange({TopicPartition(topic, 0): 5})], "c", TOPICS, source_cluster)
    assert bool(own.ends) is is_own
    assert not is_own or own.starts is None


def test_the_lower_end_counts_for_a_partition_that_two_sources_read() -> None:
    own = on_cluster(
        [SourceRange({A0: 5, A1: 9}, {A0: 3, A1: 9}, "c"), SourceRange({A0: 8}, {A0: 1}, "c")],
        "c",
        TOPICS,
        "auto",
    )
    assert own.ends == {A0: 5, A1: 9}
    assert own.starts == {A0: 1, A1: 9}


def test_only_the_batch_in_which_a_source_jumps_is_a_jump() -> None:
    """Spark logs the position of a source without new records as in the batch before."""
    before, jump, after = (
        kafka({"a": {"0": 1}}, cluster="c"),
        kafka({"a": {"0": 5}}, cluster="c", jump=True),
        kafka({"a": {"0": 9}}, cluster="c"),
    )

    def logged(line: str) -> offset_log.LoggedOffsets:
        return offset_log.parse(f"v1\n{METADATA}\n{line}", "x", 0)

    entries = [logged(line) for line in (before, jump, jump, after)]
    found = [ranges(entry, earlier)[0].jump for earlier, entry in itertools.pairwise(entries)]
    assert found == [True, False, False]


def test_offsets_of_a_topic_that_was_created_again_cannot_be_compared() -> None:
    """After a checkpoint was restored, lower offsets in such a topic do not prove that Kafka holds them."""

    def own(topic_id: str) -> bool:
        before, after = (
            offset_log.parse(f"v1\n{METADATA}\n{line}", "x", 0)
            for line in (
                kafka({"a": {"0": 50}}, cluster="c", topics={"a": "old"}),
                kafka({"a": {"0": 80}}, cluster="c", topics={"a": topic_id, "b": "new"}),
            )
        )
        return on_cluster(ranges(after, before), "c", TOPICS, "auto").comparable

    assert own("old")
    assert not own("other")


def test_the_epochs_of_the_ends_are_committed() -> None:
    ours = kafka({"a": {"0": 5, "1": 9}}, cluster="c", epochs={"a": [5, -1]})
    (source,) = ranges(logged(ours), None)
    assert source.epochs == {A0: 5}
    own = on_cluster([source], "c", TOPICS, "auto")
    assert own.epochs == {A0: 5}
    behind = SourceRange({A0: 3}, {A0: 1}, "c", epochs={A0: 4})
    assert on_cluster([source, behind], "c", TOPICS, "auto").epochs == {A0: 4}, "that of the lower end"
