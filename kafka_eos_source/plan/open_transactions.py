"""Finds out whether an idle source waits for a transaction of a producer that is still open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe.reasons import OPEN_TRANSACTIONS

_log = logging.getLogger(__name__)

#: How often an idle source asks. A source that reads does not ask.
_INTERVAL_SECONDS = 5.0


class Admin(Protocol):
    """The method of `kafka.admin.SourceAdmin` that is used here."""

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...


class OpenTransactions:
    """Compares the ends of the logs with what readers may read, as long as a source is idle.

    Args:
        admin: asks the brokers.
        clock: returns seconds, such as ``time.monotonic``.
    """

    def __init__(self, admin: Admin, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._clock = clock
        self._asked_at = clock()
        self._latest: Offsets = {}
        self._log_ends: Mapping[TopicPartition, int] = {}

    def reason(self, latest: Offsets) -> str:
        """Returns which open transactions hide records from readers; "" if none is known.

        Args:
            latest: the offset up to which readers may read, per partition. It was read after the last call,
                so a partition whose log was longer even then has an open transaction.
        """
        if latest != self._latest:
            self._latest, self._asked_at, self._log_ends = dict(latest), self._clock(), {}
        text = _text({tp: end - latest[tp] for tp, end in self._log_ends.items() if end > latest[tp]})
        if self._clock() - self._asked_at >= _INTERVAL_SECONDS:
            self._asked_at = self._clock()
            try:
                self._log_ends = self._admin.high_watermarks(list(latest))
            except KafkaEosError as error:
                _log.info("the source cannot tell whether a transaction is open: %s", error.message)
                self._log_ends = {}
        return text


def _text(hidden: Offsets) -> str:
    if not hidden:
        return ""
    others = f" and {len(hidden) - 1} other partitions" if len(hidden) > 1 else ""
    return f"{OPEN_TRANSACTIONS} {min(hidden)}{others} hide {sum(hidden.values()):,} offsets"
