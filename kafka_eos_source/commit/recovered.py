"""What Kafka holds of a query: the consumer group, or the token topic in place of a group that was lost.

A fresh owner of the transactional id reads the group's offsets. If the query has a ``token.topic``, the group
may be replaced by the topic's record. The rules:

========================================== ================== ==============================================
token in the group                         record             what counts
========================================== ================== ==============================================
ours                                       not looked for, or the group
                                           none, or of the
                                           same transaction
ours                                       of another query   the group: another checkpoint used the
                                                              application.id while the topic was in use
ours, of a lower sequence                  of the same query  the record: the group lost its newest state
ours, of a lower sequence and higher batch of the same query  neither: refused
none                                       there              the record: the group was deleted or expired
none                                       none               nothing: the query is new, or its token is lost
========================================== ================== ==============================================

Where a record counts, its offsets stand in for the group's. The next transaction commits all of them again.
An offset that another program committed since (``kafka-consumer-groups --reset-offsets`` on the new, empty
group) is left as it is, so that the commit notices the missing mark and refuses.

**When the topic is read.** A missing token is looked for with certainty, which may mean to wait for the
transactions of other queries that share the topic. If the group holds a token, each fresh owner still makes
one quick look that waits for nobody. A group that is behind the topic is the sign of a coordinator that lost
data (an unclean leader election of ``__consumer_offsets``, a restored backup) or that answers from an old
state, and in both cases the batch would be written twice. The look costs some tens of milliseconds, once per
start and after each failed commit; batches between need none, because their owner knows its own token. A
record that is seen was committed, so the quick look can prove that the group is behind. It may miss a record
behind another query's open transaction; then nothing is worse than without the topic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kafka_eos_source.errors import OperatorError, TokenMissingError
from kafka_eos_source.kafka import token_topic, token_topic_reader
from kafka_eos_source.kafka.token_topic import TokenTopic
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Mark, Token, application_hash, newest
from kafka_eos_source.protocol.token_record import TokenRecord
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """What Kafka holds of a query.

    Attributes:
        token: the newest token; None if neither the group nor the topic has one.
        offsets: the offsets that count, with their tokens and marks: the group's, or those of the record.
        from_topic: the record of the token topic replaced the group. The next transaction must commit all of
            ``offsets`` again, not only those that its batch moves.
    """

    token: Token | None
    offsets: Mapping[TopicPartition, GroupOffset]
    from_topic: bool = False


class TokenRecords(Protocol):
    """The token topic of a query, as `recover` needs it. `TopicRecords`, or a double in tests."""

    @property
    def name(self) -> str:
        """Of the topic."""

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic at this moment."""

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        """As `kafka.token_topic_reader.last`."""


@dataclass(frozen=True)
class TopicRecords:
    """`TokenRecords` over the real topic."""

    kafka: Mapping[str, Any]
    topic: TokenTopic

    @classmethod
    def checked(cls, kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TopicRecords:
        """Looks at the topic and logs its warnings. Raises: as `kafka.token_topic.check`."""
        topic = token_topic.check(kafka, name, deadline)
        for warning in topic.warnings:
            _log.warning("%s", warning)
        return cls(kafka, topic)

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def topic_id(self) -> str:
        return self.topic.topic_id

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        return token_topic_reader.last(self.kafka, self.topic, application_id, deadline, certain=certain)


def recover(
    application_id: str,
    group_id: str,
    offsets: Mapping[TopicPartition, GroupOffset],
    records: TokenRecords | None,
    deadline: Deadline,
    *,
    missing_token: str = "fail",
) -> Recovered:
    """What Kafka holds of a query; the token topic is asked where the module's rules want it.

    Call it after ``init_transactions`` and after the group's offsets were read.

    Args:
        application_id: of the query.
        group_id: of the query.
        offsets: what the group holds.
        records: the token topic; None = the query has none.
        deadline: for reading the topic.
        missing_token: option ``onMissingToken``. A record that must not be trusted is ignored if a person has
            said what became of the batch.

    Raises:
        TokenMissingError: the group holds no token, and the record was copied from another topic.
        OperatorError: group and record contradict each other, or the record cannot be read.
        UnavailableError: the topic cannot be read before ``deadline``.
    """
    token = newest(offsets.values(), application_id)
    if records is None:
        return Recovered(token, offsets)
    record = records.last(application_id, deadline, certain=token is None)
    if record is not None and record.topic_id != records.topic_id:
        if token is None and missing_token == "fail":
            raise _copied(application_id, group_id, record, records)
        _log.warning(
            "ignoring the record of application.id=%r in token.topic=%r: it was written to another topic "
            "(its id is %s; this one has %s)",
            application_id,
            records.name,
            record.topic_id,
            records.topic_id,
        )
        record = None
    return choose(group_id, offsets, token, record)


def choose(
    group_id: str,
    offsets: Mapping[TopicPartition, GroupOffset],
    token: Token | None,
    record: TokenRecord | None,
) -> Recovered:
    """Group or record? The rules of the module, without asking anybody.

    Args:
        group_id: of the query.
        offsets: what the group holds.
        token: the group's newest token of this application; None = none.
        record: of this application in the token topic; None = none, or it was not looked for.

    Raises:
        OperatorError: group and record contradict each other.
    """
    if record is None:
        return Recovered(token, offsets)
    if token is not None:
        if token.query_id != record.token.query_id or token.sequence >= record.token.sequence:
            return Recovered(token, offsets)
        if token.batch_id > record.token.batch_id:
            raise _contradiction(group_id, token, record)
    _log.warning(
        "group %r holds %s; going on with the token topic's record: transaction %d, batch %d of query %s%s",
        group_id,
        "no token" if token is None else f"the older transaction {token.sequence}",
        record.token.sequence,
        record.token.batch_id,
        record.token.query_id,
        "" if record.group_id == group_id else f", committed in group {record.group_id!r}",
    )
    return Recovered(record.token, {**record.group_offsets(), **_moved(offsets, record)}, from_topic=True)


def missing_everywhere(token_topic: str | None) -> str:
    """For the message of TOKEN_MISSING: where no token was found."""
    if token_topic is None:
        return "the consumer group"
    return f"the consumer group or token.topic={token_topic!r}"


def _moved(
    offsets: Mapping[TopicPartition, GroupOffset], record: TokenRecord
) -> dict[TopicPartition, GroupOffset]:
    """Offsets of the query's partitions that another program committed after the group was lost."""
    own = application_hash(record.token.application_id)

    def is_ours(offset: GroupOffset) -> bool:
        mark = Mark.decode(offset.metadata)
        return mark is not None and mark.application == own

    return {
        tp: offsets[tp]
        for tp, end in record.ends.items()
        if tp in offsets and offsets[tp].offset != end and not is_ours(offsets[tp])
    }


def _copied(
    application_id: str, group_id: str, record: TokenRecord, records: TokenRecords
) -> TokenMissingError:
    return TokenMissingError(
        f"group {group_id!r} holds no token of application.id={application_id!r}, and its record in "
        f"token.topic={records.name!r} (batch {record.token.batch_id}) is a copy: it was written to the "
        f"topic with the id {record.topic_id}, and this one has {records.topic_id}. Whether it is the "
        "newest token is unknown.",
        fix="look whether the batch is in the output; then restart once with "
        ".option('onMissingToken', 'assume_committed') or 'assume_not_committed'.",
    )


def _contradiction(group_id: str, token: Token, record: TokenRecord) -> OperatorError:
    return OperatorError(
        f"group {group_id!r} holds batch {token.batch_id} of query {token.query_id} with the sequence number "
        f"{token.sequence}; the token topic holds batch {record.token.batch_id} of the same query with "
        f"{record.token.sequence}. The sequence began anew while the query had no token.topic, or the group "
        "lost its newest state.",
        fix="find out which batch was written last. If it is the record's, delete the group. If it is the "
        f"group's, delete the record: kafka-eos token-topic forget --application-id {token.application_id}.",
    )
