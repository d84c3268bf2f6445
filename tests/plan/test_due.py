"""An idle source runs the operators when something in their state is due, and never in a hot loop."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.datasource.reader import _UnlimitedStreamReader
from kafka_eos_source.errors import AuthorizationError, KafkaEosError, UnavailableError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.plan import due
from kafka_eos_source.plan.due import LONGEST_PAUSE_MS, CommittedDue, DueBatches
from kafka_eos_source.plan.planner import Planning
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.token import Due, Token
from tests.plan.source_cluster import A0, B0, Clock, Cluster, over_the_wire, read_options

APPLICATION = "app"
TOKEN = Token(APPLICATION, "query", "run", 7, 7, "aa", "bb", 100)
START_MS = 1_760_000_000_000
ANCHOR = TopicPartition("out", 0)
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(due, "_nothing_due", {})


class Wall(Clock):
    """A clock that also tells the time of day."""

    def now_ms(self) -> int:
        return START_MS + round((self.seconds - 1000.0) * 1000)


# -- the decision --------------------------------------------------------------------------------


@dataclass
class World:
    """A query with timers on one shard. The clock of the shard's host may differ from the driver's.

    Attributes:
        timers: times of the timers that have not fired, by the clock of the shard.
        shard_ahead_ms: how far the clock of the shard's host is ahead of the driver's; negative = behind.
        begins_after_ms: how long after the plan of a batch its tasks read the clock.
        batch_ms: how long a batch takes.
        interval_ms: option ``timer.batch.interval.ms``.
    """

    timers: set[int]
    shard_ahead_ms: int = 0
    begins_after_ms: int = 0
    batch_ms: int = 0
    interval_ms: int = 1000
    stuck_at_ms: int | None = None
    clock: Wall = field(default_factory=Wall)
    fired: dict[int, int] = field(default_factory=dict)
    ticks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.due: Due | None = None
        self.decision = DueBatches(self.interval_ms, lambda: self.due, self.clock, self.clock.now_ms)
        self.batch()

    def batch(self) -> None:
        """Runs a batch: fires what is due, and commits when the next timer is due."""
        self.clock.advance(self.begins_after_ms / 1000)
        shard_ms = self.clock.now_ms() + self.shard_ahead_ms
        if self.stuck_at_ms is not None:
            shard_ms = min(shard_ms, self.stuck_at_ms)
        for timer in sorted(self.timers):
            if timer <= shard_ms:
                self.timers.remove(timer)
                self.fired[timer] = self.clock.now_ms()
        self.due = Due(min(self.timers), shard_ms) if self.timers else None
        self.clock.advance((self.batch_ms - self.begins_after_ms) / 1000)

    def run(self, for_ms: int, trigger_ms: int) -> None:
        """Asks the idle source again and again, as Spark does."""
        until = self.clock.now_ms() + for_ms
        while self.clock.now_ms() < until:
            if self.decision.is_due():
                self.ticks.append(self.clock.now_ms())
                self.decision.batch_caused()
                self.batch()
            self.clock.advance(trigger_ms / 1000)


def test_a_query_without_timers_causes_no_batch() -> None:
    world = World(set())
    world.run(HOUR_MS, 1000)
    assert world.ticks == []


def test_a_timer_fires_within_a_trigger_interval() -> None:
    world = World({START_MS + 12_345})
    world.run(60_000, 100)
    assert world.ticks == [START_MS + 12_400]
    assert world.fired == {START_MS + 12_345: START_MS + 12_400}


def test_timers_that_are_due_one_by_one_share_batches() -> None:
    world = World({START_MS + 10_000 + each for each in range(0, 5000, 10)})
    world.run(60_000, 10)
    assert [each - START_MS for each in world.ticks] == [10_000, 11_000, 12_000, 13_000, 14_000, 15_000]
    assert len(world.fired) == 500


_TIMES = st.sets(st.integers(0, 60_000).map(lambda after: START_MS + after), max_size=12)


@given(
    timers=_TIMES,
    shard_ahead_ms=st.sampled_from([0, 1, -1, 300, -300, 5000, -5000, 40_000, -40_000]),
    begins_after_ms=st.integers(0, 3000),
    rest_of_batch_ms=st.integers(0, 30_000),
    trigger_ms=st.sampled_from([100, 1000, 7000]),
    interval_ms=st.sampled_from([1, 1000, 5000]),
)
def test_timers_fire_in_time_and_no_loop_is_hot(
    timers: set[int],
    shard_ahead_ms: int,
    begins_after_ms: int,
    rest_of_batch_ms: int,
    trigger_ms: int,
    interval_ms: int,
) -> None:
    batch_ms = begins_after_ms + rest_of_batch_ms
    wanted = set(timers)
    world = World(timers, shard_ahead_ms, begins_after_ms, batch_ms, interval_ms)
    world.run(200_000 + 14 * batch_ms, trigger_ms)
    assert set(world.fired) == wanted
    ahead = max(0, shard_ahead_ms)
    behind = max(0, -shard_ahead_ms)
    for timer, at in world.fired.items():
        assert at >= timer - ahead, "a timer never fires before its time by the clock of its shard"
        waits = batch_ms if behind else 0  # a batch that came too early for the shard
        busy = batch_ms + interval_ms  # the batch before it
        late = at - timer - behind
        assert late <= waits + busy + trigger_ms + begins_after_ms + 1
    for before, after in zip(world.ticks, world.ticks[1:], strict=False):
        assert after - before >= interval_ms
    assert len(world.ticks) <= len(wanted) * (2 if behind else 1)


@pytest.mark.parametrize("trigger_ms", [10, 1000])
def test_a_timer_that_stays_due_does_not_keep_the_query_busy(trigger_ms: int) -> None:
    """The shard's time stands still, for example because its last host had a clock far in the future."""
    world = World({START_MS + 5000}, stuck_at_ms=START_MS + 4999)
    world.run(HOUR_MS, trigger_ms)
    assert world.fired == {}
    gaps = [after - before for before, after in zip(world.ticks, world.ticks[1:], strict=False)]
    assert gaps[:4] == [1000, 2000, 4000, 8000] if trigger_ms == 1000 else gaps[0] >= 1000
    assert all(LONGEST_PAUSE_MS <= gap <= LONGEST_PAUSE_MS + trigger_ms for gap in gaps[6:])


def test_what_is_left_of_many_expired_values_is_removed_at_the_interval() -> None:
    """A sweep removes a limited number of values, so the same due time remains, although it was processed."""
    clock = Wall()
    report = Due(START_MS, START_MS + 10)
    decision = DueBatches(1000, lambda: report, clock, clock.now_ms)
    ticks = []
    for _ in range(480):
        clock.advance(0.125)
        if decision.is_due():
            ticks.append(clock.now_ms())
            decision.batch_caused()
            report = Due(START_MS, clock.now_ms())
    assert 55 <= len(ticks) <= 60


@given(st.lists(st.tuples(st.integers(1, 30_000), st.booleans()), min_size=50, max_size=300))
def test_whatever_is_reported_batches_are_never_closer_than_the_interval(
    steps: list[tuple[int, bool]],
) -> None:
    clock = Wall()
    report: Due | None = Due(START_MS, START_MS)
    decision = DueBatches(2000, lambda: report, clock, clock.now_ms)
    last: int | None = None
    for milliseconds, changes in steps:
        clock.advance(milliseconds / 1000)
        if decision.is_due():
            decision.batch_caused()
            assert last is None or clock.now_ms() - last >= 2000
            last = clock.now_ms()
        if changes:
            report = Due(clock.now_ms() - 1000, clock.now_ms() + milliseconds - 15_000)


def test_an_interval_of_zero_disables_these_batches() -> None:
    world = World({START_MS + 1}, interval_ms=0)
    world.run(HOUR_MS, 1000)
    assert world.ticks == []


# -- what the source knows -----------------------------------------------------------------------


class Query:
    """A query on a cluster in memory, whose source is asked by Spark; its commits are written by hand."""

    def __init__(self, cluster: Cluster | None = None, **options: str) -> None:
        self.cluster = Cluster({A0: (0, 5)}) if cluster is None else cluster
        self.clock = Wall()
        self.options = {"application.id": APPLICATION, "token.renewal.interval.ms": "0", **options}
        self.sequence = 0
        self.restart()

    def restart(self) -> None:
        self.source = SourcePlan(read_options(**self.options), self.cluster, self.clock, self.clock.now_ms)
        if not hasattr(self, "position"):
            self.position = self.source.initial()

    def commit(self, at_ms: int | None, *, run_id: str = "run", tell: bool = True) -> None:
        """Commits a token, as the sink does at the end of a batch."""
        self.sequence += 1
        due_at = None if at_ms is None else Due(at_ms, self.clock.now_ms())
        token = replace(TOKEN, sequence=self.sequence, due=due_at)
        self.cluster.commit(group_of(APPLICATION), {ANCHOR: self.sequence}, token.encode())
        if tell:
            due.write(APPLICATION, run_id, token)

    def ask(self, **more: bool) -> bool:
        """One trigger. Returns whether the source caused a batch without records."""
        end = over_the_wire(self.source.latest(over_the_wire(self.position), **more))
        if end == self.position:
            return False
        was_tick = bool(end.tick)
        if was_tick:
            assert end.end == self.position.end
            assert self.source.tasks(self.position, end) == []
        self.position = end
        return was_tick

    def ms_until_tick(self, at_most_ms: int = 300_000) -> int | None:
        """Triggers eight times per second until the source causes a tick; None = it does not."""
        began = self.clock.now_ms()
        while self.clock.now_ms() - began < at_most_ms:
            self.clock.advance(0.125)
            if self.ask():
                return self.clock.now_ms() - began
        return None


def test_a_source_ticks_when_a_timer_is_due() -> None:
    query = Query()
    query.commit(START_MS + 5000)
    assert query.ms_until_tick() == 5000
    query.commit(START_MS + 20_000)
    assert query.ms_until_tick() == 15_000
    query.commit(None)
    assert query.ms_until_tick() is None


def test_an_idle_source_asks_kafka_once_in_a_run() -> None:
    query = Query()
    query.commit(START_MS + 120_000)
    query.ms_until_tick()
    query.commit(None)
    assert query.ms_until_tick() is None
    assert query.cluster.requests.count("all_committed") == 1


def test_a_busy_source_asks_nothing() -> None:
    query = Query()
    for records in range(6, 20):
        query.cluster.logs[A0] = (0, records)
        assert not query.ask()
    assert "all_committed" not in query.cluster.requests


def test_a_restart_on_another_host_finds_the_due_time_in_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query()
    query.commit(START_MS + 60_000)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    query.restart()
    assert query.ms_until_tick() == 60_000


def test_the_token_counts_more_than_a_file_that_an_earlier_run_left_on_this_host() -> None:
    query = Query()
    query.commit(START_MS + 1000)
    query.commit(START_MS + 70_000, tell=False)  # on another host
    query.restart()
    assert query.ms_until_tick() == 70_000
    query.commit(START_MS + 80_000)
    assert query.ms_until_tick() == 10_000


def test_a_sink_on_another_cluster_tells_the_source_through_the_file() -> None:
    query = Query()
    due.write(APPLICATION, "run", replace(TOKEN, due=Due(START_MS + 2000, START_MS)))
    assert query.ms_until_tick() == 2000
    due.write(APPLICATION, "run", replace(TOKEN, sequence=8, due=Due(START_MS + 9000, START_MS)))
    assert query.ms_until_tick() == 7000


def test_the_file_counts_if_sequence_numbers_begin_again_and_the_source_cannot_see_the_token() -> None:
    """The sink has another cluster, and somebody has removed the query's tokens there."""
    query = Query()
    due.write(APPLICATION, "run", replace(TOKEN, sequence=100))
    assert not query.ask()
    due.write(APPLICATION, "run 2", replace(TOKEN, sequence=1, due=Due(START_MS + 2000, START_MS)))
    assert query.ms_until_tick() == 2000


@pytest.mark.parametrize("error", [AuthorizationError("no"), UnavailableError("no answer")])
def test_a_source_that_may_not_read_the_group_relies_on_the_file(error: KafkaEosError) -> None:
    query = Query()
    query.commit(START_MS + 2000)
    query.cluster.refusal = error
    assert query.ms_until_tick() == 2000


def test_a_token_that_this_version_cannot_read_is_left_to_the_sink() -> None:
    query = Query()
    query.commit(None)
    query.cluster.commit(group_of(APPLICATION), {ANCHOR: 1}, '{"kafka-eos":99,"by":"9.0"}')
    assert query.ms_until_tick(10_000) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"due":null}', '{"due":[1]}', '{"due":["a","b"]}', "\0"]
)
def test_a_damaged_file_counts_as_nothing_due(text: str) -> None:
    due._folder().write(f"{APPLICATION}.json", text)
    assert CommittedDue(APPLICATION, lambda: None, Clock())() is None


def test_a_lost_file_changes_nothing_until_the_next_commit() -> None:
    query = Query()
    query.commit(START_MS + 5000)
    query.ask()
    due._folder().remove(f"{APPLICATION}.json")
    assert query.ms_until_tick() == 5000


def test_a_commit_that_cannot_write_the_file_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The source goes on with what it knows, less and less often."""
    query = Query()
    query.commit(START_MS + 1000)
    assert query.ms_until_tick() == 1000
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    query.commit(None)
    ticks = [query.ms_until_tick() for _ in range(8)]
    assert ticks == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]


def test_that_nothing_is_due_is_written_once_in_a_run() -> None:
    query = Query()
    query.commit(None)
    first = (Path(due._folder().path) / f"{APPLICATION}.json").stat().st_ino
    query.commit(None)
    assert (Path(due._folder().path) / f"{APPLICATION}.json").stat().st_ino == first
    query.commit(None, run_id="run 2")
    assert (Path(due._folder().path) / f"{APPLICATION}.json").stat().st_ino != first


def test_nothing_due_is_written_again_after_another_process_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that commits may be replaced within a run, and come back."""
    query, path = Query(), Path(due._folder().path) / f"{APPLICATION}.json"
    query.commit(None)
    assert not query.ask()
    with monkeypatch.context() as other_process:
        other_process.setattr(due, "_nothing_due", {})
        query.commit(START_MS + 5000)
    assert query.ms_until_tick() == 5000
    query.commit(None)
    assert query.ms_until_tick() is None
    with monkeypatch.context() as other_process:
        other_process.setattr(due, "_nothing_due", {})
        query.commit(START_MS, tell=False)  # it was killed before it wrote the file
    written = path.stat().st_ino
    query.commit(None)
    assert path.stat().st_ino != written, "a source that asked Kafka meanwhile waits for what is due"


def test_a_file_that_a_stopped_process_of_an_earlier_run_replaced_hides_no_timer() -> None:
    query = Query()
    query.commit(START_MS + 200_000)
    old = replace(TOKEN, sequence=query.sequence)
    query.commit(None)
    query.restart()
    assert not query.ask()
    query.commit(START_MS + 5000)
    due.write(APPLICATION, "earlier run", old)
    assert query.ms_until_tick() == 5000
    query.commit(START_MS + 20_000)
    assert query.ms_until_tick() == 15_000
    due.write(APPLICATION, "earlier run", replace(old, due=Due(START_MS + 1, START_MS)))
    query.commit(None)
    assert query.ms_until_tick() is None


@pytest.fixture
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Query:
    """A query that was started on another host while Kafka did not answer; a timer is due 90 s later."""
    query = Query()
    query.commit(START_MS + 90_000)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    query.restart()
    query.cluster.refusal = UnavailableError("no answer")
    assert query.ms_until_tick(10_000) is None
    query.cluster.refusal = None
    return query


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Receives what the source would run in a thread; nothing is answered before a test calls it."""
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(due, "_start", started.append)
    monkeypatch.setattr(due, "wait", lambda *_, **__: None)  # the test's clock stands still meanwhile
    return started


def test_a_source_asks_again_if_kafka_did_not_answer_when_the_query_was_started(
    forgotten: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "_start", lambda ask: ask())
    assert forgotten.ms_until_tick() == 80_000
    assert forgotten.cluster.requests.count("all_committed") == 2


def test_records_do_not_wait_for_an_answer_that_only_timers_need(
    forgotten: Query, questions: list[Callable[[], None]]
) -> None:
    assert forgotten.ms_until_tick(60_000) is None
    assert len(questions) == 1
    forgotten.cluster.logs[A0] = (0, 6)
    forgotten.ask()
    assert forgotten.position.end == {A0: 6}
    assert forgotten.ms_until_tick(1000) is None
    assert forgotten.cluster.requests.count("all_committed") == 1, "Kafka still does not answer"
    questions.pop()()
    assert forgotten.ms_until_tick() == 19_000
    assert not questions


def test_an_answer_that_fails_in_a_thread_is_asked_for_again_after_a_minute(
    forgotten: Query, questions: list[Callable[[], None]]
) -> None:
    assert forgotten.ms_until_tick(51_000) is None
    forgotten.cluster.refusal = UnavailableError("no answer")
    questions.pop()()
    assert forgotten.ms_until_tick(60_000) is None
    assert not questions
    assert forgotten.ms_until_tick(1000) is None
    forgotten.cluster.refusal = None
    questions.pop()()
    assert forgotten.ms_until_tick() == 125, "the timer is overdue"


def test_an_answer_that_is_older_than_a_commit_does_not_hide_its_timer(
    forgotten: Query, questions: list[Callable[[], None]]
) -> None:
    assert forgotten.ms_until_tick(51_000) is None
    questions.pop()()
    forgotten.commit(START_MS + 70_000)
    assert forgotten.ms_until_tick() == 9_000
    forgotten.commit(None)
    assert forgotten.ms_until_tick(10_000) is None
    questions.pop()()
    assert forgotten.ms_until_tick() is None


def test_a_query_with_rare_triggers_has_the_answer_in_the_same_trigger(
    forgotten: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = due.newest

    def slowly(*args: Any) -> Token | None:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.3)  # a source that does not wait misses the answer
        return newest(*args)

    monkeypatch.setattr(due, "newest", slowly)
    forgotten.clock.advance(3600)
    assert forgotten.ask()


def test_a_host_with_too_many_threads_asks_in_the_same_thread(
    forgotten: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert forgotten.ms_until_tick() == 80_000


def test_a_batch_with_records_runs_the_operators_too() -> None:
    query = Query()
    query.commit(START_MS + 1000)
    query.clock.advance(2)
    query.cluster.logs[A0] = (0, 6)
    assert not query.ask()
    assert query.position.end == {A0: 6}
    query.commit(None)
    assert query.ms_until_tick(10_000) is None


def test_records_that_wait_for_a_minimum_do_not_delay_timers() -> None:
    query = Query(minOffsetsPerTrigger="100", maxTriggerDelay="1h")
    query.cluster.logs[A0] = (0, 6)
    query.ask()  # the first batch of a run never waits
    query.cluster.logs[A0] = (0, 7)
    query.commit(START_MS + 5000)
    assert query.ms_until_tick() == 5000
    assert query.position.end == {A0: 6}


def test_there_are_no_ticks_with_once_and_available_now() -> None:
    query = Query()
    query.commit(START_MS)
    query.clock.advance(1)
    assert not query.ask(once=True)
    query.source.stop_at_latest()
    assert query.ms_until_tick(60_000) is None


def test_a_source_without_an_application_id_does_not_tick() -> None:
    query = Query()
    query.options.pop("application.id")
    query.restart()
    query.commit(START_MS)
    assert query.ms_until_tick(60_000) is None
    assert "all_committed" not in query.cluster.requests


def test_the_source_of_a_restarted_query_ticks_at_its_first_request() -> None:
    query = Query()
    query.commit(START_MS - 1)
    assert query.ask()


def test_the_group_may_have_another_name_than_the_application() -> None:
    query = Query(**{"kafka.group.id": "group"})
    token = replace(TOKEN, due=Due(START_MS + 3000, START_MS))
    query.cluster.commit("group", {ANCHOR: 1}, token.encode())
    assert query.ms_until_tick() == 3000


def test_a_due_tick_is_a_renewal_too() -> None:
    query = Query(**{"token.renewal.interval.ms": "50000"})
    query.commit(START_MS + 40_000)
    assert query.ms_until_tick() == 40_000
    query.commit(None)
    assert query.ms_until_tick() == 50_000


def test_two_sources_of_a_query_cause_one_batch() -> None:
    """Both see that a timer is due and tick in the same micro-batch, after which neither ticks again."""
    cluster = Cluster({A0: (0, 5), B0: (0, 5)})
    first, second = Query(cluster), Query(cluster, subscribe="b")
    second.clock = first.clock
    second.restart()
    first.commit(START_MS + 5000)
    batches = 0
    for _ in range(600):
        first.clock.advance(0.1)
        asked = [first.ask(), second.ask()]
        if any(asked):
            batches += 1
            first.commit(None)
    assert batches == 1


def test_before_pyspark_4_2_the_first_request_of_a_run_causes_no_tick() -> None:
    """With Trigger.Once and Trigger.AvailableNow, it is the only request of the run."""
    query = Query()
    query.commit(START_MS)
    query.clock.advance(1)
    reader = _UnlimitedStreamReader(read_options(**query.options))
    reader._opened = Planning(query.source, query.cluster)  # type: ignore[arg-type]
    position = reader.latestOffset()
    assert reader.partitions(reader.initialOffset(), position) == []
    assert "tick" not in position["@"]
    end = reader.latestOffset()
    assert end["@"]["tick"] == 1
    assert reader.partitions(position, end) == []


def test_a_tick_ends_at_the_offsets_of_the_batch_before() -> None:
    query = Query()
    query.commit(START_MS)
    before = query.position
    assert query.ask()
    assert query.position == replace(before, start=before.start, tick=1)
    assert SourcePosition.from_json(query.position.to_json()).has_records is False
