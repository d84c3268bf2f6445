"""Runs notebooks where they are and stores them with tidy output: ``python tools/run_notebooks.py``.

Without arguments it runs all of ``notebooks/``. Needs the extras ``demo`` and ``test``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def run(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook from top to bottom in its folder, as Jupyter does, and returns it with its output.

    Raises:
        CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", record_timing=False, resources=resources
    ).execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Joins the pieces of each stream, and keeps of each line what a terminal would show at the end."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            last = outputs[-1] if outputs else None
            streams = last is not None and output.output_type == last.output_type == "stream"
            if last is not None and streams and output.name == last.name:
                last.text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                text = _TERMINAL_CODES.sub("", output.text)
                output.text = "\n".join(_shown(line) for line in text.split("\n"))
        if "outputs" in cell:
            cell.outputs = [each for each in outputs if "text" not in each or each.text.strip()]


def _shown(line: str) -> str:
    parts = [part for part in line.split("\r") if part.strip()]
    return parts[-1].rstrip() if parts else ""


def main() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for path in map(Path, sys.argv[1:] or sorted((ROOT / "notebooks").glob("*.ipynb"))):
        notebook = run(path)
        tidy(notebook)
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
