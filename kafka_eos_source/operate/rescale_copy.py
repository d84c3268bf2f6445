"""Copies the records of a store to the partitions of their new shards, and back to the changelog.

Both directions work in slices. A slice is a transaction that ends after some seconds or bytes, so that it is
far shorter than ``transaction.timeout.ms``, whatever the size of the state.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.commit.request import Producer
from kafka_eos_source.errors import ChangelogError
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe import wording
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
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


# -- the journal: what a rescale has committed so far, so that it continues after a kill
#
# Each *slice* of a copy is one transaction: its records, and the journal in the metadata of the group's
# offsets on the copy topic. So the journal is never ahead of the records, nor behind them.

#: Key of the record in partition 0 of the copy with the entries that belong to no key.
NOTES_KEY = b"\x00kafka-eos-rescale"

_VERSION = 1
_FILLED = "filled"


@dataclass(frozen=True)
class CopyJournal:
    """How far the changelog is copied. The tokens of the query are still in place.

    Attributes:
        cut: `digest` of the state that is copied. If the query has run meanwhile, the copy starts again.
        to: new number of shards.
        copy_id: Kafka's id of the copy topic.
        shard: shard that is being copied; all shards before it are complete.
        offset: offset in its changelog from which to continue.
        notes: offset of the record under `NOTES_KEY`; -1 = there is none yet.
        records: number of records in the copy.
        since_ms: when the copy of that shard began, ms since the epoch. Compaction may have removed deletes
            of what was copied, if that is too long ago.
    """

    cut: str
    to: int
    copy_id: str
    shard: int = 0
    offset: int = 0
    notes: int = -1
    records: int = 0
    since_ms: int = 0

    def encode(self) -> str:
        """Returns the journal as offset metadata. No reader takes it for a token."""
        return json.dumps({"rescale": _VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def decode(cls, metadata: str) -> CopyJournal | None:
        """Returns the journal in an offset's metadata; None if there is none that this version can read."""
        try:
            found = parse_json(metadata.rstrip("\0"))
            if found.pop("rescale") == _VERSION:
                journal = cls(**found)
                types = [str if name in ("cut", "copy_id") else int for name in asdict(journal)]
                if [type(value) for value in asdict(journal).values()] == types:
                    return journal
        except SHAPE_ERRORS:
            pass  # another text; the copy then begins anew, which is always correct
        return None

    def continues(self, cut: Cut, to: int, copy_id: str) -> bool:
        """Whether the copy holds a part of exactly this state, for this number of shards."""
        return (self.cut, self.to, self.copy_id) == (digest(cut), to, copy_id)


def digest(cut: Cut) -> str:
    """Returns a digest of a committed state: offsets, and the task attempts that they belong to."""
    batches = {
        shard: None if batch is None else [batch.query_id, batch.batch_id, batch.task_attempt_id]
        for shard, batch in cut.batches.items()
    }
    told = json.dumps([cut.topic_id, sorted(cut.ends.items()), sorted(batches.items())])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def with_filled(move: Move, topic_id: str, offset: int) -> str:
    """Returns the move record with the offset up to which a partition of the copy is in the new changelog."""
    return json.dumps({**parse_json(move.encode()), _FILLED: [topic_id, offset]}, separators=(",", ":"))


def filled_until(metadata: str, topic_id: str) -> int:
    """Returns the offset that `with_filled` wrote for this changelog topic; 0 if there is none."""
    try:
        found, offset = parse_json(metadata.rstrip("\0"))[_FILLED]
        return int(offset) if found == topic_id else 0
    except SHAPE_ERRORS:
        return 0


def encode_notes(done: Mapping[bytes, bytes], running: Mapping[bytes, bytes]) -> bytes:
    """Returns the value under `NOTES_KEY`: entries of no key, of complete shards and of the running one."""
    return json.dumps([{k.hex(): v.hex() for k, v in each.items()} for each in (done, running)]).encode()


def decode_notes(value: bytes) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Returns what `encode_notes` encoded.

    Raises:
        ChangelogError: if another program wrote the value.
    """
    try:
        done, running = (
            {bytes.fromhex(k): bytes.fromhex(v) for k, v in each.items()} for each in parse_json(value)
        )
        return done, running
    except SHAPE_ERRORS as error:
        raise ChangelogError(
            f"the notes in the copy of the changelog are damaged ({error!r}): {value[:80]!r}.",
            fix="delete that topic, and run the command again; the state itself is not damaged.",
        ) from error


@dataclass
class Progress:
    """Progress of one stage of a rescale, in this run of the command.

    Attributes:
        stage: ``"copy"`` or ``"fill"``.
        done, total: offsets that are processed, and all of them. Compacted offsets have no record.
        records, size_bytes: records that this run has committed, and the size of their keys and values.
        slices: number of transactions that this run has committed.
    """

    stage: str
    done: int
    total: int
    records: int = 0
    size_bytes: int = 0
    slices: int = 0
    _done_before: int = field(init=False)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._done_before, self._since = self.done, time.monotonic()

    @property
    def seconds(self) -> float:
        """Duration of the stage so far."""
        return time.monotonic() - self._since

    @property
    def left_seconds(self) -> float | None:
        """Estimated remaining duration; None = nothing was processed yet."""
        moved = self.done - self._done_before
        return None if moved <= 0 else self.seconds * (self.total - self.done) / moved

    def __str__(self) -> str:
        share = 100 if self.total <= 0 else 100 * self.done // self.total
        left = self.left_seconds
        rest = "" if left is None or self.done >= self.total else f", about {wording.duration(left)} left"
        return (
            f"{self.stage}: {share} %, {self.records:,} records ({wording.size(self.size_bytes)}) in "
            f"{self.slices} transaction(s){rest}"
        )
