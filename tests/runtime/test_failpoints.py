"""Failpoints do nothing unless armed, and fire only once if armed with a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_eos_source.errors import RestartQueryError
from kafka_eos_source.runtime import failpoints


@pytest.fixture(autouse=True)
def _parse_environment_again() -> Iterator[None]:
    failpoints._armed.cache_clear()
    yield
    failpoints._armed.cache_clear()


def test_a_failpoint_that_is_not_armed_does_nothing() -> None:
    failpoints.reach("commit.before_begin")


def test_a_failpoint_armed_with_a_file_fires_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, f"a=raise@{tmp_path / 'once'},b=raise")
    with pytest.raises(RestartQueryError, match="failpoint a"):
        failpoints.reach("a")
    failpoints.reach("a")
    with pytest.raises(RestartQueryError):
        failpoints.reach("b")
    failpoints.reach("c")


def test_a_failpoint_fires_at_the_configured_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, "a=raise*3")
    failpoints.reach("a")
    failpoints.reach("a")
    with pytest.raises(RestartQueryError):
        failpoints.reach("a")


@pytest.mark.parametrize("entry", ["a=explode", "a=raise*often"])
def test_an_unknown_action_of_a_failpoint_is_refused(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, entry)
    with pytest.raises(ValueError, match=entry.removeprefix("a=").replace("*", r"\*")):
        failpoints.reach("a")
