"""Turns fetched record batches (version 2, KIP-98) into Arrow buffers, with the C kernel.

In three steps: the kernel lists the batches and checks their checksums, this module leaves out what a reader
must not see and decompresses the rest, and the kernel copies the records into the buffers of one block.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.kernel_messages import Block, KernelMessages
from kafka_eos_source.kafka.needs_librdkafka import NeedsLibrdkafkaError
from kafka_eos_source.kafka.wire.decompress import decompressed
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.record_batch import HEADER_BYTES

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
#: Batches are rarely smaller than this, so bytes rarely hold more batches than this divides them into.
_USUAL_BYTES = 512
#: Type of the control record that ends an aborted transaction.
_ABORT = 0
_CONTROL_KEY = struct.Struct(">hh")
#: When this much was decompressed, the records so far are handed out before more is decompressed.
_PART_BYTES = 32 << 20


class DamagedBatchError(Exception):
    """A record batch is damaged: on the way, or in the broker's log.

    Args:
        tp: its partition.
        text: what is wrong.
    """

    def __init__(self, tp: TopicPartition, text: str) -> None:
        super().__init__(tp, text)
        self.tp = tp
        self._text = text

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True)
class FetchedBatches:
    """The complete record batches that a broker sent of one partition.

    Attributes:
        tp: the partition.
        position: the offset that was asked for. The first batch may begin before it.
        data: the bytes that the broker sent.
        batches: their positions and headers; see `BATCH`.
        aborted: producer id and first offset of each aborted transaction among them.
    """

    tp: TopicPartition
    position: int
    data: memoryview
    batches: npt.NDArray[np.void]
    aborted: tuple[tuple[int, int], ...] = ()

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
    ) -> FetchedBatches:
        """Lists the batches in what a broker sent.

        Args:
            kernel: the C kernel.
            tp, position, data, aborted: as in `FetchedBatches`.
            checks: whether to check their checksums.

        Raises:
            NeedsLibrdkafkaError: if the first batch has an older format.
            DamagedBatchError: if the first batch is damaged, or batches overlap. Another damaged batch ends
                the list.
        """
        room = len(data) // _USUAL_BYTES + 16
        while True:
            found = np.empty(room, BATCH)
            count = kernel.list(_address(data), len(data), int(checks), found.ctypes.data, room)
            if count < room:
                break
            room *= 8
        batches = found[:count]
        if count:
            last = batches[-1]
            if last["magic"] != _MAGIC or not last["is_intact"]:
                if count == 1:
                    raise _unreadable(tp, last)
                batches = batches[:-1]
            # checksums do not cover offsets
            if (batches["first_offset"][1:] < batches["past_offset"][:-1]).any():
                raise DamagedBatchError(tp, f"the record batches from offset {position} of {tp} overlap")
        return cls(tp, position, data, batches, aborted)

    def first(self, count: int) -> FetchedBatches:
        """Returns the first ``count`` batches."""
        return replace(self, batches=self.batches[:count])

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
            raise DamagedBatchError(
                self.tp,
                f"the control record at offset {batch['first_offset']} of {self.tp} cannot be decoded",
            ) from error
        return bool(kind == _ABORT)

    def decompressed(self, batch: Any) -> memoryview:
        """Returns the records of a compressed batch.

        Raises:
            DamagedBatchError: if they cannot be decompressed.
        """
        begin = int(batch["at"]) + HEADER_BYTES
        packed = self.data[begin : int(batch["at"]) + int(batch["bytes"])]
        codec = int(batch["attributes"]) & _COMPRESSION
        try:
            return decompressed(codec, packed)
        except (OSError, ValueError, zlib.error) as error:
            raise DamagedBatchError(
                self.tp,
                f"the record batch at offset {batch['first_offset']} of {self.tp} cannot be decompressed: "
                f"{error}",
            ) from error


def _after_varint(data: memoryview, at: int) -> int:
    """Returns the position after a number of variable length."""
    while data[at] >= 0x80:
        at += 1
    return at + 1


def _unreadable(tp: TopicPartition, batch: Any) -> Exception:
    offset = int(batch["first_offset"])
    if 0 <= int(batch["magic"]) < _MAGIC:
        return NeedsLibrdkafkaError(
            f"the record batch at offset {offset} of {tp} has format {batch['magic']}"
        )
    return DamagedBatchError(
        tp, f"the record batch at offset {offset} of {tp} is damaged: its checksum is wrong"
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
    kernel: Kernel, wanted: int, group: Sequence[tuple[FetchedBatches, int]], *, committed: bool
) -> Iterator[Part]:
    """Decodes the records that a reader may see, in parts that limit what is decompressed at a time.

    Args:
        kernel: the C kernel.
        wanted: the contents to copy; see `kernel.WANT_KEY`.
        group: what was fetched of different partitions, each with the offset from which on records may be
            left out.
        committed: whether the reader must not see records of aborted transactions.

    Yields:
        At least one part. After the last one, every partition has reached its `past_offset`.

    Raises:
        DamagedBatchError: if records cannot be decoded.
    """
    visible = [fetched.visible(end, committed=committed) for fetched, end in group]
    kept = np.concatenate(visible)
    origin = np.repeat(np.arange(len(group)), [len(batches) for batches in visible])
    unpacked: dict[int, memoryview] = {}
    begin = size = 0
    for index in np.flatnonzero(kept["attributes"] & _COMPRESSION).tolist():
        unpacked[index - begin] = data = group[origin[index]][0].decompressed(kept[index])
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
        tp = group[origin[damaged]][0].tp
        raise DamagedBatchError(
            tp, f"the record batch at offset {kept[damaged]['first_offset']} of {tp} cannot be decoded"
        )
    return KernelMessages(block, 0, block.rows)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0
