"""All errors that this package raises, organised by what the caller should do next.

::

    KafkaEosError
    ├── RetriableError              make the same call again
    │   ├── StateLockedError        another process has the state open
    │   ├── SinkRetryableError      a sink outside Kafka cannot do what was asked now
    │   ├── RegistryUnavailableError  the schema registry does not answer, which says nothing about records
    │   ├── NotUpToBoundError       the state has not reached the position that the reader asked for
    │   └── ChangelogCompactedError compaction removed records of a changelog before a read reached them
    ├── AbortableError              abort the transaction and begin it again with a new producer
    ├── OutcomeUnknownError         a commit was sent and not answered: read the token, which decides
    ├── RestartQueryError           this run of the query cannot continue; start the query again
    │   ├── FencedError             another owner of the transactional id took over
    │   ├── StagedPartError         a staged part is missing or damaged; a replay stages it again
    │   ├── SinkUnfinishedError     Kafka committed a batch, and a sink did not; the next start finishes it
    │   └── StateCorruptedError     a local database is damaged; it is restored from the changelog
    └── OperatorError               a person must act; retries do not help
        ├── KernelUnavailableError  the C libraries of this package are missing, or of another build
        ├── InvalidOptionError      an option is unknown, malformed or out of range
        ├── InvalidSchemaError      the frame does not have the columns that the sink needs
        ├── InvalidSqlError         a SQL text cannot run in the read, or not within its limits
        ├── InvalidRecordError      a row cannot become a Kafka record
        ├── StagedReadError         a step of the query dropped or doubled what the reading tasks staged
        ├── SchemaNotFoundError     the schema registry answered that it has no such schema
        ├── UnavailableError        brokers, a topic or the staging folder cannot be reached
        ├── SinkUnavailableError    a sink outside Kafka cannot be reached; nothing of the batch is visible
        ├── SinkFailedError         a sink outside Kafka refuses a batch, or lost one
        ├── SinkUndecidedError      a sink holds a prepared batch, and no token decides its fate
        ├── AuthorizationError      the cluster refuses the principal
        ├── DataLossError           records that the query has not read are gone
        ├── RecordsDamagedError     a record batch in the log of a broker cannot be decoded
        ├── TokenMissingError       Kafka lost the token, so it does not show which batch was committed last
        ├── NewerVersionError       a newer version of kafka-eos has committed batches of this query
        ├── ForeignQueryError       the application.id belongs to another checkpoint
        ├── CheckpointMovedError    the checkpoint was moved or copied, and only a person knows which
        ├── GuaranteeChangedError   batches were written with at_least_once since the last token
        ├── GroupInUseError         another program is a member of the query's consumer group, or was
        ├── OffsetsMovedError       another program moved the offsets of the query's consumer group
        ├── CheckpointRolledBackError  the checkpoint is older than what Kafka holds, and overlaps it
        ├── CheckpointAheadError    the checkpoint is newer than what Kafka holds
        └── StateError              the state of an operator is not usable, or is used wrongly
            ├── StoreClosedError    a store or view was used after it was closed
            ├── StateFormatError    a newer version wrote the database
            ├── StateMismatchError  the state belongs to another query, store, schema or number of shards
            ├── ChangelogError      the changelog topic has wrong settings, or lost its first records
            ├── StateLostError      a batch was committed without its state changes
            ├── OffsetWentBackError a changelog offset would become smaller
            ├── AggregateLimitError an aggregate would keep more values of a group than the limit
            └── StatefulProcessorError  a StatefulProcessor used its handle, state or timers wrongly

The classes follow KIP-1050 (one category, one action) and not Kafka's error codes. Each message starts with a
stable condition name in brackets, because Spark passes Python errors on as text only.
"""

from __future__ import annotations

from typing import ClassVar

from kafka_eos_source.secrets import without_url_secrets


class KafkaEosError(Exception):
    """Base class of all errors of this package.

    Args:
        message: what happened, with the option, column, topic or file and its value.
        fix: what the reader can do about it. It is printed after the message.
    """

    condition: ClassVar[str] = "KAFKA_EOS"

    def __init__(self, message: str, fix: str = "") -> None:
        # locations of checkpoints and of staged rows are URLs too, and many messages name them
        message, fix = without_url_secrets(message), without_url_secrets(fix)
        super().__init__(message, fix)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        text = f"[{self.condition}] {self.message}"
        return f"{text} Fix: {self.fix}" if self.fix else text


class RetriableError(KafkaEosError):
    """The same call may succeed if it is made again."""

    condition = "KAFKA_EOS.RETRIABLE"


class AbortableError(KafkaEosError):
    """The transaction failed, but its rows are still staged: abort it and begin again with a new producer."""

    condition = "KAFKA_EOS.TRANSACTION_ABORTED"


class OutcomeUnknownError(KafkaEosError):
    """A commit was sent, and its outcome is not known. Do not abort; the token shows the outcome."""

    condition = "KAFKA_EOS.OUTCOME_UNKNOWN"


class RestartQueryError(KafkaEosError):
    """This run of the query cannot continue. It is safe to start the query again, and that is enough."""

    condition = "KAFKA_EOS.RESTART_QUERY"


class FencedError(RestartQueryError):
    """Another owner has initialised the transactional id since, and fenced this one (KIP-98)."""

    condition = "KAFKA_EOS.FENCED"


class StagedPartError(RestartQueryError):
    """A staged part is missing, truncated, or has a wrong checksum. Nothing of the batch is visible."""

    condition = "KAFKA_EOS.STAGED_PART_DAMAGED"


class SinkUnfinishedError(RestartQueryError):
    """Kafka committed a batch, but a sink did not commit it in time. The next start finishes it first."""

    condition = "KAFKA_EOS.SINK_UNFINISHED"


class OperatorError(KafkaEosError):
    """A person must act, because retries do not help."""

    condition = "KAFKA_EOS.OPERATOR"


class KernelUnavailableError(OperatorError):
    """The C libraries of this package are missing from the installation, or belong to another build of it."""

    condition = "KAFKA_EOS.KERNEL_UNAVAILABLE"


class InvalidOptionError(OperatorError):
    """An option is unknown, malformed, out of range, or conflicts with another option."""

    condition = "KAFKA_EOS.INVALID_OPTION"


class InvalidSchemaError(OperatorError):
    """The frame to write lacks a column, or a column has the wrong type."""

    condition = "KAFKA_EOS.INVALID_SCHEMA"


class InvalidSqlError(OperatorError):
    """A SQL text of a step in the read is wrong, or asks for what such a step cannot do."""

    condition = "KAFKA_EOS.INVALID_SQL"


class InvalidRecordError(OperatorError):
    """A row cannot become a Kafka record (null topic, partition out of range, too large, …)."""

    condition = "KAFKA_EOS.INVALID_RECORD"


class StagedReadError(OperatorError):
    """A step of the query dropped or doubled what reading tasks staged or set aside."""

    condition = "KAFKA_EOS.STAGED_READ"


class SchemaNotFoundError(OperatorError):
    """The schema registry answered that it has no such schema, version or subject."""

    condition = "KAFKA_EOS.SCHEMA_NOT_FOUND"


class UnavailableError(OperatorError):
    """Brokers, a topic or the staging folder could not be reached in time."""

    condition = "KAFKA_EOS.UNAVAILABLE"


class SinkUnavailableError(OperatorError):
    """A sink outside Kafka could not be reached, or could not prepare in time. Nothing is visible."""

    condition = "KAFKA_EOS.SINK_UNAVAILABLE"


class SinkFailedError(OperatorError):
    """A sink outside Kafka refuses a batch, or no longer has the batch that it prepared."""

    condition = "KAFKA_EOS.SINK_FAILED"


class SinkUndecidedError(OperatorError):
    """A sink holds a prepared batch, and the token that decides its fate is lost."""

    condition = "KAFKA_EOS.SINK_UNDECIDED"


class AuthorizationError(OperatorError):
    """The cluster refuses the principal: authentication failed or an ACL is missing."""

    condition = "KAFKA_EOS.NOT_AUTHORIZED"


class DataLossError(OperatorError):
    """Records that the query has not read are gone (``failOnDataLoss=true``)."""

    condition = "KAFKA_EOS.DATA_LOSS"


class RecordsDamagedError(OperatorError):
    """A record batch is damaged in the log of its leader, or was written damaged."""

    condition = "KAFKA_EOS.RECORDS_DAMAGED"


class TokenMissingError(OperatorError):
    """The checkpoint shows that batches were committed, but Kafka holds no token of them."""

    condition = "KAFKA_EOS.TOKEN_MISSING"


class NewerVersionError(OperatorError):
    """A newer version of kafka-eos wrote the token, the token topic or the checkpoint."""

    condition = "KAFKA_EOS.NEWER_VERSION"


class ForeignQueryError(OperatorError):
    """The newest token of the ``application.id`` belongs to another query (another checkpoint)."""

    condition = "KAFKA_EOS.FOREIGN_QUERY"


class CheckpointMovedError(OperatorError):
    """The checkpoint is not where its query ran before, and only a person knows if it was moved or copied."""

    condition = "KAFKA_EOS.CHECKPOINT_MOVED"


class GuaranteeChangedError(OperatorError):
    """Batches of the checkpoint were written with ``at_least_once``, so no token shows what Kafka holds."""

    condition = "KAFKA_EOS.GUARANTEE_CHANGED"


class GroupInUseError(OperatorError):
    """Another program is a member of the query's group, or committed offsets there before the query did."""

    condition = "KAFKA_EOS.GROUP_IN_USE"


class OffsetsMovedError(OperatorError):
    """Another program, such as Kafka's reset tool, committed offsets in the query's consumer group."""

    condition = "KAFKA_EOS.OFFSETS_MOVED"


class CheckpointRolledBackError(OperatorError):
    """The checkpoint is older than what Kafka holds, and Kafka holds a part of the replayed batch."""

    condition = "KAFKA_EOS.CHECKPOINT_ROLLED_BACK"


class CheckpointAheadError(OperatorError):
    """There is a gap between the token and the batch: batches were written elsewhere or lost."""

    condition = "KAFKA_EOS.CHECKPOINT_AHEAD"


class StateLockedError(RetriableError):
    """Another process, which the message names, has the database of a shard open."""

    condition = "KAFKA_EOS.STATE_LOCKED"


class SinkRetryableError(RetriableError):
    """A sink outside Kafka cannot do what was asked now; a later call may succeed."""

    condition = "KAFKA_EOS.SINK_RETRIABLE"


class RegistryUnavailableError(RetriableError):
    """The schema registry does not answer. This says nothing about records: none of them is bad."""

    condition = "KAFKA_EOS.REGISTRY_UNAVAILABLE"


class NotUpToBoundError(RetriableError):
    """The state does not yet include the input up to the position that the reader asked for (KIP-796)."""

    condition = "KAFKA_EOS.STATE_NOT_UP_TO_BOUND"


class ChangelogCompactedError(RetriableError):
    """Compaction removed records of a changelog before a read reached them, so the result would be wrong."""

    condition = "KAFKA_EOS.CHANGELOG_COMPACTED"


class StateCorruptedError(RestartQueryError):
    """A local database is damaged. Its folder is set aside, and the state is restored from the changelog.

    Args:
        message: what happened.
        fix: what the reader can do about it.
        reason: ``corrupt``, ``no-offset`` (the data does not include its changelog offset) or ``topic`` (the
            changelog topic was deleted and created again). It is a label in metrics and decides what happens
            to the folder.
    """

    condition = "KAFKA_EOS.STATE_CORRUPTED"

    def __init__(self, message: str, fix: str = "", *, reason: str = "corrupt") -> None:
        super().__init__(message, fix)
        self.reason = reason


class StateError(OperatorError):
    """The state of an operator has a problem that no retry can fix."""

    condition = "KAFKA_EOS.STATE"


class StoreClosedError(StateError):
    """A store, view or iterator was used after it was closed."""

    condition = "KAFKA_EOS.STATE_CLOSED"


class StateFormatError(StateError):
    """The database was written by a newer version of kafka-eos."""

    condition = "KAFKA_EOS.STATE_FORMAT"


class StateMismatchError(StateError):
    """The state on disk or in the changelog belongs to another query, store, schema or number of shards."""

    condition = "KAFKA_EOS.STATE_MISMATCH"


class ChangelogError(StateError):
    """The changelog topic is not compacted, has a wrong number of partitions, or lost records."""

    condition = "KAFKA_EOS.CHANGELOG"


class StateLostError(StateError):
    """State is gone: a batch was committed without its changes, or a changelog lost its first records."""

    condition = "KAFKA_EOS.STATE_LOST"


class OffsetWentBackError(StateError):
    """A changelog offset would become smaller than the stored one."""

    condition = "KAFKA_EOS.STATE_OFFSET"


class StatefulProcessorError(StateError):
    """A `StatefulProcessor` did what Spark's handle refuses. The message begins with Spark's condition."""

    condition = "KAFKA_EOS.STATEFUL_PROCESSOR"


class AggregateLimitError(StateError):
    """An aggregate would keep more values of one group than ``state.aggregate.max.values``."""

    condition = "KAFKA_EOS.AGGREGATE_LIMIT"
