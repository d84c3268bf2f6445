"""A manifest of a prepared batch that somebody edited is refused by name, and nothing is moved."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.sinks import OK, Ok, Retryable, SinkTxn, constructors, filesystem_layout, manifest
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import System, deadline, new_txn, opened, stage
from tests.support import foreign_manifests as foreign

ROWS = pa.table({"n": [1, 2, 3]})
Edit = Callable[[Mapping[str, Any]], object]


def with_file(**changes: object) -> Edit:
    return lambda content: content["files"][0].update(changes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".bashrc").write_text("mine")
    return tmp_path


def prepared(home: Path) -> tuple[System, SinkTxn, Path]:
    """Prepares a batch in ``out``; returns the sink, the id, and the manifest."""
    system = System(sink=lambda: constructors.files(str(home / "out")).build(), visible=list)
    txn = new_txn()
    with opened(system) as sink:
        sink.make_ready(ROWS.schema, deadline())
        outcome = sink.prepare(txn, stage(sink, ROWS), deadline())
    assert isinstance(outcome, Ok)
    (file,) = home.glob("out/_kafka_eos/*/prepared/*.json")
    assert outcome.digest == manifest.digest(file.read_bytes()), "the token holds the digest of the file"
    return system, txn, file


def tree(home: Path) -> dict[str, bytes]:
    """Returns every file below a folder, with its content."""
    return {str(each.relative_to(home)): each.read_bytes() for each in home.rglob("*") if each.is_file()}


def rows_of(home: Path) -> int:
    return sum(pq.read_table(file).num_rows for file in committed_files(str(home / "out")))


def edit(file: Path, change: Edit) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


EDITS = {
    "a name that leads out of the folder": with_file(name="../../../../../.bashrc"),
    "a staged file of somebody else": with_file(staged="../../../../.bashrc"),
    "a file less": lambda content: content["files"].pop(),
    "a file twice": lambda content: content["files"].append(content["files"][0]),
    "more rows": with_file(rows=10**9),
    "another id": lambda content: content.update(id="x"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_manifest_is_refused_by_name_and_the_restored_one_is_committed(
    home: Path, what: str
) -> None:
    system, txn, file = prepared(home)
    original = file.read_bytes()
    edit(file, EDITS[what])
    before = tree(home)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        with pytest.raises(SinkFailedError, match="was changed after the batch was prepared") as refused:
            sink.commit(txn, deadline())
    assert str(file) in refused.value.message, "the message names the file"
    assert refused.value.fix
    assert tree(home) == before, "nothing was moved"
    file.write_bytes(original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert rows_of(home) == len(ROWS)
    assert (home / ".bashrc").read_text() == "mine"


@pytest.mark.parametrize("until", ["prepared", "recorded"])
def test_a_forged_batch_in_the_public_folder_destroys_no_prepared_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    """Users who may write to the folder that readers see put a batch there before the next start."""
    system, txn, _ = prepared(home)

    def dies(name: str) -> None:
        if name == "sink.filesystem.before_rename":
            raise KeyboardInterrupt

    if until == "recorded":
        with opened(system) as sink, monkeypatch.context() as patch:
            patch.setattr(failpoints, "reach", dies)
            with pytest.raises(KeyboardInterrupt):
                sink.commit(txn, deadline())
    forged = home / "out" / f"batch={txn}"
    forged.mkdir()
    (forged / "_manifest.json").write_text(json.dumps({"id": str(txn), "files": []}))
    before = tree(home)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        with pytest.raises(SinkFailedError, match="was changed after the batch was prepared"):
            sink.commit(txn, deadline())
    as_a_person = replace(system, digests={})  # as `kafka-eos sinks commit` calls it
    with (
        opened(as_a_person) as sink,
        pytest.raises(SinkFailedError, match="is not the one that was prepared"),
    ):
        sink.commit(txn, deadline())
    assert tree(home) == before, "nothing was deleted"
    shutil.rmtree(forged)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        assert sink.commit(txn, deadline()) == OK
    assert rows_of(home) == len(ROWS)


@pytest.mark.parametrize("name", foreign.NAMES)
@pytest.mark.parametrize("key", ["name", "staged"])
def test_a_person_who_commits_without_a_token_cannot_move_files_elsewhere(
    home: Path, key: str, name: str
) -> None:
    """`kafka-eos sinks commit` has no digest, so only the names protect the files of the user."""
    system, txn, file = prepared(home)
    edit(file, with_file(**{key: name}))
    before = tree(home)
    with opened(replace(system, digests={})) as sink, pytest.raises(SinkFailedError, match="damaged"):
        sink.commit(txn, deadline())
    assert tree(home) == before


def test_a_record_of_a_commit_that_was_edited_deletes_nothing_and_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies before the rename. A record of files that do not exist looks like a finished commit."""
    system, txn, _ = prepared(home)

    def dies(name: str) -> None:
        if name == "sink.filesystem.before_rename":
            raise KeyboardInterrupt

    with opened(system) as sink, monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", dies)
        with pytest.raises(KeyboardInterrupt):
            sink.commit(txn, deadline())
    (record,) = home.glob("out/_kafka_eos/*/committed/*.json")
    original = record.read_bytes()
    edit(record, lambda content: content.update(files=[]))
    before = tree(home)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn], "only a digest could tell that it was committed"
        with pytest.raises(SinkFailedError, match="was changed"):
            sink.commit(txn, deadline())
    assert tree(home) == before
    record.write_bytes(original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
        assert list(sink.recover(deadline())) == []
    assert rows_of(home) == len(ROWS)


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_no_edited_manifest_changes_a_file(data: st.DataObject) -> None:
    """With the digest, every edit is refused. Without it, files are moved only below ``out``."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / ".bashrc").write_text("mine")
        system, txn, file = prepared(home)
        original = file.read_bytes()
        file.write_bytes(data.draw(foreign.edited(original)))
        before = tree(home)
        with opened(system) as sink:
            assert list(sink.recover(deadline())) == [txn]
            with pytest.raises(SinkFailedError, match="was changed"):
                sink.commit(txn, deadline())
        assert tree(home) == before
        if data.draw(st.booleans()):
            with opened(replace(system, digests={})) as sink:
                try:
                    sink.commit(txn, deadline())
                except SinkFailedError as error:
                    assert str(file) in error.message or "/staged/" in error.message  # noqa: PT017
            assert tree(home)[".bashrc"] == b"mine"
            assert not [each for each in tree(home) if not each.startswith(("out/", ".bashrc"))]
        else:
            file.write_bytes(original)
            with opened(system) as sink:
                assert sink.commit(txn, deadline()) == OK
            assert rows_of(home) == len(ROWS)


@pytest.mark.parametrize("of", ["prepared", "staged", "staged file", "hidden"])
def test_a_symbolic_link_is_not_followed(home: Path, of: str) -> None:
    system, txn, file = prepared(home)
    (staged,) = {each.parent for each in home.glob("out/_kafka_eos/*/staged/*/*")}
    at = {
        "prepared": file,
        "staged": staged,
        "staged file": staged.parent / json.loads(file.read_text())["files"][0]["staged"],
        "hidden": file.parent.parent,
    }[of]
    elsewhere = home / "elsewhere"
    at.rename(elsewhere)
    at.symlink_to(elsewhere)
    with opened(system) as sink, pytest.raises(SinkFailedError, match="link"):
        sink.commit(txn, deadline())
    assert rows_of(home) == 0
    assert elsewhere.exists(), "it was not moved"
    at.unlink()
    elsewhere.rename(at)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert rows_of(home) == len(ROWS)


def test_a_staged_file_of_another_size_is_refused(home: Path) -> None:
    system, txn, _ = prepared(home)
    one = sorted(home.glob("out/_kafka_eos/*/staged/*/*"))[0]
    original = one.read_bytes()
    one.write_bytes(original + b"more")
    with (
        opened(system) as sink,
        pytest.raises(SinkFailedError, match=f"{len(original) + 4} bytes, but its task"),
    ):
        sink.commit(txn, deadline())
    assert rows_of(home) == 0
    one.write_bytes(original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert rows_of(home) == len(ROWS)


def test_only_the_owner_may_open_the_hidden_folder_and_everybody_the_rows(home: Path) -> None:
    system, txn, file = prepared(home)
    hidden = file.parent.parent
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
    hidden.chmod(0o777)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700, "the rights of others were taken away"
    (batch,) = home.glob("out/batch=*")
    assert stat.S_IMODE(batch.stat().st_mode) & 0o055 == 0o055, "readers may open the folder of the batch"
    assert all(stat.S_IMODE(each.stat().st_mode) & 0o044 for each in batch.glob("part-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_that_another_user_created_first_is_refused(home: Path) -> None:
    system, txn, file = prepared(home)
    os.chown(file.parent.parent, 12345, 12345)
    with opened(system) as sink:
        with pytest.raises(SinkFailedError, match="belongs to user id 12345"):
            sink.make_ready(ROWS.schema, deadline())
        with pytest.raises(SinkFailedError, match="belongs to user id 12345"):
            stage(sink, ROWS)
        with pytest.raises(SinkFailedError, match="belongs to user id 12345"):
            sink.commit(txn, deadline())
    assert rows_of(home) == 0


def test_readers_take_no_names_from_a_manifest_that_lead_elsewhere(home: Path) -> None:
    system, txn, _ = prepared(home)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
    (file,) = home.glob("out/batch=*/_manifest.json")
    edit(file, with_file(name="../../.bashrc"))
    with pytest.raises(SinkFailedError, match="damaged"):
        committed_files(str(home / "out"))


def test_a_store_that_cannot_rename_folders_refuses_an_edited_manifest(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pafs.SubTreeFileSystem(str(home), pafs.LocalFileSystem())
    monkeypatch.setattr(filesystem_layout, "file_system", lambda _uri: (store, "out"))
    system, txn, file = prepared(home)
    original = file.read_bytes()
    edit(file, with_file(name="../../.bashrc"))
    with opened(system) as sink, pytest.raises(SinkFailedError, match="was changed"):
        sink.commit(txn, deadline())
    with opened(replace(system, digests={})) as sink, pytest.raises(SinkFailedError, match="damaged"):
        sink.commit(txn, deadline())
    file.write_bytes(original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert len(committed_files("out")) == 2
    assert (home / ".bashrc").read_text() == "mine"


def sql_note(note: Mapping[str, Any]) -> object:
    from kafka_eos_source.sinks import sql as module

    return module._read_note(note)


def in_checkpoint(home: Path, kind: str) -> tuple[System, Callable[[], int]]:
    """Returns a sink that keeps what it prepared in the checkpoint, and a function that counts its rows."""
    store = str(home / "store")
    if kind == "sql":
        pytest.importorskip("sqlalchemy")

        file = home / "rows.db"

        def stored() -> int:
            with sqlite3.connect(file) as connection:
                return int(connection.execute("SELECT count(*) FROM t").fetchone()[0])

        return System(lambda: constructors.sql(f"sqlite:///{file}", "t").build(), list, store), stored
    path = str(home / "table")
    if kind == "delta":
        deltalake = pytest.importorskip("deltalake")

        def in_table() -> int:
            return int(deltalake.DeltaTable(path).to_pyarrow_table().num_rows)

        return System(lambda: constructors.delta(path).build(), list, store), in_table
    pytest.importorskip("pyiceberg.catalog.sql")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": f"file://{home}/warehouse"}

    def in_snapshot() -> int:
        table = SqlCatalog("default", **catalog).load_table("db.t")
        return int(table.scan().to_arrow().num_rows)

    SqlCatalog("default", **catalog).create_namespace("db")
    return System(lambda: constructors.iceberg("db.t", catalog=catalog).build(), list, store), in_snapshot


@pytest.mark.parametrize("ending", ["json", "arrow"])
@pytest.mark.parametrize("kind", ["sql", "delta", "iceberg"])
def test_what_the_checkpoint_holds_of_a_batch_is_believed_only_with_its_digest(
    home: Path, kind: str, ending: str
) -> None:
    if ending == "arrow" and kind != "sql":
        pytest.skip("this sink keeps no rows in the checkpoint")
    system, count = in_checkpoint(home, kind)
    txn = new_txn()
    with opened(system) as sink:
        sink.make_ready(ROWS.schema, deadline())
        outcome = sink.prepare(txn, stage(sink, ROWS), deadline())
    assert isinstance(outcome, Ok)
    assert outcome.digest
    (file,) = home.glob(f"store/*/*.{ending}")
    original = file.read_bytes()
    if ending == "json":
        edit(file, lambda content: content.update(rows=99, files=content.get("files", [])[1:]))
    else:
        with pa.ipc.new_stream(str(file), ROWS.schema) as stream:
            stream.write_table(pa.table({"n": [7, 8, 9]}))
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        with pytest.raises(SinkFailedError, match="was changed after the batch was prepared") as refused:
            sink.commit(txn, deadline())
    assert str(file) in refused.value.message
    assert count() == 0
    file.write_bytes(original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert count() == len(ROWS)


@pytest.mark.parametrize("kind", ["sql", "delta", "iceberg"])
def test_a_foreign_note_is_refused_by_name_or_has_the_shape_of_an_own_one(home: Path, kind: str) -> None:
    """A person who commits a batch without a token has no digest, so the shape and the names are checked."""
    system, _ = in_checkpoint(home, kind)
    txn = new_txn()
    with opened(system) as sink:
        sink.make_ready(ROWS.schema, deadline())
        outcome = sink.prepare(txn, stage(sink, ROWS), deadline())
        assert isinstance(outcome, Ok)
        read = getattr(sink, "read_note", sql_note)
    (file,) = home.glob("store/*/*.json")
    original, notes = file.read_bytes(), NotesFolder(str(file.parent))
    assert notes.get(file.stem, outcome.digest, read) is not None

    @given(st.data())
    @settings(deadline=None, max_examples=200)
    def refused_or_of_the_right_shape(data: st.DataObject) -> None:
        file.write_bytes(data.draw(foreign.edited(original)))
        with pytest.raises(SinkFailedError, match="was changed"):
            notes.get(file.stem, outcome.digest, read)
        try:
            notes.get(file.stem, "", read)
        except SinkFailedError as error:
            assert f"{file} is damaged" in error.message  # noqa: PT017

    refused_or_of_the_right_shape()


def test_rows_that_somebody_adds_to_the_checkpoint_do_not_replace_a_prepared_transaction(home: Path) -> None:
    """The token says that the database holds the batch, so no note in the checkpoint can have its digest."""
    system, count = in_checkpoint(home, "sql")
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        with pytest.raises(SinkFailedError, match="but Kafka holds database"):
            sink.commit(replace(txn, digest="database"), deadline())
    assert count() == 0


def test_rows_for_a_service_are_sent_only_with_their_digest(home: Path) -> None:
    """Nothing listens at the port: only unchanged rows would be sent, which then fails."""
    url = "http://127.0.0.1:9/rows"
    system = System(
        lambda: constructors.http(url, mode="idempotency-key", retries=0).build(), list, str(home / "store")
    )
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
    (file,) = home.glob("store/*/*.arrow")
    original = file.read_bytes()
    file.write_bytes(original.replace((2).to_bytes(8, "little"), (9).to_bytes(8, "little")))
    assert file.read_bytes() != original
    with opened(system) as sink, pytest.raises(SinkFailedError, match="was changed"):
        sink.commit(txn, deadline())
    file.write_bytes(original)
    with opened(system) as sink:
        assert isinstance(sink.commit(txn, deadline()), Retryable), "it tried to send the rows"
