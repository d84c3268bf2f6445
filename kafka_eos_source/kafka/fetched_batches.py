"""Turns fetched record batches (version 2, KIP-98) into Arrow buffers, with the C kernel.

In three steps: the kernel lists the batches and checks their checksums, this module leaves out what a reader
must not see and decompresses the rest, and the kernel copies the records into the buffers of one block.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.compression import TooLargeError, decompressed
from kafka_eos_source.kafka.kernel import Block, Kernel, KernelMessages
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.records import HEADER_BYTES

#: ``batch_t`` of kernel.c.
BATCH = np.dtype(
    [
        ("at", "i8"),
        ("bytes", "i8"),
        ("first_offset", "i8"),
        ("past_offset", "i8"),
        ("producer_id", "i8"),
        ("first_ms", "i8"),
        ("max_ms", "i8"),
        ("count", "i4"),
        ("attributes", "i4"),
        ("magic", "i4"),
        ("is_intact", "i4"),
    ]
)
#: ``records_t`` of kernel.c.
RECORDS = np.dtype(
    [
        ("at", "u8"),
        ("bytes", "i8"),
        ("first_offset", "i8"),
        ("past_offset", "i8"),
        ("first_ms", "i8"),
        ("append_ms", "i8"),
        ("topic", "i8"),
        ("count", "i4"),
        ("partition", "i4"),
    ]
)

#: Bits of a batch's attributes.
_COMPRESSION, _LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
_MAGIC = 2
#: Where a batch's header has the epoch of the leader that appended it.
_LEADER_EPOCH = np.arange(12, 16)
#: The byte of a batch that names its format.
MAGIC = bytes([_MAGIC])
_CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
#: Positions in a batch: what its length counts, and what its checksum covers. Offsets are not covered.
_LENGTH_COUNTS_FROM, _CHECKSUM_COVERS_FROM, _OLD_CHECKSUM_COVERS_FROM = 12, 21, 16
#: Batches are rarely smaller than this, so bytes rarely hold more batches than this divides them into.
_USUAL_BYTES = 512
#: Type of the control record that ends an aborted transaction.
_ABORT = 0
_CONTROL_KEY = struct.Struct(">hh")
#: When this much was decompressed, the records so far are handed out before more is decompressed.
_PART_BYTES = 32 << 20
#: Batches of several partitions are decoded at once while they have at most this many bytes. Decoding each of
#: 1,000 partitions with a few records alone took 0.3 s.
_GROUP_BYTES = 1 << 20
#: What a record needs in memory beside its bytes, for its offsets, numbers and times in a block.
_RECORD_BYTES = 48


class DamagedBatchError(Exception):
    """A record batch is damaged: on the way, or in the broker's log.

    Args:
        tp: its partition.
        text: what is wrong, as a clause about "it".
        position: the offset that was asked for.
        offset: the batch's first offset; its header may be wrong, too.
        at: where it begins in the bytes that the broker sent.
        digest: identifies the damaged bytes.
        past_offset: the offset after the batch, if the checksum proves its header; else -1.
        is_too_large: whether nothing is wrong with it but that its records are larger than the reader allows.
    """

    def __init__(
        self,
        tp: TopicPartition,
        text: str,
        *,
        position: int,
        offset: int,
        at: int = 0,
        digest: int = 0,
        past_offset: int = -1,
        is_too_large: bool = False,
    ) -> None:
        super().__init__(tp, text)
        self.tp = tp
        self.text = text
        self.position = position
        self.offset = offset
        self.at = at
        self.digest = digest
        self.past_offset = past_offset
        self.is_too_large = is_too_large

    def __str__(self) -> str:
        what = "too large" if self.is_too_large else "damaged"
        return f"the record batch at offset {self.offset} of {self.tp} is {what}: {self.text}"


@dataclass(frozen=True)
class FetchedBatches:
    """The complete record batches that a broker sent of one partition.

    Attributes:
        tp: the partition.
        position: the offset that was asked for. The first batch may begin before it.
        data: the bytes that the broker sent.
        batches: their positions and headers; see `BATCH`.
        aborted: producer id and first offset of each aborted transaction among them.
        damage: what is wrong with the batch that ends the list; None = the bytes end there.
        is_proven: whether checksums prove the headers of the batches.
    """

    tp: TopicPartition
    position: int
    data: memoryview
    batches: npt.NDArray[np.void]
    aborted: tuple[tuple[int, int], ...] = ()
    damage: DamagedBatchError | None = None
    is_proven: bool = True

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        tp: TopicPartition,
        position: int,
        data: memoryview,
        aborted: tuple[tuple[int, int], ...] = (),
        *,
        checks: bool = True,
        log_end: int = -1,
    ) -> FetchedBatches:
        """Lists the batches in what a broker sent, up to the first damaged one.

        Args:
            kernel: the C kernel.
            tp, position, data, aborted: as in `FetchedBatches`.
            checks: whether to check their checksums.
            log_end: the high watermark, beyond which no batch can end; -1 = unknown.

        Raises:
            InvalidRecordError: if the first batch has a format from before Kafka 0.11.
        """
        batches = listed(kernel, data, checks=checks)
        damage = None
        if len(batches) and (batches[-1]["magic"] != _MAGIC or not batches[-1]["is_intact"]):
            last, batches = batches[-1], batches[:-1]
            if _has_old_format(data, last):
                if not len(batches):
                    raise _old_format(tp, int(last["first_offset"]), int(last["magic"]))
            else:
                text = what_is_wrong(kernel, data[int(last["at"]) :])
                damage = cls(tp, position, data, batches).damaged(last, text)
        # checksums do not cover offsets
        first, past = batches["first_offset"], batches["past_offset"]
        overlaps = np.flatnonzero(first[1:] < past[:-1])
        beyond = np.flatnonzero(past > log_end) if log_end >= 0 else overlaps[:0]
        if len(overlaps) or len(beyond):
            index, text = len(batches), ""
            if len(overlaps):
                index = int(overlaps[0])
                text = f"it overlaps with the one at offset {first[index + 1]}"
                if first[index] <= (past[index - 1] if index else position):
                    # the batches before are in their place, so that the second of the two is not
                    index, text = index + 1, f"it overlaps with the one at offset {first[index]}"
            if len(beyond) and beyond[0] < index:
                index = int(beyond[0])
                text = f"it ends before offset {past[index]}, but the log before offset {log_end}"
            text = f"its first offset is {first[index]}: {text}"
            bad, batches = batches[index], batches[:index]
            damage = cls(tp, position, data, batches).damaged(bad, text, offset_is_wrong=True)
        return cls(tp, position, data, batches, aborted, damage, checks)

    def damaged(
        self,
        batch: Any,
        text: str,
        *,
        offset_is_wrong: bool = False,
        is_proven: bool = False,
        is_too_large: bool = False,
    ) -> DamagedBatchError:
        """Returns the error for a batch that begins behind the list, or is part of it.

        Args:
            batch: its position and header.
            text: what is wrong with it.
            offset_is_wrong: whether its first offset is known to be wrong.
            is_proven: whether its checksum proves its header.
            is_too_large: as in `DamagedBatchError`.
        """
        at, offset = int(batch["at"]), int(batch["first_offset"])
        before = self.batches[self.batches["at"] < at]
        reached = int(before[-1]["past_offset"]) if len(before) else self.position
        if offset_is_wrong or offset < 0 or (len(before) and offset < reached):
            offset = reached
        size = max(HEADER_BYTES, int(batch["bytes"]))
        return DamagedBatchError(
            self.tp,
            text,
            position=self.position,
            offset=offset,
            at=at,
            digest=zlib.crc32(self.data[at : at + size]),
            past_offset=int(batch["past_offset"]) if is_proven else -1,
            is_too_large=is_too_large,
        )

    def before(self, offset: int) -> FetchedBatches:
        """Returns only the batches that begin before an offset."""
        return replace(self, batches=self.batches[self.batches["first_offset"] < offset])

    def first(self, count: int) -> FetchedBatches:
        """Returns the first ``count`` batches, without what follows them."""
        return replace(self, batches=self.batches[:count], damage=None)

    @property
    def past_offset(self) -> int:
        """The offset after the last batch; `position` without batches."""
        return int(self.batches[-1]["past_offset"]) if len(self.batches) else self.position

    def above(self, epoch: int, end: int) -> int | None:
        """Returns the index of the first batch before an offset whose leader epoch is above ``epoch``."""
        if epoch < 0 or not len(self.batches):
            return None
        at = self.batches["at"][:, None] + _LEADER_EPOCH
        found = np.frombuffer(self.data, np.uint8)[at].view(">i4")[:, 0] > epoch
        found &= self.batches["first_offset"] < end
        return int(found.argmax()) if found.any() else None

    @property
    def mean_bytes(self) -> float:
        """Bytes per offset, as the broker sent them. There is at least one batch."""
        offsets = self.past_offset - int(self.batches[0]["first_offset"])
        return max(1.0, int(self.batches["bytes"].sum()) / offsets)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest batch, as the broker sent it."""
        return int(self.batches["bytes"].max()) if len(self.batches) else 0

    def visible(self, end: int, *, committed: bool) -> npt.NDArray[np.void]:
        """Returns the batches with records that a reader may see.

        Args:
            end: batches from this offset on may be left out.
            committed: whether the reader must not see records of aborted transactions.

        Raises:
            DamagedBatchError: if a control record cannot be decoded.
        """
        batches = self.batches[self.batches["first_offset"] < end]
        hidden = (batches["attributes"] & _CONTROL) != 0
        if committed and self.aborted:
            hidden |= self._aborted(batches)
        return batches[~hidden] if hidden.any() else batches

    def _aborted(self, batches: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Returns which batches belong to aborted transactions, as KIP-98 and Java's consumer decide.

        A producer's batches are aborted from the first offset of its aborted transaction on, up to the marker
        that ends it. The broker names the transactions in no particular order.
        """
        left = sorted(self.aborted, key=lambda each: each[1], reverse=True)
        open_ids: set[int] = set()
        found = np.zeros(len(batches), bool)
        for index, batch in enumerate(batches):
            while left and left[-1][1] < batch["past_offset"]:
                open_ids.add(left.pop()[0])
            producer, attributes = int(batch["producer_id"]), int(batch["attributes"])
            if producer not in open_ids:
                continue
            if attributes & _CONTROL:
                if self._is_abort_marker(batch):
                    open_ids.discard(producer)
            else:
                found[index] = bool(attributes & _TRANSACTIONAL)
        return found

    def left_open(self) -> tuple[tuple[int, int], ...]:
        """Returns the aborted transactions that no marker among the batches ends."""
        ended: dict[int, int] = {}
        for batch in self.batches[(self.batches["attributes"] & _CONTROL) != 0]:
            if self._is_abort_marker(batch):
                ended[int(batch["producer_id"])] = int(batch["first_offset"])
        return tuple(each for each in self.aborted if each[1] > ended.get(each[0], -1))

    def _is_abort_marker(self, batch: Any) -> bool:
        """Whether a control batch, which has one record, ends an aborted transaction.

        The record has a length, attributes, and the differences of time and offset in front of its key. The
        key is a version and a type, both of 16 bits.
        """
        if not batch["count"]:  # compaction keeps the last batch of a producer, without its record
            return False
        begin = int(batch["at"]) + HEADER_BYTES
        record = self.data[begin : int(batch["at"]) + int(batch["bytes"])]
        try:
            at = _after_varint(record, 0) + 1
            key = _after_varint(record, _after_varint(record, _after_varint(record, at)))
            _version, kind = _CONTROL_KEY.unpack_from(record, key)
        except (IndexError, struct.error) as error:
            text = "its control record cannot be decoded"
            raise self.damaged(batch, text, is_proven=self.is_proven) from error
        return bool(kind == _ABORT)

    def decompressed(self, batch: Any, most_bytes: int) -> memoryview:
        """Returns the records of a compressed batch.

        Args:
            batch: its position and header.
            most_bytes: the most memory that they may need.

        Raises:
            DamagedBatchError: if they cannot be decompressed, or need more.
        """
        begin = int(batch["at"]) + HEADER_BYTES
        packed = self.data[begin : int(batch["at"]) + int(batch["bytes"])]
        codec, count = int(batch["attributes"]) & _COMPRESSION, int(batch["count"])
        try:
            return decompressed(codec, packed, most_bytes - _RECORD_BYTES * count)
        except TooLargeError as error:
            text = (
                f"its {count} record(s) are {len(packed)} bytes as {_CODECS.get(codec, codec)}, and need "
                f"more than {most_bytes} bytes of memory"
            )
            raise self.damaged(batch, text, is_proven=True, is_too_large=True) from error
        except (OSError, ValueError, zlib.error) as error:
            text = f"its records cannot be decompressed as {_CODECS.get(codec, codec)} ({error})"
            raise self.damaged(batch, text, is_proven=self.is_proven) from error


def _after_varint(data: memoryview, at: int) -> int:
    """Returns the position after a number of variable length."""
    while data[at] >= 0x80:
        at += 1
    return at + 1


def listed(kernel: Kernel, data: memoryview, *, checks: bool = True) -> npt.NDArray[np.void]:
    """Returns positions and headers of the batches in the data; only the last one may be unreadable."""
    room = len(data) // _USUAL_BYTES + 16
    while True:
        found = np.empty(room, BATCH)
        count = kernel.list(_address(data), len(data), int(checks), found.ctypes.data, room)
        if count < room:
            return found[:count]
        room *= 8


def what_is_wrong(kernel: Kernel, batch: memoryview) -> str:
    """Returns what is wrong with a record batch, as a clause about "it".

    Args:
        kernel: the C kernel.
        batch: bytes that begin with it.
    """
    if len(batch) < HEADER_BYTES:
        return f"it ends after {len(batch)} bytes"
    length, magic = int.from_bytes(batch[8:12], "big", signed=True), batch[16]
    stored = int.from_bytes(batch[17:21], "big")
    if magic != _MAGIC:
        return f"its format is {magic}; expected {_MAGIC}"
    if length < HEADER_BYTES - _LENGTH_COUNTS_FROM:
        least = HEADER_BYTES - _LENGTH_COUNTS_FROM
        return f"its length is {length} bytes; expected at least {least}"
    if length > len(batch) - _LENGTH_COUNTS_FROM:
        sent = len(batch) - _LENGTH_COUNTS_FROM
        return f"its length is {length} bytes, of which the broker's log has only {sent}"
    covered = batch[_CHECKSUM_COVERS_FROM : _LENGTH_COUNTS_FROM + length]
    computed = kernel.crc32c(0, _address(covered), len(covered))
    if computed != stored:
        return f"its checksum is {stored:#010x}, and that of its bytes is {computed:#010x}"
    return "its offsets or its number of records are impossible"


def _has_old_format(data: memoryview, batch: Any) -> bool:
    """Whether a batch has a format before version 2, and its checksum proves that."""
    at, past = int(batch["at"]), int(batch["at"]) + int(batch["bytes"])
    if not 0 <= int(batch["magic"]) < _MAGIC or past < at + _OLD_CHECKSUM_COVERS_FROM:
        return False
    stored = int.from_bytes(data[at + _LENGTH_COUNTS_FROM : at + _OLD_CHECKSUM_COVERS_FROM], "big")
    return zlib.crc32(data[at + _OLD_CHECKSUM_COVERS_FROM : past]) == stored


def _old_format(tp: TopicPartition, offset: int, magic: int) -> InvalidRecordError:
    return InvalidRecordError(
        f"the record at offset {offset} of {tp} has the record format {magic}, from before Kafka 0.11; "
        f"expected format {_MAGIC}. Its checksum is right, so it is not damaged.",
        fix="copy the topic with a program that still reads such records (MirrorMaker or Kafka Connect of "
        "Kafka 3), and read the copy; or let retention remove them, or remove them with "
        "kafka-delete-records.sh; or start a new query behind them with startingOffsets.",
    )


class Part(NamedTuple):
    """Some decoded messages.

    Attributes:
        messages: of one partition after the other, in the order of offsets within each.
        reached: the offset before which nothing more will come, by partition.
    """

    messages: KernelMessages | tuple[()]
    reached: dict[TopicPartition, int]


def decode(
    kernel: Kernel,
    wanted: int,
    group: Sequence[tuple[FetchedBatches, int]],
    *,
    committed: bool,
    most_bytes: int,
) -> Iterator[Part]:
    """Decodes the records that a reader may see, in parts that limit what is decompressed at a time.

    Args:
        kernel: the C kernel.
        wanted: the contents to copy; see `kernel.WANT_KEY`.
        group: what was fetched of different partitions, each with the offset from which on records may be
            left out.
        committed: whether the reader must not see records of aborted transactions.
        most_bytes: the most memory that the records of one compressed batch may need.

    Yields:
        At least one part. After the last one, every partition has reached its `past_offset`.

    Raises:
        DamagedBatchError: if records cannot be decoded, or a compressed batch is too large.
    """
    visible = [fetched.visible(end, committed=committed) for fetched, end in group]
    kept = np.concatenate(visible)
    origin = np.repeat(np.arange(len(group)), [len(batches) for batches in visible])
    unpacked: dict[int, memoryview] = {}
    begin = size = 0
    for index in np.flatnonzero(kept["attributes"] & _COMPRESSION).tolist():
        unpacked[index - begin] = data = group[origin[index]][0].decompressed(kept[index], most_bytes)
        size += len(data)
        past = index + 1
        if size >= _PART_BYTES and past < len(kept):
            held, unpacked = unpacked, {}
            messages = _decoded(kernel, wanted, group, kept[begin:past], origin[begin:past], held)
            reached = {each.tp: each.past_offset for each, _ in group[: origin[past]]}
            reached[group[origin[past]][0].tp] = int(kept[past]["first_offset"])
            begin, size = past, 0
            del held
            yield Part(messages, reached)
            del messages
    rest = _decoded(kernel, wanted, group, kept[begin:], origin[begin:], unpacked) if len(kept) else ()
    yield Part(rest, {each.tp: each.past_offset for each, _ in group})


def _decoded(
    kernel: Kernel,
    wanted: int,
    group: Sequence[tuple[FetchedBatches, int]],
    kept: npt.NDArray[np.void],
    origin: npt.NDArray[np.intp],
    unpacked: Mapping[int, memoryview],
) -> KernelMessages:
    """Decodes the records of some batches.

    Args:
        kernel, wanted, group: as in `decode`.
        kept: the batches.
        origin: the index in ``group`` of each batch.
        unpacked: decompressed records, by the index of their batch.
    """
    topics = {name: number for number, name in enumerate({each.tp.topic: None for each, _ in group})}
    address, partition, topic = (
        np.array(values)[origin]
        for values in zip(
            *((_address(each.data), each.tp.partition, topics[each.tp.topic]) for each, _ in group),
            strict=True,
        )
    )
    records = np.zeros(len(kept), RECORDS)
    records["at"] = address + kept["at"] + HEADER_BYTES
    records["bytes"] = kept["bytes"] - HEADER_BYTES
    for name in ("first_offset", "past_offset", "first_ms", "count"):
        records[name] = kept[name]
    records["append_ms"] = np.where(kept["attributes"] & _LOG_APPEND_TIME, kept["max_ms"], -1)
    records["partition"] = partition
    records["topic"] = topic
    for index, data in unpacked.items():
        records[index]["at"], records[index]["bytes"] = _address(data), len(data)
    found = kernel.decode(records.ctypes.data, len(records), wanted)
    if not found:
        raise MemoryError("not enough memory for the fetched records")
    damaged = int(found.contents.damaged)
    block = Block(kernel, found, {number: name for name, number in topics.items()})
    if damaged >= 0:
        fetched = group[origin[damaged]][0]
        text = "its records cannot be decoded: a length, a number or an offset in them is impossible"
        raise fetched.damaged(kept[damaged], text, is_proven=fetched.is_proven)
    return KernelMessages(block, 0, block.rows)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


class Arrived:
    """Fetched batches in the order of their arrival.

    Args:
        kernel: the C kernel.
        committed: whether the reader must not see records of aborted transactions.
        most_bytes: the most memory that the records of one compressed batch may need.
    """

    def __init__(self, kernel: Kernel, *, committed: bool, most_bytes: int) -> None:
        self._kernel = kernel
        self._committed = committed
        self._most_bytes = most_bytes
        #: The node, the number of its answer, and the batches.
        self._fetched: deque[tuple[int, int, FetchedBatches]] = deque()
        self._of_partition: Counter[TopicPartition] = Counter()
        #: Decodes the first `_in_parts` entries of `_fetched`; None = none of them is being decoded.
        self._parts: Iterator[Part] | None = None
        self._in_parts = 0

    def __len__(self) -> int:
        """Returns how often batches of a partition arrived."""
        return len(self._fetched)

    @property
    def size_bytes(self) -> int:
        """Size of the batches, as brokers sent them."""
        return sum(len(batches.data) for *_, batches in self._fetched)

    def has(self, tp: TopicPartition) -> bool:
        """Returns whether something of a partition has arrived."""
        return self._of_partition[tp] > 0

    def answers(self) -> Counter[int]:
        """Returns the number of answers, by node."""
        return Counter(node for node, _ in {each[:2] for each in self._fetched})

    def add(self, node: int, answer: int, batches: FetchedBatches) -> None:
        """Adds what a node sent of one partition in an answer."""
        self._fetched.append((node, answer, batches))
        self._of_partition[batches.tp] += 1

    def drop(self, tps: Collection[TopicPartition]) -> None:
        """Discards what has arrived of these partitions."""
        if not any(self._of_partition[tp] for tp in tps):
            return
        if any(batches.tp in tps for *_, batches in islice(self._fetched, self._in_parts)):
            self._start_again()
        self._fetched = deque(each for each in self._fetched if each[-1].tp not in tps)
        for tp in tps:
            del self._of_partition[tp]

    def keep_before(self, tp: TopicPartition, offset: int) -> None:
        """Discards what has arrived of a partition from a record batch on; the rest is decoded again."""
        if any(batches.tp == tp for *_, batches in islice(self._fetched, self._in_parts)):
            self._start_again()
        kept: deque[tuple[int, int, FetchedBatches]] = deque()
        for node, answer, batches in self._fetched:
            left = batches.before(offset) if batches.tp == tp else batches
            if len(left.batches):
                kept.append((node, answer, left))
        self._fetched = kept
        self._of_partition = Counter(batches.tp for *_, batches in kept)

    def clear(self) -> None:
        """Discards everything."""
        self._fetched.clear()
        self._of_partition.clear()
        self._start_again()

    def next_part(self, wanted: int, end: Callable[[TopicPartition], int]) -> Part:
        """Decodes the next messages. Those of other partitions may come again after `drop`.

        Args:
            wanted: the contents to copy; see `kernel.WANT_KEY`.
            end: returns the offset of a partition from which on nothing is wanted.

        Raises:
            DamagedBatchError: if records cannot be decoded, or are too large. Call `keep_before` before the
                next call.
        """
        if self._parts is None:
            group = self._group()
            self._in_parts = len(group)
            pairs = [(each, end(each.tp)) for each in group]
            self._parts = decode(
                self._kernel, wanted, pairs, committed=self._committed, most_bytes=self._most_bytes
            )
        part = next(self._parts)
        while self._in_parts and part.reached.get(self._fetched[0][-1].tp, -1) >= self._past_first():
            *_, batches = self._fetched.popleft()
            self._of_partition[batches.tp] -= 1
            self._in_parts -= 1
        if not self._in_parts:
            self._start_again()
        return part

    def _start_again(self) -> None:
        self._parts, self._in_parts = None, 0

    def _past_first(self) -> int:
        *_, batches = self._fetched[0]
        return batches.past_offset

    def _group(self) -> list[FetchedBatches]:
        group: dict[TopicPartition, FetchedBatches] = {}
        size = 0
        for *_, batches in self._fetched:
            size += len(batches.data)
            # Two answers of a partition may overlap; their reader sees that only if it gets them one by one.
            if group and (size > _GROUP_BYTES or batches.tp in group):
                break
            group[batches.tp] = batches
        return [*group.values()]
