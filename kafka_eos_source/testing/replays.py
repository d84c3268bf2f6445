"""Merges all attempts at a micro-batch into one transaction: its outcome and its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

from kafka_eos_source.testing.history import History, Identity, Operation, Phase, Txn


@dataclass(frozen=True)
class Transaction:
    """All attempts at one batch.

    Attributes:
        query, batch_id: identify the batch.
        outcome: ok if one attempt was ok; else unknown if one attempt's outcome is unknown, because a later
            attempt that failed does not show what the earlier one did; else failed.
        attempts: number of attempts.
        invoked_ns: when the first attempt began; None = not recorded.
        completed_ns: when the end was known: of the first attempt that was ok, else of the last attempt; None
            if the end of an attempt is unknown.
        txn: what it reads and writes.
        discarded: values that other attempts meant to write and `txn` does not; nobody may ever read them.
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
    """Returns the transactions of a run, by query and batch id.

    Args:
        history: history of the run.
        seen: values that readers saw. If attempts write different rows (a query that is not deterministic),
            the attempt of which readers saw most is the one that took place.
    """
    by_batch: dict[tuple[str, int], list[Operation[Txn]]] = defaultdict(list)
    for each in history.txns:
        by_batch[each.what.query, each.what.batch_id].append(each)
    return [_merge(attempts, seen) for _, attempts in sorted(by_batch.items())]


def _merge(attempts: list[Operation[Txn]], seen: Container[Identity]) -> Transaction:
    phases = {each.phase for each in attempts}
    outcome = next(each for each in (Phase.OK, Phase.INFO, Phase.FAIL) if each in phases)
    txn, discarded = _what_took_place(attempts, outcome, seen)
    return Transaction(
        query=txn.query,
        batch_id=txn.batch_id,
        outcome=outcome,
        attempts=len(attempts),
        invoked_ns=_least([each.invoked_ns for each in attempts]),
        completed_ns=_completed_ns(attempts, outcome),
        txn=txn,
        discarded=discarded,
    )


def _what_took_place(
    attempts: list[Operation[Txn]], outcome: Phase, seen: Container[Identity]
) -> tuple[Txn, frozenset[Identity]]:
    """Returns the attempt that took place, and the values that only other attempts would have written."""
    txn = next(each.what for each in attempts if each.phase is outcome)
    if all(each.what.sends == txn.sends for each in attempts):
        return txn, frozenset()
    possible = [each.what for each in attempts if each.phase is not Phase.FAIL] or [txn]
    txn = max(possible, key=lambda each: (sum(send.identity in seen for send in each.sends), len(each.sends)))
    intended = {send.identity for each in attempts for send in each.what.sends}
    return txn, frozenset(intended.difference(send.identity for send in txn.sends))


def _completed_ns(attempts: list[Operation[Txn]], outcome: Phase) -> int | None:
    ends = [each.completed_ns for each in attempts if each.phase is outcome]
    least = _least(ends)
    if outcome is Phase.OK or least is None:
        return least
    return max(end for end in ends if end is not None)


def _least(times_ns: list[int | None]) -> int | None:
    """Returns the earliest time; None if one of the times is unknown."""
    known = [each for each in times_ns if each is not None]
    return min(known) if known and len(known) == len(times_ns) else None
