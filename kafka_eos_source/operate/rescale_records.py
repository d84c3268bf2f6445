"""Copies the records of a store to the partitions of their new shards, and back to the changelog."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from kafka_eos_source.commit.interfaces import Producer
from kafka_eos_source.errors import ChangelogError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import layout
from kafka_eos_source.state.batch_record import encode_batch, record_of
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.move import EVERY_SHARD, Move, Placement, merge_keyless_entries
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.restore_target import ForwardingTarget
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.reading.cut import Changelog, Cut
from kafka_eos_source.state.reading.frames import described

_Handler = Callable[[pa.BinaryArray, pa.BinaryArray], None]


class RecordSender:
    """Sends records to one topic, each to a given partition.

    Attributes:
        records: number of records sent.
    """

    def __init__(self, producer: Producer, topic: str, timeout_ms: int) -> None:
        self._producer = producer
        self.topic = topic
        self.timeout_ms = timeout_ms
        self.records = 0

    def send(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        partitions: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        """Sends records without waiting for their acknowledgement."""
        if len(keys):
            rows = pa.record_batch(
                [keys, values, pa.array(partitions.astype(np.int32))], ["key", "value", "partition"]
            )
            self._producer.send(rows, self.topic, Deadline.after_ms(self.timeout_ms))
            self.records += len(keys)


def copy_to_new_shards(changelog: Changelog, cut: Cut, shards: int, sender: RecordSender) -> None:
    """Copies the changelog, each record to the partition of its new shard.

    Args:
        changelog: changelog of the store.
        cut: how far the changelog is committed.
        shards: new number of shards.
        sender: sends to the copy, which has a partition for each new shard.

    Raises:
        ChangelogError: if the changelog does not describe its store, or changed while it was read.
        KafkaEosError: if Kafka fails.
    """
    description = described(changelog, cut, Deadline.after_ms(sender.timeout_ms))
    if description is None:
        raise ChangelogError(
            f"changelog {cut.topic!r} contains no description of its store, so its keys cannot be moved.",
            fix="only stores of this package's stateful operators can be moved.",
        )
    placement = Placement(description, cut.shards, shards)
    common: dict[int, dict[bytes, bytes]] = {}
    for shard in range(cut.shards):
        held = common.setdefault(shard, {})

        def place(
            keys: pa.BinaryArray,
            values: pa.BinaryArray,
            shard: int = shard,
            held: dict[bytes, bytes] = held,
        ) -> None:
            placed = placement.of(keys, shard)
            is_common = placed == EVERY_SHARD
            if bool(is_common.any()):
                mask = pa.array(is_common)
                for key, value in zip(
                    keys.filter(mask).to_pylist(), values.filter(mask).to_pylist(), strict=True
                ):
                    held.pop(key, None)
                    if value is not None:
                        held[key] = value
                keep = pa.array(~is_common)
                keys, values, placed = keys.filter(keep), values.filter(keep), placed[~is_common]
            sender.send(keys, values, placed)

        _read(changelog, cut.tp(shard), cut.ends[shard], place, sender.timeout_ms)
    everywhere = merge_keyless_entries(common)
    _raise_if_changed(everywhere, description)
    for number in range(shards):
        sender.send(
            pa.array(list(everywhere), pa.binary()),
            pa.array(list(everywhere.values()), pa.binary()),
            np.full(len(everywhere), number, np.int64),
        )


def copy_back(
    changelog: Changelog,
    copy: str,
    move: Move,
    offsets: Mapping[TopicPartition, GroupOffset],
    sender: RecordSender,
) -> None:
    """Copies each partition of the copy to the changelog, followed by the record of the batch it belongs to.

    Args:
        changelog: changelog of the store.
        copy: topic with a partition for each new shard.
        move: the move under way.
        offsets: committed offsets of the group, which say how far the copy is committed.
        sender: sends to the changelog.

    Raises:
        KafkaEosError: if Kafka fails.
    """
    for number in range(move.to):
        source = TopicPartition(copy, number)

        def same(keys: pa.BinaryArray, values: pa.BinaryArray, number: int = number) -> None:
            sender.send(keys, values, np.full(len(keys), number, np.int64))

        _read(changelog, source, offsets[source].offset, same, sender.timeout_ms)
        record = encode_batch(record_of(move.shard_token(number)))
        sender.send(pa.array([layout.BATCH_KEY]), pa.array([record]), np.full(1, number, np.int64))


def _read(changelog: Changelog, tp: TopicPartition, end: int, handle: _Handler, timeout_ms: int) -> None:
    with changelog_client(changelog.kafka, changelog.group_id) as consumer:
        restore(
            ForwardingTarget(handle),
            tp,
            end,
            ChangelogReader(consumer, tp),
            deadline=Deadline.after_ms(timeout_ms),
        )


def _raise_if_changed(everywhere: Mapping[bytes, bytes], description: Description) -> None:
    if everywhere.get(META_KEY) != description.to_json():
        raise ChangelogError(
            "the description of the store changed while it was read.",
            fix="stop the query, then run the command again.",
        )
