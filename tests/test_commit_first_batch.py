"""The first-batch file, which records in a checkpoint that Kafka must hold a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.commit import first_batch
from kafka_eos_source.commit.first_batch import FirstBatch, FirstBatchFile, read_first_batch
from kafka_eos_source.errors import InvalidOptionError, NewerVersionError, OperatorError
from kafka_eos_source.runtime.file_systems import file_system

OURS = FirstBatch("app", "query", 3)
WRITTEN = FirstBatch("app", "query", 3, genesis=True)


def test_without_a_first_batch_file_no_batch_needs_a_token(tmp_path: Path) -> None:
    file = FirstBatchFile(str(tmp_path), OURS)
    assert not file.promises_token(3)
    file.write()
    assert file.promises_token(3)
    assert read_first_batch(str(tmp_path)) == WRITTEN


def test_the_content_is_on_disk_before_the_name_and_both_before_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure otherwise leaves an empty file, which only a person can mend."""
    synced: list[tuple[str, str]] = []

    def fsync(path: str) -> None:
        synced.append(("folder", "") if Path(path).is_dir() else ("file", Path(path).read_text()))
        assert read_first_batch(str(tmp_path)) == (WRITTEN if Path(path).is_dir() else None)

    monkeypatch.setattr(first_batch, "fsync", fsync)
    FirstBatchFile(str(tmp_path), OURS).write()
    assert synced == [("file", (tmp_path / "kafka-eos/identity.json").read_text()), ("folder", "")]


def test_an_existing_first_batch_file_is_not_replaced(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    later = FirstBatchFile(str(tmp_path), FirstBatch("app", "query", 7))
    later.write()
    assert later.found == read_first_batch(str(tmp_path)) == WRITTEN


def test_a_file_of_format_1_does_not_promise_a_token_for_its_first_batch(tmp_path: Path) -> None:
    """Format 1 wrote the file before it committed the first batch, so that batch may have no token."""
    (tmp_path / "kafka-eos").mkdir()
    old = {"application_id": "app", "query_id": "query", "first_batch": 3}
    (tmp_path / "kafka-eos/identity.json").write_text(json.dumps(old))
    file = FirstBatchFile(str(tmp_path), FirstBatch("app", "query", 4))
    assert not file.promises_token(3)
    assert file.promises_token(4)
    file.write()
    assert read_first_batch(str(tmp_path)) == WRITTEN


def test_a_file_with_keys_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    path = tmp_path / "kafka-eos/identity.json"
    newer = json.dumps({**json.loads(path.read_text()), "later": 1})
    path.write_text(newer)
    with pytest.raises(NewerVersionError, match="does not know: later"):
        FirstBatchFile(str(tmp_path), OURS)
    assert path.read_text() == newer


def test_the_refusal_names_the_version_that_wrote_the_file_which_alone_is_no_reason(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    path = tmp_path / "kafka-eos/identity.json"
    signed = {**json.loads(path.read_text()), "by": "9.1"}
    path.write_text(json.dumps(signed))
    assert read_first_batch(str(tmp_path)) == WRITTEN
    path.write_text(json.dumps({**signed, "later": 1}))
    with pytest.raises(NewerVersionError, match=r"know: later\..* written by kafka-eos 9\.1") as caught:
        read_first_batch(str(tmp_path))
    assert "kafka-eos 9.1" in caught.value.fix


def test_a_changed_application_id_is_refused(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    with pytest.raises(
        InvalidOptionError,
        match=r"committed with application\.id='app', but the query now has application\.id='other'",
    ):
        FirstBatchFile(str(tmp_path), FirstBatch("other", "query", 0))


def test_a_first_batch_file_of_another_query_promises_no_token(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    copied = FirstBatchFile(str(tmp_path), FirstBatch("other", "another query", 0))
    assert not copied.promises_token(5)
    copied.write()
    assert read_first_batch(str(tmp_path)) == FirstBatch("other", "another query", 0, genesis=True)


def with_topic(token_topic: str | None) -> FirstBatch:
    return FirstBatch("app", "query", 9, token_topic=token_topic)


def test_a_new_file_names_the_token_topic_of_the_query(tmp_path: Path) -> None:
    file = FirstBatchFile(str(tmp_path), with_topic("tokens"))
    assert file.has_all_tokens("tokens"), "nothing was committed yet"
    file.write()
    assert FirstBatchFile(str(tmp_path), with_topic("tokens")).has_all_tokens("tokens")
    assert not FirstBatchFile(str(tmp_path), with_topic("tokens")).has_all_tokens("others")


@pytest.mark.parametrize("later", [None, "others"])
def test_a_batch_without_a_token_record_first_removes_the_token_topic_from_the_file(
    tmp_path: Path, later: str | None
) -> None:
    FirstBatchFile(str(tmp_path), with_topic("tokens")).write()
    FirstBatchFile(str(tmp_path), with_topic(later)).write()
    again = FirstBatchFile(str(tmp_path), with_topic("tokens"))
    assert not again.has_all_tokens("tokens")
    again.write()
    assert not again.has_all_tokens("tokens"), "only a transaction with a record confirms the topic again"
    again.confirm_token_topic()
    found = FirstBatchFile(str(tmp_path), with_topic("tokens"))
    assert found.has_all_tokens("tokens")
    assert found.found == FirstBatch("app", "query", 9, genesis=True, token_topic="tokens")


def test_a_file_of_an_older_version_has_no_token_topic(tmp_path: Path) -> None:
    FirstBatchFile(str(tmp_path), OURS).write()
    file = FirstBatchFile(str(tmp_path), with_topic("tokens"))
    file.write()
    assert not file.has_all_tokens("tokens")
    file.confirm_token_topic()
    wanted = FirstBatch("app", "query", 3, genesis=True, token_topic="tokens")
    assert read_first_batch(str(tmp_path)) == wanted


@pytest.mark.parametrize("text", ["{", "[]", '["later"]', '"later"', "7", "null"])
def test_a_damaged_first_batch_file_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "kafka-eos").mkdir()
    (tmp_path / "kafka-eos/identity.json").write_text(text)
    with pytest.raises(OperatorError, match=r"identity\.json is damaged"):
        FirstBatchFile(str(tmp_path), OURS)


class FilesWithRival:
    """A file system on which another driver writes the file just before this one moves its own."""

    def __init__(self, checkpoint: str) -> None:
        self._fs: Any = file_system(checkpoint)[0]
        self._checkpoint = checkpoint

    def move(self, source: str, target: str) -> None:
        FirstBatchFile(self._checkpoint, OURS).write()
        self._fs.move(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_two_drivers_that_write_the_file_at_the_same_time_agree_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither driver fails here; Spark's log stops one of them later."""
    real = file_system(str(tmp_path))
    file = FirstBatchFile(str(tmp_path), OURS)
    answers = iter([(FilesWithRival(str(tmp_path)), real[1])])
    monkeypatch.setattr(first_batch, "file_system", lambda _location: next(answers, real))
    file.write()
    assert read_first_batch(str(tmp_path)) == WRITTEN
    assert [each.name for each in (tmp_path / "kafka-eos").iterdir()] == ["identity.json"]
