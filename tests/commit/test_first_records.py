"""A batch of which all records are bad is refused once in a run, and no other batch is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kafka_eos_source.commit.first_records import FirstRecords
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.bad_records import LEAST_OF_TOPIC as LEAST
from kafka_eos_source.model import ReadPart, ReadTask, StagedPart, TopicRecords
from kafka_eos_source.observe.figures import Step
from tests.commit.model_broker import ModelRows, broker_with_genesis, request, rows, run_commit

PART = StagedPart("", 0, 0, 0)


def read(*topics: TopicRecords) -> StagedPart:
    """The part of a task of the sink that received the report of a reading task."""
    return replace(PART, reads=(ReadPart(ReadTask("f", "p", 0, 1), "a", (0,), 1, topics),))


def marked(*topics: TopicRecords, unmarked: int = 0) -> StagedPart:
    return replace(PART, marked=topics, unmarked=unmarked)


def bad(topic: str, number: int, reason: str = "") -> TopicRecords:
    return TopicRecords(topic, number, number, reason)


def refused(*parts: StagedPart, offsets: Mapping[str, int] | None = None, known: tuple[str, ...] = ()) -> str:
    """Returns the text of the refusal; "" if there is none."""
    offsets = offsets or {"t": LEAST}
    error = FirstRecords.of(parts, offsets).refusal(known, offsets, 7)
    return "" if error is None else str(error)


def test_a_topic_of_bad_records_is_refused_with_its_number_the_first_reason_and_what_to_do() -> None:
    text = refused(read(bad("t", 600, "not JSON")), read(bad("t", 401, "later")))
    assert "all 1,001 records of topic 't' in batch 7 are bad" in text
    assert "not JSON" in text
    assert "later" not in text
    for each in ("schema=, registry=", "another frame", "onAllRecordsBad=continue", "App: write(options="):
        assert each in text


@pytest.mark.parametrize(
    "parts",
    [
        [read(bad("t", LEAST - 1))],
        [read(bad("t", LEAST)), read(TopicRecords("t", 1, 0))],
        [read(TopicRecords("t", LEAST + 1, LEAST, "x"))],
        [read(TopicRecords("t", LEAST, 0))],
        [PART],
    ],
)
def test_a_good_record_or_too_few_bad_ones_are_no_reason(parts: list[StagedPart]) -> None:
    assert refused(*parts) == ""


def test_each_topic_is_looked_at_alone() -> None:
    both = read(TopicRecords("good", 5000, 1), bad("bad", LEAST, "why"))
    assert "topic 'bad'" in refused(both)
    assert refused(both, known=("bad",)) == ""


def test_marked_rows_are_bad_records_if_they_are_all_that_the_topic_has() -> None:
    assert "all 1,500 records of topic 't'" in refused(marked(bad("t", 1500, "no")), offsets={"t": 1500})
    # control records have offsets, too
    assert refused(marked(bad("t", 1500)), offsets={"t": 3000})
    # a filter or an aggregation dropped the valid rows
    assert refused(marked(bad("t", 1500)), offsets={"t": 3001}) == ""
    assert refused(marked(bad("t", 1500), unmarked=1), offsets={"t": 1600}) == ""
    # another topic has valid rows
    assert refused(marked(bad("t", 1500), unmarked=9), offsets={"t": 1500, "u": 9})


def test_marks_that_name_no_topic_count_for_the_only_topic_or_for_all() -> None:
    assert "topic 't'" in refused(marked(bad("", LEAST)), offsets={"t": LEAST})
    assert "topic 't', 'u'" in refused(marked(bad("", LEAST)), offsets={"t": 600, "u": 400})
    assert refused(marked(bad("", LEAST), unmarked=1), offsets={"t": 1000, "u": 400}) == ""


@pytest.mark.parametrize(
    ("parts", "topics"),
    [
        ([read(TopicRecords("t", 1, 0))], {"t"}),
        ([read(bad("t", LEAST - 1))], set()),
        ([read(bad("t", LEAST))], {"t"}),
        ([marked(unmarked=3)], {"t"}),
        ([marked(bad("t", 10))], {"t"}),  # of 1,000: a step has dropped the others
        ([marked(bad("t", 600))], set()),
        ([PART], set()),
    ],
)
def test_a_good_record_or_enough_bad_ones_settle_a_topic(parts: list[StagedPart], topics: set[str]) -> None:
    assert FirstRecords.of(parts, {"t": LEAST}).settles == topics


def test_a_refused_batch_begins_no_transaction_and_a_replay_that_kafka_holds_is_skipped() -> None:
    broker, refusal = broker_with_genesis(), InvalidRecordError("all bad")
    before = dict(broker.group)
    with pytest.raises(InvalidRecordError, match="all bad"):
        run_commit(broker, replace(request(0), refusal=refusal), ModelRows(rows(0)), ProducerSession())
    assert not broker.log
    assert "begin" not in broker.calls
    assert broker.group == before
    assert run_commit(broker, request(0), ModelRows(rows(0)), ProducerSession()).is_new
    again = replace(request(0, "run-2"), refusal=refusal)
    found = run_commit(broker, again, ModelRows(rows(0)), ProducerSession())
    assert (found.step, found.is_new) == (Step.SKIPPED, False)
