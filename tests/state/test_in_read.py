"""Stateful operators in the read: shards are partitions, tasks cover all shards, and state says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    StateMismatchError,
)
from kafka_eos_source.in_read.bad_records import DEAD_LETTER
from kafka_eos_source.in_read.lineage import Lineage
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns, step_in_read
from kafka_eos_source.kafka.admin import Topics
from kafka_eos_source.model import OffsetRange, ReadTask, TopicPartition
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.plan.planner import Planning
from kafka_eos_source.plan.split import OFFSETS_SHARED, split_by_shard
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.packing import CHANGELOG, BadRecords
from kafka_eos_source.protocol.packing import packets as unpacked
from kafka_eos_source.read.settings import schema_of, task_read
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.changelog.move import Placement
from kafka_eos_source.state.encoding.describe import Description
from kafka_eos_source.state.model import ShardsBy
from kafka_eos_source.state.operator import frame
from kafka_eos_source.state.operator.in_read import OperatorInRead
from kafka_eos_source.state.operator.task import Operator
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.registry import Registry
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.state.vector.function import FunctionProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.local_state import Machine, rows_of

KEYED = pa.schema([("k", pa.string())])
COLUMNS = ReadColumns((ReadColumn("k", "key", as_text=True),))
COLUMNS_OF_ROWS = ReadColumns((ReadColumn("k", "k"),))
READ = {"kafka.bootstrap.servers": "b:9092", "subscribe": "t"}


def counting() -> AggregateProcessor:
    return AggregateProcessor(KEYED, ["k"], {"n": agg.count()})


def in_read(*, combines: bool = True) -> OperatorInRead:
    processor = counting()
    operator = Operator(processor, "s", 2, parse_state({"kafka.bootstrap.servers": "b:9092"}))
    return OperatorInRead(
        COLUMNS,
        from_arrow_schema(operator.output),
        to_bytes(processor, "", fix=""),
        combines,
        ("k",),
        "s",
        2,
        1,
        "America/New_York",
    )


def source_batch(keys: list[bytes | None]) -> pa.RecordBatch:
    return pa.record_batch({"key": pa.array(keys, pa.binary())})


# ------------------------------------------------------------------ planning


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6), st.integers(0, 60_000)), max_size=12),
    st.integers(7, 12),
    st.integers(1, 9),
)
def test_every_shard_runs_once_and_reads_its_partition_of_each_topic(
    wanted: list[tuple[str, int, int]], shards: int, parallelism: int
) -> None:
    sizes = {TopicPartition(topic, partition): size for topic, partition, size in wanted}
    ranges = [OffsetRange(tp, 5, 5 + size) for tp, size in sizes.items()]
    tasks = split_by_shard(ranges, shards, parallelism)
    assert [shard for task in tasks for shard, _ in task] == list(range(shards))
    read = [(shard, each) for task in tasks for shard, own in task for each in own]
    assert all(each.tp.partition == shard for shard, each in read)
    assert sorted(each.tp for _, each in read) == sorted(tp for tp, size in sizes.items() if size)
    total = 4_000 * shards + sum(sizes.values())
    if shards <= parallelism:
        assert len(tasks) == shards
        return
    assert len(tasks) <= max(parallelism, -(-total // OFFSETS_SHARED))
    for task in tasks:
        # the ends of a task's shards may lie outside of its share of the work, by half their size each
        inner = sum(4_000 + sum(each.size for each in own) for _, own in task[1:-1])
        assert inner <= max(OFFSETS_SHARED, total / parallelism)


@pytest.mark.parametrize(
    ("sizes", "parallelism", "shared"),
    [
        ([100, 200, OFFSETS_SHARED, 0], 1, [[0, 1], [2, 3]]),
        ([100, 200, OFFSETS_SHARED, 0], 3, [[0, 1], [2], [3]]),
        ([500_000, 0, 0, 0], 4, [[0], [1], [2], [3]]),
        ([0] * 4, 1, [[0, 1, 2, 3]]),
        ([90, 120, 100, 110], 2, [[0, 1], [2, 3]]),
        ([0] * 3, 2, [[0], [1, 2]]),
        ([0] * 4, 16, [[0], [1], [2], [3]]),
        ([0] * 12, 2, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_small_shards_share_a_task_and_large_ones_have_their_own(
    sizes: list[int], parallelism: int, shared: list[list[int]]
) -> None:
    ranges = [OffsetRange(TopicPartition("t", n), 0, size) for n, size in enumerate(sizes)]
    tasks = split_by_shard(ranges, len(sizes), parallelism)
    assert [[shard for shard, _ in task] for task in tasks] == shared
    read = [[each.size for each in own] for task in tasks for _, own in task]
    assert read == [[size] if size else [] for size in sizes], "a shard without records runs too"


def test_a_partition_without_a_shard_is_refused() -> None:
    with pytest.raises(StateMismatchError, match="'t' has 5 partitions, but the operator has 2 shards"):
        split_by_shard([OffsetRange(TopicPartition("t", n), 7, 7) for n in (2, 4)], 2, 1)


@pytest.mark.parametrize(
    ("described", "error"),
    [
        (["t/0", "t/1"], None),
        ([], None),  # the topic is gone
        (["t/0", "t/1", "t/2"], "has 3 partitions, but the operator has 2 shards"),
    ],
)
def test_partitions_are_counted_again_after_the_end_of_the_batch_is_known(
    described: list[str], error: str | None
) -> None:
    """A producer may have sent a key to a new partition, and other records into the range of the batch."""
    partitions = [TopicPartition(name[0], int(name[2:])) for name in described]

    class Admin:
        def existing(self, _topics: Any) -> Topics:
            return Topics(tuple(partitions))

    class Plan:
        def ranges(self, _start: Any, end: Any) -> list[OffsetRange]:
            return [OffsetRange(tp, 0, until) for tp, until in end.end.items()]

    end = {TopicPartition("t", n): 5 for n in range(2)}
    planning = Planning(cast(Any, Plan()), cast(Any, Admin()))
    start, position = SourcePosition(dict.fromkeys(end, 0)).to_dict(), SourcePosition(end).to_dict()
    if error is None:
        assert len(planning.shard_tasks(start, position, 2, 2)) == 2
        return
    with pytest.raises(StateMismatchError, match=error):
        planning.shard_tasks(start, position, 2, 2)


# ------------------------------------------------------------------ the option of the source


def test_the_operator_travels_as_an_option_and_its_passwords_as_options_of_their_own() -> None:
    step = in_read()
    own = {"kafka.bootstrap.servers": "b:9092", "kafka.sasl.password": "secret", "application.id": "app"}
    options = parse_read(
        {
            **READ,
            "step.in.read": step.to_option(),
            **{f"step.in.read.operator.{name}": value for name, value in own.items()},
        },
        streaming=True,
    )
    assert step_in_read(options) == step
    assert "secret" not in repr(options)
    schema = schema_of(options)
    assert isinstance(schema, StructType)
    assert schema.names == ["k", "n", CHANGELOG]
    read = task_read(options)
    assert read.settings.columns == ("key",)
    assert "secret" not in repr(read)
    assert read.operator is not None
    assert read.operator.application_id == "app"
    assert read.operator.kafka["sasl.password"] == "secret"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step.in.read": "{}"}, "'step.in.read' has the value"),
        ({"step.in.read.operator.application.id": "a"}, "'step.in.read' is not"),
        ({"step.in.read": in_read().to_option()}, "belong to another step"),
    ],
)
def test_options_that_no_operator_has_set_are_refused(more: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        schema_of(parse_read({**READ, **more}, streaming=True))


# ------------------------------------------------------------------ input


@pytest.fixture
def given_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Operator, list[pa.RecordBatch]]]:
    """The operators that run, and the rows that each gets. Their output is their input."""
    given_to: list[tuple[Operator, list[pa.RecordBatch]]] = []

    def run(
        operator: Operator, _shard: int, rows: Iterator[pa.RecordBatch], *_packets: object
    ) -> Iterator[pa.RecordBatch]:
        taken = list(rows)
        given_to.append((operator, taken))
        for each in taken:
            columns = [pa.nulls(each.num_rows, type_) for type_ in operator.output.types]
            yield pa.RecordBatch.from_arrays(columns, schema=operator.output)

    monkeypatch.setattr(Operator, "in_read", run)
    return given_to


def run(step: OperatorInRead, batches: list[pa.RecordBatch], shard: int = 0) -> list[pa.RecordBatch]:
    return list(step.run(shard, batches, parse_state({"kafka.bootstrap.servers": "b:9092"})))


def test_rows_of_a_shard_are_combined_before_they_meet_the_state(given_rows: Any) -> None:
    batches = [source_batch([b"a", b"b"]), source_batch([b"a"])]
    run(in_read(), batches)
    run(in_read(combines=False), batches)
    (_, [partial]), (_, rows) = given_rows
    assert partial.num_rows == 2
    assert [each.column("k").to_pylist() for each in rows] == [["a", "b"], ["a"]]


def test_each_shard_has_a_processor_of_its_own(given_rows: Any) -> None:
    """A processor may keep something in its attributes, and shards share a task only if they are small."""
    step = in_read()
    for shard in (0, 1):
        run(step, [source_batch([b"a"])], shard)
    (first, _), (second, _) = given_rows
    assert first.processor is not second.processor
    assert first.shards_by is ShardsBy.INPUT_PARTITION


def test_a_record_without_a_key_is_refused(given_rows: Any) -> None:
    with pytest.raises(InvalidRecordError, match="2 of 3 records in partition 1 of the input have no key"):
        run(in_read(), [source_batch([None, b"a", None])], 1)
    # a group that contains the partition may have records without a key
    (output,) = run(replace(in_read(combines=False), record_keys=()), [source_batch([None])])
    assert output.num_rows == 1


def test_a_processor_sees_times_of_the_session_and_spark_gets_them_in_utc(given_rows: Any) -> None:
    at = pa.field("at", pa.timestamp("us", "America/New_York"))
    nested = pa.field("past", pa.list_(pa.struct([at])))
    schema = pa.schema([at])
    processor = FunctionProcessor(
        schema, ["at"], "f", output=pa.schema([at, nested]), state=schema, event_time=None, version="1"
    )
    columns = ReadColumns((ReadColumn("at", "timestamp"),))
    step = replace(in_read(), columns=columns, processor=to_bytes(processor, "", fix=""), combines=False)
    batch = pa.record_batch({"timestamp": pa.array([1], pa.timestamp("us", "UTC"))})
    (output,) = run(replace(step, record_keys=()), [batch])
    (_, [rows]) = given_rows[0]
    assert rows.schema == schema
    assert output.schema.field("at").type == pa.timestamp("us", "UTC")
    assert output.schema.field("past").type.value_type.field("at").type == pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class NoDashes:
    """A transform that cannot process keys with a dash."""

    rows: StructType = field(default_factory=lambda: StructType([StructField("k", StringType())]))

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        errors = {row: "a dash" for row, key in enumerate(batch["k"].to_pylist()) if "-" in key}
        yield pa.record_batch({"k": batch["k"]}), errors


@pytest.mark.parametrize("combines", [False, True])
def test_bad_records_pass_an_operator_in_the_read(monkeypatch: pytest.MonkeyPatch, combines: bool) -> None:
    """They reach the sink in packets. A shard that does not read its rows sends a report only."""
    skips, seen = [False], []

    def run_shard(
        _operator: Operator, _shard: int, rows: Iterator[pa.RecordBatch], packets: Any, finish: Any
    ) -> Iterator[pa.RecordBatch]:
        seen[:] = [] if skips[0] else list(rows)
        finish()
        found = [each for column in packets.taken() for each in unpacked(column)]
        assert all(isinstance(each, BadRecords) and each.task.task == 1 for each in found)
        seen.append(found)
        yield from ()

    monkeypatch.setattr(Operator, "in_read", run_shard)
    before = RowsInRead.of(NoDashes(), COLUMNS, "checks keys", on_bad=DEAD_LETTER)
    step = replace(in_read(combines=combines), columns=replace(COLUMNS_OF_ROWS, before=before))
    assert step.sets_aside
    batch = source_batch([b"a", b"-", b"b"]).append_column("topic", pa.array(["t"] * 3))
    task = ReadTask(before.frame, "p", 1, 2)
    options = parse_state({"kafka.bootstrap.servers": "b:9092"})
    list(step.run(1, [batch], options, task))
    *rows, (bad, report) = seen
    assert sorted(key for each in rows for key in each.column("k").to_pylist()) == ["a", "b"]
    assert [row["key"] for each in bad.batches() for row in each.to_pylist()] == [b"-"]
    assert (bad.total, report.total) == (None, 2)
    skips[0] = True
    list(step.run(1, [batch], options, task))
    assert [each.total for each in seen[0]] == [1]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("columns", "keys", "checked"),
    [
        ([("k", "key")], ["k"], ("k",)),
        ([("k", "key"), ("t", "topic")], ["t", "k"], ("k",)),
        ([("k", "key"), ("p", "partition")], ["k", "p"], ()),
        ([("p", "partition")], ["p"], ()),
    ],
)
def test_keys_with_the_records_key_or_its_partition_stay_in_one_partition(
    columns: list[tuple[str, str]], keys: list[str], checked: tuple[str, ...]
) -> None:
    source = Lineage({}, None, ReadColumns(tuple(ReadColumn(*each) for each in columns)))
    assert frame._record_keys(source, keys) == checked


def test_keys_of_other_columns_are_refused() -> None:
    source = Lineage({}, None, ReadColumns((ReadColumn("key", "value"), ReadColumn("k", "key"))))
    with pytest.raises(InvalidSchemaError, match="groups by key; expected the column 'key' of the source"):
        frame._record_keys(source, ["key"])


@pytest.mark.parametrize(
    ("options", "partitions", "found"),
    [
        ({}, [("t", 0), ("t", 1)], 2),
        ({"subscribe": "t,u"}, [("t", 0), ("t", 1), ("u", 0), ("u", 1)], 2),
        ({"subscribe": "t,u"}, [("t", 0), ("t", 1), ("u", 0)], "different numbers of partitions: t 2, u 1"),
        ({"subscribe": None, "subscribePattern": "t.*"}, [("t", 0)], "'subscribePattern', but"),
        ({"subscribe": None, "assign": '{"t":[0]}'}, [("t", 0)], "'assign', but"),
        ({"minPartitions": "4"}, [("t", 0)], r"'minPartitions' \(value 4\)"),
        ({"maxRecordsPerPartition": "4"}, [("t", 0)], r"'maxRecordsPerPartition' \(value 4\)"),
    ],
)
def test_the_number_of_shards_is_that_of_the_partitions_of_each_topic(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str | None],
    partitions: list[tuple[str, int]],
    found: int | str,
) -> None:
    class Admin:
        def __init__(self, *_: Any) -> None: ...

        def named(self, topics: Any) -> Topics:
            return Topics(tuple(TopicPartition(*each) for each in partitions))

        def close(self) -> None: ...

    monkeypatch.setattr(frame, "SourceAdmin", Admin)
    given_options = {name: value for name, value in {**READ, **options}.items() if value is not None}
    read = parse_read(given_options, streaming=True)
    if isinstance(found, int):
        assert frame._partitions(read) == found
        return
    with pytest.raises(InvalidOptionError, match=found):
        frame._partitions(read)


# ------------------------------------------------------------------ the state says what its shards are


def test_a_description_says_what_decides_the_shard() -> None:
    by_hash = counting().description
    by_partition = replace(by_hash, shards_by=ShardsBy.INPUT_PARTITION)
    assert Description.from_json(by_partition.to_json()) == by_partition
    assert Description.from_json(by_hash.to_json()) == by_hash


@pytest.mark.parametrize("was", ShardsBy)
def test_an_aggregation_refuses_state_of_the_other_kind_of_shards(tmp_path: Path, was: ShardsBy) -> None:
    (now,) = set(ShardsBy) - {was}
    machine = Machine(tmp_path, counting(), ["k"], shards=2, shards_by=was)
    machine.batch(0, rows_of(KEYED, [("a",)]))
    machine.commit()
    machine.shards_by = now
    with pytest.raises(StateMismatchError, match="keys would meet shards"):
        machine.batch(1, rows_of(KEYED, [("a",)]))
    machine.shards_by = was
    machine.batch(1, rows_of(KEYED, [("a",)]))


def test_a_stateful_processor_refuses_state_of_the_other_kind_of_shards() -> None:
    by_hash = Registry(StructType().add("k", "string"), "None")
    by_partition = replace(by_hash, shards_by=ShardsBy.INPUT_PARTITION)
    assert Registry.from_description(by_partition.description()) == by_partition
    for stored, declared in [(by_hash, by_partition), (by_partition, by_hash)]:
        with pytest.raises(StateMismatchError, match="keys would meet shards"):
            registry.reconcile(stored, declared, [], frozenset())
        assert registry.reconcile(stored, stored, [], frozenset()) == (stored, [])


def test_a_key_is_looked_up_in_all_shards(tmp_path: Path) -> None:
    """Only Kafka's producers know its shard, which here is another one than that of Spark's hash."""
    machine = Machine(tmp_path, counting(), ["k"], shards=3, shards_by=ShardsBy.INPUT_PARTITION)
    machine.batch(0, rows_of(KEYED, [(key,) for key in "abcdea"]))
    machine.commit()
    for shard in range(3):
        machine.promote(shard)
    with StateQuery(state_dir=tmp_path) as query:
        assert {key: (query.get(key) or {}).get("n") for key in "abcdef"} == {
            "a": 2,
            **dict.fromkeys("bcde", 1),
            "f": None,
        }


def test_state_with_a_shard_for_each_partition_cannot_be_moved() -> None:
    description = replace(counting().description, shards_by=ShardsBy.INPUT_PARTITION)
    with pytest.raises(StateMismatchError, match="cannot be moved to other shards"):
        Placement(description, 2, 3)
