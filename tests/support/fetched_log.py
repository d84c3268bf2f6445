"""A model of one partition's log: takes what producers send, and answers fetches with a broker's bytes.

Where brokers differ, it does the worst that any of them may do: a log that does not know a producer accepts
any sequence number.
"""

from __future__ import annotations

import gzip
import random
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from kafka.record.memory_records import MemoryRecords

from kafka_eos_source.kafka.fetched_batches import FetchedBatches, decode
from kafka_eos_source.kafka.kernel import WANTS, KernelMessages, kernel
from kafka_eos_source.model import TopicPartition

NONE, GZIP, SNAPPY, LZ4, ZSTD, XERIAL = 0, 1, 2, 3, 4, 10
COMMIT, ABORT = 1, 0

_HEAD = struct.Struct(">qiibIhiqqqhii")
#: Position of the checksum, and of the first byte that it covers.
_CRC, _COVERED = 17, 21

OK, OUT_OF_ORDER, INVALID_EPOCH = 0, 45, 47

Headers = Sequence[tuple[bytes, bytes | None]]


@dataclass(frozen=True)
class Record:
    """A record; its time is in milliseconds."""

    offset: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()
    ms: int = 0


@dataclass
class Batch:
    """A record batch.

    Attributes:
        first, last: its first and last offset, which compaction does not change.
        records: what is left of its records.
        producer: id of the producer; -1 = none.
        transaction: its first offset; None = the batch belongs to none.
        marker: `COMMIT` or `ABORT` of a control batch.
        codec: how the records are compressed; `XERIAL` = snappy in Java's frame.
        append_ms: the time at which the broker appended it, if the topic is configured so.
        horizon_ms: when compaction may delete its tombstones (KIP-534).
        epoch: of the leader that appended it.
        sent: the bytes that a producer sent; None = they follow from the other attributes.
        producer_epoch: of the producer that sent it.
        sequences: the first and last sequence number.
        outcome: whether its transaction was committed; None = it is open.
    """

    first: int
    last: int
    records: list[Record]
    producer: int = -1
    transaction: int | None = None
    marker: int | None = None
    codec: int = NONE
    append_ms: int | None = None
    horizon_ms: int | None = None
    epoch: int = 0
    sent: bytes | None = None
    producer_epoch: int = 0
    sequences: tuple[int, int] = (0, 0)
    outcome: bool | None = None

    def encoded(self) -> bytes:
        """Returns the bytes of the batch."""
        if self.sent is not None:  # brokers change only what the checksum does not cover
            return (
                struct.pack(">q", self.first)
                + self.sent[8:12]
                + struct.pack(">i", self.epoch)
                + self.sent[16:]
            )
        first_ms = self.horizon_ms if self.horizon_ms is not None else next((e.ms for e in self.records), -1)
        plain = b"".join(encoded_record(each, self.first, first_ms) for each in self.records)
        codec = self.codec if self.records else NONE
        attributes = (SNAPPY if codec == XERIAL else codec) | (0x08 if self.append_ms is not None else 0)
        attributes |= (0x10 if self.transaction is not None else 0) | (0x20 if self.marker is not None else 0)
        attributes |= 0x40 if self.horizon_ms is not None else 0
        max_ms = self.append_ms
        if max_ms is None:
            max_ms = max((each.ms for each in self.records), default=-1)
        return sealed(
            self.first,
            compressed(plain, codec),
            count=len(self.records),
            attributes=attributes,
            last_delta=self.last - self.first,
            first_ms=first_ms,
            max_ms=max_ms,
            producer=self.producer,
            epoch=self.epoch,
        )


def sealed(
    first: int,
    body: bytes,
    *,
    count: int,
    attributes: int = 0,
    last_delta: int | None = None,
    first_ms: int = 0,
    max_ms: int = 0,
    producer: int = -1,
    magic: int = 2,
    epoch: int = 0,
) -> bytes:
    """Returns a batch with this body and a right checksum."""
    last_delta = count - 1 if last_delta is None else last_delta
    length = _HEAD.size - 12 + len(body)
    head = _HEAD.pack(
        first, length, epoch, magic, 0, attributes, last_delta, first_ms, max_ms, producer, 0, 0, count
    )
    return with_checksum(head + body)


def with_checksum(batch: bytes) -> bytes:
    """Returns the batch with a right checksum."""
    covered = batch[_COVERED:]
    crc = kernel().crc32c(0, covered, len(covered))
    return batch[:_CRC] + struct.pack(">I", crc) + batch[_COVERED:]


def compressed(data: bytes, codec: int) -> bytes:
    """Returns the data as Kafka's clients compress it."""
    if codec == GZIP:
        return gzip.compress(data, 1)
    if codec == SNAPPY:
        return bytes(pa.Codec("snappy").compress(data, asbytes=True))
    if codec == LZ4:
        return bytes(pa.Codec("lz4").compress(data, asbytes=True))
    if codec == ZSTD:
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    if codec == XERIAL:
        out = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
        for at in range(0, len(data), 100):  # Java's blocks have 32 KiB
            block = compressed(data[at : at + 100], SNAPPY)
            out += struct.pack(">i", len(block)) + block
        return out
    return data


def encoded_record(record: Record, first: int, first_ms: int) -> bytes:
    """Returns a record of a batch with this first offset and time."""
    body = b"\0" + varint(record.ms - first_ms) + varint(record.offset - first)
    body += _bytes(record.key) + _bytes(record.value) + varint(len(record.headers))
    for name, value in record.headers:
        body += _bytes(name) + _bytes(value)
    return varint(len(body)) + body


def _bytes(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def varint(number: int) -> bytes:
    """Returns a number of variable length, with its sign in the last bit."""
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def marker(offset: int, producer: int, transaction: int, kind: int) -> Batch:
    """Returns the control batch that ends a transaction."""
    record = Record(offset, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 7))
    return Batch(offset, offset, [record], producer, transaction, kind)


@dataclass
class Log:
    """A partition.

    Attributes:
        batches: what compaction left.
        end: the high watermark.
        aborted: producer, first offset and offset of the marker of each aborted transaction.
        open: first offset of each open transaction, by its producer; of those that producers sent, also by
            the producer's epoch.
        start: the first offset of the log.
        epochs: leader epochs with their first offsets.
        recent: the last five batches of each producer.
    """

    batches: list[Batch] = field(default_factory=list)
    end: int = 0
    aborted: list[tuple[int, int, int]] = field(default_factory=list)
    open: dict[int | tuple[int, int], int] = field(default_factory=dict)
    start: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    recent: dict[int, deque[Batch]] = field(default_factory=dict)

    def elect(self, epoch: int, *, end: int | None = None, forgets: bool = False) -> None:
        """Begins an epoch.

        Args:
            epoch: the epoch.
            end: where the log of the new leader ends, if the election is unclean.
            forgets: whether its log lacks epochs without records.
        """
        self.end = self.end if end is None else end
        self.batches = [each for each in self.batches if each.last < self.end]
        written = {each.epoch for each in self.batches}
        known = [each for each in self.epochs if each[1] <= self.end and (not forgets or each[0] in written)]
        self.epochs = [*known, (epoch, self.end)]

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """Returns the newest epoch up to this one, and where it ends; -1 and -1 if the log cannot tell."""
        if epoch == self.epochs[-1][0]:
            return epoch, self.end
        later = [start for each, start in self.epochs if each > epoch]
        before = [each for each, _ in self.epochs if each <= epoch]
        return (before[-1] if before else epoch, later[0]) if later else (-1, -1)

    def append(
        self, records: Sequence[Record], *, producer: int = -1, transactional: bool = False, **how: int | None
    ) -> None:
        """Appends a batch; the records get their offsets."""
        placed = [replace(each, offset=self.end + at) for at, each in enumerate(records)]
        transaction = self.open.setdefault(producer, self.end) if transactional else None
        last = self.end + len(placed) - 1
        how["epoch"] = self.epochs[-1][0]
        self.batches.append(Batch(self.end, last, placed, producer, transaction, **how))  # type: ignore[arg-type]
        self.end = last + 1

    def produce(self, sent: bytes) -> tuple[int, int]:
        """Appends a batch that a producer sent; returns an error code and the offset of its first record."""
        batch = MemoryRecords(sent).next_batch()
        assert batch is not None
        producer, epoch, first = batch.producer_id, batch.producer_epoch, batch.base_sequence
        records = [
            Record(
                self.end + at,
                each.key,
                each.value,
                [(k.encode(), v) for k, v in each.headers],
                each.timestamp,
            )
            for at, each in enumerate(batch)
        ]
        last = (first + len(records) - 1) & 0x7FFFFFFF
        known = self.recent.get(producer) if producer >= 0 else None
        if known:
            newest = known[-1]
            if epoch < newest.producer_epoch:
                return INVALID_EPOCH, -1
            if epoch > newest.producer_epoch and first != 0:
                return OUT_OF_ORDER, -1
            if epoch == newest.producer_epoch:
                for each in known:
                    if each.sequences == (first, last):
                        return OK, each.first
                if first != (newest.sequences[1] + 1) & 0x7FFFFFFF:
                    return OUT_OF_ORDER, -1
        made = Batch(
            self.end,
            self.end + len(records) - 1,
            records,
            producer,
            epoch=self.epochs[-1][0],
            sent=sent,
            producer_epoch=epoch,
            sequences=(first, last),
        )
        if batch.is_transactional:
            made.transaction = self.open.setdefault((producer, epoch), self.end)
        else:
            made.outcome = True
        self.end += len(records)
        self.batches.append(made)
        if not known or known[-1].producer_epoch != epoch:
            known = self.recent[producer] = deque(maxlen=5)
        known.append(made)
        return OK, made.first

    def end_transaction(self, producer: int, epoch: int, kind: int) -> None:
        """Appends the marker that ends what a producer sent with an epoch; nothing if it sent nothing."""
        first = self.open.pop((producer, epoch), None)
        if first is None:
            return
        for each in self.batches:
            if (each.producer, each.transaction) == (producer, first):
                each.outcome = kind == COMMIT
        self.open[producer] = first
        self.finish(producer, kind)

    def lose(self, batches: int) -> None:
        """Loses the last batches that producers sent, and what the broker knew of them."""
        sent = [each for each in self.batches if each.sent is not None][-batches:]
        self.end = sent[0].first
        self.batches = [each for each in self.batches if each.first < self.end]
        for known in self.recent.values():
            while known and known[-1] in sent:
                known.pop()

    def finish(self, producer: int, kind: int) -> None:
        """Appends the marker that ends the open transaction of a producer."""
        first = self.open.pop(producer)
        if kind == ABORT:
            self.aborted.append((producer, first, self.end))
        self.batches.append(replace(marker(self.end, producer, first, kind), epoch=self.epochs[-1][0]))
        self.end += 1

    def stable(self) -> int:
        """Returns the last stable offset."""
        return min(self.open.values(), default=self.end)

    def visible(self, start: int, end: int, *, committed: bool) -> list[Record]:
        """Returns the records that a reader of the range may see."""
        bad = {(producer, first) for producer, first, _ in self.aborted}
        bound = min(end, self.stable() if committed else self.end)
        return [
            record
            for batch in self.batches
            if batch.marker is None and not (committed and (batch.producer, batch.transaction) in bad)
            for record in batch.records
            if start <= record.offset < bound
        ]

    def fetched(
        self, position: int, most_bytes: int, *, committed: bool, chance: random.Random | None = None
    ) -> tuple[bytes, tuple[tuple[int, int], ...]]:
        """Returns the bytes that a broker sends, and the aborted transactions that it names.

        It sends at least one batch, and cuts the last one off. It names more transactions than needed,
        because it knows the end of what it sends only roughly.
        """
        chance = chance or random.Random(0)
        bound = self.stable() if committed else self.end
        sent, past = b"", position
        for batch in self.batches:
            if batch.last < position or batch.first >= bound:
                continue
            encoded = batch.encoded()
            if sent and len(sent) + len(encoded) > most_bytes:
                sent += encoded[: most_bytes - len(sent)]
                past = batch.first
                break
            sent += encoded
            past = batch.last + 1
        past += chance.randrange(20)
        named = [
            (producer, first)
            for producer, first, ends in self.aborted
            if ends >= position and first < max(past, position + 1)
        ]
        chance.shuffle(named)
        return sent, tuple(named) if committed else ()


def decoded(batches: Mapping[TopicPartition, Batch], wanted: int | None = None) -> KernelMessages:
    """Returns the records of a batch of each partition as a consumer gets them, with all columns or some."""
    group = [
        (FetchedBatches.of(kernel(), tp, each.first, memoryview(each.encoded())), each.last + 1)
        for tp, each in batches.items()
    ]
    (part,) = decode(kernel(), wanted or sum(set(WANTS.values())), group, committed=True, most_bytes=1 << 30)
    assert isinstance(part.messages, KernelMessages)
    return part.messages
