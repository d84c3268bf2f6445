"""Encodes Fetch requests, and decodes their answers without copying the records.

A Fetch has no session (KIP-227): each request names all partitions that it wants, because the partitions of a
task differ from those of the task before.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka.protocol.consumer import FetchRequest

from kafka_eos_source.kafka.wire.messages import check_correlation
from kafka_eos_source.model import TopicPartition

#: The versions that name topics, not their ids, and tell the aborted transactions.
LOWEST, HIGHEST = 11, 12

_NO_SESSION, _NO_EPOCH, _CONSUMER = 0, -1, -1
#: The tagged field of a partition that names the end of the last fetched epoch (KIP-595).
_DIVERGING_EPOCH = 0
_FLEXIBLE = 12
_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_PARTITION = struct.Struct(">ihqqq")
_EPOCH_END = struct.Struct(">iq")


@dataclass(frozen=True)
class Wanted:
    """What a Fetch asks of one partition.

    Attributes:
        offset: the first offset to read.
        most_bytes: how much the broker may send; it sends at least one record batch if there is one.
        leader_epoch: epoch of the leader that the caller knows; -1 = unknown.
        last_epoch: leader epoch that belongs to the offset; -1 = unknown. From version 12 on, the broker
            sends no records if it ends before the offset in its log, or if there is no such epoch.
    """

    offset: int
    most_bytes: int
    leader_epoch: int = -1
    last_epoch: int = -1


@dataclass(frozen=True)
class Fetched:
    """What a broker answered about one partition.

    Attributes:
        tp: the partition.
        error_code: Kafka's code; 0 = none.
        high_watermark: offset up to which records are replicated.
        last_stable_offset: offset of the first record of the oldest open transaction, or the high watermark.
        aborted: producer id and first offset of each aborted transaction among the records.
        records: record batches; the last one may be cut off.
        replica: the broker to read from instead, as the cluster's ``replica.selector.class`` chose it; -1 =
            none.
        diverging: the newest epoch in the broker's log that is not above the last one of the request, and the
            offset at which it ends; None unless the broker sends no records because of it.
    """

    tp: TopicPartition
    error_code: int
    high_watermark: int
    last_stable_offset: int
    aborted: tuple[tuple[int, int], ...]
    records: memoryview
    replica: int = -1
    diverging: tuple[int, int] | None = None


@dataclass(frozen=True)
class FetchAnswer:
    """The answer to a Fetch.

    Attributes:
        throttle_time_ms: how long the broker's quota asks the client to wait.
        error_code: Kafka's code for the whole request; 0 = none.
        partitions: the answer about each partition.
    """

    throttle_time_ms: int
    error_code: int
    partitions: list[Fetched]


def fetch_request(
    version: int,
    wanted: Mapping[TopicPartition, Wanted],
    *,
    committed: bool,
    wait_ms: int,
    least_bytes: int,
    most_bytes: int,
    rack: str = "",
) -> Any:
    """Returns the request for records of these partitions, which the broker reads in this order.

    Args:
        version: from `LOWEST` to `HIGHEST`.
        wanted: what to read of each partition.
        committed: whether the answer ends at the last stable offset, and names aborted transactions.
        wait_ms: how long the broker waits for ``least_bytes``.
        least_bytes: see ``wait_ms``.
        most_bytes: how much the broker may send in total.
        rack: where the client is (KIP-392); the leader may refer it to a replica there. "" = nowhere.
    """
    kind = FetchRequest.FetchTopic
    topics: dict[str, list[Any]] = {}
    for tp, each in wanted.items():
        partition = kind.FetchPartition(
            partition=tp.partition,
            current_leader_epoch=each.leader_epoch,
            fetch_offset=each.offset,
            last_fetched_epoch=each.last_epoch,
            log_start_offset=-1,
            partition_max_bytes=each.most_bytes,
            version=version,
        )
        topics.setdefault(tp.topic, []).append(partition)
    return FetchRequest(
        replica_id=_CONSUMER,
        max_wait_ms=wait_ms,
        min_bytes=least_bytes,
        max_bytes=most_bytes,
        isolation_level=int(committed),
        session_id=_NO_SESSION,
        session_epoch=_NO_EPOCH,
        topics=[kind(topic=name, partitions=each, version=version) for name, each in topics.items()],
        forgotten_topics_data=[],
        rack_id=rack,
        version=version,
    )


def fetch_answer(version: int, data: memoryview) -> FetchAnswer:
    """Decodes the answer to a Fetch.

    Args:
        version: of the request.
        data: the answer after its correlation id. The records of the result refer to this memory.

    Raises:
        ValueError, struct.error, IndexError: if the bytes are no such answer.
    """
    reader = _Reader(data, is_flexible=version >= _FLEXIBLE)
    reader.tags()  # of the header
    throttle_ms, error_code, _session = reader.int32(), reader.int16(), reader.int32()
    partitions: list[Fetched] = []
    for _ in range(reader.array()):
        topic = reader.string()
        for _ in range(reader.array()):
            partitions.append(_fetched(reader, topic))
        reader.tags()
    reader.tags()
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes follow it")
    return FetchAnswer(throttle_ms, error_code, partitions)


def decoded_fetch(request: Any, data: memoryview, correlation_id: int) -> FetchAnswer:
    """Decodes the answer to a Fetch, with its header; raises as `fetch_answer`."""
    check_correlation(data, correlation_id)
    return fetch_answer(request.API_VERSION, data[4:])


def _fetched(reader: _Reader, topic: str) -> Fetched:
    number, error_code, high, stable, _log_start = reader.unpack(_PARTITION)
    aborted = []
    for _ in range(reader.array()):
        aborted.append((reader.int64(), reader.int64()))
        reader.tags()
    replica = reader.int32()
    records = reader.bytes()
    diverging = reader.tags().get(_DIVERGING_EPOCH)
    return Fetched(
        TopicPartition(topic, number),
        error_code,
        high,
        stable,
        tuple(aborted),
        records,
        replica,
        None if diverging is None else _EPOCH_END.unpack_from(diverging),
    )


class _Reader:
    """Reads the fields of an answer one after the other."""

    def __init__(self, data: memoryview, *, is_flexible: bool) -> None:
        self._data = data
        self._is_flexible = is_flexible
        self.at = 0

    def unpack(self, kind: struct.Struct) -> tuple[Any, ...]:
        found = kind.unpack_from(self._data, self.at)
        self.at += kind.size
        return found

    def int16(self) -> int:
        return int(self.unpack(_INT16)[0])

    def int32(self) -> int:
        return int(self.unpack(_INT32)[0])

    def int64(self) -> int:
        return int(self.unpack(_INT64)[0])

    def array(self) -> int:
        """Returns the number of elements that follow; 0 for null."""
        return max(0, self._length())

    def string(self) -> str:
        length = self._varint() - 1 if self._is_flexible else self.int16()
        return bytes(self._take(length)).decode()

    def bytes(self) -> memoryview:
        """Returns the bytes that follow, without copying them; none for null."""
        return self._take(max(0, self._length()))

    def tags(self) -> dict[int, memoryview]:
        """Returns the tagged fields, by number."""
        found = {}
        for _ in range(self._varint() if self._is_flexible else 0):
            tag = self._varint()
            found[tag] = self._take(self._varint())
        return found

    def _length(self) -> int:
        return self._varint() - 1 if self._is_flexible else self.int32()

    def _take(self, length: int) -> memoryview:
        if not 0 <= length <= len(self._data) - self.at:
            raise ValueError(f"a field of {length} bytes does not fit")
        found = self._data[self.at : self.at + length]
        self.at += length
        return found

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 28:
                raise ValueError("a number is too long")
