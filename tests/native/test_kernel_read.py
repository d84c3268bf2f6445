"""What librdkafka's producer writes to librdkafka's mock cluster is read, value by value."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p

import numpy as np
import psutil
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    AuthorizationError,
    DataLossError,
    InvalidRecordError,
    UnavailableError,
)
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read import fetch
from kafka_eos_source.read.columns import Run, record_batch, record_batches
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from tests.support.mock_cluster import MockCluster, client_pointer, function

ALL = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")


@pytest.fixture(scope="module")
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster
        POOL.close()


@pytest.fixture(scope="module")
def writer(mock: MockCluster) -> Writer:
    return Writer(mock)


class Writer:
    """Writes to new topics, with raw requests for records that confluent-kafka cannot produce."""

    def __init__(self, mock: MockCluster) -> None:
        self._mock = mock
        self._client = Producer({"bootstrap.servers": mock.bootstrap_servers, "linger.ms": 0})
        self._topics = 0
        self._common: str | None = None
        self._end = 0

    def topic(self, partitions: int = 1) -> str:
        self._topics += 1
        name = f"t{self._topics}"
        self._mock.create_topic(name, partitions)
        return name

    def write(self, topic: str, records: Sequence[Record], partition: int = 0) -> None:
        for key, value, headers, timestamp in records:
            self._client.produce(topic, value, key, partition, headers=headers, timestamp=timestamp)
        assert self._client.flush(30) == 0

    def append(self, records: Sequence[Record]) -> OffsetRange:
        """Appends to one shared topic, because a new topic for each example costs a metadata request."""
        if self._common is None:
            self._common = self.topic()
        self.write(self._common, records)
        first, self._end = self._end, self._end + len(records)
        return OffsetRange(TopicPartition(self._common, 0), first, self._end)

    def write_raw_header(self, topic: str, name: bytes) -> None:
        """Writes a header whose name need not be UTF-8, which Kafka allows."""
        headers = function("rd_kafka_headers_new", c_void_p, c_size_t)(1)
        add = function("rd_kafka_header_add", c_int, c_void_p, c_char_p, c_int64, c_char_p, c_int64)
        assert add(headers, name, len(name), b"v", 1) == 0
        parts = [c_int(1), c_char_p(topic.encode()), c_int(3), c_int32(0), c_int(10), c_void_p(headers)]
        produce = function("rd_kafka_producev", c_int, c_void_p)
        assert produce(client_pointer(self._client), *parts, c_int(0)) == 0

    def flush(self) -> None:
        assert self._client.flush(30) == 0


Record = tuple[bytes | None, bytes | None, "list[tuple[str, bytes | None]] | None", int]


def conf(mock: MockCluster) -> dict[str, str]:
    ours = {
        "bootstrap.servers": mock.bootstrap_servers,
        "topic.metadata.propagation.max.ms": "1",
        "check.crcs": "false",  # the mock cluster writes control records without a checksum
    }
    return {**ours, "isolation.level": "read_committed"}


def read(
    mock: MockCluster,
    ranges: Sequence[OffsetRange],
    *,
    columns: tuple[str, ...] | None = None,
    fail_on_data_loss: bool = True,
    poll_timeout_ms: int = 60_000,
) -> list[pa.RecordBatch]:
    wanted = ReadSettings(conf(mock), True, fail_on_data_loss, poll_timeout_ms, columns)
    return list(read_ranges(wanted, ranges))


def whole(topic: str, end: int, partition: int = 0) -> OffsetRange:
    return OffsetRange(TopicPartition(topic, partition), 0, end)


def sorted_rows(batches: Sequence[pa.RecordBatch]) -> list[dict[str, object]]:
    rows = pa.Table.from_batches(batches).to_pylist()
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


binaries = st.none() | st.binary(max_size=8) | st.just(b"x" * 50)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=3)
headers = st.none() | st.lists(st.tuples(names, st.none() | st.binary(max_size=5)), max_size=4)
records = st.tuples(binaries, binaries, headers, st.integers(1, 4_102_444_800_000))


@given(drawn=st.lists(records, min_size=1, max_size=20), chosen=st.sets(st.sampled_from(ALL), min_size=1))
@settings(max_examples=40)
def test_rows_have_what_was_produced(
    mock: MockCluster, writer: Writer, drawn: list[Record], chosen: set[str]
) -> None:
    appended = writer.append(drawn)
    batches = read(mock, [appended])
    for batch in batches:
        batch.validate(full=True)
    found = pa.Table.from_batches(batches).to_pylist()
    assert [(row["key"], row["value"]) for row in found] == [record[:2] for record in drawn]
    assert [row["offset"] for row in found] == list(range(appended.start, appended.end))
    assert [round(row["timestamp"].timestamp() * 1000) for row in found] == [record[3] for record in drawn]
    expected = [
        [{"key": name, "value": value} for name, value in record[2]] if record[2] else None
        for record in drawn
    ]
    assert [row["headers"] for row in found] == expected

    some = read(mock, [appended], columns=tuple(chosen))
    assert some[0].schema.names == list(chosen)
    assert pa.Table.from_batches(some).to_pylist() == [{name: row[name] for name in chosen} for row in found]


def test_many_partitions_and_topics_and_large_values(mock: MockCluster, writer: Writer) -> None:
    topics = [writer.topic(3), writer.topic(2)]
    ranges = []
    for topic, partitions in zip(topics, (3, 2), strict=True):
        for partition in range(partitions):
            count = 50 * (partition + 1)
            writer.write(
                topic,
                [(b"%d" % at, os.urandom(40_000 if at == 7 else at), None, 5) for at in range(count)],
                partition,
            )
            ranges.append(OffsetRange(TopicPartition(topic, partition), partition, count - partition))
    rows = sorted_rows(read(mock, ranges))
    assert [(row["topic"], row["partition"], row["offset"], row["key"]) for row in rows] == [
        (each.tp.topic, each.tp.partition, at, b"%d" % at)
        for each in sorted(ranges, key=lambda each: each.tp)
        for at in range(each.start, each.end)
    ]
    assert all(len(row["value"]) == (40_000 if row["offset"] == 7 else row["offset"]) for row in rows)


@given(
    drawn=st.lists(records, min_size=1, max_size=12),
    limit=st.integers(50, 160),
)
@settings(max_examples=20)
def test_a_large_column_is_split(mock: MockCluster, writer: Writer, drawn: list[Record], limit: int) -> None:
    appended = writer.append(drawn)
    with taking(mock, appended) as runs:
        batches = record_batches(runs, True, limit_bytes=limit)
        assert pa.Table.from_batches(batches).equals(
            pa.Table.from_batches([record_batch(runs, True)]).combine_chunks()
        )
        for name in ("key", "value"):
            assert all(sum(len(each.as_py() or b"") for each in b[name]) <= limit for b in batches)


def test_one_record_larger_than_a_column_is_named(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    writer.write(topic, [(None, b"a", None, 1), (None, b"abcdef", None, 1)])
    with (
        taking(mock, whole(topic, 2)) as runs,
        pytest.raises(InvalidRecordError, match=f"offset 1 of {topic}-0 is larger than 5 bytes"),
    ):
        record_batches(runs, True, limit_bytes=5)


class taking:  # noqa: N801
    """Returns the messages of a range without gaps, as runs, with nothing after them."""

    def __init__(self, mock: MockCluster, wanted: OffsetRange) -> None:
        self._consumer = RangeConsumer(conf(mock))
        self._wanted = wanted

    def __enter__(self) -> list[Run]:
        tp, position, end = self._wanted.tp, self._wanted.start, self._wanted.end
        self._consumer.assign({tp: position}, ALL, {tp: end})
        runs: list[Run] = []
        while position < end:
            messages = self._consumer.take(5).messages
            if messages:
                kept = slice(*np.searchsorted(messages.offsets, [position, end]))
                messages = messages[kept]
                runs.append(Run(tp, messages, messages.offsets))
                position += len(messages.offsets)
        return runs

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def test_header_names_that_are_not_utf8_are_repaired(mock: MockCluster, writer: Writer) -> None:
    """As Python replaces characters, at every boundary of Unicode's table of well-formed sequences."""
    leads = [b"", b"a", b"\xc1", b"\xc2", b"\xdf", b"\xe0", b"\xed", b"\xef", b"\xf0", b"\xf4", b"\xf5"]
    tails = [b"", b"\x7f", b"\x80", b"\x8f", b"\x90", b"\x9f", b"\xa0", b"\xbf", b"\xc0"]
    raw = [lead + tail + more for lead in leads for tail in tails for more in (b"", b"\x80", b"\x80\x80")]
    topic = writer.topic()
    for name in raw:
        writer.write_raw_header(topic, name)
    writer.flush()
    with taking(mock, whole(topic, len(raw))) as runs:
        rows = [
            Run(run.tp, run.messages[at : at + 1], run.offsets[at : at + 1])
            for run in runs
            for at in range(len(run.offsets))
        ]
        found = [record_batch([row], True, ("headers",))["headers"][0].as_py() for row in rows]
    assert found == [[{"key": name.decode(errors="replace"), "value": b"v"}] for name in raw]


def test_a_timestamp_beyond_sparks_range_is_null(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    writer.write(topic, [(None, b"1", None, 5), (None, b"2", None, 1712345678123456789)])
    (batch,) = read(mock, [whole(topic, 2)])
    assert batch["value"].to_pylist() == [b"1", b"2"]
    assert batch["timestamp"].is_null().to_pylist() == [False, True]


def test_control_records_end_ranges_and_produce_no_rows(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    producer = Producer({"bootstrap.servers": mock.bootstrap_servers, "transactional.id": "tx"})
    producer.init_transactions(30)
    for batch in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % batch, partition=0)
        producer.commit_transaction(30)
    for end in range(1, 7):  # records at 0, 2, 4, each followed by a control record
        (batch,) = read(mock, [whole(topic, end)])
        assert batch["offset"].to_pylist() == [at for at in (0, 2, 4) if at < end]
    assert read(mock, [OffsetRange(TopicPartition(topic, 0), 5, 6)]) == []


# -- events


def test_lost_offsets_are_reported(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic(2)
    writer.write(topic, [(None, b"a", None, 1)])
    writer.write(topic, [(None, b"b", None, 1)] * 3, partition=1)
    ranges = [OffsetRange(TopicPartition(topic, 0), 5, 9), whole(topic, 3, partition=1)]
    with pytest.raises(DataLossError, match="the log now ends at offset 1"):
        read(mock, ranges)
    rows = sorted_rows(read(mock, ranges, fail_on_data_loss=False))
    assert [row["partition"] for row in rows] == [1, 1, 1]


def test_a_timeout_names_the_missing_topic(mock: MockCluster) -> None:
    with pytest.raises(
        UnavailableError, match=r"no records of never-0 arrived .*: never(-0| \[0\]): .*unknown topic"
    ):
        read(mock, [OffsetRange(TopicPartition("never", 0), 0, 4)], poll_timeout_ms=1500)


def test_errors_of_fetch_requests_are_raised(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    writer.write(topic, [(None, b"a", None, 1)])
    mock.fail_fetches(KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._TRANSPORT)
    assert len(read(mock, [whole(topic, 1)])) == 1
    mock.fail_fetches(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(AuthorizationError, match=f"reading {topic}-0"):
        read(mock, [whole(topic, 1)])
    mock.fail_fetches()


# -- the consumer itself


def test_a_wait_ends_with_the_first_records_that_arrive(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    tp = TopicPartition(topic, 0)
    consumer = RangeConsumer(conf(mock))
    consumer.assign({tp: 0}, ALL)
    taken = consumer.take(30)
    assert taken.log_ends == {tp: 0}
    threading.Timer(0.2, writer.write, [topic, [(None, b"late", None, 1)]]).start()
    began = time.monotonic()
    while not len((taken := consumer.take(60)).messages):
        assert time.monotonic() - began < 50
    assert len(taken.messages) == 1
    assert time.monotonic() - began < 50
    consumer.close()


def test_batches_stay_valid_after_their_consumer_is_closed(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    writer.write(topic, [(b"k%d" % at, b"v", [("h", b"%d" % at)], 1) for at in range(1000)])
    with taking(mock, whole(topic, 1000)) as runs:
        pass
    batch = record_batch(runs[:1], True)
    del runs
    gc.collect()
    taken = batch.num_rows
    assert batch["key"].to_pylist() == [b"k%d" % at for at in range(taken)]
    assert [each[0]["value"] for each in batch["headers"].to_pylist()] == [b"%d" % at for at in range(taken)]


def test_more_records_than_fit_into_a_batch_make_several_batches(
    mock: MockCluster, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer takes everything that arrived, but the rows and bytes of a batch are limited."""
    topic = writer.topic(2)
    for partition in (0, 1):
        writer.write(topic, [(None, b"v" * 100, None, 1)] * 1000, partition)
    ranges = [whole(topic, 1000, partition) for partition in (0, 1)]
    monkeypatch.setattr(fetch, "BATCH_ROWS", 300)
    batches = read(mock, ranges)
    assert all(150 <= batch.num_rows <= 300 for batch in batches[:-1])
    expected = sorted_rows(batches)
    assert [(row["partition"], row["offset"]) for row in expected] == [
        (partition, offset) for partition in (0, 1) for offset in range(1000)
    ]
    monkeypatch.setattr(fetch, "BATCH_BYTES", 5000)
    batches = read(mock, ranges)
    assert [batch.num_rows for batch in batches] == [50] * 40
    assert sorted_rows(batches) == expected


def test_reads_do_not_leak_memory(mock: MockCluster, writer: Writer) -> None:
    topic = writer.topic()
    count = 300
    writer.write(topic, [(b"k", b"v" * 4000, [("h", b"1")], 1)] * count)

    def reads(times: int) -> int:
        for _ in range(times):
            ranges = [whole(topic, count)]
            assert sum(batch.num_rows for batch in read(mock, ranges)) == count
        return int(psutil.Process().memory_info().rss)

    before = reads(60)
    after = reads(120)
    assert after - before < 60 * count * 4000 // 4  # a quarter of what half of these reads read
