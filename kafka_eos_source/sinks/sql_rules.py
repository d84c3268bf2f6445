"""The rules for rows that follow from the columns of a table, as its database applies them.

A rule is never stricter than the database: what depends on a collation, a trigger or the time zone of a
session is left to the database, which refuses the row at `prepare`. SQLite accepts nearly everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.runtime.json_input import is_json
from kafka_eos_source.sinks.row_checks import (
    DecimalFits,
    FloatRange,
    IntegerRange,
    LongestText,
    NotNull,
    OneOf,
    RowRule,
    TimestampRange,
    Utf8,
    UuidText,
    WithoutNul,
    as_binary,
    is_utf8,
)
from kafka_eos_source.sinks.sql_database import is_bytes, is_text, sqlalchemy, without_domain
from kafka_eos_source.sinks.sql_rows import copier
from kafka_eos_source.sinks.table_columns import YEAR_1_US, YEAR_9999_US, year_rules

_POSTGRES, _MYSQL = ("postgresql",), ("mysql", "mariadb")
_DAY_US = 86_400_000_000
#: Postgres: from 4714-11-24 BC to the year 294276, and for dates to 5874897.
_POSTGRES_US = (-2_440_588 * _DAY_US, 9_224_318_016_000_000_000 - 1)
_POSTGRES_DATE_US = (_POSTGRES_US[0], 2_145_042_906 * _DAY_US - 1)
#: TIMESTAMP of MySQL and MariaDB, in any time zone: from 1970 to 2106, the limit of newer servers.
_MYSQL_TIMESTAMP_US = (-_DAY_US, ((1 << 32) + 86_400) * 1_000_000)
#: The greatest double that becomes a finite float.
_MOST_FLOAT = 3.4028235677973366e38
_BITS = {"TINYINT": 8, "SMALLINT": 16, "MEDIUMINT": 24, "INTEGER": 32, "BIGINT": 64}
#: Character sets in which a text takes as many bytes as in UTF-8.
_LIKE_UTF8 = frozenset({"utf8mb4", "utf8mb3", "utf8", "ascii"})


@dataclass(frozen=True)
class TableRules:
    """What is known about the rows that a table refuses.

    Attributes:
        rules: what the tasks check.
        is_complete: whether the database accepts each row that breaks none of them.
    """

    rules: tuple[RowRule, ...]
    is_complete: bool


def table_rules(connection: Any, table: Any, schema: pa.Schema, keys: Sequence[str]) -> TableRules:
    """Returns the rules of a table.

    Args:
        connection: SQLAlchemy connection.
        table: SQLAlchemy table, as loaded from the database.
        schema: schema of the rows.
        keys: key columns of an upsert; empty to append.
    """
    columns = _Columns.of(
        connection, table, copies=not keys and copier(connection.dialect, table) is not None
    )
    rules: list[RowRule] = []
    is_complete = not _may_refuse_more(connection, table)
    for field in schema:
        found = list(columns.rules(field))
        rules += found
        is_complete = is_complete and columns.is_complete(field)
    return TableRules(tuple(rules), is_complete)


@dataclass(frozen=True)
class _Columns:
    """The columns of one table.

    Attributes:
        table: SQLAlchemy table.
        dialect: name of SQLAlchemy's dialect.
        copies: whether rows are sent by COPY.
        fills_nulls: whether a trigger may fill a column before the database looks for nulls.
        lengths: of MySQL and MariaDB: greatest length in characters and bytes, and character set, by column.
        most_bytes: of MySQL and MariaDB: max_allowed_packet.
    """

    table: Any
    dialect: str
    copies: bool
    fills_nulls: bool
    lengths: Mapping[str, tuple[int | None, int | None, str | None]]
    most_bytes: int | None

    @classmethod
    def of(cls, connection: Any, table: Any, *, copies: bool) -> _Columns:
        dialect = connection.dialect.name
        lengths: dict[str, tuple[int | None, int | None, str | None]] = {}
        most_bytes = None
        if dialect in _MYSQL:
            most_bytes = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar())
            statement = sqlalchemy().text(
                "SELECT column_name, character_maximum_length, character_octet_length, character_set_name "
                "FROM information_schema.columns WHERE table_name = :name AND table_schema = "
                "COALESCE(:schema, DATABASE())"
            )
            for name, *of_name in connection.execute(statement, {"name": table.name, "schema": table.schema}):
                lengths[str(name)] = (of_name[0], of_name[1], of_name[2])
        return cls(table, dialect, copies, _fills_nulls(connection, table), lengths, most_bytes)

    def is_complete(self, field: pa.Field) -> bool:
        """Returns whether the database accepts each value of a column that breaks no rule."""
        sa, kind, t = sqlalchemy(), self.table.columns[field.name].type, pa.types
        if self.dialect == "sqlite":
            return True
        if self.dialect not in _POSTGRES:
            return False
        return (
            (t.is_boolean(field.type) and isinstance(kind, sa.Boolean))
            or (t.is_integer(field.type) and isinstance(kind, sa.Integer))
            or (t.is_decimal(field.type) and isinstance(kind, sa.Numeric) and not isinstance(kind, sa.Float))
            or (t.is_floating(field.type) and isinstance(kind, sa.Double))
            or (is_text(field.type) and type(kind).__name__ in ("TEXT", "VARCHAR"))
            or (is_bytes(field.type) and type(kind).__name__ in ("BYTEA", "TEXT", "VARCHAR"))
            or (t.is_timestamp(field.type) and isinstance(kind, sa.DateTime))
            or (t.is_date(field.type) and isinstance(kind, sa.Date))
        )

    def rules(self, field: pa.Field) -> Iterator[RowRule]:
        """Yields the rules for one column."""
        column = self.table.columns[field.name]
        kind, is_not_null = column.type, not column.nullable
        if hasattr(kind, "data_type"):  # a domain of Postgres; its CHECK is left to the database
            is_not_null = is_not_null or bool(kind.not_null)
            kind = without_domain(kind)
        about: dict[str, Any] = {"column": field.name, "of": f"{_shown(kind)} of table {self.table.name!r}"}
        if is_not_null and not self.fills_nulls and not self._numbers(column):
            yield NotNull(column=field.name, of=f"NOT NULL in table {self.table.name!r}")
        t = pa.types
        if is_text(field.type) or (is_bytes(field.type) and not self._holds_bytes(kind)):
            for rule in self._of_text(kind, about):
                yield rule if is_text(field.type) else ReadAsText(column=field.name, of=rule.of, rule=rule)
        elif is_bytes(field.type):
            yield from self._of_length(about, is_for_text=False)
        elif t.is_nested(field.type):
            yield from self._of_nested(field.type, kind, about)
        elif t.is_integer(field.type) or t.is_floating(field.type) or t.is_decimal(field.type):
            yield from self._of_number(field.type, kind, about)
        elif t.is_timestamp(field.type) or t.is_date(field.type):
            yield from self._of_time(field.type, kind, about)

    def _holds_bytes(self, kind: Any) -> bool:
        sa = sqlalchemy()
        return isinstance(kind, sa.LargeBinary | sa.types._Binary)

    def _numbers(self, column: Any) -> bool:
        """Returns whether the database may put a value of its own in the place of null."""
        if self.dialect == "sqlite":
            return bool(column.primary_key)
        if self.dialect in _MYSQL:
            is_time = isinstance(column.type, sqlalchemy().TIMESTAMP)
            return is_time or column.autoincrement is True
        return self.dialect not in _POSTGRES

    def _of_text(self, kind: Any, about: Mapping[str, Any]) -> Iterator[RowRule]:
        sa = sqlalchemy()
        yield Utf8(**about)
        if self.dialect in _POSTGRES:
            yield WithoutNul(**about)
        if isinstance(kind, sa.JSON) and self.dialect in (*_POSTGRES, *_MYSQL):
            yield JsonText(**about, without_nul=type(kind).__name__ == "JSONB")
        elif self.dialect in _POSTGRES:
            if isinstance(kind, sa.Enum):
                yield OneOf(**about, values=tuple(kind.enums))
            elif isinstance(kind, sa.UUID):
                yield UuidText(**about, any_form=True)
            elif isinstance(kind, sa.String) and kind.length:
                yield LongestText(**about, most=kind.length, spaces_count=False)
        yield from self._of_length(about, is_for_text=True)

    def _of_length(self, about: Mapping[str, Any], *, is_for_text: bool) -> Iterator[RowRule]:
        """Yields the rules for the length of a value in MySQL and MariaDB."""
        if self.most_bytes is None:
            return
        characters, most_bytes, charset = self.lengths.get(
            self.table.columns[about["column"]].name, (None, None, None)
        )
        if is_for_text and characters and most_bytes and characters < most_bytes:
            yield LongestTextOfMySql(**about, most=characters)
        elif is_for_text and most_bytes and charset is not None:
            unit: Literal["bytes", "characters"] = "bytes" if charset in _LIKE_UTF8 else "characters"
            yield LongestTextOfMySql(**about, most=most_bytes, unit=unit)
        elif not is_for_text and most_bytes:
            yield LongestText(**about, most=most_bytes, unit="bytes")
        of = "max_allowed_packet of the server"
        yield LongestText(column=about["column"], of=of, most=self.most_bytes, unit="bytes")

    def _of_nested(self, arrow: pa.DataType, kind: Any, about: Mapping[str, Any]) -> Iterator[RowRule]:
        yield Utf8(**about)
        if type(kind).__name__ == "JSONB":
            yield WithoutNul(**about)
        yield from year_rules([pa.field(about["column"], arrow)], about["of"])

    def _of_number(self, arrow: pa.DataType, kind: Any, about: Mapping[str, Any]) -> Iterator[RowRule]:
        sa, is_float = sqlalchemy(), pa.types.is_floating(arrow)
        if self.dialect not in (*_POSTGRES, *_MYSQL):
            return
        if isinstance(kind, sa.Integer) and pa.types.is_integer(arrow):
            bits = next((_BITS[each] for each in _names(kind) if each in _BITS), None)
            if bits is not None and getattr(kind, "unsigned", False):
                yield IntegerRange(**about, low=0, high=(1 << bits) - 1)
            elif bits is not None:
                yield IntegerRange(**about, low=-(1 << (bits - 1)), high=(1 << (bits - 1)) - 1)
        elif isinstance(kind, sa.Float):
            is_single = isinstance(kind, sa.REAL) or type(kind).__name__ == "FLOAT"
            if is_float and (is_single or self.dialect in _MYSQL):
                most = _MOST_FLOAT if is_single and arrow.bit_width == 64 else None
                if most is not None or self.dialect in _MYSQL:
                    yield FloatRange(**about, most=most, finite=self.dialect in _MYSQL)
        elif isinstance(kind, sa.Numeric):
            if is_float and self.dialect in _MYSQL:
                yield FloatRange(**about, finite=True)
            if kind.precision is not None:
                yield DecimalFits(**about, precision=kind.precision, scale=kind.scale or 0)

    def _of_time(self, arrow: pa.DataType, kind: Any, about: Mapping[str, Any]) -> Iterator[RowRule]:
        if self.dialect in _MYSQL and isinstance(kind, sqlalchemy().TIMESTAMP):
            first, last = _MYSQL_TIMESTAMP_US
        elif self.copies:
            is_date = isinstance(kind, sqlalchemy().Date)
            first, last = _POSTGRES_DATE_US if is_date else _POSTGRES_US
        else:
            first, last = YEAR_1_US, YEAR_9999_US  # of Python's calendar: drivers receive objects
        yield TimestampRange(**about, first_us=first, last_us=last)


def _names(kind: Any) -> list[str]:
    return [each.__name__ for each in type(kind).__mro__]


def _shown(kind: Any) -> str:
    """Returns the name of a type, as people write it in SQL."""
    try:
        return (
            str(kind.compile()).lower() if not hasattr(kind, "enums") else f"enum {kind.name or ''}".strip()
        )
    except Exception:  # noqa: BLE001 - SQLAlchemy cannot name each type without its dialect
        return type(kind).__name__.lower()


# -- what the database knows besides columns -------------------------------------------------------


def _fills_nulls(connection: Any, table: Any) -> bool:
    """Returns whether a trigger may replace a null before the check for NOT NULL.

    True if this user may not see the triggers.

    Postgres, MySQL and MariaDB look for nulls after the triggers that run before an insert. Triggers of
    SQLite cannot change a row.
    """
    dialect = connection.dialect.name
    if dialect == "sqlite":
        return False
    sa = sqlalchemy()
    if dialect in _POSTGRES:  # a partition may have triggers of its own; 66: BEFORE or INSTEAD OF
        name = connection.dialect.identifier_preparer.format_table(table)
        statement = sa.text(
            "SELECT c.relkind <> 'r' OR c.relhasrules OR EXISTS (SELECT FROM pg_trigger g "
            "WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgtype & 66 <> 0) "
            "FROM pg_class c WHERE c.oid = to_regclass(:name)"
        )
        return connection.execute(statement, {"name": name}).scalar() is not False
    if dialect not in _MYSQL:
        return True
    of_schema = "= COALESCE(:schema, DATABASE())"
    right = sa.text(  # a user without the right TRIGGER sees none
        "SELECT 1 FROM (SELECT privilege_type FROM information_schema.user_privileges UNION "
        "SELECT privilege_type FROM information_schema.schema_privileges "
        f"WHERE table_schema {of_schema} UNION "
        "SELECT privilege_type FROM information_schema.table_privileges "
        f"WHERE table_schema {of_schema} AND table_name = :name) p WHERE privilege_type = 'TRIGGER'"
    )
    triggers = sa.text(
        "SELECT 1 FROM information_schema.triggers WHERE event_manipulation IN ('INSERT', 'UPDATE') "
        f"AND action_timing = 'BEFORE' AND event_object_table = :name AND event_object_schema {of_schema}"
    )
    parameters = {"name": table.name, "schema": table.schema}
    may_look = connection.execute(right, parameters).first() is not None
    return not may_look or connection.execute(triggers, parameters).first() is not None


def _may_refuse_more(connection: Any, table: Any) -> bool:
    """Returns whether the database may refuse rows for other reasons than their columns' types."""
    sa, dialect = sqlalchemy(), connection.dialect.name
    if dialect == "sqlite":
        statement = sa.text("SELECT upper(sql) FROM sqlite_master WHERE lower(tbl_name) = lower(:name)")
        found = [str(each) for (each,) in connection.execute(statement, {"name": table.name})]
        words = ("UNIQUE", "CHECK", "REFERENCES", "TRIGGER", "PRIMARY KEY", "STRICT", "INDEX", "VIEW")
        return not found or any(word in each for each in found for word in words)
    if dialect not in _POSTGRES:
        return True
    name = connection.dialect.identifier_preparer.format_table(table)
    statement = sa.text(
        "SELECT c.relkind = 'r' AND NOT c.relrowsecurity AND NOT c.relhasrules AND NOT c.relhasindex "
        "AND NOT c.relhastriggers AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid "
        "AND k.contype <> 'n') AND pg_encoding_to_char(d.encoding) = 'UTF8' AND NOT EXISTS ("
        "SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '') "
        "FROM pg_class c, pg_database d WHERE c.oid = to_regclass(:name) AND d.datname = current_database()"
    )
    return not connection.execute(statement, {"name": name}).scalar()


# -- rules that only databases have ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadAsText(RowRule):
    """Applies a rule for texts to a column of bytes that the sink writes to a text column.

    Attributes:
        rule: the rule for the text.
    """

    rule: RowRule

    @property
    def what(self) -> str:
        return self.rule.what

    def wrong(self, values: pa.Array) -> pa.Array:
        raw = as_binary(values)
        is_good = is_utf8(raw)
        if isinstance(self.rule, Utf8):
            return pc.invert(is_good)
        if pc.any(pc.invert(is_good)).as_py():
            raw = pc.if_else(is_good, raw, pa.scalar(None, raw.type))
        return self.rule.broken(raw.cast(pa.large_string()))


@dataclass(frozen=True, kw_only=True)
class LongestTextOfMySql(LongestText):
    """`LongestText` as MySQL and MariaDB apply it: they cut off all white space at the end of a text."""

    def wrong(self, values: pa.Array) -> pa.Array:
        found = super().wrong(values)
        if not pc.any(found).as_py():
            return found
        return super().wrong(pc.ascii_rtrim_whitespace(values.cast(pa.large_string())))


#: An escaped U+0000. In JSON, a backslash is only inside of texts.
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, kw_only=True)
class JsonText(RowRule):
    """A text must be a JSON document.

    Attributes:
        without_nul: whether its texts must not contain U+0000 either, which ``jsonb`` cannot store.
    """

    without_nul: bool = False

    @property
    def what(self) -> str:
        return "is not JSON" + (", or contains the character U+0000" if self.without_nul else "")

    def wrong(self, values: pa.Array) -> pa.Array:
        raw = as_binary(values)
        suspects = _is_suspect(values.cast(pa.large_string()))
        if self.without_nul:
            suspects = pc.or_kleene(suspects, pc.match_substring(raw, b"\\u0000"))
        if not pc.any(suspects).as_py():
            return suspects
        flags = pc.fill_null(suspects, False).to_pylist()
        return pa.array(
            [bool(flag) and self._refuses(raw[at].as_py()) for at, flag in enumerate(flags)], pa.bool_()
        )

    def _refuses(self, document: bytes) -> bool:
        try:
            text = document.decode()
        except UnicodeDecodeError:
            return True
        return bool(self.without_nul and _ESCAPED_NUL.search(text)) or not is_json(text)


def _is_suspect(values: pa.Array) -> pa.Array:
    """Returns which texts the JSON decoder refuses as the value of a field.

    The decoder has limits of its own, so that a suspect may yet be JSON.
    """
    decoding = _decoding()
    # Null for null. A text that is JSON cannot end the document around it.
    begin, end, empty = (pa.scalar(each, values.type) for each in ('{"":', "}", ""))
    documents = pc.binary_join_element_wise(begin, values, end, empty)
    bad = [False] * len(values)
    before = 0
    for part in decoding.slices(documents):
        for at in part.errors:
            bad[before + at] = True
        before += len(part.values)
    return pa.array(bad)


@lru_cache(maxsize=1)
def _decoding() -> Any:
    from pyspark.sql.types import BooleanType, StructType  # workers of Spark start without it

    from kafka_eos_source.documents.decode import JsonDecoding

    return JsonDecoding(StructType().add("none", BooleanType()))
