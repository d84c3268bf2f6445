"""The walk of one micro-batch in `docs/architecture.md` names files and functions that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests import ROOT

_PAGE = (ROOT / "docs" / "architecture.md").read_text()
_WALK = _PAGE.partition("## One micro-batch")[2].partition("\n## ")[0]
#: A file in backticks, or a class, function or method. What is named belongs to the file before it.
_NAMES = re.findall(r"`([\w/]+\.py|[A-Za-z_][\w.]*(?:\(\))?)`", _WALK)


def _named() -> list[tuple[str, str]]:
    found, file = [], ""
    for name in _NAMES:
        if name.endswith(".py"):
            file = name
        elif file:
            found.append((file, name.removesuffix("()")))
    return found


def _defined(file: str) -> set[str]:
    names = set()
    for node in ast.parse((ROOT / "kafka_eos_source" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (each.name for each in node.body if isinstance(each, ast.FunctionDef))
            names |= {node.name, *(f"{node.name}.{each}" for each in inner)}
    return names


@pytest.mark.parametrize(("file", "name"), _named())
def test_what_the_walk_names_exists(file: str, name: str) -> None:
    assert name in _defined(file)


def test_a_micro_batch_is_read_in_about_thirty_files() -> None:
    files = {name for name in _NAMES if name.endswith(".py")}
    assert all((ROOT / "kafka_eos_source" / file).is_file() for file in files)
    assert 20 < len(files) <= 32
