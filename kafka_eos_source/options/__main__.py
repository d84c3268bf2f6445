"""Writes the pages in ``docs/`` that list options: ``python -m kafka_eos_source.options``."""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.kafka import properties
from kafka_eos_source.options import docs

if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "docs"
    (folder / "options.md").write_text(docs.documentation(), encoding="utf-8")
    (folder / "kafka-properties.md").write_text(properties.documentation(), encoding="utf-8")
