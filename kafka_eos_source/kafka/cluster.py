"""Finds brokers: leaders of partitions, and the coordinators of a transactional id and a group."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.consumer import ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from kafka_eos_source.errors import AuthorizationError, KafkaEosError, OperatorError
from kafka_eos_source.kafka.access import Access, NoConnectionError
from kafka_eos_source.kafka.connection import SILENT_SECONDS, Connection, Decode, Network
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import (
    Login,
    LoginRefusedError,
    classify,
    is_transient,
    unreachable,
)
from kafka_eos_source.kafka.messages import EARLIEST, LATEST, epoch_ends_request, offsets_request
from kafka_eos_source.model import Epochs, LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.secrets import Secrets

T = TypeVar("T")

GROUP, TRANSACTION = 0, 1

_METADATA, _COORDINATOR, _LIST_OFFSETS, _EPOCH_ENDS, _CONFIGS = 12, 4, 7, 4, 4
#: Type of a topic among the resources of DescribeConfigs.
_TOPIC = 2
_NOT_THE_LEADER = frozenset(
    {ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH}
)
#: How long an attempt to connect may take at least: TCP, TLS and the login need several round trips.
_LEAST_CONNECT_SECONDS = 3.0
#: How many times longer than the last answer the next one may take.
_SLOWER = 4
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5
#: What OpenSSL says if the other side sends something else than TLS.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"})


class TemporaryError(Exception):
    """A request failed, and may succeed a moment later on this or another broker."""


class NoLeaderError(TemporaryError):
    """A partition has no leader.

    Attributes:
        code: Kafka's error of the topic or partition; 0 = it exists.
    """

    def __init__(self, tp: TopicPartition, code: int) -> None:
        super().__init__(f"{tp} has no leader")
        self.code = code


class Cluster:
    """The brokers of a cluster, and the connections to those that were asked.

    The connections of a broker that hangs stay open, so only its silence shows that something is wrong. The
    cluster replaces it as leader and coordinator after ``broker.session.timeout.ms`` (9 s). So while a broker
    is silent, another one is asked which brokers the cluster has. If the silent one is not among them, its
    requests fail at once, and their senders look for its successor. Otherwise one request after the other
    would have to time out.

    Args:
        config: librdkafka properties.

    Attributes:
        bootstrap: addresses of the brokers that are asked first.
        network: serves the connections.
        complaint: what went wrong last; "" if nothing did.
        login_error: what a broker said when it refused a login that worked before; None = they accept it.
        leaders: the leaders of partitions, as of the last metadata.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kafka = {name: str(value) for name, value in config.items() if isinstance(value, (str, int))}
        if "sasl.mechanism" in kafka:
            kafka.setdefault("sasl.mechanisms", kafka["sasl.mechanism"])
        self.bootstrap = kafka.get("bootstrap.servers", "")
        self._creates_topics = kafka.get("allow.auto.create.topics") == "true"
        self.network = Network(self._on_silence)
        self.complaint = ""
        self.leaders = Leaders()
        #: why brokers refuse a login that worked before; None = they accept it
        self._refusal: AuthorizationError | None = None
        self.login_error: KafkaError | None = None
        self._access = Access.of(
            kafka,
            connect_seconds=int(kafka.get("socket.connection.setup.timeout.ms", "10000")) / 1000,
            request_seconds=int(kafka.get("socket.timeout.ms", "10000")) / 1000,
        )
        self._login, self._secrets = Login(config), Secrets.of(kafka)
        self._brokers: dict[int, tuple[str, int]] = {}
        #: Why an address did not answer, until it answers a request.
        self._failures: dict[str, Exception] = {}
        self._connections: dict[int, Connection] = {}
        self._any: Connection | None = None
        #: When `anyone` left an address, on the monotonic clock; others are asked first.
        self._left: dict[str, float] = {}
        #: Addresses that failed or are silent, which are asked last, and when to connect to them again at the
        #: earliest. A thread that connects does nothing else, so it must not do that all the time.
        self._away: dict[str, float] = {}
        #: How many attempts to connect to an address failed since one succeeded.
        self._attempts: dict[str, int] = {}
        #: How long an address may take for its first answer; this doubles until it suffices.
        self._answer_seconds: dict[str, float] = {}
        #: How long `anyone` may take to answer until another broker is asked; this doubles until it suffices.
        self._patience_seconds = SILENT_SECONDS
        self._is_looking = False
        self._coordinators: dict[tuple[int, str], int] = {}

    # -- requests --------------------------------------------------------------------------------

    def ask(
        self, connection: Connection, request: Any, deadline: Deadline, decode: Decode | None = None
    ) -> Any:
        """Sends a request, and waits for the answer.

        Args:
            connection: to a broker.
            request: a message of ``kafka-python``, whose version is set.
            deadline: for the answer.
            decode: decodes the answer; None = `messages.decoded`.

        Raises:
            TemporaryError: if no answer arrives.
        """
        return self._asked(connection, request, deadline, decode)()

    def _asked(
        self, connection: Connection, request: Any, deadline: Deadline, decode: Decode | None = None
    ) -> Callable[[], Any]:
        """Sends a request; the result waits for the answer, and raises `TemporaryError` if none arrives."""
        sent = time.monotonic()
        found: list[tuple[Any, Exception | None, float]] = []
        send = connection.send if decode is None else partial(connection.send, decode=decode)
        send(request, lambda answer, error: found.append((answer, error, time.monotonic())))

        def answer() -> Any:
            while not found:
                # Also reads after the deadline, once: else a silent connection would never be found to be so.
                self.network.wait(deadline.remaining_seconds(1.0))
                if not found and deadline.expired:
                    self._failures[connection.address] = TimeoutError("the time is up")
                    raise TemporaryError(f"no answer from broker {connection.address}")
            answer, error, arrived = found[0]
            if error is not None:
                # this client itself ends the connection of a broker that is slow, and asks another one
                is_slow = isinstance(error, ConnectionAbortedError)
                self._failures[connection.address] = TimeoutError(str(error)) if is_slow else error
                self.complain(error)
                raise TemporaryError(str(error)) from error
            self._login.record_success()
            self._away.pop(connection.address, None)
            self._failures.pop(connection.address, None)
            if connection is self._any:
                self._patience_seconds = self._patience(arrived - sent)
            return answer

        return answer

    def retried(
        self,
        doing: str,
        deadline: Deadline,
        call: Callable[[], T],
        explained: Callable[[KafkaError, str], KafkaEosError] = classify,
    ) -> T:
        """Calls ``call`` again while it raises `TemporaryError` or a temporary `KafkaError`.

        Args:
            doing: what is attempted, for messages.
            deadline: when to give up.
            call: is safe to repeat.
            explained: returns the error to raise for a broker's error that no retry mends.

        Raises:
            KafkaEosError: if it fails for good, or the deadline passed.
        """

        def permanent(failure: Exception) -> KafkaEosError | None:
            if not isinstance(failure, KafkaError):
                self.complain(failure)
                return None
            if not is_transient(failure):
                return explained(failure, doing)
            self.complain(failure.text)
            return None

        def timed_out(_: Exception) -> KafkaEosError:
            return self.out_of_time(deadline, f"{doing}: {self.complaint}")

        pauses = Pauses(deadline, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        return retry(call, (TemporaryError, KafkaError), pauses, permanent=permanent, timed_out=timed_out)

    def out_of_time(self, deadline: Deadline, last: str) -> KafkaEosError:
        """Returns the error for a deadline that has passed.

        Args:
            deadline: the deadline.
            last: what was attempted, and what went wrong last.
        """
        if self.unreached not in last:
            last = f"{last}; {self.unreached}"
        return self._refusal or unreachable(self.bootstrap, deadline.budget_seconds * 1000, last)

    @property
    def refusal(self) -> AuthorizationError | None:
        """Why brokers refuse a login that worked before; None = they accept it."""
        return self._refusal

    @property
    def brokers(self) -> Mapping[int, tuple[str, int]]:
        """The host and port that each broker advertises, by node id."""
        return self._brokers

    @property
    def refuses(self) -> bool:
        """Whether no address can be reached: each refuses, or does not accept a connection in time.

        Brokers that accept connections and do not answer in time may only be slow.
        """
        return bool(self._failures) and not any(
            isinstance(each, TimeoutError) and not isinstance(each, NoConnectionError)
            for each in self._failures.values()
        )

    def complain(self, what: object) -> None:
        """Records what went wrong last, for the message of a later error."""
        self.complaint = str(what)

    # -- brokers ---------------------------------------------------------------------------------

    def anyone(self, deadline: Deadline, avoid: Collection[str] = ()) -> Connection:
        """Returns a connection to any broker; if it has to choose one, those to ``avoid`` come last.

        Raises:
            TemporaryError: if none can be reached.
            AuthorizationError: if the login is refused.
        """
        if self._any is None or not _usable(self._any):
            self.ask_another()
            candidates = [*self._brokers.values()]
            random.shuffle(candidates)
            known = {
                f"{host}:{port}": (host, port)
                for host, port in [*candidates, *self._access.addresses.bootstrap()]
            }
            ordered = sorted(known, key=lambda each: (each in avoid, self._order(each)))
            for index, (host, port) in enumerate(known[each] for each in ordered):
                # a broker that hangs must leave time for the others
                remaining = deadline.remaining_seconds()
                share = min(remaining, max(_LEAST_CONNECT_SECONDS, remaining / (len(ordered) - index)))
                try:
                    self._any = self._connect(host, port, Deadline.after_seconds(share))
                    break
                except TemporaryError as error:
                    if deadline.expired:
                        raise TemporaryError(self.unreached) from error
            else:
                raise TemporaryError(self.unreached)
        return self._any

    @property
    def unreached(self) -> str:
        """Which addresses do not answer, and why; "" if all that were tried do."""
        nodes = {f"{host}:{port}": node for node, (host, port) in self._brokers.items()}
        return "; ".join(
            _unreached(address, nodes.get(address), failure) for address, failure in self._failures.items()
        )

    def ask_another(self) -> None:
        """Makes `anyone` choose a broker again: the present one may be cut off from the others."""
        chosen, self._any = self._any, None
        if chosen is not None:
            self._left[chosen.address] = time.monotonic()
            chosen.fail(ConnectionAbortedError("another broker is asked"))

    def broker(self, node: int, deadline: Deadline) -> Connection:
        """Returns the connection to a broker.

        Raises:
            TemporaryError: if it cannot be reached.
        """
        found = self._connections.get(node)
        if found is not None and _usable(found):
            return found
        if node not in self._brokers:
            raise TemporaryError(f"broker {node} is not in the cluster's metadata")
        if found is not None:
            found.fail(ConnectionAbortedError("its session ends soon"))
        self._connections[node] = made = self._connect(*self._brokers[node], deadline, node)
        if found is not None:
            made.muted_until = found.muted_until  # the broker's quota applies to the client
        return made

    def new_connection(self, node: int, deadline: Deadline) -> Connection:
        """Returns a new connection to a broker, which replaces the one that there is; raises as `broker`."""
        found = self._connections.get(node)
        if found is not None:
            found.fail(ConnectionAbortedError("a new connection replaces it"))
        return self.broker(node, deadline)

    def metadata(self, topics: Collection[str] | None, deadline: Deadline) -> Any:
        """Asks for topics; None = all. Updates brokers and leaders.

        Raises:
            TemporaryError: if no broker answers.
        """
        return self.ask_metadata(topics, deadline)()

    def ask_metadata(self, topics: Collection[str] | None, deadline: Deadline) -> Callable[[], Any]:
        """Sends the request of `metadata`; the result waits for the answer, and updates brokers and leaders.

        Raises:
            TemporaryError: if no broker can be reached.
        """
        connection = self.anyone(deadline)
        version = connection.version(MetadataRequest, _METADATA, 1)  # version 0 would ask for all topics
        wanted = None
        if topics is not None:
            wanted = [MetadataRequest.MetadataRequestTopic(name=name, version=version) for name in topics]
        request = MetadataRequest(
            topics=wanted, allow_auto_topic_creation=self._creates_topics, version=version
        )
        asked = self._asked(connection, request, deadline)
        return lambda: self._learned(asked(), has_topics=topics is not None)

    def _learned(self, answer: Any, *, has_topics: bool) -> Any:
        """Updates brokers and leaders from the answer to a Metadata request, and returns the answer."""
        self._brokers = {
            each.node_id: (each.host, each.port) for each in answer.brokers or ()
        } or self._brokers
        if has_topics:
            self.leaders.learn(answer.topics or ())
        return answer

    def partition_count(self, topic: str, deadline: Deadline) -> int:
        """Returns the number of partitions of a topic.

        Raises:
            KafkaError: with the error of the topic.
            TemporaryError: if no broker answers.
        """
        answer = self.metadata([topic], deadline)
        found = next((each for each in answer.topics or () if each.name == topic), None)
        if found is not None and found.error_code:
            raise KafkaError(found.error_code)
        if found is None or not found.partitions:
            raise TemporaryError(f"the answer does not mention the partitions of topic {topic!r}")
        return len(found.partitions)

    def topic_property(self, topic: str, name: str, deadline: Deadline) -> str:
        """Returns a property of a topic, which may be the broker's default.

        Raises:
            UnavailableError: if no broker answers before ``deadline``.
            AuthorizationError: if the principal may not describe the topic's configuration.
            KafkaEosError: if the topic or the property does not exist.
        """
        doing = f"reading {name} of topic {topic!r}"

        def ask() -> str:
            connection = self.anyone(deadline)
            version = connection.version(DescribeConfigsRequest, _CONFIGS, 1)
            resource = DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=_TOPIC, resource_name=topic, configuration_keys=[name], version=version
            )
            request = DescribeConfigsRequest(
                resources=[resource], include_synonyms=False, include_documentation=False, version=version
            )
            for found in self.ask(connection, request, deadline).results or ():
                if found.error_code:
                    raise KafkaError(found.error_code)
                for each in found.configs or ():
                    if each.name == name:
                        return str(each.value)
            raise OperatorError(f"{doing}: the broker {connection.address} does not report it.")

        return self.retried(doing, deadline, ask)

    def offsets(
        self,
        partitions: Iterable[TopicPartition],
        deadline: Deadline,
        *,
        earliest: bool = False,
        committed: bool = False,
    ) -> dict[TopicPartition, int]:
        """Returns an offset of each partition's log.

        Args:
            partitions: the partitions.
            deadline: for all requests.
            earliest: ask for the first offset of the log, instead of its end.
            committed: the end is the last stable offset, instead of the high watermark.

        Raises:
            KafkaError: if a leader refuses.
            TemporaryError: if a partition has no leader, or the leader does not answer.
        """
        times = dict.fromkeys(partitions, EARLIEST if earliest else LATEST)
        found = self.offsets_at(times, deadline, committed=committed)
        return {tp: each.offset for tp, each in found.items()}

    def offsets_at(
        self, times: Mapping[TopicPartition, int], deadline: Deadline, *, committed: bool
    ) -> dict[TopicPartition, LogEnd]:
        """Returns the first offset at or after a time in each partition's log, with its leader epoch.

        Args:
            times: ms since the epoch, `messages.EARLIEST` or `messages.LATEST`, by partition.
            deadline: for all requests.
            committed: the end is the last stable offset, instead of the high watermark.

        Returns:
            The offsets; -1 = no record is that late.

        Raises: as `offsets`.
        """
        found: dict[TopicPartition, LogEnd] = {}
        for connection, epochs in self._by_leader(times, deadline):
            version = connection.version(ListOffsetsRequest, _LIST_OFFSETS, 4)  # with the leader epoch
            request = offsets_request(version, epochs, times, committed=committed)
            for topic in self.ask(connection, request, deadline).topics or ():
                for each in topic.partitions or ():
                    self._check_partition(each)
                    tp = TopicPartition(topic.name, each.partition_index)
                    found[tp] = LogEnd(each.offset, each.leader_epoch)
        return _complete(found, times)

    def epoch_ends(
        self, epochs: Epochs, deadline: Deadline, leaders: Epochs | None = None
    ) -> dict[TopicPartition, int]:
        """Returns where an epoch ends in the log of each partition's leader (OffsetForLeaderEpoch, KIP-320).

        Args:
            epochs: the epoch, by partition.
            deadline: for all requests.
            leaders: epochs of leaders that the caller has heard of; older leaders do not count.

        Returns:
            The first offset of a later epoch, or else the end of the log; -1 = the leader does not know
            whether there was such an epoch, or such a request.

        Raises:
            KafkaError: if a leader refuses.
            TemporaryError: if a partition has no leader, or the leader does not answer.
        """
        found: dict[TopicPartition, int] = {}
        for connection, current in self._by_leader(epochs, deadline):
            try:
                version = connection.version(OffsetForLeaderEpochRequest, _EPOCH_ENDS, 2)
            except OperatorError:  # a service that only resembles Kafka
                found.update(dict.fromkeys(current, -1))
                continue
            known = leaders or {}
            asked = {tp: (max(epoch, known.get(tp, -1)), epochs[tp]) for tp, epoch in current.items()}
            request = epoch_ends_request(version, asked)
            for topic in self.ask(connection, request, deadline).topics or ():
                for each in topic.partitions or ():
                    self._check_partition(each)
                    found[TopicPartition(topic.topic, each.partition)] = each.end_offset
        return _complete(found, epochs)

    def _by_leader(
        self, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Iterator[tuple[Connection, Epochs]]:
        """Yields a connection to each leader with its partitions and their present leader epochs."""
        answer = self.metadata({tp.topic for tp in partitions}, deadline)
        by_leader: dict[int, dict[TopicPartition, int]] = {}
        for tp in partitions:
            node = self.leaders.of(tp)
            if node is None:
                raise NoLeaderError(tp, _error_of(tp, answer.topics or ()))
            by_leader.setdefault(node, {})[tp] = self.leaders.epoch(tp)
        for node, epochs in by_leader.items():
            yield self.broker(node, deadline), epochs

    def coordinator(self, kind: int, key: str, deadline: Deadline) -> Connection:
        """Returns the connection to the coordinator of a group or transactional id.

        Raises:
            KafkaError: if there is no coordinator, or the principal may not ask for it.
            TemporaryError: if no broker answers.
        """
        node = self._coordinators.get((kind, key))
        if node is None:
            connection = self.anyone(deadline)
            version = connection.version(FindCoordinatorRequest, _COORDINATOR, 1)  # with the kind
            named = {"coordinator_keys": [key]} if version >= 4 else {"key": key}
            request = FindCoordinatorRequest(key_type=kind, version=version, **named)
            answer = self.ask(connection, request, deadline)
            found = answer
            if version >= 4:
                found = next((each for each in answer.coordinators or () if each.key == key), None)
            if found is None:
                raise TemporaryError(f"the answer of {connection.address} does not mention {key!r}")
            if found.error_code:
                raise KafkaError(found.error_code)
            node = found.node_id
            self._brokers[node] = (found.host, found.port)
            self._coordinators[kind, key] = node
        try:
            return self.broker(node, deadline)
        except TemporaryError:
            self.forget_coordinator(kind, key)
            raise

    def forget_coordinator(self, kind: int, key: str) -> None:
        """Forgets a coordinator, because it moved or does not answer, and asks another broker for it."""
        self.ask_another()
        self._coordinators.pop((kind, key), None)

    def close(self) -> None:
        """Closes all connections."""
        self.network.close()

    # -- silence ---------------------------------------------------------------------------------

    def _on_silence(self, silent: Collection[Connection]) -> None:
        """Asks another broker which brokers the cluster has, and gives up a silent `anyone`."""
        addresses, now = {each.address for each in silent}, time.monotonic()
        for address in addresses:
            self._away.setdefault(address, now)
        if len({*self._brokers.values(), *self._access.addresses.bootstrap()}) < 2:
            return
        chosen = self._any
        if chosen is not None and chosen in silent and now - chosen.owes_since >= self._patience_seconds:
            self._patience_seconds = min(2 * self._patience_seconds, self._access.request_seconds)
            self.ask_another()
        if self._is_looking:
            return
        try:
            # It may be silent on another connection: a Produce request waits for replicas that hang.
            connection = self.anyone(Deadline.after_seconds(_LEAST_CONNECT_SECONDS), addresses)
        except (TemporaryError, AuthorizationError) as error:
            self.complain(error)
            return
        self._is_looking = True
        version = connection.version(MetadataRequest, _METADATA, 1)
        request = MetadataRequest(topics=[], allow_auto_topic_creation=False, version=version)
        connection.send(request, self._on_look)

    def _on_look(self, answer: Any, error: Exception | None) -> None:
        """Ends the connections to silent brokers that the cluster no longer has."""
        self._is_looking = False
        if error is not None:
            self.complain(error)
            return
        self._learned(answer, has_topics=False)
        for node, each in list(self._connections.items()):
            seconds = time.monotonic() - each.owes_since
            if node not in self._brokers and seconds >= SILENT_SECONDS:
                why = f"broker {each.address} has not answered for {seconds:.1f} s, and left the cluster"
                each.fail(TimeoutError(why))

    # -- inside ----------------------------------------------------------------------------------

    def _connect(self, host: str, port: int, deadline: Deadline, node: int | None = None) -> Connection:
        address, started = f"{host}:{port}", time.monotonic()
        if deadline.expired or started < self._away.get(address, started):
            failure = self._failures.setdefault(address, TimeoutError("no time was left"))
            raise TemporaryError(_unreached(address, node, failure))
        seconds = self._answer_seconds.get(address, _LEAST_CONNECT_SECONDS)
        try:
            connection = self.network.connect(host, port, self._access, deadline, seconds)
            self._refusal = self.login_error = None
            self._away.pop(address, None)
            self._attempts.pop(address, None)
            self._answer_seconds[address] = self._patience(time.monotonic() - started)
            return connection
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as failure:  # the broker is starting or stopping
            raise self._no_connection(address, node, started, failure) from failure
        except (LoginRefusedError, ssl.SSLError) as refusal:
            if getattr(refusal, "reason", None) in _NO_TLS:
                raise self._no_connection(address, node, started, refusal) from refusal
            said = self._secrets.hide(str(refusal))
            self.complain(said)
            is_tls = isinstance(refusal, ssl.SSLError)
            code = ErrorCode.TLS_HANDSHAKE_FAILED if is_tls else ErrorCode.SASL_AUTHENTICATION_FAILED
            error = KafkaError(code, f"handshake: {said}" if is_tls else said)
            self._refusal = self._login.error(error, f"connecting to {_named(address, node)}")
            if not self._login.has_worked:
                raise self._refusal from None  # the broker's own words may quote a secret
            self.login_error = error
            raise TemporaryError(said) from None
        except (OSError, ValueError, LookupError, OverflowError, struct.error) as failure:
            # the connection failed, or the other side is not a Kafka broker
            if isinstance(failure, TimeoutError):
                self._answer_seconds[address] = min(2 * seconds, self._access.connect_seconds)
            raise self._no_connection(address, node, started, failure) from failure

    def _check_partition(self, answer: Any) -> None:
        """Raises what a leader refuses; the broker that named the leader may be cut off from the others."""
        if answer.error_code in _NOT_THE_LEADER:
            self.ask_another()
        if answer.error_code:
            raise KafkaError(answer.error_code)

    def _patience(self, took_seconds: float) -> float:
        """Returns how long an answer may take, after the last one took so long."""
        return min(max(SILENT_SECONDS, _SLOWER * took_seconds), self._access.request_seconds)

    def _order(self, address: str) -> tuple[float, float]:
        """Returns a key that sorts addresses which failed or were asked lately to the end."""
        return self._away.get(address, 0.0), self._left.get(address, 0.0)

    def _no_connection(
        self, address: str, node: int | None, started: float, failure: Exception
    ) -> TemporaryError:
        now = time.monotonic()
        self._attempts[address] = attempts = self._attempts.get(address, 0) + 1
        self._away[address] = now + (
            self._access.pause_seconds(attempts) or min(now - started, SILENT_SECONDS)
        )
        self._failures[address] = failure
        why = _unreached(address, node, failure)
        self.complain(why)
        return TemporaryError(why)


def _named(address: str, node: int | None) -> str:
    """Returns the address of a broker for a message, and where it comes from."""
    return address if node is None else f"broker {node} at {address} (its advertised.listeners)"


def _unreached(address: str, node: int | None, failure: Exception) -> str:
    return f"cannot connect to {_named(address, node)}: {_reason(failure)}"


def _reason(failure: Exception) -> str:
    if isinstance(failure, socket.gaierror):
        return f"the host name does not resolve ({failure.strerror})"
    if isinstance(failure, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(failure, NoConnectionError):
        return "it did not accept a connection in time"
    if isinstance(failure, TimeoutError):
        return "it did not answer in time"
    if isinstance(failure, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError)):
        return (
            "it ended the connection before it answered, as a broker does that stops or starts, or whose "
            "listener expects another kafka.security.protocol"
        )
    if getattr(failure, "reason", None) in _NO_TLS:
        return "it does not speak TLS, but kafka.security.protocol does"
    return str(failure)


def _error_of(tp: TopicPartition, topics: Iterable[Any]) -> int:
    """Returns the error of a partition in an answer to a Metadata request; 0 = it exists."""
    topic = next((each for each in topics if each.name == tp.topic), None)
    if topic is None or topic.error_code:
        return 0 if topic is None else int(topic.error_code)
    is_known = any(each.partition_index == tp.partition for each in topic.partitions or ())
    return 0 if is_known else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def _complete(found: dict[TopicPartition, T], wanted: Collection[TopicPartition]) -> dict[TopicPartition, T]:
    for tp in set(wanted) - found.keys():
        raise TemporaryError(f"the leader's answer does not mention {tp}")
    return found


def _usable(connection: Connection) -> bool:
    return connection.failure is None and (connection.in_flight > 0 or time.monotonic() < connection.expires)


class Leaders:
    """Keeps the newest leader of each partition.

    Attributes:
        as_of: number of answers from which leaders were learned.
    """

    def __init__(self) -> None:
        self.as_of = 0
        self._nodes: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, Any] = {}

    def of(self, tp: TopicPartition) -> int | None:
        """Returns the node id of a partition's leader; None if it has none."""
        found = self._nodes.get(tp, -1)
        return None if found < 0 else found

    def epoch(self, tp: TopicPartition) -> int:
        """Returns the epoch of a partition's leader (KIP-320); -1 if unknown."""
        return self._epochs.get(tp, -1)

    def learn(self, topics: Iterable[Any]) -> None:
        """Takes leaders over from the topics in an answer to a Metadata request.

        An answer does not replace a leader by one with a lower epoch: a broker that is cut off from the
        others may still name an older leader, whose log may be shorter.
        """
        self.as_of += 1
        for topic in topics:
            if topic.error_code == 0:
                self._learn(topic)

    def _learn(self, topic: Any) -> None:
        topic_id = getattr(topic, "topic_id", None)
        # before Kafka 2.8 all ids are zero
        is_same = topic_id is not None and topic_id.int != 0 and self._topic_ids.get(topic.name) == topic_id
        self._topic_ids[topic.name] = topic_id
        found = {TopicPartition(topic.name, each.partition_index): each for each in topic.partitions or ()}
        # if the topic was created again with fewer partitions, the others have no leader any more
        for tp in [tp for tp in self._nodes if tp.topic == topic.name and tp not in found]:
            del self._nodes[tp]
            self._epochs.pop(tp, None)
        for tp, each in found.items():
            epoch = getattr(each, "leader_epoch", -1)
            if not is_same or epoch < 0 or epoch >= self.epoch(tp):
                self._nodes[tp] = each.leader_id
                self._epochs[tp] = epoch
