"""The warehouse example runs as a user starts it; its exit code says whether it worked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kafka_warehouse_and_lake_agree_although_the_driver_is_killed(broker: str) -> None:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("pyiceberg")
    arguments = ["--bootstrap-servers", broker, "--events", "10000", "--kills", "0"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "kafka_to_warehouse.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.count("driver killed exactly") == 4
    assert done.stdout.count("yes ") == 4
