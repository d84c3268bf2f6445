"""Tests of when a store compacts its tables, and of a process that is killed during a compaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.store import database, durable
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import (
    IDENTITY,
    SPILLING,
    TINY,
    TP,
    OtherProcess,
    binary,
    key,
    other_process,
    put_rows,
)
from tests.state.store.crash_kit import until

#: Rows of a table. Compacting eight such tables takes some tenths of a second, closing the store a few ms.
ROWS = 40_000
#: Number of tables at level 0 that cause a compaction.
DUE = database.DUE_TABLES


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    with other_process() as process:
        yield process


def value(offset: int) -> bytes:
    return b"%d" % offset * 100


def commit(store: TransactionalStateStore, keys: int) -> None:
    """Commits that many keys, each with the value of the commit's offset."""
    offset = (store.next_offset(TP) or 0) + 1
    order = np.random.default_rng(offset).permutation(keys)
    put_rows(store, [(key(int(number)), value(offset)) for number in order])
    store.commit({TP: offset})


def with_tables(path: Path, number: int) -> Path:
    """Returns a closed store with this number of tables at level 0, each with the same keys."""
    for _ in range(number):
        with TransactionalStateStore.open(path, IDENTITY) as store:
            commit(store, ROWS)
    assert tables_at_level_0(path) == number
    return path


def tables_at_level_0(path: Path) -> int:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        return store._durable.database.property("num-files-at-level0")


def use_briefly(path: Path, keys: int = 1) -> None:
    """Opens the store, changes some keys, and closes it, as the task of a small batch does."""
    with TransactionalStateStore.open(path, IDENTITY) as store:
        commit(store, keys)


def check(path: Path, offset: int) -> None:
    """Checks that the store has the rows of `with_tables`, and in its first key the value of ``offset``."""
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.next_offset(TP) == offset
        rows = dict(store.all())
        assert rows.keys() == {key(number) for number in range(ROWS)}
        assert rows[key(0)] == value(offset)
        assert rows[key(ROWS - 1)] == value(DUE)
        assert set(rows.values()) <= {value(each) for each in range(DUE, offset + 1)}


def test_a_store_with_few_young_tables_is_not_compacted(tmp_path: Path) -> None:
    """A task that compacts a few tables each time writes more bytes than it saves."""
    path = with_tables(tmp_path / "s", DUE - 1)
    before = set((path / "db").glob("*.sst"))
    for _ in range(3):
        use_briefly(path)
    assert set((path / "db").glob("*.sst")) == before


def test_closing_a_store_waits_for_the_compaction_of_its_young_tables(tmp_path: Path) -> None:
    """If closing aborted it, each task would begin it again, and none would end it."""
    path = with_tables(tmp_path / "s", DUE)
    use_briefly(path)
    assert not list((path / "db").glob("OPTIONS-*")), "the next open would parse them"
    assert tables_at_level_0(path) == 0
    check(path, DUE + 1)


def test_a_restore_compacts_into_tables_of_some_mb(tmp_path: Path) -> None:
    """Large tables make long compactions, for which tasks wait."""
    rows = 20_000
    numbers = np.random.default_rng(1).permutation(rows * (DUE + 1)).tolist()
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        for chunk in range(DUE + 1):
            keys = [key(number) for number in numbers[chunk * rows : (chunk + 1) * rows]]
            store.restore_chunk(
                binary(keys), binary([value(1) * 3] * rows), {TP: chunk + 1}, done=chunk == DUE
            )
    assert tables_at_level_0(tmp_path / "s") == 0
    assert max(table.stat().st_size for table in (tmp_path / "s" / "db").glob("*.sst")) < 12 << 20
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        assert sum(1 for _ in store.all()) == rows * (DUE + 1)


def test_a_store_that_stays_open_is_compacted(tmp_path: Path) -> None:
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, TINY) as store:
        for _ in range(5 * DUE):
            commit(store, 500)  # more than a memtable holds
        until(lambda: store._durable.database.property("num-files-at-level0") < DUE)


def test_a_large_batch_is_compacted_while_it_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written as many tables, between which nothing else is written."""
    monkeypatch.setattr(durable, "_APPLY_ROWS", 200)
    reached: list[str] = []
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, SPILLING) as store:

        def reach(name: str) -> None:
            reached.append(name)
            if reached.count("state.apply_slice") == 2 * DUE:
                until(lambda: store._durable.database.property("num-files-at-level0") < DUE)

        commit(store, 300 * 3 * DUE)
        monkeypatch.setattr(durable.failpoints, "reach", reach)
        commit(store, 300 * 3 * DUE)
    assert reached.count("state.apply_slice") >= 2 * DUE


def test_compactions_that_cannot_be_switched_on_or_off_fail_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_tables(tmp_path / "s", DUE)

    class Fails:
        """A column family whose options cannot be changed."""

        def __init__(self, family: Any) -> None:
            self._family = family

        def __getattr__(self, name: str) -> Any:
            return getattr(self._family, name)

        def set_options(self, options: dict[str, str]) -> None:
            raise OSError(f"No space left on device for {options}")

    with TransactionalStateStore.open(path, IDENTITY) as store:
        families = store._durable.database._families
        families["data"] = Fails(families["data"])
        commit(store, 1)
    assert caplog.text.count("No space left on device") == 2
    check(path, DUE + 1)


def test_a_close_that_is_interrupted_while_it_waits_closes_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_tables(tmp_path / "s", DUE)

    def interrupted(_database: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(database.Database, "_is_compacting", interrupted)
        with pytest.raises(KeyboardInterrupt):
            use_briefly(path)
    check(path, DUE + 1)


def test_a_compaction_that_finds_damage_fails_no_batch_but_the_next_open(tmp_path: Path) -> None:
    """Otherwise the compaction of each later task would fail, and nothing would repair the store."""
    path = with_tables(tmp_path / "s", DUE)
    table = sorted((path / "db").glob("*.sst"))[DUE // 2]
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 0x40
    table.write_bytes(content)
    use_briefly(path)
    with pytest.raises(StateCorruptedError, match=r"a compaction found damage: .*checksum"):
        TransactionalStateStore.open(path, IDENTITY)
    assert TransactionalStateStore.set_aside(path)
    with_tables(path, 1)


def test_a_compaction_without_space_fails_no_batch(tmp_path: Path, other: OtherProcess) -> None:
    path = with_tables(tmp_path / "s", DUE)
    other.run(f"""
import resource
from tests.state.store.test_compactions import use_briefly
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))  # less than the table that is written
use_briefly(Path({str(path)!r}), 3000)  # more than close would leave in the log
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
""")
    assert tables_at_level_0(path) == DUE
    use_briefly(path)
    assert tables_at_level_0(path) == 0
    check(path, DUE + 2)


def test_a_process_that_is_killed_during_a_compaction_loses_nothing(
    tmp_path: Path, other: OtherProcess
) -> None:
    path = with_tables(tmp_path / "s", DUE)
    with pytest.raises(AssertionError, match="the process ended with -9"):
        other.run(f"""
os.environ[{failpoints.ENVIRONMENT_VARIABLE!r}] = "state.within_compaction=kill-worker"
from tests.state.store.test_compactions import use_briefly
use_briefly(Path({str(path)!r}))
""")
    assert tables_at_level_0(path) == DUE
    use_briefly(path)
    assert tables_at_level_0(path) == 0
    check(path, DUE + 2)
