"""Encodes requests and decodes answers.

Messages come from ``kafka-python``, except Produce requests and Fetch answers: these are encoded and decoded
here, without copying the records.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kafka.protocol.api_message import ApiMessage
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import ApiVersionsRequest

from kafka_eos_source.model import TopicPartition

if TYPE_CHECKING:
    from kafka_eos_source.kafka.batches import EncodedBatch

#: What brokers log as the client's software, and the default client id.
SOFTWARE = "kafka-eos"

#: The largest answer that is accepted, unless options ask for larger ones.
LARGEST_ANSWER_BYTES = 100 << 20
#: From this version on, an `ApiVersions` answer has finalized features (KIP-584).
VERSIONS_WITH_FEATURES = 3
#: What the decoders of kafka-python raise if bytes are no such message.
_DAMAGED = (ValueError, LookupError, ArithmeticError, AssertionError, TypeError, struct.error)
_PRODUCE = 0
#: How the answer of a listener begins that expects TLS and receives something else.
_TLS_ALERT = b"\x15\x03"
#: What ListOffsets takes for the end and the beginning of a log, instead of a time.
LATEST, EARLIEST = -1, -2
#: Each byte of a number of variable length has seven bits; the last one of 32 bits is shifted by 28.
_MOST_SHIFT = 28


def bound_numbers() -> None:
    """Makes ``kafka-python`` refuse numbers of variable length that have more than 32 bits.

    Its generated decoders accept any length, and the number grows with each byte: 300 kB of 0xFF, which a
    damaged answer or a hostile broker may contain, take 17 s.
    """
    from kafka.protocol.schemas.fields.codecs.types import UnsignedVarInt32

    unbounded = UnsignedVarInt32.emit_decode_from

    def emit_decode_from(ctx: Any, var_name: str, indent: str) -> None:
        unbounded(ctx, var_name, indent)
        shift = ctx.lines[-1].split()[0]  # "sh1 += 7", the end of its loop
        ctx.emit(indent, f"    if {shift} > {_MOST_SHIFT}: raise ValueError('a number is too long')")

    UnsignedVarInt32.emit_decode_from = emit_decode_from


bound_numbers()


def versions_request(version: int = VERSIONS_WITH_FEATURES) -> ApiVersionsRequest:
    """Returns the request for the versions of requests, and for finalized features."""
    return ApiVersionsRequest(client_software_name=SOFTWARE, client_software_version="1", version=version)


def features_of(answer: Any) -> dict[str, int]:
    """Returns the finalized levels by feature, from an `ApiVersions` answer."""
    found = getattr(answer, "finalized_features", None)
    return {each.name: each.max_version_level for each in found or ()}


def offsets_request(
    version: int,
    leader_epochs: Mapping[TopicPartition, int],
    times: Mapping[TopicPartition, int],
    *,
    committed: bool,
) -> ListOffsetsRequest:
    """Returns the request for an offset of each partition's log.

    Args:
        version: of the request.
        leader_epochs: the epoch of the leader that the caller knows, by partition.
        times: ms since the epoch, `EARLIEST` or `LATEST`, by partition.
        committed: the end is the last stable offset, instead of the high watermark.
    """
    kind = ListOffsetsRequest.ListOffsetsTopic
    topics: dict[str, list[Any]] = {}
    for tp, epoch in leader_epochs.items():
        partition = kind.ListOffsetsPartition(
            partition_index=tp.partition,
            current_leader_epoch=epoch,
            timestamp=times[tp],
            version=version,
        )
        topics.setdefault(tp.topic, []).append(partition)
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(committed),
        topics=[kind(name=name, partitions=each, version=version) for name, each in topics.items()],
        version=version,
    )


def epoch_ends_request(
    version: int, epochs: Mapping[TopicPartition, tuple[int, int]]
) -> OffsetForLeaderEpochRequest:
    """Returns the request for the end of a leader epoch in each partition's log.

    Args:
        version: of the request.
        epochs: the epoch of the leader that the caller knows, and the epoch to look up, by partition.
    """
    kind = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    topics: dict[str, list[Any]] = {}
    for tp, (current, epoch) in epochs.items():
        partition = kind.OffsetForLeaderPartition(
            partition=tp.partition, current_leader_epoch=current, leader_epoch=epoch, version=version
        )
        topics.setdefault(tp.topic, []).append(partition)
    return OffsetForLeaderEpochRequest(
        replica_id=-1,
        topics=[kind(topic=name, partitions=each, version=version) for name, each in topics.items()],
        version=version,
    )


def topic_id_text(topic_id: UUID | None) -> str:
    """Returns a topic id (KIP-516) as Kafka's tools print it: base64 without padding.

    Brokers that do not know ids (before Metadata, version 10) have the id 0 for each topic.
    """
    return base64.b64encode((topic_id or UUID(int=0)).bytes).decode().rstrip("=")


def encoded(request: Any, correlation_id: int, client_id: str) -> bytes:
    """Returns the bytes of a request, with its length and header."""
    request.with_header(correlation_id=correlation_id, client_id=client_id)
    return bytes(request.encode(framed=True, header=True))


def check_size(size: int, address: str, most_bytes: int = LARGEST_ANSWER_BYTES) -> None:
    """Checks the length that precedes an answer.

    Args:
        size: the length.
        address: of the broker.
        most_bytes: the largest length that is accepted.

    Raises:
        ConnectionError: if no broker sends such an answer.
    """
    if not 4 <= size <= most_bytes:
        begin = size.to_bytes(4, "big", signed=True)
        if begin[:2] == _TLS_ALERT:
            raise ConnectionError("it speaks TLS: set kafka.security.protocol to SSL or SASL_SSL")
        raise ConnectionError(
            f"{address} announces an answer of {size} bytes ({begin!r}): it is not a Kafka broker, or its "
            "answer is larger than kafka.receive.message.max.bytes"
        )


def decoded(request: Any, data: bytes | memoryview, correlation_id: int) -> ApiMessage:
    """Returns the answer to a request.

    Raises:
        ValueError: if the bytes are not that answer.
    """
    kind = request.header.get_response_class() if request.header is not None else _response_of(request)
    check_correlation(data, correlation_id)
    version = request.API_VERSION
    is_flexible = kind.flexible_version_q(version) and kind.name != "ApiVersionsResponse"
    try:
        return kind[None].decode(memoryview(data)[5 if is_flexible else 4 :], version=version)
    except _DAMAGED as error:
        raise ValueError(f"it is no {kind.name}: {type(error).__name__} {error}") from error


def check_correlation(data: bytes | memoryview, correlation_id: int) -> None:
    """Checks that an answer is the one to a request.

    Raises:
        ValueError: if it is not.
    """
    (found,) = struct.unpack_from(">i", data)
    if found != correlation_id:
        raise ValueError(f"its correlation id is {found}, not {correlation_id}")


def _response_of(request: Any) -> Any:
    request.with_header(correlation_id=0, client_id="")
    return request.header.get_response_class()


def produce_head(version: int, correlation_id: int, client_id: str, body_bytes: int) -> bytes:
    """Returns the length and header that precede the body of a Produce request."""
    name = client_id.encode()
    head = struct.pack(">hhih", _PRODUCE, version, correlation_id, len(name)) + name + b"\0"
    return struct.pack(">i", len(head) + body_bytes) + head


def produce_body(
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
    topics: Mapping[str, Iterable[tuple[int, EncodedBatch]]],
) -> list[bytes | memoryview]:
    """Returns the body of a Produce request, version 9 to 12, without copying the batches.

    Args:
        transactional_id: of the producer; None = it has no transactions.
        acks: -1 = the leader waits for the in-sync replicas; 1 = it does not.
        timeout_ms: how long the leader waits for the in-sync replicas.
        topics: partitions and their batches by topic, at most one batch for each partition.
    """
    out: list[bytes | memoryview] = []
    head = b"\0" if transactional_id is None else _compact(transactional_id.encode())
    head += struct.pack(">hi", acks, timeout_ms)
    head += _varint(len(topics) + 1)
    for topic, partitions in topics.items():
        parts = list(partitions)
        head += _compact(topic.encode()) + _varint(len(parts) + 1)
        for number, batch in parts:
            size = struct.pack(">i", number) + _varint(batch.size_bytes + 1)
            out += [head + size + batch.header, batch.body]
            head = b"\0"  # no tags of the partition
        head += b"\0"
    out.append(head + b"\0")
    return out


def _compact(text: bytes) -> bytes:
    return _varint(len(text) + 1) + text


def _varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


# -- Fetch --------------------------------------------------------------------------------------
#
# A Fetch has no session (KIP-227): each request names all partitions that it wants, because the partitions of
# a task differ from those of the task before.

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
