"""A log that was cut below the query's position, and filled again, is noticed by its leader epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import SourcePosition
from tests.plan.source_cluster import A0, A1, Cluster, over_the_wire, plan

EARLIEST = {"startingOffsets": "earliest"}
LOSSY = {**EARLIEST, "failOnDataLoss": "false"}


def refilled(**options: str) -> tuple[Cluster, SourcePosition]:
    """Returns a cluster and a query at offset 100, epoch 5; the log was cut at 60 and refilled to 140."""
    cluster = Cluster({A0: (0, 100)}, epochs={A0: [(3, 0), (5, 10)]})
    source = plan(cluster, **(options or EARLIEST))
    position = over_the_wire(source.latest(source.initial()))
    assert (position.end, position.epochs) == ({A0: 100}, {A0: 5})
    cluster.elect(A0, 7, end=60)
    cluster.append(A0, 80)
    return cluster, position


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_log_that_was_cut_and_refilled_is_a_loss_that_names_both_offsets(is_restarted: bool) -> None:
    cluster, position = refilled()
    source = plan(cluster, **EARLIEST)
    if is_restarted:
        source = plan(cluster, **EARLIEST)
    with pytest.raises(
        DataLossError, match=r"LOG_WAS_CUT: a-0: .* offset 100, .* cut at offset 60"
    ) as caught:
        source.latest(position)
    assert "where the log was cut" in caught.value.fix
    with pytest.raises(DataLossError):
        source.latest(position)


@pytest.mark.parametrize("limit", [None, "30", "40"])
def test_a_query_that_accepts_the_loss_reads_every_record_from_the_cut_on(limit: str | None) -> None:
    """Also if a limit lets the batch end at the very offset at which it was: the epoch tells them apart."""
    options = {**LOSSY, **({"maxOffsetsPerTrigger": limit} if limit else {})}
    cluster, position = refilled(**LOSSY)
    source, found = plan(cluster, **options), list[OffsetRange]()
    while (end := over_the_wire(source.latest(position))) != position:
        planned = source.ranges(position, end)
        assert plan(cluster, **options).ranges(position, end) == planned, "the same when Spark repeats it"
        found += planned
        position = end
    assert [(each.start, each.epoch) for each in found] == [
        (each, 7) for each in range(60, 140, int(limit or 80))
    ]
    assert found[-1].end == 140
    assert position.end == {A0: 140}


def test_a_log_that_was_cut_and_not_refilled_is_read_from_the_cut_on() -> None:
    cluster, position = refilled(**LOSSY)
    cluster.logs[A0] = (0, 60)
    source = plan(cluster, **LOSSY)
    end = over_the_wire(source.latest(position))
    assert (end.end, end.epochs) == ({A0: 60}, {A0: 7})
    cluster.append(A0, 5)
    after = source.latest(end)
    assert source.ranges(end, after) == [OffsetRange(A0, 60, 65, 7)]


def test_without_epochs_in_the_checkpoint_nothing_is_asked() -> None:
    cluster, _ = refilled()
    source = plan(cluster, **EARLIEST)
    end = source.latest(SourcePosition.from_json('{"a":{"0":100}}'))
    assert "epoch_ends" not in cluster.requests
    assert end.epochs == {A0: 7}, "known from now on"


def test_brokers_without_epochs_are_not_asked() -> None:
    cluster = Cluster({A0: (0, 10)})
    source = plan(cluster, **EARLIEST)
    start = source.initial()
    assert source.latest(start).epochs == {}
    assert '"epochs"' not in source.latest(start).to_json()


def test_a_leader_is_asked_once_after_each_change() -> None:
    """Neither in the steady state, nor at a start without a change; an idle partition keeps its position."""
    cluster = Cluster({A0: (0, 10), A1: (0, 0)}, epochs={A0: [(0, 0)], A1: [(0, 0)]})
    source = plan(cluster, **EARLIEST)
    position = over_the_wire(source.latest(source.initial()))
    for epoch in (4, 9):
        cluster.elect(A0, epoch, forgets=True)
        cluster.elect(A1, epoch, forgets=True)
        for run in (source, plan(cluster, **EARLIEST)):
            cluster.requests.clear()
            for _ in range(3):
                assert run.latest(position).to_json() == position.to_json(), "a new leader starts no batch"
            assert cluster.requests.count("epoch_ends") == 1
    cluster.append(A0, 1)
    position = over_the_wire(source.latest(position))
    assert position.epochs == {A0: 9, A1: 0}
    cluster.requests.clear()
    assert plan(cluster, assign='{"a":[0]}', **EARLIEST).latest(
        SourcePosition({A0: 11}, None, "cluster-1", {"a": "id-a"}, epochs={A0: 9})
    ).end == {A0: 11}
    assert "epoch_ends" not in cluster.requests


def test_a_recreated_topic_is_not_a_cut_log() -> None:
    cluster, position = refilled()
    cluster.recreate("a", {A0: (0, 3)})
    cluster.epochs[A0] = [(0, 0)]
    with pytest.raises(DataLossError, match="TOPIC_RECREATED") as caught:
        plan(cluster, **EARLIEST).latest(position)
    assert "LOG_WAS_CUT" not in caught.value.message
    assert "epoch_ends" not in cluster.requests


def test_a_leader_that_does_not_know_the_epoch_proves_nothing() -> None:
    """It may be an old leader that is cut off from the others; the tasks ask the leader that they find."""
    cluster, position = refilled()
    cluster.epochs[A0] = [(2, 0)]
    assert plan(cluster, **EARLIEST).latest(position).end == {A0: 140}


@pytest.mark.parametrize("epoch", [5, -1])
def test_a_query_that_starts_at_committed_offsets_starts_with_their_epochs(epoch: int) -> None:
    cluster, _ = refilled()
    cluster.commit("g", {A0: 100})
    cluster.groups["g"][A0] = type(cluster.groups["g"][A0])(A0, 100, "", epoch)
    source = plan(cluster, startingOffsets="group", **{"kafka.group.id": "g"})
    begun = over_the_wire(source.initial())
    assert (begun.end, begun.epochs) == ({A0: 100}, {A0: epoch if epoch >= 0 else 7})
    if epoch >= 0:
        with pytest.raises(DataLossError, match="LOG_WAS_CUT"):
            source.latest(begun)
    else:
        assert source.latest(begun).end == {A0: 140}


def test_a_batch_read_names_the_epoch_of_its_end() -> None:
    cluster, _ = refilled()
    assert plan(cluster, streaming=False).batch() == [OffsetRange(A0, 0, 140, 7)]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Returns what happens to a partition; an unclean leader's log is shorter."""
    kinds = st.sampled_from(["append", "append", "clean", "clean", "unclean", "batch", "restart"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 6)), max_size=25))


@given(histories(), st.booleans())
def test_a_loss_is_reported_if_and_only_if_records_that_were_read_are_gone(
    history: list[tuple[str, int]], forgets: bool
) -> None:
    cluster = Cluster({A0: (0, 0)}, epochs={A0: [(0, 0)]})
    log: list[int] = []  # a number of its own for each record
    read: list[int] = []
    source, position, epoch = _begun(cluster)
    made = 0
    for kind, number in [*history, ("batch", 0)]:
        if kind == "append":
            log += range(made, made + number)
            made += number
            cluster.append(A0, number)
        elif kind in ("clean", "unclean"):
            epoch += 1 + number
            end = max(0, len(log) - number) if kind == "unclean" else len(log)
            del log[end:]
            cluster.elect(A0, epoch, end=end, forgets=forgets)
        elif kind == "restart":
            source = plan(cluster, **EARLIEST)
        else:
            is_lost = read != log[: len(read)]
            try:
                end_of_batch = over_the_wire(source.latest(position))
            except DataLossError:
                assert is_lost
                return
            assert not is_lost
            ranges = source.ranges(position, end_of_batch)
            read += [record for each in ranges for record in log[each.start : each.end]]
            position = end_of_batch
            assert read == log


def _begun(cluster: Cluster) -> tuple[SourcePlan, SourcePosition, int]:
    source = plan(cluster, **EARLIEST)
    return source, over_the_wire(source.initial()), 0


def test_a_partition_that_was_never_written_keeps_its_epoch() -> None:
    tp = TopicPartition("a", 1)
    cluster = Cluster({A0: (0, 1), tp: (0, 0)}, epochs={A0: [(0, 0)], tp: [(0, 0)]})
    source = plan(cluster, **EARLIEST)
    position = over_the_wire(source.latest(source.initial()))
    cluster.elect(tp, 5, forgets=True)
    assert cluster.epochs[tp] == [(5, 0)]
    cluster.append(tp, 2)
    end = over_the_wire(source.latest(position))
    assert source.ranges(position, end)[1] == OffsetRange(tp, 0, 2, 5)
