"""A client call that never returns is abandoned, together with its client."""

from __future__ import annotations

import threading

import pytest

from kafka_eos_source.errors import RetriableError
from kafka_eos_source.runtime import watchdog
from kafka_eos_source.runtime.watchdog import Pulse, Watchdog


@pytest.fixture(autouse=True)
def _short_silence_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.05)


def test_results_and_errors_of_a_call_are_passed_on() -> None:
    dog = Watchdog("c")
    assert dog.call("counting", lambda: 7, 1.0) == 7
    with pytest.raises(ZeroDivisionError):
        dog.call("dividing", lambda: 1 / 0, 1.0)
    closed = []
    dog.end(lambda: closed.append(True), 10.0)
    assert closed == [True]


def test_a_call_that_hangs_is_abandoned_and_its_client_closed_when_it_returns() -> None:
    dog = Watchdog("c")
    release, closed = threading.Event(), threading.Event()
    with pytest.raises(RetriableError, match="waiting: the call did not return"):
        dog.call("waiting", release.wait, 0.01)
    assert dog.is_lost
    with pytest.raises(RetriableError, match="asking again"):
        dog.call("asking again", lambda: pytest.fail("the client is in the middle of a call"), 0.01)
    dog.end(closed.set, 10.0)
    assert not closed.is_set(), "a hanging client is not closed, and nobody waits for it"
    release.set()
    assert closed.wait(10)


def test_an_error_while_closing_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Watchdog("c").end(lambda: 1 / 0, 10.0)  # type: ignore[arg-type,return-value]


def test_a_call_may_take_as_long_as_it_reports_progress() -> None:
    pulse, pause = Pulse(), threading.Event()
    dog = Watchdog("c", pulse)

    def work() -> int:
        for _ in range(20):
            pulse.beat()
            pause.wait(0.05)
        return 7

    assert dog.call("working", work, 0.5) == 7
    assert not dog.is_lost


def test_a_call_that_stops_reporting_progress_is_abandoned() -> None:
    pulse, release = Pulse(), threading.Event()
    dog = Watchdog("c", pulse)

    def work() -> None:
        pulse.beat()
        release.wait()

    with pytest.raises(RetriableError):
        dog.call("working", work, 0.05)
    release.set()
