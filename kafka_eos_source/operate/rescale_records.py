"""The records of a store on their way to other shards: from its changelog to the copy, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import ChangelogError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.kafka.transactional import TransactionalProducer
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

_Take = Callable[[pa.BinaryArray, pa.BinaryArray], None]


class Sent:
    """Records on their way to one topic, each to the partition that it is given.

    Attributes:
        records: how many.
    """

    def __init__(self, producer: TransactionalProducer, topic: str, timeout_ms: int) -> None:
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
        if len(keys):
            rows = pa.record_batch(
                [keys, values, pa.array(partitions.astype(np.int32))], ["key", "value", "partition"]
            )
            self._producer.send(rows, self.topic, Deadline.after_ms(self.timeout_ms))
            self.records += len(keys)


def send_placed(changelog: Changelog, cut: Cut, shards: int, sent: Sent) -> None:
    """All that the changelog holds, each record to the partition of its new shard.

    Args:
        changelog: of the store.
        cut: of it: how far it is committed.
        shards: how many there will be.
        sent: on its way to the copy, which has a partition for each.

    Raises:
        ChangelogError: it does not say what the store holds, or changed while it was read.
        KafkaEosError: of Kafka.
    """
    description = described(changelog, cut, Deadline.after_ms(sent.timeout_ms))
    if description is None:
        raise ChangelogError(
            f"changelog {cut.topic!r} does not say what the store holds.",
            fix="only stores of this package's processors can be moved.",
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
            sent.send(keys, values, placed)

        _read(changelog, cut.tp(shard), cut.ends[shard], place, sent.timeout_ms)
    everywhere = merge_keyless_entries(common)
    _check_described(everywhere, description)
    for number in range(shards):
        sent.send(
            pa.array(list(everywhere), pa.binary()),
            pa.array(list(everywhere.values()), pa.binary()),
            np.full(len(everywhere), number, np.int64),
        )


def send_back(
    changelog: Changelog, copy: str, move: Move, offsets: Mapping[TopicPartition, GroupOffset], sent: Sent
) -> None:
    """Each partition of the copy, and behind it the batch that it belongs to.

    Args:
        changelog: of the store.
        copy: topic with a partition for each of the move's shards.
        move: under way.
        offsets: of the group, the copy's among them: how far it is committed.
        sent: on its way to the changelog.

    Raises:
        KafkaEosError: of Kafka.
    """
    for number in range(move.to):
        source = TopicPartition(copy, number)

        def same(keys: pa.BinaryArray, values: pa.BinaryArray, number: int = number) -> None:
            sent.send(keys, values, np.full(len(keys), number, np.int64))

        _read(changelog, source, offsets[source].offset, same, sent.timeout_ms)
        record = encode_batch(record_of(move.shard_token(number)))
        sent.send(pa.array([layout.BATCH_KEY]), pa.array([record]), np.full(1, number, np.int64))


def _read(changelog: Changelog, tp: TopicPartition, end: int, take: _Take, timeout_ms: int) -> None:
    with changelog_client(changelog.kafka, changelog.group_id) as consumer:
        restore(
            ForwardingTarget(take),
            tp,
            end,
            ChangelogReader(consumer, tp),
            deadline=Deadline.after_ms(timeout_ms),
        )


def _check_described(everywhere: Mapping[bytes, bytes], description: Description) -> None:
    if everywhere.get(META_KEY) != description.to_json():
        raise ChangelogError(
            "the store's description changed while it was read.", fix="stop the query; then try again."
        )
