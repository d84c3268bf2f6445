"""The SQL sink on real servers, put to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from integration.support.databases import MariaDb, Postgres, PostgresAlone, Server
from kafka_eos_source.testing.sinks import SinkConformance, System


class _OnServer(SinkConformance):
    kind: ClassVar[type[Server]]
    depth: ClassVar[int] = 2
    most_kills: ClassVar[int] = 6

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        server = cls.kind()
        yield server
        server.close()

    @pytest.fixture
    def system(self, server: Server, tmp_path: Path) -> System:
        from kafka_eos_source.sinks.sql import SqlSink

        table = server.new_table()
        more = {"mode": "upsert", "keys": ("id",)} if self.upserts else {}
        return System(
            sink=lambda: SqlSink(server.url, table, **more),  # type: ignore[arg-type]
            visible=lambda: server.rows(table),
            store=str(tmp_path / "store"),
        )


class TestPostgres(_OnServer):
    kind = Postgres


@pytest.mark.long
class TestPostgresUpsert(_OnServer):
    kind = Postgres
    upserts = True
    most_kills = 2


@pytest.mark.long
class TestPostgresWithoutPreparedTransactions(_OnServer):
    kind = PostgresAlone
    most_kills = 3


@pytest.mark.long
class TestMariaDb(_OnServer):
    kind = MariaDb
    most_kills = 4
