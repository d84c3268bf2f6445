"""The commit of a batch with operator state: records, offsets and changelog commit together or not at all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.report_checks import (
    check_names,
    check_one_source,
    check_reports,
    check_same_cluster,
    check_shards,
    check_tail,
    is_alone,
)
from kafka_eos_source.commit.request import Cluster, ProducerSession, SourceRange, inherited_shards
from kafka_eos_source.commit.verdict import Held
from kafka_eos_source.errors import (
    AbortableError,
    ChangelogError,
    InvalidOptionError,
    RestartQueryError,
    RetriableError,
    StateError,
    StatefulProcessorError,
    StateLostError,
    StateMismatchError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.identity import of_stream
from kafka_eos_source.protocol.token import Due, ShardProgress, Token, newest
from kafka_eos_source.state.changelog.topic import Tail
from kafka_eos_source.state.model import Owner
from tests.commit.model_broker import (
    IN,
    OUT,
    Fault,
    ModelBroker,
    ModelRows,
    broker_with_genesis,
    request,
    rows,
    run_commit,
)
from tests.commit.shards_kit import SHARDS, report


def commit(broker: ModelBroker, session: ProducerSession, batch_id: int, shards: list[ShardReport]) -> Result:
    topics = {**broker.topics, "app-counts-changelog": 2}
    broker.topics = topics
    return run_commit(broker, request(batch_id), ModelRows(rows(batch_id), shards), session)


def committed_offset(broker: ModelBroker, tp: TopicPartition) -> tuple[int, Token]:
    found = broker.group[tp]
    token = Token.decode(found.metadata)
    assert token is not None
    return found.offset, token


def both_shards(batch_id: int, **values: int) -> list[ShardReport]:
    return [report(batch_id, 0, **values), report(batch_id, 1, **values)]


def test_the_token_says_when_the_next_batch_is_due_and_a_replay_finds_that_out() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    first, second = both_shards(0)
    reports = [replace(first, due_ms=9000, time_ms=70), replace(second, due_ms=8000, time_ms=60)]
    written = commit(broker, session, 0, reports)
    assert written.token is not None
    assert written.token.due == Due(8000, 60)
    held = newest(broker.group.values())
    assert held is not None
    assert held.due == Due(8000, 60)
    skipped = commit(broker, ProducerSession(), 0, both_shards(0, sequence=1))
    assert skipped.step is Step.SKIPPED
    assert skipped.token is not None
    assert skipped.token.due == Due(8000, 60), "what Kafka holds counts, and not what the replay reports"
    last = commit(broker, session, 1, both_shards(1))
    assert last.token is not None
    assert last.token.due is None


def test_state_changes_and_their_offset_commit_with_the_records() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(2):
        assert commit(broker, session, batch_id, both_shards(batch_id)) == Result(Step.COMMITTED, 1)
    assert [row for row in broker.log if "changelog" not in row] == rows(0) + rows(1)
    for number, tp in enumerate(SHARDS):
        assert sum(row.startswith(f"{tp}/") for row in broker.log) == 6
        offset, token = committed_offset(broker, tp)
        assert (offset, token.batch_id) == (6, 1)
        assert token.shard == ShardProgress(f"1-{number}", 5, 9, {"late_rows": 1})
    assert committed_offset(broker, IN)[1].shard is None


def in_read(reports: list[ShardReport]) -> list[ShardReport]:
    return [replace(each, in_read=True) for each in reports]


def test_a_batch_without_an_operator_in_the_read_that_ran_before_is_refused() -> None:
    """Spark leaves out a source without new offsets. The operator's next batch would find a gap."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, in_read(both_shards(0)))
    assert committed_offset(broker, SHARDS[0])[1].in_read
    for fresh in (session, ProducerSession()):
        with pytest.raises(StateError, match="did not run in batch 1"):
            commit(broker, fresh, 1, [])
    commit(broker, ProducerSession(), 1, in_read(both_shards(1)))


def test_an_operator_in_the_read_of_another_query_in_the_group_does_not_matter() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, in_read(both_shards(0)))
    for tp in SHARDS:
        token = replace(committed_offset(broker, tp)[1], application_id="another")
        broker.group[tp] = replace(broker.group[tp], metadata=token.encode())
    commit(broker, ProducerSession(), 1, [])


def test_an_operator_after_a_shuffle_may_be_removed() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    commit(broker, session, 1, [])


def test_a_query_with_an_operator_in_the_read_has_one_source() -> None:
    check_one_source(in_read(both_shards(0)), 1)
    check_one_source(both_shards(0), 2)
    check_one_source([], 2)
    with pytest.raises(StateError, match="the query has 2 sources; expected one"):
        check_one_source(in_read(both_shards(0)), 2)


def test_a_shard_without_changes_keeps_its_offset_and_gets_the_token() -> None:
    broker = broker_with_genesis()
    commit(broker, ProducerSession(), 0, [report(0, 0), replace(report(0, 1, records=0), next_offset=1000)])
    assert committed_offset(broker, SHARDS[1])[0] == 1000
    assert committed_offset(broker, SHARDS[1])[1].batch_id == 0


def test_a_recreated_changelog_gets_no_changes() -> None:
    """The new changelog would hold only these changes; the earlier state was in the deleted topic."""
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(2):
        commit(broker, session, batch_id, both_shards(batch_id))
    broker.log[:] = [row for row in broker.log if "changelog" not in row]
    before, group = list(broker.log), dict(broker.group)
    with pytest.raises(StateLostError, match=r"ends at offset 3 .* ends at offset 6"):
        commit(broker, session, 2, both_shards(2))
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
def test_a_failure_of_the_changelog_aborts_and_repeats_the_transaction(call: str, error: Exception) -> None:
    broker = broker_with_genesis(faults=[Fault(call, error)])
    assert commit(broker, ProducerSession(), 0, both_shards(0)) == Result(Step.COMMITTED, 2)
    assert "abort" in broker.calls
    assert sum("changelog" in row for row in broker.log) == 6
    assert committed_offset(broker, SHARDS[0])[0] == 3


def test_a_shard_with_a_newer_state_makes_the_commit_read_the_token() -> None:
    """Otherwise a clean producer would commit batch 1 again, on top of a state that contains it."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    commit(broker, ProducerSession(), 1, both_shards(1))  # by a zombie
    assert commit(broker, session, 1, both_shards(1, sequence=2)).step is Step.SKIPPED
    assert [row for row in broker.log if "changelog" not in row] == rows(0) + rows(1)


@pytest.mark.parametrize("sequence", [-1, 0, 2])
def test_changes_that_start_from_another_state_than_kafkas_are_never_written(sequence: int) -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    with pytest.raises(RestartQueryError, match=rf"transaction {sequence}, but Kafka .* transaction 1"):
        commit(broker, session, 1, [report(1, 0), report(1, 1, sequence=sequence)])
    assert [row for row in broker.log if "changelog" not in row] == rows(0)


def test_a_state_without_the_last_transaction_is_refused_unless_the_user_accepts_it() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    commit(broker, session, 1, [])  # a projection dropped the column of changes
    behind = [replace(each, sequence=1, next_offset=3) for each in both_shards(2)]
    with pytest.raises(StateLostError, match=r"transaction 1 .*last transaction of the query is 2"):
        commit(broker, session, 2, behind)
    accepted = [replace(each, missing_state="changelog") for each in behind]
    assert commit(broker, session, 2, accepted).step is Step.COMMITTED


def test_a_processor_error_in_a_batch_that_kafka_holds_does_not_fail_the_query() -> None:
    """The state already contains the batch, so the processor may fail on it."""
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    failed = [
        replace(each, failure="KeyError: seen before", records=0) for each in both_shards(0, sequence=1)
    ]
    assert commit(broker, session, 0, failed).step is Step.SKIPPED
    failed = [replace(each, failure="KeyError: unknown", records=0) for each in both_shards(1)]
    with pytest.raises(StatefulProcessorError, match="KeyError: unknown"):
        commit(broker, session, 1, failed)


def test_adoption_keeps_the_progress_of_shards() -> None:
    """Another query continues with a batch without state changes; the task attempt of the state is kept."""
    other = Token("app", "other", "run", 9, 9, "d", "d", 1, shard=ShardProgress("9-0", 4, 8))
    held_before = Held.of("app", {SHARDS[0]: GroupOffset(SHARDS[0], 77, other.encode())})
    own = Token("app", "query", "run-1", 10, 3, "d3", "d4", 0)
    cluster = Cluster("model-cluster", {"out": 2, "in": 2, "app-counts-changelog": 2})
    inherited = inherited_shards(held_before, "query")
    offsets = {each.tp: each for each in request(3).offsets(own, {}, cluster, inherited)}
    kept = Token.decode(offsets[SHARDS[0]].metadata)
    assert kept == replace(own, shard=other.shard, partitions=1)
    assert offsets[SHARDS[0]].offset == 77
    assert Token.decode(offsets[OUT].metadata) == replace(own, partitions=1)


def commit_declared_by_operator(broker: ModelBroker, shards: list[ShardReport]) -> Result:
    """Commits batch 1, whose group was deleted, after an operator declared it committed."""
    broker.topics = {**broker.topics, "app-counts-changelog": 2}
    broker.group.clear()
    asked = replace(request(1), missing_token="assume_committed:1")
    return run_commit(broker, asked, ModelRows(rows(1), shards))


def test_a_batch_that_an_operator_declared_committed_keeps_its_state() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    for batch_id in range(2):
        commit(broker, session, batch_id, both_shards(batch_id))
    before = list(broker.log)
    found = [
        replace(each, skipped=True, base_digest=request(1).batch.end, records=0, next_offset=6)
        for each in both_shards(1)
    ]
    assert commit_declared_by_operator(broker, found).step is Step.SKIPPED
    assert broker.log == before
    offset, token = committed_offset(broker, SHARDS[0])
    assert (offset, token.batch_id) == (6, 1)
    assert token.shard == ShardProgress("1-0", 5, 9, {"late_rows": 1})


def test_the_state_contradicts_an_operator_who_declared_the_wrong_outcome() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    before = list(broker.log)
    with pytest.raises(StateLostError, match="assume_not_committed"):
        commit_declared_by_operator(broker, both_shards(1))
    assert broker.log == before


# -- whose state it is


OWN = Owner("app", "counts", 2)


def test_a_first_batch_beside_the_state_of_another_owner_is_refused() -> None:
    """X with store eu-agg, and X-eu with store agg, have one changelog topic."""
    other = Owner("app-eu", "agg", 2)
    broker = broker_with_genesis(tail_records=3, tail_owners=frozenset({other}))
    broker.log += [f"{SHARDS[0]}/theirs"] * 3  # they committed after the shard had read an empty changelog
    before = list(broker.log), dict(broker.group)
    with pytest.raises(ChangelogError) as caught:
        commit(broker, ProducerSession(), 0, both_shards(0))
    assert f"holds the state of {other}; expected the state of {OWN}" in caught.value.message
    assert "Nothing was written" in caught.value.message
    assert (broker.log, broker.group) == before
    assert broker.calls[-2:] == ["changelog_tail", "abort"]


@pytest.mark.parametrize(
    ("owners", "error"), [((), "another program has written 3 records"), ((OWN,), "were set back")]
)
def test_committed_records_after_the_tokens_state_are_refused(owners: tuple[Owner, ...], error: str) -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    broker.log += [f"{SHARDS[1]}/theirs"] * 3
    broker.tail_records, broker.tail_owners = 3, frozenset(owners)
    with pytest.raises(StateError, match=error):
        commit(broker, session, 1, both_shards(1))


def test_an_open_transaction_of_another_owner_is_waited_for() -> None:
    """Both transactions see each other's records, and neither is believed before the other has ended."""
    shard = report(0, 0)
    assert is_alone(shard, 0, 3)
    assert is_alone(replace(shard, sequence=4), 10, 14), "and the control record of the transaction before"
    for end in (2, 4, 5):
        assert not is_alone(shard, 0, end)
    check_tail(shard, 9, Tail(6, 0, frozenset()))
    with pytest.raises(AbortableError, match="another producer has an open transaction"):
        check_tail(shard, 9, Tail(4, 0, frozenset()))


def in_store(batch_id: int, store: str, **values: Any) -> ShardReport:
    made = replace(
        report(batch_id, 0, records=0, sequence=-1), tp=TopicPartition(f"app-{store}-changelog", 0)
    )
    return replace(made, store=store, shards=1, **values)


def test_a_renamed_store_is_answered_with_the_stores_that_exist() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    before = list(broker.log), dict(broker.group)
    for fresh in (session, ProducerSession()):
        with pytest.raises(
            StateMismatchError, match=r"store 'sums' .* does not exist yet.* 'counts', which"
        ) as caught:
            commit(broker, fresh, 1, [in_store(1, "sums")])
        assert "set its store to 'counts' again" in caught.value.fix
        assert "onMissingState=new:1" in caught.value.fix
    assert (broker.log, broker.group) == before
    assert commit(broker, session, 1, [in_store(1, "sums", missing_state="new")]).step is Step.COMMITTED


def test_a_second_operator_needs_no_ceremony() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    commit(broker, session, 0, both_shards(0))
    assert commit(broker, session, 1, [*both_shards(1), in_store(1, "sums")]).step is Step.COMMITTED
    commit(broker, session, 2, both_shards(2))  # the second operator was removed
    assert commit(broker, session, 3, [*both_shards(3), in_store(3, "others")]).step is Step.COMMITTED


def test_a_batch_that_the_changelog_holds_is_not_written_again() -> None:
    """The group was lost. A batch id alone proves nothing: a restored checkpoint uses it for other rows."""
    held, batch = Held.of("app", {}), request(1).batch
    found = [replace(report(1, 0, sequence=-1), skipped=True, base_digest=batch.end)]
    check_reports(found, batch, held, ("driver", 5))
    with pytest.raises(StateLostError) as caught:
        check_shards(found, 1, held, lambda *_: pytest.fail("no need to read the changelog"))
    assert "assume_committed:1" in caught.value.fix
    found = [replace(each, base_digest="another") for each in found]
    with pytest.raises(StateLostError, match="another batch 1"):
        check_reports(found, batch, held, ("driver", 5))


def test_without_a_token_the_digest_in_the_changelog_proves_which_state_it_is() -> None:
    held, batch = Held.of("app", {}), request(1).batch
    shard = replace(report(1, 0, sequence=-1), base_digest=batch.start)
    check_reports([shard], batch, held, ("driver", 5))
    with pytest.raises(TokenMissingError, match="does not end where batch 1 begins") as caught:
        check_reports([replace(shard, base_digest="another")], batch, held, ("driver", 5))
    assert "onMissingState=changelog:1" in caught.value.fix
    accepted = replace(shard, base_digest="another", missing_state="changelog")
    check_reports([accepted], batch, held, ("driver", 5))


# -- clocks


def test_a_batch_in_the_future_is_refused_and_names_the_host() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    now_ms = time.time_ns() // 1_000_000
    ahead = [report(0, 0), replace(report(0, 1), time_ms=now_ms + 3_600_000, host="host-7")]
    before = list(broker.log), dict(broker.group)
    with pytest.raises(
        StateError, match=r"clock of host 'host-7'.* is 3\d\d\d s ahead .* expected at most 60 s"
    ):
        commit(broker, session, 0, ahead)
    assert (broker.log, broker.group) == before
    accepted = [replace(each, clock_max_ahead_ms=7_200_000) for each in ahead]
    assert commit(broker, session, 0, accepted).step is Step.COMMITTED


def test_a_recorded_time_in_the_future_names_the_command_that_lowers_it() -> None:
    broker, session = broker_with_genesis(), ProducerSession()
    future = time.time_ns() // 1_000_000 + 3_600_000
    for batch_id, ahead_ms in ((0, 7_200_000), (1, 60_000)):
        found = [replace(each, time_ms=future, clock_max_ahead_ms=ahead_ms) for each in both_shards(batch_id)]
        if batch_id == 0:
            commit(broker, session, 0, found)
            continue
        with pytest.raises(StateError, match="the recorded processing time") as caught:
            commit(broker, session, 1, found)
        assert "state lower-time QUERY --store counts" in caught.value.fix


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"application_id": "other", "group_id": "kafka-eos.app"}, "the sink 'app', the operator .* 'other'"),
        (
            {"application_id": "app", "group_id": "other"},
            "consumer groups: the sink 'kafka-eos.app'.* 'other'",
        ),
    ],
)
def test_an_operator_has_the_names_of_the_sink(names: dict[str, str], said: str) -> None:
    who = of_stream("query", application_id="app", group_id=None, topic="out")
    agreed = replace(report(0, 0), application_id="app", group_id="kafka-eos.app")
    check_names(who, 0, [agreed], [SourceRange(None, application_id="app"), SourceRange(None)])
    with pytest.raises(InvalidOptionError, match=said):
        check_names(who, 0, [agreed, replace(agreed, tp=TopicPartition("other", 0), **names)], [])


def test_a_source_has_the_name_of_the_sink_if_it_has_one() -> None:
    who = of_stream("query", application_id=None, group_id=None, topic="out")
    with pytest.raises(
        InvalidOptionError, match=r"the sink 'kafka-eos-query' \(derived.*source 1 'x'"
    ) as caught:
        check_names(who, 3, [], [SourceRange(None), SourceRange(None, application_id="x")])
    assert "offsets/3" in caught.value.fix


def test_the_changelog_of_an_operator_is_on_the_cluster_of_the_sink() -> None:
    made = replace(report(0, 0), topic_id="id-1", brokers="b:9092")
    check_same_cluster([made], {made.tp.topic: "id-1"}, "c", 0)
    with pytest.raises(InvalidOptionError, match=r"b:9092.*id-1.*\(c\).* id-2"):
        check_same_cluster([made], {made.tp.topic: "id-2"}, "c", 0)
