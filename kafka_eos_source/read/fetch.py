"""Reads the offset ranges of one task from Kafka as Arrow batches of bounded size.

The interface is `read_ranges`. It has two implementations with the same results, in C and in Python, which
differ in the consumer and in how columns are built from its messages.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import (
    DataLossError,
    KafkaEosError,
    RecordsDamagedError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.consumer import POOL, Damage, Taken
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.kernel_messages import KernelMessages
from kafka_eos_source.kafka.needs_librdkafka import NeedsLibrdkafkaError
from kafka_eos_source.kafka.read_client import reading_consumer
from kafka_eos_source.model import Epochs, OffsetRange, TopicPartition
from kafka_eos_source.read.columns import record_batches
from kafka_eos_source.read.progress import Progress
from kafka_eos_source.read.runs import MessageList, Messages, Run
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.schema import read_arrow_schema
from kafka_eos_source.spark.worker import cycle_collection_paused

_log = logging.getLogger(__name__)

#: Maximum number of rows in an Arrow batch. Larger batches were not faster; smaller ones cost Spark more per
#: row.
BATCH_ROWS = 10_000

#: A batch is full when its values reach this many bytes. It may exceed this by the messages of one poll.
BATCH_BYTES = 16 << 20

#: Messages of two polls in one batch would have to be copied. So a batch ends with a poll if it has this many
#: rows, or values of this many bytes: Spark's cost per batch is then small beside that of the copy.
ENOUGH_ROWS, ENOUGH_BYTES = BATCH_ROWS // 2, 1 << 20

#: Number of messages to poll while their size is unknown.
FIRST_TAKE = 500

#: Longest wait of one poll. Between two polls, the task checks its timeout and the errors of the client.
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
        conf: configuration of the consumer, from `kafka.config.consumer_config`.
        include_headers: whether to build the column ``headers``.
        fail_on_data_loss: whether to raise if offsets no longer exist; otherwise the task logs it and
            continues.
        poll_timeout_ms: how long to wait for data before failing (``kafkaConsumer.pollTimeoutMs``).
        columns: names of the columns to build; None = all.
        client: the option ``read.client``; "" = it is not set.
        skip_damaged: offsets of damaged record batches to pass over, by partition (``skipDamagedRecords``).
    """

    conf: Mapping[str, str] = field(repr=False)  # may hold passwords
    include_headers: bool = False
    fail_on_data_loss: bool = True
    poll_timeout_ms: int = 120_000
    columns: tuple[str, ...] | None = None
    client: str = ""
    skip_damaged: Mapping[TopicPartition, tuple[int, ...]] = field(default_factory=dict)


class RangeConsumer(Protocol):
    """The methods of `kafka.consumer.AssignedConsumer` that `Reading` uses; tests use a model of a log."""

    drains: ClassVar[bool]
    last_complaint: str

    def want(self, columns: Collection[str]) -> None: ...
    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None = None,
        epochs: Epochs | None = None,
    ) -> None: ...
    def move(self, tp: TopicPartition, position: int) -> None: ...
    def drop(self, tps: Sequence[TopicPartition]) -> None: ...
    def take(self, at_most: int, wait_seconds: float) -> Taken: ...
    def log_bounds(self, tp: TopicPartition, timeout_seconds: float) -> tuple[int, int]: ...
    def login_error(self, doing: str) -> KafkaEosError | None: ...


def read_ranges(settings: ReadSettings, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
    """Reads every range to its end.

    A task attempt calls this once, or once for each shard of a stateful operator. It reads several partitions
    at a time. One batch and the prefetch queue of librdkafka (``queued.max.messages.kbytes``) bound its
    memory.

    Yields:
        Non-empty batches with the schema of `read_arrow_schema`, or its requested columns, in offset order
        within each partition.

    Raises:
        DataLossError: if offsets of a range no longer exist, with ``fail_on_data_loss``.
        RecordsDamagedError: if a record batch is damaged that ``skip_damaged`` does not name.
        UnavailableError: if nothing arrived for ``poll_timeout_ms`` although a range is not finished.
        AuthorizationError: if the principal is not authorized to read.
        InvalidRecordError: as `record_batches`.
    """
    progress = Progress(ranges)
    if progress.done:
        return
    with ExitStack() as borrowed:
        kind = reading_consumer(settings.conf, settings.client)
        reading = Reading(borrowed.enter_context(POOL.borrow(settings.conf, kind)), progress, settings)
        while not reading.done:
            with cycle_collection_paused():
                try:
                    runs = reading.next_runs()
                except NeedsLibrdkafkaError as found:
                    _log.info("librdkafka reads this task's partitions, because %s", found)
                    borrowed.close()
                    reading.use(borrowed.enter_context(POOL.borrow(settings.conf, range_consumer())))
                    continue
                batches = record_batches(runs, settings.include_headers, settings.columns) if runs else []
                del runs
            yield from batches


class Reading:
    """Reads the ranges of one task: polls, divides by partition, detects finished and lost ranges.

    Args:
        consumer: a consumer, which gets the unfinished ranges as its assignment.
        progress: progress of the ranges; the read ends with ``progress.done``.
        settings: settings of the read.
    """

    def __init__(self, consumer: RangeConsumer, progress: Progress, settings: ReadSettings) -> None:
        self._progress = progress
        self._settings = settings
        self._single = next(iter(progress.open)) if len(progress.open) == 1 else None
        self._one_topic = len({tp.topic for tp in progress.open}) == 1
        self._take_at_most = FIRST_TAKE
        #: Messages that were polled, but are not in a batch yet.
        self._left: deque[Run] = deque()
        #: Partitions whose log ends before the end of their range, and since when (monotonic seconds).
        self._short_since: dict[TopicPartition, float] = {}
        self._deadline = Deadline.after_ms(settings.poll_timeout_ms)
        self.use(consumer)

    def use(self, consumer: RangeConsumer) -> None:
        """Continues with this consumer, which gets the unfinished ranges as its assignment."""
        self._consumer = consumer
        names = read_arrow_schema(self._settings.include_headers).names
        columns = self._settings.columns
        consumer.want(names if columns is None else set(names).intersection(columns))
        self._progress.take_finished()  # the new assignment does not have them
        unfinished = sorted(self._progress.open)
        consumer.assign(
            {tp: self._progress.position(tp) for tp in unfinished},
            {tp: self._progress.end(tp) for tp in unfinished},
            {tp: self._progress.epoch(tp) for tp in unfinished},
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
            NeedsLibrdkafkaError: if another consumer must read what is left; see `use`. Nothing is lost.
        """
        self._deadline = Deadline.after_ms(
            self._settings.poll_timeout_ms
        )  # excludes the time that Spark took
        runs: list[Run] = []
        rows = size_bytes = 0
        while not self.done and rows < BATCH_ROWS and size_bytes < BATCH_BYTES:
            if not self._left:
                if rows >= ENOUGH_ROWS or size_bytes >= ENOUGH_BYTES:
                    break
                try:
                    self._left.extend(self._poll(BATCH_ROWS - rows))
                except NeedsLibrdkafkaError:
                    self._left.extend(runs)
                    raise
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
            self._adapt_poll_size(size_bytes / rows)
        return runs

    def _adapt_poll_size(self, mean_bytes: float) -> None:
        """Sets the number of messages per poll to what probably makes a quarter of a full batch."""
        self._take_at_most = max(1, int(BATCH_BYTES / 4 / max(mean_bytes, 1.0)))

    def _poll(self, at_most: int) -> list[Run]:
        """Polls once, and returns the messages that belong to the ranges."""
        progress = self._progress
        # no more than can exist: the remaining offsets, and one event for the end of each log
        wanted = progress.remaining + len(progress.open)
        if not self._consumer.drains:
            wanted = min(wanted, at_most, self._take_at_most)
        taken = self._consumer.take(max(1, wanted), min(WAIT_SECONDS, self._deadline.remaining_seconds()))
        if taken.empty:
            self._check_silence()
            return []
        remaining_before = progress.remaining
        runs = self._split(_messages(taken)) if taken.messages else []
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

    def _check_silence(self) -> None:
        """Handles a poll without progress.

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
        refused = self._consumer.login_error(f"reading {tp} from offset {self._progress.position(tp)}")
        if refused is not None:
            raise refused
        reason = self._consumer.last_complaint or "the broker does not answer fetch requests"
        if tp in self._short_since:
            reason = f"the log ends at {self._progress.position(tp)}"
        raise UnavailableError(
            f"no records of {tp} arrived within {self._settings.poll_timeout_ms} ms "
            f"(kafkaConsumer.pollTimeoutMs), at offset {self._progress.position(tp)} of a range that ends "
            f"before offset {self._progress.end(tp)}. {len(self._progress.open)} partition(s) of the task "
            f"are unfinished. Reason: {reason}.",
            fix="check the leader of the partition and the network. If the cluster is only slow, increase "
            "kafkaConsumer.pollTimeoutMs.",
        )

    def _check_short_log(self, tp: TopicPartition) -> None:
        """Asks where a log ends that has been too short for longer than a change of leader explains."""
        self._short_since[tp] = time.monotonic()
        try:
            _, high = self._consumer.log_bounds(tp, self._bounds_timeout())
        except RetriableError as failure:
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
            low, high = self._consumer.log_bounds(tp, self._bounds_timeout())
        except RetriableError as failure:
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
        named = self._settings.skip_damaged.get(tp, ())
        position, last = progress.position(tp), damage.past_offset - 1
        if damage.resume < 0 or not any(damage.offset <= offset <= last for offset in named):
            raise _records_damaged(damage, position, self._settings.skip_damaged)
        until = min(damage.resume, progress.end(tp))
        _log.warning(
            "%s The task continues at offset %d, as skipDamagedRecords asks; %d offset(s) are lost: %s.",
            _what(damage),
            until,
            until - position,
            f"{position} to {until - 1}" if until > position else "the records were read nevertheless",
        )
        self._consumer.move(tp, damage.resume)
        progress.advance(tp, until)

    def _bounds_timeout(self) -> float:
        return max(0.1, self._deadline.remaining_seconds(BOUNDS_TIMEOUT_SECONDS))

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


def _messages(taken: Taken) -> Messages:
    found = taken.messages
    return found if isinstance(found, KernelMessages) else MessageList(found)


def _what(damage: Damage) -> str:
    offsets = f"offset {damage.offset}"
    if damage.past_offset != damage.offset + 1:
        last = damage.past_offset - 1 if damage.past_offset >= 0 else "an unknown one"
        offsets = f"offsets {damage.offset} to {last}"
    return f"{offsets} of {damage.tp} cannot be read, because the record batch is damaged: {damage.text}."


def _records_damaged(
    damage: Damage, position: int, named: Mapping[TopicPartition, tuple[int, ...]]
) -> RecordsDamagedError:
    """Returns the error for a damaged place.

    Args:
        damage: the place.
        position: the next offset to read.
        named: the offsets that the option ``skipDamagedRecords`` names already.
    """
    tp = damage.tp
    if damage.intact_on:
        fix = (
            f"make broker {damage.intact_on[0]} the leader of the partition (kafka-reassign-partitions.sh "
            "with it as the first replica, then kafka-leader-election.sh --election-type PREFERRED), start "
            f"the query again, and let broker {damage.leader} copy the partition again"
        )
    else:
        fix = (
            "check the disk of the broker, restore its log from a copy if there is one, and start the query "
            "again"
        )
    if damage.resume < 0:
        fix += ". No offset behind the damage can be read, so that the query cannot pass over it"
    else:
        by_topic: dict[str, dict[str, list[int]]] = {}
        for each, offsets in {**named, tp: (*named.get(tp, ()), damage.offset)}.items():
            by_topic.setdefault(each.topic, {})[str(each.partition)] = sorted(set(offsets))
        lost = max(0, min(damage.resume, damage.past_offset) - max(damage.offset, position))
        fix += (
            f". If there is no copy, pass over the batch, whereby {lost} offset(s) are lost: "
            f".option('skipDamagedRecords', '{json.dumps(by_topic, separators=(',', ':'))}') on the source"
        )
    return RecordsDamagedError(_what(damage), fix=f"{fix}. See docs/runbooks.md, RECORDS_DAMAGED.")
