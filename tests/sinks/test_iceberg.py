"""The Iceberg sink: the contract, and behaviour that is specific to Iceberg."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    SinkRetryableError,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import constructors, specs
from kafka_eos_source.sinks.contract import OK, Fatal, SinkContext
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import (
    ROWS,
    Rows,
    SinkConformance,
    System,
    deadline,
    new_txn,
    opened,
    stage,
)

pytest.importorskip("pyiceberg", reason="needs pip install 'kafka-eos-source[iceberg]'")

from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import FixedType, ListType, LongType, NestedField, StructType, UUIDType

from kafka_eos_source.sinks import iceberg as module
from kafka_eos_source.sinks.iceberg import IcebergSink, PartitionBy
from tests.sinks.table_format_kit import TableFormatKit, refusals, without
from tests.support.row_rules import NOT_UTF8

NAME = "lake.orders"


@dataclass
class Lake:
    """A catalog in SQLite, a table in a local folder, and factories of sinks for it."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def catalog(self) -> dict[str, str]:
        return {
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog.db",
            "warehouse": f"file://{self.folder}/warehouse",
        }

    def sink(self, **options: Any) -> IcebergSink:
        return constructors.iceberg(NAME, catalog=self.catalog, **{**self.options, **options}).build()

    @property
    def label(self) -> str:
        return f"Iceberg table {NAME!r}"

    def table(self) -> Table:
        return load_catalog("default", **self.catalog).load_table(NAME)

    def visible(self) -> Rows:
        catalog = load_catalog("default", **self.catalog)
        return catalog.load_table(NAME).scan().to_arrow().to_pylist() if catalog.table_exists(NAME) else []

    def system(self, rows: pa.Table | None = None, **options: Any) -> System:
        return System(
            lambda: self.sink(**options),
            self.visible,
            store=str(self.folder / "checkpoint"),
            rows=rows,
            poison=NOT_UTF8,
        )

    def create(self, schema: pa.Schema) -> object:
        catalog = load_catalog("default", **self.catalog)
        catalog.create_namespace("lake")
        return catalog.create_table(NAME, schema)

    def file_of(self, staged: Any) -> Path:
        return Path(urlsplit(staged.files[0]["path"]).path)

    def write_batch(self, rows: pa.Table, batch_id: int = 7, **options: Any) -> None:
        txn = new_txn(batch_id)
        with opened(self.system(**options)) as sink:
            sink.make_ready(rows.schema, deadline())
            assert sink.prepare(txn, stage(sink, rows, batch_id), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


class TestIceberg(SinkConformance):
    depth = 2
    most_kills = 6

    @pytest.fixture
    def system(self, lake: Lake) -> System:
        return lake.system()


class TestTable(TableFormatKit):
    """What both table formats promise."""


def test_rows_of_every_type_are_written_to_their_partition(lake: Lake) -> None:
    utc = datetime.timezone.utc
    late = datetime.datetime(2020, 2, 29, 23, 59, 59, 999999, utc)
    old = datetime.datetime(1969, 12, 31, tzinfo=utc)
    price = decimal.Decimal("1.50")
    inner = pa.struct([("x", pa.int32()), ("y", pa.string())])
    rows = pa.table(
        {
            "id": pa.array([1, 2, None], pa.int64()),
            "small": pa.array([1, -2, None], pa.int16()),
            "flag": pa.array([True, False, None]),
            "real": pa.array([1.5, -2.25, None], pa.float32()),
            "price": pa.array([price, -price, None], pa.decimal128(10, 2)),
            "day": pa.array([datetime.date(2020, 2, 29), datetime.date(1969, 12, 31), None]),
            "at": pa.array([late, old, None], pa.timestamp("us", "UTC")),
            "local": pa.array([datetime.datetime(2020, 1, 1), None, None], pa.timestamp("us")),
            "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "more": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "inner": pa.array([{"x": 1, "y": "z"}, {"x": None, "y": None}, None], inner),
        }
    )
    by = "days(at), bucket(4, id), truncate(1, price), day"
    lake.write_batch(rows, partition_by=by)
    table = lake.table()
    found = table.scan().to_arrow()
    assert sorted(found.to_pylist(), key=lambda row: row["id"] or 99) == rows.to_pylist()
    names = [each.name for each in table.spec().fields]
    assert names == ["at_day", "id_bucket", "price_trunc", "day"]
    partitions = {str(each["partition"]) for each in table.inspect.partitions().to_pylist()}
    assert len(partitions) == 3, partitions
    # readers prune files by the partition values and bounds, which the note stored as JSON
    chosen = table.scan(row_filter="at < '1970-01-01T00:00:00+00:00'")
    assert len(list(chosen.plan_files())) == 1
    assert chosen.to_arrow()["id"].to_pylist() == [2]


def test_the_snapshot_names_the_batch_and_a_table_property_outlives_it(lake: Lake) -> None:
    txn = new_txn(12)
    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS, 12), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    first = lake.table().snapshots()
    assert len(first) == 1
    assert first[0].summary is not None
    told = first[0].summary.additional_properties
    assert {
        name: told[name] for name in (module.APPLICATION, module.SEQUENCE, module.ATTEMPT, module.SINK)
    } == {
        module.APPLICATION: txn.application_id,
        module.SEQUENCE: "12",
        module.ATTEMPT: txn.attempt,
        module.SINK: "conformance",
    }
    table = lake.table()
    table.append(ROWS.slice(0, 1))
    table.maintenance.expire_snapshots().by_id(first[0].snapshot_id).commit()
    assert [each.snapshot_id for each in lake.table().snapshots()] != [first[0].snapshot_id]
    with opened(lake.system()) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert len(lake.visible()) == ROWS.num_rows + 1


def test_a_commit_with_a_lost_answer_is_found_at_the_next_try(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog committed the snapshot but reported a conflict; the next try finds the batch."""
    txn = new_txn()
    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        _after_commit_table(monkeypatch, _conflict)
        assert sink.commit(txn, deadline()) == OK
    assert len(lake.visible()) == ROWS.num_rows


def test_a_concurrent_commit_of_another_writer_is_kept(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    txn = new_txn()
    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        tries: list[Table] = []
        real = IcebergSink.publish

        def append(self: IcebergSink, table: Table, *rest: Any) -> Exception | None:
            tries.append(table)
            if len(tries) <= 2:
                lake.table().append(ROWS.slice(0, 1))  # after the sink has loaded the table
            return real(self, table, *rest)

        monkeypatch.setattr(IcebergSink, "publish", append)
        assert sink.commit(txn, deadline()) == OK
    assert len(tries) == 3
    assert len(lake.visible()) == ROWS.num_rows + 2
    assert len(lake.table().snapshots()) == 3


def test_columns_are_added_although_another_writer_adds_rows_meanwhile(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog refuses the new schema, and the schema of the table is the same as before."""
    from pyiceberg.catalog.sql import SqlCatalog

    lake.write_batch(ROWS, 1)
    wider = ROWS.append_column("note", pa.array(["n"] * ROWS.num_rows))
    real, conflicts = SqlCatalog.commit_table, [_conflict] * 2

    def commit_table(self: SqlCatalog, *args: Any) -> Any:
        if conflicts:
            conflicts.pop()()
        return real(self, *args)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    lake.write_batch(wider, 2, schema_evolution="add")
    assert not conflicts
    assert [row["note"] for row in lake.visible()].count("n") == ROWS.num_rows
    conflicts.append(_conflict)
    with opened(lake.system(schema_evolution="add")) as sink, pytest.raises(SinkRetryableError, match="kept"):
        sink.make_ready(wider.append_column("more", wider["note"]).schema, Deadline.after_seconds(0))


def test_columns_are_widened_and_never_narrowed(lake: Lake) -> None:
    narrow = pa.table({"id": pa.array([1], pa.int32())})
    wide = pa.table({"id": pa.array([2**40], pa.int64())})
    lake.write_batch(narrow, 1)
    with pytest.raises(InvalidSchemaError, match="id"):
        lake.write_batch(wide, 2)
    lake.write_batch(wide, 2, schema_evolution="add")
    lake.write_batch(narrow, 3, schema_evolution="add")
    assert sorted(row["id"] for row in lake.visible()) == [1, 1, 2**40]
    text = pa.table({"id": ["x"]})
    with pytest.raises(InvalidSchemaError, match="cannot be evolved"):
        lake.write_batch(text, 4, schema_evolution="add")


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.time64("ns"), pa.list_(pa.null()), pa.decimal256(60)])
@pytest.mark.parametrize("exists", [True, False])
def test_a_type_that_iceberg_does_not_have_is_named(lake: Lake, kind: pa.DataType, exists: bool) -> None:
    if exists:
        lake.write_batch(pa.table({"id": [1]}), 1)
    with pytest.raises(InvalidSchemaError, match="odd"):
        lake.write_batch(pa.table({"id": [1], "odd": pa.array([None], kind)}), 2, schema_evolution="add")


def test_a_type_that_does_not_fit_its_column_is_named(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    inner = pa.struct([("x", pa.int32())])
    lake.write_batch(pa.table({"a": pa.array([{"x": 1}], inner), "b": pa.array([[1]], pa.list_(pa.int32()))}))
    wrong = pa.table({"a": pa.array([{"x": "1"}]), "b": pa.array([["1"]])})
    with pytest.raises(
        InvalidSchemaError,
        match=r"'a\.x' is string in the frame and int32 in the table; column 'b\.element' is",
    ):
        lake.write_batch(wrong)
    with pytest.raises(InvalidSchemaError, match="duration"):
        lake.write_batch(pa.table({"a": pa.array([1], pa.duration("us"))}))
    assert capsys.readouterr().out == "", "a Python worker's standard output belongs to Spark"


def files_of(lake: Lake) -> list[pa.Table]:
    """Reads the data files of the table with Arrow, because pyiceberg's own reader loses nulls of lists."""
    paths = [urlsplit(each.file.file_path).path for each in lake.table().scan().plan_files()]
    return [pq.ParquetFile(each).read() for each in paths]


def test_a_null_list_or_map_of_structs_is_not_an_empty_one(lake: Lake) -> None:
    inner = pa.struct([("x", pa.int64())])
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "list": pa.array([None, [], [{"x": 1}, None]], pa.list_(inner)),
            "map": pa.array([None, [], [("k", None)]], pa.map_(pa.string(), inner)),
        }
    )
    lake.write_batch(rows)
    assert pa.concat_tables(files_of(lake)).sort_by("id").to_pylist() == rows.to_pylist()


UUID = "0123ABCD-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize("by", [None, IdentityTransform(), BucketTransform(4)])
def test_texts_and_bytes_go_to_columns_of_uuid_and_fixed(lake: Lake, by: Any) -> None:
    """As in Spark, which has neither type."""
    last = "ffffffff-ffff-ffff-ffff-ffffffffffff"
    schema = Schema(
        NestedField(1, "u", UUIDType(), required=False),
        NestedField(2, "f", FixedType(3), required=False),
        NestedField(3, "s", StructType(NestedField(5, "u", UUIDType(), required=True)), required=False),
        NestedField(4, "l", ListType(6, FixedType(2), element_required=False), required=False),
        NestedField(7, "b", UUIDType(), required=False),
    )
    spec = PartitionSpec() if by is None else PartitionSpec(PartitionField(1, 1000, by, "p"))
    catalog = load_catalog("default", **lake.catalog)
    catalog.create_namespace("lake")
    catalog.create_table(NAME, schema, partition_spec=spec)
    rows = pa.table(
        {
            "U": [UUID, None, last, UUID[:-1], *[None] * 4],
            "f": pa.array([b"abc", b"\0\0\0", None, None, b"ab", b"abcd", None, None]),
            "S": pa.array([{"U": UUID}, None, {"U": last}, *[None] * 3, {"U": "x"}, {"U": None}]),
            "l": pa.array([[b"ab", None], [], *[None] * 6], pa.list_(pa.binary())),
            "b": pa.array([uuid.UUID(UUID).bytes, *[None] * 7]),
        }
    )
    found = refusals(lake, rows)
    assert {row: text.partition(" (Iceberg")[0] for row, text in found.items()} == {
        3: "column 'U' (text) is not a UUID",
        4: "column 'f' (bytes) does not have exactly 3 bytes",
        5: "column 'f' (bytes) does not have exactly 3 bytes",
        6: "column 'S.U' (text) is not a UUID",
        7: f"column 'S.U' (text) is null (a required column of the {lake.label})",
    }
    lake.write_batch(without(rows, found))
    first, second = uuid.UUID(UUID), uuid.UUID(last)
    seen = [row for table in files_of(lake) for row in table.to_pylist()]
    assert sorted(seen, key=lambda row: str(row["u"])) == [
        {"u": first, "f": b"abc", "s": {"u": first}, "l": [b"ab", None], "b": first},
        {"u": None, "f": b"\0\0\0", "s": None, "l": [], "b": None},
        {"u": second, "f": None, "s": {"u": second}, "l": None, "b": None},
    ]
    if isinstance(by, IdentityTransform):  # pyiceberg does not find files by them
        partitions = [each.file.partition[0] for each in lake.table().scan().plan_files()]
        assert sorted(map(str, partitions)) == sorted(map(str, (first, None, second)))
    else:
        plan = lake.table().scan(row_filter=EqualTo("u", second)).plan_files()
        assert sum(each.file.record_count for each in plan) == 1


def test_numbers_that_are_equal_or_no_numbers_are_written_once(lake: Lake) -> None:
    """pyiceberg's own partitioning doubles rows with 0.0 and -0.0, and loses those with NaN."""
    values = [0.0, -0.0, float("nan"), float("nan"), float("-inf"), None, 1.5]
    lake.write_batch(pa.table({"id": range(7), "x": values}), partition_by="x")
    seen = pa.concat_tables(files_of(lake)).sort_by("id")
    assert seen["id"].to_pylist() == list(range(7))
    assert [str(each) for each in seen["x"].to_pylist()] == [str(each) for each in values]


def test_a_partition_value_may_be_longer_than_a_file_name(lake: Lake) -> None:
    values = ["x" * 10_000, "ž" * 100, "/..", "", None, "a"]
    lake.write_batch(pa.table({"id": range(6), "x": values}), partition_by="x")
    assert sorted((row["id"], row["x"]) for row in lake.visible()) == list(enumerate(values))
    for value in values[:4]:
        found = lake.table().scan(row_filter=EqualTo("x", value))
        assert [row["x"] for row in found.to_arrow().to_pylist()] == [value]
        assert len(list(found.plan_files())) == 1


def test_times_beyond_the_year_9999_are_refused_by_a_rule(lake: Lake) -> None:
    """pyiceberg cannot write the bounds of a file that has them."""
    far = [2**62, -(2**62), 253_402_300_799_999_999, None]
    rows = pa.table(
        {
            "at": pa.array(far, pa.timestamp("us", "UTC")),
            "days": pa.array([None, None, None, [2**30]], pa.list_(pa.int32())).view(pa.list_(pa.date32())),
        }
    )
    found = refusals(lake, rows)
    where = f"({lake.label}, as pyiceberg writes it)"
    assert found == {
        row: f"column {name} is before 0001-01-01 or after 9999-12-31 {where}"
        for row, name in ((0, "'at' (timestamp)"), (1, "'at' (timestamp)"), (3, "'days.element' (date)"))
    }
    lake.write_batch(without(rows, found))
    assert lake.table().scan().to_arrow()["at"].cast(pa.int64()).to_pylist() == far[2:3]


def test_a_required_column_stays_required_when_it_is_widened(lake: Lake) -> None:
    """pyiceberg would make it optional, because every column of a frame is."""
    inner = pa.struct([pa.field("x", pa.int32(), nullable=False)])
    lake.create(pa.schema([pa.field("id", pa.int32(), nullable=False), ("s", inner)]))
    of_rows = pa.struct([("X", pa.int64()), ("y", pa.string())])
    rows = pa.table({"ID": [2**40], "S": pa.array([{"X": 2**40, "y": "z"}], of_rows)})
    lake.write_batch(rows, schema_evolution="add")
    assert lake.visible() == [{"id": 2**40, "s": {"x": 2**40, "y": "z"}}]
    fields = lake.table().schema().fields
    assert [each.required for each in fields] == [True, False]
    assert [each.required for each in fields[1].field_type.fields] == [True, False]


def test_names_that_differ_only_in_case_are_matched_by_their_spelling(lake: Lake) -> None:
    lake.create(pa.schema([("id", pa.int64()), ("ID", pa.string()), ("x", pa.int64())]))
    lake.write_batch(pa.table({"ID": ["a"], "X": [3], "id": [1]}))
    assert lake.visible() == [{"id": 1, "ID": "a", "x": 3}]
    with pytest.raises(InvalidSchemaError, match="column 'Id' may be each of 'id' and 'ID' in the table"):
        lake.write_batch(pa.table({"Id": [1]}), schema_evolution="add")


def test_what_pyiceberg_cannot_commit_is_refused_at_the_start(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.write_batch(ROWS, 1, properties={"format-version": "1"}, partition_by="name")
    with lake.table().update_spec() as spec:
        spec.remove_field("name")
    lake.write_batch(ROWS, 2)
    with lake.table().update_schema() as schema:
        schema.delete_column("name")  # its field in the spec, which version 1 keeps, has no source now
    rows = ROWS.select(["id"])
    with pytest.raises(InvalidOptionError, match="partition fields that this sink cannot write: name"):
        lake.write_batch(rows, 3)
    monkeypatch.setattr(module, "_FORMAT_VERSIONS", (2,))
    with pytest.raises(InvalidOptionError, match="version 1 of Iceberg's format; this sink writes 2"):
        lake.write_batch(rows, 3)


def test_a_table_is_created_only_if_the_option_allows_it(lake: Lake) -> None:
    with pytest.raises(InvalidOptionError, match=r"no Iceberg table 'lake\.orders'"):
        lake.write_batch(ROWS, create=False)
    lake.write_batch(ROWS, properties={"write.parquet.compression-codec": "snappy"})
    assert lake.table().properties["write.parquet.compression-codec"] == "snappy"
    lake.write_batch(ROWS, create=False)
    assert len(lake.visible()) == 2 * ROWS.num_rows


@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_a_batch_whose_table_was_dropped_is_refused(lake: Lake, when: str) -> None:
    """The staged files belong to the dropped table."""
    txn = new_txn()
    with opened(lake.system()) as sink:
        staged = stage(sink, ROWS)
        if when == "commit":
            assert sink.prepare(txn, staged, deadline()) == OK
        load_catalog("default", **lake.catalog).drop_table(NAME)
        sink.make_ready(ROWS.schema, deadline())
        is_prepare = when == "prepare"
        outcome = sink.prepare(txn, staged, deadline()) if is_prepare else sink.commit(txn, deadline())
    assert isinstance(outcome, Fatal)
    assert "created again" in outcome.why
    assert lake.visible() == []


@pytest.mark.parametrize("merge", ["false", "true"])
@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_a_changed_partition_spec_does_not_fail_a_batch(lake: Lake, when: str, merge: str) -> None:
    """The files keep the spec with which they were written, and the table keeps its new spec."""
    lake.write_batch(ROWS.slice(0, 2), 1, partition_by="name", properties=_MERGE[merge])
    txn, after = new_txn(2), new_txn(3)
    with opened(lake.system()) as sink:
        staged = stage(sink, ROWS.slice(2))
        if when == "commit":
            assert sink.prepare(txn, staged, deadline()) == OK
        with lake.table().update_spec() as spec:
            spec.remove_field("name")
            spec.add_field("id", IdentityTransform(), "id_part")
        with lake.table().update_schema() as schema:
            schema.rename_column("amount", "price")
        if when == "prepare":
            assert sink.prepare(txn, staged, deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
        assert [each.name for each in lake.table().spec().fields] == ["id_part"]
        again = stage(sink, pa.table({"id": pa.array([9], pa.int64()), "name": ["z"]}))
        assert sink.prepare(after, again, deadline()) == OK
        assert sink.commit(after, deadline()) == OK
    assert sorted(row["id"] for row in lake.visible()) == [0, 1, 2, 3, 4, 9]
    files = lake.table().inspect.files().to_pylist()
    assert {file["spec_id"] for file in files} == {1, 2}
    for column, value in (("name", "a"), ("id", 9)):  # both specs prune
        rows = lake.table().scan(row_filter=EqualTo(column, value)).to_arrow()
        assert rows.num_rows == 1


def test_a_widened_partition_column_does_not_fail_a_batch(lake: Lake) -> None:
    narrow = pa.table({"id": pa.array([1, 2], pa.int32())})
    txn = new_txn()
    with opened(lake.system(partition_by="id")) as sink:
        assert sink.prepare(txn, stage(sink, narrow), deadline()) == OK
        with lake.table().update_schema() as schema:
            schema.update_column("id", LongType())
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in lake.visible()) == [1, 2]


_MERGE = {
    "false": {},
    "true": {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"},
}


def test_all_options_are_parsed() -> None:
    stated = {
        "sink.w.type": "iceberg",
        "sink.w.table": NAME,
        "sink.w.catalog.name": "prod",
        "sink.w.catalog.uri": "postgresql+psycopg2://joe:hunter2@db/iceberg",
        "sink.w.catalog.s3.session-token": "tok3n-of-mine",
        "sink.w.catalog.s3.region": "eu-central-1",
        "sink.w.partition.by": "days(ts), bucket(16, id), country",
        "sink.w.properties.format-version": "2",
    }
    (spec,) = specs.parse(["w"], stated)
    target = IcebergSink.from_options(spec.options)._to  # type: ignore[attr-defined]
    assert target.catalog == "prod"
    assert set(target.properties) == {"uri", "s3.session-token", "s3.region"}
    assert target.table_properties == {"format-version": "2"}
    assert target.partition_by == (
        PartitionBy("ts", "day", "ts_day"),
        PartitionBy("id", "bucket[16]", "id_bucket"),
        PartitionBy("country", "identity", "country"),
    )
    assert set(spec.secret_values) == {"hunter2", "tok3n-of-mine"}
    assert not any(secret in f"{spec!r}{target!r}" for secret in spec.secret_values)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("partition.by", "weeks(ts)"),
        ("partition.by", "bucket(0, id)"),
        ("partition.by", "days(ts), days(ts)"),
        ("partition.by", ""),
        ("table", "orders"),
        ("schema.evolution", "drop"),
        ("catalogue", "x"),
        ("catalog.", "x"),
    ],
)
def test_an_invalid_option_is_refused(option: str, text: str) -> None:
    stated = {"sink.w.type": "iceberg", "sink.w.table": NAME, f"sink.w.{option}": text}
    with pytest.raises(InvalidOptionError, match=option.rstrip(".")):
        specs.parse(["w"], stated)


def test_an_unreachable_catalog_is_retried(lake: Lake) -> None:
    from kafka_eos_source.errors import RetriableError

    sink = constructors.iceberg(NAME, catalog={"type": "rest", "uri": "http://127.0.0.1:9/"}).build()
    sink.open(SinkContext("w", "app", "cluster", NotesFolder(str(lake.folder / "checkpoint"))))
    with pytest.raises((RetriableError, OSError)):
        sink.make_ready(ROWS.schema, deadline())


def _conflict() -> None:
    from pyiceberg.exceptions import CommitFailedException

    raise CommitFailedException("the answer was lost")


def _after_commit_table(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    real = SqlCatalog.commit_table

    def commit_table(self: SqlCatalog, *args: Any) -> Any:
        real(self, *args)
        then()

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignores a developer's own .pyiceberg.yaml."""
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
