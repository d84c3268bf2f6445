"""The conformance suite, run against every sink that needs no server."""

from __future__ import annotations

import json
import sqlite3
import uuid
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.sinks import constructors, filesystem_layout
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.sinks.memory import SYSTEMS, MemorySink
from kafka_eos_source.testing.sinks import Rows, SinkConformance, System
from tests.support.row_rules import NOT_UTF8


class TestMemory(SinkConformance):
    @pytest.fixture
    def system(self) -> System:
        name = uuid.uuid4().hex

        def visible() -> Rows:
            memory = SYSTEMS.get(name)
            table = memory.visible() if memory is not None else None
            return [] if table is None else table.to_pylist()

        return System(sink=lambda: MemorySink(name), visible=visible, in_process=True)


class TestFilesystem(SinkConformance):
    kind: ClassVar[str] = "parquet"
    most_kills = 20

    @pytest.fixture
    def system(self, tmp_path: Path) -> System:
        path = str(tmp_path / "sink")

        def visible() -> Rows:
            return [row for file in committed_files(path) for row in _READERS[self.kind](f"/{file}")]

        return System(
            sink=lambda: constructors.files(path, format=self.kind).build(), visible=visible, poison=NOT_UTF8
        )


class TestJsonLines(TestFilesystem):
    """Runs with few kills, because the protocol is the same as for Parquet."""

    kind = "json"
    depth = 1
    most_kills = 3


class TestCsv(TestJsonLines):
    kind = "csv"


class TestFilesystemThatCopies(TestFilesystem):
    """A file system that moves files one by one, as object stores do, so the manifest makes them visible."""

    depth = 2
    most_kills = 20

    @pytest.fixture(autouse=True)
    def _copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = pafs.SubTreeFileSystem("/", pafs.LocalFileSystem())
        monkeypatch.setattr(filesystem_layout, "file_system", lambda path: (store, path.lstrip("/")))


def _json(file: str) -> Rows:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def _csv(file: str) -> Rows:
    convert = pacsv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    options = {"convert_options": convert, "parse_options": pacsv.ParseOptions(newlines_in_values=True)}
    return pacsv.read_csv(file, **options).to_pylist()


_READERS = {"parquet": lambda file: pq.ParquetFile(file).read().to_pylist(), "json": _json, "csv": _csv}


class TestSqlite(SinkConformance):
    """SQLite has no prepared transactions, so prepared rows are in the checkpoint."""

    columns: ClassVar[str] = "id BIGINT CHECK (id < 100), name TEXT CHECK (name <> 'no'), amount DOUBLE"

    depth = 2
    most_kills = 15

    @pytest.fixture
    def system(self, tmp_path: Path) -> System:
        pytest.importorskip("sqlalchemy")

        file = tmp_path / "sink.db"
        with sqlite3.connect(file) as made:
            made.execute(f"CREATE TABLE rows ({self.columns})")

        def visible() -> Rows:
            with sqlite3.connect(file) as connection:
                connection.row_factory = sqlite3.Row
                return [dict(row) for row in connection.execute("SELECT * FROM rows")]

        return System(
            sink=lambda: constructors.sql(f"sqlite:///{file}", "rows").build(),
            visible=visible,
            store=str(tmp_path / "store"),
            poison=pa.table({"id": [100, 50, 101], "name": ["a", "no", "b"], "amount": [0.0, 1.0, 2.0]}),
        )
