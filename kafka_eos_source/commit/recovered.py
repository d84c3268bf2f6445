"""Replaces the offsets of a lost consumer group by the query's record in the token topic.

A new owner of the transactional id reads the offsets of the group. If the query has a ``token.topic``, the
topic's record of the query may replace them. The rules:

===================================== =========================== ============================================
newest token in the group             record in the token topic   what the commit uses
===================================== =========================== ============================================
of this query, no newer mark          none, older, or equally new the group
of this query, no newer mark          of another query            the group
of this query, no newer mark          newer                       the record: the group lost offsets
of this query, with a higher batch id newer                       neither: the commit refuses the batch
none, or some marks are newer         as new as the newest mark   the record: the group was deleted or expired
none, or some marks are newer         none, or older than a mark  the group: new query, or its token is lost
===================================== =========================== ============================================

If the commit uses the record, the record's offsets replace those of the group, and the next transaction
commits them again. An offset that another program committed in the meantime (``kafka-consumer-groups
--reset-offsets`` on the empty group) stays as it is, so that the commit notices the missing mark and refuses.

**When the topic is read.** If the group holds no token, the read is *certain*: it waits until the
transactions of other queries that share the topic have ended. If the group holds a token, each new owner
still makes one *quick* read, which waits for nobody. A group that is behind the topic shows that its
coordinator lost data (an unclean leader election of ``__consumer_offsets``, a restored backup) or gives
outdated answers; in both cases the batch would be written twice. The quick read takes some tens of
milliseconds, once per start and after each failed commit. The batches in between need none, because their
owner knows its own token. A record that the quick read returns was committed, so it proves that the group is
behind. The quick read may miss a record that lies after another query's open transaction; the query is then
as safe as without the token topic.

**When a record is not believed.** A record must be the newest one of its query. It may not be if it was
copied from another topic, or if the query ran without its token topic for a while. The identity file of
the checkpoint records the latter (`commit.identity_file`). Batch writes have no checkpoint: a person who
removes the option from a series of them must delete its record (``kafka-eos token-topic forget``).
"""

from __future__ import annotations

import logging
from typing import Protocol

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.errors import OperatorError, TokenMissingError
from kafka_eos_source.protocol.token import Token, TokenRecord
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)


class TokenRecords(Protocol):
    """The token topic of a query (`kafka.token_topic_reader.TopicRecords`, or a fake in tests)."""

    @property
    def name(self) -> str:
        """Name of the topic."""

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic."""

    def partition_of(self, application_id: str) -> int:
        """Returns the partition that holds the record of a query."""

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        """Returns the newest record of a query (`kafka.token_topic_reader.last`)."""


def recover(
    held: Held,
    group_id: str,
    records: TokenRecords,
    deadline: Deadline,
    *,
    batch_id: int = -1,
    missing_token: str = "fail",
    is_complete: bool = True,
) -> Held:
    """Reads the token topic, and returns what Kafka holds of the query by the rules of this module.

    Call it after ``init_transactions`` and after the offsets of the group were read.

    Args:
        held: what the group holds.
        group_id: the consumer group of the query.
        records: the token topic.
        deadline: time limit for reading the topic.
        batch_id: the batch to commit.
        missing_token: option ``onMissingToken``. If a person has declared the outcome of this batch there, a
            doubtful record is ignored.
        is_complete: whether the topic has a record of every transaction, as far as the checkpoint knows. If
            the query ran without its token topic for a while, the record may be older than the lost token.

    Returns:
        ``held`` itself if the commit uses the group.

    Raises:
        TokenMissingError: if the group lost its newest token, and the record may not be the newest one.
        OperatorError: if group and record contradict each other, or the record cannot be read.
        UnavailableError: if the topic cannot be read before ``deadline``.
    """
    is_lost = held.whole_token is None
    record = records.last(held.application_id, deadline, certain=is_lost)
    if record is None:
        return held
    if record.topic_id != records.topic_id:
        doubt = (
            f"it is a copy, because it was written to the topic with the id {record.topic_id}, and the id of "
            f"this topic is {records.topic_id}"
        )
    elif not is_complete:
        doubt = "the query may have committed batches without a record since"
    else:
        return choose(held, group_id, record)
    is_answered = missing_token.endswith(f":{batch_id}")
    if not is_answered and (is_lost or choose(held, group_id, record) is not held):
        raise _doubtful(held, group_id, record, records, doubt, batch_id)
    _log.info("ignoring the record of %r in token.topic=%r: %s", held.application_id, records.name, doubt)
    return held


def choose(held: Held, group_id: str, record: TokenRecord | None) -> Held:
    """Chooses between group and record by the rules of this module. Reads nothing.

    Args:
        held: what the group holds.
        group_id: the consumer group of the query.
        record: the query's record in the token topic; None if there is none.

    Returns:
        ``held`` itself if the commit uses the group.

    Raises:
        OperatorError: if group and record contradict each other.
    """
    if record is None or record.token.sequence < held.newest_sequence:
        return held
    token = held.whole_token
    if token is not None:
        if token.query_id != record.token.query_id or token.sequence == record.token.sequence:
            return held
        if token.batch_id > record.token.batch_id:
            raise _contradiction(group_id, token, record)
    _log.warning(
        "group %r holds %s; continuing from the record in the token topic: transaction %d, batch %d of query "
        "%s%s",
        group_id,
        "no token" if token is None else f"the older transaction {token.sequence}",
        record.token.sequence,
        record.token.batch_id,
        record.token.query_id,
        "" if record.group_id == group_id else f", committed in group {record.group_id!r}",
    )
    moved = {tp: held.offsets[tp] for tp in record.ends if tp in held.offsets and not held.is_marked(tp)}
    return Held.of(held.application_id, {**held.offsets, **record.group_offsets(), **moved})


def _doubtful(
    held: Held, group_id: str, record: TokenRecord, records: TokenRecords, doubt: str, batch_id: int
) -> TokenMissingError:
    return TokenMissingError(
        f"the newest token of application.id={held.application_id!r} is not in group {group_id!r}, and its "
        f"record in token.topic={records.name!r} (transaction {record.token.sequence}, batch "
        f"{record.token.batch_id}) may not be the newest: {doubt}.",
        fix=f"look for the rows of batch {batch_id} in the output. If they are there, restart with "
        f".option('onMissingToken', 'assume_committed:{batch_id}'); if they are not, with "
        f"'assume_not_committed:{batch_id}'. A wrong answer loses or doubles the rows of this batch.",
    )


def _contradiction(group_id: str, token: Token, record: TokenRecord) -> OperatorError:
    return OperatorError(
        f"group {group_id!r} holds batch {token.batch_id} of query {token.query_id} with the sequence number "
        f"{token.sequence}, but the token topic holds batch {record.token.batch_id} of the same query with "
        f"{record.token.sequence}. Either the group lost its newest offsets after the checkpoint was rolled "
        "back, or the sequence started again while the query had no token.topic.",
        fix="find out which of the two batches was written last. If it is the record's, delete the group. If "
        "it is the group's, delete the record with kafka-eos token-topic forget --topic … --application-id "
        f"{token.application_id} --bootstrap-servers … --yes. The wrong choice loses or doubles rows.",
    )
