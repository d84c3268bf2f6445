"""Opens a store with the state that Kafka holds: catches local state up, or replaces it, at most once.

What becomes of local state::

    local state                                      decision
    ───────────────────────────────────────────────  ─────────────────────────────────────────────
    none                                             read the whole changelog
    a batch, but no changelog offset                 wipe: no-offset
    offset == committed offset                       read nothing, however old the state is
    offset > committed offset                        wipe: out-of-range (another topic, or a truncated one)
    offset < start of the log                        wipe: out-of-range (deletes may be missing)
    offset behind, last batch long ago               wipe: too-old (deletes may be missing, KIP-1259)
    offset behind, written far in the future         wipe: too-old (the clock was set back, so nobody knows)
    offset behind                                    read from the offset on

The functions that decide this are pure. The age of a store counts from when it may have begun to miss
deletes: from its last batch, or, if a restore was interrupted, from the start of that restore. Until the
restore is finished, the batch record carries the start time.

The times of batches never go back. So if the clock of one host was ahead once, even for a single batch, the
times of all later batches are in the future until the other clocks are there. The age therefore counts from
the time at which the store was written, if that is earlier.

`open_restored` does it::

    open ──────▶ restore ──Restored──▶ ready
     │ damaged     │ WipeNeeded, or damage found during the restore
     ▼             ▼
    remove or set aside, once ──▶ open, restore ──Restored──▶ ready
                                               └──anything else──▶ error, so that there is no loop

Wherever there is no store, a snapshot may take its place, at most twice. If that one cannot be used either,
it is removed, and an empty store is restored from the whole changelog.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NoReturn

from kafka_eos_source.errors import ChangelogError, KafkaEosError, StateCorruptedError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)

#: Part of ``delete.retention.ms`` that a store may be old. Half of it, because clocks differ and the restore
#: itself takes time.
MAX_AGE = 0.5
#: The same part, at the last read of a restore. Compaction keeps every delete up to then.
MAX_AGE_AT_END = 0.9


class Reason(str, Enum):
    """Why a store reads its changelog; the value of the metric ``restore-reason``.

    `NO_OFFSET` and the members after it are reasons to wipe local state.
    """

    NONE = "none"
    EMPTY = "empty"
    CATCH_UP = "catch-up"
    RESUMED = "resumed"
    NO_OFFSET = "no-offset"
    OUT_OF_RANGE = "out-of-range"
    TOO_OLD = "too-old"
    CORRUPT = "corrupt"
    OTHER_TOPIC = "other-topic-id"
    SNAPSHOT = "snapshot"


#: Prefix of the attempt in the batch record of a store that is being restored.
_TAG = re.compile(r"restoring since (\d+): ?", re.ASCII)


def tag_restoring(record: BatchRecord | None, since_ms: int) -> BatchRecord:
    """Returns the batch record of a store whose restore is not finished.

    Args:
        record: the last batch record that the restore read; None = none yet.
        since_ms: from when on the store may miss deletes, ms since the epoch.
    """
    last = record or BatchRecord("", -1, "")
    return replace(last, task_attempt_id=f"restoring since {since_ms}: {last.task_attempt_id}")


def untag_restoring(record: BatchRecord) -> tuple[BatchRecord, int | None]:
    """Returns the arguments of `tag_restoring`; the time is None if no restore is unfinished."""
    tag = _TAG.match(record.task_attempt_id)
    if tag is None:
        return record, None
    return replace(record, task_attempt_id=record.task_attempt_id[tag.end() :]), int(tag[1])


@dataclass(frozen=True)
class WipeNeeded:
    """The local state must be removed and restored from the whole changelog.

    Attributes:
        reason: `Reason.NO_OFFSET` or a member after it.
        why: explanation with numbers, for logs and errors; its subject is the store.
    """

    reason: Reason
    why: str


@dataclass(frozen=True)
class Restored:
    """The result of a restore: the store holds the changelog up to its committed offset.

    Attributes:
        records: number of changelog records that were read.
        skipped: number of offsets without a record: control records, aborted or compacted records.
        reason: why the changelog was read.
        ms: how long it took.
    """

    records: int
    skipped: int
    reason: Reason
    ms: float


def deletes_may_be_gone(since_ms: int, now_ms: int, delete_retention_ms: int) -> WipeNeeded | None:
    """Returns why a running restore must begin again, if compaction may have removed deletes meanwhile.

    Args:
        since_ms: ms since the epoch at which the store held all changes before the restored range.
        now_ms: the current time, in ms since the epoch.
        delete_retention_ms: ``delete.retention.ms`` of the changelog topic.
    """
    age_ms = now_ms - since_ms
    if age_ms <= MAX_AGE_AT_END * delete_retention_ms:
        return None
    return WipeNeeded(
        Reason.TOO_OLD,
        f"it is {age_ms / 3_600_000:.1f} h old before its restore ends; with delete.retention.ms="
        f"{delete_retention_ms} compaction may have removed deletes meanwhile",
    )


@dataclass(frozen=True)
class ReadRange:
    """Offsets of the changelog to read, from ``start`` (included) to ``end`` (excluded).

    Attributes:
        start, end: equal if nothing is to be read.
        reason: why the changelog is read.
        since_ms: from when on the store may miss deletes, ms since the epoch.
    """

    start: int
    end: int
    reason: Reason
    since_ms: int


def plan_restore(
    next_offset: int | None,
    last_batch: BatchRecord | None,
    log_start: int,
    end: int,
    *,
    now_ms: int,
    delete_retention_ms: int | None,
    saved_ms: int = 0,
) -> ReadRange | WipeNeeded:
    """Returns what to do about the local state, by the table of the module.

    Args:
        next_offset: changelog offset from which the store continues; None = it has none.
        last_batch: batch record of the store; None = no batch.
        log_start: first offset of the changelog partition.
        end: committed offset of the changelog partition (excluded).
        now_ms: ms since the epoch.
        delete_retention_ms: ``delete.retention.ms`` of the topic; None = deletes are kept for ever.
        saved_ms: when the last batch was written to the store, ms since the epoch; 0 = not known.
    """
    batch, since_ms = (None, None) if last_batch is None else untag_restoring(last_batch)
    if not next_offset and batch is None:
        return ReadRange(min(log_start, end), end, Reason.EMPTY if end else Reason.NONE, now_ms)
    if next_offset is None:
        return WipeNeeded(Reason.NO_OFFSET, "it holds a batch, but no offset of its changelog")
    reason = Reason.CATCH_UP if since_ms is None else Reason.RESUMED
    if since_ms is None:
        since_ms = now_ms if batch is None else min(batch.time_ms, saved_ms or batch.time_ms)
    if next_offset == end:
        return ReadRange(end, end, Reason.NONE, since_ms)
    if next_offset > end:
        return WipeNeeded(
            Reason.OUT_OF_RANGE,
            f"it holds the changelog up to offset {next_offset}; only offsets up to {end} are committed",
        )
    if next_offset < log_start:
        return WipeNeeded(
            Reason.OUT_OF_RANGE,
            f"it holds the changelog up to offset {next_offset}; the log now starts at {log_start}",
        )
    age_ms = now_ms - since_ms
    if delete_retention_ms is not None and -age_ms > MAX_AGE * delete_retention_ms:
        return WipeNeeded(
            Reason.TOO_OLD,
            f"it was written {-age_ms / 3_600_000:.1f} h in the future by the clock of this host, so its age "
            f"is not known; with delete.retention.ms={delete_retention_ms} the changelog may have lost "
            "deletes since",
        )
    if delete_retention_ms is not None and age_ms > MAX_AGE * delete_retention_ms:
        return WipeNeeded(
            Reason.TOO_OLD,
            f"it is {age_ms / 3_600_000:.1f} h old and incomplete; with delete.retention.ms="
            f"{delete_retention_ms} the changelog may have lost deletes since",
        )
    return ReadRange(next_offset, end, reason, since_ms)


LOG_EVERY_SECONDS = 10.0


@dataclass
class RestoreProgress:
    """Progress of the restore of one partition.

    Another thread may read it while the restore runs.

    Attributes:
        tp: the changelog partition.
        clock: returns monotonic seconds.
        reason: why the changelog is read.
        wiped: why local state was removed before the restore; None = it was not.
        snapshot_offset: changelog offset of the snapshot with which the store began; None = not with one.
        position: changelog offset up to which records were read (excluded).
        end: changelog offset up to which records will be read (excluded).
        records: number of records read so far.
    """

    tp: TopicPartition
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    reason: Reason = Reason.NONE
    wiped: Reason | None = None
    snapshot_offset: int | None = None
    position: int = 0
    end: int = 0
    records: int = 0
    _since: float = 0.0
    _until: float | None = None
    _next_line: float = 0.0

    def begin(self, reason: Reason, start: int, end: int) -> None:
        """Records that a restore of these offsets begins."""
        self.reason = self.wiped or reason
        self.position, self.end, self.records = start, end, 0
        self._since, self._until = self.clock(), None
        self._next_line = self._since + LOG_EVERY_SECONDS

    def advance(self, records: int, position: int) -> None:
        """Records that the store has more records, and holds the changelog up to ``position``."""
        self.records += records
        self.position = position
        now = self.clock()
        if now >= self._next_line:
            self._next_line = now + LOG_EVERY_SECONDS
            _log.info("restoring %s (%s): %s", self.tp, self.reason.value, self._numbers())

    def done(self) -> None:
        """Records that the restore is finished."""
        self._until = self.clock()
        if self.records:
            _log.info("restored %s (%s): %s", self.tp, self.reason.value, self._numbers())

    @property
    def ms(self) -> float:
        """Duration in ms, until now or until the end."""
        return 1000 * ((self.clock() if self._until is None else self._until) - self._since)

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / (self.ms / 1000) if self.ms > 0 else 0.0

    @property
    def remaining(self) -> int:
        """Number of offsets still to be read, an upper bound of the number of records."""
        return max(0, self.end - self.position)

    def metrics(self) -> dict[str, float | str]:
        """Returns the metrics by the names of Kafka Streams."""
        return {
            "restore-records-total": self.records,
            "restore-remaining-records": self.remaining,
            "restore-rate": self.rate,
            "restore-time-ms": self.ms,
            "restore-reason": self.reason.value,
        }

    def _numbers(self) -> str:
        return (
            f"{self.records:,} records in {self.ms / 1000:.1f} s ({self.rate:,.0f}/s), at offset "
            f"{self.position} of {self.end}, at most {self.remaining:,} to go"
        )


# ---------------------------------------- opening a store and restoring it


def open_restored(
    path: str | os.PathLike[str],
    identity: StoreIdentity,
    config: StoreConfig,
    restore_store: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    progress: RestoreProgress,
    install_snapshot: Callable[[], bool] | None = None,
) -> tuple[TransactionalStateStore, Restored]:
    """Returns the open store of a shard, with the state of the batch that Kafka holds.

    Local state is wiped at most once; a damaged database is set aside instead of removed. If the process is
    killed, the same call continues where it stopped.

    Args:
        path: folder of the store.
        identity: which state it is.
        config: of the store.
        restore_store: promotes pending changes or reads the changelog, usually by `restore.restore`. It is
            called with the open store, and a second time with an empty one if that store was wiped.
        progress: of ``restore_store``; a wipe and the use of a snapshot are recorded there.
        install_snapshot: called where there is no store; puts a snapshot there if one fits, and returns
            whether it did. None = there are no snapshots.

    Raises:
        ChangelogError: if an empty store could not be restored either.
        StateCorruptedError, StateError: if the store was damaged again soon after it was created again.
        KafkaEosError: any error of opening and of ``restore_store``; the store is closed then.
    """
    wiped: WipeNeeded | None = None
    is_snapshot = not _has_store(path) and install_snapshot is not None and install_snapshot()
    while True:
        may_wipe = wiped is None or is_snapshot
        try:
            store = TransactionalStateStore.open(path, identity, config)
        except StateCorruptedError as error:
            if not may_wipe:
                raise
            wipe = WipeNeeded(_damage(path, identity), error.message.rstrip("."))
        else:
            progress.snapshot_offset = store.next_offset(progress.tp) if is_snapshot else None
            outcome = _try_restore(store, restore_store, may_wipe=may_wipe)
            if isinstance(outcome, Restored):
                return store, outcome
            wipe = outcome
        if is_snapshot:
            TransactionalStateStore.destroy(path)
            _log.warning(
                "the snapshot in %s cannot be used (%s: %s); the whole changelog is read instead",
                path,
                wipe.reason.value,
                wipe.why,
            )
            install_snapshot, is_snapshot = None, False
            continue
        if wiped is not None:
            _raise_wiped_twice(path, wiped, wipe)
        wiped = wipe
        _wipe(path, wipe)
        progress.wiped = wipe.reason
        is_snapshot = install_snapshot is not None and install_snapshot()


def _has_store(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.join(path, "VERSION"))


def _try_restore(
    store: TransactionalStateStore,
    restore_store: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    *,
    may_wipe: bool,
) -> Restored | WipeNeeded:
    """Returns the result of ``restore_store``; closes the store unless it is restored."""
    try:
        outcome = restore_store(store)
    except BaseException as error:
        store.close()
        if isinstance(error, StateCorruptedError) and may_wipe:
            return WipeNeeded(Reason.CORRUPT, error.message.rstrip("."))
        raise
    if isinstance(outcome, WipeNeeded):
        store.close()
    return outcome


def _damage(path: str | os.PathLike[str], identity: StoreIdentity) -> Reason:
    """Returns why opening failed: another changelog topic, or damaged files."""
    try:
        with TransactionalStateStore.open_read_only(path) as reader:
            topic_id = reader.identity.topic_id
    except KafkaEosError:
        return Reason.CORRUPT
    return Reason.OTHER_TOPIC if identity.topic_id and topic_id != identity.topic_id else Reason.CORRUPT


def _wipe(path: str | os.PathLike[str], wipe: WipeNeeded) -> None:
    """Removes local state; sets a damaged database aside, so that a person can examine it."""
    if wipe.reason is Reason.CORRUPT:
        result = f"set aside as {TransactionalStateStore.set_aside(path)}"
    else:
        TransactionalStateStore.destroy(path)
        result = "removed"
    _log.warning("the state in %s is %s and restored (%s): %s", path, result, wipe.reason.value, wipe.why)


def _raise_wiped_twice(path: str | os.PathLike[str], first: WipeNeeded, second: WipeNeeded) -> NoReturn:
    fix = (
        "find out what removes records of the changelog while it is read: its retention, or "
        "kafka-delete-records.sh."
    )
    if second.reason is Reason.TOO_OLD:
        fix = (
            "set delete.retention.ms of the changelog topic to more than twice the time that a restore takes."
        )
    raise ChangelogError(
        f"the state in {path} was removed ({first.reason.value}: {first.why}), and the restored state cannot "
        f"be used either ({second.reason.value}: {second.why}).",
        fix=fix,
    )
