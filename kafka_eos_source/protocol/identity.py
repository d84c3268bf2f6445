"""The names under which Kafka knows a query or a series of batch writes.

Two different writers must never get one name. So each part of a composed name is percent-encoded, and the
parts are joined with ``:``, which no encoded part contains.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from kafka_eos_source.model import TopicPartition

#: Partition that carries the token of a query which reads no Kafka topic and writes to no single topic. Every
#: cluster with consumer groups has it, and no consumer reads it.
_ANCHOR_OF_LAST_RESORT = "__consumer_offsets"

#: How the query ids of batch writes without ``txnVersion`` start.
ONCE = "once:"
_ONCE_NAMES = "kafka-eos-batch-"
_SERIES = "txnAppId:"


@dataclass(frozen=True)
class Predecessor:
    """The names that format 1 gave to a series of batch writes.

    They were ambiguous: application ``a`` writing topic ``b-c`` and application ``a-b`` writing topic ``c``
    had the same ones. But each token lies on partition 0 of its own topic, which tells them apart.
    """

    application_id: str
    query_id: str


@dataclass(frozen=True)
class Identity:
    """Names of one query, or of one series of batch writes.

    Attributes:
        application_id: the transactional id.
        group_id: consumer group of the source offsets and the token.
        query_id: what the token must say for a batch to be ours.
        anchor: partition under which the full token is committed whatever the sources are.
        versioned: a series of batch writes, identified by ``txnAppId``.
        once: one batch write without ``txnVersion``.
        predecessor: names that the series had in format 1, if it may have had others.
    """

    application_id: str
    group_id: str
    query_id: str
    anchor: TopicPartition
    versioned: bool = False
    once: bool = False
    predecessor: Predecessor | None = None

    @property
    def disposable(self) -> bool:
        """Whether the group was made for one batch write only, and is to be deleted after it."""
        return self.once and self.group_id.startswith(_ONCE_NAMES)


def derived_application_id(query_id: str) -> str:
    """The ``application.id`` of a streaming query that was given none, from its checkpoint's id."""
    return f"kafka-eos-{query_id}"


def anchor(anchor_topic: str | None, topic: str | None) -> TopicPartition:
    """The partition whose group offset carries the full token.

    Args:
        anchor_topic: option ``anchor.topic``.
        topic: option ``topic``.
    """
    return TopicPartition(anchor_topic or topic or _ANCHOR_OF_LAST_RESORT, 0)


def of_stream(
    query_id: str,
    *,
    application_id: str | None,
    group_id: str | None,
    topic: str | None,
    anchor_topic: str | None = None,
) -> Identity:
    """The identity of a streaming query.

    Args:
        query_id: from the checkpoint.
        application_id, group_id, topic, anchor_topic: options of the sink; None = not given.
    """
    application_id = application_id or derived_application_id(query_id)
    return Identity(application_id, group_id or application_id, query_id, anchor(anchor_topic, topic))


def of_series(
    txn_app_id: str,
    *,
    application_id: str | None,
    group_id: str | None,
    topic: str | None,
    anchor_topic: str | None = None,
) -> Identity:
    """The identity of batch writes with ``txnAppId``.

    The topic is part of it, so that one ``foreachBatch`` may write several topics under one ``txnAppId``.
    """
    encoded = quote(txn_app_id, safe="") + ("" if topic is None else f":{quote(topic, safe='')}")
    own = application_id or f"kafka-eos-txn-{encoded}"
    series = f"{txn_app_id}-{topic}" if topic else txn_app_id
    former = application_id or "kafka-eos-" + re.sub(r"[^A-Za-z0-9._-]", "_", series)
    return Identity(
        own,
        group_id or own,
        f"{_SERIES}{encoded}",
        anchor(anchor_topic, topic),
        versioned=True,
        predecessor=Predecessor(former, f"{_SERIES}{series}"),
    )


def is_series(query_id: str) -> bool:
    """Whether this is the identity of batch writes with ``txnAppId``, which have no checkpoint."""
    return query_id.startswith(_SERIES)


def of_one_write(
    write_id: str,
    *,
    application_id: str | None,
    group_id: str | None,
    topic: str | None,
    anchor_topic: str | None = None,
) -> Identity:
    """The identity of one batch write without ``txnVersion``.

    All such writes of a process share one transactional id, because a transaction coordinator remembers each
    id for days. Each write has a consumer group of its own for its token.

    Args:
        write_id: unique to this write.
    """
    own = application_id or f"{_ONCE_NAMES}{_process_id(os.getpid())}"
    group = group_id or application_id or f"{_ONCE_NAMES}{write_id}"
    return Identity(own, group, f"{ONCE}{write_id}", anchor(anchor_topic, topic), once=True)


@lru_cache(maxsize=4)
def _process_id(_pid: int) -> str:
    """Unique to this process; a forked child has another pid and so gets an id of its own."""
    return str(uuid.uuid4())
