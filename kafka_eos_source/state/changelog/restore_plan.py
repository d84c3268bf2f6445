"""What a shard's local state is worth, given what Kafka has: read on, or away with it. Pure decisions.

::

    held                                             decision
    ───────────────────────────────────────────────  ─────────────────────────────────────────────
    nothing at all                                   read all of the changelog
    a batch, but no offset of the changelog          wipe: no-offset
    next == the committed end                        nothing to read, however old the state is
    next > the committed end                         wipe: out-of-range (another topic, or one cut short)
    next < the log's start                           wipe: out-of-range (deletions may be gone)
    next behind, last batch long ago                 wipe: too-old (likewise, KIP-1259)
    next behind                                      read on from next

Old is what may have missed deletions since. For a store at a batch that is since the batch; for one whose
restore was cut short it is since the restore began, whatever batches it has passed: until it is finished the
batch record carries that time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from kafka_eos_source.state.model import BatchRecord

#: Of ``delete.retention.ms``: what is older than this part of it may have missed a deletion. Half, since
#: clocks differ and the restore itself takes time.
MAX_AGE = 0.5


class Reason(str, Enum):
    """Why a store reads its changelog, as the metric ``restore-reason`` says it.

    From `NO_OFFSET` on: why what was there is worth nothing.
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


#: Before the attempt, which nobody can take for one then.
_MARK = re.compile(r"restoring since (\d+): ?", re.ASCII)


def marked(record: BatchRecord | None, since_ms: int) -> BatchRecord:
    """The batch record of a store that is being restored and has seen this one last, None = none yet."""
    seen = record or BatchRecord("", -1, "")
    return replace(seen, attempt=f"restoring since {since_ms}: {seen.attempt}")


def unmarked(record: BatchRecord) -> tuple[BatchRecord, int | None]:
    """What `marked` was given; the time is None for a store that is not being restored."""
    found = _MARK.match(record.attempt)
    if found is None:
        return record, None
    return replace(record, attempt=record.attempt[found.end() :]), int(found[1])


@dataclass(frozen=True)
class WipeNeeded:
    """The local state cannot be caught up: it is to be removed and read anew.

    Attributes:
        reason: one of those.
        why: the same with its numbers, for the log.
    """

    reason: Reason
    why: str


@dataclass(frozen=True)
class ReadOn:
    """Offsets ``start`` (included) to ``end`` (excluded) are to be read; equal = nothing.

    Attributes:
        since_ms: from when on the store may miss what is deleted, ms since the epoch.
    """

    start: int
    end: int
    reason: Reason
    since_ms: int


def decide(
    next_offset: int | None,
    last_batch: BatchRecord | None,
    log_start: int,
    end: int,
    *,
    now_ms: int,
    delete_retention_ms: int | None,
) -> ReadOn | WipeNeeded:
    """The table above.

    Args:
        next_offset: the store's, None = it has none.
        last_batch: of the store.
        log_start: first offset of the changelog partition.
        end: up to where it is committed (excluded).
        now_ms: ms since the epoch.
        delete_retention_ms: of the topic; None = a deletion is never forgotten.
    """
    batch, since_ms = (None, None) if last_batch is None else unmarked(last_batch)
    if not next_offset and batch is None:
        return ReadOn(min(log_start, end), end, Reason.EMPTY if end else Reason.NONE, now_ms)
    if next_offset is None:
        return WipeNeeded(Reason.NO_OFFSET, "it holds a batch and no offset of its changelog")
    reason = Reason.CATCH_UP if since_ms is None else Reason.RESUMED
    if since_ms is None:
        since_ms = now_ms if batch is None else batch.time_ms
    if next_offset == end:
        return ReadOn(end, end, Reason.NONE, since_ms)
    if next_offset > end:
        return WipeNeeded(
            Reason.OUT_OF_RANGE,
            f"it holds the changelog up to offset {next_offset}, which is committed up to {end} only",
        )
    if next_offset < log_start:
        return WipeNeeded(
            Reason.OUT_OF_RANGE,
            f"it holds the changelog up to offset {next_offset}; the log starts at {log_start} now",
        )
    age_ms = now_ms - since_ms
    if delete_retention_ms is not None and age_ms > MAX_AGE * delete_retention_ms:
        return WipeNeeded(
            Reason.TOO_OLD,
            f"it is {age_ms / 3_600_000:.1f} h old and not complete; deletions may be forgotten after "
            f"delete.retention.ms={delete_retention_ms}",
        )
    return ReadOn(next_offset, end, reason, since_ms)
