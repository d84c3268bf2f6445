"""How large a batch may be so that its state fits into memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.plan import advice as admission


@given(st.integers(1, 10**9), st.floats(1.0001, 1e6))
def test_the_advice_after_a_batch_that_was_too_large_fits_into_memory(records: int, pressure: float) -> None:
    limit = admission.next_limit(None, records, pressure)
    assert limit is not None
    assert limit == 1 or limit * pressure / records < 0.81


@given(st.none() | st.integers(1, 10**9), st.integers(0, 10**9), st.floats(0, 1))
def test_the_advice_after_a_batch_that_fitted_is_never_smaller(
    limit: int | None, records: int, pressure: float
) -> None:
    after = admission.next_limit(limit, records, pressure)
    assert after == limit or (limit is not None and after is not None and after > limit)


def test_only_a_full_batch_raises_the_advice() -> None:
    assert admission.next_limit(100, 100, 0.1) == 200
    assert admission.next_limit(100, 3, 0.001) == 100


def test_advice_is_written_read_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert admission.read("app") is None
    admission.write("app", 7)
    assert admission.read("app") == 7
    assert admission.read("other") is None
    admission.write("app", None)
    admission.write("app", None)
    assert admission.read("app") is None


@pytest.mark.parametrize("text", ["", "{}", '{"records": "many"}', "[]"])
def test_damaged_advice_is_ignored(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    admission.write("app", 7)
    next(tmp_path.rglob("app.json")).write_text(text)
    assert admission.read("app") is None
