"""Runs the ``kafka-eos`` command in a process of its own: ``python -m integration.chaos.command SPEC.json``.

A spec is ``{"arguments": [...], "mutations": []}``. The process ends when its parent does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from integration.chaos.switches import switch_off
from integration.support.driver import end_with_parent
from kafka_eos_source.cli import main as command

if __name__ == "__main__":
    end_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text())
    switch_off(spec.get("mutations", ()))
    command(spec["arguments"])
