"""Sphinx configuration of the documentation site. Build it with ``./dev docs``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from sphinx.application import Sphinx

_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent


def _release() -> str:
    """Returns the version in pyproject.toml, which may be newer than that of the installed package."""
    found = re.search(r'^version = "(.+)"$', (_ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version"
    return found[1]


def _commit() -> str:
    """Returns the short id of the commit that the pages are built from; empty outside of a clone."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


project = "kafka-eos"
author = "The kafka-eos maintainers"
project_copyright = "The kafka-eos maintainers"
release = version = _release()

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
# command-line.md includes the last two
exclude_patterns = ["_build", "_templates", "cli-json.md", "cli-transcript.md"]
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
#: Notebooks are committed with their output; integration/test_notebooks.py runs them.
nb_execution_mode = "off"

#: Docstrings name code in single backticks: modules, functions and parameters alike.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

#: A reference to a class of this package that leads nowhere is an error. Classes of other projects have no
#: link, because the build does not need a network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!kafka_eos_source\.).*"),
    # internal: base classes, and arguments that users do not make
    ("py:.*", r".*\.(Cursor|Database|Description|Scan|StoreMetadata)"),
    (
        "py:.*",
        r".*\.observe\.(notebook\.StreamingQuery|notebook\.Frame|view\.QueryView|draw\.StateTable)",
    ),
    ("py:.*", r".*\.state\.reading\.live\.StreamingQuery"),
    ("py:.*", r".*\.registry\.codec\.Schema"),
    ("py:.*", r".*\.app\.app\.Options"),
    ("py:.*", r".*\.manifest\.T"),
    ("py:.*", r".*\.(Overlay|Reads|SinkKills|_Texts)"),
]

smartquotes = False  # it would turn --yes into a dash in the command line reference

html_theme = "furo"
html_title = f"kafka-eos {release}"
html_static_path: list[str] = []
html_context = {"commit": _commit()}
copybutton_prompt_text = "$ "
suppress_warnings = ["myst.xref_missing_external"]


def _copy_notebooks(_app: Sphinx) -> None:
    """Copies the notebooks below docs/, where Sphinx finds them, and adapts their links to these pages."""
    target = _DOCS / "notebooks"
    target.mkdir(exist_ok=True)
    sources = {path.name: path.read_text("utf-8") for path in (_ROOT / "notebooks").glob("*.ipynb")}
    for path in target.glob("*.ipynb"):
        if path.name not in sources:
            path.unlink()
    for name, text in sources.items():
        text = re.sub(r"\]\(\.\./(docs/)?", lambda link: "](../" if link[1] else "](../../", text)
        copy = target / name
        if not copy.exists() or copy.read_text("utf-8") != text:
            copy.write_text(text, "utf-8")


def _link_to_copies(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Makes links to notebooks, which work in the repository, lead to their pages on the site."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def setup(app: Sphinx) -> None:
    """Prepares the build."""
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _link_to_copies)
