"""Kafka's error codes, and the error that this package's client raises for them.

Kafka defines the codes and their names in ``org.apache.kafka.common.protocol.Errors``. The table is our own,
because the client libraries that have one take longer to import than a small task takes to run.
"""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """An error code of Kafka's protocol, or of this client.

    Attributes:
        text: what the code means, for messages.
    """

    text: str

    def __new__(cls, code: int, text: str) -> ErrorCode:
        """Makes a member of the enumeration, with its text."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.text = text
        return member

    # of this client; brokers use no code below -1
    TLS_HANDSHAKE_FAILED = -4, "the TLS handshake failed"
    CONNECTION_FAILED = -3, "the connection to the broker failed"
    NO_ANSWER = -2, "no broker answered in time"

    # of brokers
    UNKNOWN_SERVER_ERROR = -1, "the broker failed unexpectedly"
    OFFSET_OUT_OF_RANGE = 1, "offset out of range"
    CORRUPT_MESSAGE = 2, "the message is corrupt"
    UNKNOWN_TOPIC_OR_PARTITION = 3, "unknown topic or partition"
    INVALID_FETCH_SIZE = 4, "invalid size of a fetch"
    LEADER_NOT_AVAILABLE = 5, "leader not available"
    NOT_LEADER_OR_FOLLOWER = 6, "the broker does not lead the partition"
    REQUEST_TIMED_OUT = 7, "request timed out"
    BROKER_NOT_AVAILABLE = 8, "broker not available"
    REPLICA_NOT_AVAILABLE = 9, "replica not available"
    MESSAGE_TOO_LARGE = 10, "the message is too large"
    STALE_CONTROLLER_EPOCH = 11, "stale controller epoch"
    OFFSET_METADATA_TOO_LARGE = 12, "offset metadata string too large"
    NETWORK_EXCEPTION = 13, "the broker disconnected before it answered"
    COORDINATOR_LOAD_IN_PROGRESS = 14, "the coordinator is still loading"
    COORDINATOR_NOT_AVAILABLE = 15, "the coordinator is not available"
    NOT_COORDINATOR = 16, "the broker is not the coordinator"
    INVALID_TOPIC_EXCEPTION = 17, "invalid topic"
    RECORD_LIST_TOO_LARGE = 18, "the record batch is larger than a segment of the log"
    NOT_ENOUGH_REPLICAS = 19, "not enough in-sync replicas"
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, "the record was written to too few in-sync replicas"
    INVALID_REQUIRED_ACKS = 21, "invalid required acks value"
    ILLEGAL_GENERATION = 22, "the generation of the group is not valid"
    INCONSISTENT_GROUP_PROTOCOL = 23, "inconsistent group protocol"
    INVALID_GROUP_ID = 24, "invalid group id"
    UNKNOWN_MEMBER_ID = 25, "unknown member of the group"
    INVALID_SESSION_TIMEOUT = 26, "invalid session timeout"
    REBALANCE_IN_PROGRESS = 27, "the group is rebalancing"
    INVALID_COMMIT_OFFSET_SIZE = 28, "commit offset data size is not valid"
    TOPIC_AUTHORIZATION_FAILED = 29, "topic authorization failed"
    GROUP_AUTHORIZATION_FAILED = 30, "group authorization failed"
    CLUSTER_AUTHORIZATION_FAILED = 31, "cluster authorization failed"
    INVALID_TIMESTAMP = 32, "invalid timestamp"
    UNSUPPORTED_SASL_MECHANISM = 33, "unsupported SASL mechanism"
    ILLEGAL_SASL_STATE = 34, "request not valid in current SASL state"
    UNSUPPORTED_VERSION = 35, "the broker does not support this version of the request"
    TOPIC_ALREADY_EXISTS = 36, "topic already exists"
    INVALID_PARTITIONS = 37, "invalid number of partitions"
    INVALID_REPLICATION_FACTOR = 38, "invalid replication factor"
    INVALID_REPLICA_ASSIGNMENT = 39, "invalid replica assignment"
    INVALID_CONFIG = 40, "configuration is invalid"
    NOT_CONTROLLER = 41, "the broker is not the controller"
    INVALID_REQUEST = 42, "invalid request"
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43, "the message format of the log does not support the request"
    POLICY_VIOLATION = 44, "policy violation"
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45, "sequence number out of order"
    DUPLICATE_SEQUENCE_NUMBER = 46, "duplicate sequence number"
    INVALID_PRODUCER_EPOCH = 47, "the producer's epoch is old"
    INVALID_TXN_STATE = 48, "the transaction is in a state that does not allow this"
    INVALID_PRODUCER_ID_MAPPING = 49, "the producer id does not belong to the transactional id"
    INVALID_TRANSACTION_TIMEOUT = (
        50,
        "the timeout is larger than the broker's transaction.max.timeout.ms",
    )
    CONCURRENT_TRANSACTIONS = 51, "another operation on the same transaction is going on"
    TRANSACTION_COORDINATOR_FENCED = 52, "the coordinator of the transaction was replaced"
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53, "transactional id authorization failed"
    SECURITY_DISABLED = 54, "security features are disabled"
    OPERATION_NOT_ATTEMPTED = 55, "operation not attempted"
    KAFKA_STORAGE_ERROR = 56, "the broker failed to access a log on its disk"
    LOG_DIR_NOT_FOUND = 57, "the folder of the log is not in the broker's configuration"
    SASL_AUTHENTICATION_FAILED = 58, "SASL authentication failed"
    UNKNOWN_PRODUCER_ID = 59, "unknown producer id"
    REASSIGNMENT_IN_PROGRESS = 60, "partition reassignment is in progress"
    DELEGATION_TOKEN_AUTH_DISABLED = 61, "delegation tokens are not enabled"
    DELEGATION_TOKEN_NOT_FOUND = 62, "the delegation token is unknown"
    DELEGATION_TOKEN_OWNER_MISMATCH = 63, "the principal is not the owner of the delegation token"
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64, "delegation tokens cannot be requested on this connection"
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65, "delegation token authorization failed"
    DELEGATION_TOKEN_EXPIRED = 66, "the delegation token has expired"
    INVALID_PRINCIPAL_TYPE = 67, "the type of principal is not supported"
    NON_EMPTY_GROUP = 68, "the group is not empty"
    GROUP_ID_NOT_FOUND = 69, "the group id does not exist"
    FETCH_SESSION_ID_NOT_FOUND = 70, "the fetch session is unknown"
    INVALID_FETCH_SESSION_EPOCH = 71, "the fetch session epoch is invalid"
    LISTENER_NOT_FOUND = 72, "the leader has no matching listener"
    TOPIC_DELETION_DISABLED = 73, "topic deletion is disabled"
    FENCED_LEADER_EPOCH = 74, "the leader epoch is older than the broker's"
    UNKNOWN_LEADER_EPOCH = 75, "the leader epoch is newer than the broker's"
    UNSUPPORTED_COMPRESSION_TYPE = 76, "unsupported compression type"
    STALE_BROKER_EPOCH = 77, "the broker epoch has changed"
    OFFSET_NOT_AVAILABLE = 78, "the leader does not know its high watermark yet"
    MEMBER_ID_REQUIRED = 79, "a member of a group needs a valid member id"
    PREFERRED_LEADER_NOT_AVAILABLE = 80, "the preferred leader is not available"
    GROUP_MAX_SIZE_REACHED = 81, "the group has reached its largest size"
    FENCED_INSTANCE_ID = 82, "another member with the same group.instance.id fenced this one"
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83, "no eligible leader is available"
    ELECTION_NOT_NEEDED = 84, "leader election not needed for topic partition"
    NO_REASSIGNMENT_IN_PROGRESS = 85, "no partition reassignment is in progress"
    GROUP_SUBSCRIBED_TO_TOPIC = 86, "the group is subscribed to the topic"
    INVALID_RECORD = 87, "the broker refuses the record as invalid"
    UNSTABLE_OFFSET_COMMIT = 88, "an open transaction will change the offset"
    THROTTLING_QUOTA_EXCEEDED = 89, "throttling quota has been exceeded"
    PRODUCER_FENCED = 90, "a newer producer with the same transactional id fences this one"
    RESOURCE_NOT_FOUND = 91, "the request names a resource that does not exist"
    DUPLICATE_RESOURCE = 92, "the request names a resource twice"
    UNACCEPTABLE_CREDENTIAL = 93, "the credential does not meet the criteria"
    INCONSISTENT_VOTER_SET = 94, "a voter of the request is not one of the expected voters"
    INVALID_UPDATE_VERSION = 95, "invalid update version"
    FEATURE_UPDATE_FAILED = 96, "the broker could not update its features"
    PRINCIPAL_DESERIALIZATION_FAILURE = 97, "the broker could not decode the forwarded principal"
    SNAPSHOT_NOT_FOUND = 98, "snapshot not found"
    POSITION_OUT_OF_RANGE = 99, "position out of range"
    UNKNOWN_TOPIC_ID = 100, "unknown topic id"
    DUPLICATE_BROKER_REGISTRATION = 101, "broker id is already in use"
    BROKER_ID_NOT_REGISTERED = 102, "broker id is not registered"
    INCONSISTENT_TOPIC_ID = 103, "the topic id is not the one in the log"
    INCONSISTENT_CLUSTER_ID = 104, "the cluster id does not match"
    TRANSACTIONAL_ID_NOT_FOUND = 105, "transactional id not found"
    FETCH_SESSION_TOPIC_ID_ERROR = 106, "the fetch session has inconsistent topic ids"
    INELIGIBLE_REPLICA = 107, "replica is not eligible for the in-sync replicas"
    NEW_LEADER_ELECTED = 108, "a new leader was elected"
    OFFSET_MOVED_TO_TIERED_STORAGE = 109, "offset moved to tiered storage"
    FENCED_MEMBER_EPOCH = 110, "the group coordinator fenced the member's epoch"
    UNRELEASED_INSTANCE_ID = 111, "the instance id is still in use by another member"
    UNSUPPORTED_ASSIGNOR = 112, "the group does not support the assignor, or its version"
    STALE_MEMBER_EPOCH = 113, "the member's epoch is stale"
    MISMATCHED_ENDPOINT_TYPE = 114, "the request was sent to an endpoint of the wrong type"
    UNSUPPORTED_ENDPOINT_TYPE = 115, "this type of endpoint is not supported yet"
    UNKNOWN_CONTROLLER_ID = 116, "unknown controller id"
    UNKNOWN_SUBSCRIPTION_ID = 117, "the telemetry subscription is invalid or old"
    TELEMETRY_TOO_LARGE = 118, "the metrics are larger than the broker accepts"
    INVALID_REGISTRATION = 119, "the controller considers the broker's registration invalid"
    TRANSACTION_ABORTABLE = 120, "the transaction must be aborted"
    INVALID_RECORD_STATE = 121, "the state of the record is invalid"
    SHARE_SESSION_NOT_FOUND = 122, "the share session is unknown"
    INVALID_SHARE_SESSION_EPOCH = 123, "invalid epoch of the share session"
    FENCED_STATE_EPOCH = 124, "the epoch of the share group's state does not match"
    INVALID_VOTER_KEY = 125, "the voter's key is not the one of the replica"
    DUPLICATE_VOTER = 126, "the voter is already one of the voters"
    VOTER_NOT_FOUND = 127, "the voter is not one of the voters"
    INVALID_REGULAR_EXPRESSION = 128, "invalid regular expression"
    REBOOTSTRAP_REQUIRED = 129, "the client's metadata is stale; it must ask the bootstrap servers again"
    STREAMS_INVALID_TOPOLOGY = 130, "the topology is invalid"
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131, "the topology epoch is invalid"
    STREAMS_TOPOLOGY_FENCED = 132, "the topology epoch is old"
    SHARE_SESSION_LIMIT_REACHED = 133, "the limit of share sessions is reached"


#: 0 stands for no error.
_CODES = {int(each): each for each in ErrorCode}


class KafkaError(Exception):
    """An error that a broker answered, or why there was no answer; `failure.classify` explains it to users.

    Args:
        code: of the error. A newer broker may answer one that is not in `ErrorCode`.
        text: what the broker said; "" = the meaning of the code.

    Attributes:
        code: the code.
        name: Kafka's name of the code, such as ``REQUEST_TIMED_OUT``.
        text: the words for messages.
    """

    def __init__(self, code: int, text: str = "") -> None:
        known = _CODES.get(code)
        self.code = code
        self.name = f"ERROR_{code}" if known is None else known.name
        self.text = text or (f"unknown error code {code}" if known is None else known.text)
        super().__init__(code, text)  # what `pickle` calls the class with

    def __str__(self) -> str:
        return f"{self.text} ({self.name})"
