"""Reads the committed offset of a shard's changelog, and what the log holds after it.

The committed offset is an offset of the query's group, with the commit token as metadata. The token decides
whether the pending changes of a shard are applied, so it must not be read while an open transaction is about
to change it (``RequireStable``, KIP-447). Usually that transaction is the previous batch, whose control
records are being written, which takes a few milliseconds. But the driver may have died inside the
transaction, which then stays open until its timeout. So after a while the reader ends the transaction, as the
next driver would: it initialises the query's transactional id (KIP-98), which completes a commit that was
decided and aborts a transaction that was not.

::

    fetch ──stable──▶ answer
      │ ▲
      │ └─────────────────────────────┐
      └─unstable─▶ wait ──end_after_ms──▶ end the transaction, once ──unstable until the deadline──▶ error
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.group import stable_offsets
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.kafka.reader import POOL, ChangelogReader
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses
from kafka_eos_source.state.batch_record import Owner
from kafka_eos_source.state.layout import BATCH_PREFIX

if TYPE_CHECKING:
    from kafka_eos_source.kafka.fetch import RangeConsumer

_log = logging.getLogger(__name__)

#: How long a transaction may stay open before the reader ends it. Control records of a committed transaction
#: are written in milliseconds; a coordinator that moves to another broker takes seconds.
END_AFTER_MS = 3_000

#: Pause between two fetches while a transaction is open: the first, and the longest after doubling.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1


def changelog_client(kafka: Mapping[str, str]) -> AbstractContextManager[RangeConsumer]:
    """Borrows the consumer that a shard uses for all requests.

    It is the same client for offsets, log bounds and restore, so that a task connects once. The process keeps
    it between tasks.

    Args:
        kafka: librdkafka properties, from `kafka.config.check_consumer`.
    """
    return POOL.borrow({**kafka, "isolation.level": "read_committed"})


def end_open_transaction(kafka: Mapping[str, Any], transactional_id: str, deadline: Deadline) -> None:
    """Ends the transaction that an earlier owner of the id left open, and fences that owner.

    A driver of the query that is still alive is fenced too; it then opens a new producer and reads the token
    again.

    Args:
        kafka: librdkafka properties of the sink's cluster.
        transactional_id: of the query.
        deadline: for the transaction coordinator.

    Raises:
        UnavailableError: if no coordinator answers before ``deadline``.
        AuthorizationError: if the ACL on the transactional id is missing.
    """
    timeout = {key: value for key, value in kafka.items() if key == "transaction.timeout.ms"}
    producer = TransactionalProducer(producer_config({**admin_config(kafka), **timeout}, transactional_id))
    try:
        producer.init(deadline)
    finally:
        producer.close()


@dataclass(frozen=True)
class Tail:
    """What a changelog partition holds after an offset, up to the first open transaction.

    Attributes:
        stable: where it ends: the offset of the first record of an open transaction, or the end of the log.
        records: number of committed records.
        owners: the owners that their batch records name.
    """

    stable: int
    records: int
    owners: frozenset[Owner]


def read_tail(kafka: Mapping[str, Any], tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
    """Reads the committed records of a changelog partition from an offset on.

    Args:
        kafka: as `changelog_client`.
        tp: the partition.
        start: the offset.
        deadline: for the brokers.

    Raises:
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if the principal may not read the topic.
        ChangelogError: if another program wrote a batch record.
    """
    records, owners = 0, set[Owner]()
    with changelog_client(kafka) as consumer:
        reader = ChangelogReader(consumer, tp)
        first, stable = reader.readable(deadline)
        for each in reader.read(max(first, start), stable, deadline, if_gone="restart the query."):
            records += len(each)
            keys = each.keys.filter(pc.starts_with(each.keys, BATCH_PREFIX)).unique()
            owners.update(map(Owner.of_key, keys.to_pylist()))
    return Tail(stable, records, frozenset(owners))


class CommittedShard:
    """Reads the committed offset of one changelog partition.

    Args:
        consumer: from `changelog_client`, with nothing assigned.
        group_id: the query's group.
        tp: the shard's changelog partition.
        end_transaction: ends a transaction that stays open, as `end_open_transaction` does; None = only wait
            for its end.
        end_after_ms: how long the transaction may stay open before `end_transaction` is called.
    """

    def __init__(
        self,
        consumer: RangeConsumer,
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

    def offset(self, deadline: Deadline) -> GroupOffset | None:
        """Returns the shard's committed offset; None if it was never committed.

        The token is the offset's metadata.

        Raises:
            UnavailableError: if there is no answer before ``deadline``, or a transaction stays open. A
                failure is never reported as None.
            AuthorizationError: if the principal may not describe the group.
        """
        return self.offsets((), deadline).get(self._tp)

    def offsets(
        self, others: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns the committed offsets of the shard and of ``others`` as of one moment.

        A partition without a committed offset is absent.

        Raises:
            UnavailableError, AuthorizationError: as `offset`.
        """
        wanted = [self._tp, *(tp for tp in others if tp != self._tp)]
        since: float | None = None
        ended = False
        pauses = Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while (found := stable_offsets(self._consumer.cluster, self._group_id, wanted, deadline)) is None:
            now = time.monotonic()
            since = now if since is None else since
            if pauses.expired:
                raise self._still_open(now - since, ended)
            if self._end_transaction is not None and not ended and now - since >= self._end_after_seconds:
                _log.info(
                    "an open transaction has blocked the offset of %s in group %s for %.1f s; ending it",
                    self._tp,
                    self._group_id,
                    now - since,
                )
                self._end_transaction(deadline)
                ended = True
                continue
            pauses.wait()
        return found

    def _still_open(self, seconds: float, ended: bool) -> UnavailableError:
        if ended:
            owner = " It belongs to another program: this query's own transactions were ended meanwhile."
            fix = f"find the program that commits offsets in group {self._group_id!r}, and stop it."
        else:
            owner = ""
            fix = "wait until it ends or times out; kafka-transactions.sh lists it and can abort it."
        return UnavailableError(
            f"an open transaction has blocked the offset of {self._tp} in group {self._group_id!r} for "
            f"{seconds:.1f} s.{owner}",
            fix=fix,
        )
