"""The sinks of a query in the commit of a batch: prepared together, committed or taken back together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kafka_eos_source.commit.facts import Batch
from kafka_eos_source.commit.interfaces import missing_sinks
from kafka_eos_source.commit.sink_fate import Fate, fate, named_by
from kafka_eos_source.commit.verdict import Verdict
from kafka_eos_source.errors import (
    KafkaEosError,
    OperatorError,
    RestartQueryError,
    RetriableError,
    SinkFailedError,
    SinkRetryableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.protocol.token import PreparedSinks, Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import metrics
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Retryable,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
#: For taking back and finishing, which are tried once though the commit's own time is over.
_LEAST_SECONDS = 10.0


class SinkWork:
    """`parties.Sinks` over real sinks; of one commit.

    Args:
        sinks: all sinks of the query by name, opened.
        staged: the rows of the batch, for those sinks that have any.
        application_id, batch_id: of the batch.
    """

    def __init__(
        self,
        sinks: Mapping[str, TwoPhaseSink],
        staged: Mapping[str, Staged],
        application_id: str,
        batch_id: int,
    ) -> None:
        self._sinks = sinks
        self._staged = staged
        self._application_id = application_id
        self._batch_id = batch_id
        self._found: Mapping[str, Sequence[SinkTxn]] = {}
        self._prepared: list[tuple[str, SinkTxn]] = []
        self._pause = threading.Event()

    def list_prepared(self, deadline: Deadline) -> None:
        """Raises: SinkRetryableError: a sink does not tell."""
        self._found = {name: self._look_at(name, deadline) for name in self._sinks}

    def has_prepared(self) -> bool:
        return any(self._found.values())

    def resolve_prepared(
        self, token: Token | None, batch: Batch, verdict: Verdict | None, deadline: Deadline
    ) -> None:
        """Commits or aborts what `list_prepared` found, each id by `commit.sink_fate.fate`.

        Raises:
            SinkUndecidedError: something is prepared, and no token tells what becomes of it.
            SinkRetryableError, SinkFailedError: a sink cannot do it.
        """
        found, self._found = self._found, {}
        decided = [
            (name, txn, fate(name, txn, token, batch, verdict))
            for name, txns in found.items()
            for txn in txns
        ]
        undecided = [f"{txn} in {name!r}" for name, txn, what in decided if what is Fate.LEAVE]
        if undecided:
            raise SinkUndecidedError(
                f"Kafka holds no token of application.id={self._application_id!r} that tells, and these "
                f"batches are prepared, neither committed nor aborted: {', '.join(undecided)}.",
                fix="look whether they are in the output of Kafka, and say so with `kafka-eos sinks commit` "
                "or `kafka-eos sinks abort`; then start the query again.",
            )
        to_commit: dict[str, SinkTxn] = {}
        for name, txn, what in decided:
            _log.warning("sink %r: %s of %s, as the token says", name, what.value, txn)
            metrics.of(self._application_id, name).recovered += 1
            if what is Fate.COMMIT:
                to_commit[name] = txn
            else:
                _raise(name, what.value, txn, _asked(partial(self._sinks[name].abort, txn, deadline)))
        self._commit(to_commit, deadline)

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | None:
        """Prepares the batch in every sink that has rows of it, under a new attempt each time.

        Args:
            sequence: sequence number of the transaction that will commit the batch.
            deadline: of the commit.

        Raises:
            SinkRetryableError, SinkFailedError: a sink cannot; `roll_back` takes back what others did.
        """
        self._prepared = []
        if not self._staged:
            return None
        attempt = SinkTxn.new_attempt()
        for name, staged in self._staged.items():
            sink = self._sinks[name]
            txn = SinkTxn(self._application_id, name, sequence, attempt)
            self._prepared.append((name, txn))
            begun = time.monotonic()
            _raise(name, "prepare", txn, _asked(partial(sink.prepare, txn, staged, deadline)))
            measured = metrics.of(self._application_id, name)
            measured.prepare_seconds += time.monotonic() - begun
            measured.prepared += 1
            failpoints.reach("commit.within_prepare")
        return PreparedSinks(attempt, tuple(self._staged))

    def roll_back(self, deadline: Deadline) -> None:
        """What cannot be taken back now is found and taken back at the next start: no token names it."""
        prepared, self._prepared = self._prepared, []
        for name, txn in prepared:
            outcome = _asked(partial(self._sinks[name].abort, txn, _at_least(deadline)))
            metrics.of(self._application_id, name).aborted += 1
            if outcome != OK:
                _log.warning("sink %r: %s is not aborted yet: %s", name, txn, _why(outcome))
            failpoints.reach("commit.within_roll_back")

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Lets every sink commit what the token names, and holds the query back until all of them have.

        It does not matter which checkpoint wrote the token. A sink that neither holds the id prepared nor
        knows it as committed fails the query by name: its rows of that batch may be lost.

        Raises:
            SinkUnfinishedError: one of them cannot be reached until the deadline.
            SinkFailedError: one of them says that no retry helps.
            InvalidOptionError: the token names a sink that the query has no more.
        """
        if token.sinks is None:
            return
        gone = [name for name in token.sinks.names if name not in self._sinks]
        if gone:
            raise missing_sinks(token, gone)
        named = {name: named_by(token, name) for name in token.sinks.names}
        self._commit({name: txn for name, txn in named.items() if txn is not None}, deadline)

    def _commit(self, left: Mapping[str, SinkTxn], deadline: Deadline) -> None:
        """Commits in every sink, again and again: the batch is in Kafka, so there is no way back.

        Every sink is asked before the first failure is raised. A failure that no retry helps is raised at
        once after that, though other sinks may be down: they keep the batch prepared for the next start.
        """
        pause, begun = _FIRST_PAUSE_SECONDS, time.monotonic()
        while left:
            waiting: dict[str, Retryable] = {}
            failed: dict[str, Fatal] = {}
            for name, txn in left.items():
                called = time.monotonic()
                outcome = _asked(partial(self._sinks[name].commit, txn, _at_least(deadline)), is_commit=True)
                measured = metrics.of(self._application_id, name)
                measured.commit_seconds += time.monotonic() - called
                if isinstance(outcome, Retryable):
                    waiting[name] = outcome
                    measured.retries += 1
                    measured.held_back_seconds = time.monotonic() - begun
                elif isinstance(outcome, Fatal):
                    failed[name] = outcome
                else:
                    measured.held_back_seconds = 0.0
                    measured.committed += 1
                    measured.rows += self._staged[name].rows if name in self._staged else 0
                    failpoints.reach("commit.within_finish")
            if failed:
                raise _lost(left, failed, waiting)
            left = {name: txn for name, txn in left.items() if name in waiting}
            if left:
                reasons = _reasons(waiting)
                if deadline.expired:
                    raise _unfinished(left, reasons, deadline)
                _log.warning(
                    "batch %d is in Kafka; the query is held back %.0f s by now, waiting for sinks: %s",
                    self._batch_id,
                    time.monotonic() - begun,
                    reasons,
                )
                self._pause.wait(min(pause, deadline.remaining_seconds()))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def tidy(self, deadline: Deadline) -> None:
        """The batch is finished: what was staged for it, and for older ones, may go."""
        for name, sink in self._sinks.items():
            try:
                sink.tidy(self._batch_id, _at_least(deadline))
                if sink.context.store is not None:
                    sink.context.store.sweep()
            except Exception as error:  # noqa: BLE001 - a user's class may raise anything; nothing depends on it
                _log.warning(
                    "sink %r: left-overs of batch %d stay: %s", name, self._batch_id, concealed(str(error))
                )

    def _look_at(self, name: str, deadline: Deadline) -> Sequence[SinkTxn]:
        try:
            found = self._sinks[name].recover(deadline)
        except (OperatorError, RestartQueryError) as error:
            raise SinkFailedError(f"sink {name!r}: {concealed(error.message)}", fix=error.fix) from error
        except Exception as error:
            raise SinkRetryableError(
                f"sink {name!r} does not tell what it holds prepared: {_text(error)}"
            ) from error
        own = SinkContext(name, self._application_id)
        return [txn for txn in found if own.owns(txn)]


def _asked(call: Callable[[], Outcome], *, is_commit: bool = False) -> Outcome:
    """What a sink says, also where it raises. A commit that raised may have happened: it is asked again."""
    try:
        outcome: object = call()
    except (RetriableError, OSError) as error:
        return Retryable(_text(error))
    except KafkaEosError as error:
        return Fatal(error.message, error.fix)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        _log.warning("a sink raised %s", concealed(repr(error)))
        return Retryable(_text(error)) if is_commit else Fatal(_text(error))
    if isinstance(outcome, Ok | Retryable | Fatal):
        return outcome
    return Fatal(f"the sink answered {outcome!r}", "return OK, Retryable or Fatal.")


def _raise(name: str, what: str, txn: SinkTxn, outcome: Outcome) -> None:
    if isinstance(outcome, Retryable):
        raise SinkRetryableError(f"sink {name!r} cannot {what} {txn} now: {concealed(outcome.why)}")
    if isinstance(outcome, Fatal):
        raise _failed(name, what, txn, outcome)


def _failed(name: str, what: str, txn: SinkTxn, outcome: Fatal) -> SinkFailedError:
    return SinkFailedError(
        f"sink {name!r} cannot {what} {txn}: {concealed(outcome.why)}",
        fix=outcome.fix or "see docs/runbooks.md, SINK_FAILED.",
    )


def _lost(
    txns: Mapping[str, SinkTxn], failed: Mapping[str, Fatal], waiting: Mapping[str, Retryable]
) -> SinkFailedError:
    """Names every sink that failed for good, and those that are still to commit."""
    said = "; ".join(
        f"sink {name!r} cannot commit {txns[name]}: {concealed(each.why)}" for name, each in failed.items()
    )
    if waiting:
        said += (
            f". Not committed yet, and prepared until the next start: {', '.join(map(repr, waiting))} "
            f"({_reasons(waiting)})"
        )
    fixes = [each.fix for each in failed.values() if each.fix]
    return SinkFailedError(said, fix=" ".join(fixes) or "see docs/runbooks.md, SINK_FAILED.")


def _unfinished(txns: Mapping[str, SinkTxn], reasons: str, deadline: Deadline) -> SinkUnfinishedError:
    return SinkUnfinishedError(
        f"a batch is in Kafka, and {deadline.budget_seconds:.0f} s (commitTimeoutMs) were not enough to have "
        f"it in every sink: {reasons}.",
        fix="see to that system, then start the query again: it finishes the batch first, under the id "
        f"{_ids(txns.values())}. Nothing is lost or doubled.",
    )


def _reasons(waiting: Mapping[str, Retryable]) -> str:
    return "; ".join(f"{name!r}: {concealed(each.why)}" for name, each in waiting.items())


def _ids(txns: Iterable[SinkTxn]) -> str:
    return ", ".join(sorted({str(txn) for txn in txns}))


def _why(outcome: Outcome) -> str:
    return concealed(outcome.why) if isinstance(outcome, Retryable | Fatal) else "OK"


def _text(error: Exception) -> str:
    text = str(error) or "no reason given"
    return f"{type(error).__name__}: {text}"


def _at_least(deadline: Deadline) -> Deadline:
    return (
        deadline if deadline.remaining_seconds() > _LEAST_SECONDS else Deadline.after_seconds(_LEAST_SECONDS)
    )
