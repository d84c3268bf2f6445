"""A micro-batch that was tried several times is one transaction: what became of it, and with which rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

from kafka_eos_source.testing.history import History, Identity, Operation, Phase, Txn


@dataclass(frozen=True)
class Transaction:
    """All attempts at one batch.

    Attributes:
        query, batch_id: which batch.
        outcome: ok if one attempt was; else unknown if that of one is (a later attempt that failed says
            what itself did, not what the earlier one did); else failed.
        attempts: how many there were.
        invoked_ns: when the first one began; None = not recorded.
        completed_ns: when it was known to have ended: the first attempt that was ok, else the last of them;
            None = one that nobody knows the end of.
        txn: what it reads and writes.
        discarded: what attempts meant to write and `txn` does not: nobody may ever see it.
    """

    query: str
    batch_id: int
    outcome: Phase
    attempts: int
    invoked_ns: int | None
    completed_ns: int | None
    txn: Txn
    discarded: frozenset[Identity] = frozenset()

    def __str__(self) -> str:
        return f"batch {self.batch_id} of {self.query}"


def transactions(history: History, seen: Container[Identity]) -> list[Transaction]:
    """The transactions of a run, by query and batch id.

    Args:
        history: of the run.
        seen: what readers saw. Where attempts differ in what they write (rows that are not
            deterministic), the one that readers saw most of is the one that took place.
    """
    attempts: dict[tuple[str, int], list[Operation[Txn]]] = defaultdict(list)
    for each in history.txns:
        attempts[each.what.query, each.what.batch_id].append(each)
    return [_merge(tried, seen) for _, tried in sorted(attempts.items())]


def _merge(tried: list[Operation[Txn]], seen: Container[Identity]) -> Transaction:
    phases = {each.phase for each in tried}
    outcome = next(each for each in (Phase.OK, Phase.INFO, Phase.FAIL) if each in phases)
    txn, discarded = _what_took_place(tried, outcome, seen)
    return Transaction(
        query=txn.query,
        batch_id=txn.batch_id,
        outcome=outcome,
        attempts=len(tried),
        invoked_ns=_least([each.invoked_ns for each in tried]),
        completed_ns=_completed_ns(tried, outcome),
        txn=txn,
        discarded=discarded,
    )


def _what_took_place(
    tried: list[Operation[Txn]], outcome: Phase, seen: Container[Identity]
) -> tuple[Txn, frozenset[Identity]]:
    """What one of the attempts writes, and what only the others would have written."""
    txn = next(each.what for each in tried if each.phase is outcome)
    if all(each.what.sends == txn.sends for each in tried):
        return txn, frozenset()
    possible = [each.what for each in tried if each.phase is not Phase.FAIL] or [txn]
    txn = max(possible, key=lambda each: (sum(send.identity in seen for send in each.sends), len(each.sends)))
    intended = {send.identity for each in tried for send in each.what.sends}
    return txn, frozenset(intended.difference(send.identity for send in txn.sends))


def _completed_ns(tried: list[Operation[Txn]], outcome: Phase) -> int | None:
    ends = [each.completed_ns for each in tried if each.phase is outcome]
    least = _least(ends)
    if outcome is Phase.OK or least is None:
        return least
    return max(end for end in ends if end is not None)


def _least(times_ns: list[int | None]) -> int | None:
    """None if one of them is not known."""
    known = [each for each in times_ns if each is not None]
    return min(known) if known and len(known) == len(times_ns) else None
