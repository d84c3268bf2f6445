"""Loads the C kernel, and presents the messages that it decoded as Arrow arrays in the kernel's memory.

`wire.fetched_batches` and others in `kafka.wire` describe what else the kernel does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_void_p
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.native.loader import load

#: Bits of the last argument of ``decode``: what to copy of each message, besides its position.
WANT_KEY, WANT_VALUE, WANT_TIMESTAMP, WANT_HEADERS = 1, 2, 4, 8
#: The same, by the column of Spark's schema that needs it.
WANTS = {
    "key": WANT_KEY,
    "value": WANT_VALUE,
    "timestamp": WANT_TIMESTAMP,
    "timestampType": WANT_TIMESTAMP,
    "headers": WANT_HEADERS,
}


def wants(columns: Collection[str]) -> int:
    """Returns the `WANTS` of these columns in one number. Other columns need nothing from the kernel."""
    return reduce(or_, (WANTS.get(name, 0) for name in columns), 0)


class Part(Structure):
    """``part_t``: a buffer that the kernel allocated, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class Column(Structure):
    """``column_t``: the buffers of an Arrow array with values of variable size."""

    _fields_ = (("validity", Part), ("offsets", Part), ("data", Part), ("nulls", c_int64))


class _Block(Structure):
    """``block_t``, up to the last member that Python reads."""

    _fields_ = (
        ("rows", c_int64),
        ("entries", c_int64),
        ("offsets", Part),
        ("partitions", Part),
        ("topics", Part),
        ("timestamps_ms", Part),
        ("timestamp_types", Part),
        ("header_counts", Part),
        ("keys", Column),
        ("values", Column),
        ("header_names", Column),
        ("header_values", Column),
        ("no_memory", c_int64),
        ("damaged", c_int64),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "free": (None, (POINTER(_Block),)),
    "place_rows": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32)),
    "group": (
        c_int64,
        (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "seal": (
        c_int64,
        (
            *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int64),
            *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        ),
    ),
    "stamp": (None, (c_void_p, c_int64, c_int64, c_int32, c_int32)),
    "list": (c_int64, (c_void_p, c_int64, c_int32, c_void_p, c_int64)),
    "decode": (POINTER(_Block), (c_void_p, c_int64, c_int32)),
    "crc32c": (c_uint32, (c_uint32, c_void_p, c_int64)),
}


class Kernel:
    """The functions of kernel.c without their prefix. Its comments describe them. None holds the GIL."""

    free: Any
    place_rows: Any
    group: Any
    seal: Any
    stamp: Any
    list: Any
    decode: Any
    crc32c: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            found = library[f"kafka_eos_{name}"]
            found.restype, found.argtypes = result, arguments
            setattr(self, name, found)


@lru_cache(maxsize=1)
def kernel() -> Kernel:
    """Returns the C kernel.

    Raises:
        KernelUnavailableError: if the library is missing or cannot be used.
    """
    return Kernel(load("kernel"))


class _Memory:
    """Owns the memory of a block, and frees it when the last array that refers to it is gone."""

    def __init__(self, kernel: Kernel, pointer: Any) -> None:
        self._free = kernel.free
        self.pointer = pointer

    def __del__(self) -> None:
        self._free(self.pointer)


class Block:
    """The messages of one call of the kernel's ``decode``.

    Args:
        kernel: the kernel that allocated the block.
        pointer: the pointer that ``decode`` returned.
        topic_names: names of the topics, by their number.

    Attributes:
        rows: number of messages.
        offsets: offset of each message.
        partitions: partition of each message.
        topics: number of the topic of each message.
        topic_names: number → name of the topic.
    """

    def __init__(self, kernel: Kernel, pointer: Any, topic_names: Mapping[int, str]) -> None:
        self._memory = _Memory(kernel, pointer)
        found = pointer.contents
        if found.no_memory:
            raise MemoryError("not enough memory for the fetched messages")
        self._found = found
        self.rows = int(found.rows)
        self.offsets: npt.NDArray[np.int64] = self._numbers(found.offsets, np.int64)
        self.partitions: npt.NDArray[np.int32] = self._numbers(found.partitions, np.int32)
        self.topics: npt.NDArray[np.int64] = self._numbers(found.topics, np.int64)
        self.topic_names = topic_names

    @cached_property
    def keys(self) -> pa.Array:
        """Keys. This and all properties below are empty if the caller did not ask for them."""
        return self._array(pa.binary(), self.rows, self._found.keys)

    @cached_property
    def values(self) -> pa.Array:
        """Values; null = a tombstone."""
        return self._array(pa.binary(), self.rows, self._found.values)

    @cached_property
    def value_ends(self) -> npt.NDArray[np.int32]:
        """Total bytes of all values up to and including each one."""
        return self._numbers(self._found.values.offsets, np.int32)[1:]

    @cached_property
    def timestamps_ms(self) -> npt.NDArray[np.int64]:
        """Timestamps, ms since the epoch; -1 = none."""
        return self._numbers(self._found.timestamps_ms, np.int64)

    @cached_property
    def timestamp_types(self) -> npt.NDArray[np.int32]:
        """Timestamp types as Spark numbers them: -1 = none, 0 = create time, 1 = log append time."""
        return self._numbers(self._found.timestamp_types, np.int32)

    @cached_property
    def header_counts(self) -> npt.NDArray[np.int32]:
        """Headers of each message."""
        return self._numbers(self._found.header_counts, np.int32)

    @cached_property
    def header_starts(self) -> npt.NDArray[np.int64]:
        """Index of each message's first header; one more entry for the total number."""
        starts = np.zeros(self.rows + 1, np.int64)
        np.cumsum(self.header_counts, out=starts[1:])
        return starts

    @cached_property
    def header_names(self) -> pa.Array:
        """Names of all headers, with U+FFFD for what is not UTF-8."""
        return self._array(pa.string(), int(self._found.entries), self._found.header_names)

    @cached_property
    def header_values(self) -> pa.Array:
        """Values of all headers."""
        return self._array(pa.binary(), int(self._found.entries), self._found.header_values)

    # -- inside ----------------------------------------------------------------------------------

    def _buffer(self, part: Part) -> pa.Buffer:
        return pa.foreign_buffer(part.at, part.bytes, self._memory) if part.at else pa.py_buffer(b"")

    def _numbers(self, part: Part, kind: Any) -> npt.NDArray[Any]:
        return np.frombuffer(self._buffer(part), kind)

    def _array(self, kind: pa.DataType, length: int, column: Column) -> pa.Array:
        if not column.offsets.bytes:
            return pa.array([], kind)
        nulls = int(column.nulls)
        validity = self._buffer(column.validity) if nulls else None
        buffers = [validity, self._buffer(column.offsets), self._buffer(column.data)]
        return pa.Array.from_buffers(kind, length, buffers, nulls)


class KernelMessages:
    """Consecutive messages of a block, in offset order within each partition."""

    __slots__ = ("block", "first", "past")

    def __init__(self, block: Block, first: int, past: int) -> None:
        self.block = block
        self.first = first
        self.past = past

    def __len__(self) -> int:
        return self.past - self.first

    def __getitem__(self, part: slice) -> KernelMessages:
        first, past, _ = part.indices(len(self))
        return KernelMessages(self.block, self.first + first, self.first + max(first, past))

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        return self.block.offsets[self.first : self.past]

    @property
    def keys(self) -> pa.BinaryArray:
        """Keys, a binary array; null = no key."""
        return self.block.keys[self.first : self.past]

    @property
    def values(self) -> pa.BinaryArray:
        """Values, a binary array; null = a tombstone."""
        return self.block.values[self.first : self.past]

    @property
    def size_bytes(self) -> int:
        """Total bytes of the values; 0 if the caller did not ask for values."""
        ends = self.block.value_ends
        return int(ends[self.past - 1]) - self._bytes_before() if len(self) and len(ends) else 0

    def fitting(self, rows: int, size_bytes: int) -> int:
        """Returns how many of the first messages reach that many rows or bytes of values; at least 1."""
        ends = self.block.value_ends[self.first : self.past]
        enough = int(np.searchsorted(ends, self._bytes_before() + size_bytes)) + 1 if len(ends) else rows
        return max(1, min(rows, enough, len(self)))

    @property
    def partition_ids(self) -> npt.NDArray[np.int64]:
        """A number per message that differs between partitions."""
        rows = slice(self.first, self.past)
        return self.block.topics[rows] << 32 | self.block.partitions[rows]

    def partition_at(self, index: int) -> TopicPartition:
        """Returns the topic and partition of a message."""
        at = self.first + index
        return TopicPartition(
            self.block.topic_names[int(self.block.topics[at])], int(self.block.partitions[at])
        )

    def _bytes_before(self) -> int:
        return int(self.block.value_ends[self.first - 1]) if self.first else 0
