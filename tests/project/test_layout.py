"""Where tests stand, as `tests/README.md` says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def _run_by_scripts() -> Iterator[str]:
    """Yields the modules, and the names in them, that the scripts and workflows run or import."""
    scripts = [ROOT / "dev", ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    for text in (each.read_text() for each in scripts):
        yield from re.findall(r"python3? -m ((?:kafka_eos_source|integration|benchmarks|tests)[\w.]*)", text)
        for program in re.findall(r"python3? -c '([^']*)'", text):
            for node in ast.walk(ast.parse(program)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    yield from (f"{node.module}:{each.name}" for each in node.names)


@pytest.mark.parametrize("name", sorted(set(_run_by_scripts())))
def test_what_the_scripts_run_exists(name: str) -> None:
    """A script that imports a name which moved fails only on a clean machine, after minutes of set-up."""
    module, _, attribute = name.partition(":")
    if attribute:
        assert hasattr(importlib.import_module(module), attribute)
    else:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        is_package = spec.submodule_search_locations is not None
        assert not is_package or importlib.util.find_spec(f"{module}.__main__") is not None
