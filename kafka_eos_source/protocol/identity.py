"""The names of a query, or of a series of batch writes, in Kafka.

Two different writers must never get the same name. So each part of a composed name is percent-encoded, and
the parts are joined with ``:``, which no encoded part contains.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from kafka_eos_source.model import TopicPartition

#: Topic of the anchor partition if neither ``anchor.topic`` nor ``topic`` is set. Every cluster with consumer
#: groups has it.
_ANCHOR_OF_LAST_RESORT = "__consumer_offsets"

#: Prefix of the query ids of batch writes without ``txnVersion``.
ONCE = "once:"
_ONCE_NAMES = "kafka-eos-batch-"
_SERIES = "txnAppId:"


@dataclass(frozen=True)
class Predecessor:
    """The names that a series of batch writes had in format 1.

    They were ambiguous: application ``a`` writing topic ``b-c`` and application ``a-b`` writing topic ``c``
    had the same names. But each token was committed on partition 0 of its own topic, so the topic identifies
    the series.

    Attributes:
        application_id: the former transactional id.
        query_id: the former query id in tokens.
    """

    application_id: str
    query_id: str


@dataclass(frozen=True)
class Identity:
    """The names of one query, or of one series of batch writes.

    Attributes:
        application_id: the transactional id.
        group_id: consumer group of the source offsets and the token.
        query_id: the query id in the tokens of this writer.
        anchor: the partition whose offset always carries the full token, whatever the sources are.
        versioned: whether this is a series of batch writes, identified by ``txnAppId``.
        once: whether this is one batch write without ``txnVersion``.
        predecessor: names that the series may have had in format 1; None for all other writers.
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
        """Whether the group was created for one batch write, which deletes it at its end."""
        return self.once and self.group_id.startswith(_ONCE_NAMES)


def derived_application_id(query_id: str) -> str:
    """Returns the ``application.id`` of a streaming query that does not set the option."""
    return f"kafka-eos-{query_id}"


def anchor(anchor_topic: str | None, topic: str | None) -> TopicPartition:
    """Returns the partition whose offset in the group carries the full token.

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
    """Returns the identity of a streaming query.

    Args:
        query_id: Spark's id of the query, from the checkpoint.
        application_id, group_id, topic, anchor_topic: options of the sink; None if they are not set.
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
    """Returns the identity of batch writes with ``txnAppId``.

    The topic is part of it, so that one ``foreachBatch`` can write several topics with one ``txnAppId``.
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
    """Whether this query id belongs to batch writes with ``txnAppId``, which have no checkpoint."""
    return query_id.startswith(_SERIES)


def of_one_write(
    write_id: str,
    *,
    application_id: str | None,
    group_id: str | None,
    topic: str | None,
    anchor_topic: str | None = None,
) -> Identity:
    """Returns the identity of one batch write without ``txnVersion``.

    All such writes of a process share one transactional id, because a transaction coordinator keeps each id
    for days. Each write has its own consumer group for its token.

    Args:
        write_id: a unique id of this write.
        application_id, group_id, topic, anchor_topic: options of the write; None if they are not set.
    """
    own = application_id or f"{_ONCE_NAMES}{_process_id(os.getpid())}"
    group = group_id or application_id or f"{_ONCE_NAMES}{write_id}"
    return Identity(own, group, f"{ONCE}{write_id}", anchor(anchor_topic, topic), once=True)


@lru_cache(maxsize=4)
def _process_id(_pid: int) -> str:
    """Returns a unique id of this process. A forked child has another pid, and so another id."""
    return str(uuid.uuid4())
