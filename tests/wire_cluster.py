"""A cluster that speaks Kafka's protocol on real sockets, and misbehaves as a test asks it to.

It models what producers rely on: sequence numbers by producer and partition with the last five batches,
epochs, the coordinator's view of a transaction, offsets that become visible with it, and levels 0 to 2 of
``transaction.version``. At level 0, the coordinator cannot write that a transaction has version 2. Where
brokers differ, it does the worst that any of them may do: a log that does not know a producer accepts any
sequence number.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.admin import DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from kafka.record.memory_records import MemoryRecords

Partition = tuple[str, int]

OK, UNKNOWN_TOPIC, NOT_LEADER, NOT_COORDINATOR, NOT_ENOUGH_REPLICAS = 0, 3, 6, 16, 19
OUT_OF_ORDER, INVALID_EPOCH, INVALID_TXN_STATE, CONCURRENT, FENCED = 45, 47, 48, 51, 90
UNSUPPORTED_VERSION, TOO_LARGE, CORRUPT_MESSAGE = 35, 10, 2
LAST_EPOCH = 32766

_REQUESTS: dict[int, tuple[Any, Any, int]] = {
    kind.API_KEY: (kind, answer, newest)
    for kind, answer, newest in (
        (ApiVersionsRequest, ApiVersionsResponse, 3),
        (MetadataRequest, MetadataResponse, 12),
        (FindCoordinatorRequest, FindCoordinatorResponse, 4),
        (InitProducerIdRequest, InitProducerIdResponse, 5),
        (AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, 3),
        (AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, 3),
        (ProduceRequest, ProduceResponse, 12),
        (TxnOffsetCommitRequest, TxnOffsetCommitResponse, 5),
        (EndTxnRequest, EndTxnResponse, 5),
        (DescribeTransactionsRequest, DescribeTransactionsResponse, 0),
        (FetchRequest, FetchResponse, 12),
        (ListOffsetsRequest, ListOffsetsResponse, 7),
        (OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse, 4),
    )
}


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        kind: what happens:
            ``error``: it is refused with error code ``number``.
            ``unsure``: it has its effect, and the answer is error code ``number`` nevertheless.
            ``cut``: the connection ends before it has an effect; ``lost``: after that.
            ``silent``: it has its effect, and this connection never answers again.
            ``late``: the connection ends, and the request has its effect ``number`` ms later.
            ``delay``: the answer comes ``number`` ms later; ``throttle``: it asks for a pause of that length.
            ``truncate``: the answer ends after ``number`` bytes; ``damage``: bit ``number`` of it is wrong.
            ``trickle``: the answer takes ``number`` ms to arrive; ``twice``: it comes twice.
            ``move``: leaders and coordinators move before the broker looks at the request.
        number: see ``kind``.
    """

    kind: str
    number: int = 0


@dataclass
class _Batch:
    producer_id: int
    epoch: int
    first: int
    last: int
    offset: int
    values: list[bytes]
    outcome: bool | None = None


@dataclass
class _Log:
    batches: list[_Batch] = field(default_factory=list)
    end: int = 0
    recent: dict[int, deque[_Batch]] = field(default_factory=dict)

    def truncate(self, count: int) -> None:
        """Loses the last batches, and what the broker knew of them."""
        lost = self.batches[-count:]
        del self.batches[-count:]
        self.end -= sum(len(each.values) for each in lost)
        for known in self.recent.values():
            while known and known[-1] in lost:
                known.pop()

    def append(self, producer_id: int, epoch: int, first: int, values: list[bytes]) -> tuple[int, int]:
        """Returns an error code and the offset of the first record."""
        known = self.recent.get(producer_id) if producer_id >= 0 else None
        if known:
            newest = known[-1]
            if epoch < newest.epoch:
                return INVALID_EPOCH, -1
            if epoch > newest.epoch and first != 0:
                return OUT_OF_ORDER, -1
            if epoch == newest.epoch:
                last = (first + len(values) - 1) & 0x7FFFFFFF
                for each in known:
                    if (each.epoch, each.first, each.last) == (epoch, first, last):
                        return OK, each.offset
                if first != (newest.last + 1) & 0x7FFFFFFF:
                    return OUT_OF_ORDER, -1
        last = (first + len(values) - 1) & 0x7FFFFFFF
        batch = _Batch(producer_id, epoch, first, last, self.end, values)
        self.end += len(values)
        self.batches.append(batch)
        if not known or known[-1].epoch != epoch:
            known = self.recent[producer_id] = deque(maxlen=5)
        known.append(batch)
        return OK, batch.offset


class WireCluster:
    """Brokers 1 to ``brokers``, with the given partition counts of topics.

    Attributes:
        version: the finalized ``transaction.version``.
        fault: returns what happens to a request, by the name of its kind, as in ``Produce``; None = nothing.
        offsets: committed offsets and metadata of the only group.
        producer_id: of the only transactional id.
        epoch: of the only transactional id.
        received: number of requests by kind.
        most_open: most requests of one connection that had no answer.
        is_stuck: whether the coordinator failed to write its state.
        hung: brokers that accept connections and requests, and answer nothing.
        unsupported: requests that the brokers do not know.
        most_bytes: largest record batch that topics accept.
        producer_ids: ids of producers without transactions.
    """

    def __init__(self, topics: dict[str, int], *, brokers: int = 1, version: int = 2) -> None:
        self.version = version
        self.fault: Callable[[str], Fault | None] = lambda kind: None
        self.offsets: dict[Partition, tuple[int, str]] = {}
        self.producer_id, self.epoch = 1000, -1
        self.received: dict[str, int] = defaultdict(int)
        self.session_ms = 0
        self.is_stuck = False
        self.hung: set[int] = set()
        self._fenced: set[int] = set()
        self.unsupported: set[str] = set()
        self.most_bytes = 1 << 20
        self.producer_ids: list[int] = []
        self._stated_version = 0
        self._topics = topics
        self._logs: dict[Partition, _Log] = defaultdict(_Log)
        self._last_epoch: tuple[int, int] = (-1, -1)
        self._ended: tuple[int, int, bool] | None = None
        self._enlisted: set[Partition] = set()
        self._is_open = False
        self._pending: dict[Partition, tuple[int, str]] = {}
        self._shift = 0
        self._lock = threading.RLock()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._timers: list[threading.Timer] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(brokers)]
        for number, listener in enumerate(self._listeners, 1):
            threading.Thread(target=self._accept, args=(number, listener), daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in self._listeners)

    def __enter__(self) -> WireCluster:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            timers, sockets = list(self._timers), [*self._listeners, *self._sockets]
        for timer in timers:
            timer.cancel()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def committed(self, topic: str) -> dict[int, list[bytes]]:
        """Returns the values that a ``read_committed`` consumer reads, by partition."""
        with self._lock:
            return {
                number: [
                    value
                    for batch in self._logs[topic, number].batches
                    if batch.outcome
                    for value in batch.values
                ]
                for number in range(self._topics[topic])
            }

    def lose(self, topic: str, number: int, batches: int) -> None:
        """Truncates the log of a partition by the last batches, as an unclean leader election does."""
        with self._lock:
            self._logs[topic, number].truncate(batches)

    def hanging(self) -> int:
        """Number of batches that belong to no transaction which is open or ended."""
        with self._lock:
            mine = (self.producer_id, self.epoch) if self._is_open else None
            return sum(
                each.outcome is None and (each.producer_id, each.epoch) != mine
                for log in self._logs.values()
                for each in log.batches
            )

    def leader(self, number: int) -> int:
        """Returns the node that leads the partitions of this number; coordinators are those of 0 and 1."""
        return self._node_of(number)

    def fence(self, node: int) -> None:
        """Removes a broker from the cluster, and moves what it leads to the next one."""
        with self._lock:
            self._fenced.add(node)
            self._shift += len(self._listeners)  # a new epoch with the same leaders otherwise

    def move(self) -> None:
        """Moves every leader and coordinator to the next broker."""
        with self._lock:
            self._shift += 1

    def drop_connections(self) -> None:
        """Ends every connection, as brokers do with idle ones."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # -- connections -----------------------------------------------------------------------------

    def _accept(self, node: int, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    accepted.close()
                    return
                self._sockets.add(accepted)
            threading.Thread(target=self._serve, args=(node, accepted), daemon=True).start()

    def _serve(self, node: int, connection: socket.socket) -> None:
        silent = False
        try:
            for data in _frames(connection):
                answer = self._handle(node, data)
                if answer is None:
                    return
                payload, fault = answer
                silent = silent or fault.kind == "silent"
                if silent:
                    continue
                if fault.kind == "delay":
                    time.sleep(fault.number / 1000)
                elif fault.kind == "truncate":
                    connection.sendall(payload[: max(1, min(fault.number, len(payload) - 1))])
                    return
                elif fault.kind == "damage":
                    at = 4 + fault.number // 8 % (len(payload) - 4)
                    changed = bytearray(payload)
                    changed[at] ^= 1 << fault.number % 8
                    payload = bytes(changed)
                elif fault.kind == "trickle":
                    pieces = 10
                    for index in range(pieces):
                        begin, past = (len(payload) * each // pieces for each in (index, index + 1))
                        connection.sendall(payload[begin:past])
                        time.sleep(fault.number / 1000 / pieces)
                    continue
                elif fault.kind == "twice":
                    payload *= 2
                connection.sendall(payload)
        except OSError:
            return
        finally:
            with self._lock:
                self._sockets.discard(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _handle(self, node: int, data: bytes) -> tuple[bytes, Fault] | None:
        """Returns the answer; None = the connection ends."""
        if node in self.hung:
            return b"", Fault("silent")
        key, version, correlation_id = struct.unpack_from(">hhi", data)
        kind, answer_kind, _ = _REQUESTS[key]
        name = kind.__name__.removesuffix("Request")
        request = kind.decode(data, version=version, header=True)
        with self._lock:
            self.received[name] += 1
            fault = self.fault(name) or Fault("")
            if fault.kind == "move":
                self._shift += 1
            if fault.kind == "cut":
                return None
            if fault.kind == "late":
                timer = threading.Timer(fault.number / 1000, self._answer, (node, name, request, version))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
                return None
            refusal = fault.number if fault.kind == "error" else 0
            answer = self._answer(node, name, request, version, refusal)
            if fault.kind == "unsure":
                answer = self._answer(node, name, request, version, fault.number)
        if fault.kind == "lost":
            return None
        if fault.kind == "throttle":
            answer["throttle_time_ms"] = fault.number
        made = answer_kind(**answer, version=version)
        made.with_header(correlation_id=correlation_id)
        return bytes(made.encode(framed=True, header=True)), fault

    # -- requests --------------------------------------------------------------------------------

    def _answer(self, node: int, name: str, request: Any, version: int, refusal: int = 0) -> dict[str, Any]:
        with self._lock:
            handler: Callable[..., dict[str, Any]] = getattr(self, f"_on_{name}")
            return handler(node, request, version, refusal)

    def _node_of(self, number: int) -> int:
        count = len(self._listeners)
        nodes = [(number + self._shift + more) % count + 1 for more in range(count)]
        return next(each for each in nodes if each not in self._fenced)

    def _on_ApiVersions(self, *_: Any) -> dict[str, Any]:  # noqa: N802
        keys = [
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=0, max_version=newest, version=3)
            for key, (kind, _, newest) in _REQUESTS.items()
            if kind.__name__.removesuffix("Request") not in self.unsupported
        ]
        level = ApiVersionsResponse.FinalizedFeatureKey(
            name="transaction.version", max_version_level=self.version, min_version_level=0, version=3
        )
        finalized = [level] if self.version else []
        return {
            "error_code": 0,
            "api_keys": keys,
            "throttle_time_ms": 0,
            "supported_features": [],
            "finalized_features_epoch": 1,
            "finalized_features": finalized,
            "zk_migration_ready": False,
        }

    def _on_Metadata(self, _: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        kind = MetadataResponse.MetadataResponseTopic
        topics = []
        names = [*self._topics] if request.topics is None else [each.name for each in request.topics]
        for name in names:
            count = self._topics.get(name)
            partitions = [
                kind.MetadataResponsePartition(
                    error_code=0,
                    partition_index=number,
                    leader_id=self._node_of(number),
                    leader_epoch=self._shift,
                    replica_nodes=[],
                    isr_nodes=[],
                    offline_replicas=[],
                    version=version,
                )
                for number in range(count or 0)
            ]
            code = refusal or (UNKNOWN_TOPIC if count is None else 0)
            topics.append(kind(error_code=code, name=name, partitions=partitions, version=version))
        brokers = [
            MetadataResponse.MetadataResponseBroker(
                node_id=number, host="127.0.0.1", port=each.getsockname()[1], rack=None, version=version
            )
            for number, each in enumerate(self._listeners, 1)
            if number not in self._fenced
        ]
        return {"brokers": brokers, "topics": topics, "cluster_id": "c", "controller_id": 1}

    def _on_FindCoordinator(  # noqa: N802
        self, _: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        node = self._node_of(request.key_type)
        found = [
            FindCoordinatorResponse.Coordinator(
                key=key,
                node_id=node,
                host="127.0.0.1",
                port=self._listeners[node - 1].getsockname()[1],
                error_code=refusal,
                error_message=None,
                version=version,
            )
            for key in request.coordinator_keys
        ]
        return {"coordinators": found}

    def _refusal(self, node: int, group: int, refusal: int) -> int:
        return refusal or (0 if node == self._node_of(group) else NOT_COORDINATOR)

    def _state(self, version: int) -> int:
        """Writes the coordinator's state of a transaction of this version; returns an error code."""
        if self.is_stuck:
            return CONCURRENT
        self.is_stuck = version >= 2 and self.version == 0
        self._stated_version = version
        return UNSUPPORTED_VERSION if self.is_stuck else OK

    def _on_DescribeTransactions(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        found = DescribeTransactionsResponse.TransactionState(
            error_code=self._refusal(node, 1, refusal) or (105 if self.epoch < 0 else 0),
            transactional_id=request.transactional_ids[0],
            transaction_state="Ongoing" if self._is_open else "CompleteCommit",
            transaction_timeout_ms=1,
            transaction_start_time_ms=1,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            topics=[],
            version=version,
        )
        return {"throttle_time_ms": 0, "transaction_states": [found]}

    def _on_InitProducerId(  # noqa: N802
        self, node: int, request: Any, _: int, refusal: int
    ) -> dict[str, Any]:
        if request.transactional_id is None:
            if not refusal:
                self.producer_ids.append(5000 + len(self.producer_ids))
            return {
                "throttle_time_ms": 0,
                "error_code": refusal,
                "producer_id": -1 if refusal else self.producer_ids[-1],
                "producer_epoch": -1 if refusal else 0,
            }
        code = self._refusal(node, 1, refusal)
        asked, now = (request.producer_id, request.producer_epoch), (self.producer_id, self.epoch)
        if not code and asked[0] != -1 and asked not in (now, self._last_epoch):
            code = FENCED
        if not code:  # the end of an open transaction has the version of the brokers
            code = self._state(self.version if self._is_open else self._stated_version)
        if not code and (asked[0] == -1 or asked == now):
            self._end(False)
            self._raise_epoch()
            self._ended = None
            if asked[0] == -1:  # another owner: the retry of an older one's request is refused
                self._last_epoch = (-1, -1)
        return {
            "throttle_time_ms": 0,
            "error_code": code,
            "producer_id": -1 if code else self.producer_id,
            "producer_epoch": -1 if code else self.epoch,
        }

    def _raise_epoch(self) -> None:
        self._last_epoch = self.producer_id, self.epoch
        if self.epoch >= LAST_EPOCH:
            self.producer_id, self.epoch = self.producer_id + 1, 0
        else:
            self.epoch += 1

    def _end(self, commit: bool) -> None:
        for log in self._logs.values():
            for batch in log.batches:
                if batch.outcome is None and (batch.producer_id, batch.epoch) == (
                    self.producer_id,
                    self.epoch,
                ):
                    batch.outcome = commit
        if commit:
            self.offsets.update(self._pending)
        self._pending, self._enlisted, self._is_open = {}, set(), False

    def _is_mine(self, request: Any) -> bool:
        return (request.producer_id, request.producer_epoch) == (self.producer_id, self.epoch)

    def _on_AddPartitionsToTxn(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        code = self._refusal(node, 1, refusal)
        mine = (request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        if not code and mine != (self.producer_id, self.epoch):
            code = FENCED
        topics = {each.name: list(each.partitions) for each in request.v3_and_below_topics}
        code = code or self._state(0)
        if not code:
            self._is_open = True
            self._enlisted |= {(name, number) for name, numbers in topics.items() for number in numbers}
        kind = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        return {
            "results_by_topic_v3_and_below": [
                kind(
                    name=name,
                    results_by_partition=[
                        kind.AddPartitionsToTxnPartitionResult(
                            partition_index=number, partition_error_code=code, version=version
                        )
                        for number in numbers
                    ],
                    version=version,
                )
                for name, numbers in topics.items()
            ]
        }

    def _on_AddOffsetsToTxn(  # noqa: N802
        self, node: int, request: Any, _: int, refusal: int
    ) -> dict[str, Any]:
        code = self._refusal(node, 1, refusal)
        if not code and not self._is_mine(request):
            code = FENCED
        code = code or self._state(0)
        self._is_open = self._is_open or not code
        return {"throttle_time_ms": 0, "error_code": code}

    def _on_Produce(self, node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        kind = ProduceResponse.TopicProduceResponse
        topics = []
        for topic in request.topic_data:
            partitions = []
            for each in topic.partition_data:
                records, tp = bytes(each.records), (topic.name, each.index)
                code, offset = self._append(node, tp, records, version, refusal)
                partitions.append(
                    kind.PartitionProduceResponse(
                        index=each.index, error_code=code, base_offset=offset, version=version
                    )
                )
            topics.append(kind(name=topic.name, partition_responses=partitions, version=version))
        return {"responses": topics, "throttle_time_ms": 0}

    def _append(
        self, node: int, tp: Partition, records: bytes, version: int, refusal: int
    ) -> tuple[int, int]:
        if refusal or node != self._node_of(tp[1]):
            return refusal or NOT_LEADER, -1
        batch = MemoryRecords(records).next_batch()
        assert batch is not None
        if not batch.validate_crc():
            return CORRUPT_MESSAGE, -1
        if len(records) > self.most_bytes:
            return TOO_LARGE, -1
        if not batch.is_transactional:
            assert batch.producer_id == -1 or batch.producer_id in self.producer_ids
            producer_id, epoch, first = batch.producer_id, batch.producer_epoch, batch.base_sequence
            code, offset = self._logs[tp].append(
                producer_id, epoch, first, [bytes(each.value) for each in batch]
            )
            if not code:
                self._logs[tp].batches[-1].outcome = True
            return code, offset
        if version >= 12 or self.version >= 2:  # brokers of version 2 verify every transaction
            if (batch.producer_id, batch.producer_epoch) != (self.producer_id, self.epoch):
                return INVALID_EPOCH, -1
            if version >= 12:
                code = OK if tp in self._enlisted else self._state(2)
                if code:
                    return code, -1
                self._is_open = True
                self._enlisted.add(tp)
            elif tp not in self._enlisted:
                return INVALID_TXN_STATE, -1
        values = [bytes(each.value) for each in batch]
        return self._logs[tp].append(batch.producer_id, batch.producer_epoch, batch.base_sequence, values)

    def _on_TxnOffsetCommit(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        code = self._refusal(node, 0, refusal)
        if not code and not self._is_mine(request):
            code = INVALID_EPOCH
        if not code and version >= 5:
            code = self._state(2)
        kind = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
        topics = []
        for topic in request.topics:
            for each in topic.partitions if not code else ():
                self._is_open = True
                metadata = (each.committed_metadata or "").removesuffix("\0")
                self._pending[topic.name, each.partition_index] = (each.committed_offset, metadata)
            partitions = [
                kind.TxnOffsetCommitResponsePartition(
                    partition_index=each.partition_index, error_code=code, version=version
                )
                for each in topic.partitions
            ]
            topics.append(kind(name=topic.name, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "topics": topics}

    def _on_EndTxn(self, node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        code = self._refusal(node, 1, refusal)
        asked = request.producer_id, request.producer_epoch, bool(request.committed)
        if not code and asked == self._ended:
            pass  # the same request again
        elif not code and not self._is_mine(request):
            code = FENCED
        elif not code and not self._is_open and (request.committed or version < 5):
            code = INVALID_TXN_STATE
        elif not code and (code := self._state(2 if version >= 5 else 0)):
            pass
        elif not code:
            self._end(bool(request.committed))
            self._ended = asked
            if version >= 5:
                self._raise_epoch()
        return {
            "throttle_time_ms": 0,
            "error_code": code,
            "producer_id": -1 if code or version < 5 else self.producer_id,
            "producer_epoch": -1 if code or version < 5 else self.epoch,
        }


def _frames(connection: socket.socket) -> Iterator[bytes]:
    buffer = b""
    while True:
        while len(buffer) < 4 or len(buffer) < 4 + struct.unpack_from(">i", buffer)[0]:
            more = connection.recv(1 << 20)
            if not more:
                return
            buffer += more
        (size,) = struct.unpack_from(">i", buffer)
        yield buffer[4 : 4 + size]
        buffer = buffer[4 + size :]
