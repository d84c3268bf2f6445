"""Each Kafka error code becomes the error class that names the right next action."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import confluent_kafka
import kafka.errors
import pytest

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
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import classify, is_transient, unreachable
from kafka_eos_source.runtime.deadline import Deadline


def error(code: int) -> KafkaError:
    return KafkaError(code, "said so")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (error(ErrorCode.PRODUCER_FENCED), FencedError),
        (error(ErrorCode.INVALID_PRODUCER_EPOCH), FencedError),
        (error(ErrorCode.TOPIC_AUTHORIZATION_FAILED), AuthorizationError),
        (error(ErrorCode.GROUP_AUTHORIZATION_FAILED), AuthorizationError),
        (error(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), AuthorizationError),
        (error(ErrorCode.MESSAGE_TOO_LARGE), InvalidRecordError),
        (error(ErrorCode.INVALID_TRANSACTION_TIMEOUT), InvalidOptionError),
        (error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), UnavailableError),
        (error(ErrorCode.NO_ANSWER), RetriableError),
        (error(ErrorCode.CONNECTION_FAILED), RetriableError),
        (error(9999), OperatorError),  # of a newer broker
        (error(ErrorCode.UNKNOWN_SERVER_ERROR), OperatorError),
    ],
)
def test_each_kafka_error_maps_to_the_class_of_its_next_action(
    failure: KafkaError, expected: type[KafkaEosError]
) -> None:
    got = classify(failure, "writing to topic 't'")
    assert type(got) is expected
    assert "writing to topic 't'" in str(got)
    assert failure.name in str(got)


@pytest.mark.parametrize(
    ("code", "names", "not_this"),
    [
        (ErrorCode.MESSAGE_TOO_LARGE, "max.message.bytes", "timestamp"),
        (ErrorCode.RECORD_LIST_TOO_LARGE, "max.message.bytes", "timestamp"),
        (ErrorCode.INVALID_TIMESTAMP, "message.timestamp.after.max.ms", "max.message.bytes"),
        (ErrorCode.INVALID_RECORD, "give each record a key", "max.message.bytes"),
        (ErrorCode.INVALID_REPLICATION_FACTOR, "as the cluster has brokers", "max.message.bytes"),
        (ErrorCode.POLICY_VIOLATION, "create.topic.policy.class.name", "max.message.bytes"),
    ],
)
def test_a_refused_record_or_topic_is_answered_with_what_mends_it(
    code: int, names: str, not_this: str
) -> None:
    got = classify(error(code), "writing to topic 't'")
    assert names in got.fix
    assert not_this not in got.fix


def test_an_authorization_error_names_the_right_to_grant() -> None:
    got = classify(error(ErrorCode.GROUP_AUTHORIZATION_FAILED), "committing offsets of group 'g'")
    assert "'g'" in str(got)
    assert "consumer group (Read;" in got.fix
    assert "kafka-eos acls" in got.fix


def test_transient_errors_are_recognised_in_exceptions() -> None:
    assert is_transient(error(ErrorCode.UNSTABLE_OFFSET_COMMIT))
    assert is_transient(error(ErrorCode.THROTTLING_QUOTA_EXCEEDED))  # CreateTopics 6, DeleteTopics 5
    assert not is_transient(error(ErrorCode.TOPIC_AUTHORIZATION_FAILED))


@pytest.mark.parametrize(
    "code",
    [ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH, ErrorCode.OFFSET_NOT_AVAILABLE],
)
def test_errors_of_a_moving_leader_are_retriable(code: int) -> None:
    assert is_transient(error(code))
    assert not isinstance(classify(error(code), "test"), FencedError), (
        "this error fences a partition's leader, not the producer"
    )


#: librdkafka's names that are not Kafka's.
_OTHER_NAMES = {
    "UNKNOWN": "UNKNOWN_SERVER_ERROR",
    "INVALID_MSG": "CORRUPT_MESSAGE",
    "UNKNOWN_TOPIC_OR_PART": "UNKNOWN_TOPIC_OR_PARTITION",
    "INVALID_MSG_SIZE": "INVALID_FETCH_SIZE",
    "NOT_LEADER_FOR_PARTITION": "NOT_LEADER_OR_FOLLOWER",
    "MSG_SIZE_TOO_LARGE": "MESSAGE_TOO_LARGE",
    "STALE_CTRL_EPOCH": "STALE_CONTROLLER_EPOCH",
    "TOPIC_EXCEPTION": "INVALID_TOPIC_EXCEPTION",
}


def test_the_table_of_codes_agrees_with_two_other_clients() -> None:
    theirs = {
        value: _OTHER_NAMES.get(name, name)
        for name, value in vars(confluent_kafka.KafkaError).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, int) and value
    }
    ours = {int(each): each.name for each in ErrorCode}
    assert len(theirs) > 100
    assert {code: ours.get(code) for code in theirs} == theirs
    assert {code for code in kafka.errors.kafka_errors if code} <= ours.keys()


def test_the_same_errors_are_temporary_as_for_another_client() -> None:
    theirs = {code for code, each in kafka.errors.kafka_errors.items() if each.retriable}
    ours = {code for code in ErrorCode if is_transient(KafkaError(code)) and code >= 0}
    assert {each.name for each in ours - theirs} == {"BROKER_NOT_AVAILABLE"}
    # a topic that brokers do not know may be new or gone: the caller knows how long it waits
    topics = {"UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID"}
    # `fetch` begins a new session; this client has no share sessions, and asks for no election
    sessions = {
        "FETCH_SESSION_ID_NOT_FOUND",
        "INVALID_FETCH_SESSION_EPOCH",
        "FETCH_SESSION_TOPIC_ID_ERROR",
        "SHARE_SESSION_NOT_FOUND",
        "INVALID_SHARE_SESSION_EPOCH",
        "ELECTION_NOT_NEEDED",
    }
    assert {ErrorCode(each).name for each in theirs - ours} == topics | sessions


def test_an_error_is_worded_by_the_broker_or_else_by_its_code() -> None:
    silent, worded = KafkaError(ErrorCode.REQUEST_TIMED_OUT), KafkaError(7, "the disk is slow")
    assert str(silent) == "request timed out (REQUEST_TIMED_OUT)"
    assert str(worded) == "the disk is slow (REQUEST_TIMED_OUT)"
    assert str(KafkaError(9999)) == "unknown error code 9999 (ERROR_9999)"
    for each in (silent, worded):  # tasks send errors to the driver
        copy = pickle.loads(pickle.dumps(each))
        assert (copy.code, copy.name, copy.text) == (each.code, each.name, each.text)


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
REFUSED = KafkaError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"Authentication failed for {PASSWORD}")
TIMED_OUT = KafkaError(ErrorCode.NO_ANSWER)


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
        raise answer


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
            KafkaError(ErrorCode.TLS_HANDSHAKE_FAILED, "SSL handshake failed"),
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
