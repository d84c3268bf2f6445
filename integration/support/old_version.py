"""An older version of this package, to upgrade from and to roll back to."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from integration.support.driver import ROOT

#: The last commit that writes tokens of format 1.
FORMAT_1 = "fde9b9c"


def export(commit: str, folder: Path) -> Path:
    """Writes the repository as of a commit into ``folder``; skips the test if the history lacks it."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this clone does not reach back to {commit}: {archive.stderr!r}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder
