"""The driver's side of the source plans the right ranges, batch after batch, on an in-memory cluster."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.datasource.reader import _UnlimitedStreamReader, batch_reader, stream_reader
from kafka_eos_source.errors import DataLossError, InvalidOptionError, UnavailableError
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.plan.planner import Planning
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import SourcePosition
from tests.plan.source_cluster import A0, A1, B0, Clock, Cluster, over_the_wire, plan, ranges, read_options

# -- where a query starts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {A0: 10, A1: 20}),
        ({"startingOffsets": "earliest"}, {A0: 2, A1: 0}),
        ({"startingOffsets": '{"a":{"0":5,"1":-1}}'}, {A0: 5, A1: 20}),
        ({"startingOffsets": "group", "kafka.group.id": "g"}, {A0: 7, A1: 0}),
        ({"startingTimestamp": "1000"}, {A0: 4, A1: 9}),
    ],
)
def test_a_new_query_starts_where_its_options_say(
    options: dict[str, str], expected: dict[TopicPartition, int]
) -> None:
    cluster = Cluster({A0: (2, 10), A1: (0, 20)}, times={A0: {1000: 4}, A1: {1000: 9}})
    cluster.commit("g", {A0: 7})
    position = plan(cluster, **options).initial()
    assert position.end == expected
    assert (position.cluster_id, position.topic_ids) == ("cluster-1", {"a": "id-a"})


def test_a_missing_topic_is_named() -> None:
    with pytest.raises(UnavailableError, match="'a'"):
        plan(Cluster({B0: (0, 1)})).initial()


def test_a_pattern_without_a_topic_reads_nothing_until_there_is_one() -> None:
    cluster = Cluster({})
    source = plan(cluster, subscribePattern="^a", startingOffsets="earliest")
    start = source.initial()
    assert start.end == {}
    assert source.latest(start) == start
    cluster.logs[A0] = (0, 3)
    end = source.latest(over_the_wire(start))
    assert ranges(source.tasks(start, end)) == {(A0, 0, 3)}


def test_assign_reads_only_the_listed_partitions() -> None:
    cluster = Cluster({A0: (0, 3), A1: (0, 4)})
    source = plan(cluster, assign='{"a":[1,7]}', startingOffsets='{"a":"earliest"}')
    assert source.initial().end == {A1: 0}


# -- batch after batch


def test_a_replay_of_batch_0_starts_where_batch_0_started() -> None:
    """Spark asks for *latest* again, which may have moved."""
    cluster = Cluster({A0: (0, 10)})
    first = plan(cluster)
    start = over_the_wire(first.initial())
    cluster.logs[A0] = (0, 14)
    end = over_the_wire(first.latest(start))
    assert ranges(first.tasks(start, end)) == {(A0, 10, 14)}

    cluster.logs[A0] = (0, 30)
    again = plan(cluster)
    assert ranges(again.tasks(over_the_wire(again.initial()), end)) == {(A0, 10, 14)}
    after = over_the_wire(again.latest(end))
    assert ranges(again.tasks(end, after)) == {(A0, 14, 30)}
    assert after.start is None


def test_without_new_records_the_position_is_unchanged() -> None:
    cluster = Cluster({A0: (0, 10)})
    source = plan(cluster)
    start = over_the_wire(source.initial())
    assert source.latest(start).to_json() == start.to_json()
    cluster.logs[A1] = (0, 0)
    assert source.latest(start).to_json() == start.to_json()


def test_new_partitions_are_read_from_their_beginning() -> None:
    cluster = Cluster({A0: (0, 10)})
    source = plan(cluster)
    start = source.initial()
    cluster.logs[A1] = (0, 3)
    end = source.latest(start)
    assert ranges(source.tasks(start, end)) == {(A1, 0, 3)}
    assert end.end == {A0: 10, A1: 3}


def test_a_checkpoint_of_sparks_own_source_is_continued() -> None:
    cluster = Cluster({A0: (0, 10), A1: (0, 9)})
    source = plan(cluster)
    start = SourcePosition.from_json('{"a":{"0":4,"1":9}}')
    end = source.latest(start)
    assert ranges(source.tasks(start, end)) == {(A0, 4, 10)}
    assert end.topic_ids == {"a": "id-a"}


def test_a_position_past_the_last_stable_offset_is_not_a_loss() -> None:
    """Spark's own source reads uncommitted records, so its checkpoint may be past it."""
    cluster = Cluster({A0: (0, 10), A1: (0, 9)}, open_transactions={A0: 5})
    source = plan(cluster)
    start = SourcePosition.from_json('{"a":{"0":8,"1":7}}')
    end = source.latest(start)
    assert ranges(source.tasks(start, end)) == {(A1, 7, 9)}
    assert end.end[A0] == 8


def test_a_checkpoint_with_none_of_the_sources_topics_is_probably_that_of_another_query() -> None:
    cluster = Cluster({A0: (0, 8), B0: (0, 9)})
    start = plan(cluster, subscribe="b").initial()
    with pytest.raises(DataLossError, match=r"probably the checkpoint of another query.*NO_LONGER") as raised:
        plan(cluster).latest(start)
    assert raised.value.fix.startswith("check checkpointLocation")
    both = plan(cluster, subscribe="a,b").initial()
    with pytest.raises(DataLossError) as raised:
        plan(cluster).latest(both)
    assert "another query" not in str(raised.value)


@pytest.mark.parametrize(
    ("logs", "ids", "kind"),
    [
        (
            {A0: (0, 4), A1: (0, 9)},
            {},
            "OFFSETS_WENT_BACK: a-0: the query is at offset 8, but the log ends at offset 4",
        ),
        ({A0: (0, 9)}, {}, "PARTITIONS_GONE: a-1"),
        ({A0: (0, 9), A1: (0, 9)}, {"a": "new"}, "TOPIC_RECREATED: topic 'a'"),
        (
            {A0: (0, 9), A1: (0, 9), TopicPartition("a", 2): (3, 5)},
            {},
            "NEW_PARTITION_NOT_AT_ZERO: a-2: the partition is new, but starts at offset 3",
        ),
    ],
)
def test_a_data_loss_fails_the_query_or_is_logged(
    logs: dict[TopicPartition, tuple[int, int]], ids: dict[str, str], kind: str
) -> None:
    cluster = Cluster({A0: (0, 8), A1: (0, 9)})
    start = plan(cluster).initial()
    cluster.logs, cluster.ids_by_topic = logs, ids
    with pytest.raises(DataLossError, match=kind):
        plan(cluster).latest(start)
    lenient = plan(cluster, failOnDataLoss="false")
    end = lenient.latest(start)
    lenient.tasks(start, end)
    assert lenient.latest(end) == end


def test_the_checkpoint_of_another_cluster_is_named() -> None:
    cluster = Cluster({A0: (0, 8)})
    start = over_the_wire(plan(cluster).initial())
    other = Cluster({A0: (0, 2)}, ids_by_topic={"a": "new"}, cluster_id="cluster-2")
    with pytest.raises(DataLossError, match=r"of cluster 'cluster-1', .* 'cluster-2'") as caught:
        plan(other).latest(start)
    assert "TOPIC_RECREATED" in caught.value.message
    assert "kafka.bootstrap.servers" in caught.value.fix
    assert "failOnDataLoss" not in caught.value.fix
    for unknown in (None, "cluster-1"):
        other.cluster_id = unknown
        with pytest.raises(DataLossError, match=r"^\[KAFKA_EOS.DATA_LOSS\] TOPIC_RECREATED"):
            plan(other).latest(start)


def test_a_topic_that_the_user_unsubscribed_does_not_count_as_deleted() -> None:
    cluster = Cluster({A0: (0, 8), B0: (0, 9)})
    start = plan(cluster, subscribe="a,b").initial()
    cluster.logs[A0] = (0, 9)
    with pytest.raises(DataLossError, match="NO_LONGER_SUBSCRIBED: b-0"):
        plan(cluster).latest(start)
    lenient = plan(cluster, failOnDataLoss="false")
    end = lenient.latest(start)
    assert ranges(lenient.tasks(start, end)) == {(A0, 8, 9)}
    assert end.end == {A0: 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"startingOffsets": '{"a":{"0":1}}'},
            "'startingOffsets' must name exactly.*missing: a-1; unknown: none",
        ),
        ({"startingOffsets": '{"a":{"0":1,"1":2,"2":3}}'}, "missing: none; unknown: a-2"),
        (
            {"startingOffsetsByTimestamp": '{"a":{"0":1}}'},
            "'startingOffsetsByTimestamp' must name exactly.*missing: a-1",
        ),
        ({"startingTimestamp": "5"}, "'startingTimestamp' starts a-[01] at time 5 .* no record at or after"),
    ],
)
def test_a_start_that_the_log_cannot_satisfy_names_its_option(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message) as caught:
        plan(Cluster({A0: (0, 8), A1: (0, 9)}), **options).initial()
    assert caught.value.fix


def test_a_default_offset_applies_to_partitions_that_are_not_named() -> None:
    cluster = Cluster({A0: (2, 8), A1: (3, 9), B0: (1, 5)})
    source = plan(cluster, subscribe="a,b", startingOffsets='{"a":{"0":5},"*":"latest"}')
    assert source.initial().end == {A0: 5, A1: 9, B0: 5}


def test_a_recreated_topic_is_read_from_its_beginning_if_loss_is_accepted() -> None:
    cluster = Cluster({A0: (0, 5)})
    start = plan(cluster).initial()
    cluster.recreate("a", {A0: (0, 10)})
    source = plan(cluster, failOnDataLoss="false")
    end = over_the_wire(source.latest(start))
    assert ranges(source.tasks(start, end)) == {(A0, 0, 10)}


# -- topics that change between the planning of a batch and its replay


@pytest.mark.parametrize(
    ("logs", "loss"),
    [
        (
            {A0: (0, 20)},
            "TOPIC_RECREATED: topic 'a' was deleted and recreated after the batch was planned",
        ),
        ({}, "PARTITIONS_GONE: a-0: the topic was deleted after the batch was planned"),
    ],
    ids=["recreated", "deleted"],
)
def test_a_replay_reads_nothing_of_a_deleted_or_recreated_topic(
    logs: dict[TopicPartition, tuple[int, int]], loss: str
) -> None:
    cluster = Cluster({A0: (0, 5), B0: (0, 7)})
    options = {"subscribePattern": "a|b", "startingOffsets": "earliest"}
    first = plan(cluster, **options, failOnDataLoss="false")
    start = first.initial()
    middle = over_the_wire(first.latest(start))
    cluster.logs |= {A0: (0, 12), B0: (0, 9)}
    end = over_the_wire(first.latest(middle))
    cluster.recreate("a", logs)

    with pytest.raises(DataLossError, match=loss):
        plan(cluster, **options).tasks(middle, end)
    lenient = plan(cluster, **options, failOnDataLoss="false")
    assert ranges(lenient.tasks(middle, end)) == {(B0, 7, 9)}
    cluster.logs[B0] = (0, 10)
    after = over_the_wire(lenient.latest(end))
    expected = {(B0, 9, 10)} | {(tp, low, high) for tp, (low, high) in logs.items()}
    assert ranges(lenient.tasks(end, after)) == expected


def test_a_replay_of_batch_0_detects_a_recreated_topic() -> None:
    """It does so although Spark asks for the initial position again."""
    cluster = Cluster({A0: (0, 5)})
    first = plan(cluster, startingOffsets="earliest")
    end = over_the_wire(first.latest(first.initial()))
    cluster.recreate("a", {A0: (0, 9)})
    again = plan(cluster, startingOffsets="earliest")
    with pytest.raises(DataLossError, match="TOPIC_RECREATED"):
        again.tasks(again.initial(), end)
    lenient = plan(cluster, startingOffsets="earliest", failOnDataLoss="false")
    assert lenient.tasks(lenient.initial(), end) == []
    after = lenient.latest(end)
    assert ranges(lenient.tasks(end, after)) == {(A0, 0, 9)}


def test_a_topic_of_which_a_batch_reads_nothing_may_be_recreated() -> None:
    cluster = Cluster({A0: (0, 5), B0: (0, 7)})
    options = {"subscribePattern": "a|b", "startingOffsets": "earliest"}
    first = plan(cluster, **options)
    start = first.latest(first.initial())
    cluster.logs[B0] = (0, 8)
    end = first.latest(start)
    cluster.recreate("a", {A0: (0, 9)})
    assert ranges(plan(cluster, **options).tasks(start, end)) == {(B0, 7, 8)}


def test_an_empty_topic_may_be_recreated_before_the_replay_of_batch_0() -> None:
    cluster = Cluster({A0: (0, 5), B0: (0, 0)})
    options = {"subscribe": "a,b", "startingOffsets": "earliest"}
    first = plan(cluster, **options)
    end = over_the_wire(first.latest(first.initial()))
    cluster.recreate("b", {B0: (0, 9)})
    again = plan(cluster, **options)
    assert ranges(again.tasks(again.initial(), end)) == {(A0, 0, 5)}
    with pytest.raises(DataLossError, match="TOPIC_RECREATED: topic 'b'"):
        again.latest(end)


def test_only_a_replay_requests_topic_ids_and_only_once() -> None:
    cluster = Cluster({A0: (0, 5)})
    first = plan(cluster, startingOffsets="earliest")
    start = over_the_wire(first.initial())
    end = over_the_wire(first.latest(start))
    cluster.requests.clear()
    assert ranges(first.tasks(start, end)) == {(A0, 0, 5)}
    assert cluster.requests == []
    again = plan(cluster, startingOffsets="earliest")
    assert ranges(again.tasks(start, end)) == {(A0, 0, 5)}
    assert cluster.requests == ["existing_topic_ids"]
    assert again.tasks(end, end) == []
    assert cluster.requests == ["existing_topic_ids"], "a batch that reads nothing needs no ids"


def test_a_batch_of_sparks_own_source_has_no_ids_to_compare() -> None:
    cluster = Cluster({A0: (0, 5)})
    start, end = (SourcePosition.from_json(f'{{"a":{{"0":{at}}}}}') for at in (2, 5))
    assert ranges(plan(cluster).tasks(start, end)) == {(A0, 2, 5)}
    assert cluster.requests == []


def test_a_replay_of_a_topic_that_appeared_in_the_batch_starts_at_its_first_offset() -> None:
    """A replay starts at the topic's first offset even if records have expired; the task then reports it."""
    cluster = Cluster({A0: (0, 5), B0: (0, 7)})
    options = {"subscribePattern": "a|b", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    first = plan(cluster, **options)
    start = first.latest(first.initial())
    cluster.recreate("b", {})
    gone = over_the_wire(first.latest(start))
    assert gone.end == {A0: 5}
    cluster.recreate("b", {B0: (3, 9)})
    end = over_the_wire(first.latest(gone))
    planned = ranges(first.tasks(gone, end))
    assert planned == {(B0, 3, 9)}
    cluster.logs[B0] = (6, 20)
    cluster.requests.clear()
    assert ranges(plan(cluster, **options).tasks(gone, end)) == planned
    assert cluster.requests == ["existing_topic_ids"], "the first offset is in the position"


def test_a_replay_of_a_recreated_topic_starts_at_its_first_offset() -> None:
    cluster = Cluster({A0: (0, 5)})
    lenient = plan(cluster, failOnDataLoss="false")
    start = over_the_wire(lenient.latest(lenient.initial()))
    cluster.recreate("a", {A0: (2, 5)})
    end = over_the_wire(lenient.latest(start))
    cluster.logs[A0] = (4, 8)
    replays = plan(cluster, failOnDataLoss="false")
    assert ranges(replays.tasks(start, end)) == {(A0, 2, 5)}, "although both positions say 5"
    assert ranges(replays.tasks(end, replays.latest(end))) == {(A0, 5, 8)}


def test_an_accepted_loss_does_not_fail_the_replay_of_its_batch() -> None:
    cluster = Cluster({A0: (0, 5)})
    lenient = plan(cluster, startingOffsets="earliest", failOnDataLoss="false")
    start = over_the_wire(lenient.latest(lenient.initial()))
    cluster.recreate("a", {A0: (0, 3)})
    end = over_the_wire(lenient.latest(start))
    assert end.lossy
    assert ranges(plan(cluster).tasks(start, end)) == {(A0, 0, 3)}


def test_a_position_records_whether_the_user_accepts_data_loss() -> None:
    cluster = Cluster({A0: (0, 5)})
    for fail, lossy in (("true", False), ("false", True)):
        source = plan(cluster, startingOffsets="earliest", failOnDataLoss=fail)
        start = source.initial()
        end = source.latest(start)
        assert (start.lossy, end.lossy) == (lossy, lossy)


# -- limits and triggers


def test_available_now_ends_at_the_end_of_the_log_at_its_start() -> None:
    cluster = Cluster({A0: (0, 15)})
    source = plan(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    position = source.initial()
    source.stop_at_latest()
    ends = []
    for _ in range(5):
        position = source.latest(over_the_wire(position))
        cluster.logs[A0] = (0, cluster.logs[A0][1] + 10)
        ends.append(position.end[A0])
    assert ends == [6, 12, 15, 15, 15]


def test_available_now_does_not_wait_for_a_minimum() -> None:
    cluster = Cluster({A0: (0, 33)})
    source = plan(cluster, startingOffsets="earliest", minOffsetsPerTrigger="15", maxOffsetsPerTrigger="20")
    position = source.initial()
    source.stop_at_latest()
    position = source.latest(position)
    assert source.latest(position).end == {A0: 33}


def test_available_now_does_not_read_partitions_added_after_its_start() -> None:
    cluster = Cluster({A0: (0, 3)})
    source = plan(cluster, startingOffsets="earliest")
    start = source.initial()
    source.stop_at_latest()
    cluster.logs[A1] = (0, 9)
    end = source.latest(start)
    assert ranges(source.tasks(start, end)) == {(A0, 0, 3)}
    assert source.latest(end) == end


def test_a_batch_below_the_minimum_waits_for_max_trigger_delay() -> None:
    cluster = Cluster({A0: (0, 6)})
    clock = Clock()
    limits = {"minOffsetsPerTrigger": "15", "maxTriggerDelay": "50s"}
    source = plan(cluster, clock=clock, startingOffsets="earliest", **limits)
    first = source.latest(source.initial())
    assert first.end == {A0: 6}
    cluster.logs[A0] = (0, 12)
    clock.advance(49)
    assert source.latest(first) == first
    clock.advance(1)
    second = source.latest(first)
    assert second.end == {A0: 12}
    cluster.logs[A0] = (0, 40)
    assert source.latest(second).end == {A0: 40}


def test_trigger_once_ignores_the_limit_of_a_batch() -> None:
    cluster = Cluster({A0: (0, 33)})
    source = plan(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="5")
    assert source.latest(source.initial(), once=True).end == {A0: 33}


cluster_steps = st.lists(st.tuples(st.sampled_from([A0, A1, B0]), st.integers(0, 9)), min_size=1, max_size=10)


@given(cluster_steps, st.sampled_from([None, "1", "7"]), st.data())
@settings(deadline=None)
def test_each_offset_is_planned_in_exactly_one_batch(
    steps: list[tuple[TopicPartition, int]], limit: str | None, data: st.DataObject
) -> None:
    """This holds with growing logs, new partitions, limits and restarts."""
    cluster = Cluster({A0: (0, 0)})
    options = {"subscribePattern": "a|b", "startingOffsets": "earliest"}
    if limit:
        options["maxOffsetsPerTrigger"] = limit
    source = plan(cluster, **options)
    position = over_the_wire(source.initial())
    seen: dict[TopicPartition, int] = {}
    for tp, more in [*steps, *[(A0, 0)] * 90]:
        low, high = cluster.logs.get(tp, (0, 0))
        cluster.logs[tp] = (low, high + more)
        if data.draw(st.booleans()) if more else False:
            source = plan(cluster, **options)
        end = over_the_wire(source.latest(position))
        planned = ranges(source.tasks(position, end))
        assert ranges(plan(cluster, **options).tasks(position, end)) == planned
        for found, start, past in sorted(planned):
            assert start == seen.get(found, 0)
            seen[found] = past
        position = end
    assert seen == {tp: high for tp, (_, high) in cluster.logs.items() if high}


# -- batch reads


def test_a_batch_read_plans_the_ranges_of_its_options() -> None:
    cluster = Cluster({A0: (2, 10), A1: (0, 0)})
    assert plan(cluster, streaming=False).batch() == [OffsetRange(A0, 2, 10)]
    source = plan(
        cluster, streaming=False, startingOffsets='{"a":{"0":3,"1":-2}}', endingOffsets='{"a":{"0":5,"1":-1}}'
    )
    assert source.batch() == [OffsetRange(A0, 3, 5)]


def test_a_batch_read_that_starts_past_its_end_is_refused() -> None:
    cluster = Cluster({A0: (0, 10)})
    options = {"startingOffsets": '{"a":{"0":12}}'}
    with pytest.raises(InvalidOptionError, match="a-0 starts at offset 12, which is after its end offset 10"):
        plan(cluster, streaming=False, **options).batch()
    assert plan(cluster, streaming=False, failOnDataLoss="false", **options).batch() == []


# -- Spark's classes


def test_readers_are_pickled_without_clients() -> None:
    for reader in (stream_reader(read_options()), batch_reader(read_options(streaming=False))):
        again = pickle.loads(pickle.dumps(reader))
        assert type(again) is type(reader)
        assert again._task_read == reader._task_read


def test_a_reader_has_push_filters_only_with_its_option() -> None:
    """Spark refuses a reader with pushFilters while its configuration is off."""
    plain = batch_reader(read_options(streaming=False))
    pushing = batch_reader(read_options(streaming=False, pushFilters="true"))
    assert "pushFilters" not in type(plain).__dict__
    assert "pushFilters" in type(pushing).__dict__


def test_before_pyspark_4_2_the_start_is_fixed_before_the_end() -> None:
    """PySpark 4.0 asks a new query's latestOffset before its initialOffset."""
    cluster = Cluster({A0: (0, 10)})

    def reader() -> _UnlimitedStreamReader:
        made = _UnlimitedStreamReader(read_options())
        made._opened = Planning(SourcePlan(made._options, cluster), cluster)
        return made

    new = reader()
    end = new.latestOffset()
    cluster.logs[A0] = (0, 12)
    start = new.initialOffset()
    assert SourcePosition.from_dict(start).end == {A0: 10}
    new.partitions(start, end)
    second = new.latestOffset()
    assert ranges(each.ranges for each in new.partitions(end, second)) == {(A0, 10, 12)}

    cluster.logs[A0] = (0, 20)
    replaying = reader()
    assert replaying.partitions(end, end) == []
    first = {**second, "@": end["@"]}  # as if one batch had read everything
    again = replaying.partitions(replaying.initialOffset(), first)
    assert ranges(each.ranges for each in again) == {(A0, 10, 12)}
    restarted = reader()
    restarted.partitions(end, second)
    third = restarted.latestOffset()
    assert ranges(each.ranges for each in restarted.partitions(second, third)) == {(A0, 12, 20)}


def test_the_journal_is_read_ahead_only_for_a_spark_that_asks_for_the_newest_offsets() -> None:
    """Before PySpark 4.2, nobody would take the result."""
    cluster, calls = Cluster({A0: (0, 10)}), list[str]()

    class Observer:
        """Records the calls about the journal, and accepts all others."""

        asking = staticmethod(nullcontext)

        def planned(self, *_arguments: object, **_named: object) -> None:
            return

        def look_up_newest_batch(self) -> None:
            calls.append("begun")

        def newest_batch(self) -> None:
            calls.append("taken")

    planning = Planning(SourcePlan(read_options(), cluster), cluster, cast(Any, Observer()))
    planning._open_transactions = cast(Any, SimpleNamespace(hidden=lambda *_a, **_n: {}))
    position = planning.latest(planning.initial())
    planning.latest(position)
    assert calls == []
    planning.available()
    planning.latest(position)
    assert calls == ["taken", "begun"]
