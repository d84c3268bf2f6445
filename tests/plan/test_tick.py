"""An idle source causes an empty micro-batch in time, so that the query's token does not expire."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.datasource.reader import _UnlimitedStreamReader
from kafka_eos_source.errors import AuthorizationError, UnavailableError
from kafka_eos_source.plan.planner import Planning
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import SourcePosition
from tests.plan.source_cluster import A0, A_WEEK_MS, Clock, Cluster, over_the_wire, plan, read_options

MINUTE, HOUR = 60.0, 3600.0


class Run:
    """One run of a query; like Spark, it keeps asking the source for new data."""

    def __init__(self, cluster: Cluster, position: SourcePosition | None = None, **options: str) -> None:
        self.clock = Clock()
        self.source = plan(cluster, clock=self.clock, **options)
        self.position = self.source.initial() if position is None else position
        self.batches: list[SourcePosition] = []
        self.ask()

    def ask(self) -> bool:
        """One trigger. Returns whether the source caused a batch."""
        end = over_the_wire(self.source.latest(over_the_wire(self.position)))
        if end == self.position:
            return False
        if end.tick:
            assert end.end == self.position.end
            assert self.source.tasks(self.position, end) == []
        self.position = end
        self.batches.append(end)
        return True

    def seconds_until_batch(self, at_most: float = 10 * HOUR) -> float | None:
        """Triggers once a second until the source causes a batch; None = it did not."""
        began = self.clock.seconds
        while self.clock.seconds - began < at_most:
            self.clock.advance(1)
            if self.ask():
                return self.clock.seconds - began
        return None


def test_an_idle_source_renews_the_token_a_minute_after_the_start_and_then_every_hour() -> None:
    run = Run(Cluster({A0: (0, 5)}))
    assert [run.seconds_until_batch() for _ in range(3)] == [MINUTE, HOUR, HOUR]
    assert [each.tick for each in run.batches] == [1, 2, 3]
    assert {each.end[A0] for each in run.batches} == {5}


def test_a_batch_with_records_starts_the_interval_again() -> None:
    cluster = Cluster({A0: (0, 5)})
    run = Run(cluster)
    run.clock.advance(50)
    cluster.logs[A0] = (0, 6)
    assert run.ask()
    assert run.position.tick == 0
    assert run.seconds_until_batch() == HOUR
    assert run.position.tick == 1


def test_a_query_that_reads_all_the_time_never_renews_the_token() -> None:
    cluster = Cluster({A0: (0, 5)})
    run = Run(cluster)
    for _ in range(5):
        run.clock.advance(50 * MINUTE)
        cluster.logs[A0] = (0, cluster.logs[A0][1] + 1)
        assert run.ask()
    assert {each.tick for each in run.batches} == {0}
    assert "offsets_retention_ms" not in cluster.requests


def test_the_renewal_counter_continues_after_a_restart() -> None:
    """Spark starts no batch for an equal position."""
    cluster = Cluster({A0: (0, 5)})
    before = Run(cluster)
    before.seconds_until_batch()
    after = Run(cluster, before.position)
    assert after.seconds_until_batch() == MINUTE
    assert after.position.tick == 2


def test_the_first_request_of_a_run_never_causes_a_renewal() -> None:
    """With Trigger.Once it is the only request of the run."""
    cluster = Cluster({A0: (0, 5)})
    clock = Clock()
    source = plan(cluster, clock=clock)
    start = source.initial()
    clock.advance(10 * HOUR)
    assert source.latest(start) == start


def test_available_now_and_once_never_renew_the_token() -> None:
    run = Run(Cluster({A0: (0, 5)}))
    run.source.stop_at_latest()
    assert run.seconds_until_batch(3 * HOUR) is None
    clock = Clock()
    source = plan(Cluster({A0: (0, 5)}), clock=clock)
    start = source.initial()
    for _ in range(3):
        clock.advance(HOUR)
        assert source.latest(start, once=True) == start


def test_an_interval_of_zero_disables_renewals() -> None:
    cluster = Cluster({A0: (0, 5)})
    run = Run(cluster, **{"token.renewal.interval.ms": "0"})
    assert run.seconds_until_batch(3 * HOUR) is None
    assert cluster.requests.count("offsets_retention_ms") == 1, "for the alarm before the token expires"


def test_an_interval_below_a_minute_counts_from_the_start_too() -> None:
    run = Run(Cluster({A0: (0, 5)}), **{"token.renewal.interval.ms": "7000"})
    assert [run.seconds_until_batch() for _ in range(2)] == [7, 7]


@pytest.mark.parametrize(("minutes", "expected"), [(60, 15 * MINUTE), (1, 15), (4 * 60, HOUR), (600, HOUR)])
def test_a_quarter_of_the_retention_is_the_longest_interval(minutes: int, expected: float) -> None:
    cluster = Cluster({A0: (0, 5)}, retention=minutes * 60_000)
    run = Run(cluster)
    assert run.seconds_until_batch() == min(expected, MINUTE)
    assert run.seconds_until_batch() == expected
    assert cluster.requests.count("offsets_retention_ms") == 1


@pytest.mark.parametrize("refusal", [AuthorizationError("no rights"), UnavailableError("no answer")])
def test_the_option_sets_the_interval_if_the_retention_is_unknown(
    refusal: AuthorizationError | UnavailableError, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster({A0: (0, 5)}, retention=refusal)
    run = Run(cluster)
    with caplog.at_level(logging.INFO):
        assert [run.seconds_until_batch() for _ in range(2)] == [MINUTE, HOUR]
    assert caplog.text.count(refusal.message) == 1
    assert cluster.requests.count("offsets_retention_ms") == 1


def test_renewals_and_records_that_wait_for_a_minimum_do_not_delay_each_other() -> None:
    cluster = Cluster({A0: (0, 5)})
    limits = {"minOffsetsPerTrigger": "100", "maxTriggerDelay": "90m"}
    run = Run(cluster, startingOffsets="earliest", **limits)
    assert run.position.end == {A0: 5}, "the first batch never waits"
    cluster.logs[A0] = (0, 8)
    assert run.seconds_until_batch() == HOUR
    assert (run.position.tick, run.position.end) == (1, {A0: 5})
    assert run.seconds_until_batch() == HOUR / 2
    assert (run.position.tick, run.position.end) == (0, {A0: 8})


def test_a_renewal_keeps_the_start_of_batch_0_and_no_start_of_the_batch_before() -> None:
    """A renewal does not repeat the starts that the batch before it recorded; batch 0 keeps its own."""
    cluster = Cluster({A0: (0, 5)})
    run = Run(cluster)
    run.seconds_until_batch()
    assert run.position.start == {A0: 5}
    cluster.logs[A0] = (0, 9)
    assert run.ask()
    again = plan(cluster)
    assert {(each[0].start, each[0].end) for each in again.tasks(again.initial(), run.position)} == {(5, 9)}
    run.seconds_until_batch()
    assert run.position.start is None


def test_a_source_without_partitions_renews_the_token() -> None:
    run = Run(Cluster({}), subscribePattern="^a")
    assert run.seconds_until_batch() == MINUTE
    assert run.position.to_json() == '{"@":{"start":{},"cluster":"cluster-1","tick":1}}'


def test_before_pyspark_4_2_a_source_renews_the_token() -> None:
    """There, the source learns where a batch starts when it plans the tasks."""
    clock = Clock()
    reader = _UnlimitedStreamReader(read_options())
    cluster = Cluster({A0: (0, 5)})
    reader._opened = Planning(SourcePlan(reader._options, cluster, clock), cluster)  # type: ignore[arg-type]
    position = reader.latestOffset()
    assert reader.partitions(reader.initialOffset(), position) == []
    ticks = []
    for _ in range(2 * 3600):
        clock.advance(1)
        end = reader.latestOffset()
        if end != position:
            assert reader.partitions(position, end) == []
            position = end
            ticks.append(end["@"]["tick"])
    assert ticks == [1, 2]
    restarted = _UnlimitedStreamReader(read_options())
    restarted._opened = Planning(SourcePlan(restarted._options, cluster, clock), cluster)  # type: ignore[arg-type]
    assert restarted.partitions(position, position) == []
    assert restarted.latestOffset() == position
    clock.advance(MINUTE)
    assert restarted.latestOffset()["@"]["tick"] == 3


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 2)), max_size=60),
    st.sampled_from([0, 1000, 300_000, 3_600_000]),
    st.sampled_from([A_WEEK_MS, 60_000, 3_600_000]),
)
@settings(deadline=None)
def test_renewals_never_change_an_offset_and_are_in_time(
    steps: list[tuple[int, int]], interval_ms: int, retention_ms: int
) -> None:
    cluster = Cluster({A0: (0, 0)}, retention=retention_ms)
    run = Run(cluster, startingOffsets="earliest", **{"token.renewal.interval.ms": str(interval_ms)})
    longest = min(interval_ms, retention_ms // 4) / 1000
    idle_since = run.clock.seconds
    for seconds, records in steps:
        run.clock.advance(seconds)
        cluster.logs[A0] = (0, cluster.logs[A0][1] + records)
        caused = run.ask()
        assert run.position.end == {A0: cluster.logs[A0][1]}
        assert caused or not interval_ms or run.clock.seconds - idle_since < longest
        assert interval_ms or caused == bool(records)
        if caused:
            assert bool(run.position.tick) == (not records)
            idle_since = run.clock.seconds
