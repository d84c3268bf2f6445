"""Sends requests that administer topics and groups: the client, and how its requests are retried.

`AdminClient` sends them through the package's own connections. A try of a request has a time limit; `request`
repeats temporary failures until the caller's deadline, and names the reason when it gives up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

from kafka_eos_source.errors import KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.cluster import GROUP, TRANSACTION, Cluster, NoLeaderError, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import (
    START_SECONDS,
    Login,
    classify,
    is_login,
    is_transient,
    unreachable,
)
from kafka_eos_source.kafka.messages import topic_id_text
from kafka_eos_source.kafka.probe import check_reachable
from kafka_eos_source.model import Epochs, LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.secrets import Secrets

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Time limit of one try of a request.
REQUEST_SECONDS = 10.0
#: Time limit of a try in the first seconds of a request that only reads. The other brokers replace one that
#: hangs within that time, so they are asked again and again.
SOON_SECONDS, REPLACED_SECONDS = 3.0, 15.0
#: How long to wait for the names of other topics, for a message.
NAMES_SECONDS = 3.0
#: Pauses within one try while brokers cannot be reached.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 0.5

#: The highest version of each request.
_METADATA, _CREATE, _DELETE, _CONFIGS = 12, 7, 5, 4
_GROUPS, _DELETE_GROUPS, _INIT_PRODUCER = 5, 2, 4
#: Types of resources of DescribeConfigs.
_TOPIC, _BROKER = 2, 4
#: DescribeConfigs: the value was set on the topic itself and is not a default.
_SET_ON_TOPIC = 1
#: Kafka's operations (`AclOperation`): their names by code.
_OPERATIONS: tuple[str, ...] = (
    *("UNKNOWN", "ANY", "ALL", "READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION"),
    *("DESCRIBE_CONFIGS", "ALTER_CONFIGS", "IDEMPOTENT_WRITE", "CREATE_TOKENS", "DESCRIBE_TOKENS"),
    "TWO_PHASE_COMMIT",
)


# -- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """A partition as brokers describe it.

    Attributes:
        number: of the partition.
        leader: node id of its leader; -1 = it has none.
        replicas: node ids of all brokers that keep a copy.
    """

    number: int
    leader: int
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True)
class Topic:
    """A topic as brokers describe it.

    Attributes:
        topic_id: Kafka's id of the topic (KIP-516), see `topic_id_text`.
        partitions: its partitions, in order.
        is_internal: whether it is one of Kafka's own.
        operations: what the principal may do with it; None = brokers were not asked.
    """

    topic_id: str
    partitions: tuple[Partition, ...]
    is_internal: bool = False
    operations: frozenset[str] | None = None


@dataclass(frozen=True)
class Everything:
    """The brokers and topics of a cluster.

    Attributes:
        cluster_id: Kafka's id of the cluster; "" = brokers report none.
        brokers: host and port that each broker advertises, by node id.
        topics: the topics that the principal may see, by name.
    """

    cluster_id: str
    brokers: Mapping[int, tuple[str, int]]
    topics: Mapping[str, Topic]


@dataclass(frozen=True)
class Setting:
    """The value of a property of a topic or broker."""

    value: str
    is_set_on_topic: bool = False


@dataclass(frozen=True)
class Group:
    """A consumer group.

    Attributes:
        members: client id and host of each member.
        operations: what the principal may do with it; None = the broker does not say.
    """

    members: tuple[tuple[str, str], ...]
    operations: frozenset[str] | None


# -- the client ----------------------------------------------------------------------------------


class AdminClient:
    """Sends admin requests. May be used by several threads.

    Each method answers, or raises within a time limit. A broker that cannot be reached is asked again until
    then, or another one is.

    All methods raise:
        KafkaError: with the broker's error, with NO_ANSWER if none answered, or with the reason why
            brokers refuse a login that worked before.
        KafkaEosError: if they refuse a login that has never worked, or do not support a request.

    Args:
        config: librdkafka properties.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._cluster = Cluster(config)
        self._lock = threading.Lock()
        #: Whether a broker was reached at the address that it advertises.
        self._has_reached = False

    def __del__(self) -> None:
        if "_cluster" in vars(self):
            self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._cluster.close()

    # -- topics ----------------------------------------------------------------------------------

    def everything(self, seconds: float) -> Everything:
        """Returns the cluster's brokers and topics."""
        found = self._metadata(None, seconds)
        brokers = {each.node_id: (each.host, each.port) for each in found.brokers or ()}
        topics = {each.name: _topic(each) for each in found.topics or () if not each.error_code}
        return Everything(str(found.cluster_id or ""), brokers, topics)

    def cluster(self, seconds: float) -> tuple[str, list[int]]:
        """Returns the cluster's id, and the node ids of its brokers."""
        found = self._metadata([], seconds)
        return str(found.cluster_id or ""), [each.node_id for each in found.brokers or ()]

    def names(self, seconds: float) -> list[str]:
        """Returns the names of the topics that the principal may see."""
        return [str(each.name) for each in self._metadata(None, seconds).topics or () if not each.error_code]

    def names_if_known(self, seconds: float) -> list[str]:
        """Returns what `names` does, for a message; nothing if no broker answers in time. Raises nothing."""
        try:
            return self.names(seconds)
        except (KafkaError, KafkaEosError):
            return []

    def topics(
        self, names: Collection[str], seconds: float, *, operations: bool = False
    ) -> dict[str, Topic | KafkaError]:
        """Describes topics by name; an error of one topic takes its place. Otherwise as `described`."""
        return self.described(names, seconds, operations=operations)[1]

    def described(
        self, names: Collection[str], seconds: float, *, operations: bool = False
    ) -> tuple[str, dict[str, Topic | KafkaError]]:
        """Returns the cluster's id, and describes topics by name; an error of one topic takes its place.

        Args:
            names: of the topics.
            seconds: the time limit.
            operations: whether to ask for the principal's rights (KIP-430).
        """
        answer = self._metadata(list(names), seconds, operations=operations)
        found = {each.name: each for each in answer.topics or ()}
        described: dict[str, Topic | KafkaError] = {}
        for name in names:
            try:
                _check(found.get(name))
                described[name] = _topic(found[name])
            except KafkaError as error:
                described[name] = error
        return str(answer.cluster_id or ""), described

    def topic(self, name: str, seconds: float) -> Topic:
        """Describes a topic."""
        found = self.topics([name], seconds)[name]
        if isinstance(found, KafkaError):
            raise found
        return found

    def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        config: Mapping[str, str],
        seconds: float,
        *,
        is_retry: bool = False,
    ) -> None:
        """Creates a topic; the controller's answer decides.

        A request whose answer was lost may have created the topic. After one, a topic that exists counts as
        created.

        Args:
            name: of the topic.
            partitions: how many it gets.
            replication_factor: -1 = the broker's default.
            config: its properties.
            seconds: the time limit.
            is_retry: whether the caller has sent this request before, and got no definite answer.
        """
        kind = CreateTopicsRequest.CreatableTopic
        may_be_ours = is_retry

        def ask(connection: Connection, deadline: Deadline) -> Iterable[Any]:
            nonlocal may_be_ours
            version = connection.version(CreateTopicsRequest, _CREATE, 4)
            wanted = kind(
                name=name,
                num_partitions=partitions,
                replication_factor=replication_factor,
                assignments=[],
                configs=[
                    kind.CreatableTopicConfig(name=each, value=str(value), version=version)
                    for each, value in config.items()
                ],
                version=version,
            )
            request = CreateTopicsRequest(
                topics=[wanted], timeout_ms=_ms_left(deadline), validate_only=False, version=version
            )
            was_sent, may_be_ours = may_be_ours, True
            answer = self._cluster.ask(connection, request, deadline).topics or ()
            for each in answer:
                if was_sent and each.error_code == ErrorCode.TOPIC_ALREADY_EXISTS:
                    each.error_code = 0
            return answer

        self._of_controller(name, ask, seconds)

    def delete_topic(self, name: str, seconds: float) -> None:
        """Deletes a topic; the controller's answer decides."""

        def ask(connection: Connection, deadline: Deadline) -> Iterable[Any]:
            version = connection.version(DeleteTopicsRequest, _DELETE, 1)
            request = DeleteTopicsRequest(topic_names=[name], timeout_ms=_ms_left(deadline), version=version)
            return self._cluster.ask(connection, request, deadline).responses or ()

        self._of_controller(name, ask, seconds)

    def topic_config(self, name: str, seconds: float) -> dict[str, Setting]:
        """Returns the properties of a topic, including defaults."""
        return self._config(_TOPIC, name, seconds)

    def broker_config(self, node: int, seconds: float) -> dict[str, Setting]:
        """Returns the properties of a broker, which answers for itself."""
        return self._config(_BROKER, str(node), seconds)

    def offsets_at(
        self, times: Mapping[TopicPartition, int], seconds: float, *, committed: bool
    ) -> dict[TopicPartition, LogEnd]:
        """Returns the first offset at or after a time in each log; see `Cluster.offsets_at`.

        All partitions fail if one does.
        """
        return self._call_leaders(
            lambda deadline: self._cluster.offsets_at(times, deadline, committed=committed), seconds
        )

    def epoch_ends(
        self, epochs: Epochs, seconds: float, leaders: Epochs | None = None
    ) -> dict[TopicPartition, int]:
        """Returns where leader epochs end in the logs of the present leaders; see `Cluster.epoch_ends`."""
        return self._call_leaders(
            lambda deadline: self._cluster.epoch_ends(epochs, deadline, leaders), seconds
        )

    # -- groups ----------------------------------------------------------------------------------

    def group(self, group_id: str, seconds: float, *, operations: bool = False) -> Group:
        """Describes a group, of the classic protocol or KIP-848.

        Args:
            group_id: the group.
            seconds: the time limit.
            operations: whether to ask for the principal's rights (KIP-430).
        """

        def ask(deadline: Deadline) -> Group:
            connection = self._cluster.coordinator(GROUP, group_id, deadline)
            found = self._consumer_group(connection, group_id, operations, deadline)
            if found is None:
                version = connection.version(DescribeGroupsRequest, _GROUPS, 3)
                request = DescribeGroupsRequest(
                    groups=[group_id], include_authorized_operations=operations, version=version
                )
                (found,) = self._asked_coordinator(connection, request, group_id, deadline).groups
            self._check_coordinator(found, group_id)
            members = tuple((each.client_id, each.client_host) for each in found.members or ())
            return Group(members, _operations(found.authorized_operations))

        return self._call(ask, seconds)

    def delete_group(self, group_id: str, seconds: float) -> None:
        """Deletes a group."""

        def ask(deadline: Deadline) -> None:
            connection = self._cluster.coordinator(GROUP, group_id, deadline)
            version = connection.version(DeleteGroupsRequest, _DELETE_GROUPS)
            request = DeleteGroupsRequest(groups_names=[group_id], version=version)
            (found,) = self._asked_coordinator(connection, request, group_id, deadline).results
            self._check_coordinator(found, group_id)

        self._call(ask, seconds)

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
        absent = (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION)
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
        if found.error_code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
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
            answer = self._cluster.ask(connection, request, deadline)
            self._reach(connection, answer, deadline)
            return answer

        return self._call(ask, seconds)

    def _reach(self, connection: Connection, answer: Any, deadline: Deadline) -> None:
        """Makes sure, once, that a broker can be reached at the address that it advertises.

        The address of a bootstrap server may answer although no other does. A query that starts would only
        find that out when it reads.

        Raises:
            TemporaryError: if none can.
        """
        addresses = {f"{each.host}:{each.port}" for each in answer.brokers or ()}
        if self._has_reached or not addresses or connection.address in addresses:
            self._has_reached = True
            return
        self._cluster.metadata([], deadline)
        nodes = list(self._cluster.brokers)
        for index, node in enumerate(nodes):
            share = Deadline.after_seconds(deadline.remaining_seconds() / (len(nodes) - index))
            try:
                self._cluster.broker(node, share)
            except TemporaryError:
                if index == len(nodes) - 1:
                    raise
            else:
                self._has_reached = True
                return

    def _config(self, kind: int, name: str, seconds: float) -> dict[str, Setting]:
        def ask(deadline: Deadline) -> dict[str, Setting]:
            connection = self._broker(int(name) if kind == _BROKER else None, deadline)
            version = connection.version(DescribeConfigsRequest, _CONFIGS, 1)
            wanted = DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=kind, resource_name=name, configuration_keys=None, version=version
            )
            request = DescribeConfigsRequest(resources=[wanted], version=version)
            (found,) = self._cluster.ask(connection, request, deadline).results
            _check(found)
            return {
                each.name: Setting(each.value, each.config_source == _SET_ON_TOPIC)
                for each in found.configs or ()
            }

        return self._call(ask, seconds)

    def _broker(self, node: int | None, deadline: Deadline) -> Connection:
        """Returns the connection to a broker; None = to any."""
        if node is None:
            return self._cluster.anyone(deadline)
        self._cluster.metadata([], deadline)
        return self._cluster.broker(node, deadline)

    def _of_controller(
        self, topic: str, ask: Callable[[Connection, Deadline], Iterable[Any]], seconds: float
    ) -> None:
        """Asks the controller about a topic; without ZooKeeper, any broker passes the request on to it."""

        def call(deadline: Deadline) -> None:
            controller = self._cluster.metadata([], deadline).controller_id
            connection = self._broker(controller if controller >= 0 else None, deadline)
            _check({each.name: each for each in ask(connection, deadline)}.get(topic))

        self._call(call, seconds)

    def _call_leaders(self, ask: Callable[[Deadline], T], seconds: float) -> T:
        """Calls ``ask`` as `_call` does, and raises the error of a topic or partition that has no leader."""

        def ask_leaders(deadline: Deadline) -> T:
            try:
                return ask(deadline)
            except NoLeaderError as error:
                if error.code:
                    raise KafkaError(error.code) from error
                raise

        return self._call(ask_leaders, seconds)

    def _call(self, ask: Callable[[Deadline], T], seconds: float) -> T:
        """Calls ``ask`` until it does not fail for a temporary reason of the network, or the time is up."""
        deadline = Deadline.after_seconds(seconds)
        with self._lock:
            try:
                pauses = Pauses(deadline, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                return retry(lambda: ask(deadline), TemporaryError, pauses)
            except TemporaryError as error:
                refused = self._cluster.login_error
                if refused is not None:
                    raise KafkaError(refused.code, refused.text) from error
                raise KafkaError(ErrorCode.NO_ANSWER, str(error)) from error


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
        except KafkaError as error:
            code = error.code
            if code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
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
        if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            cluster.forget_coordinator(TRANSACTION, transactional_id)
        if code and is_transient(KafkaError(code)):
            raise KafkaError(code)
        return code

    try:
        return cluster.retried(f"asking for transactional id {transactional_id!r}", deadline, ask)
    finally:
        cluster.close()


def _ms_left(deadline: Deadline) -> int:
    """Returns how long the controller may take, so that its answer arrives before the deadline."""
    seconds = deadline.remaining_seconds()
    return int(1000 * max(seconds - 1.0, seconds / 2))


def _check(answer: Any) -> None:
    """Raises the error that an answer contains."""
    if answer is None:
        raise KafkaError(ErrorCode.CONNECTION_FAILED, "the answer does not mention it")
    if answer.error_code:
        message = getattr(answer, "error_message", None)
        raise KafkaError(answer.error_code, message or "")


def _topic(found: Any) -> Topic:
    return Topic(
        topic_id_text(found.topic_id),
        tuple(
            Partition(each.partition_index, each.leader_id, tuple(each.replica_nodes or ()))
            for each in sorted(found.partitions or (), key=lambda each: int(each.partition_index))
        ),
        bool(found.is_internal),
        _operations(found.authorized_operations),
    )


def _operations(codes: Collection[int] | None) -> frozenset[str] | None:
    if codes is None:
        return None
    return frozenset(_OPERATIONS[code] for code in codes if code < len(_OPERATIONS))


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


# -- requests that are repeated ------------------------------------------------------------------

#: Errors that say that no broker has answered.
_SILENT = frozenset({ErrorCode.NO_ANSWER, ErrorCode.CONNECTION_FAILED})
#: Bootstrap servers of clusters that have answered a request of this process.
_answered: set[str] = set()


class Complaints:
    """What went wrong with the requests of a client, for messages.

    Args:
        config: librdkafka properties of the client.

    Attributes:
        last: the newest failure, without secrets; "" = none. It is the likely reason of a time-out.
        secrets: of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.last = ""
        self._config = config
        self._bootstrap = str(config.get("bootstrap.servers", ""))
        self.secrets = Secrets.of(config)
        self._explained = False
        self._login = Login(config)
        self._refused: KafkaError | None = None

    def record(self, error: KafkaError) -> None:
        """Records a failure."""
        self.last = self.secrets.hide(error.text)
        if is_login(error):
            # without secrets, because the error that quotes it has this one as its cause
            self._refused = KafkaError(error.code, self.last)

    def answered(self) -> None:
        """Records that a broker answered a request, so the credentials work."""
        self._refused = None
        self._login.record_success()
        _answered.add(self._bootstrap)

    @property
    def has_answered(self) -> bool:
        """Whether a broker of the cluster has answered a request of this process."""
        return self._bootstrap in _answered

    def login_error(self, doing: str) -> KafkaEosError | None:
        """Returns the error if a broker has refused the login since the last answer; else None.

        After a time-out, this is the reason.

        Args:
            doing: what was attempted.
        """
        return None if self._refused is None else self._login.error(self._refused, doing)

    def permanent_login_error(self, doing: str) -> KafkaEosError | None:
        """Returns `login_error` if these credentials have never worked in this process; else None.

        Credentials that worked before may be refused for a while; see `Login`.
        """
        return None if self._login.has_worked else self.login_error(doing)

    def explanation(self, doing: str, failure: KafkaError, seconds: float = 0.0) -> KafkaEosError | None:
        """Returns the error that says why no broker has answered.

        Args:
            doing: what was attempted.
            failure: of the request.
            seconds: how long brokers may refuse connections; 0 = each is asked once.

        Returns:
            None if brokers have answered, or may answer later; `last` then names what is wrong with some.
        """
        if failure.code not in _SILENT:
            return None
        try:
            self.last = check_reachable(self._config, seconds, every=True) or self.last
        except UnavailableError as error:
            return UnavailableError(f"{doing}: {error.message}", fix=error.fix)
        except KafkaEosError as error:
            return error
        return None

    def start_error(self, doing: str, failure: KafkaError, deadline: Deadline) -> KafkaEosError | None:
        """Returns `explanation`, once, if the cluster has answered no request of this process; else None.

        A query that starts fails soon, so that a person sees the cause. One that runs waits for its brokers.

        Args:
            doing: what was attempted.
            failure: of the request.
            deadline: until which brokers may refuse connections.
        """
        if self._explained or self.has_answered or failure.code not in _SILENT:
            return None
        self._explained = True
        return self.explanation(doing, failure, deadline.remaining_seconds())

    def forget(self) -> None:
        """Forgets the newest failure, because brokers have since done all that they were asked to."""
        self.last = ""


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
    send: Callable[[float], T],
    deadline: Deadline,
    complaints: Complaints,
    bootstrap_servers: str,
    *,
    pause_seconds: float = 0.05,
    request_seconds: float = REQUEST_SECONDS,
    starts: bool = False,
) -> T:
    """Sends a request until it is answered, fails for good, or the deadline has passed.

    Args:
        doing: what the request does, for messages, such as "reading the offsets of group 'g'".
        send: sends the request; receives its time limit in seconds.
        deadline: of all tries together.
        complaints: of the client that sends.
        bootstrap_servers: for messages.
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

    def permanent(failure: KafkaError) -> KafkaEosError | None:
        if not (is_login(failure) or is_transient(failure)):
            return classify(failure, doing, complaints.secrets)
        complaints.record(failure)
        refused = complaints.permanent_login_error(doing)
        return refused or (complaints.start_error(doing, failure, soon) if starts else None)

    def timed_out(failure: KafkaError) -> KafkaEosError:
        explained = complaints.login_error(doing) or complaints.explanation(doing, failure)
        if explained is not None:
            return explained
        return unreachable(bootstrap_servers, deadline.budget_seconds * 1000, f"{doing}: {complaints.last}")

    def report(failure: KafkaError, seconds: float) -> None:
        text = complaints.secrets.hide(failure.text)
        _log.debug("%s: %s; retrying in %.2f s", doing, text, seconds)

    limit = TryLimit()

    def send_once() -> T:
        if starts:
            return send(limit.seconds(deadline))
        return send(max(0.5, deadline.remaining_seconds(request_seconds)))

    answer = retry(
        send_once,
        KafkaError,
        Pauses(deadline, pause_seconds),
        permanent=permanent,
        timed_out=timed_out,
        report=report,
    )
    complaints.answered()
    return answer
