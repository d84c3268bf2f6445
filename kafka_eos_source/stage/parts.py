"""Reads the staged rows of one batch on the driver, as often as the commit is retried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from kafka_eos_source.model import ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import packets
from kafka_eos_source.spark.schema import CHANGES
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.shards import batch_of
from kafka_eos_source.stage.verified_parts import VerifiedParts
from kafka_eos_source.state.batch_record import encode_batch
from kafka_eos_source.state.layout import BATCH_KEY


class StagedRows:
    """All staged rows of a batch, in the order of its tasks, and the state changes of its operators.

    Attributes:
        rows: number of records that the batch writes.
        topics: each topic that the batch writes, with the highest partition that a row names (-1 = none).
        shards: reports of the operators' shards (`stage.shards.reports`).
    """

    def __init__(
        self,
        folder: StagingFolder,
        batch: str,
        parts: Iterable[StagedPart],
        shards: Sequence[ShardReport] = (),
    ) -> None:
        """Verifies length, checksum and number of rows of every part, before anything is sent to Kafka.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        parts = list(parts)
        self.shards = tuple(shards)
        self._parts = VerifiedParts(folder, batch, parts)
        carriers = sum(len(shard.packets) for part in parts for shard in part.shards or ())
        changes = sum(shard.records + 1 for shard in self.shards if shard.records)  # and the batch record
        self.rows = sum(part.rows for part in parts) - carriers + changes
        self.topics: Mapping[str, int] = _highest(parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the staged Arrow batches of records; can be called again."""
        for each in self._parts.batches():
            if CHANGES not in each.schema.names:
                yield each
            elif each.column(CHANGES).null_count:
                yield each.drop_columns([CHANGES])

    def changes(self) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yields the state changes of operators, by changelog partition; can be called again.

        The columns are ``key``, ``value`` (null = tombstone) and ``partition``. The last change of each
        partition is its batch record, which shows readers of the changelog which batch the state belongs to.
        """
        if not self.shards:
            return
        for each in self._parts.batches(with_changes=True):
            if each.column(CHANGES).null_count == 0:
                for packet in packets(each.column(CHANGES)):
                    for batch in packet.batches():
                        yield packet.tp, _of_partition(batch, packet.tp.partition)
        for shard in self.shards:
            if shard.records:
                record = pa.record_batch(
                    [pa.array([BATCH_KEY]), pa.array([encode_batch(batch_of(shard))])], ["key", "value"]
                )
                yield shard.tp, _of_partition(record, shard.tp.partition)


def _of_partition(batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    return batch.append_column("partition", pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows))


def _highest(parts: Iterable[StagedPart]) -> dict[str, int]:
    topics: dict[str, int] = {}
    for part in parts:
        for topic, partition in part.topics:
            topics[topic] = max(partition, topics.get(topic, partition))
        for shard in part.shards or ():
            topics[shard.tp.topic] = max(shard.tp.partition, topics.get(shard.tp.topic, -1))
    return topics
