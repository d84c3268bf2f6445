"""Damaged record batches on a broker's disk: the query stops at once, names them, and can pass over them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

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
from integration.support.kafka import Admin, produce
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import RecordsDamagedError
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.config import consumer_config
from kafka_eos_source.kafka.wire import consumer
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.option_values import offset_lists
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

pytestmark = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)

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


def filled(bootstrap: str, topic: str, compression: str = "none") -> list[str]:
    """Fills a topic with batches of the same size; returns the values."""
    values = [f"{number:04d} " + "x" * 300 for number in range(RECORDS_SENT)]
    for first, past in pairwise(range(0, RECORDS_SENT + 1, PER_BATCH)):
        produce(bootstrap, topic, values[first:past], partition=0, config={"compression.type": compression})
    return values


def read(bootstrap: str, topic: str, start: int, end: int, skip: str = "") -> list[tuple[int, str]]:
    """Returns offset and value of what a task reads of a range."""
    settings = ReadSettings(
        consumer_config({"bootstrap.servers": bootstrap}, "g", "read_committed"),
        poll_timeout_ms=TIMEOUT_MS,
        client="native",
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
    monkeypatch.setattr(consumer, "_STALL_SECONDS", 0.2)
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
    for border in (damaged.first, damaged.first + 2, damaged.last + 1, damaged.last + 7, RECORDS_SENT - 1):
        before = read(kafka.bootstrap_servers, topic, 0, border, skip)
        assert before + read(kafka.bootstrap_servers, topic, border, RECORDS_SENT, skip) == wanted, border
    assert read(kafka.bootstrap_servers, topic, 0, damaged.first) == wanted[: damaged.first]
