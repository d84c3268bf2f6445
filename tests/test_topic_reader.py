"""The reader of topics reads its ranges to their ends, or says that it could not. No broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka import topic_reader
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.kafka.topic_reader import TopicReader
from kafka_eos_source.model import TopicPartition

TP = TopicPartition("t", 0)


class Message:
    """A record of a partition, or an event at an offset."""

    def __init__(self, offset: int, code: int | None = None, partition: int = 0) -> None:
        self._offset, self._code, self._partition = offset, code, partition

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000

    def key(self) -> None:
        return None

    value = headers = key


def end(offset: int) -> Message:
    return Message(offset, KafkaError._PARTITION_EOF)


class Client:
    """A consumer that returns these answers, and then repeats the last one for ever."""

    def __init__(self, answers: Sequence[Sequence[Message]]) -> None:
        self._answers = list(answers)

    def assign(self, _partitions: Any) -> None:
        return

    def unassign(self) -> None:
        return

    close = unassign

    def consume(self, _count: int, _seconds: float) -> Sequence[Message]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def read(
    monkeypatch: pytest.MonkeyPatch, *answers: Sequence[Message], start: int = 0, seconds: float = 30.0
) -> list[int]:
    """Reads up to offset 4, and returns the offsets of the records."""
    monkeypatch.setattr(topic_reader, "make", lambda *_: Client(answers))
    with TopicReader({"bootstrap.servers": "x"}, seconds) as reader:
        found = reader.read({TP: (start, 4)}, {TP: LogEnds(0, 4, 4)}, uncommitted=False)
        return [record.offset for record in found]


def test_an_end_before_that_of_the_range_does_not_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader may report an end that is too low."""
    answers = [Message(0), end(1)], [], [Message(1), Message(2), Message(3)], []
    assert read(monkeypatch, *answers) == [0, 1, 2, 3]


@pytest.mark.parametrize("offset", [4, 9])
def test_control_records_and_gaps_at_the_end_are_passed(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    assert read(monkeypatch, [Message(0), end(offset)], []) == [0]
    assert read(monkeypatch, [Message(0), Message(offset)], []) == [0]


@pytest.mark.parametrize(
    "again",
    [
        [end(2)],
        [],
        [Message(7, partition=1)],
        [Message(0, KafkaError._TRANSPORT)],
        [Message(0)],
    ],
    ids=["end", "silence", "another partition", "temporary error", "a record again"],
)
def test_a_log_that_never_reaches_the_end_of_its_range_is_an_error(
    monkeypatch: pytest.MonkeyPatch, again: Sequence[Message]
) -> None:
    with pytest.raises(UnavailableError, match="nothing arrives from") as error:
        read(monkeypatch, [Message(0), Message(1), end(2)], again, seconds=0.05)
    assert f"The log of {TP} ends at 2; records up to 4 were expected." in error.value.message


def test_records_before_the_range_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose position the log does not have begins at the start of the log."""
    assert read(monkeypatch, [Message(0), Message(1)], [Message(2), Message(3)], start=2) == [2, 3]
