"""A pytest plugin: the tests use another library of the Avro codec, such as one with sanitizers."""

from __future__ import annotations

import os
from pathlib import Path

from kafka_eos_source.native import loader

_original = loader.library_path


def _library_path(name: str = "kernel") -> Path:
    return Path(os.environ["AVRO_LIBRARY"]) if name == "avro" else _original(name)


loader.library_path = _library_path
