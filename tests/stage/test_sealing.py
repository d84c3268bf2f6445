"""Tasks seal rows as record batches, and the driver sends them: nothing is lost, doubled or out of order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecords

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidRecordError,
    KafkaEosError,
    StagedPartError,
    UnavailableError,
)
from kafka_eos_source.kafka import kernel, topic_admin
from kafka_eos_source.kafka.batches import EncodedBatch, Encoder
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.kernel import Rows
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import SEALED, STAGED_ARROW
from kafka_eos_source.stage import row_rules, staging
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.staging import SealingPlan, sealed_batches, stage
from tests.support import sanitized
from tests.support.simulated_kafka import SimulatedKafka

KERNEL = kernel.kernel()

PARTITIONS = 5
PLAN = SealingPlan("out", PARTITIONS, topic_bytes=1 << 20, batch_bytes=400, record_bytes=1000)
SEALS_ALL = replace(PLAN, least_bytes=100)
SCHEMA = pa.schema([STAGED_ARROW.field(name) for name in ("key", "value", "partition", "headers")])

#: key, partition, size of the value
_ROW = st.tuples(
    st.none() | st.sampled_from([b"a", b"b", b"c"]), st.none() | st.integers(0, 4), st.integers(0, 60)
)
#: Arrow batches of rows of tasks
_TASKS = st.lists(st.lists(st.lists(_ROW, min_size=1, max_size=12), max_size=4), min_size=1, max_size=5)


def numbered(tasks: Sequence[Sequence[Sequence[tuple[Any, ...]]]]) -> list[list[pa.RecordBatch]]:
    """Returns the batches of each task. Each value begins with the row's number, in the order of tasks."""
    number, found = 0, []
    for task in tasks:
        found.append([])
        for rows in task:
            values = [b"%05d" % (number + index) + b"x" * row[2] for index, row in enumerate(rows)]
            number += len(rows)
            columns = [
                pa.array([row[0] for row in rows], pa.binary()),
                pa.array(values, pa.binary()),
                pa.array([row[1] for row in rows], pa.int32()),
                pa.array(
                    [[{"key": "n", "value": b"%d" % len(each)}] for each in values],
                    SCHEMA.field("headers").type,
                ),
            ]
            found[-1].append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return found


def staged(
    batches: Sequence[pa.RecordBatch],
    plan: SealingPlan | None = PLAN,
    folder: StagingFolder | None = None,
    inline: int = 1 << 30,
) -> StagedPart:
    return stage(batches, SCHEMA, folder=folder, batch="3", inline_bytes=inline, topic="out", sealing=plan)


class RecordingQueue:
    """A `RecordQueue` whose broker acknowledges every batch, and keeps it."""

    def __init__(self) -> None:
        self.records = self.bytes = 0
        self.logs: dict[int, list[tuple[bytes | None, bytes]]] = {}
        self.batches = 0

    def add(self, topic: str, batches: Iterable[tuple[int, EncodedBatch]]) -> None:
        assert topic == "out"
        for partition, batch in batches:
            batch.stamp(KERNEL, 7, 1, 0)
            read = MemoryRecords(batch.header + bytes(batch.body)).next_batch()
            assert read.validate_crc()
            records = list(read)
            for each in records:
                assert each.headers == [("n", b"%d" % len(each.value))]
            self.logs.setdefault(partition, []).extend((each.key, each.value) for each in records)
            self.records += len(records)
            self.batches += 1

    def send(self, deadline: Deadline, *, until_bytes: int) -> None:
        """Has nothing to wait for."""

    def batch_bytes(self, topic: str, wanted: int) -> int:
        return wanted


def sent(parts: Sequence[StagedPart], folder: StagingFolder | None = None) -> RecordingQueue:
    """Sends parts as a commit does."""
    producer = TransactionalProducer(producer_config({"bootstrap.servers": "127.0.0.1:1"}, "t"))
    queue: Any = RecordingQueue()
    producer._queue = queue
    producer._counts._ask = lambda _topic, _deadline: PARTITIONS
    deadline = Deadline.after_seconds(60)
    rows = StagedRows(folder or StagingFolder("/nowhere"), "3", parts)
    for batch in rows.batches():
        if SEALED in batch.schema.names:
            producer.send_sealed(sealed_batches(batch), "out", deadline)
        else:
            producer.send(batch, "out", deadline, rows.sealed_partitions)
    producer._encode(deadline)
    producer.close()
    assert producer.enqueued == rows.rows == queue.records
    return queue


@given(_TASKS, st.integers(50, 2000), st.integers(1, 600), st.sampled_from([0, 200, 10**6]))
@settings(max_examples=200)
def test_every_record_arrives_once_and_in_the_order_of_the_tasks(
    tasks: list[list[list[tuple[Any, ...]]]], collect: int, least: int, waiting: int
) -> None:
    given_batches = numbered(tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_COLLECT_BYTES", collect)
        patch.setattr(staging, "_WAITING_BYTES", waiting)
        parts = [staged(batches, replace(PLAN, least_bytes=least)) for batches in given_batches]
    assert [part.rows for part in parts] == [sum(map(len, task)) for task in tasks]
    logs = sent(parts).logs
    rows = [
        row
        for task in given_batches
        for batch in task
        for row in zip(
            *(batch.column(name).to_pylist() for name in ("key", "value", "partition")), strict=True
        )
    ]
    assert sorted(value for log in logs.values() for _, value in log) == [value for _, value, _ in rows]
    where = {value: (key, partition) for partition, log in logs.items() for key, value in log}
    for key, value, partition in rows:
        assert where[value][0] == key
        assert partition is None or where[value][1] == partition
    keyed = [value for key, value, partition in rows if key is not None or partition is not None]
    for log in logs.values():
        mine = [value for _, value in log if value in set(keyed)]
        assert mine == sorted(mine), "rows with a key or a partition keep their order"


def test_a_task_seals_large_partitions_and_leaves_small_ones_to_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 tasks with 1,000 partitions must not make 64,000 batches."""
    large = [(None, 0, 60)] * 40
    small = [(None, partition, 10) for partition in range(1, PARTITIONS)]
    plan = replace(PLAN, least_bytes=2000)
    parts = [staged(batches, plan) for batches in numbered([[[*large, *small]]] * 30)]
    queue = sent(parts)
    assert all(part.sealed_partitions == PARTITIONS for part in parts)
    tables = [pa.ipc.open_stream(part.inline).read_all() for part in parts]
    assert all(each.num_rows - each[SEALED].null_count > 0 for each in tables)
    assert [each[SEALED].null_count for each in tables] == [PARTITIONS - 1] * 30
    # 30 tasks with some batches of partition 0; the others' rows are merged into full batches
    of_small = sum(-(-30 * 60 // 300) for _ in small)
    assert queue.batches <= sum(each.num_rows - each[SEALED].null_count for each in tables) + of_small * 2


def test_rows_that_are_lost_while_they_are_sealed_fail_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.Sealer, "finish", lambda self: iter(self._collected[1:]))
    with pytest.raises(AssertionError, match="received 6 rows, but staged 4"):
        staged(numbered([[[(b"a", None, 3)] * 2] * 3])[0])


def test_few_rows_travel_as_rows() -> None:
    part = staged(numbered([[[(b"a", None, 3)] * 10]])[0])
    table = pa.ipc.open_stream(part.inline).read_all()
    assert (table.num_rows, table[SEALED].null_count) == (10, 10)


def test_a_record_that_is_too_large_is_refused_in_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    (batches,) = numbered([[[(b"a", None, 60)]]])
    for plan in (
        SealingPlan("out", PARTITIONS, topic_bytes=1 << 20, batch_bytes=400, record_bytes=50, least_bytes=10),
        SealingPlan("out", PARTITIONS, topic_bytes=100, batch_bytes=100, record_bytes=1000, least_bytes=10),
    ):
        with pytest.raises(
            InvalidRecordError, match=r"writing a record of .* to topic 'out'.*MESSAGE_TOO_LARGE"
        ):
            staged(batches, plan)


def test_batches_that_compression_would_enlarge_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(1).bytes(30 * 60)
    values = pa.array([noise[at : at + 60] for at in range(0, len(noise), 60)], pa.binary())
    batch = pa.RecordBatch.from_arrays([values], ["value"])
    plan = SealingPlan(
        "out", 1, topic_bytes=700, batch_bytes=700, record_bytes=1000, compression="gzip", least_bytes=10
    )
    part = stage([batch], batch.schema, folder=None, batch="3", inline_bytes=0, topic="out", sealing=plan)
    sealed = [each.as_py() for each in pa.ipc.open_stream(part.inline).read_all()[SEALED].drop_null()]
    assert max(map(len, sealed)) <= 700
    assert {each[22] for each in sealed} == {0x10}, "the mark of a transaction, and no codec"
    found = [record.value for each in sealed for record in MemoryRecords(restamped(each)).next_batch()]
    assert found == values.to_pylist()


def restamped(sealed: bytes) -> bytes:
    batch = EncodedBatch(memoryview(sealed))
    batch.stamp(KERNEL, 7, 1, 0)
    return batch.header + bytes(batch.body)


def test_damage_of_a_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StagingFolder.at(str(tmp_path / "staging"))
    part = staged(numbered([[[(b"a", 1, 50)] * 30]])[0], SEALS_ALL, folder, inline=0)
    assert sum(map(len, sent([part], folder).logs.values())) == 30
    file = tmp_path / "staging" / "3" / part.name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StagedPartError, match="CRC-32C"):
        StagedRows(folder, "3", [part])


@given(st.integers(61, 400), st.integers(1, 40))
def test_the_kernel_never_writes_beyond_its_buffer(limit: int, count: int) -> None:
    """The bound for the number of batches and bytes holds for every size of record."""
    sizes = [(7 * index) % 90 for index in range(count)]
    columns = {"value": pa.array([b"v" * size for size in sizes], pa.binary())}
    rows = Rows([columns])
    rows.place(KERNEL, 3, 0, 1)
    sealed = Encoder(KERNEL).seal(rows, rows.by_partition(KERNEL), limit)
    assert sum(int.from_bytes(each[57:61], "big") for _, each in sealed) == count


def test_sanitizers_find_nothing_in_the_encoder(tmp_path: Path) -> None:
    files = ["kafka/test_batches.py", "stage/test_sealing.py"]
    sanitized.check("kernel", tmp_path, files, "not sanitizers")


def test_a_key_stays_in_its_partition_although_the_topic_grows_before_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task with many rows seals them for the partitions that it knows of; another one has too few rows."""
    keys = [b"%d" % number for number in range(40)]
    tasks = [[[(key, None, 20) for key in keys]], [[(key, None, 0) for key in keys[:5]]]]
    many, few = numbered(tasks)
    parts = [staged(many, SEALS_ALL), staged(few, replace(PLAN, least_bytes=10_000))]
    monkeypatch.setattr(f"{__name__}.PARTITIONS", 50)
    partitions_of: dict[bytes | None, set[int]] = {}
    for partition, log in sent(parts).logs.items():
        for key, _ in log:
            partitions_of.setdefault(key, set()).add(partition)
    assert {len(each) for each in partitions_of.values()} == {1}


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_sealed_batch_that_changes_after_its_part_was_verified_is_refused(compression: str) -> None:
    """The broker checks the records; the commit then says what is wrong, and that a restart suffices."""
    rows = Rows([{"value": pa.array([b"some", b"values"] * 50, pa.binary())}])
    rows.partitions[:] = 0
    ((_, sealed),) = Encoder(KERNEL, compression).seal(rows, rows.by_partition(KERNEL), 10_000)
    changed = bytearray(sealed)
    changed[-1] ^= 1
    with SimulatedKafka({"out": 1}) as cluster:
        producer = TransactionalProducer(producer_config({"bootstrap.servers": cluster.bootstrap}, "t"))
        deadline = Deadline.after_seconds(30)
        producer.init(deadline)
        producer.begin()
        producer.send_sealed([(0, memoryview(changed))], "out", deadline)
        with pytest.raises(StagedPartError, match="checksum of a record batch"):
            producer.flush(deadline)
        producer.abort(deadline)
        producer.close()
        assert cluster.committed("out") == {0: []}


def test_the_number_of_batches_is_never_underestimated() -> None:
    """Every second record opens a new batch: its timestamp is far from the first one's."""
    times = [1 if number % 2 else 2**45 for number in range(2000)]
    columns = {"value": pa.array([b"x" * 100] * 2000, pa.binary()), "timestamp": pa.array(times, pa.int64())}
    for limit in (270, 275, 281, 282, 283, 290):
        rows = Rows([columns])
        rows.partitions[:] = 0
        sealed = Encoder(KERNEL).seal(rows, rows.by_partition(KERNEL), limit)
        assert sum(int.from_bytes(each[57:61], "big") for _, each in sealed) == 2000


class Admin:
    """A `TopicAdmin` for one topic."""

    settings: Mapping[str, str] = {}
    asked: ClassVar[list[tuple[str, float]]] = []
    error: KafkaEosError | None = None

    def __init__(self, _kafka: object) -> None:
        pass

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shape(self, name: str, _deadline: Deadline) -> TopicShape | None:
        return TopicShape(3, True, "id") if name != "missing" else None

    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]:
        self.asked.append((name, deadline.budget_seconds))
        if self.error is not None:
            raise self.error
        return self.settings


@pytest.mark.parametrize(
    ("settings", "batch_bytes"),
    [
        ({"max.message.bytes": "1048588", "segment.bytes": "1073741824"}, 1_000_000),
        ({"max.message.bytes": "5000", "segment.bytes": "1073741824"}, 5_000),
        ({"max.message.bytes": "1048588", "segment.bytes": "2000"}, 2_000),
        ({}, None),
        ({"max.message.bytes": "", "segment.bytes": "2000"}, None),
    ],
)
def test_the_plan_keeps_to_every_limit_of_the_topic(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], batch_bytes: int | None
) -> None:
    monkeypatch.setattr(topic_admin, "TopicAdmin", Admin)
    monkeypatch.setattr(Admin, "settings", settings)
    monkeypatch.setattr(row_rules, "_known", {})
    found = staging.sealing_plan({"bootstrap.servers": "localhost:1"}, "out")
    assert (None if found is None else (found.batch_bytes, found.partitions)) == (
        None if batch_bytes is None else (batch_bytes, 3)
    )
    assert staging.sealing_plan({"bootstrap.servers": "localhost:1"}, "missing") is None
    assert staging.sealing_plan({"bootstrap.servers": "localhost:1"}, None) is None
    other = staging.sealing_plan({"bootstrap.servers": "localhost:1", "partitioner": "fnv1a"}, "out")
    assert (None if other is None else other.partitioner) == (None if batch_bytes is None else "fnv1a")


def test_a_topic_is_asked_for_once_and_a_short_wait_is_not_repeated_in_each_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_admin, "TopicAdmin", Admin)
    monkeypatch.setattr(row_rules, "_known", {})
    monkeypatch.setattr(Admin, "asked", [])
    monkeypatch.setattr(Admin, "settings", {"max.message.bytes": "50000", "segment.bytes": "1073741824"})
    kafka = {"bootstrap.servers": "localhost:1"}
    monkeypatch.setattr(Admin, "error", UnavailableError("no answer"))
    for _ in range(2):
        assert staging.sealing_plan(kafka, "out") is None
    assert Admin.asked == [("out", 3.0)]
    for _ in range(2):  # the batch fails: the next try asks again
        with pytest.raises(UnavailableError, match="no answer"):
            row_rules.record_limits(kafka, "out", None)
    assert Admin.asked[1:] == [("out", 60.0)] * 2
    monkeypatch.setattr(Admin, "error", None)
    assert row_rules.record_limits(kafka, "out", "letters").record_bytes == 50_000
    assert staging.sealing_plan(kafka, "out") is not None
    assert [name for name, _ in Admin.asked[3:]] == ["out", "letters"]
    monkeypatch.setattr(Admin, "error", AuthorizationError("not shown"))
    assert staging.sealing_plan(kafka, "secret") is None
    assert row_rules.record_limits(kafka, "secret", None).partitions == 3
    assert [name for name, _ in Admin.asked[5:]] == ["secret"]
