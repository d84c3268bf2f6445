"""A source whose checkpoint is an old copy continues from the offsets that its application committed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.datasource.reader import ReadLimit, _UnlimitedStreamReader, stream_reader
from kafka_eos_source.errors import AuthorizationError, DataLossError, UnavailableError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.plan.planner import Planning
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.token import MOVING, Mark, Token, application_hash
from tests.plan.source_cluster import A0, A1, B0, Cluster, over_the_wire, plan, ranges, read_options

APPLICATION = "orders"
JUMP = {"application.id": APPLICATION, "onRolledBackCheckpoint": "jump"}
MARK = Mark(application_hash(APPLICATION), 7).encode()
OTHERS_MARK = Mark(application_hash("other"), 7).encode()
TOKEN = Token(APPLICATION, "query", "run", 7, 7, "s", "e", 1).encode()
OLD = SourcePosition({A0: 3, A1: 4}, None, "cluster-1", {"a": "id-a"})


def cluster(*committed: tuple[TopicPartition, int, str]) -> Cluster:
    made = Cluster({A0: (0, 10), A1: (0, 20)})
    for tp, offset, metadata in committed:
        made.commit(group_of(APPLICATION), {tp: offset}, metadata)
    return made


def source(made: Cluster, **options: str) -> SourcePlan:
    return plan(made, **{**JUMP, **options})


def test_an_old_checkpoint_continues_from_the_committed_offsets(caplog: pytest.LogCaptureFixture) -> None:
    made = cluster((A0, 8, TOKEN), (A1, 9, MARK))
    run = source(made)
    jumped = over_the_wire(run.latest(OLD))
    assert jumped == SourcePosition(
        {A0: 8, A1: 9}, None, "cluster-1", {"a": "id-a"}, jump=True, application_id=APPLICATION
    )
    assert "the checkpoint is an old copy" in caplog.text
    assert run.tasks(OLD, jumped) == []
    after = over_the_wire(run.latest(jumped))
    assert not after.jump
    assert ranges(run.tasks(jumped, after)) == {(A0, 8, 10), (A1, 9, 20)}
    assert made.requests.count("committed") == 1
    restarted = source(made)
    assert restarted.tasks(OLD, jumped) == [], "a replay of the jump reads nothing either"
    assert restarted.latest(jumped) == after, "the checkpoint has caught up"


def test_a_jump_takes_over_the_epochs_of_the_committed_offsets() -> None:
    made = cluster((A0, 8, TOKEN))
    held = made.groups[group_of(APPLICATION)]
    held[A0] = replace(held[A0], epoch=6)
    made.epochs = {A0: [(6, 0)], A1: [(6, 0)]}
    begun = replace(OLD, epochs={A0: 2, A1: 3})
    assert source(made).latest(begun).epochs == {A0: 6, A1: 3}


def test_a_partition_without_offset_keeps_its_start() -> None:
    assert source(cluster((A1, 9, MARK))).latest(OLD).end == {A0: 3, A1: 9}


def test_a_partition_that_was_added_after_the_copy_is_read_from_its_committed_offset() -> None:
    a2 = TopicPartition("a", 2)
    made = cluster((A0, 8, MARK), (A1, 9, MARK), (a2, 1, MARK))
    made.logs[a2] = (0, 2)
    run = source(made)
    jumped = run.latest(OLD)
    assert jumped.end == {A0: 8, A1: 9, a2: 1}
    assert (a2, 1, 2) in ranges(run.tasks(jumped, run.latest(jumped)))


def test_a_source_does_not_take_the_anchor_of_the_sink_for_a_position() -> None:
    """Until the query reads the anchor partition, the offset there is a batch id."""
    made = cluster((A0, 5, MARK), (A1, 7, TOKEN))
    begin = SourcePosition({A0: 5}, None, "cluster-1", {"a": "id-a"})
    end = source(made).latest(begin)
    assert not end.jump
    assert ranges(source(made).tasks(begin, end)) >= {(A1, 0, end.end[A1])}


def test_the_source_reads_the_group_of_the_sink() -> None:
    made = cluster()
    made.commit("g", {A0: 8, A1: 9}, MARK)
    assert source(made, **{"kafka.group.id": "g"}).latest(OLD).jump


NO_JUMP: dict[str, list[tuple[TopicPartition, int, str]]] = {
    "not behind": [(A0, 3, MARK), (A1, 4, MARK)],
    "nothing committed": [],
    "one partition is lower": [(A0, 2, MARK), (A1, 9, MARK)],
    "one without a mark": [(A0, 8, MARK), (A1, 9, "")],
    "one with another program's text": [(A0, 8, MARK), (A1, 9, "spark")],
    "one of another application": [(A0, 8, OTHERS_MARK), (A1, 9, MARK)],
    "a mark of another application where nothing would move": [(A0, 3, OTHERS_MARK), (A1, 9, MARK)],
    "a damaged token": [(A0, 8, '{"kafka-eos":2'), (A1, 9, MARK)],
    "a token of a newer version": [(A0, 8, '{"kafka-eos":99}'), (A1, 9, MARK)],
    "state that is being moved": [
        (A0, 8, '{"kafka-eos":2,"' + MOVING + '":{"store":"s","to":4}}'),
        (A1, 9, MARK),
    ],
}


@pytest.mark.parametrize("committed", NO_JUMP.values(), ids=NO_JUMP)
def test_a_source_that_may_not_jump_continues_and_leaves_the_verdict_to_the_sink(
    committed: list[tuple[TopicPartition, int, str]],
) -> None:
    end = source(cluster(*committed)).latest(OLD)
    assert not end.jump
    assert end.end == {A0: 10, A1: 20}


BEHIND = [(A0, 8, MARK), (A1, 9, MARK)]


@pytest.mark.parametrize(
    "start",
    [
        SourcePosition({A0: 3, A1: 4}),
        SourcePosition({A0: 3, A1: 4}, None, "cluster-2", {"a": "id-a"}),
        SourcePosition({A0: 3, A1: 4}, None, "cluster-1", {}),
    ],
    ids=["Spark's own checkpoint", "another cluster", "no topic ids"],
)
def test_a_source_with_an_incomparable_position_does_not_jump(start: SourcePosition) -> None:
    made = cluster(*BEHIND)
    assert not source(made).latest(start).jump
    assert "committed" not in made.requests


def test_a_source_does_not_jump_if_the_cluster_has_no_id() -> None:
    made = cluster(*BEHIND)
    made.cluster_id = None
    assert not source(made).latest(SourcePosition({A0: 3, A1: 4}, None, None, {"a": "id-a"})).jump


def test_a_source_does_not_jump_into_a_recreated_topic() -> None:
    made = cluster(*BEHIND)
    made.recreate("a", {A0: (0, 10), A1: (0, 20)})
    assert not source(made, failOnDataLoss="false").latest(OLD).jump


def test_a_source_does_not_jump_over_a_topic_without_a_recorded_id() -> None:
    """It may not be the topic that the query read."""
    made = cluster(*BEHIND, (B0, 5, MARK))
    made.logs[B0] = (0, 9)
    assert not source(made, subscribe="a,b").latest(OLD).jump


def test_a_source_does_not_jump_if_a_partition_is_missing() -> None:
    made = cluster(*BEHIND)
    del made.logs[A1]
    assert not source(made, failOnDataLoss="false").latest(OLD).jump


def test_a_new_query_starts_at_its_starting_offsets() -> None:
    made = cluster(*BEHIND)
    run = source(made, startingOffsets="earliest")
    end = run.latest(over_the_wire(run.initial()))
    assert ranges(run.tasks(run.initial(), end)) == {(A0, 0, 10), (A1, 0, 20)}
    assert "committed" not in made.requests


def test_a_copied_checkpoint_that_had_read_nothing_jumps() -> None:
    made = cluster(*BEHIND)
    began = SourcePosition({A0: 3, A1: 4}, {A0: 3, A1: 4}, "cluster-1", {"a": "id-a"})
    assert source(made).latest(began).jump


def test_only_the_first_batch_of_a_run_may_jump() -> None:
    """Later in a run, offsets ahead of the source come from another driver, and fencing resolves that."""
    made = cluster((A0, 3, MARK), (A1, 4, MARK))
    run = source(made)
    position = run.latest(OLD)
    made.logs = {A0: (0, 30), A1: (0, 30)}
    made.commit(group_of(APPLICATION), {A0: 25, A1: 25}, MARK)
    assert run.latest(position).end == {A0: 30, A1: 30}
    assert made.requests.count("committed") == 1


def test_without_an_application_id_no_group_is_read() -> None:
    made = cluster(*BEHIND)
    options = {"kafka.group.id": APPLICATION, "onRolledBackCheckpoint": "jump"}
    assert not plan(made, **options).latest(OLD).jump
    assert "committed" not in made.requests


def test_a_source_jumps_only_if_the_option_allows_it() -> None:
    """A jump needs the option, because with a sink other than `kafka-eos` it would lose records."""
    made = cluster(*BEHIND)
    assert not plan(made, **{"application.id": APPLICATION}).latest(OLD).jump
    assert "committed" not in made.requests


def test_available_now_reads_the_records_after_the_jump() -> None:
    made = cluster(*BEHIND)
    run = source(made, maxOffsetsPerTrigger="4")
    run.stop_at_latest()
    made.logs = {A0: (0, 15), A1: (0, 25)}
    position, jumped, seen = OLD, [], set()
    while (end := run.latest(position)) != position:
        jumped.append(end.jump)
        seen |= ranges(run.tasks(position, end))
        position = end
    assert jumped == [True, False, False, False, False]
    assert position.end == {A0: 10, A1: 20}
    assert sum(end - start for _, start, end in seen) == 2 + 11


def test_a_source_never_jumps_under_trigger_once() -> None:
    """The jump would use up the only batch of the run, which would read nothing."""
    assert not source(cluster(*BEHIND)).latest(OLD, once=True).jump


def test_before_pyspark_4_2_a_source_never_jumps() -> None:
    """Before PySpark 4.2 the source cannot recognise Trigger.Once and AvailableNow, so it never jumps."""
    made = cluster(*BEHIND)
    reader = _UnlimitedStreamReader(read_options(**JUMP))
    reader._opened = Planning(SourcePlan(reader._options, made), made)  # type: ignore[arg-type]
    reader.partitions(OLD.to_dict(), OLD.to_dict())
    assert "jump" not in reader.latestOffset()["@"]


@pytest.mark.skipif(ReadLimit is None, reason="Spark tells the limit since 4.2")
@pytest.mark.parametrize("limits", [{}, {"minOffsetsPerTrigger": "2"}, {"maxOffsetsPerTrigger": "3"}])
def test_spark_passes_read_all_available_only_under_trigger_once(limits: dict[str, str]) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    made = cluster(*BEHIND)

    def reader() -> Any:
        found = stream_reader(read_options(**{**JUMP, **limits}))
        found._opened = Planning(SourcePlan(found._options, made), made)  # type: ignore[attr-defined]
        return found

    usual = reader()
    assert "jump" in usual.latestOffset(OLD.to_dict(), usual.getDefaultReadLimit())["@"]
    assert "jump" not in reader().latestOffset(OLD.to_dict(), ReadAllAvailable())["@"]


def test_a_minimum_batch_size_neither_delays_a_jump_nor_counts_it_as_a_batch() -> None:
    made = cluster(*BEHIND)
    run = source(made, minOffsetsPerTrigger="1000")
    jumped = run.latest(OLD)
    assert jumped.jump
    assert run.latest(jumped).end == {A0: 10, A1: 20}, "the first batch with records never waits"


def test_a_group_that_the_user_may_not_read_is_logged_and_not_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = cluster(*BEHIND)
    made.refusal = AuthorizationError("group denied")
    with caplog.at_level(logging.WARNING):
        assert source(made).latest(OLD).end == {A0: 10, A1: 20}
    assert "not authorized to read the offsets of consumer group 'kafka-eos.orders'" in caplog.text
    assert "group denied" in caplog.text


def test_a_group_that_does_not_answer_is_an_error() -> None:
    """If the group does not answer, the source fails: reading on would only be refused by the sink."""
    made = cluster(*BEHIND)
    made.refusal = UnavailableError("an open transaction")
    with pytest.raises(UnavailableError, match="an open transaction"):
        source(made).latest(OLD)


_PARTITIONS = [A0, A1, B0]
_METADATA = st.sampled_from([MARK, MARK, MARK, TOKEN, OTHERS_MARK, "", '{"kafka-eos":99}'])


@given(
    start=st.dictionaries(st.sampled_from(_PARTITIONS), st.integers(0, 9), min_size=1),
    committed=st.dictionaries(st.sampled_from(_PARTITIONS), st.tuples(st.integers(0, 9), _METADATA)),
    known_ids=st.sampled_from(["id-b", "other", None]),
    here=st.sampled_from(["cluster-1", "cluster-2"]),
)
@settings(deadline=None, max_examples=300)
def test_a_jump_goes_only_forwards_and_only_to_offsets_of_the_application(
    start: dict[TopicPartition, int],
    committed: dict[TopicPartition, tuple[int, str]],
    known_ids: str | None,
    here: str,
) -> None:
    made = Cluster(dict.fromkeys(_PARTITIONS, (0, 10)), cluster_id=here)
    for tp, (offset, metadata) in committed.items():
        made.commit(group_of(APPLICATION), {tp: offset}, metadata)
    ids = {"a": "id-a"} | ({} if known_ids is None else {"b": known_ids})
    begin = SourcePosition(start, None, "cluster-1", ids)
    run = source(made, subscribe="a,b", failOnDataLoss="false")
    end = over_the_wire(run.latest(begin))
    expected = (
        here == "cluster-1"
        and all(metadata in (MARK, TOKEN) for _, metadata in committed.values())
        and all(tp in start or metadata == MARK for tp, (_, metadata) in committed.items())
        and all(offset >= start.get(tp, 0) for tp, (offset, _) in committed.items())
        and any(tp not in start or offset > start[tp] for tp, (offset, _) in committed.items())
        and (known_ids == "id-b" or B0 not in {*start, *committed})
    )
    assert end.jump == expected
    if end.jump:
        assert run.tasks(begin, end) == []
        assert end.end == {**start, **{tp: offset for tp, (offset, _) in committed.items()}}
        assert end.topic_ids == ids
        after = run.latest(end)
        read = ranges(run.tasks(end, after))
        assert read == {(tp, end.end.get(tp, 0), 10) for tp in _PARTITIONS}


# -- a planned batch whose records are gone


def repeated(made: Cluster, **options: str) -> set[tuple[TopicPartition, int, int]]:
    """Plans a batch from offset 3 on, removes records of it, and returns what a repeat of it reads."""
    start = replace(OLD, end={A0: 3, A1: 20}, application_id=APPLICATION)
    end = over_the_wire(source(made, onRolledBackCheckpoint="read").latest(start))
    made.logs[A0] = (10, 12)
    return ranges(source(made, **options).tasks(start, end))


def test_a_repeated_batch_that_kafka_holds_reads_nothing_if_its_records_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert repeated(cluster((A0, 10, TOKEN))) == set()
    assert "the sink skips the batch" in caplog.text


@pytest.mark.parametrize(
    ("committed", "options"),
    [
        ([], {}),
        ([(A0, 9, MARK)], {}),
        ([(A0, 10, OTHERS_MARK)], {}),
        ([(A0, 10, "")], {}),
        ([(A1, 20, MARK)], {}),
        ([(A0, 10, MARK)], {"onRolledBackCheckpoint": "read"}),
    ],
    ids=["none", "not-the-end", "another-application", "unmarked", "another-partition", "read"],
)
def test_a_repeated_batch_is_read_unless_marks_prove_that_kafka_holds_it(
    committed: list[tuple[TopicPartition, int, str]], options: dict[str, str]
) -> None:
    """The task that reads the records then reports the loss."""
    assert repeated(cluster(*committed), **options) == {(A0, 3, 10)}


def test_marks_of_an_application_that_the_position_does_not_name_prove_nothing() -> None:
    """The sink compares the name in the position with its own. Without one it could write an empty batch."""
    made = cluster((A0, 10, MARK))
    start = replace(OLD, end={A0: 3, A1: 20})
    end = over_the_wire(plan(made).latest(start))
    made.logs[A0] = (10, 12)
    assert ranges(source(made).tasks(start, end)) == {(A0, 3, 10)}


@pytest.mark.parametrize("change", ["cluster", "topic"])
def test_offsets_of_other_topics_prove_nothing(change: str) -> None:
    made = cluster((A0, 10, MARK))
    start = replace(OLD, end={A0: 3, A1: 20}, application_id=APPLICATION)
    end = over_the_wire(source(made, onRolledBackCheckpoint="read").latest(start))
    made.logs[A0] = (10, 12)
    if change == "cluster":
        made.cluster_id = "cluster-2"
        assert ranges(source(made).tasks(start, end)) == {(A0, 3, 10)}
    else:
        made.ids_by_topic["a"] = "another"
        with pytest.raises(DataLossError, match="TOPIC_RECREATED"):
            source(made).tasks(start, end)


def test_a_repeated_batch_whose_records_exist_is_read_although_kafka_holds_it() -> None:
    """Operators then see the same rows as before."""
    made = cluster((A0, 10, MARK))
    start = replace(OLD, end={A0: 3, A1: 20}, application_id=APPLICATION)
    end = over_the_wire(source(made, onRolledBackCheckpoint="read").latest(start))
    assert ranges(source(made).tasks(start, end)) == {(A0, 3, 10)}
    assert made.requests.count("committed") == 0
