"""Settings of the tests of the commit."""

import pytest

from kafka_eos_source.commit import machine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a batch be tried again at once: hundreds of tests retry, up to five times each."""
    monkeypatch.setattr(machine, "_FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(machine, "_LONGEST_PAUSE_SECONDS", 0.05)
