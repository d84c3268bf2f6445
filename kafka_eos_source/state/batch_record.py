"""Converts batch records: from a shard's token, and from and to the bytes in the changelog.

Each changelog partition holds these bytes under `layout.BATCH_KEY`. They are compact JSON with a version, so
that people can read them and an older kafka-eos refuses a newer format instead of misreading it.
"""

from __future__ import annotations

import json

from kafka_eos_source.errors import ChangelogError, StateFormatError
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.state.model import BatchRecord

_VERSION = 1


def record_of(token: Token) -> BatchRecord:
    """Returns the record of the batch that a shard's token names."""
    shard = token.shard
    return BatchRecord(
        query_id=token.query_id,
        batch_id=token.batch_id,
        task_attempt_id="" if shard is None else shard.task_attempt_id,
        run_id=token.run_id,
        time_ms=0 if shard is None else shard.time_ms,
        event_time_ms=None if shard is None else shard.event_time_ms,
        counts={} if shard is None else shard.counts,
    )


def encode_batch(record: BatchRecord) -> bytes:
    """Returns the value under `layout.BATCH_KEY`: compact JSON with a version."""
    return json.dumps(
        {
            "v": _VERSION,
            "query": record.query_id,
            "batch": record.batch_id,
            "attempt": record.task_attempt_id,
            "run": record.run_id,
            "time": record.time_ms,
            "event": record.event_time_ms,
            **({"counts": dict(record.counts)} if record.counts else {}),
        },
        separators=(",", ":"),
    ).encode()


def decode_batch(value: bytes) -> BatchRecord:
    """Returns the batch record that `encode_batch` wrote.

    Raises:
        StateFormatError: if a newer version of kafka-eos wrote it.
        ChangelogError: if it is damaged, or another program wrote it.
    """
    try:
        fields = json.loads(value)
        if fields["v"] > _VERSION:
            raise StateFormatError(
                f"the changelog's batch record has format {fields['v']}; this version of kafka-eos reads "
                f"format {_VERSION}: {value[:200]!r}",
                fix="run the query with the newer version of kafka-eos that wrote it.",
            )
        event = fields["event"]
        return BatchRecord(
            query_id=str(fields["query"]),
            batch_id=int(fields["batch"]),
            task_attempt_id=str(fields["attempt"]),
            run_id=str(fields["run"]),
            time_ms=int(fields["time"]),
            event_time_ms=None if event is None else int(event),
            counts={str(name): int(number) for name, number in fields.get("counts", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChangelogError(
            f"the changelog's batch record is damaged ({error!r}): {value[:200]!r}",
            fix="find out which other program writes to the changelog topic, and stop it.",
        ) from error
