"""A new virtual environment into which tests install the package, and a clone of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from kafka_eos_source.operate.shared import ExitCode

ROOT = Path(__file__).parents[2]
SECONDS = 600
#: The only folder with programs for an installation without a compiler.
NO_COMPILER = "/nonexistent"

_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
_FOLDERS = ("kafka_eos_source", "pyspark_kafka_eos", "pyspark_kafka_eos_state")


def clone(folder: Path) -> Path:
    """Copies the package as a new clone of the repository has it: sources, and nothing that was compiled."""
    folder.mkdir()
    for name in _FILES:
        shutil.copy(ROOT / name, folder)
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def environment(**changed: str) -> dict[str, str]:
    """Returns the variables of this process without those that lead into the source tree, with changes."""
    left_out = ("CC", "PYTHONPATH")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **changed}


def command(
    *arguments: str, cwd: Path | str = "/", fails: bool = False, **changed: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program, by default outside of the source tree, and returns what it printed."""
    done = subprocess.run(
        arguments,
        env=environment(**changed),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    succeeded = done.returncode in (ExitCode.DONE, ExitCode.WARNING)
    assert succeeded is not fails, done.stdout + done.stderr
    return done


class Bare:
    """A new virtual environment that has the dependencies of the package, and not the package."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)  # pip is one of the dependencies
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        # Python processes no .pth file there, so the editable install of this environment is not found
        folders = [each for each in sys.path if Path(each).name == "site-packages"]
        (self.site / "dependencies.pth").write_text("\n".join(folders) + "\n")

    def install(self, *arguments: str, fails: bool = False, **changed: str) -> str:
        """Installs the package without its dependencies, and returns what pip printed."""
        pip = (str(self.bin / "python"), "-m", "pip", "install", "--no-deps", "--no-cache-dir")
        done = command(*pip, *arguments, fails=fails, **changed)
        return done.stdout + done.stderr
