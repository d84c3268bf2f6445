"""Reads the offset ranges of one task from Kafka as Arrow batches of bounded size."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import DataLossError, RecordsDamagedError, UnavailableError
from kafka_eos_source.kafka.kernel import RAW_NAMES, KernelMessages
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.protocol.records import LARGEST_MOST_DECOMPRESSED_BYTES, MOST_DECOMPRESSED
from kafka_eos_source.read.columns import Run, record_batches
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import read_arrow_schema
from kafka_eos_source.spark.worker import cycle_collection_paused

if TYPE_CHECKING:
    from kafka_eos_source.kafka.damage import Damage
    from kafka_eos_source.kafka.fetch import RangeConsumer

_log = logging.getLogger(__name__)

#: Maximum number of rows in an Arrow batch: as many small messages as one answer of a broker has, usually.
#: Larger batches were not faster; smaller ones cost Spark more per row.
BATCH_ROWS = 20_000

#: A batch is full when its values reach this many bytes. It may exceed this by one message.
BATCH_BYTES = 16 << 20

#: Messages of two takes in one batch would have to be copied. So a batch ends with a take if it has this many
#: rows, or values of this many bytes: Spark's cost per batch is then small beside that of the copy. A take of
#: more than `BATCH_ROWS` is divided into equal parts, so that no small rest of it begins the next batch.
ENOUGH_ROWS, ENOUGH_BYTES = 5_000, 1 << 20

#: Longest wait for messages. Between two waits, the task checks its timeout.
WAIT_SECONDS = 0.5

#: A log must end before the end of the range for this long before the task checks for data loss. Right after
#: a change of leader, a broker may report an old high watermark (KIP-207).
SHORT_LOG_GRACE_SECONDS = 3.0

#: Timeout of one request for the first and last offset of a log.
BOUNDS_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class ReadSettings:
    """Settings of a read that are pickled with every task.

    Attributes:
        conf: properties of the consumer; see `kafka.fetch.RangeConsumer`.
        include_headers: whether to build the column ``headers``.
        fail_on_data_loss: whether to raise if offsets no longer exist; otherwise the task logs it and
            continues.
        poll_timeout_ms: how long to wait for data before failing (``kafkaConsumer.pollTimeoutMs``).
        columns: names of the columns to build; None = all.
        header_names: how names of headers that are not UTF-8 are shown (`read.columns.Contents`).
        skip_damaged: offsets of damaged record batches to pass over, by partition (``skipDamagedRecords``);
            None = the reader is a command, which has no such option.
    """

    conf: Mapping[str, str] = field(repr=False)  # may hold passwords
    include_headers: bool = False
    fail_on_data_loss: bool = True
    poll_timeout_ms: int = 120_000
    columns: tuple[str, ...] | None = None
    header_names: str = "replace"
    skip_damaged: Mapping[TopicPartition, tuple[int, ...]] | None = field(default_factory=dict)


def read_ranges(
    settings: ReadSettings, ranges: Sequence[OffsetRange], counts: dict[str, int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Reads every range to its end.

    A task attempt calls this once, or once for each shard of a stateful operator. It reads several partitions
    at a time. One batch and what the consumer fetches ahead (`kafka.partitions`) bound its memory.

    Args:
        settings: settings of the read.
        ranges: what to read.
        counts: this function adds to it how many records it has read, by topic; None = nobody wants to know.

    Yields:
        Non-empty batches with the schema of `read_arrow_schema`, or its requested columns, in offset order
        within each partition.

    Raises:
        DataLossError: if offsets of a range no longer exist, with ``fail_on_data_loss``.
        RecordsDamagedError: if a record batch is damaged, or too large, that ``skip_damaged`` does not name.
        UnavailableError: if nothing arrived for ``poll_timeout_ms`` although a range is not finished.
        AuthorizationError: if the principal is not authorized to read.
        InvalidRecordError: as `record_batches`, or if a record has a format from before Kafka 0.11.
    """
    progress = Progress(ranges)
    if progress.done:
        return
    with POOL.borrow(settings.conf) as consumer:
        reading = Reading(consumer, progress, settings)
        while not reading.done:
            with cycle_collection_paused():
                runs = reading.next_runs()
                batches = _batches(runs, settings) if runs else []
                if counts is not None:
                    for run in runs:
                        counts[run.tp.topic] = counts.get(run.tp.topic, 0) + len(run.offsets)
                del runs
            yield from batches


def _batches(runs: Sequence[Run], settings: ReadSettings) -> list[pa.RecordBatch]:
    return record_batches(
        runs, settings.include_headers, settings.columns, header_names=settings.header_names
    )


class Reading:
    """Reads the ranges of one task: takes messages, divides them by partition, detects what is lost.

    Args:
        consumer: a consumer, which gets the unfinished ranges as its assignment.
        progress: progress of the ranges; the read ends with ``progress.done``.
        settings: settings of the read.
    """

    def __init__(self, consumer: RangeConsumer, progress: Progress, settings: ReadSettings) -> None:
        self._consumer = consumer
        self._progress = progress
        self._settings = settings
        self._single = next(iter(progress.open)) if len(progress.open) == 1 else None
        #: Messages that were taken, but are not in a batch yet.
        self._left: deque[Run] = deque()
        #: Partitions whose log ends before the end of their range, and since when (monotonic seconds).
        self._short_since: dict[TopicPartition, float] = {}
        self._deadline = Deadline.after_ms(settings.poll_timeout_ms)
        names = read_arrow_schema(settings.include_headers).names
        columns = set(names if settings.columns is None else settings.columns).intersection(names)
        if settings.header_names != "replace":
            columns.add(RAW_NAMES)
        unfinished = sorted(progress.open)
        consumer.assign(
            {tp: progress.position(tp) for tp in unfinished},
            columns,
            {tp: progress.end(tp) for tp in unfinished},
            {tp: progress.epoch(tp) for tp in unfinished},
        )

    @property
    def done(self) -> bool:
        """Whether every range is finished and all its messages were returned."""
        return self._progress.done and not self._left

    def next_runs(self) -> list[Run]:
        """Returns the messages of one Arrow batch.

        They are fewer than `ENOUGH_ROWS` only if their values are large, or every range is finished.

        Raises:
            DataLossError, RecordsDamagedError, UnavailableError, AuthorizationError: as `read_ranges`.
            InvalidRecordError: if a record has a format from before Kafka 0.11.
        """
        self._deadline = Deadline.after_ms(
            self._settings.poll_timeout_ms
        )  # excludes the time that Spark took
        runs: list[Run] = []
        rows = size_bytes = 0
        most_rows = BATCH_ROWS
        while not self.done and rows < most_rows and size_bytes < BATCH_BYTES:
            if not self._left:
                if rows >= ENOUGH_ROWS or size_bytes >= ENOUGH_BYTES:
                    break
                self._left.extend(self._take())
                continue
            run = self._left.popleft()
            if not rows and len(run.messages) > BATCH_ROWS:
                parts = -(-len(run.messages) // BATCH_ROWS)
                most_rows = -(-len(run.messages) // parts)
            count = run.messages.fitting(most_rows - rows, BATCH_BYTES - size_bytes)
            if count < len(run.messages):
                self._left.appendleft(Run(run.tp, run.messages[count:], run.offsets[count:]))
                run = Run(run.tp, run.messages[:count], run.offsets[:count])
            runs.append(run)
            rows += count
            size_bytes += run.messages.size_bytes
        return runs

    def _take(self) -> list[Run]:
        """Takes what has arrived, and returns the messages that belong to the ranges."""
        progress = self._progress
        taken = self._consumer.take(min(WAIT_SECONDS, self._deadline.remaining_seconds()))
        if taken.empty:
            self._check_silence()
            return []
        remaining_before = progress.remaining
        runs = self._split(taken.messages) if taken.messages else []
        for tp, log_end in taken.log_ends.items():
            self._at_log_end(tp, log_end)
        for tp, offset in taken.reached.items():
            progress.advance(tp, offset)
        for tp in taken.out_of_range:
            self._out_of_range(tp)
        for tp, cut in taken.cut.items():
            if progress.is_open(tp):
                self._skip_or_raise(
                    tp,
                    progress.end(tp),
                    f"the log was cut at offset {cut}, and its records from there on are others than those "
                    "that the batch was planned to read (an unclean leader election, or a lost or restored "
                    "disk)",
                )
        for tp in taken.gone:
            if progress.is_open(tp):
                self._skip_or_raise(tp, progress.end(tp), "the topic or partition was deleted")
        for damage in taken.damaged:
            self._on_damage(damage)
        finished = progress.take_finished()
        if finished and not progress.done:
            self._consumer.drop(sorted(finished))
        if progress.remaining < remaining_before:
            self._deadline = Deadline.after_ms(self._settings.poll_timeout_ms)
        else:  # events alone are no progress: the same ones may come for ever
            self._check_silence()
        return runs

    def _split(self, messages: KernelMessages) -> list[Run]:
        offsets = messages.offsets
        if self._single is not None:
            return self._accept(self._single, messages, offsets)
        found: list[Run] = []
        changes = np.flatnonzero(np.diff(messages.partition_ids)) + 1
        for first, past in pairwise([0, *changes.tolist(), len(messages)]):
            tp = messages.partition_at(first)
            found += self._accept(tp, messages[first:past], offsets[first:past])
        return found

    def _accept(
        self, tp: TopicPartition, messages: KernelMessages, offsets: npt.NDArray[np.int64]
    ) -> list[Run]:
        self._short_since.pop(tp, None)
        kept = self._progress.accept(tp, offsets)
        if kept.start >= kept.stop:
            return []
        if kept == slice(0, len(offsets)):
            return [Run(tp, messages, offsets)]
        return [Run(tp, messages[kept], offsets[kept])]

    def _at_log_end(self, tp: TopicPartition, log_end: int) -> None:
        self._progress.advance(tp, log_end)
        if self._progress.is_open(tp):
            self._short_since.setdefault(tp, time.monotonic())

    def _check_silence(self) -> None:
        """Handles a wait without progress.

        Raises:
            DataLossError: if a log is too short for its range.
            AuthorizationError: if nothing has arrived for ``poll_timeout_ms`` because brokers refuse the
                login, which they accepted before.
            UnavailableError: if nothing has arrived for ``poll_timeout_ms`` for another reason.
        """
        before = time.monotonic() - SHORT_LOG_GRACE_SECONDS
        for tp, since in list(self._short_since.items()):
            if self._progress.is_open(tp) and since < before:
                self._check_short_log(tp)
        if self._progress.done or not self._deadline.expired:
            return
        tp = min(self._progress.open)
        refused = self._consumer.cluster.refusal
        if refused is not None:
            raise refused
        reason = self._consumer.last_complaint or "the broker does not answer fetch requests"
        if tp in self._short_since:
            reason = f"the log ends at {self._progress.position(tp)}"
        raise UnavailableError(
            f"no records of {tp} arrived within {self._settings.poll_timeout_ms} ms, at offset "
            f"{self._progress.position(tp)} of a range that ends before offset {self._progress.end(tp)}. "
            f"{len(self._progress.open)} partition(s) of the task "
            f"are unfinished. Reason: {reason}.",
            fix="check the leader of the partition and the network. If the cluster is only slow, increase "
            "kafkaConsumer.pollTimeoutMs.",
        )

    def _check_short_log(self, tp: TopicPartition) -> None:
        """Asks where a log ends that has been too short for longer than a change of leader explains."""
        self._short_since[tp] = time.monotonic()
        try:
            _, high = self._consumer.log_bounds(tp, self._bounds_deadline())
        except UnavailableError as failure:
            self._consumer.last_complaint = str(failure)
            return
        if high < self._progress.end(tp):
            self._skip_or_raise(tp, self._progress.end(tp), f"the log now ends at offset {high}")

    def _out_of_range(self, tp: TopicPartition) -> None:
        """Handles a position that is not in the log: retention removed it, or the log became shorter."""
        if not self._progress.is_open(tp):
            return
        position = self._progress.position(tp)
        try:
            low, high = self._consumer.log_bounds(tp, self._bounds_deadline())
        except UnavailableError as failure:
            self._consumer.last_complaint = str(failure)
            self._consumer.move(tp, position)  # fetches again, until the timeout
            return
        if position < low:
            self._skip_or_raise(tp, low, f"the log now starts at offset {low}")
        elif position > high:
            self._skip_or_raise(tp, self._progress.end(tp), f"the log now ends at offset {high}")
        if self._progress.is_open(tp):
            self._consumer.move(tp, self._progress.position(tp))

    def _on_damage(self, damage: Damage) -> None:
        """Passes over a damaged place if the option names it.

        Raises:
            RecordsDamagedError: if it does not.
        """
        tp, progress = damage.tp, self._progress
        if not progress.is_open(tp):
            return
        named = (self._settings.skip_damaged or {}).get(tp, ())
        position, last = progress.position(tp), damage.past_offset - 1
        if damage.resume < 0 or not any(damage.offset <= offset <= last for offset in named):
            raise _records_damaged(damage, position, self._settings.skip_damaged)
        until = min(damage.resume, progress.end(tp))
        _log.warning(
            "%s The task continues at offset %d, as skipDamagedRecords asks; %d offset(s) are lost: %s.",
            damage,
            until,
            until - position,
            f"{position} to {until - 1}" if until > position else "the records were read nevertheless",
        )
        self._consumer.move(tp, damage.resume)
        progress.advance(tp, until)

    def _bounds_deadline(self) -> Deadline:
        return Deadline.after_seconds(max(0.1, self._deadline.remaining_seconds(BOUNDS_TIMEOUT_SECONDS)))

    def _skip_or_raise(self, tp: TopicPartition, until: int, why: str) -> None:
        """Skips offsets that no longer exist, or raises.

        Raises:
            DataLossError: with ``fail_on_data_loss``.
        """
        position, end = self._progress.position(tp), self._progress.end(tp)
        until = min(until, end)
        text = f"offsets {position} to {until - 1} of {tp} cannot be read: {why}."
        if self._settings.fail_on_data_loss:
            raise DataLossError(
                text,
                fix="`kafka-eos inspect` shows whether Kafka holds this batch already. If it does, restart "
                "with failOnDataLoss=false, and no row is lost; a source that had application.id when the "
                "batch was planned finds that out itself with onRolledBackCheckpoint=jump. If it does not, "
                "failOnDataLoss=false continues without the lost records. If the query was too slow, "
                "increase the retention of the topic.",
            )
        _log.warning("%s The task continues at offset %d (failOnDataLoss=false).", text, until)
        self._progress.advance(tp, until)


def _records_damaged(
    damage: Damage, position: int, named: Mapping[TopicPartition, tuple[int, ...]] | None
) -> RecordsDamagedError:
    """Returns the error for a damaged place.

    Args:
        damage: the place.
        position: the next offset to read.
        named: the offsets that the option ``skipDamagedRecords`` names already; None = there is no option.
    """
    tp = damage.tp
    fix, otherwise = damage.repair, "they are not" if damage.is_too_large else "there is no copy"
    if damage.is_too_large and named is not None:
        fix += (
            ". If its records are wanted and the task has the memory, set the option "
            f"'{MOST_DECOMPRESSED}' on the source to more, at most {LARGEST_MOST_DECOMPRESSED_BYTES}"
        )
    if damage.resume < 0:
        fix += ". No offset behind the damage can be read, so that the query cannot pass over it"
    elif named is None:
        fix += (
            f". If {otherwise}, remove the records before offset {damage.resume} of the partition with "
            "kafka-delete-records.sh, or let retention remove them; then run the command again"
        )
    else:
        by_topic: dict[str, dict[str, list[int]]] = {}
        for each, offsets in {**named, tp: (*named.get(tp, ()), damage.offset)}.items():
            by_topic.setdefault(each.topic, {})[str(each.partition)] = sorted(set(offsets))
        lost = max(0, min(damage.resume, damage.past_offset) - max(damage.offset, position))
        fix += (
            f". If {otherwise}, pass over the batch, whereby {lost} offset(s) are lost: "
            f".option('skipDamagedRecords', '{json.dumps(by_topic, separators=(',', ':'))}') on the source"
        )
    return RecordsDamagedError(str(damage), fix=f"{fix}. See docs/runbooks.md, RECORDS_DAMAGED.")


# -- Progress in the ranges of a task --------------------------------------------------------------
#
# A range is finished when the task has received a message at or after its end, the message at its last
# offset, or the report that the log ends at or after its end. Counting messages would not work: control
# records, aborted records and records removed by compaction occupy offsets, but the broker does not deliver
# them.


class Progress:
    """Positions in the ranges of one task, with one range per partition.

    Args:
        ranges: ranges to read. Empty ranges count as finished.

    Raises:
        ValueError: if two ranges have the same partition, because a consumer has one position per partition.
    """

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._end: dict[TopicPartition, int] = {}
        self._position: dict[TopicPartition, int] = {}
        for wanted in ranges:
            if wanted.tp in self._end:
                raise ValueError(f"the task has two ranges of {wanted.tp}; expected one")
            self._end[wanted.tp] = wanted.end
            self._position[wanted.tp] = wanted.start
        self._epoch = {each.tp: each.epoch for each in ranges}
        self._open = {tp for tp, end in self._end.items() if self._position[tp] < end}
        self._remaining = sum(self._end[tp] - self._position[tp] for tp in self._open)
        self._finished: list[TopicPartition] = []

    @property
    def open(self) -> Set[TopicPartition]:
        """Partitions that are not finished. The set changes with every call of `advance`."""
        return self._open

    def take_finished(self) -> list[TopicPartition]:
        """Returns the partitions that have been finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def remaining(self) -> int:
        """Number of offsets that remain: at least the number of records that remain."""
        return self._remaining

    def position(self, tp: TopicPartition) -> int:
        """Returns the next offset to read."""
        return self._position[tp]

    def end(self, tp: TopicPartition) -> int:
        return self._end[tp]

    def epoch(self, tp: TopicPartition) -> int:
        """Returns the leader epoch that belongs to the end; -1 = unknown."""
        return self._epoch[tp]

    def is_open(self, tp: TopicPartition) -> bool:
        return tp in self._open

    def accept(self, tp: TopicPartition, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> slice:
        """Registers messages of one partition.

        Args:
            tp: the partition.
            offsets: offsets of the messages, ascending, at least one.

        Returns:
            The messages that are in the range and were not accepted before.
        """
        if tp not in self._open:
            return slice(0, 0)
        start, end = self._position[tp], self._end[tp]
        first = 0 if offsets[0] >= start else int(np.searchsorted(offsets, start))
        past = len(offsets) if offsets[-1] < end else int(np.searchsorted(offsets, end))
        self.advance(tp, int(offsets[-1]) + 1)
        return slice(first, past)

    def advance(self, tp: TopicPartition, position: int) -> None:
        """Moves the position forward, because no message before it will come."""
        if tp not in self._open:
            return
        end, before = self._end[tp], self._position[tp]
        self._position[tp] = min(end, max(position, before))
        self._remaining -= self._position[tp] - before
        if position >= end:
            self._open.discard(tp)
            self._finished.append(tp)
