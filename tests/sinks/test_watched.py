"""A sink whose call never returns counts as down; a slow sink that makes progress does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.commit.two_phase import Sinks
from kafka_eos_source.errors import RetriableError, SinkRetryableError, SinkUnfinishedError
from kafka_eos_source.protocol.token import PreparedSinks, Token
from kafka_eos_source.runtime import watchdog
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import OK, Outcome, SinkContext, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.contract import Refused, RowRefusal
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.sink_options import SinkNaming
from kafka_eos_source.sinks.watched import WatchedSink

TXN = SinkContext("s", "app", "cluster").txn(3, "0123456789abcdef0123")
ROWS = pa.record_batch({"n": [1, 2]})
SLOW_BATCHES = 12


@pytest.fixture(autouse=True)
def _short_silence_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr("kafka_eos_source.commit.two_phase._LEAST_SECONDS", 0.2)


class Rows:
    """Staged rows whose batches take some time to read."""

    schema = ROWS.schema
    rows = 2 * SLOW_BATCHES
    receipts: Sequence[Any] = ("t",)

    def batches(self) -> Iterator[pa.RecordBatch]:
        for _ in range(SLOW_BATCHES):
            threading.Event().wait(0.05)
            yield ROWS


class Scripted(TwoPhaseSink):
    """Calls ``act`` in every call, and counts the rows that it reads."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.drawn = 0
        self.calls: list[str] = []

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        self.drawn += sum(batch.num_rows for batch in staged.batches())
        assert (staged.rows, staged.receipts, staged.schema) == (Rows.rows, Rows.receipts, Rows.schema)
        return self._record_call("prepare")

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        if self.context.store is not None:
            with contextlib.suppress(FileNotFoundError):  # not prepared
                self.drawn += sum(self._slowly(batch) for batch in self.context.store.rows(str(txn), ""))
        return self._record_call("commit")

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._record_call("abort")

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        self._record_call("recover")
        return [TXN]

    def _record_call(self, call: str) -> Outcome:
        self.calls.append(call)
        self.act()
        return OK

    @staticmethod
    def _slowly(batch: pa.RecordBatch) -> int:
        threading.Event().wait(0.05)
        return batch.num_rows


def watched(sink: TwoPhaseSink, store: NotesFolder | None = None) -> WatchedSink:
    found = WatchedSink(sink, SinkNaming("a"))
    found.open(SinkContext("s", "app", "cluster", store))
    return found


def soon(seconds: float = 0.2) -> Deadline:
    return Deadline.after_seconds(seconds)


def test_every_call_reaches_the_sink() -> None:
    sink = Scripted()
    found = watched(sink)
    assert found.recover(soon()) == [TXN]
    assert found.prepare(TXN, Rows(), soon(30)) == OK
    assert found.commit(TXN, soon()) == OK
    assert found.abort(TXN, soon()) == OK
    found.check(ROWS.schema, soon())
    found.make_ready(ROWS.schema, soon())
    found.tidy(3, soon())
    found.close()
    assert sink.calls == ["recover", "prepare", "commit", "abort"]


def test_a_sink_that_refused_rows_says_so_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Scripted):
        def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
            return Refused({0: RowRefusal("no")})

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = watched(Refusing())
    assert not found.refuses_rows
    assert isinstance(found.prepare(TXN, Rows(), soon()), Refused)
    assert found.refuses_rows
    assert watched(Refusing()).refuses_rows, "after a restart, and in the process that plans batches"
    other = WatchedSink(Refusing(), SinkNaming("a"))
    other.open(SinkContext("s", "other", "cluster"))
    assert not other.refuses_rows
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert isinstance(other.prepare(TXN, Rows(), soon()), Refused), "only logged"


def test_a_sink_that_keeps_reading_rows_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    sink, store = Scripted(), NotesFolder(str(tmp_path))
    store.put_rows(str(TXN), ROWS.schema, [ROWS] * SLOW_BATCHES)
    found = watched(sink, store)
    assert found.prepare(TXN, Rows(), soon()) == OK
    assert found.commit(TXN, soon()) == OK
    assert sink.drawn == 2 * Rows.rows


def test_a_commit_that_never_returns_is_unfinished_at_the_deadline() -> None:
    release = threading.Event()
    work = Sinks({"s": watched(Scripted(release.wait))}, {}, 3)
    token = Token("app", "q", "r", 3, 3, "", "", 0, sinks=PreparedSinks(TXN.attempt, ("s",)))
    with pytest.raises(SinkUnfinishedError, match=r"'s': RetriableError.*commit app-.*-s-3-.*did not return"):
        work.finish(token, soon())
    release.set()


def test_a_prepare_that_never_returns_fails_and_is_not_awaited_twice() -> None:
    release = threading.Event()
    sink = Scripted(release.wait)
    work = Sinks({"s": watched(sink)}, {"s": Rows()}, 3)
    with pytest.raises(SinkRetryableError, match="did not return"):
        work.prepare(1, soon())
    work.roll_back(soon())
    assert sink.calls == ["prepare"], "it is in the middle of that call"
    with pytest.raises(SinkRetryableError, match="cannot list its prepared batches"):
        work.list_prepared(soon())
    release.set()


def test_an_error_of_the_sink_is_raised_unchanged() -> None:
    def fail() -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        watched(Scripted(fail)).commit(TXN, soon())


def test_a_sink_that_hangs_is_closed_when_its_call_returns() -> None:
    release, closed = threading.Event(), threading.Event()

    class Closing(Scripted):
        def close(self) -> None:
            closed.set()

    found = watched(Closing(release.wait))
    with pytest.raises(RetriableError):
        found.commit(TXN, soon())
    found.close()
    assert not closed.is_set()
    release.set()
    assert closed.wait(60)
