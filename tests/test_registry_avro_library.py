"""The C library of the Avro codec: when it is used, and what sanitizers say about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import sanitized
from avro_model import schema_of

from kafka_eos_source.native import loader
from kafka_eos_source.registry.avro import decoder, encoder
from kafka_eos_source.registry.avro.kernel import choice


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


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """They watch the tests with valid, damaged and random payloads."""
    files = [f"test_registry_avro_{name}.py" for name in ("decode", "encode", "evolution")]
    tests = "random or damaged or messages or late or offsets or slices or decimals or recursive"
    examples = os.environ.get("AVRO_EXAMPLES", "15")
    sanitized.check("avro", tmp_path, files, tests, {"AVRO_EXAMPLES": examples})
