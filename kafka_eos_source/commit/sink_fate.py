"""Decides whether a sink commits or aborts a prepared transaction, as a pure function of the token.

Sinks listed their prepared transactions *before* ``init_transactions``, and the token was read *after* it. A
sink transaction is prepared by one owner of the transactional id. That owner has either committed it in
Kafka, and then the token names it, or it was fenced and never will. So the fate is final, whichever other
processes run at this moment.

::

    token                                    prepared transaction     fate
    names a sink transaction                 the same one             COMMIT
    names another one, or none               any                      ABORT
    was written by a person                  has a later sequence     ABORT
    was written by a person                  any other                LEAVE
    there is no token                        any                      LEAVE

The token names a sink transaction by sequence number, sink transaction id and names of the sinks. Application
and cluster are those that the token was read for. Without a token nothing relates the sequence number of a
sink transaction to the current batch, so a person decides, even if the batch is about to be written.

A token that a person wrote in place of a lost one (`token.UNDECIDED`) says what Kafka holds, and nothing
about sinks. A sink transaction with a later sequence number was prepared after it, for a transaction that
Kafka does not hold, because its token would have replaced this one.

The token of a later batch cannot hide an unfinished sink transaction: the next batch starts only after every
sink has committed the one before.
"""

from __future__ import annotations

from enum import Enum

from kafka_eos_source.protocol.token import UNDECIDED, Token
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn


class Fate(Enum):
    """What a sink does with a prepared transaction."""

    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave"  #: only a person can decide


def named_by(token: Token, sink: SinkContext) -> SinkTxn | None:
    """Returns the sink transaction that the token tells a sink to commit, with the digest in the token.

    Returns:
        None if the token names no transaction of this sink.
    """
    prepared = token.sinks
    if prepared is None or prepared == UNDECIDED or sink.name not in prepared.names:
        return None
    digest = prepared.digests.get(sink.name, "")
    return sink.txn(token.sequence, prepared.sink_transaction_id, digest)


def fate(sink: SinkContext, txn: SinkTxn, token: Token | None) -> Fate:
    """Decides the fate of ``txn``.

    Args:
        sink: the sink that holds it, on the cluster that holds the token.
        txn: the sink transaction, prepared before this owner initialised.
        token: the newest token, read after that; None if there is none.
    """
    if token is None:
        return Fate.LEAVE
    if token.sinks != UNDECIDED:
        return Fate.COMMIT if txn == named_by(token, sink) else Fate.ABORT
    return Fate.ABORT if txn.sequence > token.sequence else Fate.LEAVE
