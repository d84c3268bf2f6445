"""Two-phase sinks in a commit: whatever fails, all systems hold the same batches once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_broker import Fault, ModelBroker, ModelRows, no_sleep
from test_commit_transaction import Killed, begun, committed, request, rows

from kafka_eos_source.commit.interfaces import ProducerSession, UndecidedSinks
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.sinks import SinkWork
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.errors import (
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OutcomeUnknownError,
    RetriableError,
    SinkFailedError,
    SinkUnavailableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Outcome,
    Retryable,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)

NAMES = ("files", "database")


@dataclass
class ModelSystem:
    """An external system that follows the contract. As in `ModelBroker`, a call may fail before or after.

    Attributes:
        answers: outcomes of the next calls, by name of the call; such a call has no effect.
    """

    broker: ModelBroker
    prepared: dict[SinkTxn, list[str]] = field(default_factory=dict)
    committed: dict[SinkTxn, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    answers: dict[str, list[Outcome]] = field(default_factory=dict)

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
        if txn not in self.system.committed:
            self.system.prepared[txn] = [row for batch in staged.batches() for row in batch[0].to_pylist()]
        self.system.reach("prepare", after=True)
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self.system.reach("commit", after=False)
        if answer := self._scripted("commit"):
            return answer
        if txn in self.system.committed:
            return OK
        if txn not in self.system.prepared:
            return Fatal(f"nothing is prepared under {txn}")
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


class World:
    """Kafka and two external systems."""

    def __init__(self) -> None:
        self.broker = begun()
        self.systems = {name: ModelSystem(self.broker) for name in NAMES}

    def commit(
        self,
        session: ProducerSession,
        batch_id: int,
        run_id: str = "run-1",
        *,
        seconds: float = 30,
        names: Sequence[str] = NAMES,
        **more: object,
    ) -> Result:
        sinks = {name: ModelSink(self.systems[name]) for name in names}
        for name, sink in sinks.items():
            sink.open(SinkContext(name, "app"))
        parts = {name: ModelStaged(rows(batch_id)) for name in names}
        work = SinkWork(sinks, parts, "app", batch_id, sleep=no_sleep)
        wanted = request(batch_id, run_id)
        machine = Commit(
            type(wanted)(**{**wanted.__dict__, **more}),
            ModelRows(rows(batch_id)),
            self.broker,
            session,
            Deadline.after_seconds(seconds),
            work,
            sleep=no_sleep,
        )
        return machine.run()

    def same_everywhere(self, batches: int) -> None:
        wanted = [row for batch_id in range(batches) for row in rows(batch_id)]
        assert self.broker.log == wanted
        for name, system in self.systems.items():
            assert system.visible() == wanted, name
            assert system.prepared == {}, f"{name}: something stays prepared"


@pytest.fixture
def world() -> World:
    return World()


def test_each_batch_is_in_kafka_and_in_every_sink_once(world: World) -> None:
    session = ProducerSession()
    for batch_id in range(3):
        assert world.commit(session, batch_id) == Result(Step.COMMITTED, 1)
    world.same_everywhere(3)
    token = committed(world.broker)
    assert token.sinks is not None
    assert token.sinks.names == NAMES
    assert list(world.systems["files"].committed)[-1] == SinkTxn(
        "app", "files", token.sequence, token.sinks.sink_transaction_id
    )
    assert world.broker.epoch == 1, "one session, listed once"


def test_a_sink_that_cannot_prepare_now_is_asked_again_and_the_others_are_rolled_back(world: World) -> None:
    world.systems["database"].answers["prepare"] = [Retryable("locked"), Retryable("locked")]
    assert world.commit(ProducerSession(), 0).transactions == 1, "it begins after prepare"
    world.same_everywhere(1)


def test_a_sink_that_cannot_prepare_in_time_leaves_nothing(world: World) -> None:
    world.systems["database"].answers["prepare"] = [Retryable("down")]
    with pytest.raises(SinkUnavailableError, match=r"'database' cannot prepare app-database-1-.*down"):
        world.commit(ProducerSession(), 0, seconds=0)
    world.same_everywhere(0)


def test_a_sink_that_refuses_the_batch_is_named_and_leaves_nothing(world: World) -> None:
    world.systems["database"].answers["prepare"] = [Fatal("no such column", "add it")]
    with pytest.raises(SinkFailedError, match=r"no such column.*add it"):
        world.commit(ProducerSession(), 0)
    world.same_everywhere(0)


@pytest.mark.parametrize("call", ["begin", "send", "flush", "send_offsets"])
def test_kafka_fails_after_prepare(world: World, call: str) -> None:
    """The prepared work is aborted, and prepared again with another id."""
    world.broker.faults.append(Fault(call, RetriableError("not now")))
    world.commit(ProducerSession(), 0)
    world.same_everywhere(1)


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_outcome_takes_nothing_back_until_the_token_is_read(world: World, after: bool) -> None:
    world.broker.faults.append(Fault("commit", RetriableError("time-out"), after=after))
    world.commit(ProducerSession(), 0)
    world.same_everywhere(1)


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_outcome_at_the_deadline_stays_prepared_for_the_next_start(
    world: World, after: bool
) -> None:
    """T50: Spark then calls abort(), which does not concern sinks."""
    world.broker.faults.append(Fault("commit", RetriableError("time-out"), after=after))
    with pytest.raises(OutcomeUnknownError):
        world.commit(ProducerSession(), 0, seconds=0)
    assert all(len(system.prepared) == 1 for system in world.systems.values())
    world.commit(ProducerSession(), 0, "run-2")
    world.same_everywhere(1)


def test_a_sink_that_does_not_commit_holds_the_query_back(world: World) -> None:
    world.systems["database"].answers["commit"] = [Retryable("down")] * 3
    world.commit(ProducerSession(), 0)
    world.same_everywhere(1)


def test_a_sink_that_does_not_commit_in_time_is_finished_at_the_next_start(world: World) -> None:
    session = ProducerSession()
    world.systems["files"].answers["commit"] = [Retryable("down")]
    with pytest.raises(SinkUnfinishedError, match="'files': down"):
        world.commit(session, 0, seconds=0)
    assert world.systems["database"].visible() == rows(0), "the other sink has committed"
    assert session.producer is None, "the next batch must not begin before all sinks have committed this one"
    assert world.commit(ProducerSession(), 0, "run-2") == Result(Step.SKIPPED, 0)
    world.same_everywhere(1)


def test_a_sink_that_lost_what_it_prepared_is_named_when_the_others_have_committed(world: World) -> None:
    world.systems["files"].answers["commit"] = [Fatal("the disk is gone")]
    with pytest.raises(SinkFailedError, match="the disk is gone"):
        world.commit(ProducerSession(), 0)
    assert world.systems["database"].visible() == rows(0)
    world.commit(ProducerSession(), 0, "run-2")
    world.same_everywhere(1)


def test_a_sink_that_was_left_out_is_named(world: World) -> None:
    world.systems["files"].answers["commit"] = [Retryable("down")]
    with pytest.raises(SinkUnfinishedError):
        world.commit(ProducerSession(), 0, seconds=0)
    with pytest.raises(InvalidOptionError, match="'files'"):
        world.commit(ProducerSession(), 0, "run-2", names=["database"])
    world.commit(ProducerSession(), 0, "run-2")
    world.same_everywhere(1)


def test_a_poison_record_takes_everything_back(world: World) -> None:
    world.broker.faults.append(Fault("flush", InvalidRecordError("too large")))
    with pytest.raises(InvalidRecordError):
        world.commit(ProducerSession(), 0)
    world.same_everywhere(0)


def test_what_cannot_be_taken_back_now_is_taken_back_at_the_next_look(world: World) -> None:
    world.broker.faults.append(Fault("flush", RetriableError("not now")))
    world.systems["files"].answers["abort"] = [Retryable("down")]
    world.commit(ProducerSession(), 0)
    world.same_everywhere(1)


def test_a_zombie_takes_its_own_back_when_it_was_overtaken(world: World) -> None:
    zombie, successor = ProducerSession(), ProducerSession()
    world.commit(zombie, 0, "run-1")
    world.commit(successor, 1, "run-2")
    with pytest.raises(FencedError, match="run-2"):
        world.commit(zombie, 1, "run-1")
    world.same_everywhere(2)
    world.commit(successor, 2, "run-2")
    world.same_everywhere(3)


def overtaken_between_token_and_settling(world: World) -> None:
    """A reads the token; B commits the batch in Kafka and dies before its sinks commit; A continues."""
    broker = world.broker
    read = broker.group_offsets

    def rival() -> None:
        world.systems["files"].faults.append(Fault("commit", Killed()))
        with pytest.raises(Killed):
            world.commit(ProducerSession(), 0, "run-2")
        broker.dead = False

    def group_offsets(*arguments: Any) -> Any:
        found = read(*arguments)
        broker.group_offsets = read  # type: ignore[method-assign]
        rival()
        return found

    broker.group_offsets = group_offsets  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="run-2"):
        world.commit(ProducerSession(), 0, "run-1")
    world.commit(ProducerSession(), 0, "run-3")
    world.same_everywhere(1)


def test_what_a_rival_prepares_after_the_list_was_made_is_none_of_ours(world: World) -> None:
    overtaken_between_token_and_settling(world)


def test_a_list_made_after_the_token_would_lose_the_rivals_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule of `commit.sink_fate` switched off, the test above would fail."""
    resolve = SinkWork.resolve_prepared

    def looks_late(self: SinkWork, *arguments: Any) -> None:
        self.list_prepared(arguments[-1])
        resolve(self, *arguments)

    monkeypatch.setattr(SinkWork, "resolve_prepared", looks_late)
    with pytest.raises((SinkFailedError, AssertionError)):
        overtaken_between_token_and_settling(world)


def test_a_lost_group_leaves_what_is_prepared_to_a_person(world: World) -> None:
    world.commit(ProducerSession(), 0)
    world.broker.faults.append(Fault("commit", RetriableError("time-out"), after=True))
    with pytest.raises(OutcomeUnknownError):
        world.commit(ProducerSession(), 1, seconds=0)
    world.broker.group.clear()
    with pytest.raises(SinkUndecidedError, match="sinks commit"):
        world.commit(ProducerSession(), 1, "run-2", missing_token="assume_committed")
    for system in world.systems.values():  # what `kafka-eos sinks commit` does
        system.committed.update(system.prepared)
        system.prepared.clear()
    assert world.commit(ProducerSession(), 1, "run-2", missing_token="assume_committed").step is Step.SKIPPED
    world.commit(ProducerSession(), 2, "run-2")
    world.same_everywhere(3)


def test_a_token_that_a_person_wrote_does_not_decide_what_sinks_hold(world: World) -> None:
    """`kafka-eos adopt --committed`: Kafka has committed the batch, and the sinks have prepared it."""
    world.commit(ProducerSession(), 0)
    world.broker.faults.append(Fault("commit", RetriableError("time-out"), after=True))
    with pytest.raises(OutcomeUnknownError):
        world.commit(ProducerSession(), 1, seconds=0)
    world.broker.group.clear()
    adopted = type(wanted := request(1))(**{**wanted.__dict__, "missing_token": "assume_committed"})
    Commit(
        adopted, ModelRows([]), world.broker, ProducerSession(), Deadline.after_seconds(30), UndecidedSinks()
    ).run()
    with pytest.raises(SinkUndecidedError):
        world.commit(ProducerSession(), 1, "run-2")
    for system in world.systems.values():
        system.committed.update(system.prepared)
        system.prepared.clear()
    assert world.commit(ProducerSession(), 1, "run-2").step is Step.SKIPPED
    world.broker.faults.append(Fault("flush", Killed()))
    with pytest.raises(Killed):
        world.commit(ProducerSession(), 2, "run-2")
    world.broker.dead = False
    world.commit(ProducerSession(), 2, "run-3")
    world.same_everywhere(3)


def test_a_person_says_that_the_batch_is_not_in_kafka(world: World) -> None:
    world.commit(ProducerSession(), 0)
    world.broker.faults.append(Fault("commit", RetriableError("time-out")))
    with pytest.raises(OutcomeUnknownError):
        world.commit(ProducerSession(), 1, seconds=0)
    world.broker.group.clear()
    with pytest.raises(SinkUndecidedError, match="sinks abort"):  # which batch it was nobody knows any more
        world.commit(ProducerSession(), 1, "run-2", missing_token="assume_not_committed")
    for system in world.systems.values():  # what `kafka-eos sinks abort` does
        system.prepared.clear()
    world.commit(ProducerSession(), 1, "run-2", missing_token="assume_not_committed")
    world.same_everywhere(2)


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
def test_whatever_breaks_the_same_batches_are_everywhere_once(
    faults: list[tuple[tuple[str, str], BaseException, bool]], workers: list[int]
) -> None:
    """Changing processes commit, fail and die; each batch is repeated until it is committed."""
    world = World()
    for (where, call), error, after in faults:
        if where == "kafka":
            world.broker.faults.append(Fault(call, error, after=after and call in ("init", "send", "commit")))
        else:
            world.systems[where].faults.append(
                Fault(call, error, after=after and call in ("prepare", "commit"))
            )
    owners = [ProducerSession() for _ in range(3)]
    turns = iter(workers)
    for batch_id in range(3):
        for run in range(10):
            at = next(turns)
            try:
                world.commit(owners[at], batch_id, f"run-{run}")
                break
            except KafkaEosError:
                continue  # Spark's query is started again
            except Killed:
                world.broker.dead = False
                owners[at] = ProducerSession()
        else:
            raise AssertionError("the batch did not come through")
        # the next batch begins only after every system has committed this one
        for name, system in world.systems.items():
            assert len(system.committed) == batch_id + 1, name
    for faulty in (world.broker, *world.systems.values()):
        faulty.faults.clear()  # of calls that were not reached
    world.commit(ProducerSession(), 3, "run-last")  # lists prepared work, and aborts what is left
    world.same_everywhere(4)
