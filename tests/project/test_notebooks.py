"""The committed notebooks are complete and clean: each cell was run, none failed, and the code parses."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: What must not be in a committed output: errors, log lines, terminal codes, and paths of somebody's machine.
UNWANTED = re.compile(r"Traceback|\bWARN\b|^%\d\||\x1b|/(?:work|home|root|tmp|Users)/", re.MULTILINE)
IMAGE_BYTES = 150_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@every_notebook
def test_a_notebook_is_committed_with_its_output(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert outputs(path)
    assert not [output for output in outputs(path) if output["output_type"] == "error"]
    for cell in code:
        lines = "".join(cell["source"]).splitlines()
        if lines and lines[0].startswith("%%writefile"):
            lines = lines[1:]
        ast.parse("\n".join(line for line in lines if not line.lstrip().startswith("!")))


@every_notebook
def test_the_output_is_clean(path: Path) -> None:
    for output in outputs(path):
        data = output.get("data", {})
        texts = [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
        for text in texts:
            found = UNWANTED.search("".join(text))
            assert not found, found
        assert "application/vnd.jupyter.widget-view+json" not in data, "pages cannot show widgets"
        if "image/png" in data:
            assert len(base64.b64decode("".join(data["image/png"]))) <= IMAGE_BYTES


@every_notebook
def test_a_notebook_says_what_it_needs_and_what_to_read_next(path: Path) -> None:
    texts = ["".join(cell["source"]) for cell in cells(path, "markdown")]
    assert "kafka-eos-source[demo]" in texts[0]
    assert "Connect" in texts[0]
    assert f"\n{texts[-1]}".rpartition("\n## ")[2].startswith("What to read next")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", "\n".join(texts))
    assert targets
    assert not [target for target in targets if not (FOLDER / target).exists()]


@every_notebook
def test_a_notebook_hides_log_lines_that_need_no_action(path: Path) -> None:
    first = "".join(cells(path, "code")[0]["source"])
    assert "quiet_logs()" in first


@every_notebook
def test_each_run_of_a_notebook_has_a_broker_and_a_folder_of_its_own(path: Path) -> None:
    """Checkpoint, state and tables of an earlier run belong to a broker that is gone."""
    first, *others = ("".join(cell["source"]) for cell in cells(path, "code"))
    assert first.index("os.chdir(tempfile.mkdtemp(") < first.index("EmbeddedKafka()")
    assert not [text for text in others if "chdir" in text]
