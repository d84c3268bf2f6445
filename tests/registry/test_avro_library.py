"""What sanitizers say about the C library of the Avro codec."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import sanitized


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """They watch the tests with valid, damaged and random payloads."""
    files = [f"registry/test_avro_{name}.py" for name in ("decode", "encode", "evolution")]
    tests = "random or damaged or messages or late or offsets or slices or decimals or recursive"
    examples = os.environ.get("AVRO_EXAMPLES", "15")
    sanitized.check("avro", tmp_path, files, tests, {"AVRO_EXAMPLES": examples})
