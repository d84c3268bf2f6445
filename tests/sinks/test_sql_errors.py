"""What the errors of databases mean, by their codes, and what is said about a refused row."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.sinks.contract import Fatal, Retryable, RowRefusal

sa = pytest.importorskip("sqlalchemy")

from kafka_eos_source.sinks.sql_errors import Kind, RowRefusedError, meaning_of  # noqa: E402

SECRET = "4711-of-another-row"
TABLE = sa.Table(
    "orders",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("a", sa.Integer),
    sa.Column("b", sa.Integer),
    sa.UniqueConstraint("a", name="orders_a_key"),
    sa.UniqueConstraint("a", "b", name="orders_ab_key"),
)


_ROWS = "22001 22003 22P02 22021 21000 23505 23514 23P01 44000 54000 54001 P0001 P0004 KE001 U0001"
_LATER = "08006 40001 40P01 53100 53200 55P03 57014 57P01"
_PERSON = "42501 42P01 42703 42846 54011 XX000 0A000 28P01 25006 3D000 F0000 HV000 55000"
#: Of MySQL and MariaDB.
_NUMBERS_OF_ROWS = (1048, 1062, 1264, 1265, 1292, 1366, 1406, 1452, 1526, 1644, 3140, 3819, 4025)


class PostgresError(Exception):
    """An error as psycopg raises it."""

    def __init__(self, state: str, **details: str) -> None:
        super().__init__(f"text with {SECRET}\nDETAIL:  Key (id)=({SECRET}) already exists.")
        self.sqlstate = state
        self.diag = SimpleNamespace(sqlstate=state, message_primary=f"text with {SECRET}", **details)


def mysql(number: int, text: str = "", kind: str = "OperationalError") -> Exception:
    return type(kind, (Exception,), {})(number, text)  # type: ignore[no-any-return]


def wrapped(original: Exception, kind: Any = None) -> Exception:
    error: Exception = (kind or sa.exc.OperationalError)("INSERT", {"secret": SECRET}, original)
    return error


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        *[(state, Kind.ROW) for state in _ROWS.split()],
        *[(state, Kind.LATER) for state in _LATER.split()],
        *[(state, Kind.PERSON) for state in _PERSON.split()],
    ],
)
def test_sqlstates(state: str, kind: Kind) -> None:
    """With the class of SQLAlchemy's error that psycopg's has, unless the code does not decide."""
    assert meaning_of(wrapped(PostgresError(state), sa.exc.ProgrammingError)).kind is kind
    assert meaning_of(PostgresError(state)).kind is kind, "COPY raises the driver's own error"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *[
            (each, Kind.ROW)
            for each in (1048, 1062, 1264, 1265, 1292, 1366, 1406, 1452, 1526, 1644, 3140, 3819, 4025)
        ],
        *[(each, Kind.ROW) for each in (1139, 1242, 1365, 3691, 3903)],
        *[(each, Kind.LATER) for each in (1021, 1040, 1114, 1205, 1213, 2006, 2013)],
        *[(each, Kind.PERSON) for each in (1044, 1142, 1146)],
    ],
)
def test_error_numbers_of_mysql_and_mariadb(number: int, kind: Kind) -> None:
    """PyMySQL has one class, OperationalError, for what it does not know."""
    assert meaning_of(wrapped(mysql(number, SECRET))).kind is kind
    error = mysql(number, SECRET)
    error.sqlstate = "23000"  # type: ignore[attr-defined]
    assert meaning_of(error).kind is kind


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            PostgresError("23505", constraint_name="orders_pkey"),
            RowRefusal("violates the unique constraint 'orders_pkey' (SQLSTATE 23505)"),
        ),
        (
            PostgresError("23505", constraint_name="orders_a_key"),
            RowRefusal("violates the unique constraint 'orders_a_key' (SQLSTATE 23505)", "a"),
        ),
        (
            PostgresError("23505", constraint_name="orders_ab_key"),
            RowRefusal(
                "violates the unique constraint 'orders_ab_key' (SQLSTATE 23505), "
                "which has the columns 'a', 'b'"
            ),
        ),
        (
            PostgresError("23502", column_name="a"),
            RowRefusal("is null, but the column 'a' is NOT NULL (SQLSTATE 23502)", "a"),
        ),
        (
            PostgresError("22003", context=f'COPY my, line 1 table, line 17, column a: "{SECRET}"'),
            RowRefusal("a number is out of the range of its column (SQLSTATE 22003)", "a"),
        ),
        (
            PostgresError("22021", context=f'COPY orders, Zeile 3: "{SECRET}"'),
            RowRefusal(
                "a text contains a character, or bytes, that the database cannot store (SQLSTATE 22021)"
            ),
        ),
        (
            PostgresError("42501", source_function="ExecWithCheckOptions"),
            RowRefusal("violates a row-level security policy (SQLSTATE 42501)"),
        ),
        (
            mysql(1062, f"Duplicate entry '{SECRET}' for key 'orders.orders_a_key'"),
            RowRefusal("violates the unique key 'orders_a_key' (error 1062)", "a"),
        ),
        (
            mysql(1062, f"Duplicate entry '{SECRET}' for key 'PRIMARY'"),
            RowRefusal("violates the unique key 'PRIMARY' (error 1062)", "id"),
        ),
        (
            mysql(1452, f"{SECRET} (`d`.`t`, CONSTRAINT `fk` FOREIGN KEY (`a`) REFERENCES `n` (`x`))"),
            RowRefusal("violates the foreign key 'fk' (error 1452)", "a"),
        ),
        (
            mysql(1366, f"Incorrect integer value: '{SECRET}' for column `d`.`t`.`b` at row 3"),
            RowRefusal("a value is not one of its column's type, or out of range (error 1366)", "b"),
        ),
        (
            mysql(4025, "CONSTRAINT `t.b` failed for `d`.`t`"),
            RowRefusal("violates the check constraint 'b' (error 4025)"),
        ),
        (
            mysql(3819, "Check constraint 'chk' is violated."),
            RowRefusal("violates the check constraint 'chk' (error 3819)"),
        ),
        (
            mysql(1062, f"eine Meldung in einer anderen Sprache, mit {SECRET}"),
            RowRefusal("violates the unique key (error 1062)"),
        ),
        (
            wrapped(type("IntegrityError", (Exception,), {})(SECRET), sa.exc.IntegrityError),
            RowRefusal("has a value that the database refuses (IntegrityError)"),
        ),
        (
            sa.exc.StatementError("(builtins.TypeError)", "INSERT", SECRET, TypeError(SECRET)),
            RowRefusal("has a value that the Python driver of the database cannot take (TypeError)"),
        ),
        (
            wrapped(type("ProgrammingError", (Exception,), {})("nan can not be used with MySQL")),
            RowRefusal("is NaN or infinite"),
        ),
        (
            OverflowError(SECRET),
            RowRefusal("has a value that the Python driver of the database cannot take (OverflowError)"),
        ),
        (RowRefusedError("is not valid UTF-8", "a"), RowRefusal("is not valid UTF-8", "a")),
    ],
)
def test_a_refused_row_is_described_without_values(error: Exception, wanted: RowRefusal) -> None:
    found = meaning_of(error)
    assert found.kind is Kind.ROW
    assert found.refusal(TABLE) == wanted
    assert SECRET not in str(found)


def test_the_words_of_a_trigger_are_passed_on_in_one_short_line() -> None:
    for error in (PostgresError("P0001"), mysql(1644, f"text with {SECRET}")):
        assert f"the database says 'text with {SECRET}'" in meaning_of(error).why
    long = mysql(1644, "line\n" * 1000)
    assert len(meaning_of(long).why) < 300
    assert meaning_of(long).why.isprintable()


def test_the_line_of_copy_is_a_hint() -> None:
    assert meaning_of(PostgresError("23505", context="COPY a, line 17")).row == 16
    assert meaning_of(PostgresError("23505", context="COPY a, line 7, column b: x, line 9")).row == 6
    assert meaning_of(PostgresError("23505", context='COPY a, line 3: "x, line 9"')).row == 2
    assert meaning_of(PostgresError("23505")).row is None


def test_a_lost_connection_is_never_about_rows() -> None:
    error = sa.exc.IntegrityError("", None, PostgresError("23505"), connection_invalidated=True)
    assert meaning_of(error).kind is Kind.LATER


@pytest.mark.parametrize(("error", "kind"), [(mysql(1205), Retryable), (mysql(1142), Fatal)])
def test_other_errors_name_the_table_and_say_what_to_do(error: Exception, kind: type) -> None:
    outcome = meaning_of(wrapped(error)).outcome("orders")
    assert isinstance(outcome, kind)
    assert "the table 'orders'" in outcome.why
    assert not isinstance(outcome, Fatal) or "restart the query" in outcome.fix


def test_sqlite_before_python_3_11_has_no_codes() -> None:
    for error, kind in (
        (sqlite3.IntegrityError("FOREIGN KEY constraint failed"), Kind.ROW),
        (sqlite3.OperationalError("database is locked"), Kind.LATER),
        (sqlite3.OperationalError("no such table: rows"), Kind.PERSON),
    ):
        assert meaning_of(error).kind is kind


def test_postgres_reads_some_values_by_a_parser_that_complains_about_syntax() -> None:
    for file in ("tsquery.c", "jsonpath_scan.l", "src/backend/utils/adt/tsquery.c"):
        error = PostgresError("42601", source_file=file)
        why = "a text is not a value that the database can read (SQLSTATE 42601)"
        assert meaning_of(error).refusal(TABLE) == RowRefusal(why)
    assert meaning_of(PostgresError("42601", source_file="scan.l")).kind is Kind.PERSON


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        *[
            (code, text, Kind.LATER)
            for code, text in [
                (5, "database is locked"),
                (517, "database is locked"),  # BUSY_SNAPSHOT
                (6, "database table is locked: rows"),
                (10, "disk I/O error"),
                (778, "disk I/O error"),  # IOERR_WRITE
                (13, "database or disk is full"),
                (14, "unable to open database file"),
            ]
        ],
        (8, "attempt to write a readonly database", Kind.PERSON),
        (1, "no such table: main.rows", Kind.PERSON),
        (1, "malformed JSON", Kind.STATEMENT),
        (1, f"bad JSON path: {SECRET}", Kind.STATEMENT),
        (11, "database disk image is malformed", Kind.PERSON),
    ],
)
def test_result_codes_of_sqlite(code: int, text: str, kind: Kind) -> None:
    name = "DatabaseError" if code == 11 else "OperationalError"
    error = getattr(sqlite3, name)(text)
    of_sqlalchemy = getattr(sa.exc, name)
    assert meaning_of(wrapped(error, of_sqlalchemy)).kind is kind, "by the text, before Python 3.11"
    error.sqlite_errorcode = code
    found = meaning_of(wrapped(error, of_sqlalchemy))
    assert found.kind is kind
    assert SECRET not in found.why
    assert isinstance(found.outcome("rows"), Retryable if kind is Kind.LATER else Fatal)
