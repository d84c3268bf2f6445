"""What Kafka holds of a query: its consumer group, or the token topic in place of a group that was lost.

A fresh owner of the transactional id reads the group's offsets. If the query has a ``token.topic``, the
topic's record of the query may replace them. The rules:

===================================== =========================== ============================================
newest token in the group             record in the token topic   what counts
===================================== =========================== ============================================
of this query, whole                  none, older, or as new      the group
of this query, whole                  of another query            the group
of this query, whole                  newer                       the record: the group lost its newest state
of this query, whole, a higher batch  newer                       neither: refused
none, or marks that are newer         as new as the newest mark   the record: the group was deleted or expired
none, or marks that are newer         none, or older than a mark  the group: new query, or its token is lost
===================================== =========================== ============================================

Where a record counts, its offsets stand in for the group's, and the next transaction commits them again. An
offset that another program committed in the meantime (``kafka-consumer-groups --reset-offsets`` on the empty
group) is left as it is, so that the commit notices the missing mark and refuses.

**When the topic is read.** A missing token is looked for with certainty, which may mean to wait for the
transactions of other queries that share the topic. If the group holds a token, each fresh owner still makes
one quick look that waits for nobody. A group that is behind the topic is the sign of a coordinator that lost
data (an unclean leader election of ``__consumer_offsets``, a restored backup) or that answers from an old
state, and in both cases the batch would be written twice. The look costs some tens of milliseconds, once per
start and after each failed commit. Batches between need none, because their owner knows its own token. A
record that the quick look finds was committed, so it proves that the group is behind. The look may miss a
record behind another query's open transaction; then nothing is worse than without the topic.

**When a record is not believed.** A record proves what it says, but it must also be the newest. It may not be
if it was copied from another topic, or if the query ran without its token topic for a while. The first-batch
file of the checkpoint remembers the latter (`commit.first_batch`). Batch writes have no checkpoint: whoever
takes the option from a series of them must delete its record (``kafka-eos token-topic forget``).
"""

from __future__ import annotations

import logging
from typing import Protocol

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.errors import OperatorError, TokenMissingError
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.protocol.token_record import TokenRecord
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)


class TokenRecords(Protocol):
    """The token topic of a query, as `kafka.token_topic_reader.TopicRecords`, or a double in tests."""

    @property
    def name(self) -> str:
        """Name of the topic."""

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic."""

    def partition_of(self, application_id: str) -> int:
        """Partition for the record of a query."""

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        """The newest record of a query, as `kafka.token_topic_reader.last`."""


def recover(
    held: Held,
    group_id: str,
    records: TokenRecords,
    deadline: Deadline,
    *,
    missing_token: str = "fail",
    is_complete: bool = True,
) -> Held:
    """What Kafka holds of a query; asks the token topic as the module's rules want it.

    Call it after ``init_transactions`` and after the group's offsets were read.

    Args:
        held: what the group holds.
        group_id: of the query.
        records: the token topic.
        deadline: for reading the topic.
        missing_token: option ``onMissingToken``. A record that must not be trusted is ignored if a person has
            said what became of the batch.
        is_complete: whether the topic has a record of every transaction, as far as the checkpoint knows. If
            the query ran without its token topic for a while, the record may be older than what was lost.

    Returns:
        ``held`` itself if the group counts.

    Raises:
        TokenMissingError: the group lost its newest token, and the record may not be the newest one.
        OperatorError: group and record contradict each other, or the record cannot be read.
        UnavailableError: the topic cannot be read before ``deadline``.
    """
    is_lost = held.whole_token is None
    record = records.last(held.application_id, deadline, certain=is_lost)
    if record is None:
        return held
    if record.topic_id != records.topic_id:
        doubt = (
            f"it is a copy: it was written to the topic with the id {record.topic_id}, and this one has "
            f"{records.topic_id}"
        )
    elif not is_complete:
        doubt = "batches of the query may have been committed without a record since"
    else:
        return choose(held, group_id, record)
    if missing_token == "fail" and (is_lost or choose(held, group_id, record) is not held):
        raise _doubtful(held, group_id, record, records, doubt)
    _log.info("not using the record of %r in token.topic=%r: %s", held.application_id, records.name, doubt)
    return held


def choose(held: Held, group_id: str, record: TokenRecord | None) -> Held:
    """Group or record? The rules of the module, without asking anybody.

    Args:
        held: what the group holds.
        group_id: of the query.
        record: of the query in the token topic; None = none.

    Raises:
        OperatorError: group and record contradict each other.
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
        "group %r holds %s; going on with the token topic's record: transaction %d, batch %d of query %s%s",
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
    held: Held, group_id: str, record: TokenRecord, records: TokenRecords, doubt: str
) -> TokenMissingError:
    return TokenMissingError(
        f"the newest token of application.id={held.application_id!r} is not in group {group_id!r}, and its "
        f"record in token.topic={records.name!r} (transaction {record.token.sequence}, batch "
        f"{record.token.batch_id}) may not be the newest: {doubt}.",
        fix="look whether the batch is in the output; then restart once with "
        ".option('onMissingToken', 'assume_committed') or 'assume_not_committed'.",
    )


def _contradiction(group_id: str, token: Token, record: TokenRecord) -> OperatorError:
    return OperatorError(
        f"group {group_id!r} holds batch {token.batch_id} of query {token.query_id} with the sequence number "
        f"{token.sequence}; the token topic holds batch {record.token.batch_id} of the same query with "
        f"{record.token.sequence}. Either the group lost its newest state after a rolled-back checkpoint, or "
        "the sequence began anew while the query had no token.topic.",
        fix="find out which batch was written last. If it is the record's, delete the group. If it is the "
        f"group's, delete the record: kafka-eos token-topic forget --application-id {token.application_id}.",
    )
