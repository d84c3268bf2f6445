"""Snapshots of shards on shared storage: what is uploaded, what is downloaded, and what each fault leaves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError, StateCorruptedError, StateError, StateLockedError
from kafka_eos_source.runtime import watchdog
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.runtime.failpoints import ENVIRONMENT_VARIABLE
from kafka_eos_source.runtime.file_systems import file_system, without_secrets
from kafka_eos_source.state.changelog.recovery import (
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    open_restored,
)
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.operator import shard_store
from kafka_eos_source.state.operator.shard_store import ShardSnapshots, SnapshotUse
from kafka_eos_source.state.options import SNAPSHOT_INTERVAL_MS, SnapshotSettings, parse_state
from kafka_eos_source.state.snapshots import storage as storage_module
from kafka_eos_source.state.snapshots import upload as upload_module
from kafka_eos_source.state.snapshots.storage import (
    Manifest,
    SnapshotFile,
    SnapshotStorage,
    UnusableSnapshotError,
)
from kafka_eos_source.state.snapshots.upload import (
    KEPT,
    LocalCopy,
    Uploaded,
    remove_left_copies,
    take_if_due,
    upload,
)
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests import ROOT
from tests.state.state_kit import IDENTITY as NO_TOPIC_ID
from tests.state.state_kit import TINY, TP, Workload, binary, put_rows, record

IDENTITY = replace(NO_TOPIC_ID, topic_id="topic-1")
HOUR_MS = 3_600_000
SEED = 5


def now_ms() -> int:
    return int(time.time() * 1000)


def wait_for_upload() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("kafka-eos-snapshot-"):
            thread.join()


@dataclass
class Host:
    """A host that runs the shard, with its own copy of the state.

    Attributes:
        root: its ``state.dir``.
        location: the storage that all hosts share.
    """

    root: Path
    location: str
    work: Workload = field(default_factory=lambda: Workload(SEED))

    @property
    def path(self) -> Path:
        return IDENTITY.folder(self.root)

    @property
    def storage(self) -> SnapshotStorage:
        return SnapshotStorage(self.location, IDENTITY)

    @property
    def shared(self) -> Path:
        return IDENTITY.folder(self.location)

    def open(self) -> TransactionalStateStore:
        return TransactionalStateStore.open(self.path, IDENTITY, TINY)

    def advance(self, commits: int) -> Host:
        with self.open() as store:
            for _ in range(commits):
                self.work.step(store)
        return self

    def uploaded(self, commits: int) -> Host:
        """Makes some commits and uploads the state after them."""
        assert self.advance(commits).upload() is Uploaded.DONE
        return self

    def take(self, interval_ms: int = 0) -> None:
        """Takes a snapshot as a task does, at the state that the token confirms."""
        (self.path / "snapshot" / "next").unlink(missing_ok=True)
        with self.open() as store:
            offset, batch = store.next_offset(TP), store.last_batch()
            assert offset is not None
            assert batch is not None
            take_if_due(store, TP, offset, batch, SnapshotSettings(self.location, interval_ms))
        wait_for_upload()

    def upload(self, interval_ms: int = 0, **changes: Any) -> Uploaded:
        """Uploads the state in this thread; errors are raised."""
        with self.open() as store:
            copy = LocalCopy.freeze(store)
            batch = store.last_batch()
            assert copy is not None
            assert batch is not None
            state = Manifest(IDENTITY, store.next_offset(TP) or 0, batch, now_ms(), ())
        try:
            return upload(copy, self.storage, replace(state, **changes), interval_ms)[0]
        finally:
            copy.remove()

    def snapshots(
        self,
        end: int,
        *,
        log_start: int = 0,
        retention_ms: int | None = None,
        identity: StoreIdentity = IDENTITY,
        timeout_ms: int = 60_000,
    ) -> ShardSnapshots:
        use = SnapshotUse(self.location, timeout_ms)
        return ShardSnapshots(use, self.path, identity, end, lambda: log_start, retention_ms)

    def installed(self, end: int, **more: Any) -> int | None:
        """Returns the changelog offset of the snapshot from which this host begins; checks its contents."""
        if not self.snapshots(end, **more).install():
            assert not (self.path / "db").exists()
            return None
        with self.open() as store:
            offset = store.next_offset(TP)
            assert offset is not None
            assert store.last_batch() == record(offset)
            assert dict(store.all()) == Workload.after(SEED, offset)
        assert not list(self.path.parent.glob("*.download-*"))
        return offset


Hosts = Callable[[str], Host]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return lambda name: Host(tmp_path / name, str(tmp_path / "shared"))


# ---------------------------------------------------------------- what is in a snapshot


def test_another_host_continues_from_a_snapshot(hosts: Hosts) -> None:
    old, new = hosts("a"), hosts("b")
    old.advance(30)
    old.take()
    assert new.installed(31) == 30
    new.work = old.work
    new.advance(5)
    new.take()
    assert hosts("c").installed(35) == 35


def test_tables_that_the_storage_has_are_not_uploaded_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts("a").advance(40)
    host.take()
    (first,) = host.storage.manifests()
    sent: list[str] = []
    put = SnapshotStorage.put_file
    monkeypatch.setattr(
        SnapshotStorage,
        "put_file",
        lambda self, source, file: (sent.append(file.name), put(self, source, file))[1],
    )
    with host.open() as store:
        store.put(b"\1one", b"more")
        store.commit({TP: 41}, batch=record(41))
    host.take()
    tables = {each.name for each in host.storage.read(first).files if each.name.endswith(".sst")}
    assert tables
    assert sent
    assert not tables & set(sent)


def test_what_the_owner_writes_after_the_copy_is_not_uploaded(hosts: Hosts) -> None:
    """The upload runs while the task of the next batch makes changes pending, and promotes others."""
    host = hosts("a").advance(20)
    with host.open() as store:
        copy = LocalCopy.freeze(store)
        assert copy is not None
        state = Manifest(IDENTITY, 20, record(20), now_ms(), ())
        for number in (21, 22):
            store.put(b"\1later", b"%d" % number)
            store.persist_pending(record(number, "uncommitted"))
        store.promote(record(21, "uncommitted"), {TP: 21})
        store.put(b"\1later", b"pending")
        store.persist_pending(record(22, "pending"))
        assert upload(copy, host.storage, state, 0)[0] is Uploaded.DONE
        copy.remove()
    assert hosts("b").installed(20) == 20


def test_tables_that_rocksdb_is_still_writing_are_not_uploaded(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts("a").advance(40)
    put = SnapshotStorage.put_file
    with host.open() as store:
        output = store.path / "db" / "987654.sst"
        output.write_bytes(b"the first block of a compaction's output")
        copy = LocalCopy.freeze(store)
        assert copy is not None
        frozen = set(os.listdir(copy.path))
        assert output.name in frozen

        def put_while_the_table_grows(storage: SnapshotStorage, source: Path, file: SnapshotFile) -> None:
            with output.open("ab") as opened:
                opened.write(b"another block")
            put(storage, source, file)

        monkeypatch.setattr(SnapshotStorage, "put_file", put_while_the_table_grows)
        state = Manifest(IDENTITY, 40, record(40), now_ms(), ())
        assert upload(copy, host.storage, state, 0)[0] is Uploaded.DONE
        copy.remove()
    (name,) = host.storage.manifests()
    uploaded = {each.name for each in host.storage.read(name).files}
    assert uploaded <= frozen - {output.name}
    assert any(each.endswith(".sst") for each in uploaded)
    assert hosts("b").installed(40) == 40


def test_a_copy_without_a_table_that_its_manifest_names_is_not_uploaded(hosts: Hosts) -> None:
    host = hosts("a").advance(40)
    with host.open() as store:
        copy = LocalCopy.freeze(store)
    assert copy is not None
    named = [each.name for each in copy.files() if each.name.endswith(".sst")]  # drops tables that are not
    (copy.path / named[0]).unlink()
    with pytest.raises(StateCorruptedError):
        upload(copy, host.storage, Manifest(IDENTITY, 40, record(40), now_ms(), ()), 0)
    copy.remove()
    assert not host.storage.manifests()
    assert not host.storage.files()


def test_each_copy_of_a_store_that_flushes_and_compacts_can_be_uploaded(hosts: Hosts) -> None:
    host = hosts("a").advance(1)
    with host.open() as store:
        for number in range(2, 22):
            put_rows(store, [(b"\1%d/%d" % (number, n % 7), os.urandom(500)) for n in range(200)])
            store.commit({TP: number}, batch=record(number))
            # a task gives up while RocksDB changes its manifest again and again, and the next one tries again
            copy = retry(lambda: LocalCopy.freeze(store), StateLockedError, Pauses(None, 0.01))
            assert copy is not None
            outcome, *_ = upload(
                copy, host.storage, Manifest(IDENTITY, number, record(number), now_ms(), ()), 0
            )
            assert outcome is Uploaded.DONE
            copy.remove()
        expected = dict(store.all())
    new = hosts("b")
    assert new.snapshots(21).install()
    with new.open() as store:
        assert dict(store.all()) == expected


def _stage(store: TransactionalStateStore) -> None:
    store.put(b"\1x", b"1")


def _pend(store: TransactionalStateStore) -> None:
    store.put(b"\1x", b"1")
    store.persist_pending(record(99))


def _restore_in_part(store: TransactionalStateStore) -> None:
    store.restore_chunk(binary([b"\1x"]), binary([b"1"]), {TP: 99}, done=False)


@pytest.mark.parametrize("change", [_stage, _pend, _restore_in_part])
def test_state_that_no_token_confirmed_is_never_frozen(
    hosts: Hosts, change: Callable[[TransactionalStateStore], None]
) -> None:
    host = hosts("a").advance(3)
    with host.open() as store:
        change(store)
        with pytest.raises(StateError, match=r"freeze\(\)"):
            LocalCopy.freeze(store)
        copy = host.path / "snapshot"
        assert not list(copy.glob("db-*"))


@pytest.mark.parametrize(
    ("offset", "batch"),
    [(4, record(3)), (2, record(3)), (3, record(3, "another attempt")), (3, record(4))],
)
def test_state_that_is_not_the_tokens_is_not_uploaded(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, offset: int, batch: BatchRecord
) -> None:
    host = hosts("a").advance(3)
    with host.open() as store:
        take_if_due(store, TP, offset, batch, SnapshotSettings(host.location, 0))
    wait_for_upload()
    assert host.storage.manifests() == []
    assert "not at the token's state" in caplog.text


# ---------------------------------------------------------------- when a snapshot is made


def test_a_snapshot_is_made_once_in_an_interval_by_all_hosts_together(hosts: Hosts) -> None:
    one, other = hosts("a"), hosts("b")
    one.advance(3)
    one.take(HOUR_MS)
    assert other.installed(3) == 3
    other.work = one.work
    other.advance(2)
    other.take(HOUR_MS)
    assert [name.next_offset for name in one.storage.manifests()] == [3]
    due_ms = int((other.path / "snapshot" / "next").read_text())
    assert now_ms() < due_ms <= now_ms() + HOUR_MS
    assert list((other.path / "snapshot").glob("db-*")) == []


def test_no_file_is_linked_until_a_snapshot_is_due(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosts("a").advance(3)
    host.take(HOUR_MS)
    monkeypatch.setattr(LocalCopy, "freeze", lambda _store: pytest.fail("a snapshot is made too early"))
    with host.open() as store:
        host.work.step(store)
        take_if_due(store, TP, 4, record(4), SnapshotSettings(host.location, HOUR_MS))


@pytest.mark.parametrize(
    ("written_by", "now_by"), [(1000 * HOUR_MS, 0), (0, 24 * HOUR_MS)], ids=["clock", "interval"]
)
def test_a_snapshot_is_due_after_the_clock_was_set_back_or_the_interval_was_made_shorter(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, written_by: int, now_by: int
) -> None:
    """First a clock that is ``written_by`` ahead, and an interval that is ``now_by`` longer than later."""
    host = hosts("a").advance(3)
    with monkeypatch.context() as mutation:
        ahead = time.time() + written_by / 1000
        mutation.setattr(time, "time", lambda: ahead)
        host.take(HOUR_MS + now_by)
    with host.open() as store:
        host.work.step(store)
        take_if_due(store, TP, 4, record(4), SnapshotSettings(host.location, HOUR_MS // 1000))
    wait_for_upload()
    offsets = [name.next_offset for name in host.storage.manifests()]
    assert offsets == ([4, 3] if written_by else [3]), "the newest snapshot is recent, or not"
    due_ms = int((host.path / "snapshot" / "next").read_text())
    assert due_ms <= now_ms() + HOUR_MS // 1000, "the host looked for a newer one"


def test_state_that_did_not_change_is_not_uploaded_again(hosts: Hosts) -> None:
    host = hosts("a").uploaded(3)
    assert host.upload() is Uploaded.SAME
    assert len(host.storage.manifests()) == 1


def test_a_storage_that_fails_does_not_fail_the_task(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    host = hosts("a").advance(3)
    Path(host.location).write_text("a file in the place of the folder")
    host.take()
    assert "could not be uploaded" in caplog.text
    assert int((host.path / "snapshot" / "next").read_text()) <= now_ms() + 60_000


@pytest.mark.parametrize("fault", ["storage", "location", "disk"])
def test_a_task_that_cannot_download_reads_the_changelog(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    host = hosts("b")
    if fault == "storage":
        Path(host.location).write_text("a file in the place of the folder")
    elif fault == "location":
        host.location = "nothing://x"
    else:
        monkeypatch.setattr(Path, "mkdir", _disk_is_full)
    assert not host.snapshots(9).install()
    assert not host.path.exists()
    assert fault == "storage" or "no snapshot in" in caplog.text  # PyArrow finds such a folder empty


def _disk_is_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_one_upload_of_a_shard_runs_at_a_time(hosts: Hosts) -> None:
    host = hosts("a").advance(3)
    with host.open() as store:
        first = LocalCopy.freeze(store)
        assert first is not None
        assert LocalCopy.freeze(store) is None
        first.remove()
        second = LocalCopy.freeze(store)
        assert second is not None
        second.remove()


def test_what_a_killed_upload_left_is_removed_unless_an_upload_runs(hosts: Hosts) -> None:
    host = hosts("a").advance(3)
    remove_left_copies(host.path)
    assert not (host.path / "snapshot").exists()
    with host.open() as store:
        running = LocalCopy.freeze(store)
    assert running is not None
    left = host.path / "snapshot" / "db-killed"
    left.mkdir()
    (left / "000001.sst").write_bytes(b"deleted by a compaction")
    remove_left_copies(host.path)
    assert running.files()
    assert left.exists()
    running.remove()
    remove_left_copies(host.path)
    assert sorted(each.name for each in (host.path / "snapshot").iterdir()) == ["checksums", "lock"]


# ---------------------------------------------------------------- crashes

_DIES = """
from tests.state.snapshots.test_snapshots import *
host = Host(Path({root!r}), {location!r})
host.work.done = {done}
host.upload()
"""


@pytest.mark.parametrize(
    ("step", "is_there"),
    [
        ("snapshot.within_file", False),
        ("snapshot.within_file=kill-worker*2", False),
        ("snapshot.after_file", False),
        ("snapshot.after_file=kill-worker*3", False),
        ("snapshot.before_manifest", False),
        ("snapshot.after_manifest", True),
        ("snapshot.before_removal", True),
    ],
)
def test_an_upload_that_is_killed_leaves_a_complete_snapshot_or_none(
    hosts: Hosts, step: str, is_there: bool
) -> None:
    host = hosts("a")
    for commits in (10, 10):  # two snapshots, so that the next one removes one
        host.uploaded(commits)
    host.advance(10)
    armed = step if "=" in step else f"{step}=kill-worker"
    code = _DIES.format(root=str(host.root), location=host.location, done=host.work.done)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), ENVIRONMENT_VARIABLE: armed}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    assert hosts("b").installed(30) == (30 if is_there else 20)
    host.uploaded(1)
    assert hosts("c").installed(31) == 31
    assert len(host.storage.manifests()) == KEPT
    assert list((host.path / "snapshot").glob("db-*")) == []


def test_a_download_that_is_killed_leaves_no_store_and_is_cleaned_up(hosts: Hosts) -> None:
    old, new = hosts("a"), hosts("b")
    old.advance(10)
    old.take()
    code = f"""
from tests.state.snapshots.test_snapshots import *
Host(Path({str(new.root)!r}), {new.location!r}).installed(10)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        ENVIRONMENT_VARIABLE: "snapshot.after_fetch=kill-worker*2",
    }
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    assert len(list(new.path.parent.glob("*.download-*"))) == 1
    assert not new.path.exists()
    assert new.installed(10) == 10


# ---------------------------------------------------------------- damage, and snapshots that do not fit


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink], ids=["cut off", "flipped bit", "missing"])
@pytest.mark.parametrize("kind", [".sst", ".log", "MANIFEST", "json"])
def test_a_damaged_snapshot_is_skipped_for_the_one_before(
    hosts: Hosts,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    kind: str,
) -> None:
    host = hosts("a").uploaded(20)
    for commits in (19, 1):  # after the last one, the log holds a commit
        host.advance(commits)
    host.upload()
    newest, before = host.storage.manifests()
    if kind == "json":
        damage(host.shared / newest.text)
    else:
        older = {file.sha256 for file in host.storage.read(before).files}
        own = [each for each in host.storage.read(newest).files if each.sha256 not in older]
        file = max((each for each in own if kind in each.name), key=lambda each: each.size_bytes)
        damage(host.shared / "files" / file.sha256)
    assert hosts("b").installed(40) == 20
    if kind != "json":
        assert f"its file {file.name} ({file.sha256}) is" in caplog.text
    elif damage is not Path.unlink:
        assert "is not used" in caplog.text


def test_without_any_sound_snapshot_the_whole_changelog_is_read(hosts: Hosts) -> None:
    host = hosts("a").uploaded(5)
    for each in (host.shared / "files").iterdir():
        _cut(each)
    assert hosts("b").installed(5) is None
    assert hosts("c").installed(5) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"end": 9}, "only offsets up to 9 are committed"),
        ({"end": 30, "log_start": 11}, "the log now starts at 11"),
        ({"end": 30, "retention_ms": 24 * HOUR_MS}, "may have lost deletes"),
        ({"end": 30, "identity": replace(IDENTITY, topic_id="topic-2")}, "another changelog topic"),
        ({"end": 30, "identity": replace(IDENTITY, shards=8)}, "it holds other state"),
    ],
    ids=["ahead of the token", "before the log", "too old", "topic", "shards"],
)
def test_a_snapshot_that_does_not_fit_is_skipped(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: str
) -> None:
    host = hosts("a")
    with host.open() as store:  # 13 hours ago
        store.put(b"\1x", b"1")
        store.commit({TP: 10}, batch=replace(record(10), time_ms=now_ms() - 13 * HOUR_MS))
    host.upload()
    with caplog.at_level("INFO"):
        assert hosts("b").installed(**more) is None
    assert said in caplog.text


def test_a_manifest_never_leads_out_of_the_folder(hosts: Hosts) -> None:
    host = hosts("a").uploaded(2)
    (name,) = host.storage.manifests()
    manifest = host.storage.read(name)
    for bad in ("../x.sst", "/etc/passwd", "CURRENT/..", ""):
        files = (replace(manifest.files[0], name=bad),)
        with pytest.raises(UnusableSnapshotError, match="illegal file"):
            Manifest.decode(replace(manifest, files=files).encode())
    newer = manifest.encode().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(UnusableSnapshotError, match="newer release"):
        Manifest.decode(newer)


_foreign = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_PLACES = (
    *("format", "identity", "next_offset", "batch", "created_ms", "files"),
    *("identity.shard", "identity.topic_id", "batch.batch_id", "batch.counts", "batch.event_time_ms"),
    *("files.0", "files.0.name", "files.0.size_bytes", "files.0.sha256"),
)


@given(st.sampled_from(_PLACES), _foreign)
@example("next_offset", float("inf"))
@example("batch.batch_id", 10**400)
@example("files.0.size_bytes", "1")
@example("files.0.name", None)
@example("identity", [])
@example("batch.counts", {"late_rows": []})
def test_a_manifest_has_the_types_of_its_fields_or_is_damaged(place: str, value: Any) -> None:
    file = SnapshotFile("CURRENT", 16, "0" * 64)
    sound = Manifest(IDENTITY, 5, record(5), 1, (file,))
    content = json.loads(sound.encode())
    *way, last = place.split(".")
    inner = content
    for step in way:
        inner = inner[int(step) if step.isdigit() else step]
    inner[int(last) if last.isdigit() else last] = value
    try:
        found = Manifest.decode(json.dumps(content).encode())
    except UnusableSnapshotError:
        return
    assert json.loads(found.encode()) == {**content, "format": 1}  # the value fits
    assert found.size_bytes + found.next_offset + found.created_ms < 2**66
    assert found.identity == IDENTITY or place.startswith("identity")


@given(st.binary(max_size=60) | st.sampled_from([b"[" * 200_000, b'{"a":' * 100_000, b"9" * 100_000, b"[]"]))
def test_a_manifest_of_foreign_bytes_is_damaged(content: bytes) -> None:
    with pytest.raises(UnusableSnapshotError, match=r"its manifest is damaged|newer release"):
        Manifest.decode(content)


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b"[]", b"null", b'{"format": "x"}', b'{"format": 1e400, "files": 7}']
)
def test_damaged_manifests_beside_a_sound_one_do_not_stop_the_restore(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """They are more, and newer, than the snapshots that are kept; the sound one is used all the same."""
    host = hosts("a").uploaded(5)
    (sound,) = host.storage.manifests()
    for number in range(5):
        name = f"{6 + number:020d}-{sound.topic}-{number:032x}.json"
        (host.shared / name).write_bytes(content)
    assert hosts("b").installed(20) == 5
    assert caplog.text.count("is not used: its manifest is damaged") == 5
    host.uploaded(1)
    assert hosts("c").installed(20) == 6


def test_a_download_ends_at_the_size_in_the_manifest(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts("a").uploaded(2)
    (name,) = host.storage.manifests()
    file = max(host.storage.read(name).files, key=lambda each: each.size_bytes)
    os.truncate(host.shared / "files" / file.sha256, 1 << 40)  # without blocks: the disk could not hold it
    with pytest.raises(UnusableSnapshotError, match="is larger than"):
        host.storage.fetch(file, tmp_path / "copy", Deadline.after_seconds(60))
    assert (tmp_path / "copy").stat().st_size <= file.size_bytes
    assert hosts("b").installed(2) is None


def test_a_snapshot_that_the_disk_cannot_hold_is_not_downloaded(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = hosts("a").uploaded(2)
    (name,) = host.storage.manifests()
    manifest = host.storage.read(name)
    huge = replace(manifest, files=(replace(manifest.files[0], size_bytes=1 << 60), *manifest.files[1:]))
    (host.shared / name.text).write_bytes(huge.encode())
    assert hosts("b").installed(2) is None
    assert "bytes are free" in caplog.text


@pytest.mark.parametrize("what", ["manifest", "file", "folder", "pipe"])
def test_links_and_pipes_in_the_storage_are_refused(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    host = hosts("a").uploaded(2)
    (name,) = host.storage.manifests()
    file = f"files/{host.storage.read(name).files[0].sha256}"
    place = host.shared / {"manifest": name.text, "folder": "files"}.get(what, file)
    place.rename(tmp_path / "elsewhere")
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / "elsewhere")
    assert hosts("b").installed(2) is None
    assert "is not used" in caplog.text


@pytest.mark.parametrize("which", ["", "app", "shard"])
def test_folders_that_other_users_may_change_are_refused(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    host = hosts("a").uploaded(2)
    folder = {"": Path(host.location), "app": Path(host.location, IDENTITY.application_id)}.get(
        which, host.shared
    )
    folder.chmod(0o777)
    assert hosts("b").installed(2) is None
    assert "every user of this host may change the files in" in caplog.text
    host.advance(1)
    with pytest.raises(PermissionError, match="chmod o-w"):
        host.upload()
    folder.chmod(0o1777)
    assert hosts("c").installed(2) == (2 if which == "" else None)
    folder.chmod(0o775)
    assert hosts("d").installed(2) == 2


def test_own_snapshots_are_believed_whatever_the_umask(hosts: Hosts) -> None:
    former = os.umask(0)
    try:
        host = hosts("a")
        host = replace(host, location=f"{host.location}/not there yet")
        for _ in range(2):
            host.uploaded(2)
    finally:
        os.umask(former)
    assert replace(hosts("b"), location=host.location).installed(4) == 4


@pytest.mark.skipif(os.getuid() != 0, reason="only a folder of root counts as a volume that root mounted")
def test_a_volume_that_root_mounted_may_be_open_to_all(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provisioners of Kubernetes create volumes with mode 0777."""
    host = hosts("a").uploaded(2)
    Path(host.location).chmod(0o777)
    assert hosts("b").installed(2) is None
    monkeypatch.setattr(os.path, "ismount", lambda path: path == host.location)
    assert hosts("c").installed(2) == 2


@pytest.mark.parametrize("runtime", [True, False])
def test_databricks_decides_who_may_write_to_its_mounts(
    monkeypatch: pytest.MonkeyPatch, runtime: bool
) -> None:
    """Its mounts show mode 0777 for everything, and nobody can mount them in another way."""
    if runtime:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    for location in ("/dbfs/snapshots", "file:/dbfs/snapshots", "/Volumes/main/default/snapshots"):
        assert SnapshotStorage(location, IDENTITY)._has_modes is not runtime
    assert SnapshotStorage("/data/snapshots", IDENTITY)._has_modes


def test_folders_of_another_user_are_refused(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts("a").uploaded(2)
    theirs, stat = str(host.shared), os.stat

    def forged(path: Any, **more: Any) -> Any:
        found = stat(path, **more)
        return os.stat_result((*found[:4], 4321, *found[5:])) if str(path) == theirs else found

    monkeypatch.setattr(os, "stat", forged)
    assert hosts("b").installed(2) is None
    assert "belongs to another user (user id 4321)" in caplog.text


def test_files_of_another_state_than_the_manifest_says_are_not_used(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = hosts("a").advance(5)
    host.upload(next_offset=7)
    assert hosts("b").installed(9) is None
    assert "its manifest says" in caplog.text


# ---------------------------------------------------------------- old snapshots, and several owners


def test_old_snapshots_and_their_files_are_removed(hosts: Hosts) -> None:
    host = hosts("a")
    for _ in range(5):
        host.uploaded(15)
    names = host.storage.manifests()
    assert [name.next_offset for name in names] == [75, 60]
    needed = {file.sha256 for name in names for file in host.storage.read(name).files}
    assert set(host.storage.files()) == needed


def test_snapshots_of_another_cluster_are_never_removed(hosts: Hosts) -> None:
    """Queries in two regions have the same names and the same location."""
    host = hosts("a").uploaded(3)
    (name,) = host.storage.manifests()
    theirs = host.storage.read(name)
    identity = replace(theirs.identity, topic_id="theirs", cluster_id="west")
    storage = SnapshotStorage(host.location, identity)
    storage.put_manifest(replace(theirs, identity=identity, created_ms=0))
    for _ in range(3):
        host.uploaded(15)
    (kept,) = (each for each in host.storage.manifests() if host.storage.read(each).created_ms == 0)
    assert {file.sha256 for file in host.storage.read(kept).files} <= set(host.storage.files())


def test_a_file_without_a_snapshot_is_removed_after_a_day(hosts: Hosts) -> None:
    host = hosts("a").uploaded(3)
    files = host.shared / "files"
    for name in ("running.unfinished", "dead.unfinished"):
        (files / name).write_bytes(b"a part")
    two_days_ago = time.time() - 48 * 3600
    os.utime(files / "dead.unfinished", (two_days_ago, two_days_ago))
    host.uploaded(3)
    assert (files / "running.unfinished").exists()
    assert not (files / "dead.unfinished").exists()


def test_a_zombie_neither_replaces_nor_removes_the_snapshot_of_a_later_batch(hosts: Hosts) -> None:
    zombie, owner = hosts("zombie"), hosts("owner")
    zombie.advance(10)
    owner.uploaded(20)
    owner.uploaded(5)
    assert zombie.upload() is Uploaded.SAME
    assert hosts("b").installed(30) == 25


def test_two_owners_that_upload_at_once_leave_sound_snapshots(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked for the newest snapshot before either wrote one."""
    zombie, owner = hosts("zombie"), hosts("owner")
    zombie.advance(10)
    owner.advance(20)
    both_looked = threading.Barrier(2)
    newest = upload_module._newest

    def wait_for_the_other(*args: Any) -> Any:
        found = newest(*args)
        both_looked.wait(60)
        return found

    monkeypatch.setattr(upload_module, "_newest", wait_for_the_other)
    outcomes: list[Uploaded] = []
    threads = [
        threading.Thread(target=lambda host=host: outcomes.append(host.upload())) for host in (zombie, owner)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Uploaded.DONE] * 2
    assert hosts("b").installed(30) == 20
    assert hosts("c").installed(10) == 10


def test_a_snapshot_whose_file_another_process_removed_is_withdrawn(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts("a").advance(5)
    put = SnapshotStorage.put_manifest

    def remove_one_first(self: SnapshotStorage, manifest: Manifest) -> Any:
        self.remove(f"files/{manifest.files[0].sha256}")
        return put(self, manifest)

    monkeypatch.setattr(SnapshotStorage, "put_manifest", remove_one_first)
    assert host.upload() is Uploaded.WITHDRAWN
    assert host.storage.manifests() == []


def test_snapshots_of_a_truncated_changelog_do_not_block_new_ones(hosts: Hosts) -> None:
    """A topic that was restored from a backup ends below the snapshots that were made before."""
    host = hosts("a").advance(20)
    host.upload(created_ms=now_ms() - 2 * HOUR_MS)
    again = hosts("b").uploaded(10)
    assert [name.next_offset for name in again.storage.manifests()] == [10]


def test_a_file_that_changes_during_its_upload_is_refused(hosts: Hosts) -> None:
    host = hosts("a").advance(2)
    source = host.root / "file"
    source.write_bytes(b"changed")
    with pytest.raises(UnusableSnapshotError, match="changed while"):
        host.storage.put_file(source, SnapshotFile("CURRENT", 5, sha256(b"before").hexdigest()))
    assert host.storage.files() == {}


def test_object_stores_get_no_temporary_names(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a file appears only when it is complete, and a rename would copy it."""
    monkeypatch.setattr(storage_module, "_APPEARS_WHOLE", ("local",))
    host = hosts("a").uploaded(40)
    assert hosts("b").installed(40) == 40
    assert not any(name.endswith(".unfinished") for name in host.storage.files())
    for file in (host.shared / "files").iterdir():
        _cut(file)  # as pyarrow leaves it when the connection breaks
    host.advance(1)
    monkeypatch.undo()
    host.upload()
    assert hosts("c").installed(41) == 41


# ---------------------------------------------------------------- how a shard is opened


@dataclass
class Opening:
    """Opens a shard as a task does, and records what its restores began with."""

    host: Host
    end: int = 30
    seen: list[int | None] = field(default_factory=list)
    answers: list[WipeNeeded] = field(default_factory=list)
    progress: RestoreProgress = field(default_factory=lambda: RestoreProgress(TP))

    def run(self) -> int | None:
        snapshots = self.host.snapshots(self.end)

        def restore(store: TransactionalStateStore) -> Restored | WipeNeeded:
            self.seen.append(store.next_offset(TP))
            replaced = snapshots.replaces(store.next_offset(TP))
            if replaced is not None:
                return replaced
            return self.answers.pop(0) if self.answers else Restored(0, 0, Reason.NONE, 0.0)

        try:
            store, _ = open_restored(
                self.host.path, IDENTITY, StoreConfig(), restore, self.progress, snapshots.install
            )
        finally:
            snapshots.close()
        with store:
            return store.next_offset(TP)


TOO_OLD = WipeNeeded(Reason.TOO_OLD, "so says the test")


def test_a_host_without_the_shard_begins_with_the_snapshot(hosts: Hosts) -> None:
    hosts("a").uploaded(20)
    opening = Opening(hosts("b"))
    assert opening.run() == 20
    assert opening.seen == [20]
    assert opening.progress.wiped is None


def test_a_store_that_is_too_old_is_replaced_by_the_snapshot(hosts: Hosts) -> None:
    """A copy that was idle for twelve hours costs a download, and not the whole changelog."""
    busy, idle = hosts("a"), hosts("b")
    idle.advance(10)
    busy.uploaded(20)
    opening = Opening(idle, answers=[TOO_OLD])
    assert opening.run() == 20
    assert opening.seen == [10, 20]
    assert opening.progress.wiped is Reason.TOO_OLD


def test_a_damaged_store_is_replaced_by_the_snapshot(hosts: Hosts) -> None:
    host = hosts("a").uploaded(20)
    (host.path / "db" / "CURRENT").write_bytes(b"nonsense\n")
    opening = Opening(host)
    assert opening.run() == 20
    assert opening.progress.wiped is Reason.CORRUPT


def test_a_snapshot_that_cannot_be_caught_up_is_replaced_by_the_whole_changelog(hosts: Hosts) -> None:
    hosts("a").uploaded(20)
    opening = Opening(hosts("b"), answers=[TOO_OLD])
    assert opening.run() == 0
    assert opening.seen == [20, 0]


def test_without_a_snapshot_an_empty_store_is_restored(hosts: Hosts) -> None:
    opening = Opening(hosts("a"))
    assert opening.run() == 0
    assert opening.seen == [0]


@pytest.mark.parametrize(("per_record", "expected"), [(10**6, 20), (0, 10)], ids=["worth it", "not worth it"])
def test_a_store_that_is_far_behind_is_replaced_if_that_takes_less_time(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, per_record: int, expected: int
) -> None:
    monkeypatch.setattr(shard_store, "_FAR_BEHIND", 15)
    monkeypatch.setattr(shard_store, "_BYTES_PER_RECORD", per_record)
    busy, behind = hosts("a"), hosts("b")
    behind.advance(10)
    busy.uploaded(20)
    opening = Opening(behind)
    assert opening.run() == expected
    assert opening.progress.wiped is (Reason.SNAPSHOT if expected == 20 else None)
    assert not list(behind.path.parent.glob("*.download-*"))


def test_a_store_that_appears_during_the_download_is_kept(hosts: Hosts) -> None:
    """Another attempt at the task restored the shard meanwhile."""
    old, new = hosts("a"), hosts("b")
    old.uploaded(20)
    snapshots = new.snapshots(30)
    snapshots._log_start = lambda: (new.advance(25), 0)[1]
    assert not snapshots.install()
    with new.open() as store:
        assert store.next_offset(TP) == 25


# ---------------------------------------------------------------- options


def test_snapshots_are_an_option() -> None:
    kafka = {"kafka.bootstrap.servers": "b:9092"}
    assert parse_state(kafka).snapshots is None
    found = parse_state({**kafka, "state.snapshot.location": "/shared"}).snapshots
    assert found == SnapshotSettings("/shared", SNAPSHOT_INTERVAL_MS)
    found = parse_state(
        {**kafka, "state.snapshot.location": "file:///x", "state.snapshot.interval.ms": "2000"}
    ).snapshots
    assert found == SnapshotSettings("file:///x", 2000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state.snapshot.interval.ms": "2000"}, "set state.snapshot.location"),
        ({"state.snapshot.location": "nothing://x"}, "state.snapshot.location"),
        ({"state.snapshot.location": " "}, "state.snapshot.location"),
        ({"state.snapshot.location": "/x", "state.snapshot.interval.ms": "10"}, "state.snapshot.interval.ms"),
        ({"state.changelog.delete.retention.ms": "1"}, "state.changelog.delete.retention.ms"),
    ],
)
def test_options_of_snapshots_are_checked_on_the_driver(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOptionError) as error:
        parse_state({"kafka.bootstrap.servers": "b:9092", **options})
    assert said in str(error.value)


# ------------------------------------------------------------------ what failed once


@pytest.mark.parametrize("first", ["install", "replaces"])
def test_a_download_that_fails_is_not_tried_again_by_the_same_task(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A second one would take the time in which the task can read the changelog."""
    hosts("a").uploaded(3)
    other = hosts("b").advance(1)
    monkeypatch.setattr(shard_store, "_FAR_BEHIND", 1)
    monkeypatch.setattr(shard_store, "_BYTES_PER_RECORD", 1 << 40)
    fetched: list[str] = []

    def fails(_storage: SnapshotStorage, file: SnapshotFile, *_more: Any) -> None:
        fetched.append(file.name)
        raise OSError("503")

    monkeypatch.setattr(SnapshotStorage, "fetch", fails)
    snapshots = other.snapshots(3)
    assert not (snapshots.install() if first == "install" else snapshots.replaces(1))
    assert len(fetched) == 1
    monkeypatch.undo()
    assert snapshots.replaces(0) is None
    assert not snapshots.install()


def test_a_download_ends_at_its_deadline(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    hosts("a").uploaded(3)
    assert not hosts("b").snapshots(3, timeout_ms=0).install()
    assert "over 0 s (in tasks: state.timeout.ms)" in caplog.text


@pytest.mark.parametrize("method", ["manifests", "read", "fetch"])
def test_a_storage_that_hangs_does_not_keep_the_task(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """As a network file system does whose server is gone."""
    host, answers = hosts("a"), threading.Event()
    host.uploaded(3)
    monkeypatch.setattr(SnapshotStorage, method, lambda *_: answers.wait(60))
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.2)
    assert not hosts("b").snapshots(3, timeout_ms=300).install()
    assert "did not return" in caplog.text
    assert not answers.is_set()
    assert not list(hosts("b").path.parent.glob("*.download-*"))
    answers.set()


def test_a_damaged_file_is_sent_again(hosts: Hosts) -> None:
    host = hosts("a").uploaded(3)
    for file in (host.shared / "files").iterdir():
        content = bytearray(file.read_bytes())
        if content:
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    other, tries = hosts("b"), 0
    while not other.snapshots(3).install():  # each try finds one of the files
        assert host.upload() is Uploaded.DONE
        tries += 1
        assert tries < 20
    assert tries
    with other.open() as store:
        assert store.next_offset(TP) == 3


def test_a_thread_that_cannot_start_leaves_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = hosts("a").advance(3)

    def cannot(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    host.take()
    assert "can't start new thread" in caplog.text
    assert list((host.path / "snapshot").glob("db-*")) == []


def test_an_upload_that_does_not_end_is_logged_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else says that a location hangs: each later task finds that an upload runs, and makes none."""
    host, answers = hosts("a"), threading.Event()
    host.advance(3)
    monkeypatch.setattr(SnapshotStorage, "files", lambda _storage: answers.wait(60) and {})
    with host.open() as store:
        offset, batch = store.next_offset(TP), store.last_batch()
        assert offset is not None
        assert batch is not None
        for later_seconds, warnings in [(0, 0), (500, 0), (700, 1), (800, 1)]:
            now = time.monotonic() + later_seconds
            with monkeypatch.context() as mutation:
                mutation.setattr(upload_module.time, "monotonic", lambda now=now: now)
                take_if_due(store, TP, offset, batch, SnapshotSettings(host.location, 0))
            assert caplog.text.count("does not end") == warnings
    answers.set()
    wait_for_upload()


def test_the_secrets_of_a_location_are_not_shown(tmp_path: Path) -> None:
    location = "s3://key:secret@bucket/folder?session_token=other"
    assert "secret" not in repr(SnapshotSettings(location, 0))
    assert without_secrets(location) == "s3://bucket/folder"
    assert without_secrets(str(tmp_path)) == str(tmp_path)
    with pytest.raises(InvalidOptionError) as raised:
        file_system("nothing://key:secret@bucket/folder?session_token=other")
    assert "secret" not in str(raised.value)
    assert "other" not in str(raised.value)
