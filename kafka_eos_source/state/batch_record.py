"""Batch records: whose state a changelog partition holds, and of which micro-batch.

Every transaction that changes a shard writes one as the last of its records. The *key* names the owner of the
changelog: application, store and number of shards. Two owners can choose the same topic, because the topic's
name joins the names of application and store with a dash; compaction keeps the newest batch record of each,
so both are found. The *value* is compact JSON with a version, so that people can read it and an older
kafka-eos refuses a newer format instead of misreading it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kafka_eos_source.errors import ChangelogError, KafkaEosError, StateFormatError, StateMismatchError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.state.layout import BATCH_PREFIX
from kafka_eos_source.state.model import BatchRecord

_VERSION = 1


@dataclass(frozen=True)
class Owner:
    """Whose state a changelog holds.

    Attributes:
        application_id: the query's ``application.id``.
        store: name of the store within the query.
        shards: number of shards of the operator.
    """

    application_id: str
    store: str
    shards: int

    @property
    def key(self) -> bytes:
        """Key of the owner's batch records. No name contains a slash, because Kafka allows none in topics."""
        return BATCH_PREFIX + f"{self.application_id}/{self.store}/{self.shards}".encode()

    @classmethod
    def of_key(cls, key: bytes) -> Owner:
        """Returns the owner that the key of a batch record names.

        Raises:
            ChangelogError: if another program wrote the record.
        """
        try:
            application_id, store, shards = key.removeprefix(BATCH_PREFIX).decode().split("/")
            return cls(application_id, store, int(shards))
        except ValueError as error:
            raise ChangelogError(
                f"the changelog has a batch record with the key {key!r}, which kafka-eos did not write.",
                fix="find out which other program writes to the changelog topic, and stop it.",
            ) from error

    def __str__(self) -> str:
        shards = f"{self.shards} shard{'' if self.shards == 1 else 's'}"
        return f"store {self.store!r} of application.id {self.application_id!r} with {shards}"


def foreign_state(tp: TopicPartition, found: Owner, own: Owner) -> KafkaEosError:
    """Returns the error for a changelog that holds the state of another owner.

    Args:
        tp: partition of the changelog.
        found: the owner that a batch record names.
        own: the owner that was expected.
    """
    message = f"the changelog {tp} holds the state of {found}; expected the state of {own}."
    if (found.application_id, found.store) == (own.application_id, own.store):
        return StateMismatchError(
            message,
            fix=f"set the operator's number of shards to {found.shards} again; or stop the query and run "
            f"`kafka-eos state rescale --shards {own.shards} --yes`, which moves the state.",
        )
    return ChangelogError(
        f"{message} The names of application and store, joined with a dash, make the same topic name for "
        "both. Nothing was written to the topic.",
        fix=f"keep the topic {tp.topic!r}, which belongs to {found}. Choose another store name for the other "
        "operator; if its query has committed batches, start it with a new checkpoint and a new "
        "application.id, so that its state is computed from the input again.",
    )


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
        end_digest=token.end_digest,
        log_start=0 if shard is None else shard.log_start,
    )


def encode_batch(record: BatchRecord) -> bytes:
    """Returns the value of a batch record."""
    return json.dumps(
        {
            "v": _VERSION,
            "query": record.query_id,
            "batch": record.batch_id,
            "attempt": record.task_attempt_id,
            "run": record.run_id,
            "time": record.time_ms,
            "event": record.event_time_ms,
            "end": record.end_digest,
            **({"log_start": record.log_start} if record.log_start else {}),
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
        fields = parse_json(value)
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
            end_digest=str(fields["end"]),
            log_start=int(fields.get("log_start", 0)),
        )
    except SHAPE_ERRORS as error:
        raise ChangelogError(
            f"the changelog's batch record is damaged ({error!r}): {value[:200]!r}",
            fix="find out which other program writes to the changelog topic, and stop it.",
        ) from error
