"""The names of a query, or of a series of batch writes, in Kafka.

Two different writers must never get the same name. So each part of a composed name is percent-encoded, and
the parts are joined with ``:``, which no encoded part contains.

The arguments ``application_id``, ``group_id``, ``topic`` and ``anchor_topic`` are options of the sink; None
if they are not set.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from kafka_eos_source.model import TopicPartition

#: Topic of the anchor partition if neither ``anchor.topic`` nor ``topic`` is set. Every cluster with consumer
#: groups has it.
_ANCHOR_OF_LAST_RESORT = "__consumer_offsets"

#: Stands in a target for the column ``topic``. No topic has this name.
_COLUMN = "*"
#: Prefix of the default consumer groups of queries and batch writes. No other program should use it.
GROUP_PREFIX = "kafka-eos."

#: Prefix of the query ids of batch writes without ``txnVersion``.
ONCE = "once:"
#: Prefix of the ids that batch writes without an ``application.id`` generate.
ONE_WRITE_NAMES = "kafka-eos-batch-"
_SERIES = "txnAppId:"


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
    """

    application_id: str
    group_id: str
    query_id: str
    anchor: TopicPartition
    versioned: bool = False
    once: bool = False

    @property
    def disposable(self) -> bool:
        """Whether the group was created for one batch write, which deletes it at its end."""
        return self.once and self.group_id.startswith(group_of(ONE_WRITE_NAMES))


def target(topic: str | None, sinks: Mapping[str, str]) -> str:
    """Returns what a token says about where rows go: the topic, and a digest of the sinks outside Kafka.

    Args:
        topic: option ``topic``; None = the column ``topic`` of each row.
        sinks: the normalised target of each sink, by the name of the sink.
    """
    text = json.dumps(sorted(sinks.items()))
    return f"{topic or _COLUMN}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def target_topic(found: str) -> str:
    """Returns the topic that a target names, for messages."""
    topic = found.rpartition(":")[0]
    if not topic:
        return "a topic that is not known"
    return "the topics that the column 'topic' names" if topic == _COLUMN else f"topic {topic!r}"


def adopts(foreign_query: str, query_id: str) -> bool:
    """Whether the option ``onForeignQuery`` lets a query continue the work of the query ``query_id``."""
    return foreign_query in ("adopt", f"adopt_unchecked:{query_id}")


def derived_application_id(query_id: str) -> str:
    """Returns the ``application.id`` of a streaming query that does not set the option."""
    return f"kafka-eos-{query_id}"


def group_of(application_id: str, group_id: str | None = None) -> str:
    """Returns the consumer group of a query or of a series of batch writes.

    The default has a prefix, because people give their consumers the name of the application. Such a consumer
    would share the group with the query, and each would overwrite the offsets of the other.
    """
    return group_id or f"{GROUP_PREFIX}{application_id}"


def anchor(anchor_topic: str | None, topic: str | None) -> TopicPartition:
    """Returns the partition whose offset in the group carries the full token."""
    return TopicPartition(anchor_topic or topic or _ANCHOR_OF_LAST_RESORT, 0)


def of_stream(
    query_id: str,
    *,
    application_id: str | None,
    group_id: str | None,
    topic: str | None,
    anchor_topic: str | None = None,
) -> Identity:
    """Returns the identity of a streaming query."""
    application_id = application_id or derived_application_id(query_id)
    return Identity(application_id, group_of(application_id, group_id), query_id, anchor(anchor_topic, topic))


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
    return Identity(
        own,
        group_of(own, group_id),
        f"{_SERIES}{encoded}",
        anchor(anchor_topic, topic),
        versioned=True,
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

    ``write_id`` is a unique id of this write.
    """
    own = application_id or f"{ONE_WRITE_NAMES}{_process_id(os.getpid())}"
    group = group_of(application_id or f"{ONE_WRITE_NAMES}{write_id}", group_id)
    return Identity(own, group, f"{ONCE}{write_id}", anchor(anchor_topic, topic), once=True)


@lru_cache(maxsize=4)
def _process_id(_pid: int) -> str:
    """Returns a unique id of this process. A forked child has another pid, and so another id."""
    return str(uuid.uuid4())
