"""A row that one output refuses leaves all outputs, and becomes one dead letter, whatever is killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from integration.chaos.everywhere import pairs
from integration.chaos.scenario import Scenario
from integration.support.kafka import read_back
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.testing.verdict import judge

pytest.importorskip("sqlalchemy")

#: Where the driver is killed: while it stages rows again, and around both commits after that.
STEPS = [
    "commit.after_refusal",
    "commit.within_roll_back",
    "commit.before_restage",
    "stage.before_close",
    "commit.after_restage",
    "commit.within_prepare",
    "commit.before_commit",
    "commit.after_commit",
    "commit.within_finish",
]


class Outputs:
    """A scenario with four outputs: Kafka, a folder, a database, and a database that refuses rows."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
        self.folder = scenario.folder / "archive"
        self.database = scenario.folder / "warehouse.db"

    @property
    def sink(self) -> Mapping[str, str]:
        return {
            "onInvalidRecord": "dead-letter",
            "deadLetter.topic": self.dead,
            # the sink that refuses rows is the last, so that the others have prepared the batch
            "sinks": "archive,warehouse,picky",
            "sink.archive.type": "filesystem",
            "sink.archive.path": str(self.folder),
            "sink.warehouse.type": "sql",
            "sink.warehouse.url": f"sqlite:///{self.database}",
            "sink.warehouse.table": "orders",
            "sink.picky.type": "integration.chaos.picky:Picky",
            "sink.picky.url": f"sqlite:///{self.database}",
            "sink.picky.table": "picky",
            "sink.picky.ledger.table": "picky_ledger",
            "staging.inline.bytes": "1000",
        }

    def killed_at_each(self, steps: Sequence[str], **spec: object) -> None:
        for step in steps:
            self.scenario.feed(60)
            at = f"{step}=kill-worker@{self.scenario.once(step)}"
            killed = self.scenario.start(at, sink=self.sink, **spec)
            assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
        self.scenario.feed(60)
        self.scenario.run(sink=self.sink, **spec)

    def found(self) -> dict[str, list[tuple[str, str]]]:
        """Returns key and value of the rows in each output, and of the dead letters."""
        topics = {"kafka": self.scenario.sink, "letters": self.dead}
        found = {
            name: [
                ((each.key or b"").decode(), (each.value or b"").decode())
                for each in read_back(self.scenario.bootstrap, topic)
            ]
            for name, topic in topics.items()
        }
        found["archive"] = [
            row for each in committed_files(str(self.folder)) for row in pairs(pq.ParquetFile(each).read())
        ]
        with sqlite3.connect(self.database) as connection:
            for name, table in (("warehouse", "orders"), ("picky", "picky")):
                found[name] = [
                    (key.decode(), value.decode())
                    for key, value in connection.execute(f"SELECT key, value FROM {table}")
                ]
        return found

    def verdict(self) -> None:
        """Checks that each output has each good row once, and the dead-letter topic each other row once."""
        sent = self.scenario.sent
        wanted = {
            True: [each for each in sent if is_good(each)],
            False: [each for each in sent if not is_good(each)],
        }
        for name, rows in self.found().items():
            found = judge(wanted[name != "letters"], rows)
            assert found.exactly_once, (name, found)
        for each in read_back(self.scenario.bootstrap, self.dead):
            about = DeadLetter.parse(each.headers)
            value = (each.value or b"").decode()
            assert about.error == ("InvalidRecord" if value.endswith("5") else "RefusedBySink"), about
            assert about.sink == "picky"
        left = [*self.scenario.checkpoint.glob("kafka-eos/sinks/*/*"), *self.staged()]
        assert not left, "staged or prepared rows are left"

    def staged(self) -> list[Path]:
        return sorted(self.scenario.checkpoint.glob("kafka-eos/staging/[0-9]*/*.arrow"))


def is_good(row: tuple[str, str]) -> bool:
    return row[1][-1] not in "359"


@pytest.fixture
def outputs(scenario: Scenario) -> Outputs:
    return Outputs(scenario)


@pytest.mark.fault("T481", "the driver is killed around the refusal of rows by a sink", "steps of the commit")
def test_t481_refused_rows_leave_all_outputs_although_the_driver_is_killed_at_every_step(
    outputs: Outputs,
) -> None:
    outputs.killed_at_each(STEPS)
    outputs.verdict()


@pytest.mark.fault("T482", "the same, of rows that the reading tasks staged", "steps of the commit")
def test_t482_refused_rows_that_reading_tasks_staged_leave_all_outputs(outputs: Outputs) -> None:
    outputs.killed_at_each(
        ["commit.before_restage", "commit.after_restage", "commit.after_commit"], in_read=True
    )
    outputs.verdict()


@pytest.mark.fault(
    "T483", "a driver is paused when it has staged rows again, and another one takes over", "commit"
)
def test_t483_a_paused_driver_that_staged_rows_again_commits_nothing(outputs: Outputs) -> None:
    scenario = outputs.scenario
    scenario.feed(100)
    zombie = scenario.stopped_at("commit.after_restage", sink=outputs.sink)
    scenario.run(sink=outputs.sink)
    zombie.resume()
    zombie.wait()
    scenario.feed(50)
    scenario.run(sink=outputs.sink)
    outputs.verdict()


@pytest.mark.fault("T484", "somebody changes the kept rows of a batch before they are staged again", "commit")
def test_t484_kept_rows_that_were_changed_are_not_staged_again(outputs: Outputs) -> None:
    scenario = outputs.scenario
    scenario.feed(100)
    sink = {**outputs.sink, "staging.inline.bytes": "0"}
    stopped = scenario.stopped_at("commit.after_refusal", sink=sink)
    for each in outputs.staged():
        each.write_bytes(each.read_bytes().replace(b"000001", b"666666"))
    stopped.resume()
    assert stopped.wait() == 1
    assert "STAGED_PART_DAMAGED" in stopped.log.read_text(), stopped.tail()
    scenario.run(sink=sink)
    outputs.verdict()


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_refused_rows_that_stay_in_the_part_for_kafka_are_noticed(outputs: Outputs) -> None:
    """Proves that the tests above notice a refused row in another output."""
    outputs.scenario.feed(60)
    outputs.scenario.run(sink=outputs.sink, mutations=["stage again for Kafka"])
    found = outputs.found()
    assert judge([each for each in outputs.scenario.sent if is_good(each)], found["picky"]).exactly_once
    refused = [each for each in outputs.scenario.sent if each[1][-1] in "39"]
    assert sorted(set(refused) & set(found["kafka"])) == sorted(refused)
    with pytest.raises(AssertionError, match="kafka"):
        outputs.verdict()
