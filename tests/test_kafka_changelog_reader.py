"""The result of one read of a changelog partition, with a scripted client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kafka_eos_source.errors import DataLossError, RetriableError, UnavailableError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader, Pulled
from kafka_eos_source.kafka.consumer import Taken
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

TP = TopicPartition("c", 1)
OTHER = TopicPartition("c", 0)


@dataclass
class Message:
    at: int

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes:
        return b"k%d" % self.at

    def value(self) -> bytes | None:
        return b"v%d" % self.at if self.at % 2 else None


class Consumer:
    bootstrap_servers = "b:9092"
    last_complaint = ""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.assigned: Mapping[TopicPartition, int] = {}
        self.drains = False
        self.asked: list[int] = []

    def want(self, columns: Collection[str]) -> None:
        assert set(columns) == {"key", "value"}

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self.assigned = positions

    def release(self) -> None:
        self.assigned = {}

    def take(self, at_most: int, wait_seconds: float) -> Taken:
        self.asked.append(at_most)
        found: Taken = self.answers.pop(0)
        return found

    def log_bounds(self, tp: TopicPartition, timeout_seconds: float) -> tuple[int, int]:
        assert tp == TP
        assert timeout_seconds > 0
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def reader(*answers: Any) -> ChangelogReader:
    return ChangelogReader(Consumer(*answers), TP)  # type: ignore[arg-type]


def pulled(messages: Sequence[Message], end: int) -> tuple[list[int], list[bytes], list[bytes | None], int]:
    found = reader(Taken(messages)).take(0.1, end).records
    assert found is not None
    return found.offsets.tolist(), found.keys.to_pylist(), found.values.to_pylist(), found.position


def test_a_read_returns_keys_values_and_the_next_offset() -> None:
    assert pulled([Message(3), Message(7)], 100) == ([3, 7], [b"k3", b"k7"], [b"v3", b"v7"], 8)


def test_records_at_or_after_the_end_are_omitted() -> None:
    messages = [Message(at) for at in (3, 4, 7)]
    assert pulled(messages, 8)[3] == 8
    assert pulled(messages, 7) == ([3, 4], [b"k3", b"k4"], [b"v3", None], 7)
    assert pulled(messages, 5) == ([3, 4], [b"k3", b"k4"], [b"v3", None], 5)
    assert pulled(messages, 2) == ([], [], [], 2)


def test_the_records_of_a_read_can_be_split_into_parts() -> None:
    found = reader(Taken([Message(at) for at in (3, 4, 7, 9)])).take(0.1, 20).records
    assert found is not None
    for at_most, expected in {
        2: [([3, 4], 7), ([7, 9], 10)],
        3: [([3, 4, 7], 9), ([9], 10)],
        4: [([3, 4, 7, 9], 10)],
    }.items():
        assert [(part.offsets.tolist(), part.position) for part in found.parts(at_most)] == expected
        assert [k for part in found.parts(at_most) for k in part.keys.to_pylist()] == found.keys.to_pylist()
    assert [part.position for part in found.before(2).parts(2)] == [2]


def test_a_read_requests_no_more_records_than_it_needs() -> None:
    consumer = Consumer(Taken([Message(3)]), Taken(()))
    consumer.drains = True
    found = ChangelogReader(consumer, TP)  # type: ignore[arg-type]
    found.start(2)
    found.take(0.1, 10)
    found.take(0.1, 10)
    assert consumer.asked == [8, 6]


def test_a_read_reports_only_events_of_its_own_partition() -> None:
    assert reader(Taken(())).take(0.1, 9) == Pulled()
    assert reader(Taken((), log_ends={TP: 5, OTHER: 9})).take(0.1, 9).log_end == 5
    assert reader(Taken((), out_of_range=[TP])).take(0.1, 9).out_of_range
    assert reader(Taken((), gone=[TP])).take(0.1, 9).gone
    strange = reader(Taken((), {OTHER: 5}, [OTHER], [OTHER])).take(0.1, 9)
    assert strange == Pulled()


def test_the_bounds_of_the_log_are_requested_until_they_are_known() -> None:
    assert reader(RetriableError("a leader is elected"), (2, 9)).readable(Deadline.after_seconds(5)) == (2, 9)
    with pytest.raises(UnavailableError, match=r"b:9092.*a leader is elected"):
        reader(RetriableError("a leader is elected")).readable(Deadline.after_seconds(0.01))


def test_a_reader_is_assigned_one_partition_and_releases_it() -> None:
    consumer = Consumer()
    found = ChangelogReader(consumer, TP)  # type: ignore[arg-type]
    found.start(7)
    assert consumer.assigned == {TP: 7}
    found.stop()
    assert not consumer.assigned


def taken(*offsets: int) -> Taken:
    return Taken([Message(at) for at in offsets])


def read(*answers: Any, skips_deleted: bool = True, deadline: Deadline | None = None) -> list[int]:
    """Returns the offsets of the records from 3 to 9 that the answers contain."""
    found = reader(*answers).read(
        3, 9, deadline or Deadline.after_seconds(60), if_gone="create it.", skips_deleted=skips_deleted
    )
    return [int(offset) for records in found for offset in records.offsets]


def test_a_part_of_the_log_is_read_to_its_end() -> None:
    assert read(taken(3, 4), taken(), taken(7, 8, 9)) == [3, 4, 7, 8]
    assert read(taken(3), Taken([], log_ends={TP: 9})) == [3], "control records end the log"


def test_a_topic_that_was_deleted_ends_the_read() -> None:
    with pytest.raises(UnavailableError, match=r"c-1 is gone, because the topic was deleted.*create it"):
        read(taken(3), Taken([], gone=[TP]))


def test_deleted_records_are_skipped_only_if_that_loses_nothing() -> None:
    assert read(Taken([], out_of_range=[TP]), (5, 9), taken(5, 8)) == [5, 8]
    with pytest.raises(DataLossError, match=r"records of c-1 from offset 3 on were deleted.*create it"):
        read(Taken([], out_of_range=[TP]), skips_deleted=False)


def test_a_read_without_an_answer_ends_at_the_deadline() -> None:
    with pytest.raises(UnavailableError, match=r"reading c-1: nothing arrives"):
        read(taken(3), taken(), deadline=Deadline.after_seconds(0))
