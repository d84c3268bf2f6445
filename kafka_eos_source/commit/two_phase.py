"""The two-phase sinks of a query: they prepare together, and commit or abort together.

Sinks listed their prepared transactions *before* ``init_transactions``, and the token was read *after* it. A
sink transaction is prepared by one owner of the transactional id. That owner has either committed it in
Kafka, and then the token names it, or it was fenced and never will. So the *fate* of a sink transaction is
final, whichever other processes run at this moment::

    token                                    prepared transaction     fate
    names a sink transaction                 the same one             COMMIT
    names another one, or none               any                      ABORT
    was written by a person                  has a later sequence     ABORT
    was written by a person                  any other                LEAVE
    there is no token                        any                      LEAVE

The token names a sink transaction by sequence number, sink transaction id and names of the sinks. Application
and cluster are those that the token was read for. Without a token nothing relates the sequence number of a
sink transaction to the current batch, so a person decides, even if the batch is about to be written.

A token that a person wrote in place of a lost one (`token.UNDECIDED`) says what Kafka holds, and nothing
about sinks. A sink transaction with a later sequence number was prepared after it, for a transaction that
Kafka does not hold, because its token would have replaced this one.

The token of a later batch cannot hide an unfinished sink transaction: the next batch starts only after every
sink has committed the one before.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from kafka_eos_source.errors import (
    InvalidOptionError,
    KafkaEosError,
    OperatorError,
    RestartQueryError,
    RetriableError,
    SinkFailedError,
    SinkRetryableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)
from kafka_eos_source.observe.figures import EventKind
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.protocol.token import UNDECIDED, PreparedSinks, Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.secrets import Secrets
from kafka_eos_source.sinks.contract import (
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    RowRefusal,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)


class Fate(Enum):
    """What a sink does with a prepared transaction."""

    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave"  #: only a person can decide


def named_by(token: Token, sink: SinkContext) -> SinkTxn | None:
    """Returns the sink transaction that the token tells a sink to commit, with the digest in the token.

    Returns:
        None if the token names no transaction of this sink.
    """
    prepared = token.sinks
    if prepared is None or prepared == UNDECIDED or sink.name not in prepared.names:
        return None
    digest = prepared.digests.get(sink.name, "")
    return sink.txn(token.sequence, prepared.sink_transaction_id, digest)


def fate(sink: SinkContext, txn: SinkTxn, token: Token | None) -> Fate:
    """Decides the fate of ``txn``.

    Args:
        sink: the sink that holds it, on the cluster that holds the token.
        txn: the sink transaction, prepared before this owner initialised.
        token: the newest token, read after that; None if there is none.
    """
    if token is None:
        return Fate.LEAVE
    if token.sinks != UNDECIDED:
        return Fate.COMMIT if txn == named_by(token, sink) else Fate.ABORT
    return Fate.ABORT if txn.sequence > token.sequence else Fate.LEAVE


@dataclass(frozen=True)
class Refusal:
    """What a sink refuses of a batch that it was to prepare.

    Attributes:
        sink: name of the sink.
        rows: the refused rows, by number in the order of the sink's staged rows.
        of: number of rows that the sink got.
    """

    sink: str
    rows: Mapping[int, RowRefusal]
    of: int


# -- preparing, committing and aborting -----------------------------------------------------------------

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
#: Time limit of an abort or commit that is tried once although the deadline of the batch has passed.
_LEAST_SECONDS = 10.0
_NONE: Mapping[str, Any] = {}
_RUNBOOK = "see docs/runbooks.md, SINK_FAILED."


class Sinks:
    """All two-phase sinks of a query, with their staged rows of one batch. There may be none.

    Attributes:
        staged: the rows of the batch, for the sinks that have any.

    Args:
        sinks: all opened sinks of the query, by name.
        staged: the rows of the batch, for the sinks that have any.
        batch_id: Spark's id of the batch.
        trace: measures the sinks; None = nobody looks at the figures.
        sleep: pauses between two tries of a commit; tests replace it.
    """

    def __init__(
        self,
        sinks: Mapping[str, TwoPhaseSink] = _NONE,
        staged: Mapping[str, Staged] = _NONE,
        batch_id: int = -1,
        trace: Trace | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._sinks = sinks
        self._trace = Trace() if trace is None else trace
        self.staged = staged
        self._batch_id = batch_id
        self._found: Mapping[str, Sequence[SinkTxn]] = {}
        self._prepared: list[tuple[str, SinkTxn]] = []
        self._sleep = sleep

    @property
    def cluster_id(self) -> str:
        """Kafka's id of the cluster for which the sinks were opened; "" if there are no sinks."""
        return next((sink.context.cluster_id for sink in self._sinks.values()), "")

    def list_prepared(self, deadline: Deadline) -> None:
        """Asks every sink for its prepared batches, and keeps the answers for `resolve_prepared`.

        Call it before `Producer.init`: the token that is read after that decides the fate of all of it.

        Raises:
            SinkRetryableError: if a sink cannot answer now.
            SinkFailedError: if a sink refuses to answer.
        """
        self._found = {name: self._prepared_in(name, deadline) for name in self._sinks}

    def risks(self) -> list[str]:
        """Returns the risks of the sinks (`TwoPhaseSink.risks`); call it after `list_prepared`."""
        return [
            f"sink {name!r}: {self._hide(name, each)}"
            for name, sink in self._sinks.items()
            for each in sink.risks()
        ]

    def has_prepared(self) -> bool:
        """Whether `list_prepared` found prepared work."""
        return any(self._found.values())

    def resolve_prepared(self, token: Token | None, deadline: Deadline) -> None:
        """Commits or aborts each sink transaction that `list_prepared` found, as `fate` decides.

        Raises:
            SinkUndecidedError: if no token decides the fate of a sink transaction.
            SinkRetryableError, SinkFailedError, SinkUnfinishedError: if a sink cannot commit or abort it.
        """
        found, self._found = self._found, {}
        decided = [
            (name, txn, fate(self._sinks[name].context, txn, token))
            for name, txns in found.items()
            for txn in txns
        ]
        undecided = [(name, txn) for name, txn, what in decided if what is Fate.LEAVE]
        if undecided:
            listed = ", ".join(f"{txn} in {name!r}" for name, txn in undecided)
            raise SinkUndecidedError(
                f"this query (application.id={undecided[0][1].application_id!r}) has prepared these sink "
                f"transactions, and the Kafka cluster {self.cluster_id!r} holds no token that decides "
                f"whether to commit or abort them: {listed}.",
                fix="find out for each whether its rows are in the output topics of this cluster. Run "
                "`kafka-eos sinks commit` if they are and `kafka-eos sinks abort` if they are not (the wrong "
                "one doubles or loses them in the sink); then start the query again.",
            )
        for name, txn, what in decided:
            _log.warning("sink %r: the token decides to %s prepared transaction %s", name, what.value, txn)
            self._trace.sink(name).recovered += 1
            if what is Fate.ABORT:
                outcome = self._outcome_of(name, partial(self._sinks[name].abort, txn, deadline))
                _raise_unless_ok(name, what.value, txn, outcome)
        self._commit(token, [name for name, _, what in decided if what is Fate.COMMIT], deadline)

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | Refusal | None:
        """Prepares the batch in every sink that has rows, with a new sink transaction id each time.

        Args:
            sequence: sequence number of the Kafka transaction that will commit the batch.
            deadline: time limit of the commit.

        Returns:
            None if no sink has rows. `Refusal` if a sink refuses some of them; call `roll_back` then.

        Raises:
            SinkRetryableError, SinkFailedError: if a sink cannot prepare. `roll_back` then aborts the work of
                the others.
        """
        self._prepared = []
        if not self.staged:
            return None
        sink_transaction_id = SinkTxn.new_attempt()
        digests: dict[str, str] = {}
        for name, staged in self.staged.items():
            sink = self._sinks[name]
            txn = sink.context.txn(sequence, sink_transaction_id)
            self._prepared.append((name, txn))
            begun = time.monotonic()
            outcome = self._outcome_of(name, partial(sink.prepare, txn, staged, deadline))
            if isinstance(outcome, Refused):
                return self._refusal(name, outcome, staged.rows)
            _raise_unless_ok(name, "prepare", txn, outcome)
            if isinstance(outcome, Ok) and outcome.digest:
                digests[name] = outcome.digest
            measured = self._trace.sink(name)
            measured.prepare_seconds += time.monotonic() - begun
            measured.prepared += 1
            failpoints.reach("commit.within_prepare")
        return PreparedSinks(sink_transaction_id, tuple(self.staged), digests)

    def _refusal(self, name: str, outcome: Refused, rows: int) -> Refusal:
        """Returns the rows that a sink refuses, after checking that it can mean them.

        Raises:
            SinkFailedError: if it names no row, or one that it did not get.
        """
        wrong = [row for row in outcome.rows if not 0 <= row < rows]
        if wrong or not outcome.rows:
            raise SinkFailedError(
                f"sink {name!r} returned Refused with {f'row {wrong[0]}' if wrong else 'no rows'}; expected "
                f"at least one number from 0 to {rows - 1}, because the batch has {rows:,} rows for it.",
                fix="correct the sink's prepare().",
            )
        return Refusal(
            name,
            {row: replace(each, why=self._hide(name, each.why)) for row, each in outcome.rows.items()},
            rows,
        )

    def roll_back(self, deadline: Deadline) -> None:
        """Aborts the work of the last `prepare`. Does not raise.

        If an abort fails, the next start lists the sink transaction and aborts it, because no token names it.
        """
        prepared, self._prepared = self._prepared, []
        for name, txn in prepared:
            outcome = self._outcome_of(name, partial(self._sinks[name].abort, txn, _at_least(deadline)))
            self._trace.sink(name).aborted += 1
            if not isinstance(outcome, Ok):
                why = "it returned Refused" if isinstance(outcome, Refused) else outcome.why
                _log.warning("sink %r could not abort %s yet: %s", name, txn, why)
            failpoints.reach("commit.within_roll_back")

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Commits the sink transactions that the token names, and waits until every sink has committed.

        Call it after Kafka has committed the token.

        The token may come from another checkpoint. If a sink neither holds the transaction prepared nor knows
        it as committed, the query fails, because the sink may have lost the rows of that batch.

        Raises:
            SinkUnfinishedError: if a sink cannot commit before the deadline.
            SinkFailedError: if a sink reports an error that no retry can fix.
            InvalidOptionError: if the token names a sink that the query no longer has.
        """
        if token.sinks is None:
            return
        gone = [name for name in token.sinks.names if name not in self._sinks]
        if gone:
            raise InvalidOptionError(
                f"batch {token.batch_id} of application.id={token.application_id!r} is committed in Kafka "
                f"and prepared in the sinks {', '.join(map(repr, gone))}, but the option 'sinks' no longer "
                "names them.",
                fix="start the query once with those sinks, so that they commit the batch; after that you "
                "may remove them.",
            )
        self._commit(token, token.sinks.names, deadline)

    def _commit(self, token: Token | None, names: Iterable[str], deadline: Deadline) -> None:
        """Commits what the token names in these sinks, with the digests in the token.

        It retries until the deadline, because Kafka has already committed.

        Every sink is called before a fatal error of one of them is raised. It is raised although other sinks
        may still be retrying; they keep the batch prepared for the next start.
        """
        named = {} if token is None else {name: named_by(token, self._sinks[name].context) for name in names}
        left = {name: txn for name, txn in named.items() if txn is not None}
        begun, is_held_back = time.monotonic(), False
        pauses = Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, sleep=self._sleep)
        while left:
            waiting: dict[str, Retryable] = {}
            failed: dict[str, Fatal] = {}
            for name, txn in left.items():
                called = time.monotonic()
                call = partial(self._sinks[name].commit, txn, _at_least(deadline))
                outcome = self._outcome_of(name, call, is_commit=True)
                if isinstance(outcome, Refused):
                    outcome = _misplaced("commit")
                measured = self._trace.sink(name)
                measured.commit_seconds += time.monotonic() - called
                if isinstance(outcome, Retryable):
                    waiting[name] = outcome
                    measured.retries += 1
                    measured.held_back_seconds = time.monotonic() - begun
                elif isinstance(outcome, Fatal):
                    failed[name] = outcome
                else:
                    if measured.retries:
                        measured.held_back_seconds = time.monotonic() - begun
                    measured.committed += 1
                    measured.rows += self.staged[name].rows if name in self.staged else 0
                    failpoints.reach("commit.within_finish")
            if failed:
                raise _commits_failed(left, failed, waiting)
            left = {name: txn for name, txn in left.items() if name in waiting}
            if left:
                reasons = _reasons(waiting)
                if pauses.expired:
                    raise _commits_unfinished(left, reasons, deadline)
                _log.warning(
                    "batch %d is committed in Kafka; the query has waited %.0f s for sinks: %s",
                    self._batch_id,
                    time.monotonic() - begun,
                    reasons,
                )
                if not is_held_back:
                    self._trace.happened(EventKind.HELD_BACK, reasons)
                is_held_back = True
                self._trace.waiting(reasons)
                pauses.wait()

    def tidy(self, deadline: Deadline) -> None:
        """Lets every sink delete what was staged for this batch and older ones. Call it after `finish`."""
        for name, sink in self._sinks.items():
            try:
                sink.tidy(self._batch_id, _at_least(deadline))
                if sink.context.store is not None:
                    sink.context.store.sweep()
            except Exception as error:  # noqa: BLE001 - a user's class may raise anything
                _log.warning(
                    "sink %r could not delete the staged rows of batch %d: %s",
                    name,
                    self._batch_id,
                    self._hide(name, str(error)),
                )

    def _prepared_in(self, name: str, deadline: Deadline) -> Sequence[SinkTxn]:
        """Returns the transactions of this query, on this cluster, that a sink holds prepared."""
        try:
            prepared = self._sinks[name].recover(deadline)
        except (OperatorError, RestartQueryError) as error:
            raise SinkFailedError(
                f"sink {name!r}: {self._hide(name, error.message)}", fix=error.fix
            ) from error
        except Exception as error:
            if not isinstance(error, RetriableError | OSError):
                _log_unexpected(name, error, self._sinks[name].context.secrets)
            raise SinkRetryableError(
                f"sink {name!r} cannot list its prepared batches: {self._hide(name, _text(error))}"
            ) from error
        return [txn for txn in prepared if self._sinks[name].context.owns(txn)]

    def _hide(self, name: str, text: str) -> str:
        """Returns a text of the external system without the secrets of its sink."""
        return self._sinks[name].context.secrets.hide(text)

    def _outcome_of(self, name: str, call: Callable[[], Outcome], *, is_commit: bool = False) -> Outcome:
        """Calls a sink; returns its outcome, or what an exception means, without secrets.

        Args:
            name: the sink.
            call: the call.
            is_commit: whether an unknown exception means `Retryable`, because the commit may have happened.
        """
        outcome = _outcome_of(name, call, self._sinks[name].context.secrets, is_commit=is_commit)
        if isinstance(outcome, Ok | Refused):
            return outcome
        return replace(outcome, why=self._hide(name, outcome.why))


def _outcome_of(name: str, call: Callable[[], Outcome], secrets: Secrets, *, is_commit: bool) -> Outcome:
    """Calls a sink, and translates what it raises into an outcome.

    Args:
        name: the sink.
        call: the call.
        secrets: of the sink.
        is_commit: whether an unknown exception means `Retryable`, because the commit may have happened.
    """
    try:
        outcome: object = call()
    except (RetriableError, OSError) as error:
        return Retryable(_text(error))
    except KafkaEosError as error:
        return Fatal(error.message, error.fix)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        _log_unexpected(name, error, secrets)
        return Retryable(_text(error)) if is_commit else Fatal(_text(error))
    if isinstance(outcome, Ok | Retryable | Fatal | Refused):
        return outcome
    return Fatal(f"the sink returned {outcome!r}", "let the sink return OK, Retryable, Fatal or Refused.")


#: Where sinks raised exceptions that the contract does not name: name of the sink, class, file and line.
_raised: set[tuple[str, type[Exception], str, int | None]] = set()


def _log_unexpected(name: str, error: Exception, secrets: Secrets) -> None:
    """Logs an exception of a sink; for the first one from a line of its code, also the traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = name, type(error), last.filename, last.lineno
    if where in _raised:
        _log.warning("sink %r raised %s", name, secrets.hide(repr(error)))
        return
    _raised.add(where)
    found = "".join(traceback.format_exception(error))
    _log.warning("sink %r raised an exception:\n%s", name, secrets.hide(found))


class UndecidedSinks(Sinks):
    """The `Sinks` of ``kafka-eos adopt``, whose token must not decide the fate of prepared work.

    Args:
        finished: whether the person who runs the command declared that the sinks have committed the work that
            the previous token names.
    """

    def __init__(self, *, finished: bool = False) -> None:
        super().__init__()
        self._finished = finished

    def prepare(self, sequence: int, deadline: Deadline) -> PreparedSinks | Refusal | None:
        return UNDECIDED

    def finish(self, token: Token, deadline: Deadline) -> None:
        """Raises InvalidOptionError if the token names sinks, and nobody declared that they committed."""
        if not self._finished and token.sinks is not None and token.sinks.names:
            raise InvalidOptionError(
                f"transaction {token.sequence} of application.id={token.application_id!r} was prepared in "
                f"the sinks {', '.join(map(repr, token.sinks.names))}. A new token would hide that they may "
                "not have committed it.",
                fix="let the query itself adopt, with the same sinks and .option('onForeignQuery', 'adopt'); "
                "the sinks then commit first. If you know that they have committed, add --sinks-finished.",
            )


def _raise_unless_ok(name: str, what: str, txn: SinkTxn, outcome: Outcome) -> None:
    if isinstance(outcome, Refused):
        outcome = _misplaced(what)
    if isinstance(outcome, Retryable):
        raise SinkRetryableError(f"sink {name!r} cannot {what} {txn} now: {outcome.why}")
    if isinstance(outcome, Fatal):
        raise SinkFailedError(
            f"sink {name!r} cannot {what} {txn}: {outcome.why}", fix=outcome.fix or _RUNBOOK
        )


def _misplaced(what: str) -> Fatal:
    return Fatal(
        f"the sink returned Refused from {what}, when it is too late to leave rows out",
        "let the sink refuse rows in prepare() only.",
    )


def _commits_failed(
    txns: Mapping[str, SinkTxn], failed: Mapping[str, Fatal], waiting: Mapping[str, Retryable]
) -> SinkFailedError:
    """The error that names every sink that failed, and those that have not committed yet."""
    text = "; ".join(f"sink {name!r} cannot commit {txns[name]}: {each.why}" for name, each in failed.items())
    if waiting:
        text += (
            f". These sinks have not committed yet, and keep the batch prepared until the next start: "
            f"{', '.join(map(repr, waiting))} ({_reasons(waiting)})"
        )
    fixes = [each.fix for each in failed.values() if each.fix]
    return SinkFailedError(text, fix=" ".join(fixes) or _RUNBOOK)


def _commits_unfinished(txns: Mapping[str, SinkTxn], reasons: str, deadline: Deadline) -> SinkUnfinishedError:
    return SinkUnfinishedError(
        f"the batch is committed in Kafka, but these sinks did not commit it within "
        f"{deadline.budget_seconds:.0f} s (commitTimeoutMs): {reasons}.",
        fix="check that system, then start the query again; it first commits "
        f"{', '.join(sorted(map(str, txns.values())))} in the sinks. No row is lost or duplicated.",
    )


def _reasons(waiting: Mapping[str, Retryable]) -> str:
    return "; ".join(f"{name!r}: {each.why}" for name, each in waiting.items())


def _text(error: Exception) -> str:
    text = str(error) or "no reason given"
    return f"{type(error).__name__}: {text}"


def _at_least(deadline: Deadline) -> Deadline:
    """Returns ``deadline``, or a later one if little or no time is left."""
    return (
        deadline if deadline.remaining_seconds() > _LEAST_SECONDS else Deadline.after_seconds(_LEAST_SECONDS)
    )
