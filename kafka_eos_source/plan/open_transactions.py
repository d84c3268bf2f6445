"""Finds out which partitions of a source wait for a transaction of another producer that is still open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.model import Offsets, TopicPartition

_log = logging.getLogger(__name__)

#: How often the source asks for the ends of the logs: while it has nothing to read, and while it reads.
_IDLE_SECONDS = 5.0
_BUSY_SECONDS = 30.0


class Admin(Protocol):
    """The method of `kafka.admin.SourceAdmin` that is used here."""

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...


class OpenTransactions:
    """Compares the ends of the logs with what readers may read (the LSO).

    A partition counts as hidden if its LSO has not moved since its log was seen to be longer than that.

    Args:
        admin: asks the brokers.
        clock: returns seconds, such as ``time.monotonic``.
    """

    def __init__(self, admin: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._clock = clock
        self._asked_at = clock()
        self._idle_since: float | None = None
        self._ends: dict[TopicPartition, tuple[int, int]] = {}  # the LSO before the question, and the answer

    def hidden(self, latest: Offsets, *, is_idle: bool) -> Offsets:
        """Returns how many offsets open transactions hide, per partition; without partitions that show all.

        Args:
            latest: the LSO of each partition. It was read after the last call, so a partition whose log was
                longer even then has an open transaction.
            is_idle: whether the source has nothing to read.
        """
        now = self._clock()
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._ends = {
            tp: (stable, end)
            for tp, (stable, end) in self._ends.items()
            if latest.get(tp) == stable and end > stable
        }
        found = {tp: end - stable for tp, (stable, end) in self._ends.items()}
        if self._is_due(now):
            self._asked_at = now
            self._ask(latest)
        return found

    def _is_due(self, now: float) -> bool:
        """Returns whether to ask the brokers. A source that was busy a moment ago does not ask at once."""
        if self._idle_since is None:
            return now - self._asked_at >= _BUSY_SECONDS
        return now - max(self._asked_at, self._idle_since) >= _IDLE_SECONDS

    def _ask(self, latest: Offsets) -> None:
        try:
            ends = self._admin.high_watermarks(list(latest))
        except KafkaEosError as error:
            _log.info("the source cannot tell whether a transaction is open: %s", error.message)
            self._ends = {}
            return
        self._ends = {tp: (latest[tp], end) for tp, end in ends.items() if tp in latest and end > latest[tp]}


def reason(hidden: Offsets) -> str:
    """Returns which open transactions hide records from readers, for people; "" if none does."""
    if not hidden:
        return ""
    others = f" and {len(hidden) - 1} other partitions" if len(hidden) > 1 else ""
    return f"open transactions in {min(hidden)}{others} hide {sum(hidden.values()):,} offsets"
