"""Each test has a temporary folder of its own, without figures of other queries."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_eos_source.runtime import folders, logs


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that stands in for the host's temporary folder."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(shared))
    monkeypatch.setattr(logs, "_warned", set())
    monkeypatch.setattr(folders, "_tidied", {})
    return shared
