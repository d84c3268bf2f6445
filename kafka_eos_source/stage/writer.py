"""Stages the rows of one task attempt as one part: in its commit message if they are few, else in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import packets
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.schema import CHANGES, PARTITION, TOPIC
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.spool import PartStage


def stage(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    *,
    folder: StagingFolder | None,
    batch: str,
    inline_bytes: int,
    run_id: str = "",
    topic: str | None = None,
) -> StagedPart:
    """Stages the batches of one task attempt.

    Args:
        batches: batches with the staged columns, from `stage.rows`.
        schema: schema of the staged columns.
        folder: folder for a file; None = the rows always stay in the commit message.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size of a part that stays in the commit message.
        run_id: id of this run of the query.
        topic: option ``topic``; None if the rows have a topic.

    Returns:
        The part, for the commit message.

    Raises:
        InvalidRecordError: if ``batches`` raises it for a row.
        StateError: if the column with state changes of an operator contains anything else.
        UnavailableError: if the folder cannot be written, for example because the disk is full.
        InvalidOptionError: if the folder is not shared with the driver.
    """
    part = PartStage(schema, folder, batch, inline_bytes)
    topics: dict[str, int] = {}
    shards: list[ShardPart] | None = [] if CHANGES in schema.names else None
    try:
        for each in batches:
            if each.num_rows:
                part.write(each)
                if shards is not None and each.column(CHANGES).null_count == 0:
                    shards += shard_parts(each)
                    continue
                # the driver checks the topics before it begins the transaction
                for name, partition in highest_partitions(each, topic).items():
                    topics[name] = max(partition, topics.get(name, partition))
        failpoints.reach("stage.before_close")
        staged = part.finish()
    except BaseException:
        part.discard()
        raise
    failpoints.reach("stage.after_close")
    return replace(
        staged,
        topics=tuple(sorted(topics.items())),
        run_id=run_id,
        shards=None if shards is None else tuple(shards),
    )


def shard_parts(batch: pa.RecordBatch) -> list[ShardPart]:
    """Returns the state changes in a staged batch of packets, by shard and task attempt."""
    numbers: dict[tuple[TopicPartition, str], list[int]] = {}
    reports: dict[tuple[TopicPartition, str], ShardReport] = {}
    for packet in packets(batch.column(CHANGES)):
        numbers.setdefault((packet.tp, packet.task_attempt_id), []).append(packet.number)
        if packet.report is not None:
            reports[packet.tp, packet.task_attempt_id] = packet.report
    return [
        ShardPart(tp, task_attempt_id, tuple(found), reports.get((tp, task_attempt_id)))
        for (tp, task_attempt_id), found in numbers.items()
    ]


def highest_partitions(batch: pa.RecordBatch, topic: str | None) -> dict[str, int]:
    """Returns each topic of a staged batch with the highest partition in its rows; -1 if no row has one."""
    partition = (
        batch.column(PARTITION) if PARTITION in batch.schema.names else pa.nulls(batch.num_rows, pa.int32())
    )
    if topic is not None:
        highest = pc.max(partition).as_py()
        return {topic: -1 if highest is None else highest}
    table = pa.table({TOPIC: batch.column(TOPIC), PARTITION: pc.fill_null(partition, -1)})
    maxima = table.group_by(TOPIC).aggregate([(PARTITION, "max")])
    return dict(zip(maxima[TOPIC].to_pylist(), maxima[f"{PARTITION}_max"].to_pylist(), strict=True))
