"""Admin requests through the package's own connections, for logins that confluent-kafka lacks or delays.

`WireAdmin` has the methods of confluent-kafka's `AdminClient` that this package calls, with the same
arguments and results. `kafka.clients` creates it instead, so callers do not notice.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
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

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.cluster import GROUP, TRANSACTION, Cluster, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.failure import is_transient
from kafka_eos_source.model import LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

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
