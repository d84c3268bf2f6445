"""A Kafka cluster in this process that speaks the protocol on real sockets, and misbehaves as a test asks.

It models what clients rely on: logs with the batches that producers sent, sequence numbers, epochs, the
coordinator's view of a transaction, markers, offsets that become visible with it, leader epochs, topic ids,
logins, and levels 0 to 2 of ``transaction.version``. At level 0, the coordinator cannot write that a
transaction has version 2. Messages are those of kafka-python.

A request that no broker announced, or that the simulation cannot decode, fails the test at the end.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kafka.protocol import consumer as reads
from kafka.protocol import metadata, producer, sasl
from kafka.protocol.admin import DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.record.memory_records import MemoryRecords

from tests.support.fetched_log import ABORT, COMMIT, INVALID_EPOCH, OK, Batch, Log

Partition = tuple[str, int]

OUT_OF_RANGE, CORRUPT_MESSAGE, UNKNOWN_TOPIC, NOT_LEADER, TOO_LARGE = 1, 2, 3, 6, 10
NOT_AVAILABLE, NOT_COORDINATOR, NOT_ENOUGH_REPLICAS = 15, 16, 19
UNSUPPORTED_VERSION, INVALID_TXN_STATE, CONCURRENT, LOGIN_FAILED = 35, 48, 51, 58
FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, FENCED = 74, 75, 90
UNSUPPORTED_MECHANISM, UNSTABLE_OFFSET_COMMIT, UNKNOWN_ID = 33, 88, 105
LAST_EPOCH = 32766
#: ListOffsets: the first offset of a log.
_EARLIEST = -2

#: Kind of request and answer, and the newest version that the simulation knows, by API key.
_KINDS: dict[int, tuple[Any, Any, int]] = {
    request.API_KEY: (request, answer, newest)
    for request, answer, newest in (
        (metadata.ApiVersionsRequest, metadata.ApiVersionsResponse, 3),
        (metadata.MetadataRequest, metadata.MetadataResponse, 12),
        (metadata.FindCoordinatorRequest, metadata.FindCoordinatorResponse, 4),
        (sasl.SaslHandshakeRequest, sasl.SaslHandshakeResponse, 1),
        (sasl.SaslAuthenticateRequest, sasl.SaslAuthenticateResponse, 2),
        (producer.InitProducerIdRequest, producer.InitProducerIdResponse, 5),
        (producer.AddPartitionsToTxnRequest, producer.AddPartitionsToTxnResponse, 3),
        (producer.AddOffsetsToTxnRequest, producer.AddOffsetsToTxnResponse, 3),
        (producer.ProduceRequest, producer.ProduceResponse, 12),
        (producer.TxnOffsetCommitRequest, producer.TxnOffsetCommitResponse, 5),
        (producer.EndTxnRequest, producer.EndTxnResponse, 5),
        (DescribeTransactionsRequest, DescribeTransactionsResponse, 0),
        (reads.FetchRequest, reads.FetchResponse, 12),
        (reads.ListOffsetsRequest, reads.ListOffsetsResponse, 7),
        (reads.OffsetForLeaderEpochRequest, reads.OffsetForLeaderEpochResponse, 4),
        (reads.OffsetFetchRequest, reads.OffsetFetchResponse, 9),
    )
}


def name_of(key: int) -> str:
    """Returns the name of a kind of request, such as ``Produce``."""
    return str(_KINDS[key][0].__name__.removesuffix("Request"))


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
            ``loris``: the answer says that it has ``number`` bytes, which come one by one and never end.
            ``length``: the answer says that it has ``number`` bytes more than it has.
            ``correlation``: its correlation id is wrong by ``number``.
            ``reorder``: it comes after the next answer of its connection.
            ``move``: leaders and coordinators move before the broker looks at the request.
        number: see ``kind``.
    """

    kind: str
    number: int = 0


class SimulatedKafka:
    """Brokers 1 to ``brokers`` with some topics.

    Args:
        topics: the partition count of each topic, or its logs.
        brokers: number of brokers.
        version: the finalized ``transaction.version``.

    Attributes:
        logs: the log of each partition.
        version: the finalized ``transaction.version``.
        fault: returns what happens to a request, by the name of its kind, as in ``Produce``; None = nothing.
        refuse: returns the error code with which a Fetch of a partition is answered; 0 = none.
        hides: returns whether a broker does not find an offset, because a length before it is wrong.
        remote_ms: how long a broker reads an offset from remote storage (KIP-405). Before Kafka 3.8, it gives
            up if the Fetch does not wait that long, and sends nothing.
        spoil: returns what is sent instead of these record batches of a partition.
        refers: returns the broker to which the leader of a partition refers clients in a rack; -1 = none.
        followers_refer: whether followers refer clients to other brokers, too.
        copies: the logs of followers, by broker and partition. They answer Fetch requests, too.
        asked_racks: the racks that Fetch requests named, in order, with the broker that was asked.
        offsets: committed offsets and metadata of the only group.
        pending: those that the open transaction is about to commit.
        producer_id, epoch: of the only transactional id.
        producer_ids: ids of producers without transactions.
        received: number of requests by kind.
        used: the versions of requests that were received, by kind.
        most_asked: the most bytes that one Fetch asked for.
        most_bytes: largest record batch that topics accept.
        is_stuck: whether the coordinator failed to write its state.
        hung: brokers that accept connections and requests, and answer nothing.
        cut_off: brokers that no other broker hears: they believe that they still lead what they led at some
            time (a value of `shift`), and cannot write.
        outdated: committed offsets with which brokers that are cut off answer as coordinators.
        unsupported: requests that the brokers do not know.
        advertised: host and port that a broker advertises instead of its own, by node.
        announced: lowest and highest version by kind, where they differ from what the simulation knows.
        users: passwords by name; if there are any, clients log in with SASL/PLAIN first.
        mechanisms: the SASL mechanisms that brokers name. They verify only PLAIN.
        challenge: what the brokers answer to each step of a login.
        session_ms: lifetime of a login; 0 = no limit.
        greet: returns what is sent to each new connection before it asks anything.
        garble: returns what is sent instead of an answer, with its correlation id, to a kind of request.
        shift: how often leaders and coordinators moved, which is also the leader epoch.
        violations: what clients did that they must not do.
    """

    def __init__(
        self, topics: Mapping[str, int | Sequence[Log]], *, brokers: int = 1, version: int = 2
    ) -> None:
        self.logs: dict[Partition, Log] = {}
        self.version = version
        self.fault: Callable[[str], Fault | None] = lambda kind: None
        self.refuse: Callable[[Partition], int] = lambda tp: 0
        self.hides: Callable[[Partition, int], bool] = lambda tp, offset: False
        self.remote_ms: Callable[[Partition, int], int] = lambda tp, offset: 0
        self.spoil: Callable[[Partition, bytes], bytes] = lambda tp, records: records
        self.refers: Callable[[Partition, str], int] = lambda tp, rack: -1
        self.followers_refer = False
        self.copies: dict[tuple[int, Partition], Log] = {}
        self.asked_racks: list[tuple[int, str]] = []
        self.offsets: dict[Partition, tuple[int, str]] = {}
        self.producer_id, self.epoch = 1000, -1
        self.producer_ids: list[int] = []
        self.received: dict[str, int] = defaultdict(int)
        self.used: dict[str, set[int]] = defaultdict(set)
        self.most_asked, self.most_bytes = 0, 1 << 20
        self.is_stuck = False
        self.hung: set[int] = set()
        self.cut_off: dict[int, int] = {}
        self.outdated: dict[int, dict[Partition, tuple[int, str]]] = {}
        self.unsupported: set[str] = set()
        self.advertised: dict[int, tuple[str, int]] = {}
        self.announced: dict[str, tuple[int, int]] = {}
        self.users: dict[str, str] = {}
        self.mechanisms, self.challenge = ["PLAIN"], b""
        self.session_ms = 0
        self.greet: Callable[[], bytes] = lambda: b""
        self.garble: Callable[[str, bytes], bytes] = lambda kind, answer: answer
        self.shift = 0
        self.violations: list[str] = []
        self._ids: dict[str, uuid.UUID] = {}
        self._counts: dict[str, int] = {}
        self._fenced: set[int] = set()
        self._stated_version = 0
        self._last_epoch: tuple[int, int] = (-1, -1)
        self._ended: tuple[int, int, bool] | None = None
        self._enlisted: set[Partition] = set()
        self._is_open = False
        self.pending: dict[Partition, tuple[int, str]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._timers: list[threading.Timer] = []
        for name, each in topics.items():
            self.add_topic(name, [Log() for _ in range(each)] if isinstance(each, int) else each)
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(brokers)]
        for number, listener in enumerate(self._listeners, 1):
            threading.Thread(target=self._accept, args=(number, listener), daemon=True).start()

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in self._listeners)

    def __enter__(self) -> SimulatedKafka:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._closed = True
            timers, sockets = list(self._timers), [*self._listeners, *self._sockets]
        for timer in timers:
            timer.cancel()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if kind is None:
            assert not self.violations, self.violations

    # -- what tests ask and do ---------------------------------------------------------------------

    def committed(self, topic: str) -> dict[int, list[bytes | None]]:
        """Returns the values of committed transactions, and those without one, by partition."""
        with self._lock:
            return {
                number: [
                    record.value
                    for batch in self.logs[topic, number].batches
                    if batch.outcome
                    for record in batch.records
                ]
                for number in range(self._counts[topic])
            }

    def hanging(self) -> int:
        """Number of batches that belong to no transaction which is open or ended."""
        with self._lock:
            mine = (self.producer_id, self.epoch) if self._is_open else None
            return sum(
                each.sent is not None
                and each.outcome is None
                and (each.producer, each.producer_epoch) != mine
                for each in self._batches()
            )

    def _batches(self) -> Iterator[Batch]:
        for log in self.logs.values():
            yield from log.batches

    def lose(self, topic: str, number: int, batches: int) -> None:
        """Truncates a log by the last batches that producers sent, as an unclean leader election does."""
        with self._lock:
            self.logs[topic, number].lose(batches)

    def leader(self, number: int) -> int:
        """Returns the node that leads the partitions of this number; coordinators are those of 0 and 1."""
        return self._node_of(number, self.shift)

    def add_topic(self, name: str, logs: Sequence[Log]) -> None:
        """Creates a topic with a new id."""
        with self._lock:
            self._counts[name], self._ids[name] = len(logs), uuid.uuid4()
            self.logs |= {(name, number): log for number, log in enumerate(logs)}

    def remove_topic(self, name: str) -> None:
        """Deletes a topic."""
        with self._lock:
            del self._counts[name], self._ids[name]
            self.logs = {tp: log for tp, log in self.logs.items() if tp[0] != name}

    def fence(self, node: int) -> None:
        """Removes a broker from the cluster, and moves what it leads to the next one."""
        with self._lock:
            self._fenced.add(node)
            self.shift += len(self._listeners)  # a new epoch with the same leaders otherwise

    def move(self) -> None:
        """Moves every leader and coordinator to the next broker."""
        with self._lock:
            self.shift += 1

    def drop_connections(self) -> None:
        """Ends every connection, as brokers do with idle ones."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # -- connections -------------------------------------------------------------------------------

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
        state = _State()
        held = b""
        try:
            connection.sendall(self.greet())
            for data in _frames(connection):
                answer = self._handle(node, data, state)
                if answer is None:
                    return
                payload, fault = answer
                state.is_silent = state.is_silent or fault.kind == "silent"
                if state.is_silent:
                    continue
                if fault.kind == "reorder":
                    held += payload
                    continue
                if not self._send(connection, payload + held, fault):
                    return
                held = b""
        except OSError:
            return
        except Exception as error:  # of the client, which sent something that no broker accepts
            self.violations.append(repr(error))
            raise
        finally:
            with self._lock:
                self._sockets.discard(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send(self, connection: socket.socket, payload: bytes, fault: Fault) -> bool:
        """Sends an answer; returns whether the connection goes on."""
        if fault.kind == "delay":
            time.sleep(fault.number / 1000)
        elif fault.kind == "truncate":
            connection.sendall(payload[: max(1, min(fault.number, len(payload) - 1))])
            return False
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
            return True
        elif fault.kind == "loris":
            connection.sendall(struct.pack(">i", fault.number) + payload[4:])
            while True:
                connection.sendall(b"\0")
                time.sleep(0.02)
        elif fault.kind == "length":
            size = min(len(payload) - 4 + fault.number, 2**31 - 1)
            payload = struct.pack(">i", size) + payload[4:]
        elif fault.kind == "correlation":
            (found,) = struct.unpack_from(">i", payload, 4)
            payload = payload[:4] + struct.pack(">i", (found + fault.number) & 0x7FFFFFFF) + payload[8:]
        elif fault.kind == "twice":
            payload *= 2
        connection.sendall(payload)
        return True

    def _handle(self, node: int, data: bytes, state: _State) -> tuple[bytes, Fault] | None:
        """Returns the answer; None = the connection ends."""
        if node in self.hung:
            return b"", Fault("silent")
        key, version, correlation_id = struct.unpack_from(">hhi", data)
        kind, answer_kind, _ = _KINDS[key]
        name = name_of(key)
        low, high = self._announced(key)
        if name == "ApiVersions" and not low <= version <= high:  # KIP-511
            made = answer_kind(error_code=UNSUPPORTED_VERSION, api_keys=[], version=0)
            made.with_header(correlation_id=correlation_id)
            return bytes(made.encode(framed=True, header=True)), Fault("")
        assert name not in self.unsupported, f"brokers do not know {name}"
        assert low <= version <= high, f"{name} {version} was not announced, but {low} to {high}"
        assert state.is_known or not self.users or name in _BEFORE_LOGIN, f"{name} came before a login"
        request = kind.decode(data, version=version, header=True)
        with self._lock:
            self.received[name] += 1
            self.used[name].add(version)
            fault = self.fault(name) or Fault("")
            if fault.kind == "move":
                self.shift += 1
            if fault.kind == "cut":
                return None
            if fault.kind == "late":
                timer = threading.Timer(fault.number / 1000, self._answer, (node, name, request, version))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
                return None
            if name.startswith("Sasl"):
                answer = self._log_in(request, state, fault.number if fault.kind == "error" else 0)
            else:
                refusal = fault.number if fault.kind == "error" else 0
                answer = self._answer(node, name, request, version, refusal)
                if fault.kind == "unsure":
                    answer = self._answer(node, name, request, version, fault.number)
        if fault.kind == "lost":
            return None
        if fault.kind == "throttle" and not name.startswith("Sasl"):
            answer["throttle_time_ms"] = fault.number
        made = answer_kind(**answer, version=version)
        made.with_header(correlation_id=correlation_id)
        sent = self.garble(name, bytes(made.encode(framed=False, header=True)))
        return struct.pack(">i", len(sent)) + sent, fault

    def _announced(self, key: int) -> tuple[int, int]:
        """Returns the lowest and highest version of a request that the simulation serves."""
        newest = _KINDS[key][2]
        low, high = self.announced.get(name_of(key), (0, newest))
        return low, min(high, newest)

    # -- requests ----------------------------------------------------------------------------------

    def _answer(self, node: int, name: str, request: Any, version: int, refusal: int = 0) -> dict[str, Any]:
        with self._lock:
            handler: Callable[..., dict[str, Any]] = getattr(self, f"_on_{name}")
            return handler(node, request, version, refusal)

    def _node_of(self, number: int, shift: int) -> int:
        count = len(self._listeners)
        nodes = [(number + shift + more) % count + 1 for more in range(count)]
        # those that are cut off believe in an older time, when they were not
        absent = self._fenced | (self.cut_off.keys() if shift == self.shift else set())
        return next(each for each in nodes if each not in absent)

    def _shift_of(self, node: int) -> int:
        """Returns how often leaders have moved, as far as a broker knows."""
        return self.cut_off.get(node, self.shift)

    def _log_in(self, request: Any, state: _State, refusal: int) -> dict[str, Any]:
        if isinstance(request, sasl.SaslHandshakeRequest):
            state.mechanism = request.mechanism
            code = refusal or (0 if state.mechanism in self.mechanisms else UNSUPPORTED_MECHANISM)
            return {"error_code": code, "mechanisms": self.mechanisms}
        if state.mechanism == "PLAIN":
            _, name, password = bytes(request.auth_bytes).decode().split("\0")
            state.is_known = not refusal and self.users.get(name) == password
        is_refused = refusal or (state.mechanism == "PLAIN" and not state.is_known)
        return {
            "error_code": (refusal or LOGIN_FAILED) if is_refused else 0,
            "error_message": "Authentication failed" if is_refused else None,
            "auth_bytes": self.challenge,
            "session_lifetime_ms": self.session_ms,
        }

    def _on_ApiVersions(self, _: int, __: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        keys = []
        for key, (_kind, _answer, newest) in _KINDS.items():
            if name_of(key) not in self.unsupported:
                low, high = self.announced.get(name_of(key), (0, newest))
                keys.append(
                    metadata.ApiVersionsResponse.ApiVersion(
                        api_key=key, min_version=low, max_version=high, version=version
                    )
                )
        answer: dict[str, Any] = {"error_code": refusal, "api_keys": keys, "throttle_time_ms": 0}
        if version >= 3 and self.version:
            level = metadata.ApiVersionsResponse.FinalizedFeatureKey(
                name="transaction.version", max_version_level=self.version, min_version_level=0, version=3
            )
            answer |= {"finalized_features_epoch": 1, "finalized_features": [level]}
        return answer

    def _on_Metadata(self, node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        kind = metadata.MetadataResponse.MetadataResponseTopic
        topics, shift = [], self._shift_of(node)
        names = [each.name for each in request.topics or ()]
        if request.topics is None or (version == 0 and not names):
            names = [*self._counts]
        for name in names:
            count = self._counts.get(name)
            partitions = [
                kind.MetadataResponsePartition(
                    error_code=0,
                    partition_index=number,
                    leader_id=self._node_of(number, shift),
                    leader_epoch=shift,
                    replica_nodes=[],
                    isr_nodes=[],
                    offline_replicas=[],
                    version=version,
                )
                for number in range(count or 0)
            ]
            code = refusal or (UNKNOWN_TOPIC if count is None else 0)
            told = {"topic_id": self._ids.get(name)} if version >= 10 else {}
            topics.append(kind(error_code=code, name=name, partitions=partitions, version=version, **told))
        brokers = [
            metadata.MetadataResponse.MetadataResponseBroker(
                node_id=number,
                host=self.advertised.get(number, ("127.0.0.1", 0))[0],
                port=self.advertised.get(number, each.getsockname())[1],
                rack=None,
                version=version,
            )
            for number, each in enumerate(self._listeners, 1)
            if number not in self._fenced and (number not in self.cut_off or shift != self.shift)
        ]
        return {"brokers": brokers, "topics": topics, "cluster_id": "c", "controller_id": 1}

    def _on_FindCoordinator(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        found = self._node_of(request.key_type, self._shift_of(node))
        told = {
            "node_id": found,
            "host": "127.0.0.1",
            "port": self._listeners[found - 1].getsockname()[1],
            "error_code": refusal,
            "error_message": None,
        }
        if version < 4:
            return told
        kind = metadata.FindCoordinatorResponse.Coordinator
        return {"coordinators": [kind(key=key, version=version, **told) for key in request.coordinator_keys]}

    def _refusal(self, node: int, group: int, refusal: int) -> int:
        """Returns the error code of a coordinator, which is that of the group or of the transactional id."""
        if refusal or node in self.cut_off:
            return refusal or NOT_AVAILABLE
        return 0 if node == self._node_of(group, self.shift) else NOT_COORDINATOR

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
            error_code=self._refusal(node, 1, refusal) or (UNKNOWN_ID if self.epoch < 0 else 0),
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
        for log in self.logs.values():
            log.end_transaction(self.producer_id, self.epoch, COMMIT if commit else ABORT)
        if commit:
            self.offsets.update(self.pending)
        self.pending, self._enlisted, self._is_open = {}, set(), False

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
        kind = producer.AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
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
        kind = producer.ProduceResponse.TopicProduceResponse
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
        if node in self.cut_off:
            return refusal or NOT_ENOUGH_REPLICAS, -1
        code = refusal or self._code(node, tp, -1)
        if code or len(records) > self.most_bytes:
            return code or TOO_LARGE, -1
        batch = MemoryRecords(records).next_batch()
        assert batch is not None
        if not batch.validate_crc():
            return CORRUPT_MESSAGE, -1
        if not batch.is_transactional:
            assert batch.producer_id == -1 or batch.producer_id in self.producer_ids
        elif version >= 12 or self.version >= 2:  # brokers of version 2 verify every transaction
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
        return self.logs[tp].produce(records)

    def _on_TxnOffsetCommit(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        code = self._refusal(node, 0, refusal)
        if not code and not self._is_mine(request):
            code = INVALID_EPOCH
        if not code and version >= 5:
            code = self._state(2)
        kind = producer.TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
        topics = []
        for topic in request.topics:
            for each in topic.partitions if not code else ():
                self._is_open = True
                metadata_ = (each.committed_metadata or "").removesuffix("\0")
                self.pending[topic.name, each.partition_index] = (each.committed_offset, metadata_)
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

    def _on_OffsetFetch(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        offsets, pending = self.offsets, self.pending
        if node in self.outdated and node == self._node_of(0, self._shift_of(node)):
            code, offsets, pending = refusal, self.outdated[node], {}
        else:
            code = self._refusal(node, 0, refusal)
        if version < 8:
            kind = reads.OffsetFetchResponse.OffsetFetchResponseTopic
            unstable = pending if version >= 7 and request.require_stable else {}
            topics = self._committed_offsets(
                kind, kind.OffsetFetchResponsePartition, request.topics, version, offsets, unstable
            )
            return {"throttle_time_ms": 0, "topics": [] if code else topics, "error_code": code}
        group_kind = reads.OffsetFetchResponse.OffsetFetchResponseGroup
        of_topic = group_kind.OffsetFetchResponseTopics
        groups = [
            group_kind(
                group_id=group.group_id,
                topics=[]
                if code
                else self._committed_offsets(
                    of_topic,
                    of_topic.OffsetFetchResponsePartitions,
                    group.topics,
                    version,
                    offsets,
                    pending if request.require_stable else {},
                ),
                error_code=code,
                version=version,
            )
            for group in request.groups
        ]
        return {"throttle_time_ms": 0, "groups": groups}

    def _committed_offsets(
        self,
        kind: Any,
        part_kind: Any,
        asked: Any,
        version: int,
        offsets: Mapping[Partition, tuple[int, str]],
        unstable: Collection[Partition],
    ) -> list[Any]:
        """Returns committed offsets as topics of an answer; all of them if the request names no topic."""
        wanted: dict[str, list[int]] = {}
        if asked is None:
            for name, number in offsets:
                wanted.setdefault(name, []).append(number)
        else:
            wanted = {each.name: list(each.partition_indexes) for each in asked}
        return [
            kind(
                name=name,
                partitions=[
                    part_kind(
                        partition_index=number,
                        committed_offset=offsets.get((name, number), (-1, ""))[0],
                        committed_leader_epoch=-1,
                        metadata=offsets.get((name, number), (-1, ""))[1],
                        error_code=UNSTABLE_OFFSET_COMMIT if (name, number) in unstable else 0,
                        version=version,
                    )
                    for number in numbers
                ],
                version=version,
            )
            for name, numbers in wanted.items()
        ]

    def _code(self, node: int, tp: Partition, epoch: int) -> int:
        """Returns the error code of a leader for a partition, of whose leader the client knows this epoch."""
        shift = self._shift_of(node)
        if tp not in self.logs:
            return UNKNOWN_TOPIC
        if node != self._node_of(tp[1], shift):
            return NOT_LEADER
        if epoch not in (-1, shift):
            return FENCED_LEADER_EPOCH if epoch < shift else UNKNOWN_LEADER_EPOCH
        return 0

    def _on_Fetch(self, node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        kind = reads.FetchResponse.FetchableTopicResponse
        committed = request.isolation_level == 1
        left, is_first = request.max_bytes, True
        self.most_asked = max(self.most_asked, left)
        self.asked_racks.append((node, request.rack_id if version >= 11 else ""))
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.topic, each.partition)
                code = refusal or self.refuse(tp) or self._code(node, tp, each.current_leader_epoch)
                log, replica = self.logs.get(tp, Log()), -1
                if code == NOT_LEADER and (node, tp) in self.copies:
                    code, log = 0, self.copies[node, tp]
                    if self.followers_refer:
                        replica = self.refers(tp, request.rack_id)
                elif not code and version >= 11:
                    replica = self.refers(tp, request.rack_id)
                if not code and not log.start <= each.fetch_offset <= log.end:
                    code = OUT_OF_RANGE
                if not code and self.hides(tp, each.fetch_offset):
                    code = CORRUPT_MESSAGE
                records, aborted, diverging = b"", (), None
                if not code and version >= 12 and each.last_fetched_epoch >= 0:
                    epoch, epoch_end = log.epoch_end(each.last_fetched_epoch)
                    if epoch_end < 0:
                        code = OUT_OF_RANGE
                    elif epoch < each.last_fetched_epoch or epoch_end < each.fetch_offset:
                        diverging = kind.PartitionData.EpochEndOffset(
                            epoch=epoch, end_offset=epoch_end, version=version
                        )
                if replica >= 0:
                    diverging = None
                elif not code and diverging is None:
                    most = min(left, each.partition_max_bytes)
                    if self.remote_ms(tp, each.fetch_offset) <= request.max_wait_ms:
                        records, aborted = log.fetched(each.fetch_offset, most, committed=committed)
                    if not is_first and len(records) > most:
                        records = b""  # only the first partition gets a batch beyond the limit
                    left = max(0, left - len(records))
                    is_first = is_first and not records
                told = {} if diverging is None else {"diverging_epoch": diverging}
                partitions.append(
                    kind.PartitionData(
                        **told,
                        partition_index=each.partition,
                        error_code=code,
                        high_watermark=-1 if code else log.end,
                        last_stable_offset=-1 if code else log.stable(),
                        log_start_offset=-1 if code else log.start,
                        aborted_transactions=[
                            kind.PartitionData.AbortedTransaction(
                                producer_id=producer_id, first_offset=first, version=version
                            )
                            for producer_id, first in aborted
                        ],
                        preferred_read_replica=replica,
                        records=self.spoil(tp, records),
                        version=version,
                    )
                )
            topics.append(kind(topic=topic.topic, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "error_code": 0, "session_id": 0, "responses": topics}

    def _on_ListOffsets(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        kind = reads.ListOffsetsResponse.ListOffsetsTopicResponse
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.name, each.partition_index)
                code = refusal or self._code(node, tp, -1)
                log = self.logs.get(tp, Log())
                end = log.stable() if request.isolation_level == 1 else log.end
                told = {"leader_epoch": self._shift_of(node)} if version >= 4 else {}
                partitions.append(
                    kind.ListOffsetsPartitionResponse(
                        partition_index=each.partition_index,
                        error_code=code,
                        timestamp=-1,
                        offset=-1 if code else log.start if each.timestamp == _EARLIEST else end,
                        version=version,
                        **told,
                    )
                )
            topics.append(kind(name=topic.name, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "topics": topics}

    def _on_OffsetForLeaderEpoch(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        kind = reads.OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.topic, each.partition)
                code = refusal or self._code(node, tp, each.current_leader_epoch)
                epoch, end = self.logs.get(tp, Log()).epoch_end(each.leader_epoch)
                partitions.append(
                    kind.EpochEndOffset(
                        partition=each.partition,
                        error_code=code,
                        leader_epoch=-1 if code else epoch,
                        end_offset=-1 if code else end,
                        version=version,
                    )
                )
            topics.append(kind(topic=topic.topic, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "topics": topics}


#: Requests that a client may send before its login.
_BEFORE_LOGIN = frozenset({"ApiVersions", "SaslHandshake", "SaslAuthenticate"})


@dataclass
class _State:
    """What a broker knows of a connection: whether somebody has logged in and how, and whether it answers."""

    is_known: bool = False
    mechanism: str = ""
    is_silent: bool = False


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
