"""The history checker finds every kind of violation, and accepts every correct history."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from integration.support import jepsen as edn_module
from integration.support.checker import Anomaly, Findings, check
from integration.support.history import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Fault,
    History,
    Invoked,
    Operation,
    Phase,
    Poll,
    Record,
    Recorder,
    Send,
    SourceRange,
    Txn,
    read_history,
)
from integration.support.jepsen import edn
from kafka_eos_source.errors import OperatorError
from tests.project import model_run

OK, FAIL, INFO = Phase.OK, Phase.FAIL, Phase.INFO
SEEDS = st.integers(0, 2**63)


def send(value: str, partition: int | None = None, topic: str = "out") -> Send:
    return Send(topic, partition, value.partition(":")[0], value)


def txn(
    batch_id: int,
    *values: str | Send,
    phase: Phase = OK,
    at: int | None = None,
    ranges: Sequence[tuple[int, int]] = (),
    reads: Sequence[Record] | None = None,
    query: str = "app",
) -> Operation[Txn]:
    """Returns a batch's operation; unless ``at`` is set, batch 0 lasts from 100 to 150, batch 1 from 200."""
    at = 100 * (batch_id + 1) if at is None else at
    sends = tuple(send(each) if isinstance(each, str) else each for each in values)
    source = tuple(SourceRange("in", partition, *each) for partition, each in enumerate(ranges))
    what = Txn(query, batch_id, source, None if reads is None else tuple(reads), sends)
    return Operation("driver", phase, at, None if phase is INFO else at + 50, what)


def record(value: str, offset: int, partition: int = 0, topic: str = "out") -> Record:
    return Record(topic, partition, offset, value.partition(":")[0], value)


def poll(
    *records: Record, process: str = "reader", at: int = 1000, isolation: str = READ_COMMITTED
) -> Operation[Poll]:
    return Operation(process, OK, at - 10, at, Poll(records, isolation))


def run(*operations: Operation[Any]) -> History:
    return History(
        txns=tuple(each for each in operations if isinstance(each.what, Txn)),
        polls=tuple(each for each in operations if isinstance(each.what, Poll)),
        faults=tuple(each for each in operations if isinstance(each.what, Fault)),
    )


A1, A2, A3, B1 = record("a:1", 0), record("a:2", 2), record("a:3", 3), record("b:1", 1)
IN = [record("a:1", 0, topic="in"), record("b:1", 1, topic="in"), record("a:2", 3, topic="in")]

#: For each violation: the expected finding, a history with it, and the same history without it.
CASES: dict[str, tuple[set[Anomaly], History, History]] = {
    "two readers see different values at one offset": (
        {Anomaly.INCONSISTENT_OFFSET},
        run(txn(0, "a:1", "b:1"), poll(A1, B1), poll(A1._replace(key="b", value="b:1"), process="other")),
        run(txn(0, "a:1", "b:1"), poll(A1, B1), poll(A1, process="other")),
    ),
    "a read_uncommitted reader sees another value than the others": (
        {Anomaly.INCONSISTENT_OFFSET},
        run(txn(0, "a:1"), poll(A1), poll(record("z:1", 0), process="u", isolation=READ_UNCOMMITTED)),
        run(txn(0, "a:1"), poll(A1), poll(A1, process="u", isolation=READ_UNCOMMITTED)),
    ),
    "two attempts at a batch read different records of the source": (
        {Anomaly.INCONSISTENT_OFFSET},
        run(
            txn(0, phase=INFO, ranges=[(0, 1)], reads=[record("a:1", 0, topic="in")]),
            txn(0, at=200, ranges=[(0, 1)], reads=[record("b:1", 0, topic="in")]),
        ),
        run(
            txn(0, phase=INFO, ranges=[(0, 1)], reads=[record("a:1", 0, topic="in")]),
            txn(0, at=200, ranges=[(0, 1)], reads=[record("a:1", 0, topic="in")]),
        ),
    ),
    "a value twice in a partition": (
        {Anomaly.DUPLICATE},
        run(txn(0, "a:1", "b:1", "a:2"), poll(A1, B1, A2, A1._replace(offset=5))),
        run(txn(0, "a:1", "b:1", "a:2"), poll(A1, B1, A2)),
    ),
    "a value in two partitions": (
        {Anomaly.DUPLICATE},
        run(txn(0, "a:1", "b:1"), poll(A1, B1, A1._replace(partition=1))),
        run(txn(0, "a:1", "b:1"), poll(A1, B1._replace(partition=1))),
    ),
    "a replay that doubles, seen by two readers of which each sees it once": (
        {Anomaly.DUPLICATE},
        run(txn(0, "a:1", phase=INFO), txn(0, "a:1", at=200), poll(A1), poll(record("a:1", 4), process="o")),
        run(txn(0, "a:1", phase=INFO), txn(0, "a:1", at=200), poll(A1), poll(A1, process="o")),
    ),
    "a transaction reads a record twice": (
        {Anomaly.DUPLICATE},
        run(txn(0, ranges=[(0, 4)], reads=[*IN, IN[0]])),
        run(txn(0, ranges=[(0, 4)], reads=IN)),
    ),
    "a value that nobody sent": (
        {Anomaly.FOREIGN_READ},
        run(txn(0, "a:1"), poll(A1, record("z:1", 1))),
        run(txn(0, "a:1"), poll(A1, record("z:1", 1, topic="elsewhere"))),
    ),
    "a value under another key": (
        {Anomaly.FOREIGN_READ, Anomaly.LOST_WRITE},
        run(txn(0, "a:1"), poll(A1._replace(key="b"))),
        run(txn(0, "a:1"), poll(A1)),
    ),
    "a value in another partition than it was sent to": (
        {Anomaly.FOREIGN_READ},
        run(txn(0, send("a:1", 1)), poll(A1)),
        run(txn(0, send("a:1", 0)), poll(A1)),
    ),
    "a value of a transaction that failed": (
        {Anomaly.ABORTED_READ},
        run(txn(0, "a:1"), txn(1, "a:2", phase=FAIL), poll(A1, A2)),
        run(txn(0, "a:1"), txn(1, "a:2", phase=FAIL), poll(A1)),
    ),
    "a value of an attempt that did not take place, where the next one made other values": (
        {Anomaly.ABORTED_READ},
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, "a:2", "a:3", at=200), poll(A1, A2, A3)),
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, "a:2", "a:3", at=200), poll(A2, A3)),
    ),
    "a value of an attempt that failed, where the one in doubt would have made another": (
        {Anomaly.ABORTED_READ},
        run(txn(0, "a:1", phase=INFO), txn(0, "a:2", phase=FAIL, at=200), poll(A2)),
        run(txn(0, "a:1", phase=INFO), txn(0, "a:2", phase=FAIL, at=200), poll(A1)),
    ),
    "a value before its transaction began": (
        {Anomaly.PRECOMMITTED_READ},
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1, A2, at=199)),
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1, A2, at=201)),
    ),
    "a value before its transaction began, by the reader that was done first": (
        {Anomaly.PRECOMMITTED_READ},
        run(
            txn(0, "a:1"),
            Operation("slow", OK, 10, 500, Poll((A1,))),
            Operation("fast", OK, 20, 90, Poll((A1,))),
        ),
        run(
            txn(0, "a:1"),
            Operation("slow", OK, 10, 500, Poll((A1,))),
            Operation("fast", OK, 20, 190, Poll((A1,))),
        ),
    ),
    "a transaction reads what it sends": (
        {Anomaly.PRECOMMITTED_READ},
        run(txn(0, send("a:1", topic="in"), ranges=[(0, 1)], reads=IN[:1])),
        run(txn(0, send("a:1", topic="in")), txn(1, ranges=[(0, 1)], reads=IN[:1])),
    ),
    "a value that was acknowledged and is not there": (
        {Anomaly.LOST_WRITE},
        run(txn(0, "a:1", "b:1"), txn(1, "a:2"), poll(A1, A2)),
        run(txn(0, "a:1", "b:1"), txn(1, "a:2"), poll(A1, B1, A2)),
    ),
    "the last value of all": (
        {Anomaly.LOST_WRITE},
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1)),
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1, A2)),
    ),
    "nothing is read at all": (
        {Anomaly.LOST_WRITE},
        run(txn(0, "a:1")),
        run(txn(0, "a:1", phase=FAIL)),
    ),
    "a batch in doubt, acknowledged by its replay": (
        {Anomaly.LOST_WRITE},
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, "a:1", "b:1", at=200), poll(A1)),
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, "a:1", "b:1", at=200), poll(A1, B1)),
    ),
    "a replay that was acknowledged without saying what it wrote": (
        {Anomaly.LOST_WRITE},
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, at=200), poll(A1)),
        run(txn(0, "a:1", "b:1", phase=INFO), txn(0, at=200), poll(A1, B1)),
    ),
    "a part of a transaction in doubt": (
        {Anomaly.TORN_TRANSACTION},
        run(txn(0, "a:1"), txn(1, "b:1", "a:2", phase=INFO), poll(A1, A2)),
        run(txn(0, "a:1"), txn(1, "b:1", "a:2", phase=INFO), poll(A1, B1, A2)),
    ),
    "a part of a transaction in doubt whose replay failed": (
        {Anomaly.TORN_TRANSACTION},
        run(txn(0, "b:1", "a:2", phase=INFO), txn(0, "b:1", "a:2", phase=FAIL, at=200), poll(A2)),
        run(txn(0, "b:1", "a:2", phase=INFO), txn(0, "b:1", "a:2", phase=FAIL, at=200), poll()),
    ),
    "values of a key change places between batches": (
        {Anomaly.KEY_ORDER},
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1._replace(value="a:2"), A2._replace(value="a:1"))),
        run(txn(0, "a:1"), txn(1, "a:2"), poll(A1, A2)),
    ),
    "values of a key change places within a batch": (
        {Anomaly.KEY_ORDER},
        run(txn(0, "a:1", "b:1", "a:2"), poll(A1._replace(value="a:2"), B1, A2._replace(value="a:1"))),
        run(txn(0, "a:1", "b:1", "a:2"), poll(B1._replace(offset=0), A1._replace(offset=1), A2)),
    ),
    "a reader goes back": (
        {Anomaly.NONMONOTONIC_POLL},
        run(txn(0, "a:1", "b:1"), poll(A1, B1), poll(A1, at=1100)),
        run(txn(0, "a:1", "b:1"), poll(A1, B1), poll(A1, at=1100, process="another")),
    ),
    "a reader reads a record twice in one poll": (
        {Anomaly.NONMONOTONIC_POLL},
        run(txn(0, "a:1", "b:1"), poll(A1, A1, B1)),
        run(txn(0, "a:1", "b:1"), poll(A1, B1)),
    ),
    "a reader passes over what another one saw": (
        {Anomaly.POLL_SKIP},
        run(txn(0, "a:1", "b:1", "a:2"), poll(A1), poll(A2, at=1100), poll(A1, B1, A2, process="other")),
        run(txn(0, "a:1", "a:2"), poll(A1), poll(A2, at=1100), poll(A1, A2, process="other")),
    ),
    "a read_uncommitted reader passes over what others saw": (
        {Anomaly.POLL_SKIP},
        run(
            txn(0, "a:1", "b:1", "a:2"),
            poll(A1, B1, A2),
            poll(A1, A2, process="u", isolation=READ_UNCOMMITTED),
        ),
        run(
            txn(0, "a:1", "a:2"),
            poll(A1, A2),
            poll(A1, record("z:1", 1), A2, process="u", isolation=READ_UNCOMMITTED),
        ),
    ),
    "a transaction passes over a record that an earlier attempt read": (
        {Anomaly.POLL_SKIP},
        run(txn(0, phase=INFO, ranges=[(0, 4)], reads=IN), txn(0, at=200, ranges=[(0, 4)], reads=IN[1:])),
        run(txn(0, phase=INFO, ranges=[(0, 4)], reads=IN), txn(0, at=200, ranges=[(0, 4)], reads=IN)),
    ),
    "a range of the source that nobody reads": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(0, 5), (0, 3)]), txn(1, ranges=[(5, 9), (4, 8)])),
        run(txn(0, ranges=[(0, 5), (0, 3)]), txn(1, ranges=[(5, 9), (3, 8)])),
    ),
    "a range of the source that is read twice": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(0, 5)]), txn(1, ranges=[(4, 9)])),
        run(txn(0, ranges=[(0, 5)]), txn(1, ranges=[(5, 9)])),
    ),
    "a range that ends before it starts": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(5, 4)])),
        run(txn(0, ranges=[(5, 5)])),
    ),
    "a batch in doubt that nothing is there of, and the next one goes on behind it": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(0, 3)]), txn(1, "a:1", phase=INFO, ranges=[(3, 5)]), txn(2, ranges=[(5, 9)])),
        run(txn(0, ranges=[(0, 3)]), txn(1, "a:1", phase=INFO, ranges=[(3, 5)]), txn(2, ranges=[(3, 9)])),
    ),
    "a batch that failed, and the next one goes on behind it": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(0, 3)]), txn(1, phase=FAIL, ranges=[(3, 5)]), txn(2, ranges=[(5, 9)])),
        run(txn(0, ranges=[(0, 3)]), txn(1, phase=FAIL, ranges=[(3, 5)]), txn(2, ranges=[(3, 9)])),
    ),
    "a read outside of the range": (
        {Anomaly.SOURCE_RANGE},
        run(txn(0, ranges=[(0, 3)], reads=IN)),
        run(txn(0, ranges=[(0, 4)], reads=IN)),
    ),
}


@pytest.mark.parametrize(("found", "wrong", "right"), CASES.values(), ids=CASES.keys())
def test_each_anomaly_is_found_only_in_the_history_that_has_it(
    found: set[Anomaly], wrong: History, right: History
) -> None:
    findings = check(wrong)
    assert set(findings.counts) == found, findings
    assert set(findings.examples) == found
    assert not findings.ok
    assert check(right).ok, check(right)


def test_every_anomaly_has_a_case() -> None:
    assert set().union(*(found for found, _, _ in CASES.values())) == set(Anomaly)


def test_a_batch_with_an_unknown_outcome_and_no_values_may_have_happened_or_not() -> None:
    doubt = txn(1, phase=INFO, ranges=[(5, 7)])
    assert check(run(txn(0, ranges=[(0, 5)]), doubt, txn(2, ranges=[(7, 9)]))).ok
    assert check(run(txn(0, ranges=[(0, 5)]), doubt, txn(2, ranges=[(5, 9)]))).ok
    assert not check(run(txn(0, ranges=[(0, 5)]), doubt, txn(2, ranges=[(6, 9)]))).ok


def test_before_the_end_only_what_comes_before_the_last_value_of_its_key_must_be_read() -> None:
    sent = (txn(0, "a:1", "b:1"), txn(1, "a:2", "a:3"))
    assert check(run(*sent, poll(A1, A2)), final=False).ok
    assert set(check(run(*sent, poll(A1, A3)), final=False).counts) == {Anomaly.LOST_WRITE}
    late = poll(A1, at=1100, process="late")
    assert set(check(run(*sent, poll(A3), late), final=False).counts) == {Anomaly.LOST_WRITE}
    no_key = txn(0, Send("out", 0, None, "1"), Send("out", 0, None, "2"))
    assert check(run(no_key, poll(Record("out", 0, 0, None, "2"))), final=False).ok
    in_doubt = (txn(0, "b:1", "a:2", "a:3", phase=INFO),)
    assert check(run(*in_doubt, poll(B1, A2)), final=False).ok
    assert set(check(run(*in_doubt, poll(B1, A3)), final=False).counts) == {Anomaly.TORN_TRANSACTION}


def test_equal_batch_ids_of_two_queries_are_different_batches() -> None:
    both = (txn(1, "a:1", ranges=[(5, 9)]), txn(0, "a:2", at=200, ranges=[(0, 5)], query="other"))
    assert check(run(*both, poll(A2._replace(offset=0), A1._replace(offset=1)))).ok
    assert check(run(*both, poll(A1, A2))).ok
    assert check(run(*both, poll(A1, A2))).transactions == 2


def test_a_value_that_another_query_sends_again_belongs_to_that_query() -> None:
    again = txn(0, "a:1", at=200, query="adopted")
    assert check(run(txn(0, "a:1", phase=FAIL), again, poll(A1))).ok
    assert check(run(txn(0, "a:1", "b:1", phase=INFO), again, poll(A1))).ok
    assert check(run(txn(0, "a:1", "b:1"), again, poll(B1))).counts == {Anomaly.LOST_WRITE: 1}


def test_a_value_seen_only_at_the_offset_of_another_one_is_not_reported_as_lost() -> None:
    clash = run(txn(0, "a:1", "b:1"), poll(A1), poll(record("b:1", 0), process="other"))
    assert check(clash).counts == {Anomaly.INCONSISTENT_OFFSET: 1}


def test_acknowledged_values_are_lost_if_the_replay_does_not_list_its_values() -> None:
    replayed = run(txn(0, "a:1", "b:1", phase=INFO), txn(0, at=200))
    assert check(replayed).counts == {Anomaly.LOST_WRITE: 2}
    first_said_nothing = run(txn(0, phase=INFO), txn(0, "a:1", at=200))
    assert check(first_said_nothing).counts == {Anomaly.LOST_WRITE: 1}


def test_the_order_of_records_may_come_from_their_values() -> None:
    history = run(txn(0, "a:2", "a:1"), poll(A1._replace(value="a:2"), A2._replace(value="a:1")))
    assert check(history).ok
    nobody_sent_it = run(poll(A1._replace(value="a:2"), A2._replace(value="a:1")))
    for each in (history, nobody_sent_it):
        by_value = check(each, order=lambda value: int(value.partition(":")[2]))
        assert set(by_value.counts) == {Anomaly.KEY_ORDER}


def test_records_without_a_key_have_no_order() -> None:
    sent = txn(0, Send("out", 0, None, "1"), Send("out", 0, None, "2"))
    assert check(run(sent, poll(Record("out", 0, 0, None, "2"), Record("out", 0, 1, None, "1")))).ok


def test_findings_are_counted_and_shown() -> None:
    lost = run(
        txn(0, "a:1", "a:2", "a:3", "b:1"),
        Operation("soak", INFO, None, 5, Fault("kill driver")),
        poll(A1),
    )
    findings = check(lost, examples=2)
    assert findings == Findings(
        transactions=1,
        replays=0,
        took_place=1,
        sent=4,
        read=1,
        faults=1,
        counts={Anomaly.LOST_WRITE: 3},
        examples={
            Anomaly.LOST_WRITE: (
                "out: 'a:2' of key 'a', batch 0 of app",
                "out: 'a:3' of key 'a', batch 0 of app",
            )
        },
    )
    lines = str(findings).splitlines()
    assert len(lines) == 6 + len(Anomaly) + 2
    assert lines[lines.index("  out: 'a:2' of key 'a', batch 0 of app") - 1].split() == [
        "lost",
        "writes",
        "3",
    ]


@given(SEEDS, st.booleans())
def test_a_correct_run_has_no_findings(seed: int, finish: bool) -> None:
    random = Random(seed)
    history = model_run.read(random, model_run.write(random, finish=finish)).history
    findings = check(history, order=lambda value: int(value.partition(":")[2]))
    assert findings.ok, findings
    assert check(history).ok
    assert findings.transactions + findings.replays == len(history.txns)


@given(SEEDS, st.booleans(), st.floats(0, 1))
def test_a_correct_run_has_no_findings_at_any_moment(seed: int, finish: bool, share: float) -> None:
    random = Random(seed)
    made = model_run.read(random, model_run.write(random, finish=finish))
    made.polls = sorted(made.polls, key=lambda each: each.time_ns)[: int(share * len(made.polls))]
    findings = check(made.history, final=False)
    assert findings.ok, findings


@pytest.mark.parametrize("mutation", model_run.WRITTEN_WRONG, ids=lambda each: each.__name__)
@given(SEEDS, st.booleans())
def test_every_wrong_write_is_found(mutation: model_run.Mutation, seed: int, finish: bool) -> None:
    random = Random(seed)
    made = model_run.write(random, finish=finish)
    expected = mutation(random, made)
    assume(expected)
    findings = check(model_run.read(random, made).history)
    assert set(findings.counts).issuperset(expected or {None}), findings


@pytest.mark.parametrize("mutation", model_run.READ_WRONG, ids=lambda each: each.__name__)
@given(SEEDS, st.booleans())
def test_every_wrong_read_is_found(mutation: model_run.Mutation, seed: int, finish: bool) -> None:
    random = Random(seed)
    made = model_run.read(random, model_run.write(random, finish=finish))
    expected = mutation(random, made)
    assume(expected)
    findings = check(made.history)
    assert set(findings.counts).issuperset(expected or {None}), findings


def written(history: History, folder: Path) -> list[Path]:
    """Writes the files that the recorders of all processes would have written."""
    steps: list[tuple[int, str, Phase, Operation[Any]]] = []
    operations: list[Operation[Any]] = [*history.txns, *history.polls, *history.faults]
    for each in operations:
        if each.invoked_ns is not None:
            steps.append((each.invoked_ns, each.process, Phase.INVOKE, each))
        if each.completed_ns is not None:
            steps.append((each.completed_ns, each.process, each.phase, each))
    now_ns = [0]
    recorders: dict[str, Recorder] = {}
    begun: dict[int, Invoked] = {}
    for now_ns[0], process, phase, each in sorted(steps, key=lambda step: step[0]):
        if process not in recorders:
            recorders[process] = Recorder(folder / f"{process}.jsonl", process, lambda: now_ns[0])
        recorder = recorders[process]
        if phase is Phase.INVOKE:
            begun[id(each)] = recorder.invoke(each.what)
        elif isinstance(each.what, Fault):
            recorder.fault(each.what.what, **each.what.detail)
        elif each.invoked_ns is None:
            recorder.polled(each.what.records, each.what.isolation)
        else:
            end = {OK: recorder.ok, FAIL: recorder.fail, INFO: recorder.info}[phase]
            end(begun[id(each)], each.what if isinstance(each.what, Poll) else None)
    for recorder in recorders.values():
        recorder.close()
    return [folder / f"{process}.jsonl" for process in recorders]


@settings(max_examples=20)
@given(SEEDS, st.booleans())
def test_recorded_histories_are_read_back(seed: int, finish: bool) -> None:
    random = Random(seed)
    history = model_run.read(random, model_run.write(random, finish=finish)).history
    with tempfile.TemporaryDirectory() as folder:
        found = read_history(written(history, Path(folder)))
    assert sorted(found.txns, key=str) == sorted(history.txns, key=str)
    assert sorted(found.polls, key=str) == sorted(history.polls, key=str)
    assert found.faults == history.faults


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    for name, times in (("b", [1, 2, 7, 8, 9]), ("a", [3, 4, 5, 6, 10])):
        with Recorder(tmp_path / name, name, iter(times).__next__) as recorder:
            recorder.invoke(Txn("app", 0))
            recorder.polled([])
            recorder.polled([])
            recorder.fault("cut")
            recorder.invoke(Txn("app", 1))
    history = read_history([tmp_path / "b", tmp_path / "a"])
    assert [each.time_ns for each in history.txns] == [1, 3, 9, 10]
    assert [(each.process, each.time_ns) for each in history.polls] == [
        ("b", 2),
        ("a", 4),
        ("a", 5),
        ("b", 7),
    ]
    assert [each.process for each in history.faults] == ["a", "b"]
    assert [each.process for each in history.txns] == ["b", "a", "b", "a"]


def test_the_end_of_an_operation_may_add_details_to_its_start(tmp_path: Path) -> None:
    with Recorder(tmp_path / "h", "driver", iter([1, 2, 3, 4, 5, 6]).__next__) as recorder:
        plain = recorder.invoke(Txn("app", 0, sends=(send("a:1"),)))
        more = recorder.invoke(Txn("app", 1))
        recorder.info(plain)
        recorder.ok(more, Txn("app", 1, sends=(send("a:2"),), reads=(A1,), run="r"))
        recorder.invoke(Poll())
        recorder.fault("cut", broker="2")
    history = read_history([tmp_path / "h"])
    assert history.txns == (
        Operation("driver", INFO, 1, 3, Txn("app", 0, sends=(send("a:1"),))),
        Operation("driver", OK, 2, 4, Txn("app", 1, sends=(send("a:2"),), reads=(A1,), run="r")),
    )
    assert history.polls == (Operation("driver", INFO, 5, None, Poll()),)
    assert history.faults == (Operation("driver", INFO, None, 6, Fault("cut", {"broker": "2"})),)


@given(st.data())
def test_a_truncated_file_is_read_up_to_its_last_whole_line(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h"
        with Recorder(path, "driver", iter(range(10)).__next__) as recorder:
            for batch_id in range(3):
                recorder.ok(recorder.invoke(Txn("app", batch_id, sends=(send("ä:1"),))))
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        found = read_history([path])
        assert found.torn_lines == (0 if whole[:cut].endswith(b"\n") or not cut else 1)
        assert [each.phase for each in found.txns] == [OK] * (lines // 2) + [INFO] * (lines % 2)

        with Recorder(path, "driver") as again:  # a process that continues where the other was killed
            again.ok(again.invoke(Txn("app", 9)))
        gone_on = read_history([path])
        assert gone_on.torn_lines == 0
        assert gone_on.txns[:-1] == found.txns
        assert gone_on.txns[-1].what == Txn("app", 9)
        assert gone_on.txns[-1].phase is OK


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        '{"op": 0}',
        '{"op": 0, "kind": "txn", "phase": "odd", "time_ns": 1}',
        '{"op": 0, "kind": "odd", "phase": "ok", "time_ns": 1}',
        '{"op": 7, "kind": "txn", "phase": "ok", "time_ns": 1}',
        '{"op": 7, "kind": "poll", "phase": "ok", "time_ns": 1}',
    ],
)
def test_a_line_that_is_not_an_operation_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "h"
    with Recorder(path, "driver") as recorder:
        recorder.fault("kill")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(OperatorError, match="line 2 of the history"):
        read_history([path])


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    """Calls of a recorder that returned are on disk, even if the process is killed afterwards."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from integration.support.history import Recorder, Txn\n"
        "recorder = Recorder(Path(sys.argv[1]), 'driver')\n"
        "recorder.ok(recorder.invoke(Txn('app', 0)))\n"
        "recorder.invoke(Txn('app', 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "h"
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -9
    assert [each.phase for each in read_history([path]).txns] == [OK, INFO]


def parse(text: str) -> Any:
    """Reads a subset of EDN: vectors become lists, keywords strings that start with a colon."""
    value, rest = _value(text)
    assert not rest.strip(" ,"), f"left over: {rest!r}"
    return value


def _value(text: str) -> tuple[Any, str]:
    text = text.lstrip(" ,")
    if text[0] in "[{":
        end = {"[": "]", "{": "}"}[text[0]]
        items, rest = [], text[1:].lstrip(" ,")
        while not rest.startswith(end):
            item, rest = _value(rest)
            items.append(item)
            rest = rest.lstrip(" ,")
        if end == "]":
            return items, rest[1:]
        assert len(items) % 2 == 0
        return dict(zip(items[::2], items[1::2], strict=True)), rest[1:]
    if text[0] == '"':
        at = 1
        while text[at] != '"':
            at += 2 if text[at] == "\\" else 1
        plain = text[1:at].encode("ascii").decode("unicode_escape")
        return plain.encode("utf-16", "surrogatepass").decode("utf-16"), text[at + 1 :]
    word = text.split(",")[0].split(" ")[0].split("]")[0].split("}")[0]
    rest = text[len(word) :]
    if word == "nil":
        return None, rest
    return word if word.startswith(":") else int(word), rest


def test_edn_of_a_small_run_is_as_expected() -> None:
    history = run(
        txn(0, "a:1", "b:1", phase=INFO),
        txn(0, "a:1", "b:1", at=200),
        txn(1, "a:2", phase=FAIL, at=300),
        txn(2, "a:3", phase=INFO, at=400),
        txn(3, "a:4", send('é😀\n"\\:1'), at=500, reads=[record("x:1", 0, topic="in")]),
        Operation("soak", INFO, None, 180, Fault("kill driver")),
        poll(B1._replace(offset=0), A1._replace(offset=1), at=260),
        poll(record("a:4", 5, 1), at=600),
        poll(A2, at=600, process="u", isolation=READ_UNCOMMITTED),
    )
    odd = 'é😀\n"\\=é😀\n"\\:1'
    found = [parse(line) for line in edn(history)]
    assert [op[":index"] for op in found] == list(range(len(found)))
    assert [(op[":time"], op[":process"], op[":type"], op[":f"], op[":value"]) for op in found] == [
        (0, 0, ":invoke", ":txn", [[":send", "out-0", "b=b:1"], [":send", "out-0", "a=a:1"]]),
        (80, ":nemesis", ":info", ":fault", "kill driver"),
        (150, 0, ":ok", ":txn", [[":send", "out-0", [0, "b=b:1"]], [":send", "out-0", [1, "a=a:1"]]]),
        (150, 2, ":invoke", ":poll", [[":poll"]]),
        (160, 2, ":ok", ":poll", [[":poll", {"out-0": [[0, "b=b:1"], [1, "a=a:1"]]}]]),
        (200, 0, ":invoke", ":txn", [[":send", "out-?", "a=a:2"]]),
        (250, 0, ":fail", ":txn", [[":send", "out-?", "a=a:2"]]),
        (300, 0, ":invoke", ":txn", [[":send", "out-?", "a=a:3"]]),
        (400, 1, ":invoke", ":txn", [[":send", "out-1", "a=a:4"], [":send", "out-?", odd]]),
        (450, 1, ":ok", ":txn", [[":send", "out-1", [5, "a=a:4"]], [":send", "out-?", odd]]),
        (490, 2, ":invoke", ":poll", [[":poll"]]),
        (500, 0, ":info", ":txn", [[":send", "out-?", "a=a:3"]]),
        (500, 2, ":ok", ":poll", [[":poll", {"out-1": [[5, "a=a:4"]]}]]),
    ]


def test_edn_has_the_polls_of_a_topic_that_is_written_to() -> None:
    feed = txn(0, send("a:1", topic="in"), query="feeder")
    copy = txn(0, "a:1", at=200, reads=[record("a:1", 7, topic="in")])
    values = [parse(line)[":value"] for line in edn(run(feed, copy, poll(A1)))]
    assert [[":poll"], [":send", "out-0", "a=a:1"]] in values
    assert [[":poll", {"in-0": [[7, "a=a:1"]]}], [":send", "out-0", [0, "a=a:1"]]] in values
    assert [[":send", "in-0", [7, "a=a:1"]]] in values


def exported(*operations: Operation[Any]) -> list[tuple[int, int, str, Any]]:
    """Returns time, process, type and value of each operation's outcome."""
    found = [parse(line) for line in edn(run(*operations))]
    return [(op[":time"], op[":process"], op[":type"], op[":value"]) for op in found]


def test_edn_contains_the_first_acknowledgement_of_an_operation() -> None:
    assert [each[:3] for each in exported(txn(0), txn(0, at=200))] == [(0, 0, ":invoke"), (50, 0, ":ok")]


def test_edn_ends_operations_with_an_unknown_outcome_at_the_end_of_the_run() -> None:
    told = replace(txn(0, phase=INFO), completed_ns=150)
    after = txn(1, at=400)
    assert [each[:3] for each in exported(told, txn(0, phase=INFO, at=200), after)] == [
        (0, 0, ":invoke"),
        (300, 1, ":invoke"),
        (350, 0, ":info"),
        (350, 1, ":ok"),
    ]
    assert [each[:3] for each in exported(told, after)] == [
        (0, 0, ":invoke"),
        (50, 0, ":info"),
        (300, 1, ":invoke"),
        (350, 1, ":ok"),
    ]


def test_edn_keeps_the_order_of_batches_whose_ids_went_back() -> None:
    assert [each[1] for each in exported(txn(1, at=100), txn(0, at=300))] == [0, 0, 0, 0]


def test_edn_omits_the_offset_of_a_misplaced_value() -> None:
    elsewhere = exported(txn(0, send("a:1", 1)), poll(A1))
    assert elsewhere[1][3] == [[":send", "out-1", "a=a:1"]]
    aborted = exported(txn(0, "a:1", phase=FAIL), poll(A1))
    assert aborted[1][3] == [[":send", "out-0", "a=a:1"]]


def test_edn_omits_polls_of_a_topic_without_writers() -> None:
    assert exported(poll(record("a:1", 0, topic="elsewhere")))[1][3] == [[":poll", {}]]


def test_edn_gives_sends_without_a_key_in_the_order_of_the_log() -> None:
    sent = txn(0, Send("out", 0, None, "1"), Send("out", 0, None, "2"))
    found = exported(sent, poll(Record("out", 0, 0, None, "2"), Record("out", 0, 1, None, "1")))
    assert found[1][3] == [[":send", "out-0", [0, "2"]], [":send", "out-0", [1, "1"]]]


def test_edn_shows_values_of_a_key_that_were_reordered() -> None:
    swapped = run(txn(0, "a:1", "b:1", "a:2"), poll(A1._replace(value="a:2"), B1, A2._replace(value="a:1")))
    sent = parse(list(edn(swapped))[1])[":value"]
    assert [value for _, _, value in sent] == [[2, "a=a:1"], [1, "b=b:1"], [0, "a=a:2"]]


@given(SEEDS, st.booleans())
def test_edn_of_any_run_is_a_valid_history(seed: int, finish: bool) -> None:
    """In a valid history, a process runs one operation at a time and stops after an unknown outcome."""
    random = Random(seed)
    history = model_run.read(random, model_run.write(random, finish=finish)).history
    found = [parse(line) for line in edn(history)]
    assert [op[":time"] for op in found] == sorted(op[":time"] for op in found)
    for process in {op[":process"] for op in found} - {":nemesis"}:
        mine = [op for op in found if op[":process"] == process]
        assert [op[":type"] for op in mine[::2]] == [":invoke"] * (len(mine) // 2)
        assert ":invoke" not in {op[":type"] for op in mine[1::2]}
        assert ":info" not in {op[":type"] for op in mine[1:-2:2]}
        assert len(mine) % 2 == 0
    sent = {each for each in _acknowledged(found) if each[0].startswith("out-")}
    assert sent == {
        (f"out-{r.partition}", r.offset, f"{r.key}={r.value}")
        for each in history.polls
        if each.what.isolation == READ_COMMITTED
        for r in each.what.records
        if any(
            txn.phase is OK and any(s.identity == r.identity for s in txn.what.sends) for txn in history.txns
        )
    }


def _acknowledged(found: list[Any]) -> Iterator[tuple[str, int, str]]:
    for op in found:
        if op[":type"] == ":ok" and op[":f"] == ":txn":
            for micro in op[":value"]:
                if micro[0] == ":send":
                    yield micro[1], *micro[2]


def test_edn_from_the_command_line(tmp_path: Path) -> None:
    with Recorder(tmp_path / "driver", "driver") as recorder:
        recorder.ok(recorder.invoke(Txn("app", 0, sends=(send("a:1", 0),))))
    with Recorder(tmp_path / "reader", "reader") as recorder:
        recorder.polled([A1])
    result = CliRunner().invoke(edn_module.main, [str(tmp_path / "driver"), str(tmp_path / "reader")])
    assert result.exit_code == 0, result.output
    assert [parse(line)[":type"] for line in result.output.splitlines()] == [":invoke", ":ok"] * 2
    assert CliRunner().invoke(edn_module.main, [str(tmp_path / "nowhere")]).exit_code == 2


def test_edn_of_an_empty_history_is_empty() -> None:
    assert list(edn(History())) == []
