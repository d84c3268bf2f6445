"""What becomes of a batch that a sink holds prepared, as a pure function of the token.

The list of what is prepared was made *before* `init_transactions`, the token was read *after* it. So whoever
prepared an id on the list has by now committed it in Kafka, and the token says so, or was fenced, and never
will: an id is prepared under one owner of the transactional id and no other. The answer is final, whoever
else runs at this moment.

::

    token                                    prepared id              fate
    names the id                             that one                 COMMIT  (CommitFromToken)
    names another, or none                   any                      ABORT   (AbortFromToken)
    a person wrote it                        of a later sequence      ABORT
    a person wrote it                        any other                LEAVE   (UnknownLeaveAsIs)
    there is none                            any                      LEAVE

The token names an id by the application, the sequence number of the transaction, the attempt and the names
of the sinks; a token of format 1 names the old form of the id. Without a token nothing relates the sequence
in an id to the batch at hand, so a person decides, even where the batch is about to be written. An old id has
Spark's batch id in it: if that batch is written now, the id is aborted.

A token that a person had written in place of a lost one (`token.UNDECIDED`) says what is in Kafka, and not
what sinks were to do. An id of a later sequence was prepared after it, for a transaction that Kafka does not
have, or its token would be there instead.

A token of a later batch cannot hide one that is unfinished: the next batch begins only when every sink has
committed the one before.
"""

from __future__ import annotations

from enum import Enum

from kafka_eos_source.commit.facts import Batch
from kafka_eos_source.commit.verdict import Verdict
from kafka_eos_source.protocol.token import UNDECIDED, Token
from kafka_eos_source.sinks.contract import SinkTxn


class Fate(Enum):
    """What to do with a prepared id."""

    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave"  #: only a person can tell


def named_by(token: Token, sink: str) -> SinkTxn | None:
    """The id that the token tells a sink to commit.

    Returns:
        None if the token tells this sink nothing.
    """
    prepared = token.sinks
    if prepared is None or prepared == UNDECIDED or sink not in prepared.names:
        return None
    if token.format == 1:
        return SinkTxn(token.application_id, "", token.batch_id, prepared.sink_transaction_id)
    return SinkTxn(token.application_id, sink, token.sequence, prepared.sink_transaction_id)


def fate_by_token(sink: str, txn: SinkTxn, token: Token | None) -> Fate:
    """Decides what becomes of ``txn`` by the token alone.

    Args:
        sink: name of the sink that holds it.
        txn: prepared before the token was read.
        token: None if there is none.
    """
    if token is None:
        return Fate.LEAVE
    if token.sinks != UNDECIDED:
        return Fate.COMMIT if txn == named_by(token, sink) else Fate.ABORT
    return Fate.ABORT if not txn.is_old and txn.sequence > token.sequence else Fate.LEAVE


def fate(sink: str, txn: SinkTxn, token: Token | None, batch: Batch, verdict: Verdict | None) -> Fate:
    """Decides what becomes of ``txn`` when a batch is committed.

    Args:
        sink: name of the sink that holds it.
        txn: prepared before this owner initialised.
        token: read after that; None if there is none.
        batch: the one at hand.
        verdict: on it, by `verdict.batch_verdict`; None if this owner was overtaken, and the token is the
            other's.
    """
    found = fate_by_token(sink, txn, token)
    if found is Fate.LEAVE and verdict is Verdict.WRITE and txn.is_old and txn.sequence == batch.batch_id:
        return Fate.ABORT
    return found
