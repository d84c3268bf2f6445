"""The batch record as bytes: what each changelog partition holds under `layout.BATCH_KEY`.

Compact JSON with a version, so that people can read it and a newer format is refused rather than guessed at.
"""

from __future__ import annotations

import json

from kafka_eos_source.errors import ChangelogError, StateFormatError
from kafka_eos_source.state.model import BatchRecord

_VERSION = 1


def encode_batch(record: BatchRecord) -> bytes:
    """The value under `layout.BATCH_KEY`: compact JSON with a version."""
    return json.dumps(
        {
            "v": _VERSION,
            "query": record.query_id,
            "batch": record.batch_id,
            "attempt": record.attempt,
            "run": record.run_id,
            "time": record.time_ms,
            "event": record.event_time_ms,
            **({"counts": dict(record.counts)} if record.counts else {}),
        },
        separators=(",", ":"),
    ).encode()


def decode_batch(value: bytes) -> BatchRecord:
    """`encode_batch` undone.

    Raises:
        StateFormatError: it was written by a newer version of kafka-eos.
        ChangelogError: it is damaged, or not ours.
    """
    try:
        found = json.loads(value)
        if found["v"] > _VERSION:
            raise StateFormatError(
                f"the changelog's batch record has format {found['v']}; this version of kafka-eos reads "
                f"format {_VERSION}: {value[:200]!r}",
                fix="run the query with the newer version of kafka-eos that wrote it.",
            )
        event = found["event"]
        return BatchRecord(
            query_id=str(found["query"]),
            batch_id=int(found["batch"]),
            attempt=str(found["attempt"]),
            run_id=str(found["run"]),
            time_ms=int(found["time"]),
            event_time_ms=None if event is None else int(event),
            counts={str(name): int(number) for name, number in found.get("counts", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChangelogError(
            f"the changelog's batch record is damaged ({error!r}): {value[:200]!r}",
            fix="find out which other program writes to the changelog topic.",
        ) from error
