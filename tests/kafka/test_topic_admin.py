"""`TopicAdmin` creates and describes topics correctly for each answer of a scripted cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import AuthorizationError, OperatorError, UnavailableError
from kafka_eos_source.kafka import admin_client, topic_admin
from kafka_eos_source.kafka.admin_client import Partition, Topic
from kafka_eos_source.kafka.topic_admin import TopicAdmin, TopicShape
from kafka_eos_source.runtime.deadline import Deadline

Answer = Any


class TopicClient:
    """A client that returns these answers, one per request, and repeats the last; a code is an error."""

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        self.requests: list[str] = []
        self.made: list[Any] = []

    def __call__(self, config: dict[str, Any]) -> TopicClient:
        assert config == {"bootstrap.servers": "b:9092"}
        return self

    def topic(self, name: str, seconds: float) -> Any:
        return self._answer("describe")

    def topic_config(self, name: str, seconds: float) -> Any:
        return self._answer("config")

    def create_topic(
        self, name: str, partitions: int, replication_factor: int, config: Mapping[str, str], seconds: float
    ) -> None:
        self.made.append((name, partitions, replication_factor, config))
        self._answer("create")

    def _answer(self, request: str) -> Any:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, (int, KafkaError)):
            raise KafkaException(KafkaError(answer) if isinstance(answer, int) else answer)
        return answer


def admin(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> tuple[TopicAdmin, TopicClient]:
    client = TopicClient(list(answers))
    monkeypatch.setattr(topic_admin, "AdminClient", client)
    return TopicAdmin({"bootstrap.servers": "b:9092", "group.id": "not for an admin client"}), client


def described(*leaders: int) -> Topic:
    return Topic("id-1", tuple(Partition(number, leader) for number, leader in enumerate(leaders)))


def in_seconds(seconds: float = 10.0) -> Deadline:
    return Deadline.after_seconds(seconds)


def test_describe_returns_partitions_and_topic_id(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = admin(monkeypatch, described(1, 2))
    assert found.shape("t", in_seconds()) == TopicShape(2, True, "id-1")


def test_a_missing_topic_is_reported_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = admin(monkeypatch, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert found.shape("t", in_seconds()) is None
    assert client.requests == ["describe"]


def test_a_transient_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = admin(monkeypatch, KafkaError._TRANSPORT, KafkaError.NOT_CONTROLLER, described(1))
    assert found.shape("t", in_seconds()) == TopicShape(1, True, "id-1")
    assert len(client.requests) == 3


def test_the_error_without_a_broker_contains_the_clients_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "check_reachable", lambda *_, **__: "")
    found, _ = admin(monkeypatch, KafkaError(KafkaError._TIMED_OUT, "no such host b"))
    with pytest.raises(UnavailableError, match=r"'b:9092'.*topic 't': no such host b"):
        found.shape("t", in_seconds(0.1))


def test_a_refused_login_fails_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = admin(monkeypatch, KafkaError(KafkaError._AUTHENTICATION, "bad password"))
    with pytest.raises(AuthorizationError, match="credentials"):
        found.shape("t", in_seconds())
    assert len(client.requests) == 1


def test_a_topic_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = admin(monkeypatch, None)
    assert found.create("t", 3, -1, {"cleanup.policy": "compact"}, in_seconds())
    assert client.made == [("t", 3, -1, {"cleanup.policy": "compact"})]


def test_a_topic_that_another_process_created_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = admin(monkeypatch, KafkaError.REQUEST_TIMED_OUT, KafkaError.TOPIC_ALREADY_EXISTS)
    assert not found.create("t", 3, -1, {}, in_seconds())


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED]
)
def test_the_error_names_the_missing_right_to_create_topics(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    found, _ = admin(monkeypatch, code)
    with pytest.raises(AuthorizationError, match="grant the principal Create on topic 't'"):
        found.create("t", 3, -1, {}, in_seconds())


def test_the_error_names_the_missing_right_to_describe_configurations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = admin(monkeypatch, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(AuthorizationError, match="DescribeConfigs on topic 't'"):
        found.config("t", in_seconds())


def test_a_topic_that_the_cluster_cannot_create_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = admin(monkeypatch, KafkaError.INVALID_REPLICATION_FACTOR)
    with pytest.raises(OperatorError, match=r"creating topic 't'.*INVALID_REPLICATION_FACTOR"):
        found.create("t", 3, 5, {}, in_seconds())


def test_a_new_topic_is_waited_for_until_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
    found, client = admin(monkeypatch, unknown, described(1, -1), described(-1, -1), described(1, 1))
    assert found.await_led("t", in_seconds()).led
    assert len(client.requests) == 4


@pytest.mark.parametrize(
    ("answer", "seen"),
    [(KafkaError.UNKNOWN_TOPIC_OR_PART, "no broker knows it"), (described(-1), "has no leader")],
)
def test_the_wait_for_a_new_topic_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, seen: str
) -> None:
    found, _ = admin(monkeypatch, answer)
    with pytest.raises(UnavailableError, match=seen):
        found.await_led("t", in_seconds(0.1))
