"""The notes by which a commit knows that reading tasks were planned to send packets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_eos_source.commit.micro_batch import _planned_reads
from kafka_eos_source.errors import StagedReadError
from kafka_eos_source.model import ReadPart, ReadTask, StagedPart, TopicPartition
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition
from kafka_eos_source.runtime import folders
from kafka_eos_source.spark.packet_senders import PlannedReads, is_running, planned_reads
from kafka_eos_source.stage.parts import check_planned_reads


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders, "_PATIENCE_SECONDS", 0.0)


def position(end: int) -> SourcePosition:
    return SourcePosition({TopicPartition("t", 0): end})


def logged(end: int) -> LoggedOffsets:
    return LoggedOffsets({"0": position(end).to_json()}, "digest")


def arrived(frame: str) -> StagedPart:
    part = ReadPart(ReadTask(frame, "p", 0, 1), "a", (0,), 1)
    return StagedPart("", 0, 0, 0, reads=(part,))


def missing(parts: list[StagedPart], end: int = 5, before: int | None = 3) -> set[str]:
    earlier = None if before is None else logged(before)
    expected = _planned_reads("app", logged(end), earlier, parts)
    return expected - {each.task.frame for part in parts for each in part.reads}


def test_the_commit_expects_the_packets_of_a_read_that_was_planned_for_its_batch() -> None:
    assert planned_reads("app") == {}
    read = PlannedReads("app", "frame")
    read.plan(position(3).digest)
    read.plan(position(5).digest)
    assert missing([]) == missing([], before=None) == {"frame"}
    assert missing([arrived("frame")]) == set()
    with pytest.raises(StagedReadError, match="reading tasks were planned"):
        check_planned_reads([arrived("other")], {"frame"}, 7)
    check_planned_reads([arrived("frame")], {"frame"}, 7)
    # the source had nothing new, or the note is of another batch
    assert missing([], before=5) == set()
    assert missing([], end=9) == set()
    assert _planned_reads("other app", logged(5), None, []) == set()
    read.close()
    assert planned_reads("app") == {}


def test_the_note_of_a_process_that_was_killed_is_believed_by_nobody_and_removed_by_the_next() -> None:
    killed = PlannedReads("app", "killed")
    killed.plan(position(5).digest)
    assert killed._held is not None
    killed._held.close()
    assert planned_reads("app")
    assert not is_running("app", "killed")
    assert missing([]) == set()
    read = PlannedReads("app", "frame")
    read.plan(position(5).digest)
    assert set(planned_reads("app")) == {"frame"}
    assert is_running("app", "frame")
    assert missing([]) == {"frame"}
