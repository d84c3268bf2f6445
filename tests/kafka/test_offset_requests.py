"""How the offsets of a transaction are split over requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import AbortableError, AuthorizationError, OperatorError
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import named_partitions
from kafka_eos_source.kafka.group import LIMIT_BYTES, record_bytes, send_in_parts, split
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Mark
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import Fault, SimulatedKafka

#: Partitions of the mock cluster's topic; creating more takes time.
PARTITIONS = 300
MARK = Mark("0123456789ab", 1_000_000).encode()
OFFSETS = st.lists(
    st.builds(
        GroupOffset,
        st.builds(TopicPartition, st.text(max_size=20), st.integers(0, 10**6)),
        st.integers(0, 2**62),
        st.text(max_size=400),
    ),
    max_size=50,
)


def offsets(count: int, metadata: str = MARK) -> list[GroupOffset]:
    return [GroupOffset(TopicPartition("topic", number), number, metadata) for number in range(count)]


@given(OFFSETS, st.text(max_size=50), st.integers(1, 5000))
def test_every_offset_is_in_one_request_in_order(
    wanted: list[GroupOffset], group_id: str, limit_bytes: int
) -> None:
    requests = list(split(wanted, group_id, limit_bytes))
    assert [each for request in requests for each in request] == wanted
    for request in requests:
        size = sum(record_bytes(each, group_id) for each in request)
        assert len(request) == 1 or 0 < size <= limit_bytes
    for request, following in pairwise(requests):
        both = [*request, following[0]]
        assert sum(record_bytes(each, group_id) for each in both) > limit_bytes, (
            "no more requests than needed"
        )


@given(st.text(max_size=100), st.text(max_size=249), st.text(max_size=4096))
def test_an_encoded_offset_is_not_larger_than_its_estimate(group_id: str, topic: str, metadata: str) -> None:
    """Kafka's format: an OffsetCommitKey and an OffsetCommitValue (version 4, with a topic id)."""
    key = 2 + 2 + len(group_id.encode()) + 2 + len(topic.encode()) + 4
    # the value ends with a null byte that librdkafka adds, and with an empty section of tagged fields
    value = 2 + 8 + 4 + 3 + len(metadata.encode()) + 1 + 8 + 16 + 1
    widest_header = 3 + 1 + 2 + 3 + 2 + 2 + 1
    assert record_bytes(GroupOffset(TopicPartition(topic, 1), 1, metadata), group_id) >= (
        key + value + widest_header
    )


def test_a_micro_batch_of_usual_size_takes_one_request() -> None:
    assert len(list(split(offsets(3000), "application"))) == 1
    assert len(list(split(offsets(10_000), "application"))) == 3


def test_no_offsets_take_no_request() -> None:
    assert list(split([], "application")) == []


@pytest.fixture
def cluster() -> Iterator[SimulatedKafka]:
    with SimulatedKafka({"topic": PARTITIONS}) as made:
        yield made


@pytest.fixture
def producer_in_transaction(cluster: SimulatedKafka) -> Iterator[TransactionalProducer]:
    producer = TransactionalProducer(
        producer_config({"bootstrap.servers": cluster.bootstrap}, transactional_id="app")
    )
    producer.init(deadline_soon())
    producer.begin()
    yield producer
    producer.close()


def deadline_soon() -> Deadline:
    return Deadline.after_seconds(20)


def test_the_producer_sends_many_offsets_in_several_requests(
    cluster: SimulatedKafka, producer_in_transaction: TransactionalProducer
) -> None:
    wanted = offsets(PARTITIONS, "t" * 4000)
    producer_in_transaction.send_offsets(wanted, "app", deadline_soon())
    assert cluster.received["TxnOffsetCommit"] == len(list(split(wanted, "app"))) == 3
    producer_in_transaction.commit(deadline_soon())
    assert cluster.received["EndTxn"] == 1


def refuse_offsets(cluster: SimulatedKafka, code: int) -> None:
    cluster.fault = lambda kind: Fault("error", code) if kind == "TxnOffsetCommit" else None


def refused_with(code: int) -> Callable[[Collection[GroupOffset], str, Deadline], None]:
    def send(_offsets: Collection[GroupOffset], _group_id: str, _deadline: Deadline) -> None:
        failure = KafkaError(code)
        raise AbortableError("refused") from failure

    return send


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1000", OperatorError), (str(LIMIT_BYTES), AbortableError), (None, AbortableError)],
)
def test_a_refusal_without_a_reason_is_explained_by_the_coordinators_limit(
    limit: str | None, expected: type[Exception]
) -> None:
    def topic_property(topic: str, name: str, _deadline: Deadline) -> str:
        assert (topic, name) == ("__consumer_offsets", "max.message.bytes")
        if limit is None:
            raise AuthorizationError("the principal may not describe the topic")
        return limit

    with pytest.raises(expected) as caught:
        send_in_parts(
            topic_property, offsets(100), "app", deadline_soon(), refused_with(ErrorCode.UNKNOWN_SERVER_ERROR)
        )
    assert type(caught.value) is expected
    assert ("max.message.bytes=1000" in str(caught.value)) == (expected is OperatorError)


def test_a_refusal_with_a_reason_is_raised_unchanged() -> None:
    def topic_property(*_: object) -> str:
        raise AssertionError("nobody needs it")

    send = refused_with(ErrorCode.TRANSACTION_ABORTABLE)
    with pytest.raises(AbortableError) as caught:
        send_in_parts(topic_property, offsets(100), "app", deadline_soon(), send)
    assert isinstance(caught.value.__cause__, KafkaError)


def test_an_error_about_thousands_of_partitions_names_a_few() -> None:
    partitions = [each.tp for each in offsets(10_000)]
    assert named_partitions(partitions[:2]) == "topic-0, topic-1"
    assert (
        named_partitions(reversed(partitions)) == "topic-0, topic-1, topic-2, topic-3, topic-4 and 9,995 more"
    )
