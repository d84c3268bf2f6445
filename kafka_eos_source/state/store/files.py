"""Files and folders that are whole or not there, whatever is killed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path


def replace_text(path: Path, text: str, *, sync: bool = False) -> None:
    """The whole new text or the whole old one is there at any time, also when this process dies.

    Args:
        sync: also when the machine does. Files that only tell of the database do not need that.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)


def remove_tree(path: Path) -> None:
    """Removes a folder so that a kill half-way leaves nothing that looks like it: renamed first."""
    if path.exists():
        trash = path.with_name(f"{path.name}.trash-{os.getpid()}-{time.monotonic_ns()}")
        path.rename(trash)
    for left in path.parent.glob(f"{path.name}.trash-*"):
        shutil.rmtree(left, ignore_errors=True)
