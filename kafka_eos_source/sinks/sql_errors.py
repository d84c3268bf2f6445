"""What an error of a database means: a row that it refuses, a failure that may pass, or work for a person.

Only the codes decide, because texts depend on the language of the server: SQLSTATE for Postgres, and for
drivers that pass it on; the error numbers of MySQL and MariaDB; SQLite's result codes. Other databases are
judged by the class of the error that Python's database API prescribes (PEP 249).

An error that is not about rows never makes the sink look for a row: a lost connection, a lock, a deadlock, a
conflict of transactions, a full disk, a missing right or table.

The texts of databases quote values of the refused row, and of other rows. What is said about a row is
therefore put together here, from the names of constraints and columns; only what a trigger says on purpose is
passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kafka_eos_source.sinks.contract import Fatal, Outcome, Retryable, RowRefusal


class RowRefusedError(Exception):
    """A row cannot be written, as this package finds itself.

    Attributes:
        column: name of the column; "" if no single one is to blame.
        depends_on_rows: as in `Meaning`.
    """

    def __init__(self, why: str, column: str = "", *, depends_on_rows: bool = False) -> None:
        super().__init__(why)
        self.column = column
        self.depends_on_rows = depends_on_rows


class Kind(Enum):
    """What an error means for the batch."""

    ROW = "row"  #: the database refuses a row, and would refuse it again
    LATER = "later"  #: the same call may succeed later
    PERSON = "person"  #: a person must act


@dataclass(frozen=True)
class Meaning:
    """The meaning of one error.

    Attributes:
        kind: what it means for the batch.
        why: cause, as text for people. About a row, it contains no values.
        fix: what a person can do.
        column: about a row: the column that is to blame; "" if the database does not say so.
        constraint: about a row: name of the constraint that it violates; "" if the database does not say so.
        row: number of the row in the statement, from 0; None if the database does not say so. Not exact,
            because Postgres counts lines.
        depends_on_rows: about a row: whether another row of the batch, which comes later, may cure it.
    """

    kind: Kind
    why: str
    fix: str = ""
    column: str = ""
    constraint: str = ""
    row: int | None = None
    depends_on_rows: bool = False

    def refusal(self, table: Any) -> RowRefusal:
        """Returns why a row is refused.

        Args:
            table: SQLAlchemy table, as loaded from the database; has the columns of constraints.
        """
        if self.column or not (columns := _columns_of(table, self.constraint)):
            in_frame = {each.name: each.key for each in table.columns}
            return RowRefusal(self.why, in_frame.get(self.column, self.column))
        why = f"{self.why}, which has the columns {', '.join(map(repr, columns))}"
        return RowRefusal(self.why, columns[0]) if len(columns) == 1 else RowRefusal(why)

    def outcome(self, table: str) -> Outcome:
        """Returns the outcome of a call that failed with this error."""
        why = f"the database cannot write to the table {table!r}: {self.why}"
        return Retryable(why) if self.kind is Kind.LATER else Fatal(why, self.fix)


#: What a person can do about rows that the database refuses.
FIX_ROWS = "correct the rows or the table, then restart the query."
_FIX_OTHER = (
    "correct the database or the options of the sink, then restart the query; it writes the batch again."
)
_FIX_RIGHT = "grant the user of the URL the right to write to the table, then restart the query."
_FIX_TABLE = "create the table again, or correct the option 'table', then restart the query."
_SHOWN_CHARACTERS = 200


def meaning_of(error: Exception, dialect: Any = None) -> Meaning:
    """Returns what an error means.

    Args:
        error: error of SQLAlchemy, or of a driver.
        dialect: SQLAlchemy dialect of the connection; recognises a lost connection.
    """
    if isinstance(error, RowRefusedError):
        return Meaning(Kind.ROW, str(error), FIX_ROWS, error.column, depends_on_rows=error.depends_on_rows)
    original: Any = getattr(error, "orig", None) or error
    if getattr(error, "connection_invalidated", False) or _is_lost(original, dialect):
        return Meaning(Kind.LATER, driver_text(error))
    number = _number(original)
    if (state := _sqlstate(original)) is not None:
        found = _by_sqlstate(original, state)
    elif type(original).__module__.partition(".")[0] == "sqlite3":
        found = _of_sqlite(original)
    elif number is not None:
        found = _of_mysql(original, number)
    else:
        found = None
    return found or _by_class(error, original)


def _columns_of(table: Any, constraint: str) -> list[str]:
    """Returns the frame's columns of a constraint or unique index, as far as SQLAlchemy knows them."""
    if not constraint:
        return []
    of_table = [*table.constraints, *table.indexes]
    found = next((each for each in of_table if each.name == constraint), None)
    if found is None and constraint == "PRIMARY":  # of MySQL
        found = table.primary_key
    return [] if found is None else [each.key for each in found.columns]


def driver_text(error: Exception) -> str:
    """Returns the error text of the database's driver.

    SQLAlchemy's own text is not used, because it includes the statement and its rows.
    """
    original = getattr(error, "orig", None) or error
    message = re.sub(r"\s+", " ", str(original)).strip()
    return f"{type(original).__name__}: {message}"


def _is_lost(original: Any, dialect: Any) -> bool:
    if dialect is None or not isinstance(original, dialect.loaded_dbapi.Error):
        return False
    return bool(dialect.is_disconnect(original, None, None))


def _by_class(error: Exception, original: Any) -> Meaning:
    """Judges an error by its class in Python's database API, for databases whose codes are not known."""
    names = {each.__name__ for cls in (type(error), type(original)) for each in cls.__mro__}
    if names & {"DataError", "IntegrityError"}:
        why = f"has a value that the database refuses ({type(original).__name__})"
        return Meaning(Kind.ROW, why, FIX_ROWS)
    if str(original).endswith(_NOT_A_NUMBER):
        return Meaning(Kind.ROW, "is NaN or infinite", FIX_ROWS)
    if ("StatementError" in names and "DBAPIError" not in names) or isinstance(original, _OF_VALUES):
        # the driver, or SQLAlchemy, cannot pass the value on
        text = f"has a value that the Python driver of the database cannot take ({type(original).__name__})"
        return Meaning(Kind.ROW, text, FIX_ROWS)
    if names & {"OperationalError", "InterfaceError", "InternalError", "TimeoutError"}:
        return Meaning(Kind.LATER, driver_text(error))
    return Meaning(Kind.PERSON, driver_text(error), _FIX_OTHER)


#: PyMySQL says this of NaN and the infinities.
_NOT_A_NUMBER = "can not be used with MySQL"
#: What Python raises for a value that a driver cannot convert.
_OF_VALUES = (OverflowError, ValueError)


# -- SQLSTATE ------------------------------------------------------------------------------------

#: Classes of SQLSTATE about rows: cardinality (one upsert changes a row twice), data, integrity constraints,
#: what functions and triggers raise, the check option of a view, limits such as the size of an index entry.
_OF_ROWS = frozenset({"09", "21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0"})
#: Of these classes, what is not about rows.
_NOT_OF_ROWS = frozenset({"54011", "54023"})
#: Connection, transaction rollback (deadlock, serialization), resources (disk, memory), locks, the
#: administrator (shutdown, statement_timeout), the operating system.
_FOR_LATER = frozenset({"08", "40", "53", "55", "57", "58"})
#: The other classes that Postgres and the standard define. A function of the user's raised any further one.
_OTHER = frozenset(f"{number:02}" for number in (0, 1, 2, 3, 10, 20, 24, 25, 26, 28, 34, 42, 72)) | frozenset(
    ("0A", "0B", "0F", "0L", "0P", "0Z", "2B", "2D", "3B", "3D", "3F", "F0", "HV", "HY", "HZ", "IM", "XX")
)
_STATE_TEXTS: Mapping[str, str] = {
    "22001": "a text is too long for its column",
    "22003": "a number is out of the range of its column",
    "22007": "a text is not a date or time",
    "22008": "a date or time is out of range",
    "22021": "a text contains a character, or bytes, that the database cannot store",
    "22P05": "a text contains a character that the database cannot store",
    "22P02": "a text is not a value of its column's type",
    "22P03": "bytes are not a value of its column's type",
    "22004": "a value is null",
}
#: "COPY table, line 17".
_COPY_LINE = re.compile(r"^COPY .+?, \w+ ([0-9]{1,9})(?:, \w+ |:|$)", re.MULTILINE)
#: ", column name: ", after the number of the line, in the context of an error of COPY.
_COPY_COLUMN = re.compile(r"^COPY .*, \w+ \d+, \w+ ([^:\n]{1,63})(?::|$)", re.MULTILINE)


def _sqlstate(original: Any) -> str | None:
    """Returns the SQLSTATE that the driver passes on; None if it passes none on."""
    for name in ("sqlstate", "pgcode"):
        found = getattr(original, name, None)
        if isinstance(found, str) and len(found) == 5 and not _number(original):
            return found
    first = original.args[0] if getattr(original, "args", ()) else None
    if isinstance(first, dict) and isinstance(first.get("C"), str):  # pg8000
        return str(first["C"])
    if isinstance(first, str) and re.fullmatch(r"[0-9A-Z]{5}", first) and first[0].isdigit():  # pyodbc
        return first
    return None


def _by_sqlstate(original: Any, state: str) -> Meaning | None:
    details = getattr(original, "diag", None)

    def named(name: str) -> str:
        return str(getattr(details, name, None) or "")

    kind = state[:2]
    is_policy = state == "42501" and named("source_function") == "ExecWithCheckOptions"
    if kind in _FOR_LATER:
        return Meaning(Kind.LATER, driver_text(original))
    if kind == "42" and not is_policy:
        fix = {"42501": _FIX_RIGHT, "42P01": _FIX_TABLE}.get(state, _FIX_OTHER)
        return Meaning(Kind.PERSON, driver_text(original), fix)
    if not is_policy and (state in _NOT_OF_ROWS or (kind not in _OF_ROWS and kind in _OTHER)):
        return None
    column = named("column_name")
    if not column and (found := _COPY_COLUMN.search(named("context"))):
        column = found[1]
    constraint = named("constraint_name")
    if kind == "23" or state == "22004":
        why = _violated(state, constraint, column)
    elif is_policy:
        why = "violates a row-level security policy"
    elif kind == "44":
        why = "violates the check option of the view"
    elif kind in ("54", "P0") or kind not in _OF_ROWS:
        # texts about limits contain sizes only; those of triggers are meant for whoever writes the row
        why = f"the database says {_shown(named('message_primary'))!r}"
    else:
        why = _STATE_TEXTS.get(state, "the database cannot store a value")
    line = _COPY_LINE.search(named("context"))
    row = None if line is None else int(line[1]) - 1
    why = f"{why} (SQLSTATE {state})"
    return Meaning(Kind.ROW, why, FIX_ROWS, column, constraint, row, depends_on_rows=state == "23503")


def _violated(state: str, constraint: str, column: str) -> str:
    name = f" {constraint!r}" if constraint else ""
    what = f"the column {column!r}" if column else "the type of its column"
    return {
        "23502": f"is null, but {what} is NOT NULL",
        "22004": f"is null, but {what} is NOT NULL",
        "23503": f"violates the foreign key{name}",
        "23505": f"violates the unique constraint{name}",
        "23514": f"violates the check constraint{name}",
        "23P01": f"violates the exclusion constraint{name}",
    }.get(state, f"violates the constraint{name}")


def _shown(text: str) -> str:
    text = "".join(each if each.isprintable() else " " for each in text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# -- MySQL and MariaDB ---------------------------------------------------------------------------

#: Texts by the error numbers of MySQL and MariaDB about rows; {0}, {1} are the names in the server's text.
_MYSQL_ROWS: Mapping[int, str] = {
    **dict.fromkeys((1022, 1062, 1169, 1586, 1859), "violates the unique key {0}"),
    **dict.fromkeys((1216, 1452, 1761, 1762), "violates the foreign key {0}"),
    **dict.fromkeys((1217, 1451), "would change a row to which the foreign key {0} refers"),
    **dict.fromkeys((1048, 1263), "is null, but the column is NOT NULL"),
    **dict.fromkeys((1264, 1690), "a number is out of the range of its column"),
    **dict.fromkeys((1406,), "a value is too long for its column"),
    **dict.fromkeys(
        (1265, 1292, 1366, 1367, 1411, 1416, 1441), "a value is not one of its column's type, or out of range"
    ),
    **dict.fromkeys((1300, 3854, 3988), "a text contains a character that the column cannot store"),
    **dict.fromkeys((3819, 4025), "violates the check constraint {0}"),
    **dict.fromkeys((*range(3140, 3159), *range(4035, 4045)), "a text is not JSON that the database reads"),
    **dict.fromkeys((1526, 1748), "belongs to no partition of the table"),
    1118: "is too large for a row of the table",
    1365: "a generated column or trigger divides by zero",
    1364: "lacks the value of a column without a default",
}
_MYSQL_FOREIGN_KEYS = frozenset({1216, 1452})
#: SIGNAL of a trigger.
_MYSQL_SIGNAL = 1644
_MYSQL_RIGHTS = frozenset({1044, 1142, 1143, 1227, 1370})
_MYSQL_TABLES = frozenset({1051, 1109, 1146})
_MYSQL_CONSTRAINTS: Sequence[re.Pattern[str]] = (
    re.compile(r"CONSTRAINT `([^`]+)`"),
    re.compile(r"Check constraint '([^']+)' is violated"),
    re.compile(r"for key '([^']+)'$"),
)
_MYSQL_COLUMNS: Sequence[re.Pattern[str]] = (
    re.compile(r"column (?:`[^`]*`\.)*`([^`]+)` at row"),
    re.compile(r"(?:column|Column) '([^']+)' (?:at row|cannot be null)"),
    re.compile(r"FOREIGN KEY \(`([^`]+)`\)"),
)


def _number(original: Any) -> int | None:
    """Returns the number of an error of a MySQL driver; None if it has none."""
    first = original.args[0] if getattr(original, "args", ()) else None
    found = getattr(original, "errno", None) or first
    return found if type(found) is int else None


def _of_mysql(original: Any, number: int) -> Meaning | None:
    text = str(original.args[1]) if len(original.args) > 1 else str(original)
    if number == _MYSQL_SIGNAL:
        return Meaning(Kind.ROW, f"the database says {_shown(text)!r}", FIX_ROWS)
    if number in _MYSQL_ROWS:
        constraint = _first(_MYSQL_CONSTRAINTS, text).rpartition(".")[2]  # often with the table before it
        column = _first(_MYSQL_COLUMNS, text)
        why = " ".join(_MYSQL_ROWS[number].format(repr(constraint) if constraint else "").split())
        depends = number in _MYSQL_FOREIGN_KEYS
        return Meaning(
            Kind.ROW, f"{why} (error {number})", FIX_ROWS, column, constraint, depends_on_rows=depends
        )
    if number in _MYSQL_RIGHTS:
        return Meaning(Kind.PERSON, driver_text(original), _FIX_RIGHT)
    if number in _MYSQL_TABLES:
        return Meaning(Kind.PERSON, driver_text(original), _FIX_TABLE)
    if type(original).__name__ in ("DataError", "IntegrityError"):
        return Meaning(Kind.ROW, f"the database refuses a value (error {number})", FIX_ROWS)
    return None


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> str:
    return next((found[1] for each in patterns if (found := each.search(text))), "")


# -- SQLite --------------------------------------------------------------------------------------

#: SQLite's primary result codes: a constraint, a value that is too large, a type that does not match.
_SQLITE_CONSTRAINT, _SQLITE_ROWS = 19, frozenset({18, 19, 20})
_SQLITE_FOREIGN_KEY, _SQLITE_TRIGGER = 787, 1811
_SQLITE_TEXT = re.compile(r"(UNIQUE|CHECK|NOT NULL) constraint failed: (.+)", re.DOTALL)
_SQLITE_STRICT = re.compile(r"cannot store (\w+) value in (\w+) column (.+)", re.DOTALL)


def _of_sqlite(original: Any) -> Meaning | None:
    code = getattr(original, "sqlite_errorcode", None)  # since Python 3.11
    is_of_rows = (
        code & 0xFF in _SQLITE_ROWS
        if code is not None
        else type(original).__name__ in ("IntegrityError", "DataError")
    )
    text = str(original)
    if not is_of_rows:
        is_missing = text.startswith("no such table")
        return Meaning(Kind.PERSON, driver_text(original), _FIX_TABLE) if is_missing else None
    column = ""
    if found := _SQLITE_TEXT.fullmatch(text):
        what, names = found[1], _shown(found[2])
        if what == "NOT NULL":
            column = names.rpartition(".")[2]
            why = f"is null, but the column {column!r} is NOT NULL"
        elif what == "UNIQUE":
            columns = [each.rpartition(".")[2] for each in names.split(", ")]
            column = columns[0] if len(columns) == 1 else ""
            why = f"violates the unique constraint on {', '.join(map(repr, columns))}"
        else:
            why = f"violates the check constraint {names!r}"
    elif found := _SQLITE_STRICT.fullmatch(text):
        column = _shown(found[3]).rpartition(".")[2]
        why = f"is of the type {found[1]}, which a column of the type {found[2]} of a STRICT table refuses"
    elif code == _SQLITE_FOREIGN_KEY or text == "FOREIGN KEY constraint failed":
        return Meaning(Kind.ROW, "violates a foreign key", FIX_ROWS, depends_on_rows=True)
    elif code == _SQLITE_TRIGGER:  # RAISE(ABORT, …)
        why = f"the database says {_shown(text)!r}"
    else:
        why = "a value does not fit the column's type, or is too large"
    return Meaning(Kind.ROW, why, FIX_ROWS, column)
