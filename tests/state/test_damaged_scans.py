"""A scan that meets a damaged table fails; it does not end early, as if there were no more rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.uncommitted import SpilledRows
from tests.state.state_kit import IDENTITY, TP

ROWS = 60_000


def key(number: int) -> bytes:
    return b"\1%08d" % number


def damage(folder: Path) -> None:
    """Overwrites some bytes in the middle of the largest table."""
    table = max(folder.glob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"\xff" * 64)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The folder of a store of which one block cannot be read."""
    path = tmp_path / "s"
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.put_all([(key(number), b"%032d" % number) for number in range(ROWS)])
        store.commit({TP: 1})
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.put(b"\2", b"")
        store.commit({TP: 2})
    damage(path / "db")
    return path


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda store: sum(1 for _ in store.range()), id="forwards"),
        pytest.param(lambda store: sum(1 for _ in store.range(reverse=True)), id="backwards"),
        pytest.param(lambda store: list(map(store.get, map(key, range(ROWS)))), id="get"),
        pytest.param(
            lambda store: store.get_many(pa.array([key(n) for n in range(ROWS)], pa.binary())), id="get_many"
        ),
    ],
)
def test_a_read_of_a_damaged_block_is_an_error(
    damaged: Path, read: Callable[[TransactionalStateStore], Any]
) -> None:
    with TransactionalStateStore.open(damaged, IDENTITY) as store, pytest.raises(StateCorruptedError):
        read(store)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_damaged_rows_on_disk_is_an_error(tmp_path: Path, reverse: bool) -> None:
    config = StoreConfig()
    rows = SpilledRows.create(tmp_path, config)
    rows.add({key(number): b"%032d" % number for number in range(ROWS)}, 1)
    rows.seal()
    damage(rows.path)
    again = SpilledRows.open(tmp_path, rows.path.name, config)
    with pytest.raises(StateCorruptedError):
        sum(1 for _ in again.scan(None, None, reverse=reverse))
    again.close()
