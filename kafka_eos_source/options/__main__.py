"""Writes ``docs/options.md`` from the option tables: ``python -m kafka_eos_source.options``."""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.options.docs import documentation

if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "options.md").write_text(documentation(), encoding="utf-8")
