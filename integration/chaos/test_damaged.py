"""Damaged record batches on a broker's disk: the query stops at once, names them, and can pass over them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support.damage import (
    ATTRIBUTES,
    CHECKSUM,
    FORMAT,
    LAST_DELTA,
    LENGTH,
    OFFSET,
    RECORDS,
    StoredLog,
)
from integration.support.driver import await_condition
from integration.support.kafka import Admin, produce, read_back, values
from integration.support.query import Query
from integration.support.tools import console_consumer
from integration.support.tools import run as run_tool
from kafka_eos_source import map_in_read
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import RecordsDamagedError
from kafka_eos_source.kafka import fetch
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.option_values import offset_lists
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from tests.support.fetched_log import (
    GZIP,
    LZ4,
    SNAPPY,
    XERIAL,
    ZSTD,
    Record,
    compressed,
    encoded_record,
    sealed,
)

BATCHES, PER_BATCH = 12, 4
RECORDS_SENT = BATCHES * PER_BATCH
#: Far longer than the test: a query that waits for the damage to go away does not pass.
TIMEOUT_MS = 3_600_000
#: What is changed: the byte in the batch, the bits, the compression, and a part of the message.
PLACES = {
    "checksum": (CHECKSUM, 0x01, "none", "its checksum is 0x"),
    "attributes": (ATTRIBUTES + 1, 0x02, "none", "its checksum is 0x"),
    "last offset": (LAST_DELTA + 2, 0x04, "none", "its checksum is 0x"),
    "records": (RECORDS + 200, 0x10, "none", "its checksum is 0x"),
    "compressed": (RECORDS + 40, 0x10, "gzip", "its checksum is 0x"),
    "negative length": (LENGTH, 0x80, "none", "its length is -"),
    "larger length": (LENGTH + 2, 0x02, "none", "its "),
    "huge length": (LENGTH, 0x10, "none", "its length is 268436"),
    "smaller length": (LENGTH + 2, 0x04, "none", "its "),
    "format": (FORMAT, 0x02, "none", "its format is 0; expected 2"),
    "first offset": (OFFSET + 6, 0x01, "none", "its first offset is 2"),
}
#: Only fields are changed that the checksum does not cover, so that the records are known to be right.
MENDED = {"negative length", "larger length", "huge length", "smaller length", "format"}


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS) as running:
        yield running


def filled(bootstrap: str, topic: str, compression: str = "none", partition: int = 0) -> list[str]:
    """Fills a partition with batches of the same size; returns the values."""
    values = [f"{number:04d} " + "x" * 300 for number in range(RECORDS_SENT)]
    for first, past in pairwise(range(0, RECORDS_SENT + 1, PER_BATCH)):
        how = {"compression.type": compression, "linger.ms": 1000}  # one batch, also on a busy machine
        produce(bootstrap, topic, values[first:past], partition=partition, config=how)
    return values


def read(bootstrap: str, topic: str, start: int, end: int, skip: str = "") -> list[tuple[int, str]]:
    """Returns offset and value of what a task reads of a range."""
    settings = ReadSettings(
        {"bootstrap.servers": bootstrap, "isolation.level": "read_committed"},
        poll_timeout_ms=TIMEOUT_MS,
        skip_damaged=offset_lists("skipDamagedRecords", skip) if skip else {},
    )
    return [
        (row["offset"], row["value"].decode())
        for batch in read_ranges(settings, [OffsetRange(TopicPartition(topic, 0), start, end)])
        for row in batch.to_pylist()
    ]


def advised(error: str) -> str:
    """Returns the value of the option that an error advises."""
    found = re.search(r"\.option\('skipDamagedRecords', '([^']*)'\)", error)
    assert found is not None, error
    return found[1]


@pytest.mark.fault("T310", "a bit of a record batch changes on the broker's disk", "between write and read")
@pytest.mark.parametrize("place", PLACES)
def test_t310_a_damaged_batch_is_named_and_passed_over_alone(
    kafka: EmbeddedKafka, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else is read, also by micro-batches that begin or end within the damage or behind it."""
    monkeypatch.setattr(fetch, "_STALL_SECONDS", 0.2)
    at, bits, compression, text = PLACES[place]
    topic = f"t310-{place.replace(' ', '-')}"
    Admin(kafka.bootstrap_servers).create(topic, 1)
    values = filled(kafka.bootstrap_servers, topic, compression)
    log = StoredLog(kafka.directory, topic)
    damaged = next(each for each in log.batches() if each.first >= 16)
    log.flip(damaged.at + at, bits)

    with pytest.raises(RecordsDamagedError) as raised:
        read(kafka.bootstrap_servers, topic, 0, RECORDS_SENT)
    said = str(raised.value)
    assert f"offsets {damaged.first} to {damaged.last} of {topic}-0 cannot be read" in said
    assert text in said
    assert "the leader, sends it like this every time" in said
    skip = advised(said)
    assert json.loads(skip) == {topic: {"0": [damaged.first]}}

    lost = set() if place in MENDED else set(range(damaged.first, damaged.last + 1))
    wanted = [(offset, value) for offset, value in enumerate(values) if offset not in lost]
    assert f"whereby {len(lost)} offset(s) are lost" in said
    assert read(kafka.bootstrap_servers, topic, 0, RECORDS_SENT, skip) == wanted
    borders = [damaged.first, damaged.last + 1, damaged.last + 7, RECORDS_SENT - 1]
    if place != "format":
        # Asked for an offset within it, a broker may pass over a batch that it takes for one of an older
        # format, as if compaction had removed it. No client can tell that from its answer.
        borders.append(damaged.first + 2)
    for border in borders:
        before = read(kafka.bootstrap_servers, topic, 0, border, skip)
        assert before + read(kafka.bootstrap_servers, topic, border, RECORDS_SENT, skip) == wanted, border
    assert read(kafka.bootstrap_servers, topic, 0, damaged.first) == wanted[: damaged.first]


@pytest.mark.fault(
    "T311", "batches are damaged on disk; a query with a checkpoint", "before two micro-batches"
)
@pytest.mark.parametrize("staged", [False, True], ids=["plain", "staged by the reading tasks"])
def test_t311_a_query_with_a_checkpoint_passes_over_what_was_named_and_nothing_else(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path, staged: bool
) -> None:
    bootstrap, source = kafka.bootstrap_servers, f"t311-{staged}".lower()
    admin = Admin(bootstrap)
    sink = admin.create(f"{source}-out", 1)
    admin.create(source, 2)
    query = Query(spark, bootstrap, source, sink, str(tmp_path / "checkpoint"))
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "topic": sink,
        "checkpointLocation": query.checkpoint,
        "application.id": source,
    }

    def unchanged(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from rows

    def run(skip: str = "") -> None:
        more = {"kafkaConsumer.pollTimeoutMs": str(TIMEOUT_MS)} | (
            {"skipDamagedRecords": skip} if skip else {}
        )
        frame = query.frame(**more).select("key", "value")
        if staged:
            frame = map_in_read(frame, unchanged, "key BINARY, value BINARY", write=options)
        writer = frame.writeStream.format("kafka-eos").options(**options)
        assert writer.trigger(availableNow=True).start().awaitTermination(120), "the query did not end"

    def stops(skip: str) -> str:
        """Returns the value that the error advises; nothing of the micro-batch is visible."""
        before = values(read_back(bootstrap, sink))
        with pytest.raises(StreamingQueryException) as raised:
            run(skip)
        assert "[KAFKA_EOS.RECORDS_DAMAGED]" in str(raised.value)
        assert values(read_back(bootstrap, sink)) == before
        return advised(str(raised.value))

    wanted = [f"before {number}" for number in range(8)]
    produce(bootstrap, source, wanted)
    run()
    places = ("records",) if staged else ("records", "compressed")
    for partition, place in enumerate(places):
        at, bits, compression, _ = PLACES[place]
        log = StoredLog(kafka.directory, source, partition)
        begin = log.batches()[-1].last + 1
        sent = filled(bootstrap, source, compression, partition)
        # a producer on a busy machine may have sent some records in more batches
        damaged = next(each for each in log.batches() if each.first >= begin + 5 * PER_BATCH)
        log.flip(damaged.at + at, bits)
        wanted += sent[: damaged.first - begin] + sent[damaged.last + 1 - begin :]
    skip = json.dumps({source: {"0": [1], "1": [2]}})  # intact batches
    for _ in places:  # each partition
        skip = stops(skip)
    run(skip)
    assert values(read_back(bootstrap, sink)) == sorted(wanted)

    log = StoredLog(kafka.directory, source, 0)
    if not staged:  # the option is still set when another batch is damaged
        produce(bootstrap, source, ["after"] * PER_BATCH, partition=0)
        damaged = log.batches()[-1].at + RECORDS + 3
        log.flip(damaged)
        stops(skip)
        log.flip(damaged)
        run(skip)
        assert values(read_back(bootstrap, sink)) == sorted([*wanted, *["after"] * PER_BATCH])
    assert admin.group(group_of(source))[source, 0][0] == log.batches()[-1].last + 1


@pytest.mark.fault("T312", "a batch is damaged on the disk of the leader, and not of the follower", "read")
def test_t312_the_error_names_the_intact_copy_and_its_steps_restore_the_partition(tmp_path: Path) -> None:
    with EmbeddedKafka(2, java_options=brokers.JAVA_OPTIONS) as kafka:
        bootstrap, topic = kafka.bootstrap_servers, "t312"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(topic, 1, replica_assignment=[[1, 2]])])[topic].result()
        sent = filled(bootstrap, topic)
        log, copy = (StoredLog(kafka.directory / f"node-{node}", topic) for node in (1, 2))
        await_condition(lambda: log.batches() == copy.batches(), 60, "the follower has everything")
        log.flip(log.batches()[5].at + RECORDS + 7)

        with pytest.raises(RecordsDamagedError) as raised:
            read(bootstrap, topic, 0, RECORDS_SENT)
        said = str(raised.value)
        assert "broker 1, the leader, sends it like this every time; broker 2 has an intact copy" in said
        assert "make broker 2 the leader of the partition" in said
        assert "let broker 1 copy the partition again" in said

        reassign(bootstrap, topic, [2, 1], tmp_path)
        run_tool(
            "org.apache.kafka.tools.LeaderElectionCommand",
            *("--bootstrap-server", bootstrap, "--election-type", "PREFERRED"),
            *("--topic", topic, "--partition", "0"),
        )
        assert read(bootstrap, topic, 0, RECORDS_SENT) == list(enumerate(sent))
        reassign(bootstrap, topic, [2], tmp_path)
        reassign(bootstrap, topic, [2, 1], tmp_path)
        assert StoredLog(kafka.directory / "node-1", topic).path.read_bytes() == copy.path.read_bytes()


def reassign(bootstrap: str, topic: str, replicas: list[int], folder: Path) -> None:
    """Sets the replicas of partition 0 as the runbook says, and waits until they have everything."""
    plan = folder / "plan.json"
    partition = {"topic": topic, "partition": 0, "replicas": replicas}
    plan.write_text(json.dumps({"version": 1, "partitions": [partition]}))
    run_tool(
        "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
        *("--bootstrap-server", bootstrap, "--reassignment-json-file", str(plan), "--execute"),
    )
    client = AdminClient({"bootstrap.servers": bootstrap})

    def is_complete() -> bool:
        found = client.list_topics(topic, timeout=30).topics[topic].partitions[0]
        return found.replicas == replicas and sorted(found.isrs) == sorted(replicas)

    await_condition(is_complete, 60, f"the replicas are {replicas}")


#: How two records are compressed: the codec, and the stream.
STREAMS: dict[str, tuple[int, Callable[[bytes, bytes], bytes]]] = {
    "gzip, two members": (GZIP, lambda one, two: compressed(one, GZIP) + compressed(two, GZIP)),
    "gzip, more": (GZIP, lambda one, two: compressed(one + two, GZIP) + b"something that is no member"),
    "zstd, two frames": (ZSTD, lambda one, two: compressed(one, ZSTD) + compressed(two, ZSTD)),
    "zstd, more": (ZSTD, lambda one, two: compressed(one + two, ZSTD) + b"something that is no frame"),
    "snappy, two parts": (SNAPPY, lambda one, two: compressed(one, XERIAL) + compressed(two, XERIAL)),
    "lz4, two frames": (LZ4, lambda one, two: compressed(one, LZ4) + compressed(two, LZ4)),
    "lz4, more": (LZ4, lambda one, two: compressed(one + two, LZ4) + compressed(two, LZ4)),
}
#: Streams behind whose first record Kafka's own consumer fails.
REFUSED = {"zstd, more", "lz4, two frames"}


@pytest.mark.fault("T313", "producers compress in several members, and leave bytes behind them", "read")
def test_t313_compressed_streams_are_read_as_kafkas_own_consumer_reads_them(tmp_path: Path) -> None:
    """The logs of a stopped broker are replaced by such streams, which other producers may write."""

    def sent(name: str) -> list[str]:
        return [f"{name} 1", f"{name} 2"]

    with EmbeddedKafka(directory=tmp_path / "kafka", java_options=brokers.JAVA_OPTIONS) as kafka:
        bootstrap = kafka.bootstrap_servers
        topics = {name: f"t313-{name in REFUSED}-{number}" for number, name in enumerate(STREAMS)}
        for name, topic in topics.items():
            Admin(bootstrap).create(topic, 1)
            produce(bootstrap, topic, sent(name))
        kafka.stop_node(1)
        for name, (codec, stream) in STREAMS.items():
            log = StoredLog(kafka.directory, topics[name])
            one, two = (
                encoded_record(Record(at, None, value.encode()), 0, 0) for at, value in enumerate(sent(name))
            )
            log.path.write_bytes(sealed(0, stream(one, two), count=2, attributes=codec))
            for index in (".index", ".timeindex"):
                log.path.with_suffix(index).unlink()
        kafka.start_node(1)
        wanted = sorted(value for name in topics.keys() - REFUSED for value in sent(name))
        assert sorted(console_consumer(bootstrap, "t313-False-.*", len(wanted), of="--include")) == sorted(
            wanted
        )
        for name, topic in topics.items():
            if name in REFUSED:
                assert console_consumer(bootstrap, topic, 2) != sent(name), name
                with pytest.raises(RecordsDamagedError, match="its records cannot be de"):
                    read(bootstrap, topic, 0, 2)
            else:
                assert read(bootstrap, topic, 0, 2) == list(enumerate(sent(name))), name
