"""The retry policy, on a clock that only moves when the code sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry


class Clock:
    """Stands for `time.monotonic` and `time.sleep`, and records every sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(round(seconds, 6))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


class TemporaryError(Exception):
    """An error that the policy retries."""


def failing(times: int, error: BaseException | None = None) -> Callable[[], str]:
    """Returns an operation that fails ``times`` times and then returns "done"."""
    left = [times]

    def operation() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error or TemporaryError(f"{left[0]} more")
        return "done"

    return operation


def retried(
    operation: Callable[[], str],
    pauses: Pauses,
    permanent: Callable[[TemporaryError], BaseException | None] = lambda _: None,
    report: Callable[[TemporaryError, float], None] | None = None,
) -> str:
    return retry(
        operation,
        TemporaryError,
        pauses,
        permanent=permanent,
        timed_out=lambda failure: TimeoutError(str(failure)),
        report=report,
    )


def test_a_first_success_does_not_sleep(clock: Clock) -> None:
    assert retried(failing(0), Pauses(Deadline.after_seconds(0.0), 0.1, sleep=clock.sleep)) == "done"
    assert clock.slept == []


def test_all_pauses_have_the_same_length_by_default(clock: Clock) -> None:
    assert retried(failing(3), Pauses(Deadline.after_seconds(9.0), 0.1, sleep=clock.sleep)) == "done"
    assert clock.slept == [0.1, 0.1, 0.1]


def test_pauses_double_up_to_a_maximum_and_end_at_the_deadline(clock: Clock) -> None:
    pauses = Pauses(Deadline.after_seconds(10.0), 0.5, 3.0, sleep=clock.sleep)
    with pytest.raises(TimeoutError, match="more") as caught:
        retried(failing(99), pauses)
    assert clock.slept == [0.5, 1.0, 2.0, 3.0, 3.0, 0.5]
    assert isinstance(caught.value.__cause__, TemporaryError)


def test_an_expired_deadline_allows_one_try(clock: Clock) -> None:
    with pytest.raises(TimeoutError, match="4 more"):
        retried(failing(5), Pauses(Deadline.after_seconds(0.0), 0.1, sleep=clock.sleep))
    assert clock.slept == []


def test_without_a_deadline_only_a_permanent_failure_ends_the_retries(clock: Clock) -> None:
    def permanent(failure: TemporaryError) -> BaseException | None:
        return PermissionError("no") if str(failure) == "0 more" else None

    with pytest.raises(PermissionError) as caught:
        retried(failing(4), Pauses(None, 0.1, sleep=clock.sleep), permanent)
    assert clock.slept == [0.1, 0.1, 0.1]
    assert isinstance(caught.value.__cause__, TemporaryError)


def test_a_permanent_error_is_raised_without_a_cause(clock: Clock) -> None:
    with pytest.raises(TemporaryError) as caught:
        retried(failing(1), Pauses(None, 0.1, sleep=clock.sleep), lambda failure: failure)
    assert caught.value.__cause__ is None


def test_other_errors_are_not_retried(clock: Clock) -> None:
    with pytest.raises(KeyError):
        retried(failing(1, KeyError("x")), Pauses(Deadline.after_seconds(9.0), 0.1, sleep=clock.sleep))
    assert clock.slept == []


def test_each_retry_is_reported_with_its_pause(clock: Clock) -> None:
    reported: list[tuple[str, float]] = []
    retried(
        failing(2),
        Pauses(Deadline.after_seconds(9.0), 0.1, 0.4, sleep=clock.sleep),
        report=lambda failure, seconds: reported.append((str(failure), seconds)),
    )
    assert reported == [("1 more", 0.1), ("0 more", 0.2)]


def test_a_waiting_loop_ends_at_its_deadline(clock: Clock) -> None:
    pauses = Pauses(Deadline.after_seconds(1.0), 0.4, sleep=clock.sleep)
    for _ in range(3):
        pauses.wait(TimeoutError)
    with pytest.raises(TimeoutError):
        pauses.wait(TimeoutError)
    assert clock.slept == [0.4, 0.4, 0.2]


def test_pauses_of_length_zero_do_not_sleep(clock: Clock) -> None:
    assert retried(failing(3), Pauses(Deadline.after_seconds(9.0), 0.0, sleep=clock.sleep)) == "done"
    assert clock.slept == []


def test_the_number_of_pauses_can_be_limited(clock: Clock) -> None:
    pauses = Pauses(None, 0.1, 10.0, most=3, sleep=clock.sleep)
    with pytest.raises(TimeoutError, match="5 more"):
        retried(failing(9), pauses)
    assert clock.slept == [0.1, 0.2, 0.4]
    assert pauses.expired
    with pytest.raises(TimeoutError, match="4 more"):
        retried(failing(5), Pauses(None, 0.1, most=0, sleep=clock.sleep))


def test_jitter_changes_each_pause_by_at_most_its_share(clock: Clock) -> None:
    pauses = Pauses(None, 1.0, 2.0, jitter=0.5, sleep=clock.sleep)
    for _ in range(100):
        pauses.wait()
    assert 0.5 <= clock.slept[0] <= 1.5
    assert all(1.0 <= each <= 3.0 for each in clock.slept[1:])
    assert min(clock.slept[1:]) < 1.9 < 2.1 < max(clock.slept), "the pauses differ"


def test_the_other_side_can_ask_for_a_longer_pause(clock: Clock) -> None:
    pauses = Pauses(Deadline.after_seconds(9.0), 0.1, 10.0, sleep=clock.sleep)
    pauses.wait(at_least_seconds=3.0)
    pauses.wait(at_least_seconds=0.1)
    assert clock.slept == [3.0, 0.2]
