"""Every error this package raises, sorted by what the caller should do next.

::

    KafkaEosError
    ├── RetriableError              call the same thing again
    │   ├── StateLockedError        another process has the state open
    │   ├── SinkRetryableError      a sink outside Kafka cannot do it now
    │   ├── NotUpToBoundError       the state is not as far yet as the reader asked for
    │   └── ViewInvalidatedError    what a read_uncommitted view showed was rolled back
    ├── AbortableError              abort the transaction, begin it again with a new producer
    ├── OutcomeUnknownError         a commit was sent and not answered: read the token, believe it
    ├── RestartQueryError           this query (or driver) is done; start it again
    │   ├── FencedError             another owner of the transactional id took over
    │   ├── StagedPartError         a staged part is missing or damaged; a replay stages it anew
    │   ├── SinkUnfinishedError     a batch is in Kafka, and a sink has not taken it yet: a start finishes it
    │   └── StateCorruptedError     a local database is damaged; it is restored from the changelog
    └── OperatorError               a person must look: nothing will change by trying again
        ├── InvalidOptionError      an option is unknown, malformed or out of range
        ├── InvalidSchemaError      the frame does not fit the sink's row contract
        ├── InvalidRecordError      one row cannot become a Kafka record
        ├── UnavailableError        brokers, topic or staging folder cannot be reached
        ├── SinkUnavailableError    a sink outside Kafka cannot be reached; nothing of the batch is visible
        ├── SinkFailedError         a sink outside Kafka refuses a batch, or lost one
        ├── SinkUndecidedError      a sink holds a prepared batch, and Kafka forgot what became of it
        ├── AuthorizationError      the cluster refuses the principal
        ├── DataLossError           offsets the query has not read are gone
        ├── TokenMissingError       Kafka forgot which batch it holds
        ├── ForeignQueryError       the application.id belongs to another checkpoint
        ├── OffsetsMovedError       another program moved the offsets of the query's consumer group
        ├── CheckpointRolledBackError  the checkpoint is older than what Kafka holds, and overlaps it
        ├── CheckpointAheadError    the checkpoint is newer than what Kafka holds
        └── StateError              the state of an operator, and how it is used
            ├── StoreClosedError    a store or view was used after it was closed
            ├── StateFormatError    the database was written by a newer version
            ├── StateMismatchError  the state belongs to another query, store, schema or number of shards
            ├── ChangelogError      the changelog topic is not what a changelog must be, or lost its beginning
            ├── StateLostError      a batch was committed without the state that it made
            ├── OffsetWentBackError a changelog offset was to become smaller
            ├── UncommittedBytesError  one micro-batch changes more state than memory may hold
            └── StatefulProcessorError  a StatefulProcessor used its handle, state or timers wrongly

The classes follow KIP-1050 (one category, one action) rather than Kafka's error codes. Each message
starts with a stable condition name in brackets, because Spark hands Python errors on as text only.
"""

from __future__ import annotations

from typing import ClassVar


class KafkaEosError(Exception):
    """Root of all errors of this package.

    Args:
        message: what happened, naming the option, column, topic or file and its value.
        fix: what the reader can do about it; printed after the message.
    """

    condition: ClassVar[str] = "KAFKA_EOS"

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        text = f"[{self.condition}] {self.message}"
        return f"{text} Fix: {self.fix}" if self.fix else text


class RetriableError(KafkaEosError):
    """The same call may succeed when made again."""

    condition = "KAFKA_EOS.RETRIABLE"


class AbortableError(KafkaEosError):
    """The transaction is lost, its rows are not: abort it and begin again with a new producer."""

    condition = "KAFKA_EOS.TRANSACTION_ABORTED"


class OutcomeUnknownError(KafkaEosError):
    """A commit was sent and its answer is not known. Never abort on it: read the token."""

    condition = "KAFKA_EOS.OUTCOME_UNKNOWN"


class RestartQueryError(KafkaEosError):
    """This run of the query cannot go on; starting it again is safe and enough."""

    condition = "KAFKA_EOS.RESTART_QUERY"


class FencedError(RestartQueryError):
    """Another owner of the transactional id initialised after us (KIP-98 fencing)."""

    condition = "KAFKA_EOS.FENCED"


class StagedPartError(RestartQueryError):
    """A staged part is missing, truncated or fails its checksum. Nothing of the batch is visible."""

    condition = "KAFKA_EOS.STAGED_PART_DAMAGED"


class SinkUnfinishedError(RestartQueryError):
    """A batch is in Kafka, and a sink did not take it in time. The next start finishes it first."""

    condition = "KAFKA_EOS.SINK_UNFINISHED"


class OperatorError(KafkaEosError):
    """Trying again changes nothing: a person must look."""

    condition = "KAFKA_EOS.OPERATOR"


class InvalidOptionError(OperatorError):
    """An option is unknown, malformed, out of range, or does not go with another."""

    condition = "KAFKA_EOS.INVALID_OPTION"


class InvalidSchemaError(OperatorError):
    """A frame to be written lacks a column or has one of the wrong type."""

    condition = "KAFKA_EOS.INVALID_SCHEMA"


class InvalidRecordError(OperatorError):
    """A row cannot become a Kafka record (null topic, partition out of range, too large, ...)."""

    condition = "KAFKA_EOS.INVALID_RECORD"


class UnavailableError(OperatorError):
    """Brokers, a topic or the staging folder cannot be reached within the time allowed."""

    condition = "KAFKA_EOS.UNAVAILABLE"


class SinkUnavailableError(OperatorError):
    """A sink outside Kafka could not prepare within the time allowed. Nothing of the batch is visible."""

    condition = "KAFKA_EOS.SINK_UNAVAILABLE"


class SinkFailedError(OperatorError):
    """A sink outside Kafka refuses a batch, or does not have what it had prepared."""

    condition = "KAFKA_EOS.SINK_FAILED"


class SinkUndecidedError(OperatorError):
    """A sink holds a prepared batch, and the token that would tell what becomes of it is gone."""

    condition = "KAFKA_EOS.SINK_UNDECIDED"


class AuthorizationError(OperatorError):
    """The cluster refuses the principal: authentication failed or an ACL is missing."""

    condition = "KAFKA_EOS.NOT_AUTHORIZED"


class DataLossError(OperatorError):
    """Offsets that the query has not read are gone (``failOnDataLoss=true``)."""

    condition = "KAFKA_EOS.DATA_LOSS"


class TokenMissingError(OperatorError):
    """The checkpoint says that batches were committed, and Kafka holds no token of them."""

    condition = "KAFKA_EOS.TOKEN_MISSING"


class ForeignQueryError(OperatorError):
    """The ``application.id`` carries the token of another query (another checkpoint)."""

    condition = "KAFKA_EOS.FOREIGN_QUERY"


class OffsetsMovedError(OperatorError):
    """Another program committed offsets in the query's consumer group, such as Kafka's own reset tool."""

    condition = "KAFKA_EOS.OFFSETS_MOVED"


class CheckpointRolledBackError(OperatorError):
    """The checkpoint is older than what Kafka holds, and the replayed range overlaps it in part."""

    condition = "KAFKA_EOS.CHECKPOINT_ROLLED_BACK"


class CheckpointAheadError(OperatorError):
    """The checkpoint starts behind a gap after the token: batches went elsewhere or were lost."""

    condition = "KAFKA_EOS.CHECKPOINT_AHEAD"


class StateLockedError(RetriableError):
    """The database of a shard is open in another process, which the message names."""

    condition = "KAFKA_EOS.STATE_LOCKED"


class SinkRetryableError(RetriableError):
    """A sink outside Kafka cannot do now what is asked of it."""

    condition = "KAFKA_EOS.SINK_RETRIABLE"


class NotUpToBoundError(RetriableError):
    """The state does not hold the input yet up to the position that the reader asked for (KIP-796)."""

    condition = "KAFKA_EOS.STATE_NOT_UP_TO_BOUND"


class ViewInvalidatedError(RetriableError):
    """What a read_uncommitted view showed was rolled back, or put by until the transaction is decided."""

    condition = "KAFKA_EOS.STATE_VIEW_INVALIDATED"


class StateCorruptedError(RestartQueryError):
    """A local database is damaged. Its folder is set aside; the changelog has all that was in it.

    Args:
        reason: ``corrupt``, ``no-offset`` (data that does not say how far it is) or ``topic`` (the changelog
            topic was deleted and made anew), for metrics and for what to do with the folder.
    """

    condition = "KAFKA_EOS.STATE_CORRUPTED"

    def __init__(self, message: str, fix: str = "", *, reason: str = "corrupt") -> None:
        super().__init__(message, fix)
        self.reason = reason


class StateError(OperatorError):
    """Something about the state of an operator that no retry mends."""

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
    """The changelog topic is not compacted, has the wrong number of partitions, or lost records."""

    condition = "KAFKA_EOS.CHANGELOG"


class StateLostError(StateError):
    """A batch is in Kafka without the state that it made, which was dropped on the way to the sink."""

    condition = "KAFKA_EOS.STATE_LOST"


class OffsetWentBackError(StateError):
    """A changelog offset was to become smaller than the one stored."""

    condition = "KAFKA_EOS.STATE_OFFSET"


class UncommittedBytesError(StateError):
    """One micro-batch changes more state than ``statestore.uncommitted.max.bytes`` allows."""

    condition = "KAFKA_EOS.STATE_UNCOMMITTED_BYTES"


class StatefulProcessorError(StateError):
    """A `StatefulProcessor` did what Spark's handle refuses; the message begins with Spark's condition."""

    condition = "KAFKA_EOS.STATEFUL_PROCESSOR"
