"""The C library of the Avro codec: when it is used, and what sanitizers say about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from avro_model import schema_of

from kafka_eos_source.native import loader
from kafka_eos_source.registry.avro import decoder, encoder
from kafka_eos_source.registry.avro.kernel import choice

HERE = Path(__file__).parent


@pytest.fixture
def new_choice() -> Iterator[None]:
    choice.cache_clear()
    yield
    choice.cache_clear()


@pytest.mark.skipif(not os.environ.get("KAFKA_EOS_TEST_KERNEL"), reason="./dev test says whether it must be")
def test_the_library_was_built_where_there_is_a_compiler() -> None:
    assert choice().kernel is not None, choice().why_not


@pytest.mark.usefixtures("new_choice")
def test_without_the_library_python_does_the_work_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loader.VARIABLE, "0")
    schema = schema_of("string")
    column = pa.array(["x", None])
    for _ in range(2):
        encoded = encoder(schema, pa.string()).encode(column, b"\0")
        assert encoded.values.to_pylist() == [b"\0\2x", None]
        assert decoder(schema).decode(encoded.values, 1).values == column
    assert [record.message for record in caplog.records] == [
        "Avro records are decoded and encoded by slow Python code, because the C kernel is not available: "
        "KAFKA_EOS_NATIVE=0 turns it off"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Address and undefined-behaviour sanitizers watch the tests with valid, damaged and random payloads."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    library = tmp_path / "avro.so"
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fPIC", "-shared"]
    source = Path(loader.__file__).with_name("avro.c")
    built = subprocess.run(
        [compiler, *flags, "-o", library, source], capture_output=True, text=True, check=False
    )
    if built.returncode != 0 and "cannot find" in built.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert built.returncode == 0, built.stderr
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "AVRO_LIBRARY": str(library),
        "AVRO_EXAMPLES": os.environ.get("AVRO_EXAMPLES", "15"),
        "KAFKA_EOS_TEST_KERNEL": "1",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    }
    files = [HERE / f"test_registry_avro_{name}.py" for name in ("decode", "encode", "evolution")]
    tests = "random or damaged or messages or late or offsets or slices or decimals or recursive"
    options = ["-q", "-x", "-p", "avro_sanitized", "-p", "no:xdist", "-k", tests]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        env=environment,
        cwd=HERE.parent,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
