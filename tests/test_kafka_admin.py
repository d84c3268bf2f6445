"""What the source's look-ups make of answers that are none."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID
from confluent_kafka import TopicPartition as ClientTopicPartition

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka import admin
from kafka_eos_source.model import TopicPartition

A = TopicPartition("t", 0)


class Client:
    """Answers with these offsets, one a look-up, the last one for ever."""

    answers: list[int]

    def __init__(self, config: Any, logger: Any) -> None:
        self.config = config

    def list_offsets(self, wanted: dict[ClientTopicPartition, Any], **_: Any) -> Any:
        answer: Future[Any] = Future()
        offset = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer.set_result(SimpleNamespace(offset=offset))
        return dict.fromkeys(wanted, answer)

    def poll(self, timeout: float) -> None:
        """As the client's."""


def source_admin(monkeypatch: pytest.MonkeyPatch, *answers: int) -> admin.SourceAdmin:
    monkeypatch.setattr(admin, "_AdminClient", type("_", (Client,), {"answers": list(answers)}))
    return admin.SourceAdmin({"bootstrap.servers": "b:9092"}, "read_committed", 2, 1)


def test_a_partition_without_offset_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen while a leader is being elected; taken for an offset it would look like lost data."""
    assert source_admin(monkeypatch, OFFSET_INVALID, OFFSET_INVALID, 42).latest([A]) == {A: 42}


def test_and_never_taken_for_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker says at once that it does not know: it is asked for as long as if it did not answer."""
    monkeypatch.setattr(admin, "_REQUEST_SECONDS", 0.1)
    with pytest.raises(UnavailableError, match=r"tried \d{2,} times"):
        source_admin(monkeypatch, OFFSET_INVALID).earliest([A])


def test_no_record_at_or_after_a_time_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_admin(monkeypatch, -1).at_time({A: 1000}) == {A: None}
