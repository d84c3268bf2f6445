"""Filters of dead letters, where a replay sends each one, and which groups it refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import dead_letters as operating
from kafka_eos_source.operate.dead_letters import Filter, Letter, Summary
from kafka_eos_source.operate.records import TopicRecord
from kafka_eos_source.operate.replay import Replay, group_of, ranges
from kafka_eos_source.protocol import records
from kafka_eos_source.protocol.records import DeadLetter, without_ours
from kafka_eos_source.spark.arrow import HEADERS_ARROW, with_unescaped_names

DEAD = TopicPartition("dead", 0)
LOGS = {DEAD: LogEnds(2, 9, 10)}


def letter(offset: int = 0, timestamp_ms: int | None = 1000, **headers: str | None) -> Letter:
    usual = {
        "ERROR": "E",
        "ORIGIN_TOPIC": "in",
        "ORIGIN_PARTITION": "3",
        "APPLICATION": "app",
        "BATCH": "7",
        "HOLDS": "input",
    }
    named = {name: text for name, text in {**usual, **headers}.items() if text is not None}
    listed = tuple((getattr(records, name), text.encode()) for name, text in named.items())
    return Letter.of(TopicRecord(DEAD, offset, timestamp_ms, b"k", b"v", (("trace", None), *listed)))


@pytest.mark.parametrize(
    ("conditions", "selects"),
    [
        ({}, True),
        ({"error": "E", "application_id": "app", "origin_topic": "in", "batch": 7, "holds": "input"}, True),
        ({"at": "0:0"}, True),
        ({"at": "0:1"}, False),
        ({"at": "1:0"}, False),
        ({"error": "F"}, False),
        ({"application_id": "b"}, False),
        ({"origin_topic": "x"}, False),
        ({"batch": 0}, False),
        ({"holds": "output"}, False),
        ({"since_ms": 1000, "until_ms": 1001}, True),
        ({"since_ms": 1001}, False),
        ({"until_ms": 1000}, False),
    ],
)
def test_a_letter_is_selected_if_it_meets_all_conditions(conditions: dict[str, Any], selects: bool) -> None:
    assert Filter(**conditions).selects(letter()) is selects


@pytest.mark.parametrize("place", ["17", "0:", ":3", "-1:3", "0:x", "0:" + "9" * 20, "0:1:2"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    found = CliRunner().invoke(main, ["dead-letters", "replay", "dead", "--at", place])
    assert found.exit_code == 2
    assert "expected PARTITION:OFFSET" in found.output


def test_names_of_headers_that_are_not_utf8_are_sent_again_as_they_were() -> None:
    columns = {"value": pa.array([b"1", b"2"], pa.binary())}
    headers = pa.array([[("a\\xFF", b"1"), ("b", None)], None], HEADERS_ARROW)
    rows = with_unescaped_names(pa.record_batch({**columns, "headers": headers}))
    assert rows.column("headers").flatten().field(0).cast(pa.binary()).to_pylist() == [b"a\xff", b"b"]
    assert rows.column("headers").null_count == 1
    assert rows.column("value").to_pylist() == [b"1", b"2"]


def test_a_letter_without_a_time_is_in_no_range_of_time() -> None:
    assert Filter().selects(letter(timestamp_ms=None))
    assert not Filter(until_ms=5).selects(letter(timestamp_ms=None))


def test_headers_of_other_programs_are_read_as_far_as_they_make_sense() -> None:
    found = DeadLetter.parse([(records.BATCH, b"-1"), (records.ERROR, b"\xff"), (records.ORIGIN_OFFSET, b"")])
    assert found == DeadLetter(error="\ufffd")
    assert without_ours(letter().record.headers) == (("trace", None),)


@pytest.mark.parametrize(
    "digits", [b"9" * 5000, b"9" * 20, b"9" * 19, b"0" * 20], ids=lambda each: str(len(each))
)
def test_a_number_that_is_too_large_counts_as_absent(digits: bytes) -> None:
    names = (records.BATCH, records.ORIGIN_TIMESTAMP, records.ORIGIN_OFFSET)
    assert DeadLetter.parse([(name, digits) for name in names]) == DeadLetter()


def test_the_largest_numbers_of_kafka_are_read() -> None:
    found = DeadLetter.parse(
        [
            (records.ORIGIN_OFFSET, str(2**63 - 1).encode()),
            (records.ORIGIN_TIMESTAMP, str(records.MOST_MS).encode()),
        ]
    )
    assert (found.origin_offset, found.origin_timestamp_ms) == (2**63 - 1, records.MOST_MS)
    late = DeadLetter.parse([(records.ORIGIN_TIMESTAMP, str(records.MOST_MS + 1).encode())])
    assert late.origin_timestamp_ms is None, "no calendar has this time"


def test_a_letter_that_was_written_after_the_year_9999_is_shown() -> None:
    assert operating.time_text(records.MOST_MS) == "9999-12-31 23:59:59"
    assert operating.time_text(2**63 - 1) == f"{2**63 - 1} ms"


def test_each_header_of_a_letter_is_removed_before_it_is_sent_again() -> None:
    names = {value for name, value in vars(records).items() if str(value).startswith("__") and name.isupper()}
    assert names == set(records.ALL)


@pytest.mark.parametrize(
    ("headers", "given", "expected"),
    [
        ({}, {}, ("in", 3)),
        ({"ORIGIN_PARTITION": None}, {}, ("in", None)),
        ({}, {"input_to": "again"}, ("again", None)),
        ({"HOLDS": "output"}, {"output_to": "out", "input_to": "again"}, ("out", None)),
        ({"HOLDS": "output"}, {"input_to": "again"}, "output_row"),
        ({"HOLDS": "output", "TARGET_TOPIC": "out"}, {}, "output_row"),
        ({"ORIGIN_TOPIC": None}, {}, "no_origin"),
        ({"ORIGIN_TOPIC": "dead"}, {}, "own_topic"),
        ({"VALUE_BYTES": "0"}, {}, "incomplete"),
        ({"HOLDS": None}, {"output_to": "out", "input_to": "again"}, "unknown_contents"),
    ],
)
def test_each_letter_goes_where_its_contents_belong(
    headers: dict[str, str | None], given: dict[str, str], expected: object
) -> None:
    assert Replay("dead", "id", LOGS, "g", **given).destination(letter(**headers)) == expected


def test_a_replay_never_has_the_transactional_id_of_a_query() -> None:
    assert Replay("dead", "id", LOGS, "app").transactional_id == "kafka-eos-replay-app"
    group = group_of("dead", Filter())
    assert Replay("dead", "id", LOGS, group).transactional_id == group == "kafka-eos-replay-dead"
    groups = {
        group_of("dead", each) for each in (Filter(), Filter(error="1"), Filter(batch=1), Filter(error="2"))
    }
    assert len(groups) == 4


REPLAY = Replay("dead", "id", LOGS, "g", Filter(error="E"))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (GroupOffset(DEAD, 3, ""), "holds offsets of another program"),
        (GroupOffset(DEAD, 3, "[1]"), "holds offsets of another program"),
        (GroupOffset(TopicPartition("in", 0), 3, ""), "holds offsets of another program or topic"),
        (GroupOffset(TopicPartition("dead", 5), 3, REPLAY.metadata), "(no such partition)"),
        (GroupOffset(DEAD, 3, Replay("dead", "old", LOGS, "g", Filter(error="E")).metadata), "created again"),
        (GroupOffset(DEAD, 3, Replay("dead", "id", LOGS, "g").metadata), "other filters (no filters)"),
        (GroupOffset(DEAD, 11, REPLAY.metadata), "has an offset that the topic does not have (LogEnds("),
    ],
)
def test_a_group_of_somebody_else_is_refused(found: GroupOffset, text: str) -> None:
    with pytest.raises(OperatorError, match="--group") as error:
        ranges(REPLAY, {found.tp: found})
    assert text in error.value.message


def test_a_replay_continues_at_its_offset() -> None:
    assert ranges(REPLAY, {}) == {DEAD: (2, 9)}
    assert ranges(REPLAY, {DEAD: GroupOffset(DEAD, 5, REPLAY.metadata)}) == {DEAD: (5, 9)}


def test_the_newest_letters_are_kept_in_the_order_of_their_times() -> None:
    found = [letter(offset, time) for offset, time in enumerate([5, 9, None, 7, 6])]
    assert [each.record.offset for each in operating.newest(found, 2)] == [3, 1]
    assert [each.record.offset for each in operating.newest(found, 10)] == [2, 0, 4, 3, 1]
    assert operating.newest(found, 0) == []


def test_a_summary_counts_every_letter_in_a_bounded_number_of_lines() -> None:
    summary = Summary()
    for number in range(1000):
        summary.add(letter(ERROR=f"E{number}"))
    assert summary.total == 1000
    assert len(summary.counts) == 200
