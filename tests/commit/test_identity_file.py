"""The identity file of a checkpoint: it promises a token, names its place, and remembers lost guarantees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.commit import identity_file
from kafka_eos_source.commit.identity_file import (
    Identity,
    IdentityFile,
    check_identity,
    read_identity,
    set_unproven,
)
from kafka_eos_source.errors import (
    CheckpointMovedError,
    GuaranteeChangedError,
    InvalidOptionError,
    NewerVersionError,
    OperatorError,
)
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.runtime.file_systems import file_system

PLACE = "file:/checkpoints/orders"
OURS = Identity("app", "query", 3, PLACE)


def test_without_a_identity_file_no_batch_needs_a_token(tmp_path: Path) -> None:
    file = IdentityFile(str(tmp_path), OURS)
    assert not file.promises_token
    file.write()
    assert file.promises_token
    assert read_identity(str(tmp_path)) == OURS


def test_the_content_is_on_disk_before_the_name_and_both_before_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure otherwise leaves an empty file, which only a person can mend."""
    synced: list[tuple[str, str]] = []

    def fsync(path: str) -> None:
        synced.append(("folder", "") if Path(path).is_dir() else ("file", Path(path).read_text()))
        assert read_identity(str(tmp_path)) == (OURS if Path(path).is_dir() else None)

    monkeypatch.setattr(identity_file, "fsync", fsync)
    IdentityFile(str(tmp_path), OURS).write()
    assert synced == [("file", (tmp_path / "kafka-eos/identity.json").read_text()), ("folder", "")]


def test_an_existing_identity_file_is_not_replaced(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    later = IdentityFile(str(tmp_path), replace(OURS, first_batch=7))
    later.write()
    assert later.found == read_identity(str(tmp_path)) == OURS


def test_a_file_with_keys_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    path = tmp_path / "kafka-eos/identity.json"
    newer = json.dumps({**json.loads(path.read_text()), "later": 1})
    path.write_text(newer)
    with pytest.raises(NewerVersionError, match="does not know: later"):
        IdentityFile(str(tmp_path), OURS)
    assert path.read_text() == newer


def test_the_refusal_names_the_version_that_wrote_the_file_which_alone_is_no_reason(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    path = tmp_path / "kafka-eos/identity.json"
    signed = {**json.loads(path.read_text()), "by": "9.1"}
    path.write_text(json.dumps(signed))
    assert read_identity(str(tmp_path)) == OURS
    path.write_text(json.dumps({**signed, "later": 1}))
    with pytest.raises(NewerVersionError, match=r"know: later\..* written by kafka-eos 9\.1") as caught:
        read_identity(str(tmp_path))
    assert "kafka-eos 9.1" in caught.value.fix


def test_a_changed_application_id_is_refused(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    with pytest.raises(
        InvalidOptionError,
        match=r"committed with application\.id='app', but the query now has application\.id='other'",
    ):
        IdentityFile(str(tmp_path), replace(OURS, application_id="other"))


def test_a_identity_file_of_another_query_promises_no_token(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    other = Identity("other", "another query", 0, "file:/checkpoints/other")
    copied = IdentityFile(str(tmp_path), other)
    assert not copied.promises_token
    copied.write()
    assert read_identity(str(tmp_path)) == other


def test_a_checkpoint_that_has_lost_its_query_id_is_refused(tmp_path: Path) -> None:
    """Otherwise the batch would be written again under the id that Spark has created."""
    IdentityFile(str(tmp_path), OURS).write()
    lost = replace(OURS, query_id="new", application_id="kafka-eos-new")
    with pytest.raises(OperatorError, match=r"committed by query query, but .* names query new") as caught:
        IdentityFile(str(tmp_path), lost)
    assert '{"id":"query"}' in caught.value.fix
    assert not IdentityFile(str(tmp_path), replace(lost, first_batch=0)).promises_token, "it begins anew"


def with_topic(token_topic: str | None) -> Identity:
    return replace(OURS, first_batch=9, token_topic=token_topic)


def test_a_new_file_names_the_token_topic_of_the_query(tmp_path: Path) -> None:
    file = IdentityFile(str(tmp_path), with_topic("tokens"))
    assert file.has_all_tokens("tokens"), "nothing was committed yet"
    file.write()
    assert IdentityFile(str(tmp_path), with_topic("tokens")).has_all_tokens("tokens")
    assert not IdentityFile(str(tmp_path), with_topic("tokens")).has_all_tokens("others")


@pytest.mark.parametrize("later", [None, "others"])
def test_a_batch_without_a_token_record_first_removes_the_token_topic_from_the_file(
    tmp_path: Path, later: str | None
) -> None:
    IdentityFile(str(tmp_path), with_topic("tokens")).write()
    IdentityFile(str(tmp_path), with_topic(later)).write()
    again = IdentityFile(str(tmp_path), with_topic("tokens"))
    assert not again.has_all_tokens("tokens")
    again.write()
    assert not again.has_all_tokens("tokens"), "only a transaction with a record confirms the topic again"
    again.confirm_token_topic()
    found = IdentityFile(str(tmp_path), with_topic("tokens"))
    assert found.has_all_tokens("tokens")
    assert found.found == with_topic("tokens")


def test_a_query_that_gets_a_token_topic_later_names_it_after_its_first_record(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    file = IdentityFile(str(tmp_path), with_topic("tokens"))
    file.write()
    assert not file.has_all_tokens("tokens")
    file.confirm_token_topic()
    assert read_identity(str(tmp_path)) == replace(OURS, token_topic="tokens")


@pytest.mark.parametrize("text", ["{", "[]", '["later"]', '"later"', "7", "null"])
def test_a_damaged_identity_file_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "kafka-eos").mkdir()
    (tmp_path / "kafka-eos/identity.json").write_text(text)
    with pytest.raises(OperatorError, match=r"identity\.json is damaged"):
        IdentityFile(str(tmp_path), OURS)


class FilesWithRival:
    """A file system on which another driver writes the file just before this one moves its own."""

    def __init__(self, checkpoint: str) -> None:
        self._fs: Any = file_system(checkpoint)[0]
        self._checkpoint = checkpoint

    def move(self, source: str, target: str) -> None:
        IdentityFile(self._checkpoint, OURS).write()
        self._fs.move(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_two_drivers_that_write_the_file_at_the_same_time_agree_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither driver fails here; Spark's log stops one of them later."""
    real = file_system(str(tmp_path))
    file = IdentityFile(str(tmp_path), OURS)
    answers = iter([(FilesWithRival(str(tmp_path)), real[1])])
    monkeypatch.setattr(identity_file, "file_system", lambda _location: next(answers, real))
    file.write()
    assert read_identity(str(tmp_path)) == OURS
    assert [each.name for each in (tmp_path / "kafka-eos").iterdir()] == ["identity.json"]


MOVED = replace(OURS, location="file:/elsewhere/orders")


@pytest.mark.parametrize(
    "answer", ["fail", "continue:file:/checkpoints/another", f"continue:{MOVED.location}"]
)
def test_a_checkpoint_at_another_place_is_refused_until_a_person_says_what_happened(
    tmp_path: Path, answer: str
) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    with pytest.raises(CheckpointMovedError, match=f"at {MOVED.location} ran before at {PLACE} ") as caught:
        IdentityFile(str(tmp_path), MOVED, answer)
    assert f"'continue:{PLACE}'" in caught.value.fix
    assert read_identity(str(tmp_path)) == OURS


@pytest.mark.parametrize("former", [PLACE, "/checkpoints/orders", "file:///checkpoints/orders/"])
def test_a_moved_checkpoint_continues_and_the_answer_acts_once(tmp_path: Path, former: str) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    moved = IdentityFile(str(tmp_path), MOVED, f"continue:{former}")
    assert moved.promises_token
    assert read_identity(str(tmp_path)) == OURS, "nothing is written before the batch"
    moved.write()
    assert read_identity(str(tmp_path)) == MOVED
    with pytest.raises(CheckpointMovedError, match=f"ran before at {MOVED.location} "):
        IdentityFile(str(tmp_path), replace(OURS, location="file:/copy"), f"continue:{former}")


def test_a_fork_is_a_query_of_its_own(tmp_path: Path) -> None:
    IdentityFile(str(tmp_path), OURS).write()
    with pytest.raises(InvalidOptionError, match="'app' is that of the original query"):
        IdentityFile(str(tmp_path), MOVED, "fork")
    forked = IdentityFile(str(tmp_path), replace(MOVED, application_id="copy", first_batch=8), "fork")
    assert forked.is_new_fork
    assert not forked.promises_token, "the tokens of the original are not the fork's"
    forked.write()
    again = IdentityFile(str(tmp_path), replace(MOVED, application_id="copy", first_batch=9), "fork")
    assert not again.is_new_fork
    assert again.found == replace(MOVED, application_id="copy", first_batch=8)
    with pytest.raises(InvalidOptionError, match="is that of the original query"):
        IdentityFile(str(tmp_path), replace(OURS, application_id="copy"), "fork")


def test_batches_without_a_token_are_remembered_until_a_token_exists_again(tmp_path: Path) -> None:
    set_unproven(str(tmp_path), 2)
    assert read_identity(str(tmp_path)) is None, "no batch of this checkpoint ever left a token"
    IdentityFile(str(tmp_path), OURS).write()
    IdentityFile(str(tmp_path), OURS).check_guarantee()
    for batch_id in (5, 6):
        set_unproven(str(tmp_path), batch_id)
    with pytest.raises(GuaranteeChangedError, match=r"from batch 5 on .*at_least_once") as caught:
        IdentityFile(str(tmp_path), OURS).check_guarantee()
    assert "kafka-eos adopt" in caught.value.fix
    set_unproven(str(tmp_path), None)
    IdentityFile(str(tmp_path), OURS).check_guarantee()
    assert read_identity(str(tmp_path)) == OURS


# ------------------------------------------------------------------ static tables


def of(checkpoint: Path, tables: dict[str, str], **more: str) -> IdentityFile:
    """The file of a checkpoint for a query that joins these tables in SQL; by name, their digests."""
    return IdentityFile.of(str(checkpoint), options_of(checkpoint, tables, **more), "query", 0)


def options_of(checkpoint: Path, tables: dict[str, str], **more: str) -> WriteOptions:
    stated = {"sql.tables": json.dumps(tables), **more} if tables else more
    return parse_write(
        {
            "kafka.bootstrap.servers": "h:1",
            "topic": "t",
            "checkpointLocation": str(checkpoint),
            "application.id": "app",
            **stated,
        },
        streaming=True,
    )


def test_a_changed_static_table_is_refused_until_a_person_allows_it(tmp_path: Path) -> None:
    of(tmp_path, {"rates": "1", "codes": "1"}).write()
    of(tmp_path, {"rates": "1", "codes": "1"}).write()
    with pytest.raises(InvalidOptionError, match=r"static table 'rates'.*other rows") as refused:
        of(tmp_path, {"codes": "1", "rates": "2"})
    assert "options={'onChangedTable': 'continue'} to App.write" in refused.value.fix
    of(tmp_path, {"codes": "1", "rates": "2"}, onChangedTable="continue").write()
    of(tmp_path, {"codes": "1", "rates": "2"}).write()
    with pytest.raises(InvalidOptionError, match="'rates'"):
        of(tmp_path, {"codes": "1", "rates": "1"})


def test_a_changed_table_that_a_person_allows_is_recorded_also_if_no_batch_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_file, "_checked", set())
    monkeypatch.setattr(identity_file.offset_log, "query_id", lambda _: "query")
    of(tmp_path, {"rates": "1"}).write()
    check_identity(options_of(tmp_path, {"rates": "2"}, onChangedTable="continue"))
    monkeypatch.setattr(identity_file, "_checked", set())
    check_identity(options_of(tmp_path, {"rates": "2"}))
    with pytest.raises(InvalidOptionError, match="'rates'"):
        check_identity(options_of(tmp_path, {"rates": "1"}))


def test_a_static_table_is_recorded_with_the_first_batch_that_uses_it(tmp_path: Path) -> None:
    of(tmp_path, {}).write()
    of(tmp_path, {"rates": "1"})
    of(tmp_path, {"rates": "2"}).write()  # no batch was committed with the one before
    with pytest.raises(InvalidOptionError, match="'rates'"):
        of(tmp_path, {"rates": "1"})
    of(tmp_path, {}).write()
    of(tmp_path, {"rates": "1"}).write()  # a query without the table used the checkpoint in between


@pytest.mark.parametrize("text", ["[]", '{"a":1}', "{", "x"])
def test_digests_of_tables_that_the_app_did_not_write_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"'sql\.tables'.*expected a JSON object"):
        of(tmp_path, {}, **{"sql.tables": text})
