"""A file system that hangs delays a commit once, for a short time; then figures resume."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kafka_eos_source.observe import background, journal
from kafka_eos_source.observe.background import Background
from kafka_eos_source.observe.journal import Journal, query_journals
from kafka_eos_source.runtime import logs
from kafka_eos_source.runtime.folders import PrivateFolder
from tests.observe.figures_kit import BATCH

SECONDS = 60


def test_a_result_reaches_the_caller_and_an_error_is_none() -> None:
    made = Background()
    assert made.run(lambda: 5) == 5
    assert made.run(lambda: 1 // 0) is None
    assert made.run(lambda: 6) == 6


def test_calls_are_dropped_while_one_hangs_and_resume_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.01)
    made, answers = Background(), threading.Event()
    later: list[int] = []

    def add(number: int) -> int:
        later.append(number)
        return number

    assert made.run(lambda: answers.wait(SECONDS)) is None
    hung = made._hung
    assert hung is not None
    assert made.run(lambda: add(1)) is None
    answers.set()
    assert hung.is_done.wait(SECONDS)
    monkeypatch.setattr(background, "PATIENCE_SECONDS", SECONDS)
    assert made.run(lambda: add(2)) == 2
    assert later == [2], "the dropped call was not made late"


def test_a_call_that_was_begun_earlier_has_a_result_later() -> None:
    made, answers = Background(), threading.Event()

    def answer() -> int:
        answers.wait(SECONDS)
        return 7

    begun = made.start(answer)
    assert begun is not None
    answers.set()
    assert made.result(begun) == 7
    assert made.result(begun) == 7, "the result stays"


def test_a_call_that_hangs_after_it_was_begun_delays_one_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.01)
    made, answers = Background(), threading.Event()
    begun, other = made.start(lambda: answers.wait(SECONDS)), made.start(lambda: 1)
    assert begun is not None
    assert other is not None
    assert made.result(begun) is None
    monkeypatch.setattr(background, "PATIENCE_SECONDS", SECONDS)
    assert made.result(other) is None, "nobody waits for a thread that hangs"
    assert made.start(lambda: 2) is None
    answers.set()


def test_a_commit_goes_on_although_the_temporary_folder_hangs(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    monkeypatch.setattr(background, "_background", Background())
    answers, append = threading.Event(), PrivateFolder.append

    def hangs(self: PrivateFolder, name: str, line: Callable[[int], str], most_bytes: int) -> int:
        answers.wait(SECONDS)
        return append(self, name, line, most_bytes)

    monkeypatch.setattr(PrivateFolder, "append", hangs)
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.01)
    made = Journal(BATCH.application_id)
    made.finished(BATCH)  # returns
    made.proceeds()
    assert query_journals() == []
    hung = background._background._hung
    answers.set()
    assert hung is not None
    assert hung.is_done.wait(SECONDS)
    assert [each.application_id for each in query_journals()] == [BATCH.application_id]
    assert journal.newest_batch(BATCH.application_id) is not None


def test_totals_go_on_after_the_temporary_folder_hung(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    monkeypatch.setattr(background, "_background", Background())
    Journal(BATCH.application_id).finished(BATCH)
    answers, lines = threading.Event(), PrivateFolder.lines

    def hangs(self: PrivateFolder, name: str, last_bytes: int) -> list[str]:
        answers.wait(SECONDS)
        return lines(self, name, last_bytes)

    with monkeypatch.context() as hanging:
        hanging.setattr(PrivateFolder, "lines", hangs)
        hanging.setattr(background, "PATIENCE_SECONDS", 0.01)
        made = Journal(BATCH.application_id)
        known = made.newest("another run")
        assert known is not None
        assert known.totals["batches"] == 1, "a hung folder is no folder without a journal"
        made.finished(replace(BATCH, batch_id=8))  # dropped, because the thread still hangs
    hung = background._background._hung
    answers.set()
    assert hung is not None
    assert hung.is_done.wait(SECONDS)
    made = Journal(BATCH.application_id)
    made.newest("run")
    made.finished(replace(BATCH, batch_id=9))
    (found,) = query_journals()
    assert [(each.batch_id, each.totals["batches"]) for each in found.batches] == [(7, 1), (9, 3)]
    assert {each.runs for each in found.batches} == {1}


def test_a_fork_has_a_thread_and_a_lock_of_its_own() -> None:
    assert background.in_background(lambda: 1) == 1
    former = background._background
    with former._lock:  # as another thread may hold it during the fork
        pid = os.fork()
        if pid == 0:
            os._exit(0 if background.in_background(lambda: 2) == 2 else 1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
