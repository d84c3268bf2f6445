"""A scenario whose rows also go to two external sinks, and the check that each system holds each row once."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from integration.chaos.scenario import Scenario
from kafka_eos_source.sinks.filesystem import committed_files


class Everywhere:
    """A scenario whose rows also go to a folder and a database.

    Attributes:
        folder: target folder of the sink ``archive``.
        url: SQLAlchemy URL of the sink ``warehouse``, which writes the table ``orders``.
    """

    def __init__(self, scenario: Scenario, url: str | None = None) -> None:
        self.scenario = scenario
        self.folder = scenario.folder / "archive"
        self._file = scenario.folder / "warehouse.db"
        self.url = url or f"sqlite:///{self._file}"

    @property
    def sink(self) -> Mapping[str, str]:
        return {
            "sinks": "archive,warehouse",
            "sink.archive.type": "filesystem",
            "sink.archive.path": str(self.folder),
            "sink.warehouse.type": "sql",
            "sink.warehouse.url": self.url,
            "sink.warehouse.table": "orders",
        }

    def verdict(self) -> None:
        """Checks that each system holds each row once, and that no temporary work is left."""
        found = self.scenario.outcome()
        assert found.exactly_once, found
        sent = sorted(self.scenario.sent)
        assert sorted(self.archived()) == sent
        assert sorted(self.stored()) == sent
        assert not self.prepared(), "staged, prepared or gathered files or rows are left"

    def prepared(self) -> list[Path]:
        """Returns what no reader of the sinks sees: files of the folder, and rows for the database."""
        files = [each for each in self.folder.glob("_kafka_eos/*/*/*") if each.parent.name != "committed"]
        rows = self.scenario.checkpoint.glob("kafka-eos/sinks/*/*")
        return sorted((*files, *rows))

    def archived(self) -> list[tuple[str, str]]:
        files = committed_files(str(self.folder))
        return [row for file in files for row in pairs(pq.ParquetFile(file).read())]

    def stored(self) -> list[tuple[str, str]]:
        with sqlite3.connect(self._file) as connection:
            return [
                (key.decode(), value.decode())
                for key, value in connection.execute("SELECT key, value FROM orders")
            ]


def pairs(table: pa.Table) -> list[tuple[str, str]]:
    """Returns key and value of each row."""
    columns = [table.column(name).to_pylist() for name in ("key", "value")]
    return [(key.decode(), value.decode()) for key, value in zip(*columns, strict=True)]
