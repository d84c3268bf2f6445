"""Rows that PostgreSQL, MariaDB and a web service refuse: rules of columns, and the search for the others.

The server is the judge of the rules: a value that breaks one must be refused by the server too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from integration.support.databases import MariaDb, Postgres, Server
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Refused, Retryable
from kafka_eos_source.testing.sinks import Given, Rows, System, deadline, new_txn, opened
from tests.support.http_service import running

#: A column of a table, values, and the numbers of those that break a rule and that only the server refuses.
Case = tuple[str, pa.Array, Sequence[int], Sequence[int]]

_FAR = 253_402_300_800_000_000  # the first microsecond of the year 10000
_NAN, _INF = float("nan"), float("inf")


def ints(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64())


def floats(*values: float) -> pa.Array:
    return pa.array(values, pa.float64())


def decimals(*values: str) -> pa.Array:
    return pa.array([Decimal(each) for each in values], pa.decimal128(20, 4))


def not_checked(*values: bytes) -> pa.Array:
    """Returns texts that may not be UTF-8, as Spark passes them."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def times(*values: int | None, zone: str | None = "UTC") -> pa.Array:
    return pa.array(values, pa.timestamp("us", zone))


def dates(*days: int) -> pa.Array:
    return pa.array(days, pa.int32()).cast(pa.date32())


_UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
_JSON = ['{"a":1}', "[1]", ' "x" ', "", "x", '{"a":NaN}', '{"a":"\\u0000"}', '{"a":"\\\\u0000"}', '1,"b":2']

POSTGRES: Sequence[Case] = [
    ("smallint", ints(1, 32767, 32768, -32768, -32769, None), [2, 4], []),
    ("integer", ints(2**31 - 1, 2**31, -(2**31), -(2**31) - 1), [1, 3], []),
    ("numeric(5,2)", ints(999, 1000, -999, -1000), [1, 3], []),
    ("numeric(5,2)", floats(999.994, 999.996, -1000, _NAN, _INF), [1, 2, 4], []),
    ("numeric(5,2)", decimals("1.2345", "999.9949", "999.9950", "-999.9950"), [2, 3], []),
    ("real", floats(_NAN, -_INF, 3.4e38, 3.5e38, 1e-300), [3], [4]),
    ("varchar(3)", pa.array(["abc", "abcd", "äöü", "äöüß", "abc  ", "abc\t", None]), [1, 3, 5], []),
    ("char(3)", pa.array(["abc", "abcd", "a", "abc   "]), [1], []),
    ("text", pa.array(["a", "a\0b", "\0", "😀", "\\.", ""]), [1, 2], []),
    ("text", not_checked(b"ok", b"\xff", b"\xc3\xa4", b"\xed\xa0\x80"), [1, 3], []),
    ("varchar(2)", pa.array([b"ok", b"\xff", b"a\0", b"\xc3\xa4\xc3\xa4", b"abc"]), [1, 2, 4], []),
    ("bytea", pa.array([b"ok", b"\xff\0", b""]), [], []),
    (
        "uuid",
        pa.array([_UUID, _UUID.upper().replace("-", ""), f"{{{_UUID}}}", _UUID[1:], " ", ""]),
        [3, 4, 5],
        [],
    ),
    ("json", pa.array(_JSON), [3, 4, 5], [8]),
    ("jsonb", pa.array(_JSON), [3, 4, 5, 6], [8]),
    ("jsonb", pa.array([{"t": "x", "f": _NAN}, {"t": "x\0", "f": -_INF}, None]), [1], []),
    ("mood", pa.array(["sad", "happy", "Sad", "sad ", ""]), [2, 3, 4], []),
    ("boolean", pa.array([True, False, None]), [], []),
    ("smallint", pa.array([True, False, None]), [], []),
    ("date", dates(0, -719_163, -2_440_588, -2_440_589, 2_145_042_905, 2_145_042_906), [3, 5], []),
    ("timestamptz", times(0, -62_135_596_800_000_001, -210_866_803_200_000_001, _FAR, 2**63 - 1), [2], []),
    ("timestamp", times(-210_866_803_200_000_000, _FAR, None, zone=None), [], []),
    ("short", pa.array(["abc", "abcd", None, "bad"]), [2], [1, 3]),
    ("integer NOT NULL", ints(1, None), [1], []),
]

MARIADB: Sequence[Case] = [
    ("tinyint", ints(127, 128, -128, -129), [1, 3], []),
    ("tinyint unsigned", ints(255, 256, 0, -1), [1, 3], []),
    ("mediumint", ints(8388607, 8388608, -8388608, -8388609), [1, 3], []),
    ("int unsigned", ints(2**32 - 1, 2**32, -1), [1, 2], []),
    ("bigint unsigned", ints(2**63 - 1, -1), [1], []),
    ("decimal(5,2)", floats(999.994, 999.996, -1000, _NAN, _INF), [1, 2, 3, 4], []),
    ("decimal(5,2)", decimals("1.2345", "999.9949", "999.9950", "-999.9950"), [2, 3], []),
    ("float", floats(3.4e38, 3.5e38, _NAN, 1e-300), [1, 2], []),
    ("double", floats(1e308, _NAN, -_INF), [1, 2], []),
    ("varchar(3)", pa.array(["abc", "abcd", "äöü", "äöüß", "abc  ", "abc\t", None]), [1, 3], []),
    ("varchar(3) character set utf8mb3", pa.array(["äöü", "😀"]), [], [1]),
    ("tinytext", pa.array(["a" * 255, "a" * 256, "ä" * 127, "ä" * 128, "a" * 255 + "  "]), [1, 3], []),
    ("tinytext character set latin1", pa.array(["a" * 255, "a" * 256, "ä" * 255]), [1], []),
    ("text", not_checked(b"ok\0", b"\xff", b"\xc3\xa4", b"\xed\xa0\x80"), [1, 3], []),
    ("varchar(2)", pa.array([b"ok", b"\xff", b"\xc3\xa4\xc3\xa4", b"abc"]), [1, 3], []),
    ("varbinary(2)", pa.array([b"\xff\0", b"abc"]), [1], []),
    ("tinyblob", pa.array([b"o" * 255, b"\xff" * 256]), [1], []),
    ("json", pa.array(_JSON), [], [3, 4, 5, 8]),
    ("json", pa.array([{"t": "x"}, {"t": "x\0"}, None]), [], []),
    ("enum('sad','happy')", pa.array(["sad", "Sad", "sad ", "", "x", "1"]), [], [3, 4]),
    ("date", dates(0, -719_162, -719_163, 2_932_896, 2_932_897), [2, 4], []),
    ("datetime(6)", times(0, -62_135_596_800_000_001, _FAR - 1, _FAR), [1, 3], []),
    (
        "timestamp(6) null",
        times(86_400_000_000, -3 * 86_400_000_000, 4_295_200_000_000_000, None),
        [1, 2],
        [],
    ),
    ("timestamp not null", times(86_400_000_000, None, zone=None), [], []),
    ("integer NOT NULL", ints(1, None), [1], []),
    ("integer NOT NULL auto_increment unique", ints(1, None), [], []),
]
#: Cases of columns with Postgres, if psycopg receives objects instead of COPY's text.
_OBJECTS = {
    "date": [1, 2, 3, 4, 5],
    "timestamptz": [1, 2, 3, 4],
    "timestamp": [0, 1],
}


class _OnServer:
    kind: ClassVar[type[Server]]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        server = cls.kind()
        yield server
        server.close()

    @pytest.fixture
    def store(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


def prepared(
    server: Server, table: str, store: str, rows: pa.Table, **options: Any
) -> tuple[Outcome, set[int]]:
    """Prepares rows; returns the outcome, and which rows break a rule. What is prepared is aborted."""
    system = System(
        sink=lambda: constructors.sql(server.url, table, **options).build(),
        visible=lambda: server.rows(table),
        store=store,
    )
    txn = new_txn()
    with opened(system) as sink:
        sink.make_ready(rows.schema, deadline())
        broken: set[int] = set()
        for rule in sink.row_rules(rows.schema, deadline()):
            wrong = rule.broken(rows[rule.column].combine_chunks()).to_pylist()
            broken.update(at for at, each in enumerate(wrong) if each)
        outcome = sink.prepare(txn, Given(rows.schema, rows.num_rows, [rows.to_batches()]), deadline())
        assert isinstance(outcome, Refused) or sink.refuses_rows or outcome == OK
        assert list(sink.recover(deadline())) == ([txn] if outcome == OK else [])
        assert sink.abort(txn, deadline()) == OK
    return outcome, broken


def written(server: Server, table: str, store: str, rows: pa.Table, **options: Any) -> tuple[list[int], Rows]:
    """Writes the rows that the server accepts; returns the numbers of the others, and what readers see."""
    system = System(
        sink=lambda: constructors.sql(server.url, table, **options).build(),
        visible=lambda: server.rows(table),
        store=store,
    )
    refused: set[int] = set()
    with opened(system) as sink:
        sink.make_ready(rows.schema, deadline())
        for _ in range(2):
            good = [at for at in range(rows.num_rows) if at not in refused]
            part = rows.take(good)
            txn = new_txn()
            outcome = sink.prepare(txn, Given(rows.schema, len(good), [part.to_batches()]), deadline())
            if isinstance(outcome, Refused):
                refused |= {good[at] for at in outcome.rows}
        assert outcome == OK, "the rows that are left are accepted"
        assert sink.commit(txn, deadline()) == OK
    return sorted(refused), server.rows(table)


def check_cases(server: Server, store: str, cases: Sequence[Case], **options: Any) -> None:
    for kind, values, of_rules, of_server in cases:
        table = server.new_table()
        server.run(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v {kind})")
        rows = pa.table({"id": ints(*range(len(values))), "v": values})
        outcome, broken = prepared(server, table, store, rows, **options)
        wanted = _OBJECTS.get(kind, of_rules) if options and isinstance(server, Postgres) else of_rules
        case = f"{kind} of {values.type} {options}: {outcome}"
        assert sorted(broken) == list(wanted), case
        found = sorted(outcome.rows) if isinstance(outcome, Refused) else []
        assert found == sorted([*wanted, *of_server]), case


class TestPostgres(_OnServer):
    kind = Postgres

    @pytest.mark.parametrize(
        "options",
        [{}, pytest.param({"mode": "upsert", "keys": "id"}, marks=pytest.mark.long)],
        ids=["append", "upsert"],
    )
    def test_rules_are_as_strict_as_the_server(
        self, server: Server, store: str, options: dict[str, Any]
    ) -> None:
        if not server.run("SELECT FROM pg_type WHERE typname = 'mood'"):
            server.run(
                "CREATE TYPE mood AS ENUM ('sad', 'happy')",
                "CREATE DOMAIN short AS varchar(3) NOT NULL CHECK (value <> 'bad')",
            )
        check_cases(server, store, POSTGRES, **options)

    def test_constraints_of_all_kinds(self, server: Server, store: str) -> None:
        names = pa.array([f"n{number}" for number in range(10)])
        ten = pa.table({"id": ints(*range(10)), "v": names})

        def refused(
            columns: str, rows: pa.Table, *more: str, table: str | None = None, **options: Any
        ) -> list[int]:
            made = server.new_table()
            statements = [f"CREATE TABLE {made} {columns}", *more]
            server.run(*(each.replace("{t}", made) for each in statements))
            found, seen = written(server, (table or "{t}").replace("{t}", made), store, rows, **options)
            assert len(seen) == rows.num_rows - len(found) + len(
                [each for each in more if "INSERT INTO" in each]
            )
            return found

        twice = pa.table({"id": ints(0, 1, 2, 3, 1, 5, 7, 5), "v": names.slice(0, 8)})
        there = "INSERT INTO {t} (id) VALUES (3)"
        assert refused("(id bigint PRIMARY KEY, v text)", twice, there) == [3, 4, 7]
        deferred = "DEFERRABLE INITIALLY DEFERRED"
        assert refused(f"(id bigint UNIQUE {deferred}, v text)", twice, there) == [3, 4, 7]
        assert refused("(id bigint, v text, EXCLUDE USING btree (id WITH =))", twice, there) == [3, 4, 7]
        # 0 refers to 5, 2 to none, 3 to 2; 7 is there twice
        tree = pa.table({"id": ints(0, 1, 2, 3, 4, 5, 7, 7), "up": ints(5, 0, 99, 2, None, 4, 7, None)})
        for when in ("", deferred):
            assert refused(f"(id bigint PRIMARY KEY, up bigint REFERENCES {{t}} {when})", tree) == [2, 3, 7]
        # each row comes before its parent, and one refers to none
        chain = pa.table({"id": ints(*range(30, 0, -1), 90), "up": ints(*range(29, 0, -1), None, 99)})
        stored = {"two_phase": "never"}
        for options in ({}, stored, {**stored, "mode": "upsert", "keys": "id", "batch_rows": 1}):
            for when in ("", deferred, "DEFERRABLE INITIALLY IMMEDIATE"):
                made = f"(id bigint PRIMARY KEY, up bigint REFERENCES {{t}} {when})"
                assert refused(made, chain, **options) == [30], (options, when)
        query = pa.table({"id": ints(1, 2, 3), "v": ["a & b", "a b", "c"]})
        assert refused("(id bigint, v text CHECK (to_tsquery('simple', v) IS NOT NULL))", query) == [1]
        server.run(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.id = 4 THEN RAISE EXCEPTION 'four'; END IF; "
            "IF NEW.id = 5 THEN RAISE EXCEPTION 'five' USING ERRCODE = 'KE001'; END IF; RETURN NEW; END $$"
        )
        for kind, when in (("TRIGGER g BEFORE", ""), ("CONSTRAINT TRIGGER g AFTER", deferred)):
            made = f"CREATE {kind} INSERT ON {{t}} {when} FOR EACH ROW EXECUTE FUNCTION refuse()"
            assert refused("(id bigint, v text)", ten, made) == [4, 5]
        view = "CREATE VIEW {t}v AS SELECT * FROM {t} WHERE id < 8 WITH CHECK OPTION"
        assert refused("(id bigint, v text)", ten, view, table="{t}v", create=False) == [8, 9]
        part = "CREATE TABLE {t}a PARTITION OF {t} FOR VALUES FROM (2) TO (9)"
        assert refused("(id bigint, v text) PARTITION BY RANGE (id)", ten, part) == [0, 1, 9]
        long = pa.array(["a", "".join(chr(0x4E00 + (7919 * at) % 20_000) for at in range(9_000)), "c"])
        index = "CREATE INDEX ON {t} (v)"
        assert refused("(id bigint, v text)", pa.table({"id": ints(1, 2, 3), "v": long}), index) == [1]
        keys = pa.table({"id": ints(0, 1, 1, 1, 2, 2), "v": ["a", "stays", "bad", "bad", "bad", "bad"]})
        outcome, _ = prepared(server, self._checked(server), store, keys, mode="upsert", keys="id")
        assert isinstance(outcome, Refused)
        assert sorted(outcome.rows) == [2, 3, 4, 5]

    def _checked(self, server: Server) -> str:
        table = server.new_table()
        server.run(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v text CHECK (v <> 'bad'))")
        return table

    def test_a_refusal_names_constraint_and_column_but_no_values(self, server: Server, store: str) -> None:
        table = server.new_table()
        server.run(
            f"CREATE TABLE {table} (id bigint CONSTRAINT one PRIMARY KEY, v text, n smallint)",
            f"INSERT INTO {table} VALUES (4711, 'of another row', 1)",
        )
        rows = pa.table({"id": ints(4711, 2), "v": ["private", "a\0b"], "n": ints(1, 1)})
        outcome, broken = prepared(server, table, store, rows)
        assert isinstance(outcome, Refused)
        assert broken == {1}
        assert outcome.rows[0].column == "id"
        assert "unique constraint 'one'" in outcome.rows[0].why
        assert not any(text in str(outcome) for text in ("4711", "private", "another row"))

    def test_row_level_security_and_missing_rights(self, server: Server, store: str) -> None:
        """A policy is about rows; COPY, which such a table refuses, is not used. A missing right is not."""
        server.run(
            "CREATE ROLE joe LOGIN",
            "GRANT CREATE, USAGE ON SCHEMA public TO joe",
            "CREATE TABLE guarded (id bigint)",
            "CREATE TABLE closed (id bigint)",
            "ALTER TABLE guarded ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY low ON guarded WITH CHECK (id < 5)",
            "GRANT ALL ON guarded TO joe",
        )
        as_joe = {"ledger_table": "ledger_of_joe"}
        url = server.url.replace("eos@", "joe@")
        rows = pa.table({"id": ints(*range(8))})

        def outcome(table: str) -> Outcome:
            sink = lambda: constructors.sql(url, table, **as_joe).build()  # noqa: E731
            with opened(System(sink=sink, visible=list, store=store)) as opened_sink:
                opened_sink.make_ready(rows.schema, deadline())
                return opened_sink.prepare(new_txn(), Given(rows.schema, 8, [rows.to_batches()]), deadline())

        found = outcome("guarded")
        assert isinstance(found, Refused)
        assert sorted(found.rows) == [5, 6, 7]
        found = outcome("closed")
        assert isinstance(found, Fatal)
        assert "permission denied" in found.why
        assert "grant" in found.fix

    def test_a_trigger_that_fills_a_column_is_not_forestalled(self, server: Server, store: str) -> None:
        table = server.new_table()
        server.run(
            f"CREATE TABLE {table} (id bigint NOT NULL, v text)",
            "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.id := COALESCE(NEW.id, 7); RETURN NEW; END $$",
            f"CREATE TRIGGER fill BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION fill()",
        )
        outcome, broken = prepared(server, table, store, pa.table({"id": ints(None, 1), "v": ["a", "b"]}))
        assert outcome == OK
        assert broken == set()

    @pytest.mark.fault("T485", "a lock, a lost connection", "the sink looks for refused rows")
    def test_a_lock_or_a_lost_connection_ends_the_search(
        self, server: Server, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Row 6 would wait for another program's transaction; then the server ends the connection."""
        from kafka_eos_source.sinks import sql, sql_rows

        monkeypatch.setattr(sql, "_LOCK_SECONDS", 1)
        table = server.new_table()
        server.run(f"CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint CHECK (v < 5))")
        rows = pa.table({"id": ints(*range(10)), "v": ints(*([9, 9] + [1] * 8))})
        import sqlalchemy as sa

        engine = sa.create_engine(server.url, poolclass=sa.pool.NullPool)
        with engine.connect() as other:
            other.exec_driver_sql(f"INSERT INTO {table} VALUES (6, 1)")
            outcome, _ = prepared(server, table, store, rows)
            assert isinstance(outcome, Retryable)
            assert "lock" in outcome.why
            assert f"'{table}'" in outcome.why
        write = sql_rows._write

        def cut(connection: Any, *arguments: Any) -> None:
            write(connection, *arguments)
            own = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            ended = threading.Thread(target=server.run, args=(f"SELECT pg_terminate_backend({own})",))
            ended.start()
            ended.join()

        monkeypatch.setattr(sql_rows, "_write", cut)
        outcome, _ = prepared(server, table, store, rows.slice(2))
        assert isinstance(outcome, Retryable)
        monkeypatch.setattr(sql_rows, "_write", write)
        outcome, _ = prepared(server, table, store, rows)
        assert isinstance(outcome, Refused)
        assert sorted(outcome.rows) == [0, 1]


@pytest.mark.long
class TestMariaDb(_OnServer):
    kind = MariaDb

    @pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": "id"}], ids=["append", "upsert"])
    def test_rules_are_as_strict_as_the_server(
        self, server: Server, store: str, options: dict[str, Any]
    ) -> None:
        check_cases(server, store, MARIADB, **options)

    def test_constraints_of_all_kinds(self, server: Server, store: str) -> None:
        table, names = server.new_table(), server.new_table()
        server.run(
            f"CREATE TABLE {names} (name varchar(10) PRIMARY KEY)",
            f"INSERT INTO {names} VALUES ('a')",
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, name varchar(10), n int, u int UNIQUE, "
            f"CONSTRAINT small CHECK (n < 100), "
            f"CONSTRAINT known FOREIGN KEY (name) REFERENCES {names} (name))",
            f"INSERT INTO {table} VALUES (3, 'a', 0, 33)",
            f"CREATE TRIGGER {table}_t BEFORE INSERT ON {table} FOR EACH ROW BEGIN IF NEW.n = 13 THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no thirteen'; END IF; END",
        )
        rows = pa.table(
            {
                "id": ints(1, 2, 3, 4, 5, 1, 6, 7),
                "name": ["a", "b", "a", "a", "a", "a", "a", "a"],
                "n": ints(1, 1, 1, 100, 13, 1, 1, 1),
                "u": ints(1, 2, 3, 4, 5, 6, 33, None),
            }
        )
        outcome, broken = prepared(server, table, store, rows)
        assert broken == set()
        assert isinstance(outcome, Refused)
        assert {at: (each.column, each.why) for at, each in sorted(outcome.rows.items())} == {
            1: ("name", "violates the foreign key 'known' (error 1452)"),
            2: ("id", "violates the unique key 'PRIMARY' (error 1062)"),
            3: ("", "violates the check constraint 'small' (error 4025)"),
            4: ("", "the database says 'no thirteen'"),
            5: ("id", "violates the unique key 'PRIMARY' (error 1062)"),
            6: ("u", "violates the unique key 'u' (error 1062)"),
        }
        found, seen = written(server, table, store, rows)
        assert found == sorted(outcome.rows)
        assert sorted(row["id"] for row in seen) == [1, 3, 7]


@pytest.mark.fault("T486", "the driver is killed", "a sink looks for the rows that a system refuses")
@pytest.mark.parametrize("names", [0, 1], ids=["no row is named", "one row is named"])
def test_a_driver_that_is_killed_in_the_search_leaves_an_id_that_the_next_start_aborts(
    tmp_path: Path, names: int
) -> None:
    rows = pa.table(
        {"id": ints(*range(50)), "name": ["poison" if at in (7, 40) else "x" for at in range(50)]}
    )
    txn = new_txn()
    with running(tmp_path / "service") as service:
        service.refuse("poison", names=names)
        system = System(sink=lambda: constructors.http(service.url).build(), visible=service.committed)

        def prepare(kill: bool) -> Outcome:
            with opened(system) as sink:
                if kill:
                    failpoints.reach = lambda name: name.endswith("within_search") and os.kill(os.getpid(), 9)
                return sink.prepare(txn, Given(rows.schema, 50, [rows.to_batches()]), deadline())

        child = os.fork()
        if child == 0:
            prepare(kill=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 9
        with opened(system) as sink:
            (left,) = sink.recover(deadline())
            assert left != txn
            assert left.sequence == txn.sequence
            assert sink.abort(left, deadline()) == OK
        outcome = prepare(kill=False)
        assert isinstance(outcome, Refused)
        assert sorted(outcome.rows) == [7, 40]
        with opened(system) as sink:
            assert list(sink.recover(deadline())) == []
        assert service.committed() == []
