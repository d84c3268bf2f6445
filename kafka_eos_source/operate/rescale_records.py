"""Copies the records of a store to the partitions of their new shards, and back to the changelog.

Both directions work in slices. A slice is a transaction that ends after some seconds or bytes, so that it is
far shorter than ``transaction.timeout.ms``, whatever the size of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.commit.request import Producer
from kafka_eos_source.errors import ChangelogError
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.rescale_journal import (
    NOTES_KEY,
    CopyJournal,
    Progress,
    decode_notes,
    encode_notes,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.move import EVERY_SHARD, Move, Placement, merge_keyless_entries
from kafka_eos_source.state.changelog.recovery import Reason, WipeNeeded
from kafka_eos_source.state.changelog.restore import ForwardingTarget, restore
from kafka_eos_source.state.changelog.topic import changelog_client
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import BatchRecord, Owner, encode_batch, record_of
from kafka_eos_source.state.reading.frames import described
from kafka_eos_source.state.reading.stores import Changelog, Cut

#: A slice ends when it has lasted this long, or holds this much; it exceeds a limit by one chunk at most.
SLICE_SECONDS = 10.0
SLICE_RECORDS = 1_000_000
SLICE_BYTES = 64 << 20

#: Receives the records between two positions of a partition, and the second position.
_Handler = Callable[[pa.BinaryArray, pa.BinaryArray, int], None]


class RecordSender:
    """Sends records to one topic, each to a given partition, and counts them.

    Attributes:
        topic: the topic.
        records: number of records sent in this slice.
        size_bytes: size of their keys and values.
        state_records: number of records of the state that all runs of the command have sent.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        timeout_ms: int,
        progress: Progress,
        *,
        slice_seconds: float,
        records_before: int = 0,
    ) -> None:
        self._producer = producer
        self._progress = progress
        self.topic = topic
        self.timeout_ms = timeout_ms
        self._slice_seconds = slice_seconds
        self.state_records = self._records_before = records_before
        self.begin_slice()

    def begin_slice(self) -> None:
        """Counts from zero again."""
        self.records, self.size_bytes = 0, 0
        self._since = time.monotonic()

    @property
    def is_slice_full(self) -> bool:
        """Whether the transaction should end here."""
        return (
            self.records >= SLICE_RECORDS
            or self.size_bytes >= SLICE_BYTES
            or time.monotonic() - self._since >= self._slice_seconds
        )

    def send(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        partitions: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        """Sends records of the state, without waiting for their acknowledgement."""
        if len(keys):
            self._send(keys, values, partitions)
            self.state_records += len(keys)

    def send_other(self, key: bytes, value: bytes | None, partition: int) -> None:
        """Sends a record that is not part of the state; a value of None is a tombstone."""
        keys, values = pa.array([key], pa.binary()), pa.array([value], pa.binary())
        self._send(keys, values, np.full(1, partition, np.int64))

    def _send(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        partitions: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        rows = pa.record_batch(
            [keys, values, pa.array(partitions.astype(np.int32))], ["key", "value", "partition"]
        )
        self._producer.send(rows, self.topic, Deadline.after_ms(self.timeout_ms))
        self.records += len(keys)
        self.size_bytes += _size(keys) + _size(values)

    def committed(self, done: int) -> Progress:
        """Records that the slice is committed; returns the progress of the stage.

        Args:
            done: offsets of the stage that are processed now.
        """
        progress = self._progress
        progress.records = self.state_records - self._records_before
        progress.size_bytes += self.size_bytes
        progress.slices += 1
        progress.done = done
        return progress


def copy_to_new_shards(
    changelog: Changelog,
    cut: Cut,
    journal: CopyJournal,
    sender: RecordSender,
    commit_slice: Callable[[CopyJournal, int], None],
) -> CopyJournal:
    """Copies the changelog from where the journal ends, each record to the partition of its new shard.

    The transaction of the last slice is still open at the end.

    Args:
        changelog: changelog of the store.
        cut: how far the changelog is committed.
        journal: what the copy holds already.
        sender: sends to the copy, which has a partition for each new shard.
        commit_slice: commits a slice, given the journal without ``notes``, and the number of offsets done. It
            then begins the next one. The record with the notes is the last one that was sent to partition 0.

    Returns:
        The journal of the complete copy.

    Raises:
        ChangelogError: if the changelog does not describe its store, or changed while it was read.
        KafkaEosError: if Kafka fails.
    """
    description = described(changelog, cut, Deadline.after_ms(sender.timeout_ms))
    if description is None:
        raise ChangelogError(
            f"changelog {cut.topic!r} contains no description of its store, so its keys cannot be moved.",
            fix="only stores of this package's stateful operators can be moved.",
        )
    placement = Placement(description, cut.shards, journal.to)
    done, held = _notes(changelog, sender, journal)
    retention_ms = changelog.delete_retention_ms(Deadline.after_ms(sender.timeout_ms))
    for shard in range(journal.shard, cut.shards):
        start = journal.offset if shard == journal.shard else 0
        since_ms = journal.since_ms if start else time.time_ns() // 1_000_000

        def place(
            keys: pa.BinaryArray,
            values: pa.BinaryArray,
            position: int,
            shard: int = shard,
            since_ms: int = since_ms,
            done: dict[bytes, bytes] = done,
            held: dict[bytes, bytes] = held,
        ) -> None:
            placed = placement.of(keys, shard)
            is_common = placed == EVERY_SHARD
            if bool(is_common.any()):
                mask = pa.array(is_common)
                for key, value in zip(
                    keys.filter(mask).to_pylist(), values.filter(mask).to_pylist(), strict=True
                ):
                    held.pop(key, None)
                    if value is not None:
                        held[key] = value
                keep = pa.array(~is_common)
                keys, values, placed = keys.filter(keep), values.filter(keep), placed[~is_common]
            sender.send(keys, values, placed)
            if sender.is_slice_full:
                sender.send_other(NOTES_KEY, encode_notes(done, held), 0)
                now = replace(
                    journal,
                    shard=shard,
                    offset=position,
                    records=sender.state_records,
                    since_ms=since_ms,
                )
                commit_slice(now, sum(cut.ends[k] for k in range(shard)) + position)

        age = _Age(since_ms, retention_ms)
        _read(
            changelog,
            cut.owner,
            cut.tp(shard),
            start,
            cut.ends[shard],
            place,
            sender.timeout_ms,
            age,
            cut.log_start(shard),
        )
        done = merge_keyless_entries({0: done, 1: held})
        held = {}
    _raise_if_changed(done, description)
    for number in range(journal.to):
        sender.send(
            pa.array(list(done), pa.binary()),
            pa.array(list(done.values()), pa.binary()),
            np.full(len(done), number, np.int64),
        )
    sender.send_other(NOTES_KEY, None, 0)
    return replace(journal, shard=cut.shards, offset=0, records=sender.state_records)


def copy_back(
    changelog: Changelog,
    copy: Mapping[TopicPartition, int],
    filled: Mapping[TopicPartition, int],
    sender: RecordSender,
    commit_slice: Callable[[Mapping[TopicPartition, int], int], None],
) -> None:
    """Copies each partition of the copy to the changelog, from where an earlier run stopped.

    The transaction of the last slice is still open at the end.

    Args:
        changelog: changelog of the store.
        copy: committed end of each partition of the copy.
        filled: offset up to which each partition is in the changelog already.
        sender: sends to the changelog.
        commit_slice: commits a slice, given the offsets up to which the partitions are in the changelog then,
            and the number of offsets done. It then begins the next one.

    Raises:
        KafkaEosError: if Kafka fails.
    """
    now = dict(filled)
    owner = Owner(changelog.application_id, changelog.store, len(copy))
    for source, end in copy.items():

        def same(
            keys: pa.BinaryArray, values: pa.BinaryArray, position: int, source: TopicPartition = source
        ) -> None:
            is_note = pc.equal(keys, pa.scalar(NOTES_KEY))
            if is_note.true_count:
                keys, values = keys.filter(pc.invert(is_note)), values.filter(pc.invert(is_note))
            sender.send(keys, values, np.full(len(keys), source.partition, np.int64))
            now[source] = position
            if sender.is_slice_full:
                commit_slice(now, sum(now.values()))

        _read(changelog, owner, source, now[source], end, same, sender.timeout_ms)
        now[source] = end


def finish_changelog(move: Move, sender: RecordSender) -> None:
    """Sends to each partition of the changelog the record of the batch that its records belong to."""
    owner = Owner(move.token.application_id, move.store, move.to)
    for number in range(move.to):
        sender.send_other(owner.key, encode_batch(record_of(move.shard_token(number))), number)


def _notes(
    changelog: Changelog, sender: RecordSender, journal: CopyJournal
) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Returns the entries of no key that earlier runs found: in complete shards, and in the next one.

    Raises:
        ChangelogError: if another program changed the copy.
    """
    if journal.notes < 0:
        return {}, {}
    found: list[bytes] = []

    def keep(keys: pa.BinaryArray, values: pa.BinaryArray, _position: int) -> None:
        pairs = zip(keys.to_pylist(), values.to_pylist(), strict=True)
        found.extend(value for key, value in pairs if key == NOTES_KEY)

    source = TopicPartition(sender.topic, 0)
    owner = Owner(changelog.application_id, changelog.store, journal.to)
    _read(changelog, owner, source, journal.notes, journal.notes + 1, keep, sender.timeout_ms)
    if not found:
        raise ChangelogError(
            f"the topic {sender.topic!r} with the copy of the state lost a record at offset {journal.notes}.",
            fix="delete the topic, and run the command again; the state itself is not damaged.",
        )
    return decode_notes(found[-1])


@dataclass(frozen=True)
class _Age:
    """How old a copy of a partition is, and how old it may become.

    Attributes:
        since_ms: when it began, ms since the epoch.
        delete_retention_ms: ``delete.retention.ms`` of the partition's topic.
    """

    since_ms: int
    delete_retention_ms: int


def _read(
    changelog: Changelog,
    owner: Owner,
    tp: TopicPartition,
    start: int,
    end: int,
    handle: _Handler,
    timeout_ms: int,
    age: _Age | None = None,
    accepted_start: int = 0,
) -> None:
    """Reads the records of a partition from one offset to another; raises as `restore`.

    Args:
        age: of the copy that continues at ``start``; None = the topic keeps all deletes.
    """
    if start >= end:
        return
    with changelog_client(changelog.kafka) as consumer:
        target = _PositionedTarget(tp, handle, start, 0 if age is None else age.since_ms)
        outcome = restore(
            target,
            tp,
            end,
            ChangelogReader(consumer, tp),
            owner=owner,
            deadline=Deadline.after_ms(timeout_ms),
            delete_retention_ms=None if age is None else age.delete_retention_ms,
            accepted_start=accepted_start,
        )
    if isinstance(outcome, WipeNeeded) and outcome.reason is Reason.TOO_OLD:
        raise ChangelogError(
            f"the copy of partition {tp} cannot go on: {outcome.why}.",
            fix="run the command again, which copies the state from the beginning.",
        )
    if isinstance(outcome, WipeNeeded):
        raise ChangelogError(
            f"partition {tp} lost records while it was copied: {outcome.why}.",
            fix="find out what deletes records of this topic, then run the command again.",
        )


class _PositionedTarget(ForwardingTarget):
    """Passes each chunk on with the position after it; reading begins at an offset.

    Args:
        tp: the partition.
        handle: receives keys, values and position.
        start: offset of the first record; 0 = the first one that the log has.
        since_ms: when the first record of the partition was read, ms since the epoch.
    """

    def __init__(self, tp: TopicPartition, handle: _Handler, start: int, since_ms: int) -> None:
        # `plan_restore` takes a batch to have an offset
        batch = BatchRecord("", 0, "", time_ms=since_ms) if start else None
        super().__init__(lambda *_: None, offsets={tp: start} if start else {}, batch=batch)
        self._tp = tp
        self._handle = handle

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        super().restore_chunk(keys, values, changelog_offsets, batch=batch, done=done)
        if len(keys):
            self._handle(keys, values, changelog_offsets[self._tp])


def _size(column: pa.BinaryArray) -> int:
    return int(pc.sum(pc.binary_length(column)).as_py() or 0)


def _raise_if_changed(everywhere: Mapping[bytes, bytes], description: Description) -> None:
    if everywhere.get(META_KEY) != description.to_json():
        raise ChangelogError(
            "the description of the store changed while it was read.",
            fix="stop the query, then run the command again.",
        )
