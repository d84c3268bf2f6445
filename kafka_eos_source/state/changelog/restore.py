"""State from its changelog: one partition, read_committed, from where the store is to where it is committed.

The store is the only memory of how far a restore has come: each chunk moves its offset in the same
`WriteBatch` as the data, so a killed restore goes on behind the last chunk, and to read a chunk twice changes
nothing. A restore is finished by position (a record at or past the end, or the log's end reported at or past
it), never by the last record seen: what is left may be control markers, aborted or compacted away.

::

    decide ──wipe──▶ WipeNeeded                              (the caller removes the state and begins again)
      │
    reading ──records──▶ chunk ──┐
      │ ▲ ▲                      │
      │ │ └──────────────────────┘
      │ └─ nothing came: is the log shorter than what is committed? ──yes, and stays so──▶ error
      └─ end reached ──▶ Restored
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import ChangelogError, UnavailableError
from kafka_eos_source.kafka.changelog_reader import Pulled, Records
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.worker import cycle_collection_paused
from kafka_eos_source.state.batch_record import decode_batch
from kafka_eos_source.state.changelog.restore_plan import ReadOn, Reason, WipeNeeded, decide, marked, unmarked
from kafka_eos_source.state.changelog.restore_progress import RestoreProgress
from kafka_eos_source.state.layout import BATCH_KEY
from kafka_eos_source.state.model import BatchRecord

_log = logging.getLogger(__name__)

_NONE = pa.array([], pa.binary())

#: A chunk is full with so many records, or bytes of keys and values. The store writes a large one as a sorted
#: file, for a quarter of what the same records cost in small batches: 0.8 µs a record against 3.3, of keys in
#: no order. The larger the files, the less RocksDB merges meanwhile. A kill loses one chunk. In memory it has
#: four times its bytes, which one look at the client (``queued.max.messages.kbytes``) brings above these.
CHUNK_RECORDS = 500_000
CHUNK_BYTES = 32 << 20

#: Between two looks at the time while nothing comes.
_WAIT_SECONDS = 0.2
#: How long a log may look shorter than what is committed before that is believed: after a change of leader a
#: broker may answer with an older high watermark (KIP-207).
_SHORT_LOG_GRACE_SECONDS = 3.0


class RestorableStore(Protocol):
    """What `restore` needs of a `TransactionalStateStore`."""

    @property
    def restoring(self) -> bool: ...
    def next_offset(self, tp: TopicPartition) -> int | None: ...
    def last_batch(self) -> BatchRecord | None: ...
    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        """All of it or nothing. Of a key that repeats the last value counts; null deletes."""


class ChangelogSource(Protocol):
    """What `restore` needs of a `kafka.changelog_reader.ChangelogReader`."""

    @property
    def last_complaint(self) -> str: ...
    def start(self, position: int) -> None: ...
    def stop(self) -> None: ...
    def take(self, wait_seconds: float, end: int) -> Pulled: ...
    def readable(self, deadline: Deadline) -> tuple[int, int]: ...
    def ends(self) -> LogEnds: ...


_FIND_PRODUCER = (
    "find its producer with `kafka-transactions.sh find-hanging` and end it; nobody but the query may write "
    "to its changelog."
)


@dataclass(frozen=True)
class Restored:
    """The store is as Kafka says.

    Attributes:
        records: changelog records read.
        skipped: offsets on the way that held none for us: control markers, aborted, compacted away.
        reason: why anything was read.
        ms: how long it took.
    """

    records: int
    skipped: int
    reason: Reason
    ms: float


def restore(
    store: RestorableStore,
    tp: TopicPartition,
    target_end: int | None,
    source: ChangelogSource,
    *,
    deadline: Deadline,
    progress: RestoreProgress | None = None,
    end_transaction: Callable[[Deadline], None] | None = None,
    delete_retention_ms: int | None = None,
    now_ms: int | None = None,
) -> Restored | WipeNeeded:
    """Brings the store to the committed end of its changelog.

    Nothing is asked of Kafka when it is there already.

    Args:
        store: open, with nothing staged.
        tp: its changelog partition.
        target_end: the group's committed offset of it (excluded). None = the group has none: all of the log
            is read, in which no transaction may be unfinished.
        source: of that partition.
        deadline: its budget is for each wait: it begins anew whenever something arrives.
        progress: kept up to date.
        end_transaction: ends a transaction that an earlier driver left open, as
            `committed.end_open_transaction` does. Called at most once: if the group has no offset and the log
            has an open transaction, which may be that of the very first batch.
        delete_retention_ms: of the changelog topic; older state must not be caught up. None = any age.
        now_ms: ms since the epoch; None = the clock's.

    Returns:
        What was read, or that the store is worth nothing.

    Raises:
        ChangelogError: the changelog ends before what is committed, holds a foreign record, or an unfinished
            transaction does not end.
        StateFormatError: the changelog was written by a newer version.
        UnavailableError: no broker answers, nothing arrives, or the partition is gone.
        AuthorizationError: the principal may not read it.
    """
    progress = RestoreProgress(tp) if progress is None else progress
    held = store.next_offset(tp)
    log_start = 0
    if target_end is None:
        log_start, target_end = _settled_log(source, tp, end_transaction, deadline)
    elif held != target_end:
        log_start, _ = source.readable(deadline)
    decision = decide(
        held,
        store.last_batch(),
        log_start,
        target_end,
        now_ms=int(time.time() * 1000) if now_ms is None else now_ms,
        delete_retention_ms=delete_retention_ms,
    )
    if isinstance(decision, WipeNeeded):
        return decision
    if decision.reason is Reason.EMPTY and log_start > 0:
        _log.warning(
            "%s begins at offset %d: what was before it was removed and is not restored", tp, log_start
        )
    return _Restoring(store, tp, decision, source, deadline, progress).run()


def _settled_log(
    source: ChangelogSource,
    tp: TopicPartition,
    end_transaction: Callable[[Deadline], None] | None,
    deadline: Deadline,
) -> tuple[int, int]:
    """First and end offset of a log in which no transaction is unfinished; waits for one that is."""
    while (ends := source.ends()).stable < ends.end:
        if end_transaction is not None:
            end_transaction(deadline)
            end_transaction = None
            continue
        if deadline.expired:
            raise ChangelogError(
                f"an unfinished transaction of another producer holds {tp} at offset {ends.stable}, and the "
                f"log goes on to {ends.end}; waited {deadline.budget_seconds:.0f} s.",
                fix=_FIND_PRODUCER,
            )
        time.sleep(min(_WAIT_SECONDS, deadline.remaining_seconds()))  # there is nothing to be woken by
    return ends.earliest, ends.end


class _Chunk:
    """Records read and not stored yet. Of a key that repeats the store takes the last value.

    Attributes:
        records: how many were read.
        batch_value: of the last batch record among them, which is none of the store's data.
    """

    def __init__(self) -> None:
        self.records = 0
        self.batch_value: bytes | None = None
        self._keys: list[pa.BinaryArray] = []
        self._values: list[pa.BinaryArray] = []
        self._bytes = 0

    def add(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self.records += len(keys)
        of_batch = pc.equal(keys, pa.scalar(BATCH_KEY))
        if of_batch.true_count:
            self.batch_value = values.filter(of_batch)[-1].as_py() or b""
            others = pc.invert(of_batch)
            keys, values = keys.filter(others), values.filter(others)
        self._keys.append(keys)
        self._values.append(values)
        self._bytes += keys.nbytes + values.nbytes

    @property
    def keys(self) -> pa.BinaryArray:
        return pa.concat_arrays(self._keys)

    @property
    def values(self) -> pa.BinaryArray:
        return pa.concat_arrays(self._values)

    @property
    def is_full(self) -> bool:
        return self.records >= CHUNK_RECORDS or self._bytes >= CHUNK_BYTES


class _Restoring:
    """One run over ``plan.start`` to ``plan.end``."""

    def __init__(
        self,
        store: RestorableStore,
        tp: TopicPartition,
        plan: ReadOn,
        source: ChangelogSource,
        deadline: Deadline,
        progress: RestoreProgress,
    ) -> None:
        self._store = store
        self._tp = tp
        self._plan = plan
        self._source = source
        self._patience_seconds = deadline.budget_seconds
        self._deadline = deadline
        self._progress = progress
        self._at = plan.start
        held = store.last_batch()
        #: The batch whose records were read last, as far as is known.
        self._batch = None if held is None else unmarked(held)[0]
        self._chunk = _Chunk()
        #: Since when the log looks shorter than it must be, monotonic seconds.
        self._short_since: float | None = None

    def run(self) -> Restored | WipeNeeded:
        plan, progress = self._plan, self._progress
        progress.begin(plan.reason, plan.start, plan.end)
        if self._at < plan.end:
            self._source.start(self._at)
            try:
                with cycle_collection_paused():
                    wipe = self._read()
            finally:
                self._source.stop()
            if wipe is not None:
                return wipe
        self._finish()
        progress.advance(0, plan.end)
        progress.done()
        return Restored(
            progress.records, plan.end - plan.start - progress.records, progress.reason, progress.ms
        )

    def _finish(self) -> None:
        """The store is at the end, also behind control markers, and at its batch."""
        if self._store.restoring or self._store.next_offset(self._tp) != self._plan.end:
            batch = self._batch or (BatchRecord("", -1, "") if self._store.restoring else None)
            self._store.restore_chunk(_NONE, _NONE, {self._tp: self._plan.end}, batch=batch, done=True)

    def _read(self) -> WipeNeeded | None:
        end = self._plan.end
        while self._at < end:
            wait_seconds = min(_WAIT_SECONDS, self._deadline.remaining_seconds())
            pulled = self._source.take(wait_seconds, end)
            if pulled.records is not None:
                self._accept(pulled.records)
            if pulled.log_end is not None:
                self._at_log_end(pulled.log_end)
            if pulled.gone:
                raise UnavailableError(
                    f"changelog {self._tp} was deleted while state was restored from it.",
                    fix="restore the topic, or start the query with another application.id.",
                )
            if pulled.out_of_range and (wipe := self._out_of_range()) is not None:
                return wipe
            if pulled.records is None:
                if self._chunk.records:
                    self._store_chunk()
                if self._at < end:
                    self._nothing_came()
        if self._chunk.records:
            self._store_chunk()
        return None

    def _accept(self, records: Records) -> None:
        self._arrived()
        keys = records.keys
        if keys.null_count or pc.min(pc.binary_length(keys)).as_py() == 0:
            raise ChangelogError(
                f"changelog {self._tp} has a record without a key between offsets {self._at} and "
                f"{records.position}: it is not one of kafka-eos.",
                fix="find out which other program writes to the changelog topic.",
            )
        for part in records.parts(CHUNK_RECORDS):
            self._chunk.add(part.keys, part.values)
            self._at = part.position
            if self._chunk.is_full:
                self._store_chunk()

    def _store_chunk(self) -> None:
        chunk, self._chunk = self._chunk, _Chunk()
        if chunk.batch_value is not None:
            self._batch = decode_batch(chunk.batch_value)
        batch = marked(self._batch, self._plan.since_ms)
        self._store.restore_chunk(chunk.keys, chunk.values, {self._tp: self._at}, batch=batch, done=False)
        self._progress.advance(chunk.records, self._at)

    def _at_log_end(self, log_end: int) -> None:
        self._arrived()
        if log_end > self._at:
            self._at = min(log_end, self._plan.end)
        if self._at < self._plan.end:
            self._short_since = time.monotonic()

    def _arrived(self) -> None:
        self._short_since = None
        self._deadline = Deadline.after_seconds(self._patience_seconds)

    def _nothing_came(self) -> None:
        """Finds out why, when that has lasted for long."""
        short_seconds = 0.0 if self._short_since is None else time.monotonic() - self._short_since
        is_short = short_seconds > _SHORT_LOG_GRACE_SECONDS
        if not is_short and not self._deadline.expired:
            return
        end, ends = self._plan.end, self._source.ends()
        if ends.end < end:
            raise ChangelogError(
                f"changelog {self._tp} is committed up to offset {end} and ends at {ends.end}: it lost "
                "records, or was created anew.",
                fix="bring the topic back, or start the query with another application.id and a new "
                "checkpoint; the state cannot be restored.",
            )
        if not self._deadline.expired:
            self._short_since = time.monotonic()
            return
        waited = f"waited {self._patience_seconds:.0f} s"
        if ends.stable < end:
            raise ChangelogError(
                f"an unfinished transaction of another producer holds {self._tp} at offset {ends.stable}, "
                f"below the committed end {end}; {waited}.",
                fix=_FIND_PRODUCER,
            )
        raise UnavailableError(
            f"nothing of changelog {self._tp} arrives, at offset {self._at} of {end}, {waited}: "
            f"{self._source.last_complaint or 'the broker answers no fetches for it'}.",
            fix="see that the partition has a leader and that the brokers can be reached.",
        )

    def _out_of_range(self) -> WipeNeeded | None:
        """The broker has no such offset; asked again where it should: a new leader may be behind."""
        log_start, stable = self._source.readable(self._deadline)
        if self._at < log_start:
            return WipeNeeded(
                Reason.OUT_OF_RANGE,
                f"it holds the changelog up to offset {self._at}; the log starts at {log_start} now",
            )
        if self._at > stable:
            self._short_since = self._short_since or time.monotonic()
        self._source.start(self._at)
        return None
