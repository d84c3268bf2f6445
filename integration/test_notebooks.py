"""The notebooks run from top to bottom in an empty folder; their last cells compare output and input."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.run_notebooks import run

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = run(path, tmp_path)  # raises CellExecutionError if a cell fails, such as the comparison
    printed = [
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    ]
    assert printed
    assert not [text for text in printed if " WARN " in text or text.startswith("%")]
