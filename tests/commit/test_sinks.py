"""Two-phase sinks in a commit: whatever fails, all systems hold the same batches once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.commit import ownership
from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.commit.run_notes import RunNotes
from kafka_eos_source.commit.two_phase import Refusal, Sinks, UndecidedSinks
from kafka_eos_source.errors import (
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OutcomeUnknownError,
    RestartQueryError,
    RetriableError,
    SinkFailedError,
    SinkUnavailableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    RowRefusal,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)
from tests.commit.model_broker import (
    CLUSTER_ID,
    Fault,
    Killed,
    ModelBroker,
    ModelRows,
    broker_with_genesis,
    committed,
    no_sleep,
    request,
    rows,
    run_commit,
)

NAMES = ("files", "database")


@dataclass
class ModelSystem:
    """An external system that follows the contract. As in `ModelBroker`, a call may fail before or after.

    Attributes:
        answers: outcomes of the next calls, by name of the call; such a call has no effect.
        poison: rows that the system refuses.
    """

    broker: ModelBroker
    prepared: dict[SinkTxn, list[str]] = field(default_factory=dict)
    committed: dict[SinkTxn, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    answers: dict[str, list[Outcome]] = field(default_factory=dict)
    poison: set[str] = field(default_factory=set)

    def reach(self, call: str, *, after: bool) -> None:
        if self.broker.dead:
            raise Killed  # nothing of a killed process reaches it
        for fault in self.faults:
            if fault.call == call and fault.after == after:
                self.faults.remove(fault)
                self.broker.dead = not isinstance(fault.error, Exception)
                raise fault.error

    def visible(self) -> list[str]:
        return [row for batch in self.committed.values() for row in batch]


class ModelSink(TwoPhaseSink):
    def __init__(self, system: ModelSystem) -> None:
        self.system = system

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        self.system.reach("prepare", after=False)
        if answer := self._scripted("prepare"):
            return answer
        staged_rows = [row for batch in staged.batches() for row in batch[0].to_pylist()]
        poison = [number for number, row in enumerate(staged_rows) if row in self.system.poison]
        if poison:
            return Refused({number: RowRefusal("poison") for number in poison})
        if txn not in self.system.committed:
            self.system.prepared[txn] = staged_rows
        self.system.reach("prepare", after=True)
        return Ok(_digest(txn))

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self.system.reach("commit", after=False)
        if answer := self._scripted("commit"):
            return answer
        if txn in self.system.committed:
            return OK
        if txn not in self.system.prepared:
            return Fatal(f"nothing is prepared under {txn}")
        if txn.digest != _digest(txn):
            return Fatal(f"the token did not pass on what prepare returned, but {txn.digest!r}")
        self.system.committed[txn] = self.system.prepared.pop(txn)
        self.system.reach("commit", after=True)
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        if self.system.broker.dead:
            return OK
        self.system.reach("abort", after=False)
        if answer := self._scripted("abort"):
            return answer
        self.system.prepared.pop(txn, None)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        self.system.reach("recover", after=False)
        return sorted(self.system.prepared)

    def _scripted(self, call: str) -> Outcome | None:
        waiting = self.system.answers.get(call)
        return waiting.pop(0) if waiting else None


def _digest(txn: SinkTxn) -> str:
    return f"{txn.sink}-{txn.sequence}"


@dataclass
class ModelStaged:
    values: list[str]
    tokens: Sequence[object] = ()

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([("value", pa.string())])

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array(self.values)], ["value"])


class Systems:
    """Kafka and two external systems."""

    def __init__(self) -> None:
        self.broker = broker_with_genesis()
        self.systems = {name: ModelSystem(self.broker) for name in NAMES}
        self.restaged = 0

    def commit(
        self,
        session: ProducerSession,
        batch_id: int,
        run_id: str = "run-1",
        *,
        seconds: float = 30,
        names: Sequence[str] = NAMES,
        cluster_id: str = CLUSTER_ID,
        **more: object,
    ) -> Result:
        sinks = {name: ModelSink(self.systems[name]) for name in names}
        for name, sink in sinks.items():
            sink.open(SinkContext(name, "app", cluster_id))
        left, letters = list(rows(batch_id)), list[str]()

        def work() -> Sinks:
            staged = {name: ModelStaged(list(left)) for name in names if left}
            return Sinks(sinks, staged, batch_id, sleep=no_sleep)

        def restage(refusal: Refusal) -> tuple[ModelRows, Sinks]:
            self.restaged += 1
            assert refusal.of == len(left)
            assert all(not system.prepared for system in self.systems.values()), "nothing stays prepared"
            self.broker.reach("restage", after=False)
            letters.extend(f"{left[number]} refused by {refusal.sink}" for number in sorted(refusal.rows))
            left[:] = [row for number, row in enumerate(left) if number not in refusal.rows]
            return ModelRows([*left, *letters]), work()

        wanted = request(batch_id, run_id)
        return run_commit(
            self.broker,
            replace(wanted, **more),
            ModelRows(left),
            session,
            seconds=seconds,
            sinks=work(),
            restage=restage,
        )

    def same_everywhere(self, batches: int) -> None:
        wanted = [row for batch_id in range(batches) for row in rows(batch_id)]
        assert self.broker.log == wanted
        for name, system in self.systems.items():
            assert system.visible() == wanted, name
            assert system.prepared == {}, f"{name}: something stays prepared"


@pytest.fixture
def systems() -> Systems:
    return Systems()


def test_each_batch_is_in_kafka_and_in_every_sink_once(systems: Systems) -> None:
    session = ProducerSession()
    for batch_id in range(3):
        assert systems.commit(session, batch_id) == Result(Step.COMMITTED, 1)
    systems.same_everywhere(3)
    token = committed(systems.broker)
    assert token.sinks is not None
    assert token.sinks.names == NAMES
    assert list(systems.systems["files"].committed)[-1] == SinkContext("files", "app", CLUSTER_ID).txn(
        token.sequence, token.sinks.sink_transaction_id
    )
    assert systems.broker.epoch == 1, "one session, listed once"


def test_the_driver_warns_of_risks_once_in_each_run(
    systems: Systems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark may commit the batches of one run in several processes."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ModelSink, "risks", lambda _: ["it may refuse rows late"])

    def warned(batch_id: int, run_id: str) -> int:
        caplog.clear()
        monkeypatch.setattr(ownership, "_RISKS", RunNotes("risks", "", ""))  # of a new process
        systems.commit(ProducerSession(), batch_id, run_id)
        return sum("it may refuse rows late" in each.getMessage() for each in caplog.records)

    with caplog.at_level(logging.WARNING):
        assert [warned(0, "run-1"), warned(1, "run-1"), warned(2, "run-2")] == [2, 0, 2], "of two sinks"


def test_sinks_that_were_opened_for_another_cluster_prepare_nothing(systems: Systems) -> None:
    """The bootstrap servers led to another cluster when the producer connected than when the sinks opened."""
    session = ProducerSession()
    systems.commit(session, 0)
    for used in (ProducerSession(), session):
        with pytest.raises(RestartQueryError, match=f"'elsewhere'.*'{CLUSTER_ID}'.*Nothing of the batch"):
            systems.commit(used, 1, cluster_id="elsewhere")
    systems.same_everywhere(1)
    systems.commit(ProducerSession(), 1)
    systems.same_everywhere(2)


def test_a_prepare_that_fails_for_now_is_retried_after_all_sinks_rolled_back(systems: Systems) -> None:
    systems.systems["database"].answers["prepare"] = [Retryable("locked"), Retryable("locked")]
    assert systems.commit(ProducerSession(), 0).transactions == 1, "it begins after prepare"
    systems.same_everywhere(1)


def test_a_prepare_that_fails_until_the_deadline_leaves_nothing_prepared(systems: Systems) -> None:
    systems.systems["database"].answers["prepare"] = [Retryable("down")]
    with pytest.raises(SinkUnavailableError, match=r"'database' cannot prepare app-.*-database-1-.*down"):
        systems.commit(ProducerSession(), 0, seconds=0)
    systems.same_everywhere(0)


def test_a_sink_that_refuses_the_batch_is_named_and_nothing_stays_prepared(systems: Systems) -> None:
    systems.systems["database"].answers["prepare"] = [Fatal("no such column", "add it")]
    with pytest.raises(SinkFailedError, match=r"no such column.*add it"):
        systems.commit(ProducerSession(), 0)
    systems.same_everywhere(0)


@pytest.mark.parametrize("call", ["begin", "send", "flush", "send_offsets"])
def test_a_kafka_failure_after_prepare_aborts_and_prepares_again(systems: Systems, call: str) -> None:
    """The second prepare uses another sink transaction id."""
    systems.broker.faults.append(Fault(call, RetriableError("not now")))
    systems.commit(ProducerSession(), 0)
    systems.same_everywhere(1)


@pytest.mark.parametrize("after", [False, True])
def test_after_an_unknown_outcome_sinks_abort_nothing_before_the_token_is_read(
    systems: Systems, after: bool
) -> None:
    systems.broker.faults.append(Fault("commit", RetriableError("time-out"), after=after))
    systems.commit(ProducerSession(), 0)
    systems.same_everywhere(1)


@pytest.mark.parametrize("after", [False, True])
def test_t50_an_unknown_outcome_at_the_deadline_stays_prepared_for_the_next_start(
    systems: Systems, after: bool
) -> None:
    """Spark then calls abort(), which does not concern sinks."""
    systems.broker.faults.append(Fault("commit", RetriableError("time-out"), after=after))
    with pytest.raises(OutcomeUnknownError):
        systems.commit(ProducerSession(), 0, seconds=0)
    assert all(len(system.prepared) == 1 for system in systems.systems.values())
    systems.commit(ProducerSession(), 0, "run-2")
    systems.same_everywhere(1)


def test_the_query_waits_for_a_sink_that_does_not_commit(systems: Systems) -> None:
    systems.systems["database"].answers["commit"] = [Retryable("down")] * 3
    systems.commit(ProducerSession(), 0)
    systems.same_everywhere(1)


def test_a_sink_that_does_not_commit_in_time_commits_at_the_next_start(systems: Systems) -> None:
    session = ProducerSession()
    systems.systems["files"].answers["commit"] = [Retryable("down")]
    with pytest.raises(SinkUnfinishedError, match="'files': down"):
        systems.commit(session, 0, seconds=0)
    assert systems.systems["database"].visible() == rows(0), "the other sink has committed"
    assert session.producer is None, "the next batch must not begin before all sinks have committed this one"
    assert systems.commit(ProducerSession(), 0, "run-2") == Result(Step.SKIPPED, 0)
    systems.same_everywhere(1)


def test_a_sink_that_lost_its_prepared_work_is_named_after_the_others_committed(systems: Systems) -> None:
    systems.systems["files"].answers["commit"] = [Fatal("the disk is gone")]
    with pytest.raises(SinkFailedError, match="the disk is gone"):
        systems.commit(ProducerSession(), 0)
    assert systems.systems["database"].visible() == rows(0)
    systems.commit(ProducerSession(), 0, "run-2")
    systems.same_everywhere(1)


def test_a_sink_that_was_removed_from_the_query_is_named(systems: Systems) -> None:
    systems.systems["files"].answers["commit"] = [Retryable("down")]
    with pytest.raises(SinkUnfinishedError):
        systems.commit(ProducerSession(), 0, seconds=0)
    with pytest.raises(InvalidOptionError, match="'files'"):
        systems.commit(ProducerSession(), 0, "run-2", names=["database"])
    systems.commit(ProducerSession(), 0, "run-2")
    systems.same_everywhere(1)


def test_a_poison_record_aborts_all_prepared_work(systems: Systems) -> None:
    systems.broker.faults.append(Fault("flush", InvalidRecordError("too large")))
    with pytest.raises(InvalidRecordError):
        systems.commit(ProducerSession(), 0)
    systems.same_everywhere(0)


def test_prepared_work_that_cannot_be_aborted_at_once_is_aborted_later(systems: Systems) -> None:
    systems.broker.faults.append(Fault("flush", RetriableError("not now")))
    systems.systems["files"].answers["abort"] = [Retryable("down")]
    systems.commit(ProducerSession(), 0)
    systems.same_everywhere(1)


def test_a_fenced_driver_aborts_its_own_prepared_work(systems: Systems) -> None:
    zombie, successor = ProducerSession(), ProducerSession()
    systems.commit(zombie, 0, "run-1")
    systems.commit(successor, 1, "run-2")
    with pytest.raises(FencedError, match="run-2"):
        systems.commit(zombie, 1, "run-1")
    systems.same_everywhere(2)
    systems.commit(successor, 2, "run-2")
    systems.same_everywhere(3)


def overtaken_between_token_and_resolution(systems: Systems) -> None:
    """A reads the token; B commits the batch in Kafka and dies before its sinks commit; A continues."""
    broker = systems.broker
    read = broker.group_offsets

    def rival() -> None:
        systems.systems["files"].faults.append(Fault("commit", Killed()))
        with pytest.raises(Killed):
            systems.commit(ProducerSession(), 0, "run-2")
        broker.dead = False

    def group_offsets(*arguments: Any) -> Any:
        found = read(*arguments)
        broker.group_offsets = read  # type: ignore[method-assign]
        rival()
        return found

    broker.group_offsets = group_offsets  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="run-2"):
        systems.commit(ProducerSession(), 0, "run-1")
    systems.commit(ProducerSession(), 0, "run-3")
    systems.same_everywhere(1)


def test_prepared_work_that_a_rival_adds_after_the_listing_is_left_alone(systems: Systems) -> None:
    overtaken_between_token_and_resolution(systems)


def test_the_model_detects_that_prepared_work_is_listed_after_the_token_is_read(
    systems: Systems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule of `commit.two_phase` switched off, the test above would fail."""
    resolve = Sinks.resolve_prepared

    def list_after_token(self: Sinks, *arguments: Any) -> None:
        self.list_prepared(arguments[-1])
        resolve(self, *arguments)

    monkeypatch.setattr(Sinks, "resolve_prepared", list_after_token)
    with pytest.raises((SinkFailedError, AssertionError)):
        overtaken_between_token_and_resolution(systems)


def test_after_a_lost_group_an_operator_decides_prepared_work(systems: Systems) -> None:
    systems.commit(ProducerSession(), 0)
    systems.broker.faults.append(Fault("commit", RetriableError("time-out"), after=True))
    with pytest.raises(OutcomeUnknownError):
        systems.commit(ProducerSession(), 1, seconds=0)
    systems.broker.group.clear()
    with pytest.raises(SinkUndecidedError, match="sinks commit"):
        systems.commit(ProducerSession(), 1, "run-2", missing_token="assume_committed:1")
    for system in systems.systems.values():  # what `kafka-eos sinks commit` does
        system.committed.update(system.prepared)
        system.prepared.clear()
    assert (
        systems.commit(ProducerSession(), 1, "run-2", missing_token="assume_committed:1").step is Step.SKIPPED
    )
    systems.commit(ProducerSession(), 2, "run-2")
    systems.same_everywhere(3)


def test_a_token_written_by_an_operator_does_not_decide_prepared_work(systems: Systems) -> None:
    """`kafka-eos adopt --committed`: Kafka has committed the batch, and the sinks have prepared it."""
    systems.commit(ProducerSession(), 0)
    systems.broker.faults.append(Fault("commit", RetriableError("time-out"), after=True))
    with pytest.raises(OutcomeUnknownError):
        systems.commit(ProducerSession(), 1, seconds=0)
    systems.broker.group.clear()
    adopted = replace(request(1), missing_token="assume_committed:1")
    run_commit(systems.broker, adopted, ModelRows([]), sinks=UndecidedSinks())
    with pytest.raises(SinkUndecidedError):
        systems.commit(ProducerSession(), 1, "run-2")
    for system in systems.systems.values():
        system.committed.update(system.prepared)
        system.prepared.clear()
    assert systems.commit(ProducerSession(), 1, "run-2").step is Step.SKIPPED
    systems.broker.faults.append(Fault("flush", Killed()))
    with pytest.raises(Killed):
        systems.commit(ProducerSession(), 2, "run-2")
    systems.broker.dead = False
    systems.commit(ProducerSession(), 2, "run-3")
    systems.same_everywhere(3)


def test_after_assume_not_committed_an_operator_must_abort_prepared_work(systems: Systems) -> None:
    systems.commit(ProducerSession(), 0)
    systems.broker.faults.append(Fault("commit", RetriableError("time-out")))
    with pytest.raises(OutcomeUnknownError):
        systems.commit(ProducerSession(), 1, seconds=0)
    systems.broker.group.clear()
    # the token no longer tells which batch it was
    with pytest.raises(SinkUndecidedError, match="sinks abort"):
        systems.commit(ProducerSession(), 1, "run-2", missing_token="assume_not_committed:1")
    for system in systems.systems.values():  # what `kafka-eos sinks abort` does
        system.prepared.clear()
    systems.commit(ProducerSession(), 1, "run-2", missing_token="assume_not_committed:1")
    systems.same_everywhere(2)


CALLS = st.sampled_from(
    [
        *(
            ("kafka", call)
            for call in ("init", "group_offsets", "begin", "send", "flush", "send_offsets", "commit")
        ),
        *((name, call) for name in NAMES for call in ("prepare", "commit", "abort", "recover")),
    ]
)
ERRORS = st.sampled_from(
    [RetriableError("not now"), FencedError("newer"), Killed(), InvalidRecordError("no")]
)


@settings(max_examples=300, deadline=None)
@given(
    faults=st.lists(st.tuples(CALLS, ERRORS, st.booleans()), max_size=6),
    workers=st.lists(st.integers(0, 2), min_size=30, max_size=30),
)
def test_every_system_has_each_batch_once_under_any_schedule_of_faults(
    faults: list[tuple[tuple[str, str], BaseException, bool]], workers: list[int]
) -> None:
    """Changing processes commit, fail and die; each batch is repeated until it is committed."""
    systems = Systems()
    for (where, call), error, after in faults:
        if where == "kafka":
            systems.broker.faults.append(
                Fault(call, error, after=after and call in ("init", "send", "commit"))
            )
        else:
            systems.systems[where].faults.append(
                Fault(call, error, after=after and call in ("prepare", "commit"))
            )
    owners = [ProducerSession() for _ in range(3)]
    turns = iter(workers)
    for batch_id in range(3):
        for run in range(10):
            at = next(turns)
            try:
                systems.commit(owners[at], batch_id, f"run-{run}")
                break
            except KafkaEosError:
                continue  # Spark's query is started again
            except Killed:
                systems.broker.dead = False
                owners[at] = ProducerSession()
        else:
            raise AssertionError("the batch was never committed")
        # the next batch begins only after every system has committed this one
        for name, system in systems.systems.items():
            assert len(system.committed) == batch_id + 1, name
    for faulty in (systems.broker, *systems.systems.values()):
        faulty.faults.clear()  # of calls that were not reached
    systems.commit(ProducerSession(), 3, "run-last")  # lists prepared work, and aborts what is left
    systems.same_everywhere(4)


# -- rows that a sink refuses ----------------------------------------------------------------------


def refused(systems: Systems, batch_id: int, **poison: Sequence[int]) -> list[str]:
    """Poisons rows of a batch for some sinks; returns the rows that are good everywhere."""
    good = rows(batch_id)
    for name, numbers in poison.items():
        systems.systems[name].poison = {rows(batch_id)[number] for number in numbers}
        good = [row for row in good if row not in systems.systems[name].poison]
    return good


def only_good_rows(systems: Systems, good: Sequence[str], letters: Sequence[str]) -> None:
    assert systems.broker.log == [*good, *letters]
    for name, system in systems.systems.items():
        assert system.visible() == good, name
        assert system.prepared == {}, f"{name}: something stays prepared"


def test_a_row_that_a_sink_refuses_leaves_all_outputs_and_becomes_one_letter(systems: Systems) -> None:
    good = refused(systems, 0, database=[1])
    assert systems.commit(ProducerSession(), 0) == Result(Step.COMMITTED, 1), "Kafka was not begun before"
    only_good_rows(systems, good, ["0:1 refused by database"])
    assert committed(systems.broker).rows == len(good) + 1


def test_the_next_batch_follows_one_with_refused_rows(systems: Systems) -> None:
    session = ProducerSession()
    good = refused(systems, 0, files=[0])
    systems.commit(session, 0)
    systems.commit(session, 1)
    assert systems.broker.log == [*good, "0:0 refused by files", *rows(1)]
    assert systems.broker.epoch == 1, "the producer stays"


def test_each_sink_may_refuse_other_rows(systems: Systems) -> None:
    good = refused(systems, 0, files=[0], database=[2])
    systems.commit(ProducerSession(), 0)
    only_good_rows(systems, good, ["0:0 refused by files", "0:2 refused by database"])
    assert systems.restaged == 2


def test_a_batch_whose_rows_are_all_refused_commits_with_letters_only(systems: Systems) -> None:
    good = refused(systems, 0, database=range(len(rows(0))))
    systems.commit(ProducerSession(), 0)
    only_good_rows(systems, good, [f"{row} refused by database" for row in rows(0)])
    assert good == []
    assert committed(systems.broker).sinks is None


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("prepare", False),
        ("prepare", True),
        ("abort", False),
        ("restage", False),
        ("begin", False),
        ("send", False),
        ("flush", False),
        ("send_offsets", False),
        ("commit", False),
        ("commit", True),
    ],
)
def test_t481_a_driver_killed_around_a_refusal_leaves_each_good_row_once(
    systems: Systems, call: str, after: bool
) -> None:
    """Spark repeats the batch from its tasks on, so the sink refuses the same rows again."""
    good = refused(systems, 0, database=[1])
    in_sink = call in ("prepare", "abort")
    (systems.systems["files"] if in_sink else systems.broker).faults.append(
        Fault(call, Killed(), after=after)
    )
    with pytest.raises(Killed):
        systems.commit(ProducerSession(), 0)
    systems.broker.dead = False
    systems.commit(ProducerSession(), 0, "run-2")
    only_good_rows(systems, good, ["0:1 refused by database"])


def test_a_refused_row_that_fails_the_batch_leaves_nothing_prepared(systems: Systems) -> None:
    refused(systems, 0, database=[1])
    systems.broker.faults.append(Fault("restage", InvalidRecordError("row 1 is bad")))
    with pytest.raises(InvalidRecordError, match="row 1 is bad"):
        systems.commit(ProducerSession(), 0)
    systems.same_everywhere(0)


def test_a_sink_that_refuses_rows_one_at_a_time_is_stopped_after_a_few_rounds(systems: Systems) -> None:
    """Each round stages all rows again, so 10,000 rounds of one row would take days."""
    one = Refused({0: RowRefusal("no")})
    systems.systems["database"].answers["prepare"] = [one] * 10
    count = "tests.commit.model_broker.ROWS_PER_BATCH"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, 20)
        with pytest.raises(SinkFailedError, match=r"refuses 1 of 15 rows .* 5 times already.*at once"):
            systems.commit(ProducerSession(), 0)
    assert systems.restaged == 5
    systems.same_everywhere(0)


@pytest.mark.parametrize(("numbers", "what"), [([], "no rows"), ([99], "row 99"), ([-1, 0], "row -1")])
def test_a_sink_that_refuses_rows_that_it_did_not_get_is_named(
    systems: Systems, numbers: list[int], what: str
) -> None:
    answer = Refused({number: RowRefusal("no") for number in numbers})
    systems.systems["database"].answers["prepare"] = [answer]
    with pytest.raises(SinkFailedError, match=f"'database' returned Refused with {what}; expected"):
        systems.commit(ProducerSession(), 0)
    systems.same_everywhere(0)


def test_a_sink_cannot_refuse_rows_when_kafka_has_committed_them(systems: Systems) -> None:
    systems.systems["database"].answers["commit"] = [Refused({0: RowRefusal("no")})]
    with pytest.raises(SinkFailedError, match="returned Refused from commit"):
        systems.commit(ProducerSession(), 0)
    systems.commit(ProducerSession(), 0, "run-2")
    systems.same_everywhere(1)


def test_the_commit_has_all_of_its_time_again_after_rows_were_staged_again(
    systems: Systems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink may need long to find the rows that it refuses, and the driver to stage the others again."""
    clock = [1000.0]
    monkeypatch.setattr("kafka_eos_source.runtime.deadline.time.monotonic", lambda: clock[0])
    good = refused(systems, 0, database=[1])
    left: list[float] = []
    prepare, reach = ModelSink.prepare, systems.broker.reach

    def timed(self: ModelSink, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        left.append(deadline.remaining_seconds())
        return prepare(self, txn, staged, deadline)

    def slow(call: str, *, after: bool) -> None:
        clock[0] += 20 if call == "restage" else 0
        reach(call, after=after)

    monkeypatch.setattr(ModelSink, "prepare", timed)
    monkeypatch.setattr(systems.broker, "reach", slow)
    systems.commit(ProducerSession(), 0, seconds=30)
    assert left == [30, 30, 30, 30]
    only_good_rows(systems, good, ["0:1 refused by database"])
