"""The batch record as bytes: in a store, and under `layout.BATCH_KEY` in its changelog partition.

Compact JSON with a version, so that people can read it and a newer format is refused rather than guessed at.
"""

from __future__ import annotations

import json

from kafka_eos_source.errors import StateError, StateFormatError
from kafka_eos_source.state.model import BatchRecord

_VERSION = 1


def encode_batch(record: BatchRecord) -> bytes:
    """``record`` as UTF-8 JSON, some 150 bytes."""
    return json.dumps(
        {
            "v": _VERSION,
            "query": record.query_id,
            "run": record.run_id,
            "batch": record.batch_id,
            "attempt": record.attempt,
            "time": record.time_ms,
            "event": record.event_time_ms,
        },
        separators=(",", ":"),
    ).encode()


def decode_batch(data: bytes) -> BatchRecord:
    """The record in ``data``.

    Raises:
        StateFormatError: a newer version wrote it.
        StateError: it is damaged.
    """
    try:
        found = json.loads(data)
        version = found["v"]
        if version == _VERSION:
            return BatchRecord(
                query_id=found["query"],
                run_id=found["run"],
                batch_id=int(found["batch"]),
                attempt=found["attempt"],
                time_ms=int(found["time"]),
                event_time_ms=None if found["event"] is None else int(found["event"]),
            )
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"a batch record is damaged ({error!r}): {data[:200]!r}.",
            fix="delete the local state of this shard: it is restored from its changelog.",
        ) from error
    raise StateFormatError(
        f"a batch record has format {version}; this version of kafka-eos reads format {_VERSION}.",
        fix="run the version of kafka-eos that wrote it, or a newer one.",
    )
