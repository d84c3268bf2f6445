"""Records and protocols that the parts of `state` share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.errors import (
    ChangelogError,
    KafkaEosError,
    StateError,
    StateFormatError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Limits of `BatchContext.metrics`, whose sums are part of the token, as JSON. By default, brokers accept
#: up to 4096 bytes of metadata with a committed offset.
_MAX_METRICS = 16
_MAX_METRIC_CHARS = 64


#: The keys of batch records begin with this; the owner of the changelog follows.
BATCH_PREFIX = b"\x00kafka-eos-batch/"


class ShardsBy(Enum):
    """What decides the shard of a key.

    The description of a store contains it (`encoding.describe`), because readers of the state look for a key
    in the shard that it belongs to.
    """

    #: Spark's hash of the grouping columns.
    HASH = "hash"
    #: The partition of the input topic that holds the key's records.
    INPUT_PARTITION = "input partition"


@dataclass(frozen=True)
class StoreIdentity:
    """Identifies the shard whose state a store holds.

    The database contains its identity; opening it with another identity fails.

    Attributes:
        application_id: the query's application.id, as in the names of its changelog topics.
        store: name of the store within the query.
        shard: number of this shard, and of its changelog partition.
        shards: number of shards, fixed when the changelog is created.
        changelog_topic: ``<application.id>-<store>-changelog``.
        topic_id: Kafka's id of that topic; "" if unknown. Another id means that the topic was deleted and
            recreated, and that the local state is invalid.
        cluster_id: Kafka's id of the cluster that has the changelog; "" if it is not compared.
    """

    application_id: str
    store: str
    shard: int
    shards: int
    changelog_topic: str
    topic_id: str = ""
    cluster_id: str = ""

    def agrees_with(self, other: StoreIdentity) -> bool:
        """Whether both can be the same state. A cluster that one does not know is not compared."""
        is_known = self.cluster_id and other.cluster_id
        return self == (other if is_known else replace(other, cluster_id=self.cluster_id))

    def folder(self, root: str | os.PathLike[str]) -> Path:
        """Returns the folder of the shard's database under ``root``, the option ``state.dir``."""
        return Path(root, self.application_id, self.store, str(self.shard))


@dataclass(frozen=True)
class BatchRecord:
    """The micro-batch whose state a store holds, written in the same `WriteBatch` as the state.

    Attributes:
        query_id: Spark's id of the query.
        batch_id: Spark's batch id; -1 for state from before the first batch.
        task_attempt_id: UUID (hex) of the task attempt whose changes are in the changelog. Two attempts at a
            batch may have computed different states; the token in Kafka names the one that is committed.
        run_id: Spark's id of the run.
        time_ms: when the task began, in ms since the epoch; never decreases from batch to batch.
        event_time_ms: largest event time that any shard saw up to and including this batch, in ms since the
            epoch; None if no shard saw one.
        counts: sums of the metrics that the shard's processor counted (`BatchContext.count`) in all batches.
        end_digest: digest of the batch's entry in Spark's offset log, as in the token; "" in pending changes,
            because tasks do not know it.
        log_start: as in `ShardProgress`.
    """

    query_id: str
    batch_id: int
    task_attempt_id: str
    run_id: str = ""
    time_ms: int = 0
    event_time_ms: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)
    end_digest: str = ""
    log_start: int = 0


@dataclass(frozen=True)
class PendingBatch:
    """Changes of one task attempt, which stay in the database unapplied until the token decides.

    Attributes:
        record: record of the batch and task attempt.
        base: batch record of the state to which the changes apply; None for an empty store.
        size_bytes: size of the changes.
    """

    record: BatchRecord
    base: BatchRecord | None
    size_bytes: int


class StateAccess(Protocol):
    """How a processor reads and writes the state of its shard. Reads see the processor's own writes.

    `layout` makes the keys: they are never empty, and their first byte is at least 1. Keys are ordered as
    bytes. Bounds: ``low`` is included, ``high`` is excluded, None is unbounded.
    """

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of the key; None if it has no value."""

    def put(self, key: bytes, value: bytes | None) -> None:
        """Writes a value; None deletes the key."""

    def delete(self, key: bytes) -> None:
        """Deletes the key."""

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        """Deletes all keys between the bounds."""

    def range(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and values between the bounds, in key order."""

    def prefix_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys with this prefix and their values, in key order."""

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Returns the value of each key, null where it has none. Keys may repeat."""

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Writes the values; null deletes the key. If a key repeats, its last value wins."""


@dataclass
class BatchContext:
    """The micro-batch that a processor works on: ids, times and metrics.

    Attributes:
        batch_id: Spark's batch id.
        shard: number of the shard.
        shards: number of shards of the operator.
        first: whether no batch was ever committed to this state.
        time_ms: processing time of the batch in ms since the epoch, the same for all its rows and timers.
        event_time_ms: largest event time that *any* shard saw in the batches before, in ms since the epoch;
            None if no shard saw one. The watermark of the batch is this time minus the operator's delay.
        seen_event_time_ms: set by the processor: largest event time among its own rows of this batch.
        due_ms: earliest processing time that the processor passed to `request_batch_at`; None if it passed
            none.
        metrics: what the processor counted in this batch, by name (``late_rows``). The sums over all batches
            commit with the state, so a batch that runs twice is counted once.
        event_time_limit_ms: latest event time that may advance the watermark, in ms since the epoch; None if
            every event time may. Later ones are not part of ``seen_event_time_ms``.
        shards_by: what decides the shard of a key.
    """

    batch_id: int
    shard: int
    shards: int
    first: bool
    time_ms: int
    event_time_ms: int | None = None
    seen_event_time_ms: int | None = None
    due_ms: int | None = None
    metrics: dict[str, int] = field(default_factory=dict)
    event_time_limit_ms: int | None = None
    shards_by: ShardsBy = ShardsBy.HASH

    def count(self, metric: str, more: int) -> None:
        """Adds to a metric. Only a few metrics with short names fit, because the token contains their sums.

        Raises:
            StateError: if there are too many metrics, or the name is too long.
        """
        is_new = metric not in self.metrics
        if is_new and (len(self.metrics) >= _MAX_METRICS or len(json.dumps(metric)) - 2 > _MAX_METRIC_CHARS):
            raise StateError(
                f"a processor counts metric {metric[:80]!r} in addition to {len(self.metrics)} others; "
                f"expected up to {_MAX_METRICS} metrics with names of up to {_MAX_METRIC_CHARS} characters "
                "(as JSON).",
                fix="count fewer metrics; keep counts per key in the state.",
            )
        self.metrics[metric] = self.metrics.get(metric, 0) + more

    def request_batch_at(self, time_ms: int) -> None:
        """Requests a micro-batch at or soon after a processing time, even if no records arrive until then.

        A processor calls this in *every* batch after which something in its state waits for a processing
        time: a timer, a value that expires, a result that is held back for a limited time. The requests of a
        batch replace those of the batch before. The earliest one commits in the token, and an idle source
        starts an empty micro-batch when it is due (`plan.due`). That batch may come late, and its processing
        time may be earlier than the requested one if the clocks of two hosts differ. So the processor still
        compares times, and requests again what is not due yet.

        Args:
            time_ms: processing time in ms since the epoch, as in `time_ms`. The past means: at once.
        """
        self.due_ms = time_ms if self.due_ms is None else min(self.due_ms, time_ms)

    def watermark_ms(self, delay_ms: int) -> int | None:
        """Returns the watermark of the batch; None if no shard has seen an event time.

        Args:
            delay_ms: the operator's delay.
        """
        return None if self.event_time_ms is None else self.event_time_ms - delay_ms


class ShardProcessor(Protocol):
    """The part of an operator that works on one shard. The driver creates it and pickles it to the tasks."""

    @property
    def output(self) -> pa.Schema:
        """Arrow schema of the output rows."""

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Processes all rows of this shard in this micro-batch: changes the state, yields output rows.

        The operator also calls this without rows, because time alone may fire timers and close windows.
        """


# ---------------------------------------- batch records
#
# Every transaction that changes a shard writes a batch record as the last of its records. The *key* names the
# owner of the changelog: application, store and number of shards. Two owners can choose the same topic,
# because the topic's name joins the names of application and store with a dash; compaction keeps the newest
# batch record of each, so both are found. The *value* is compact JSON with a version, so that people can read
# it and an older kafka-eos refuses a newer format instead of misreading it.

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
            f"`kafka-eos state rescale {own.application_id} --store {own.store} --shards {own.shards} "
            "--yes`, which moves the state.",
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
