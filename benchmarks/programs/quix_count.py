"""Counts records by key in Quix Streams, exactly once.

Arguments: bootstrap servers, topic to read, topic to write, consumer group, state directory, seconds between
two commits, a JSON object with more properties of ``producer`` and ``consumer``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from quixstreams import Application, State

_told = False


def count(_value: bytes, state: State) -> int:
    global _told
    if not _told:
        _told = True
        print(f"FIRST {time.time():.3f}", flush=True)
    counted: int = state.get("count", 0) + 1
    state.set("count", counted)
    return counted


def main(
    bootstrap: str,
    topic_in: str,
    topic_out: str,
    group: str,
    state_directory: str,
    commit_seconds: str,
    more: str,
) -> None:
    clients = json.loads(more)
    application: Any = Application(
        broker_address=bootstrap,
        consumer_group=group,
        processing_guarantee="exactly-once",
        auto_offset_reset="earliest",
        commit_interval=float(commit_seconds),
        state_dir=state_directory,
        producer_extra_config=clients.get("producer", {}),
        consumer_extra_config=clients.get("consumer", {}),
    )
    source = application.topic(topic_in, key_deserializer="bytes", value_deserializer="bytes")
    output = application.topic(topic_out, key_serializer="bytes", value_serializer="json")
    application.dataframe(source).apply(count, stateful=True).to_topic(output)
    application.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
