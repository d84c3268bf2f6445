"""Ranges are read to their end from logs with gaps, and lost records are reported, on a model of a log."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    AuthorizationError,
    DataLossError,
    KafkaEosError,
    UnavailableError,
)
from kafka_eos_source.kafka.fetch import Taken
from kafka_eos_source.kafka.reader import ConsumerPool
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read import fetch
from kafka_eos_source.read.fetch import Progress, Reading, ReadSettings
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.worker import cycle_collection_paused
from tests.support.fetched_log import Batch, Record, decoded

A, B, U = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)


@dataclass
class Log:
    """One partition: offsets ``low`` to ``high``, of which ``visible`` are records."""

    visible: Sequence[int]
    high: int
    low: int = 0
    gone: bool = False


@dataclass
class ModelConsumer:
    """A consumer of logs in memory; ``sizes`` sets how many messages, of 100 bytes, each call returns."""

    logs: dict[TopicPartition, Log]
    sizes: Sequence[int] = (3,)
    last_complaint: str = ""
    refusal: KafkaEosError | None = None
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    told: set[tuple[TopicPartition, str, int]] = field(default_factory=set)
    looks: int = 0
    bounds_fail: int = 0

    @property
    def cluster(self) -> ModelConsumer:
        return self

    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        columns: Collection[str],
        ends: Mapping[TopicPartition, int],
        epochs: Mapping[TopicPartition, int],
    ) -> None:
        self.positions, self.ends = dict(positions), dict(ends)

    def move(self, tp: TopicPartition, position: int) -> None:
        self.positions[tp] = position
        self.told = {each for each in self.told if each[0] != tp}

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        for tp in tps:
            del self.positions[tp]

    def take(self, wait_seconds: float) -> Taken:
        room = max(1, self.sizes[self.looks % len(self.sizes)])
        self.looks += 1
        taken = Taken()
        found: dict[TopicPartition, Batch] = {}
        for tp, position in list(self.positions.items()):
            log = self.logs[tp]
            if log.gone:
                self._event(tp, "gone", 0, taken.gone)
            elif not log.low <= position <= log.high:
                self._event(tp, "range", position, taken.out_of_range)
            else:
                offsets = [at for at in log.visible if log.low <= at >= position][:room]
                room -= len(offsets)
                if offsets:
                    records = [Record(at, value=bytes(100)) for at in offsets]
                    found[tp] = Batch(offsets[0], offsets[-1], records)
                    self.positions[tp] = taken.reached[tp] = offsets[-1] + 1
                elif room and (tp, "end", log.high) not in self.told:
                    self.told.add((tp, "end", log.high))
                    taken.log_ends[tp] = log.high
        if found:
            taken.messages = decoded(found)
        return taken

    def _event(self, tp: TopicPartition, what: str, at: int, where: list[TopicPartition]) -> None:
        if (tp, what, at) not in self.told:
            self.told.add((tp, what, at))
            where.append(tp)

    def log_bounds(self, tp: TopicPartition, deadline: Deadline) -> tuple[int, int]:
        if self.bounds_fail:
            self.bounds_fail -= 1
            raise UnavailableError("no answer")
        return self.logs[tp].low, self.logs[tp].high


def reading_of(consumer: ModelConsumer, progress: Progress, **settings: Any) -> Reading:
    return Reading(consumer, progress, ReadSettings({}, **settings))  # type: ignore[arg-type]


def read(
    consumer: ModelConsumer, ranges: Sequence[OffsetRange], *, fail: bool = True, timeout_ms: int = 10_000
) -> list[tuple[TopicPartition, int]]:
    progress = Progress(ranges)
    reading = reading_of(consumer, progress, fail_on_data_loss=fail, poll_timeout_ms=timeout_ms)
    found: list[tuple[TopicPartition, int]] = []
    while not progress.done:
        for run in reading.next_runs():
            assert run.messages.offsets.tolist() == run.offsets.tolist()
            assert {run.messages.partition_at(index) for index in range(len(run.messages))} == {run.tp}
            found += [(run.tp, int(offset)) for offset in run.offsets]
    return found


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SHORT_LOG_GRACE_SECONDS", -1.0)


# -- progress


def test_a_range_ends_with_a_message_at_or_past_its_end() -> None:
    progress = Progress([OffsetRange(A, 2, 5)])
    assert progress.accept(A, np.array([0, 2, 3])) == slice(1, 3)
    assert not progress.done
    assert progress.accept(A, np.array([9])) == slice(0, 0)
    assert progress.done
    assert progress.accept(A, np.array([4])) == slice(0, 0)


def test_a_range_ends_with_its_last_offset() -> None:
    progress = Progress([OffsetRange(A, 2, 5), OffsetRange(B, 0, 0)])
    assert progress.remaining == 3
    assert progress.accept(A, np.array([4])) == slice(0, 1)
    assert progress.done
    assert progress.remaining == 0


def test_two_ranges_of_one_partition_are_refused() -> None:
    with pytest.raises(ValueError, match="two ranges of t-0"):
        Progress([OffsetRange(A, 0, 1), OffsetRange(A, 1, 2)])


# -- reading


@st.composite
def read_case(draw: st.DrawFn) -> tuple[dict[TopicPartition, Log], list[OffsetRange], list[int]]:
    logs, ranges = {}, []
    for tp in draw(st.sampled_from([[A], [A, B], [A, B, U], [A, U]])):
        low = draw(st.integers(0, 5))
        high = low + draw(st.integers(0, 30))
        visible = [at for at in range(low, high) if draw(st.booleans())]
        logs[tp] = Log(visible, high, low)
        start = draw(st.integers(low, high))
        ranges.append(OffsetRange(tp, start, draw(st.integers(start, high))))
    return logs, ranges, draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))


@given(read_case())
@settings(deadline=None)
def test_exactly_the_records_of_the_ranges_are_read_in_order(
    case: tuple[dict[TopicPartition, Log], list[OffsetRange], list[int]],
) -> None:
    """Control records, aborted and compacted offsets neither end a range early nor make a read hang."""
    logs, ranges, sizes = case
    found = read(ModelConsumer(logs, sizes), ranges)
    for each in ranges:
        expected = [at for at in logs[each.tp].visible if each.start <= at < each.end]
        assert [at for tp, at in found if tp == each.tp] == expected
    assert len(found) == len(set(found))


def test_the_consumer_knows_where_the_ranges_end() -> None:
    consumer = ModelConsumer({A: Log(range(100_000), 100_000)}, sizes=[1_000])
    assert len(read(consumer, [OffsetRange(A, 10, 13)])) == 3
    assert consumer.ends == {A: 13}


def test_batches_are_bounded_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "BATCH_ROWS", 7)
    progress = Progress([OffsetRange(A, 0, 50)])
    reading = reading_of(ModelConsumer({A: Log(range(50), 50)}, sizes=[100]), progress)
    sizes = []
    while not reading.done:
        sizes.append(sum(len(run.messages) for run in reading.next_runs()))
    assert sizes == [7, 7, 6, 6, 6, 6, 6, 6]  # equal parts, without a small rest


def test_messages_of_two_takes_are_not_in_one_batch_if_they_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would have to be copied."""
    monkeypatch.setattr(fetch, "BATCH_ROWS", 10)
    monkeypatch.setattr(fetch, "ENOUGH_ROWS", 5)
    progress = Progress([OffsetRange(A, 0, 60)])
    reading = reading_of(ModelConsumer({A: Log(range(60), 60)}, sizes=[12]), progress)
    found = []
    while not reading.done:
        found.append([(run.offsets[0], len(run.messages)) for run in reading.next_runs()])
    assert found == [[(at, 6)] for at in range(0, 60, 6)]


def test_batches_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "BATCH_BYTES", 2000)
    progress = Progress([OffsetRange(A, 0, 2000)])
    reading = reading_of(ModelConsumer({A: Log(range(2000), 2000)}, sizes=[10_000]), progress)
    sizes = []
    while not reading.done:
        sizes.append(sum(len(run.messages) for run in reading.next_runs()))
    assert sizes == [20] * 100


def test_a_partition_is_dropped_as_soon_as_its_range_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its consumer goes on to fetch what nobody wants."""
    monkeypatch.setattr(fetch, "ENOUGH_ROWS", 1)
    b = TopicPartition("t", 9)
    consumer = ModelConsumer({A: Log(range(10), 10), b: Log(range(100), 100)}, sizes=[20])
    progress = Progress([OffsetRange(A, 0, 5), OffsetRange(b, 0, 100)])
    reading = reading_of(consumer, progress)
    while progress.is_open(A):
        reading.next_runs()
    assert not progress.done
    assert consumer.positions.keys() == {b}


def test_aged_out_offsets_fail_or_are_skipped() -> None:
    def consumer() -> ModelConsumer:
        return ModelConsumer({A: Log(range(10), 10, low=4)})

    with pytest.raises(DataLossError, match=r"offsets 0 to 3 of t-0 .* now starts at offset 4"):
        read(consumer(), [OffsetRange(A, 0, 10)])
    assert read(consumer(), [OffsetRange(A, 0, 10)], fail=False) == [(A, at) for at in range(4, 10)]
    assert read(consumer(), [OffsetRange(A, 0, 3)], fail=False) == []


def test_expired_offsets_in_one_partition_do_not_affect_the_others() -> None:
    logs = {A: Log(range(10), 10, low=10), B: Log(range(6), 6)}
    assert read(ModelConsumer(logs), [OffsetRange(A, 0, 9), OffsetRange(B, 0, 6)], fail=False) == [
        (B, at) for at in range(6)
    ]


def test_a_deleted_topic_fails_or_is_skipped() -> None:
    logs = {A: Log([], 0, gone=True), B: Log([0], 1)}
    ranges = [OffsetRange(A, 0, 9), OffsetRange(B, 0, 1)]
    with pytest.raises(
        DataLossError, match=r"offsets 0 to 8 of t-0 cannot be read: the topic or partition was"
    ):
        read(ModelConsumer(logs), ranges)
    assert read(ModelConsumer(logs), ranges, fail=False) == [(B, 0)]


def test_a_start_beyond_the_log_is_data_loss() -> None:
    logs = {A: Log(range(5), 5)}
    with pytest.raises(DataLossError, match="the log now ends at offset 5"):
        read(ModelConsumer(logs), [OffsetRange(A, 7, 9)])
    assert read(ModelConsumer(logs), [OffsetRange(A, 7, 9)], fail=False) == []


@pytest.mark.usefixtures("no_grace")
def test_a_log_shorter_than_planned_is_data_loss() -> None:
    logs = {A: Log(range(5), 5)}
    with pytest.raises(DataLossError, match=r"offsets 5 to 8 .* the log now ends at offset 5"):
        read(ModelConsumer(logs), [OffsetRange(A, 0, 9)])
    assert len(read(ModelConsumer(logs), [OffsetRange(A, 0, 9)], fail=False)) == 5


@pytest.mark.usefixtures("no_grace")
def test_a_log_whose_end_lags_for_a_moment_is_not_data_loss() -> None:
    """A new leader's lagging high watermark (KIP-207) does not count as data loss."""

    class Lagging(ModelConsumer):
        def log_bounds(self, tp: TopicPartition, deadline: Deadline) -> tuple[int, int]:
            self.logs[tp].high = 9
            self.logs[tp].visible = range(9)
            return super().log_bounds(tp, deadline)

    assert len(read(Lagging({A: Log(range(5), 5)}), [OffsetRange(A, 0, 9)])) == 9


def test_a_failed_request_for_log_bounds_is_retried() -> None:
    consumer = ModelConsumer({A: Log(range(10), 10, low=4)}, bounds_fail=2)
    assert len(read(consumer, [OffsetRange(A, 0, 10)], fail=False)) == 6


def test_the_error_when_no_record_arrives_names_the_position() -> None:
    class Silent(ModelConsumer):
        def take(self, wait_seconds: float) -> Taken:
            assert 0 <= wait_seconds <= fetch.WAIT_SECONDS
            return Taken()

    consumer = Silent({A: Log(range(5), 5)}, last_complaint="broker 1 is down")
    expected = (
        r"no records of t-0 arrived within 20 ms, at offset 2 .* ends before offset 5.*broker 1 is down"
    )
    with pytest.raises(UnavailableError, match=expected):
        read(consumer, [OffsetRange(A, 2, 5)], timeout_ms=20)
    consumer.refusal = AuthorizationError("the login failed", fix="restart the query")
    with pytest.raises(AuthorizationError, match="the login failed"):
        read(consumer, [OffsetRange(A, 2, 5)], timeout_ms=20)


def test_the_read_restores_the_garbage_collectors_setting() -> None:
    assert gc.isenabled()
    with cycle_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with cycle_collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


# -- the pool of consumers, tested with clients without brokers


CONF = {"bootstrap.servers": "127.0.0.1:1"}


def test_the_pool_reuses_a_consumer() -> None:
    pool = ConsumerPool()
    with pool.borrow(CONF) as first:
        assert len(pool) == 0
    with pool.borrow(CONF) as second, pool.borrow(CONF) as third:
        assert second is first
        assert third is not first
    with pool.borrow({**CONF, "client.id": "other"}) as other:
        assert other not in (first, third)
    pool.close()
    assert len(pool) == 0


def test_the_pool_does_not_reuse_a_consumer_after_an_error() -> None:
    pool = ConsumerPool()
    with pytest.raises(RuntimeError), pool.borrow(CONF):
        raise RuntimeError
    assert len(pool) == 0


def test_the_pool_is_bounded_and_closes_idle_consumers() -> None:
    pool = ConsumerPool(capacity=1, idle_seconds=-1.0)
    with pool.borrow(CONF) as first, pool.borrow({**CONF, "client.id": "h"}):
        pass
    assert len(pool) == 1
    with pool.borrow(CONF) as again:
        assert again is not first
    pool.close()


def test_a_forked_child_does_not_use_its_parents_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConsumerPool()
    with pool.borrow(CONF) as first:
        pass
    mine = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: mine + 1)
        with pool.borrow(CONF) as second:
            assert second is not first
        pool.close()
    first.close()


def test_events_without_progress_do_not_keep_a_task_waiting_for_ever() -> None:
    """A position is out of range again and again, although it is in the log: remote storage that fails."""

    class Refusing(ModelConsumer):
        def take(self, wait_seconds: float) -> Taken:
            return Taken(out_of_range=[A])

    consumer = Refusing({A: Log(range(10), 10)}, sizes=[10])
    with pytest.raises(UnavailableError, match="no records of t-0 arrived within 50 ms"):
        read(consumer, [OffsetRange(A, 2, 5)], timeout_ms=50)
