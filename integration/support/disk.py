"""A small disk that a test can fill up."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = b"\0" * 65536


class SmallDisk:
    """A file system in memory with a fixed size, mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Takes all the space that is left."""
        with open(self._ballast, "ab", buffering=0) as ballast:
            for size in (len(_BLOCK), 1):
                try:
                    while ballast.write(_BLOCK[:size]):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Gives the space back."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """Mounts a small disk on a folder, which is created; skips the test where that is not allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "kafka-eos-test", os.fspath(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs root, or `unshare --user --map-root-user --mount`: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True)
