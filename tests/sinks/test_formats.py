"""Conversion of values for files and tables."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.sinks import constructors, formats
from kafka_eos_source.sinks.contract import OK, Fatal, SinkContext
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.sinks.formats import encode
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import Given, System, deadline, new_txn, opened, stage
from tests.support.row_rules import broken_rules

UTC = datetime.timezone.utc


def lines(batch: pa.RecordBatch) -> list[Any]:
    return [json.loads(line) for line in encode(batch).to_pylist()]


@given(st.lists(st.none() | st.text(), min_size=1, max_size=5))
def test_any_text_is_encoded_as_valid_json(values: list[str | None]) -> None:
    batch = pa.record_batch({'a "name"': pa.array(values, pa.string())})
    assert lines(batch) == [{'a "name"': value} for value in values]
    assert not any("\n" in line for line in encode(batch).to_pylist())


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_any_number_is_encoded_as_valid_json(floats: list[float | None], integers: list[int]) -> None:
    special = {float("inf"): "Infinity", float("-inf"): "-Infinity"}
    wanted = [None if each is None else "NaN" if each != each else special.get(each, each) for each in floats]
    assert [line["x"] for line in lines(pa.record_batch({"x": pa.array(floats, pa.float64())}))] == wanted
    batch = pa.record_batch({"x": pa.array(integers, pa.int64())})
    assert [line["x"] for line in lines(batch)] == integers


def test_other_types_are_encoded_as_json_like_spark() -> None:
    at = datetime.datetime(2026, 11, 21, 14, 5, 6, 789000)
    batch = pa.record_batch(
        {
            "flag": pa.array([True, None]),
            "bytes": pa.array([b"\x00\xff", None]),
            "day": pa.array([at.date(), None]),
            "at": pa.array([at.replace(tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            "wall": pa.array([at, None], pa.timestamp("us")),
            "price": pa.array([decimal.Decimal("1.50"), None]),
            "list": pa.array([[1, None], None]),
            "struct": pa.array([{"a": "x", "b": b"y"}, None]),
        }
    )
    first, second = lines(batch)
    assert first == {
        "flag": True,
        "bytes": "AP8=",
        "day": "2026-11-21",
        "at": "2026-11-21T14:05:06.789000Z",
        "wall": "2026-11-21T14:05:06.789000",
        "price": 1.5,
        "list": [1, None],
        "struct": {"a": "x", "b": "eQ=="},
    }
    assert set(second.values()) == {None}


def test_nested_values_are_encoded_as_the_flat_ones() -> None:
    """Also NaN and times, which Python's own encoder writes otherwise, and maps, which it does not have."""
    at = datetime.datetime(2026, 11, 21, 14, 5, 6, tzinfo=UTC)
    inner = pa.struct([("x", pa.float64()), ("at", pa.timestamp("us", "UTC")), ("d", pa.decimal128(5, 2))])
    value = {"x": float("nan"), "at": at, "d": decimal.Decimal("1.50")}
    read = {"x": "NaN", "at": "2026-11-21T14:05:06.000000Z", "d": 1.5}
    empty = dict.fromkeys(read)
    batch = pa.record_batch(
        {
            "list": pa.array([[value, None, {}], [], None], pa.list_(inner)),
            "map": pa.array([[("a", value), ("b", None)], [], None], pa.map_(pa.string(), inner)),
            "days": pa.array([[(at.date(), True)], [], None], pa.map_(pa.date32(), pa.bool_())),
            "numbers": pa.array([[(-1, b"\xff"), (2, None)], [], None], pa.map_(pa.int8(), pa.binary())),
            "deep": pa.array([[[], None, [["x", '"']]], [], None], pa.list_(pa.list_(pa.list_(pa.string())))),
            "none": pa.array([{}, {}, None], pa.struct([])),
        }
    )
    first = {
        "list": [read, None, empty],
        "map": {"a": read, "b": None},
        "days": {"2026-11-21": True},
        "numbers": {"-1": "/w==", "2": None},
        "deep": [[], None, [["x", '"']]],
        "none": {},
    }
    second = {"list": [], "map": {}, "days": {}, "numbers": {}, "deep": [], "none": {}}
    assert lines(batch) == [first, second, dict.fromkeys(first)]
    assert lines(batch.slice(1)) == [second, dict.fromkeys(first)], "a slice of an array begins elsewhere"


def test_a_null_struct_with_required_fields_is_written_to_parquet(tmp_path: Path) -> None:
    """Spark declares the fields of named_struct('a', 1) as required; Arrow's writer refuses a null there."""
    inner = pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.list_(pa.int32()))])
    kinds = pa.schema([("s", inner), ("l", pa.list_(pa.field("element", inner, nullable=False)))])
    children = [pa.array([1, None], pa.int32()), pa.array([[1], None], pa.list_(pa.int32()))]
    structs = pa.StructArray.from_arrays(children, fields=list(inner), mask=pa.array([False, True]))
    rows = pa.Table.from_arrays([structs, pa.array([[], None], kinds.field("l").type)], schema=kinds)
    system = System(lambda: constructors.files(str(tmp_path)).build(), list)
    txn = new_txn()
    with opened(system) as sink:
        sink.make_ready(rows.schema, deadline())
        assert sink.prepare(txn, stage(sink, rows), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    found = [row for file in committed_files(str(tmp_path)) for row in pq.read_table(f"/{file}").to_pylist()]
    assert found == [{"s": {"a": 1, "b": [1]}, "l": []}, {"s": None, "l": None}]


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_rows_that_a_file_cannot_hold_break_a_rule(tmp_path: Path, kind: str) -> None:
    far = pa.array([0, 2**62, 0, None], pa.timestamp("us", "UTC"))
    rows = pa.table({"at": far, "text": pa.array([b"\xff", b"", None, "ž".encode()]).view(pa.string())})
    with opened(System(lambda: constructors.files(str(tmp_path), format=kind).build(), list)) as sink:
        found = broken_rules(sink, rows)
        alone = broken_rules(sink, rows.select(["text"]))
        with pytest.raises(InvalidRecordError, match=r"'text' .text. is not valid UTF-8"):
            stage(sink, rows)  # which a task checked by no rule
    year = f"column 'at' (timestamp) is before 0001-01-01 or after 9999-12-31 (a {kind} file)"
    utf8 = {0: f"column 'text' (text) is not valid UTF-8 (a {kind} file)"}
    assert found == (utf8 if kind == "parquet" else utf8 | {1: year})
    only = "the only column of a csv file, whose readers pass over empty lines"
    assert alone == (utf8 | {2: f"column 'text' (text) is null ({only})"} if kind == "csv" else utf8)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        *(("csv", pa.list_(pa.int32())), ("csv", pa.binary()), ("csv", pa.struct([]))),
        *(("json", pa.null()), ("json", pa.duration("us")), ("json", pa.list_(pa.null()))),
        *(("parquet", pa.null()), ("parquet", pa.struct([]))),
    ],
)
def test_a_type_that_the_file_format_cannot_hold_is_refused_before_the_first_batch(
    kind: str, column: pa.DataType
) -> None:
    with pytest.raises(InvalidSchemaError, match="'x' has type"):
        formats.check(kind, pa.schema([("x", column)]))


ROWS = pa.table(
    {
        "id": pa.array([1, 2, 1], pa.int64()),
        "name": pa.array([b"a", "ž".encode(), b"c"], pa.binary()),
        "tags": pa.array([["x"], None, ["y"]]),
        "at": pa.array([datetime.datetime(2026, 1, 1, tzinfo=UTC)] * 3, pa.timestamp("us", "UTC")),
    }
)


class TestSql:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        pytest.importorskip("sqlalchemy")
        return tmp_path / "x.db"

    def sink(self, file: Path, **options: Any) -> Any:

        sink = constructors.sql(f"sqlite:///{file}", "t", **options).build()
        sink.open(SinkContext("db", "app", "cluster", NotesFolder(str(file.parent / "store"))))
        return sink

    def run(self, file: Path, *statements: str) -> list[Any]:
        import sqlite3

        with sqlite3.connect(file) as connection:
            return [connection.execute(each).fetchall() for each in statements][-1]

    def write(self, sink: Any, rows: pa.Table = ROWS) -> Any:
        txn = new_txn(application_id="app")
        outcome = sink.prepare(txn, Given(rows.schema, rows.num_rows, [rows.to_batches()]), deadline())
        return sink.commit(txn, deadline()) if outcome == OK else outcome

    def test_an_upsert_keeps_the_last_row_of_a_key(self, file: Path) -> None:
        sink = self.sink(file, mode="upsert", keys=("id",))
        assert self.write(sink) == OK
        assert self.write(sink, ROWS.slice(1, 1)) == OK
        assert sorted(self.run(file, "SELECT id, name, tags FROM t")) == [
            (1, b"c", '["y"]'),
            (2, "ž".encode(), None),
        ]

    def test_bytes_go_to_a_column_of_text_as_utf8(self, file: Path) -> None:
        self.run(file, "CREATE TABLE t (id INTEGER, name TEXT, tags TEXT, at TIMESTAMP)")
        assert self.write(self.sink(file)) == OK
        assert self.run(file, "SELECT name, tags FROM t ORDER BY name") == [
            ("a", '["x"]'),
            ("c", '["y"]'),
            ("ž", None),
        ]

    @pytest.mark.parametrize(
        ("table", "options", "message"),
        [
            ("id INTEGER, name TEXT, at TIMESTAMP", {}, "no column 'tags'"),
            (
                "id INTEGER, name INTEGER, tags TEXT, at TIMESTAMP",
                {},
                "'name' has type binary .* it is INTEGER",
            ),
            ("id INTEGER, name TEXT, tags TEXT, at TIMESTAMP, x INT NOT NULL", {}, "requires the column 'x'"),
            (
                "id INTEGER, name TEXT, tags TEXT, at TIMESTAMP",
                {"mode": "upsert", "keys": ("id",)},
                "no primary key or unique constraint",
            ),
        ],
    )
    def test_a_table_with_other_columns_is_refused(
        self, file: Path, table: str, options: dict[str, Any], message: str
    ) -> None:
        self.run(file, f"CREATE TABLE t ({table})")
        sink = self.sink(file, **options)
        with pytest.raises(InvalidSchemaError, match=message):
            sink.make_ready(ROWS.schema, deadline())
        assert isinstance(self.write(sink), Fatal), "and a query that was not checked is refused too"

    def test_a_missing_table_is_refused_if_it_must_not_be_created(self, file: Path) -> None:
        with pytest.raises(InvalidSchemaError, match="there is no table 't'"):
            self.sink(file, create=False).make_ready(ROWS.schema, deadline())

    def test_a_commit_that_violates_a_constraint_succeeds_once_the_conflicting_row_is_gone(
        self, file: Path
    ) -> None:
        self.run(file, "CREATE TABLE t (id INTEGER UNIQUE, name BLOB, tags TEXT, at TIMESTAMP)")
        rows = ROWS.set_column(0, "id", pa.array(range(ROWS.num_rows), pa.int64()))
        sink = self.sink(file)
        txn = new_txn(application_id="app", sink="db")
        assert sink.prepare(txn, Given(rows.schema, 3, [rows.to_batches()]), deadline()) == OK
        assert self.run(file, "SELECT * FROM t") == [], "what was tried out is not there"
        self.run(file, "INSERT INTO t (id) VALUES (1)")
        refused = sink.commit(txn, deadline())
        assert isinstance(refused, Fatal)
        assert "violates the unique constraint" in refused.why
        assert self.run(file, "SELECT id FROM t") == [(1,)]
        self.run(file, "DELETE FROM t")
        assert sink.commit(txn, deadline()) == OK
        assert self.run(file, "SELECT count(*) FROM t") == [(3,)]

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("nonsense:pw", r"'url' has a value \(not shown\) that SQLAlchemy cannot use"),
            ("postgresql+pg8000://u:pw@h/d", "pip install pg8000"),
        ],
    )
    def test_a_url_that_sqlalchemy_cannot_use_is_refused_without_its_password(
        self, file: Path, url: str, message: str
    ) -> None:
        from kafka_eos_source.errors import InvalidOptionError

        sink = constructors.sql(url, "t").build()
        sink.open(SinkContext("db", "app", "cluster"))
        with pytest.raises(InvalidOptionError, match=message) as refused:
            sink.make_ready(ROWS.schema, deadline())
        assert "pw" not in str(refused.value)

    def test_two_phase_mode_is_refused_for_a_database_without_it(self, file: Path) -> None:
        from kafka_eos_source.errors import InvalidOptionError

        with pytest.raises(InvalidOptionError, match="sqlite has no prepared transactions"):
            self.sink(file, two_phase="require").make_ready(ROWS.schema, deadline())
