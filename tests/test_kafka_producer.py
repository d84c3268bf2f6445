"""The producer's fast path, its routing by topic, and the rule that decides whether it is clean."""

from __future__ import annotations

import ctypes
import json
import threading

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import FencedError, InvalidOptionError, KafkaEosError
from kafka_eos_source.kafka import librdkafka
from kafka_eos_source.kafka import producer as module
from kafka_eos_source.kafka.native import client_pointer, end_poll, function
from kafka_eos_source.kafka.producer import RecordProducer, _needs_produceva, by_topic
from kafka_eos_source.kafka.transactional import Traffic, TransactionalProducer
from kafka_eos_source.runtime.deadline import Deadline

_BYTES = st.lists(st.none() | st.binary(max_size=20), max_size=30)


def at(address: int, length: int) -> bytes | None:
    """Returns what the client will read at a message's address."""
    return None if address == 0 else ctypes.string_at(address, length)


@given(_BYTES, st.integers(0, 5), st.integers(0, 30))
def test_every_message_points_at_its_bytes(values: list[bytes | None], start: int, length: int) -> None:
    """A null is NULL and an empty value is not; slices of an array point at the right bytes."""
    array = pa.array(values, pa.binary()).slice(start, length)
    batch = librdkafka.messages(array, array, None)
    wanted = values[start : start + length]
    assert [at(int(m["payload"]), int(m["len"])) for m in batch] == wanted
    assert [at(int(m["key"]), int(m["key_len"])) for m in batch] == wanted
    assert set(batch["partition"].tolist()) <= {librdkafka.PARTITION_UNASSIGNED}


def test_messages_carry_the_partitions_of_rows_and_no_keys() -> None:
    values = pa.array([b"a", b"b", b"c"])
    batch = librdkafka.messages(None, values, pa.array([2, None, 0], pa.int32()))
    assert batch["partition"].tolist() == [2, librdkafka.PARTITION_UNASSIGNED, 0]
    assert batch["key"].tolist() == [0, 0, 0]
    assert librdkafka.MESSAGE.itemsize == 72


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_rows_of_each_topic_keep_their_order(topics: list[str]) -> None:
    columns = {"topic": pa.array(topics), "value": pa.array(list(range(len(topics))))}
    found = {topic: part["value"].to_pylist() for topic, part in by_topic(columns, None)}
    assert found == {
        topic: [index for index, each in enumerate(topics) if each == topic] for topic in set(topics)
    }


def test_with_the_topic_option_all_rows_go_to_one_topic() -> None:
    columns = {"value": pa.array([b"a"])}
    assert list(by_topic(columns, "t")) == [("t", columns)]


def test_only_headers_and_timestamps_leave_the_fast_path() -> None:
    value = pa.array([b"a"])
    assert not _needs_produceva({"value": value})
    assert not _needs_produceva({"value": value, "timestamp": pa.nulls(1, pa.int64())})
    assert _needs_produceva({"value": value, "timestamp": pa.array([5])})


def statistics(ts: int, *brokers: tuple[int, int, int, int]) -> str:
    return json.dumps(
        {
            "ts": ts,
            "brokers": {
                str(index): {
                    "req": {"EndTxn": commits, "Produce": 9},
                    "txretries": retries,
                    "req_timeouts": timeouts,
                    "disconnects": disconnects,
                }
                for index, (commits, retries, timeouts, disconnects) in enumerate(brokers)
            },
        }
    )


BEFORE = Traffic.parse(statistics(1, (3, 1, 0, 2), (0, 0, 0, 0)))


def test_one_commit_answered_at_the_first_try_is_clean() -> None:
    assert Traffic.parse(statistics(2, (4, 1, 0, 2), (0, 0, 0, 0))).clean_since(BEFORE)
    assert Traffic.parse(statistics(2, (3, 1, 0, 2), (1, 0, 0, 0))).clean_since(BEFORE)


@pytest.mark.parametrize(
    "after",
    [
        [(5, 1, 0, 2), (0, 0, 0, 0)],  # two EndTxn requests for one commit: an answer was lost
        [(3, 1, 0, 2), (0, 0, 0, 0)],  # no EndTxn at all, so something else committed
        [(4, 2, 0, 2), (0, 0, 0, 0)],  # a retry
        [(4, 1, 1, 2), (0, 0, 0, 0)],  # a timeout
        [(4, 1, 0, 2), (0, 0, 0, 1)],  # a connection was cut, even another broker's
    ],
)
def test_a_commit_with_any_other_statistics_is_not_clean(after: list[tuple[int, int, int, int]]) -> None:
    assert not Traffic.parse(statistics(2, *after)).clean_since(BEFORE)


def test_a_producer_that_has_not_committed_is_not_clean() -> None:
    producer = TransactionalProducer({"bootstrap.servers": "127.0.0.1:1", "transactional.id": "t"})
    try:
        assert not producer.is_clean()
    finally:
        producer.close()


def test_end_poll_ends_a_poll_that_waits_and_one_that_begins_later() -> None:
    client = Producer({})  # without a broker, no event ends the poll

    def poll() -> None:
        function("rd_kafka_poll", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(client_pointer(client), 60_000)

    for begins_later in (True, False):
        if begins_later:
            end_poll(client)
        polling = threading.Thread(target=poll, daemon=True)
        polling.start()
        if not begins_later:
            end_poll(client)
        polling.join(30)
        assert not polling.is_alive(), f"{begins_later=}"


def test_closing_a_producer_ends_the_poll_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it waits for a tenth of a second, which the start of a query pays before its first batch."""
    ended: list[bool] = []
    monkeypatch.setattr(module, "end_poll", lambda client: (end_poll(client), ended.append(True)))
    RecordProducer({}, "test").close()
    assert ended


def test_contradicting_producer_properties_are_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"message\.timeout\.ms"):
        TransactionalProducer(
            {
                "bootstrap.servers": "127.0.0.1:1",
                "transactional.id": "t",
                "transaction.timeout.ms": 1000,
                "message.timeout.ms": 5000,
            }
        )


def test_a_producer_with_unsent_records_can_close() -> None:
    producer = RecordProducer({"bootstrap.servers": "127.0.0.1:1"}, "test")
    producer.begin_count()
    rows = pa.record_batch({"value": pa.array([b"a", None, b""], pa.binary())})
    producer.send(rows, "t", Deadline.after_seconds(5))
    assert producer.enqueued == 3
    producer.close()


@pytest.mark.parametrize("columns", [{}, {"timestamp": pa.array([5])}], ids=["plain", "timestamp"])
def test_without_a_transaction_a_lost_record_fails_the_flush(columns: dict[str, pa.Array]) -> None:
    """Without a transaction, a record that no broker accepts in time makes `flush` fail."""
    config = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 100, "log_level": 0}
    producer = RecordProducer(config, "test")
    try:
        producer.begin_count()
        producer.send(pa.record_batch({"value": pa.array([b"a"]), **columns}), "t", Deadline.after_seconds(5))
        with pytest.raises(KafkaEosError, match="_MSG_TIMED_OUT"):
            producer.flush(Deadline.after_seconds(30))
    finally:
        producer.close()


def test_a_fatal_error_is_raised_whichever_thread_receives_it() -> None:
    """A fatal error is reported whether `flush` or the polling thread receives it first."""
    for _ in range(20):
        producer = RecordProducer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "test")
        try:
            fail = function(
                "rd_kafka_test_fatal_error", ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
            )
            producer.begin_count()
            rows = pa.record_batch({"value": pa.array([b"a"])})
            producer.send(rows, "t", Deadline.after_seconds(5))
            fail(client_pointer(producer._client), KafkaError._FENCED, b"test")
            with pytest.raises(FencedError):
                producer.flush(Deadline.after_seconds(30))
            assert producer._poller.is_alive()
        finally:
            producer.close()
