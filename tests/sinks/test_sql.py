"""The SQL sink on SQLite: deferred constraints, names, the ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, Refused, RowRefusal, SinkContext, SinkTxn
from kafka_eos_source.testing.sinks import ROWS, System, deadline, new_txn, opened, stage

sa = pytest.importorskip("sqlalchemy")

from kafka_eos_source.sinks.sql_transactions import MySql, gid_of, txn_of  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sink.db"


@pytest.fixture
def _foreign_keys() -> Iterator[None]:
    """Makes SQLite check foreign keys, which it does not do by default."""

    def switch_on(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")

    sa.event.listen(sa.Engine, "connect", switch_on)
    yield
    sa.event.remove(sa.Engine, "connect", switch_on)


def run(file: Path, *statements: str) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    with sqlite3.connect(file) as connection:
        for statement in statements:
            found = connection.execute(statement).fetchall()
    return found


def system(file: Path, **options: object) -> System:
    return System(
        sink=lambda: constructors.sql(f"sqlite:///{file}", "rows", **options).build(),  # type: ignore[arg-type]
        visible=list,
        store=str(file.parent / "store"),
    )


@pytest.mark.usefixtures("_foreign_keys")
def test_a_violated_deferred_constraint_is_found_before_kafka_commits(file: Path) -> None:
    run(
        file,
        "CREATE TABLE names (name TEXT PRIMARY KEY)",
        "CREATE TABLE rows (id INTEGER, name TEXT REFERENCES names (name) DEFERRABLE INITIALLY DEFERRED)",
        "INSERT INTO names VALUES ('a')",
    )
    good, bad = (pa.table({"id": [number], "name": [name]}) for number, name in ((1, "a"), (2, "b")))
    with opened(system(file)) as sink:
        first, second = new_txn(1), new_txn(2)
        assert sink.prepare(first, stage(sink, good), deadline()) == OK
        assert sink.commit(first, deadline()) == OK
        outcome = sink.prepare(second, stage(sink, bad), deadline())
        assert outcome == Refused({0: RowRefusal("violates a foreign key")})
        assert list(sink.recover(deadline())) == []
    assert run(file, "SELECT id FROM rows") == [(1,)]


def test_a_database_that_may_refuse_at_the_commit_is_reported(file: Path) -> None:
    with opened(system(file)) as sink:
        sink.make_ready(ROWS.schema, deadline())
        (risk,) = sink.risks()
    assert "sqlite has no prepared transactions" in risk
    assert "two.phase=require" in risk


def test_the_ledger_records_sequence_number_and_sink(file: Path) -> None:
    txn = new_txn(12)
    with opened(system(file)) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    found = run(file, "SELECT application_id, sink, sequence, row_count FROM kafka_eos_ledger")
    assert found == [("conformance", "conformance", 12, 5)]


def test_transaction_names_are_short_enough_and_can_be_parsed() -> None:
    context = SinkContext("s" * 32, "a" * 500, "c" * 200)
    txn = context.txn(2**63 - 1, SinkTxn.new_attempt())
    name = gid_of(txn)
    assert len(name.encode()) <= 64, "all that XA takes"
    assert txn_of(context, name) == txn
    for other in ({"name": "other"}, {"application_id": "other"}, {"cluster_id": "other"}):
        assert txn_of(replace(context, **other), name) is None


def test_other_programs_may_name_their_xa_transactions_with_any_bytes() -> None:
    class Server:
        def exec_driver_sql(self, _statement: str) -> list[tuple[object, ...]]:
            return [(1, 2, 0, b"\xff\xfe"), (1, 40, 0, b"keos_0123456789abcdef_7_0123456789abcdef0123")]

    found = MySql().prepared(Server())
    assert found[1:] == ["keos_0123456789abcdef_7_0123456789abcdef0123"]
