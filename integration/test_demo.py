"""The demo runs end to end with few events; its exit code says whether every event arrived exactly once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.support.kafka import produce, transaction
from kafka_eos_source.kafka import playground


def test_what_the_demo_reads_back_includes_the_records_of_a_transaction_that_is_open_at_first(
    broker: str, topic: Callable[..., str]
) -> None:
    """Kafka answers a commit before the records of the transaction can be read: they would look lost."""
    name = topic()
    produce(broker, name, ["before"])
    late = transaction(broker, f"late-{name}")
    late.produce(name, "late")
    assert late.flush(60) == 0
    found = playground.read_back(broker, {name: 1})
    assert next(found) == (name, b"before")
    late.commit_transaction(60)
    assert list(found) == [(name, b"late")]


#: The demo with fewer micro-batches, because none of its kills is at a random time.
_DEMO = "from kafka_eos_source.demo import __main__ as demo; demo._FEWEST_BATCHES = 3; demo.main()"


@pytest.mark.fault("T07", "the driver dies after Kafka's commit and before Spark's", "commit")
@pytest.mark.timeout(400)
def test_the_demo_finds_every_event_exactly_once(broker: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-c", _DEMO, "--events", "3000"),
            *("--kills", "0"),  # random kills, in addition to the two at exact failpoints
            *("--bootstrap-servers", broker, "--output", str(tmp_path)),
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
