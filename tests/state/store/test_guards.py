"""Checks the source for uses of rocksdict that lose data, which tests of behaviour would rarely notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests import ROOT

PACKAGE = ROOT / "kafka_eos_source"
SOURCES = sorted(PACKAGE.rglob("*.py"))


#: The only modules that may import rocksdict.
ROCKSDICT = ("database.py", "opening.py", "rocksdb.py", "uncommitted.py")


def offences(source: str, *, database: bool) -> Iterator[str]:
    """Yields calls that flush one column family before the others, and handles outside their module."""
    tree = ast.parse(source)
    kept = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.Assign)
        and "self._families"
        in ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        for call in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if not database and ("rocksdict" in module or any("rocksdict" in name for name in names)):
                yield "imports rocksdict"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if database and name in ("flush", "flush_wal") and ast.unparse(node.func.value) != "file":
                yield f"{name}() puts one column family on the disk"
            if name in ("get_column_family", "create_column_family") and id(node) not in kept:
                yield f"{name}() is not kept: dropping it flushes one column family"
            if name == "snapshot":
                yield "an iteration over rocksdict's snapshot shows what was written after it"
            if name == "disable_wal":
                yield "without a log, a kill loses commits"


def test_no_code_flushes_a_single_column_family() -> None:
    found = {path: list(offences(path.read_text(), database=path.name in ROCKSDICT)) for path in SOURCES}
    assert found
    assert not {path: what for path, what in found.items() if what}


@pytest.mark.parametrize(
    "source",
    [
        "import rocksdict",
        "from rocksdict import Rdict",
        "db.get_column_family('offsets').put(b'a', b'b')",
        "x = db.get_column_family('offsets')",
        "options.disable_wal(True)",
        "db.snapshot()",
    ],
)
def test_the_guard_detects_each_forbidden_use(source: str) -> None:
    assert list(offences(source, database=False))


def test_the_guard_detects_a_flush() -> None:
    assert list(offences("self._db.flush()", database=True))
    assert not list(offences("self._families = {n: db.get_column_family(n) for n in N}", database=True))
