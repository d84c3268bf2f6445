"""Each Kafka error code becomes the error class that names the right next action."""

from __future__ import annotations

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
from kafka_eos_source.kafka.failure import classify, is_transient, unreachable


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


def test_an_authorization_error_names_the_right_to_grant() -> None:
    got = classify(error(KafkaError.GROUP_AUTHORIZATION_FAILED), "committing offsets of group 'g'")
    assert "'g'" in str(got)
    assert "consumer group (Read;" in got.fix
    assert "kafka-eos acls" in got.fix


def test_transient_errors_are_recognised_in_exceptions() -> None:
    assert is_transient(KafkaException(error(KafkaError.UNSTABLE_OFFSET_COMMIT)))
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
