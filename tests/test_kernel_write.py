"""The C kernel and its Python twin write the same records, with real clients on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int32, c_size_t, c_void_p
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_cluster import Api, MockCluster

from kafka_eos_source.errors import AuthorizationError, InvalidRecordError, KafkaEosError, UnavailableError
from kafka_eos_source.kafka import deliveries, kernel, librdkafka
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.native import function
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.native import loader
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.schema import HEADERS_ARROW, STAGED_ARROW

TOPIC, PARTITIONS = "out", 3

pytestmark = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)


@pytest.fixture(scope="module")
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        cluster.create_topic(TOPIC, PARTITIONS)
        yield cluster


class Log:
    """Reads with confluent-kafka what was written since the last call, by partition."""

    def __init__(self, mock: MockCluster) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": mock.bootstrap_servers, "group.id": "g", "fetch.wait.max.ms": 5}
        )
        self._consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])

    def next(self, count: int) -> dict[int, list[tuple[Any, ...]]]:
        found: dict[int, list[tuple[Any, ...]]] = {partition: [] for partition in range(PARTITIONS)}
        deadline = deadline_soon()
        while sum(map(len, found.values())) < count:
            assert not deadline.expired
            for message in self._consumer.consume(count - sum(map(len, found.values())), 0.05):
                assert message.error() is None
                found[message.partition()].append(
                    (message.key(), message.value(), message.headers(), message.timestamp())
                )
        return found

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture(scope="module")
def log(mock: MockCluster) -> Iterator[Log]:
    log = Log(mock)
    yield log
    log.close()


def producer(mock: MockCluster, kernels: bool, **properties: str) -> RecordProducer:
    """Returns a producer without transactions, which must report every failed delivery."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setattr(deliveries, "choice", lambda: kernel.Choice(None, "a test"))
        config = producer_config({"bootstrap.servers": mock.bootstrap_servers, **properties})
        made = RecordProducer(config, "test")
    assert made._reports_batches is kernels  # otherwise it sends all records one by one
    return made


@pytest.fixture(scope="module")
def both(mock: MockCluster) -> Iterator[Sequence[RecordProducer]]:
    made = [producer(mock, kernels) for kernels in (False, True)]
    yield made
    for each in made:
        each.close()


def deadline_soon() -> Deadline:
    return Deadline.after_seconds(30)


def written(by: RecordProducer, rows: pa.RecordBatch) -> None:
    by.check_partitions({TOPIC: -1}, deadline_soon())
    by.begin_count()
    by.send(rows, TOPIC, deadline_soon())
    by.flush(deadline_soon())
    assert by.enqueued == rows.num_rows


binaries = st.none() | st.binary(max_size=8) | st.just(b"x" * 3000)
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
entries = st.fixed_dictionaries({"key": names, "value": st.none() | st.binary(max_size=5)})
rows = st.fixed_dictionaries(
    {
        "key": binaries,
        "value": binaries,
        "partition": st.none() | st.integers(0, PARTITIONS - 1),
        "headers": st.none() | st.lists(entries, max_size=4),
        "timestamp": st.integers(1, 4_102_444_800_000),
    }
).map(lambda row: row if row["key"] is not None or row["partition"] is not None else {**row, "partition": 0})


def where(row: dict[str, Any]) -> int:
    return of_murmur2(row["key"], PARTITIONS) if row["partition"] is None else int(row["partition"])


def of_murmur2(key: bytes, partitions: int) -> int:
    """Computes partitions with librdkafka's own partitioner."""
    choose = function(
        "rd_kafka_msg_partitioner_murmur2", c_int32, c_void_p, c_char_p, c_size_t, c_int32, c_void_p, c_void_p
    )
    return int(choose(None, key, len(key), partitions, None, None))


@given(keys=st.lists(st.none() | st.binary(max_size=40), min_size=1), partitions=st.integers(1, 2**31 - 1))
def test_keys_are_placed_as_librdkafka_places_them(keys: list[bytes | None], partitions: int) -> None:
    rows = pa.array(keys, pa.binary())  # the array must outlive the messages
    batch = librdkafka.messages(rows, rows, None)
    librdkafka.place(batch, partitions)
    wanted = [-1 if key is None else of_murmur2(key, partitions) for key in keys]
    assert batch["partition"].tolist() == wanted


@given(st.lists(st.sampled_from([-1, 0, 1, 2, 32767, 32768, 2**31 - 1])))
def test_messages_are_grouped_by_partition_in_their_order(partitions: list[int]) -> None:
    batch = np.zeros(len(partitions), librdkafka.MESSAGE)
    batch["partition"], batch["offset"] = partitions, range(len(partitions))
    order = librdkafka.by_partition(batch)
    found = batch if order is None else batch[order]
    assert [(row["partition"], row["offset"]) for row in found] == sorted(
        (partition, number) for number, partition in enumerate(partitions)
    )


@given(drawn=st.lists(rows, min_size=1, max_size=20), start=st.integers(0, 3), more=st.booleans())
@settings(max_examples=60)
def test_kernel_and_twin_write_the_same_records(
    log: Log, both: Sequence[RecordProducer], drawn: list[dict[str, Any]], start: int, more: bool
) -> None:
    """``start`` takes a slice, whose buffers have an offset."""
    schema = pa.schema([STAGED_ARROW.field(name) for name in drawn[0] if more or name != "headers"])
    batch = pa.RecordBatch.from_pylist(drawn, schema).slice(min(start, len(drawn) - 1))
    found = []
    for each in both:
        written(each, batch)
        found.append(log.next(batch.num_rows))
    assert found[1] == found[0]
    wanted = drawn[min(start, len(drawn) - 1) :]
    for partition, records in found[1].items():
        mine = [row for row in wanted if partition == where(row)]
        assert [(key, value) for key, value, _, _ in records] == [(row["key"], row["value"]) for row in mine]
        assert [time for *_, (_, time) in records] == [row["timestamp"] for row in mine]


def test_a_null_timestamp_becomes_the_time_of_sending(log: Log, both: Sequence[RecordProducer]) -> None:
    batch = pa.record_batch(
        {
            "value": pa.array([b"a", b"b"]),
            "timestamp": pa.array([None, 5], pa.int64()),
            "partition": pa.array([0, 0], pa.int32()),
        }
    )
    for each in both:
        written(each, batch)
        (_, _, _, (_, sent)), (_, _, _, (_, given)) = log.next(2)[0]
        assert sent > 1_700_000_000_000
        assert given == 5


def test_a_null_list_of_headers_writes_no_headers(log: Log, both: Sequence[RecordProducer]) -> None:
    """A null list has no headers, although in Arrow it may cover entries of the child array."""
    entries = pa.array(
        [{"key": "hidden", "value": b"1"}, {"key": "a", "value": b"2"}], HEADERS_ARROW.value_type
    )
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), entries, type=HEADERS_ARROW, mask=pa.array([True, False])
    )
    batch = pa.record_batch(
        {"value": pa.array([b"a", b"b"]), "headers": lists, "partition": pa.array([0, 0], pa.int32())}
    )
    for each in both:
        written(each, batch)
        assert [headers for _, _, headers, _ in log.next(2)[0]] == [None, [("a", b"2")]]


@pytest.mark.parametrize("with_headers", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_the_producer_waits_while_its_queue_is_full(
    mock: MockCluster, log: Log, kernels: bool, with_headers: bool
) -> None:
    count = 500
    columns: dict[str, pa.Array] = {
        "value": pa.array([b"%d" % at for at in range(count)]),
        "partition": pa.array([0] * count, pa.int32()),
    }
    if with_headers:
        columns["headers"] = pa.array(
            [[{"key": "n", "value": b"%d" % at}] for at in range(count)], HEADERS_ARROW
        )
    small = producer(mock, kernels, **{"queue.buffering.max.messages": "50"})
    try:
        written(small, pa.record_batch(columns))
    finally:
        small.close()
    found = log.next(count)[0]
    assert [value for _, value, _, _ in found] == [b"%d" % at for at in range(count)]
    expected = [[("n", b"%d" % at)] if with_headers else None for at in range(count)]
    assert [headers for _, _, headers, _ in found] == expected


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("columns", [{}, {"timestamp": pa.array([5, 5])}], ids=["plain", "timestamp"])
def test_a_failed_delivery_is_reported_once(
    mock: MockCluster, log: Log, kernels: bool, columns: dict[str, pa.Array]
) -> None:
    batch = pa.record_batch(
        {"value": pa.array([b"a", b"b"]), "partition": pa.array([0, 1], pa.int32()), **columns}
    )
    failing, other = producer(mock, kernels), producer(mock, kernels)
    try:
        other.begin_count()
        failing.begin_count()
        mock.fail(Api.PRODUCE, *[KafkaError.TOPIC_AUTHORIZATION_FAILED] * 2)
        failing.send(batch, TOPIC, deadline_soon())
        with pytest.raises(AuthorizationError, match=f"writing records to '{TOPIC}'"):
            failing.flush(deadline_soon())
        mock.clear_failures(Api.PRODUCE)
        other.flush(deadline_soon())  # each client counts separately
        written(other, batch)
        found = log.next(2)
        assert [value for records in found.values() for _, value, _, _ in records] == [b"a", b"b"]
    finally:
        mock.clear_failures(Api.PRODUCE)
        failing.close()
        other.close()


@pytest.mark.parametrize("kernels", [False, True])
def test_a_record_that_is_too_large_is_named(mock: MockCluster, kernels: bool) -> None:
    small = producer(mock, kernels, **{"message.max.bytes": "2000"})
    batch = pa.record_batch({"value": pa.array([b"x" * 5000]), "timestamp": pa.array([5])})
    try:
        small.begin_count()
        with pytest.raises(InvalidRecordError, match=f"writing a record of 5,000 bytes to topic '{TOPIC}'"):
            small.send(batch, TOPIC, deadline_soon())
    finally:
        small.close()


@pytest.mark.parametrize("kernels", [False, True])
def test_a_client_whose_broker_is_gone_can_close(kernels: bool) -> None:
    """The records that it purges count as failed deliveries."""
    with MockCluster() as gone:
        lost = producer(gone, kernels)
    lost.begin_count()
    lost.send(
        pa.record_batch({"value": pa.array([b"a"]), "timestamp": pa.array([5])}), TOPIC, deadline_soon()
    )
    with pytest.raises((UnavailableError, KafkaEosError)):
        lost.flush(Deadline.after_seconds(0.5))
    lost.close()


def test_the_users_librdkafka_plugins_are_kept() -> None:
    mine = loader.load("kernel")._name
    assert deliveries.with_counter({"a": "b"}) == {"a": "b", "plugin.library.paths": mine}
    theirs = deliveries.with_counter({"plugin.library.paths": "monitoring"})
    assert theirs == {"plugin.library.paths": f"monitoring;{mine}"}
