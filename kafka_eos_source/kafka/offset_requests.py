"""Splits the offsets of a transaction into requests that the group coordinator can store.

The coordinator writes the offsets of one TxnOffsetCommit request as one record batch. It refuses the whole
request if that batch is larger than ``max.message.bytes`` of the topic ``__consumer_offsets``. A transaction
may contain several such requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kafka_eos_source.model import GroupOffset

#: The topic in which group coordinators store committed offsets.
OFFSETS_TOPIC = "__consumer_offsets"

#: Largest record batch that one request may cause: half of Kafka's default of ``max.message.bytes``.
LIMIT_BYTES = 512 << 10

#: Bytes of the fields of fixed size, rounded up: versions and lengths, partition, offset, leader epoch, topic
#: id and timestamp (54 bytes with librdkafka's null byte), and the record's own header (14).
_FIXED_BYTES = 72


def split(
    offsets: Iterable[GroupOffset], group_id: str, limit_bytes: int = LIMIT_BYTES
) -> Iterator[list[GroupOffset]]:
    """Yields the offsets, in order, in lists that the coordinator can store as one record batch each.

    Args:
        offsets: offsets that one transaction commits.
        group_id: the group.
        limit_bytes: largest record batch. An offset that alone is larger forms a list of its own.
    """
    request: list[GroupOffset] = []
    size = 0
    for each in offsets:
        added = record_bytes(each, group_id)
        if request and size + added > limit_bytes:
            yield request
            request, size = [], 0
        request.append(each)
        size += added
    if request:
        yield request


def record_bytes(offset: GroupOffset, group_id: str) -> int:
    """Returns an upper bound of the bytes that one committed offset takes in the coordinator's log."""
    text = group_id, offset.tp.topic, offset.metadata
    return _FIXED_BYTES + sum(len(each.encode()) for each in text)
