"""The SQL sink passes the sink contract tests on real PostgreSQL and MariaDB servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

from integration.support.databases import MariaDb, Postgres, PostgresAlone, Server
from integration.support.processes import await_condition
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, Fatal, Refused, Retryable
from kafka_eos_source.sinks.specs import parse
from kafka_eos_source.sinks.watched import check_targets
from kafka_eos_source.testing.sinks import ROWS, SinkConformance, System, deadline, new_txn, opened, stage


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

        table = server.new_table()
        more = {"mode": "upsert", "keys": ("id",)} if self.upserts else {}
        key = "PRIMARY KEY" if self.upserts else ""
        server.run(
            f"CREATE TABLE {table} (id BIGINT {key}, name TEXT, amount DOUBLE PRECISION, CHECK (id < 100))"
        )
        return System(
            sink=lambda: constructors.sql(server.url, table, **more).build(),  # type: ignore[arg-type]
            visible=lambda: server.rows(table),
            store=str(tmp_path / "store"),
            poison=pa.table({"id": [100, 101], "name": ["a", "b"], "amount": [0.0, 1.0]}),
        )

    @pytest.mark.fault(
        "T445", "a wrong login, schema, table, column or right of a database", "a query is started"
    )
    def test_a_check_names_what_is_wrong_and_leaves_no_trace(self, server: Server, system: System) -> None:
        """Also while another process has a batch prepared, whose locks the check must not wait for."""
        table, txn = server.new_table(), new_txn()
        before = server.tables()

        def check(columns: tuple[str, ...] = ("id", "name", "amount"), **options: object) -> str:
            sink = constructors.sql(**{"url": server.url, "table": table, **options})  # type: ignore[arg-type]
            (spec,) = parse(["db"], sink.options("db"))
            found = check_targets([(spec, ROWS.select(columns).schema)]).get("db")
            return "" if found is None else str(found)

        assert check() == ""
        refused = check(url=server.wrong_password())
        assert "SINK_UNAVAILABLE" in refused
        assert "option 'sink.db.url'" in refused
        assert "hunter2" not in refused
        assert "option 'sink.db.schema'" in check(schema="no_such_schema")
        assert "there is no table" in check(create=False)
        assert server.tables() == before, "the check created a table"
        server.run(f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, name VARCHAR(80))")
        assert check(("id", "name")) == ""
        assert check(("id", "name"), mode="upsert", keys="id") == ""
        assert "has no column 'amount'" in check()
        assert "no primary key or unique constraint" in check(("id", "name"), mode="upsert", keys="name")
        if isinstance(server, Postgres):
            server.run(f"GRANT SELECT ON {table} TO guarded")
            refused = check(("id", "name"), url=server.wrong_password().replace("hunter2", "swordfish"))
            assert f"no right to INSERT into the table {table}" in refused
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
            assert check(table=_table_of(system)) == ""
            assert list(sink.recover(deadline())) == [txn]
            assert sink.commit(txn, deadline()) == OK
        assert server.rows(table) == []


class TestPostgres(_OnServer):
    kind = Postgres

    def test_a_deferred_constraint_is_checked_by_prepare(self, server: Server, system: System) -> None:
        check_prepare_finds_violated_constraint(server, system)

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_a_prepared_transaction_is_resolved_after_two_phase_was_set_to_never(
        self, server: Server, tmp_path: Path, end: str
    ) -> None:
        check_two_phase_never_resolves_prepared_transactions(server, tmp_path, end)

    @pytest.mark.parametrize("kind", ["citext", "char(8)", 'text COLLATE "ignores_case"'])
    def test_of_keys_that_are_equal_for_the_database_the_last_row_wins(
        self, server: Server, tmp_path: Path, kind: str
    ) -> None:
        check_the_last_row_wins(server, tmp_path, kind)


@pytest.mark.long
class TestPostgresUpsert(_OnServer):
    kind = Postgres
    upserts = True
    most_kills = 2


@pytest.mark.long
class TestPostgresWithoutPreparedTransactions(_OnServer):
    kind = PostgresAlone
    most_kills = 3

    def test_a_deferred_constraint_is_checked_by_prepare(self, server: Server, system: System) -> None:
        check_prepare_finds_violated_constraint(server, system)


@pytest.mark.long
class TestMariaDb(_OnServer):
    kind = MariaDb
    most_kills = 4

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_a_prepared_transaction_is_resolved_after_two_phase_was_set_to_never(
        self, server: Server, tmp_path: Path, end: str
    ) -> None:
        check_two_phase_never_resolves_prepared_transactions(server, tmp_path, end)

    @pytest.mark.parametrize("creates", ["sink", "user"])
    def test_a_key_of_zero_stays_zero(self, server: Server, tmp_path: Path, creates: str) -> None:
        check_a_key_of_zero_stays_zero(server, tmp_path, creates)

    @pytest.mark.parametrize("listed", [True, False])
    def test_the_sink_waits_for_a_slow_commit_of_a_fenced_driver(
        self, server: Server, system: System, monkeypatch: pytest.MonkeyPatch, listed: bool
    ) -> None:
        """While a zombie's XA COMMIT hangs in the server, the batch is retried and does not count as lost.

        Some servers no longer list the transaction's id at that point.
        """
        import sqlalchemy as sa

        from kafka_eos_source.sinks import sql as module
        from kafka_eos_source.sinks import sql_transactions

        txn, ended = new_txn(), []
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        engine = sa.create_engine(server.url, poolclass=sa.pool.NullPool)

        def commit() -> None:
            with opened(system) as zombie:
                ended.append(zombie.commit(txn, deadline()))

        thread = threading.Thread(target=commit)
        with engine.connect() as lock:
            lock.exec_driver_sql("FLUSH TABLES WITH READ LOCK")  # commits wait for it
            thread.start()
            await_condition(lambda: _is_committing(server), 30, "the zombie's XA COMMIT is running")
            monkeypatch.setattr(module, "_END_SECONDS", 1)
            if not listed:
                monkeypatch.setattr(sql_transactions.MySql, "prepared", lambda *_: [])
            with opened(system) as sink:
                outcome = sink.commit(txn, deadline())
            assert isinstance(outcome, Retryable), f"the batch is being committed, not lost: {outcome}"
            lock.exec_driver_sql("UNLOCK TABLES")
        thread.join()
        monkeypatch.undo()
        assert ended == [OK]
        with opened(system) as sink:
            assert sink.commit(txn, deadline()) == OK
        assert self.times(system) == 1

    def test_a_table_without_transactions_is_refused_at_the_start(
        self, server: Server, system: System
    ) -> None:
        with opened(system) as sink:
            table = _table_of(system)
            server.run(f"ALTER TABLE {table} ENGINE = MyISAM")
            with pytest.raises(InvalidSchemaError, match="MyISAM, which has no transactions"):
                sink.make_ready(ROWS.schema, deadline())


def _is_committing(server: Server) -> bool:
    found = server.run("SELECT state FROM information_schema.processlist WHERE info LIKE 'XA COMMIT%%'")
    return any("backup lock" in str(state) for (state,) in found)


def check_prepare_finds_violated_constraint(server: Server, system: System) -> None:
    """A deferred constraint fails in prepare, not at the database's commit after Kafka has the batch."""
    names, table = server.new_table(), _table_of(system)
    server.run(
        f"CREATE TABLE {names} (name TEXT PRIMARY KEY)",
        f"DROP TABLE {table}",
        f"CREATE TABLE {table} "
        f"(id BIGINT, name TEXT REFERENCES {names} (name) DEFERRABLE INITIALLY DEFERRED)",
        f"INSERT INTO {names} VALUES ('a')",
    )
    good, bad = (pa.table({"id": [number], "name": [name]}) for number, name in ((1, "a"), (2, "b")))
    with opened(system) as sink:
        first, second = new_txn(1), new_txn(2)
        assert sink.prepare(first, stage(sink, good), deadline()) == OK
        assert sink.commit(first, deadline()) == OK
        outcome = sink.prepare(second, stage(sink, bad), deadline())
        assert isinstance(outcome, Refused)
        assert "foreign key" in outcome.rows[0].why
        assert list(sink.recover(deadline())) == []
    assert [row["id"] for row in server.rows(table)] == [1]


def _table_of(system: System) -> str:
    from kafka_eos_source.sinks.sql import SqlSink

    sink = system.sink()
    assert isinstance(sink, SqlSink)
    return sink.table


def check_two_phase_never_resolves_prepared_transactions(server: Server, folder: Path, end: str) -> None:
    """The batch that was prepared in the database is listed and ended, and its locks block no later batch."""

    table = server.new_table()

    def system(two_phase: str) -> System:
        return System(
            sink=lambda: constructors.sql(
                server.url, table, mode="upsert", keys=("id",), two_phase=two_phase
            ).build(),
            visible=lambda: server.rows(table),
            store=str(folder / "store"),
        )

    first, second, third = (new_txn(sequence) for sequence in (1, 2, 3))
    with opened(system("auto")) as sink:
        assert sink.prepare(first, stage(sink, ROWS), deadline()) == OK
        assert sink.commit(first, deadline()) == OK
        assert sink.prepare(second, stage(sink, ROWS.slice(0, 2), tasks=1), deadline()) == OK
    with opened(system("never")) as sink:
        assert list(sink.recover(deadline())) == [second]
        assert getattr(sink, end)(second, deadline()) == OK
        assert list(sink.recover(deadline())) == []
        assert isinstance(sink.commit(second, deadline()), Fatal) is (end == "abort")
        assert sink.prepare(third, stage(sink, ROWS), deadline()) == OK
        assert list(sink.recover(deadline())) == [third]
        assert sink.commit(third, deadline()) == OK
    assert len(server.rows(table)) == ROWS.num_rows


def check_a_key_of_zero_stays_zero(server: Server, folder: Path, creates: str) -> None:
    """MariaDB must not number rows by itself, also where the server is not strict about values."""

    table = server.new_table()
    if creates == "user":
        server.run(
            f"CREATE TABLE {table} (id BIGINT AUTO_INCREMENT PRIMARY KEY, name VARCHAR(3))",
            "SET GLOBAL sql_mode = ''",
        )
    rows = pa.table({"id": pa.array([0, 1], pa.int64()), "name": ["a", "b"]})
    system = System(
        sink=lambda: constructors.sql(server.url, table, mode="upsert", keys=("id",)).build(),
        visible=lambda: server.rows(table),
        store=str(folder / "store"),
    )
    try:
        with opened(system) as sink:
            for sequence in (1, 2):
                txn = new_txn(sequence)
                assert sink.prepare(txn, stage(sink, rows), deadline()) == OK
                assert sink.commit(txn, deadline()) == OK
            if creates == "user":
                long = rows.set_column(1, "name", pa.array(["a", "longer than the column"]))
                assert isinstance(sink.prepare(new_txn(3), stage(sink, long), deadline()), Refused)
    finally:
        server.run("SET GLOBAL sql_mode = DEFAULT")
    assert sorted(row["id"] for row in server.rows(table)) == [0, 1]


def check_the_last_row_wins(server: Server, folder: Path, kind: str, url: str | None = None) -> None:

    table = server.new_table()
    server.run(
        "CREATE EXTENSION IF NOT EXISTS citext",
        "CREATE COLLATION IF NOT EXISTS ignores_case "
        "(provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        f"CREATE TABLE {table} (name {kind} PRIMARY KEY, n bigint)",
    )
    names = ["a", "b", "a  ", "c"] if kind.startswith("char") else ["a", "b", "A", "c"]
    rows = pa.table({"name": names, "n": range(len(names))})
    system = System(
        sink=lambda: constructors.sql(url or server.url, table, mode="upsert", keys=("name",)).build(),
        visible=lambda: server.rows(table),
        store=str(folder / "store"),
    )
    with opened(system) as sink:
        sink.make_ready(rows.schema, deadline())
        txn = new_txn()
        assert sink.prepare(txn, stage(sink, rows, tasks=1), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["n"] for row in server.rows(table)) == [1, 2, 3]
