"""A query with sinks outside Kafka, as several tests run it."""

from __future__ import annotations

from typing import Any


def rows(first: int, end: int) -> list[str]:
    return [f"{row:05d}" for row in range(first, end)]


LOOP = "integration.chaos.loop"


def without_spark(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec for `LOOP`, which starts in one second instead of ten."""
    sink = plan["sink"]["options"]
    source = plan["sources"][0]["options"]
    return {"source": source, "sink": sink, "checkpoint": sink["checkpointLocation"]}


def spec(broker: str, source: str, sink: str, checkpoint: str, limit: int, **more: Any) -> dict[str, Any]:
    reader = {"kafka.bootstrap.servers": broker, "subscribe": source, "startingOffsets": "earliest"}
    return {
        "sources": [{"format": "kafka-eos", "options": {**reader, "maxOffsetsPerTrigger": str(limit)}}],
        "sink": {
            "format": "kafka-eos",
            "options": {"kafka.bootstrap.servers": broker, "topic": sink, "checkpointLocation": checkpoint},
        },
        **more,
    }
