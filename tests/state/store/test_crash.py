"""Tests of crashes without a broker: kills at any moment, damaged logs, full disks, forks and locks.

A process is stopped while it commits, its folder is copied, and the process continues. Each copy is what a
SIGKILL at that moment would have left. The state after each commit is known beforehand, so a copy must hold
exactly the state of one commit, and none older than the last acknowledged one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kafka_eos_source.errors import StateCorruptedError, StateLockedError
from kafka_eos_source.state.store import database
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import (
    EFFORT,
    IDENTITY,
    TINY,
    TP,
    OtherProcess,
    Workload,
    binary,
    key,
    other_process,
    put_rows,
    record,
)
from tests.state.store.crash_kit import (
    OPEN_FOR_EACH_COMMIT,
    OPEN_ONCE,
    SEED,
    copy_of_open_store,
    crash_images,
    log_sizes,
    records_of,
    until,
)


@pytest.fixture(scope="module", params=[OPEN_ONCE, OPEN_FOR_EACH_COMMIT], ids=["open once", "open for each"])
def crashes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Folders as kills left them, each with the number of commits acknowledged before the kill."""
    return crash_images(tmp_path_factory.mktemp("crashes"), "TINY", request.param, commits=40)


@pytest.fixture(scope="module")
def crashes_while_spilling(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """As `crashes`, for a store whose transactions are too large for its memory."""
    return crash_images(tmp_path_factory.mktemp("crashes"), "SPILLING", OPEN_ONCE, commits=8)


def _verify(path: Path) -> int:
    """Checks that the store holds exactly the state after one commit; returns its number."""
    with TransactionalStateStore.open(path, IDENTITY, TINY) as store:
        done = store.next_offset(TP)
        assert done is not None
        last = store.last_batch()
        assert last == (record(done) if done else None)
        assert store.get(b"\1last") == (b"%d" % done if done else None)
        assert dict(store.all()) == Workload.after(SEED, done)
        # The store can continue from there.
        store.put(b"\1last", b"again")
        store.persist_pending(record(done + 1, "next"))
        store.promote(record(done + 1, "next"), {TP: done + 1})
    # Recovery may leave the old logs in place, so the next open reads them again.
    with TransactionalStateStore.open(path, IDENTITY, TINY) as store:
        assert (store.next_offset(TP), store.last_batch()) == (done + 1, record(done + 1, "next"))
        assert dict(store.all()) == {**Workload.after(SEED, done), b"\1last": b"again"}
    return done


def test_after_a_kill_the_store_holds_every_acknowledged_commit_and_no_partial_one(
    crashes: list[tuple[Path, int]], tmp_path: Path
) -> None:
    for image, acknowledged in crashes:
        copy = shutil.copytree(image, tmp_path / image.name)
        assert _verify(copy) in (acknowledged, acknowledged + 1), "at most the commit in flight is more"


def test_after_a_kill_a_store_that_spills_holds_every_acknowledged_commit(
    crashes_while_spilling: list[tuple[Path, int]], tmp_path: Path
) -> None:
    test_after_a_kill_the_store_holds_every_acknowledged_commit_and_no_partial_one(
        crashes_while_spilling, tmp_path
    )


def test_a_damaged_log_yields_an_older_commit_or_an_error(
    crashes: list[tuple[Path, int]], tmp_path: Path
) -> None:
    """A power failure or a bad disk leaves logs that are cut off or have flipped bits."""
    rng = random.Random(SEED)
    outcomes = set()
    for number in range(3 * len(crashes)):
        image, acknowledged = crashes[number % len(crashes)]
        copy = shutil.copytree(image, tmp_path / f"{image.name}-{number}")
        logs = sorted((copy / "db").glob("*.log"))
        log = rng.choice(logs)
        content = bytearray(log.read_bytes())
        if not content:
            continue
        at = rng.randrange(len(content))
        if rng.random() < 0.5:
            del content[at:]
        else:
            content[at] ^= 1 << rng.randrange(8)
        log.write_bytes(content)
        try:
            done = _verify(copy)
            assert done <= acknowledged + 1
            outcomes.add("older" if done < acknowledged else "whole")
        except StateCorruptedError:
            outcomes.add("damaged")
            _restored(copy)
        shutil.rmtree(copy)
    assert "older" in outcomes, outcomes


def test_a_log_that_ends_between_two_records_loses_no_commit_in_the_middle(tmp_path: Path) -> None:
    """RocksDB takes such a log for complete. A power failure leaves one if the next log is on disk."""
    image = _with_two_logs(tmp_path)
    first, *_, last = (log for log, size in log_sizes(image / "db").items() if size)
    records = records_of(first)
    for case, size in enumerate([*records[1::5], records[-1]]):
        copy = shutil.copytree(image, tmp_path / f"torn{case}")
        os.truncate(copy / "db" / first.name, size)
        with pytest.raises(StateCorruptedError, match="a log is missing or ends too early"):
            TransactionalStateStore.open(copy, IDENTITY, TINY)
        with pytest.raises(StateCorruptedError, match="a log is missing or ends too early"):
            TransactionalStateStore.open_read_only(copy)
        _restored(copy)
        # Without the later log, nothing is missing in the middle.
        copy = shutil.copytree(image, tmp_path / f"older{case}")
        os.truncate(copy / "db" / first.name, size)
        (copy / "db" / last.name).unlink()
        _verify(copy)


def _with_two_logs(folder: Path) -> Path:
    """Returns a copy of a store whose first log has several records, and whose second log has some too."""
    for attempt in range(40):  # a fast flush may leave no second log
        live, work = folder / f"live{attempt}", Workload(SEED)
        with TransactionalStateStore.open(live, IDENTITY, TINY) as store:
            for _ in range(500):
                work.step(store)
                if len([size for size in log_sizes(live / "db").values() if size]) < 2:
                    continue
                image = copy_of_open_store(live, folder / "image")
                logs = [log for log, size in log_sizes(image / "db").items() if size]
                if len(logs) > 1 and len(records_of(logs[0])) > 10 and _is_needed(image, logs[0]):
                    return image
                shutil.rmtree(image)  # a flush came between
    raise AssertionError("RocksDB never kept two logs")


def _is_needed(image: Path, log: Path) -> bool:
    """Whether a copy of a store needs a log. One whose writes are in tables stays on disk for a moment."""
    copy = shutil.copytree(image, image.with_name("without"))
    (copy / "db" / log.name).unlink()
    try:
        TransactionalStateStore.open(copy, IDENTITY, TINY).close()
    except StateCorruptedError:
        return True
    finally:
        shutil.rmtree(copy)
    return False


def _restored(path: Path) -> None:
    """Does what the caller does about damage: sets the store aside, creates it again, restores it."""
    TransactionalStateStore.set_aside(path)
    with TransactionalStateStore.open(path, IDENTITY, TINY) as store:
        assert store.next_offset(TP) == 0
        store.restore_chunk(binary([b"\1a"]), binary([b"1"]), {TP: 1}, batch=record(0))
        assert list(store.all()) == [(b"\1a", b"1")]


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", "*.sst", "VERSION"])
@pytest.mark.parametrize("how", ["cut", "flip", "remove"])
def test_a_store_with_a_damaged_file_is_set_aside_and_restored(
    crashes: list[tuple[Path, int]], tmp_path: Path, pattern: str, how: str
) -> None:
    """Damage that opening the store does not read is reported by the read that meets it."""
    copy = shutil.copytree(crashes[-1][0], tmp_path / "s")
    files = sorted([*copy.glob(f"db/{pattern}"), *copy.glob(pattern)])
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: len(content) // 3])
        else:
            for at in range(0, len(content), max(1, len(content) // 7)):
                content[at] ^= 0xFF
            path.write_bytes(content)
    if (pattern, how) == ("VERSION", "remove"):
        _verify(copy)  # identity and offsets are in the database
        return
    with pytest.raises(StateCorruptedError) as raised:  # noqa: PT012
        store = TransactionalStateStore.open(copy, IDENTITY, TINY)
        with store:
            list(store.all())
    assert raised.value.reason == "corrupt"
    _restored(copy)


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    with other_process() as process:
        yield process


def test_close_releases_the_files_although_views_and_scans_are_open(
    other: OtherProcess, tmp_path: Path
) -> None:
    """Another process can open the files, which hold everything that was committed."""
    path = tmp_path / "s"
    other.run(
        f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY)\n"
        "for number in range(1, 21):\n"
        "    put_rows(store, [(key(n), b'%d' % number) for n in range(100)])\n"
        "    store.commit({TP: number})\n"
        "managers = [store.view(), store.view()]\n"
        "views = [manager.__enter__() for manager in managers]\n"
        "scans = [store.all(), store.range(reverse=True), *(view.all() for view in views)]\n"
        "for scan in scans: next(scan)\n"
        "store.close()"
    )
    with TransactionalStateStore.open(path, IDENTITY, StoreConfig(lock_timeout_ms=0)) as store:
        assert store.next_offset(TP) == 20
        assert dict(store.all()) == {key(n): b"20" for n in range(100)}


def test_close_succeeds_although_a_flush_deletes_a_log_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = TransactionalStateStore.open(path, IDENTITY)
    store.put(b"\1a", b"1")
    store.commit({TP: 1})
    deleted = path / "db" / "999999.log"
    deleted.symlink_to("nothing")  # listing the folder shows it, and asking for its size fails
    store.close()
    deleted.unlink()
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.get(b"\1a") == b"1"


def test_opening_a_store_in_use_waits_and_then_names_its_owner(other: OtherProcess, tmp_path: Path) -> None:
    """A process that fails to open the store does not disturb its owner."""
    path = tmp_path / "s"
    other.run(f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY)")
    with pytest.raises(StateLockedError, match=f"process {other.pid} "):
        TransactionalStateStore.open(path, IDENTITY, StoreConfig(lock_timeout_ms=50))
    for put_away in (TransactionalStateStore.destroy, TransactionalStateStore.set_aside):
        with pytest.raises(StateLockedError, match=f"process {other.pid} "):
            put_away(path)
    other.send("import time; time.sleep(0.3); store.put(b'\\1a', b'1'); store.commit({TP: 1}); store.close()")
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.get(b"\1a") == b"1"
        with pytest.raises(StateLockedError, match=f"process {os.getpid()} "):
            TransactionalStateStore.open(path, IDENTITY, StoreConfig(lock_timeout_ms=20))
        with pytest.raises(StateLockedError, match="in this process"):
            TransactionalStateStore.destroy(path)
    other.answer()
    TransactionalStateStore.destroy(path)
    assert not path.exists()


def test_another_process_reads_commits_while_the_owner_writes(other: OtherProcess, tmp_path: Path) -> None:
    """Data and offset always belong to the same commit, and the reader takes no lock."""
    path = tmp_path / "s"
    other.run(
        f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY, TINY)\n"
        "store.put(b'\\1last', b'0'); store.commit({TP: 0})"
    )
    # The owner commits until the reader has seen enough, so that neither can be too early or too late.
    enough = tmp_path / "enough"
    other.send(
        f"number, enough = 0, Path({str(enough)!r})\n"
        "while not enough.exists():\n"
        "    number += 1\n"
        "    put_rows(store, [(key(n), b'%d' % number * 20) for n in range(50)])\n"
        "    store.put(b'\\1last', b'%d' % number)\n"
        "    store.commit({TP: number})\n"
        "store.put(b'\\1staged', b'')\n"
        "result = number"
    )
    seen = [0]
    with TransactionalStateStore.open_read_only(path) as reader:

        def read_once() -> None:
            reader.refresh()
            number = reader.next_offset(TP)
            assert number is not None
            assert number >= seen[-1]
            rows = dict(reader.all())
            assert rows.pop(b"\1last") == b"%d" % number
            assert set(rows.values()) == ({b"%d" % number * 20} if number else set())
            assert reader.get(b"\1last") == b"%d" % number
            seen.append(number)

        def has_read_enough() -> bool:
            read_once()
            return len(set(seen)) > 30 * EFFORT

        try:
            until(has_read_enough)
        finally:
            enough.touch()
            committed = other.answer()
        read_once()
        assert seen[-1] == committed
        assert reader.identity == IDENTITY
    other.run("store.close()")


def test_a_forked_process_is_refused_and_does_not_hang(other: OtherProcess, tmp_path: Path) -> None:
    """This holds while the parent has its store open, and after the parent closed it."""
    path = tmp_path / "s"
    code = f"""
def forked(act):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        import signal; signal.alarm(20)
        try:
            act(); said = 'nothing'
        except BaseException as error:
            said = type(error).__name__ + str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 10000).decode()
    os.waitpid(pid, 0); os.close(reading)
    return said
from kafka_eos_source.state.store.files import owner_files
path = {str(path)!r}
store = TransactionalStateStore.open(path + '1', IDENTITY, SPILLING)
store.put(b'\\1a', b'1'); store.commit({{TP: 1}}); store.put(b'\\1b', b'2' * 6_000)
result = [
    forked(lambda: TransactionalStateStore.open(path + '2', IDENTITY)),
    forked(lambda: store.commit({{TP: 2}})),
    forked(lambda: store.put(b'\\1c', b'3' * 6_000)),
    forked(lambda: (store.rollback(), store.drop_pending())),
    forked(lambda: store.rollback()),
    forked(lambda: store.close()),
]
result.append(len(owner_files(store.path / 'db')))
store.put(b'\\1d', b'4' * 6_000)
store.commit({{TP: 3}})
store.close()
result.append(forked(lambda: TransactionalStateStore.open(path + '2', IDENTITY)))
"""
    opened, committed, put, dropped, rolled_back, closed, owners, opened_later = other.run(code)
    assert opened.startswith("StateError[KAFKA_EOS.STATE] process")
    assert committed.startswith("StateError[KAFKA_EOS.STATE] process")
    assert "was forked from" in opened
    assert "was forked from" in put, "the child would write into the owner's spilled rows"
    assert "was forked from" in dropped, "the child would remove the owner's spilled rows"
    assert rolled_back == closed == "nothing"
    assert owners == 1, "the owner's file and the owner's writes on disk stay"
    assert opened_later.startswith("StateError")
    with TransactionalStateStore.open(tmp_path / "s1", IDENTITY) as store:
        assert store.next_offset(TP) == 3
        assert dict(store.all()) == {b"\1a": b"1", b"\1b": b"2" * 6_000, b"\1d": b"4" * 6_000}


def test_a_full_disk_closes_the_store_and_loses_no_commit(tmp_path: Path) -> None:
    """A commit that failed has no effect, and is not reported as damage."""
    path = tmp_path / "s"
    with other_process() as other:
        said = other.run(
            "import resource\n"
            f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY, TINY)\n"
            "store.put(b'\\1a', b'1'); store.commit({TP: 1})\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
            "result = []\n"
            "put_rows(store, [(key(n), b'x' * 500) for n in range(3000)])\n"
            "commit = lambda: store.commit({TP: 2})\n"
            "acts = commit, lambda: store.get(b'\\1a'), store.last_batch\n"
            "for act in acts:\n"
            "    try:\n"
            "        act(); result.append('nothing')\n"
            "    except Exception as error:\n"
            "        result.append(type(error).__name__)\n"
            "store.close()"
        )
        assert said == ["StateError", "StoreClosedError", "StoreClosedError"]
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.next_offset(TP) == 1
        assert dict(store.all()) == {b"\1a": b"1"}
        assert store.next_offset(TP) == 1


def test_opening_and_closing_a_store_leaks_no_resources(tmp_path: Path) -> None:
    """Opens that fail are included."""
    path = tmp_path / "s"
    me = psutil.Process()
    fds: list[int] = []
    threads: list[int] = []
    for _ in range(24 * EFFORT):
        with TransactionalStateStore.open(path, IDENTITY) as store:
            store.put(b"\1a", b"1")
            scan = store.all()
            next(scan)
            with pytest.raises(StateLockedError):
                TransactionalStateStore.open(path, IDENTITY, StoreConfig(lock_timeout_ms=0))
        fds.append(me.num_fds())
        threads.append(me.num_threads())
    half = len(fds) // 2
    assert max(fds[half:]) <= max(fds[:half])
    assert max(threads[half:]) <= max(threads[:half])


def test_closing_a_store_leaves_small_changes_in_a_log_of_bounded_length(tmp_path: Path) -> None:
    """RocksDB writes them into tables once the log is long, or consists of many files."""
    path, db = tmp_path / "s", tmp_path / "s" / "db"
    logs, sizes, tables = [], [], []
    for number in range(1, 61):
        with TransactionalStateStore.open(path, IDENTITY) as store:
            assert store.get(b"\1last") == (b"%d" % (number - 1) if number > 1 else None)
            assert (store.next_offset(TP) or 0) == number - 1
            put_rows(store, [(key(n), b"%d" % number) for n in range(100)])
            store.put(b"\1last", b"%d" % number)
            store.persist_pending(record(number))
            store.promote(record(number), {TP: number})
        logs.append(len(list(db.glob("*.log"))))
        sizes.append(sum(log.stat().st_size for log in db.glob("*.log")))
        tables.append({table.name for table in db.glob("*.sst")})
    assert max(logs) <= database._KEPT_LOGS + 2, "an open and a close begin a log each"
    assert max(sizes) <= database._KEPT_LOG_BYTES + 50_000
    written = [number for number in range(1, 60) if tables[number] - tables[number - 1]]
    assert 1 <= len(written) <= 20, f"most closes write no table, but these do: {written}"
    with TransactionalStateStore.open_read_only(path) as reader:
        assert dict(reader.all()) == {**{key(n): b"60" for n in range(100)}, b"\1last": b"60"}
        assert reader.next_offset(TP) == 60


def test_closing_a_store_writes_a_long_log_into_tables(tmp_path: Path) -> None:
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        put_rows(store, [(key(n), b"x" * 100) for n in range(3000)])
        store.commit({TP: 1})
    db = tmp_path / "s" / "db"
    assert list(db.glob("*.sst"))
    assert sum(log.stat().st_size for log in db.glob("*.log")) < database._KEPT_LOG_BYTES
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        assert store.next_offset(TP) == 1
        assert store.get(key(2999)) == b"x" * 100


def test_a_kill_changes_neither_a_rarely_nor_a_frequently_written_store(
    other: OtherProcess, tmp_path: Path
) -> None:
    """One store gets one commit, the other thousands; a kill changes neither of them."""
    with other_process() as busy:
        busy.run(
            f"quiet = TransactionalStateStore.open({str(tmp_path / 'quiet')!r}, IDENTITY, TINY)\n"
            f"store = TransactionalStateStore.open({str(tmp_path / 'busy')!r}, IDENTITY, TINY)\n"
            "quiet.put(b'\\1a', b'1'); quiet.commit({TP: 5}, batch=record(1))\n"
            f"for number in range(1, {2000 * EFFORT} + 1):\n"
            "    store.put(key(number % 100), b'%d' % number); store.commit({TP: number})"
        )
        os.kill(busy.pid, signal.SIGKILL)
    with TransactionalStateStore.open(tmp_path / "quiet", IDENTITY) as store:
        assert (store.next_offset(TP), store.last_batch()) == (5, record(1))
    with TransactionalStateStore.open(tmp_path / "busy", IDENTITY) as store:
        assert store.next_offset(TP) == 2000 * EFFORT
        assert store.get(key(0)) == b"%d" % (2000 * EFFORT)
