"""Reads of the changelog, and ``kafka-eos state restore``, that begin with snapshots on shared storage."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.errors import AuthorizationError, InvalidOptionError, StateLostError
from kafka_eos_source.operate import stores
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import restore as restore_module
from kafka_eos_source.state.changelog.recovery import Reason, WipeNeeded
from kafka_eos_source.state.encoding.describe import META_KEY
from kafka_eos_source.state.reading import frames
from kafka_eos_source.state.reading.frames import RAW, parse_state_read
from kafka_eos_source.state.reading.query import StateQuery, with_partition_id
from kafka_eos_source.state.reading.snapshot import of_changelog
from kafka_eos_source.state.reading.stores import Cut
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage
from kafka_eos_source.state.snapshots.upload import LocalCopy, Uploaded, upload
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.fake_changelog import APP, HOUR_MS, KAFKA, STORE, FakeQuery, now_ms
from tests.state.state_kit import EFFORT

Shards = dict[int, dict[bytes, bytes]]


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeQuery:
    made = FakeQuery(tmp_path / "state", str(tmp_path / "shared"))
    made.install(monkeypatch)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return made


def soon() -> Deadline:
    return Deadline.after_seconds(30)


def read(query: FakeQuery, cut: Cut, *, snapshots: bool = True) -> tuple[Shards, dict[int, int]]:
    """Reads all shards; returns their entries, and from which offset on each changelog was read."""
    query.reads.clear()
    changelog = query.changelog_and_snapshots if snapshots else query.changelog
    with of_changelog(changelog, cut, range(cut.shards), soon()) as found:
        entries = {shard: dict(state.view.all()) for shard, state in found.states.items()}
        assert {shard: state.batch for shard, state in found.states.items()} == cut.batches
    assert os.listdir(tempfile.gettempdir()) == [], "temporary files are removed"
    return entries, dict(query.reads)


def contents(folder: str | Path) -> dict[str, bytes]:
    """Returns all files of a folder, so that a test can compare them later."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ---------------------------------------------------------------- the result is the same


@pytest.mark.parametrize("seed", range(2 * EFFORT))
def test_a_read_from_snapshots_equals_a_read_of_the_whole_changelog_at_each_batch(
    query: FakeQuery, seed: int
) -> None:
    uploaded: dict[int, list[int]] = {shard: [] for shard in range(query.shards)}
    query._random.seed(seed)
    for _ in range(6):
        cut = query.batch()
        for shard in range(query.shards):
            if query._random.random() < 0.4:
                query.upload(shard)
                # the two newest snapshots are kept
                uploaded[shard] = [*uploaded[shard], cut.ends[shard]][-2:]
    assert any(uploaded.values())
    for at, model in zip(query.cuts, query.models, strict=True):
        found, began = read(query, at)
        assert found == model
        assert found == read(query, at, snapshots=False)[0]
        for shard, end in at.ends.items():
            newest = max((each for each in uploaded[shard] if each <= end), default=0)
            assert began.get(shard) == (None if newest == end else newest)


def test_a_read_begins_with_the_newest_snapshot_and_reads_only_the_rest(query: FakeQuery) -> None:
    for _ in range(3):
        newest = query.batch({b"\1a": b"1", b"\1b": b"1"})
        query.upload()
    cut = query.batch({b"\1a": None, b"\1c": b"2"})
    found, began = read(query, cut)
    assert found == query.models[-1]
    assert found[0] == {b"\1b": b"1", b"\1c": b"2"}
    assert began == newest.ends


def test_a_read_at_the_batch_of_a_snapshot_reads_no_record(query: FakeQuery) -> None:
    cut = query.batch({b"\1a": b"1"})
    query.upload()
    found, began = read(query, cut)
    assert found == query.models[-1]
    assert began == {}


def test_a_snapshot_that_is_newer_than_the_read_is_skipped_for_the_one_before(
    query: FakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver plans a DataFrame at one batch, and a task reads it when a later one has a snapshot."""
    first = query.batch({b"\1a": b"1"})
    query.upload()
    planned = query.batch({b"\1a": b"2"})
    query.batch({b"\1a": b"3", b"\1later": b"3"})
    query.upload()
    found, began = read(query, planned)
    assert found == query.models[1]
    assert found[0] == {b"\1a": b"2"}
    assert began == first.ends
    assert f"only offsets up to {planned.ends[0]} are committed" in caplog.text


def test_a_store_without_a_committed_batch_uses_no_snapshot(query: FakeQuery) -> None:
    query.batch()
    query.upload()
    nothing = replace(query.cuts[0], ends={0: 0, 1: 0}, batches={0: None, 1: None})
    assert read(query, nothing) == ({0: {}, 1: {}}, {})


# ---------------------------------------------------------------- snapshots that cannot be used


def _damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _tables(query: FakeQuery, damage: Callable[[Path], None]) -> None:
    for shard in range(query.shards):
        for each in (query.shared(shard) / "files").iterdir():
            if each.stat().st_size:
                damage(each)


def _manifests(query: FakeQuery, change: Callable[[bytes], bytes]) -> None:
    for shard in range(query.shards):
        for each in query.shared(shard).glob("*.json"):
            each.write_bytes(change(each.read_bytes()))


UNUSABLE: dict[str, tuple[Callable[[FakeQuery], Any], str]] = {
    "none": (lambda query: _tables(query, Path.unlink) or _remove_manifests(query), "there is no snapshot"),
    "damaged file": (lambda query: _tables(query, _damage), "is damaged"),
    "missing file": (lambda query: _tables(query, Path.unlink), "is missing"),
    "damaged manifest": (lambda query: _manifests(query, lambda text: text[:-9]), "its manifest is damaged"),
    "newer format": (
        lambda query: _manifests(query, lambda text: text.replace(b'"format": 1', b'"format": 2')),
        "a newer release wrote it in format 2",
    ),
    "number of shards": (
        lambda query: _manifests(query, lambda text: text.replace(b'"shards": 2', b'"shards": 3')),
        "it holds other state",
    ),
    "another topic": (
        lambda query: setattr(query, "topic_id", "topic-2"),
        "1 snapshots in",
    ),
    "too old": (lambda query: setattr(query, "retention_ms", HOUR_MS), "may have lost deletes since"),
    "no right": (lambda query: setattr(query, "retention_ms", None), "their age cannot be checked"),
    "storage": (
        lambda query: setattr(query, "location", "nothing://x"),
        "no snapshot in nothing://x can be used",
    ),
}


def _remove_manifests(query: FakeQuery) -> None:
    for shard in range(query.shards):
        for each in query.shared(shard).glob("*.json"):
            each.unlink()


@pytest.mark.parametrize("kind", UNUSABLE)
def test_without_a_usable_snapshot_the_whole_changelog_is_read_and_the_log_says_why(
    query: FakeQuery, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    query.batch({b"\1a": b"1", b"\1b": b"1"}, hours_ago=2)
    query.upload()
    query.batch({b"\1b": None, b"\1c": b"2"})
    make_unusable, said = UNUSABLE[kind]
    make_unusable(query)
    cut = replace(query.cuts[-1], topic_id=query.topic_id)
    with caplog.at_level("INFO"):
        found, began = read(query, cut)
    assert began == query.starts, "the changelog is read from its first offset"
    assert found == read(query, cut, snapshots=False)[0]
    assert found == query.models[-1]
    assert said in caplog.text


def test_a_log_without_its_beginning_is_read_only_with_a_snapshot_that_covers_it(query: FakeQuery) -> None:
    """``compact,delete``, or a person, removed the first records."""
    query.batch({b"\1a": b"1", b"\1b": b"1"})
    query.upload()
    cut = query.batch({b"\1b": None, b"\1c": b"2"})
    query.starts = dict(query.cuts[0].ends)
    assert read(query, cut)[0] == query.models[-1]
    query.starts = {shard: end + 1 for shard, end in query.starts.items()}
    for snapshots in (True, False):
        with pytest.raises(StateLostError, match="begins at offset"):
            read(query, cut, snapshots=snapshots)


def test_a_snapshot_whose_files_hold_another_offset_than_it_says_is_not_used(
    query: FakeQuery, caplog: pytest.LogCaptureFixture
) -> None:
    query.batch({b"\1a": b"1"})
    cut = query.batch({b"\1a": b"2"})
    query.upload(next_offset=1)
    found, began = read(query, cut)
    assert found == query.models[-1]
    assert began == {0: 0, 1: 0}
    assert "its manifest says" in caplog.text


def test_a_read_does_not_continue_an_older_topic_of_the_same_name(query: FakeQuery) -> None:
    """The topic was created again, and the offsets of its snapshots name other records."""
    query.batch({b"\1old": b"1"})
    query.batch({b"\1old": b"2"})
    query.upload()
    again = FakeQuery(query.root.with_name("again"), query.location, topic_id="topic-2")
    query.logs, query.cuts, query.models = again.logs, again.cuts, again.models
    for number in range(3):
        again.batch({b"\1new": b"%d" % number})
    assert read(query, again.cuts[-1]) == (again.models[-1], {0: 0, 1: 0})
    again.upload()
    assert read(query, again.cuts[-1]) == (again.models[-1], {})


def test_a_read_whose_snapshot_becomes_too_old_meanwhile_reads_the_whole_changelog(
    query: FakeQuery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process was suspended, and compaction removed a delete before the read arrived there."""
    first = query.batch({b"\1gone": b"1", b"\1kept": b"1"}, hours_ago=2)
    query.upload()
    cut = query.batch({b"\1gone": None, b"\1new": b"1"})
    for log in query.logs.values():
        log[:] = [None if each is not None and each[0] == b"\1gone" else each for each in log]
    too_old = WipeNeeded(Reason.TOO_OLD, "so says the test")
    began_ms = now_ms()
    monkeypatch.setattr(
        restore_module,
        "deletes_may_be_gone",
        lambda since_ms, _now_ms, _retention_ms: too_old if since_ms < began_ms - HOUR_MS else None,
    )
    query.reads.clear()
    with of_changelog(query.changelog_and_snapshots, cut, range(2), soon()) as found:
        assert {shard: dict(each.view.all()) for shard, each in found.states.items()} == query.models[-1]
    assert query.reads == [(0, first.ends[0]), (0, 0), (1, first.ends[1]), (1, 0)]
    assert "the whole changelog is read instead" in caplog.text


# ---------------------------------------------------------------- nobody is disturbed


def test_a_read_changes_neither_the_storage_nor_the_databases(query: FakeQuery) -> None:
    """Tasks remove a damaged file, so that the next upload sends it again; a read leaves it."""
    query.batch()
    query.upload()
    query.batch()
    query.upload()
    for each in (query.shared(0) / "files").iterdir():
        if each.stat().st_size:
            _damage(each)
    before = contents(query.location), contents(query.root)
    found, _ = read(query, query.cuts[-1])
    assert found == query.models[-1]
    assert (contents(query.location), contents(query.root)) == before


def test_a_read_does_not_disturb_an_upload_that_runs(
    query: FakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read takes place when the files are on the storage, and the manifest is not."""
    first = query.batch({b"\1a": b"1"})
    query.upload()
    second = query.batch({b"\1a": b"2"})
    put = SnapshotStorage.put_manifest
    reads: list[tuple[Shards, dict[int, int]]] = []

    def read_before(storage: SnapshotStorage, manifest: Any) -> Any:
        reads.append(read(query, second))
        return put(storage, manifest)

    monkeypatch.setattr(SnapshotStorage, "put_manifest", read_before)
    identity, batch = query.identity(0), second.batches[0]
    assert batch is not None
    with query.open(0) as store:  # the query's task goes on with its store meanwhile
        copy = LocalCopy.freeze(store)
        assert copy is not None
        state = Manifest(identity, second.ends[0], batch, now_ms(), ())
        assert upload(copy, SnapshotStorage(query.location, identity), state, 0)[0] is Uploaded.DONE
        copy.remove()
    assert reads == [(query.models[-1], first.ends)]
    assert read(query, second) == (query.models[-1], {1: first.ends[1]})


def test_a_snapshot_that_is_removed_while_it_is_downloaded_is_skipped(
    query: FakeQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.batch()
    query.upload()
    cut = query.batch()
    fetch = SnapshotStorage.fetch

    def fetch_when_removed(storage: SnapshotStorage, *args: Any) -> None:
        _tables(query, Path.unlink)
        fetch(storage, *args)

    monkeypatch.setattr(SnapshotStorage, "fetch", fetch_when_removed)
    assert read(query, cut) == (query.models[-1], {0: 0, 1: 0})


# ---------------------------------------------------------------- from Python and as a DataFrame


def rows(state: StateQuery) -> Shards:
    return {number: dict(each.view.all()) for number, each in state._snapshot.states.items()}


def test_a_state_query_begins_with_snapshots_and_then_reads_only_what_is_new(query: FakeQuery) -> None:
    first = query.batch()
    query.upload()
    second = query.batch({b"\1a": b"2"})
    with StateQuery(APP, STORE, kafka=KAFKA, snapshot_location=query.location) as state:
        assert rows(state) == query.models[-1]
        assert dict(query.reads) == first.ends
        query.reads.clear()
        query.batch({b"\1a": None, b"\1b": b"3"})
        query.upload()
        state.refresh()
        assert rows(state) == query.models[-1]
        assert dict(query.reads) == second.ends, "it goes on with its own copy"


def test_a_state_query_that_begins_with_an_idle_querys_snapshot_can_go_on(query: FakeQuery) -> None:
    """Its copy was complete a moment ago, so the age of the last batch does not matter."""
    query.batch({b"\1a": b"1"}, hours_ago=20)
    query.upload()
    with StateQuery(APP, STORE, kafka=KAFKA, snapshot_location=query.location) as state:
        assert query.reads == []
        query.batch({b"\1a": None, b"\1b": b"2"})
        state.refresh()
        assert rows(state) == query.models[-1]


def options(query: FakeQuery, **more: str) -> dict[str, str]:
    named = {"application.id": APP, "storeName": STORE, "state.snapshot.location": query.location}
    return {**KAFKA, **named, **more}


def test_each_part_of_a_dataframe_begins_with_its_snapshot(query: FakeQuery) -> None:
    first = query.batch()
    query.upload()
    query.batch()
    parsed = parse_state_read(options(query, raw="true"))
    assert query.location not in repr(parsed)
    parts = frames.plan(parsed)
    query.reads.clear()
    found = pa.Table.from_batches(
        [batch for part in parts for batch in frames.read(parsed, part, with_partition_id(RAW))]
    ).to_pylist()
    assert dict(query.reads) == first.ends
    assert {shard: dict(_pairs(found, shard)) for shard in range(2)} == query.models[-1]


def _pairs(found: list[dict[str, Any]], shard: int) -> list[tuple[bytes, bytes]]:
    return [(row["key"], row["value"]) for row in found if row["partition_id"] == shard]


@pytest.mark.parametrize("upload_first", [True, False])
def test_the_columns_of_a_dataframe_are_found_in_a_snapshot(
    query: FakeQuery, monkeypatch: pytest.MonkeyPatch, upload_first: bool
) -> None:
    monkeypatch.setattr(frames.Description, "from_json", lambda text: text)
    cut = query.batch({META_KEY: b"described", b"\1a": b"1"})
    if upload_first:
        query.upload()
    query.batch({b"\1a": b"2"})
    query.reads.clear()
    assert frames._description(parse_state_read(options(query))) == b"described"
    assert query.reads == [(0, cut.ends[0] if upload_first else 0)]


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"state_dir": "/data"}, "does not restore the state from the changelog"),
        ({"kafka": None}, "does not restore the state from the changelog"),
        ({"snapshot_location": "nothing://key:secret@x"}, "state.snapshot.location"),
    ],
)
def test_a_location_of_a_state_query_that_cannot_be_used_is_an_error(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        StateQuery(APP, STORE, **{"kafka": KAFKA, "snapshot_location": "/shared", **more})
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("location", ["nothing://x", " "])
def test_a_location_of_a_dataframe_that_cannot_be_opened_is_an_error(query: FakeQuery, location: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"state\.snapshot\.location"):
        parse_state_read(options(query, **{"state.snapshot.location": location}))


def test_a_dataframe_of_databases_uses_no_snapshots() -> None:
    with pytest.raises(InvalidOptionError, match="databases uses no snapshots"):
        parse_state_read({"state.dir": "/data", "state.snapshot.location": "/shared"})


# ---------------------------------------------------------------- kafka-eos state restore


def restore(query: FakeQuery, root: Path, *, snapshots: bool = True) -> list[stores.RestoredShard]:
    query.reads.clear()
    changelog = query.changelog_and_snapshots if snapshots else query.changelog
    cut = query.cuts[-1]
    done = list(stores.restore_shards(root, changelog, cut, range(cut.shards), soon()))
    for shard in range(cut.shards):
        identity = query.identity(shard)
        with TransactionalStateStore.open(identity.folder(root), identity) as store:
            assert dict(store.all()) == query.models[-1][shard]
            assert store.next_offset(cut.tp(shard)) == cut.ends[shard]
            assert store.last_batch() == cut.batches[shard]
            assert store.identity == identity, "a task of the query accepts the store"
    return done


def test_a_restore_begins_with_the_snapshots(query: FakeQuery, tmp_path: Path) -> None:
    first = query.batch()
    query.upload()
    query.batch()
    done = restore(query, tmp_path / "new")
    assert [each.snapshot_offset for each in done] == [first.ends[0], first.ends[1]]
    assert dict(query.reads) == first.ends
    assert [each.wiped for each in done] == [None, None]
    again = restore(query, tmp_path / "new")
    assert [(each.snapshot_offset, each.records) for each in again] == [(None, 0)] * 2
    plain = restore(query, tmp_path / "plain", snapshots=False)
    assert [each.snapshot_offset for each in plain] == [None, None]
    assert query.reads == [(0, 0), (1, 0)]


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_restore_does_not_continue_a_database_that_is_too_old(
    query: FakeQuery, tmp_path: Path, snapshots: bool
) -> None:
    """Compaction has removed the delete of a key that the database still has."""
    query.batch({b"\1gone": b"1", b"\1kept": b"1"}, hours_ago=20)
    old = tmp_path / "old"
    restore(query, old, snapshots=False)
    query.batch({b"\1gone": None}, hours_ago=19)
    query.batch({b"\1new": b"1"}, hours_ago=1)
    query.upload()
    for log in query.logs.values():
        log[:] = [None if each is not None and each[0] == b"\1gone" else each for each in log]
    query.batch({b"\1new": b"2"})
    done = restore(query, old, snapshots=snapshots)
    assert [each.wiped for each in done] == ["too-old"] * 2
    assert [each.snapshot_offset is not None for each in done] == [snapshots] * 2


def test_a_restore_removes_a_damaged_file_as_a_task_does(query: FakeQuery, tmp_path: Path) -> None:
    query.batch()
    query.upload()
    _tables(query, _damage)
    before = set(contents(query.location))
    restore(query, tmp_path / "new")
    assert set(contents(query.location)) < before


def test_a_restore_needs_to_know_how_old_state_may_be(query: FakeQuery, tmp_path: Path) -> None:
    query.batch()
    query.retention_ms = None
    with pytest.raises(AuthorizationError):
        restore(query, tmp_path / "new")


def test_the_command_says_from_which_snapshot_each_shard_began(query: FakeQuery, tmp_path: Path) -> None:
    first = query.batch({b"\1a": b"1"})
    query.upload(0)
    query.batch({b"\1a": b"2"})
    words = [
        *(
            "state",
            "restore",
            APP,
            "--store",
            STORE,
            "--bootstrap-servers",
            "127.0.0.1:1",
        ),
        *("--snapshot-location", query.location, "--state-dir", str(tmp_path / "new"), "--yes"),
    ]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.stdout.split())
    assert f"shard 0: at batch 1, began with the snapshot at changelog offset {first.ends[0]}, read" in said
    assert "shard 1: at batch 1, read" in said
    assert "there is no snapshot in" in shown.stderr
    assert f"downloaded the snapshot at changelog offset {first.ends[0]}" in shown.stderr
