"""The batch record in its other forms: as a shard's token in Kafka, and as bytes in the changelog.

The bytes are what each changelog partition holds under `layout.BATCH_KEY`: compact JSON with a version, so
that people can read it and a newer format is refused rather than guessed at.
"""

from __future__ import annotations

import json

from kafka_eos_source.errors import ChangelogError, StateFormatError
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.state.model import BatchRecord

_VERSION = 1


def record_of(token: Token) -> BatchRecord:
    """The batch that a shard's token names."""
    shard = token.shard
    return BatchRecord(
        query_id=token.query_id,
        batch_id=token.batch_id,
        attempt="" if shard is None else shard.task_attempt_id,
        run_id=token.run_id,
        time_ms=0 if shard is None else shard.time_ms,
        event_time_ms=None if shard is None else shard.event_time_ms,
        counts={} if shard is None else shard.counts,
    )


def token_of(batch: BatchRecord) -> Token:
    """As much of a shard's token as `operator.decide` looks at."""
    mark = ShardProgress(batch.attempt, batch.time_ms, batch.event_time_ms, batch.counts)
    return Token("", batch.query_id, batch.run_id, 0, batch.batch_id, "", "", 0, shard=mark)


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
