"""What the tests of the consumer share: logs, a consumer on the simulated cluster, and what it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.fetch import RangeConsumer, Taken
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from tests.support.fetched_log import ABORT, COMMIT, GZIP, Batch, Log, Record, sealed
from tests.support.simulated_kafka import Partition, SimulatedKafka

#: All columns of a read.
ALL = tuple(kernel.WANTS)

#: More than any step takes that does not hang.
SECONDS = 30.0


def log_of(count: int, *, size: int = 20, abort_every: int = 3) -> Log:
    """Returns a log of small batches by two producers, some of whose transactions are aborted."""
    log = Log()
    for number in range(count):
        producer = 1 + number % 2
        value = b"%d." % number + bytes(size)
        log.append([Record(0, b"k", value)] * 2, producer=producer, transactional=True)
        log.append([Record(0, None, value)], producer=3 - producer, transactional=True)
        log.finish(producer, ABORT if number % abort_every == 0 else COMMIT)
    for producer in list(log.open):
        log.finish(producer, COMMIT)
    return log


def conf(cluster: SimulatedKafka, **more: str) -> dict[str, str]:
    ours = {"bootstrap.servers": cluster.bootstrap, "topic.metadata.propagation.max.ms": "1"}
    return {**ours, **more, "isolation.level": "read_committed"}


def whole(cluster: SimulatedKafka) -> list[OffsetRange]:
    return [OffsetRange(TopicPartition(*tp), 0, log.end) for tp, log in cluster.logs.items()]


def read(
    cluster: SimulatedKafka,
    ranges: Sequence[OffsetRange] = (),
    *,
    poll_timeout_ms: int = 60_000,
    fail_on_data_loss: bool = True,
    skip: Mapping[TopicPartition, tuple[int, ...]] | None = None,
    **more: str,
) -> dict[Partition, list[tuple[int, bytes | None]]]:
    """Returns offset and value of each row that a task reads, by partition and in order."""
    wanted = ReadSettings(
        conf(cluster, **more),
        True,
        fail_on_data_loss,
        poll_timeout_ms,
        None,
        skip_damaged=skip or {},
    )
    found: dict[Partition, list[tuple[int, bytes | None]]] = {}
    for batch in read_ranges(wanted, ranges or whole(cluster)):
        for row in batch.to_pylist():
            found.setdefault((row["topic"], row["partition"]), []).append((row["offset"], row["value"]))
    return found


def expected(
    cluster: SimulatedKafka, ranges: Sequence[OffsetRange] = ()
) -> dict[Partition, list[tuple[int, bytes | None]]]:
    found = {
        (each.tp.topic, each.tp.partition): [
            (record.offset, record.value)
            for record in cluster.logs[each.tp.topic, each.tp.partition].visible(
                each.start, each.end, committed=True
            )
        ]
        for each in ranges or whole(cluster)
    }
    return {tp: rows for tp, rows in found.items() if rows}


@contextmanager
def consuming(cluster: SimulatedKafka, **more: str) -> Iterator[RangeConsumer]:
    consumer = RangeConsumer(conf(cluster, **more))
    try:
        yield consumer
    finally:
        consumer.close()


def take_until(consumer: RangeConsumer, is_done: Callable[[Taken], bool]) -> Taken:
    deadline = time.monotonic() + SECONDS
    while True:
        taken = consumer.take(0.2)
        if is_done(taken):
            return taken
        assert time.monotonic() < deadline, f"nothing came: {consumer.last_complaint}"


@dataclass
class Spoiled(Batch):
    """A batch that is damaged on the disk of its broker, or was written damaged."""

    how: str = "record"

    def encoded(self) -> bytes:
        sent = bytearray(super().encoded())
        if self.how == "record":
            sent[-1] ^= 1
        elif self.how == "last offset":
            sent[25] ^= 8  # seems to have 2048 offsets more
        elif self.how == "length":
            sent[8] ^= 0x80
        elif self.how == "format":
            sent[16] ^= 2
        elif self.how == "first offset":
            sent[6] ^= 8
        else:  # with a right checksum
            codec = GZIP if self.how == "compressed" else 0
            count = len(self.records)
            return sealed(self.first, b"\xff" * 12, count=count, attributes=codec)
        return bytes(sent)


_MENDED = {"length", "format"}


def spoiled(log: Log, how: Mapping[int, str]) -> set[int]:
    """Damages batches of a log, by their index; returns the offsets that cannot be read."""
    for index, each in how.items():
        log.batches[index] = Spoiled(**vars(log.batches[index]), how=each)
    unlisted = {index for index, each in how.items() if each not in ("compressed", "decoded")}
    # where the length of one of two neighbours is wrong, nothing shows where the other one begins
    mended = {at for at, each in how.items() if each in _MENDED and not {at - 1, at + 1} & unlisted}
    bad = [log.batches[index] for index in how.keys() - mended]
    return {offset for batch in bad for offset in range(batch.first, batch.last + 1)}


def plain_log(batches: int) -> Log:
    log = Log()
    for number in range(batches):
        log.append([Record(0, b"k", b"%d.%d" % (number, each)) for each in range(3)])
    return log
