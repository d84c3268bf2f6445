"""Stages the rows of one task attempt as one part: in its commit message if they are few, else in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import packets
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.arrow import CHANGES
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.meter import TaskMeter
from kafka_eos_source.stage.sealing import Sealer, SealingPlan, filled, records_in, sealed_schema
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
    sealing: SealingPlan | None = None,
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
        sealing: how to encode rows as record batches; None = they are staged as rows.

    Returns:
        The part, for the commit message.

    Raises:
        InvalidRecordError: if ``batches`` raises it for a row, or a record is too large to be sealed.
        StateError: if the column with state changes of an operator contains anything else.
        UnavailableError: if the folder cannot be written, for example because the disk is full.
        InvalidOptionError: if the folder is not shared with the driver.
    """
    sealer = None
    if sealing is not None:
        schema = sealed_schema(schema)
        sealer = Sealer(sealing, schema)
    part = PartStage(schema, folder, batch, inline_bytes)
    meter = TaskMeter(topic)
    shards: list[ShardPart] | None = [] if CHANGES in schema.names else None
    taken = 0
    try:
        for each in batches:
            if not each.num_rows:
                continue
            taken += each.num_rows
            if shards is not None and each.column(CHANGES).null_count == 0:
                shards += shard_parts(each)
                with meter.staging():
                    part.write(each if sealer is None else filled(each, schema))
                continue
            meter.add(each)
            with meter.staging():
                for ready in (each,) if sealer is None else sealer.add(each):
                    part.write(ready, records_in(ready))
        with meter.staging():
            for ready in () if sealer is None else sealer.finish():
                part.write(ready, records_in(ready))
        failpoints.reach("stage.before_close")
        with meter.staging():
            staged = part.finish()
        _check_count(staged, taken)
    except BaseException:
        part.discard()
        raise
    failpoints.reach("stage.after_close")
    return replace(
        staged,
        topics=tuple(sorted(meter.highest.items())),
        run_id=run_id,
        shards=None if shards is None else tuple(shards),
        measured=meter.figures(),
        sealed_partitions=0 if sealing is None else sealing.partitions,
    )


def _check_count(staged: StagedPart, taken: int) -> None:
    """Checks that sealing has neither lost nor doubled a row."""
    if staged.rows != taken:
        raise AssertionError(f"the task received {taken} rows, but staged {staged.rows}")


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
