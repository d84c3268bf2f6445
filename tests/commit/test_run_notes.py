"""What the processes of a run remember, and that nothing else knows it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kafka_eos_source.commit.run_notes import RunNotes
from kafka_eos_source.runtime.folders import PrivateFolder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


def notes() -> RunNotes:
    """Returns the notes as a new process has them."""
    return RunNotes("notes", "which topics have good records", "the query stops")


@pytest.mark.parametrize("reused", [True, False])
def test_what_a_run_notes_is_known_in_each_process_of_it_and_in_no_other_run(reused: bool) -> None:
    process = notes()

    def now() -> RunNotes:
        return process if reused else notes()

    now().add("app", "run-1", {"t"})
    assert now().of("app", "run-1") == {"t"}
    now().add("app", "run-1", {"u"})
    assert now().of("app", "run-1") == {"t", "u"}
    assert now().of("other", "run-1") == frozenset()
    assert now().of("app", "run-2") == frozenset()
    now().add("app", "run-2", {"u"})
    assert now().of("app", "run-2") == {"u"}


@pytest.mark.parametrize("text", ["", "{}", '{"run": "run-1", "notes": 3}', json.dumps([1])])
def test_a_damaged_file_says_nothing(text: str) -> None:
    PrivateFolder.of_user("notes").write("app.json", text)
    assert notes().of("app", "run-1") == frozenset()


def test_notes_that_cannot_be_written_are_known_in_this_process(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(PrivateFolder.of_user("notes").path).symlink_to(folder)
    process = notes()
    with caplog.at_level(logging.WARNING):
        process.add("app", "run-1", {"t"})
    assert process.of("app", "run-1") == {"t"}
    assert "cannot note which topics have good records" in caplog.text
