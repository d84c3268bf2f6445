"""Shared by the tests of crashes of a state store: copies of its folder as kills would leave it."""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.state.state_kit import EFFORT, other_process

SEED = 11
CRASHES = 12 * EFFORT

#: What the process does that is killed: as a library's user does, and as the tasks of micro-batches do.
OPEN_ONCE = "while True:\n    work.step(store)\n    acknowledged.write(b'.')"
OPEN_FOR_EACH_COMMIT = (
    "store.close()\n"
    "while True:\n"
    "    with TransactionalStateStore.open(path / 'live', IDENTITY, TINY) as store:\n"
    "        work.step(store)\n"
    "        acknowledged.write(b'.')"
)


def crash_images(folder: Path, config: str, work: str, *, commits: int) -> list[tuple[Path, int]]:
    """Returns copies of a store's folder, each after up to this number of further commits.

    The process that writes is stopped during each copy, so that each copy is what a SIGKILL would have left.

    Args:
        folder: for the store and its copies.
        config: name of its configuration.
        work: what the process does that is killed.
        commits: see above.

    Returns:
        Each copy with the number of commits that were acknowledged before it was made.
    """
    rng = random.Random(SEED)
    images = []
    with other_process() as other:
        other.run(
            f"work = Workload({SEED}); path = Path({str(folder)!r})\n"
            f"store = TransactionalStateStore.open(path / 'live', IDENTITY, {config})\n"
            "acknowledged = open(path / 'acknowledged', 'ab', buffering=0)"
        )
        acknowledged = folder / "acknowledged"
        other.send(work)
        process = psutil.Process(other.pid)
        for number in range(CRASHES):
            enough = _number(acknowledged) + rng.randrange(1, commits)
            until(lambda enough=enough: _number(acknowledged) >= enough)  # type: ignore[misc]
            process.suspend()
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            image = folder / f"image{number}"
            done = _number(acknowledged)
            shutil.copytree(folder / "live", image)
            images.append((image, done))
            process.resume()
        other.kill()
        done = _number(acknowledged)
        images.append((folder / "live", done))
    return images


def log_sizes(database: Path) -> dict[Path, int]:
    """Returns the write-ahead logs, in order, with their sizes in bytes.

    If the database is open, a flush may delete a log at any moment.
    """
    sizes = {}
    for log in sorted(database.glob("*.log")):
        with contextlib.suppress(FileNotFoundError):
            sizes[log] = log.stat().st_size
    return sizes


def copy_of_open_store(store: Path, copy: Path) -> Path:
    """Copies the folder of a store that this process has open, as a kill at one moment would leave it.

    RocksDB's threads write and delete files while the test does nothing. A copy that they disturbed mixes
    several moments, so this function copies again until no file changed meanwhile.

    Returns:
        The copy.
    """
    deadline = time.monotonic() + 120
    while True:
        before = _files(store)
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            shutil.copytree(store, copy)
            if _files(store) == before:
                return copy
        assert time.monotonic() < deadline, "the files of the store do not come to rest"
        shutil.rmtree(copy)


def _files(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Returns what changes if a file of a folder is created, replaced, written or deleted."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _number(path: Path) -> int:
    """Returns the number of bytes of a file that gets one byte per commit, so that it is never torn."""
    return path.stat().st_size if path.exists() else 0


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition on another process."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the other process does not get on"
        time.sleep(0.002)


def records_of(log: Path) -> list[int]:
    """Returns where the records of a log of RocksDB begin, in bytes.

    A log has blocks of 32 KiB. Each fragment has a header of 7 bytes: checksum, length, and type, which is 1
    for a whole record and 2 for the first of several fragments.
    """
    content, at, found = log.read_bytes(), 0, []
    while at + 7 <= len(content):
        left_in_block = 32_768 - at % 32_768
        if left_in_block < 7:
            at += left_in_block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", content, at)
        if kind in (1, 2):
            found.append(at)
        at += 7 + length
    return found
