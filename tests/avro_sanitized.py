"""A pytest plugin: the tests use another library of the Avro codec, such as one with sanitizers."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import Phase, settings

from kafka_eos_source.native import loader

# The same example fails again where a debugger is at hand; here, shrinking it would only take time.
settings.register_profile("sanitized", phases=[Phase.generate], database=None)
settings.load_profile("sanitized")

_original = loader.library_path


def _library_path(name: str = "kernel") -> Path:
    return Path(os.environ["AVRO_LIBRARY"]) if name == "avro" else _original(name)


loader.library_path = _library_path
