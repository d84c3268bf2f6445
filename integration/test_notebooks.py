"""The notebooks run again and one after the other in their folder, and leave nothing there.

Their last cells compare output and input.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tools.run_notebooks import run

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_notebooks_run_again_and_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=lambda _, names: {n for n in names if n[:1] == "."})
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    for path in [*sorted(before), *sorted(before)]:
        notebook = run(path)  # raises CellExecutionError if a cell fails, such as the comparison
        printed = [
            output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
        ]
        assert printed
        assert not [text for text in printed if " WARN " in text or text.startswith("%")]
        assert {path: path.read_bytes() for path in folder.rglob("*")} == before
