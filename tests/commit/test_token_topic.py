"""The commit with a token topic, on a model of Kafka that can lose the group at any time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.commit.identity_file import Identity, IdentityFile
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.commit.verdict import Held
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    OffsetsMovedError,
    RestartQueryError,
    RetriableError,
    TokenMissingError,
)
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.operate.token_topics import restore_group
from kafka_eos_source.protocol.token import Token, newest
from kafka_eos_source.runtime.deadline import Deadline
from tests.commit.model_broker import (
    IN,
    OUT,
    TOKENS,
    Fault,
    Killed,
    ModelBroker,
    ModelRows,
    broker_with_genesis,
    committed,
    request,
    rows,
    run_commit,
)


def commit(
    broker: ModelBroker,
    session: ProducerSession,
    batch_id: int,
    run_id: str = "run-1",
    staged: ModelRows | None = None,
    **batch: object,
) -> Result:
    return run_commit(
        broker,
        replace(request(batch_id, run_id, **batch), token_topic=TOKENS),
        ModelRows(rows(batch_id)) if staged is None else staged,
        session,
    )


def test_the_token_record_is_committed_with_the_batch_and_equals_the_group() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(3):
        commit(broker, session, batch_id)
        record = broker.records["app"]
        assert record.token == committed(broker)
        assert record.group_offsets().keys() == broker.group.keys()
        assert {tp: broker.group[tp].offset for tp in broker.group} == record.ends
        assert (record.group_id, record.anchor, record.topic_id) == ("app", OUT, f"id-{TOKENS}")
    assert broker.log == rows(0) + rows(1) + rows(2)
    looks = [call for call in broker.calls if call.endswith("_record")]
    assert looks == ["quick_record"], "the owner of the newest token needs no other look"


def test_the_genesis_token_has_a_token_record() -> None:
    broker = ModelBroker(faults=[Fault("check_partitions", Killed())])
    with pytest.raises(Killed):
        commit(broker, ProducerSession(), 0, promised=False)
    assert broker.records["app"].token == committed(broker)
    assert committed(broker).sequence == 0
    broker.dead = False
    broker.group.clear()
    commit(broker, ProducerSession(), 0, "run-2")
    assert (broker.log, committed(broker).sequence) == (rows(0), 1)


def test_a_batch_whose_group_was_lost_is_skipped_and_the_next_one_restores_the_group() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group.clear()
    session = ProducerSession()
    assert commit(broker, session, 0, "run-2").step is Step.SKIPPED
    assert not broker.group
    assert commit(broker, session, 1, "run-2").step is Step.COMMITTED
    assert broker.log == rows(0) + rows(1)
    assert broker.group[IN].offset == 20
    assert newest(broker.group.values()) == broker.records["app"].token


def test_without_a_record_a_lost_group_is_an_error_that_names_both_places() -> None:
    broker = ModelBroker()
    with pytest.raises(TokenMissingError, match=r"in the consumer group or in token\.topic='tokens'"):
        commit(broker, ProducerSession(), 0)
    assert broker.log == []


def test_offsets_that_were_reset_after_the_loss_are_refused() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group = {IN: GroupOffset(IN, 3, "")}
    with pytest.raises(OffsetsMovedError, match="in-0 at 3"):
        commit(broker, ProducerSession(), 1)
    assert broker.log == rows(0)


def test_offsets_that_were_moved_while_the_held_batch_was_open_refuse_the_batch_after_it() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group[IN] = GroupOffset(IN, 3, "")
    session = ProducerSession()
    assert commit(broker, session, 0, "run-2").step is Step.SKIPPED
    with pytest.raises(OffsetsMovedError, match="in-0 at 3"):
        commit(broker, session, 1, "run-2")
    assert broker.log == rows(0)


def test_versions_of_batch_writes_are_written_once_although_the_group_was_deleted() -> None:
    broker = ModelBroker()
    versioned = {"versioned": True, "promised": False, "query_id": "txnAppId:job"}
    for version in (1, 2):
        assert commit(broker, ProducerSession(), version, **versioned).step is Step.COMMITTED
        broker.group.clear()
        assert commit(broker, ProducerSession(), version, **versioned).step is Step.SKIPPED
        assert commit(broker, ProducerSession(), 1, **versioned).step is Step.SKIPPED
    assert broker.log == rows(1) + rows(2)


def test_the_token_record_of_an_aborted_transaction_is_not_used() -> None:
    for call in ("flush", "send_offsets", "send"):
        broker = broker_with_genesis(faults=[Fault(call, AbortableError("broken"))])
        assert commit(broker, ProducerSession(), 0) == Result(Step.COMMITTED, 2)
        assert broker.records["app"].token == committed(broker)
        assert broker.records["app"].token.transaction_number == 2


def test_a_token_record_that_the_client_did_not_enqueue_fails_the_transaction() -> None:
    broker = broker_with_genesis(lose_records=1)
    assert commit(broker, ProducerSession(), 0) == Result(Step.COMMITTED, 2)
    assert broker.records["app"].token == committed(broker)


def test_a_recreated_token_topic_is_checked_again() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    broker.ids[TOKENS] = "another id"
    broker.records.clear()
    assert commit(broker, session, 1).step is Step.COMMITTED
    assert broker.records["app"].topic_id == "another id"
    assert broker.log == rows(0) + rows(1)


def test_the_token_record_contains_the_progress_of_shards() -> None:
    broker = broker_with_genesis(topics={"in": 2, "out": 2, "state": 1, "__consumer_offsets": 5})
    shard = TopicPartition("state", 0)
    report = ShardReport(
        shard, "attempt", 1, "query", 0, 0, 1000, sequence=-1, records=2, application_id="app", group_id="app"
    )
    commit(broker, ProducerSession(), 0, staged=ModelRows(rows(0), [report]))
    record = broker.records["app"]
    assert record.ends[shard] == 3
    assert record.shards[shard].task_attempt_id == "attempt"
    own = Token.decode(record.group_offsets()[shard].metadata)
    assert own is not None
    assert own.shard == record.shards[shard]


@pytest.mark.parametrize(
    ("next_offset", "behind", "is_proved"), [(4, 0, True), (3, 0, True), (2, 0, False), (6, 2, False)]
)
def test_a_shard_without_recent_changes_continues_if_its_changelog_ends_at_the_token(
    next_offset: int, behind: int, is_proved: bool
) -> None:
    """The group is lost, and the digest in the changelog is that of an older batch."""
    broker = broker_with_genesis(topics={"in": 2, "out": 2, "state": 1, "__consumer_offsets": 5})
    shard = TopicPartition("state", 0)
    first = ShardReport(
        shard, "attempt", 1, "query", 0, 0, 1000, sequence=-1, records=2, application_id="app", group_id="app"
    )
    session = ProducerSession()
    commit(broker, session, 0, staged=ModelRows(rows(0), [first]))
    sequence = committed(broker).sequence
    second = replace(first, batch_id=1, next_offset=3, sequence=sequence, records=0)
    commit(broker, session, 1, staged=ModelRows(rows(1), [second]))
    broker.group.clear()
    broker.tail_records = behind
    third = replace(first, batch_id=2, next_offset=next_offset, records=0, base_digest="of batch 0")
    staged, before = ModelRows(rows(2), [third]), list(broker.log)
    if is_proved:
        assert commit(broker, ProducerSession(), 2, staged=staged).step is Step.COMMITTED
        return
    with pytest.raises(RestartQueryError, match="started from the state of transaction -1"):
        commit(broker, ProducerSession(), 2, staged=staged)
    assert broker.log == before


def test_setting_or_removing_the_token_topic_takes_effect_in_a_running_process() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id, topic in ((0, None), (1, TOKENS), (2, None), (3, TOKENS)):
        wanted = replace(request(batch_id), token_topic=topic)
        staged, deadline = ModelRows(rows(batch_id)), Deadline.after_seconds(30)
        Commit(wanted, staged, broker, session, deadline).run()
        record = broker.records.get("app")
        assert (record is not None and record.token.batch_id == batch_id) is (topic is not None)


def test_without_a_token_topic_no_record_is_written_or_read() -> None:
    broker = broker_with_genesis()
    run_commit(broker, request(0), ModelRows(rows(0)))
    assert not broker.records
    assert "token_records" not in broker.calls


_CALLS = st.sampled_from(
    [
        *("init", "group_offsets", "quick_record", "last_record", "check_partitions", "begin"),
        *("send", "flush", "send_offsets", "committed_now", "commit"),
    ]
)
_ERRORS = st.sampled_from([RetriableError, AbortableError, FencedError, Killed])
_FAULTS = st.lists(st.tuples(_CALLS, _ERRORS, st.booleans()), max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(_FAULTS, st.booleans(), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6),
    st.data(),
)
def test_each_batch_is_committed_once_although_the_group_is_lost_at_any_time(
    schedule: list[tuple[list[tuple[str, type[BaseException], bool]], bool, int, int]], data: st.DataObject
) -> None:
    """Each batch is committed once, although the group is often deleted while the query is stopped."""
    broker = ModelBroker()
    processes = [ProducerSession(), ProducerSession()]
    run, promised = 0, False
    for batch_id, (faults, clean, process, lost_rows) in enumerate(schedule):
        broker.clean, broker.lose_rows = clean, lost_rows
        broker.faults = [Fault(call, error("fault"), after) for call, error, after in faults]
        while True:
            try:
                commit(broker, processes[process], batch_id, f"run-{run}", promised=promised)
                break
            except (Killed, FencedError):
                # the driver and all its processes are gone
                processes = [ProducerSession(), ProducerSession()]
                broker.dead = False
                run += 1
                promised = bool(broker.records)
                if data.draw(st.booleans()):
                    broker.discard_open_transaction()
                    broker.group.clear()
        promised = True
        if data.draw(st.booleans()):
            processes = [ProducerSession(), ProducerSession()]
            run += 1
            broker.group.clear()
        assert broker.records["app"].token.batch_id == batch_id
    assert broker.log == [row for batch_id in range(len(schedule)) for row in rows(batch_id)]


@dataclass
class Run:
    """One run of a query, of one batch.

    Attributes:
        with_topic: whether the query has its token topic.
        dies: whether the driver dies after Kafka's commit, so that Spark replays the batch.
        group_is_lost: whether the group is deleted afterwards.
    """

    with_topic: bool
    dies: bool
    group_is_lost: bool


@settings(max_examples=300, deadline=None)
@given(st.lists(st.builds(Run, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_setting_and_removing_the_token_topic_between_runs_never_duplicates_a_batch(
    schedule: list[Run],
) -> None:
    """A named error may refuse the batch, and ends the schedule."""
    broker, batch_id = ModelBroker(), 0
    with TemporaryDirectory() as checkpoint:
        for run in schedule:
            name = TOKENS if run.with_topic else None
            file = IdentityFile(
                checkpoint, Identity("app", "query", batch_id, "file:/checkpoint", token_topic=name)
            )
            wanted = request(batch_id, promised=file.promises_token)
            staged, deadline = ModelRows(rows(batch_id)), Deadline.after_seconds(30)
            machine = Commit(
                replace(wanted, token_topic=name), staged, broker, ProducerSession(), deadline, None, file
            )
            try:
                machine.run()
            except TokenMissingError:
                break
            if not run.dies:
                batch_id += 1
            if run.group_is_lost:
                broker.group.clear()
    written = len(broker.log) // len(rows(0))
    assert broker.log == [row for number in range(written) for row in rows(number)]
    assert written in (batch_id, batch_id + 1)


# -- kafka-eos token-topic restore


def restored(broker: ModelBroker, *, is_complete: bool = True) -> Held | None:
    return restore_group(
        broker,
        broker.token_records(TOKENS, Deadline.after_seconds(30)),
        "app",
        "app",
        Deadline.after_seconds(30),
        is_complete=is_complete,
    )


def test_a_lost_group_is_restored_with_the_progress_of_its_shards() -> None:
    broker = broker_with_genesis(topics={"in": 2, "out": 2, "state": 1, "__consumer_offsets": 5})
    shard = TopicPartition("state", 0)
    report = ShardReport(
        shard, "attempt", 1, "query", 0, 0, 1000, sequence=-1, records=2, application_id="app", group_id="app"
    )
    commit(broker, ProducerSession(), 0, staged=ModelRows(rows(0), [report]))
    before = dict(broker.group)
    broker.group.clear()
    found = restored(broker)
    assert found is not None
    assert found.token == newest(before.values())
    assert {tp: each.offset for tp, each in broker.group.items()} == {tp: before[tp].offset for tp in before}
    assert Held.of("app", broker.group) == found
    for tp in (OUT, shard):
        assert broker.group[tp] == before[tp], "with the full token"
    assert restored(broker) is None, "the group is complete again"


def test_a_restored_group_omits_deleted_topics() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group.clear()
    del broker.topics["in"]
    restored(broker)
    assert set(broker.group) == {OUT}


def test_a_record_that_may_be_out_of_date_restores_nothing() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0)
    broker.group.clear()
    with pytest.raises(TokenMissingError, match="committed batches without a record"):
        restored(broker, is_complete=False)
    assert not broker.group
    broker.records.clear()
    assert restored(broker) is None


def test_restoring_a_group_fences_a_running_driver() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0)
    epoch = broker.epoch
    assert restored(broker) is None
    assert broker.epoch == epoch + 1
    assert commit(broker, session, 1).step is Step.COMMITTED
    assert broker.log == rows(0) + rows(1)
