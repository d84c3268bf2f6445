"""A wrapper that abandons a sink's call that never returns, and treats the sink as down.

The time limit restarts whenever the sink reads rows, staged ones or those in its notes folder. So a large
batch may take long, but a sink that makes no progress is abandoned after `commitTimeoutMs`. An abandoned call
may still take effect later. That is the same situation as after the death of a driver at that point, and the
next `recover` resolves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.watchdog import Pulse, Watchdog
from kafka_eos_source.sinks.contract import (
    Fatal,
    Outcome,
    Retryable,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.sink_options import SinkNaming

_CLOSE_SECONDS = 5.0

T = TypeVar("T")


class WatchedSink(TwoPhaseSink):
    """Wraps a sink on the driver: one thread makes its calls, in order, each with a time limit.

    A call that does not return raises `RetriableError`, and so does every later call. Only a new instance
    can be used then. Errors and outcomes name the sink's options in full; errors of calls that have no
    outcome name the sink too.
    """

    def __init__(self, sink: TwoPhaseSink, naming: SinkNaming) -> None:
        self._sink = sink
        self._naming = naming
        self._pulse = Pulse()

    def open(self, context: SinkContext) -> None:
        store = None if context.store is None else _PulsingNotesFolder(context.store.location, self._pulse)
        super().open(replace(context, store=store))
        with self._naming.errors():
            self._sink.open(self.context)
        self._watchdog = Watchdog(f"sink {context.name!r}", self._pulse)

    def close(self) -> None:
        self._watchdog.end(self._sink.close, _CLOSE_SECONDS)

    def target(self) -> str | None:
        with self._naming.errors():
            return self._sink.target()

    def risks(self) -> Sequence[str]:
        return self._sink.risks()

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        with self._naming.errors():
            self._call("check", deadline, self._sink.check, schema)

    def stage(self, context: StageContext) -> Stage:
        return self._sink.stage(context)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        pulsing = _PulsingStaged(staged, self._pulse)
        return self._call(f"prepare {txn}", deadline, self._sink.prepare, txn, pulsing)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._call(f"commit {txn}", deadline, self._sink.commit, txn)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._call(f"abort {txn}", deadline, self._sink.abort, txn)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return self._call("list prepared ids", deadline, self._sink.recover)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        self._call("tidy up", deadline, self._sink.tidy, batch_id)

    def _call(self, doing: str, deadline: Deadline, call: Callable[..., T], *arguments: Any) -> T:
        """Makes a call of the contract, whose last argument is always the deadline."""
        limited = partial(call, *arguments, deadline)
        try:
            answer = self._watchdog.call(doing, limited, deadline.remaining_seconds())
        except KafkaEosError as error:
            self._naming.rename(error)
            raise
        if isinstance(answer, Retryable):
            return replace(answer, why=self._naming.full(answer.why))
        if isinstance(answer, Fatal):
            return replace(answer, why=self._naming.full(answer.why), fix=self._naming.full(answer.fix))
        return answer


class _PulsingStaged:
    """`Staged` that resets the time limit whenever the sink reads a batch."""

    def __init__(self, staged: Staged, pulse: Pulse) -> None:
        self._staged = staged
        self._pulse = pulse

    @property
    def rows(self) -> int:
        return self._staged.rows

    @property
    def schema(self) -> pa.Schema:
        return self._staged.schema

    @property
    def receipts(self) -> Sequence[Any]:
        return self._staged.receipts

    def batches(self) -> Iterator[pa.RecordBatch]:
        return _pulsing(self._staged.batches(), self._pulse)


@dataclass(frozen=True)
class _PulsingNotesFolder(NotesFolder):
    """`NotesFolder` that resets the time limit whenever the sink reads a batch."""

    pulse: Pulse

    def rows(self, name: str, digest: str) -> Iterator[pa.RecordBatch]:
        return _pulsing(super().rows(name, digest), self.pulse)


def _pulsing(batches: Iterator[pa.RecordBatch], pulse: Pulse) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        pulse.beat()
        yield batch
