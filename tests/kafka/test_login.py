"""A refused login is an error at once, unless the credentials worked before in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import AuthorizationError, OperatorError
from kafka_eos_source.kafka.admin_client import Complaints, request
from kafka_eos_source.runtime.deadline import Deadline

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
