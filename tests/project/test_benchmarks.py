"""The arithmetic of the benchmarks: progress over time, detection of wrong output, and result tables."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contenders.base import Target
from benchmarks.kafka import Taken
from benchmarks.latency import LatencyRun, _wrong
from benchmarks.measure import Run, figures
from benchmarks.plot import plot
from benchmarks.processes import kind_of
from benchmarks.progress import Output, Sample, counted, curve, wrong
from benchmarks.report import (
    LatencyResult,
    RestartResult,
    Result,
    as_json,
    contenders_table,
    in_short,
    latency_table,
    parts_table,
    ratios_table,
    restart_table,
    targets_lines,
)
from benchmarks.restart import RestartRun
from benchmarks.start import Traced, processes_of
from benchmarks.start import table as start_table
from benchmarks.targets import Found, better_peers, lines, target_tasks
from benchmarks.tasks import TASKS, Task
from benchmarks.watch import CpuSample, Watched
from benchmarks.workload import LATE_MINUTES, RECORD_BYTES, Documents, Workload, key_numbers

KEYS = 5


def output(*records: tuple[int, int, int]) -> Output:
    """Returns output records, given as (offset, key, count)."""
    part = Output()
    part.add(*(np.array(column, np.int64) for column in zip(*records, strict=True)))
    return part


def test_the_workload_has_the_documented_keys_and_sizes() -> None:
    workload = Workload(records=1000, keys=17)
    sent = [key for chunk in workload.chunks() for key in chunk]
    assert len(sent) == 1000
    assert {len(key) + len(*workload.payloads()) for key in sent} == {RECORD_BYTES}
    assert (np.bincount(key_numbers(sent), minlength=17) == workload.truth()).all()
    assert Workload(records=1000, keys=17).truth().tolist() == workload.truth().tolist()


def test_an_output_record_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        key_numbers([b"0000000001", b"1"])


@given(st.lists(st.integers(0, KEYS - 1), max_size=40), st.data())
def test_progress_equals_the_counts_that_a_reader_would_see(keys: list[int], data: st.DataObject) -> None:
    """Progress is right however counts are spread over partitions, even if some counts are not written."""
    parts = [Output(), Output()]
    seen = [0] * KEYS
    told: list[list[tuple[int, int, int]]] = [[], []]
    for key in keys:
        seen[key] += 1
        if data.draw(st.booleans()):
            told[key % 2].append((2 * len(told[key % 2]), key, seen[key]))  # control records lie between
    for part, records in zip(parts, told, strict=True):
        if records:
            part.add(*(np.array(column, np.int64) for column in zip(*records, strict=True)))
    stable = tuple(data.draw(st.integers(0, 2 * len(records))) for records in told)
    expected = 0
    for records, end in zip(told, stable, strict=True):
        expected += sum({key: count for offset, key, count in records if offset < end}.values())
    assert curve(parts, [Sample(0.0, stable)]).tolist() == [expected]
    everything = tuple(2 * len(records) for records in told)
    assert curve(parts, [Sample(0.0, everything)]).tolist() == [counted(parts)]


@dataclasses.dataclass
class Message:
    """The part of a client's message that the code uses."""

    at: int
    of: int = 0
    failure: KafkaError | None = None

    def offset(self) -> int:
        return self.at

    def partition(self) -> int:
        return self.of

    def key(self) -> bytes:
        return b"%010d" % self.at

    def value(self) -> bytes:
        return b"1"

    def error(self) -> KafkaError | None:
        return self.failure


def test_each_reading_of_the_output_ends_where_the_next_one_begins() -> None:
    end = KafkaError(KafkaError._PARTITION_EOF)
    taken = Taken(2)
    taken.take([Message(0), Message(7, 1)])
    assert not taken.complete
    taken.take([Message(1), Message(2, 0, end), Message(2), Message(8, 1, end)])
    assert taken.complete
    assert taken.offsets == [[0, 1], [7]]
    assert taken.ends == {0: 2, 1: 8}


def test_a_partition_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        Taken(1).take([Message(0, 0, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))])


@given(st.lists(st.lists(st.integers(0, KEYS - 1), max_size=12), max_size=4))
def test_copied_records_are_counted_by_key(readings: list[list[int]]) -> None:
    """Copies count one record each however many are read at once, and a duplicate is detected."""
    part, offset = Output(), 0
    for keys in readings:
        part.add_copies(np.arange(offset, offset + len(keys)), np.array(keys, np.int64))
        offset += len(keys)
    everything = [key for keys in readings for key in keys]
    assert part.counts.tolist() == [everything[: at + 1].count(key) for at, key in enumerate(everything)]
    assert counted([part]) == len(everything)
    truth = np.bincount(everything, minlength=KEYS)
    assert wrong([part], truth, True) == ""
    if everything:
        part.add_copies(np.array([offset]), np.array(everything[:1]))
        assert "1 of 5 keys have another count" in wrong([part], truth, True)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [([0, 2, 1], ""), ([0, 2], "1 of 3 records never came out"), ([0, 1, 2, 1], "1 records came out twice")],
)
def test_output_with_lost_or_duplicate_records_has_no_latency(numbers: list[int], message: str) -> None:
    assert message in _wrong(numbers, 3)
    assert bool(_wrong(numbers, 3)) == bool(message)


def test_the_latency_table_is_formatted() -> None:
    runs = [
        LatencyRun("", (1.0, 2.0, 3.0), None, {}, 0.1, 0.5),
        LatencyRun("", (3.0, 4.0, 5.0), (10.0, 20.0, 30.0), {"addBatch": 8.0, "getBatch": 1.0}, 0.3, 0.5),
    ]
    table = latency_table([LatencyResult("a", "A", "exactly once", "", 1, runs)]).splitlines()
    assert table[2] == "| A | exactly once | 2 / 3 / 4 ms | 10 / 20 / 30 ms | 0.20 | 0.5 |"
    parts = parts_table([LatencyResult("a", "A", "exactly once", "", 1, runs[1:])]).splitlines()
    assert parts[0] == "| part of a micro-batch, p50 in ms | A |"
    assert parts[2:] == ["| addBatch | 8 |", "| getBatch | 1 |"]
    bad = LatencyResult("a", "A", "exactly once", "", 1, [*runs, LatencyRun("WRONG: 1")])
    assert "| WRONG |" in latency_table([bad])


def test_an_outage_is_reported_in_seconds_with_its_duplicates() -> None:
    runs = [RestartRun("", 8.0, 0, 0.1, 3.0), RestartRun("", 10.0, 4_000, 0.1, 5.0)]
    runs.append(RestartRun("", 9.0, 2_000, 0.1, 4.0))
    result = RestartResult("a", "A", "at least once", "", 10_000, runs)
    assert restart_table([result]).splitlines()[2] == "| A | at least once | 4.0 s | 9.0 s | 2,000 | 0.1 |"
    bad = RestartResult("a", "A", "exactly once", "", 10_000, [*runs, RestartRun("WRONG: 3 lost")])
    assert "| WRONG |" in restart_table([bad])
    assert in_short(runs[0], 10_000) == "8.0 s"


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    plot(tmp_path / "a.svg", "T", "records/s", {"kafka-eos <1>": 200.0, "peer": 100.0})
    drawn = (tmp_path / "a.svg").read_text()
    assert "kafka-eos &lt;1&gt;" in drawn
    assert 'width="430" height="18" fill="#2b6cb0"' in drawn
    assert 'width="215" height="18" fill="#a0aec0"' in drawn
    plot(tmp_path / "b.svg", "T", "records/s", {})
    assert not (tmp_path / "b.svg").exists()


@pytest.mark.parametrize(
    ("parts", "exactly_once", "message"),
    [
        ([output((0, 0, 2), (1, 0, 3)), output((0, 1, 1))], True, ""),
        ([output((0, 0, 2)), output((0, 1, 1))], True, "1 of 2 keys have another count, the first one 0: 2"),
        ([output((0, 0, 4)), output((0, 1, 1))], False, "4 instead of 3"),
        ([output((0, 0, 3), (1, 0, 3)), output((0, 1, 1))], True, "anew or lower"),
        ([output((0, 0, 2), (1, 0, 1), (2, 0, 3)), output((0, 1, 1))], True, "anew or lower"),
        ([output((0, 0, 3), (1, 0, 3)), output((0, 1, 1))], False, ""),
        ([output((0, 0, 3)), output((0, 1, 1), (1, 0, 3))], False, "1 keys are in two partitions"),
        ([output((0, 0, 3), (1, 7, 1)), output((0, 1, 1))], False, "never sent"),
        ([output((0, 0, 3)), Output()], True, "instead of 1"),
    ],
)
def test_a_wrong_output_is_described(parts: list[Output], exactly_once: bool, message: str) -> None:
    found = wrong(parts, np.array([3, 1]), exactly_once)
    assert message in found
    assert bool(found) == bool(message)


def test_a_run_yields_sustained_rate_and_cpu_use() -> None:
    part = output(*((offset, 0, 10 * (offset + 1)) for offset in range(10)))  # 100 records, 10 at a time
    samples = [Sample(100.0 + second, (second,)) for second in range(11)] + [Sample(120.0, (10,))]
    watched = Watched(
        samples,
        [
            CpuSample(100.0, 1.0, 50.0, {"JVM": 1.0}),
            CpuSample(110.0, 11.0, 55.0, {"JVM": 6.0, "broker": 2.0}),
            CpuSample(120.0, 11.5, 55.0, {"JVM": 6.0, "broker": 2.0}),
        ],
        first_seconds=102.0,
    )
    run = figures([part], watched, began=95.0)
    assert run.seconds == pytest.approx(8.0)
    assert run.with_start_seconds == pytest.approx(15.0)
    assert run.sustained == pytest.approx(70 / 7.0)  # from 30 at second 3
    assert run.sustained_cpu == pytest.approx(0.1)  # 7 seconds of one core
    assert run.sustained_cpu_by_process == pytest.approx({"JVM": 0.05, "broker": 0.02})
    assert run.cpu_seconds == pytest.approx(8.0)
    assert run.with_start_cpu_seconds == pytest.approx(11.0)
    assert run.others_cores == pytest.approx(0.5)
    assert (run.commits, run.written) == (10, 10)


def test_one_commit_has_no_sustained_rate() -> None:
    watched = Watched(
        [Sample(1.0, (0,)), Sample(2.0, (1,))], [CpuSample(1.0, 0.0, 9.0), CpuSample(2.0, 1.0, 9.0)], 1.0
    )
    assert figures([output((0, 0, 100))], watched, began=0.0).sustained == 0.0


def result(name: str, *seconds: float, problem: str = "") -> Result:
    cpu = {"JVM": 0.0015, "broker": 0.0005, "planning processes": 0.0}
    runs = [
        Run(problem, each, 2 * each, 0.5, 1000 / each, 0.002, 3.0, 4.0, 0.25, 5, 6, cpu, (90, 40, 50, 10))
        for each in seconds
    ]
    return Result(name, name.title(), "exactly once", "none", 1000, runs)


def test_the_result_tables_are_formatted() -> None:
    results = [result("ours", 1.0, 2.0, 4.0), result("peer", 5.0), result("bad", 1.0, problem="WRONG: 3")]
    table = contenders_table(results).splitlines()
    first = "| Ours | exactly once | 500 | 200 | 0.5 s | 500 | 3000.0 | 2000.0 "
    assert table[2] == first + "| JVM 1500.00, broker 500.00 | 0.2 |"
    assert table[4] == "| Bad | exactly once | WRONG |  |  |  |  |  |  |  |"
    ratios = ratios_table(results, ["ours"]).splitlines()
    assert ratios[0] == "| times as fast as (after the first quarter) | Peer | Bad |"
    assert ratios[2] == "| Ours | 2.5 × | – |"
    assert ratios_table(results, []) == ""


def test_one_wrong_run_marks_the_contender_as_wrong() -> None:
    good, bad = result("ours", 1.0), result("ours", 1.0, problem="ended by itself")
    both = dataclasses.replace(good, runs=[*good.runs, *bad.runs])
    assert "FAILED" in contenders_table([both])
    assert as_json([both], {})["contenders"][0]["problem"] == "ended by itself"
    assert "rate" not in as_json([both], {})["contenders"][0]


def test_targets_are_compared_with_the_results() -> None:
    results = [result("ours", 1.0), result("peer", 5.0), result("bad", 1.0, problem="WRONG")]
    targets = [
        Target("ours", "peer", 5),
        Target("ours", "peer", 6),
        Target("ours", "bad", 1),
        Target("ours", "no", 1),
    ]
    assert [line.split(":")[0].strip() for line in targets_lines(results, targets)] == [
        "reached",
        "MISSED",
        "MISSED",
    ]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_contender_names_are_unique_and_targets_refer_to_them(task: Task) -> None:
    names = [contender.name for contender in task.contenders]
    assert len(set(names)) == len(names)
    assert {name for target in task.targets for name in (target.ours, target.peer)} <= set(names)
    assert set(task.on_request) <= set(names)
    assert set(task.ours) <= set(names)
    assert "kafka-eos" in task.ours


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/usr/bin/java -cp /x/* kafka.Kafka /tmp/server.properties", "broker"),
        ("python -m kafka_eos_source.embedded.supervisor java kafka.Kafka /tmp/server.properties", "broker"),
        ("/usr/bin/java -cp /x/* org.apache.spark.deploy.SparkSubmit pyspark-shell", "JVM"),
        ("python -m pyspark.daemon pyspark.worker", "Python workers"),
        ("python -m kafka_eos_source.spark.worker_daemon pyspark.worker", "Python workers"),
        ("python -m pyspark.daemon pyspark.sql.worker.python_streaming_sink_runner", "committing process"),
        ("python -m pyspark.daemon pyspark.sql.worker.plan_data_source_read", "planning processes"),
        ("python -m pyspark.sql.streaming.python_streaming_source_runner", "planning processes"),
        ("python /x/programs/quix_copy.py 127.0.0.1:9092", "Python workers"),
        ("python /x/programs/spark_copy.py {}", "driver's Python"),
        ("", "driver's Python"),
    ],
)
def test_the_kind_of_a_process_follows_from_its_command_line(command: str, kind: str) -> None:
    assert kind_of(command.split()) == kind


def test_the_table_of_targets_compares_medians_and_names_what_is_missing() -> None:
    found = {
        "copy": [result("kafka-eos", 1.0), result("spark", 2.0), result("kafka-streams", 0.5)],
        "read": [result("kafka-eos", 1.0, problem="FAILED"), result("spark", 2.0)],
        "to-1": [result("kafka-eos", 1.0)],
        "to-1000": [result("kafka-eos", 1.2)],
    }
    cells = {line.workload: line.cells[1:] for line in lines(Found(found))}
    ratio = ["≥ 1.7 ×", "2.00 × (1,000.0 against 500.0), reached"]
    assert cells["topic to topic, rows, exactly once / Spark tuned, at least once"] == ratio
    assert cells["read to nothing / Spark tuned"] == ["≥ 2 ×", "not measured"]
    assert cells["1,000 output partitions / 1: overall"][1].endswith("**missed**")
    assert cells["1,000 output partitions / 1: warm micro-batch"][1] == "1.00 × (30.0 against 30.0), reached"
    assert cells["CPU s per million, broker included: rows"][1] == "2500.00 s, **missed**"
    assert cells["exactly_once / our own at_least_once"][1] == "not measured"
    better = better_peers(found)
    assert any("Kafka-Streams is better" in line and "after the first quarter" in line for line in better)
    assert not any("Spark" in line for line in better)


def test_what_a_process_did_is_computed_from_its_events() -> None:
    """Imports within a call count as imports, and a fork belongs to a process of its own."""
    command = ["python", "-m", "pyspark.daemon", "pyspark.sql.worker.create_data_source"]
    events = [
        {"kind": "process", "pid": 1, "began": 10.0, "ended": 10.25, "cpu": 0.125, "command": command},
        {"kind": "import", "pid": 1, "began": 10.25, "ended": 10.5, "cpu": 0.25, "name": "pyspark"},
        {"kind": "fork", "pid": 2, "began": 10.5, "ended": 10.5, "cpu": 0.0, "command": command},
        {"kind": "import", "pid": 2, "began": 11.0, "ended": 12.0, "cpu": 0.5, "name": "kafka_eos_source"},
        {"kind": "call", "pid": 2, "began": 10.75, "ended": 12.25, "cpu": 0.5, "name": "schema"},
    ]
    daemon, child = processes_of(events, 9.0)
    assert daemon == Traced("creates the source: schema, Spark's daemon", 1.0, 0.125, 0.25, until=1.5)
    assert child == Traced("creates the source: schema", 1.5, ours=0.5, called=0.5, until=3.25)
    assert start_table([daemon, child]).splitlines()[-1].endswith("| 0.00 | 0.00 | 0.50 | 0.50 | 3.25 |")


def test_contenders_of_the_table_of_targets_have_names_of_their_own() -> None:
    for task in target_tasks(0.01):
        names = [contender.name for contender in task.contenders]
        assert len(set(names)) == len(names)
        assert any(name.startswith("kafka-eos") for name in names) or task.name in ("quix", "count-quix")


@pytest.mark.parametrize(("size", "fields", "bad"), [(120, 3, 0.0), (1024, 20, 0.01), (10_240, 200, 0.5)])
def test_half_of_the_documents_stay_and_the_key_tells_which(size: int, fields: int, bad: float) -> None:
    workload = Documents(records=4_000, document_bytes=size, fields=fields, bad=bad)
    stay, sizes = np.zeros_like(workload.truth()), []
    declared = [each.split()[0] for each in workload.schema.split(", ")]
    assert declared == workload.columns
    assert len(declared) == fields
    for key, value in (record for records in workload.sent() for record in records):
        sizes.append(len(value))
        try:
            document = json.loads(value)
        except ValueError:
            continue
        assert set(declared) <= set(document)
        if isinstance(document["dep_delay"], int) and document["dep_delay"] > LATE_MINUTES:
            stay[int(key)] += 1
            chosen = {name: document[name] for name in declared}
            assert workload.wrong_record(key, json.dumps(chosen).encode()) == ""
            assert "expected" in workload.wrong_record(key, json.dumps({**chosen, "dest": "X"}).encode())
    assert (stay == workload.truth()).all()
    assert stay.sum() / 4_000 == pytest.approx((1 - bad) / 2, abs=0.05)
    assert np.mean(sizes) == pytest.approx(size, rel=0.2)


def test_a_schema_may_declare_more_fields_than_documents_have_and_the_output_fewer() -> None:
    workload = Documents(records=10, fields=200, chosen=3)
    assert workload.documents["columns"] == ["carrier", "dest", "dep_delay"]
    assert workload.schema.count(",") == 199
    assert workload.title == "documents of 120 bytes, 200 declared fields, 3 chosen, 0% bad"


def test_a_rate_counts_the_records_that_are_left_out() -> None:
    part = output(*((offset, 0, offset + 1) for offset in range(10)))
    samples = [Sample(100.0 + second, (second,)) for second in range(11)]
    cpu = [CpuSample(100.0, 0.0, 0.0), CpuSample(110.0, 10.0, 0.0)]
    run = figures([part], Watched(samples, cpu, first_seconds=100.0), began=100.0, read=2.0)
    assert run.sustained == pytest.approx(2.0)
    assert run.sustained_cpu == pytest.approx(0.5)
    assert run.written == 10


@pytest.mark.parametrize(("size", "compression"), [(110, "none"), (1024, "zstd")])
def test_records_have_the_configured_size(size: int, compression: str) -> None:
    workload = Workload(records=10, record_bytes=size, compression=compression)
    values = workload.payloads()
    assert {len(value) + len(next(workload.chunks())[0]) for value in values} == {size}
    assert len(set(values)) == len(values)
    packed = len(zlib.compress(values[0])) / len(values[0])
    assert (packed < 0.5) == (compression != "none")
