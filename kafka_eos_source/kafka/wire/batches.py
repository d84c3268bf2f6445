"""Encodes records as Kafka's record batches, version 2 (KIP-98), with the C kernel."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from ctypes import byref, c_int64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.wire.rows import Rows

#: Bytes before the first record.
HEADER_BYTES = 61

#: Bit of the attributes that marks the records of a transaction.
TRANSACTIONAL = 0x10

#: Bytes that are compressed at a time.
_LZ4_BLOCK_BYTES = 64 << 10
_SNAPPY_BLOCK_BYTES = 32 << 10

#: An LZ4 frame's magic number and descriptor: version 1, independent blocks of 64 KiB, no checksums (Kafka
#: refuses dependent blocks). The last byte is the descriptor's checksum.
_LZ4_FRAME = b"\x04\x22\x4d\x18\x60\x40\x82"
#: The frame that Java's snappy library (xerial) expects.
_SNAPPY_FRAME = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"


@dataclass(frozen=True)
class Stamp:
    """What makes a batch part of one transaction.

    Attributes:
        producer_id: of the producer.
        epoch: of the producer, for this transaction.
        sequence: number of the first record among those of this producer and epoch in the partition.
    """

    producer_id: int
    epoch: int
    sequence: int


@dataclass
class EncodedBatch:
    """A record batch that is ready to be sent once `stamp` has completed it.

    Attributes:
        records: number of records.
        attributes: compression, and the mark of a transaction.
        data: the bytes, in memory that may be written.
    """

    records: int
    attributes: int
    data: memoryview

    @property
    def size_bytes(self) -> int:
        """Bytes of the batch, as the broker compares them with ``max.message.bytes``."""
        return len(self.data)


class Encoder:
    """Encodes messages of one partition as batches.

    Args:
        kernel: the C kernel.
        compression: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``.
        level: level of the compression; None = the codec's default.
    """

    def __init__(self, kernel: Kernel, compression: str = "none", level: int | None = None) -> None:
        self._kernel = kernel
        self._attributes, self._compress = _codec(compression, level)

    def encode(self, rows: Rows, order: npt.NDArray[np.int64], limit_bytes: int) -> Iterator[EncodedBatch]:
        """Yields rows as batches.

        Args:
            rows: rows of one topic.
            order: which of them belong to one partition, in their order.
            limit_bytes: largest batch before compression. A record that alone is larger gets a batch of its
                own.
        """
        now_ms = time.time_ns() // 1_000_000
        taken = c_int64()
        done = 0
        enough = HEADER_BYTES + int(rows.encoded_sizes[order].sum())
        while done < len(order):
            rest = order[done:]
            capacity = min(limit_bytes, enough)
            while True:
                out = np.empty(max(capacity, HEADER_BYTES), np.uint8)
                size = self._kernel.encode(
                    rows.address,
                    rest.ctypes.data,
                    len(rest),
                    now_ms,
                    limit_bytes,
                    out.ctypes.data,
                    len(out),
                    byref(taken),
                )
                if taken.value:
                    break
                capacity = size
            yield EncodedBatch(taken.value, self._attributes | TRANSACTIONAL, self._compressed(out, size))
            done += taken.value

    def _compressed(self, out: npt.NDArray[np.uint8], size: int) -> memoryview:
        if self._compress is None:
            return out.data[:size]
        packed = self._compress(out.data[HEADER_BYTES:size])
        smaller = np.empty(HEADER_BYTES + len(packed), np.uint8)
        smaller[:HEADER_BYTES] = out[:HEADER_BYTES]
        smaller[HEADER_BYTES:] = np.frombuffer(packed, np.uint8)
        return smaller.data


def stamp(kernel: Kernel, batch: EncodedBatch, owner: Stamp) -> None:
    """Completes a batch's header: attributes, producer id, epoch, sequence, length and checksum."""
    at = np.frombuffer(batch.data, np.uint8).ctypes.data
    kernel.stamp(at, batch.size_bytes, batch.attributes, owner.producer_id, owner.epoch, owner.sequence)


def next_sequence(sequence: int, records: int) -> int:
    """Returns the sequence number that follows; it wraps after 2^31 - 1 to 0, as in Java's client."""
    return (sequence + records) & 0x7FFFFFFF


def _codec(name: str, level: int | None) -> tuple[int, Callable[[memoryview], bytes] | None]:
    """Returns the number of a compression in a batch's attributes, and the function that compresses."""
    if name == "none":
        return 0, None
    if name == "gzip":
        return 1, lambda data: _gzip(data, -1 if level is None else level)
    if name == "snappy":
        return 2, _snappy
    if name == "lz4":
        return 3, _lz4
    codec = pa.Codec("zstd", compression_level=3 if level is None else level)
    return 4, lambda data: codec.compress(pa.py_buffer(data), asbytes=True)


def _gzip(data: memoryview, level: int) -> bytes:
    packer = zlib.compressobj(level, wbits=31)
    return packer.compress(data) + packer.flush()


def _snappy(data: memoryview) -> bytes:
    codec = pa.Codec("snappy")
    parts = [_SNAPPY_FRAME]
    for start in range(0, len(data), _SNAPPY_BLOCK_BYTES):
        block = codec.compress(pa.py_buffer(data[start : start + _SNAPPY_BLOCK_BYTES]), asbytes=True)
        parts += [len(block).to_bytes(4, "big"), block]
    return b"".join(parts)


def _lz4(data: memoryview) -> bytes:
    codec = pa.Codec("lz4_raw")
    parts = [_LZ4_FRAME]
    for start in range(0, len(data), _LZ4_BLOCK_BYTES):
        block = data[start : start + _LZ4_BLOCK_BYTES]
        packed = codec.compress(pa.py_buffer(block), asbytes=True)
        if len(packed) < len(block):
            parts += [len(packed).to_bytes(4, "little"), packed]
        else:
            parts += [(len(block) | 1 << 31).to_bytes(4, "little"), bytes(block)]
    parts.append(bytes(4))
    return b"".join(parts)
