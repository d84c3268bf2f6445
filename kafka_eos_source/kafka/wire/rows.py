"""Rows in Arrow arrays, described for the C kernel without copying keys and values."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.failure import record_too_large
from kafka_eos_source.kafka.kernel import Kernel

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
#: Most bytes of a record's attributes, deltas and lengths, and of the lengths of one header.
_FIELDS_BYTES, _HEADER_FIELDS_BYTES = 40, 10

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
    """Rows of one topic.

    Args:
        columns: ``value``, and optionally ``key``, ``partition``, ``timestamp`` and ``headers``, as in
            `schema.STAGED_ARROW`.

    Attributes:
        count: number of rows.
        partitions: partition of each row; -1 = not chosen yet.
    """

    def __init__(self, columns: Mapping[str, pa.Array]) -> None:
        for name in ("key", "value"):
            if name in columns and columns[name].type not in (pa.binary(), pa.string()):
                raise TypeError(f"column {name!r} has type {columns[name].type}; expected binary")
        self._columns = columns  # keeps the buffers alive
        self.count = len(columns["value"])
        self.partitions: npt.NDArray[np.int32] = np.full(self.count, _UNASSIGNED, np.int32)
        given = columns.get("partition")
        if given is not None and given.null_count < self.count:
            self.partitions[:] = given.fill_null(_UNASSIGNED).to_numpy(zero_copy_only=False)
        self._extras = _extras(columns.get("timestamp"), columns.get("headers"))
        times, starts, counts, headers = self._extras
        self._described = _Rows(
            _values(columns.get("key")),
            _values(columns["value"]),
            *(None if array is None else array.ctypes.data for array in (times, starts, counts, headers)),
        )

    @property
    def address(self) -> int:
        """Address of the description; valid as long as this object lives."""
        return ctypes.addressof(self._described)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of key, value and headers of each row."""
        sizes = self._header_sizes(0)
        for name in ("key", "value"):
            array = self._columns.get(name)
            if array is not None:
                sizes += _lengths(array)
        return sizes

    @cached_property
    def encoded_sizes(self) -> npt.NDArray[np.int64]:
        """Upper bound for the encoded bytes of each row."""
        return self.sizes + _FIELDS_BYTES + self._header_sizes(_HEADER_FIELDS_BYTES) - self._header_sizes(0)

    def _header_sizes(self, more: int) -> npt.NDArray[np.int64]:
        """Returns the bytes of the headers of each row, plus ``more`` for each header."""
        _, starts, counts, headers = self._extras
        if headers is None or starts is None or counts is None:
            return np.zeros(self.count, np.int64)
        ends = np.zeros(len(headers) + 1, np.int64)
        np.cumsum(headers["name_bytes"] + headers["value_bytes"] + more, out=ends[1:])
        return np.asarray(ends[starts + counts] - ends[starts], np.int64)

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
        largest = int(self.sizes.max(initial=0))
        if largest > largest_bytes:
            raise record_too_large(largest, topic)
        first = random.randrange(partition_count)
        self.place(kernel, partition_count, first, _STRIPE_ROWS, partitioner)
        return self.by_partition()

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
        kernel.place_rows(self.address, self.count, self.partitions.ctypes.data, partition_count, number)
        rest = np.flatnonzero(self.partitions < 0)
        if len(rest):
            turns = np.arange(len(rest)) // max(stripe, -(-len(rest) // partition_count))
            self.partitions[rest] = (turns + first_without_key) % partition_count

    def by_partition(self) -> Groups:
        """Returns all rows, grouped by partition. Call `place` first."""
        partitions = self.partitions
        if self.count == 0:
            return Groups(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))
        if (partitions == partitions[0]).all():
            return Groups(np.arange(self.count), np.array([self.count]), partitions[:1])
        # NumPy uses a radix sort for 16-bit numbers, which takes a tenth of the time
        is_narrow = int(partitions.max()) <= np.iinfo(np.int16).max
        order = np.argsort(partitions.astype(np.int16) if is_narrow else partitions, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(partitions[order])) + 1, self.count)
        return Groups(order, ends, partitions[order[ends - 1]])


@dataclass(frozen=True)
class Groups:
    """Rows by partition.

    Attributes:
        order: numbers of the rows, those of one partition after the other, in their order within each.
        ends: where each partition's rows end in ``order``.
        partitions: the partitions.
    """

    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    partitions: npt.NDArray[np.int32]

    def sums(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the sum of the rows' values for each partition."""
        if len(self.ends) == 0:
            return np.empty(0, np.int64)
        return np.add.reduceat(values[self.order], self._begins)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Groups:
        """Returns the rows of some of the partitions.

        Args:
            chosen: one value per partition.
        """
        if chosen.all():
            return self
        ends = np.cumsum(self.lengths[chosen])
        return Groups(self.order[np.repeat(chosen, self.lengths)], ends, self.partitions[chosen])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of rows of each partition."""
        return self.ends - self._begins

    @property
    def _begins(self) -> npt.NDArray[np.int64]:
        return np.append(np.zeros(1, np.int64), self.ends[:-1])


def _lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Returns the length of each value; that of a null does not matter."""
    offsets = _offsets(array)
    return np.zeros(len(array), np.int64) if offsets is None else np.diff(offsets).astype(np.int64)


def _offsets(array: pa.Array) -> npt.NDArray[np.int32] | None:
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return None
    return np.frombuffer(buffer, np.int32, len(array) + 1, array.offset * 4)


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
        timestamps_ms: ms since the epoch; 0 = the time of sending. None = all 0.
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
        headers: array of lists as in `schema.HEADERS_ARROW`; null = no headers.
    """
    times = None
    if timestamp is not None and timestamp.null_count < len(timestamp):
        times = np.ascontiguousarray(timestamp.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
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
