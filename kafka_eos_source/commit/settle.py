"""What becomes of a batch that a sink holds prepared, as a pure function of the token.

The list of what is prepared was made *before* `init_transactions`, the token was read *after* it. So whoever
prepared an id on the list has by now committed it in Kafka, and the token says so, or was fenced, and never
will: an id is prepared under one owner of the transactional id and no other. The answer is final, whoever
else runs at this moment.

::

    token                                    prepared id              fate
    names the id                             that one                 COMMIT  (CommitFromToken)
    names another, or none                   any                      ABORT   (AbortFromToken)
    there is none, the batch is written now  of this batch            ABORT
    there is none                            any other                LEAVE   (UnknownLeaveAsIs)

A token that a person had written in place of a lost one (`token.UNDECIDED`) counts as none: whoever wrote it
said what is in Kafka, and not what sinks were to do.

A token of a later batch cannot hide one that is unfinished: the next batch begins only when every sink has
committed the one before.
"""

from __future__ import annotations

from enum import Enum

from kafka_eos_source.commit.verdict import Batch, Verdict
from kafka_eos_source.protocol.token import UNDECIDED, Token
from kafka_eos_source.sinks.contract import SinkTxn


class Fate(Enum):
    """What to do with a prepared id."""

    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave"  #: only a person can tell


def named_by(token: Token) -> SinkTxn | None:
    """The id that the token says is to be committed."""
    if token.sinks is None or token.sinks == UNDECIDED:
        return None
    return SinkTxn(token.application_id, token.batch_id, token.sinks.sink_transaction_id)


def fate(txn: SinkTxn, token: Token | None, batch: Batch, verdict: Verdict | None) -> Fate:
    """What becomes of ``txn``.

    Args:
        txn: prepared before this owner initialised.
        token: read after; None = there is none.
        batch: the one at hand.
        verdict: on it, by `decide.decide`; None = this owner was overtaken, and the token is the other's.
    """
    if token is not None and token.sinks != UNDECIDED:
        return Fate.COMMIT if txn == named_by(token) else Fate.ABORT
    if verdict is Verdict.WRITE and txn.batch_id == batch.batch_id:
        return Fate.ABORT
    return Fate.LEAVE
