"""The package has its C kernel, however it is installed: from a wheel, an sdist or a clone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from integration.support.installed import NO_COMPILER, SECONDS, Bare, clone, command

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS)]

#: Uses each library, and prints from where the package and its libraries were imported.
_PROGRAM = """
import json, kafka_eos_source
from kafka_eos_source import native
from kafka_eos_source.registry.avro import encoder
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.stage.files import crc32c
import pyarrow as pa
native.check()
assert crc32c(b"123456789") == 0xE3069283
encoded = encoder(Schema("AVRO", '"string"'), pa.string()).encode(pa.array(["x"]), b"")
assert encoded.values.to_pylist() == [b"\\2x"]
print(json.dumps([kafka_eos_source.__file__, *(native.load(name)._name for name in native.VERSIONS)]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Builds an sdist, and a wheel from the sdist, as ``./dev wheel`` does."""
    folder = tmp_path_factory.mktemp("dist")
    tree = clone(tmp_path_factory.mktemp("tree") / "clone")
    command(sys.executable, "-m", "build", "--outdir", str(folder), str(tree))
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def imported(bare: Bare, cwd: Path | str = "/") -> tuple[Path, set[Path]]:
    """Returns the folder of the package that a program imports there, and the folders of its libraries."""
    done = command(str(bare.bin / "python"), "-c", _PROGRAM, cwd=cwd, PATH=NO_COMPILER)
    assert done.stderr == ""
    package, *libraries = map(Path, json.loads(done.stdout))
    return package.parent, {each.parent for each in libraries}


def assert_installed(bare: Bare) -> None:
    package = bare.site / "kafka_eos_source"
    assert imported(bare) == (package, {package / "native"})
    program = str(bare.bin / "kafka-eos")
    found = command(program, "doctor", "--check", "kernel", "--json", PATH=NO_COMPILER)
    assert json.loads(found.stdout)["findings"][0]["severity"] == "ok"


def test_the_wheel_is_for_all_versions_of_python_and_needs_no_compiler(
    built: Mapping[str, Path], tmp_path: Path
) -> None:
    assert "-py3-none-" in built["wheel"].name
    bare = Bare(tmp_path)
    bare.install(str(built["wheel"]), PATH=NO_COMPILER)
    assert_installed(bare)


def test_the_sdist_is_compiled(built: Mapping[str, Path], tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    bare.install(str(built["sdist"]), PATH=os.environ["PATH"])
    assert_installed(bare)


def test_without_a_compiler_the_sdist_takes_one_from_the_index(
    built: Mapping[str, Path], tmp_path: Path
) -> None:
    bare = Bare(tmp_path)
    bare.install(str(built["sdist"]), PATH=NO_COMPILER)
    assert_installed(bare)


def test_without_any_compiler_the_build_says_what_to_install(tmp_path: Path) -> None:
    bare = Bare(tmp_path / "venv")
    said = bare.install(str(clone(tmp_path / "clone")), fails=True, PATH=NO_COMPILER, CC="/nonexistent/cc")
    assert "needs a C compiler, and CC=/nonexistent/cc does not work: install gcc or clang" in said


@pytest.mark.parametrize("is_editable", [False, True], ids=["normal", "editable"])
def test_in_a_clone_the_kernel_is_used_from_both_places(tmp_path: Path, is_editable: bool) -> None:
    """In the clone, Python imports the sources, beside which a normal installation compiles nothing."""
    tree, bare = clone(tmp_path / "clone"), Bare(tmp_path / "venv")
    editable = ("--config-settings", "editable_mode=compat", "--editable") if is_editable else ()
    bare.install(*editable, str(tree), PATH=os.environ["PATH"])
    sources, installed = tree / "kafka_eos_source", bare.site / "kafka_eos_source"
    assert any((sources / "native").glob("*.so")) is is_editable
    place = sources if is_editable else installed
    assert imported(bare, tree) == (sources, {place / "native"})
    assert imported(bare) == (place, {place / "native"})
