"""Where tests stand, as `tests/README.md` says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

#: Folders of `tests/` that mirror no package.
_OWN_FOLDERS = {"chain", "corpus", "fuzzing", "project", "support", "__pycache__"}


def _imports(file: Path) -> Iterator[str]:
    """Yields the modules that a file imports, and the names that it imports from packages."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_no_test_module_imports_another() -> None:
    """What two of them need is a helper."""
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("tests", "integration")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for name in _imports(file)
        if re.match(r"(tests|integration)\.(\w+\.)*test_", name)
        and not name.startswith(".".join(file.relative_to(ROOT).with_suffix("").parts))
    ]
    assert found == []


def test_each_folder_mirrors_a_package() -> None:
    packages = {
        each.name for each in (ROOT / "kafka_eos_source").iterdir() if (each / "__init__.py").exists()
    }
    folders = {each.name for each in (ROOT / "tests").iterdir() if each.is_dir()}
    assert folders - _OWN_FOLDERS <= packages
