"""Sends records in bulk with ``rd_kafka_produce_batch``, straight from Arrow buffers.

confluent-kafka's ``produce()`` needs a Python call per record. librdkafka also accepts an array of
``rd_kafka_message_t``. NumPy fills that array from the addresses and offsets of Arrow's binary arrays. So no
Python object per record is needed: 1.3 to 1.5 million records/s instead of 0.3 million. The array has no
fields for headers and timestamps; the C kernel sends records that have them, with ``rd_kafka_produceva``.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, Producer

from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.native import ERROR_TEXT_BYTES, client_pointer, function

PARTITION_UNASSIGNED = -1
_MSG_F_COPY = 0x2
_MSG_F_PARTITION = 0x8

#: `rd_kafka_message_t` (rdkafka.h), unchanged since 0.8: 72 bytes on every 64-bit platform.
MESSAGE = np.dtype(
    {
        "names": ["err", "rkt", "partition", "payload", "len", "key", "key_len", "offset", "private"],
        "formats": ["i4", "u8", "i4", "u8", "u8", "u8", "u8", "i8", "u8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)

Messages = npt.NDArray[np.void]

#: ``header_t`` of kernel.c. A value at address 0 is null.
HEADER = np.dtype([("name", "u8"), ("name_bytes", "i8"), ("value", "u8"), ("value_bytes", "i8")])

# An empty value that is not null needs a non-NULL address, which is never read.
_EMPTY = ctypes.create_string_buffer(1)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)


def messages(key: pa.Array | None, value: pa.Array, partition: pa.Array | None) -> Messages:
    """Returns one `MESSAGE` per row. The arrays must outlive the result.

    Args:
        key: binary array; None = records without keys.
        value: binary array of the same length; null = a tombstone.
        partition: int32 array; null = the partitioner chooses. None = all null.
    """
    out = np.zeros(len(value), MESSAGE)
    out["payload"], out["len"] = _addresses(value)
    if key is not None:
        out["key"], out["key_len"] = _addresses(key)
    out["partition"] = PARTITION_UNASSIGNED
    if partition is not None and partition.null_count < len(partition):
        out["partition"] = partition.fill_null(PARTITION_UNASSIGNED).to_numpy(zero_copy_only=False)
    return out


def place(batch: Messages, partitions: int) -> None:
    """Sets the partition of each message that has a key, as Java's producers choose it (murmur2).

    Messages that have a partition keep it. librdkafka chooses the partitions of messages without a key. Where
    the C kernel is not available, librdkafka chooses all partitions, with the same result.

    Args:
        batch: from `messages`; changed in place.
        partitions: partition count of the topic.
    """
    kernel = choice().kernel
    if kernel is not None:
        kernel.place(batch.ctypes.data, len(batch), partitions)


def by_partition(batch: Messages) -> npt.NDArray[np.intp] | None:
    """Returns the order that groups messages by partition and keeps their order within each.

    librdkafka needs about half the time for messages that are grouped by partition: 0.36 s instead of 0.7 s
    for 500,000 records and 4 partitions, 1.0 s instead of 1.7 s for 1,000 partitions.

    Returns:
        The indices of the messages; None if they are grouped already.
    """
    partition = batch["partition"]
    if len(partition) < 2 or (partition[1:] >= partition[:-1]).all():
        return None
    # NumPy uses a radix sort for 16-bit numbers, which takes a tenth of the time
    narrow = partition.astype(np.int16) if int(partition.max()) <= np.iinfo(np.int16).max else partition
    return np.argsort(narrow, kind="stable")


class Extras(NamedTuple):
    """The timestamps and headers of messages, for which `MESSAGE` has no fields.

    Attributes:
        timestamps_ms: ms since the epoch; 0 = the time of sending. None = all 0.
        header_starts: index of each message's first header in ``headers``. None = no message has headers.
        header_counts: number of headers of each message.
        headers: see `HEADER`.
    """

    timestamps_ms: npt.NDArray[np.int64] | None
    header_starts: npt.NDArray[np.int64] | None
    header_counts: npt.NDArray[np.int64] | None
    headers: npt.NDArray[np.void] | None

    def of(self, rows: slice | npt.NDArray[np.intp]) -> Extras:
        """Returns the timestamps and headers of these messages, in this order."""
        return Extras(
            None if self.timestamps_ms is None else self.timestamps_ms[rows],
            None if self.header_starts is None else self.header_starts[rows],
            None if self.header_counts is None else self.header_counts[rows],
            self.headers,
        )


def extras(timestamp: pa.Array | None, headers: pa.Array | None) -> Extras:
    """Returns the timestamps and headers that belong to `messages`. The arrays must outlive the result.

    Args:
        timestamp: int64 array, ms since the epoch; null = the time of sending.
        headers: array of lists as in `schema.HEADERS_ARROW`; null = no headers.
    """
    times = None
    if timestamp is not None and timestamp.null_count < len(timestamp):
        times = np.ascontiguousarray(timestamp.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    if headers is None or headers.null_count == len(headers):
        return Extras(times, None, None, None)
    offsets = headers.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    counts[np.asarray(headers.is_null())] = 0
    first = int(offsets[0])
    entries = headers.values.slice(first, int(offsets[-1]) - first)
    found = np.zeros(len(entries), HEADER)
    found["name"], found["name_bytes"] = _addresses(entries.field("key"))
    found["value"], found["value_bytes"] = _addresses(entries.field("value"))
    return Extras(times, offsets[:-1] - first, counts, found)


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


def _at(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else int(array.ctypes.data)


class BatchProducer:
    """Sends batches of messages through a `Producer`. Call `close` before the producer's own end."""

    def __init__(self, producer: Producer) -> None:
        self._producer: Any = producer  # keeps the client alive
        self._client: int | None = client_pointer(producer)
        self._topics: dict[str, int] = {}

    def produce(self, topic: str, batch: Messages, more: Extras | None = None) -> int:
        """Enqueues copies of the messages, in order.

        A message that was not accepted has an error code in its field ``err``. After the code
        `KafkaError._QUEUE_FULL`, no later message was accepted; send the rest again when there is room.

        Args:
            topic: name of the topic.
            batch: from `messages`.
            more: timestamps and headers; requires the C kernel.

        Returns:
            The number of messages that were accepted.
        """
        if not batch.flags.c_contiguous:
            raise ValueError("the array of messages must be contiguous: librdkafka writes errors into it")
        if more is not None:
            return self._produce_with(topic, batch, more)
        flags = _MSG_F_COPY
        if (batch["partition"] != PARTITION_UNASSIGNED).any():
            flags |= _MSG_F_PARTITION
        produce = function(
            "rd_kafka_produce_batch",
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
        )
        taken: int = produce(self._topic(topic), PARTITION_UNASSIGNED, flags, batch.ctypes.data, len(batch))
        return taken

    def _produce_with(self, topic: str, batch: Messages, more: Extras) -> int:
        kernel = choice().kernel
        assert kernel is not None
        taken: int = kernel.produce(
            self._client, self._topic(topic), batch.ctypes.data, len(batch), *map(_at, more)
        )
        return taken

    def fatal_error(self) -> KafkaError | None:
        """Returns the fatal error that ended this client; None = the client works."""
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        ask = function(
            "rd_kafka_fatal_error", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
        )
        code = ask(self._client, text, len(text))
        return KafkaError(code, text.value.decode(errors="replace"), True) if code else None

    def close(self) -> None:
        """Frees the topic handles and drops the producer; otherwise the client could not be destroyed."""
        while self._topics:
            _, handle = self._topics.popitem()
            function("rd_kafka_topic_destroy", None, ctypes.c_void_p)(handle)
        self._client = self._producer = None

    def _topic(self, name: str) -> int:
        handle = self._topics.get(name)
        if handle is None:
            new = function(
                "rd_kafka_topic_new", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
            )
            handle = new(self._client, name.encode(), None)
            if not handle:
                code = function("rd_kafka_last_error", ctypes.c_int)()
                raise ValueError(f"cannot use topic {name!r}: {KafkaError(code).str()}")
            self._topics[name] = handle
        return handle
