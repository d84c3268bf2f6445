"""Rows that a database or a web service refuses become dead letters, although drivers are killed."""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from integration.chaos.scenario import Scenario
from integration.support.kafka import read_back
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.testing.verdict import judge
from tests.support.http_service import HttpService, running

pytest.importorskip("sqlalchemy")

#: Where the driver is killed.
STEPS = ["sink.sql.within_search", "sink.http.within_search", "commit.after_restage", "commit.after_commit"]
#: Last digits of the values that the database and the service refuse.
OF_DATABASE, OF_SERVICE = "3", "9"

Rows = list[tuple[str, str]]


class Outputs:
    """A scenario with three outputs: Kafka, a table with a constraint, a service that does not name rows."""

    def __init__(self, scenario: Scenario, service: HttpService) -> None:
        self.scenario = scenario
        self.service = service
        self.dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
        self.database = scenario.folder / "warehouse.db"
        check = f"CHECK (substr(CAST(value AS TEXT), -1) <> '{OF_DATABASE}')"
        with sqlite3.connect(self.database) as connection:
            connection.execute(f"CREATE TABLE orders (key BLOB, value BLOB {check})")
        service.refuse(OF_SERVICE, names=0)

    @property
    def sink(self) -> Mapping[str, str]:
        return {
            "onInvalidRecord": "dead-letter",
            "deadLetter.topic": self.dead,
            "sinks": "warehouse,service",
            "sink.warehouse.type": "sql",
            "sink.warehouse.url": f"sqlite:///{self.database}",
            "sink.warehouse.table": "orders",
            "sink.warehouse.columns": "key,value",
            "sink.service.type": "http",
            "sink.service.url": self.service.url,
        }

    def found(self) -> dict[str, Rows]:
        """Returns key and value of the rows in each output, and of the dead letters."""
        found = {
            name: [_text(each.key, each.value) for each in read_back(self.scenario.bootstrap, topic)]
            for name, topic in (("kafka", self.scenario.sink), ("letters", self.dead))
        }
        with sqlite3.connect(self.database) as connection:
            found["warehouse"] = [_text(*row) for row in connection.execute("SELECT key, value FROM orders")]
        lines = [json.loads(line) for body in self.service.committed() for line in body.splitlines()]
        found["service"] = [_text(*(base64.b64decode(each[at]) for at in ("key", "value"))) for each in lines]
        return found


def _text(key: bytes | None, value: bytes | None) -> tuple[str, str]:
    return (key or b"").decode(), (value or b"").decode()


@pytest.fixture
def outputs(scenario: Scenario, tmp_path: Path) -> Iterator[Outputs]:
    with running(tmp_path / "service") as service:
        yield Outputs(scenario, service)


@pytest.mark.fault("T486", "the driver is killed", "a sink looks for the rows that a system refuses")
def test_rows_that_real_systems_refuse_leave_all_outputs_although_the_driver_is_killed(
    outputs: Outputs,
) -> None:
    scenario = outputs.scenario
    for step in STEPS:
        scenario.feed(40)
        killed = scenario.start(f"{step}=kill-worker@{scenario.once(step)}", sink=outputs.sink)
        assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
    scenario.run(sink=outputs.sink)
    bad = (OF_DATABASE, OF_SERVICE)
    wanted = {
        True: [each for each in scenario.sent if not each[1].endswith(bad)],
        False: [each for each in scenario.sent if each[1].endswith(bad)],
    }
    for name, rows in outputs.found().items():
        found = judge(wanted[name != "letters"], rows)
        assert found.exactly_once, (name, found)
    for each in read_back(scenario.bootstrap, outputs.dead):
        about, value = DeadLetter.parse(each.headers or ()), (each.value or b"").decode()
        assert about.error == "RefusedBySink"
        assert about.sink == ("warehouse" if value.endswith(OF_DATABASE) else "service")
        assert ("check constraint" if about.sink == "warehouse" else "HTTP 422") in str(about.message)
    assert not list(scenario.checkpoint.glob("kafka-eos/sinks/*/*")), "prepared rows are left"
    prepared = list((outputs.service.folder / "prepared").iterdir())
    assert not prepared, "the service still holds a part of a batch"
