"""The mark that a query leaves in its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.commit import identity
from kafka_eos_source.commit.identity import Mark, mark, read_mark
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.file_systems import file_system

OURS = Mark("app", "query", 3)


def test_the_first_one_stays(tmp_path: Path) -> None:
    assert mark(str(tmp_path), OURS) == OURS
    assert mark(str(tmp_path), Mark("app", "query", 7)) == OURS


def test_another_application_id_is_refused(tmp_path: Path) -> None:
    mark(str(tmp_path), OURS)
    with pytest.raises(InvalidOptionError, match=r"committed with application\.id='app'"):
        mark(str(tmp_path), Mark("other", "query", 0))


class Meanwhile:
    """A file system on which another driver marks the checkpoint just before a file is moved."""

    def __init__(self, checkpoint: str, other: Mark) -> None:
        self._fs: Any = file_system(checkpoint)[0]
        self._checkpoint, self._other = checkpoint, other

    def move(self, source: str, target: str) -> None:
        mark(self._checkpoint, self._other)
        self._fs.move(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_two_drivers_that_mark_at_the_same_moment_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's log stops one of them; that none fails here leaves it to that."""
    real = file_system(str(tmp_path))
    answers: Iterator[Any] = iter([(Meanwhile(str(tmp_path), OURS), real[1])])
    monkeypatch.setattr(identity, "file_system", lambda _location: next(answers, real))
    assert mark(str(tmp_path), OURS) == OURS
    assert read_mark(str(tmp_path)) == OURS
    assert [each.name for each in (tmp_path / "kafka-eos").iterdir()] == ["identity.json"]
