"""Reports and parts of shards, for tests of what the commit and the commands do with them."""

from __future__ import annotations

from kafka_eos_source.model import ShardReport, TopicPartition

SHARDS = [TopicPartition("app-counts-changelog", 0), TopicPartition("app-counts-changelog", 1)]


def report(
    batch_id: int, shard: int, *, records: int = 2, skipped: bool = False, sequence: int | None = None
) -> ShardReport:
    """Returns the report of a shard. ``sequence`` None means that of the batch before."""
    return ShardReport(
        tp=SHARDS[shard],
        task_attempt_id=f"{batch_id}-{shard}",
        shards=2,
        query_id="query",
        batch_id=batch_id,
        next_offset=3 * batch_id,
        application_id="app",
        group_id="app",
        store="counts",
        time_ms=5,
        event_time_ms=9,
        records=records,
        sequence=(batch_id if batch_id else -1) if sequence is None else sequence,
        skipped=skipped,
        counts={"late_rows": batch_id},
    )
