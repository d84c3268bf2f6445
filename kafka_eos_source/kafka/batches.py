"""Encodes records as Kafka's record batches, version 2 (KIP-98), with the C kernel.

A batch is *sealed* when its records are encoded and compressed. It is *stamped* when its header also names
the producer, the epoch and the sequence number that make it part of one transaction.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import StagedPartError
from kafka_eos_source.kafka.compression import compressor
from kafka_eos_source.kafka.kernel import Groups, Kernel, Rows
from kafka_eos_source.protocol.records import HEADER_BYTES, records_of

#: Bit of the attributes that marks the records of a transaction.
TRANSACTIONAL = 0x10

#: Where a header has the checksum and the attributes.
_CHECKSUM, _ATTRIBUTES = slice(17, 21), slice(21, 23)

_COLUMNS = ("key", "value", "partition", "timestamp", "headers")


@dataclass
class EncodedBatch:
    """A sealed record batch, and the header with which it is sent.

    Attributes:
        sealed: the batch before it was stamped, which may be in memory that cannot be written.
        again: encodes the same records as batches of up to a number of bytes; None = a task has encoded them.
        limit_bytes: largest batch before compression, when this one was encoded.
        records: number of records.
        header: the first `HEADER_BYTES` bytes, as `stamp` made them.
        sequence: number of the first record, as `stamp` was told.
    """

    sealed: memoryview
    again: Callable[[int], SealedBatches] | None = None
    limit_bytes: int = 0
    records: int = 0
    header: bytes = b""
    sequence: int = -1

    def __post_init__(self) -> None:
        self.records = records_of(self.sealed)

    @property
    def body(self) -> memoryview:
        """The bytes after the header."""
        return self.sealed[HEADER_BYTES:]

    @property
    def size_bytes(self) -> int:
        """Bytes of the batch, as the broker compares them with ``max.message.bytes``."""
        return len(self.sealed)

    def stamp(self, kernel: Kernel, producer_id: int, epoch: int, sequence: int) -> None:
        """Makes the header name its producer, without copying or changing the sealed batch.

        Brokers recognise a batch by that if it is sent again. It also makes the batch part of a transaction.

        Args:
            kernel: the C kernel.
            producer_id: of the producer; -1 = brokers do not recognise the batch.
            epoch: of the producer; a transaction has one of its own.
            sequence: number of the first record among those of this producer and epoch in the partition.
        """
        header = ctypes.create_string_buffer(bytes(self.sealed[:HEADER_BYTES]), HEADER_BYTES)
        kernel.stamp(header, len(self.sealed) - HEADER_BYTES, producer_id, epoch, sequence)
        self.header, self.sequence = header.raw, sequence

    def check(self, kernel: Kernel) -> None:
        """Checks the records, after a broker has found that they are not what the header says.

        Raises:
            StagedPartError: if the records have changed since they were sealed.
        """
        body = np.frombuffer(self.body, np.uint8)
        found = kernel.crc32c(0, body.ctypes.data, len(body))
        if found != int.from_bytes(self.sealed[_CHECKSUM], "big"):
            raise StagedPartError(
                f"the checksum of a record batch of {len(self.sealed):,} bytes is wrong: its file in the "
                "staging folder was changed while the batch was written.",
                fix="find out who changed it, and restart the query. Readers see nothing of the batch.",
            )


@dataclass(frozen=True)
class SealedBatches:
    """Record batches without a stamp.

    Attributes:
        data: the batches, one after the other.
        ends: where each of them ends in ``data``.
        partitions: partition of each of them.
        limit_bytes: largest of them before compression.
        again: encodes rows again: from and up to which row of all batches, their partition, the limit. None =
            that is not possible.
    """

    data: memoryview
    ends: npt.NDArray[np.int64]
    partitions: npt.NDArray[np.int32]
    limit_bytes: int = 0
    again: Callable[[int, int, int, int], SealedBatches] | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """Yields the partition and the bytes of each batch."""
        begin = 0
        for partition, end in zip(self.partitions.tolist(), self.ends.tolist(), strict=True):
            yield partition, self.data[begin:end]
            begin = end

    def encoded(self) -> Iterator[tuple[int, EncodedBatch]]:
        """Yields the partition of each batch, and the batch."""
        begin = 0
        for partition, sealed in self:
            batch = EncodedBatch(sealed)
            if self.again is not None:
                end = begin + batch.records
                batch.again, batch.limit_bytes = partial(self.again, begin, end, partition), self.limit_bytes
                begin = end
            yield partition, batch


class Encoder:
    """Encodes rows as sealed batches.

    Args:
        kernel: the C kernel.
        compression: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``.
        level: level of the compression; None = the codec's default.
        transactional: whether the batches belong to transactions.
    """

    def __init__(
        self,
        kernel: Kernel,
        compression: str = "none",
        level: int | None = None,
        *,
        transactional: bool = True,
    ) -> None:
        self._kernel = kernel
        self._kind = TRANSACTIONAL if transactional else 0
        codec, self._compress = compressor(compression, level)
        self._attributes = codec | self._kind

    def seal(self, rows: Rows, groups: Groups, limit_bytes: int) -> SealedBatches:
        """Encodes rows as batches, those of each partition in their order.

        Args:
            rows: rows of one topic.
            groups: which of them to encode, by partition.
            limit_bytes: largest batch before compression. A record that alone is larger gets a batch of its
                own.
        """
        # two batches in a row of one partition exceed the limit together, or the second one's first row would
        # be in the first one
        room = max(1, limit_bytes - HEADER_BYTES)
        most = int(np.minimum(2 * groups.encoded_bytes // room + 1, groups.lengths).sum())
        out = np.empty(int(groups.encoded_bytes.sum()) + most * HEADER_BYTES, np.uint8)
        ends, owners = np.empty(most, np.int64), np.empty(most, np.int64)
        count = self._kernel.seal(
            rows.address,
            groups.order.ctypes.data,
            groups.ends.ctypes.data,
            len(groups.ends),
            time.time_ns() // 1_000_000,
            self._attributes,
            limit_bytes,
            out.ctypes.data,
            len(out),
            ends.ctypes.data,
            owners.ctypes.data,
            most,
        )
        if count < 0:
            raise AssertionError(f"{groups.order.size} rows do not fit into {len(out)} bytes")
        ends, partitions = ends[:count], groups.partitions[owners[:count]]
        used = out.data[: int(ends[-1]) if count else 0]
        sealed = SealedBatches(used, ends, partitions, limit_bytes, partial(self._seal_some, rows, groups))
        return sealed if self._compress is None else self._compressed(sealed, self._compress)

    def _seal_some(
        self, rows: Rows, groups: Groups, begin: int, end: int, partition: int, limit_bytes: int
    ) -> SealedBatches:
        """Seals some rows of one partition again, from and up to a position in the order of the groups."""
        return self.seal(rows, groups.slice(begin, end, partition), limit_bytes)

    def _compressed(self, sealed: SealedBatches, compress: Callable[[memoryview], bytes]) -> SealedBatches:
        """Compresses batches, but for those that compression would enlarge."""
        pieces: list[bytearray | bytes | memoryview] = []
        for _, batch in sealed:
            header, records = bytearray(batch[:HEADER_BYTES]), batch[HEADER_BYTES:]
            packed = compress(records)
            if len(packed) < len(records):
                address = np.frombuffer(packed, np.uint8).ctypes.data
                header[_CHECKSUM] = self._kernel.crc32c(0, address, len(packed)).to_bytes(4, "big")
                pieces += [header, packed]
            else:
                header[_ATTRIBUTES] = self._kind.to_bytes(2, "big")
                pieces += [header, records]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return replace(sealed, data=memoryview(b"".join(pieces)), ends=np.cumsum(sizes)[1::2])


def next_sequence(sequence: int, records: int) -> int:
    """Returns the sequence number that follows; it wraps after 2^31 - 1 to 0, as in Java's client."""
    return (sequence + records) & 0x7FFFFFFF


@dataclass
class _Topic:
    """Rows of one topic.

    Attributes:
        parts: their columns.
        partitions: partitions of the first ``counted`` parts; None if a row of these has no partition yet.
        counted: number of parts that ``partitions`` covers.
    """

    parts: list[Mapping[str, pa.Array]] = field(default_factory=list)
    partitions: set[int] | None = field(default_factory=set)
    counted: int = 0


class CollectedRows:
    """Rows by topic, in the order in which they came.

    Args:
        kernel: the C kernel.
        encoder: encodes the rows.
        largest_bytes: largest record, without compression.
        partitioner: one of `kernel.PARTITIONERS`.

    Attributes:
        bytes: size of the rows.
        records: number of rows.
    """

    def __init__(self, kernel: Kernel, encoder: Encoder, largest_bytes: int, partitioner: str) -> None:
        self.bytes = self.records = 0
        self._kernel = kernel
        self._encoder = encoder
        self._largest_bytes = largest_bytes
        self._partitioner = partitioner
        self._topics: dict[str, _Topic] = {}

    def __iter__(self) -> Iterator[str]:
        """Yields the topics that have rows."""
        return iter(list(self._topics))

    def add(self, topic: str, columns: Mapping[str, pa.Array], size_bytes: int) -> None:
        """Takes rows of a topic: ``value``, and optionally other columns of `spark.arrow.STAGED_ARROW`."""
        self._topics.setdefault(topic, _Topic()).parts.append(columns)
        self.bytes += size_bytes
        self.records += len(columns["value"])

    def conflicts(self, topic: str, partitions: Collection[int]) -> set[int] | None:
        """Returns those of the partitions that have rows here, which must be encoded before later batches.

        Returns:
            None if rows have no partition yet: any row may belong to any partition.
        """
        found = self._topics.get(topic)
        if found is None:
            return set()
        for columns in found.parts[found.counted :]:
            given = columns.get("partition")
            if given is None or given.null_count:
                found.partitions = None
            elif found.partitions is not None:
                found.partitions.update(np.unique(given.to_numpy()).tolist())
        found.counted = len(found.parts)
        return None if found.partitions is None else found.partitions.intersection(partitions)

    def take(
        self, topic: str, partition_count: int, limit_bytes: int, only: set[int] | None = None
    ) -> SealedBatches:
        """Removes rows of a topic, and encodes them by partition and in order within each.

        Args:
            topic: the topic.
            partition_count: of the topic.
            limit_bytes: largest batch before compression.
            only: partitions whose rows to take; the others stay. None = all.

        Raises:
            InvalidRecordError: if a record is too large.
        """
        parts = self._topics.pop(topic).parts
        rows = Rows(parts)
        groups = rows.grouped(self._kernel, topic, partition_count, self._largest_bytes, self._partitioner)
        if only is not None:
            chosen = np.isin(groups.partitions, list(only))
            self._put_back(topic, parts, rows, groups.select(~chosen))
            groups = groups.select(chosen)
        self.records -= len(groups.order)
        if not self._topics:
            self.bytes = 0
        return self._encoder.seal(rows, groups, limit_bytes)

    def _put_back(self, topic: str, parts: list[Mapping[str, pa.Array]], rows: Rows, rest: Groups) -> None:
        """Keeps rows whose partitions are known; they are already grouped by partition."""
        if len(rest.order):
            order = pa.array(rows.numbers(rest.order))
            names = [name for name in _COLUMNS if any(name in part for part in parts)]
            kept = {name: _concatenated(name, parts).take(order) for name in names}
            self._topics[topic] = _Topic([kept], set(rest.partitions.tolist()), 1)


def _concatenated(name: str, parts: list[Mapping[str, pa.Array]]) -> pa.Array:
    """Returns one column of several parts; null where a part does not have it."""
    kind = next(part[name].type for part in parts if name in part)
    found = [part[name] if name in part else pa.nulls(len(part["value"]), kind) for part in parts]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)
