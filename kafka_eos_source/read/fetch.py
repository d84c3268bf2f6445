"""The ranges of one task, read from Kafka as Arrow batches of bounded size.

`read_ranges` is the whole interface. Behind it are two twins with the same results, the C kernel and Python:
they differ in the consumer that is borrowed and in what makes columns of its messages.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import DataLossError, RetriableError, UnavailableError
from kafka_eos_source.kafka.consumer import POOL, Taken
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.kernel_messages import KernelMessages
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.columns import record_batches
from kafka_eos_source.read.progress import Progress
from kafka_eos_source.read.runs import MessageList, Messages, Run
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.schema import read_arrow_schema
from kafka_eos_source.spark.worker import cycle_collection_paused

_log = logging.getLogger(__name__)

#: Rows of an Arrow batch at most: larger ones were not faster, smaller ones cost Spark more per row.
BATCH_ROWS = 10_000

#: Bytes of values after which a batch is full (it overshoots by what one look at the queue gives).
BATCH_BYTES = 16 << 20

#: Messages asked for at once while their size is not known.
FIRST_TAKE = 500

#: The longest single wait: between two of them the time-out and the client's complaints are looked at.
WAIT_SECONDS = 0.5

#: How long a log may look shorter than planned before that is believed: right after a change of leader a
#: broker may answer with an older high watermark (KIP-207).
SHORT_LOG_GRACE_SECONDS = 3.0

#: For one look-up of a log's bounds.
BOUNDS_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class ReadSettings:
    """What a read task needs besides its ranges; pickled with every task.

    Attributes:
        conf: of the consumer, from `kafka.config.consumer_config`.
        include_headers: whether to fill the ``headers`` column.
        fail_on_data_loss: raise when offsets are gone, else log and go on.
        poll_timeout_ms: how long nothing at all may arrive (``kafkaConsumer.pollTimeoutMs``).
        columns: names of the columns to make, None = all of the schema.
    """

    conf: Mapping[str, str] = field(repr=False)  # may hold passwords
    include_headers: bool = False
    fail_on_data_loss: bool = True
    poll_timeout_ms: int = 120_000
    columns: tuple[str, ...] | None = None


class RangeConsumer(Protocol):
    """What `Reading` needs of `kafka.consumer.AssignedConsumer`; tests give it a model of a log."""

    drains: ClassVar[bool]
    last_complaint: str

    def want(self, columns: Collection[str]) -> None: ...
    def assign(self, positions: Mapping[TopicPartition, int]) -> None: ...
    def move(self, tp: TopicPartition, position: int) -> None: ...
    def drop(self, tps: Sequence[TopicPartition]) -> None: ...
    def take(self, at_most: int, wait_seconds: float) -> Taken: ...
    def log_bounds(self, tp: TopicPartition, timeout_seconds: float) -> tuple[int, int]: ...


def read_ranges(settings: ReadSettings, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
    """Reads every range to its end.

    Called once per task attempt, in an executor; reads several partitions at once. Memory is bounded by one
    batch and by what librdkafka prefetches (``queued.max.messages.kbytes``).

    Yields:
        Batches of `schema.read_arrow_schema`, or of the columns wanted of it, in offset order within a
        partition, none empty.

    Raises:
        DataLossError: offsets of a range are gone, with ``fail_on_data_loss``.
        UnavailableError: nothing arrived for ``poll_timeout_ms`` although a range is not finished.
        AuthorizationError: the principal may not read.
        InvalidRecordError: see `record_batches`.
    """
    progress = Progress(ranges)
    if progress.done:
        return
    with POOL.borrow(settings.conf, range_consumer()) as consumer:
        reading = Reading(consumer, progress, settings)
        while not reading.done:
            with cycle_collection_paused():
                runs = reading.next_runs()
                batches = record_batches(runs, settings.include_headers, settings.columns) if runs else []
                del runs
            yield from batches


class Reading:
    """One pass over the ranges of a task: takes, sorts by partition, notices what is finished or lost.

    Args:
        consumer: assigned here, to the unfinished ranges.
        progress: of the task's ranges; ``progress.done`` ends the pass.
    """

    def __init__(self, consumer: RangeConsumer, progress: Progress, settings: ReadSettings) -> None:
        self._consumer = consumer
        self._progress = progress
        self._settings = settings
        self._single = next(iter(progress.open)) if len(progress.open) == 1 else None
        self._one_topic = len({tp.topic for tp in progress.open}) == 1
        self._take_at_most = FIRST_TAKE
        #: Taken and accepted, but not given out yet.
        self._left: deque[Run] = deque()
        #: Partitions whose log ended below their range's end, and since when (monotonic seconds).
        self._short_since: dict[TopicPartition, float] = {}
        names = read_arrow_schema(settings.include_headers).names
        consumer.want(names if settings.columns is None else set(names).intersection(settings.columns))
        consumer.assign({tp: progress.position(tp) for tp in sorted(progress.open)})
        self._deadline = Deadline.after_ms(settings.poll_timeout_ms)

    @property
    def done(self) -> bool:
        """Every range is finished and everything was given out."""
        return self._progress.done and not self._left

    def next_runs(self) -> list[Run]:
        """Messages for one Arrow batch; fewer, or none, only when every range is finished.

        Raises:
            DataLossError, UnavailableError, AuthorizationError: as `read_ranges`.
        """
        self._deadline = Deadline.after_ms(self._settings.poll_timeout_ms)  # Spark's time is not Kafka's
        runs: list[Run] = []
        rows = size_bytes = 0
        while not self.done and rows < BATCH_ROWS and size_bytes < BATCH_BYTES:
            if not self._left:
                self._left.extend(self._step(BATCH_ROWS - rows))
                continue
            run = self._left.popleft()
            count = run.messages.fitting(BATCH_ROWS - rows, BATCH_BYTES - size_bytes)
            if count < len(run.messages):
                self._left.appendleft(Run(run.tp, run.messages[count:], run.offsets[count:]))
                run = Run(run.tp, run.messages[:count], run.offsets[:count])
            runs.append(run)
            rows += count
            size_bytes += run.messages.size_bytes
        if rows:
            self._learn_size(size_bytes / rows)
        return runs

    def _learn_size(self, mean_bytes: float) -> None:
        """Asks for as many messages at once as a quarter of a batch's bytes probably holds."""
        self._take_at_most = max(1, int(BATCH_BYTES / 4 / max(mean_bytes, 1.0)))

    def _step(self, at_most: int) -> list[Run]:
        """One look at the queue."""
        progress = self._progress
        # never more than can be there: one event of a log's end per partition comes on top
        wanted = progress.remaining + len(progress.open)
        if not self._consumer.drains:
            wanted = min(wanted, at_most, self._take_at_most)
        taken = self._consumer.take(max(1, wanted), min(WAIT_SECONDS, self._deadline.remaining_seconds()))
        if taken.empty:
            self._nothing_came()
            return []
        self._deadline = Deadline.after_ms(self._settings.poll_timeout_ms)
        open_before = progress.open
        runs = self._split(_messages(taken)) if taken.messages else []
        for tp, log_end in taken.log_ends.items():
            self._at_log_end(tp, log_end)
        for tp in taken.out_of_range:
            self._out_of_range(tp)
        for tp in taken.gone:
            if progress.is_open(tp):
                self._lost(tp, progress.end(tp), "the topic or partition was deleted")
        finished = open_before - progress.open
        if finished and not progress.done:
            self._consumer.drop(sorted(finished))
        return runs

    def _split(self, messages: Messages) -> list[Run]:
        offsets = messages.offsets
        if self._single is not None:
            return self._accept(self._single, messages, offsets)
        found: list[Run] = []
        changes = np.flatnonzero(np.diff(messages.partition_ids(self._one_topic))) + 1
        for first, past in pairwise([0, *changes.tolist(), len(messages)]):
            tp = messages.partition_at(first)
            found += self._accept(tp, messages[first:past], offsets[first:past])
        return found

    def _accept(self, tp: TopicPartition, messages: Messages, offsets: npt.NDArray[np.int64]) -> list[Run]:
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

    def _nothing_came(self) -> None:
        before = time.monotonic() - SHORT_LOG_GRACE_SECONDS
        for tp, since in list(self._short_since.items()):
            if self._progress.is_open(tp) and since < before:
                self._check_short_log(tp)
        if self._progress.done or not self._deadline.expired:
            return
        tp = min(self._progress.open)
        reason = self._consumer.last_complaint or "the broker answers no fetches for it"
        if tp in self._short_since:
            reason = f"the log ends at {self._progress.position(tp)}"
        raise UnavailableError(
            f"nothing arrived from {tp} at offset {self._progress.position(tp)} within "
            f"{self._settings.poll_timeout_ms} ms (kafkaConsumer.pollTimeoutMs), wanted up to offset "
            f"{self._progress.end(tp)}, excluded; {len(self._progress.open)} partition(s) unfinished. "
            f"Last seen: {reason}.",
            fix="check the partition's leader and the network; raise kafkaConsumer.pollTimeoutMs "
            "if the cluster is merely slow.",
        )

    def _check_short_log(self, tp: TopicPartition) -> None:
        """A log that ended below the range's end, for longer than a change of leader explains."""
        self._short_since[tp] = time.monotonic()
        try:
            _, high = self._consumer.log_bounds(tp, self._bounds_timeout())
        except RetriableError as failure:
            self._consumer.last_complaint = str(failure)
            return
        if high < self._progress.end(tp):
            self._lost(tp, self._progress.end(tp), f"the log ends at offset {high} now")

    def _out_of_range(self, tp: TopicPartition) -> None:
        """The position is not in the log: aged out below it, or the log became shorter."""
        if not self._progress.is_open(tp):
            return
        position = self._progress.position(tp)
        try:
            low, high = self._consumer.log_bounds(tp, self._bounds_timeout())
        except RetriableError as failure:
            self._consumer.last_complaint = str(failure)
            self._consumer.move(tp, position)  # asks again; the deadline bounds it
            return
        if position < low:
            self._lost(tp, low, f"the log starts at offset {low} now")
        elif position > high:
            self._lost(tp, self._progress.end(tp), f"the log ends at offset {high} now")
        if self._progress.is_open(tp):
            self._consumer.move(tp, self._progress.position(tp))

    def _bounds_timeout(self) -> float:
        return max(0.1, self._deadline.remaining_seconds(BOUNDS_TIMEOUT_SECONDS))

    def _lost(self, tp: TopicPartition, until: int, why: str) -> None:
        position, end = self._progress.position(tp), self._progress.end(tp)
        until = min(until, end)
        text = f"offsets {position} to {until} (excluded) of {tp} cannot be read: {why}."
        if self._settings.fail_on_data_loss:
            raise DataLossError(
                text,
                fix="set failOnDataLoss=false to go on with what is left, or start a new query; "
                "raise the topic's retention if the query was too slow.",
            )
        _log.warning("%s failOnDataLoss=false: reading goes on at offset %d.", text, until)
        self._progress.advance(tp, until)


def _messages(taken: Taken) -> Messages:
    found = taken.messages
    return found if isinstance(found, KernelMessages) else MessageList(found)
