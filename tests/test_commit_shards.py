"""The commit's state machine with operators' state: records, offsets and changelog move together, or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_broker import Fault, ModelBroker, ModelRows
from test_commit_transaction import IN, OUT, order, rows

from kafka_eos_source.commit.parties import Owner
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.commit.transaction import Commit, Result
from kafka_eos_source.errors import (
    AbortableError,
    RestartQueryError,
    RetriableError,
    StateLostError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.runtime.deadline import Deadline

SHARDS = [TopicPartition("app-counts-changelog", 0), TopicPartition("app-counts-changelog", 1)]


def report(batch_id: int, shard: int, *, records: int = 2, skipped: bool = False) -> ShardReport:
    return ShardReport(
        tp=SHARDS[shard],
        attempt=f"{batch_id}-{shard}",
        shards=2,
        query_id="query",
        batch_id=batch_id,
        next_offset=2 * batch_id,
        time_ms=5,
        event_time_ms=9,
        records=records,
        skipped=skipped,
        counts={"late_rows": batch_id},
    )


def commit(broker: ModelBroker, owner: Owner, batch_id: int, shards: list[ShardReport]) -> Result:
    topics = {**broker.topics, "app-counts-changelog": 2}
    broker.topics = topics
    machine = Commit(
        order(batch_id), ModelRows(rows(batch_id), shards), broker, owner, Deadline.after_seconds(30)
    )
    machine._pause.wait = lambda _seconds: True  # type: ignore[method-assign,assignment,misc]
    return machine.run()


def held(broker: ModelBroker, tp: TopicPartition) -> tuple[int, Token]:
    found = broker.group[tp]
    token = Token.decode(found.metadata)
    assert token is not None
    return found.offset, token


def both(batch_id: int, **values: int) -> list[ShardReport]:
    return [report(batch_id, 0, **values), report(batch_id, 1, **values)]


def test_the_changelog_and_how_far_it_is_commit_with_the_records() -> None:
    broker, owner = ModelBroker(), Owner()
    for batch_id in range(2):
        assert commit(broker, owner, batch_id, both(batch_id)) == Result(Step.COMMITTED, 1)
    assert [row for row in broker.log if "changelog" not in row] == rows(0) + rows(1)
    for number, tp in enumerate(SHARDS):
        assert sum(row.startswith(f"{tp}/") for row in broker.log) == 4
        offset, token = held(broker, tp)
        assert (offset, token.batch_id) == (4, 1)
        assert token.shard == ShardProgress(f"1-{number}", 5, 9, {"late_rows": 1})
    assert held(broker, IN)[1].shard is None


def test_a_shard_without_changes_keeps_its_offset_and_gets_the_token() -> None:
    broker = ModelBroker()
    commit(broker, Owner(), 0, [report(0, 0), replace(report(0, 1, records=0), next_offset=1000)])
    assert held(broker, SHARDS[1])[0] == 1000
    assert held(broker, SHARDS[1])[1].batch_id == 0


def test_a_changelog_that_was_made_anew_meanwhile_gets_no_changes() -> None:
    """They would be all that it holds: the state that they are made to is in the topic that is gone."""
    broker, owner = ModelBroker(), Owner()
    for batch_id in range(2):
        commit(broker, owner, batch_id, both(batch_id))
    broker.log[:] = [row for row in broker.log if "changelog" not in row]
    before, group = list(broker.log), dict(broker.group)
    with pytest.raises(StateLostError, match=r"ends at offset 2, .*that of offset 4"):
        commit(broker, owner, 2, both(2))
    assert (broker.log, broker.group) == (before, group)
    assert broker.calls[-2:] == ["ends", "abort"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("send", AbortableError("broken")),
        ("ends", AbortableError("broken")),
        ("ends", RetriableError("not now")),
        ("ends", UnavailableError("the topic is gone")),
    ],
)
def test_what_fails_with_the_changelog_is_aborted_and_done_again(call: str, error: Exception) -> None:
    broker = ModelBroker(faults=[Fault(call, error)])
    assert commit(broker, Owner(), 0, both(0)) == Result(Step.COMMITTED, 2)
    assert "abort" in broker.calls
    assert sum("changelog" in row for row in broker.log) == 4
    assert held(broker, SHARDS[0])[0] == 2


def test_a_skipped_shard_makes_the_commit_look_at_the_token() -> None:
    """A clean producer in memory would else commit batch 1 again as batch 1, without its state."""
    broker, owner = ModelBroker(), Owner()
    commit(broker, owner, 0, both(0))
    commit(broker, Owner(), 1, both(1))  # by a zombie
    skipped = [replace(each, skipped=True, records=0) for each in both(1)]
    assert commit(broker, owner, 1, skipped).step is Step.SKIPPED
    assert [row for row in broker.log if "changelog" not in row] == rows(0) + rows(1)


def test_a_batch_that_shards_skipped_and_kafka_does_not_hold_is_never_written() -> None:
    broker, owner = ModelBroker(), Owner()
    commit(broker, owner, 0, both(0))
    with pytest.raises(RestartQueryError, match="operators found batch 1 in Kafka"):
        commit(broker, owner, 1, [report(1, 0), report(1, 1, records=0, skipped=True)])
    assert [row for row in broker.log if "changelog" not in row] == rows(0)


def test_an_adopted_querys_shards_keep_their_marks() -> None:
    """Another query goes on with a batch without state changes: whose attempt the state is stays known."""
    other = Token("app", "other", "run", 9, 9, "d", "d", 1, shard=ShardProgress("9-0", 4, 8))
    inherited = {SHARDS[0]: GroupOffset(SHARDS[0], 77, other.encode())}
    own = Token("app", "query", "run-1", 3, 3, "d3", "d4", 0)
    topics = {"out": 2, "in": 2, "app-counts-changelog": 2}
    offsets = {each.tp: each for each in order(3).offsets(own, "model-cluster", topics, inherited)}
    kept = Token.decode(offsets[SHARDS[0]].metadata)
    assert kept == replace(own, shard=other.shard)
    assert offsets[SHARDS[0]].offset == 77
    assert Token.decode(offsets[OUT].metadata) == own


def marked(broker: ModelBroker, shards: list[ShardReport]) -> Result:
    """The group was deleted after batch 1, and a person says that it is in the output."""
    broker.topics = {**broker.topics, "app-counts-changelog": 2}
    broker.group.clear()
    asked = replace(order(1, first_batch=0), missing_token="assume_committed")
    return Commit(asked, ModelRows(rows(1), shards), broker, Owner(), Deadline.after_seconds(30)).run()


def test_a_batch_that_a_person_found_in_kafka_keeps_its_state() -> None:
    broker, owner = ModelBroker(), Owner()
    for batch_id in range(2):
        commit(broker, owner, batch_id, both(batch_id))
    before = list(broker.log)
    found = [replace(each, skipped=True, records=0, next_offset=4) for each in both(1)]
    assert marked(broker, found).step is Step.SKIPPED
    assert broker.log == before
    offset, token = held(broker, SHARDS[0])
    assert (offset, token.batch_id) == (4, 1)
    assert token.shard == ShardProgress("1-0", 5, 9, {"late_rows": 1})


def test_a_person_who_errs_is_told_by_the_state() -> None:
    broker, owner = ModelBroker(), Owner()
    commit(broker, owner, 0, both(0))
    before = list(broker.log)
    with pytest.raises(StateLostError, match="assume_not_committed"):
        marked(broker, both(1))
    assert broker.log == before
