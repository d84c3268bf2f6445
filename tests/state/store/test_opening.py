"""Tests of opening a store: identity, formats, damage, and removal."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rocksdict
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity
from kafka_eos_source.state.store import database, durable, files, opening
from kafka_eos_source.state.store.database import FAMILIES, Database
from kafka_eos_source.state.store.durable import StoreMetadata
from kafka_eos_source.state.store.opening import open_owned
from kafka_eos_source.state.store.overlay import Ranges
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import IDENTITY, TOPIC, TP, key, record
from tests.state.store.crash_kit import copy_of_open_store

A = b"\1a"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def open_store(path: Path, identity: StoreIdentity = IDENTITY) -> TransactionalStateStore:
    return TransactionalStateStore.open(path, identity)


def filled(path: Path, **rows: bytes) -> Path:
    with open_store(path) as store:
        store.put(A, b"1")
        store.commit({TP: 5}, batch=record(2))
    return path


def edit(path: Path, *, put: dict[bytes, bytes] | None = None, delete: tuple[bytes, ...] = ()) -> None:
    """Changes the metadata in a closed database."""
    database = open_owned(path / "db", StoreConfig())
    writes = database.new_batch()
    for name, value in (put or {}).items():
        writes.put("offsets", name, value)
    for name in delete:
        writes.delete("offsets", name)
    database.write(writes, sync=False)
    database.close()


def foreign(path: Path, *, data: bool) -> None:
    """Creates a database that records neither an identity nor an offset."""
    path.mkdir(parents=True)
    database = open_owned(path / "db", StoreConfig())
    if data:
        writes = database.new_batch()
        writes.put("data", A, b"1")
        database.write(writes, sync=False)
    database.close()


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------ identity and format


@pytest.mark.parametrize(
    "change",
    [
        {"application_id": "x"},
        {"store": "x"},
        {"shard": 1},
        {"shards": 8},
        {"changelog_topic": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_store_with_another_identity_is_refused(path: Path, change: dict[str, Any]) -> None:
    filled(path)
    other = replace(IDENTITY, **change)
    ((name, value),) = change.items()
    with pytest.raises(StateMismatchError, match=f"{name} .*, expected {value!r}"):
        open_store(path, other)
    with open_store(path) as store:
        assert store.get(A) == b"1"


def test_a_store_of_a_recreated_topic_must_be_restored_and_an_unknown_topic_id_is_recorded(
    path: Path,
) -> None:
    filled(path)
    with open_store(path, replace(IDENTITY, topic_id="one")) as store:
        assert store.identity.topic_id == "one"
    with open_store(path) as store:
        assert store.identity.topic_id == "one"
    with pytest.raises(StateCorruptedError, match="id one, which was deleted") as raised:
        open_store(path, replace(IDENTITY, topic_id="two"))
    assert raised.value.reason == "topic"
    with pytest.raises(
        StateCorruptedError, match="id one, which was deleted"
    ):  # even with another number of shards
        open_store(path, replace(IDENTITY, topic_id="two", shards=9))


def test_a_store_of_another_cluster_is_refused_and_not_removed(path: Path) -> None:
    """Queries in two regions have the same names, and the same state.dir on a host of both."""
    filled(path)
    one = replace(IDENTITY, topic_id="t1", cluster_id="east")
    open_store(path, one).close()
    with open_store(path) as store:
        assert store.identity == one
    with pytest.raises(StateMismatchError, match="cluster 'east', and this query uses the cluster 'west'"):
        open_store(path, replace(IDENTITY, topic_id="t2", cluster_id="west"))
    with open_store(path, one) as store:
        assert store.get(A) == b"1"


def test_an_unknown_cluster_is_recorded_at_the_next_open(path: Path) -> None:
    open_store(path).close()
    known = replace(IDENTITY, cluster_id="east")
    for opened in (known, IDENTITY):
        with open_store(path, opened) as store:
            assert store.identity == known


def test_a_store_of_a_newer_format_is_refused_before_anything_is_changed(path: Path) -> None:
    filled(path)
    (path / "VERSION").write_text("99\n")
    before = content(path)
    for read in (open_store, TransactionalStateStore.open_read_only):
        with pytest.raises(StateFormatError, match=f"{path}.*format 99.*up to {durable.FORMAT}"):
            read(path)
    assert content(path) == before
    TransactionalStateStore.set_aside(path)  # an operator may decide to do this
    with open_store(path) as store:
        assert store.next_offset(TP) == 0


@pytest.mark.parametrize("content", ["", "\n", "..\n", "MANIFEST-999999\n"])
def test_a_database_whose_manifest_has_no_name_is_damaged_for_each_reader(path: Path, content: str) -> None:
    """A power failure may leave a file without its content."""
    filled(path)
    (path / "db" / "CURRENT").write_text(content)
    for read in (open_store, TransactionalStateStore.open_read_only):
        with pytest.raises(StateCorruptedError):
            read(path)


def test_metadata_of_a_newer_format_is_refused(path: Path) -> None:
    filled(path)
    edit(path, put={b"fmt": b"\x01" + (99).to_bytes(8, "big")})
    with pytest.raises(StateFormatError):
        open_store(path)


@pytest.mark.parametrize("name", [b"ident", b"batch", b"saved", b"off/t/0", b"status"])
@pytest.mark.parametrize("value", [b"", b"{}", b"\x02{}", b"\x01{", b"\x01[1]", b'\x01"x"'])
def test_unreadable_metadata_counts_as_damage(name: bytes, value: bytes) -> None:
    """Only the version byte decides how a value is decoded."""
    if (name, value) == (b"status", b'\x01"x"') or (name, value) == (b"status", b"\x01[1]"):
        assert not durable.decode_metadata([(name, value)]).restoring
        return
    with pytest.raises(StateCorruptedError):
        durable.decode_metadata([(name, value)])


TPS = st.builds(TopicPartition, st.sampled_from(["a", "b.c-d_1", "0"]), st.integers(0, 2**31 - 1))
OFFSETS = st.dictionaries(TPS, st.integers(0, 2**63 - 1), max_size=4)
BATCHES = st.builds(
    BatchRecord,
    query_id=st.text(max_size=3),
    batch_id=st.integers(-1, 2**63 - 1),
    task_attempt_id=st.text(max_size=3),
    time_ms=st.integers(0, 2**62),
    event_time_ms=st.none() | st.integers(-(2**62), 2**62),
)
METADATA = st.builds(
    StoreMetadata,
    identity=st.builds(
        StoreIdentity, st.text(max_size=3), st.just("s"), st.just(0), st.just(1), st.just("t")
    ),
    offsets=OFFSETS,
    batch=st.none() | BATCHES,
    saved_ms=st.integers(0, 2**63),
    restoring=st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(METADATA, min_size=1, max_size=3))
def test_overwritten_metadata_has_the_last_value(steps: list[StoreMetadata]) -> None:
    stored: dict[bytes, bytes] = {}
    before = StoreMetadata()
    for metadata in steps:
        for name, value in durable.encode_metadata(before, metadata).items():
            if value is None:
                del stored[name]
            else:
                stored[name] = value
        before = metadata
    assert durable.decode_metadata(stored.items()) == steps[-1]


@given(BATCHES, st.none() | BATCHES, st.lists(st.tuples(st.binary(max_size=3), st.none() | st.binary())))
def test_headers_of_pending_batches_survive_encoding_and_decoding(
    batch: BatchRecord, base: BatchRecord | None, spans: list[Any]
) -> None:
    header = durable.PendingHeader(PendingBatch(batch, base, 17), Ranges(tuple(spans)))
    ((name, value),) = durable.encode_attempt(header, [])
    assert name.startswith(b"h")
    again = durable.decode_header(value)
    assert (again.batch, again.ranges.spans) == (header.batch, tuple(spans))


def test_an_unreadable_header_or_row_of_a_pending_batch_counts_as_damage() -> None:
    for value in (b"", b"{}", b'{"record": 1}'):
        with pytest.raises(StateCorruptedError):
            durable.decode_header(value)
    for blob in (None, b"", b"rubbish"):
        with pytest.raises(StateCorruptedError):
            durable.decode_rows(blob)


# ------------------------------------------------------------------ missing data


def test_lost_offsets_count_as_damage_once(path: Path) -> None:
    filled(path)
    edit(path, delete=(f"off/{TOPIC}/0".encode(),))
    with pytest.raises(StateCorruptedError) as raised:
        open_store(path)
    assert raised.value.reason == "no-offset"
    TransactionalStateStore.destroy(path)
    for _ in range(2):
        with open_store(path) as store:
            assert store.next_offset(TP) == 0


def test_an_empty_database_is_a_new_store(path: Path) -> None:
    foreign(path, data=False)
    with open_store(path) as store:
        assert store.next_offset(TP) == 0


def test_detecting_damage_deletes_nothing(path: Path) -> None:
    filled(path)
    for sst in (path / "db").glob("*.sst"):
        sst.write_bytes(b"rubbish")
    (path / "db" / "CURRENT").write_bytes(b"rubbish")
    before = {name for name in content(path) if "LOG" not in name}
    with pytest.raises(StateCorruptedError):
        open_store(path)
    assert before <= set(content(path))


def test_a_damaged_log_of_a_rarely_written_column_family_is_detected(tmp_path: Path) -> None:
    """Without atomic flush, data is flushed while offsets are only in an old log, which is damaged here."""
    path = tmp_path / "s"
    filled(path)
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(64 << 10)
    options.set_disable_auto_compactions(True)
    families = dict.fromkeys(FAMILIES, options)
    database = rocksdict.Rdict(str(path / "db"), options=options, column_families=families)
    data, offsets = (database.get_column_family(name) for name in ("data", "offsets"))
    offsets.put(b"batch", b"in the oldest log only")
    for n in range(3000):
        data.put(key(n), b"x" * 200)
    flushing = [f"rocksdb.{name}" for name in ("num-running-flushes", "mem-table-flush-pending")]
    while any(data.property_int_value(name) for name in flushing):
        time.sleep(0.005)
    copy = copy_of_open_store(path, tmp_path / "copy")
    del data, offsets
    database.close()
    logs = sorted((copy / "db").glob("*.log"))
    assert len(logs) > 1
    damaged = bytearray(logs[0].read_bytes())
    damaged[len(damaged) // 3] ^= 0xFF
    logs[0].write_bytes(damaged)
    with pytest.raises(StateCorruptedError, match="ahead of WALs"):
        open_store(copy)
    TransactionalStateStore.set_aside(copy)
    with open_store(copy) as store:
        assert store.next_offset(TP) == 0


def test_data_without_an_identity_counts_as_damage(path: Path) -> None:
    foreign(path, data=True)
    with pytest.raises(StateCorruptedError, match="does not record which state") as raised:
        open_store(path)
    assert raised.value.reason == "no-offset"


def test_an_open_database_keeps_no_options_file(path: Path) -> None:
    """rocksdict would parse it at the next open. A database without one has the same settings and data."""
    with open_store(path) as store:
        store.put(A, b"1")
        store.commit({TP: 3})
        assert not list((path / "db").glob("OPTIONS-*"))
    assert not list((path / "db").glob("OPTIONS-*"))
    with open_store(path) as store:
        assert (store.get(A), store.next_offset(TP)) == (b"1", 3)


# ------------------------------------------------------------------ removal


def test_an_interrupted_removal_is_finished_at_the_next_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)

    def interrupted(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            TransactionalStateStore.destroy(path)
    assert list(path.parent.glob("s.trash-*"))
    assert not path.exists()
    with open_store(path) as store:
        assert store.next_offset(TP) == 0
        assert list(store.all()) == []
    assert not list(path.parent.glob("s.trash-*"))
    TransactionalStateStore.destroy(path)
    TransactionalStateStore.destroy(path)
    assert not path.exists()


def test_a_damaged_store_is_set_aside_at_most_once_in_ten_minutes(path: Path) -> None:
    assert TransactionalStateStore.set_aside(path) is None
    filled(path)
    aside = TransactionalStateStore.set_aside(path)
    assert aside is not None
    assert (aside / "db" / "CURRENT").exists()
    assert not path.exists()
    filled(path)
    with pytest.raises(StateError, match="damaged again, 0 s after"):
        TransactionalStateStore.set_aside(path)
    with open_store(path) as store:
        assert store.get(A) == b"1"
    old = aside.rename(path.with_name("s.corrupt-1600000000000"))
    newer = TransactionalStateStore.set_aside(path)
    assert newer is not None
    assert newer.exists()
    assert not old.exists(), "one is kept"


def test_a_damaged_store_is_set_aside_although_the_clock_was_set_back(path: Path) -> None:
    filled(path)
    aside = TransactionalStateStore.set_aside(path)
    assert aside is not None
    ahead = aside.rename(path.with_name(f"s.corrupt-{int(time.time() * 1000) + 86_400_000}"))
    filled(path)
    assert TransactionalStateStore.set_aside(path) is not None
    assert not ahead.exists()


# ------------------------------------------------------------------ a full disk, and other processes


def full(*_args: Any, **_named: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named_when_a_store_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StateError, match=r"the disk of the state store .* failed: .*No space left"):
        open_store(path)
    monkeypatch.undo()
    with open_store(path) as store:
        assert store.get(A) == b"1"


def test_two_processes_may_remove_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    rename = Path.rename

    def second(self: Path, target: Path) -> Path:
        rename(self, target.with_name(target.name + "-first"))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second)
    TransactionalStateStore.destroy(path)
    assert not list(path.parent.iterdir())


def test_logs_that_could_not_be_synced_are_synced_by_the_next_owner(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, no table may be written, because the write chain would require what may still be lost."""
    filled(path)
    files.write_owner(path / "db")  # as a killed process leaves it
    monkeypatch.setattr(database, "_KEPT_LOG_BYTES", 0)  # so that `close` would write tables
    monkeypatch.setattr(database, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        open_store(path)
    assert not (path / "db" / "least-write").exists()
    monkeypatch.undo()
    synced: list[Database] = []
    monkeypatch.setattr(Database, "sync_logs", lambda database: synced.append(database))
    open_store(path).close()
    assert len(synced) == 1
    open_store(path).close()
    assert len(synced) == 1


def test_only_files_of_owners_are_taken_for_them(path: Path) -> None:
    filled(path)
    (path / "owners.csv").write_text("of somebody else")
    (path / "owner.d").mkdir()
    open_store(path).close()
    assert not files.owner_files(path / "db")
    assert (path / "owners.csv").exists()


def test_an_owner_that_closes_the_database_leaves_the_file_of_the_next_owner(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free a moment before the file of the owner is removed. Without the file of the next owner,
    nobody would sync the logs that it leaves if it is killed."""
    next_owners: list[TransactionalStateStore] = []
    mark_closed = opening.mark_closed

    def mark_late(database: Database) -> None:
        if not next_owners:
            next_owners.append(open_store(path))
        mark_closed(database)

    monkeypatch.setattr(opening, "mark_closed", mark_late)
    open_store(path).close()
    assert files.owner_files(path / "db")
    next_owners[0].close()
    assert not files.owner_files(path / "db")
