"""Measures a source in the process that plans its batches, for a file and for Spark's ``lastProgress``."""

from __future__ import annotations

import json
import threading
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe import journal
from kafka_eos_source.observe.background import (
    Call,
    begun_in_background,
    guarded,
    in_background,
    result_from_background,
)
from kafka_eos_source.observe.figures import BatchFigures, SourceFigures, SourceState, position_id
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.protocol.offset_log import OURS
from kafka_eos_source.runtime.json_input import JsonError, parse_json

#: How often the file of a source is written, if anything has changed.
INTERVAL_SECONDS = 1.0
#: Positions that are kept to connect the source with its query.
_MOST_POSITIONS = 16
#: A source without ``application.id`` looks for its query this often at once, and then at intervals: the
#: query may write to another sink.
_QUICK_SEARCHES = 10
_SEARCH_INTERVAL_SECONDS = 10.0
#: Number of remembered partition offsets from which the lag in seconds is computed.
_MOST_REMEMBERED = 200_000
_MOST_SAMPLES = 600


@dataclass(frozen=True)
class _Sample:
    at: float
    latest: Offsets


class LagClock:
    """Remembers what was available when, to tell since when a query is behind."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def add(self, at: float, latest: Offsets) -> None:
        """Remembers what was available at a time, in seconds since 1970; at most one sample per second."""
        if self._samples and at - self._samples[-1].at < INTERVAL_SECONDS:
            return
        self._samples.append(_Sample(at, latest))
        most = max(2, min(_MOST_SAMPLES, _MOST_REMEMBERED // max(1, len(latest))))
        while len(self._samples) > most:
            self._samples.popleft()

    def behind_since(self, tp: TopicPartition, committed: int) -> tuple[float, bool] | None:
        """Returns since when the record at offset ``committed`` has been available.

        Returns:
            The time in seconds since 1970, and whether it may have been available even before; None if no
            sample shows the record.
        """
        first = bisect_right(self._samples, committed, key=lambda sample: sample.latest.get(tp, 0))
        return None if first == len(self._samples) else (self._samples[first].at, first == 0)


@dataclass(frozen=True)
class _Seen:
    """What the planner has seen last; see `SourceFigures`. ``latest_at`` is when it first saw ``latest``."""

    state: SourceState
    since: float
    reason: str = ""
    start: Offsets = field(default_factory=dict)
    planned: Offsets = field(default_factory=dict)
    latest: Offsets = field(default_factory=dict)
    latest_at: float = 0.0
    hidden: Offsets = field(default_factory=dict)
    hidden_since: float | None = None
    retention_seconds: float | None = None


class SourceObserver:
    """Measures one source, and writes what has changed to the source's file.

    The first plan is written before Spark learns of it, later ones by a thread, once per second. Spark may
    kill the process at any time, without calling `stopped`; readers of the file then see that its writer is
    dead. A query without such a file would seem to run for as long as its driver does.

    No error of the measurement reaches the caller.

    Args:
        name: what the source reads, for people.
        application_id: option ``application.id`` of the source; "" = not set.
        clock: returns seconds since 1970.
    """

    def __init__(self, name: str, application_id: str, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._application_id = application_id
        self._clock = clock
        self._file = journal.SourceFile(uuid.uuid4().hex)
        self._lag = LagClock()
        self._seen = _Seen(SourceState.IDLE, clock())
        self._written: tuple[_Seen | None, str] = None, application_id
        self._positions: deque[str] = deque(maxlen=_MOST_POSITIONS)
        self._asked_at: float | None = None
        self._newest: Call[BatchFigures | None] | None = None
        self._searched_at, self._searches = 0.0, 0
        self._began_at = self._written_at = clock()
        self._complaint: Callable[[], str] = str
        self._written_at_once: set[bool] = set()  # whether the plans started a batch
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # the last writer at the end of the run is `stopped`
        self._thread: threading.Thread | None = None

    def explained_by(self, complaint: Callable[[], str]) -> None:
        """Names a function that returns why brokers may not answer; "" if it does not know."""
        self._complaint = complaint

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Encloses requests to brokers. If they take long, the file says so."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kafka-eos-observe", daemon=True)
            guarded(self._thread.start)  # raises if the process may not have another thread
        self._asked_at = self._clock()
        try:
            yield
        finally:
            self._asked_at = None

    def planned(
        self,
        start: Offsets,
        end: Offsets,
        latest: Offsets,
        *,
        is_batch: bool,
        reason: str,
        hidden: Offsets | None = None,
        retention_ms: int | None = None,
    ) -> None:
        """Records what the source planned.

        Args:
            start: the position where the batch starts.
            end: where it ends.
            latest: what readers can read up to.
            is_batch: whether the source starts a batch.
            reason: why it starts none, if it is not that there are no records.
            hidden: offsets that open transactions hide, per partition.
            retention_ms: how long Kafka keeps the offsets of an idle query; None if that is not known.
        """
        guarded(partial(self._look, hidden or {}, retention_ms))
        guarded(partial(self._planned, start, end, latest, is_batch=is_batch, reason=reason))
        if is_batch not in self._written_at_once:
            self._written_at_once.add(is_batch)
            in_background(self.write)

    def _look(self, hidden: Offsets, retention_ms: int | None) -> None:
        """Records what the source knows besides its plan."""
        seen = self._seen
        retention = None if retention_ms is None else retention_ms / 1000
        since = None if not hidden else self._clock() if seen.hidden_since is None else seen.hidden_since
        if (hidden, since, retention) != (seen.hidden, seen.hidden_since, seen.retention_seconds):
            with self._lock:
                self._seen = replace(
                    seen, hidden=dict(hidden), hidden_since=since, retention_seconds=retention
                )

    def _planned(self, start: Offsets, end: Offsets, latest: Offsets, *, is_batch: bool, reason: str) -> None:
        now, seen = self._clock(), self._seen
        if seen.latest != latest:
            seen = replace(seen, latest=latest, latest_at=now)
        if is_batch:
            seen = replace(
                seen,
                state=SourceState.PLANNED,
                since=now,
                reason="",
                start=start,
                planned=end,
            )
        else:
            if (seen.state, seen.reason) != (SourceState.IDLE, reason):
                seen = replace(seen, state=SourceState.IDLE, since=now, reason=reason)
            if seen.start != start:
                seen = replace(seen, start=start)
        with self._lock:
            self._lag.add(now, latest)
            self._seen = seen

    def stopped(self) -> None:
        """Records that the run of the query has ended."""
        self._ended.set()
        with self._lock:
            self._seen = replace(self._seen, state=SourceState.STOPPED, since=self._clock(), reason="")
        guarded(self.write)

    def look_up_newest_batch(self) -> None:
        """Begins to read the newest batch, which `newest_batch` returns after the brokers have answered."""
        is_reading = self._newest is not None and not self._newest.is_done.is_set()
        # without an application.id, the query is found by the position that is planned next
        if self._application_id and not is_reading:
            self._newest = begun_in_background(self._read_newest)

    def newest_batch(self) -> BatchFigures | None:
        """Returns the newest batch that the query of this source has committed; None if that is not known."""
        begun, self._newest = self._newest, None
        return in_background(self._read_newest) if begun is None else result_from_background(begun)

    def _read_newest(self) -> BatchFigures | None:
        return journal.attempt(self._newest_batch, "read")

    def _newest_batch(self) -> BatchFigures | None:
        known = journal.newest_batch(self._application_id) if self._application_id else None
        if known is not None and known.ended_at >= self._began_at:
            return known
        # A query without a commit does not use the option application.id.
        return self._batch_at_position() or known

    def _batch_at_position(self) -> BatchFigures | None:
        """Searches the newest batches of this host for the position that this source planned last."""
        start, now = self._seen.start, self._clock()
        pause = 0.0 if self._searches < _QUICK_SEARCHES else _SEARCH_INTERVAL_SECONDS
        if not start or now - self._searched_at < pause:
            return None
        self._searched_at, self._searches = now, self._searches + 1
        own, driver = {position_id(start), *self._positions.copy()}, this_writer().driver
        for batch in journal.newest_batches(self._began_at):
            if batch.writer.driver == driver and any(read.position in own for read in batch.sources):
                self._application_id = batch.application_id
                return batch
        return None

    def write(self) -> None:
        """Writes the file, if anything has changed or brokers have not answered for a while."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        now, asked_at = self._clock(), self._asked_at
        waits = asked_at is not None and now - asked_at >= INTERVAL_SECONDS
        seen, application_id = self._seen, self._application_id
        is_written = self._written[0] is seen and self._written[1] == application_id
        if is_written and not waits and now - self._written_at < journal.RENEWAL_SECONDS:
            return
        self._written_at = now
        self._written = None if waits else seen, application_id
        if waits and asked_at is not None and seen.state is not SourceState.STOPPED:
            seen = replace(seen, state=SourceState.ASKING, since=asked_at, reason=self._complaint())
        self._file.write(self._figures(seen, now))

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            guarded(self.write)

    def _figures(self, seen: _Seen, now: float) -> SourceFigures:
        behind: dict[str, float] = {}
        at_least: set[str] = set()
        with self._lock:
            for tp, committed in seen.start.items():
                if seen.latest.get(tp, 0) > committed:
                    # without a sample, the record is newer than the last one
                    since, was_there = self._lag.behind_since(tp, committed) or (seen.latest_at, False)
                    behind[tp.topic] = min(since, behind.get(tp.topic, since))
                    if was_there:
                        at_least.add(tp.topic)
        for offsets in (seen.start, seen.planned):
            position = position_id(offsets)
            if offsets and position not in self._positions:
                self._positions.append(position)
        return SourceFigures(
            at=now,
            writer=this_writer(),
            state=seen.state,
            state_since=seen.since,
            reason=seen.reason,
            application_id=self._application_id,
            name=self._name,
            start=seen.start,
            planned=seen.planned,
            latest=seen.latest,
            positions=tuple(self._positions),
            behind_since=behind,
            behind_at_least=tuple(sorted(at_least)),
            hidden=seen.hidden,
            hidden_since=seen.hidden_since,
            retention_seconds=seen.retention_seconds,
        )


# -- figures in Spark's progress reports -----------------------------------------------------------

_LIVE = "live"


def with_figures(latest: Mapping[str, Any], batch: BatchFigures | None) -> dict[str, Any]:
    """Adds the newest micro-batch to the JSON of a source position.

    Args:
        latest: the position, as `SourcePosition.to_dict` returns it.
        batch: the newest micro-batch of the query; None if it is not known.
    """
    if batch is None:
        return dict(latest)
    return {**latest, OURS: {**latest.get(OURS, {}), _LIVE: parse_json(batch.to_json())}}


def figures_in(latest: object) -> BatchFigures | None:
    """Returns the micro-batch that `with_figures` added; None if there is none.

    Args:
        latest: ``latestOffset`` of a source in a progress report: an object of JSON, or its text.
    """
    try:
        found = parse_json(latest) if isinstance(latest, str) else latest
    except JsonError:
        return None
    ours = found.get(OURS) if isinstance(found, dict) else None
    live = ours.get(_LIVE) if isinstance(ours, dict) else None
    return None if live is None else BatchFigures.from_json(json.dumps(live))
