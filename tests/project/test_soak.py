"""The bookkeeping of the soak: the judge bites, a run resumes where it ended, slopes name growth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from integration.chaos.soak import samples
from integration.chaos.soak.__main__ import main
from integration.chaos.soak.folder import JsonLines, RunFolder
from integration.chaos.soak.judge import Judgement, Printed, Seen, judge
from integration.chaos.soak.watch import Watch, prune
from integration.chaos.soak.workload import (
    PARTITIONS,
    QUERIES,
    SOURCE,
    STORE,
    Batch,
    Carry,
    Counts,
    Query,
    key_of,
    partition_of,
    value_of,
)
from integration.support.history import History, Operation, Phase, Record, Send, SourceRange, Txn

ROWS, BATCHES = 60, 4
COUNTS = next(query for query in QUERIES if isinstance(query, Counts))
BY_NAME = {query.name: query for query in QUERIES}


def source(first: int = 0, rows: int = ROWS, at: dict[int, int] | None = None) -> list[Record]:
    """Returns input records; ``at`` has the next offset of each partition, and moves."""
    at = {} if at is None else at
    found = []
    for number in range(first, first + rows):
        partition = partition_of(number)
        found.append(Record(SOURCE, partition, at.get(partition, 0), key_of(number), value_of(number)))
        at[partition] = at.get(partition, 0) + 1
    return sorted(found)


def batches(records: list[Record], carry: Carry, number: int = BATCHES) -> list[Batch]:
    """Splits records into micro-batches of about the same size."""
    ends = dict(carry.position)
    found = []
    for index in range(number):
        for partition in sorted({each.partition for each in records}):
            own = [each.offset for each in records if each.partition == partition]
            ends[partition] = own[0] + len(own) * (index + 1) // number
        found.append(Batch(carry.next_batch + index, dict(ends)))
    return found


def written(query: Query, carry: Carry, planned: list[Batch], records: list[Record]) -> Seen:
    """Returns what a query finds at rest if it works."""
    totals, position = dict(carry.totals), dict(carry.position)
    output: list[Record] = []
    offsets: dict[tuple[str, int], int] = {}
    for batch in planned:
        read = [
            each
            for each in records
            if position.get(each.partition, 0) <= each.offset < batch.ends[each.partition]
        ]
        position.update(batch.ends)
        for topic, _, key, value in query.rows(read, totals):
            partition = int(str(key)[1:]) % PARTITIONS
            at = offsets.get((topic, partition), 0)
            output.append(Record(topic, partition, at, key, value))
            offsets[topic, partition] = at + 1
    values = [each.value for each in output]
    states = {"changelog": dict(totals)} if isinstance(query, Counts) else {}
    return Seen(
        printed=[Printed(each.partition, each.offset, str(each.key), each.value) for each in output],
        records=output,
        sinks={sink: list(values) for sink in query.sinks},
        states=states,
        sequence=carry.sequence + len(planned),
    )


def judged(query: Query, change: Callable[[Seen], Seen] = lambda seen: seen) -> Judgement:
    """Judges a chunk, after a change to what was found."""
    records = source()
    planned = batches(records, Carry())
    return judge(query, Carry(), planned, records, change(written(query, Carry(), planned, records)))[0]


def without(seen: Seen, index: int) -> Seen:
    """Removes a record from the output, as both consumers see it."""
    printed, records = list(seen.printed), list(seen.records)
    del printed[index], records[index]
    return replace(seen, printed=printed, records=records)


def with_another(seen: Seen, record: Record) -> Seen:
    """Adds a record to the output, as both consumers see it."""
    line = Printed(record.partition, record.offset, str(record.key), record.value)
    return replace(seen, printed=[*seen.printed, line], records=[*seen.records, record])


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_chunk_in_which_everything_is_there_once_is_good(query: Query) -> None:
    found = judged(query)
    assert found.good, found
    assert found.rows > ROWS // 2
    assert found.transactions == BATCHES


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_lost_record_is_noticed(query: Query) -> None:
    found = judged(query, lambda seen: without(seen, 7))
    assert (found.lost, found.doubled) == (1, 0)
    assert not found.good


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_doubled_record_is_noticed(query: Query) -> None:
    found = judged(query, lambda seen: with_another(seen, seen.records[7]._replace(offset=9999)))
    assert (found.lost, found.doubled) == (0, 1)
    assert found.anomalies["duplicates"]
    assert not found.good


def test_a_foreign_record_is_noticed() -> None:
    found = judged(BY_NAME["copy"], lambda seen: with_another(seen, Record("copy", 0, 999, "k00", "copy:1")))
    assert found.foreign == 1
    assert not found.good


def test_records_in_another_order_are_noticed() -> None:
    def swap(seen: Seen) -> Seen:
        """Exchanges two records of one key."""
        records = list(seen.records)
        first = 0
        second = next(n for n, each in enumerate(records) if n and each.key == records[first].key)
        one, two = records[first], records[second]
        records[first], records[second] = one._replace(value=two.value), two._replace(value=one.value)
        printed = [Printed(each.partition, each.offset, str(each.key), each.value) for each in records]
        return replace(seen, records=records, printed=printed)

    found = judged(BY_NAME["copy"], swap)
    assert found.anomalies["key order"]
    assert (found.lost, found.doubled, found.foreign) == (0, 0, 0)
    assert not found.good


def test_a_record_in_another_topic_of_its_query_is_noticed() -> None:
    def misroute(seen: Seen) -> Seen:
        topics = {"routed-even": "routed-odd", "routed-odd": "routed-even"}
        moved = seen.records[0]._replace(topic=topics[seen.records[0].topic])
        return replace(seen, records=[moved, *seen.records[1:]])

    found = judged(BY_NAME["routed"], misroute)
    assert (found.lost, found.foreign) == (1, 1)


def test_a_record_that_only_one_consumer_sees_is_noticed() -> None:
    assert judged(BY_NAME["copy"], lambda seen: replace(seen, printed=seen.printed[1:])).readers_differ == 1
    assert judged(BY_NAME["copy"], lambda seen: replace(seen, records=seen.records[1:])).readers_differ == 1


def test_a_record_that_an_open_transaction_hides_is_invisible() -> None:
    found = judged(BY_NAME["copy"], lambda seen: replace(without(seen, 3), hidden=["copy-0"]))
    assert found.invisible == 1
    assert not found.good


def recorded(change: Callable[[Txn], Txn], outcome: Phase = Phase.OK, older: Sequence[Txn] = ()) -> Judgement:
    """Judges a chunk of a query whose process recorded its attempts, after a change to the second one."""
    query, records = BY_NAME["fast"], source()
    planned = batches(records, Carry())
    txns, position = [], dict[int, int]()
    for batch in planned:
        starts = {partition: position.get(partition, 0) for partition in batch.ends}
        read = [
            each for each in records if starts[each.partition] <= each.offset < batch.ends[each.partition]
        ]
        ranges = tuple(
            SourceRange(SOURCE, partition, starts[partition], end) for partition, end in batch.ends.items()
        )
        txns.append(Txn("fast", batch.batch_id, ranges, tuple(read), tuple(query.rows(read, {})), "run"))
        position.update(batch.ends)
    txns[1] = change(txns[1])
    outcomes = [Phase.OK, outcome, *[Phase.OK] * (len(txns) - 2)]
    operations = tuple(Operation("loop", phase, 1, 2, txn) for phase, txn in zip(outcomes, txns, strict=True))
    operations += tuple(Operation("loop", Phase.OK, 1, 2, txn) for txn in older)
    seen = replace(written(query, Carry(), planned, records), history=History(txns=operations), now_ns=9)
    return judge(query, Carry(), planned, records, seen)[0]


def test_what_a_process_recorded_is_judged_too() -> None:
    assert recorded(lambda txn: txn).good
    assert recorded(lambda txn: txn, Phase.INFO).good, (
        "the outcome is unknown to the process, and all is there"
    )
    with_older = Txn("fast", -1, (), (), (Send("fast", None, "k00", "fast:judged"),), "run")
    assert recorded(lambda txn: txn, older=[with_older]).good, "a resumed run may find judged attempts"
    assert recorded(lambda txn: txn, Phase.FAIL).anomalies["aborted reads"]
    assert recorded(lambda txn: replace(txn, reads=txn.reads[1:])).anomalies["poll skips"]  # type: ignore[index]
    assert recorded(lambda txn: replace(txn, sends=txn.sends[1:])).anomalies["foreign reads"]


@pytest.mark.parametrize("sink", ["filesystem", "sql"])
def test_t147_a_row_that_a_sink_lost_or_doubled_is_noticed(sink: str) -> None:
    def change(rows: Callable[[list[str]], list[str]]) -> Judgement:
        return judged(
            BY_NAME["archive"],
            lambda seen: replace(seen, sinks={**seen.sinks, sink: rows(list(seen.sinks[sink]))}),
        )

    assert change(lambda rows: rows).good
    assert change(lambda rows: rows[1:]).sink_faults == 1
    assert change(lambda rows: [*rows, rows[0]]).sink_faults == 1


def test_t147_a_wrong_count_in_the_state_is_noticed() -> None:
    def wrong(seen: Seen) -> Seen:
        rows, total = seen.states["changelog"]["k03"]
        return replace(seen, states={"changelog": {**seen.states["changelog"], "k03": (rows + 1, total)}})

    found = judged(COUNTS, wrong)
    assert found.state_faults == 1
    assert "k03" in found.examples[0]


def test_t147_a_lost_key_of_the_state_is_noticed() -> None:
    def lose(seen: Seen) -> Seen:
        kept = {key: each for key, each in seen.states["changelog"].items() if key != "k03"}
        return replace(seen, states={"changelog": kept})

    assert judged(COUNTS, lose).state_faults == 1


def test_t147_state_that_was_applied_twice_is_noticed_in_the_output() -> None:
    """A batch that is applied twice to the state shows in the next values of its keys."""

    def twice(seen: Seen) -> Seen:
        name, rows, total = seen.records[-1].value.split(":")
        changed = seen.records[-1]._replace(value=f"{name}:{int(rows) + 1}:{total}")
        return with_another(without(seen, len(seen.records) - 1), changed)

    found = judged(COUNTS, twice)
    assert (found.lost, found.foreign) == (1, 1)


def test_input_that_no_batch_reads_is_lost() -> None:
    records = source()
    planned = batches(records, Carry())
    seen = written(BY_NAME["copy"], Carry(), planned, records)
    extra = Record(SOURCE, 0, 9999, "k00", value_of(72000))
    assert judge(BY_NAME["copy"], Carry(), planned, [*records, extra], seen)[0].lost == 1


def test_a_batch_that_the_offset_log_lacks_is_noticed() -> None:
    records = source()
    planned = batches(records, Carry())
    seen = written(BY_NAME["copy"], Carry(), planned, records)
    found, _ = judge(BY_NAME["copy"], Carry(), [*planned[:1], *planned[2:]], records, seen)
    assert not found.good


def test_fewer_transactions_than_batches_are_noticed() -> None:
    assert not judged(BY_NAME["copy"], lambda seen: replace(seen, sequence=BATCHES - 1)).good


@given(st.lists(st.integers(1, 80), min_size=1, max_size=4))
def test_t148_the_next_chunk_goes_on_where_the_last_one_ended(sizes: list[int]) -> None:
    """Positions, totals and batch ids go through JSON, as in a resumed run."""
    for query in (COUNTS, BY_NAME["routed"]):
        carry, first, at = Carry(), 0, dict[int, int]()
        for rows in sizes:
            records = source(first, rows, at)
            planned = batches(records, carry)
            found, carry = judge(query, carry, planned, records, written(query, carry, planned, records))
            assert found.good, found
            carry = Carry.from_json(json.loads(json.dumps(carry.to_json())))
            first += rows
        if query is COUNTS:
            assert sum(rows for rows, _ in carry.totals.values()) == first
            assert sum(total for _, total in carry.totals.values()) == sum(range(first))


def test_t148_the_totals_of_earlier_chunks_count() -> None:
    """A resumed run that had forgotten the totals would find the state wrong."""
    records = source()
    planned = batches(records, Carry())
    _, carry = judge(COUNTS, Carry(), planned, records, written(COUNTS, Carry(), planned, records))
    at = dict(carry.position)
    more = source(ROWS, 10, at)
    planned = batches(more, carry)
    seen = written(COUNTS, carry, planned, more)
    assert judge(COUNTS, carry, planned, more, seen)[0].good
    assert not judge(COUNTS, replace(carry, totals={}), planned, more, seen)[0].good


# -- the folder of a run


def test_t148_a_line_that_a_killed_process_did_not_complete_is_dropped(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "chunks.jsonl")
    lines.append(chunk=0)
    with open(tmp_path / "chunks.jsonl", "ab") as file:
        file.write(b'{"chunk": 1, "que')
    assert [each["chunk"] for each in lines] == [0]
    lines.append(chunk=1)
    assert [each["chunk"] for each in lines] == [0, 1]
    last = lines.last()
    assert last is not None
    assert last["chunk"] == 1


def test_t148_a_folder_holds_one_run_with_its_settings(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not run.exists
    run.begin(seed=7, rows_per_second=10.0)
    assert RunFolder(tmp_path / "run").settings() == {"seed": 7, "rows_per_second": 10.0}
    with pytest.raises(FileExistsError, match="--resume"):
        run.begin(seed=8)


# -- the checkpoints


def entry(checkpoint: Path, log: str, batch_id: int, end: int = 0) -> None:
    folder = checkpoint / log
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(batch_id)).write_text(f'v1\n{{}}\n{{"{SOURCE}":{{"0":{end}}},"@":{{}}}}')


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_t148_the_watch_collects_each_batch_once_and_continues_after_the_last_chunk(tmp_path: Path) -> None:
    for number in range(6):
        entry(tmp_path, "offsets", number, 10 * number)
    carry = Carry(next_batch=2, position={0: 10})
    files = [JsonLines(tmp_path / name) for name in ("faults.jsonl", "batches.jsonl")]
    watch = Watch({"copy": tmp_path}, {"copy": carry}, *files)
    assert watch.unfinished({0: 50}) == ["copy"], "batch 5 is planned, and not committed"
    entry(tmp_path, "commits", 5)
    assert watch.unfinished({0: 50}) == []
    assert watch.unfinished({0: 51}) == ["copy"]
    assert [each.batch_id for each in watch.take_batches("copy")] == [2, 3, 4, 5]
    entry(tmp_path, "offsets", 6, 60)
    watch.look()
    assert watch.take_batches("copy") == [Batch(6, {0: 60})]


def test_t148_a_resumed_run_knows_batches_that_spark_has_deleted(tmp_path: Path) -> None:
    files = [JsonLines(tmp_path / name) for name in ("faults.jsonl", "batches.jsonl")]
    carry = Carry(next_batch=2, position={0: 10})
    for number in range(5):
        entry(tmp_path, "offsets", number, 10 * number)
    Watch({"copy": tmp_path}, {"copy": carry}, *files).look()  # this session is killed
    for number in range(4):
        (tmp_path / "offsets" / str(number)).unlink()
    entry(tmp_path, "offsets", 5, 50)
    watch = Watch({"copy": tmp_path}, {"copy": carry}, *files)
    watch.look()
    assert [each.batch_id for each in watch.take_batches("copy")] == [2, 3, 4, 5]
    later = Watch({"copy": tmp_path}, {"copy": Carry(6, {0: 50})}, *files)
    later.look()
    assert later.take_batches("copy") == [], "they were judged before"


def test_a_query_has_recovered_when_it_has_committed_twice_after_the_fault(tmp_path: Path) -> None:
    clock, faults = Clock(), JsonLines(tmp_path / "faults.jsonl")
    paths = {name: tmp_path / name for name in ("copy", "fast")}
    carries = {name: Carry() for name in paths}
    watch = Watch(paths, carries, faults, JsonLines(tmp_path / "batches.jsonl"), clock)
    watch.begin_input()
    for path in paths.values():
        entry(path, "commits", 0)
    watch.look()
    watch.injected(3)
    entry(paths["copy"], "commits", 1)
    entry(paths["copy"], "commits", 2)
    watch.look()
    assert watch.open_faults == 1
    clock.now += 42
    assert watch.stalled(41) == ["copy", "fast"]
    assert watch.stalled(43) == []
    entry(paths["fast"], "commits", 1)
    watch.look()
    assert watch.open_faults == 1, "this batch may be from before the fault"
    entry(paths["fast"], "commits", 2)
    watch.look()
    assert watch.open_faults == 0
    (recovered,) = faults
    assert (recovered["fault"], recovered["seconds"], recovered["helped"]) == (3, 42, False)
    assert watch.longest_stall == (42, "fast")


def test_pruning_keeps_the_entries_of_the_chunk_under_way(tmp_path: Path) -> None:
    for number in range(8, 13):
        entry(tmp_path, "offsets", number)
    prune(tmp_path, before=10)
    assert sorted(int(each.name) for each in (tmp_path / "offsets").iterdir()) == [10, 11, 12]


# -- slopes and the report


def life(rss: Callable[[float], float], minutes: float = 30, pid: int = 7) -> list[dict[str, Any]]:
    """Returns samples of a process, every ten seconds; ``rss`` gets the time in hours."""
    times = [10.0 * number for number in range(int(minutes * 6))]
    return [
        {
            "at": at,
            "role": "fast",
            "pid": pid,
            "born": 1.0,
            "rss": rss(at / 3600),
            "fds": 30,
            "threads": 12,
        }
        for at in times
    ]


def slope_of(points: list[dict[str, Any]], metric: str = "rss") -> samples.Slope:
    return next(each for each in samples.slopes(points) if each.metric == metric)


def test_t149_memory_that_grows_is_named_and_noise_is_not() -> None:
    noise = random.Random(5)
    noisy = slope_of(life(lambda _: 2e8 + noise.uniform(-2e7, 2e7)))
    assert not noisy.grows
    assert noisy.low < 0 < noisy.high
    growing = slope_of(life(lambda hours: 2e8 + 1e8 * hours + noise.uniform(-2e6, 2e6)))
    assert growing.grows
    assert growing.low < 1e8 < growing.high


def test_t149_what_a_process_takes_while_it_starts_is_no_growth() -> None:
    assert not slope_of(life(lambda hours: min(2e8, 5e7 + 2e9 * hours))).grows


def test_t149_short_lives_are_not_judged() -> None:
    assert samples.slopes(life(lambda hours: 1e9 * hours, minutes=5)) == []


def test_t149_a_leaked_file_descriptor_a_minute_is_named() -> None:
    points = life(lambda _: 2e8)
    for number, each in enumerate(points):
        each["fds"] = 30 + number // 6
    assert slope_of(points, "fds").grows
    assert not slope_of(points, "threads").grows


def test_the_regression_agrees_with_a_known_example() -> None:
    """y = 1, 2, 2, 4 over x = 0 … 3: slope 0.9, standard error 0.2646, t(2) = 4.303 (its expansion: 4.2)."""
    slope, error = samples.regression([(0, 1), (1, 2), (2, 2), (3, 4)])
    assert slope == pytest.approx(0.9)
    assert error == pytest.approx(0.2646 * 4.303, rel=0.05)


def a_run(folder: Path, **changed: Any) -> RunFolder:
    """Writes the folder of a run with one judged chunk."""
    run = RunFolder(folder)
    run.begin(seed=7, rows_per_second=10.0, chunk_seconds=60.0, fault_seconds=20.0)
    run.events.append(kind="session", chunk=0, first_row=0)
    run.events.append(kind="start", host="fast", log="driver-0.log", failpoints="")
    run.faults.append(kind="fault", fault=0, what="cut network", detail="")
    run.faults.append(kind="recovered", fault=0, seconds=4.0, helped=False)
    result = judged(BY_NAME["copy"])
    run.chunks.append(
        **{
            "chunk": 0,
            "good": True,
            "seconds": 60.0,
            "calm": {"seconds": 30.0, "batches": 600},
            "input_rows": ROWS,
            "lost_input": 0,
            "stall": 9.5,
            "stalled": "copy",
            "queries": {"copy": result.to_json()},
            "carry": {},
            "ends": {},
            "last_row": ROWS - 1,
            **changed,
        }
    )
    for sample in life(lambda hours: 2e8 + 1e9 * hours):
        run.samples.append(**sample)
    return run


def test_the_report_of_a_good_run(tmp_path: Path) -> None:
    a_run(tmp_path)
    finished = CliRunner().invoke(main, ["--report", str(tmp_path)])
    assert finished.exit_code == 0, finished.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["transactions"] == BATCHES
    assert found["faults"] == {"cut network": 1}
    assert (found["recovered"], found["helps"]) == (1, 0)
    assert found["calm_per_second"] == 20.0
    for text in ("every record exactly once", "cut network | 1", "10 s (copy)", "7: +"):
        assert text in finished.output, text
    assert finished.output.strip() == (tmp_path / "report.md").read_text().strip()


@pytest.mark.parametrize("wrong", ["a chunk", "help", "stuck"])
def test_a_run_with_a_wrong_chunk_or_help_is_not_good(tmp_path: Path, wrong: str) -> None:
    run = a_run(tmp_path, good=wrong != "a chunk")
    if wrong != "a chunk":
        run.events.append(kind=wrong, queries=["copy"], logs=[])
    finished = CliRunner().invoke(main, ["--report", str(tmp_path)])
    assert finished.exit_code == 1
    assert "**WRONG**" in finished.output


def test_a_run_that_ended_wrong_is_not_resumed(tmp_path: Path) -> None:
    """The next chunk would delete what shows the defect."""
    a_run(tmp_path, good=False)
    refused = CliRunner().invoke(main, ["--resume", str(tmp_path)])
    assert refused.exit_code == 2
    assert "chunk 0" in refused.output


def test_t148_a_run_that_another_process_runs_is_not_resumed(tmp_path: Path) -> None:
    with a_run(tmp_path).held():
        refused = CliRunner().invoke(main, ["0.1", "--resume", str(tmp_path)])
    assert refused.exit_code == 2
    assert "another process runs the soak" in refused.output


def test_options_that_exclude_each_other_and_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    for arguments in (
        ["--resume", str(tmp_path)],
        ["--report", str(tmp_path)],
        ["--keep", str(tmp_path), "--resume", str(tmp_path)],
    ):
        assert CliRunner().invoke(main, arguments).exit_code == 2


def test_the_queries_cover_state_two_sinks_and_steps_in_the_read() -> None:
    assert STORE
    assert {query.host for query in QUERIES} == {"spark", "fast", "fastarchive"}
    assert [query.name for query in QUERIES if len(query.sinks) == 2] == ["archive", "fastarchive"]
