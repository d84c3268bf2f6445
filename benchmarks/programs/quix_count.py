"""Counts records by key in Quix Streams, exactly once.

Arguments: bootstrap servers, topic to read, topic to write, consumer group, state directory.
"""

from __future__ import annotations

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


def main(bootstrap: str, topic_in: str, topic_out: str, group: str, state_directory: str) -> None:
    application: Any = Application(
        broker_address=bootstrap,
        consumer_group=group,
        processing_guarantee="exactly-once",
        auto_offset_reset="earliest",
        commit_interval=1.0,
        state_dir=state_directory,
    )
    source = application.topic(topic_in, key_deserializer="bytes", value_deserializer="bytes")
    output = application.topic(topic_out, key_serializer="bytes", value_serializer="json")
    application.dataframe(source).apply(count, stateful=True).to_topic(output)
    application.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
