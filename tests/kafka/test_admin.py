"""How `SourceAdmin` treats incomplete answers, and `TopicAdmin` each answer of a scripted cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.errors import AuthorizationError, OperatorError, UnavailableError
from kafka_eos_source.kafka import admin, admin_client, cluster, topic_admin
from kafka_eos_source.kafka.admin_client import Partition, Topic
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.topic_admin import TopicAdmin, TopicShape
from kafka_eos_source.model import LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import Fault, SimulatedKafka

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
            raise offset
        return dict.fromkeys(times, LogEnd(offset))

    def topics(self, names: Any, seconds: float) -> dict[str, Topic | KafkaError]:
        answer = self._next()
        if isinstance(answer, str):
            return {"t": Topic(answer, ())}
        if answer.code == ErrorCode.NO_ANSWER:
            raise answer
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


TIMED_OUT = KafkaError(ErrorCode.NO_ANSWER)


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


MISSING = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
HIDDEN = KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)


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


_ENDS = """
import sys, threading, time
from pathlib import Path
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.runtime.deadline import Deadline

def ask():
    while True:
        try:
            SourceAdmin({"bootstrap.servers": sys.argv[1]}, "read_committed", 3, 10).named(["t"])
            GroupOffsets({"bootstrap.servers": sys.argv[1]}).members("g", Deadline.after_seconds(5))
        except Exception as error:
            print(type(error).__name__)

for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(float(sys.argv[2]))
names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
print("threads of librdkafka:", sum(name.startswith("rdk") for name in names))
sys.exit(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
@pytest.mark.parametrize("fault", ["", "silent", "cut"])
def test_a_process_may_end_while_a_thread_administers(fault: str) -> None:
    """Threads of a native client would call Python while the interpreter ends: the process once crashed."""
    with SimulatedKafka({"t": 1}) as cluster:
        if fault == "silent":
            cluster.hung.add(1)
        elif fault:
            cluster.fault = lambda kind: Fault("cut") if kind == "Metadata" else None
        ended = subprocess.run(
            [sys.executable, "-c", _ENDS, cluster.bootstrap, "1.5"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1, ended.stderr
    assert "threads of librdkafka: 0" in ended.stdout


# -- topics of this package

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
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        config: Mapping[str, str],
        seconds: float,
        *,
        is_retry: bool,
    ) -> None:
        assert is_retry == ("create" in self.requests)
        self.made.append((name, partitions, replication_factor, config))
        self._answer("create")

    def _answer(self, request: str) -> Any:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, (int, KafkaError)):
            raise KafkaError(answer) if isinstance(answer, int) else answer
        return answer


def topics(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> tuple[TopicAdmin, TopicClient]:
    client = TopicClient(list(answers))
    monkeypatch.setattr(topic_admin, "AdminClient", client)
    return TopicAdmin({"bootstrap.servers": "b:9092", "group.id": "not for an admin client"}), client


def described(*leaders: int) -> Topic:
    return Topic("id-1", tuple(Partition(number, leader) for number, leader in enumerate(leaders)))


def in_seconds(seconds: float = 10.0) -> Deadline:
    return Deadline.after_seconds(seconds)


def test_describe_returns_partitions_and_topic_id(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = topics(monkeypatch, described(1, 2))
    assert found.shape("t", in_seconds()) == TopicShape(2, True, "id-1")


def test_a_missing_topic_is_reported_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = topics(monkeypatch, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert found.shape("t", in_seconds()) is None
    assert client.requests == ["describe"]


def test_a_transient_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = topics(monkeypatch, ErrorCode.CONNECTION_FAILED, ErrorCode.NOT_CONTROLLER, described(1))
    assert found.shape("t", in_seconds()) == TopicShape(1, True, "id-1")
    assert len(client.requests) == 3


def test_the_error_without_a_broker_contains_the_clients_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "check_reachable", lambda *_, **__: "")
    found, _ = topics(monkeypatch, KafkaError(ErrorCode.NO_ANSWER, "no such host b"))
    with pytest.raises(UnavailableError, match=r"'b:9092'.*topic 't': no such host b"):
        found.shape("t", in_seconds(0.1))


def test_a_refused_login_fails_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = topics(monkeypatch, KafkaError(ErrorCode.SASL_AUTHENTICATION_FAILED, "bad password"))
    with pytest.raises(AuthorizationError, match="credentials"):
        found.shape("t", in_seconds())
    assert len(client.requests) == 1


def test_a_topic_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    found, client = topics(monkeypatch, None)
    assert found.create("t", 3, -1, {"cleanup.policy": "compact"}, in_seconds())
    assert client.made == [("t", 3, -1, {"cleanup.policy": "compact"})]


def test_a_topic_that_another_process_created_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = topics(monkeypatch, ErrorCode.TOPIC_ALREADY_EXISTS)
    assert not found.create("t", 3, -1, {}, in_seconds())


def created(monkeypatch: pytest.MonkeyPatch, *codes: int, is_retry: bool) -> list[int]:
    """Asks a scripted controller to create a topic; returns the answers that are left."""
    left = list(codes)

    class Controller(cluster.Cluster):
        def metadata(self, *_: object) -> Any:
            return SimpleNamespace(controller_id=1)

        def broker(self, *_: object) -> Any:
            return SimpleNamespace(version=lambda *_: 4)

        def ask(self, *_: object) -> Any:
            code = left.pop(0)
            if code == ErrorCode.CONNECTION_FAILED:
                raise cluster.TemporaryError("the connection was lost after the request was sent")
            return SimpleNamespace(topics=[SimpleNamespace(name="t", error_code=code, error_message=None)])

    monkeypatch.setattr(admin_client, "Cluster", Controller)
    client = admin_client.AdminClient({"bootstrap.servers": "b:9092"})
    client.create_topic("t", 3, -1, {}, 10.0, is_retry=is_retry)
    return left


def test_a_topic_that_exists_after_a_lost_answer_counts_as_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, ``kafka-eos flights`` refused the topic that it had created itself."""
    exists = ErrorCode.TOPIC_ALREADY_EXISTS
    assert created(monkeypatch, ErrorCode.CONNECTION_FAILED, exists, is_retry=False) == []
    assert created(monkeypatch, exists, is_retry=True) == []
    with pytest.raises(KafkaError, match="TOPIC_ALREADY_EXISTS"):
        created(monkeypatch, exists, is_retry=False)


@pytest.mark.parametrize(
    "code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED]
)
def test_the_error_names_the_missing_right_to_create_topics(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    found, _ = topics(monkeypatch, code)
    with pytest.raises(AuthorizationError, match="grant the principal Create on topic 't'"):
        found.create("t", 3, -1, {}, in_seconds())


def test_the_error_names_the_missing_right_to_describe_configurations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = topics(monkeypatch, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(AuthorizationError, match="DescribeConfigs on topic 't'"):
        found.config("t", in_seconds())


def test_a_topic_that_the_cluster_cannot_create_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = topics(monkeypatch, ErrorCode.INVALID_REPLICATION_FACTOR)
    with pytest.raises(OperatorError, match=r"creating topic 't'.*INVALID_REPLICATION_FACTOR"):
        found.create("t", 3, 5, {}, in_seconds())


def test_a_new_topic_is_waited_for_until_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    found, client = topics(monkeypatch, unknown, described(1, -1), described(-1, -1), described(1, 1))
    assert found.await_led("t", in_seconds()).led
    assert len(client.requests) == 4


@pytest.mark.parametrize(
    ("answer", "seen"),
    [(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no broker knows it"), (described(-1), "has no leader")],
)
def test_the_wait_for_a_new_topic_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, seen: str
) -> None:
    found, _ = topics(monkeypatch, answer)
    with pytest.raises(UnavailableError, match=seen):
        found.await_led("t", in_seconds(0.1))
