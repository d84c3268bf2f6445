"""Admin requests through the package's own connections, for logins that confluent-kafka lacks or delays.

`WireAdmin` has the methods of confluent-kafka's `AdminClient` that this package calls, with the same
arguments and results. `kafka.clients` creates it instead, so callers do not notice.
"""

from __future__ import annotations

import base64
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, libversion
from confluent_kafka.admin import AdminClient
from kafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteGroupsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
)
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest

from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.cluster import GROUP, TRANSACTION, Cluster, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.failure import (
    START_SECONDS,
    Login,
    classify,
    is_login,
    is_transient,
    kafka_error,
    mechanism,
    unreachable,
)
from kafka_eos_source.kafka.properties import for_librdkafka
from kafka_eos_source.model import LogEnd, TopicPartition
from kafka_eos_source.runtime.client_log import ClientLog, with_log_level
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.secrets import Secrets

#: The highest version of each request.
_METADATA, _CREATE, _DELETE, _CONFIGS = 12, 7, 5, 4
_GROUPS, _DELETE_GROUPS, _INIT_PRODUCER = 5, 2, 4
_BROKER_RESOURCE = 4
#: Kafka's operations (`AclOperation`): their names by code.
_OPERATIONS: tuple[str, ...] = (
    *("UNKNOWN", "ANY", "ALL", "READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION"),
    *("DESCRIBE_CONFIGS", "ALTER_CONFIGS", "IDEMPOTENT_WRITE", "CREATE_TOKENS", "DESCRIBE_TOKENS"),
    "TWO_PHASE_COMMIT",
)
#: No try of a request takes longer.
_LONGEST_SECONDS = 10.0

T = TypeVar("T")
Answers = dict[Any, "Future[Any]"]


class WireAdmin:
    """Sends admin requests through the package's own connections. May be used by several threads.

    A method answers before it returns, and its futures are complete. Errors are those of confluent-kafka.

    Args:
        config: librdkafka properties and callbacks.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._cluster = Cluster(config)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if "_cluster" in vars(self):
            self._cluster.close()

    def poll(self, _: float = 0.0) -> int:
        """Does nothing, because this client reports errors only as answers."""
        return 0

    # -- topics ----------------------------------------------------------------------------------

    def list_topics(self, timeout: float = _LONGEST_SECONDS) -> Any:
        """Returns the cluster's id, its brokers by id, and all topics by name."""
        found = self._metadata(None, timeout)
        topics = {}
        for each in found.topics or ():
            partitions = {
                one.partition_index: SimpleNamespace(replicas=list(one.replica_nodes or ()))
                for one in each.partitions or ()
            }
            error = KafkaError(each.error_code) if each.error_code else None
            topics[each.name] = SimpleNamespace(error=error, partitions=partitions)
        brokers = {
            each.node_id: SimpleNamespace(id=each.node_id, host=each.host, port=each.port)
            for each in found.brokers or ()
        }
        return SimpleNamespace(cluster_id=found.cluster_id, brokers=brokers, topics=topics)

    def describe_cluster(self, request_timeout: float = _LONGEST_SECONDS) -> Future[Any]:
        """Returns the cluster's id and its brokers."""

        def ask() -> Any:
            found = self._metadata([], request_timeout)
            nodes = [SimpleNamespace(id=each.node_id) for each in found.brokers or ()]
            return SimpleNamespace(cluster_id=found.cluster_id, nodes=nodes)

        return _future(ask)

    def describe_topics(
        self,
        topics: Any,
        include_authorized_operations: bool = False,
        request_timeout: float = _LONGEST_SECONDS,
    ) -> Answers:
        """Describes topics by name: id, partitions, and the principal's rights."""
        names = list(topics.topic_names)
        try:
            answer = self._metadata(names, request_timeout, operations=include_authorized_operations)
        except KafkaException as error:
            return {name: _failed(error) for name in names}
        found = {each.name: each for each in answer.topics or ()}
        return {name: _future(_topic, found.get(name)) for name in names}

    def create_topics(
        self,
        new_topics: Sequence[Any],
        operation_timeout: float = 0.0,
        request_timeout: float = _LONGEST_SECONDS,
    ) -> Answers:
        """Creates topics; the controller's answer decides about each."""
        kind = CreateTopicsRequest.CreatableTopic

        def ask(connection: Connection, deadline: Deadline) -> Iterable[Any]:
            version = connection.version(CreateTopicsRequest, _CREATE, 4)
            wanted = [
                kind(
                    name=each.topic,
                    num_partitions=each.num_partitions,
                    replication_factor=each.replication_factor,
                    assignments=[],
                    configs=[
                        kind.CreatableTopicConfig(name=name, value=str(value), version=version)
                        for name, value in (each.config or {}).items()
                    ],
                    version=version,
                )
                for each in new_topics
            ]
            request = CreateTopicsRequest(
                topics=wanted, timeout_ms=int(1000 * operation_timeout), validate_only=False, version=version
            )
            return self._cluster.ask(connection, request, deadline).topics or ()

        return self._by_controller([each.topic for each in new_topics], ask, request_timeout)

    def delete_topics(
        self, topics: Sequence[str], operation_timeout: float = 0.0, request_timeout: float = _LONGEST_SECONDS
    ) -> Answers:
        """Deletes topics; the controller's answer decides about each."""

        def ask(connection: Connection, deadline: Deadline) -> Iterable[Any]:
            version = connection.version(DeleteTopicsRequest, _DELETE, 1)
            request = DeleteTopicsRequest(
                topic_names=list(topics), timeout_ms=int(1000 * operation_timeout), version=version
            )
            return self._cluster.ask(connection, request, deadline).responses or ()

        return self._by_controller(topics, ask, request_timeout)

    def describe_configs(
        self, resources: Sequence[Any], request_timeout: float = _LONGEST_SECONDS
    ) -> Answers:
        """Returns the properties of topics or brokers, including defaults. A broker answers for itself."""

        def of(resource: Any) -> Any:
            def ask(deadline: Deadline) -> Any:
                kind, name = int(resource.restype.value), resource.name
                connection = self._broker(int(name) if kind == _BROKER_RESOURCE else None, deadline)
                version = connection.version(DescribeConfigsRequest, _CONFIGS, 1)
                wanted = DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=kind, resource_name=name, configuration_keys=None, version=version
                )
                request = DescribeConfigsRequest(resources=[wanted], version=version)
                (found,) = self._cluster.ask(connection, request, deadline).results
                _check(found)
                return {
                    each.name: SimpleNamespace(name=each.name, value=each.value, source=each.config_source)
                    for each in found.configs or ()
                }

            return self._call(ask, request_timeout)

        return {each: _future(of, each) for each in resources}

    def list_offsets(
        self,
        partitions: Mapping[Any, Any],
        isolation_level: Any,
        request_timeout: float = _LONGEST_SECONDS,
    ) -> Answers:
        """Returns the first offset at or after a time, or at an end of the log, with the leader's epoch.

        All partitions fail if one does.
        """
        times = {TopicPartition(tp.topic, tp.partition): spec._value for tp, spec in partitions.items()}
        committed = bool(isolation_level.value)
        try:
            answer = self._call(
                lambda deadline: self._cluster.offsets_at(times, deadline, committed=committed),
                request_timeout,
            )
        except KafkaException as error:
            return {tp: _failed(error) for tp in partitions}
        return {tp: _done(_offset(answer[TopicPartition(tp.topic, tp.partition)])) for tp in partitions}

    # -- groups ----------------------------------------------------------------------------------

    def describe_consumer_groups(
        self,
        group_ids: Sequence[str],
        include_authorized_operations: bool = False,
        request_timeout: float = _LONGEST_SECONDS,
    ) -> Answers:
        """Returns members of groups, of the classic protocol or KIP-848, and the principal's rights."""

        def of(group_id: str) -> Any:
            def ask(deadline: Deadline) -> Any:
                connection = self._cluster.coordinator(GROUP, group_id, deadline)
                found = self._consumer_group(connection, group_id, include_authorized_operations, deadline)
                if found is None:
                    version = connection.version(DescribeGroupsRequest, _GROUPS, 3)
                    request = DescribeGroupsRequest(
                        groups=[group_id],
                        include_authorized_operations=include_authorized_operations,
                        version=version,
                    )
                    (found,) = self._asked_coordinator(connection, request, group_id, deadline).groups
                self._check_coordinator(found, group_id)
                members = [
                    SimpleNamespace(client_id=each.client_id, host=each.client_host)
                    for each in found.members or ()
                ]
                operations = _operations(found.authorized_operations)
                return SimpleNamespace(members=members, authorized_operations=operations)

            return self._call(ask, request_timeout)

        return {each: _future(of, each) for each in group_ids}

    def delete_consumer_groups(
        self, group_ids: Sequence[str], request_timeout: float = _LONGEST_SECONDS
    ) -> Answers:
        """Deletes groups."""

        def of(group_id: str) -> None:
            def ask(deadline: Deadline) -> None:
                connection = self._cluster.coordinator(GROUP, group_id, deadline)
                version = connection.version(DeleteGroupsRequest, _DELETE_GROUPS)
                request = DeleteGroupsRequest(groups_names=[group_id], version=version)
                (found,) = self._asked_coordinator(connection, request, group_id, deadline).results
                self._check_coordinator(found, group_id)

            self._call(ask, request_timeout)

        return {each: _future(of, each) for each in group_ids}

    def _consumer_group(
        self, connection: Connection, group_id: str, operations: bool, deadline: Deadline
    ) -> Any:
        """Describes a group of the protocol of KIP-848; None = it is a classic one, or does not exist."""
        try:
            version = connection.version(_ConsumerGroupRequest, 0)
        except OperatorError:  # a broker before Kafka 3.7
            return None
        request = _ConsumerGroupRequest(
            group_ids=[group_id], include_authorized_operations=operations, version=version
        )
        (found,) = self._asked_coordinator(connection, request, group_id, deadline).groups
        absent = (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.UNSUPPORTED_VERSION)
        return None if found.error_code in absent else found

    def _asked_coordinator(
        self, connection: Connection, request: Any, group_id: str, deadline: Deadline
    ) -> Any:
        try:
            return self._cluster.ask(connection, request, deadline)
        except TemporaryError:
            self._cluster.forget_coordinator(GROUP, group_id)
            raise

    def _check_coordinator(self, found: Any, group_id: str) -> None:
        if found.error_code in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE):
            self._cluster.forget_coordinator(GROUP, group_id)
        _check(found)

    # -- inside ----------------------------------------------------------------------------------

    def _metadata(self, topics: Sequence[str] | None, seconds: float, *, operations: bool = False) -> Any:
        def ask(deadline: Deadline) -> Any:
            connection = self._cluster.anyone(deadline)
            version = connection.version(MetadataRequest, _METADATA, 8)
            wanted = None
            if topics is not None:
                wanted = [MetadataRequest.MetadataRequestTopic(name=name, version=version) for name in topics]
            request = MetadataRequest(
                topics=wanted,
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=operations,
                version=version,
            )
            return self._cluster.ask(connection, request, deadline)

        return self._call(ask, seconds)

    def _broker(self, node: int | None, deadline: Deadline) -> Connection:
        """Returns the connection to a broker; None = to any."""
        if node is None:
            return self._cluster.anyone(deadline)
        self._cluster.metadata([], deadline)
        return self._cluster.broker(node, deadline)

    def _by_controller(
        self,
        names: Sequence[str],
        ask: Callable[[Connection, Deadline], Iterable[Any]],
        seconds: float,
    ) -> Answers:
        """Asks the controller; without ZooKeeper, any broker passes the request on to it."""

        def call(deadline: Deadline) -> dict[str, Any]:
            controller = self._cluster.metadata([], deadline).controller_id
            connection = self._broker(controller if controller >= 0 else None, deadline)
            return {each.name: each for each in ask(connection, deadline)}

        try:
            found = self._call(call, seconds)
        except KafkaException as error:
            return {name: _failed(error) for name in names}
        return {name: _future(_check, found.get(name)) for name in names}

    def _call(self, ask: Callable[[Deadline], T], seconds: float) -> T:
        """Calls ``ask``; a failure of the network becomes an error of confluent-kafka's.

        Callers that pass hours to confluent-kafka stop waiting for its future earlier; here they cannot.
        """
        deadline = Deadline.after_seconds(min(seconds, _LONGEST_SECONDS))
        with self._lock:
            try:
                return ask(deadline)
            except TemporaryError as error:
                code = KafkaError._TIMED_OUT if deadline.expired else KafkaError._TRANSPORT
                raise KafkaException(KafkaError(code, str(error))) from error


def initial_error(
    config: Mapping[str, Any], transactional_id: str, timeout_ms: int, deadline: Deadline
) -> int:
    """Returns the error code with which a coordinator answers InitProducerId; 0 = it has a new epoch.

    Args:
        config: librdkafka properties.
        transactional_id: of the producer.
        timeout_ms: the transaction timeout to ask for.
        deadline: of all tries together.

    Raises:
        KafkaEosError: if no broker answers, or the login is refused.
    """
    cluster = Cluster(config)

    def ask() -> int:
        try:
            connection = cluster.coordinator(TRANSACTION, transactional_id, deadline)
        except KafkaException as error:
            code = int(error.args[0].code())
            if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                return code
            raise
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            version=connection.version(InitProducerIdRequest, _INIT_PRODUCER),
        )
        code = int(cluster.ask(connection, request, deadline).error_code)
        if code in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE):
            cluster.forget_coordinator(TRANSACTION, transactional_id)
        if code and is_transient(KafkaError(code)):
            raise KafkaException(KafkaError(code))
        return code

    try:
        return cluster.retried(f"asking for transactional id {transactional_id!r}", deadline, ask)
    finally:
        cluster.close()


def _check(answer: Any) -> None:
    """Raises the error that an answer contains."""
    if answer is None:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, "the answer does not mention it"))
    if answer.error_code:
        message = getattr(answer, "error_message", None)
        raise KafkaException(
            KafkaError(answer.error_code, message) if message else KafkaError(answer.error_code)
        )


def _topic(found: Any) -> Any:
    _check(found)
    partitions = [
        SimpleNamespace(
            id=each.partition_index,
            leader=SimpleNamespace(id=each.leader_id) if each.leader_id >= 0 else None,
            replicas=list(each.replica_nodes or ()),
        )
        for each in sorted(found.partitions or (), key=lambda each: int(each.partition_index))
    ]
    return SimpleNamespace(
        name=found.name,
        topic_id=base64.b64encode(found.topic_id.bytes).decode().rstrip("="),
        is_internal=found.is_internal,
        partitions=partitions,
        authorized_operations=_operations(found.authorized_operations),
    )


def _offset(found: LogEnd) -> Any:
    epoch = found.epoch if found.epoch >= 0 else None
    return SimpleNamespace(offset=found.offset, leader_epoch=epoch)


def _operations(codes: Collection[int] | None) -> list[Any] | None:
    if codes is None:
        return None
    return [SimpleNamespace(name=_OPERATIONS[code]) for code in codes if code < len(_OPERATIONS)]


def _future(ask: Callable[..., Any], *arguments: Any) -> Future[Any]:
    try:
        return _done(ask(*arguments))
    except KafkaException as error:
        return _failed(error)


def _done(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


# -- ConsumerGroupDescribe (KIP-848), which kafka-python lacks -----------------------------------


def _fields(text: str, **inner: Any) -> list[dict[str, Any]]:
    """Returns fields of a schema: ``Name:type``, where the type is a name of ``inner`` for a structure."""
    found = []
    for each in text.split():
        name, _, kind = each.partition(":")
        field: dict[str, Any] = {"name": name, "type": kind, "versions": "0+"}
        if kind == "string":
            field["nullableVersions"] = "0+"
        plain = kind.removeprefix("[]")
        found.append(field | ({"fields": inner[plain]} if plain in inner else {}))
    return found


def _message(kind: str, fields: list[dict[str, Any]]) -> Any:
    """Returns the class of a message. ``kafka-python`` loads a schema by its name, then patches it."""
    schema = {
        "apiKey": 69,
        "type": kind.lower(),
        "name": f"ConsumerGroupDescribe{kind}",
        "validVersions": "0",
        "flexibleVersions": "0+",
        "fields": fields,
    }
    patch = classmethod(lambda _cls, _given: schema)
    return type(ApiMessage)(f"DescribeGroups{kind}", (ApiMessage,), {"json_patch": patch})


_ConsumerGroupRequest = _message("Request", _fields("GroupIds:[]string IncludeAuthorizedOperations:bool"))
_TOPICS = _fields("Topics:[]Topic", Topic=_fields("TopicId:uuid TopicName:string Partitions:[]int32"))
_MEMBER = _fields(
    "MemberId:string InstanceId:string RackId:string MemberEpoch:int32 ClientId:string ClientHost:string "
    "SubscribedTopicNames:[]string SubscribedTopicRegex:string Assignment:Assignment "
    "TargetAssignment:Assignment",
    Assignment=_TOPICS,
)
_GROUP = _fields(
    "ErrorCode:int16 ErrorMessage:string GroupId:string GroupState:string GroupEpoch:int32 "
    "AssignmentEpoch:int32 AssignorName:string Members:[]Member AuthorizedOperations:bitfield",
    Member=_MEMBER,
)
#: Keeps the class alive: kafka-python refers to it weakly, by its key.
_ConsumerGroupResponse = _message("Response", _fields("ThrottleTimeMs:int32 Groups:[]Group", Group=_GROUP))


# HOUSE: from kafka_eos_source.kafka.admin_client
# HOUSE| """Sends requests to brokers: retries temporary failures, and names the reason when it gives up."""

Answer = TypeVar("Answer")

#: How long to wait for an answer before checking whether the brokers refused the login.
_LOGIN_CHECK_SECONDS = 0.5

#: Time limit of one try of a request.
REQUEST_SECONDS = 10.0
#: Time limit of a try in the first seconds of a request that only reads. The other brokers replace one that
#: hangs within that time, so they are asked again and again.
SOON_SECONDS, REPLACED_SECONDS = 3.0, 15.0

#: Errors by which librdkafka says that no broker has answered.
_SILENT = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE}
)

_log = logging.getLogger(__name__)


class Complaints:
    """What a client reported through its error callback, apart from the answers to its calls.

    Args:
        config: librdkafka properties of the client.

    Attributes:
        last: the newest report, without secrets; "" = none. It is the likely reason of a time-out.
        secrets: of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.last = ""
        self._config = config
        self.secrets = Secrets.of(config)
        self._explained = False
        self._login = Login(config)
        self._refused: KafkaError | None = None

    def on_error(self, error: KafkaError) -> None:
        """Records a report. The client's ``error_cb``."""
        self.last = self.secrets.hide(error.str())
        if is_login(error):
            # without secrets, because the error that quotes it has this one as its cause
            self._refused = KafkaError(error.code(), self.last)

    def answered(self) -> None:
        """Records that a broker answered a request, so the credentials work."""
        self._refused = None
        self._login.record_success()

    def login_error(self, doing: str) -> KafkaEosError | None:
        """Returns the error if a broker has refused the login since the last answer; else None.

        After a time-out, this is the reason.

        Args:
            doing: what was attempted.
        """
        return None if self._refused is None else self._login.error(self._refused, doing)

    def permanent_login_error(self, doing: str) -> KafkaEosError | None:
        """Returns `login_error` if these credentials have never worked in this process; else None.

        Credentials that worked before may be refused for a while; see `kafka.login`.
        """
        return None if self._login.has_worked else self.login_error(doing)

    def explanation(
        self, doing: str, failure: KafkaError | KafkaException, seconds: float = 0.0
    ) -> KafkaEosError | None:
        """Returns the error that says why no broker has answered, found out with the package's own client.

        Args:
            doing: what was attempted.
            failure: of the request.
            seconds: how long brokers may refuse connections; 0 = each is asked once.

        Returns:
            None if brokers have answered, or may answer later; `last` then names what is wrong with some.
        """
        if kafka_error(failure).code() not in _SILENT:
            return None
        # imported here, because it takes 0.1 s and few requests fail
        from kafka_eos_source.kafka.probe import check_reachable

        try:
            self.last = check_reachable(self._config, seconds, every=True) or self.last
        except UnavailableError as error:
            return UnavailableError(f"{doing}: {error.message}", fix=error.fix)
        except KafkaEosError as error:
            return error
        return None

    def start_error(self, doing: str, failure: KafkaException, deadline: Deadline) -> KafkaEosError | None:
        """Returns `explanation`, once, if no request of this process has ever succeeded; else None.

        A query that starts fails soon, so that a person sees the cause. One that runs waits for its brokers.

        Args:
            doing: what was attempted.
            failure: of the request.
            deadline: until which brokers may refuse connections.
        """
        if self._explained or self._login.has_worked or kafka_error(failure).code() not in _SILENT:
            return None
        self._explained = True
        return self.explanation(doing, failure, deadline.remaining_seconds())

    def forget(self) -> None:
        """Forgets the newest report, because brokers have since done all that they were asked to."""
        self.last = ""

    def await_answer(self, client: Any, future: Any, seconds: float | None = None) -> Any:
        """Returns the result of an admin call; stops waiting for it if the login was refused for good.

        Args:
            client: the client of the call.
            future: its result.
            seconds: longest time to wait; None = the call has a time limit of its own.

        Raises:
            KafkaException: if the call failed, or the login was refused for good; with _TIMED_OUT after
                ``seconds``.
        """
        waited = 0.0
        while True:
            wait = _LOGIN_CHECK_SECONDS if seconds is None else min(_LOGIN_CHECK_SECONDS, seconds - waited)
            try:
                return future.result(wait)
            except concurrent.futures.TimeoutError:
                client.poll(0)  # runs the error callback
                if self._refused is not None and not self._login.has_worked:
                    raise KafkaException(self._refused) from None
            waited += wait
            if seconds is not None and waited >= seconds:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


class TryLimit:
    """The time limit of each try of one request that only reads."""

    def __init__(self) -> None:
        self._replaced = Deadline.after_seconds(REPLACED_SECONDS)

    def seconds(self, deadline: Deadline | None = None) -> float:
        """Returns the limit of a try that begins now, and ends at ``deadline`` if that is earlier."""
        limit = REQUEST_SECONDS if self._replaced.expired else SOON_SECONDS
        return limit if deadline is None else max(0.5, deadline.remaining_seconds(limit))


def request(
    doing: str,
    send: Callable[[float], Answer],
    deadline: Deadline,
    complaints: Complaints,
    bootstrap_servers: str,
    *,
    poll: Callable[[float], object] | None = None,
    pause_seconds: float = 0.05,
    request_seconds: float = REQUEST_SECONDS,
    starts: bool = False,
) -> Answer:
    """Sends a request until it is answered, fails for good, or the deadline has passed.

    Args:
        doing: what the request does, for messages, such as "reading the offsets of group 'g'".
        send: sends the request; receives its time limit in seconds.
        deadline: of all tries together.
        complaints: of the client that sends.
        bootstrap_servers: for messages.
        poll: runs the client's error callback, so that a refused login ends the tries; None = ``send`` does.
        pause_seconds: between two tries.
        request_seconds: longest time limit of one try.
        starts: whether the request is the first of a query or command, and changes nothing. It then fails
            soon if brokers refuse connections (`Complaints.start_error`), and the first tries have less time
            (`TryLimit`).

    Raises:
        UnavailableError: if no broker answered before ``deadline``.
        AuthorizationError: if a broker refused the login, or the principal lacks a right.
        KafkaEosError: if the request failed for another reason that no retry mends; see `failure.classify`.
    """
    soon = Deadline.after_seconds(deadline.remaining_seconds(START_SECONDS))

    def permanent(failure: KafkaException) -> KafkaEosError | None:
        if is_login(failure):
            complaints.on_error(kafka_error(failure))
        elif not is_transient(failure):
            return classify(failure, doing, complaints.secrets)
        if poll is not None:
            poll(0)
        refused = complaints.permanent_login_error(doing)
        return refused or (complaints.start_error(doing, failure, soon) if starts else None)

    def timed_out(failure: KafkaException) -> KafkaEosError:
        refused = complaints.login_error(doing)
        if refused is not None:
            return refused
        explained = complaints.explanation(doing, failure)
        if explained is not None:
            return explained
        reason = f"{doing}: {complaints.last or complaints.secrets.hide(kafka_error(failure).str())}"
        return unreachable(bootstrap_servers, deadline.budget_seconds * 1000, reason)

    def report(failure: KafkaException, seconds: float) -> None:
        text = complaints.secrets.hide(kafka_error(failure).str())
        _log.debug("%s: %s; retrying in %.2f s", doing, text, seconds)

    limit = TryLimit()

    def send_once() -> Answer:
        if starts:
            return send(limit.seconds(deadline))
        return send(max(0.5, deadline.remaining_seconds(request_seconds)))

    answer = retry(
        send_once,
        KafkaException,
        Pauses(deadline, pause_seconds),
        permanent=permanent,
        timed_out=timed_out,
        report=report,
    )
    complaints.answered()
    return answer


# -- clients ------------------------------------------------------------------------------------
#
# Admin requests go through confluent-kafka, or the package's own client for some logins:
#
# - Kerberos: the wheels of confluent-kafka are built without it.
# - OAUTHBEARER: librdkafka asks for the first token of a client one second after the client was created, and
#   confluent-kafka waits for that. This package creates several clients while a query starts.

Made = TypeVar("Made")


def admin_client(config: Mapping[str, Any]) -> Any:
    """Creates a client for admin requests without contacting a broker; raises as `make`.

    Args:
        config: librdkafka properties and callbacks.
    """
    if mechanism(config) in ("GSSAPI", "OAUTHBEARER"):
        pass  # imports kafka-python

        return WireAdmin(config)
    return make(AdminClient, config)


def make(kind: Callable[..., Made], config: Mapping[str, Any]) -> Made:
    """Creates a client of confluent-kafka, whose errors reveal no secret, without contacting a broker.

    What the client logs appears when its ``poll`` is called.

    Args:
        kind: a client class of confluent-kafka.
        config: librdkafka properties and callbacks.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
    """
    secrets = Secrets.of(config)
    try:
        return kind(for_librdkafka(with_log_level(config)), logger=ClientLog(secrets.hide))
    except KafkaException as error:
        reason = secrets.hide(kafka_error(error).str())
    # raised outside the block: a cause or context would show librdkafka's unredacted text in the traceback
    newer = "; newer versions of confluent-kafka may have it" if "No such configuration" in reason else ""
    raise InvalidOptionError(
        f"librdkafka {librdkafka_version()} refuses the kafka.* options: {reason}.",
        fix=f"correct or remove the option that this message names{newer}.",
    )


def librdkafka_version() -> str:
    """Returns the version of the loaded librdkafka, such as ``2.13.0``."""
    return str(libversion()[0])
