"""When an idle source asks Spark for an empty micro-batch, so that the query's token does not expire.

Kafka forgets the offsets of a consumer group, and the token with them, when nothing was committed for
``offsets.retention.minutes``. The only process that lives between two micro-batches is that of the source, so
the source keeps the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kafka_eos_source.errors import KafkaEosError

_log = logging.getLogger(__name__)

#: The token may be old when a query starts after a long stop, and the source cannot see its age. So an idle
#: source renews it this soon after the start of the run.
FIRST_AFTER_MS = 60_000
#: A quarter of the smallest retention that Kafka accepts, one minute: nothing is due before.
_NEVER_SOONER_MS = 15_000


class Renewal:
    """The clock of one source in one run of a query.

    Args:
        interval_ms: option ``token.renewal.interval.ms``; 0 = never renew.
        retention_ms: asks a broker for ``offsets.retention.minutes``, in ms. Called at most once.
        clock: seconds from any starting point.
    """

    def __init__(self, interval_ms: int, retention_ms: Callable[[], int], clock: Callable[[], float]) -> None:
        self._interval_ms = interval_ms
        self._retention_ms: Callable[[], int] | None = retention_ms
        self._clock = clock
        self._since: float | None = None
        self._caused_a_batch = False

    def batch_caused(self) -> None:
        """Starts the interval again: Spark is about to run a batch for this source, and commits a token."""
        self._since = self._clock()
        self._caused_a_batch = True

    def is_due(self) -> bool:
        """Whether the source must cause an empty batch now.

        The first call only starts the clock: with Trigger.Once there is no second one, and no renewal.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        idle_ms = (now - self._since) * 1000
        if not self._interval_ms or idle_ms < min(self._interval_ms, _NEVER_SOONER_MS):
            return False
        self._shorten_to_retention()
        return idle_ms >= (
            self._interval_ms if self._caused_a_batch else min(self._interval_ms, FIRST_AFTER_MS)
        )

    def _shorten_to_retention(self) -> None:
        """Limits the interval to a quarter of the time that Kafka keeps offsets. Does so once."""
        if self._retention_ms is None:
            return
        ask, self._retention_ms = self._retention_ms, None
        try:
            quarter_ms = ask() // 4
        except KafkaEosError as error:
            _log.info(
                "cannot read offsets.retention.minutes from a broker. An idle query renews its token every "
                "%d ms (token.renewal.interval.ms). %s",
                self._interval_ms,
                error.message,
            )
            return
        if quarter_ms < self._interval_ms:
            _log.info(
                "an idle query renews its token every %d ms, a quarter of the brokers' "
                "offsets.retention.minutes, and not every %d ms (token.renewal.interval.ms)",
                quarter_ms,
                self._interval_ms,
            )
            self._interval_ms = quarter_ms
