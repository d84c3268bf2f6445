"""Kafka and two other systems at once: killed at every step, each has the same batches, once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from integration.chaos.scenario import Scenario
from kafka_eos_source.sinks.filesystem import committed_files

#: Every moment of a commit with sinks at which its process may die, in their order.
STEPS = [
    "commit.after_look",
    "commit.after_init",
    "commit.after_token",
    "commit.after_settle",
    "sink.filesystem.before_manifest",
    "commit.within_prepare",
    "commit.after_prepare",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
    "sink.filesystem.within_gather",
    "sink.filesystem.before_rename",
    "commit.within_finish",
    "commit.after_finish",
    "commit.before_cleanup",
]


class Everywhere:
    """A scenario whose rows go to two folders too."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.folders = [scenario.folder / name for name in ("archive", "copy")]

    @property
    def sink(self) -> Mapping[str, str]:
        options = {"sinks": "archive,copy"}
        for folder in self.folders:
            options |= {
                f"sink.{folder.name}.type": "filesystem",
                f"sink.{folder.name}.path": str(folder),
            }
        return options

    def verdict(self) -> None:
        """Same batches everywhere, once; nothing half done is left."""
        found = self.scenario.outcome()
        assert found.exactly_once, found
        sent = sorted(self.scenario.sent)
        for folder in self.folders:
            assert sorted(_rows(folder)) == sent, folder.name
            assert not [each for each in folder.glob("_kafka_eos/*/prepared/*.json")]
            assert not [each for each in folder.glob("_kafka_eos/*/staged/*")]


def _rows(folder: Path) -> list[tuple[str, str]]:
    tables = [pq.ParquetFile(file).read() for file in committed_files(str(folder))]
    return [
        (key.decode(), value.decode())
        for table in tables
        for key, value in zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    ]


@pytest.fixture
def everywhere(scenario: Scenario) -> Everywhere:
    return Everywhere(scenario)


@pytest.mark.fault("T49", "the process is killed", "at each step of a commit with two sinks")
def test_t49_killed_at_every_step(everywhere: Everywhere) -> None:
    """One query, killed at its second batch, again and again, each time a step later."""
    scenario = everywhere.scenario
    for step in STEPS:
        scenario.feed(60)
        armed = f"{step}=kill-worker@{scenario.once(step)}"
        killed = scenario.start(armed, sink=everywhere.sink)
        assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
    scenario.run(sink=everywhere.sink)
    everywhere.verdict()
