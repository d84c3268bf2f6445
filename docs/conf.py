"""Sphinx configuration of the documentation site. Build it with ``./dev docs``."""

from __future__ import annotations

from importlib import metadata

project = "kafka-eos"
author = "The kafka-eos maintainers"
project_copyright = "The kafka-eos maintainers"
release = version = metadata.version("kafka-eos-source")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build", "cli-json.md", "cli-transcript.md"]  # the two are included in command-line.md
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

#: Docstrings name code in single backticks: modules, functions and parameters alike.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"kafka-eos {release}"
html_static_path: list[str] = []
copybutton_prompt_text = "$ "
suppress_warnings = ["myst.xref_missing_external"]
