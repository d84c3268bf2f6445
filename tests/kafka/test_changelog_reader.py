"""The result of one read of a changelog partition, with a scripted client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.errors import DataLossError, RecordsDamagedError, UnavailableError
from kafka_eos_source.kafka.damage import Damage
from kafka_eos_source.kafka.fetch import Taken
from kafka_eos_source.kafka.reader import ChangelogReader, Pulled
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.fetched_log import Batch, Record, decoded

TP = TopicPartition("c", 1)
OTHER = TopicPartition("c", 0)


class Consumer:
    cluster = SimpleNamespace(bootstrap="b:9092")
    last_complaint = ""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.assigned: Mapping[TopicPartition, int] = {}
        self.ends: Mapping[TopicPartition, int] | None = None
        self.starts: list[int] = []

    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        columns: Collection[str],
        ends: Mapping[TopicPartition, int] | None,
    ) -> None:
        assert set(columns) == {"key", "value"}
        self.assigned, self.ends = positions, ends
        self.starts += positions.values()

    def release(self) -> None:
        self.assigned = {}

    def take(self, wait_seconds: float) -> Taken:
        found: Taken = self.answers.pop(0)
        return found

    def log_bounds(self, tp: TopicPartition, deadline: Deadline) -> tuple[int, int]:
        assert tp == TP
        found: tuple[int, int] = self.answers.pop(0)
        return found


def taken(*offsets: int, reached: int | None = None) -> Taken:
    """Returns records at these offsets; every other value is a tombstone."""
    if not offsets:
        return Taken(reached={} if reached is None else {TP: reached})
    records = [Record(at, b"k%d" % at, b"v%d" % at if at % 2 else None) for at in offsets]
    messages = decoded({TP: Batch(offsets[0], offsets[-1], records)})
    return Taken(messages, reached={TP: offsets[-1] + 1 if reached is None else reached})


def reader(*answers: Any) -> ChangelogReader:
    return ChangelogReader(Consumer(*answers), TP)  # type: ignore[arg-type]


def pulled(found: Taken, end: int) -> tuple[list[int], list[bytes], list[bytes | None], int]:
    records = reader(found).take(0.1, end).records
    assert records is not None
    return records.offsets.tolist(), records.keys.to_pylist(), records.values.to_pylist(), records.position


def test_a_read_returns_keys_values_and_the_next_offset() -> None:
    assert pulled(taken(3, 7), 100) == ([3, 7], [b"k3", b"k7"], [b"v3", b"v7"], 8)


def test_records_at_or_after_the_end_are_omitted() -> None:
    found = taken(3, 4, 7)
    assert pulled(found, 8)[3] == 8
    assert pulled(found, 7) == ([3, 4], [b"k3", b"k4"], [b"v3", None], 7)
    assert pulled(found, 5) == ([3, 4], [b"k3", b"k4"], [b"v3", None], 5)
    assert pulled(found, 2) == ([], [], [], 2)


def test_offsets_without_records_are_passed() -> None:
    """They are those of control records, of aborted transactions, or were compacted."""
    assert pulled(taken(reached=9), 100) == ([], [], [], 9)
    assert pulled(taken(3, reached=9), 100) == ([3], [b"k3"], [b"v3"], 9)


def test_records_before_the_position_are_left_out() -> None:
    """A broker sends whole record batches, and two answers may overlap."""
    found = reader(taken(3, 4, 7), taken(4, 7, 9), taken(9), taken(10))
    found.start(4)
    read = [found.take(0.1, 100).records for _ in range(4)]
    assert [(each.offsets.tolist(), each.position) for each in read if each is not None] == [
        ([4, 7], 8),
        ([9], 10),
        ([], 10),
        ([10], 11),
    ]


def test_a_damaged_batch_is_an_error() -> None:
    damage = Damage(TP, 4, 6, 6, "its checksum is wrong", 1, (2,))
    with pytest.raises(RecordsDamagedError, match=r"offsets 4 to 5 of c-1 .*make broker 2 the leader"):
        reader(Taken(damaged=[damage])).take(0.1, 9)


def test_the_records_of_a_read_can_be_split_into_parts() -> None:
    found = reader(taken(3, 4, 7, 9)).take(0.1, 20).records
    assert found is not None
    for at_most, expected in {
        2: [([3, 4], 7), ([7, 9], 10)],
        3: [([3, 4, 7], 9), ([9], 10)],
        4: [([3, 4, 7, 9], 10)],
    }.items():
        assert [(part.offsets.tolist(), part.position) for part in found.parts(at_most)] == expected
        assert [k for part in found.parts(at_most) for k in part.keys.to_pylist()] == found.keys.to_pylist()
    assert [part.position for part in found.before(2).parts(2)] == [2]


def test_a_read_reports_only_events_of_its_own_partition() -> None:
    assert reader(Taken()).take(0.1, 9) == Pulled()
    assert reader(Taken(log_ends={TP: 5, OTHER: 9})).take(0.1, 9).log_end == 5
    assert reader(Taken(out_of_range=[TP])).take(0.1, 9).out_of_range
    assert reader(Taken(gone=[TP])).take(0.1, 9).gone
    strange = reader(Taken((), {OTHER: 5}, [OTHER], [OTHER])).take(0.1, 9)
    assert strange == Pulled()


def test_a_reader_is_assigned_one_partition_and_releases_it() -> None:
    consumer = Consumer()
    found = ChangelogReader(consumer, TP)  # type: ignore[arg-type]
    found.start(7)
    assert (consumer.assigned, consumer.ends) == ({TP: 7}, None)
    found.start(7, 9)
    assert (consumer.assigned, consumer.ends) == ({TP: 7}, {TP: 9})
    found.stop()
    assert not consumer.assigned


def read(*answers: Any, skips_deleted: bool = True, deadline: Deadline | None = None) -> list[int]:
    """Returns the offsets of the records from 3 to 9 that the answers contain."""
    found = reader(*answers).read(
        3, 9, deadline or Deadline.after_seconds(60), if_gone="create it.", skips_deleted=skips_deleted
    )
    return [int(offset) for records in found for offset in records.offsets]


def test_a_part_of_the_log_is_read_to_its_end() -> None:
    assert read(taken(3, 4), taken(), taken(7, 8, 9)) == [3, 4, 7, 8]
    assert read(taken(3), taken(reached=9)) == [3], "control records end the log"
    assert read(taken(3), Taken(log_ends={TP: 9})) == [3]


def test_a_topic_that_was_deleted_ends_the_read() -> None:
    with pytest.raises(UnavailableError, match=r"c-1 is gone, because the topic was deleted.*create it"):
        read(taken(3), Taken(gone=[TP]))


def test_deleted_records_are_skipped_only_if_that_loses_nothing() -> None:
    assert read(Taken(out_of_range=[TP]), (5, 9), taken(5, 8)) == [5, 8]
    with pytest.raises(DataLossError, match=r"records of c-1 from offset 3 on were deleted.*create it"):
        read(Taken(out_of_range=[TP]), (5, 9), skips_deleted=False)


def test_nothing_before_the_beginning_of_a_read_is_returned() -> None:
    """A leader that is outdated, or whose log was cut, does not know the offset at which the read is."""
    outdated = Taken(out_of_range=[TP])
    assert read(outdated, (0, 2), taken(3, 8)) == [3, 8]
    assert read(outdated, (0, 9), taken(3, 8), skips_deleted=False) == [3, 8]
    assert read(taken(3, 4), outdated, (1, 9), taken(5, 8)) == [3, 4, 5, 8]
    consumer = Consumer(outdated, (1, 9), taken(3, 8))
    list(ChangelogReader(consumer, TP).read(3, 9, Deadline.after_seconds(60), if_gone=""))  # type: ignore[arg-type]
    assert consumer.starts == [3, 3]


def test_an_offset_that_the_log_does_not_get_ends_the_read_at_the_deadline() -> None:
    answers = [Taken(out_of_range=[TP]), (0, 2)] * 1000
    with pytest.raises(UnavailableError, match=r"reading c-1: offset 3 is not in the log, which ends at"):
        read(*answers, deadline=Deadline.after_seconds(0.3))


def test_a_read_without_an_answer_ends_at_the_deadline() -> None:
    with pytest.raises(UnavailableError, match=r"reading c-1: nothing arrives"):
        read(taken(3), taken(), deadline=Deadline.after_seconds(0))
