"""How far a shard's changelog is committed: an ordinary offset of the query's group, and the token beside it.

The token decides what becomes of a shard's pending batch, so it must not be read while a transaction is
about to change it (``RequireStable``, KIP-447). Mostly such a transaction is the batch before, committed and
with its markers under way: a few milliseconds. But the driver may have died inside it; then it would last
until its time-out. So after a while the reader ends it himself, as the next driver would: by initialising the
query's transactional id (KIP-98), which commits what was decided and aborts what was not.

::

    asked ──stable──▶ answer
      │ ▲
      │ └─────────────────────────────┐
      └─unstable─▶ waiting ──end_after_ms──▶ settled (once) ──unstable until the deadline──▶ error
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.config import admin_config, consumer_config, producer_config
from kafka_eos_source.kafka.consumer import POOL, AssignedConsumer
from kafka_eos_source.kafka.group import stable_offsets
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.properties import is_property
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

#: Markers of a committed transaction are written in milliseconds; a broker that changes hands takes seconds.
END_AFTER_MS = 3_000

#: Between two looks while a transaction is unfinished; doubled up to the second number.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1

#: Under the user's settings. A client that lost all brokers would forget them, and wait for a coordinator
#: among those that it forgot (librdkafka's issue 5511).
_CLIENT: Mapping[str, str] = {"metadata.recovery.strategy": "none"}


def changelog_client(kafka: Mapping[str, Any], group_id: str) -> AbstractContextManager[AssignedConsumer]:
    """The consumer of this process for everything that a shard asks of Kafka; kept open between tasks.

    One client for the offsets, the log's bounds and the restore: a task that needs them all connects once.

    Args:
        kafka: librdkafka properties, from `kafka.config.check_consumer`.
        group_id: the query's group. The consumer never joins it.
    """
    ours = {name: value for name, value in _CLIENT.items() if is_property(name)}
    return POOL.borrow(consumer_config({**ours, **kafka}, group_id, "read_committed"), range_consumer())


def end_open_transaction(kafka: Mapping[str, Any], transactional_id: str, deadline: Deadline) -> None:
    """Ends whatever transaction an earlier owner of the id left unfinished, and fences that owner.

    A living driver of the query is fenced too; it opens another producer then and looks at the token.

    Args:
        kafka: librdkafka properties of the sink's cluster.
        transactional_id: the query's.
        deadline: for the transaction coordinator.

    Raises:
        UnavailableError: no coordinator answered before ``deadline``.
        AuthorizationError: the ACL on the transactional id is missing.
    """
    stated = {key: value for key, value in kafka.items() if key == "transaction.timeout.ms"}
    producer = TransactionalProducer(producer_config({**admin_config(kafka), **stated}, transactional_id))
    try:
        producer.init(deadline)
    finally:
        producer.close()


class CommittedShard:
    """Reads the committed offset of one changelog partition, and others of the same group with it.

    Args:
        consumer: from `changelog_client`, with nothing assigned.
        group_id: the query's group.
        tp: the shard's changelog partition.
        end_transaction: ends a transaction that stays open, as `end_open_transaction` does; None = only wait
            for its end.
        end_after_ms: how long it may stay open before that, in ms.
    """

    def __init__(
        self,
        consumer: AssignedConsumer,
        group_id: str,
        tp: TopicPartition,
        *,
        end_transaction: Callable[[Deadline], None] | None = None,
        end_after_ms: int = END_AFTER_MS,
    ) -> None:
        self._consumer = consumer
        self._group_id = group_id
        self._tp = tp
        self._end_transaction = end_transaction
        self._end_after_seconds = end_after_ms / 1000
        self._pause = threading.Event()

    def offset(self, deadline: Deadline) -> GroupOffset | None:
        """The shard's committed offset, its token as metadata; None = none was ever committed.

        Raises:
            UnavailableError: no answer, or an unfinished transaction, until ``deadline``. Never "no offset".
            AuthorizationError: the group may not be described.
        """
        return self.offsets((), deadline).get(self._tp)

    def offsets(
        self, others: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """The shard's and those of ``others``, of one moment. A partition without an offset is absent.

        Raises:
            UnavailableError, AuthorizationError: as `offset`.
        """
        wanted = [self._tp, *(tp for tp in others if tp != self._tp)]
        since: float | None = None
        settled = False
        pause_seconds = _FIRST_PAUSE_SECONDS
        while (found := stable_offsets(self._consumer, self._group_id, wanted, deadline)) is None:
            now = time.monotonic()
            since = now if since is None else since
            if deadline.expired:
                raise self._unfinished(now - since, settled)
            if self._end_transaction is not None and not settled and now - since >= self._end_after_seconds:
                _log.info(
                    "an unfinished transaction holds the offset of %s in group %s for %.1f s: settling it",
                    self._tp,
                    self._group_id,
                    now - since,
                )
                self._end_transaction(deadline)
                settled = True
                continue
            self._pause.wait(min(pause_seconds, deadline.remaining_seconds()))
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return found

    def _unfinished(self, seconds: float, settled: bool) -> UnavailableError:
        if settled:
            whose = " It is not one of this query's: its transactional id was initialised meanwhile."
            fix = f"find out which other program commits offsets in group {self._group_id!r}, and end it."
        else:
            whose = ""
            fix = "wait until it ends or times out; kafka-transactions.sh shows it and can abort it."
        return UnavailableError(
            f"an unfinished transaction holds the offset of {self._tp} in group {self._group_id!r} for "
            f"{seconds:.1f} s.{whose}",
            fix=fix,
        )
