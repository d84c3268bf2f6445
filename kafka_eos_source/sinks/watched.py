"""A wrapper that abandons a sink's call that never returns, and the check of all sinks at the start.

A sink whose call does not return is treated as down. The time limit restarts whenever the sink reads rows,
staged ones or those in its notes folder. So a large batch may take long, but a sink that makes no progress is
abandoned after `commitTimeoutMs`. An abandoned call may still take effect later. That is the same situation
as after the death of a driver at that point, and the next `recover` resolves it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError, OperatorError, SinkUnavailableError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.watchdog import Pulse, Watchdog
from kafka_eos_source.sinks import targets
from kafka_eos_source.sinks.contract import (
    Fatal,
    Outcome,
    Refused,
    Retryable,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sink_options import SinkNaming
from kafka_eos_source.sinks.specs import SinkSpec

_CLOSE_SECONDS = 5.0

#: What `_note_refusal` noted is forgotten after this time, in seconds.
_NOTED_SECONDS = 30 * 24 * 3600.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


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
            self._call("check the target", deadline, self._sink.check, schema)

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        with self._naming.errors():
            self._call("make the target ready", deadline, self._sink.make_ready, schema)

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        with self._naming.errors():
            return self._call("say its rules for rows", deadline, self._sink.row_rules, schema)

    @property
    def refuses_rows(self) -> bool:
        """As the sink says, and True if it refused rows before although it had said that it does not."""
        return self._sink.refuses_rows or self._has_refused

    def stage(self, context: StageContext) -> Stage:
        return self._sink.stage(context)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        pulsing = _PulsingStaged(staged, self._pulse)
        outcome = self._call(f"prepare {txn}", deadline, self._sink.prepare, txn, pulsing)
        if isinstance(outcome, Refused) and not self.refuses_rows:
            self._note_refusal()
        return outcome

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._call(f"commit {txn}", deadline, self._sink.commit, txn)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._call(f"abort {txn}", deadline, self._sink.abort, txn)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return self._call("list prepared ids", deadline, self._sink.recover)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        self._call("tidy up", deadline, self._sink.tidy, batch_id)

    @property
    def _has_refused(self) -> bool:
        try:
            return _have_refused().read(self._note_name) is not None
        except (OSError, UnicodeDecodeError) as error:
            _log.info("cannot read whether sink %r has refused rows: %s", self.context.name, error)
            return False

    def _note_refusal(self) -> None:
        """Makes `refuses_rows` true in every process of this host, such as the one that plans batches."""
        try:
            _have_refused().write(self._note_name, "")
            _have_refused().tidy(_NOTED_SECONDS)
        except OSError as error:
            _log.warning("cannot note that sink %r refuses rows: %s", self.context.name, error)

    @property
    def _note_name(self) -> str:
        return hashlib.sha256(f"{self.context.owner} {self.target()}".encode()).hexdigest()

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


def _have_refused() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-sinks-refused")


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


# -- the check at the start ------------------------------------------------------------------------

#: Time limit of `check_targets` in seconds. Calls that are under way then may take `GRACE_SECONDS` longer.
CHECK_SECONDS = 4.0
#: Ids in the context of a check if the query's own are not known yet.
UNKNOWN_ID = "kafka-eos-check"
#: Of the text of an exception.
_MOST_CHARACTERS = 500
#: delta-rs writes its errors in colours.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_targets(
    sinks: Sequence[tuple[SinkSpec, pa.Schema]],
    *,
    application_id: str = UNKNOWN_ID,
    cluster_id: str = UNKNOWN_ID,
    seconds: float = CHECK_SECONDS,
) -> dict[str, KafkaEosError]:
    """Checks that the sinks of a query can write its rows, without any effect on their targets.

    All sinks are checked at the same time, so many that are down take no longer than one. A sink that does
    not implement `TwoPhaseSink.check` counts as fine.

    Args:
        sinks: each sink, with the schema of its rows; a `stage.fanout.Plan` has both in its routes.
        application_id: application id of the query, if it is known.
        cluster_id: Kafka's id of the query's cluster, if it is known.
        seconds: time limit for each sink. `watchdog.GRACE_SECONDS` later, a call that hangs is abandoned.

    Returns:
        What is wrong, by name of the sink; a sink that is fine has no entry. `SinkUnavailableError`: the
        target cannot be reached, which may be different in a minute. Every other error needs a person.

    Raises:
        InvalidOptionError: if two sinks write to the same target, or a sink rejects its options.
    """
    built = {spec.name: spec.build() for spec, _ in sinks}
    targets.refuse_shared(built)

    def check(spec: SinkSpec, schema: pa.Schema) -> KafkaEosError | None:
        sink, secrets = built[spec.name], spec.secrets(built[spec.name])

        def look() -> None:
            sink.open(SinkContext(spec.name, application_id, cluster_id, None, secrets))
            try:
                sink.check(schema, Deadline.after_seconds(seconds))
            finally:
                sink.close()

        guard = Watchdog(f"sink {spec.name!r}")
        try:
            with spec.naming.errors():
                guard.call("the check of the target", look, seconds)
        except OperatorError as error:
            error.message = secrets.hide(error.message)
            error.args = (error.message, error.fix)
            return error
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            return _unavailable(spec, secrets.hide(_text(error)))
        finally:
            guard.end(lambda: None, _CLOSE_SECONDS)
        return None

    with ThreadPoolExecutor(max(1, len(sinks))) as pool:
        found = pool.map(lambda each: check(*each), sinks)
        return {spec.name: error for (spec, _), error in zip(sinks, found, strict=True) if error is not None}


def _unavailable(spec: SinkSpec, why: str) -> SinkUnavailableError:
    if repr(spec.name) not in why:
        why = f"sink {spec.name!r} (type {spec.type}) cannot be checked: {why}"
    return SinkUnavailableError(
        f"{why.rstrip('.')}.",
        fix=f"start the system, let this host reach it, or correct the options 'sink.{spec.name}.*'.",
    )


def _text(error: Exception) -> str:
    if isinstance(error, KafkaEosError):
        return error.message
    text = " ".join(_COLOURS.sub("", str(error)).split())
    return f"{type(error).__name__}: {textwrap.shorten(text, _MOST_CHARACTERS, placeholder=' …')}"
