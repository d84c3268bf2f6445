"""The offset of a source in Spark's offset log: the format of Spark's own Kafka source, and one more key.

``{"flights":{"0":42,"1":40},"@":{…}}`` holds the next offset to read of each partition, as Spark's built-in
source writes it, so that a query that used that source can be continued. Spark's source cannot read the key
``"@"``, which cannot be the name of a topic. It carries what Spark would otherwise lose:

``start``
    where the batch begins in partitions that the previous position does not contain. Batch 0 names all its
    partitions, because Spark calls ``initialOffset`` again on a replay, and *latest* has moved by then. Later
    batches name partitions that are new, that belong to a topic that was created again, or whose log was cut
    below the previous position.
``cluster``
    Kafka's id of the cluster that was read. The sink uses it to decide whether it commits the offsets.
``epochs``
    the leader epochs (KIP-320) that belong to the ends, as one list for each topic: the epochs of the
    partitions above, in the order of their numbers; -1 = unknown. They reveal that a log was cut and filled
    again (`plan.source`). A partition that the batch does not read keeps its epoch, so a new leader alone
    starts no batch.
``topics``
    topic ids (KIP-516), which reveal that a topic was deleted and created again.
``tick``
    a number that changes when the source needs a micro-batch without data: for what is due in the state of
    operators, or to renew the query's token before it expires (`plan.source`).
``jump``
    true if the source continues from the offsets that Kafka holds for the query, because its checkpoint is
    an old copy. Such a batch reads nothing from this source, and the sink never moves its committed offsets.
``app``
    the option ``application.id`` of the source, if it is set. The sink refuses the batch if its own differs.
``lossy``
    true if the user accepts lost records (``failOnDataLoss=false``). If a topic was deleted or created again
    after the batch was planned, neither the source nor the sink then fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.model import Epochs, Offsets, TopicPartition
from kafka_eos_source.protocol.token import digest
from kafka_eos_source.runtime.json_input import JsonError, parse_json

#: The key that only this package writes.
OURS = "@"

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class SourcePosition:
    """The position of one Kafka source at the end of a batch.

    Attributes:
        end: next offset to read, per partition.
        start: first offset of partitions that do not begin at the end of the previous position: all
            partitions in batch 0, in later batches new ones and those whose log was cut. None if there are
            none, and in offsets of Spark's own source.
        cluster_id: Kafka's id of the cluster that was read; None in offsets of Spark's own source.
        topic_ids: id of each topic, as far as the brokers returned one.
        tick: number of an empty micro-batch; 0 for an ordinary batch.
        jump: whether the batch skips records that Kafka already holds, and reads none.
        lossy: whether the source continues after a loss (``failOnDataLoss=false``).
        epochs: leader epochs that belong to ``end``, as far as they are known.
        application_id: option ``application.id`` of the source; None if it is not set.
    """

    end: Offsets
    start: Offsets | None = None
    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    tick: int = 0
    jump: bool = False
    lossy: bool = False
    epochs: Epochs = field(default_factory=dict)
    application_id: str | None = None

    @property
    def begins_query(self) -> bool:
        """Whether this is the start of a new query, or batch 0 of a query that has read nothing yet."""
        return self.start is not None and self.start == self.end

    @property
    def has_records(self) -> bool:
        """Whether a batch that ends here, and begins at another position, was planned to read offsets.

        It depends on the end alone, so the source and the commit come to the same result, although the source
        gets another start whenever Spark repeats batch 0.
        """
        return not (self.tick or self.jump or self.begins_query)

    @property
    def digest(self) -> str:
        """Digest of the whole position. Equal positions have equal digests."""
        return digest((self.to_json(),))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in sorted order, so that equal positions have equal JSON."""
        ours: dict[str, Any] = {}
        if self.start is not None:
            ours["start"] = _nested(self.start)
        if self.cluster_id is not None:
            ours["cluster"] = self.cluster_id
        epochs = _listed(self.epochs, self.end)
        if epochs:
            ours["epochs"] = epochs
        if self.topic_ids:
            ours["topics"] = dict(sorted(self.topic_ids.items()))
        if self.tick:
            ours["tick"] = self.tick
        if self.jump:
            ours["jump"] = True
        if self.lossy:
            ours["lossy"] = True
        if self.application_id is not None:
            ours["app"] = self.application_id
        return {**({OURS: ours} if ours else {}), **_nested(self.end)}

    def to_json(self) -> str:
        """Returns the offset as Spark logs it."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> SourcePosition:
        """Reads an offset of this source or of Spark's own Kafka source.

        Raises:
            OperatorError: if the offset belongs to neither.
        """
        if not _is_position(found):
            raise OperatorError(
                f"{json.dumps(found)} is not the offset of a Kafka source; "
                'expected {"topic":{"0":42}}, as format("kafka") and format("kafka-eos") write it.',
                fix="check checkpointLocation: the checkpoint belongs to another query, or the sources of "
                "this query were changed. A new checkpoint needs a new application.id, and begins at "
                "startingOffsets.",
            )
        ours = found.get(OURS, {})
        end = _flat({name: entry for name, entry in found.items() if name != OURS})
        return cls(
            end=end,
            start=_flat(ours["start"]) if "start" in ours else None,
            cluster_id=ours.get("cluster"),
            topic_ids=ours.get("topics", {}),
            tick=ours.get("tick", 0),
            jump=ours.get("jump", False),
            lossy=ours.get("lossy", False),
            epochs=_unlisted(ours.get("epochs", {}), end),
            application_id=ours.get("app"),
        )

    @classmethod
    def from_json(cls, text: str) -> SourcePosition:
        """Reads an offset from the text that Spark logged.

        Raises:
            OperatorError: if the text is not the offset of a Kafka source.
        """
        try:
            found = parse_json(text)
        except JsonError as error:
            raise OperatorError(
                f"the offset {text[:200]!r} is not JSON: {error}.",
                fix="restore the checkpoint from a copy. A new checkpoint begins at startingOffsets, which "
                "doubles or leaves out rows unless it continues where this query stopped "
                "(docs/runbooks.md, FOREIGN_QUERY).",
            ) from error
        return cls.from_dict(found)


def is_kafka_offset_json(text: str) -> bool:
    """Whether a Kafka source, of this package or Spark's own, wrote this line of the offset log.

    Other sources write ``42`` (rate, memory), ``{"logOffset":3}`` (files), ``{"sourceVersion":1,…}`` (Delta)
    or ``{"0":7}`` (rate per micro-batch, sockets). An empty ``{}`` is a Kafka source that has no partition
    yet. A connector that writes the same form for other systems, such as the one for Azure Event Hubs, cannot
    be recognised; for it the option ``source.cluster`` decides.
    """
    try:
        return _is_position(parse_json(text))
    except JsonError:
        return False


def _is_position(found: object) -> bool:
    return isinstance(found, dict) and all(
        _is_ours(entry, found) if name == OURS else bool(_TOPIC.fullmatch(name)) and _is_topic(entry)
        for name, entry in found.items()
    )


def _is_topic(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and bool(entry)
        and all(
            _PARTITION.fullmatch(partition)
            and isinstance(offset, int)
            and not isinstance(offset, bool)
            and 0 <= offset < 1 << 63
            for partition, offset in entry.items()
        )
    )


def _is_ours(entry: object, position: Mapping[str, object]) -> bool:
    """Whether the value of ``"@"`` is valid. Keys of later versions are allowed."""
    if not isinstance(entry, dict):
        return False
    start, topics, epochs = entry.get("start", {}), entry.get("topics", {}), entry.get("epochs", {})
    return (
        isinstance(start, dict)
        and all(map(_is_topic, start.values()))
        and isinstance(entry.get("cluster", ""), str)
        and isinstance(epochs, dict)
        and all(_are_epochs(listed, position.get(topic)) for topic, listed in epochs.items())
        and isinstance(entry.get("app", ""), str)
        and isinstance(topics, dict)
        and all(isinstance(topic_id, str) for topic_id in topics.values())
        and type(entry.get("tick", 0)) is int
        and isinstance(entry.get("jump", False), bool)
        and isinstance(entry.get("lossy", False), bool)
    )


def _are_epochs(listed: object, partitions: object) -> bool:
    return (
        isinstance(listed, list)
        and isinstance(partitions, dict)
        and len(listed) == len(partitions)
        and all(type(epoch) is int and epoch >= -1 for epoch in listed)
    )


def _listed(epochs: Epochs, end: Offsets) -> dict[str, list[int]]:
    """Returns the epochs of the partitions of each topic, without topics of which none is known."""
    listed: dict[str, list[int]] = {}
    for tp in sorted(end):
        listed.setdefault(tp.topic, []).append(epochs.get(tp, -1))
    return {topic: found for topic, found in listed.items() if max(found) >= 0}


def _unlisted(listed: Mapping[str, list[int]], end: Offsets) -> dict[TopicPartition, int]:
    left = {topic: iter(found) for topic, found in listed.items()}
    epochs = {tp: next(left[tp.topic]) for tp in sorted(end) if tp.topic in left}
    return {tp: epoch for tp, epoch in epochs.items() if epoch >= 0}


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for tp, offset in sorted(offsets.items()):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = offset
    return nested


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in nested.items()
        for partition, offset in partitions.items()
    }
