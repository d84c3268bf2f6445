"""The demo end to end, with few events: its exit code is its verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_the_demo_finds_every_event_once(broker: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "kafka_eos_source.demo", "--events", "6000", "--kills", "1"),
            *("--bootstrap", broker, "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "every event exactly once" in finished.stdout
    assert "6,000" in finished.stdout
    assert (tmp_path / "kills.png").exists()
