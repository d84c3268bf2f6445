"""How `SourceAdmin` treats incomplete answers: no offset yet, a missing topic, a hidden topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import AuthorizationError, UnavailableError
from kafka_eos_source.kafka import admin, admin_client
from kafka_eos_source.kafka.admin_client import Topic
from kafka_eos_source.model import LogEnd, TopicPartition

A = TopicPartition("t", 0)
NO_OFFSET = -1


class Client:
    """A client that returns these answers, one per request, repeats the last one, and raises KafkaErrors."""

    answers: list[Any]
    limits: list[float]

    def __init__(self, config: Any) -> None:
        self.config = config

    def offsets_at(
        self, times: Mapping[TopicPartition, int], seconds: float, *, committed: bool
    ) -> dict[TopicPartition, LogEnd]:
        self.limits.append(seconds)
        offset = self._next()
        if isinstance(offset, KafkaError):
            raise KafkaException(offset)
        return dict.fromkeys(times, LogEnd(offset))

    def topics(self, names: Any, seconds: float) -> dict[str, Topic | KafkaError]:
        answer = self._next()
        if isinstance(answer, str):
            return {"t": Topic(answer, ())}
        if answer.code() == KafkaError._TIMED_OUT:
            raise KafkaException(answer)
        return {"t": answer}

    def _next(self) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def source_admin(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> admin.SourceAdmin:
    monkeypatch.setattr(admin_client, "check_reachable", lambda *_, **__: "")
    monkeypatch.setattr(admin, "AdminClient", type("_", (Client,), {"answers": list(answers), "limits": []}))
    return admin.SourceAdmin({"bootstrap.servers": "b:9092"}, "read_committed", 2, 1)


def test_the_offset_of_a_partition_without_one_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a leader election there is no offset yet; using it as one would look like data loss."""
    assert source_admin(monkeypatch, NO_OFFSET, NO_OFFSET, 42).latest([A]) == {A: (42, -1)}


def test_an_unknown_offset_is_never_used_as_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not know the offset is asked again until the timeout, as if it did not answer."""
    monkeypatch.setattr(admin, "REQUEST_SECONDS", 0.1)
    with pytest.raises(UnavailableError, match=r"tried \d{2,} times"):
        source_admin(monkeypatch, NO_OFFSET).earliest([A])


def test_a_timestamp_after_the_last_record_has_no_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert source_admin(monkeypatch, -1).at_time({A: 1000}) == {A: None}


TIMED_OUT = KafkaError(KafkaError._TIMED_OUT)


def test_another_broker_is_asked_soon_until_the_cluster_has_replaced_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More short requests than retries fit into that time; later ones have time for a slow broker."""
    made = source_admin(monkeypatch, *[TIMED_OUT] * 10, 42)
    assert made.latest([A]) == {A: LogEnd(42)}
    limits = admin.AdminClient.limits
    assert limits == [admin_client.SOON_SECONDS] * 11
    limits.clear()
    monkeypatch.setattr(admin_client, "REPLACED_SECONDS", 0.0)
    assert made.latest([A]) == {A: LogEnd(42)}
    assert limits == [admin_client.REQUEST_SECONDS]


MISSING = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
HIDDEN = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


def test_existing_topic_ids_asks_again_before_a_topic_counts_as_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert source_admin(monkeypatch, MISSING, MISSING, "id-1").existing_topic_ids(["t"]) == {"t": "id-1"}
    assert source_admin(monkeypatch, MISSING, MISSING, MISSING, "id-1").existing_topic_ids(["t"]) == {}


def test_time_outs_do_not_use_up_the_retries_of_a_missing_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [*[TIMED_OUT] * 5, MISSING, "id-1"]
    assert source_admin(monkeypatch, *answers).existing_topic_ids(["t"]) == {"t": "id-1"}


def test_existing_topic_ids_raises_for_a_hidden_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthorizationError):
        source_admin(monkeypatch, HIDDEN).existing_topic_ids(["t"])
