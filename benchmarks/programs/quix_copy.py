"""Copies a topic in Quix Streams.

Arguments: bootstrap servers, topic to read, topic to write, consumer group, state directory, processing
guarantee, compression.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from quixstreams import Application

_told = False


def first(value: bytes) -> bytes:
    global _told
    if not _told:
        _told = True
        print(f"FIRST {time.time():.3f}", flush=True)
    return value


def main(
    bootstrap: str, topic_in: str, topic_out: str, group: str, state: str, guarantee: str, compression: str
) -> None:
    application: Any = Application(
        broker_address=bootstrap,
        consumer_group=group,
        processing_guarantee=guarantee,
        auto_offset_reset="earliest",
        commit_interval=1.0,
        state_dir=state,
        producer_extra_config={"compression.type": compression},
    )
    source = application.topic(topic_in, key_deserializer="bytes", value_deserializer="bytes")
    output = application.topic(topic_out, key_serializer="bytes", value_serializer="bytes")
    application.dataframe(source).apply(first).to_topic(output)
    application.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
