"""Lookups in a store while its query runs return only committed data, all of the same batch."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from kafka_eos_source.errors import (
    ChangelogCompactedError,
    InvalidOptionError,
    InvalidSchemaError,
    NotUpToBoundError,
    StateError,
    StateLockedError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import tumbling
from kafka_eos_source.state.changelog.recovery import Reason, Restored
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.reading import snapshot
from kafka_eos_source.state.reading.decode import Selection, decoder
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.state.reading.snapshot import ChangelogCopy, Snapshot, of_folders
from kafka_eos_source.state.reading.stores import Changelog, folders, one_store
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.views import CommittedReader
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.local_state import APP, STORE, TOPIC, Machine, rows_of
from tests.state.processor.processor_shard import runner

FLIGHTS = pa.schema([("origin", pa.string()), ("delay", pa.int64())])
COUNTS = {"flights": agg.count(), "delay": agg.sum("delay")}
SOON = 200


def soon() -> Deadline:
    """Returns the deadline of reads that cannot succeed."""
    return Deadline.after_ms(SOON)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, AggregateProcessor(FLIGHTS, ["origin"], COUNTS), ["origin"])


def open_query(machine: Machine, **more: Any) -> StateQuery:
    return StateQuery(state_dir=machine.root, timeout_ms=SOON, **more)


def committed(machine: Machine, deadline: Deadline | None = None) -> Snapshot:
    deadline = Deadline.after_seconds(30) if deadline is None else deadline
    return of_folders(folders(machine.root), lambda _: machine.cut(), deadline)


def values(snapshot: Snapshot) -> dict[str, int]:
    """Returns rows with the number of flights of each origin."""
    found: dict[str, int] = {}
    for state in snapshot.states.values():
        description = state.view.get(META_KEY)
        if description is None:
            continue
        read = decoder(Description.from_json(description), Selection())
        for batch in read.batches(state.view.range(*read.span)):
            found |= {row["key"]["origin"]: row["value"]["flights"] for row in batch.to_pylist()}
    return found


def test_times_beyond_pythons_calendar_are_numbers(tmp_path: Path) -> None:
    """One record whose producer sets microseconds opens a window of the year 59,000, which ends in state."""
    schema = pa.schema([("page", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    processor = AggregateProcessor(
        schema, ["page"], {"views": agg.count()}, window=tumbling("1 minute", on="at", grace="1 hour")
    )
    machine = Machine(tmp_path, processor, ["page"])
    far = 1_800_000_000_000_000_000
    machine.batch(0, rows_of(schema, [("a", far + 60_000_000), ("b", far)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state:
        found = {row["key"]["page"]: row["key"]["window_start"] for row in state.all()}
        assert found == {"a": far + 60_000_000, "b": far}
        assert [row["value"] for row in state.rows("b")] == [{"views": 1}]


def test_a_query_returns_a_key_none_for_a_missing_key_and_all_rows(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 5), ("ŁÓDŹ", 1), (None, 7), ("JFK", -2)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state:
        assert (state.application_id, state.store, state.shards, state.batch_id) == (APP, STORE, 3, 0)
        assert state.get("JFK") == {"flights": 2, "delay": 3}
        assert state.get({"origin": "ŁÓDŹ"}) == {"flights": 1, "delay": 1}
        assert state.get(None) == {"flights": 1, "delay": 7}
        assert state.get("EWR") is None
        everything = {row["key"]["origin"]: row["value"]["delay"] for row in state.all()}
        assert everything == {"JFK": 3, "ŁÓDŹ": 1, None: 7}
        table = state.to_arrow()
        assert table.schema.names == ["key", "value", "partition_id"]
        assert sorted(table["value"].combine_chunks().field("flights").to_pylist()) == [1, 1, 2]
        assert {shard for shard, _ in state.raw()} == {0, 1, 2}
        with pytest.raises(InvalidSchemaError, match="not a key of this store; expected values of: origin"):
            state.get(("JFK", 1))
        with pytest.raises(InvalidSchemaError, match="expected values of: origin string"):
            state.get({"destination": "JFK"})
        with pytest.raises(InvalidOptionError, match="stateVarName is 'views'"):
            state.get("JFK", "views")
        with pytest.raises(InvalidOptionError, match="no order"):
            list(state.range("A"))


def test_keys_that_are_numbers_have_an_order(tmp_path: Path) -> None:
    schema = pa.schema([("user", pa.int64())])
    machine = Machine(tmp_path, AggregateProcessor(schema, ["user"], {"n": agg.count()}), ["user"])
    users = [-(2**63), -7, -1, 0, 3, 10, 11, 2**63 - 1]
    machine.batch(0, rows_of(schema, [(user,) for user in users]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state:
        found = [row["key"]["user"] for row in state.range(-7, 11)]
        assert sorted(found) == [-7, -1, 0, 3, 10]
        by_shard = [row["key"]["user"] for row in state.all() if row["partition_id"] == 1]
        assert by_shard == sorted(by_shard)
        assert {row["key"]["user"] for row in state.range(high=0)} == {-(2**63), -7, -1}
        with pytest.raises(InvalidSchemaError):
            state.get("seven")


def test_pending_changes_are_visible_only_if_the_token_names_them(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1), ("LGA", 1), ("EWR", 1), ("BOS", 1)]))
    with open_query(machine) as state:  # not committed, so not visible
        assert state.batch_id is None
        assert state.get("JFK") is None
        assert list(state.all()) == []
        assert state.to_arrow().num_rows == 0
    with committed(machine) as exact:
        assert values(exact) == {}
        assert exact.batch_id is None
    machine.commit()
    with open_query(machine) as state:
        assert list(state.all()) == []
    with committed(machine) as exact:
        assert values(exact) == {"JFK": 1, "LGA": 1, "EWR": 1, "BOS": 1}
        assert exact.batch_id == 0
    machine.batch(1, rows_of(FLIGHTS, [("JFK", 1), ("LGA", 1)]), task_attempt_id="lost")
    with committed(machine) as exact:
        assert values(exact) == {"JFK": 1, "LGA": 1, "EWR": 1, "BOS": 1}
    machine.batch(1, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    with committed(machine) as exact:
        assert values(exact)["JFK"] == 2
        assert values(exact)["LGA"] == 1


def test_all_shards_show_one_batch_while_tasks_promote_one_after_another(machine: Machine) -> None:
    origins = ["JFK", "LGA", "EWR", "BOS", "SFO", "LAX"]
    machine.batch(0, rows_of(FLIGHTS, [(origin, 1) for origin in origins]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
        with committed(machine) as exact:
            assert values(exact) == dict.fromkeys(origins, 1)
            assert {state.batch and state.batch.batch_id for state in exact.states.values()} == {0}


def test_a_shard_whose_batch_is_promoted_while_it_is_read_is_read_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1), ("LGA", 1)]))
    machine.commit()

    def promoted_meanwhile(reader: CommittedReader, *_args: object) -> None:
        monkeypatch.undo()
        machine.promote(reader.identity.shard)
        raise StateLockedError("the rows are removed")

    monkeypatch.setattr(CommittedReader, "promoted", promoted_meanwhile)
    with committed(machine) as exact:
        assert values(exact) == {"JFK": 1, "LGA": 1}


def test_a_query_reads_committed_state_while_the_owner_writes(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    shard = next(k for k in range(3) if len(machine.logs[k]) > 1)
    machine.promote(shard)
    with machine.open(shard) as owner:
        key = next(key for key, _ in owner.all() if key != META_KEY)
        owner.delete(key)
        with open_query(machine) as state:
            assert state.get("JFK") == {"flights": 1, "delay": 1}
            owner.commit({TopicPartition(TOPIC, shard): 9})
            assert state.get("JFK") == {"flights": 1, "delay": 1}  # the same batch as before
            state.refresh()
            assert state.get("JFK") is None


def test_a_shard_behind_the_committed_batch_is_an_error(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    machine.batch(
        1, rows_of(FLIGHTS, [("JFK", 1)]), only=[0, 2]
    )  # the task of shard 1 ran on another machine
    machine.commit()
    machine.committed[1] = machine.committed[0]
    machine.ends[1] += 1
    with pytest.raises(
        NotUpToBoundError, match="Kafka has committed batch 1, but on this machine shard 1 is at no batch"
    ):
        committed(machine, soon())


def test_a_database_newer_than_the_group_is_an_error(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    machine.committed = dict.fromkeys(range(machine.shards))  # the group was deleted
    with pytest.raises(
        NotUpToBoundError, match="Kafka has committed no batch, but on this machine shard 0 is at batch 0"
    ):
        committed(machine, soon())


def test_a_recreated_changelog_is_an_error(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    other = machine.cut()
    other = type(other)(**{**vars(other), "topic_id": "another"})
    with pytest.raises(StateMismatchError, match="another"):
        of_folders(folders(machine.root), lambda _: other, soon())


def test_a_query_may_require_a_minimum_position(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine, at_least=0) as state:
        with pytest.raises(NotUpToBoundError, match="reflects batch 0; expected batch 1 or later"):
            state.refresh(at_least=1)
        assert state.get("JFK") is not None  # still the state of the old batch
    tp = TopicPartition("flights", 0)
    machine.cut({tp: 10}).check({tp: 9})
    with pytest.raises(
        NotUpToBoundError, match=r"flights-0 up to offset 10 \(exclusive\), but not offset 10"
    ):
        machine.cut({tp: 10}).check({tp: 10})
    with pytest.raises(NotUpToBoundError, match="no batch"):
        Machine(machine.root, machine.processor, ["origin"]).cut().check(0)


def test_offsets_as_a_bound_need_kafka(machine: Machine) -> None:
    """Databases record no input offsets, so such a bound could never be reached."""
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    with pytest.raises(InvalidOptionError, match=r"at_least has the offsets .*'kafka' is not set"):
        open_query(machine, at_least={TopicPartition("flights", 0): 0})
    with open_query(machine) as state:
        with pytest.raises(InvalidOptionError, match="'kafka' is not set"):
            state.refresh(at_least={TopicPartition("flights", 0): 0})
        assert state.batches, "the query stays where it is"
    for bad in ("7", True, {("flights", 0): 0}):
        with pytest.raises(InvalidOptionError, match="expected a batch id, or offsets by TopicPartition"):
            open_query(machine, at_least=bad)


def test_a_query_names_the_shards_that_this_host_does_not_have(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1), ("LGA", 1), ("EWR", 1), ("BOS", 1)]), only=[0])
    machine.commit()
    machine.promote(0)
    with open_query(machine) as state:
        assert state.shards == 3
        with pytest.raises(StateError, match=r"shards \[1, 2\] of store 'counts' \(3 in all\)"):
            list(state.all())


def test_an_ambiguous_or_missing_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no state of"):
        one_store(tmp_path / "nowhere", None, None)
    for name in ("a", "b"):
        (tmp_path / "app" / name / "0" / "db").mkdir(parents=True)
        (tmp_path / "app" / name / "0" / "db" / "CURRENT").write_text("1\n")
    (tmp_path / "app" / "a" / "0.corrupt-17").mkdir()
    with pytest.raises(StateError, match=r"several stores in .*: app/a, app/b"):
        one_store(tmp_path, "app", None)
    assert [each.shard for each in one_store(tmp_path, None, "a")[2]] == [0]
    assert folders(tmp_path)[0].size_bytes() == 2
    with pytest.raises(InvalidOptionError, match="neither state_dir nor kafka"):
        StateQuery("app", "a")
    with pytest.raises(InvalidOptionError, match="needs both"):
        StateQuery("app", kafka={"kafka.bootstrap.servers": "b:1"})


def test_windows_are_queried_by_time_and_by_key(tmp_path: Path) -> None:
    schema = pa.schema([("page", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    processor = AggregateProcessor(
        schema, ["page"], {"views": agg.count()}, window=tumbling("1 minute", on="at", grace="1 hour")
    )
    machine = Machine(tmp_path, processor, ["page"])
    noon = dt.datetime(2026, 11, 21, 12, tzinfo=dt.timezone.utc)
    pages = ["home", *(f"page-{n}" for n in range(9))]  # in three shards, one of which "home" shares
    rows = [(page, noon + dt.timedelta(seconds=30 * n)) for n in range(6) for page in pages]
    machine.batch(0, rows_of(schema, rows))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state:
        home = list(state.rows("home"))
        assert [row["value"]["views"] for row in home] == [2, 2, 2]
        assert [row["key"]["window_start"] for row in home] == [
            noon + dt.timedelta(minutes=n) for n in range(3)
        ]
        ms = int(noon.timestamp() * 1000)
        first = list(state.range(ms, ms + 60_001))
        assert {row["key"]["page"] for row in first} == set(pages)
        assert {row["key"]["window_end"] for row in first} == {noon + dt.timedelta(minutes=1)}
        with pytest.raises(InvalidOptionError, match="3 rows of key, value"):
            state.get("home")


INT = StructType([StructField("n", IntegerType())])
TEXT = StructType([StructField("s", StringType())])


class Everything(StatefulProcessor):
    """One variable of each kind."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", INT)
        self._short = handle.getValueState("short", INT, 60_000)
        self._list = handle.getListState("list", INT)
        self._map = handle.getMapState("map", TEXT, INT)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timer_values: Any) -> Iterator[Any]:  # noqa: N802
        for row in rows:
            total = self._total.get()
            self._total.update(((total[0] if total else 0) + row.n,))
            self._short.update((row.n,))
            self._list.appendValue((row.n,))
            self._map.updateValue((f"m{row.n}",), (row.n,))
            self._handle.registerTimer(5_000 + row.n)
        yield (key[0],)

    def close(self) -> None: ...


@pytest.fixture
def everything(tmp_path: Path) -> StateQuery:
    ddl = "user bigint, n int"
    processor = runner(
        Everything(), key="user bigint", columns=ddl, output="user bigint", time_mode="ProcessingTime"
    )
    schema = pa.schema([("user", pa.int64()), ("n", pa.int32())])
    machine = Machine(tmp_path, processor, ["user"])
    machine.batch(0, rows_of(schema, [(1, 10), (1, 11), (2, 20), (1, 12)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    return open_query(machine)


def test_the_variables_of_a_stateful_processor_are_queried(everything: StateQuery) -> None:
    with everything as state:
        assert state.get(1, "total") == {"n": 33}
        assert state.get(2, "short") == {"value": {"n": 20}, "ttlExpirationMs": 60_000}
        elements = [row["list_element"]["n"] for row in state.rows(1, "list")]
        assert elements == [10, 11, 12]
        (whole,) = state.rows(1, "list", flatten=False)
        assert [each["n"] for each in whole["list_value"]] == [10, 11, 12]
        entries = {row["user_map_key"]["s"]: row["user_map_value"]["n"] for row in state.rows(1, "map")}
        assert entries == {"m10": 10, "m11": 11, "m12": 12}
        (whole,) = state.rows(2, "map", flatten=False)
        assert whole["map_value"] == [({"s": "m20"}, {"n": 20})]
        timers = [row["expiration_timestamp_ms"] for row in state.rows(1, timers=True)]
        assert timers == [5_010, 5_011, 5_012]
        assert state.to_arrow("list").num_rows == 4
        assert state.to_arrow("map", flatten=False).num_rows == 2
        assert state.to_arrow("total").schema.field("value").type == pa.struct([("n", pa.int32())])
        assert state.get(3, "total") is None
        with pytest.raises(InvalidOptionError, match="list, map, short, total"):
            state.get(1)
        with pytest.raises(InvalidOptionError, match=r"3 rows of key, list_element"):
            state.get(1, "list")


def test_asking_for_timers_of_a_store_without_timers_is_an_error(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state, pytest.raises(InvalidOptionError, match="has no timers"):
        state.to_arrow(timers=True)


def test_the_keys_of_a_deduplication_are_queried(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    machine = Machine(tmp_path, DeduplicateProcessor(schema, ["id", "n"]), ["id", "n"])
    machine.batch(0, rows_of(schema, [("a", 1), ("a", 2), (None, 1), ("a", 1)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with open_query(machine) as state:
        assert state.to_arrow().schema.names == ["key", "partition_id"]
        found = {tuple(row["key"].values()) for row in state.all()}
        assert found == {("a", 1), ("a", 2), (None, 1)}
        assert list(state.rows(("a", 3))) == []
        (row,) = state.rows({"n": 1, "id": None})
        assert row["key"] == {"id": None, "n": 1}


def test_databases_from_an_earlier_number_of_shards_are_ignored(machine: Machine) -> None:
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1), ("LGA", 1), ("EWR", 1)]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    for shard in range(2):
        shutil.rmtree(machine.path(shard))
    fewer = Machine(machine.root, machine.processor, ["origin"], shards=2)
    fewer.topic_id = "another id"
    fewer.batch(1, rows_of(FLIGHTS, [("JFK", 5), ("LGA", 1), ("EWR", 1)]))
    fewer.commit()
    with committed(fewer) as exact:
        assert exact.shards == 2
        assert values(exact) == {"JFK": 1, "LGA": 1, "EWR": 1}
    for shard in range(2):
        fewer.promote(shard)
    with open_query(fewer) as state:
        assert state.shards == 2
        assert state.batch_id == 1
        assert len(list(state.all())) == 3


@pytest.mark.parametrize(("hours", "is_refused"), [(21, False), (25, True)])
def test_a_read_of_a_changelog_that_was_suspended_until_compaction_removed_deletes_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hours: int, is_refused: bool
) -> None:
    now = 1e9

    def suspended(
        path: Path, identity: StoreIdentity, config: StoreConfig, *_args: object, **_more: object
    ) -> tuple[TransactionalStateStore, Restored]:
        nonlocal now
        now += hours * 3600
        return TransactionalStateStore.open(path, identity, config), Restored(0, 0, Reason.NONE, 0.0)

    monkeypatch.setattr(snapshot, "open_shard_store", suspended)
    monkeypatch.setattr(snapshot, "changelog_client", lambda *_: nullcontext())
    monkeypatch.setattr(Changelog, "delete_retention_ms", lambda *_: 24 * 3_600_000)
    copy = ChangelogCopy(Changelog(APP, STORE, APP, {}), soon())
    machine.batch(0, rows_of(FLIGHTS, [("JFK", 1)]))
    machine.commit()
    cut = machine.cut()
    monkeypatch.setattr("time.time", lambda: now)
    with closing(copy), pytest.raises(ChangelogCompactedError) if is_refused else nullcontext():
        copy.follow(cut, [0])
