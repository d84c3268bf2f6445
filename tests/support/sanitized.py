"""Runs tests with a C library that sanitizers watch. As a pytest plugin, gives the tests this library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from kafka_eos_source import native
from tests import ROOT

_NAME, _LIBRARY = "SANITIZED_NAME", "SANITIZED_LIBRARY"


def check(
    name: str, folder: Path, files: Sequence[str], tests: str, environment: Mapping[str, str] | None = None
) -> None:
    """Fails if the address or the undefined-behaviour sanitizer finds something while tests run.

    Args:
        name: of the library, such as ``kernel``.
        folder: for the library with sanitizers.
        files: modules of tests.
        tests: which of their tests, as pytest's ``-k``.
        environment: further variables for the tests.
    """
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no gcc, or no LD_PRELOAD")
    library = folder / f"{name}.so"
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fPIC", "-shared"]
    source = Path(native.__file__).with_name(f"{name}.c")
    built = subprocess.run(
        [compiler, *flags, "-o", library, source], capture_output=True, text=True, check=False
    )
    if built.returncode != 0 and "cannot find" in built.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert built.returncode == 0, built.stderr
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={each}"], text=True).strip()
        for each in ("libasan.so", "libubsan.so")
    ]
    options = ["-q", "-x", "-p", "tests.support.sanitized", "-p", "no:xdist", "-k", tests]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(ROOT / "tests" / each for each in files)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **(environment or {}),
            _NAME: name,
            _LIBRARY: str(library),
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": str(ROOT),
        },
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]


if _LIBRARY in os.environ:
    # The same example fails again where a debugger is at hand; here, shrinking it would only take time.
    settings.register_profile("sanitized", phases=[Phase.generate], database=None, max_examples=15)
    settings.load_profile("sanitized")
    _original = native.candidates

    def _candidates(name: str) -> Iterator[Path]:
        return iter([Path(os.environ[_LIBRARY])]) if name == os.environ[_NAME] else _original(name)

    native.candidates = _candidates
