"""The package's client reads what other clients have written, as confluent-kafka's consumer reads it.

`integration.test_native_reader` does the same with librdkafka's producer and Java's for large records.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kafka import KafkaProducer

from integration.support.codecs import CODECS, judged, rows
from integration.support.kafka import TIMEOUT_SECONDS, await_stable, transaction
from integration.support.processes import await_condition
from integration.support.tools import run

RECORDS = 200
SARAMA = Path(__file__).with_name("sarama")
#: Compaction runs every 15 s on a broker with default settings.
_COMPACTED_SECONDS = 120.0


def check(broker: str, name: str, count: int) -> list[tuple[object, ...]]:
    """Checks that both consumers read the same; returns it."""
    await_stable(broker, name)
    found = rows(broker, name, "read_committed")
    assert found == judged(broker, name, "read_committed")
    assert found == rows(broker, name, "read_committed", parts=3)
    assert rows(broker, name, "read_uncommitted") == judged(broker, name, "read_uncommitted")
    assert len(found) == count
    return found


def test_kafka_python_with_all_codecs_and_times_that_go_back(broker: str, topic: Callable[..., str]) -> None:
    name = topic(1)
    for codec in CODECS:
        with KafkaProducer(
            bootstrap_servers=broker,
            compression_type=None if codec == "none" else codec,
            linger_ms=50,
        ) as producer:
            for number in range(RECORDS):
                producer.send(
                    name,
                    # kafka-python wants a key or a value
                    None if number % 11 == 0 and number % 3 else b"value %d " % number * (number % 50),
                    key=None if number % 3 == 0 else codec.encode(),
                    headers=[("a", b"%d" % number), ("é", b"")] if number % 5 == 0 else None,
                    timestamp_ms=1_700_000_000_000 + number * 7919 % 1000,
                )
            producer.flush(TIMEOUT_SECONDS)
    check(broker, name, RECORDS * len(CODECS))


def test_javas_console_producer_with_headers(broker: str, topic: Callable[..., str]) -> None:
    name = topic(1)
    lines = "".join(f"h:{number},i:NULL\tkey {number}\tvalue é {number}\n" for number in range(RECORDS))
    for codec in CODECS:
        run(
            "org.apache.kafka.tools.ConsoleProducer",
            *("--bootstrap-server", broker, "--topic", name, "--compression-codec", codec),
            *("--property", "parse.key=true", "--property", "parse.headers=true"),
            *("--property", "null.marker=NULL"),
            text=lines,
        )
    found = check(broker, name, RECORDS * len(CODECS))
    assert found[0][2:4] == (b"key 0", "value é 0".encode())


def test_sarama(broker: str, topic: Callable[..., str], tmp_path: Path) -> None:
    compiler = shutil.which("go")
    if compiler is None:
        pytest.skip("no Go")
    writer = tmp_path / "writer"
    built = subprocess.run(
        [compiler, "build", "-o", writer, "."], cwd=SARAMA, capture_output=True, text=True, check=False
    )
    if built.returncode and "dial tcp" in built.stderr:
        pytest.skip("the modules of Go cannot be fetched")
    assert built.returncode == 0, built.stderr
    name = topic(1)
    subprocess.run([writer, broker, name, str(RECORDS)], check=True, timeout=TIMEOUT_SECONDS)
    check(broker, name, RECORDS * len(CODECS))


@pytest.mark.parametrize("codec", CODECS)
def test_compacted_logs_with_gaps_and_empty_batches(
    broker: str, topic: Callable[..., str], codec: str
) -> None:
    """Compaction removes records within batches, and keeps a producer's last batch without its records."""
    name = topic(
        1,
        cleanup_policy="compact",
        segment_ms="200",
        min_cleanable_dirty_ratio="0.001",
        max_compaction_lag_ms="1",
        delete_retention_ms="0",
    )
    how = {"compression.type": codec, "linger.ms": 20, "enable.idempotence": True}
    for number in range(4):
        plain = Producer({"bootstrap.servers": broker, **how})
        writing = transaction(broker, f"{name}-{number}", how)
        for index in range(40):
            plain.produce(name, b"plain %d" % number, b"%d" % (index % (20 if number else 40)))
            writing.produce(name, None if index % 7 == 0 else b"%d" % number, b"t%d" % index)
        (writing.abort_transaction if number % 2 else writing.commit_transaction)(TIMEOUT_SECONDS)
        assert plain.flush(TIMEOUT_SECONDS) == 0
    await_stable(broker, name)

    def is_compacted() -> bool:
        last = Producer({"bootstrap.servers": broker})
        last.produce(
            name, b"last", b"last"
        )  # so that a new segment begins, and the one before can be compacted
        assert last.flush(TIMEOUT_SECONDS) == 0
        return len(judged(broker, name, "read_committed")) < 100

    await_condition(is_compacted, _COMPACTED_SECONDS, f"{name} is compacted")
    found = rows(broker, name, "read_committed")
    offsets = [int(row[1]) for row in found]
    assert offsets[-1] - offsets[0] >= len(offsets), "there are gaps"
    assert found == judged(broker, name, "read_committed")
    assert rows(broker, name, "read_committed", parts=7) == found
