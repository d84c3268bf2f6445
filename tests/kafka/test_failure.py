"""Each Kafka error code becomes the error class that names the right next action."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.admin_client import Complaints, request
from kafka_eos_source.kafka.failure import classify, is_transient, unreachable
from kafka_eos_source.runtime.deadline import Deadline


def error(code: int, *, retriable: bool = False) -> KafkaError:
    return KafkaError(code, "said so", False, retriable, False)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (error(KafkaError.PRODUCER_FENCED), FencedError),
        (error(KafkaError.INVALID_PRODUCER_EPOCH), FencedError),
        (error(KafkaError.TOPIC_AUTHORIZATION_FAILED), AuthorizationError),
        (error(KafkaError.GROUP_AUTHORIZATION_FAILED), AuthorizationError),
        (error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), AuthorizationError),
        (error(KafkaError.MSG_SIZE_TOO_LARGE), InvalidRecordError),
        (error(KafkaError.INVALID_TRANSACTION_TIMEOUT), InvalidOptionError),
        (error(KafkaError.UNKNOWN_TOPIC_OR_PART), UnavailableError),
        (error(KafkaError._TIMED_OUT), RetriableError),
        (error(KafkaError.UNKNOWN, retriable=True), RetriableError),
        (error(KafkaError._MSG_TIMED_OUT), UnavailableError),
        (error(KafkaError.UNKNOWN), OperatorError),
    ],
)
def test_each_kafka_error_maps_to_the_class_of_its_next_action(
    failure: KafkaError, expected: type[KafkaEosError]
) -> None:
    got = classify(KafkaException(failure), "writing to topic 't'")
    assert type(got) is expected
    assert "writing to topic 't'" in str(got)
    assert failure.name() in str(got)


@pytest.mark.parametrize(
    ("code", "names", "not_this"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, "max.message.bytes", "timestamp"),
        (KafkaError.RECORD_LIST_TOO_LARGE, "max.message.bytes", "timestamp"),
        (KafkaError.INVALID_TIMESTAMP, "message.timestamp.after.max.ms", "max.message.bytes"),
        (KafkaError.INVALID_RECORD, "give each record a key", "max.message.bytes"),
        (KafkaError.INVALID_REPLICATION_FACTOR, "as the cluster has brokers", "max.message.bytes"),
        (KafkaError.POLICY_VIOLATION, "create.topic.policy.class.name", "max.message.bytes"),
    ],
)
def test_a_refused_record_or_topic_is_answered_with_what_mends_it(
    code: int, names: str, not_this: str
) -> None:
    got = classify(error(code), "writing to topic 't'")
    assert names in got.fix
    assert not_this not in got.fix


def test_an_authorization_error_names_the_right_to_grant() -> None:
    got = classify(error(KafkaError.GROUP_AUTHORIZATION_FAILED), "committing offsets of group 'g'")
    assert "'g'" in str(got)
    assert "consumer group (Read;" in got.fix
    assert "kafka-eos acls" in got.fix


def test_transient_errors_are_recognised_in_exceptions() -> None:
    assert is_transient(KafkaException(error(KafkaError.UNSTABLE_OFFSET_COMMIT)))
    assert is_transient(error(KafkaError.THROTTLING_QUOTA_EXCEEDED))  # CreateTopics 6, DeleteTopics 5
    assert not is_transient(error(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.mark.parametrize(
    "code",
    [KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE],
)
def test_errors_of_a_moving_leader_are_retriable(code: int) -> None:
    """librdkafka does not flag these errors as retriable."""
    assert is_transient(error(code))
    assert not isinstance(classify(error(code), "test"), FencedError), (
        "this error fences a partition's leader, not the producer"
    )


def test_a_request_to_a_broker_that_shut_down_is_retriable() -> None:
    """librdkafka removes a broker that left the metadata; confluent-kafka names the code since 2.10."""
    code = getattr(KafkaError, "_DESTROY_BROKER", -137)
    assert is_transient(error(code))
    assert type(classify(error(code), "test")) is RetriableError


def test_the_error_of_unreachable_brokers_names_the_option_its_value_and_the_wait() -> None:
    got = unreachable("nowhere:9092", 15_000, "Connection refused")
    assert "kafka.bootstrap.servers='nowhere:9092'" in str(got)
    assert "15 s" in str(got)
    assert "Connection refused" in str(got)


# -- refused logins

PASSWORD = "swordfish-77"
CONFIG = {
    "bootstrap.servers": "b:9092",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "sink",
    "sasl.password": PASSWORD,
}
REFUSED = KafkaError(KafkaError._AUTHENTICATION, f"Authentication failed for {PASSWORD}")
TIMED_OUT = KafkaError(KafkaError._TIMED_OUT)


class Asked:
    """A request that gives these answers; the client reports a refused login before each error."""

    def __init__(
        self, complaints: Complaints, *answers: KafkaError | str, report: KafkaError = REFUSED
    ) -> None:
        self.complaints, self.answers, self.report = complaints, list(answers), report
        self.tries = 0

    def __call__(self, _seconds: float) -> str:
        self.tries += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            return answer
        self.complaints.record(self.report)
        raise KafkaException(answer)


def ask(complaints: Complaints, send: Callable[[float], str], seconds: float = 60.0) -> str:
    deadline = Deadline.after_seconds(seconds)
    return request("reading offsets", send, deadline, complaints, "b:9092", pause_seconds=0.001)


@pytest.mark.parametrize("code", [TIMED_OUT, REFUSED])
def test_credentials_that_never_worked_fail_at_once(code: KafkaError) -> None:
    send = Asked(complaints := Complaints(CONFIG), code)
    with pytest.raises(AuthorizationError) as caught:
        ask(complaints, send)
    assert send.tries == 1
    text = str(caught.value)
    for named in ("reading offsets", "'b:9092'", "SASL_SSL", "SCRAM-SHA-512", "kafka.sasl.password"):
        assert named in text
    assert PASSWORD not in text
    assert isinstance(caught.value, OperatorError), "a person has to act"


def test_credentials_that_worked_are_tried_until_the_deadline() -> None:
    ask(first := Complaints(CONFIG), Asked(first, "answer"))
    # another client of the process, as for each request of GroupOffsets
    send = Asked(complaints := Complaints(CONFIG), TIMED_OUT, REFUSED, TIMED_OUT, "answer")
    assert ask(complaints, send) == "answer"
    assert send.tries == 4
    with pytest.raises(AuthorizationError, match="Authentication failed") as caught:
        ask(complaints, Asked(complaints, TIMED_OUT), seconds=0.05)
    assert "If the credentials were changed, restart the query" in caught.value.fix


def test_other_credentials_have_not_worked() -> None:
    ask(first := Complaints(CONFIG), Asked(first, "answer"))
    for other in ({"sasl.password": "other"}, {"ssl.ca.location": "/ca"}, {"bootstrap.servers": "c:9092"}):
        send = Asked(complaints := Complaints({**CONFIG, **other}), TIMED_OUT)
        with pytest.raises(AuthorizationError):
            ask(complaints, send)
        assert send.tries == 1


def test_a_refusal_before_an_answer_is_not_the_reason_of_a_later_time_out() -> None:
    complaints = Complaints(CONFIG)
    complaints.record(REFUSED)
    complaints.answered()
    assert complaints.login_error("x") is None


@pytest.mark.parametrize(
    ("config", "report", "fix"),
    [
        (
            {"security.protocol": "SSL"},
            KafkaError(KafkaError._SSL, "SSL handshake failed"),
            "kafka.ssl.ca.location",
        ),
        ({"sasl.mechanism": "OAUTHBEARER"}, REFUSED, "kafka.sasl.oauthbearer"),
        ({"sasl.mechanism": "GSSAPI"}, REFUSED, "kafka.sasl.kerberos"),
    ],
)
def test_the_option_to_check_is_named(config: dict[str, str], report: KafkaError, fix: str) -> None:
    send = Asked(complaints := Complaints({**CONFIG, **config}), TIMED_OUT, report=report)
    with pytest.raises(AuthorizationError) as caught:
        ask(complaints, send)
    assert fix in caught.value.fix
    assert ("sasl.mechanism" in caught.value.message) == (config.get("security.protocol") != "SSL")
