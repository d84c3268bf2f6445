"""The Iceberg sink: the contract, and behaviour that is specific to Iceberg."""

from __future__ import annotations

import datetime
import decimal
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    SinkRetryableError,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import specs
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
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType

from kafka_eos_source.sinks import iceberg as module
from kafka_eos_source.sinks.iceberg import IcebergSink, PartitionBy, partition_by

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
        return IcebergSink(NAME, catalog=self.catalog, **{**self.options, **options})

    def table(self) -> Table:
        return load_catalog("default", **self.catalog).load_table(NAME)

    def visible(self) -> Rows:
        catalog = load_catalog("default", **self.catalog)
        return catalog.load_table(NAME).scan().to_arrow().to_pylist() if catalog.table_exists(NAME) else []

    def system(self, rows: pa.Table | None = None, **options: Any) -> System:
        return System(
            lambda: self.sink(**options), self.visible, store=str(self.folder / "checkpoint"), rows=rows
        )

    def write_batch(self, rows: pa.Table, batch_id: int = 7, **options: Any) -> None:
        txn = new_txn(batch_id)
        with opened(self.system(**options)) as sink:
            sink.check(rows.schema, deadline())
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
    by = partition_by("partition.by", "days(at), bucket(4, id), truncate(1, price), day")
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


def test_a_kill_between_snapshot_and_note_is_recovered(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    txn = new_txn()
    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        with monkeypatch.context() as patch:
            patch.setattr(NotesFolder, "remove", _die)
            with pytest.raises(KeyboardInterrupt):
                sink.commit(txn, deadline())
    store = NotesFolder(str(lake.folder / "checkpoint" / "conformance"))
    assert store.names() == [str(txn)]
    with opened(lake.system()) as sink:
        assert list(sink.recover(deadline())) == []
        assert sink.commit(txn, deadline()) == OK
    assert store.names() == []
    assert len(lake.visible()) == ROWS.num_rows


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


def test_many_queries_write_one_table(lake: Lake) -> None:
    rows, txns = ROWS.slice(0, 2), [new_txn(3, f"query{n}") for n in range(3)]
    for txn in txns:
        with opened(lake.system(), txn.application_id) as sink:
            assert sink.prepare(txn, stage(sink, rows, 3), deadline()) == OK
    outcomes = []

    def commit(txn: Any) -> None:
        with opened(lake.system(), txn.application_id) as sink:
            outcomes.append(sink.commit(txn, deadline()))

    threads = [threading.Thread(target=commit, args=(txn,)) for txn in txns]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert outcomes == [OK] * 3
    assert len(lake.visible()) == 3 * 2


def test_new_columns_fail_or_are_added(lake: Lake) -> None:
    lake.write_batch(ROWS, 1)
    wider = ROWS.append_column("note", pa.array(["n"] * ROWS.num_rows))
    with pytest.raises(InvalidSchemaError, match="note"):
        lake.write_batch(wider, 2)
    assert len(lake.visible()) == ROWS.num_rows
    lake.write_batch(wider, 2, schema_evolution="add")
    lake.write_batch(ROWS.select(["name", "id"]), 3)  # missing columns are null; the order does not matter
    notes = [row["note"] for row in lake.visible()]
    assert (notes.count("n"), notes.count(None)) == (ROWS.num_rows, 2 * ROWS.num_rows)


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
        sink.check(wider.append_column("more", wider["note"]).schema, Deadline.after_seconds(0))


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


def test_a_required_column_takes_rows_that_have_it(lake: Lake) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    catalog = load_catalog("default", **lake.catalog)
    catalog.create_namespace("lake")
    catalog.create_table(NAME, schema)
    lake.write_batch(ROWS.select(["id", "name"]))
    assert len(lake.visible()) == ROWS.num_rows
    with pytest.raises(InvalidRecordError, match="'id' is null"):
        lake.write_batch(pa.table({"id": pa.array([1, None], pa.int64())}))
    with pytest.raises(InvalidSchemaError, match="requires the column 'id'"):
        lake.write_batch(ROWS.select(["name"]), schema_evolution="add")
    assert len(lake.visible()) == ROWS.num_rows


def test_a_type_that_does_not_fit_its_column_is_named(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    inner = pa.struct([("x", pa.int32())])
    lake.write_batch(pa.table({"a": pa.array([{"x": 1}], inner), "b": pa.array([[1]], pa.list_(pa.int32()))}))
    wrong = pa.table({"a": pa.array([{"x": "1"}]), "b": pa.array([["1"]])})
    with pytest.raises(
        InvalidSchemaError,
        match=r"'a\.x' is string in the frame and int in the table; column 'b\.element' is",
    ):
        lake.write_batch(wrong)
    with pytest.raises(InvalidSchemaError, match="duration"):
        lake.write_batch(pa.table({"a": pa.array([1], pa.duration("us"))}))
    assert capsys.readouterr().out == "", "a Python worker's standard output belongs to Spark"


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
        sink.check(ROWS.schema, deadline())
        is_prepare = when == "prepare"
        outcome = sink.prepare(txn, staged, deadline()) if is_prepare else sink.commit(txn, deadline())
    assert isinstance(outcome, Fatal)
    assert "created again" in outcome.why
    assert lake.visible() == []


@pytest.mark.parametrize("merge", ["false", "true"])
@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_a_changed_partition_spec_does_not_fail_a_batch(lake: Lake, when: str, merge: str) -> None:
    """The files keep the spec with which they were written, and the table keeps its new spec."""
    lake.write_batch(ROWS.slice(0, 2), 1, partition_by=partition_by("p", "name"), properties=_MERGE[merge])
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
    with opened(lake.system(partition_by=partition_by("p", "id"))) as sink:
        assert sink.prepare(txn, stage(sink, narrow), deadline()) == OK
        with lake.table().update_schema() as schema:
            schema.update_column("id", LongType())
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in lake.visible()) == [1, 2]


def test_a_data_file_that_vanished_after_prepare_is_never_committed(lake: Lake) -> None:
    """The removal of orphan files may delete it, and a snapshot with a missing file fails every reader."""
    lake.write_batch(ROWS, 1)
    txn = new_txn(2)
    with opened(lake.system()) as sink:
        staged = stage(sink, ROWS)
        assert sink.prepare(txn, staged, deadline()) == OK
        file = Path(urlsplit(staged.receipts[0].files[0]["path"]).path)
        whole = file.read_bytes()
        file.unlink()
        outcome = sink.commit(txn, deadline())
        assert isinstance(outcome, Fatal)
        assert file.name in outcome.why
        assert len(lake.visible()) == ROWS.num_rows, "the table is as it was"
        assert list(sink.recover(deadline())) == [txn]
        file.write_bytes(whole)  # the operator restores it
        assert sink.commit(txn, deadline()) == OK
    assert len(lake.visible()) == 2 * ROWS.num_rows


_MERGE = {
    "false": {},
    "true": {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"},
}


def test_a_missing_data_file_fails_the_batch_before_kafka_commits(lake: Lake) -> None:
    with opened(lake.system()) as sink:
        staged = stage(sink, ROWS)
        path = staged.receipts[0].files[0]["path"]
        Path(path.removeprefix("file://")).unlink()
        outcome = sink.prepare(new_txn(), staged, deadline())
    assert isinstance(outcome, Fatal)
    assert path in outcome.why


def test_a_task_writes_a_file_when_its_buffer_is_full_and_deletes_its_files_on_failure(lake: Lake) -> None:
    from kafka_eos_source.sinks.contract import StageContext

    rows = pa.table({"id": range(300_000)})
    with opened(lake.system(buffer_bytes=1 << 20)) as sink:
        for end in ("finish", "discard"):
            to = sink.stage(StageContext(1, uuid.uuid4().hex, rows.schema, _no_parts))
            for batch in rows.to_batches(max_chunksize=50_000):
                to.write(batch)
            written = list((lake.folder / "warehouse").rglob("*.parquet"))
            if end == "finish":
                staged = to.finish()
                assert len(staged.files) == 2
                assert sum(each["rows"] for each in staged.files) == rows.num_rows
            else:
                assert len(written) == 2 + 2
                to.discard()
                assert len(list((lake.folder / "warehouse").rglob("*.parquet"))) == 2


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

    sink = IcebergSink(NAME, catalog={"type": "rest", "uri": "http://127.0.0.1:9/"})
    sink.open(SinkContext("w", "app", "cluster", NotesFolder(str(lake.folder / "checkpoint"))))
    with pytest.raises((RetriableError, OSError)):
        sink.check(ROWS.schema, deadline())


def _die(*_: Any) -> None:
    raise KeyboardInterrupt


def _no_parts() -> Any:
    raise AssertionError("this sink stages rows itself")


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
