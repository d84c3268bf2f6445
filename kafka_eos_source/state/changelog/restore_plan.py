"""Decides whether local state can be caught up from its changelog or must be wiped.

::

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

The functions are pure. The age of a store counts from when it may have begun to miss deletes: from its last
batch, or, if a restore was interrupted, from the start of that restore. Until the restore is finished, the
batch record carries the start time.

The times of batches never go back. So if the clock of one host was ahead once, even for a single batch, the
times of all later batches are in the future until the other clocks are there. The age therefore counts from
the time at which the store was written, if that is earlier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from kafka_eos_source.state.model import BatchRecord

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
