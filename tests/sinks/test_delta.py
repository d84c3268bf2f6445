"""The Delta sink: the contract, and behaviour that is specific to Delta."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.sinks import constructors, specs
from kafka_eos_source.sinks.contract import OK, Fatal, SinkTxn, StageContext
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import (
    CLUSTER_ID,
    OTHER_CLUSTER_ID,
    ROWS,
    Rows,
    SinkConformance,
    System,
    deadline,
    new_txn,
    opened,
    stage,
)

pytest.importorskip("deltalake", reason="needs pip install 'kafka-eos-source[delta]'")

from deltalake import DeltaTable, write_deltalake

from kafka_eos_source.sinks import delta as module
from kafka_eos_source.sinks.delta import DeltaSink
from kafka_eos_source.sinks.delta_files import Folder, statistics
from tests.sinks.table_format_kit import TableFormatKit, die, no_parts, refusals, without
from tests.support.row_rules import NOT_UTF8


@dataclass
class Lake:
    """A table in a local folder, and factories of sinks for it."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder / "orders")

    @property
    def label(self) -> str:
        return f"Delta table {self.path!r}"

    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    def visible(self) -> Rows:
        return self.table().to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(self.path) else []

    def system(self, **options: Any) -> System:
        # delta-rs does not work in a process that was forked after its first use, so tests raise instead
        return System(
            lambda: constructors.delta(self.path, **options).build(),
            self.visible,
            store=str(self.folder / "checkpoint"),
            in_process=True,
            poison=NOT_UTF8,
        )

    def create(self, schema: pa.Schema) -> object:
        return DeltaTable.create(self.path, schema)

    def file_of(self, staged: Any) -> Path:
        return Path(self.path, staged.files[0].path)

    def write_batch(self, rows: pa.Table, batch_id: int = 7, **options: Any) -> SinkTxn:
        txn = new_txn(batch_id)
        with opened(self.system(**options)) as sink:
            sink.make_ready(rows.schema, deadline())
            assert sink.prepare(txn, stage(sink, rows, batch_id), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
        return txn


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


class TestDelta(SinkConformance):
    depth = 2
    most_kills = 10

    @pytest.fixture
    def system(self, lake: Lake) -> System:
        return lake.system()


class TestTable(TableFormatKit):
    """What both table formats promise."""


def every_type() -> pa.Table:
    utc = datetime.timezone.utc
    late = datetime.datetime(2020, 2, 29, 23, 59, 59, 999999, utc)
    old = datetime.datetime(1969, 12, 31, tzinfo=utc)
    price = decimal.Decimal("1.50")
    inner = pa.struct([("x", pa.int32()), ("y", pa.string())])
    return pa.table(
        {
            "id": pa.array([1, 2, None], pa.int64()),
            "small": pa.array([1, -2, None], pa.int16()),
            "flag": pa.array([True, False, None]),
            "real": pa.array([1.5, float("inf"), None], pa.float32()),
            "price": pa.array([price, -2 * price, None], pa.decimal128(10, 2)),
            "day": pa.array([datetime.date(2020, 2, 29), datetime.date(1969, 12, 31), None]),
            "at": pa.array([late, old, None], pa.timestamp("us", "UTC")),
            "local": pa.array([datetime.datetime(2020, 1, 1), None, None], pa.timestamp("us")),
            "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "more": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "inner": pa.array([{"x": 1, "y": "z"}, {"x": None, "y": None}, None], inner),
            "name": pa.array(["a/b=c %20", "ž", None]),
        }
    )


def partition_texts(lake: Lake) -> set[str | None]:
    """Returns the values of partition columns as the log has them."""
    lines = [line for each in Path(lake.path, "_delta_log").glob("*.json") for line in each.open()]
    added = [found["add"] for line in lines if "add" in (found := json.loads(line))]
    return {text for each in added for text in each["partitionValues"].values()}


@pytest.mark.parametrize(
    "by", [(), ("id",), ("flag", "name"), ("price",), ("day",), ("at",), ("local",), ("small",)]
)
def test_rows_of_every_type_are_written_to_their_partition(lake: Lake, by: tuple[str, ...]) -> None:
    rows = every_type()
    if by == ("price",):  # delta-rs 1.6.6 shows its reader the partition value -1.50 as -1.-50
        at = rows.schema.get_field_index("price")
        rows = rows.set_column(at, rows.field(at), pc.abs(rows["price"]).cast(rows.field(at).type))
    lake.write_batch(rows, partition_by=by)
    found = lake.table().to_pyarrow_table().select(rows.schema.names).to_pylist()
    scanned = pa.table(lake.table().scan(columns=list(rows.schema.names)).read_all()).to_pylist()
    for each in (found, scanned):  # Arrow reads it, and so does DataFusion
        assert sorted(each, key=lambda row: row["id"] or 99) == rows.to_pylist()
    if by == ("at",):  # Spark reads a text without a zone in the zone of its session
        assert partition_texts(lake) == {"2020-02-29T23:59:59.999999Z", "1969-12-31T00:00:00.000000Z", None}
    assert len(lake.table().file_uris()) == (3 if by else 2)
    assert lake.table().metadata().partition_columns == list(by)


def test_readers_skip_files_by_statistics_and_lose_no_row(lake: Lake) -> None:
    rows = every_type()
    lake.write_batch(rows.slice(0, 1), 1)
    lake.write_batch(rows.slice(1, 1), 2)
    actions = pa.table(lake.table().get_add_actions(flatten=True))
    assert actions["num_records"].to_pylist() == [1, 1]
    assert sorted(actions["min.id"].to_pylist()) == [1, 2]
    for column, value in (
        ("id", "1"),
        ("at", "timestamp '2020-02-29T23:59:59.999999Z'"),
        ("name", "'a/b=c %20'"),
    ):
        seen = pa.table(lake.table().scan(predicate=f"{column} = {value}").read_all())
        assert seen["id"].to_pylist() == [1], column


def test_statistics_are_no_narrower_than_the_values(tmp_path: Path) -> None:
    utc = datetime.timezone.utc
    late = datetime.datetime(2020, 1, 1, 0, 0, 0, 1001, utc)
    rows = pa.table(
        {
            "long": ["b" * 40, "a" * 40],
            "short": ["ž", ""],
            "real": [1.0, float("nan")],
            "at": pa.array([late, None], pa.timestamp("us", "UTC")),
            "last": pa.array([datetime.datetime.max, None], pa.timestamp("us")),
            "none": pa.array([None, None], pa.int32()),
            "inner": [{"x": 1}, {"x": 2}],
        }
    )
    pq.write_table(rows, tmp_path / "f.parquet", row_group_size=1)
    found = json.loads(statistics(pq.read_metadata(tmp_path / "f.parquet"), rows.schema))
    assert found["numRecords"] == 2
    assert found["minValues"] == {
        "long": "a" * 32,
        "short": "",
        "at": "2020-01-01T00:00:00.001Z",
        "last": "9999-12-31T23:59:59.999",
    }
    assert found["maxValues"] == {"short": "ž", "at": "2020-01-01T00:00:00.002Z"}
    assert found["nullCount"] == {"long": 0, "short": 0, "real": 0, "at": 1, "last": 1, "none": 2}


def test_the_version_names_the_batch_and_log_cleanup_does_not_lose_it(lake: Lake) -> None:
    txn = lake.write_batch(ROWS, 12)
    table = lake.table()
    app_id = f"{txn.application_id}/{txn.cluster}/conformance"
    assert table.transaction_version(app_id) == 12
    assert table.history(1)[0][module.ID] == str(txn)
    write_deltalake(lake.path, ROWS.slice(0, 1), mode="append")
    lake.table().create_checkpoint()
    for each in (lake.folder / "orders" / "_delta_log").glob("*.json"):
        each.unlink()
    with opened(lake.system()) as sink:
        assert sink.commit(txn, deadline()) == OK
    assert len(lake.visible()) == ROWS.num_rows + 1


def test_a_batch_before_the_last_one_is_found_as_committed(lake: Lake) -> None:
    first = lake.write_batch(ROWS, 1)
    lake.write_batch(ROWS, 2)
    with opened(lake.system()) as sink:
        assert sink.commit(first, deadline()) == OK
        assert isinstance(sink.commit(new_txn(1), deadline()), Fatal)
    assert len(lake.visible()) == 2 * ROWS.num_rows


def test_a_batch_is_known_although_another_region_committed_and_the_table_was_compacted(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table keeps the last id of each region, not only the last one of the application.

    One region is killed between version and note. The other one commits, a compaction replaces all files,
    and the log is cleaned up, so no file and no commit shows the batch any more.
    """
    txn = new_txn(7)
    other = new_txn(8, cluster_id=OTHER_CLUSTER_ID)
    with opened(lake.system()) as sink:
        sink.make_ready(ROWS.schema, deadline())
        assert sink.prepare(txn, stage(sink, ROWS.slice(0, 2)), deadline()) == OK
        with monkeypatch.context() as patch:
            patch.setattr(NotesFolder, "remove", die)
            with pytest.raises(KeyboardInterrupt):
                sink.commit(txn, deadline())
    with opened(lake.system(), cluster_id=OTHER_CLUSTER_ID) as sink:
        assert sink.prepare(other, stage(sink, ROWS.slice(2)), deadline()) == OK
        assert sink.commit(other, deadline()) == OK
    lake.table().optimize.compact()
    lake.table().create_checkpoint()
    for each in (lake.folder / "orders" / "_delta_log").glob("*.json"):
        each.unlink()
    with opened(lake.system()) as sink:
        assert list(sink.recover(deadline())) == []
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in lake.visible()) == ROWS["id"].to_pylist()


@pytest.mark.parametrize("moment", ["before_version", "after_version"])
def test_the_next_process_finishes_a_commit_whose_driver_was_killed(lake: Lake, moment: str) -> None:
    """A separate process gets SIGKILL in its commit."""
    txn = new_txn()
    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
    killed = subprocess.run(
        [
            *(sys.executable, "-c", _COMMIT, lake.path),
            *(str(lake.folder / "checkpoint" / "conformance"), str(txn), CLUSTER_ID),
        ],
        env={**os.environ, failpoints.ENVIRONMENT_VARIABLE: f"sink.delta.{moment}=kill-worker"},
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(lake.visible()) == (ROWS.num_rows if moment == "after_version" else 0)
    with opened(lake.system()) as sink:
        assert list(sink.recover(deadline())) == ([] if moment == "after_version" else [txn])
        assert sink.commit(txn, deadline()) == OK
        assert list(sink.recover(deadline())) == []
    assert len(lake.visible()) == ROWS.num_rows


@pytest.mark.parametrize("who", ["another writer", "a zombie of ours"])
def test_concurrent_commits_of_other_processes_are_kept(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Rows of other writers stay; if two processes commit one batch, the second finds it committed."""
    txn = new_txn()
    with opened(lake.system()) as sink, opened(lake.system()) as zombie:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        tries: list[DeltaTable] = []
        real = DeltaSink.publish

        def add(self: DeltaSink, table: DeltaTable, *rest: Any) -> Exception | None:
            tries.append(table)
            if len(tries) == 1:  # after the sink has loaded the table
                if who == "another writer":
                    write_deltalake(lake.path, ROWS.slice(0, 1), mode="append")
                else:
                    assert zombie.commit(txn, deadline()) == OK
            return real(self, table, *rest)

        monkeypatch.setattr(DeltaSink, "publish", add)
        assert sink.commit(txn, deadline()) == OK
    assert len(tries) == (1 if who == "another writer" else 2)
    assert len(lake.visible()) == ROWS.num_rows + (who == "another writer")


def test_a_commit_with_a_lost_answer_is_found_at_the_next_try(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalake.exceptions import CommitFailedError

    txn = new_txn()
    real = DeltaTable.create_write_transaction

    def lost(self: DeltaTable, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        raise CommitFailedError("the answer was lost")

    with opened(lake.system()) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        monkeypatch.setattr(DeltaTable, "create_write_transaction", lost)
        assert sink.commit(txn, deadline()) == OK
    assert len(lake.visible()) == ROWS.num_rows


def test_narrow_values_are_widened_and_wide_values_are_refused(lake: Lake) -> None:
    lake.write_batch(pa.table({"id": pa.array([2**40], pa.int64()), "x": pa.array([1.5], pa.float64())}), 1)
    lake.write_batch(pa.table({"id": pa.array([1], pa.int32()), "x": pa.array([0.5], pa.float32())}), 2)
    assert sorted(row["id"] for row in lake.visible()) == [1, 2**40]
    for rows in (pa.table({"id": ["1"]}), pa.table({"x": pa.array([1], pa.int64())})):
        with pytest.raises(InvalidSchemaError, match=f"'{rows.schema.names[0]}' is"):
            lake.write_batch(rows, 3, schema_evolution="add")


@pytest.mark.parametrize(
    "kind", [pa.duration("us"), pa.null(), pa.uint8(), pa.list_(pa.null()), pa.time64("us")]
)
def test_a_type_that_delta_does_not_have_is_named(lake: Lake, kind: pa.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match="cannot hold the frame"):
        lake.write_batch(pa.table({"id": [1], "odd": pa.array([None], kind)}))
    assert not DeltaTable.is_deltatable(lake.path)


def test_a_table_is_created_only_if_the_option_allows_it(lake: Lake) -> None:
    with pytest.raises(InvalidOptionError, match="there is no Delta table"):
        lake.write_batch(ROWS, create=False)
    with pytest.raises(InvalidOptionError, match=r"delta\.nonsense"):
        lake.write_batch(ROWS, properties={"delta.nonsense": "1"})
    with pytest.raises(InvalidOptionError, match=r"partition\.by"):
        lake.write_batch(ROWS, partition_by=("country",))
    lake.write_batch(ROWS, properties={"delta.appendOnly": "true"})
    assert lake.table().metadata().configuration == {"delta.appendOnly": "true"}
    lake.write_batch(ROWS, create=False)
    assert len(lake.visible()) == 2 * ROWS.num_rows


def test_a_table_with_constraints_is_refused(lake: Lake) -> None:
    """Delta's own writer checks each row against the constraints; this sink does not."""
    lake.write_batch(ROWS)
    lake.table().alter.add_constraint({"positive": "id >= 0"})
    with pytest.raises(InvalidOptionError, match=r"delta\.constraints\.positive"):
        lake.write_batch(ROWS)


def write_log(path: str, field: dict[str, Any], protocol: dict[str, Any], **properties: str) -> None:
    """Creates a table with one column by its log, as other writers of the protocol do."""
    schema = {"type": "struct", "fields": [{"nullable": True, "metadata": {}, **field}]}
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": [],
        "configuration": properties,
        "createdTime": 1,
    }
    log = Path(path, "_delta_log")
    log.mkdir(parents=True)
    actions = [{"commitInfo": {"timestamp": 1}}, {"protocol": protocol}, {"metaData": metadata}]
    (log / f"{0:020}.json").write_text("".join(json.dumps(each) + "\n" for each in actions))


def version_7(feature: str) -> dict[str, Any]:
    """Returns a protocol with one feature."""
    of_readers = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "typeWidening"}
    found = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [feature]}
    return found | ({"minReaderVersion": 3, "readerFeatures": [feature]} if feature in of_readers else {})


@pytest.mark.parametrize(
    "feature",
    [
        *("identityColumns", "rowTracking", "domainMetadata", "icebergCompatV2", "clustering"),
        *("typeWidening", "inCommitTimestamp", "allowColumnDefaults", "somethingNew"),
    ],
)
def test_a_feature_for_which_delta_rs_would_refuse_the_commit_is_refused_at_the_start(
    lake: Lake, feature: str
) -> None:
    """The commit of the table is after Kafka's, so the query could never continue."""
    write_log(lake.path, {"name": "id", "type": "long"}, version_7(feature))
    with opened(lake.system()) as sink:
        for call in (sink.check, sink.make_ready):
            with pytest.raises(InvalidOptionError, match=f"cannot write: the feature {feature}"):
                call(pa.schema([("id", pa.int64())]), deadline())


def test_tables_of_every_feature_that_the_sink_accepts_are_committed_to(lake: Lake, tmp_path: Path) -> None:
    versions = [{"minReaderVersion": 1, "minWriterVersion": each} for each in module._WRITER_VERSIONS]
    versions = [*versions[:-1], *map(version_7, sorted(module._FEATURES))]
    for number, protocol in enumerate(versions):
        table = Lake(tmp_path / str(number))
        write_log(table.path, {"name": "id", "type": "long"}, protocol)
        table.write_batch(pa.table({"ID": [1]}))
        assert pa.table(table.table().get_add_actions())["num_records"].to_pylist() == [1], protocol
    write_log(lake.path, {"name": "id", "type": "long"}, {"minReaderVersion": 1, "minWriterVersion": 6})
    with pytest.raises(InvalidOptionError, match="version 6 of the protocol"):
        lake.write_batch(pa.table({"id": [1]}))


def test_invariants_of_nested_fields_are_refused(lake: Lake) -> None:
    inner = {"name": "x", "type": "long", "nullable": True, "metadata": {"delta.invariants": "{}"}}
    array = {
        "type": "array",
        "elementType": {"type": "struct", "fields": [inner]},
        "containsNull": True,
    }
    write_log(lake.path, {"name": "l", "type": array}, {"minReaderVersion": 1, "minWriterVersion": 2})
    with pytest.raises(InvalidOptionError, match=r"column 'l\.element\.x' has delta\.invariants"):
        lake.write_batch(pa.table({"l": [[{"x": 1}]]}))


def test_the_lengths_of_char_and_varchar_are_rules(lake: Lake) -> None:
    """As Spark writes them, which keeps such types in the metadata of a column only."""
    inner = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("d", "decimal(10,2)"), ("C", "string"), ("odd name", "string"))
    ]
    pairs = {
        "type": "map",
        "keyType": "string",
        "valueType": {
            "type": "array",
            "elementType": {"type": "struct", "fields": inner},
            "containsNull": True,
        },
        "valueContainsNull": True,
    }
    declared = "map<varchar(2),array<struct<d:decimal(10,2),C:char(3),`odd name`:string>>>"
    field = {"name": "m", "type": pairs, "metadata": {"__CHAR_VARCHAR_TYPE_STRING": declared}}
    write_log(lake.path, field, {"minReaderVersion": 1, "minWriterVersion": 2})
    of_struct = pa.struct([("d", pa.decimal128(10, 2)), ("c", pa.string()), ("odd name", pa.string())])
    values = [
        [("žž", [{"d": None, "c": "abc", "odd name": "long enough"}])],
        [("abc", [])],
        [("a", [None, {"d": None, "c": "abc ", "odd name": None}])],
        [("a", None)],
    ]
    rows = pa.table({"M": pa.array(values, pa.map_(pa.string(), pa.list_(of_struct)))})
    found = refusals(lake, rows)
    assert found == {
        1: f"column 'M.key' (text) is longer than 2 characters (varchar(2) in the {lake.label})",
        2: f"column 'M.value.element.c' (text) is longer than 3 characters (char(3) in the {lake.label})",
    }
    lake.write_batch(without(rows, found))
    assert len(lake.visible()) == 2


@pytest.mark.parametrize("text", ["", "varchar", "array<varchar(2)", "map<varchar(1),varchar(1)>", "\0<<<,"])
def test_a_type_in_metadata_that_does_not_match_the_column_is_no_rule(lake: Lake, text: str) -> None:
    kind = {"type": "array", "elementType": "long", "containsNull": True}
    field = {"name": "l", "type": kind, "metadata": {"__CHAR_VARCHAR_TYPE_STRING": text}}
    write_log(lake.path, field, {"minReaderVersion": 1, "minWriterVersion": 2})
    assert refusals(lake, pa.table({"l": [[1]]})) == {}


def test_times_beyond_the_year_9999_have_no_bounds_and_are_no_partition_values(lake: Lake) -> None:
    """Spark's types have them; Python and the texts of partition values do not."""
    far = pa.array([2**62, -(2**62), 0], pa.timestamp("us", "UTC"))
    days = pa.array([2**30, -(2**30), 0], pa.int32()).cast(pa.date32())
    rows = pa.table({"id": [1, 2, 3], "at": far, "day": days, "part": days})
    lake.write_batch(rows.slice(2), 1, partition_by="part")
    found = refusals(lake, rows)
    assert {row: text.split(" (")[0] for row, text in found.items()} == {
        0: "column 'part'",
        1: "column 'part'",
    }
    lake.write_batch(rows.set_column(3, "part", pa.array([0, 0, 0], pa.int32()).cast(pa.date32())), 2)
    table = lake.table().to_pyarrow_table().sort_by("id")
    assert table["at"].cast(pa.int64()).to_pylist() == [2**62, -(2**62), 0, 0]
    assert table["day"].cast(pa.int32()).to_pylist() == [2**30, -(2**30), 0, 0]
    statistics = pa.table(lake.table().get_add_actions(flatten=True))
    epoch = datetime.date(1970, 1, 1)
    bounds = list(zip(statistics["num_records"].to_pylist(), statistics["max.day"].to_pylist(), strict=True))
    assert sorted(bounds, key=repr) == [(1, epoch), (1, epoch), (2, None)]


@pytest.mark.parametrize("nested", [pa.map_(pa.string(), pa.timestamp("us")), pa.timestamp("us")])
@pytest.mark.parametrize("exists", [True, False])
def test_a_table_is_never_left_without_a_feature_that_its_columns_need(
    lake: Lake, nested: pa.DataType, exists: bool
) -> None:
    """delta-rs overlooks timestamps in maps when it creates a table, which then nobody can load."""
    rows = pa.table({"id": [1], "value": pa.array([{"x": None}], pa.struct([("x", nested)]))})
    if exists:
        lake.write_batch(rows.select(["id"]), 1)
    if pa.types.is_map(nested):
        with pytest.raises(InvalidSchemaError, match="'value' has timestamps without a time zone in a map"):
            lake.write_batch(rows, 2, schema_evolution="add")
        assert len(lake.visible()) == exists
        return
    lake.write_batch(rows, 2, schema_evolution="add")
    assert lake.table().protocol().writer_features == ["timestampNtz"]
    assert len(lake.visible()) == 1 + exists


def test_a_table_partitioned_by_bytes_is_refused(lake: Lake) -> None:
    rows = pa.table({"id": [1], "raw": [b"\xff"]})
    with pytest.raises(InvalidOptionError, match="binary column 'raw'"):
        lake.write_batch(rows, partition_by=("raw",))


@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_a_batch_whose_table_was_recreated_is_refused(lake: Lake, when: str) -> None:
    txn = new_txn()
    with opened(lake.system()) as sink:
        staged = stage(sink, ROWS)
        if when == "commit":
            assert sink.prepare(txn, staged, deadline()) == OK
        write_deltalake(lake.path + "2", ROWS.slice(0, 1))
        (lake.folder / "orders").rename(lake.folder / "gone")
        (lake.folder / "orders2").rename(lake.folder / "orders")
        is_prepare = when == "prepare"
        outcome = sink.prepare(txn, staged, deadline()) if is_prepare else sink.commit(txn, deadline())
    assert isinstance(outcome, Fatal)
    assert "created again" in outcome.why
    assert len(lake.visible()) == 1


def test_files_of_a_table_in_an_object_store_are_written_through_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the file system of delta-rs over a local folder."""
    from deltalake.fs import DeltaStorageHandler

    monkeypatch.setattr(
        Folder,
        "open",
        lambda self: (pafs.PyFileSystem(DeltaStorageHandler(self.uri, dict(self.storage))), ""),
    )
    lake.write_batch(ROWS, partition_by=("name",))
    assert sorted(row["id"] for row in lake.visible()) == sorted(ROWS["id"].to_pylist())
    with opened(lake.system()) as sink:
        to = sink.stage(StageContext(1, uuid.uuid4().hex, ROWS.schema, no_parts))
        to.write(ROWS.to_batches()[0])
        before = set((lake.folder / "orders").glob("*.parquet"))
        to.finish()
        to.discard()
    assert set((lake.folder / "orders").glob("*.parquet")) == before


def test_all_options_are_parsed() -> None:
    stated = {
        "sink.w.type": "delta",
        "sink.w.path": "s3://bucket/orders",
        "sink.w.storage.aws_secret_access_key": "hunter2",
        "sink.w.storage.azure_storage_account_key": "k3y-of-mine",
        "sink.w.storage.aws_region": "eu-central-1",
        "sink.w.partition.by": "country, day",
        "sink.w.properties": '{"delta.enableChangeDataFeed":"true"}',
    }
    (spec,) = specs.parse(["w"], stated)
    target = DeltaSink.from_options(spec.options)._to  # type: ignore[attr-defined]
    assert set(target.storage) == {"aws_secret_access_key", "azure_storage_account_key", "aws_region"}
    assert target.properties == {"delta.enableChangeDataFeed": "true"}
    assert target.partition_by == ("country", "day")
    assert set(spec.secret_values) == {"hunter2", "k3y-of-mine"}
    assert not any(secret in f"{spec!r}{target!r}" for secret in spec.secret_values)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("properties", "delta.appendOnly=true"),
        ("properties", '{"delta.appendOnly":true}'),
        ("partition.by", "a, a"),
        ("schema.evolution", "drop"),
        ("compression", "lzo"),
        ("storage_options", "x"),
    ],
)
def test_an_invalid_option_is_refused(option: str, text: str) -> None:
    stated = {"sink.w.type": "delta", "sink.w.path": "/tmp/t", f"sink.w.{option}": text}
    with pytest.raises(InvalidOptionError, match=option):
        specs.parse(["w"], stated)


_COMMIT = """
import sys
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.constructors import delta
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.sinks import deadline

path, store, text, cluster_id = sys.argv[1:]
txn = SinkTxn.parse(text)
sink = delta(path).build()
sink.open(SinkContext(txn.sink, txn.application_id, cluster_id, NotesFolder(store)))
sink.commit(txn, deadline())
"""
