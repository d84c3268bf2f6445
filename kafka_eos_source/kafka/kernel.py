"""The C kernel: loads it, presents what it decoded as Arrow arrays, and describes Arrow rows for it.

The arrays refer to the kernel's memory, and the descriptions to Arrow's: nobody copies keys and values.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Collection, Mapping, Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.failure import record_too_large
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.native import load
from kafka_eos_source.native.buffers import Memory, Part

#: Bits of the last argument of ``decode``: what to copy of each message, besides its position.
WANT_KEY, WANT_VALUE, WANT_TIMESTAMP, WANT_HEADERS, WANT_RAW_NAMES = 1, 2, 4, 8, 16
#: No column: with it, the names of headers are the bytes that were written, whether they are UTF-8 or not.
RAW_NAMES = "raw names"
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
    raw = WANT_RAW_NAMES if RAW_NAMES in columns else 0
    return reduce(or_, (WANTS.get(name, 0) for name in columns), raw)


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
        content = "the fetched messages"
        self._memory = Memory(pointer, kernel.free, content)
        found = self._memory.block
        if found.no_memory:
            raise MemoryError(f"not enough memory for {content}")
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
        """Names of all headers: with U+FFFD for what is not UTF-8, or their bytes (`RAW_NAMES`)."""
        return self._array(pa.string(), int(self._found.entries), self._found.header_names)

    @cached_property
    def header_values(self) -> pa.Array:
        """Values of all headers."""
        return self._array(pa.binary(), int(self._found.entries), self._found.header_values)

    # -- inside ----------------------------------------------------------------------------------

    def _numbers(self, part: Part, kind: Any) -> npt.NDArray[Any]:
        return np.frombuffer(self._memory.buffer(part), kind)

    def _array(self, kind: pa.DataType, length: int, column: Column) -> pa.Array:
        if not column.offsets.bytes:
            return pa.array([], kind)
        nulls = int(column.nulls)
        validity = self._memory.buffer(column.validity) if nulls else None
        buffers = [validity, self._memory.buffer(column.offsets), self._memory.buffer(column.data)]
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


# -- rows to encode -----------------------------------------------------------------------------

#: librdkafka's partitioners, by their numbers in kernel.c. The default places keys as Java's producers do.
PARTITIONERS = {
    name: number
    for number, name in enumerate(
        ("random", "consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random")
    )
}
DEFAULT_PARTITIONER = "murmur2_random"

#: Rows without a key go to the same partition in stripes of at least this length.
_STRIPE_ROWS = 500
_UNASSIGNED = -1
#: Instead of the timestamp of a row that has none.
_NOW = -1
#: The row's part of its number among the rows of several batches, as in kernel.c.
_ROW_BITS = 32
#: More partitions are numbered anew before rows are grouped.
_MOST_PARTITIONS = 1 << 16

#: ``header_t`` of kernel.c. A value at address 0 is null.
_HEADER = np.dtype([("name", "u8"), ("name_bytes", "i8"), ("value", "u8"), ("value_bytes", "i8")])

# An empty value that is not null needs a non-NULL address, which is never read.
_EMPTY = ctypes.create_string_buffer(1)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)


class _Values(Structure):
    """``values_t`` of kernel.c."""

    _fields_ = (("validity", c_void_p), ("offsets", c_void_p), ("data", c_void_p), ("first", c_int64))


class _Rows(Structure):
    """``rows_t`` of kernel.c."""

    _fields_ = (
        ("keys", _Values),
        ("values", _Values),
        ("timestamps_ms", c_void_p),
        ("header_starts", c_void_p),
        ("header_counts", c_void_p),
        ("headers", c_void_p),
    )


class Rows:
    """Rows of one topic, in one or more Arrow batches.

    Args:
        batches: the columns of each: ``value``, and optionally ``key``, ``partition``, ``timestamp`` and
            ``headers``, as in `spark.arrow.STAGED_ARROW`.

    Attributes:
        count: number of rows.
        partitions: partition of each row; -1 = not chosen yet.
    """

    def __init__(self, batches: Sequence[Mapping[str, pa.Array]]) -> None:
        self._batches = batches  # keeps the buffers alive
        self._counts = np.array([len(each["value"]) for each in batches], np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self.count = int(self._counts.sum())
        self.partitions: npt.NDArray[np.int32] = np.full(self.count, _UNASSIGNED, np.int32)
        self._extras = []
        self._described = (_Rows * len(batches))()
        for index, columns in enumerate(batches):
            for name in ("key", "value"):
                if name in columns and columns[name].type not in (pa.binary(), pa.string()):
                    raise TypeError(f"column {name!r} has type {columns[name].type}; expected binary")
            given = columns.get("partition")
            if given is not None and given.null_count < len(given):
                begin = int(self._starts[index])
                chosen = given.fill_null(_UNASSIGNED).to_numpy(zero_copy_only=False)
                self.partitions[begin : begin + len(given)] = chosen
            extras = _extras(columns.get("timestamp"), columns.get("headers"))
            self._extras.append(extras)
            self._described[index] = _Rows(
                _values(columns.get("key")),
                _values(columns["value"]),
                *(None if array is None else array.ctypes.data for array in extras),
            )

    @property
    def address(self) -> int:
        """Address of the description; valid as long as this object lives."""
        return ctypes.addressof(self._described)

    def grouped(
        self, kernel: Kernel, topic: str, partition_count: int, largest_bytes: int, partitioner: str
    ) -> Groups:
        """Chooses the partition of every row that has none, and returns all rows by partition.

        Args:
            kernel: the C kernel.
            topic: the topic, for the error.
            partition_count: of the topic.
            largest_bytes: largest record, without compression.
            partitioner: one of `PARTITIONERS`.

        Raises:
            InvalidRecordError: if a record is larger.
        """
        first = random.randrange(partition_count)
        self.place(kernel, partition_count, first, _STRIPE_ROWS, partitioner)
        groups = self.by_partition(kernel)
        if groups.largest_bytes > largest_bytes:
            raise record_too_large(groups.largest_bytes, topic)
        return groups

    def place(
        self,
        kernel: Kernel,
        partition_count: int,
        first_without_key: int,
        stripe: int,
        partitioner: str = DEFAULT_PARTITIONER,
    ) -> None:
        """Chooses the partition of every row that has none.

        Rows whose key decides go where librdkafka's partitioner of that name sends them. The others go to all
        partitions in turn, ``stripe`` of them at a time, so that each partition gets large batches.

        Args:
            kernel: the C kernel.
            partition_count: of the topic.
            first_without_key: partition of the first row without a key.
            stripe: number of rows.
            partitioner: one of `PARTITIONERS`.
        """
        number = PARTITIONERS[partitioner]
        for index, (begin, count) in enumerate(
            zip(self._starts.tolist(), self._counts.tolist(), strict=True)
        ):
            rows = self.address + index * ctypes.sizeof(_Rows)
            into = self.partitions.ctypes.data + begin * self.partitions.itemsize
            kernel.place_rows(rows, count, into, partition_count, number)
        rest = np.flatnonzero(self.partitions < 0)
        if len(rest):
            turns = np.arange(len(rest)) // max(stripe, -(-len(rest) // partition_count))
            self.partitions[rest] = (turns + first_without_key) % partition_count

    def by_partition(self, kernel: Kernel) -> Groups:
        """Returns all rows, grouped by partition. Call `place` first."""
        most = int(self.partitions.max(initial=-1)) + 1
        partitions, numbers = self.partitions, np.arange(min(most, _MOST_PARTITIONS), dtype=np.int32)
        if most > _MOST_PARTITIONS:  # rows name partitions that may not exist
            numbers, codes = np.unique(partitions, return_inverse=True)
            partitions = codes.astype(np.int32)
        order = np.empty(self.count, np.int64)
        lengths, ends, sizes, encoded = np.empty((4, len(numbers)), np.int64)
        largest = kernel.group(
            self.address,
            self._counts.ctypes.data,
            len(self._counts),
            partitions.ctypes.data,
            len(numbers),
            *(array.ctypes.data for array in (order, lengths, ends, sizes, encoded)),
        )
        found = Groups(order, ends, numbers, lengths, sizes, encoded, largest)
        return found.select(lengths > 0)

    def numbers(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the numbers of these rows among those of all batches."""
        return np.asarray(self._starts[order >> _ROW_BITS] + (order & ((1 << _ROW_BITS) - 1)))


@dataclass(frozen=True)
class Groups:
    """Rows by partition.

    Attributes:
        order: the rows of one partition after the other, in their order within each: the number of the batch,
            and in the lower `_ROW_BITS` bits that of the row in it.
        ends: where each partition's rows end in ``order``.
        partitions: the partitions.
        lengths: number of rows of each.
        bytes: bytes of keys, values and headers of each.
        encoded_bytes: most bytes of the encoded rows of each.
        largest_bytes: bytes of the largest row.
    """

    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    partitions: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    encoded_bytes: npt.NDArray[np.int64]
    largest_bytes: int = 0

    def select(self, chosen: npt.NDArray[np.bool_]) -> Groups:
        """Returns the rows of some of the partitions.

        Args:
            chosen: one value per partition.
        """
        if chosen.all():
            return self
        lengths = self.lengths[chosen]
        is_complete = lengths.sum() == len(self.order)
        return Groups(
            self.order if is_complete else self.order[np.repeat(chosen, self.lengths)],
            np.cumsum(lengths),
            self.partitions[chosen],
            lengths,
            self.bytes[chosen],
            self.encoded_bytes[chosen],
            self.largest_bytes,
        )

    def slice(self, begin: int, end: int, partition: int) -> Groups:
        """Returns some rows of one partition, from and up to a position in ``order``."""
        index = int(np.flatnonzero(self.partitions == partition)[0])
        return Groups(
            self.order[begin:end],
            np.array([end - begin]),
            self.partitions[index : index + 1],
            np.array([end - begin]),
            self.bytes[index : index + 1],
            self.encoded_bytes[index : index + 1],
            self.largest_bytes,
        )


def _values(array: pa.Array | None) -> _Values:
    if array is None or array.null_count == len(array):
        return _Values(None, None, None, 0)
    validity, offsets, data = array.buffers()
    return _Values(
        validity.address if validity is not None and array.null_count else None,
        offsets.address + array.offset * 4,
        None if data is None else data.address,
        array.offset,
    )


class _Extras(NamedTuple):
    """The timestamps and headers of rows, as kernel.c reads them.

    Attributes:
        timestamps_ms: ms since the epoch; `_NOW` = the time of sending. None = all of them.
        header_starts: index of each row's first header in ``headers``. None = no row has headers.
        header_counts: number of headers of each row.
        headers: see `_HEADER`.
    """

    timestamps_ms: npt.NDArray[np.int64] | None
    header_starts: npt.NDArray[np.int64] | None
    header_counts: npt.NDArray[np.int64] | None
    headers: npt.NDArray[np.void] | None


def _extras(timestamp: pa.Array | None, headers: pa.Array | None) -> _Extras:
    """Returns the timestamps and headers of rows. The arrays must outlive the result.

    Args:
        timestamp: int64 array, ms since the epoch; null = the time of sending.
        headers: array of lists as in `spark.arrow.HEADERS_ARROW`; null = no headers.
    """
    times = None
    if timestamp is not None and timestamp.null_count < len(timestamp):
        times = np.ascontiguousarray(timestamp.fill_null(_NOW).to_numpy(zero_copy_only=False), np.int64)
    if headers is None or headers.null_count == len(headers):
        return _Extras(times, None, None, None)
    offsets = headers.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    counts[np.asarray(headers.is_null())] = 0
    first = int(offsets[0])
    entries = headers.values.slice(first, int(offsets[-1]) - first)
    found = np.zeros(len(entries), _HEADER)
    found["name"], found["name_bytes"] = _addresses(entries.field("key"))
    found["value"], found["value_bytes"] = _addresses(entries.field("value"))
    return _Extras(times, offsets[:-1] - first, counts, found)


def _addresses(array: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Returns the address and length of each value of a binary array; null has the address 0."""
    rows = len(array)
    _, offsets_buffer, data = array.buffers()
    if rows == 0 or offsets_buffer is None:
        return np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
    offsets = np.frombuffer(offsets_buffer, np.int32, rows + 1, array.offset * 4).astype(np.uint64)
    base = np.uint64(data.address if data is not None and data.address else _EMPTY_ADDRESS)
    addresses = offsets[:-1] + base
    lengths = offsets[1:] - offsets[:-1]
    if array.null_count:
        null = np.asarray(array.is_null())
        addresses[null] = 0
        lengths[null] = 0
    return addresses, lengths
