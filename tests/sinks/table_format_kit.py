"""What Delta and Iceberg tables have in common, as tests of a fixture ``lake``."""

from __future__ import annotations

import pickle
import threading
import uuid
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.sinks.contract import OK, Fatal, SinkTxn, Stage, StageContext
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import ROWS, Rows, System, deadline, new_txn, opened, stage
from tests.support.row_rules import broken_rules


class Lake(Protocol):
    """A table in a local folder, and factories of sinks for it."""

    folder: Path
    label: str

    def visible(self) -> Rows: ...
    def system(self, **options: Any) -> System: ...
    def write_batch(self, rows: pa.Table, batch_id: int = 7, **options: Any) -> object: ...
    def create(self, schema: pa.Schema) -> object: ...
    def file_of(self, staged: Any) -> Path:
        """Returns the first data file of a receipt."""


def die(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def no_parts() -> Stage:
    raise AssertionError("the sink stages by itself")


def refusals(lake: Lake, rows: pa.Table) -> dict[int, str]:
    """Returns the message of each row that breaks a rule of the sink, by its number."""
    with opened(lake.system()) as sink:
        sink.make_ready(rows.schema, deadline())
        return broken_rules(sink, rows)


def without(rows: pa.Table, refused: dict[int, str]) -> pa.Table:
    return rows.take(pa.array([row for row in range(rows.num_rows) if row not in refused], pa.int64()))


class TableFormatKit:
    def test_a_kill_between_commit_and_note_is_recovered(
        self, lake: Lake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        txn = new_txn()
        with opened(lake.system()) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
            with monkeypatch.context() as patch:
                patch.setattr(NotesFolder, "remove", die)
                with pytest.raises(KeyboardInterrupt):
                    sink.commit(txn, deadline())
        store = NotesFolder(str(lake.folder / "checkpoint" / "conformance"))
        assert store.names() == [str(txn)]
        with opened(lake.system()) as sink:
            assert list(sink.recover(deadline())) == []
            assert sink.commit(txn, deadline()) == OK
        assert store.names() == []
        assert len(lake.visible()) == ROWS.num_rows

    @pytest.mark.parametrize("damage", ["deleted", "shortened"])
    def test_a_data_file_that_vanished_after_prepare_is_never_committed(
        self, lake: Lake, damage: str
    ) -> None:
        """A clean-up may delete such files. A version that refers to a missing file fails every reader."""
        lake.write_batch(ROWS, 1)
        txn = new_txn(2)
        with opened(lake.system()) as sink:
            staged = stage(sink, ROWS)
            assert sink.prepare(txn, staged, deadline()) == OK
            file = lake.file_of(staged.receipts[0])
            whole = file.read_bytes()
            file.unlink() if damage == "deleted" else file.write_bytes(whole[:-1])
            outcome = sink.commit(txn, deadline())
            assert isinstance(outcome, Fatal)
            assert file.name in outcome.why
            assert len(lake.visible()) == ROWS.num_rows, "the table is as it was"
            assert list(sink.recover(deadline())) == [txn], "what is left is not forgotten"
            file.write_bytes(whole)  # the operator restores it
            assert sink.commit(txn, deadline()) == OK
        assert len(lake.visible()) == 2 * ROWS.num_rows

    def test_a_missing_data_file_fails_the_batch_before_kafka_commits(self, lake: Lake) -> None:
        with opened(lake.system()) as sink:
            staged = stage(sink, ROWS)
            file = lake.file_of(staged.receipts[0])
            file.unlink()
            outcome = sink.prepare(new_txn(), staged, deadline())
        assert isinstance(outcome, Fatal)
        assert file.name in outcome.why

    def test_many_queries_write_one_table(self, lake: Lake) -> None:
        rows, txns = ROWS.slice(0, 2), [new_txn(3, f"query{n}") for n in range(4)]
        for txn in txns:
            with opened(lake.system(), txn.application_id) as sink:
                assert sink.prepare(txn, stage(sink, rows, 3), deadline()) == OK
        outcomes = []

        def commit(txn: SinkTxn) -> None:
            with opened(lake.system(), txn.application_id) as sink:
                outcomes.append(sink.commit(txn, deadline()))

        threads = [threading.Thread(target=commit, args=(txn,)) for txn in txns]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert outcomes == [OK] * 4
        assert len(lake.visible()) == 4 * 2

    def test_new_columns_fail_or_are_added(self, lake: Lake) -> None:
        lake.write_batch(ROWS, 1)
        wider = ROWS.append_column("note", pa.array(["n"] * ROWS.num_rows))
        with pytest.raises(InvalidSchemaError, match="note"):
            lake.write_batch(wider, 2)
        assert len(lake.visible()) == ROWS.num_rows
        lake.write_batch(wider, 2, schema_evolution="add")
        lake.write_batch(
            ROWS.select(["name", "id"]), 3
        )  # missing columns are null; the order does not matter
        notes = [row["note"] for row in lake.visible()]
        assert (notes.count("n"), notes.count(None)) == (ROWS.num_rows, 2 * ROWS.num_rows)

    @pytest.mark.parametrize("evolution", ["fail", "add"])
    def test_the_letter_case_of_a_name_does_not_make_another_column(self, lake: Lake, evolution: str) -> None:
        inner = pa.struct([("x", pa.int32()), ("Y", pa.string())])
        lake.create(
            pa.schema(
                [
                    ("id", pa.int64()),
                    ("Name", pa.string()),
                    ("inner", inner),
                    ("list", pa.list_(inner)),
                    ("map", pa.map_(pa.string(), inner)),
                ]
            )
        )
        own = pa.struct([("y", pa.string()), ("X", pa.int32())])  # in another order, too
        value = {"y": "z", "X": 1}
        rows = pa.table(
            {
                "NAME": ["a", "b", None],
                "MAP": pa.array([[("k", value), ("l", None)], [], []], pa.map_(pa.string(), own)),
                "List": pa.array([[value, None], [], []], pa.list_(own)),
                "INNER": pa.array([value, {"y": None, "X": None}, None], own),
                "ID": pa.array([1, 2, 3], pa.int64()),
            }
        )
        lake.write_batch(rows.slice(0, 1), 1, schema_evolution=evolution)
        lake.write_batch(rows.slice(1), 2, schema_evolution=evolution)
        seen = sorted(lake.visible(), key=lambda row: row["id"])
        read = {"x": 1, "Y": "z"}
        assert seen == [
            {"id": 1, "Name": "a", "inner": read, "list": [read, None], "map": [("k", read), ("l", None)]},
            {"id": 2, "Name": "b", "inner": {"x": None, "Y": None}, "list": [], "map": []},
            {"id": 3, "Name": None, "inner": None, "list": [], "map": []},
        ]

    def test_new_columns_are_added_beside_names_in_another_case(self, lake: Lake) -> None:
        lake.create(pa.schema([("id", pa.int64())]))
        lake.write_batch(pa.table({"NOTE": ["n"], "ID": [1]}), 1, schema_evolution="add")
        lake.write_batch(pa.table({"note": ["m"], "Id": [2]}), 2, schema_evolution="add")
        assert sorted(lake.visible(), key=lambda row: row["id"]) == [
            {"id": 1, "NOTE": "n"},
            {"id": 2, "NOTE": "m"},
        ]

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("nested", [True, False])
    def test_names_that_are_one_column_are_refused_before_the_first_batch(
        self, lake: Lake, exists: bool, nested: bool
    ) -> None:
        def schema(*names: str) -> pa.Schema:
            fields = [pa.field(each, pa.int64()) for each in names]
            return pa.schema([pa.field("s", pa.list_(pa.struct(fields)))] if nested else fields)

        if exists:
            lake.create(schema("id"))
        with opened(lake.system(schema_evolution="add")) as sink:
            for call in (sink.check, sink.make_ready):
                with pytest.raises(InvalidSchemaError, match="the columns 'id' and 'ID'"):
                    call(schema("id", "ID"), deadline())

    def test_partition_columns_may_be_spelled_in_another_case(self, lake: Lake) -> None:
        rows = pa.table({"Id": pa.array([1, 2], pa.int64()), "Name": ["a", "b"]})
        lake.write_batch(rows, 1, partition_by="NAME")
        lake.write_batch(rows.rename_columns(["ID", "name"]), 2)
        lake.write_batch(rows.select(["Id"]), 3)  # its partition is null
        assert sorted((row["Id"], row["Name"] or "") for row in lake.visible()) == [
            (1, ""), (1, "a"), (1, "a"), (2, ""), (2, "b"), (2, "b")
        ]  # fmt: skip

    def test_a_required_column_takes_rows_that_have_it(self, lake: Lake) -> None:
        lake.create(pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())]))
        lake.write_batch(ROWS.select(["id", "name"]))
        assert refusals(lake, pa.table({"ID": pa.array([1, None], pa.int64())})) == {
            1: f"column 'ID' (integer) is null (a required column of the {lake.label})"
        }
        with pytest.raises(InvalidSchemaError, match="requires the column 'id'"):
            lake.write_batch(ROWS.select(["name"]), schema_evolution="add")
        assert len(lake.visible()) == ROWS.num_rows

    def test_nested_values_that_the_table_requires(self, lake: Lake) -> None:
        inner = pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("t", pa.string())])
        table = {
            "id": pa.int64(),
            "s": inner,
            "l": pa.list_(pa.field("element", inner, nullable=False)),
            "m": pa.map_(pa.string(), pa.field("value", inner, nullable=False)),
        }
        lake.create(pa.schema(list(table.items())))
        of_rows = pa.struct([pa.field("X", pa.int64()), pa.field("t", pa.string())])
        good, bad = {"X": 1, "t": None}, {"X": None, "t": "a"}
        rows = pa.table(
            {
                "id": pa.array(range(8), pa.int64()),
                "s": pa.array([good, None, bad, *[good] * 5], of_rows),
                "l": pa.array([[good], None, [], [good, bad], [None], *[[]] * 3], pa.list_(of_rows)),
                "m": pa.array(
                    [[("k", good)], None, *[[]] * 3, [("k", good), ("l", bad)], [("k", None)], []],
                    pa.map_(pa.string(), of_rows),
                ),
            }
        )
        found = refusals(lake, rows)
        assert {row: text.partition(" is null")[0] for row, text in found.items()} == {
            2: "column 's.X' (integer)",
            3: "column 'l.element.X' (integer)",
            4: "column 'l.element' (struct)",
            5: "column 'm.value.X' (integer)",
            6: "column 'm.value' (struct)",
        }
        lake.write_batch(without(rows, found))
        read = {"x": 1, "t": None}
        seen = sorted(lake.visible(), key=lambda row: row["id"])
        assert [row["id"] for row in seen] == [0, 1, 7]
        assert [row["s"] for row in seen] == [read, None, read]
        assert (seen[0]["l"], seen[0]["m"]) == ([read], [("k", read)])

    def test_texts_that_are_not_utf8_are_named_wherever_they_are(self, lake: Lake) -> None:
        bad, raw = b"a\xff", pa.struct([("x", pa.binary())])
        columns = {
            "id": pa.array(range(6), pa.int64()),
            "part": pa.array([bad, b"p", b"", None, b"p", b"p"]),
            "s": pa.array([None, {"x": bad}, {"x": None}, None, None, None], raw),
            "l": pa.array([None, None, [b"x", bad], [], None, None], pa.list_(pa.binary())),
            "m": pa.array(
                [None, None, None, [(b"k", None)], [(bad, b"v")], [(b"k", bad)]],
                pa.map_(pa.binary(), pa.binary()),
            ),
            "bytes": pa.array([bad] * 6),
        }
        kinds = {
            "part": pa.string(),
            "s": pa.struct([("x", pa.string())]),
            "l": pa.list_(pa.string()),
            "m": pa.map_(pa.string(), pa.string()),
        }
        rows = pa.table({name: column.view(kinds.get(name, column.type)) for name, column in columns.items()})
        lake.write_batch(rows.slice(3, 1), 1, partition_by="part")
        found = refusals(lake, rows)
        assert found == {
            row: f"column {name!r} ({kind}) is not valid UTF-8 ({lake.label})"
            for row, name, kind in (
                (0, "part", "text"), (1, "s", "struct"), (2, "l", "list"), (4, "m", "map"), (5, "m", "map")
            )
        }  # fmt: skip
        lake.write_batch(without(rows, found), 2)
        assert [row["bytes"] for row in lake.visible()] == [bad] * 2

    def test_bytes_go_to_a_column_of_text_as_utf8(self, lake: Lake) -> None:
        lake.create(pa.schema([("id", pa.int64()), ("name", pa.string())]))
        rows = pa.table({"id": [1, 2, 3], "name": pa.array(["ž".encode(), b"\xff", None])})
        found = refusals(lake, rows)
        assert found == {1: f"column 'name' (bytes) is not valid UTF-8 ({lake.label})"}
        lake.write_batch(without(rows, found))
        assert sorted((row["id"], row["name"]) for row in lake.visible()) == [(1, "ž"), (3, None)]

    def test_a_rule_that_the_driver_did_not_know_is_checked_by_the_sink(self, lake: Lake) -> None:
        """Somebody changes the table within a minute, or it could not be reached when the query started."""
        inner = pa.struct([pa.field("x", pa.int64(), nullable=False)])
        lake.create(pa.schema([("id", pa.int64()), ("s", inner), ("t", pa.string())]))
        null = pa.table({"id": [1], "S": pa.array([{"X": None}], pa.struct([("X", pa.int64())]))})
        text = pa.table({"id": [1], "t": pa.array([b"\xff"]).view(pa.string())})
        for rows, message in (
            (null, "column 'S.X' .integer. is null"),
            (text, "'t' .text. is not valid UTF-8"),
        ):
            with pytest.raises(InvalidRecordError, match=message):
                lake.write_batch(rows)
            with opened(lake.system()) as sink:
                known = sink.row_rules(rows.schema, deadline())
                context = StageContext(
                    1, uuid.uuid4().hex, rows.schema, no_parts, pickle.loads(pickle.dumps(known))
                )
                sink.stage(context).write(rows.to_batches()[0])  # a task has checked them
        assert lake.visible() == []

    def test_a_task_writes_a_file_when_its_buffer_is_full_and_deletes_its_files_on_failure(
        self, lake: Lake
    ) -> None:
        rows = pa.table({"id": range(300_000)})
        with opened(lake.system(buffer_bytes=1 << 20)) as sink:
            for end in ("finish", "discard"):
                to = sink.stage(StageContext(1, uuid.uuid4().hex, rows.schema, no_parts))
                for batch in rows.to_batches(max_chunksize=50_000):
                    to.write(batch)
                if end == "finish":
                    folder = lake.file_of(staged := to.finish()).parent
                    written = list(folder.glob("*.parquet"))
                    assert len(staged.files) == len(written) == 2
                    assert sum(pq.read_metadata(each).num_rows for each in written) == rows.num_rows
                else:
                    assert len(list(folder.glob("*.parquet"))) == 2 + 2
                    to.discard()
                    assert sorted(folder.glob("*.parquet")) == sorted(written)
