"""The state machine of the commit on a model of Kafka: whatever fails, each batch is committed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.commit import transaction
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.request import CommitRequest, ProducerSession, SourceRange
from kafka_eos_source.commit.steps import MOVES, Progress, diagram
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    GroupInUseError,
    InvalidRecordError,
    OffsetsMovedError,
    OutcomeUnknownError,
    RetriableError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.identity import ONCE
from kafka_eos_source.protocol.token import Mark
from kafka_eos_source.runtime.deadline import Deadline
from tests import ROOT
from tests.commit.model_broker import (
    CLUSTER_ID,
    IN,
    OUT,
    TOKENS,
    Fault,
    Killed,
    ModelBroker,
    ModelRows,
    broker_with_genesis,
    commit,
    committed,
    no_sleep,
    request,
    rows,
    run_commit,
)


def test_successive_batches_reuse_one_clean_producer() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(3):
        assert commit(broker, session, batch_id) == Result(Step.COMMITTED, 1)
    assert broker.log == rows(0) + rows(1) + rows(2)
    assert broker.epoch == 1
    assert broker.group[IN].offset == 30
    assert committed(broker).batch_id == 2


def test_a_batch_without_records_commits_its_offsets_on_a_clean_producer() -> None:
    """All rows were filtered out or late: there is no topic to check, but there is progress to commit."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    assert run_commit(broker, request(1), ModelRows([]), session) == Result(Step.COMMITTED, 1)
    assert commit(broker, session, 2) == Result(Step.COMMITTED, 1)
    assert broker.log == rows(0) + rows(2)
    assert broker.epoch == 1
    assert broker.group[IN].offset == 30


def test_a_producer_that_is_not_clean_is_never_used_again() -> None:
    broker, session = broker_with_genesis(clean=False), ProducerSession()
    for batch_id in range(3):
        commit(broker, session, batch_id)
    assert broker.epoch == 3
    assert broker.log == rows(0) + rows(1) + rows(2)


def test_a_replay_of_a_committed_batch_is_skipped_by_a_new_process() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    assert commit(broker, ProducerSession(), 0, "run-2") == Result(Step.SKIPPED, 0)
    assert broker.log == rows(0)


def test_a_replay_of_a_committed_batch_is_skipped_by_the_same_process() -> None:
    """A query that restarts in the same session finds the clean producer that committed the batch."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    assert commit(broker, session, 0, "run-2").step is Step.SKIPPED
    assert broker.log == rows(0)


@pytest.mark.parametrize("call", ["init", "group_offsets", "check_partitions", "begin"])
def test_an_error_before_the_transaction_is_retried_without_an_abort(call: str) -> None:
    broker = broker_with_genesis(faults=[Fault(call, RetriableError("not now"))])
    assert commit(broker, ProducerSession(), 0).step is Step.COMMITTED
    assert "abort" not in broker.calls
    assert broker.log == rows(0)


@pytest.mark.parametrize(
    ("call", "after"),
    [("send", False), ("send", True), ("flush", False), ("send_offsets", False), ("send_offsets", True)],
)
def test_an_error_within_the_transaction_aborts_it_and_begins_again(call: str, after: bool) -> None:
    broker = broker_with_genesis(faults=[Fault(call, AbortableError("broken"), after=after)])
    assert commit(broker, ProducerSession(), 0) == Result(Step.COMMITTED, 2)
    assert "abort" in broker.calls
    assert broker.log == rows(0)
    assert broker.epoch == 2
    assert committed(broker).transaction_number == 2


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_outcome_is_never_aborted_and_is_resolved_by_the_token(after: bool) -> None:
    broker = broker_with_genesis(faults=[Fault("commit", RetriableError("time-out"), after=after)])
    result = commit(broker, ProducerSession(), 0)
    assert "abort" not in broker.calls
    assert broker.log == rows(0)
    assert result.step is (Step.SKIPPED if after else Step.COMMITTED)
    assert result.confirmed_by_token is after


def test_a_row_that_was_not_enqueued_fails_the_transaction() -> None:
    broker = broker_with_genesis(lose_rows=1)
    assert commit(broker, ProducerSession(), 0) == Result(Step.COMMITTED, 2)
    assert broker.log == rows(0)


def test_a_poison_record_is_not_retried_and_nothing_is_committed() -> None:
    broker = broker_with_genesis(faults=[Fault("flush", InvalidRecordError("too large"))])
    session = ProducerSession()
    with pytest.raises(InvalidRecordError):
        commit(broker, session, 0)
    assert broker.log == []
    assert committed(broker).sequence == 0
    assert broker.open_epoch is None
    assert session.producer is None


def test_the_error_at_the_deadline_names_the_option_that_sets_it() -> None:
    broker = broker_with_genesis(faults=[Fault("begin", RetriableError("not now")) for _ in range(3)])
    with pytest.raises(UnavailableError, match="commitTimeoutMs"):
        commit(broker, ProducerSession(), 0, seconds=0)
    assert broker.log == []


def test_a_deadline_after_an_unanswered_commit_raises_outcome_unknown() -> None:
    broker = broker_with_genesis(faults=[Fault("commit", RetriableError("time-out"), after=True)])
    with pytest.raises(OutcomeUnknownError):
        commit(broker, ProducerSession(), 0, seconds=0)


@pytest.mark.parametrize("token_topic", [None, TOKENS])
def test_no_old_offset_is_committed_for_a_topic_recreated_while_rows_are_sent(
    token_topic: str | None,
) -> None:
    """The ids are known after the offsets were sent, so the transaction begins again without them."""

    class Recreating(ModelBroker):
        def reach(self, call: str, *, after: bool) -> None:
            super().reach(call, after=after)
            if call == "flush":
                self.ids["in"] = "id-of-the-new-topic"

    broker = Recreating()
    broker.group, broker.topics[TOKENS] = broker_with_genesis().group, 1
    what = replace(request(0), token_topic=token_topic)
    source = replace(what.sources[0], topic_ids={"in": "id-in"}, lossy=True)
    assert run_commit(broker, replace(what, sources=(source,)), ModelRows(rows(0))) == Result(
        Step.COMMITTED, transactions=2
    )
    assert broker.log == rows(0)
    assert broker.group[IN].offset == 0, "as before the batch; a real broker has deleted it with the topic"
    assert all(IN not in record.ends for record in broker.records.values())


def test_a_restart_with_another_group_reads_the_offsets_of_that_group() -> None:
    """The same process still has the producer, and knows only the former group."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    broker.group = {}
    moved = replace(request(1), group_id="another")
    with pytest.raises(TokenMissingError):
        run_commit(broker, moved, ModelRows(rows(1)), session)
    assert broker.log == rows(0)


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_write_whose_token_another_write_replaced_is_not_written_again(is_committed: bool) -> None:
    """The commit is not answered, and another write without a version commits in the same group."""
    broker = ModelBroker(faults=[Fault("commit", OutcomeUnknownError("no answer"), after=is_committed)])

    def write(number: int, sleep: Callable[[float], object] = no_sleep) -> Commit:
        what = request(0, query_id=f"{ONCE}{number}", once=True, promised=False, run_id="")
        found = ModelRows(rows(number))
        return Commit(what, found, broker, ProducerSession(), Deadline.after_seconds(30), sleep=sleep)

    others = iter([write(2)])

    def run_others(_seconds: float) -> None:
        for other in others:
            other.run()

    with pytest.raises(OutcomeUnknownError, match="no longer shows whether this write was committed"):
        write(1, run_others).run()
    assert broker.log == (rows(1) if is_committed else []) + rows(2)


def test_an_outdated_cached_producer_is_fenced_once_and_replaced() -> None:
    """Spark ran the next commit in another pooled process, and the one after that in this one again."""
    broker, first, second = broker_with_genesis(), ProducerSession(), ProducerSession()
    commit(broker, first, 0)
    commit(broker, second, 1)
    assert second.held is not None
    assert commit(broker, first, 2).step is Step.COMMITTED
    assert broker.log == rows(0) + rows(1) + rows(2)


def test_a_fenced_driver_commits_nothing_after_another_run_continued() -> None:
    broker, zombie, successor = broker_with_genesis(), ProducerSession(), ProducerSession()
    commit(broker, zombie, 0, "run-1")
    for batch_id in (1, 2, 3):
        commit(broker, successor, batch_id, "run-2")
    with pytest.raises(FencedError, match="run-2"):
        commit(broker, zombie, 1, "run-1")
    assert commit(broker, successor, 4, "run-2").step is Step.COMMITTED
    assert broker.log == [row for batch_id in range(5) for row in rows(batch_id)]


def test_a_rival_that_fences_every_new_producer_is_named() -> None:
    broker = broker_with_genesis(
        faults=[Fault("send", FencedError("newer")), Fault("send", FencedError("newer"))]
    )
    with pytest.raises(FencedError, match="fenced twice"):
        commit(broker, ProducerSession(), 0)
    assert broker.log == []


def test_a_timeout_of_the_drivers_own_transaction_is_not_taken_for_a_rival() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    broker.faults.append(Fault("send_offsets", FencedError("the coordinator timed it out")))
    assert commit(broker, session, 1).step is Step.COMMITTED
    assert broker.log == rows(0) + rows(1)


def test_a_lost_group_is_an_error_and_never_taken_for_a_first_batch() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    commit(broker, ProducerSession(), 1)
    broker.group.clear()
    with pytest.raises(TokenMissingError, match="onMissingToken"):
        commit(broker, ProducerSession(), 1)
    assert broker.log == rows(0) + rows(1)


def test_assume_committed_writes_only_the_token() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group.clear()
    wanted = request(1)
    assert (
        run_commit(
            broker,
            replace(wanted, missing_token="assume_committed:1"),
            ModelRows(rows(1)),
        ).step
        is Step.SKIPPED
    )
    assert broker.log == rows(0)
    assert committed(broker).batch_id == 1


def test_an_anchor_that_does_not_exist_is_named_with_its_option() -> None:
    broker = broker_with_genesis(topics={"in": 1, "out": 0})
    with pytest.raises(UnavailableError, match=r"anchor\.topic"):
        commit(broker, ProducerSession(), 0)


def test_the_offset_of_a_partition_that_is_newer_than_the_producer_is_committed() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    broker.topics["in"] = 4
    new = TopicPartition("in", 3)
    wanted = request(1)
    source = SourceRange({IN: 20, new: 7}, {IN: 10, new: 0}, CLUSTER_ID)
    run_commit(broker, replace(wanted, sources=(source,)), ModelRows(rows(1)), session)
    assert broker.group[new] == GroupOffset(new, 7, Mark.of(committed(broker)).encode())


def test_the_offset_of_a_deleted_source_partition_is_not_committed() -> None:
    broker = broker_with_genesis()
    wanted = request(0)
    gone = TopicPartition("deleted", 0)
    source = SourceRange({IN: 10, gone: 7}, {IN: 0, gone: 0}, CLUSTER_ID)
    run_commit(broker, replace(wanted, sources=(source,)), ModelRows(rows(0)))
    assert set(broker.group) == {IN, OUT}
    assert committed(broker).sequence == 1


def test_the_documented_state_diagram_is_generated_from_the_table() -> None:
    """``python -m kafka_eos_source.commit.steps`` prints it."""
    page = ROOT / "docs/guarantees.md"
    assert diagram() in page.read_text()


def test_every_step_has_a_successor_and_no_final_step_has_one() -> None:
    ends = {step for step, to in MOVES.items() if not to}
    assert ends == {Step.COMMITTED, Step.SKIPPED}
    assert all(Step.LOST in MOVES[step] for step in MOVES if step not in {*ends, Step.LOST})


def test_a_transition_that_the_table_does_not_list_is_refused() -> None:
    with pytest.raises(AssertionError, match="from OPEN to COMMIT"):
        Progress().move(Step.COMMIT)


_CALLS = st.sampled_from(
    ["init", "group_offsets", "check_partitions", "begin", "send", "flush", "send_offsets", "commit"]
)
_ERRORS = st.sampled_from([RetriableError, AbortableError, FencedError, Killed])
_FAULTS = st.lists(st.tuples(_CALLS, _ERRORS, st.booleans()), max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(_FAULTS, st.booleans(), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6)
)
def test_each_batch_is_committed_once_under_any_schedule_of_faults(
    schedule: list[tuple[list[tuple[str, type[BaseException], bool]], bool, int, int]],
) -> None:
    """Kills, lost answers, fencing, other processes: Spark replays each batch until its commit returns."""
    broker = broker_with_genesis()
    processes = [ProducerSession(), ProducerSession(), ProducerSession()]
    run = 0
    for batch_id, (faults, clean, process, lose_rows) in enumerate(schedule):
        broker.clean = clean
        broker.lose_rows = lose_rows
        broker.faults = [Fault(call, error("fault"), after) for call, error, after in faults]
        while True:
            try:
                commit(broker, processes[process], batch_id, f"run-{run}")
                break
            except Killed:
                # the driver and all its processes are gone
                processes = [ProducerSession(), ProducerSession(), ProducerSession()]
                broker.dead = False
                run += 1
            except FencedError:
                run += 1  # Spark fails the query, and the user starts it again in the same session
        assert committed(broker).batch_id == batch_id
        assert broker.group[IN].offset == 10 * (batch_id + 1)
    assert broker.log == [row for batch_id in range(len(schedule)) for row in rows(batch_id)]


# -- offsets that another program moved


def test_a_restart_in_the_same_process_notices_offsets_that_were_moved_while_the_query_was_stopped() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    broker.group[IN] = GroupOffset(IN, 3, "")
    with pytest.raises(OffsetsMovedError, match="in-0 at 3"):
        commit(broker, session, 1, "run-2")
    assert broker.log == rows(0)
    assert broker.group[IN].offset == 3


@pytest.mark.parametrize("starts", [None, {IN: 10}])
def test_moved_offsets_of_a_partition_that_a_held_batch_read_first_refuse_the_batch_after_it(
    starts: dict[TopicPartition, int] | None,
) -> None:
    """Spark's own source logs no start of its first batch; a new partition has none in any source."""
    new = TopicPartition("in", 1)

    def run(batch_id: int, session: ProducerSession, run_id: str) -> Result:
        before = {0: starts, 1: {IN: 20, new: 7}}[batch_id]
        ends = {IN: 10 * batch_id + 20, new: 7}
        source = SourceRange(ends, before, CLUSTER_ID)
        return run_commit(
            broker, replace(request(batch_id, run_id), sources=(source,)), ModelRows(rows(batch_id)), session
        )

    broker, session = broker_with_genesis(), ProducerSession()
    broker.group[IN] = replace(broker.group[IN], offset=10)
    run(0, ProducerSession(), "run-1")
    broker.group[new] = GroupOffset(new, 3, "")
    assert run(0, session, "run-2").step is Step.SKIPPED
    with pytest.raises(OffsetsMovedError, match="in-1 at 3"):
        run(1, session, "run-2")
    assert broker.log == rows(0)


def test_a_group_with_members_is_refused_before_anything_is_sent() -> None:
    broker = broker_with_genesis(members=["client.id='other' at 10.0.0.7"])
    with pytest.raises(GroupInUseError, match=r"'app'.* has members: client\.id='other' at 10\.0\.0\.7"):
        commit(broker, ProducerSession(), 0)
    assert broker.calls == ["group_members"]
    assert not broker.log


def test_a_running_query_looks_at_its_group_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(3):
        commit(broker, session, batch_id)
    assert broker.calls.count("group_members") == 1, "in a minute, only the new owner looks"
    monkeypatch.setattr(transaction, "_LOOK_SECONDS", 0.0)
    commit(broker, session, 3)
    assert broker.calls.count("group_members") == 2
    broker.members = ["client.id='other' at 10.0.0.7"]
    with pytest.raises(GroupInUseError):
        commit(broker, session, 4)
    broker.members = []
    assert committed(broker).batch_id == 3, "the transaction was aborted"
    commit(broker, session, 4)
    broker.group[OUT] = GroupOffset(OUT, 7, "")
    with pytest.raises(OffsetsMovedError, match="out-0 at 7"):
        commit(broker, session, 5)
    assert committed(broker).batch_id == 4


def test_a_look_that_gets_no_answer_does_not_stop_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    monkeypatch.setattr(transaction, "_LOOK_SECONDS", 0.0)
    broker.faults = [Fault("group_members", UnavailableError("no answer"))]
    commit(broker, session, 1)
    assert committed(broker).batch_id == 1


# -- a query that takes over the work of another one ----------------------------------------------------

OLD = TopicPartition("old", 0)


@pytest.fixture
def broker() -> ModelBroker:
    """A broker with batches 0 to 3 of ``query``, which also wrote another topic earlier."""
    broker = broker_with_genesis()
    broker.topics["old"] = 1
    session = ProducerSession()
    for batch_id in range(4):
        commit(broker, session, batch_id)
    broker.group[OLD] = replace(broker.group[OUT], tp=OLD, offset=77)
    return broker


def run(broker: ModelBroker, request: CommitRequest, staged: list[str]) -> Step:
    return run_commit(broker, request, ModelRows(staged), seconds=5).step


def of_new_query(batch_id: int) -> CommitRequest:
    """Returns a batch of the new query, whose batch 0 starts where batch 3 of the other query ended."""
    later = request(4 + batch_id)
    return replace(later, batch=replace(later.batch, query_id="new", batch_id=batch_id))


def test_the_next_driver_of_an_adopting_query_finds_its_token(broker: ModelBroker) -> None:
    adopting = replace(of_new_query(0), foreign_query="adopt")
    assert run(broker, adopting, rows(4)) is Step.COMMITTED
    assert broker.group[OLD].offset == 77, "the offset of the other query is kept"
    for again in (of_new_query(0), adopting):
        assert run(broker, again, rows(4)) is Step.SKIPPED
    assert run(broker, of_new_query(1), rows(5)) is Step.COMMITTED
    assert broker.log == [row for batch_id in range(6) for row in rows(batch_id)]
    assert broker.group[IN].offset == 60


@pytest.mark.parametrize("anchors", [("old", "out"), ("out", "old")])
def test_a_batch_write_finds_its_own_token_after_a_write_to_another_topic(anchors: tuple[str, str]) -> None:
    """The commit of the second write is not answered: it must find its own token, not that of the first."""
    broker = ModelBroker()
    broker.topics["old"] = 1
    for number, topic in enumerate(anchors):
        if number == 1:
            broker.faults.append(Fault("commit", OutcomeUnknownError("lost"), after=True))
        write = replace(request(0), sources=(), anchor=TopicPartition(topic, 0))
        batch = replace(write.batch, query_id=f"once:{number}", once=True, promised=False)
        run(broker, replace(write, batch=batch), rows(number))
    assert broker.log == rows(0) + rows(1)
