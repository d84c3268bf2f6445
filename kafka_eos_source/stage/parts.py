"""Reads the staged rows of one batch on the driver, as often as the commit is retried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from kafka_eos_source.model import ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import packets
from kafka_eos_source.spark.schema import CHANGES, PARTITION, SEALED
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.sealed_column import is_sealed
from kafka_eos_source.stage.shards import batch_of
from kafka_eos_source.stage.verified_parts import VerifiedParts
from kafka_eos_source.state.batch_record import Owner, encode_batch


class StagedRows:
    """All staged rows of a batch, in the order of its tasks, and the state changes of its operators.

    Attributes:
        rows: number of records that the batch writes, those of changelogs included.
        changelog_rows: number of records that the batch writes to changelogs.
        topics: each topic that the batch writes, with the highest partition that a row names (-1 = none).
        sealed_partitions: partitions of the topic when tasks sealed rows for it; 0 if none did.
        shards: reports of the operators' shards (`stage.shards.reports`).
        end_digest: digest of the batch's entry in Spark's offset log, for `changes`.
    """

    def __init__(
        self,
        folder: StagingFolder,
        batch: str,
        parts: Iterable[StagedPart],
        shards: Sequence[ShardReport] = (),
    ) -> None:
        """Verifies length, checksum and number of rows of every part, before anything is sent to Kafka.

        Args:
            folder, batch, parts: where the rows are.
            shards: reports of the operators' shards.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        parts = list(parts)
        self.shards = tuple(shards)
        self.end_digest = ""
        self._parts = VerifiedParts(folder, batch, parts)
        carriers = sum(len(shard.packets) for part in parts for shard in part.shards or ())
        changes = sum(shard.records + 1 for shard in self.shards if shard.records)  # and the batch record
        self.changelog_rows = changes
        self.rows = sum(part.rows for part in parts) - carriers + changes
        self.topics: Mapping[str, int] = _highest(parts)
        self.sealed_partitions = max((part.sealed_partitions for part in parts), default=0)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the staged Arrow batches of records; can be called again.

        A batch with the column `SEALED` contains sealed batches and their partitions instead of rows.
        """
        for each in self._parts.batches():
            if CHANGES in each.schema.names and each.column(CHANGES).null_count == 0:
                continue
            if is_sealed(each):
                yield each.select([PARTITION, SEALED])
            else:
                yield each.select([name for name in each.schema.names if name not in (CHANGES, SEALED)])

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
                key = Owner(shard.application_id, shard.store, shard.shards).key
                value = encode_batch(batch_of(shard, self.end_digest))
                record = pa.record_batch([pa.array([key]), pa.array([value])], ["key", "value"])
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
