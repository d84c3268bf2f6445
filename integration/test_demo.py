"""The demo runs end to end with few events; its exit code says whether every event arrived exactly once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_the_demo_finds_every_event_exactly_once(broker: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "kafka_eos_source.demo",
                "--events",
                "3000",
                "--kills",  # random kills, in addition to the two at exact failpoints
                "0",
            ),
            *("--bootstrap", broker, "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "every event exactly once" in finished.stdout
    rows = {
        cells[0]: cells[1:]
        for line in finished.stdout.splitlines()
        if "│" in line and (cells := [cell.strip() for cell in line.split("│")[1:-1]])
    }
    assert rows["events out (read_committed)"][0] == "3,000"
    assert rows["duplicated"][0] == "0"
    assert rows["duplicated"][1] != "0", "the kill between its flush and Spark's log doubles a batch"
    for failpoint in ("commit.after_commit", "direct.after_flush"):
        assert f"SIGKILL at {failpoint}" in finished.stderr
    assert (tmp_path / "kills.png").exists()
