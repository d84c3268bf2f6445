"""The wheel brings the C kernel to machines without a compiler; the sdist installs with and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.operate.exit_codes import ExitCode

ROOT = Path(__file__).parent.parent
_SECONDS = 240
#: The only folders with programs for an installation without a compiler.
_NO_COMPILER = "/nonexistent"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program outside the source tree, without the variables that lead back into it."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC")}
    done = subprocess.run(
        arguments,
        env={**clean, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode in (ExitCode.DONE, ExitCode.WARNING), done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Builds an sdist, and a wheel from the sdist, as ``./dev wheel`` does."""
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


class Bare:
    """A new virtual environment that has the dependencies of the package, and not the package."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._bin = folder / "bin"
        (site,) = folder.glob("lib/python*/site-packages")
        # the editable install of the test's own environment is not found this way
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, file: Path, path: str) -> None:
        command(
            str(self._bin / "python"),
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-cache-dir",
            str(file),
            PATH=path,
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return command(str(self._bin / "python"), "-c", code, PATH=_NO_COMPILER)

    def kernel(self) -> dict[str, Any]:
        """Returns what doctor finds about the kernel."""
        done = command(
            str(self._bin / "kafka-eos"), "doctor", "--check", "kernel", "--json", PATH=_NO_COMPILER
        )
        (finding,) = json.loads(done.stdout)["findings"]
        assert isinstance(finding, dict)
        return finding


@pytest.mark.long
def test_the_wheel_brings_the_kernel_to_a_machine_without_a_compiler(
    built: Mapping[str, Path], tmp_path: Path
) -> None:
    assert "-cp310-abi3-" in built["wheel"].name, "one wheel is for all versions of Python"
    bare = Bare(tmp_path)
    bare.install(built["wheel"], _NO_COMPILER)
    found = bare.kernel()
    assert (found["severity"], found["what"]) == ("ok", "in use")
    imported = bare.python("import kafka_eos_source; print(kafka_eos_source.__file__)")
    assert imported.stdout.startswith(str(tmp_path)), "the test found the source tree"
    assert imported.stderr == ""


@pytest.mark.long
def test_the_sdist_without_a_compiler_installs_the_python_twin_and_says_so(
    built: Mapping[str, Path], tmp_path: Path
) -> None:
    bare = Bare(tmp_path)
    bare.install(built["sdist"], _NO_COMPILER)
    found = bare.kernel()
    assert found["severity"] == "warning"
    assert "it was not built" in found["what"]
    imported = bare.python("import kafka_eos_source")
    (line,) = imported.stderr.splitlines()
    assert "runs without the C kernel" in line
    assert "kafka-eos doctor --fix" in line


@pytest.mark.long
def test_the_sdist_with_a_compiler_builds_the_kernel(built: Mapping[str, Path], tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    bare.install(built["sdist"], os.environ["PATH"])
    assert bare.kernel()["what"] == "in use"
