"""Tasks read no record of a log that was cut and refilled after their batch was planned (KIP-320)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.kafka import fetch as wire_consumer
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.error_codes import KafkaError
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read import fetch
from kafka_eos_source.runtime.deadline import Deadline
from tests.kafka.consumer_kit import conf, read, spoiled
from tests.support.fetched_log import Log, Record
from tests.support.simulated_kafka import Fault, Partition, SimulatedKafka

TP = TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fetch, "SHORT_LOG_GRACE_SECONDS", -1.0)
    yield
    POOL.close()


@pytest.fixture(params=[11, 12])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The newest version of Fetch; from 12 on, brokers report that a log diverges."""
    monkeypatch.setattr(wire_consumer, "HIGHEST", request.param)
    return int(request.param)


def rows(log: Log, start: int, end: int, epoch: int, *, fails: bool = True) -> list[tuple[int, bytes | None]]:
    with SimulatedKafka({"t": [log]}) as cluster:
        try:
            return read(cluster, [OffsetRange(TP, start, end, epoch)], fail_on_data_loss=fails).get(
                ("t", 0), []
            )
        finally:
            POOL.close()


def appended(log: Log, batches: int, numbers: Iterator[int], size: int = 2) -> None:
    for _ in range(batches):
        log.append([Record(0, None, b"%d" % next(numbers)) for _ in range(size)])


def refilled() -> Log:
    """Returns a log that had 100 records in epoch 5, was cut at 60, and has 140 records now."""
    log, numbers = Log(), count()
    log.elect(5)
    appended(log, 50, numbers)
    log.elect(7, end=60)
    appended(log, 40, numbers)
    return log


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("start", [0, 50, 60, 80])
def test_a_task_fails_if_the_log_was_cut_after_its_batch_was_planned(start: int) -> None:
    with pytest.raises(
        DataLossError, match=r"to 99 of t-0 cannot be read: the log was cut at offset"
    ) as caught:
        rows(refilled(), start, 100, 5)
    assert f"offsets {max(start, 60)} to 99" in caught.value.message
    assert "cut at offset 60" in caught.value.message


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("knows", [True, False])
def test_later_epochs_in_record_batches_alone_are_no_loss(knows: bool) -> None:
    """A service that only resembles Kafka names other epochs, and may not know the request for their ends."""
    log = Log()
    log.elect(9)
    appended(log, 5, count())
    log.epochs = [(3, 0)]
    with SimulatedKafka({"t": [log]}) as cluster:
        if not knows:
            cluster.unsupported = {"OffsetForLeaderEpoch"}
        found = read(cluster, [OffsetRange(TP, 0, 10, 3)])
    assert [at for at, _ in found["t", 0]] == list(range(10))
    assert cluster.received["OffsetForLeaderEpoch"] == int(knows)


@pytest.mark.usefixtures("version")
def test_a_task_that_accepts_the_loss_leaves_the_new_records_to_the_next_batch() -> None:
    """The next batch begins at the cut. A record of this task from behind it would then be read twice."""
    assert [at for at, _ in rows(refilled(), 50, 100, 5, fails=False)] == list(range(50, 60))
    assert rows(refilled(), 80, 100, 5, fails=False) == []


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("is_found", [True, False], ids=["found", "taken-from-an-earlier-answer"])
def test_a_cut_is_noticed_behind_a_damaged_batch_that_is_passed_over(is_found: bool) -> None:
    """The log is cut after the first answer. The damage may hide what follows from the broker, too."""
    before, after = Log(), Log()
    for log, was_cut in ((before, False), (after, True)):
        numbers = count()
        log.elect(5)
        appended(log, 50, numbers)
        if was_cut:
            log.elect(7, end=60)
            appended(log, 40, numbers)
        spoiled(log, {15: "decoded"} if is_found else {28: "length", 29: "record"})
    with SimulatedKafka({"t": [before]}) as cluster:

        def cut(tp: Partition, records: bytes) -> bytes:
            cluster.logs[tp] = after
            return records

        cluster.spoil = cut
        cluster.hides = lambda _, offset: not is_found and 56 <= offset < 90
        with pytest.raises(DataLossError, match="the log was cut at offset 60"):
            read(cluster, [OffsetRange(TP, 0, 100, 5)], skip={TP: (30, 56, 58)})


def test_a_cut_is_noticed_although_compaction_removed_what_took_the_offsets() -> None:
    log = refilled()
    log.batches = [each for each in log.batches if each.first >= 100]
    with pytest.raises(DataLossError, match="cut at offset 60"):
        rows(log, 80, 100, 5)


def test_a_batch_planned_after_the_cut_is_read() -> None:
    assert [at for at, _ in rows(refilled(), 60, 140, 7)] == list(range(60, 140))


def test_an_epoch_without_records_that_the_new_leader_lacks_costs_one_more_fetch() -> None:
    """The broker reports that it diverges: the log of an idle partition whose leader changed often."""
    log = Log()
    appended(log, 5, count())
    log.elect(3)
    log.elect(5, forgets=True)
    with SimulatedKafka({"t": [log]}) as cluster:
        found = read(cluster, [OffsetRange(TP, 0, 10, 3)])
    assert [at for at, _ in found["t", 0]] == list(range(10))
    assert (cluster.received["Fetch"], cluster.received["OffsetForLeaderEpoch"]) == (2, 0)


def test_a_leader_that_refuses_the_epoch_is_asked_without_it() -> None:
    """It does not know the epoch, and answers OFFSET_OUT_OF_RANGE although the offset is in its log."""
    log = Log()
    appended(log, 5, count())
    with SimulatedKafka({"t": [log]}) as cluster:
        assert len(read(cluster, [OffsetRange(TP, 2, 10, 3)])["t", 0]) == 8


def test_a_leader_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_consumer, "_CONNECT_SECONDS", 0.3)
    with SimulatedKafka({"t": [refilled()]}) as cluster:
        asked = iter(["silent", "silent", "cut"])

        def fault(kind: str) -> Fault | None:
            return Fault(next(asked, "delay")) if kind == "OffsetForLeaderEpoch" else None

        cluster.fault = fault
        with pytest.raises(DataLossError, match="the log was cut at offset 60"):
            read(cluster, [OffsetRange(TP, 0, 100, 5)])
        assert cluster.received["OffsetForLeaderEpoch"] > 3


def test_the_ends_of_epochs_are_asked_of_the_leaders() -> None:
    with SimulatedKafka({"t": [refilled(), Log()]}, brokers=2) as cluster:
        wire = Cluster(conf(cluster))
        try:
            other = TopicPartition("t", 1)
            deadline = Deadline.after_seconds(30)
            assert wire.epoch_ends({TP: 5, other: 0}, deadline) == {TP: 60, other: 0}
            assert wire.epoch_ends({TP: 7}, deadline) == {TP: 140}
            assert wire.epoch_ends({TP: 9}, deadline) == {TP: -1}
            with pytest.raises(KafkaError, match="UNKNOWN_LEADER_EPOCH"):
                wire.epoch_ends({TP: 5}, deadline, {TP: 8})  # this leader is an old one
        finally:
            wire.close()
    assert cluster.received["OffsetForLeaderEpoch"] == 5


@st.composite
def lineages(draw: st.DrawFn) -> tuple[Log, Log, int, int]:
    """Returns a log when a batch was planned, the log when it is read, and the offsets of the batch."""
    numbers = count()
    log, planned, epoch = Log(), None, 0
    start = end = 0
    steps = draw(st.lists(st.sampled_from(["append", "clean", "unclean", "plan"]), max_size=12))
    for step in [*steps, "plan" if "plan" not in steps else "append"]:
        if step == "append":
            appended(log, draw(st.integers(1, 3)), numbers, draw(st.integers(1, 3)))
        elif step == "plan" and planned is None:
            planned = copy.deepcopy(log)
            end = draw(st.sampled_from([0, *(each.last + 1 for each in log.batches)]))
            start = draw(st.integers(0, end))
        elif step in ("clean", "unclean"):
            epoch += draw(st.integers(1, 3))
            firsts = [each.first for each in log.batches]
            cut = draw(st.sampled_from(firsts)) if step == "unclean" and firsts else None
            log.elect(epoch, end=cut, forgets=draw(st.booleans()))
    assert planned is not None
    return planned, log, start, end


@given(lineages(), st.sampled_from([11, 12]))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exactly_what_was_planned_is_read_or_a_loss_is_reported(
    lineage: tuple[Log, Log, int, int], version: int
) -> None:
    planned, log, start, end = lineage
    epoch = planned.epochs[-1][0]
    before = [(each.offset, each.value) for each in planned.visible(start, end, committed=True)]
    is_whole = before == [(each.offset, each.value) for each in log.visible(start, end, committed=True)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wire_consumer, "HIGHEST", version)
        if is_whole:
            assert rows(log, start, end, epoch) == before
        else:
            with pytest.raises(DataLossError):
                rows(log, start, end, epoch)
            found = rows(log, start, end, epoch, fails=False)
            assert found == before[: len(found)]
