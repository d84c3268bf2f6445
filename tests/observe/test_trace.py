"""What a trace measures of a commit, and that observers cannot harm the commit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from kafka_eos_source.commit import micro_batch as tracing_of_commit
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.commit.steps import MOVES
from kafka_eos_source.commit.two_phase import Sinks
from kafka_eos_source.errors import AbortableError, FencedError, RetriableError, UnavailableError
from kafka_eos_source.model import ShardReport, TaskFigures, TopicPartition
from kafka_eos_source.observe import journal, lines
from kafka_eos_source.observe import trace as tracing
from kafka_eos_source.observe.figures import (
    BatchFigures,
    EventKind,
    Outcome,
    SourceFigures,
    SourceRead,
    SourceState,
    Step,
    StepGroup,
    WaitingCommit,
    by_group,
    position_id,
)
from kafka_eos_source.observe.source import LagClock, SourceObserver
from kafka_eos_source.observe.trace import Subject, Trace, traced
from kafka_eos_source.observe.view import Status, view
from kafka_eos_source.observe.wording import MEANING
from kafka_eos_source.runtime import logs
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import Retryable, SinkContext
from kafka_eos_source.testing.sinks import deadline
from tests.commit.model_broker import Fault, ModelProducer, ModelRows, broker_with_genesis, request, rows
from tests.observe.figures_kit import BATCH
from tests.plan.source_cluster import Clock
from tests.sinks.scripted_sink import NAMES, Scripted, staged, token

T0, T1 = TopicPartition("in", 0), TopicPartition("in", 1)
SECONDS = 60
SUBJECT = Subject("app", "query", "run", 3)


@dataclass
class Recorder:
    """An observer that keeps what it receives."""

    batches: list[BatchFigures] = field(default_factory=list)
    waiting: list[WaitingCommit] = field(default_factory=list)
    proceeded: int = 0

    def finished(self, figures: BatchFigures) -> None:
        self.batches.append(figures)

    def waits(self, commit: WaitingCommit) -> None:
        self.waiting.append(commit)

    def proceeds(self) -> None:
        self.proceeded += 1


class Broken(Recorder):
    """An observer that always raises."""

    def finished(self, figures: BatchFigures) -> None:
        raise RuntimeError("full disk")

    def waits(self, commit: WaitingCommit) -> None:
        raise RuntimeError("full disk")

    proceeds = None  # type: ignore[assignment]


def made(*observers: Recorder, clock: Clock | None = None) -> Trace:
    clock = clock or Clock()
    found = Trace(observers, clock, lambda: clock() - 900)
    found.begin(SUBJECT)
    found.planned(90.0, (SourceRead("p", {"in": 5}),))
    return found


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the watching thread away from the traces of a test, which asks them itself."""

    class Blind(tracing._Watch):
        def add(self, trace: Trace) -> None:
            """Watches nothing."""

    monkeypatch.setattr(tracing, "_watch", Blind())


# -- the trace -------------------------------------------------------------------------------------


def test_every_step_of_the_commit_is_measured_and_has_words() -> None:
    assert MOVES.keys() == set(Step) - {Step.TASKS, Step.VERIFY, Step.TIDY}
    assert {step.group for step in Step} == set(StepGroup)
    assert all(step.doing for step in Step)
    assert set(MEANING) == set(StepGroup)


def test_durations_do_not_overlap_and_add_up() -> None:
    clock, seen = Clock(), Recorder()
    trace = made(seen, clock=clock)
    clock.advance(1)
    trace.enter(Step.PRODUCE)
    clock.advance(2)
    trace.enter(Step.FLUSH)
    clock.advance(4)
    trace.enter(Step.PRODUCE)
    clock.advance(8)
    trace.finish(Outcome.COMMITTED)
    (figures,) = seen.batches
    assert figures.seconds == {"tasks": 10.0, "verify": 1, "produce": 10, "flush": 4}
    assert figures.ended_at - figures.began_at == 15
    assert by_group(figures.seconds) == {
        StepGroup.TASKS: 10,
        StepGroup.VERIFY: 1,
        StepGroup.WRITE: 14,
    }
    assert figures.counts["offsets_read"] == 5


def test_a_replay_that_is_skipped_read_nothing_and_ran_no_tasks() -> None:
    seen = Recorder()
    made(seen).finish(Outcome.SKIPPED)
    assert "offsets_read" not in seen.batches[0].counts
    assert "tasks" not in seen.batches[0].seconds


def test_an_error_ends_the_trace_and_its_secrets_stay_secret() -> None:
    seen = Recorder()
    trace = made(seen)

    def commit() -> None:
        with traced(trace, lambda text: text.replace("hunter2", "***")):
            raise UnavailableError("no answer; password=hunter2")

    with pytest.raises(UnavailableError):
        commit()
    (figures,) = seen.batches
    assert figures.outcome is Outcome.FAILED
    assert "***" in figures.error
    assert "hunter2" not in figures.to_json()


def test_a_broken_observer_neither_raises_nor_hides_the_batch_from_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    clock, seen = Clock(), Recorder()
    trace = made(Broken(), seen, clock=clock)
    with caplog.at_level(logging.WARNING):
        trace.finish(Outcome.COMMITTED)
        made(Broken()).finish(Outcome.COMMITTED)
    assert len(seen.batches) == 1
    assert len([each for each in caplog.records if "full disk" in each.message]) == 1


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_commit_goes_on_if_the_process_may_not_have_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_watch", tracing._Watch())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    seen = Recorder()
    made(seen).finish(Outcome.COMMITTED)
    assert [each.outcome for each in seen.batches] == [Outcome.COMMITTED]
    monkeypatch.undo()
    assert tracing._watch._running == set()


def test_figures_that_cannot_be_made_do_not_fail_a_commit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("line 'btime' not found in /proc/stat")

    monkeypatch.setattr(logs, "_warned", set())
    monkeypatch.setattr(tracing, "this_writer", broken)
    seen = Recorder()
    with caplog.at_level(logging.WARNING):
        made(seen).finish(Outcome.COMMITTED)
    assert seen.batches == []
    assert "btime" in caplog.text


def test_a_process_without_a_usable_proc_has_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_pid: int) -> None:
        raise RuntimeError("line 'btime' not found in /proc/stat")

    monkeypatch.setattr(lines.psutil, "Process", broken)
    lines._writer.cache_clear()
    try:
        me = lines.this_writer()
    finally:
        lines._writer.cache_clear()
    assert me.process == me.driver == lines.ProcessId(os.getpid(), 0.0)
    assert not me.process.is_alive()


def test_a_fork_does_not_wait_for_a_lock_of_its_parent() -> None:
    former = tracing._watch
    with former._changed:  # as another thread may hold it during the fork
        pid = os.fork()
        if pid == 0:
            done = threading.Thread(target=lambda: Trace([Recorder()]).begin(SUBJECT), daemon=True)
            done.start()
            done.join(SECONDS)
            os._exit(done.is_alive())
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert tracing._watch is former, "the parent keeps its own"


@pytest.mark.usefixtures("unwatched")
def test_a_commit_that_stands_still_says_in_which_step_and_why() -> None:
    clock, seen = Clock(), Recorder()
    trace = made(seen, clock=clock)
    trace.explained_by(lambda: "127.0.0.1:9092: Connection refused")
    trace.enter(Step.FLUSH)
    clock.advance(0.5)
    trace.report_if_slow()
    assert seen.waiting == [], "half a second is no news"
    clock.advance(3)
    trace.report_if_slow()
    (commit,) = seen.waiting
    assert (commit.step, commit.batch_id, commit.retried) == ("flush", 3, 0)
    assert commit.at - commit.step_since == 3.5
    assert "refused" in commit.reason
    trace.finish(Outcome.COMMITTED)
    assert seen.proceeded == 1
    trace.report_if_slow()
    assert len(seen.waiting) == 1, "a commit that has ended does not wait"


def test_the_watching_thread_reports_a_commit_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SLOW_SECONDS", 0.01)
    told = threading.Event()

    class Telling(Recorder):
        def waits(self, commit: WaitingCommit) -> None:
            super().waits(commit)
            told.set()

    trace = Trace([Telling()])
    trace.begin(SUBJECT)
    assert told.wait(60), "the commit stands in its first step"
    trace.finish(Outcome.COMMITTED)
    assert trace not in tracing._watch._running


def test_the_first_and_the_newest_events_are_kept() -> None:
    seen = Recorder()
    trace = made(seen)
    for number in range(1000):
        trace.happened(EventKind.RETRIED, f"{number}")
    trace.finish(Outcome.COMMITTED)
    (figures,) = seen.batches
    assert figures.counts["retried"] == 1000
    texts = [each.text for each in figures.events]
    assert (texts[0], texts[-1], len(texts)) == ("0", "999", 20)


def test_tasks_are_summed_and_their_skew_is_kept() -> None:
    seen = Recorder()
    trace = made(seen)
    trace.tasks(
        [
            TaskFigures(1.0, 0.5, {"a": (2, 20), "b": (1, 5)}, "one"),
            TaskFigures(3.0, 0.25, {"a": (1, 10)}),
            TaskFigures(8.0, 0.25),
            TaskFigures(topics={"dead": (1, 3)}),  # the dead letters of a task
            *[TaskFigures(traceparent=f"{number}") for number in range(50)],
        ]
    )
    trace.finish(Outcome.COMMITTED)
    (figures,) = seen.batches
    assert figures.topics["a"] == {"records": 3, "bytes": 30}
    assert figures.topics["dead"] == {"records": 1, "bytes": 3}
    assert figures.counts["staging_ms"] == 1000
    assert figures.gauges == {"tasks": 3, "median_task_seconds": 3.0, "longest_task_seconds": 8.0}
    assert (figures.links[0], len(figures.links)) == ("one", 16)


# -- the trace of real commits ---------------------------------------------------------------------


def test_every_client_of_a_commit_can_say_why_it_stands_still() -> None:
    producer = ModelProducer(broker_with_genesis())
    assert tracing_of_commit.complaint(producer) == "the model complains"
    assert tracing_of_commit.complaint(None) == ""


def commit(faults: Sequence[Fault], **broker: object) -> tuple[Result | None, BatchFigures]:
    seen = Recorder()
    trace = made(seen)
    machine = Commit(
        request(0),
        ModelRows(rows(0)),
        broker_with_genesis(faults=list(faults), **broker),
        ProducerSession(),
        Deadline.after_seconds(30),
        trace=trace,
        sleep=lambda _seconds: None,
    )
    result = None
    try:
        with traced(trace, str):
            result = machine.run()
            trace.finish(Outcome.COMMITTED)
    except FencedError:
        pass
    (figures,) = seen.batches
    return result, figures


def counted(figures: BatchFigures) -> dict[str, int]:
    names = ("transactions", "committed", "aborted", "retried", "fenced", "unknown")
    return {name: figures.counts[name] for name in names if figures.counts.get(name)}


def test_an_ordinary_commit() -> None:
    _, figures = commit([])
    assert figures.gauges["queued_messages"] > 0, "as many as the model has not acknowledged"
    assert counted(figures) == {"transactions": 1, "committed": 1}
    assert figures.sequence == 1
    assert {"open", "init", "token", "check", "begin", "produce", "flush", "offsets", "commit"} <= set(
        figures.seconds
    )


def test_an_aborted_transaction_is_counted_with_its_reason() -> None:
    _, figures = commit([Fault("flush", AbortableError("broker 2 is gone"))])
    assert counted(figures) == {"transactions": 2, "committed": 1, "aborted": 1, "retried": 1}
    assert [(each.kind, each.text) for each in figures.events][-1] == (EventKind.RETRIED, "broker 2 is gone")


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_outcome_is_counted_and_what_the_token_shows(after: bool) -> None:
    result, figures = commit([Fault("commit", RetriableError("time-out"), after=after)])
    assert result is not None
    assert result.confirmed_by_token is after
    assert counted(figures) == {
        "transactions": 1 if after else 2,
        "committed": 1,
        "retried": 1,
        "unknown": 1,
    }
    assert figures.sequence is not None
    ordinary = commit([])[1]
    assert figures.counts["bytes"] == ordinary.counts["bytes"] > 0, "each committed record counts once"


def test_a_driver_that_is_fenced_twice_fails_and_says_so() -> None:
    _, figures = commit([Fault("flush", FencedError("fenced")), Fault("flush", FencedError("fenced"))])
    assert figures.outcome is Outcome.FAILED
    assert (figures.counts["fenced"], figures.counts["retried"]) == (2, 1)
    assert "another driver" in figures.error


@pytest.mark.usefixtures("unwatched")
def test_a_sink_that_holds_a_batch_back_is_measured() -> None:
    """Kafka has committed; the sink answers at the third call."""
    system = uuid.uuid4().hex
    sinks = {"left": Scripted(system, Retryable("down"), Retryable("down")), "right": Scripted(system)}
    for name in NAMES:
        sinks[name].open(SinkContext(name, "app", "cluster"))
    clock, seen = Clock(), Recorder()
    trace = made(seen, clock=clock)

    def pause(_seconds: float) -> None:
        clock.advance(2)
        trace.report_if_slow()

    work = Sinks(sinks, staged(), 5, trace, sleep=pause)
    work.finish(token(sinks=work.prepare(9, deadline())), deadline())
    trace.finish(Outcome.COMMITTED)
    (figures,) = seen.batches
    left, right = figures.sinks["left"], figures.sinks["right"]
    assert (left["prepared"], left["committed"], left["retries"]) == (1, 1, 2)
    assert left["held_back_seconds"] > 0
    assert "held_back_seconds" not in right
    assert [each.kind for each in figures.events] == [EventKind.HELD_BACK]
    assert all("'left': down" in each.reason for each in seen.waiting)
    assert len(seen.waiting) == 2


# -- the source ------------------------------------------------------------------------------------


def test_a_lag_in_seconds_begins_when_the_record_became_available() -> None:
    clock = LagClock()
    clock.add(10, {T0: 5})
    clock.add(20, {T0: 8})
    clock.add(30, {T0: 8})
    assert clock.behind_since(T0, 8) is None
    assert clock.behind_since(T0, 5) == (20, False)
    assert clock.behind_since(T0, 4) == (10, True), "it may have been there before"
    assert clock.behind_since(T1, 0) is None


def test_the_memory_of_the_lag_is_bounded() -> None:
    clock = LagClock()
    for second in range(5000):
        clock.add(second, {T0: second})
        clock.add(second + 0.5, {T0: second})
    assert len(clock._samples) == 600


#: A source, what it wrote to its file, and its clock.
Observed: TypeAlias = tuple[SourceObserver, list[SourceFigures], Clock]


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observed:
    clock, written = Clock(), list[SourceFigures]()
    found = SourceObserver("in", "app", clock)
    monkeypatch.setattr(found._file, "write", written.append)
    monkeypatch.setattr(found, "_watch", lambda: None)  # the test calls `write` itself
    return found, written, clock


def test_a_source_writes_only_what_has_changed(observer: Observed) -> None:
    source, written, clock = observer
    for _ in range(3):
        clock.advance(1)
        source.planned({T0: 5}, {T0: 9}, {T0: 12}, is_batch=True, reason="")
    source.write()
    source.write()
    assert len(written) == 2, "the first plan at once, the others together"
    for each in written:
        assert (each.state, each.planned, each.start, each.latest) == (
            SourceState.PLANNED,
            {T0: 9},
            {T0: 5},
            {T0: 12},
        )
    for _ in range(3):
        source.planned({T0: 9}, {T0: 9}, {T0: 9}, is_batch=False, reason="")
        source.write()
    assert [each.state for each in written] == [SourceState.PLANNED] * 2 + [SourceState.IDLE]
    source.stopped()
    assert written[-1].state is SourceState.STOPPED


def test_the_first_batch_of_a_source_that_was_idle_is_written_at_once(observer: Observed) -> None:
    source, written, _ = observer
    source.planned({T0: 5}, {T0: 5}, {T0: 5}, is_batch=False, reason="")
    source.planned({T0: 5}, {T0: 9}, {T0: 9}, is_batch=True, reason="")
    assert [each.planned for each in written] == [{}, {T0: 9}]


#: Plans a micro-batch as Spark's Python process does, and is killed before it hears that the query ended.
SHORT_LIVED = """
import os, signal
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.source import SourceObserver

source = SourceObserver("in", "")
with source.asking():
    pass
source.planned(
    {TopicPartition("in", 0): 5}, {TopicPartition("in", 0): 9}, {}, is_batch=True, reason="", hidden={}
)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_query_whose_source_was_killed_at_once_has_stopped(shared: Path) -> None:
    """A driver such as a notebook outlives its queries."""
    killed = subprocess.run(
        [sys.executable, "-c", SHORT_LIVED],
        env={**os.environ, "TMPDIR": str(shared)},
        check=False,
        timeout=SECONDS,
    )
    assert killed.returncode == -signal.SIGKILL
    (source,) = journal.source_figures()
    assert source.state is SourceState.PLANNED
    driver = lines.this_writer().process
    sources = (replace(source, writer=replace(source.writer, driver=driver)),)  # Spark's JVM
    read = (SourceRead(position_id({T0: 9}), {"in": 4}),)
    batch = replace(BATCH, sources=read, writer=lines.Writer(driver, driver))
    journal.Journal(batch.application_id).finished(batch)
    found = journal.query_journal(batch.application_id, sources)
    assert found is not None
    assert view(found, source.at).status is Status.STOPPED


def test_a_source_that_learns_the_name_of_its_query_writes_it(observer: Observed) -> None:
    source, written, _ = observer
    source._application_id = ""
    source.write()
    source._application_id = "app"  # as `newest_batch` does when it finds the query
    source.write()
    source.write()
    assert [each.application_id for each in written] == ["", "app"]


@pytest.mark.parametrize("former_at", [None, 1.0])
def test_a_source_finds_a_query_that_does_not_use_its_application_id(
    observer: Observed,
    monkeypatch: pytest.MonkeyPatch,
    former_at: float | None,
) -> None:
    """As with ``at_least_once``. An earlier query may have left a journal of that name."""
    source, _, clock = observer
    clock.advance(10)
    source.planned({T0: 2}, {T0: 9}, {T0: 9}, is_batch=True, reason="")
    source.write()
    read = (SourceRead(position_id({T0: 9}), {"in": 7}),)
    own = replace(
        BATCH,
        application_id="kafka-eos-query",
        ended_at=clock(),
        sources=read,
        writer=lines.this_writer(),
    )
    former = None if former_at is None else replace(own, application_id="app", ended_at=former_at, sources=())
    monkeypatch.setattr(journal, "newest_batch", {"app": former, "kafka-eos-query": own}.get)
    monkeypatch.setattr(journal, "newest_batches", lambda _since: [own])
    assert source.newest_batch() == own
    assert source._application_id == "kafka-eos-query"


def test_the_newest_batch_is_read_while_the_brokers_answer(
    observer: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = observer
    answers, asked = threading.Event(), list[str]()

    def newest(application_id: str) -> None:
        asked.append(application_id)
        answers.wait(SECONDS)

    monkeypatch.setattr(journal, "newest_batch", newest)
    for _ in range(5):  # as with a Spark that never asks for the result
        source.look_up_newest_batch()
    answers.set()
    assert source.newest_batch() is None
    assert asked == ["app"], "calls do not pile up behind one that hangs"
    source.newest_batch()
    assert asked == ["app"] * 2, "without a look-up, it is read at once"


def test_a_record_that_came_between_two_samples_has_an_age(observer: Observed) -> None:
    source, written, clock = observer
    source.planned({T0: 5}, {T0: 5}, {T0: 5}, is_batch=False, reason="")
    clock.advance(0.2)
    came_at = clock()
    source.planned({T0: 5}, {T0: 9}, {T0: 9}, is_batch=True, reason="")
    clock.advance(0.2)
    source.write()
    assert written[-1].behind_since == {"in": came_at}
    assert written[-1].behind_at_least == ()


def test_a_source_whose_brokers_do_not_answer_says_so(observer: Observed) -> None:
    source, written, clock = observer
    source.explained_by(lambda: "Connection refused")
    source.write()
    with source.asking():
        clock.advance(0.5)
        source.write()
        clock.advance(3)
        source.write()
        source.write()
    source.write()
    states = [(each.state, each.reason) for each in written]
    asking = (SourceState.ASKING, "Connection refused")
    assert states == [(SourceState.IDLE, ""), asking, asking, (SourceState.IDLE, "")]


def test_planning_goes_on_whatever_happens_to_the_figures(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    shared: Path,
) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("no figures")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    found = SourceObserver("in", "app", Clock())
    monkeypatch.setattr(found._file, "write", broken)
    monkeypatch.setattr(found._lag, "add", broken)
    monkeypatch.setattr(journal, "newest_batch", broken)
    with caplog.at_level(logging.WARNING):
        with found.asking():
            pass
        found.planned({T0: 5}, {T0: 9}, {T0: 9}, is_batch=True, reason="")
        assert found.newest_batch() is None
        found.stopped()
    assert len([each for each in caplog.records if "no figures" in each.message]) == 1


def test_the_end_of_a_run_is_written_last(observer: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    source, written, _ = observer
    began, may_end = threading.Event(), threading.Event()

    def slow(figures: SourceFigures) -> None:
        if figures.state is not SourceState.STOPPED:
            began.set()
            assert may_end.wait(SECONDS)
        written.append(figures)

    source.planned({T0: 5}, {T0: 5}, {T0: 5}, is_batch=False, reason="")
    monkeypatch.setattr(source._file, "write", slow)
    source.planned({T0: 5}, {T0: 9}, {T0: 9}, is_batch=True, reason="")
    watching = threading.Thread(target=source.write)
    watching.start()
    assert began.wait(SECONDS)
    stopping = threading.Thread(target=source.stopped)
    stopping.start()
    assert source._ended.wait(SECONDS)
    may_end.set()
    watching.join(SECONDS)
    stopping.join(SECONDS)
    assert [each.state for each in written] == [SourceState.IDLE, SourceState.PLANNED, SourceState.STOPPED]


# -- what shards measure ---------------------------------------------------------------------------


def test_what_shards_measured_is_summed_by_operator() -> None:
    def shard(topic: str, number: int, **measured: float) -> ShardReport:
        return ShardReport(
            TopicPartition(topic, number),
            "a",
            2,
            "query",
            3,
            0,
            0,
            pressure=number / 4,
            counts={"late_rows": 1},
            measured=measured,
        )

    shards = (
        shard("one", 0, keys=5, bytes=100, restores=1, restored_records=50, restore_seconds=1.5),
        shard("one", 1, keys=6, bytes=200, uncommitted_bytes=7),
        shard("two", 0, keys=1, bytes=10),
    )
    seen = Recorder()
    trace = made(seen)
    tracing_of_commit._count_state(trace, shards)
    trace.finish(Outcome.COMMITTED)
    (figures,) = seen.batches
    assert figures.state == {
        "one": {"keys": 11, "bytes": 300, "uncommitted_bytes": 7},
        "two": {"keys": 1, "bytes": 10},
    }
    counts = figures.counts
    assert (counts["shards"], counts["restores"], counts["restored_records"]) == (3, 1, 50)
    assert counts["restore_ms"] == 1500
    assert (figures.pressure, figures.processor_counts) == (0.25, {"late_rows": 3})
