"""Tests of when a store compacts its tables, and of a process that is killed during a compaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_kit import until
from state_kit import IDENTITY, TINY, TP, OtherProcess, key, other_process

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.store import database
from kafka_eos_source.state.store.transactional import TransactionalStateStore

#: Rows of a table. Compacting eight such tables takes some tenths of a second, closing the store a few ms.
ROWS = 40_000
#: Number of tables at level 0 that cause a compaction.
DUE = database._TABLES_TO_COMPACT


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
    store.put_all([(key(int(number)), value(offset)) for number in order])
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


def use_briefly(path: Path) -> None:
    """Opens the store, changes one key, and closes it, as the task of a small batch does."""
    with TransactionalStateStore.open(path, IDENTITY) as store:
        commit(store, 1)


def check(path: Path, offset: int) -> None:
    """Checks that the store has the rows of `with_tables`, and in one key the value of ``offset``."""
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.next_offset(TP) == offset
        rows = dict(store.all())
        assert rows.pop(key(0)) == value(offset)
        assert rows == {key(number): value(DUE) for number in range(1, ROWS)}


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
    assert tables_at_level_0(path) == 0
    check(path, DUE + 1)


def test_a_store_that_stays_open_is_compacted(tmp_path: Path) -> None:
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, TINY) as store:
        for _ in range(5 * DUE):
            commit(store, 500)  # more than a memtable holds
        until(lambda: store._durable.database.property("num-files-at-level0") < DUE)


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


def test_a_process_that_is_killed_during_a_compaction_loses_nothing(
    tmp_path: Path, other: OtherProcess
) -> None:
    path = with_tables(tmp_path / "s", DUE)
    with pytest.raises(AssertionError, match="the process ended with -9"):
        other.run(f"""
os.environ[{failpoints.ENVIRONMENT_VARIABLE!r}] = "state.within_compaction=kill-worker"
from test_state_compactions import use_briefly
use_briefly(Path({str(path)!r}))
""")
    assert tables_at_level_0(path) == DUE
    use_briefly(path)
    assert tables_at_level_0(path) == 0
    check(path, DUE + 2)
