"""Rows that a database refuses, on SQLite: rules of the table, and the search for refused rows."""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import InvalidSchemaError, SinkFailedError, SinkRetryableError
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    RowRefusal,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.row_checks import NotNull, RowRule, Utf8
from kafka_eos_source.testing.sinks import Given, System, deadline, new_txn, opened, stage

sa = pytest.importorskip("sqlalchemy")

from kafka_eos_source.sinks import sql_rows  # noqa: E402
from kafka_eos_source.sinks.sql_rules import JsonText, LongestTextOfMySql, ReadAsText  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sink.db"


@pytest.fixture
def _foreign_keys() -> Iterator[None]:
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


def system(file: Path, **options: Any) -> System:
    return System(
        sink=lambda: constructors.sql(f"sqlite:///{file}", "rows", **options).build(),
        visible=list,
        store=str(file.parent / "store"),
    )


def prepared(sink: TwoPhaseSink, rows: pa.Table, tasks: int = 2) -> Outcome:
    return sink.prepare(new_txn(), stage(sink, rows, tasks=tasks), deadline())


def refused(outcome: Outcome) -> dict[int, RowRefusal]:
    assert isinstance(outcome, Refused), outcome
    return dict(sorted(outcome.rows.items()))


def numbers(*values: int | None) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


# -- names of columns ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"]}])
def test_the_letter_case_of_names_does_not_matter(file: Path, options: dict[str, Any]) -> None:
    run(file, "CREATE TABLE rows (id INTEGER NOT NULL, Name TEXT, PRIMARY KEY (id), CHECK (Name <> 'bad'))")
    rows = pa.table({"ID": [1, 2, 3], "NAME": ["a", "b", "bad"]})
    with opened(system(file, **options)) as sink:
        sink.check(rows.schema, deadline())
        sink.make_ready(rows.schema, deadline())
        assert broken(sink, pa.table({"ID": pa.array([1, None], pa.int64()), "NAME": ["a", "b"]})) == set()
        assert list(refused(prepared(sink, rows))) == [2]
        twice = pa.table({"ID": [1, 1], "NAME": ["a", "b"]})
        if options:
            txn = new_txn()
            assert isinstance(sink.prepare(txn, stage(sink, twice), deadline()), Ok)
        else:
            assert refused(prepared(sink, twice))[1].column == "ID"
            txn = new_txn()
            assert isinstance(sink.prepare(txn, stage(sink, rows.slice(1, 1), tasks=1), deadline()), Ok)
        assert sink.commit(txn, deadline()) == OK
    assert run(file, "SELECT * FROM rows") == ([(1, "b")] if options else [(2, "b")])


def test_two_columns_of_the_frame_for_one_of_the_table_are_refused(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER)")
    rows = pa.table({"id": [1], "ID": [2]})
    with opened(system(file)) as sink, pytest.raises(InvalidSchemaError, match="'id' and 'ID' are both 'id'"):
        sink.make_ready(rows.schema, deadline())


# -- the search ------------------------------------------------------------------------------------


def test_all_rows_that_violate_constraints_are_named_and_nothing_is_prepared(file: Path) -> None:
    run(
        file,
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT NOT NULL, amount REAL CHECK (amount < 10))",
        "INSERT INTO rows VALUES (3, 'secret of another row', 0)",
    )
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3, 4, 5, 4], pa.int64()),
            "name": ["a", "b", "c", None, "private", "f"],
            "amount": [1.0, 2.0, 3.0, 4.0, 12345.0, 6.0],
        }
    )
    with opened(system(file)) as sink:
        sink.make_ready(rows.schema, deadline())
        assert sink.refuses_rows
        found = refused(prepared(sink, rows))
        assert found == {
            2: RowRefusal("violates the unique constraint on 'id'", "id"),
            3: RowRefusal("is null, but the column 'name' is NOT NULL", "name"),
            4: RowRefusal("violates the check constraint 'amount < 10'"),
        }, "the row with the number 5 has the key of one that is refused"
        assert list(sink.recover(deadline())) == []
        good = rows.filter(pa.array([at not in found for at in range(rows.num_rows)]))
        txn = new_txn()
        assert sink.prepare(txn, stage(sink, good), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert run(file, "SELECT id FROM rows ORDER BY id") == [(1,), (2,), (3,), (4,)]


def test_of_two_rows_that_exclude_each_other_the_first_stays(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER PRIMARY KEY)")
    rows = numbers(*range(50), *range(40, 90), 7)
    for _ in range(2):  # the second time as after a restart
        with opened(system(file)) as sink:
            assert list(refused(prepared(sink, rows))) == [*range(50, 60), 100]


def test_a_trigger_says_why_it_refuses_a_row(file: Path) -> None:
    run(
        file,
        "CREATE TABLE rows (id INTEGER)",
        "CREATE TRIGGER no BEFORE INSERT ON rows WHEN NEW.id = 4 BEGIN SELECT RAISE(ABORT, 'no fours'); END",
    )
    with opened(system(file)) as sink:
        assert refused(prepared(sink, numbers(3, 4, 5))) == {1: RowRefusal("the database says 'no fours'")}


@pytest.mark.usefixtures("_foreign_keys")
@pytest.mark.parametrize("deferred", ["DEFERRABLE INITIALLY DEFERRED", ""])
def test_a_row_may_refer_to_one_that_comes_later_in_the_batch(file: Path, deferred: str) -> None:
    """Row 0 refers to the last one, 2 to none, and 3 to 2. Another error makes the sink search."""
    table = f"CREATE TABLE rows (id INTEGER PRIMARY KEY, up INTEGER REFERENCES rows (id) {deferred})"
    run(file, table, "INSERT INTO rows VALUES (100, NULL)")
    rows = pa.table(
        {
            "id": pa.array([0, 1, 2, 3, 100, 5], pa.int64()),
            "up": pa.array([5, 0, 99, 2, None, None], pa.int64()),
        }
    )
    with opened(system(file)) as sink:
        found = refused(prepared(sink, rows))
        assert {at: each.why.partition(" on ")[0] for at, each in found.items()} == {
            2: "violates a foreign key",
            3: "violates a foreign key",
            4: "violates the unique constraint",
        }


@pytest.mark.usefixtures("_foreign_keys")
def test_a_foreign_key_that_was_broken_before_is_not_the_batchs_fault(file: Path) -> None:
    run(
        file,
        "CREATE TABLE names (name TEXT PRIMARY KEY)",
        "CREATE TABLE rows (id INTEGER, name TEXT REFERENCES names (name) DEFERRABLE INITIALLY DEFERRED)",
        "PRAGMA foreign_keys = OFF",
        "INSERT INTO rows VALUES (0, 'gone')",
        "INSERT INTO names VALUES ('a')",
    )
    with opened(system(file)) as sink:
        assert prepared(sink, pa.table({"id": [1], "name": ["a"]})) == OK


def test_if_the_last_row_of_a_key_is_refused_the_one_before_it_counts(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT CHECK (name <> 'bad'))")
    rows = pa.table(
        {
            "id": pa.array([0, 1, 1, 1, 2, 2, 3], pa.int64()),
            "name": ["a", "stays", "bad", "bad", "bad", "bad", "b"],
        }
    )
    with opened(system(file, mode="upsert", keys=["id"])) as sink:
        found = refused(prepared(sink, rows))
        assert list(found) == [2, 3, 4, 5], "all at once, although a search sees one row of a key at a time"
        txn, good = new_txn(), rows.filter(pa.array([at not in found for at in range(rows.num_rows)]))
        assert sink.prepare(txn, stage(sink, good), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert run(file, "SELECT * FROM rows ORDER BY id") == [(0, "a"), (1, "stays"), (3, "b")]


def test_a_batch_that_is_refused_only_as_a_whole_is_prepared(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sql_rows.write_rows

    def once(*arguments: Any) -> None:
        monkeypatch.setattr("kafka_eos_source.sinks.sql.write_rows", whole)
        raise sa.exc.IntegrityError("", None, sqlite3.IntegrityError("of the whole batch"))

    monkeypatch.setattr("kafka_eos_source.sinks.sql.write_rows", once)
    with opened(system(file)) as sink:
        txn = new_txn()
        assert sink.prepare(txn, stage(sink, numbers(1, 2, 3)), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert len(run(file, "SELECT * FROM rows")) == 3


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"]}])
def test_a_time_beyond_pythons_calendar_is_refused_with_its_column(
    file: Path, options: dict[str, Any]
) -> None:
    run(file, "CREATE TABLE rows (id INTEGER PRIMARY KEY, at TIMESTAMP)")
    far = pa.array([0, 1_800_000_000_000_000_000], pa.timestamp("us"))
    rows = pa.table({"id": [1, 2], "at": far})
    with opened(system(file, **options)) as sink:
        sink.make_ready(rows.schema, deadline())
        why = RowRefusal("has a value for which Python has no object", "at")
        assert refused(prepared(sink, rows)) == {1: why}
        assert broken(sink, rows) == {1}


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"]}])
def test_a_search_ends_when_enough_rows_are_found(file: Path, options: dict[str, Any]) -> None:
    run(file, "CREATE TABLE rows (id INTEGER PRIMARY KEY CHECK (id < 5))")
    with opened(system(file, **options)) as sink:
        sink.open(replace(sink.context, enough_refused=3))
        sink.make_ready(numbers().schema, deadline())
        assert list(refused(prepared(sink, numbers(*range(100)), tasks=20))) == [5, 6, 7]
        assert prepared(sink, numbers(*range(5))).__class__ is Ok, "nothing is left of the search"


@pytest.mark.usefixtures("_foreign_keys")
def test_a_row_that_a_later_one_may_cure_does_not_end_the_search(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER PRIMARY KEY, up INTEGER REFERENCES rows (id))")
    rows = pa.table({"ID": [5, 4, 3, 2, 9], "Up": [4, 3, 2, None, 99]})
    with opened(system(file)) as sink:
        sink.open(replace(sink.context, enough_refused=3))
        sink.make_ready(rows.schema, deadline())
        assert list(refused(prepared(sink, rows, tasks=5))) == [4]


def test_a_search_that_takes_too_long_is_an_error_with_the_first_rows(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = classmethod(lambda cls, until, enough: cls(until, most_tries=30, enough=enough))
    monkeypatch.setattr(sql_rows.Division, "within", short)
    run(file, "CREATE TABLE rows (id INTEGER CHECK (id < 0))")
    with opened(system(file)) as sink:
        sink.make_ready(numbers().schema, deadline())
        outcome = prepared(sink, numbers(*range(1000)))
        assert isinstance(outcome, Fatal)
        assert "row 0: violates the check constraint 'id < 0'" in outcome.why
        assert "commitTimeoutMs" in outcome.why
        assert "commitTimeoutMs" in outcome.fix
        sink.open(replace(sink.context, enough_refused=100))
        assert refused(prepared(sink, numbers(*range(1000)))), "the first rows, if they fail the batch"
        assert list(sink.recover(deadline())) == []


@pytest.mark.parametrize(("code", "kind"), [("SQLITE_BUSY", Retryable), ("SQLITE_FULL", Retryable)])
def test_an_error_that_is_not_about_rows_ends_the_search(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type
) -> None:
    run(file, "CREATE TABLE rows (id INTEGER CHECK (id < 5))")
    write, calls = sql_rows._write, []

    def fail(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            error = sqlite3.OperationalError("out of order")
            error.sqlite_errorcode = getattr(sqlite3, code, 13)  # type: ignore[misc]
            raise sa.exc.OperationalError("", None, error)
        write(*arguments)

    monkeypatch.setattr(sql_rows, "_write", fail)
    with opened(system(file)) as sink:
        outcome = sink.prepare(new_txn(), stage(sink, numbers(*range(10)), tasks=1), deadline())
        assert isinstance(outcome, kind)
        assert "'rows'" in outcome.why
        assert len(calls) == 4
        assert list(sink.recover(deadline())) == []
        assert prepared(sink, numbers(1)) == OK, "the transaction was rolled back"


# -- errors that are not about rows ----------------------------------------------------------------


def test_errors_name_the_table_and_what_to_do(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER)")
    with opened(system(file)) as sink:
        sink.make_ready(numbers().schema, deadline())
        run(file, "DROP TABLE rows")
        outcome = prepared(sink, numbers(1))
        assert isinstance(outcome, Fatal)
        assert "cannot write to the table 'rows'" in outcome.why
        assert "no such table" in outcome.why
        assert "create the table" in outcome.fix
        with sqlite3.connect(file, isolation_level="EXCLUSIVE") as other:
            other.execute("BEGIN EXCLUSIVE")
            sink._engine.dispose()  # type: ignore[attr-defined]
            sink._engine = sa.create_engine(f"sqlite:///{file}", connect_args={"timeout": 0})  # type: ignore[attr-defined]
            assert isinstance(prepared(sink, numbers(1)), Retryable)
            with pytest.raises(SinkRetryableError, match=r"'rows'.*locked"):
                sink.row_rules(numbers().schema, deadline())
            other.rollback()
    file.write_bytes(b"no database" * 100)
    with opened(system(file)) as sink, pytest.raises(SinkFailedError, match=r"'rows'.*not a database"):
        sink.make_ready(numbers().schema, deadline())


@pytest.mark.parametrize(
    ("column", "values", "wanted"),
    [
        ("v BLOB", pa.array(["a"]), "is BLOB"),
        ("v DATE", pa.array(["2026-01-31"]), "is DATE"),
        ("v BOOLEAN", pa.array(["true"]), "is BOOLEAN"),
        ("v INTEGER GENERATED ALWAYS AS (id + 1)", pa.array([1]), "computes the column 'v' itself"),
    ],
)
def test_a_column_that_refuses_every_value_is_an_error_at_the_start(
    file: Path, column: str, values: pa.Array, wanted: str
) -> None:
    run(file, f"CREATE TABLE rows (id INTEGER, {column})")
    rows = pa.table({"id": [1], "v": values})
    with opened(system(file)) as sink:
        with pytest.raises(InvalidSchemaError, match=wanted):
            sink.make_ready(rows.schema, deadline())
        with pytest.raises(InvalidSchemaError, match=wanted):
            sink.check(rows.schema, deadline())


# -- rules -----------------------------------------------------------------------------------------


def broken(sink: TwoPhaseSink, rows: pa.Table) -> set[int]:
    """Returns the rows that break a rule of the sink."""
    found: set[int] = set()
    for rule in sink.row_rules(rows.schema, deadline()):
        wrong = rule.broken(rows[rule.column].combine_chunks())
        found.update(at for at, each in enumerate(wrong.to_pylist()) if each)
    return found


_BAD = pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff", b"a", b"b"], pa.binary()).buffers())


@pytest.mark.parametrize(
    ("columns", "rows", "wanted"),
    [
        ("id INTEGER PRIMARY KEY, v INTEGER", {"id": [1, None, 3], "v": [None, 1, 2]}, []),
        ("id INTEGER NOT NULL, v TEXT", {"id": [1, None, 3], "v": ["a", "b", "c\0"]}, [1]),
        ("id INTEGER, v VARCHAR(2)", {"id": [1, 2, 3], "v": ["abc", "äöü", "a"]}, []),
        ("id SMALLINT, v NUMERIC(2, 1)", {"id": [1 << 40, 2, 3], "v": [1e9, float("nan"), 1.0]}, []),
        ("id INTEGER, v TEXT", {"id": [1, 2, 3], "v": _BAD}, [0]),
        ("id INTEGER, v TEXT", {"id": [1, 2, 3], "v": [b"\xff", b"a", None]}, [0]),
        ("id INTEGER, v BLOB", {"id": [1, 2, 3], "v": [b"\xff", b"a", None]}, []),
    ],
)
def test_a_rule_is_broken_by_exactly_the_rows_that_the_database_refuses(
    file: Path, columns: str, rows: dict[str, Any], wanted: list[int]
) -> None:
    """SQLite stores nearly everything, whatever its columns say."""
    run(file, f"CREATE TABLE rows ({columns})")
    frame = pa.table(rows)
    with opened(system(file)) as sink:
        sink.make_ready(frame.schema, deadline())
        assert sorted(broken(sink, frame)) == wanted
        outcome = prepared(sink, frame)
        assert (list(refused(outcome)) if isinstance(outcome, Refused) else []) == wanted


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 37), reason="SQLite has no STRICT tables")
def test_a_strict_table_refuses_values_of_other_types(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER, v INTEGER) STRICT")
    rows = pa.table({"id": [1, 2, 3], "v": ["1", "x", "3.5"]})
    with opened(system(file)) as sink:
        sink.make_ready(rows.schema, deadline())
        sink.row_rules(rows.schema, deadline())
        assert sink.refuses_rows
        found = refused(prepared(sink, rows))
    assert list(found) == [1, 2]
    assert found[1].column == "v"
    assert "TEXT, which a column of the type INTEGER of a STRICT table refuses" in found[1].why


@pytest.mark.parametrize(
    ("definition", "refuses"),
    [
        ("CREATE TABLE rows (id INTEGER, name TEXT NOT NULL)", False),
        ("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT)", True),
        ("CREATE TABLE rows (id INTEGER UNIQUE, name TEXT)", True),
        ("CREATE TABLE rows (id INTEGER CHECK (id > 0), name TEXT)", True),
    ],
)
def test_a_table_whose_rules_say_everything_refuses_no_rows_later(
    file: Path, definition: str, refuses: bool
) -> None:
    run(file, definition)
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    with opened(system(file)) as sink:
        assert sink.refuses_rows, "nobody has looked at the table yet"
        sink.make_ready(schema, deadline())
        rules = sink.row_rules(schema, deadline())
        assert sink.refuses_rows is refuses
        assert Utf8(column="name", of="text of table 'rows'") in rules
        run(file, "CREATE UNIQUE INDEX later ON rows (id)")
        sink.row_rules(schema, deadline())
        assert sink.refuses_rows, "somebody added a constraint"


def test_rules_follow_a_changed_table(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER NOT NULL)")
    with opened(system(file)) as sink:
        sink.make_ready(numbers().schema, deadline())
        assert NotNull(column="id", of="NOT NULL in table 'rows'") in sink.row_rules(
            numbers().schema, deadline()
        )
        run(file, "DROP TABLE rows", "CREATE TABLE rows (id INTEGER)")
        assert list(sink.row_rules(numbers().schema, deadline())) == []
        run(file, "DROP TABLE rows", "CREATE TABLE rows (other INTEGER)")
        with pytest.raises(InvalidSchemaError, match="no column 'id'"):
            sink.row_rules(numbers().schema, deadline())


@pytest.mark.parametrize(
    ("document", "json", "jsonb"),
    [
        ('{"a": [1, "x", null, true, 1e400]}', False, False),
        ("1", False, False),
        (' "x" ', False, False),
        (f"{'[' * 5000}{']' * 5000}", False, False),
        ("", True, True),
        ("x", True, True),
        ('{"a":NaN}', True, True),
        ('{"a":1}{"b":2}', True, True),
        ('"a\nb"', True, True),
        ('{"a":"\\u0000"}', False, True),
        ('{"a\\u0000":1}', False, True),
        ('{"a":"\\\\u0000"}', False, False),
        ('{"a":"\\\\\\u0000"}', False, True),
    ],
)
def test_json_text(document: str, json: bool, jsonb: bool) -> None:
    column = pa.array(["{}", document, None, "[]"])
    for without_nul, wanted in ((False, json), (True, jsonb)):
        rule = JsonText(column="v", without_nul=without_nul)
        assert rule.broken(column).to_pylist() == [False, wanted, False, False]


def test_json_text_that_is_not_utf8_is_none() -> None:
    assert JsonText(column="v").broken(_BAD).to_pylist() == [True, True, True]


def test_bytes_are_checked_as_the_text_that_they_become() -> None:
    rule: RowRule = LongestTextOfMySql(column="v", most=2)
    values = pa.array([b"abc", "äö".encode(), b"\xff\xff\xff", None, b"ab \t\n"])
    assert ReadAsText(column="v", rule=rule).broken(values).to_pylist() == [True, False, False, False, False]
    assert ReadAsText(column="v", rule=Utf8(column="v")).broken(values).to_pylist()[2]


# -- dates for COPY --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("day", "text"),
    [
        (0, "1970-01-01"),
        (-719_162, "0001-01-01"),
        (-719_163, "0001-12-31 BC"),
        (-719_163 - 366, "0002-12-31 BC"),
        (-2_440_588, "4714-11-24 BC"),
        (2_932_897, "10000-01-01"),
        (2_145_042_905, "5874897-12-31"),
    ],
)
def test_dates_of_all_years_are_written_as_postgres_reads_them(day: int, text: str) -> None:
    dates = sql_rows._dates(pa.array([day, None, 2_932_897], pa.int32()).cast(pa.date32()))
    assert dates.to_pylist() == [text, None, "10000-01-01"]


def test_times_of_all_years_are_written_as_postgres_reads_them() -> None:
    at = pa.array([-1, 253_402_300_800_000_001, -62_135_596_800_000_001], pa.timestamp("us", "UTC"))
    assert sql_rows._dates(at).to_pylist() == [
        "1969-12-31 23:59:59.999999+00",
        "10000-01-01 00:00:00.000001+00",
        "0001-12-31 23:59:59.999999+00 BC",
    ]
    plain = pa.array([datetime.datetime(1, 1, 1), datetime.datetime.max], pa.timestamp("us"))
    assert sql_rows._dates(plain) is plain


def test_the_rows_of_all_tasks_are_numbered_in_one_order(file: Path) -> None:
    run(file, "CREATE TABLE rows (id INTEGER CHECK (id < 100))")
    parts = [numbers(1, 500).to_batches(), numbers().to_batches(), numbers(2, 3, 600).to_batches()]
    staged = Given(numbers().schema, 5, parts)
    with opened(system(file)) as sink:
        assert list(refused(sink.prepare(new_txn(), staged, deadline()))) == [1, 4]
