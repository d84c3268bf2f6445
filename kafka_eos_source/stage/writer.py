"""One task attempt's rows into one staged part: in its message while they are few, else in a file."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import unpack
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.schema import CHANGES, PARTITION, TOPIC
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.spool import Spool


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
    """Writes every batch of one task attempt, and says what was written.

    Args:
        batches: of columns `schema`, as `stage.rows` makes them.
        schema: the staged columns.
        folder: where a file goes; None = all stays in the message.
        batch: the micro-batch's name in the folder.
        inline_bytes: largest part that travels inside the commit message.
        run_id: of the streaming run.
        topic: the ``topic`` option, when the rows do not say.

    Raises:
        InvalidRecordError: from ``batches``.
        StateError: what is in the column of an operator's changes is no packet.
        UnavailableError: the folder cannot be written (full, read-only).
        InvalidOptionError: the folder is not the driver's.
    """
    spool = Spool(folder, batch, inline_bytes)
    rows = 0
    topics: dict[str, int] = {}
    shards: list[ShardPart] | None = [] if CHANGES in schema.names else None
    try:
        with pa.ipc.new_stream(pa.PythonFile(spool, mode="w"), schema) as stream:
            for each in batches:
                if each.num_rows:
                    stream.write_batch(each)
                    rows += each.num_rows
                    if shards is not None and each.column(CHANGES).null_count == 0:
                        shards += shard_parts(each)
                        continue
                    # so that the driver can check them before it begins
                    for name, partition in highest_partitions(each, topic).items():
                        topics[name] = max(partition, topics.get(name, partition))
        failpoints.reach("stage.before_close")
        spool.finish()
    except BaseException:
        spool.discard()
        raise
    failpoints.reach("stage.after_close")
    return StagedPart(
        name=spool.name,
        rows=rows,
        size_bytes=spool.size,
        crc32=spool.crc32,
        topics=tuple(sorted(topics.items())),
        inline=spool.inline(),
        run_id=run_id,
        shards=None if shards is None else tuple(shards),
    )


def shard_parts(packets: pa.RecordBatch) -> list[ShardPart]:
    """What a staged batch of packets brings, by shard and attempt."""
    numbers: dict[tuple[TopicPartition, str], list[int]] = {}
    reports: dict[tuple[TopicPartition, str], ShardReport] = {}
    for each in packets.column(CHANGES):
        packet = unpack(memoryview(each.as_buffer()))
        numbers.setdefault((packet.tp, packet.attempt), []).append(packet.number)
        if packet.report is not None:
            reports[packet.tp, packet.attempt] = packet.report
    return [
        ShardPart(tp, attempt, tuple(found), reports.get((tp, attempt)))
        for (tp, attempt), found in numbers.items()
    ]


def highest_partitions(batch: pa.RecordBatch, topic: str | None) -> dict[str, int]:
    """Each output topic of a staged batch, with the highest partition that a row names (-1 = none does)."""
    partition = (
        batch.column(PARTITION) if PARTITION in batch.schema.names else pa.nulls(batch.num_rows, pa.int32())
    )
    if topic is not None:
        highest = pc.max(partition).as_py()
        return {topic: -1 if highest is None else highest}
    table = pa.table({TOPIC: batch.column(TOPIC), PARTITION: pc.fill_null(partition, -1)})
    maxima = table.group_by(TOPIC).aggregate([(PARTITION, "max")])
    return dict(zip(maxima[TOPIC].to_pylist(), maxima[f"{PARTITION}_max"].to_pylist(), strict=True))
