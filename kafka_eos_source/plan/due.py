"""Decides when an idle query needs an empty micro-batch.

There are two reasons. First, something in its state is due: operators request micro-batches at processing
times (`state.model.BatchContext.request_batch_at`). Each transaction commits the earliest request in its
token, so it survives a restart on another host. The process that commits also writes it to a private file
on the driver's host. The source asks Kafka once in each run, and then reads the file, so waiting for a
timer costs no requests. If Kafka does not answer, the source asks again in a thread, because new records
should not wait for an answer that only timers need.

Second, the commit token must not expire. Kafka deletes the offsets of a consumer group, and with them the
token, if the group has committed nothing for ``offsets.retention.minutes``. The process of the source is
the only one that exists between two micro-batches, so it measures the time. A renewal also runs the
operators, and its commit writes the file of due times again if that was lost.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import KafkaEosError, UnavailableError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Due, Token, newest
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.runtime.logs import warn_once

if TYPE_CHECKING:
    from kafka_eos_source.options.checked import ReadOptions

_log = logging.getLogger(__name__)

#: The longest pause between two batches for a due time that stays the same, in ms.
LONGEST_PAUSE_MS = 60_000
#: Pause before the source asks Kafka again, if Kafka did not answer.
_ASK_AGAIN_SECONDS = 60.0
#: Files of queries that have not committed for this long are deleted.
_KEPT_SECONDS = 7 * 24 * 3600.0
#: An idle source renews the token for the first time this long after the start of a run, in ms. The query may
#: have been stopped for long, and the source does not know how old the token is.
FIRST_AFTER_MS = 60_000
#: Shortest interval, in ms: a quarter of one minute, the smallest retention that Kafka accepts.
_SHORTEST_INTERVAL_MS = 15_000


class DueBatches:
    """Decides when one source starts empty batches for what is due.

    Two such batches are at least ``interval_ms`` apart. A due time may stay the same after its batch: the
    clock of an executor's host is behind that of the driver's host, or the file cannot be replaced. The
    source then waits for as long as that clock is behind, and twice as long with each try.

    Args:
        interval_ms: option ``timer.batch.interval.ms``; 0 = start no batches.
        newest: returns what the newest transaction of the query committed; None = nothing is due.
        clock: returns seconds, such as ``time.monotonic``.
        now_ms: returns ms since the epoch.
    """

    def __init__(
        self,
        interval_ms: int,
        newest: Callable[[], Due | None],
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._interval_ms = interval_ms
        self._newest = newest
        self._clock = clock
        self._now_ms = now_ms
        self._due: Due | None = None
        self._due_at_ms = 0
        self._answered: Due | None = None
        self._answered_at = 0.0
        self._pause_ms = 0

    def is_due(self) -> bool:
        """Returns whether the source must start an empty batch now. Call `batch_caused` if it does."""
        due = self._newest() if self._interval_ms else None
        now_ms = self._now_ms()
        if due != self._due:
            self._due = due
            # the shard has just read its clock, so a time in the future shows that its clock is ahead
            self._due_at_ms = 0 if due is None else due.at_ms - max(0, due.clock_ms - now_ms)
        if due is None or now_ms < self._due_at_ms:
            return False
        if self._answered is None:
            return True
        pause_ms = self._interval_ms
        if self._stays(due):
            pause_ms = max(self._pause_ms, min(due.at_ms - due.clock_ms, LONGEST_PAUSE_MS))
        return round((self._clock() - self._answered_at) * 1000) >= pause_ms

    def batch_caused(self) -> None:
        """Records that the source starts a batch for the due time now."""
        assert self._due is not None, "`is_due` returned True"
        doubled = min(2 * self._pause_ms, max(LONGEST_PAUSE_MS, self._interval_ms))
        self._pause_ms = doubled if self._stays(self._due) else self._interval_ms
        self._answered, self._answered_at = self._due, self._clock()

    def _stays(self, due: Due) -> bool:
        """Whether the last batch for a due time came too early for the shard, or its outcome is unknown."""
        before = self._answered
        if before is None:
            return False
        return due == before or (due.at_ms <= before.at_ms and due.clock_ms < due.at_ms)


class CommittedDue:
    """Finds out what the newest transaction of a query committed about its due times.

    It asks Kafka once, and then reads the file. It asks again if Kafka did not answer, or if the file is
    older than what is known: a process of an earlier run, which was stopped while it wrote, may have replaced
    the newer file.

    A call waits for the first answer, however long that takes. After a failure, a call waits for the next
    answer only for as long as has passed since the call before. So a query that asks for new records
    all the time finds them without delay, and one with an hour between its triggers has the answer in the
    same trigger. A later call takes an answer that comes later.

    Args:
        application_id: the query.
        ask_kafka: returns the query's newest token; None if there is none, or if asking again is useless.
            Raises `UnavailableError` if Kafka does not answer. It may be called in another thread.
        clock: returns seconds, such as ``time.monotonic``.
    """

    def __init__(
        self, application_id: str, ask_kafka: Callable[[], Token | None], clock: Callable[[], float]
    ) -> None:
        self._application_id = application_id
        self._ask_kafka = ask_kafka
        self._clock = clock
        self._ask_at: float | None = clock()
        self._question: _Question | None = None
        self._has_failed = False
        self._returned_at = clock()
        self._text: str | None = None
        self._sequence = -1
        self._due: Due | None = None
        self._older: tuple[int, Due | None] | None = None

    def __call__(self) -> Due | None:
        """Returns the earliest due time and the clock of its shard; None if nothing is known to be due."""
        pause_seconds = self._clock() - self._returned_at
        self._read_file()
        if self._ask_at is not None and self._question is None and self._clock() >= self._ask_at:
            self._question = _Question(self._ask_kafka, self._text, in_thread=self._has_failed)
        if self._question is not None and self._question.is_answered_within(pause_seconds):
            question, self._question = self._question, None
            self._take_answer(question)
        self._returned_at = self._clock()
        return self._due

    def _read_file(self) -> None:
        text = _read(self._application_id)
        if text is None or text == self._text:
            return
        sequence, found = _parsed(text)
        if sequence >= self._sequence:
            self._sequence, self._due, self._older = sequence, found, None
        else:
            self._older = sequence, found
            self._ask_at = self._clock() if self._ask_at is None else self._ask_at
        self._text = text

    def _take_answer(self, question: _Question) -> None:
        try:
            token = question.answer()
        except UnavailableError:
            self._ask_at = self._clock() + _ASK_AGAIN_SECONDS
            self._has_failed = True
            return
        if question.text != self._text:
            # A commit replaced the file after Kafka was asked, so the answer may be older than the file.
            self._ask_at = self._clock()
            return
        self._ask_at, self._has_failed = None, False
        if token is not None:  # the file was read earlier, and the query may have run on another host since
            self._sequence, self._due = token.sequence, token.due
        elif self._older is not None:  # only the file is known, and its numbers began again
            self._sequence, self._due = self._older
        self._older = None


class _Question:
    """One request for the query's newest token.

    Args:
        ask_kafka: sends the request, and returns the token.
        text: text of the file when Kafka is asked.
        in_thread: whether ``ask_kafka`` runs in a thread; otherwise it has returned when the object exists.
    """

    def __init__(self, ask_kafka: Callable[[], Token | None], text: str | None, *, in_thread: bool) -> None:
        self.text = text
        self._answer: Future[Token | None] = Future()

        def ask() -> None:
            try:
                self._answer.set_result(ask_kafka())
            except BaseException as error:  # noqa: BLE001 - `answer` raises it
                self._answer.set_exception(error)

        _start(ask) if in_thread else ask()

    def is_answered_within(self, seconds: float) -> bool:
        """Returns whether Kafka answered or failed to answer; waits for that, but not longer."""
        wait([self._answer], timeout=seconds)
        return self._answer.done()

    def answer(self) -> Token | None:
        """Returns what Kafka answered; raises the error of the request."""
        return self._answer.result()


def _start(ask: Callable[[], None]) -> None:
    """Calls a function in a thread that does not keep the process alive."""
    try:
        threading.Thread(target=ask, name="kafka-eos-due", daemon=True).start()
    except RuntimeError:  # the host has too many threads
        ask()


def due_batches(
    options: ReadOptions,
    all_committed: Callable[[str], Mapping[TopicPartition, GroupOffset]],
    clock: Callable[[], float],
    now_ms: Callable[[], int],
) -> DueBatches | None:
    """Returns the decisions of a source with these options; None if it does not know its query.

    Args:
        options: options of the source.
        all_committed: returns all committed offsets of a consumer group.
        clock: returns seconds, such as ``time.monotonic``.
        now_ms: returns ms since the epoch.
    """
    application_id = options.application_id
    if application_id is None:
        return None
    group_id = group_of(application_id, options.group_id)

    def newest_token() -> Token | None:
        try:
            return newest(all_committed(group_id).values(), application_id)
        except KafkaEosError as error:  # the sink raises it, if it matters there
            _log.info(
                "the source cannot read the query's token in consumer group %r, so it may not know what was "
                "due when the query was started. %s",
                group_id,
                error.message,
            )
            if isinstance(error, UnavailableError):
                raise
            return None

    newest_due = CommittedDue(application_id, newest_token, clock)
    return DueBatches(options.timer_batch_interval_ms, newest_due, clock, now_ms)


def write(application_id: str, run_id: str, token: Token) -> None:
    """Writes what a transaction committed, for the source of the query.

    Args:
        application_id: the query.
        run_id: Spark's id of the run.
        token: the token of the transaction.
    """
    value: dict[str, Any] = {"sequence": token.sequence}
    if token.due is not None:
        value["due"] = [token.due.at_ms, token.due.clock_ms]
    try:
        before, name = _nothing_due.pop(application_id, None), _file(application_id)
        if token.due is not None:
            _folder().write(name, json.dumps(value))
            return
        text = json.dumps(value)
        if (
            before is not None
            and before.is_followed_by(run_id, token)
            and _folder().read(name) == before.text
        ):
            text = before.text  # the file says already that nothing is due
        else:
            _folder().write(name, text)
            _folder().tidy(_KEPT_SECONDS)
        _nothing_due[application_id] = _NothingDue(run_id, token.sequence, text)
    except (OSError, UnicodeDecodeError) as error:
        warn_once(
            _log,
            f"the commit cannot write the next due time of application.id={application_id!r}: {error}. While "
            "the query has nothing to read, its timers fire late: when its token is renewed.",
        )


@dataclass(frozen=True)
class _NothingDue:
    """The last transaction that this process committed for a query, after which nothing is due.

    Attributes:
        run_id: Spark's id of the run.
        sequence: of the transaction.
        text: what this process wrote to the file then, or before.
    """

    run_id: str
    sequence: int
    text: str

    def is_followed_by(self, run_id: str, token: Token) -> bool:
        """Whether no other process committed between this transaction and that of ``token``."""
        return (self.run_id, self.sequence + 1) == (run_id, token.sequence)


#: By query, if nothing is due after the transaction that this process committed last.
_nothing_due: dict[str, _NothingDue] = {}


def _read(application_id: str) -> str | None:
    try:
        return _folder().read(_file(application_id))
    except (OSError, UnicodeDecodeError) as error:
        warn_once(
            _log,
            f"the source cannot read the next due time of application.id={application_id!r}: {error}. While "
            "the query has nothing to read, its timers fire late: when its token is renewed.",
        )
        return None


def _parsed(text: str) -> tuple[int, Due | None]:
    """Returns sequence number and due time of a file; (-1, None) if it is damaged."""
    try:
        found = parse_json(text)
        sequence = int(found["sequence"])
        if "due" not in found:
            return sequence, None
        at_ms, clock_ms = found["due"]
        return sequence, Due(int(at_ms), int(clock_ms))
    except SHAPE_ERRORS:
        return -1, None


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-due")


def _file(application_id: str) -> str:
    return f"{application_id}.json"


# -- Renewal of the commit token ------------------------------------------------------------------


class Renewal:
    """Measures how long one source has been idle in one run of a query.

    Args:
        interval_ms: option ``token.renewal.interval.ms``; 0 = never renew.
        ask_retention_ms: returns ``offsets.retention.minutes`` of the brokers, in ms. Called at most once.
        clock: returns seconds, such as ``time.monotonic``.

    Attributes:
        retention_ms: ``offsets.retention.minutes`` in ms; None if that is not known. An idle source asks.
    """

    def __init__(
        self, interval_ms: int, ask_retention_ms: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self.retention_ms: int | None = None
        self._interval_ms = interval_ms
        self._ask_retention_ms: Callable[[], int] | None = ask_retention_ms
        self._clock = clock
        self._since: float | None = None
        self._caused_a_batch = False

    def batch_caused(self) -> None:
        """Restarts the interval, because Spark now runs a batch for this source and commits a token."""
        self._since = self._clock()
        self._caused_a_batch = True

    def is_due(self) -> bool:
        """Returns whether the source must start an empty batch now.

        The first call only starts the clock. With Trigger.Once there is no second call, hence no renewal.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        idle_ms = (now - self._since) * 1000
        if idle_ms < min(self._interval_ms or _SHORTEST_INTERVAL_MS, _SHORTEST_INTERVAL_MS):
            return False
        self._learn_retention()
        return self._interval_ms > 0 and idle_ms >= (
            self._interval_ms if self._caused_a_batch else min(self._interval_ms, FIRST_AFTER_MS)
        )

    def _learn_retention(self) -> None:
        """Limits the interval to a quarter of the time that Kafka keeps offsets; does this only once."""
        if self._ask_retention_ms is None:
            return
        ask, self._ask_retention_ms = self._ask_retention_ms, None
        try:
            self.retention_ms = ask()
        except KafkaEosError as error:
            if not self._interval_ms:
                return
            _log.info(
                "the source cannot read offsets.retention.minutes from a broker. While the query is idle, "
                "it renews its token every %d ms (token.renewal.interval.ms). %s",
                self._interval_ms,
                error.message,
            )
            return
        quarter_ms = self.retention_ms // 4
        if quarter_ms < self._interval_ms:
            _log.info(
                "while the query is idle, it renews its token every %d ms, which is a quarter of the "
                "brokers' offsets.retention.minutes, instead of every %d ms (token.renewal.interval.ms)",
                quarter_ms,
                self._interval_ms,
            )
            self._interval_ms = quarter_ms
