"""Decides when an idle source starts an empty micro-batch, so that the commit token does not expire.

Kafka deletes the offsets of a consumer group, and with them the token, if the group has committed nothing for
``offsets.retention.minutes``. The process of the source is the only one that exists between two
micro-batches, so it measures the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kafka_eos_source.errors import KafkaEosError

_log = logging.getLogger(__name__)

#: An idle source renews the token for the first time this long after the start of a run, in ms. The query may
#: have been stopped for long, and the source does not know how old the token is.
FIRST_AFTER_MS = 60_000
#: Shortest interval, in ms: a quarter of one minute, the smallest retention that Kafka accepts.
_SHORTEST_INTERVAL_MS = 15_000


class Renewal:
    """Measures how long one source has been idle in one run of a query.

    Args:
        interval_ms: option ``token.renewal.interval.ms``; 0 = never renew.
        ask_retention_ms: returns ``offsets.retention.minutes`` of the brokers, in ms. Called at most once.
        clock: returns seconds, such as ``time.monotonic``.

    Attributes:
        retention_ms: ``offsets.retention.minutes`` in ms; None if that is not known. An idle source asks.
    """

    def __init__(
        self, interval_ms: int, ask_retention_ms: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self.retention_ms: int | None = None
        self._interval_ms = interval_ms
        self._ask_retention_ms: Callable[[], int] | None = ask_retention_ms
        self._clock = clock
        self._since: float | None = None
        self._caused_a_batch = False

    def batch_caused(self) -> None:
        """Restarts the interval, because Spark now runs a batch for this source and commits a token."""
        self._since = self._clock()
        self._caused_a_batch = True

    def is_due(self) -> bool:
        """Returns whether the source must start an empty batch now.

        The first call only starts the clock. With Trigger.Once there is no second call, hence no renewal.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        idle_ms = (now - self._since) * 1000
        if idle_ms < min(self._interval_ms or _SHORTEST_INTERVAL_MS, _SHORTEST_INTERVAL_MS):
            return False
        self._learn_retention()
        return self._interval_ms > 0 and idle_ms >= (
            self._interval_ms if self._caused_a_batch else min(self._interval_ms, FIRST_AFTER_MS)
        )

    def _learn_retention(self) -> None:
        """Limits the interval to a quarter of the time that Kafka keeps offsets; does this only once."""
        if self._ask_retention_ms is None:
            return
        ask, self._ask_retention_ms = self._ask_retention_ms, None
        try:
            self.retention_ms = ask()
        except KafkaEosError as error:
            if not self._interval_ms:
                return
            _log.info(
                "the source cannot read offsets.retention.minutes from a broker. While the query is idle, "
                "it renews its token every %d ms (token.renewal.interval.ms). %s",
                self._interval_ms,
                error.message,
            )
            return
        quarter_ms = self.retention_ms // 4
        if quarter_ms < self._interval_ms:
            _log.info(
                "while the query is idle, it renews its token every %d ms, which is a quarter of the "
                "brokers' offsets.retention.minutes, instead of every %d ms (token.renewal.interval.ms)",
                quarter_ms,
                self._interval_ms,
            )
            self._interval_ms = quarter_ms
